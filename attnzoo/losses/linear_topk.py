"""linear_topk(): the k most probable classes of an output layer."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import check_dense
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.functional.rows import bind_rows
from attnzoo.functional.top_weights import top_weights
from attnzoo.functional.topk import TopK, check_k, joined, parts, rows_per_step
from attnzoo.losses.arguments import check_class_mask, check_layer, check_plain, check_softcap
from attnzoo.losses.chunks import Layer, chunk_logits

LOGITS = 2**22  # logits that are computed at once on a CPU


@torch.no_grad()
def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    variant: str = "softmax",
    *,
    linear_bias: Tensor | None = None,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    **params: Tensor | float | None,
) -> TopK:
    """The k most probable classes of an output layer, in chunks of tokens.

    Formula: logits z = input · linear_weightᵀ + linear_bias. If ``softcap`` = c is given, z is
    replaced by c · tanh(z / c). The result is `topk_probabilities` of z over the classes. Logits
    are computed for some tokens at a time.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), in the dtype of ``input``.
        k: How many classes, from 1 to V.
        variant: A name from `list_variants`, of a variant whose weights do not depend on positions.
        linear_bias: (V,), in the dtype of ``input``.
        class_mask: Bool (V,) or (*, V); True where a class takes part.
        softcap: c above 0, or None.
        **params: Parameters of the variant: a number, a tensor () or (1,), or (*), one value per
            token, where the variant accepts one value per query. Defaults are those of an output
            layer (sigmoid: bias 0).

    Returns:
        A named tuple (values, indices) of shape (*, k), as from `topk_probabilities`.

    Raises:
        ValueError: A shape, a device or a value is wrong, or the weights of the variant depend on
            positions.
        TypeError: An argument has a wrong type or dtype, or a parameter is unknown or missing.

    Example:
        >>> import torch, attnzoo
        >>> hidden, classes = torch.randn(2, 7, 16), torch.randn(1000, 16)
        >>> values, indices = attnzoo.linear_topk(hidden, classes, 5, "entmax")
        >>> values.shape, indices.shape
        (torch.Size([2, 7, 5]), torch.Size([2, 7, 5]))

    References:
        Milakov & Gimelshein 2018, arXiv:1805.02867: softmax and top-k in one pass.

    Notes:
        No gradients are computed. Logits are fp32 (fp64 for fp64 inputs), also under autocast,
        which casts ``input`` and ``linear_weight`` to its dtype. A graph of `torch.compile`
        computes all of them at once.
    """
    check_plain(input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    check_dense("linear_weight", linear_weight)
    given = input
    input, linear_weight = cast_by_autocast(input, linear_weight)
    if linear_bias is not None:
        (linear_bias,) = cast_by_autocast(linear_bias)
    classes, softcap = check_layer(input, linear_weight, linear_bias), check_softcap(softcap)
    lead = input.shape[:-1]
    k = check_k(k, classes, f"the number of classes, {classes}")
    mask = None
    if class_mask is not None:
        mask = check_class_mask(class_mask, lead, classes, input.device)
    with in_full_precision(input.device):
        bound = bind_rows(
            "linear_topk", variant, input, params, tuple(lead), output_layer=True,
            keywords=("linear_bias", "class_mask", "softcap"),
        )  # fmt: skip
        layer = Layer(input.reshape(-1, input.shape[-1]), linear_weight, linear_bias, mask)
        count = layer.input.shape[0]
        step = count
        if not torch.compiler.is_compiling():
            # At most 1/16 of the tokens at a time, or 16 tokens if that is more.
            most = min(rows_per_step(LOGITS, classes, input.device), max(16, count // 16))
            step = min(most, count)
        buffer = input.new_empty(step, classes, dtype=score_dtype(input))
        found = []
        for part in parts(count, step):
            z = chunk_logits(layer, part, buffer[: part.stop - part.start])
            if softcap is not None:
                z.div_(softcap).tanh_().mul_(softcap)
            seen = mask if mask is None or mask.shape[0] == 1 else mask[part]
            found.append(top_weights(bound.part(part), z, seen, k, given.dtype, own=True))
        values, indices = joined(found, k, given)
        return TopK(values.reshape(*lead, k), indices.reshape(*lead, k))
