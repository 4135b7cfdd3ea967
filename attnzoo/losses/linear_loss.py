"""linear_loss() and loss(): losses of output layers whose probabilities come from a variant."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import is_dtensor
from attnzoo.core.forms import Pairwise
from attnzoo.losses import moments
from attnzoo.losses.arguments import (
    LossCall,
    TokenBatch,
    bind_batch,
    check_class_weight,
    check_options,
)
from attnzoo.losses.forms import form_loss
from attnzoo.losses.operators import token_losses
from attnzoo.losses.probabilities import BoundForm, LossStats, bind_form, check_loss
from attnzoo.losses.rules import Options

KEYWORDS = ("linear_bias", *LossCall._fields[5:13])  # for errors


@overload
def linear_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, variant: str = "softmax", *,
    linear_bias: Tensor | None = None, class_mask: Tensor | None = None,
    softcap: float | None = None, weight: Tensor | None = None, label_smoothing: float = 0.0,
    lse_penalty: float = 0.0, ignore_index: int = -100, reduction: str = "mean",
    return_stats: Literal[False] = False, **params: Tensor | float | None,
) -> Tensor: ...  # fmt: skip
@overload
def linear_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, variant: str = "softmax", *,
    linear_bias: Tensor | None = None, class_mask: Tensor | None = None,
    softcap: float | None = None, weight: Tensor | None = None, label_smoothing: float = 0.0,
    lse_penalty: float = 0.0, ignore_index: int = -100, reduction: str = "mean",
    return_stats: Literal[True], **params: Tensor | float | None,
) -> tuple[Tensor, LossStats]: ...  # fmt: skip
@overload
def linear_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, variant: str = "softmax", *,
    linear_bias: Tensor | None = None, class_mask: Tensor | None = None,
    softcap: float | None = None, weight: Tensor | None = None, label_smoothing: float = 0.0,
    lse_penalty: float = 0.0, ignore_index: int = -100, reduction: str = "mean",
    return_stats: bool, **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, LossStats]: ...  # fmt: skip
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
        linear_weight: One row per class (V, d), of the same dtype. Of all losses, only this one
            takes a DTensor whose rows are spread over ranks; see the notes.
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
    return _loss(LossCall(
        input, linear_weight, linear_bias, target, variant, class_mask, softcap, weight,
        label_smoothing, lse_penalty, ignore_index, reduction, return_stats, params,
    ))  # fmt: skip


@overload
def loss(
    logits: Tensor, target: Tensor, variant: str = "softmax", *,
    class_mask: Tensor | None = None, softcap: float | None = None, weight: Tensor | None = None,
    label_smoothing: float = 0.0, lse_penalty: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean", return_stats: Literal[False] = False, **params: Tensor | float | None,
) -> Tensor: ...  # fmt: skip
@overload
def loss(
    logits: Tensor, target: Tensor, variant: str = "softmax", *,
    class_mask: Tensor | None = None, softcap: float | None = None, weight: Tensor | None = None,
    label_smoothing: float = 0.0, lse_penalty: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean", return_stats: Literal[True], **params: Tensor | float | None,
) -> tuple[Tensor, LossStats]: ...  # fmt: skip
@overload
def loss(
    logits: Tensor, target: Tensor, variant: str = "softmax", *,
    class_mask: Tensor | None = None, softcap: float | None = None, weight: Tensor | None = None,
    label_smoothing: float = 0.0, lse_penalty: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean", return_stats: bool, **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, LossStats]: ...  # fmt: skip
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
    return _loss(LossCall(
        logits, None, None, target, variant, class_mask, softcap, weight, label_smoothing,
        lse_penalty, ignore_index, reduction, return_stats, params, is_logits=True,
    ))  # fmt: skip


def _loss(call: LossCall) -> Any:
    if any(map(is_dtensor, (*call, *call.params.values()))):
        from attnzoo.losses.sharded import on_ranks, replicated  # slow to import

        checked, mesh = on_ranks(call, _checked)
        return replicated(_computed(*checked), mesh)
    return _computed(*_checked(call))


def _checked(call: LossCall) -> tuple[LossCall, TokenBatch, BoundForm]:
    check_options(call.reduction, call.label_smoothing, call.lse_penalty, call.softcap,
                  call.ignore_index, call.return_stats)  # fmt: skip
    batch = bind_batch(
        call.input, call.linear_weight, call.linear_bias, call.target, call.ignore_index,
        call.reduction, call.class_mask, tuple(call.params.values()), call.is_logits, call.shard,
    )  # fmt: skip
    if call.weight is not None:
        class_weight = check_class_weight(call.weight, batch.classes, batch.input)
        batch = batch._replace(class_weight=class_weight)
    with in_full_precision(batch.input.device):
        layer = bind_form(
            "linear_loss", call.variant, batch.input, batch.classes, batch.class_mask, call.params,
            batch.lead, KEYWORDS,
        )  # fmt: skip
    check_loss(layer.bound.variant, layer.form, call.label_smoothing, call.lse_penalty)
    return call, batch, layer


def _computed(call: LossCall, batch: TokenBatch, layer: BoundForm) -> Any:
    form = layer.form
    with in_full_precision(batch.input.device):
        vectors = layer.vectors
        if _by_moments(call, batch, form):
            loss, *stats = _quadratic_loss(batch, vectors.gain, form)
        else:
            options = Options(
                activation=form.activation.key, normalize=form.normalize, keep=form.keep,
                softcap=call.softcap, label_smoothing=float(call.label_smoothing),
                lse_penalty=float(call.lse_penalty), want_stats=call.return_stats,
            )  # fmt: skip
            loss, *stats = token_losses(batch, form_loss, options, vectors)
    return (loss, _stats(stats, form, batch.lead)) if call.return_stats else loss


def _by_moments(call: LossCall, batch: TokenBatch, form: Pairwise) -> bool:
    """Whether moments of the classes give the loss at a lower cost than scores; see `moments`."""
    return (
        form.normalize == "sum"
        and form.activation.quadratic is not None
        and form.sink is None
        and call.softcap is None
        and call.class_mask is None
        and not call.label_smoothing
        and not call.shard.group
        and batch.weight is not None
        and moments.cheaper(batch.input.shape[0], batch.classes, batch.input.shape[1])
    )


def _quadratic_loss(batch: TokenBatch, gain: Tensor | None, form: Pairwise) -> tuple[Tensor, ...]:
    """log Σ_j φ(s_j) − log φ(s_y), and the statistics of `token_losses`."""
    assert form.activation.quadratic is not None
    a, b, c = form.activation.quadratic
    counted, logits = batch.counted, moments.logits_of(batch)
    score = logits.target if gain is None else logits.target * gain
    total = moments.log_sum(logits, gain, (a, b, c), batch.classes)
    loss = total - torch.log(a + score * (b + c * score))
    if batch.class_weight is not None:
        loss = loss * batch.class_weight[batch.classes_of_tokens]
    nan = torch.full_like(score, float("nan"))
    support = counted * float(batch.classes)
    return batch.reduced(loss), nan, nan, score.detach().where(counted, nan), support


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
