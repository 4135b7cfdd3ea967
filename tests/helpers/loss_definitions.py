"""Losses of output layers in fp64 from dense logits, written from their formulas.

Nothing here uses the library. Sparse losses solve for their threshold τ without a gradient. This
gives the right first derivatives, because a loss does not change with τ at the solution:
A = min over τ of τ + Σ φ(s − τ)^α / α − 1/α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "ssmax": {"s": 0.168, "b": 0.0},
    "log_n": {"train_length": 512},
    "sink": {"b": 0.0},
    "taylor": {"order": 2},
    "sparsemax": {},
    "entmax": {"alpha": 1.5},
    "asentmax": {"beta": math.log(2), "gamma": 0.0, "delta": 1.0},
    "sigmoid": {"bias": 0.0},
    "topk": {},
}


@dataclass(frozen=True)
class Rows:
    """Results for each of R rows of scores.

    A row has the loss m·potential − Σ_j a_j·aligned_j, plus m·Ω(a/m) if there is an ``alpha``.
    ``lse`` is without the sink.
    """

    scores: Tensor  # (R, V), after softcap and gain
    potential: Tensor  # (R,)
    aligned: Tensor  # (R, V)
    weights: Tensor  # (R, V)
    lse: Tensor | None = None
    threshold: Tensor | None = None
    power_sum: Tensor | None = None
    alpha: Tensor | None = None


@dataclass(frozen=True)
class Dense:
    """The loss and the tensors from which it was computed, with one row for each token."""

    loss: Tensor
    rows: Rows
    counted: Tensor  # (R,), False for ignored tokens
    visible: Tensor  # (R, V)
    shares: Tensor  # a, (R, V)


def of_rows(value: Any) -> Tensor:
    """Convert a parameter to an fp64 tensor of shape (1,) or (R,), for R tokens.

    ``value`` is a number, a tensor of shape () or (1,), or a tensor with the shape of the target.
    """
    return torch.as_tensor(value, dtype=torch.float64).reshape(-1)


def exponentials(s: Tensor, visible: Tensor, sink: Tensor | None = None) -> Rows:
    lse = s.masked_fill(~visible, float("-inf")).logsumexp(-1)
    potential = lse if sink is None else torch.logaddexp(lse, sink)
    weights = torch.where(visible, (s - potential[:, None]).exp(), 0.0)
    return Rows(s, potential, s, weights, lse=lse)


def largest(s: Tensor, visible: Tensor, target: Tensor, keep: int) -> Rows:
    """Cross entropy over the ``keep`` largest scores and the target; ties go to lower indices."""
    hidden = s.detach().masked_fill(~visible, float("-inf"))
    order = hidden.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    top = torch.zeros_like(visible).scatter(1, order, True) & visible
    both = top.scatter(1, target[:, None], True) & visible
    return exponentials(s, both)


def q_exp(x: Tensor, alpha: Tensor, power: Tensor | float = 1.0) -> Tensor:
    """[1 + (α−1)x]_+^{power/(α−1)}"""
    inside = (alpha - 1) * x > -1
    log = torch.log1p((alpha - 1) * torch.where(inside, x, 0.0)) / (alpha - 1)
    return torch.where(inside, (power * log).exp(), 0.0)


@torch.no_grad()
def threshold(s: Tensor, visible: Tensor, alpha: Tensor) -> Tensor:
    """τ with Σ φ(s − τ) = 1 over the visible classes, by bisection. s and α are (R, V), (·, 1)."""
    top = s.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    s = s - top
    low = torch.zeros_like(top)  # the sum is >= 1, because φ(0) = 1
    high = (1 - visible.sum(-1, keepdim=True).double() ** (1 - alpha)) / (alpha - 1)
    for _ in range(60):
        middle = (low + high) / 2
        above = (q_exp(s - middle, alpha) * visible).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return top + (low + high) / 2


def sparse(s: Tensor, visible: Tensor, alpha: Tensor) -> Rows:
    column = alpha[:, None]
    tau = threshold(s.detach(), visible, column.detach())
    x = s - tau
    power_sum = torch.where(visible, q_exp(x, column, column), 0.0).sum(-1)
    potential = tau[:, 0] - (1 - power_sum) / alpha
    weights = torch.where(visible, q_exp(x, column), 0.0)
    return Rows(s, potential, s, weights, None, tau[:, 0], power_sum, alpha)


def independent(s: Tensor, visible: Tensor, bias: Tensor) -> Rows:
    """One-vs-rest logistic loss."""
    x = s + bias[:, None]
    zero = torch.zeros_like(x)
    softplus = torch.logaddexp(torch.where(visible, x, float("-inf")), zero)
    return Rows(s, softplus.sum(-1), x, torch.where(visible, x.sigmoid(), 0.0))


def series(s: Tensor, visible: Tensor, order: int) -> Rows:
    phi = sum(s**p / math.factorial(p) for p in range(1, order + 1)) + torch.ones_like(s)
    total = torch.where(visible, phi, 0.0).sum(-1)
    return Rows(s, total.log(), phi.log(), torch.where(visible, phi / total[:, None], 0.0))


def gain_of(variant: str, log_n: Tensor, p: dict[str, Any]) -> Tensor:
    if variant == "ssmax":
        return of_rows(p["s"]) * log_n + of_rows(p["b"])
    if variant == "log_n":
        return log_n / math.log(p["train_length"])
    if variant == "asentmax":
        beta, gamma, delta = (of_rows(p[name]) for name in ("beta", "gamma", "delta"))
        many = log_n > 0
        return delta + torch.where(many, beta * torch.where(many, log_n, 1.0) ** gamma, 0.0)
    return torch.ones_like(log_n)


def rows_of(
    variant: str, z: Tensor, visible: Tensor, target: Tensor, params: dict[str, Any]
) -> Rows:
    p = {**DEFAULTS[variant], **params}
    log_n = visible.sum(-1).double().log()
    s = gain_of(variant, log_n, p)[:, None] * z
    if variant in ("softmax", "ssmax", "log_n"):
        return exponentials(s, visible)
    if variant == "sink":
        return exponentials(s, visible, of_rows(p["b"]))
    if variant == "topk":
        return largest(s, visible, target, p["top_k"])
    if variant == "sigmoid":
        return independent(s, visible, -log_n if p["bias"] is None else of_rows(p["bias"]))
    if variant == "taylor":
        return series(s, visible, p["order"])
    alpha = of_rows({"sparsemax": 2.0, "asentmax": 1.5}.get(variant) or p["alpha"])
    return sparse(s, visible, alpha.expand(log_n.shape))


def dense(
    logits: Tensor,
    target: Tensor,
    variant: str,
    *,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    **params: Any,
) -> Dense:
    classes = logits.shape[-1]
    z = logits.double().reshape(-1, classes)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    counted = target.reshape(-1) != ignore_index
    y = torch.where(counted, target.reshape(-1), 0)
    visible = torch.ones_like(z, dtype=torch.bool)
    if class_mask is not None:
        visible = class_mask.expand(*target.shape, classes).reshape(-1, classes)
    visible = visible | ~counted[:, None]  # so that the loss of ignored tokens is finite
    rows = rows_of(variant, z, visible, y, params)

    shares = torch.zeros_like(z).scatter(1, y[:, None], 1 - label_smoothing)
    shares = shares + label_smoothing * visible.double() / visible.sum(-1, keepdim=True)
    if weight is not None:
        shares = shares * weight.double()
    total = shares.sum(-1)
    loss = total * rows.potential - (shares * torch.where(visible, rows.aligned, 0.0)).sum(-1)
    if rows.alpha is not None:
        p = shares / torch.where(total > 0, total, 1.0)[:, None]
        alpha = rows.alpha
        loss = loss + total * ((p ** alpha[:, None]).sum(-1) - 1) / (alpha * (alpha - 1))
    if lse_penalty:
        assert rows.lse is not None
        loss = loss + lse_penalty * rows.lse**2
    loss = torch.where(counted, loss, 0.0)
    if reduction == "none":
        loss = loss.reshape(target.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            each = torch.ones_like(total) if weight is None else weight.double()[y]
            loss = loss / torch.where(counted, each, 0.0).sum()
    return Dense(loss, rows, counted, visible, shares)


def dense_loss(logits: Tensor, target: Tensor, variant: str = "softmax", **options: Any) -> Tensor:
    return dense(logits, target, variant, **options).loss


def dense_linear(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    variant: str = "softmax",
    linear_bias: Tensor | None = None,
    **options: Any,
) -> Dense:
    logits = input.double() @ linear_weight.double().mT
    if linear_bias is not None:
        logits = logits + linear_bias.double()
    return dense(logits, target, variant, **options)
