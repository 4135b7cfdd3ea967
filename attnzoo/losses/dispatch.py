"""Checks the arguments of a loss, then computes it from chunks of scores.

The loss of a quadratic φ can also be computed without scores; see `quadratic`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.core.call import in_full_precision
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.core.keys import key_of
from attnzoo.losses import quadratic
from attnzoo.losses.arguments import (
    BoundForm,
    bind_form,
    check_class_weight,
    check_loss,
    check_options,
)
from attnzoo.losses.batch import Batch, bind_batch
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
    logits: bool = False,
) -> Any:
    check_options(given.reduction, given.label_smoothing, given.lse_penalty, given.softcap,
                  given.ignore_index, given.return_stats)  # fmt: skip
    batch = bind_batch(
        input, linear_weight, linear_bias, target, given.ignore_index, given.reduction,
        given.class_mask, tuple(params.values()), logits=logits,
    )  # fmt: skip
    input, classes, mask = batch.input, batch.classes, batch.class_mask
    class_weight = None
    if given.weight is not None:
        class_weight = check_class_weight(given.weight, classes, input)
    with in_full_precision(input.device):
        found = bind_form("linear_loss", variant, input, classes, mask, params, batch.lead)
        form = found.form
        check_loss(found.bound.variant, form, given.label_smoothing, given.lse_penalty)
        factor, vectors = batch.factor(class_weight), _vectors(found)
        if batch.weight is not None and _by_moments(form, given, input, classes):
            losses, stats = _quadratic_losses(batch, vectors.gain, form, class_weight)
            loss = losses if given.reduction == "none" else weighted_sum(losses, factor)
        else:
            setting = Setting(
                "form", given.ignore_index, activation=key_of(form.activation),
                normalize=form.normalize, keep=form.keep, softcap=given.softcap,
                label_smoothing=float(given.label_smoothing), lse_penalty=float(given.lse_penalty),
                want_stats=given.return_stats,
            )  # fmt: skip
            operands = (
                input, batch.weight, batch.bias, *vectors, mask, batch.target, factor, class_weight,
            )  # fmt: skip
            loss, *stats = token_losses(given.reduction != "none", setting, operands)
    loss = batch.shaped(loss)
    return (loss, _stats(stats, form, batch.lead)) if given.return_stats else loss


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
    batch: Batch, gain: Tensor | None, form: Pairwise, class_weight: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """log Σ_j φ(s_j) − log φ(s_y), and the statistics of `token_losses`."""
    assert form.activation.quadratic is not None
    assert batch.weight is not None
    a, b, c = form.activation.quadratic
    counted, logits = batch.counted, quadratic.logits_of(batch)
    score = logits.target if gain is None else logits.target * gain
    total = quadratic.log_sum(logits, gain, (a, b, c), batch.classes)
    loss = total - torch.log(a + score * (b + c * score))
    if class_weight is not None:
        loss = loss * class_weight[batch.classes_of_tokens]
    nan = torch.full_like(score, float("nan"))
    stats = [nan, nan, score.detach().where(counted, nan), counted * float(batch.classes)]
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
