"""linear_loss() and loss(): losses of output layers whose probabilities come from a variant."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from attnzoo.losses.arguments import LossArguments
from attnzoo.losses.dispatch import LossStats, compute_loss


@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    linear_bias: Tensor | None = None,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: Literal[False] = False,
    **params: Tensor | float | None,
) -> Tensor: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    linear_bias: Tensor | None = None,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: Literal[True],
    **params: Tensor | float | None,
) -> tuple[Tensor, LossStats]: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    linear_bias: Tensor | None = None,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: bool,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, LossStats]: ...
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    linear_bias: Tensor | None = None,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: bool = False,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, LossStats]:
    """The mean loss of an output layer, in memory linear in tokens + classes.

    The logits are z = input · linear_weightᵀ + linear_bias, and the scores are s = gain · z. A
    token with target y has this loss, where w are the variant's weights of the classes::

        softmax, ssmax, log_n             cross entropy, log Σ_j exp(s_j) − s_y
        sink                              the same with exp(b) added to the sum
        sparsemax, entmax, asentmax       Fenchel-Young loss, τ − (1 − Σ_j w_j^α)/α − s_y
        sigmoid                           one-vs-rest logistic loss, Σ_j log(1 + exp(s_j)) − s_y
        topk                              cross entropy over the k largest scores and the target
        other positive φ, such as taylor  −log w_y

    Arguments shared with `torch.nn.functional.linear_cross_entropy` have the same meaning.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype. It may be a DTensor that shares
            out the classes over ranks; see the notes.
        target: Class indices (*), int64.
        variant: A name from `list_variants`.
        linear_bias: One number per class (V,), added to the logits; of the same dtype.
        class_mask: Bool (V,) or (*, V), True for classes that take part. A masked class has weight
            0 and is not counted in n_i. The target must take part.
        softcap: c > 0 replaces the logits z by c·tanh(z/c).
        weight: One factor >= 0 per class (V,). The loss of a token is multiplied by the factor of
            its target. With smoothing, each term of the target distribution is multiplied by the
            factor of its class, as in torch.
        label_smoothing: ε in [0, 1]. The target distribution is 1 − ε at the target, plus ε/K at
            each of the K classes that take part. The losses of sparsemax, entmax and asentmax then
            have a constant that makes their minimum 0; see the notes.
        lse_penalty: λ >= 0; adds λ·lse² to the loss of each token, not multiplied by ``weight``.
            lse is the log-sum-exp of the scores.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        reduction: "none" returns one loss per token, "sum" their sum. "mean" divides the sum by the
            number of tokens that are not ignored, or by the sum of ``weight`` at their targets. If
            the divisor is 0, the mean is NaN, as in torch.
        return_stats: Also return `LossStats`.
        **params: Parameters of the variant: a number, a tensor () or (1,), or one value per token
            (*) where the variant accepts one per query. `Variant.output_defaults` lists defaults
            that differ from those in attention.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (*) with reduction "none". With
        ``return_stats`` a pair (loss, `LossStats`).

    Raises:
        ValueError: An argument has a wrong value or shape, or the variant has no loss with these
            options.
        TypeError: An argument has a wrong type or dtype, or a parameter is unknown or missing.

    Example:
        >>> import torch, attnzoo
        >>> h = torch.randn(4, 10, 64, requires_grad=True)
        >>> E, y = torch.randn(1000, 64, requires_grad=True), torch.randint(1000, (4, 10))
        >>> loss = attnzoo.losses.linear_loss(h, E, y, "entmax", alpha=1.5)
        >>> loss.backward()
        >>> loss.shape, h.grad.shape
        (torch.Size([]), torch.Size([4, 10, 64]))

    References:
        Fenchel-Young losses: Blondel et al. 2020, arXiv:1901.02324; entmax: Peters et al. 2019,
        arXiv:1905.05702; lse penalty (z-loss): Chowdhery et al. 2022, arXiv:2204.02311, Section 5.

    Notes:
        Sharded classes: ``linear_weight`` is a DTensor with placements (Shard(0),) on a mesh with
        one dimension, ``linear_bias`` is sharded like it, and ``input`` is a DTensor with
        placements (Replicate(),). Everything else is whole and equal on each rank. The result is a
        DTensor with placements (Replicate(),), and every rank must call backward. The ranks compare
        targets, masks and class weights, but not hidden states and parameters. If each rank has
        other tokens instead, divide a sum by the number of tokens of all ranks. See
        `attnzoo.distributed`.

        With class weights u and smoothing ε, a_j = u_j·((1 − ε)[j = y] + ε/K), with sum m. The
        constant of a Fenchel-Young loss is m·Ω(a/m), Ω(p) = (Σ p^α − 1)/(α(α − 1)), 0 for ε = 0 or
        m = 0.

        Scores are fp32, also under autocast and for 16-bit inputs. First derivatives only.
        Targets are class indices. They are checked on a CPU, but not on a GPU or under
        torch.compile, where a masked target has an infinite loss. The loss of a quadratic φ
        (taylor) is computed from moments of the classes, without scores, if this is possible with
        the given options and costs less, but not with sharded classes.
    """
    given = LossArguments(
        class_mask, softcap, weight, label_smoothing, lse_penalty, ignore_index, reduction,
        return_stats,
    )  # fmt: skip
    return compute_loss(input, linear_weight, linear_bias, target, variant, given, params)


@overload
def loss(
    logits: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: Literal[False] = False,
    **params: Tensor | float | None,
) -> Tensor: ...
@overload
def loss(
    logits: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: Literal[True],
    **params: Tensor | float | None,
) -> tuple[Tensor, LossStats]: ...
@overload
def loss(
    logits: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: bool,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, LossStats]: ...
def loss(
    logits: Tensor,
    target: Tensor,
    variant: str = "softmax",
    *,
    class_mask: Tensor | None = None,
    softcap: float | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_penalty: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_stats: bool = False,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, LossStats]:
    """The loss of a variant from logits: `linear_loss` for logits that exist already.

    Args:
        logits: (*, V) in fp16, bf16, fp32 or fp64.
        target: Class indices (*), int64.
        variant: A name from `list_variants`.
        all others: As for `linear_loss`.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch, attnzoo
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.5, 3.0]])
        >>> attnzoo.losses.loss(logits, torch.tensor([0, 2]), "sparsemax").item()
        0.0
    """
    given = LossArguments(
        class_mask, softcap, weight, label_smoothing, lse_penalty, ignore_index, reduction,
        return_stats,
    )  # fmt: skip
    return compute_loss(logits, None, None, target, variant, given, params, logits=True)
