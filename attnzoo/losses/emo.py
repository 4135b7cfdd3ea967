"""emo_loss(): cross entropy plus the distance between predicted and true class embeddings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.core.call import in_full_precision
from attnzoo.functional.attention import attention
from attnzoo.losses.batch import bind_batch
from attnzoo.losses.operators import batch_loss, cross_entropy
from attnzoo.losses.targets import hidden_states, unit_rows


def emo_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """EMO: cross entropy and an upper bound of the earth mover's distance, in equal shares.

    With probabilities Q = softmax(input · linear_weightᵀ + linear_bias), unit rows Ê of
    ``linear_weight`` without gradient, target y and sg for "no gradient", the loss of a token is::

        L_mle = −log Q_y
        L_emo = 1 − ⟨Ê_y, Σ_j Q_j Ê_j − sg(Q_y) Ê_y⟩
        L     = ½ (L_mle + sg(L_mle / L_emo) · L_emo)

    The value of L is L_mle. The gradient of L_emo rewards probability on classes whose embeddings
    are close to that of the target, which cross entropy punishes like any other.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
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
        >>> from attnzoo.losses import emo_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> emo_loss(h, E, torch.arange(8)).backward()

    References:
        Ren et al. 2023, arXiv:2310.04691. sg(Q_y) is subtracted in one published version of the
        code, not in others. There Ê is a frozen copy of the pretrained matrix; here it follows
        ``linear_weight``.

    Notes:
        Σ_j Q_j Ê_j is attention of the hidden states over the classes with values Ê, so memory is
        linear in tokens + classes. Ê takes an fp32 copy of ``linear_weight``. L_emo is a difference
        of numbers near 1. In the denominator it counts as at least its rounding error of about
        1e-6 (fp64: 2e-15), where the source adds 1e-10.
    """
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        assert batch.weight is not None
        each = batch._replace(reduction="none", lead=batch.target.shape)
        mle = batch_loss(each, cross_entropy(ignore_index))
        h = hidden_states(batch)
        keys = batch.weight.to(h.dtype)
        values = unit_rows(keys.detach())
        if batch.bias is not None:
            h = pad(h, (0, 1), value=1.0)
            keys = torch.cat([keys, batch.bias.to(h.dtype)[:, None]], 1)
        predicted = attention(h[None, None], keys[None, None], values[None, None], scale=1.0)
        true = values.index_select(0, batch.classes_of_tokens)
        own = (-mle).exp().detach() * true.square().sum(-1)
        emo = 1 - (torch.linalg.vecdot(true, predicted[0, 0]) - own)
        level, cost = emo.detach(), mle.detach()
        factor = cost / level.clamp(min=8 * torch.finfo(h.dtype).eps)
        # factor · level is cost, but loses digits if level is small.
        return batch.reduced(0.5 * (mle + cost + factor * (emo - level)))
