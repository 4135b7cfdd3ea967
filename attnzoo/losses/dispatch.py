"""Checks the arguments of a loss, then computes it from chunks of scores.

The loss of a quadratic φ can also be computed without scores; see `quadratic`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.backends.transforms import uses_transforms
from attnzoo.core.activations import key_of
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.losses import quadratic
from attnzoo.losses.arguments import (
    BoundForm,
    bind_form,
    check_class_mask,
    check_class_weight,
    check_layer,
    check_loss,
    check_options,
    check_target,
)
from attnzoo.losses.operators import Setting, token_losses, weighted_sum


class LossStats(NamedTuple):
    """Statistics of each token, in the shape of target and without gradients.

    At ignored tokens ``support`` is 0, and the other fields are NaN.

    Attributes:
        lse: log Σ_j exp(s_j), without a sink; for topk over the k kept classes and the target.
            None for variants without a log-sum-exp.
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


class LossArguments(NamedTuple):
    """The keywords that `linear_loss` and `loss` share."""

    class_mask: Tensor | None
    softcap: float | None
    weight: Tensor | None
    label_smoothing: float
    lse_penalty: float
    ignore_index: int
    reduction: str
    return_stats: bool


def compute_loss(
    input: Tensor,
    linear_weight: Tensor | None,
    linear_bias: Tensor | None,
    target: Tensor,
    variant: str,
    given: LossArguments,
    params: dict[str, Any],
) -> Any:
    check_options(given.reduction, given.label_smoothing, given.lse_penalty, given.softcap,
                  given.ignore_index, given.return_stats)  # fmt: skip
    if linear_weight is not None:
        input, linear_weight = cast_by_autocast(input, linear_weight)
        if linear_bias is not None:
            (linear_bias,) = cast_by_autocast(linear_bias)
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
    with in_full_precision(input.device):
        found = bind_form("linear_loss", variant, input, classes, mask, params, lead)
        form = found.form
        check_loss(found.bound.variant, form, given.label_smoothing, given.lse_penalty)
        factor = _factor(target, class_weight, given, found.call.dtype)
        vectors = _vectors(found)
        if linear_weight is not None and _by_moments(form, given, input, classes):
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
            operands = (
                input, linear_weight, linear_bias, *vectors, mask, target, factor, class_weight,
            )  # fmt: skip
            loss, *stats = token_losses(given.reduction != "none", setting, operands)
    if given.reduction == "none":
        loss = loss.reshape(lead)
    if given.reduction == "mean" and not len(target):
        loss = loss + float("nan")  # 0/0, as in torch
    return (loss, _stats(stats, form, lead)) if given.return_stats else loss


def _factor(
    target: Tensor, class_weight: Tensor | None, given: LossArguments, dtype: torch.dtype
) -> Tensor:
    """The factor of each token in the reduced loss; 0 for ignored tokens."""
    counted = target != given.ignore_index
    if given.reduction != "mean":
        return counted.to(dtype)
    share = counted.to(dtype)
    if class_weight is not None:
        share = share * class_weight[target.where(counted, 0)]
    return counted / share.sum()


def _vectors(found: BoundForm) -> Vectors:
    """The form's vectors with one entry per token; None for a gain of 1."""
    gain, offset, shape, sink = (
        found.form.gain,
        found.form.offset,
        found.form.shape,
        found.form.sink,
    )
    assert not isinstance(gain, FromStatistics)
    given = None if not isinstance(gain, Tensor) and gain == 1 else gain
    return Vectors(*map(found.vector, (given, offset, shape, sink)))


def _by_moments(form: Pairwise, given: LossArguments, input: Tensor, classes: int) -> bool:
    """Whether the loss can be computed from moments of the classes, at a lower cost than scores.

    The moments are those of `quadratic`.
    """
    return (
        form.normalize == "sum"
        and form.activation.quadratic is not None
        and form.sink is None
        and given.softcap is None
        and given.class_mask is None
        and not given.label_smoothing
        and quadratic.cheaper(len(input), classes, input.shape[1])
    )


def _quadratic_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    gain: Tensor | None,
    form: Pairwise,
    given: LossArguments,
    class_weight: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """log Σ_j φ(s_j) − log φ(s_y), and the statistics of `token_losses`."""
    assert form.activation.quadratic is not None
    a, b, c = form.activation.quadratic
    counted = target != given.ignore_index
    target = target.where(counted, 0)
    # NaN in an ignored token must not reach the gradients.
    h = input.to(score_dtype(input)).masked_fill(~counted[:, None], 0.0)
    rows = quadratic.target_rows(weight=weight, target=target, dtype=h.dtype)
    score = torch.linalg.vecdot(h, rows)
    if bias is not None:
        score = score + bias.index_select(0, target)
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
    return LossStats(
        lse=statistic if form.has_lse else None,
        threshold=statistic if threshold else None,
        power_sum=power_sum if threshold and form.activation.alpha is not None else None,
        target_score=score,
        support=support.long(),
    )
