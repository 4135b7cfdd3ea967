"""Losses of a classifier that takes the largest of noisy scores; see `perturbed`."""

from __future__ import annotations

from torch import Tensor

from attnzoo.core.call import in_full_precision
from attnzoo.losses.arguments import check_number
from attnzoo.losses.batch import bind_batch
from attnzoo.losses.operators import Setting, batch_loss


def perturb_max_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    std: float = 1.0,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """−log of the probability that the target has the largest score after normal noise is added.

    With logits z = input · linear_weightᵀ + linear_bias and independent noise ε_k ~ N(0, std²), the
    loss of a token with target y is::

        L = −log P(z_y + ε_y > z_k + ε_k for all k ≠ y)
          = −log ∫ φ(t) Π_{k≠y} Φ(t + (z_y − z_k)/std) dt

    φ and Φ are the density and the distribution function of N(0, 1). With Gumbel noise, this would
    be cross entropy of z/std.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        std: Standard deviation of the noise, > 0.
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
        >>> from attnzoo.losses import perturb_max_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> perturb_max_loss(h, E, torch.arange(8), std=2.0).backward()

    References:
        Hazan & Jaakkola 2012, arXiv:1206.6410, for the model with Gumbel noise.

    Notes:
        No noise is drawn. The integral is computed by quadrature, and so is its gradient. In fp32
        the loss has an absolute error of about 1e-7 plus rounding, so a loss below 1e-6 has no
        correct digit. On a CPU a token costs 10 to 100 times as much as with cross entropy, and
        more if d is below 128. Memory is linear in tokens + classes.
    """
    return _loss(
        "perturbed", input, linear_weight, target, linear_bias, std, ignore_index, reduction
    )


def exact_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    std: float = 1.0,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The expected error rate of a classifier with normal noise in its scores.

    With logits z = input · linear_weightᵀ + linear_bias and independent noise ε_k ~ N(0, std²), the
    loss of a token with target y is::

        L = 1 − P(z_y + ε_y > z_k + ε_k for all k ≠ y)

    It is at most 1. A token far from its decision boundary, on either side, has almost no gradient.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        std: Standard deviation of the noise, > 0.
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
        >>> from attnzoo.losses import exact_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> exact_loss(h, E, torch.arange(8)).backward()

    References:
        EXACT: Karpukhin et al. 2022, arXiv:2205.09615. The paper decreases the noise during
        training and bounds the logits by normalization. Here ``std`` is an argument, and the logits
        are used as they are.

    Notes:
        Quadrature, cost and memory are those of `perturb_max_loss`.
    """
    return _loss("error", input, linear_weight, target, linear_bias, std, ignore_index, reduction)


def _loss(
    rule: str, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, std: float,
    ignore_index: int, reduction: str,
) -> Tensor:  # fmt: skip
    deviation = check_number("std", std, above=True)
    batch = bind_batch(input, weight, bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        return batch_loss(batch, Setting(rule, ignore_index, deviation))
