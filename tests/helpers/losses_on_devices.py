"""Compares losses and their gradients in 16 bits and fp32 with fp64, on any device.

On a GPU, 16-bit products run on tensor cores: scores are fp32 sums, but the gradient of the scores
is rounded to 16 bits before it is multiplied with the hidden states and the classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.losses import linear_loss
from helpers.cases import rand

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "smoothing": ("softmax", {"label_smoothing": 0.1, "softcap": 20.0}),
    "sparsemax": ("sparsemax", {}),
    "entmax": ("entmax", {"alpha": 1.5}),
    "sigmoid": ("sigmoid", {}),
    "taylor": ("taylor", {}),
}
NAMES = ("input", "weight", "bias")


def losses_of(
    variant: str, options: dict[str, Any], tensors: list[Tensor], target: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    h, e, b = (x.detach().clone().requires_grad_() for x in tensors)
    loss = linear_loss(h, e, target, variant, linear_bias=b, reduction="sum", **options)
    return loss.detach(), dict(zip(NAMES, torch.autograd.grad(loss, (h, e, b))))


def check_losses(case: str, dtype: torch.dtype, device: str) -> None:
    """Check that the loss and its gradients are within their error bounds."""
    variant, options = CASES[case]
    target = torch.arange(70) * 7 % 333
    target[::9] = -100
    tensors = [rand(70, 24).to(dtype), rand(333, 24, seed=1).to(dtype), rand(333, seed=2).to(dtype)]
    exact, by_name = losses_of(variant, options, [x.double() for x in tensors], target)
    moved = [x.to(device) for x in tensors]
    loss, gradients = losses_of(variant, options, moved, target.to(device))
    # Scores are sums of 24 products, with errors of 25 units of |h|·|e| in fp32.
    h, e, b = (x.double() for x in tensors)
    score = 25 * torch.finfo(torch.float32).eps * float((h.abs() @ e.abs().T + b.abs()).max())
    assert abs(float(loss) - float(exact)) <= 70 * (2 * score + 1e-6 * abs(float(exact)))
    # The gradient of a score lies in [−2, 2]. The error of the scores changes it by at most 4 times
    # this error. For 16-bit inputs, the gradient of a score and the result may be rounded to 16
    # bits. The bound allows 4 · eps of the dtype for each rounding.
    unit = torch.finfo(dtype).eps
    sizes = {"input": e.abs().sum(0), "weight": h.abs().sum(0), "bias": torch.tensor(70.0)}
    for name in NAMES:
        bound = (4 * score + 4 * unit) * sizes[name] + 4 * unit * by_name[name].abs()
        assert bool(((gradients[name].cpu().double() - by_name[name]).abs() <= bound).all()), name
