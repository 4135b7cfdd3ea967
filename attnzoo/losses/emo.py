"""emo_loss(): cross entropy plus the distance between predicted and true class embeddings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from attnzoo.core.activations import EXP, key_of
from attnzoo.core.call import in_full_precision
from attnzoo.functional.attention import attention
from attnzoo.losses.batch import bind_batch
from attnzoo.losses.operators import Setting, batch_loss
from attnzoo.losses.targets import hidden_states


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
        L     = ½ (L_mle + sg(L_mle / (L_emo + 1e-10)) · L_emo)

    The value of L is L_mle up to rounding. The second gradient rewards probability on classes whose
    embeddings are close to that of the target, which cross entropy punishes like any other.

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
        Ren et al. 2023, arXiv:2310.04691, Eq. 8 and its code, which also leaves sg(Q_y) out.

    Notes:
        Σ_j Q_j Ê_j is attention of the hidden states over the classes with values Ê, so memory is
        linear in tokens + classes. Ê takes an fp32 copy of ``linear_weight``.
    """
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    setting = Setting("form", ignore_index, activation=key_of(EXP), normalize="sum")
    with in_full_precision(batch.input.device):
        assert batch.weight is not None
        mle = batch_loss(batch._replace(reduction="none", lead=batch.target.shape), setting)
        h = hidden_states(batch)
        keys = batch.weight.to(h.dtype)
        values = normalize(keys.detach(), dim=-1)
        if batch.bias is not None:
            h = pad(h, (0, 1), value=1.0)
            keys = torch.cat([keys, batch.bias.to(h.dtype)[:, None]], 1)
        predicted = attention(h[None, None], keys[None, None], values[None, None], scale=1.0)
        true = values.index_select(0, batch.classes_of_tokens)
        own = (-mle).exp().detach() * true.square().sum(-1)
        emo = 1 - (torch.linalg.vecdot(true, predicted[0, 0]) - own)
        return batch.reduced(0.5 * (mle + (mle / (emo + 1e-10)).detach() * emo))
