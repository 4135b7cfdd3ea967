"""masked_loss(): cross entropy with constant logits for classes outside a task."""

from __future__ import annotations

import math

from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import check_dense, is_number, plain
from attnzoo.losses.arguments import check_number
from attnzoo.losses.batch import bind_batch
from attnzoo.losses.operators import batch_loss, cross_entropy


def masked_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_mask: Tensor,
    *,
    value: float = -math.inf,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy in which the logits of masked classes are a constant.

    With logits z = input · linear_weightᵀ + linear_bias, the loss of a token with target y is::

        L = log(Σ_{j in the mask} exp(z_j) + K exp(value)) − z_y

    K is the number of classes outside the mask. They get no gradient, so training on one task does
    not push down the classes of others. With −∞ they do not take part. With a finite value, the
    logits of the task's classes are still compared with a level outside of the task.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64. The mask must be True for the target.
        class_mask: Bool (V,) or (*, V), True for classes of the task.
        value: The logit of all other classes, a number or −inf.
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
        >>> from attnzoo.losses import masked_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(10, 32, requires_grad=True)
        >>> task = torch.arange(10) < 4
        >>> masked_loss(h, E, torch.arange(8) % 4, task, value=-5.0).backward()
        >>> bool(E.grad[4:].any())
        False

    References:
        Kim et al. 2023, arXiv:2309.14808: softmax masking for continual learning.

    Notes:
        Memory is linear in tokens + classes, apart from the mask itself. Targets are not checked on
        a GPU or under torch.compile; a masked target then has an infinite loss.
    """
    level = plain(value)
    if not (is_number(level) and level == -math.inf):
        level = check_number("value", value, least=None, other=" or -inf")
    check_dense("class_mask", class_mask)
    batch = bind_batch(
        input, linear_weight, linear_bias, target, ignore_index, reduction, class_mask
    )
    assert batch.class_mask is not None
    with in_full_precision(batch.input.device):
        # One more key with the logit value + log K stands for the K masked classes.
        hidden = (~batch.class_mask).sum(-1).to(score_dtype(batch.input))
        sink = (hidden.log() + level).expand(batch.target.shape[0])
        vectors = None if level == -math.inf else Vectors(sink=sink)
        return batch_loss(batch, cross_entropy(ignore_index), vectors)
