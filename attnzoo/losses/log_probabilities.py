"""Logarithms of the probabilities that an output layer gives to all classes, or to the targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.tiled.walk import kept
from attnzoo.core.call import in_full_precision
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.functional.largest import Blocks, largest
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.functional.probabilities import probabilities
from attnzoo.functional.topk import COPIED, TopK, check_k, joined, parts, rows_per_step
from attnzoo.losses.arguments import BoundForm, bind_form, check_layer, check_loss, check_plain
from attnzoo.losses.dispatch import LossStats

LOGITS = 2**22  # logits held at a time on a CPU, if log w_y needs the logits of all classes
NEG_INF = float("-inf")


class Head(NamedTuple):
    """An output layer with the parameters of its variant."""

    weight: Tensor  # [V, d]
    bias: Tensor | None  # [V]
    variant: str
    softcap: float | None
    params: dict[str, Any]


def check_head(head: Head, label_smoothing: float, lse_penalty: float) -> Pairwise:
    """The form of the layer's variant; raises ValueError if it has no loss with these options."""
    tensors = [x for x in head.params.values() if isinstance(x, Tensor)]
    token = torch.zeros(1, 1, device=tensors[0].device if tensors else "cpu")
    found = _bind(head, token, token.shape[:-1])
    check_loss(found.bound.variant, found.form, label_smoothing, lse_penalty)
    return found.form


def _bind(head: Head, input: Tensor, lead: torch.Size) -> BoundForm:
    classes = head.weight.shape[0]
    return bind_form("OutputLayer", head.variant, input, classes, None, head.params, lead)


def has_zeros(form: Pairwise) -> bool:
    """Whether the probability of a class can be exactly 0, apart from underflow."""
    phi = form.activation
    return form.normalize == "select" or not (phi.exponential or phi.positive)


def log_probabilities(input: Tensor, head: Head) -> Tensor:
    """log w (*, V) of all classes for hidden states (*, d), in fp32 or fp64; differentiable."""
    check_plain(input=input, linear_weight=head.weight, linear_bias=head.bias)
    input, weight = cast_by_autocast(input, head.weight)
    bias = None if head.bias is None else cast_by_autocast(head.bias)[0]
    classes = check_layer(input, weight, bias)
    lead = input.shape[:-1]
    with in_full_precision(input.device):
        found = _bind(head, input.reshape(-1, input.shape[-1]), lead)
        dtype = found.call.dtype
        bias = None if bias is None else bias.to(dtype)
        z = torch.nn.functional.linear(input.to(dtype), weight.to(dtype), bias)
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        return _log_weights(z.reshape(-1, classes), found, head.params).view(z.shape)


@torch.no_grad()
def topk_by_chunks(
    log_prob: Callable[[Tensor], Tensor], input: Tensor, k: int, classes: int
) -> TopK:
    """The k most probable classes of tokens (*, d), from ``log_prob`` of some tokens at a time."""
    k = check_k(k, classes, f"the number of classes, {classes}")
    flat, lead = input.reshape(-1, input.shape[-1]), input.shape[:-1]
    found = []
    for part in parts(flat.shape[0], rows_per_step(COPIED, classes, input.device)):
        logs, indices = largest(Blocks(log_prob(flat[part])), k)
        found.append((logs.exp(), indices))
    values, indices = joined(found, k, input)
    return TopK(values.reshape(*lead, k), indices.reshape(*lead, k))


def _log_weights(z: Tensor, found: BoundForm, params: dict[str, Any]) -> Tensor:
    """log w of logits (N, V)."""
    form, variant = found.form, found.bound.variant
    if not form.has_lse:
        given = {**(variant.output_defaults or {}), **params}
        return _log(probabilities(z, variant.name, **given))
    gain, sink = form.gain, found.vector(form.sink)
    assert not isinstance(gain, FromStatistics)
    vector = found.vector(gain)
    assert vector is not None
    if vector.requires_grad:  # a class with logit −∞ has no part in the gradient of the gain
        off = z == NEG_INF
        s = (z.masked_fill(off, 0.0) * vector[:, None]).masked_fill(off, NEG_INF)
    else:
        s = z * vector[:, None]
    if form.normalize == "select":
        s = s.masked_fill(~kept(s.detach(), form.keep), NEG_INF)
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
    input: Tensor, head: Head, target: Tensor, stats: LossStats, ignore_index: int
) -> Tensor:
    """log w_y (*) of the targets, NaN where they are ignored.

    They are computed from ``stats`` if possible. Otherwise logits are computed again, for some
    tokens at a time.
    """
    flat = input.detach().reshape(-1, input.shape[-1])
    score = stats.target_score.reshape(-1)
    with in_full_precision(input.device):
        found = _bind(head, flat, target.shape)
        form = found.form
        offset, shape, sink = map(found.vector, (form.offset, form.shape, form.sink))
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


def _by_chunks(input: Tensor, head: Head, target: Tensor, ignore_index: int) -> Tensor:
    column = target.where(target != ignore_index, 0)[:, None]
    size = rows_per_step(LOGITS, head.weight.shape[0], input.device)
    parts = zip(input.split(size), column.split(size))
    found = [log_probabilities(h, head).gather(1, y)[:, 0] for h, y in parts]
    return torch.cat(found) if found else input.new_empty(0)
