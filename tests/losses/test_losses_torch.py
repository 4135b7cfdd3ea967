"""Losses agree with those of torch and of the `entmax` package: values and gradients."""

from __future__ import annotations

from typing import Any

import entmax
import pytest
import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    linear,
    linear_cross_entropy,
    one_hot,
)

from attnzoo.losses import linear_loss, loss, masked_loss
from helpers.cases import rand
from helpers.crossed import crossed

REDUCTIONS = ("mean", "sum", "none")
CLASSES, FEATURES = 17, 6
TARGETS = {
    "some ignored": torch.tensor([3, -100, 0, 16, 16, -100, 5, 9, 9]),
    "none ignored": torch.arange(9),
    "all ignored": torch.full((9,), -100),
    "one token": torch.tensor([4]),
    "one ignored token": torch.tensor([-100]),
    "empty": torch.zeros(0, dtype=torch.long),
    "a scalar": torch.tensor(4),
    "an ignored scalar": torch.tensor(-100),
}


def leaves(target: Tensor, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((max(target.numel(), 1), FEATURES), (CLASSES, FEATURES), (CLASSES,))
    tensors = [rand(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    tensors[0] = tensors[0][: target.numel()].reshape(*target.shape, FEATURES)
    return [x.clone().requires_grad_() for x in tensors]


def equal(actual: Tensor, want: Tensor, inputs: list[Tensor], tolerance: float = 1e-12) -> None:
    assert actual.shape == want.shape
    assert actual.dtype == want.dtype
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(actual, want, **close)
    upstream = torch.linspace(0.5, 2, want.numel(), dtype=want.dtype).reshape(want.shape)
    gradients = (
        torch.autograd.grad(x, inputs, upstream, retain_graph=True) for x in (actual, want)
    )
    for have, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(have, exact, **close)


@pytest.mark.parametrize(
    ("target", "weighted", "smoothing", "reduction"),
    crossed(TARGETS, [True, False], [0.2, 0.0, 1.0], REDUCTIONS),
)
def test_softmax_is_cross_entropy(
    target: str, weighted: bool, smoothing: float, reduction: str
) -> None:
    y = TARGETS[target]
    x, e, b = leaves(y)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = rand(CLASSES, seed=7).abs()
    want = cross_entropy(linear(x, e, b), y, **options)
    equal(linear_loss(x, e, y, linear_bias=b, **options), want, [x, e, b])
    z = linear(x, e, b)
    equal(loss(z, y, **options), want, [x, e, b])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_softmax_is_linear_cross_entropy(reduction: str, dtype: torch.dtype) -> None:
    y = TARGETS["some ignored"]
    x, e, b = leaves(y, dtype)
    actual = linear_loss(x, e, y, linear_bias=b, reduction=reduction, label_smoothing=0.1)
    want = linear_cross_entropy(
        x, e, y, linear_bias=b, reduction=reduction, label_smoothing=0.1, ignore_index=-100
    )
    equal(actual, want, [x, e, b], 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("ignore_index", [3, 16, -1, 400])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignore_index_may_be_any_number(reduction: str, ignore_index: int) -> None:
    y = torch.tensor([3, 3, 0, 16, 5, 9, 9])
    if not 0 <= ignore_index < CLASSES:
        y[2] = ignore_index
    x, e, b = leaves(y)
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore_index}
    want = cross_entropy(linear(x, e, b), y, **options)
    equal(linear_loss(x, e, y, linear_bias=b, **options), want, [x, e, b])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 1, 5), (2, 0), (1, 1)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], reduction: str) -> None:
    count = torch.Size(shape).numel()
    y = (torch.arange(count) % CLASSES).reshape(shape)
    x, e, b = leaves(y)
    z = linear(x, e, b)
    want = cross_entropy(z.reshape(-1, CLASSES), y.flatten(), reduction=reduction)
    want = want.reshape(shape) if reduction == "none" else want
    equal(linear_loss(x, e, y, linear_bias=b, reduction=reduction), want, [x, e, b])


def test_weights_of_zero_give_nan_for_the_mean() -> None:
    y = torch.tensor([2, 2])
    x, e, b = leaves(y)
    weight = (torch.arange(CLASSES) != 2).double()
    for reduction in REDUCTIONS:
        want = cross_entropy(linear(x, e, b), y, weight=weight, reduction=reduction)
        actual = linear_loss(x, e, y, linear_bias=b, weight=weight, reduction=reduction)
        torch.testing.assert_close(actual, want, equal_nan=True)
    options = {"linear_bias": b, "weight": weight}
    for more in ({"label_smoothing": 0.1}, {"lse_penalty": 0.1}, {"variant": "taylor"}):
        assert linear_loss(x, e, y, **options, **more).isnan()


@pytest.mark.parametrize("variant", ["entmax", "sparsemax", "sigmoid", "taylor", "sink", "ssmax"])
@pytest.mark.parametrize("target", ["empty", "all ignored", "an ignored scalar"])
def test_without_counted_tokens_losses_equal_cross_entropy(variant: str, target: str) -> None:
    y = TARGETS[target]
    x, e, b = leaves(y)
    of_tokens = torch.ones(*y.shape, CLASSES, dtype=torch.bool)
    for reduction in REDUCTIONS:
        want = cross_entropy(linear(x, e, b), y, reduction=reduction)
        for mask in (None, torch.ones(CLASSES, dtype=torch.bool), of_tokens):
            options: dict[str, Any] = {"class_mask": mask, "reduction": reduction}
            actual = linear_loss(x, e, y, variant, linear_bias=b, **options)
            equal(actual, want, [x, e, b])
            equal(loss(linear(x, e, b), y, variant, **options), want, [x, e, b])
        actual = masked_loss(x, e, y, of_tokens, linear_bias=b, reduction=reduction)
        equal(actual, want, [x, e, b])


@pytest.mark.parametrize(
    "variant", ["softmax", "sink", "entmax", "sparsemax", "asentmax", "sigmoid"]
)
def test_with_weights_of_zero_and_smoothing_losses_equal_cross_entropy(variant: str) -> None:
    """The third token sees a class whose weight is not 0."""
    y = torch.tensor([2, 2, 2])
    x, e, b = leaves(y)
    visible = torch.arange(CLASSES).expand(3, CLASSES) != torch.tensor([[4], [4], [-1]])
    weight = (torch.arange(CLASSES) == 4).double()
    for reduction in REDUCTIONS:
        options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction}
        want = cross_entropy(linear(x, e, b)[:2], y[:2], weight=0 * weight, **options)
        options |= {"linear_bias": b, "weight": weight}
        actual = linear_loss(x[:2], e, y[:2], variant, class_mask=visible[:2], **options)
        equal(actual, want, [x, e, b])
    actual = linear_loss(x, e, y, variant, class_mask=visible, **options)
    assert actual[:2].tolist() == [0, 0]
    assert bool(actual[2] > 0)
    assert bool(torch.autograd.grad(actual.sum(), x)[0].isfinite().all())


# ---- the `entmax` package ---------------------------------------------------------------------

PACKAGE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sparsemax": (entmax.SparsemaxLoss, "sparsemax", {}),
    "sparsemax by bisection": (entmax.SparsemaxBisectLoss, "entmax", {"alpha": 2.0}),
    "entmax15": (entmax.Entmax15Loss, "entmax", {"alpha": 1.5}),
    "entmax by bisection": (entmax.EntmaxBisectLoss, "entmax", {"alpha": 1.75}),
    "entmax near softmax": (entmax.EntmaxBisectLoss, "entmax", {"alpha": 1.05}),
}


@pytest.mark.parametrize("ignore_index", [-100, 5])
@pytest.mark.parametrize("reduction", ["elementwise_mean", "sum", "none"])
@pytest.mark.parametrize("name", PACKAGE)
def test_sparse_losses_are_those_of_the_entmax_package(
    name: str, reduction: str, ignore_index: int
) -> None:
    make, variant, params = PACKAGE[name]
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    if make is entmax.EntmaxBisectLoss:
        options["alpha"] = params["alpha"]
    if "Bisect" in make.__name__:
        options["n_iter"] = 60
    y = torch.tensor([3, 5, 0, 16, 16, 5, 2, 9, 9])
    x, e, b = leaves(y)
    z = linear(x, e, b)
    want = make(**options)(z, y)
    arguments: dict[str, Any] = {
        "reduction": "mean" if reduction == "elementwise_mean" else reduction,
        "ignore_index": ignore_index,
        "linear_bias": b,
    }
    equal(linear_loss(x, e, y, variant, **arguments, **params), want, [x, e, b], 1e-10)


# ---- binary cross entropy -----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, -0.7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sigmoid_is_binary_cross_entropy_summed_over_classes(
    reduction: str, bias: float | None
) -> None:
    y = TARGETS["none ignored"]
    x, e, b = leaves(y)
    z = linear(x, e, b) + (bias or 0.0)
    want = binary_cross_entropy_with_logits(z, one_hot(y, CLASSES).double(), reduction="none")
    want = want.sum(-1)
    want = {"none": want, "sum": want.sum(), "mean": want.mean()}[reduction]
    params = {} if bias is None else {"bias": bias}
    actual = linear_loss(x, e, y, "sigmoid", linear_bias=b, reduction=reduction, **params)
    equal(actual, want, [x, e, b])


def test_sigmoid_of_clear_logits_does_not_overflow_or_cancel() -> None:
    z = torch.tensor([[200.0, -200.0, -30.0]]).requires_grad_()
    actual = loss(z, torch.tensor([0]), "sigmoid")
    want = binary_cross_entropy_with_logits(z, torch.tensor([[1.0, 0.0, 0.0]]), reduction="sum")
    # One unit in the last place of the logits is 1.5e-5.
    assert actual.item() == pytest.approx(want.item(), abs=2e-5)
    (gradient,) = torch.autograd.grad(actual, z)
    assert float(gradient[0, 2]) == pytest.approx(9.36e-14, rel=1e-2)
