"""attnzoo.nn.MixtureOutput: probabilities, losses and gradients, memory, tied weights, errors.

The definition computes dense logits of each component in fp64. −log p_y follows from −log w_y of
`helpers.loss_definitions`.
"""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo.losses import linear_loss
from attnzoo.nn import MixtureOutput, OutputLayer, parameter_groups
from helpers.cases import rand
from helpers.loss_definitions import dense_loss
from helpers.memory import peak_of

CLASSES, WIDTH, COMPONENTS = 23, 6, 3
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("softmax", {"softcap": 4.0, "bias": False}),
    ("ssmax", {"learn": ("s", "b")}),
    ("log_n", {"train_length": 10}),
    ("sink", {}),
    ("taylor", {}),
    ("taylor", {"order": 4}),
]
every_layer = pytest.mark.parametrize(
    ("variant", "options"), LAYERS, ids=[f"{name}{n}" for n, (name, _) in enumerate(LAYERS)]
)
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def made(variant: str = "softmax", **options: Any) -> MixtureOutput:
    torch.manual_seed(0)
    arguments = {"dtype": torch.float64, "components": COMPONENTS, **options}
    layer = MixtureOutput(WIDTH, CLASSES, variant=variant, **arguments)
    with torch.no_grad():
        for weight in (layer.weight, layer.contexts.weight, layer.prior.weight):
            weight.mul_(4)
    # Learned parameters of variants are fp32 unless the layer is cast.
    return layer.double() if arguments["dtype"] == torch.float64 else layer


def hidden(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rand(*shape, WIDTH, seed=1, dtype=dtype)


def targets(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))


def contexts_of(layer: MixtureOutput, h: Tensor) -> tuple[list[Tensor], Tensor]:
    """The contexts tanh(W_k h), each (N, d), and log π (N, K)."""
    contexts = [torch.tanh(h @ w.mT) for w in layer.contexts.weight.split(layer.in_features)]
    return contexts, (h @ layer.prior.weight.mT).log_softmax(-1)


def definition(layer: MixtureOutput, h: Tensor, y: Tensor) -> Tensor:
    """−log p_y of each token (N,)."""
    contexts, log_prior = contexts_of(layer, h)
    names = {"ssmax": ("s", "b"), "log_n": ("train_length",), "sink": ("b",), "taylor": ("order",)}
    params = {name: getattr(layer, name) for name in names.get(layer.variant, ())}
    log_probs = []
    for k, context in enumerate(contexts):
        z = context @ layer.weight.mT
        z = z if layer.bias is None else z + layer.bias
        options = {"softcap": layer.softcap, "reduction": "none", **params}
        log_probs.append(log_prior[:, k] - dense_loss(z, y, layer.variant, **options))
    return -torch.stack(log_probs, -1).logsumexp(-1)


def all_gradients(layer: nn.Module, h: Tensor, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [h, *layer.parameters()]))


# ---- probabilities and losses -----------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("components", [1, 3])
def test_loss_and_all_gradients_are_those_of_the_definition(
    variant: str, options: dict[str, Any], components: int
) -> None:
    layer = made(variant, components=components, **options)
    h, y = hidden(11).requires_grad_(), targets(11)
    expected = definition(layer, h, y)
    torch.testing.assert_close(layer.loss(h, y, "none"), expected, **TIGHT)
    torch.testing.assert_close(layer.loss(h, y, "sum"), expected.sum(), **TIGHT)
    output, loss = layer(h, y)
    torch.testing.assert_close(output, -expected.detach(), **TIGHT)
    torch.testing.assert_close(loss, expected.mean(), **TIGHT)
    wanted = all_gradients(layer, h, expected.mean())
    for value in (loss, layer.loss(h, y)):
        for one, other in zip(all_gradients(layer, h, value), wanted, strict=True):
            torch.testing.assert_close(one, other, **TIGHT)


@every_layer
def test_log_prob_and_its_gradients(variant: str, options: dict[str, Any]) -> None:
    layer, h = made(variant, **options), hidden(2, 3).requires_grad_()
    rows = h.reshape(-1, WIDTH)
    each = [-definition(layer, rows, torch.full((6,), y)) for y in range(CLASSES)]
    expected = torch.stack(each, -1).view(2, 3, CLASSES)
    log_prob = layer.log_prob(h)
    torch.testing.assert_close(log_prob, expected, **TIGHT)
    assert torch.equal(layer.logits(h), log_prob)
    assert not layer.has_zeros
    if variant != "sink":
        torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(2, 3).double(), **TIGHT)
    weights = rand(2, 3, CLASSES, seed=5)
    got, want = (all_gradients(layer, h, (x * weights).sum()) for x in (log_prob, expected))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@every_layer
def test_predict_and_topk(variant: str, options: dict[str, Any]) -> None:
    layer, h = made(variant, **options), hidden(3, 7)
    p = layer.log_prob(h).exp()
    values, indices = layer.topk(h, 4)
    torch.testing.assert_close(values, p.topk(4).values, **TIGHT)
    torch.testing.assert_close(p.gather(-1, indices), values, **TIGHT)
    assert torch.equal(layer.predict(h), p.argmax(-1))
    assert layer.predict(h[0, 0]).shape == ()


def test_hooks_of_the_modules_run() -> None:
    """Wrappers such as weight normalization work through hooks."""
    layer, seen = made(), []
    for name in ("contexts", "prior"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    layer.loss(hidden(2), torch.tensor([0, 1]))
    assert sorted(seen) == ["contexts", "prior"]


def test_equally_probable_classes_come_in_ascending_order() -> None:
    layer = made(bias=False)
    with torch.no_grad():
        layer.weight.copy_(layer.weight[:1].clone().expand_as(layer.weight))
    assert layer.topk(hidden(2), 5).indices.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("mix", ["probabilities", "contexts"])
def test_one_component_is_an_output_layer_on_its_context(mix: str) -> None:
    layer, h, y = made("ssmax", components=1, mix=mix), hidden(9), targets(9)
    same = OutputLayer(WIDTH, CLASSES, "ssmax", dtype=torch.float64)
    same.load_state_dict({name: layer.state_dict()[name] for name in same.state_dict()})
    (context,), _ = contexts_of(layer, h)
    torch.testing.assert_close(layer.loss(h, y, "none"), same.loss(context, y, "none"), **TIGHT)
    torch.testing.assert_close(layer(h, y), same(context, y), **TIGHT)
    torch.testing.assert_close(layer.log_prob(h), same.log_prob(context), **TIGHT)
    assert torch.equal(layer.predict(h), same.predict(context))


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_extreme_logits(scale: float) -> None:
    """Most probabilities underflow, but losses and gradients are those of the definition.

    Rounding errors of scores grow with the scale, and so do gradients by the contexts.
    """
    layer = made()
    with torch.no_grad():
        layer.weight.mul_(scale)
        layer.prior.weight.mul_(scale)
    h, y = hidden(12).requires_grad_(), targets(12)
    losses, expected = layer.loss(h, y, "none"), definition(layer, h, y)
    assert float(expected.detach().max()) > scale
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12 * scale)
    got, want = (all_gradients(layer, h, x.sum()) for x in (losses, expected))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("mix", ["probabilities", "contexts"])
def test_one_class_is_certain(mix: str) -> None:
    layer = MixtureOutput(WIDTH, 1, COMPONENTS, mix=mix, dtype=torch.float64)
    h, y = hidden(4).requires_grad_(), torch.zeros(4, dtype=torch.long)
    output, loss = layer(h, y)
    torch.testing.assert_close(output, torch.zeros(4).double(), rtol=0, atol=1e-15)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-15)
    assert all(float(x.abs().max()) < 1e-15 for x in all_gradients(layer, h, loss))
    assert layer.predict(h).tolist() == [0] * 4


@pytest.mark.parametrize("mix", ["probabilities", "contexts"])
def test_ignored_targets_have_no_loss_and_no_gradient(mix: str) -> None:
    layer, y = made(mix=mix, ignore_index=-1), targets(6)
    y[2] = -1
    h = hidden(6)
    h[2] = math.nan
    h.requires_grad_()
    output, loss = layer(h, y)
    keep = y != -1
    assert output.isnan().tolist() == [False, False, True, False, False, False]
    assert layer.loss(h, y, "none").tolist()[2] == 0
    torch.testing.assert_close(loss, layer.loss(h[keep], y[keep]), **TIGHT)
    gradients = all_gradients(layer, h, loss)
    wanted = all_gradients(layer, h, layer.loss(h[keep], y[keep]))
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    assert not bool(gradients[0][2].any())
    nothing = torch.full((6,), -1)
    assert bool(layer.loss(h, nothing).isnan())
    assert float(layer.loss(h, nothing, "sum").detach()) == 0


def test_no_tokens() -> None:
    layer = made()
    output, loss = layer(hidden(0), targets(0))
    assert output.shape == (0,)
    assert bool(loss.isnan())
    assert layer.predict(hidden(0)).shape == (0,)
    assert layer.log_prob(hidden(0)).shape == (0, CLASSES)


# ---- the mixture of contexts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "options"),
    [("softmax", {}), ("entmax", {"learn": ("alpha",)}), ("sigmoid", {}), ("topk", {"top_k": 4})],
)
def test_a_mixture_of_contexts_takes_any_loss(variant: str, options: dict[str, Any]) -> None:
    layer = made(variant, mix="contexts", **options)
    h, y = hidden(8).requires_grad_(), targets(8)
    contexts, log_prior = contexts_of(layer, h)
    mixed = torch.einsum("nk,knd->nd", log_prior.exp(), torch.stack(contexts))
    params = {"alpha": layer.alpha} if variant == "entmax" else options
    expected = linear_loss(mixed, layer.weight, y, variant, linear_bias=layer.bias, **params)
    torch.testing.assert_close(layer.loss(h, y), expected, **TIGHT)
    torch.testing.assert_close(layer(h, y).loss, expected, **TIGHT)
    got, want = (all_gradients(layer, h, x) for x in (layer.loss(h, y), expected))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    values, indices = layer.topk(h, 3)
    torch.testing.assert_close(layer.log_prob(h).exp().gather(-1, indices), values, **TIGHT)
    logits = mixed @ layer.weight.mT + layer.bias  # type: ignore[operator]
    torch.testing.assert_close(layer.logits(h), logits, **TIGHT)
    assert layer.has_zeros == (variant in ("entmax", "topk"))


@pytest.mark.parametrize(
    ("mix", "bias", "bound"),
    [("contexts", False, WIDTH + 1), ("contexts", True, WIDTH + 2), ("probabilities", True, None)],
)
def test_only_a_mixture_of_probabilities_exceeds_the_rank_of_softmax(
    mix: str, bias: bool, bound: int | None
) -> None:
    layer = made(mix=mix, bias=bias)
    with torch.no_grad():
        rank = int(torch.linalg.matrix_rank(layer.log_prob(hidden(100))))
    assert rank == (bound or CLASSES)


# ---- memory and dtypes ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [pytest.param("softmax", marks=pytest.mark.slow), "taylor"])
def test_memory_of_the_loss_is_at_most_an_eighth_of_one_components_logits(variant: str) -> None:
    """The gradients are not counted."""
    tokens, classes = 4096, 4096
    layer = MixtureOutput(8, classes, 2, variant)
    h = rand(tokens, 8, dtype=torch.float32).requires_grad_()
    y = torch.randint(classes, (tokens,))
    gradients = 4 * (h.numel() + sum(p.numel() for p in layer.parameters()))
    peak = peak_of(lambda: layer.loss(h, y).backward())
    assert peak - gradients <= tokens * classes * 4 / 8
    dense = peak_of(lambda: layer.log_prob(h[:64]))
    assert dense >= 64 * classes * 4  # the measure sees logits where they exist


def test_topk_holds_the_probabilities_of_some_tokens_only() -> None:
    tokens, classes = 4096, 4096
    layer = MixtureOutput(8, classes, 2)
    h = rand(tokens, 8, dtype=torch.float32)
    assert peak_of(lambda: layer.topk(h, 3)) <= tokens * classes * 4 / 2


def test_16_bits_and_autocast() -> None:
    layer = made(dtype=torch.bfloat16)
    h, y = hidden(5, dtype=torch.bfloat16), targets(5)
    output, loss = layer(h, y)
    assert output.dtype == loss.dtype == layer.log_prob(h).dtype == torch.float32
    assert layer.topk(h, 2).values.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        wide = made(dtype=torch.float32)
        wide.load_state_dict(layer.state_dict())
        assert torch.equal(wide(h.float(), y).loss, loss)
        assert wide.topk(h.float(), 2).values.dtype == torch.float32
        assert torch.equal(wide.log_prob(h.float()), layer.log_prob(h))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_graph_breaks() -> None:
    layer, h, y = made(dtype=torch.float32), hidden(8, dtype=torch.float32), targets(8)
    compiled = torch.compile(layer.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(h, y), layer.loss(h, y))


# ---- parameters, tied weights, copies ---------------------------------------------------------


def test_a_matrix_can_be_tied_to_an_embedding() -> None:
    embedding = nn.Embedding(CLASSES, WIDTH)
    layer = MixtureOutput(WIDTH, CLASSES, 2, bias=False)
    layer.weight = embedding.weight
    model = nn.ModuleDict({"in": embedding, "out": layer})
    assert len(list(model.parameters())) == 3
    tokens = targets(9)
    layer.loss(embedding(tokens), tokens).backward()
    assert embedding.weight.grad is layer.weight.grad
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double()):
        assert other["in"].weight is other["out"].weight


def test_state_dict_copies_and_meta_device() -> None:
    layer, h, y = made("ssmax"), hidden(4), targets(4)
    other = MixtureOutput(WIDTH, CLASSES, COMPONENTS, "ssmax", device="meta", dtype=torch.float64)
    other = other.to_empty(device="cpu")
    other.reset_parameters()
    assert other.loss(h, y).isfinite()
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same.loss(h, y), layer.loss(h, y))


def test_matrices_start_as_those_of_linear_and_are_decayed() -> None:
    torch.manual_seed(0)
    layer = MixtureOutput(WIDTH, CLASSES, COMPONENTS, "ssmax")
    for _ in range(2):
        for weight in (layer.contexts.weight, layer.prior.weight, layer.weight):
            assert 0.5 < float(weight.detach().abs().max()) * WIDTH**0.5 <= 1
        with torch.no_grad():
            layer.contexts.weight.mul_(9)
        layer.reset_parameters()
    decayed, free = parameter_groups(layer, 0.1)
    assert len(decayed["params"]) == 4
    assert [p is layer.s for p in free["params"]] == [True]


def test_repr_shows_components_and_mix() -> None:
    text = repr(MixtureOutput(8, 9, 2, "entmax", mix="contexts", ignore_index=-1))
    assert "8, 9, 2, 'entmax', bias=True, alpha=1.5, ignore_index=-1, mix='contexts'" in text


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": 0}, "components must be an int of at least 1, got 0"),
        ({"components": 2.0}, "components must be an int of at least 1, got 2.0"),
        ({"mix": "logits"}, "mix must be one of probabilities, contexts, got 'logits'"),
        ({"variant": "entmax"}, "mix='probabilities', but 'entmax' has another loss"),
        ({"variant": "topk", "top_k": 2}, "mix='probabilities', but 'topk' has another loss"),
        ({"variant": "sigmoid"}, "mix='probabilities', but 'sigmoid' has another loss"),
        ({"variant": "adaptive_temperature"}, "has no loss: its gain depends on statistics"),
        ({"label_smoothing": 0.1}, "MixtureOutput has no argument label_smoothing"),
        ({"lse_penalty": 0.1}, "MixtureOutput has no argument lse_penalty"),
        ({"alpha": 1.5}, "variant 'softmax' has no parameter 'alpha'"),
    ],
)
def test_wrong_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MixtureOutput(WIDTH, CLASSES, **{"components": 2, **options})


@pytest.mark.parametrize("mix", ["probabilities", "contexts"])
def test_wrong_tensors_raise(mix: str) -> None:
    layer, h, y = made(mix=mix), hidden(2), targets(2)
    with pytest.raises(ValueError, match="target must be from 0 to 22"):
        layer(h, torch.tensor([0, CLASSES]))
    with pytest.raises(ValueError, match=r"target must have shape \(2,\), got \(3,\)"):
        layer.loss(h, targets(3))
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        layer.log_prob(h[:, 1:])
    with pytest.raises(TypeError, match="linear_weight must have the dtype of input"):
        layer.topk(h.float(), 2)
    with pytest.raises(ValueError, match="k must be at most the number of classes, 23, got 24"):
        layer.topk(h, CLASSES + 1)
    with pytest.raises(ValueError, match="reduction must be one of"):
        layer.loss(h, y, "max")
    layer.weight = nn.Parameter(layer.weight.detach().float())
    layer.bias = None
    with pytest.raises(TypeError, match=r"contexts.weight must have the dtype of input"):
        layer.loss(h.float(), y)
