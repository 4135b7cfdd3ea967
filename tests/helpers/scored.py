"""The weights that a variant gives to chosen scores, and comparisons of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnzoo
from helpers.cases import rand


def weights_of(scores: Tensor, variant: str, backend: str = "eager", **params: Any) -> Tensor:
    """Return weights (R, n) of scores (R, n). Queries are the scores, and keys are unit vectors."""
    n = scores.shape[-1]
    eye = torch.eye(n, dtype=scores.dtype)[None, None]
    return attnzoo.attention(
        scores[None, None], eye, eye, variant, scale=1.0, backend=backend, **params
    )[0, 0]


def grads(function: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Return the value of function and its gradients for a fixed random upstream gradient."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
    out = function(*leaves)
    return (out, *torch.autograd.grad(out, leaves, rand(*out.shape, seed=77, dtype=out.dtype)))


def agree(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float = 1e-9) -> None:
    for have, want in zip(actual, expected, strict=True):
        assert torch.allclose(have, want, rtol=0, atol=atol), float((have - want).abs().max())
