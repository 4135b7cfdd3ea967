"""The losses of `attnzoo.losses` other than `linear_loss`, in fp64, written from their formulas.

Each function takes hidden states (N, d), a matrix (V, d), a bias (V,) or None and targets (N,), and
returns the losses (N,). Nothing here uses the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Definition = Callable[..., Tensor]


def logits(h: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    z = h @ matrix.mT
    return z if bias is None else z + bias


def cross_entropy(z: Tensor, target: Tensor) -> Tensor:
    return z.logsumexp(-1) - z.gather(1, target[:, None])[:, 0]


def with_target(z: Tensor, target: Tensor, score: Tensor) -> Tensor:
    """Scores z (N, V) in which those of the targets are replaced."""
    return z.scatter(1, target[:, None], score[:, None])


def margin(
    h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, kind: str, scale: float,
    margin: float,
) -> Tensor:  # fmt: skip
    unit_h, unit_e = (x / x.norm(dim=-1, keepdim=True) for x in (h, matrix))
    cosine = unit_h @ unit_e.mT
    of_target = cosine.gather(1, target[:, None])[:, 0]
    if kind == "arc":
        angle = of_target.acos()
        inside = (angle + margin).cos()
        with_margin = torch.where(
            angle + margin <= math.pi, inside, of_target - margin * math.sin(margin)
        )
    else:
        with_margin = of_target - margin
    return cross_entropy(with_target(scale * cosine, target, scale * with_margin), target)


def noisy(
    h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, alpha: float, seed: int
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    xi = torch.randn(len(h), generator=generator, dtype=torch.float64)
    z, target_rows = logits(h, matrix, bias), matrix[target]
    norms = target_rows.norm(dim=-1) * h.norm(dim=-1)
    cosine = (target_rows * h).sum(-1) / norms
    lower = alpha * norms * (1 - cosine) * xi.abs()
    return cross_entropy(with_target(z, target, z.gather(1, target[:, None])[:, 0] - lower), target)


def masked(
    h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, class_mask: Tensor, value: float
) -> Tensor:
    z = logits(h, matrix, bias)
    return cross_entropy(torch.where(class_mask, z, value), target)


def z_loss(
    h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, a: float, b: float
) -> Tensor:
    z = logits(h, matrix, bias)
    score = (z - z.mean(-1, keepdim=True)) / z.std(-1, correction=0, keepdim=True)
    target_score = score.gather(1, target[:, None])[:, 0]
    return torch.logaddexp(a * (b - target_score), torch.zeros_like(target_score)) / a


def spherical(h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, eps: float) -> Tensor:
    squares = logits(h, matrix, bias) ** 2 + eps
    return -(squares / squares.sum(-1, keepdim=True)).gather(1, target[:, None])[:, 0].log()


def perturb_max(
    h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, std: float
) -> Tensor:
    """The trapezoidal rule with steps of 0.01. Its error is below 1e-14 for logits up to 10 std."""
    z = logits(h, matrix, bias)
    lead = (z.gather(1, target[:, None]) - z) / std
    is_other = torch.ones_like(z, dtype=torch.bool).scatter(1, target[:, None], False)
    losses = []
    for row, others in zip(lead, is_other):
        d = row[others]
        last = 12 + float((-d.detach()).clamp(min=0).sum())
        t = torch.arange(-12, last, 0.01, dtype=torch.float64)
        terms = -(t**2) / 2 + torch.special.log_ndtr(t[:, None] + d).sum(-1)
        losses.append(0.5 * math.log(2 * math.pi) - terms.logsumexp(0) - math.log(0.01))
    return torch.stack(losses)


def exact(h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, std: float) -> Tensor:
    return 1 - (-perturb_max(h, matrix, bias, target, std)).exp()


def emo(h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    z = logits(h, matrix, bias)
    q, unit = z.softmax(-1), (matrix / matrix.norm(dim=-1, keepdim=True)).detach()
    true = torch.nn.functional.one_hot(target, len(matrix)).double()
    without = q - (q * true).detach()
    distance = 1 - ((true @ unit) * (without @ unit)).sum(-1)
    mle = cross_entropy(z, target)
    return 0.5 * (mle + (mle / distance).detach() * distance)


@dataclass(frozen=True)
class Entry:
    """A function of `attnzoo.losses`, its definition and the arguments of both.

    with_bias: whether the function takes ``linear_bias``.
    seed: of the noise that function and definition draw; None for functions that draw none.
    """

    function: str
    definition: Definition
    options: dict[str, Any] = field(default_factory=dict)
    with_bias: bool = True
    seed: int | None = None


TASK = torch.arange(11) % 3 != 1
ENTRIES = {
    "am": Entry("margin_loss", margin, {"kind": "am", "scale": 30.0, "margin": 0.35}, False),
    "arc": Entry("margin_loss", margin, {"kind": "arc", "scale": 8.0, "margin": 0.5}, False),
    "arc without a margin": Entry(
        "margin_loss", margin, {"kind": "arc", "scale": 3.0, "margin": 0.0}, False
    ),
    "noisy": Entry("noisy_loss", noisy, {"alpha": 0.3}, seed=5),
    "masked": Entry("masked_loss", masked, {"class_mask": TASK, "value": -math.inf}),
    "masked with a value": Entry("masked_loss", masked, {"class_mask": TASK, "value": -1.5}),
    "z": Entry("z_loss", z_loss, {"a": 0.7, "b": 1.3}),
    "spherical": Entry("spherical_loss", spherical, {"eps": 0.1}),
    "perturb_max": Entry("perturb_max_loss", perturb_max, {"std": 1.5}),
    "exact": Entry("exact_loss", exact, {"std": 0.8}),
    "emo": Entry("emo_loss", emo),
}
