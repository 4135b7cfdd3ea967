"""The probabilities that an output layer gives to its classes, and the form of its variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors, rule_of
from attnzoo.backends.tiled.walk import selection_mask
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import check_dense
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.core.variant import Variant
from attnzoo.functional.largest import Blocks, largest
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.functional.probabilities import probabilities
from attnzoo.functional.score_rows import BoundVariant, RowCall, bind_rows, row_call
from attnzoo.functional.top_weights import top_weights
from attnzoo.functional.topk import COPIED, TopK, check_k, joined, parts, rows_per_step
from attnzoo.losses.arguments import check_class_mask, check_layer, check_plain, check_softcap
from attnzoo.losses.chunks import Layer, chunk_logits
from attnzoo.losses.rules import NEG_INF

LOGITS = 2**22  # logits held at a time on a CPU


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


class BoundForm(NamedTuple):
    """A variant with its parameters, and its form for the tokens of an output layer."""

    bound: BoundVariant
    call: RowCall
    form: Pairwise

    @property
    def vectors(self) -> Vectors:
        """The form's vectors with one entry per token, (N,); None for a gain of 1."""
        gain, offset, shape, sink = (getattr(self.form, name) for name in Vectors._fields)
        assert not isinstance(gain, FromStatistics)
        gain = None if not isinstance(gain, Tensor) and gain == 1 else gain
        return Vectors(*map(self._per_token, (gain, offset, shape, sink)))

    def _per_token(self, value: Tensor | float | None) -> Tensor | None:
        if value is None:
            return None
        return self.call.per_query(value).expand(1, self.call.heads, 1)[0, :, 0]


def bind_form(
    function: str,
    variant: str,
    input: Tensor,
    classes: int,
    class_mask: Tensor | None,
    params: dict[str, Any],
    lead: torch.Size,
    keywords: Iterable[str] = (),
) -> BoundForm:
    """Validate the variant and its parameters for tokens ``input`` (N, d) of the shape ``lead``.

    ``keywords``: the other keywords of the function, for errors.
    """
    bound = bind_rows(
        function, variant, input, params, tuple(lead), output_layer=True, keywords=keywords
    )
    # A form depends on the number of scores, not on their values. One expanded number stands for
    # all scores, so that they take no memory.
    scores = input.new_empty((), dtype=score_dtype(input)).expand(input.shape[0], classes)
    call = row_call(scores, class_mask, input.dtype)
    form = bound.pairwise(call)
    if form is None:
        extras = ", ".join(bound.extras(call))
        why = "it has no pairwise form"
        if extras:
            why = f"its form has {extras}, which losses do not support"
        raise ValueError(f"variant {variant!r} has no loss: {why}")
    return BoundForm(bound, call, form)


def check_loss(
    variant: Variant, form: Pairwise, label_smoothing: float, lse_penalty: float
) -> None:
    """Raise unless the form has a loss with these options."""
    phi, how = form.activation, form.normalize
    reason = None
    if isinstance(form.gain, FromStatistics):
        reason = "its gain depends on statistics of all scores"
    elif how == "sum" and not (phi.exponential or phi.positive):
        reason = f"the weight of the target can be 0 (activation {phi.name} is not positive)"
    elif how == "select" and not phi.exponential:
        reason = f"normalize='select' has a loss only with φ = exp, got {phi.name}"
    elif form.mass is not None:
        reason = "the number of classes it selects depends on their weights (mass)"
    elif phi.integral is None and (how == "none" or (how == "threshold" and phi.alpha is None)):
        reason = f"activation {phi.name} has no integral"
    elif (
        how in ("none", "threshold")
        and phi.alpha is None
        and isinstance(form.shape, Tensor)
        and form.shape.requires_grad
    ):
        reason = f"the loss has no gradient for the parameter of activation {phi.name}"
    if reason is not None:
        raise ValueError(f"variant {variant.name!r} has no loss: {reason}")
    if label_smoothing and (how == "select" or (how == "threshold" and phi.alpha is None)):
        raise ValueError(
            f"label_smoothing must be 0 for variant {variant.name!r}, got {label_smoothing}"
            + ("; classes that are not kept have no score" if how == "select" else "")
        )
    if lse_penalty and not form.has_lse:
        raise ValueError(
            f"lse_penalty must be 0 for variant {variant.name!r}, which has no log-sum-exp, got "
            f"{lse_penalty}"
        )


class OutputHead(NamedTuple):
    """An output layer with the parameters of its variant."""

    weight: Tensor  # [V, d]
    bias: Tensor | None  # [V]
    variant: str
    softcap: float | None
    params: dict[str, Any]


def check_head(head: OutputHead, label_smoothing: float, lse_penalty: float) -> Pairwise:
    """The form of the layer's variant; raises ValueError if it has no loss with these options."""
    tensors = [x for x in head.params.values() if isinstance(x, Tensor)]
    token = torch.zeros(1, 1, device=tensors[0].device if tensors else "cpu")
    layer = _bind(head, token, token.shape[:-1])
    check_loss(layer.bound.variant, layer.form, label_smoothing, lse_penalty)
    return layer.form


def _bind(head: OutputHead, input: Tensor, lead: torch.Size) -> BoundForm:
    classes = head.weight.shape[0]
    return bind_form("OutputLayer", head.variant, input, classes, None, head.params, lead)


def has_zeros(form: Pairwise) -> bool:
    """Whether the probability of a class can be exactly 0, apart from underflow."""
    phi = form.activation
    return form.normalize == "select" or not (phi.exponential or phi.positive)


def log_probabilities(input: Tensor, head: OutputHead) -> Tensor:
    """log w (*, V) of all classes for hidden states (*, d), in fp32 or fp64; differentiable."""
    check_plain(input=input, linear_weight=head.weight, linear_bias=head.bias)
    input, weight = cast_by_autocast(input, head.weight)
    bias = None if head.bias is None else cast_by_autocast(head.bias)[0]
    classes = check_layer(input, weight, bias)
    lead = input.shape[:-1]
    with in_full_precision(input.device):
        layer = _bind(head, input.reshape(-1, input.shape[-1]), lead)
        dtype = layer.call.dtype
        bias = None if bias is None else bias.to(dtype)
        z = torch.nn.functional.linear(input.to(dtype), weight.to(dtype), bias)
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        return _log_weights(z.reshape(-1, classes), layer, head.params).view(z.shape)


@torch.no_grad()
def topk_by_chunks(
    log_prob: Callable[[Tensor], Tensor], input: Tensor, k: int, classes: int
) -> TopK:
    """The k most probable classes of tokens (*, d), from ``log_prob`` of some tokens at a time."""
    k = check_k(k, classes, f"the number of classes, {classes}")
    flat, lead = input.reshape(-1, input.shape[-1]), input.shape[:-1]
    chunks = []
    for part in parts(flat.shape[0], rows_per_step(COPIED, classes, input.device)):
        logs, indices = largest(Blocks(log_prob(flat[part])), k)
        chunks.append((logs.exp(), indices))
    values, indices = joined(chunks, k, input)
    return TopK(values.reshape(*lead, k), indices.reshape(*lead, k))


def _log_weights(z: Tensor, layer: BoundForm, params: dict[str, Any]) -> Tensor:
    """log w of logits (N, V)."""
    form, variant = layer.form, layer.bound.variant
    if not form.has_lse:
        params = {**(variant.output_defaults or {}), **params}
        return _log(probabilities(z, variant.name, **params))
    gain, sink = layer.vectors.gain, layer.vectors.sink
    s = z
    if gain is not None and gain.requires_grad:
        off = z == NEG_INF  # a class with logit −∞ has no part in the gradient of the gain
        s = (z.masked_fill(off, 0.0) * gain[:, None]).masked_fill(off, NEG_INF)
    elif gain is not None:
        s = z * gain[:, None]
    if form.normalize == "select":
        s = s.masked_fill(~selection_mask(s.detach(), rule_of(form)), NEG_INF)
    # Unlike log(softmax), this is accurate where w underflows. The difference of two large numbers
    # would lose digits.
    peak = s.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == NEG_INF, 0.0)
    s = s - peak
    lse = s.logsumexp(-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None] - peak)
    return s - lse


def _log(w: Tensor) -> Tensor:
    """log w, −∞ with gradient 0 where w = 0."""
    return w.masked_fill(w == 0, 1.0).log().masked_fill(w == 0, NEG_INF)


@torch.no_grad()
def target_log_probabilities(
    input: Tensor, head: OutputHead, target: Tensor, stats: LossStats, ignore_index: int
) -> Tensor:
    """log w_y (*) of the targets, NaN where they are ignored.

    They are computed from ``stats`` if possible. Otherwise logits are computed again, for some
    tokens at a time.
    """
    flat = input.detach().reshape(-1, input.shape[-1])
    score = stats.target_score.reshape(-1)
    with in_full_precision(input.device):
        layer = _bind(head, flat, target.shape)
        form = layer.form
        _, offset, shape, sink = layer.vectors
        if form.normalize == "sum" and stats.lse is not None:
            lse = stats.lse.reshape(-1)
            log_w = score - (lse if sink is None else torch.logaddexp(lse, sink))
        elif stats.threshold is not None:
            log_w = form.activation.value(score - stats.threshold.reshape(-1), shape).log()
        elif form.normalize == "none":
            assert offset is not None
            log_w = form.activation.value(score - offset, shape).log()
        else:
            log_w = None
    if log_w is None:  # outside of the context, because these logits follow autocast
        log_w = _by_chunks(flat, head, target.reshape(-1), ignore_index)
    ignored = target == ignore_index
    return log_w.reshape(target.shape).masked_fill(ignored, float("nan"))


def _by_chunks(input: Tensor, head: OutputHead, target: Tensor, ignore_index: int) -> Tensor:
    column = target.where(target != ignore_index, 0)[:, None]
    size = rows_per_step(LOGITS, head.weight.shape[0], input.device)
    pairs = zip(input.split(size), column.split(size))
    chunks = [log_probabilities(h, head).gather(1, y)[:, 0] for h, y in pairs]
    return torch.cat(chunks) if chunks else input.new_empty(0)


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
        input, linear_weight, linear_bias, class_mask, softcap: As for `attnzoo.losses.linear_loss`,
            but no DTensors.
        k: How many classes, from 1 to V.
        variant: A name from `list_variants`, of a variant whose weights do not depend on positions.
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
    original = input
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
        chunks = []
        for part in parts(count, step):
            z = chunk_logits(layer, part, buffer[: part.stop - part.start])
            if softcap is not None:
                z.div_(softcap).tanh_().mul_(softcap)
            seen = mask if mask is None or mask.shape[0] == 1 else mask[part]
            chunks.append(top_weights(bound.part(part), z, seen, k, original.dtype, inplace=True))
        values, indices = joined(chunks, k, original)
        return TopK(values.reshape(*lead, k), indices.reshape(*lead, k))
