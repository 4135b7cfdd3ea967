"""Statistics, unchecked targets and errors of output layers in rare cases."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import Activation, Pairwise, Variant
from attnzoo.core import registry
from attnzoo.core.activations import EXP, SIGMOID
from attnzoo.losses import linear_loss, loss, noisy_loss
from attnzoo.nn import MixtureOutput, OutputLayer, Transformer
from helpers.cases import rand
from helpers.crossed import crossed
from helpers.loss_cases import some

COMPILED = ("entmax", "taylor")  # quick: without and with moments of the classes
INPUT, WEIGHT, TARGET = rand(40, 8), rand(300, 8, seed=1), torch.arange(40) % 300


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))


def register(name: str, form: Pairwise, scores: bool) -> None:
    def dense(q: torch.Tensor, k: torch.Tensor, call: attnzoo.Call) -> torch.Tensor:
        raise NotImplementedError

    variant = Variant(
        name, "-", "-", dense, forms=lambda call: (form,), scores=dense if scores else None
    )
    attnzoo.register_variant(variant)


def unchecked(variant: str, target: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The losses of a compiled call, which cannot read targets."""

    def call(target: torch.Tensor) -> torch.Tensor:
        return linear_loss(INPUT, WEIGHT, target, variant, reduction="none", class_mask=mask)

    return torch.compile(call, backend="aot_eager", fullgraph=True)(target)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_support_counts_weights_and_not_slopes(label_smoothing: float) -> None:
    """φ' of taylor is 0 at −1, where its weight is 1/2 before normalization."""
    scores = torch.tensor([[-1.0, -1.0, 0.0, 2.0]])
    options = {"return_stats": True, "label_smoothing": label_smoothing}
    assert loss(scores, torch.tensor([0]), "taylor", **options)[1].support.tolist() == [4]


@pytest.mark.parametrize("variant", some(["softmax", "entmax", "sigmoid", "taylor"], COMPILED))
def test_an_unchecked_target_that_is_masked_has_an_infinite_loss(variant: str) -> None:
    mask = torch.ones(300, dtype=torch.bool)
    mask[TARGET[3]] = False
    losses = unchecked(variant, TARGET, mask)
    assert losses[3] == float("inf")
    assert bool(losses[torch.arange(40) != 3].isfinite().all())


@pytest.mark.parametrize("variant", some(["softmax", "taylor"], COMPILED))
def test_an_unchecked_negative_target_raises(variant: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match="out of (bounds|range)"):
        unchecked(variant, torch.where(TARGET == 0, -1, TARGET), None)


def test_sigmoid_is_exact_for_large_scores_in_fp64() -> None:
    scores = torch.full((1, 4), 25.0, dtype=torch.float64)
    actual = loss(scores, torch.tensor([0]), "sigmoid", reduction="sum")
    exact = 3 * 25.0 + 4 * torch.tensor(-25.0, dtype=torch.float64).exp().log1p()
    torch.testing.assert_close(actual, exact, rtol=1e-15, atol=0)


def test_top_weights_of_a_row_of_minus_infinity_with_a_sink_are_0() -> None:
    scores = torch.full((1, 5), float("-inf"))
    assert attnzoo.topk_probabilities(scores, 2, "sink").values.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("dtype", "offset", "b"),
    crossed(
        [torch.float32, torch.float64, torch.float16, torch.bfloat16],
        [-200.0, -2e4, -1000.0, -100.0, 0.0, 100.0, 1000.0],
        [500.0, -500.0, 0.0],
    ),
)
def test_a_sink_may_be_far_from_all_logits(offset: float, b: float, dtype: torch.dtype) -> None:
    z = (3 * rand(4, 9) + offset).to(dtype).requires_grad_()
    exact_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    sink = torch.tensor(b, dtype=exact_dtype, requires_grad=True)
    y, options = torch.arange(4), {"lse_penalty": 1e-3, "label_smoothing": 0.1}
    value, stats = loss(z, y, "sink", b=sink, reduction="none", return_stats=True, **options)
    gradients = torch.autograd.grad(value.sum(), (z, sink))
    s, extra = z.detach().double().requires_grad_(), sink.detach().double().requires_grad_()
    peak = s.detach().amax(-1, keepdim=True)
    lse = peak[:, 0] + (s - peak).logsumexp(-1)  # exp(s − lse), its gradient, keeps all digits
    target = 0.9 * s.gather(1, y[:, None])[:, 0] + 0.1 * s.mean(-1)
    exact = torch.logaddexp(lse, extra.expand(4)) - target + 1e-3 * lse.square()
    exact_gradients = torch.autograd.grad(exact.sum(), (s, extra))
    # Fewer than 40 roundings of numbers up to the largest score, and one of the gradient.
    eps, size = torch.finfo(exact_dtype).eps, max(abs(b), float(s.detach().abs().max()))
    close = partial(torch.testing.assert_close, rtol=40 * eps)
    close(value.double(), exact, atol=40 * eps * size)
    assert stats.lse is not None
    close(stats.lse.double(), lse, atol=40 * eps * size)
    for have, want in zip(gradients, exact_gradients, strict=True):
        close(have.double(), want, rtol=40 * eps + torch.finfo(dtype).eps, atol=40 * eps)


def test_a_common_offset_of_the_logits_loses_no_digits_of_the_loss_of_noisy_scores() -> None:
    rows, y = torch.tensor([[0.0], [1.0], [2.0]]) + 1e7, torch.tensor([1])
    have = noisy_loss(torch.ones(1, 1), rows, y, alpha=0.1, training=False)
    want = torch.nn.functional.cross_entropy(rows.double().T, y)
    torch.testing.assert_close(have.double(), want, rtol=1e-6, atol=0)


def test_log_probabilities_of_a_row_of_minus_infinity_with_a_sink_are_minus_infinity() -> None:
    layer = OutputLayer(4, 6, "sink")
    assert layer.bias is not None
    torch.nn.init.constant_(layer.bias, float("-inf"))
    assert bool((layer.log_prob(rand(3, 4).float()) == float("-inf")).all())


def test_a_class_without_probability_in_any_component_has_no_gradient() -> None:
    layer, h = MixtureOutput(4, 6, 3), rand(3, 4).float().requires_grad_()
    assert layer.bias is not None
    torch.nn.init.constant_(layer.bias[1], float("-inf"))
    logs = layer.log_prob(h)
    assert bool((logs[:, 1] == float("-inf")).all())
    assert bool(torch.autograd.grad(logs[:, 0].sum(), h)[0].isfinite().all())


@pytest.mark.usefixtures("own_registry")
def test_lse_penalty_depends_on_the_form() -> None:
    register("with_lse", Pairwise(EXP, "sum"), scores=False)
    actual = linear_loss(INPUT, WEIGHT, TARGET, "with_lse", lse_penalty=0.1)
    torch.testing.assert_close(actual, linear_loss(INPUT, WEIGHT, TARGET, lse_penalty=0.1))
    register("without_lse", Pairwise(SIGMOID, "sum"), scores=True)
    with pytest.raises(ValueError, match="without_lse.*no log-sum-exp"):
        linear_loss(INPUT, WEIGHT, TARGET, "without_lse", lse_penalty=0.1)


def test_second_derivatives_of_moments_raise_the_error_of_attnzoo_losses() -> None:
    h, e = rand(40, 4).requires_grad_(), rand(300, 4, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(linear_loss(h, e, TARGET, "taylor"), e, create_graph=True)
    with pytest.raises(RuntimeError, match="attnzoo.losses supports first derivatives only"):
        grad.sum().backward()


def test_linear_topk_without_a_matrix_raises() -> None:
    with pytest.raises(TypeError, match="linear_weight must be a tensor, got NoneType"):
        attnzoo.linear_topk(INPUT, None, 3)  # type: ignore[arg-type]


def test_wrong_arguments_of_modules_raise() -> None:
    with pytest.raises(TypeError, match="dtype must be fp16.*complex64"):
        OutputLayer(8, 30, dtype=torch.complex64)
    with pytest.raises(TypeError, match="output_params must not have num_classes"):
        Transformer(30, 8, 2, 1, output_params={"num_classes": 3})
    model = Transformer(30, 8, 2, 1)
    with pytest.raises(AttributeError, match="set embed.weight"):
        model.output.weight = torch.nn.Parameter(rand(30, 8))


def test_fields_of_activations_are_checked() -> None:
    with pytest.raises(TypeError, match="integral must be a function or None, got 3"):
        Activation("bad", lambda s, shape: s, lambda s, phi, shape: s, integral=3)  # type: ignore
    with pytest.raises(TypeError, match="quadratic must be"):
        Activation("bad", lambda s, shape: s, lambda s, phi, shape: s, quadratic=(1.0,))  # type: ignore


def test_a_class_with_logit_minus_infinity_has_no_part_in_the_gradient_of_the_gain() -> None:
    s = torch.tensor(0.4, requires_grad=True)
    z, y = torch.tensor([[1.0, 2.0, -torch.inf]]), torch.tensor([0])
    # ssmax counts the class. Its gain with 3 classes is that of s' = s log 3 / log 2 with 2.
    (gradient,) = torch.autograd.grad(loss(z, y, "ssmax", s=s), s)
    (exact,) = torch.autograd.grad(loss(z[:, :2], y, "ssmax", s=s * math.log2(3)), s)
    assert float(gradient) == pytest.approx(float(exact), rel=1e-6)
    layer = OutputLayer(2, 3, "ssmax", s=0.4, learn=("s",))
    with torch.no_grad():
        layer.get_parameter("bias")[2] = -torch.inf
    (slope,) = torch.autograd.grad(layer.log_prob(torch.ones(1, 2))[0, 0], layer.s)
    assert slope.isfinite().all()


@pytest.mark.parametrize("visible", [7, 2])
@pytest.mark.parametrize("variant", ["softmax", "ssmax", "entmax", "sigmoid", "taylor"])
def test_rows_of_masked_classes_may_hold_nan(variant: str, visible: int) -> None:
    """For a mask that all tokens share. The rows may be the padding of a vocabulary."""
    h, y, mask = rand(4, 3).requires_grad_(), torch.arange(4) % visible, torch.arange(10) < visible
    params: dict[str, Any] = {"softcap": 5.0}
    if variant == "ssmax":
        params["s"] = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    results = []
    for count in (10, visible):
        e, b = rand(10, 3, seed=1)[:count], rand(10, seed=2)[:count]
        e[visible:], b[visible:] = torch.nan, torch.nan
        leaves = [h, *(x for x in params.values() if isinstance(x, Tensor)), e, b]
        value = linear_loss(
            h, e.requires_grad_(), y, variant, linear_bias=b.requires_grad_(),
            class_mask=mask if count == 10 else None, **params,
        )  # fmt: skip
        results.append([value, *torch.autograd.grad(value, leaves)])
    for with_mask, without in zip(*results, strict=True):
        part = with_mask if with_mask.shape == without.shape else with_mask[:visible]
        torch.testing.assert_close(part, without, rtol=1e-10, atol=1e-12)
    assert not any(bool(x[visible:].any()) for x in results[0][-2:])
