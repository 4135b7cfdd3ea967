"""probabilities(): the normalizer of a variant as a function of given scores."""

from __future__ import annotations

from torch import Tensor

from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import check_dense
from attnzoo.functional.score_rows import as_rows, row_call


def probabilities(
    scores: Tensor,
    variant: str = "softmax",
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    **params: Tensor | float | None,
) -> Tensor:
    """The normalizer of a variant, applied to given scores: w = definition(scores) along ``dim``.

    Formula: the formula of the variant; see `get_variant`. Each line of ``scores`` along ``dim``
    holds the logits z_i of one query. For softmax, w_j = exp(z_j) / Σ_l exp(z_l).

    Args:
        scores: Logits of any shape (…, n, …) in fp16, bf16, fp32 or fp64.
        variant: A name from `list_variants`, of a variant whose weights do not depend on positions.
        dim: The dimension of n, along which weights are normalized.
        mask: Bool, broadcasts to ``scores``; True where an entry takes part. Entries that do not
            take part have weight 0 and are not counted in n_i.
        **params: Parameters of the variant, with the defaults of `attention`: a number, a tensor
            (), or a tensor with one value per line. The shape of the latter broadcasts to the shape
            of ``scores`` with ``dim`` removed or of size 1.

    Returns:
        The weights, in the shape and dtype of ``scores``. Those of fp16 and bf16 scores are
        computed in fp32. A line without an entry that takes part has weight 0 and gradient 0. A NaN
        that takes part makes the weights of its line NaN, except in variants that treat each entry
        by itself (sigmoid, relu, silu, screening).

    Raises:
        ValueError: ``dim``, a shape, a device or the value of a parameter is wrong, or the weights
            of the variant depend on positions.
        TypeError: ``scores`` or ``mask`` has a wrong type or dtype, or a parameter is unknown or
            missing.

    Example:
        >>> import torch, attnzoo
        >>> scores = torch.tensor([[1.0, 0.5, -1.0], [3.0, 0.0, 0.0]])
        >>> attnzoo.probabilities(scores, "sparsemax")
        tensor([[0.7500, 0.2500, 0.0000],
                [1.0000, 0.0000, 0.0000]])
        >>> alpha = torch.tensor([1.5, 2.0])  # one per row
        >>> attnzoo.probabilities(scores, "entmax", alpha=alpha).sum(-1)
        tensor([1., 1.])

    References:
        Peters et al. 2019, arXiv:1905.05702: entmax. In their package, sparsemax and entmax are the
        functions ``sparsemax``, ``entmax15`` and ``entmax_bisect``. `get_variant` names a variant's
        paper.

    Notes:
        The result is twice differentiable, also with respect to tensor parameters, if the variant's
        definition is. The function works in `torch.func` transforms and under `torch.compile`.
    """
    check_dense("scores", scores)
    with in_full_precision(scores.device):
        rows = as_rows("probabilities", scores, variant, dim, mask, params)
        dtype = score_dtype(rows.scores)
        logits = rows.scores.to(dtype)
        if rows.mask is not None:  # a NaN that takes no part must not reach the gradients
            logits = logits.masked_fill(~rows.mask, 0.0)
        call = row_call(logits, rows.mask, scores.dtype)
        return rows.restore(rows.bound.weights(call)).to(scores.dtype)
