"""linear_loss() and loss(): the loss of every normalizer over a vocabulary."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.backends.transforms import uses_transforms
from attnzoo.core.activations import key_of
from attnzoo.core.call import Call, in_full_precision, score_dtype
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.losses import quadratic
from attnzoo.losses.arguments import (
    check_class_mask,
    check_class_weight,
    check_layer,
    check_loss,
    check_options,
    check_target,
    output_call,
    output_form,
)
from attnzoo.losses.operators import Setting, TokenLosses, weighted_sum


class LossStats(NamedTuple):
    """Statistics of each token, in the shape of target and without gradients.

    At ignored tokens ``support`` is 0, and all others are NaN.

    Attributes:
        lse: log Σ_j exp(s_j) over the classes, without a sink; None for variants without one.
        threshold: τ of variants that solve for a threshold, else None.
        power_sum: Σ_j w_j^α of the entmax family, else None.
        target_score: Score of the target, after softcap and gain.
        support: Number of classes with a nonzero weight.
    """

    lse: Tensor | None
    threshold: Tensor | None
    power_sum: Tensor | None
    target_score: Tensor
    support: Tensor


class _Arguments(NamedTuple):
    """The keywords that `linear_loss` and `loss` share."""

    class_mask: Tensor | None
    softcap: float | None
    weight: Tensor | None
    label_smoothing: float
    lse_penalty: float
    ignore_index: int
    reduction: str
    return_stats: bool


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

    The logits are z = input · linear_weightᵀ + linear_bias. The loss of a token with target y has
    the gradient w − e_y with respect to the scores s of most variants, where w are the variant's
    weights of all classes::

        softmax, also with gain or sink   cross entropy, log Σ_j exp(s_j) − s_y
        sparsemax, entmax                 Fenchel-Young loss, τ − (1 − Σ_j w_j^α)/α − s_y
        sigmoid                           one-vs-rest logistic loss, Σ_j log(1 + exp(s_j)) − s_y
        topk                              cross entropy over the k largest and the target
        other positive φ, such as taylor  −log w_y

    Arguments up to ``reduction`` that `torch.nn.functional.linear_cross_entropy` has too mean the
    same as there.

    Args:
        input: Hidden states (*, d) in fp16, bf16, fp32 or fp64.
        linear_weight: One row per class (V, d), of the same dtype.
        target: Class indices (*), int64.
        variant: A name from `list_variants`.
        linear_bias: Added to the logits (V,), of the same dtype.
        class_mask: Bool (V,) or (*, V), True for classes that take part. A masked class has weight
            0 and is not counted in n_i. The target must take part.
        softcap: c > 0 replaces the logits z by c·tanh(z/c).
        weight: A factor >= 0 of the loss per target class (V,). With smoothing it applies to each
            term of the target distribution, as in torch.
        label_smoothing: ε in [0, 1]. The target distribution is 1 − ε at the target, plus ε/K at
            each of the K classes that take part.
        lse_penalty: λ >= 0; adds λ·lse² to the loss of each token, without ``weight``. lse is the
            log-sum-exp of the scores.
        ignore_index: Tokens with this target have loss 0 and no gradient.
        reduction: "mean" divides by the sum of the targets' weights over tokens that are not
            ignored, which gives NaN without tokens. "sum" adds, "none" returns one loss per token.
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
        Scores are fp32, also under autocast and for 16-bit inputs. First derivatives only. On a
        CPU, targets are checked; on a GPU a masked target has an infinite loss. The loss of a
        quadratic φ is computed from moments of the classes where that is cheaper, without scores.
    """
    given = _Arguments(
        class_mask, softcap, weight, label_smoothing, lse_penalty, ignore_index, reduction,
        return_stats,
    )  # fmt: skip
    if linear_weight is None:
        raise TypeError("linear_weight must be a tensor (V, d), got None; loss() takes logits")
    return _loss(input, linear_weight, linear_bias, target, variant, given, params)


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
    given = _Arguments(
        class_mask, softcap, weight, label_smoothing, lse_penalty, ignore_index, reduction,
        return_stats,
    )  # fmt: skip
    return _loss(logits, None, None, target, variant, given, params)


def _loss(
    input: Tensor,
    linear_weight: Tensor | None,
    linear_bias: Tensor | None,
    target: Tensor,
    variant: str,
    given: _Arguments,
    params: dict[str, Any],
) -> Any:
    check_options(given.reduction, given.label_smoothing, given.lse_penalty, given.softcap,
                  given.ignore_index, given.return_stats)  # fmt: skip
    if linear_weight is not None:
        input, linear_weight, linear_bias = cast_by_autocast(input, linear_weight, linear_bias)
    classes = check_layer(input, linear_weight, linear_bias)
    lead = input.shape[:-1]
    mask = None
    if given.class_mask is not None:
        mask = check_class_mask(given.class_mask, lead, classes, input.device)
    target = check_target(target, lead, classes, mask, given.ignore_index, input.device)
    class_weight = None
    if given.weight is not None:
        class_weight = check_class_weight(given.weight, classes, input)
    tensors = [
        x for x in (input, linear_weight, linear_bias, *params.values()) if isinstance(x, Tensor)
    ]
    if uses_transforms(*tensors):
        raise ValueError(
            "attnzoo.losses supports neither torch.func transforms (vmap, grad, jvp, ...) nor "
            "forward-mode derivatives"
        )
    input = input.reshape(-1, input.shape[-1])
    call = output_call(input, classes, mask)
    with in_full_precision(input.device):
        found, form = output_form(variant, call, lead, params)
        check_loss(found, form, given.label_smoothing, given.lse_penalty)
        factor = _factor(target, class_weight, given, call.dtype)
        vectors = _vectors(form, call)
        if linear_weight is not None and _by_moments(form, given, call):
            losses, stats = _quadratic_losses(
                input, linear_weight, linear_bias, target, vectors.gain, form, given, class_weight
            )
            loss = losses if given.reduction == "none" else weighted_sum(losses, factor)
        else:
            setting = Setting(
                key_of(form.activation), form.normalize, form.keep, given.softcap,
                given.ignore_index, float(given.label_smoothing), float(given.lse_penalty),
                given.return_stats,
            )  # fmt: skip
            loss, *stats = TokenLosses.apply(
                given.reduction != "none", setting, input, linear_weight, linear_bias, *vectors,
                mask, target, factor, class_weight,
            )  # type: ignore[misc]  # fmt: skip
    if given.reduction == "none":
        loss = loss.reshape(lead)
    return (loss, _stats(stats, form, lead)) if given.return_stats else loss


def _factor(
    target: Tensor, class_weight: Tensor | None, given: _Arguments, dtype: torch.dtype
) -> Tensor:
    """The factor of each token in the reduced loss; 0 for ignored tokens."""
    counted = target != given.ignore_index
    if given.reduction != "mean":
        return counted.to(dtype)
    share = counted.to(dtype)
    if class_weight is not None:
        share = share * class_weight[target.where(counted, 0)]
    return counted / share.sum()


def _vectors(form: Pairwise, call: Call) -> Vectors:
    """The form's vectors with one entry per token; None for a gain of 1."""
    gain = form.gain
    assert not isinstance(gain, FromStatistics)
    given = (None if not isinstance(gain, Tensor) and gain == 1 else gain, form.offset, form.shape,
             form.sink)  # fmt: skip
    return Vectors(
        *(None if x is None else call.per_query(x).expand(1, 1, call.queries)[0, 0] for x in given)
    )


def _by_moments(form: Pairwise, given: _Arguments, call: Call) -> bool:
    """Whether the loss can be computed without scores, and is cheaper so."""
    return (
        form.normalize == "sum"
        and form.activation.quadratic is not None
        and form.sink is None
        and given.softcap is None
        and given.class_mask is None
        and not given.label_smoothing
        and quadratic.cheaper(call.queries, call.keys, call.head_dim)
    )


def _quadratic_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    gain: Tensor | None,
    form: Pairwise,
    given: _Arguments,
    class_weight: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """log Σ_j φ(s_j) − log φ(s_y), and the statistics of `TokenLosses`."""
    assert form.activation.quadratic is not None
    a, b, c = form.activation.quadratic
    counted = target != given.ignore_index
    target = target.where(counted, 0)
    # NaN in an ignored token must not reach the gradients.
    h = input.to(score_dtype(input)).masked_fill(~counted[:, None], 0.0)
    rows = quadratic.target_rows(weight=weight, target=target, dtype=h.dtype)
    score = torch.linalg.vecdot(h, rows)
    if bias is not None:
        score = score + bias[target]
    if gain is not None:
        score = score * gain
    total = quadratic.log_sum(h, weight, bias, gain, (a, b, c))
    loss = total - torch.log(a + score * (b + c * score))
    if class_weight is not None:
        loss = loss * class_weight[target]
    nan = torch.full_like(score, float("nan"))
    stats = [nan, nan, score.detach().where(counted, nan), counted * float(len(weight))]
    return loss.where(counted, 0.0), stats


def _stats(stats: list[Tensor], form: Pairwise, lead: torch.Size) -> LossStats:
    statistic, power_sum, score, support = (x.reshape(lead) for x in stats)
    threshold = form.normalize == "threshold"
    has_lse = form.activation.exponential and form.normalize in ("sum", "select")
    return LossStats(
        lse=statistic if has_lse else None,
        threshold=statistic if threshold else None,
        power_sum=power_sum if threshold and form.activation.alpha is not None else None,
        target_score=score,
        support=support.long(),
    )
