"""Losses that change the score of the target: margins between angles, and noise."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import check_bool, shown
from attnzoo.losses.arguments import check_number
from attnzoo.losses.batch import Batch, bind_batch
from attnzoo.losses.operators import Setting, batch_loss
from attnzoo.losses.targets import hidden_and_target, hidden_states, unit_rows

# Scale and margin of each kind, as in its paper.
DEFAULTS = {"am": (30.0, 0.35), "cos": (64.0, 0.35), "arc": (64.0, 0.5)}


def margin_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    kind: str = "arc",
    scale: float | None = None,
    margin: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of scaled cosines, with a margin for the target.

    Let θ_j be the angle between a hidden state and row j of ``linear_weight``, s the scale, m the
    margin and y the target. The loss of a token is::

        L = log(exp(t) + Σ_{j≠y} exp(s cos θ_j)) − t

        kind "am", "cos"    t = s (cos θ_y − m)
        kind "arc"          t = s cos(θ_y + m) if θ_y + m <= π, else s (cos θ_y − m sin m)

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        kind: "am" (scale 30, margin 0.35), "cos" (64, 0.35) or "arc" (64, 0.5). "am" and "cos" have
            one formula and differ in their defaults.
        scale: s > 0; None for the default of the kind.
        margin: m >= 0, for "arc" an angle in radians of at most π; None for the default.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (*) with reduction "none".

    Raises:
        ValueError: An argument has a wrong value or shape.
        TypeError: An argument has a wrong type or dtype.

    Example:
        >>> import torch
        >>> from attnzoo.losses import margin_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> loss = margin_loss(h, E, torch.arange(8), kind="arc")
        >>> loss.backward()

    References:
        AM-Softmax: Wang et al. 2018, arXiv:1801.05599, Eq. 6. CosFace: Wang et al. 2018,
        arXiv:1801.09414, Eq. 4. ArcFace: Deng et al. 2019, arXiv:1801.07698, Eq. 3; the rule for
        θ_y + m > π is that of its code.

    Notes:
        Memory is linear in tokens + classes. Rows are normalized in the dtype of scores, so fp32
        copies of ``input`` and ``linear_weight`` are made. A row of zeros is at a right angle to
        all others. sin θ is computed as ‖u − v‖·‖u + v‖/2 from unit vectors u and v. Unlike
        √(1 − cos²θ), this is accurate for small angles and has finite gradients.
    """
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(f"kind must be one of {', '.join(DEFAULTS)}, got {shown(kind)}")
    usual = DEFAULTS[kind]
    s = usual[0] if scale is None else check_number("scale", scale, above=True)
    most = math.pi if kind == "arc" else None
    m = usual[1] if margin is None else check_number("margin", margin, most=most)
    batch = bind_batch(input, linear_weight, None, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        assert batch.weight is not None
        h = hidden_states(batch)
        batch = batch._replace(input=unit_rows(h), weight=unit_rows(batch.weight.to(h.dtype)))
        u, v = hidden_and_target(batch)
        cosine = torch.linalg.vecdot(u, v)
        if kind == "arc":
            moved = cosine * math.cos(m) - _sine(u, v) * math.sin(m)
            score = torch.where(cosine >= -math.cos(m), moved, cosine - m * math.sin(m))
        else:
            score = cosine - m
        return _rest_loss(batch._replace(input=s * u), s * score)


def noisy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    alpha: float,
    linear_bias: Tensor | None = None,
    training: bool = True,
    generator: torch.Generator | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy whose target score is lowered by annealed noise.

    With logits z = input · linear_weightᵀ + linear_bias, hidden state h, target row E_y, the angle
    θ between them and ξ ~ N(0, 1), drawn once per token, the loss of a token is::

        L = log(exp(t) + Σ_{j≠y} exp(z_j)) − t,  t = z_y − α ‖E_y‖ ‖h‖ (1 − cos θ) |ξ|

    The noise vanishes as the hidden state turns to its target, so a saturated softmax does not stop
    learning early.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        alpha: α >= 0, the size of the noise.
        linear_bias: One number per class (V,), added to the logits; of the same dtype.
        training: If False, no noise is drawn, and the loss is cross entropy.
        generator: Source of the noise, on the device of ``input``; None for torch's default.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (*) with reduction "none".

    Raises:
        ValueError: An argument has a wrong value or shape.
        TypeError: An argument has a wrong type or dtype.

    Example:
        >>> import torch
        >>> from attnzoo.losses import noisy_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> noisy_loss(h, E, torch.arange(8), alpha=0.1).backward()

    References:
        Noisy Softmax: Chen et al. 2017, arXiv:1708.03769.

    Notes:
        Memory is linear in tokens + classes.
    """
    size = check_number("alpha", alpha)
    check_bool("training", training)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {shown(generator)}")
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        h, rows = hidden_and_target(batch)
        score = torch.linalg.vecdot(h, rows)
        if training:
            d = batch.input.shape[1]  # h and rows have one more column with a bias
            h, rows = h[:, :d], rows[:, :d]
            norms = torch.linalg.vector_norm(h, dim=-1) * torch.linalg.vector_norm(rows, dim=-1)
            noise = torch.randn(score.shape, generator=generator, dtype=h.dtype, device=h.device)
            score = score - size * noise.abs() * (norms - torch.linalg.vecdot(h, rows))
        return _rest_loss(batch, score)


def _rest_loss(batch: Batch, score: Tensor) -> Tensor:
    """Cross entropy with these scores (N,) of the targets; see `rest`."""
    return batch_loss(batch, Setting("rest", batch.ignore_index), Vectors(sink=score))


def _sine(u: Tensor, v: Tensor) -> Tensor:
    """The sine of the angle between unit rows (N, d), 1 if a row is 0."""
    norm = partial(torch.linalg.vector_norm, dim=-1)
    zero = (u == 0).all(-1) | (v == 0).all(-1)
    return (0.5 * norm(u - v) * norm(u + v)).masked_fill(zero, 1.0)
