"""topk_probabilities() and linear_topk(): the k most probable entries, without normalizing all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import (
    DTYPES,
    check_dense,
    check_sizes,
    is_finite,
    is_number,
    plain,
    shown,
)
from attnzoo.functional.rows import as_rows, bind_rows, check_mask
from attnzoo.functional.top_weights import top_weights

# Number of scores that are looked at in one step on a CPU: of given fp32 scores, of scores that are
# copied first, and of logits. On a GPU, which needs larger steps: of all.
GIVEN, COPIED, LOGITS, ON_GPU = 2**23, 2**20, 2**22, 2**26
SLAB = 4096  # number of classes whose weights are cast at once


class TopK(NamedTuple):
    """The k most probable entries.

    Attributes:
        values: Their probabilities, in descending order.
        indices: Their indices, int64.
    """

    values: Tensor
    indices: Tensor


@torch.no_grad()
def topk_probabilities(
    scores: Tensor,
    k: int,
    variant: str = "softmax",
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    **params: Tensor | float | None,
) -> TopK:
    """The k most probable entries of given scores: the k largest of w = probabilities(scores).

    Formula: w as in `probabilities`. The probabilities are not computed except for these k entries,
    where the order of probabilities is that of the scores and only a sum or a threshold is needed:
    in softmax, its gains and sinks, sigmoid, sparsemax, entmax and topk. The definition of other
    variants is computed for a few rows at a time.

    Args:
        scores: Logits of any shape (…, n, …) in fp16, bf16, fp32 or fp64.
        k: How many entries, from 1 to n.
        variant: A name from `list_variants`, of a variant whose weights do not depend on positions.
        dim: The dimension of n.
        mask: Bool, broadcasts to ``scores``; True where an entry takes part. The others have
            probability 0.
        **params: Parameters of the variant, as for `probabilities`.

    Returns:
        A named tuple (values, indices), both of the shape of ``scores`` with k along ``dim``:
        probabilities in descending order in the dtype of ``scores``, and int64 indices. Of equal
        scores the one with the lowest index comes first. If fewer than k entries have a probability
        above 0, entries with probability 0 follow. A NaN counts as the largest score, as in
        `torch.topk`, and the values of its line are NaN as in `probabilities`.

    Raises:
        ValueError: k, ``dim``, a shape, a device or the value of a parameter is wrong, or the
            weights of the variant depend on positions.
        TypeError: ``scores`` or ``mask`` has a wrong type or dtype, or a parameter is unknown or
            missing.

    Example:
        >>> import torch, attnzoo
        >>> scores = torch.tensor([0.5, -1.0, 1.0])
        >>> values, indices = attnzoo.topk_probabilities(scores, 2, "sparsemax")
        >>> values, indices
        (tensor([0.7500, 0.2500]), tensor([2, 0]))

    References:
        Milakov & Gimelshein 2018, arXiv:1805.02867: softmax and top-k in one pass.

    Notes:
        No gradients are computed. Exact: the k largest entries lie in the k blocks of 64 entries
        with the largest maxima, and a threshold that is found from some entries is checked against
        all others.
    """
    check_dense("scores", scores)
    with in_full_precision(scores.device):
        rows = as_rows("topk_probabilities", scores, variant, dim, mask, params)
        count, size = rows.scores.shape
        k = _check_k(k, size, f"the size of scores along dim, {size}")
        dtype = score_dtype(scores)
        held = GIVEN if dtype == scores.dtype and mask is None else COPIED
        step = _step(held, size, scores.device)
        found = []
        for part in _parts(count, step):
            x = rows.scores[part].to(dtype)
            seen = rows.mask if rows.mask is None or len(rows.mask) == 1 else rows.mask[part]
            own = dtype != scores.dtype  # x is a copy
            found.append(top_weights(rows.bound.part(part), x, seen, k, scores.dtype, own))
        values, indices = _joined(found, k, scores)
        return TopK(rows.restore(values), rows.restore(indices))


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

    Formula: logits z = input · linear_weightᵀ + linear_bias, with ``softcap`` c replaced by
    c · tanh(z / c); then `topk_probabilities` over the classes. The logits of all tokens are never
    held at once.

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
        which casts ``input`` and ``linear_weight`` to its dtype.
    """
    softcap = _check_layer(input, linear_weight, linear_bias, softcap)
    lead, classes = tuple(input.shape[:-1]), linear_weight.shape[0]
    k = _check_k(k, classes, f"the number of classes, {classes}")
    if class_mask is not None:
        check_mask("class_mask", class_mask, input)
        if tuple(class_mask.shape) not in ((classes,), (*lead, classes)):
            raise ValueError(
                f"class_mask must have shape {(classes,)} or {(*lead, classes)}, got "
                f"{tuple(class_mask.shape)}"
            )
        class_mask = class_mask.reshape(-1, classes)
    cast = _autocast_dtype(input)
    with in_full_precision(input.device):
        bound = bind_rows("linear_topk", variant, input, params, lead, output_layer=True)
        hidden, dtype = input.reshape(-1, input.shape[-1]), score_dtype(input)
        count = len(hidden)
        # At most a 16th of all logits, unless these are few.
        step = min(_step(LOGITS, classes, input.device), max(16, count // 16))
        buffer = input.new_empty(min(step, count), classes, dtype=dtype)
        found = []
        for part in _parts(count, step):
            x = hidden[part].to(cast).to(dtype)
            z = _logits(x, linear_weight, linear_bias, cast, buffer[: len(x)])
            if softcap is not None:
                z.div_(softcap).tanh_().mul_(softcap)
            seen = class_mask if class_mask is None or len(class_mask) == 1 else class_mask[part]
            found.append(top_weights(bound.part(part), z, seen, k, input.dtype, own=True))
        values, indices = _joined(found, k, input)
        return TopK(values.reshape(*lead, k), indices.reshape(*lead, k))


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, cast: torch.dtype, out: Tensor
) -> Tensor:
    """x · weightᵀ + bias in the dtype of x; weights are cast in slabs."""
    if weight.dtype == cast == x.dtype:
        torch.mm(x, weight.mT, out=out)
    else:
        for slab in _parts(len(weight), SLAB):
            out[:, slab] = x @ weight[slab].to(cast).to(x.dtype).mT
    return out if bias is None else out.add_(bias)


def _autocast_dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if input.dtype != torch.float64 else input.dtype
    return input.dtype


def _step(held: int, size: int, device: torch.device) -> int:
    """Number of rows in one step."""
    return max(1, (held if device.type == "cpu" else ON_GPU) // size)


def _parts(count: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, count)) for at in range(0, count, step))


def _joined(found: list[tuple[Tensor, Tensor]], k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    if not found:
        return like.new_empty(0, k), torch.empty(0, k, dtype=torch.long, device=like.device)
    values, indices = zip(*found)
    return torch.cat(values).to(like.dtype), torch.cat(indices)


def _check_k(k: Any, size: int, what: str) -> int:
    k = plain(k)
    check_sizes(k=k)
    if k > size:
        raise ValueError(f"k must be at most {what}, got {k}")
    return k


def _check_layer(input: Any, weight: Any, bias: Any, softcap: Any) -> float | None:
    """Validate the tensors of an output layer; return softcap as a float."""
    given = {"input": input, "linear_weight": weight}
    given |= {} if bias is None else {"linear_bias": bias}
    for name, x in given.items():
        check_dense(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if x.device != input.device:
            raise ValueError(f"{name} must be on input's device {input.device}, got {x.device}")
        mixed = _autocast_dtype(input) != input.dtype or _autocast_dtype(weight) != weight.dtype
        if x.dtype != input.dtype and not mixed:
            raise TypeError(f"{name} must have input's dtype {input.dtype}, got {x.dtype}")
    if input.dim() < 1 or input.shape[-1] == 0:
        raise ValueError(f"input must have shape (*, d) with d >= 1, got {tuple(input.shape)}")
    width = input.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"linear_weight must have shape (V, d) with input's d={width}, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"linear_bias must have shape ({len(weight)},), got {tuple(bias.shape)}")
    softcap = plain(softcap)
    if softcap is None:
        return None
    if not is_number(softcap):
        raise TypeError(f"softcap must be a number above 0 or None, got {shown(softcap)}")
    if not (softcap > 0 and is_finite(softcap, score_dtype(input))):
        raise ValueError(f"softcap must be a finite number above 0 or None, got {shown(softcap)}")
    return float(softcap)
