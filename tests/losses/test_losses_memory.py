"""Losses use little memory, give the same results twice and read no uninitialized memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnzoo import losses
from attnzoo.losses import linear_loss
from helpers.cases import params_of
from helpers.loss_cases import LOSSES, QUICK, some, targets, tensors
from helpers.memory import peak_of


def test_peak_of_measures_memory() -> None:
    x, e, _ = (t.detach().float() for t in tensors(512, 1024, 8))
    assert 2**21 <= peak_of(lambda: (x @ e.mT).logsumexp(-1)) < 3 * 2**21 + 2**16


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", QUICK)
def test_memory_is_at_most_an_eighth_of_the_logits(variant: str, reduction: str) -> None:
    """The gradients are not counted."""
    tokens, classes = 1024, 32000
    x, e, b = (t.detach().float().requires_grad_() for t in tensors(tokens, classes, 8))
    y = targets(tokens, classes)
    params = params_of(variant)

    def step() -> None:
        options: dict[str, Any] = {"linear_bias": b, "reduction": reduction, **params}
        linear_loss(x, e, y, variant, **options).sum().backward()

    gradients = 4 * (x.numel() + e.numel() + b.numel())
    assert peak_of(step) - gradients <= tokens * classes * 4 / 8


EVERY = torch.ones(32000, dtype=torch.bool)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        pytest.param("margin_loss", {}, marks=pytest.mark.slow),
        pytest.param("noisy_loss", {"alpha": 0.1}, marks=pytest.mark.slow),
        pytest.param("masked_loss", {"class_mask": EVERY, "value": 0.0}, marks=pytest.mark.slow),
        ("z_loss", {"a": 0.1, "b": 10.0}),
        pytest.param("spherical_loss", {}, marks=pytest.mark.slow),
        pytest.param("emo_loss", {}, marks=pytest.mark.slow),
    ],
)
def test_memory_of_other_losses_is_at_most_an_eighth_of_the_logits(
    function: str, options: dict[str, Any]
) -> None:
    tokens, classes = 2048, 32000
    x, e, _ = (t.detach().float().requires_grad_() for t in tensors(tokens, classes, 8))
    y = targets(tokens, classes)
    gradients = 4 * (x.numel() + e.numel())
    used = peak_of(lambda: getattr(losses, function)(x, e, y, **options).backward())
    assert used - gradients <= tokens * classes * 4 / 8


def test_quadrature_keeps_one_node_at_a_time() -> None:
    """There are about fifty nodes. The logits of one chunk and a few blocks of it are kept."""
    x, e, _ = (t.detach().float().requires_grad_() for t in tensors(16, 2**14, 8))
    y = targets(16, 2**14)
    used = peak_of(lambda: losses.perturb_max_loss(x, e, y).backward())
    assert used <= 8 * 4 * 16 * 2**14


@pytest.mark.parametrize("variant", some(LOSSES))
def test_results_repeat(variant: str) -> None:
    x, e, b = tensors(300, 200)
    y, params = targets(300, 200), params_of(variant)
    for reduction in ("mean", "none"):
        results = []
        for _ in range(2):
            value = linear_loss(x, e, y, variant, linear_bias=b, reduction=reduction, **params)
            results.append((value.detach(), *torch.autograd.grad(value.sum(), (x, e, b))))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("variant", some(LOSSES))
def test_uninitialized_memory_is_not_read(variant: str, poisoned_memory: None) -> None:
    x, e, b = tensors(50, 40)
    loss = linear_loss(x, e, targets(50, 40), variant, linear_bias=b, **params_of(variant))
    gradients = torch.autograd.grad(loss, (x, e, b))
    assert all(bool(x.isfinite().all()) for x in (loss, *gradients))
