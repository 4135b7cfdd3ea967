"""attnzoo.nn.AdaptiveSoftmax: equality with torch, variants, cutoffs from frequencies, errors."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo.nn import AdaptiveSoftmax, TargetLoss, parameter_groups
from helpers.cases import rand
from helpers.loss_definitions import dense_loss
from helpers.memory import peak_of

CLASSES, WIDTH, CUTOFFS = 40, 32, [5, 12]
TIGHT = {"rtol": 1e-11, "atol": 1e-11}
VARIANTS: list[tuple[Any, Any]] = [
    ("softmax", None),
    ("entmax", None),
    ("softmax", ("topk", {"top_k": 4})),
    (("softmax", {"softcap": 3.0}), "sparsemax"),
    ("sigmoid", "taylor"),
    (("entmax", {"alpha": 1.4, "learn": ("alpha",)}), ("ssmax", {"lse_penalty": 1e-2})),
]
every_pair = pytest.mark.parametrize(("variant", "tail"), VARIANTS, ids=str)
PARAMS: dict[str, Any] = {
    "entmax": ("alpha",), "ssmax": ("s", "b"), "topk": ("top_k",), "taylor": ("order",)
}  # fmt: skip


def made(variant: Any = "softmax", tail: Any = None, **options: Any) -> AdaptiveSoftmax:
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(WIDTH, CLASSES, CUTOFFS, variant, tail, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return layer


def of_torch(layer: AdaptiveSoftmax) -> nn.AdaptiveLogSoftmaxWithLoss:
    bias = layer.head.bias is not None
    same = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, CUTOFFS, layer.div_value, bias)
    same.to(layer.head.weight.dtype).load_state_dict(layer.state_dict())
    return same


def hidden(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rand(*shape, WIDTH, seed=1, dtype=dtype)


def targets(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))


# ---- softmax: equality with torch -------------------------------------------------------------


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("div_value", [4.0, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_softmax_equals_torch(head_bias: bool, div_value: float, scale: float) -> None:
    """Values and all gradients, also for logits of order 1e3."""
    layer = made(head_bias=head_bias, div_value=div_value)
    same = of_torch(layer)
    h, y = (hidden(17) * scale).requires_grad_(), targets(17)
    result, wanted = layer(h, y), same(h, y)
    assert isinstance(result, TargetLoss)
    torch.testing.assert_close(result.output, wanted.output.detach(), **TIGHT)
    assert not result.output.requires_grad
    for loss in (result.loss, layer.loss(h, y), layer.loss(h, y, "none").mean()):
        torch.testing.assert_close(loss, wanted.loss, **TIGHT)
        got = torch.autograd.grad(loss, [h, *layer.parameters()])
        for one, other in zip(got, torch.autograd.grad(wanted.loss, [h, *same.parameters()],
                                                       retain_graph=True)):  # fmt: skip
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11 * scale)
    torch.testing.assert_close(layer.log_prob(h), same.log_prob(h), **TIGHT)
    assert torch.equal(layer.predict(h), same.predict(h))


def test_initial_parameters_and_state_dict_are_those_of_torch() -> None:
    torch.manual_seed(3)
    same = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, CUTOFFS, head_bias=True)
    torch.manual_seed(3)
    layer = AdaptiveSoftmax(WIDTH, CLASSES, CUTOFFS, head_bias=True)
    state, other = layer.state_dict(), same.state_dict()
    assert list(state) == list(other)
    assert all(torch.equal(state[name], other[name]) for name in state)
    same.load_state_dict(state)
    layer.load_state_dict(other)
    assert layer.cutoffs == same.cutoffs == [*CUTOFFS, CLASSES]


# ---- any variant ------------------------------------------------------------------------------


def definition(layer: AdaptiveSoftmax, h: Tensor, y: Tensor) -> Tensor:
    """The loss of each token: dense losses of the head and of the token's cluster."""

    def part(one: Any, x: Tensor, target: int) -> Tensor:
        params = {name: getattr(one, name) for name in PARAMS.get(one.variant, ())}
        logits = (x @ one.weight.mT)[None] + (0 if one.bias is None else one.bias)
        options = {"softcap": one.softcap, "lse_penalty": one.lse_penalty, **params}
        return dense_loss(logits, torch.tensor([target]), one.variant, **options)

    losses = []
    for x, target in zip(h, y.tolist()):
        cluster = sum(target >= cut for cut in CUTOFFS)
        if cluster == 0:
            losses.append(part(layer.head, x, target))
        else:
            project, tail = layer.tail[cluster - 1]  # type: ignore[misc]
            tail_loss = part(tail, x @ project.weight.mT, target - CUTOFFS[cluster - 1])
            losses.append(part(layer.head, x, CUTOFFS[0] + cluster - 1) + tail_loss)
    return torch.stack(losses)


@every_pair
def test_loss_is_that_of_the_head_plus_that_of_the_cluster(variant: Any, tail: Any) -> None:
    layer = made(variant, tail)
    h, y = hidden(12).requires_grad_(), targets(12)
    expected = definition(layer, h, y)
    torch.testing.assert_close(layer.loss(h, y, "none"), expected, rtol=1e-10, atol=1e-10)
    leaves = [h, *layer.parameters()]
    wanted = torch.autograd.grad(expected.mean(), leaves)
    for loss in (layer.loss(h, y), layer(h, y).loss):
        torch.testing.assert_close(loss, expected.mean(), rtol=1e-10, atol=1e-10)
        for one, other in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@every_pair
def test_probabilities_are_products_of_those_of_head_and_cluster(variant: Any, tail: Any) -> None:
    layer, h, y = made(variant, tail), hidden(3, 4), targets(3, 4)
    head = layer.head.log_prob(h).exp()
    pieces = [head[..., : CUTOFFS[0]]]
    for i, (project, one) in enumerate(layer.tail):  # type: ignore[misc]
        pieces.append(head[..., CUTOFFS[0] + i, None] * one.log_prob(project(h)).exp())
    p = torch.cat(pieces, -1)
    log_prob = layer.log_prob(h)
    torch.testing.assert_close(log_prob.exp(), p, **TIGHT)
    assert torch.equal(layer.logits(h).isinf(), p == 0)
    assert layer.has_zeros == bool((p == 0).any())
    if "sigmoid" not in (variant, tail):
        torch.testing.assert_close(p.sum(-1), torch.ones(3, 4).double(), **TIGHT)
    values, indices = layer.topk(h, 6)
    torch.testing.assert_close(values, p.topk(6).values, **TIGHT)
    torch.testing.assert_close(p.gather(-1, indices), values, **TIGHT)
    assert torch.equal(layer.predict(h), log_prob.argmax(-1))
    output = log_prob.gather(-1, y[..., None])[..., 0]
    torch.testing.assert_close(layer(h, y).output, output, rtol=1e-9, atol=1e-9)


def test_ignored_targets_have_no_loss_and_no_gradient() -> None:
    """Class 7 is ignored here, although it is the head's entry for the first cluster plus 2."""
    layer, y = made("entmax", ignore_index=7), torch.tensor([0, 7, 6, 39, 12, 7])
    h = hidden(6)
    h[1] = h[5] = math.nan
    h.requires_grad_()
    keep = y != 7
    output, loss = layer(h, y)
    assert output.isnan().tolist() == [False, True, False, False, False, True]
    assert layer.loss(h, y, "none")[~keep].tolist() == [0, 0]
    leaves = [h, *layer.parameters()]
    expected = layer.loss(h[keep], y[keep])
    wanted = torch.autograd.grad(expected, leaves, retain_graph=True)
    for one in (loss, layer.loss(h, y), layer.loss(h, y, "sum") / 4):
        torch.testing.assert_close(one, expected, **TIGHT)
        for x, other in zip(torch.autograd.grad(one, leaves), wanted, strict=True):
            torch.testing.assert_close(x, other, **TIGHT)
    nothing = torch.full((6,), 7)
    assert bool(layer.loss(h, nothing).isnan())
    assert float(layer.loss(h, nothing, "sum").detach()) == 0
    for one in (layer.loss(h, nothing), layer(h, nothing).loss):
        assert not any(bool(x.any()) for x in torch.autograd.grad(one, [h, layer.head.weight]))


def test_no_tokens_and_single_tokens() -> None:
    layer = made()
    output, loss = layer(hidden(0), targets(0))
    assert output.shape == (0,)
    assert bool(loss.isnan())
    assert layer.predict(hidden(0)).shape == (0,)
    one = layer(hidden(), torch.tensor(39))
    torch.testing.assert_close(one.output, layer.log_prob(hidden())[39])
    assert layer.predict(hidden()).shape == ()


def test_a_cluster_without_targets_gets_no_gradient_as_in_torch() -> None:
    layer, h = made(), hidden(3)
    layer.loss(h, torch.tensor([0, 1, 7])).backward()
    first, second = layer.tail
    assert all(p.grad is not None for p in first.parameters())
    assert all(p.grad is None for p in second.parameters())


@pytest.mark.slow
def test_memory_is_at_most_an_eighth_of_the_logits() -> None:
    """The gradients are not counted."""
    tokens, classes = 2048, 16000
    layer = AdaptiveSoftmax(16, classes, [100, 2000])
    h = rand(tokens, 16, dtype=torch.float32).requires_grad_()
    y = torch.randint(classes, (tokens,))
    gradients = 4 * (h.numel() + sum(p.numel() for p in layer.parameters()))
    assert peak_of(lambda: layer.loss(h, y).backward()) - gradients <= tokens * classes * 4 / 8


def test_16_bits_and_autocast() -> None:
    layer = AdaptiveSoftmax(WIDTH, CLASSES, CUTOFFS, dtype=torch.bfloat16)
    h, y = hidden(20, dtype=torch.bfloat16), targets(20)
    output, loss = layer(h, y)
    assert output.dtype == loss.dtype == layer.log_prob(h).dtype == torch.float32
    assert layer.topk(h, 2).values.dtype == torch.bfloat16
    wide = AdaptiveSoftmax(WIDTH, CLASSES, CUTOFFS)
    wide.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(wide(h.float(), y).loss, loss)
        assert torch.equal(wide.log_prob(h.float()), layer.log_prob(h))


def test_copies_meta_device_and_parameter_groups() -> None:
    layer, h, y = made("ssmax"), hidden(9), targets(9)
    empty = AdaptiveSoftmax(WIDTH, CLASSES, CUTOFFS, "ssmax", device="meta").double()
    empty = empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert empty.loss(h, y).isfinite()
    empty.load_state_dict(layer.state_dict())
    for same in (empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same.loss(h, y), layer.loss(h, y))
    decayed, free = parameter_groups(layer, 0.1)
    assert (len(decayed["params"]), len(free["params"])) == (5, 3)
    assert "(head): OutputLayer(32, 7, 'ssmax', bias=False" in repr(layer)
    assert repr(layer).startswith("AdaptiveSoftmax(\n  32, 40, cutoffs=[5, 12]")


# ---- cutoffs from frequencies -----------------------------------------------------------------


def modelled(
    counts: Sequence[float], cutoffs: Sequence[int], tokens: int, overhead: float, smallest: float
) -> float:
    """The time of a step by the paper's model, in units of λ."""
    edges, total = [*cutoffs, len(counts)], sum(counts)
    times = [max(smallest, (len(cutoffs) + cutoffs[0]) * tokens)]
    for first, end in itertools.pairwise(edges):
        times.append(max(smallest, (end - first) * tokens * sum(counts[first:end]) / total))
    return sum(times) + overhead * len(times)


FREQUENCIES: dict[str, list[float]] = {
    "zipf": [1 / rank for rank in range(1, 13)],
    "equal": [3.0] * 12,
    "two": [5, 1],
    "steep": [2.0**-n for n in range(12)],
    "with zeros": [9, 9, 4, 4, 1, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", FREQUENCIES)
@pytest.mark.parametrize("clusters", [None, 1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "overhead", "smallest"), [(100, 0.0, 0.0), (100, 50.0, 150.0), (7, 1000.0, 20.0)]
)
def test_cutoffs_have_the_least_modelled_time(
    name: str, clusters: int | None, tokens: int, overhead: float, smallest: float
) -> None:
    counts = FREQUENCIES[name]
    most = min(3, len(counts) - 1)  # 128 features allow 3 clusters
    if clusters is not None and clusters > most:
        with pytest.raises(ValueError, match=f"clusters must be at most {most}"):
            AdaptiveSoftmax.from_frequencies(128, counts, clusters=clusters)
        return
    costs = (tokens, overhead, smallest)
    numbers = range(1, most + 1) if clusters is None else [clusters]
    every = (
        cut for number in numbers for cut in itertools.combinations(range(1, len(counts)), number)
    )
    least = min(modelled(counts, cut, *costs) for cut in every)
    layer = AdaptiveSoftmax.from_frequencies(
        128, counts, clusters=clusters, tokens=tokens, overhead=overhead, smallest=smallest
    )
    cutoffs = layer.cutoffs[:-1]
    assert clusters is None or len(cutoffs) == clusters
    assert modelled(counts, cutoffs, *costs) == pytest.approx(least, rel=1e-12)


def test_cutoffs_do_not_depend_on_the_unit_and_type_of_the_counts() -> None:
    counts = torch.arange(1000, 0, -1)
    cutoffs = [
        AdaptiveSoftmax.from_frequencies(64, frequencies, "entmax", head_bias=True).cutoffs
        for frequencies in (counts, counts.tolist(), counts.double() / 7, counts.numpy())
    ]
    assert all(one == cutoffs[0] for one in cutoffs)


def test_a_fixed_time_per_product_gives_fewer_clusters() -> None:
    zipf = [1 / rank for rank in range(1, 5001)]
    numbers = [
        AdaptiveSoftmax.from_frequencies(1024, zipf, overhead=cost, smallest=0.0).n_clusters
        for cost in (0.0, 1e6, 1e9)
    ]
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0], numbers[-1]) == (5, 1)


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": []}, "cutoffs must be a sequence of ascending ints from 1 to"),
        ({"cutoffs": 5}, "cutoffs must be a sequence of ascending ints from 1 to"),
        ({"cutoffs": [0, 5]}, r"cutoffs must be ascending ints from 1 to num_classes - 1 = 39"),
        ({"cutoffs": [5, 40]}, r"cutoffs must be ascending ints .*, got \[5, 40\]"),
        ({"cutoffs": [9, 5]}, "cutoffs must be ascending ints"),
        ({"cutoffs": [5, 5]}, "cutoffs must be ascending ints"),
        ({"cutoffs": [5.0]}, "cutoffs must be ascending ints"),
        ({"cutoffs": [5, 9, 12]}, r"at most 2 entries, because in_features // div_value\^3 leaves"),
        ({"div_value": 0.5}, "div_value must be a finite number >= 1, got 0.5"),
        ({"div_value": 1e38}, r"at most 0 entries, because in_features // div_value\^1 leaves"),
        ({"div_value": "4"}, "div_value must be a number >= 1, got '4'"),
        ({"ignore_index": 1.5}, "ignore_index must be an int"),
        ({"head_bias": 1}, "head_bias must be a bool"),
        ({"variant": 3}, "variant must be a name or a pair"),
        ({"tail_variant": ("softmax",)}, "tail_variant must be a name or a pair"),
        ({"variant": ("softmax", {"bias": True})}, "variant must not set bias"),
        ({"tail_variant": "nothing"}, "unknown variant 'nothing'"),
        ({"variant": "adaptive_temperature"}, "has no loss"),
        ({"num_classes": 0}, "num_classes must be an int of at least 1"),
    ],
)
def test_wrong_options_raise(options: dict[str, Any], message: str) -> None:
    arguments = {"in_features": WIDTH, "num_classes": CLASSES, "cutoffs": CUTOFFS, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        AdaptiveSoftmax(**arguments)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([1, 2], {}, "descending order, but class 1 is more frequent than class 0"),
        ([1], {}, r"at least 2, got the shape \(1,\)"),
        ([[2, 1]], {}, r"got the shape \(1, 2\)"),
        ([1, -1], {}, "counts must be finite numbers >= 0"),
        ([math.nan, 1], {}, "counts must be finite numbers >= 0"),
        ([0, 0], {}, "with a sum above 0"),
        (["a", "b"], {}, "counts must be numbers >= 0"),
        (["3", "2"], {}, "counts must be numbers >= 0"),
        ([2, 1], {"clusters": 0}, "clusters must be an int of at least 1"),
        ([2, 1], {"clusters": 2}, "clusters must be at most 1"),
        ([2, 1], {"tokens": 0}, "tokens must be an int of at least 1"),
        ([2, 1], {"overhead": -1.0}, "overhead must be a finite number >= 0"),
        ([2, 1], {"smallest": math.inf}, "smallest must be a finite number >= 0"),
        ([2, 1], {"div_value": 100.0}, "in_features // div_value must be at least 1"),
    ],
)
def test_wrong_frequencies_raise(counts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        AdaptiveSoftmax.from_frequencies(WIDTH, counts, **options)


def test_wrong_tensors_raise() -> None:
    layer, h, y = made(), hidden(2), targets(2)
    with pytest.raises(ValueError, match="target must be from 0 to 39"):
        layer(h, torch.tensor([0, CLASSES]))
    with pytest.raises(ValueError, match=r"target must have shape \(2,\), got \(3,\)"):
        layer.loss(h, targets(3))
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        layer.topk(h[:, 1:], 1)
    with pytest.raises(TypeError, match="linear_weight must have the dtype of input"):
        layer.loss(h.float(), y)
    with pytest.raises(ValueError, match="k must be at most the number of classes, 40, got 41"):
        layer.topk(h, CLASSES + 1)
    with pytest.raises(ValueError, match="reduction must be one of"):
        layer.loss(h, y, "max")
