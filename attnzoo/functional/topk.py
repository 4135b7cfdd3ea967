"""topk_probabilities(): the k most probable entries, without normalizing all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import (
    check_dense,
    check_sizes,
    plain,
)
from attnzoo.core.device import is_cpu
from attnzoo.functional.score_rows import as_rows
from attnzoo.functional.top_weights import parts, top_weights

# Number of scores per step: UNCOPIED on a CPU, COPIED on a CPU if scores are cast or masked first,
# and ON_GPU on a GPU, which needs larger steps.
UNCOPIED, COPIED, ON_GPU = 2**23, 2**20, 2**26


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

    Formula: w as in `probabilities`. If the largest scores have the largest probabilities, only
    these k probabilities are computed, with a sum or a threshold over the line. That is so for a
    pairwise form with φ = exp (without ``mass``, and without a gain from statistics), with a
    threshold, or with an increasing activation and ``normalize="none"``, if it has no factor. For
    other variants all probabilities are computed, for a few rows at a time.

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
        above 0, entries with probability 0 follow. If a line has a NaN, its values are those of
        `probabilities`, and the order of its indices is not defined.

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
        No gradients are computed. The result is exact: the k largest entries lie in the k blocks of
        64 entries with the largest maxima, and a threshold that is found from some entries is
        checked against all others. All probabilities are computed at once where values cannot be
        read: in a graph of `torch.compile`, in a transform of `torch.func` and on meta.
    """
    check_dense("scores", scores)
    with in_full_precision(scores.device):
        rows = as_rows("topk_probabilities", scores, variant, dim, mask, params)
        count, size = rows.scores.shape
        k = check_k(k, size, f"the size of scores along dim, {size}")
        dtype = score_dtype(scores)
        held = UNCOPIED if dtype == scores.dtype and mask is None else COPIED
        step = rows_per_step(held, size, scores.device)
        results = []
        for part in parts(count, step):
            x = rows.scores[part].to(dtype)
            seen = rows.mask if rows.mask is None or rows.mask.shape[0] == 1 else rows.mask[part]
            is_copy = dtype != scores.dtype  # x is a copy
            results.append(top_weights(rows.bound.part(part), x, seen, k, scores.dtype, is_copy))
        values, indices = joined(results, k, scores)
        return TopK(rows.restore(values), rows.restore(indices))


def rows_per_step(held: int, size: int, device: torch.device) -> int:
    """Number of rows in one step."""
    return max(1, (held if is_cpu(device) else ON_GPU) // size)


def joined(results: list[tuple[Tensor, Tensor]], k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    if not results:
        return like.new_empty(0, k), torch.empty(0, k, dtype=torch.long, device=like.device)
    values, indices = zip(*results)
    return torch.cat(values).to(like.dtype), torch.cat(indices)


def check_k(k: Any, size: int, what: str) -> int:
    k = plain(k)
    check_sizes(k=k)
    if k > size:
        raise ValueError(f"k must be at most {what}, got {k}")
    return k
