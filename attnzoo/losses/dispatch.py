"""Checks the arguments of a loss, then computes it from chunks of scores.

The loss of a quadratic φ can also be computed without scores; see `quadratic`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import is_dtensor
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.losses import quadratic
from attnzoo.losses.arguments import (
    BoundForm,
    LossArguments,
    bind_form,
    check_class_weight,
    check_loss,
    check_options,
)
from attnzoo.losses.batch import Batch, bind_batch
from attnzoo.losses.classes import WHOLE, ClassShard
from attnzoo.losses.operators import Setting, token_losses, weighted_sum

KEYWORDS = ("linear_bias", *LossArguments._fields)


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


class Checked(NamedTuple):
    """A validated call."""

    batch: Batch
    class_weight: Tensor | None
    found: BoundForm
    given: LossArguments


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
    tensors = (input, linear_weight, linear_bias, target, given.class_mask, given.weight)
    if any(map(is_dtensor, (*tensors, *params.values()))):
        from attnzoo.losses.sharded import Sharded, on_ranks, replicated  # slow to import

        def check(own: Sharded) -> Checked:
            layer = (own.input, own.weight, own.bias, own.target)
            return _checked(*layer, variant, own.given, own.params, own.shard)

        checked, mesh = on_ranks(
            input, linear_weight, linear_bias, target, variant, given, params, check
        )
        return replicated(_computed(checked), mesh)
    layer = (input, linear_weight, linear_bias, target)
    return _computed(_checked(*layer, variant, given, params, WHOLE, logits))


def _checked(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, target: Tensor, variant: str,
    given: LossArguments, params: dict[str, Any], shard: ClassShard, logits: bool = False,
) -> Checked:  # fmt: skip
    check_options(given.reduction, given.label_smoothing, given.lse_penalty, given.softcap,
                  given.ignore_index, given.return_stats)  # fmt: skip
    batch = bind_batch(
        input, weight, bias, target, given.ignore_index, given.reduction, given.class_mask,
        tuple(params.values()), logits=logits, shard=shard,
    )  # fmt: skip
    input, mask = batch.input, batch.class_mask
    class_weight = None
    if given.weight is not None:
        class_weight = check_class_weight(given.weight, batch.classes, input)
    with in_full_precision(input.device):
        found = bind_form(
            "linear_loss", variant, input, batch.classes, mask, params, batch.lead, KEYWORDS
        )
    check_loss(found.bound.variant, found.form, given.label_smoothing, given.lse_penalty)
    return Checked(batch, class_weight, found, given)


def _computed(call: Checked) -> Any:
    batch, class_weight, found, given = call
    input, form, mask = batch.input, found.form, batch.class_mask
    with in_full_precision(input.device):
        factor, vectors = batch.factor(class_weight), _vectors(found)
        if batch.weight is not None and _by_moments(form, given, batch):
            losses, stats = _quadratic_losses(batch, vectors.gain, form, class_weight)
            loss = losses if given.reduction == "none" else weighted_sum(losses, factor)
        else:
            setting = Setting(
                "form", given.ignore_index, activation=form.activation.key,
                normalize=form.normalize, keep=form.keep, softcap=given.softcap,
                label_smoothing=float(given.label_smoothing), lse_penalty=float(given.lse_penalty),
                want_stats=given.return_stats, **batch.shard.fields(),
            )  # fmt: skip
            own_mask = None if mask is None else batch.shard.own(mask)
            operands = (
                input, batch.weight, batch.bias, *vectors, own_mask, batch.target, factor,
                class_weight,
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


def _by_moments(form: Pairwise, given: LossArguments, batch: Batch) -> bool:
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
        and batch.shard.whole
        and quadratic.cheaper(batch.input.shape[0], batch.classes, batch.input.shape[1])
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
