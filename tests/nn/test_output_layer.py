"""attnzoo.nn.OutputLayer: probabilities, losses, learned parameters, tied weights, copies."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnzoo
from attnzoo.losses import linear_loss
from attnzoo.nn import (
    AdaptiveSoftmax,
    MixtureOutput,
    OutputLayer,
    TargetLoss,
    Transformer,
    parameter_groups,
)
from helpers.cases import rand

CLASSES, WIDTH = 50, 16
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    ("softmax", {"softcap": 5.0, "label_smoothing": 0.1, "lse_penalty": 1e-3}),
    ("ssmax", {}),
    ("log_n", {"train_length": 10}),
    ("sink", {}),
    ("sparsemax", {}),
    ("entmax", {"alpha": 1.5}),
    ("entmax", {"alpha": 1.3, "learn": ("alpha",), "softcap": 4.0}),
    ("asentmax", {}),
    ("sigmoid", {}),
    ("taylor", {}),
    ("taylor", {"order": 4, "label_smoothing": 0.1}),
    ("topk", {"top_k": 4}),
]
SPARSE = {"sparsemax", "entmax", "asentmax", "topk"}
every_layer = pytest.mark.parametrize(
    ("variant", "options"), LAYERS, ids=[f"{name}{n}" for n, (name, _) in enumerate(LAYERS)]
)


def made(variant: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> OutputLayer:
    torch.manual_seed(0)
    layer = OutputLayer(WIDTH, CLASSES, variant, dtype=dtype, **options)
    with torch.no_grad():
        layer.weight.mul_(6)
    return layer


def hidden(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rand(*shape, WIDTH, seed=1, dtype=dtype)


def targets(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))


def logits_of(layer: OutputLayer, h: Tensor) -> Tensor:
    z = F.linear(h, layer.weight, layer.bias)
    return z if layer.softcap is None else layer.softcap * torch.tanh(z / layer.softcap)


def parameters_of(layer: OutputLayer) -> dict[str, Any]:
    """The parameters of the layer's variant, as keywords of a function of logits.

    The parameter bias of sigmoid is 0, because the logits already include ``layer.bias``.
    """
    names = [param.name for param in attnzoo.get_variant(layer.variant).params]
    return {name: 0.0 if name == "bias" else getattr(layer, name) for name in names}


# ---- probabilities and losses -----------------------------------------------------------------


@every_layer
def test_log_prob_is_the_log_of_the_definition(variant: str, options: dict[str, Any]) -> None:
    layer, h = made(variant, options), hidden(3, 7)
    expected = attnzoo.probabilities(logits_of(layer, h), variant, **parameters_of(layer))
    log_prob = layer.log_prob(h)
    assert torch.allclose(log_prob.exp(), expected, atol=1e-12)
    assert torch.equal(log_prob == -math.inf, expected == 0)
    assert layer.has_zeros == (variant in SPARSE)
    assert bool((log_prob == -math.inf).any()) == layer.has_zeros


@every_layer
def test_output_is_the_log_prob_of_the_target(variant: str, options: dict[str, Any]) -> None:
    layer, h, y = made(variant, options), hidden(3, 7), targets(3, 7)
    losses = layer(h, y)
    assert isinstance(losses, TargetLoss)
    expected = layer.log_prob(h).gather(-1, y[..., None])[..., 0]
    assert torch.equal(losses.output == -math.inf, expected == -math.inf)
    finite = expected > -math.inf
    assert torch.allclose(losses.output[finite], expected[finite], atol=1e-10)
    assert not losses.output.requires_grad


@every_layer
def test_loss_is_linear_loss_with_all_gradients(variant: str, options: dict[str, Any]) -> None:
    layer, h, y = made(variant, options), hidden(3, 7), targets(3, 7)
    settings = {k: v for k, v in options.items() if k not in ("learn", "alpha")}
    expected = linear_loss(
        h, layer.weight, y, variant, linear_bias=layer.bias, **{**parameters_of(layer), **settings}
    )
    assert torch.equal(layer(h, y).loss, expected)
    assert torch.equal(layer.loss(h, y), expected)
    layer.loss(h, y).backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())
    if variant == "softmax" and not layer.label_smoothing:
        assert torch.allclose(layer(h, y).output.mean(), -expected)
    each = layer.loss(h, y, reduction="none")
    assert each.shape == y.shape
    assert torch.allclose(each.mean(), expected)


@every_layer
def test_predict_and_topk(variant: str, options: dict[str, Any]) -> None:
    layer, h = made(variant, options), hidden(3, 7)
    w = layer.log_prob(h).exp()
    values, indices = layer.topk(h, 3)
    assert torch.allclose(values, w.topk(3).values, atol=1e-12)
    assert torch.allclose(w.gather(-1, indices), values, atol=1e-12)
    assert torch.equal(layer.predict(h), w.argmax(-1))
    assert layer.predict(h[0, 0]).shape == ()


@pytest.mark.parametrize("variant", ["softmax", "entmax", "sigmoid"])
def test_log_prob_has_finite_gradients(variant: str) -> None:
    layer, h = made(variant, {}), hidden(4).requires_grad_()
    log_prob = layer.log_prob(h)
    log_prob[log_prob > -math.inf].sum().backward()
    assert bool(h.grad.isfinite().all())  # type: ignore[union-attr]
    assert bool(h.grad.any())  # type: ignore[union-attr]


def test_log_prob_of_softmax_is_exact_where_probabilities_underflow() -> None:
    layer = OutputLayer(1, 2, bias=False)
    layer.weight.data = torch.tensor([[0.0], [500.0]])
    y = torch.tensor([0])
    assert layer.log_prob(torch.ones(1, 1)).tolist() == [[-500.0, 0.0]]
    assert layer(torch.ones(1, 1), y).output.tolist() == [-500.0]


@pytest.mark.parametrize(("variant", "options"), [("softmax", {}), ("topk", {"top_k": 3})])
def test_a_common_offset_of_the_logits_loses_no_digits_of_log_prob(
    variant: str, options: dict[str, Any]
) -> None:
    layer, h = made(variant, options, torch.float32), hidden(5, dtype=torch.float32)
    with torch.no_grad():
        layer.bias.fill_(1e6)  # type: ignore[union-attr]
        z = layer.logits(h)
        identity = OutputLayer(CLASSES, CLASSES, variant, bias=False, **options)
        identity.weight.copy_(torch.eye(CLASSES))
        log_prob = identity.log_prob(z)
    expected = torch.log(attnzoo.probabilities(z.double(), variant, **options))
    # Rounding of sums of 50 terms, for log w above -20.
    torch.testing.assert_close(log_prob.double(), expected, rtol=0, atol=50 * 20 * 2**-24)


@pytest.mark.parametrize(("variant", "options"), [LAYERS[0], LAYERS[6], LAYERS[11], LAYERS[12]])
def test_ignored_targets_have_output_nan_and_no_loss(variant: str, options: dict[str, Any]) -> None:
    layer, h, y = made(variant, {**options, "ignore_index": -1}), hidden(6), targets(6)
    y[2] = -1
    output, loss = layer(h, y)
    assert output.isnan().tolist() == [False, False, True, False, False, False]
    keep = y != -1
    assert torch.allclose(loss, layer.loss(h[keep], y[keep]))


def test_no_tokens() -> None:
    layer = made("topk", {"top_k": 3})
    output, loss = layer(hidden(0), targets(0))
    assert output.shape == (0,)
    assert bool(loss.isnan())
    assert layer.predict(hidden(0)).shape == (0,)
    assert layer.log_prob(hidden(0)).shape == (0, CLASSES)


def test_16_bits_and_autocast() -> None:
    layer = made("entmax", {"learn": ("alpha",)}, torch.bfloat16)
    h, y = hidden(5, dtype=torch.bfloat16), targets(5)
    output, loss = layer(h, y)
    assert layer.alpha.dtype == output.dtype == loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        wide = made("entmax", {"learn": ("alpha",)}, torch.float32)
        wide.load_state_dict(layer.state_dict())
        assert torch.equal(wide(h.float(), y).loss, loss)
        assert torch.equal(wide.log_prob(h.float()), layer.log_prob(h))
        wide.bias = None
        assert wide.log_prob(h.float()).isfinite().any()


@pytest.mark.parametrize(("variant", "options"), [("topk", {"top_k": 3}), ("taylor", {})])
def test_autocast_of_variants_whose_log_w_needs_all_logits(
    variant: str, options: dict[str, Any]
) -> None:
    layer, y = made(variant, options, torch.float32), targets(5)
    for dtype in (torch.float32, torch.bfloat16):
        h = hidden(5, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            expected = layer.log_prob(h).gather(1, y[:, None])[:, 0]
            torch.testing.assert_close(layer(h, y).output, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_graph_breaks() -> None:
    layer, h, y = made("entmax", {}, torch.float32), hidden(8, dtype=torch.float32), targets(8)
    compiled = torch.compile(layer.loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(h, y), layer.loss(h, y))


# ---- parameters -------------------------------------------------------------------------------


def test_weights_start_as_those_of_linear() -> None:
    torch.manual_seed(3)
    linear = nn.Linear(WIDTH, CLASSES)
    torch.manual_seed(3)
    layer = OutputLayer(WIDTH, CLASSES)
    assert torch.equal(layer.weight, linear.weight)
    assert torch.equal(layer.bias, linear.bias)  # type: ignore[arg-type]
    assert OutputLayer(WIDTH, CLASSES, bias=False).bias is None


def test_learned_parameters_have_shape_1_and_no_weight_decay() -> None:
    for variant, names in (("ssmax", ["s"]), ("sink", ["b"]), ("asentmax", ["beta", "gamma"])):
        layer = OutputLayer(WIDTH, CLASSES, variant)
        assert layer.learned == tuple(names)
        assert all(getattr(layer, name).shape == (1,) for name in names)
        decayed, free = parameter_groups(layer, 0.1)
        assert [p is q for p, q in zip(decayed["params"], (layer.weight, layer.bias))] == [True] * 2
        assert len(free["params"]) == len(names)
    assert OutputLayer(WIDTH, CLASSES, "ssmax", learn=()).learned == ()
    with pytest.raises(ValueError, match=r"entmax's alpha must have shape \(\) or \(1,\)"):
        OutputLayer(WIDTH, CLASSES, "entmax", alpha=torch.tensor([1.5, 1.6]))


def test_learned_alpha_is_trained_inside_its_range() -> None:
    layer, h, y = made("entmax", {"learn": ("alpha",)}), hidden(20), targets(20)
    before = layer.alpha.item()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        layer.loss(h, y).backward()
        optimizer.step()
    assert 1 < layer.alpha.item() < 2
    assert layer.alpha.item() != pytest.approx(before, abs=1e-3)
    layer.reset_parameters()
    assert layer.alpha.item() == pytest.approx(1.5)


def test_sigmoid_uses_the_bias_of_the_output_layer_and_no_bias_of_its_own() -> None:
    layer, h, y = made("sigmoid", {}), hidden(4), targets(4)
    z = F.linear(h, layer.weight, layer.bias)
    expected = F.binary_cross_entropy_with_logits(
        z, F.one_hot(y, CLASSES).double(), reduction="sum"
    )
    assert torch.allclose(layer.loss(h, y, "sum"), expected)
    with pytest.raises(TypeError, match="bias must be a bool"):
        OutputLayer(WIDTH, CLASSES, "sigmoid", bias=-1.0)  # type: ignore[arg-type]


# ---- tied weights, state dict, copies, repr ---------------------------------------------------


def test_a_matrix_can_be_tied_to_an_embedding() -> None:
    embedding = nn.Embedding(CLASSES, WIDTH)
    layer = OutputLayer(WIDTH, CLASSES, "sparsemax", bias=False)
    layer.weight = embedding.weight
    model = nn.ModuleDict({"in": embedding, "out": layer})
    assert len(list(model.parameters())) == 1
    tokens = targets(9)
    layer.loss(embedding(tokens), tokens).backward()
    assert embedding.weight.grad is layer.weight.grad
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double()):
        assert other["in"].weight is other["out"].weight


@every_layer
def test_state_dict_deepcopy_and_pickle(variant: str, options: dict[str, Any]) -> None:
    layer, h, y = made(variant, options), hidden(4), targets(4)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.01)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = made(variant, options)
    other.load_state_dict(torch.load(file, weights_only=True))
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(h, y).loss, layer(h, y).loss)
        assert torch.equal(same.log_prob(h), layer.log_prob(h))


def test_meta_layers_are_materialized() -> None:
    layer = OutputLayer(WIDTH, CLASSES, "entmax", learn=("alpha",), device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert "alpha=on meta (learned)" in repr(layer)
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.alpha.tolist() == pytest.approx([1.5])
    assert layer(hidden(2, dtype=torch.float32), targets(2)).loss.isfinite()


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(OutputLayer(8, 9)) == "OutputLayer(8, 9, 'softmax', bias=True)"
    layer = OutputLayer(8, 9, "ssmax", False, softcap=30, ignore_index=-1)
    assert repr(layer) == (
        "OutputLayer(8, 9, 'ssmax', bias=False, s=0.168 (learned), b=0.0, softcap=30.0, "
        "ignore_index=-1)"
    )


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("adaptive_temperature", {}, "has no loss: its gain depends on statistics"),
        ("top_p", {"p": 0.9}, "the number of classes it selects depends on their weights"),
        ("relu", {}, "has no loss: its form has factor, which losses do not support"),
        ("softpick", {}, "has no loss: its form has eps, normalizer, which losses do not support"),
        ("forgetting", {}, "variant of OutputLayer must not depend on positions, got 'forgetting'"),
        ("cosformer", {"max_length": 9}, "depend on positions"),
        ("topk", {}, "requires the parameter 'top_k'"),
        ("topk", {"top_k": 3, "label_smoothing": 0.1}, "label_smoothing must be 0"),
        ("sparsemax", {"lse_penalty": 0.1}, "lse_penalty must be 0"),
        ("softmax", {"softcap": 0.0}, "softcap must be"),
        ("softmax", {"label_smoothing": 2.0}, "label_smoothing must be"),
        ("softmax", {"alpha": 2.0}, "has no parameter 'alpha'"),
        ("nothing", {}, "unknown variant 'nothing'"),
        ("sigmoid", {"learn": ("bias",)}, "learn must name"),
    ],
)
def test_wrong_arguments_raise(variant: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        OutputLayer(WIDTH, CLASSES, variant, **options)


def test_wrong_sizes_and_targets_raise() -> None:
    with pytest.raises(ValueError, match="num_classes must be"):
        OutputLayer(WIDTH, 0)
    layer = OutputLayer(WIDTH, CLASSES)
    with pytest.raises(ValueError, match="target must be from 0 to 49"):
        layer(hidden(1, dtype=torch.float32), torch.tensor([50]))
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        layer(torch.zeros(1, 3), torch.tensor([0]))
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        layer.logits(torch.zeros(1, 3))
    with pytest.raises(TypeError, match="linear_weight must have the dtype of input"):
        layer.logits(hidden(1))


@pytest.mark.parametrize("classes", [120, 5000])
@pytest.mark.parametrize("variant", sorted({name for name, _ in LAYERS} - {"topk"}))
def test_loss_starts_near_log_v(variant: str, classes: int) -> None:
    """That of sigmoid would start at V · log 2 if its bias started at 0."""
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "bias": OutputLayer(64, classes, variant),
        "tied": Transformer(classes, 64, 4, 1, output=variant).output,
        "tied, bias": Transformer(
            classes, 64, 4, 1, output=variant, output_params={"bias": True}
        ).output,
        "contexts": MixtureOutput(64, classes, 2, variant, mix="contexts"),
        "clusters": AdaptiveSoftmax(64, classes, [classes // 4, classes // 2], variant),
    }
    hidden, target = torch.randn(64, 64), torch.randint(classes, (64,))
    for name, layer in layers.items():
        levels = 2 if name == "clusters" else 1  # a loss of the head and one of a cluster
        for _ in range(2):
            with torch.no_grad():
                assert float(layer.loss(hidden, target)) < levels * (math.log(classes) + 1.5)
            layer.reset_parameters()
