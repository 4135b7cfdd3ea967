"""Losses whose cost is at most V·d² + N·d², from moments of the classes."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.core.call import in_full_precision
from attnzoo.losses import quadratic
from attnzoo.losses.arguments import check_number
from attnzoo.losses.batch import bind_batch
from attnzoo.losses.rest import log1p_exp


def z_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    a: float,
    b: float,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Z-loss: logistic loss of the target's standard score among all classes.

    With logits z = input · linear_weightᵀ + linear_bias, their mean μ and standard deviation σ over
    the V classes, the loss of a token with target y is::

        L = log(1 + exp(a (b − (z_y − μ)/σ))) / a

    It does not change when all logits of a token are shifted, or scaled by a positive factor.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        a: a > 0, the sharpness. The paper tunes a and b for each task.
        b: The standard score at which the loss turns from linear to exponential.
        linear_bias: One number per class (V,), added to the logits; of the same dtype.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (*) with reduction "none".

    Raises:
        ValueError: An argument has a wrong value or shape.
        TypeError: An argument has a wrong type or dtype.

    Example:
        >>> import torch
        >>> from attnzoo.losses import z_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> z_loss(h, E, torch.arange(8), a=0.1, b=10.0).backward()

    References:
        De Brébisson & Vincent 2016, arXiv:1604.08859.

    Notes:
        With many tokens and classes (d (N + V) < N V), no logit but that of the target is computed.
        The mean and the Gram matrix of the classes give μ and σ. σ divides by V, not V − 1. If all
        logits of a token are equal up to rounding, its standard score is 0, with gradient 0. The
        loss ranks classes; it does not define probabilities.
    """
    sharpness, centre = check_number("a", a, above=True), check_number("b", b, least=None)
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        logits = quadratic.logits_of(batch, scaled=True)
        equal = logits.variance <= logits.rounding
        deviation = logits.variance.masked_fill(equal, 1.0).sqrt()
        score = (logits.centred / deviation).masked_fill(equal, 0.0)
        excess = sharpness * (centre - score)
        return batch.reduced(log1p_exp(excess) / sharpness)


def spherical_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    eps: float = 1e-3,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-probability of spherical softmax, whose probabilities are squares.

    With logits z = input · linear_weightᵀ + linear_bias, the loss of a token with target y is::

        L = −log p_y,  p_j = (z_j² + eps) / Σ_k (z_k² + eps)

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        eps: eps > 0 keeps the logarithm finite at z_y = 0. The paper only asks for a small number.
        linear_bias: One number per class (V,), added to the logits; of the same dtype.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (*) with reduction "none".

    Raises:
        ValueError: An argument has a wrong value or shape.
        TypeError: An argument has a wrong type or dtype.

    Example:
        >>> import torch
        >>> from attnzoo.losses import spherical_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> spherical_loss(h, E, torch.arange(8)).backward()

    References:
        De Brébisson & Vincent 2015, arXiv:1511.05042.

    Notes:
        With many tokens and classes, no logit but that of the target is computed, as for `z_loss`.
        Σ z² then has an error of about 1e-6 ‖h‖² Σ_k ‖E_k‖² in fp32, which is large if a hidden
        state is almost orthogonal to all rows. The sign of a logit does not matter, and a logit of
        0 has gradient 0.
    """
    constant = check_number("eps", eps, above=True)
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        logits = quadratic.logits_of(batch)
        total = quadratic.log_sum(logits, None, (constant, 0.0, 1.0), batch.classes)
        return batch.reduced(total - torch.log(logits.target.square() + constant))
