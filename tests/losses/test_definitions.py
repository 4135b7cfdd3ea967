"""The fp64 definitions in `helpers.loss_definitions` are right.

They agree with torch, with the package `entmax` and with finite differences.
"""

from __future__ import annotations

import math
from typing import Any

import entmax
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from helpers.cases import rand
from helpers.loss_definitions import dense, dense_loss

TARGET = torch.tensor([0, 3, -100, 10, 6, 3])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_softmax_is_cross_entropy(reduction: str, smoothing: float) -> None:
    z = rand(6, 11).requires_grad_()
    options: dict[str, Any] = {
        "weight": rand(11, seed=1).abs(), "label_smoothing": smoothing, "reduction": reduction
    }  # fmt: skip
    actual, want = dense_loss(z, TARGET, **options), cross_entropy(z, TARGET, **options)
    torch.testing.assert_close(actual, want, rtol=1e-13, atol=1e-13)
    gradients = (torch.autograd.grad(loss.sum(), z)[0] for loss in (actual, want))
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.8, 2.0])
def test_entmax_is_the_loss_of_the_entmax_package(alpha: float) -> None:
    z = (2 * rand(6, 11)).requires_grad_()
    actual = dense_loss(z, TARGET, "entmax", alpha=alpha, reduction="none")
    want = entmax.entmax_bisect_loss(z, TARGET.clamp(min=0), alpha, n_iter=60)
    want = torch.where(TARGET >= 0, want, 0.0)
    torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(loss.sum(), z)[0] for loss in (actual, want))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_sigmoid_is_binary_cross_entropy() -> None:
    z, y = rand(6, 11), TARGET.clamp(min=0)
    want = binary_cross_entropy_with_logits(z - 0.4, one_hot(y, 11).double(), reduction="none")
    actual = dense_loss(z, y, "sigmoid", bias=-0.4, reduction="none")
    torch.testing.assert_close(actual, want.sum(1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("variant", ["taylor", "topk", "sink"])
def test_loss_is_minus_the_logarithm_of_the_weight(variant: str) -> None:
    z, y = rand(6, 11), TARGET.clamp(min=0)
    params = {"topk": {"top_k": 11}, "sink": {"b": 0.7}}.get(variant, {})
    e = 1 + z + z**2 / 2 if variant == "taylor" else z.exp()
    total = e.sum(-1, keepdim=True) + (math.exp(0.7) if variant == "sink" else 0)
    want = -(e / total).gather(1, y[:, None])[:, 0].log()
    actual = dense_loss(z, y, variant, reduction="none", **params)
    torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12)


def test_topk_counts_the_kept_classes_and_the_target() -> None:
    z = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]], dtype=torch.float64)
    for y, classes in ((0, [0, 1, 2]), (1, [1, 2]), (4, [1, 2, 4])):
        result = dense(z, torch.tensor([y]), "topk", top_k=2)
        assert float(result.loss) == pytest.approx(float(z[0, classes].logsumexp(0) - z[0, y]))
        assert float(result.rows.lse) == pytest.approx(float(z[0, classes].logsumexp(0)))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.9])
def test_derivatives_of_entmax_are_right_without_a_gradient_of_the_threshold(
    alpha: float, smoothing: float
) -> None:
    z, a = rand(4, 6).requires_grad_(), torch.tensor(alpha).double().requires_grad_()
    y, weight = torch.tensor([0, 5, 2, 2]), rand(6, seed=1).abs()
    assert torch.autograd.gradcheck(
        lambda z, a: dense_loss(
            z, y, "entmax", alpha=a, label_smoothing=smoothing, weight=weight, reduction="none"
        ),
        (z, a),
    )


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_sparse_losses_are_not_negative_and_vanish_for_a_clear_target(alpha: float) -> None:
    z = 3 * rand(200, 12)
    y = torch.arange(200) % 12
    for smoothing in (0.0, 0.2, 1.0):
        options: dict[str, Any] = {"alpha": alpha, "label_smoothing": smoothing}
        assert float(dense_loss(z, y, "entmax", reduction="none", **options).min()) > -1e-12
    clear = 20 * torch.nn.functional.one_hot(y, 12).double()
    assert float(dense_loss(clear, y, "entmax", alpha=alpha)) == pytest.approx(0, abs=1e-14)
