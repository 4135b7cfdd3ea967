"""Logarithms of the probabilities that an output layer gives to all classes, or to the targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.tiled.walk import kept
from attnzoo.core.call import Call, in_full_precision
from attnzoo.core.forms import FromStatistics, Pairwise, Variant
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.functional.probabilities import probabilities
from attnzoo.losses.arguments import check_layer, check_loss, output_call, output_form
from attnzoo.losses.dispatch import LossStats

LOGITS = 2**22  # number of logits held at a time where targets need those of all classes
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
    call = output_call(token, head.weight.shape[0], None)
    found, form = output_form(head.variant, call, token.shape[:-1], head.params)
    check_loss(found, form, label_smoothing, lse_penalty)
    return form


def has_zeros(form: Pairwise) -> bool:
    """Whether the probability of a class can be exactly 0, apart from underflow."""
    phi = form.activation
    return form.normalize == "select" or not (phi.exponential or phi.positive)


def log_probabilities(input: Tensor, head: Head) -> Tensor:
    """log w (*, V) of all classes for hidden states (*, d), in fp32 or fp64; differentiable."""
    input, weight = cast_by_autocast(input, head.weight)
    bias = None if head.bias is None else cast_by_autocast(head.bias)[0]
    classes = check_layer(input, weight, bias)
    lead = input.shape[:-1]
    with in_full_precision(input.device):
        call = output_call(input.reshape(-1, input.shape[-1]), classes, None)
        found, form = output_form(head.variant, call, lead, head.params)
        dtype = call.dtype
        bias = None if bias is None else bias.to(dtype)
        z = torch.nn.functional.linear(input.to(dtype), weight.to(dtype), bias)
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        return _log_weights(z.reshape(-1, classes), call, found, form, head.params).view(z.shape)


def _log_weights(
    z: Tensor, call: Call, variant: Variant, form: Pairwise, params: dict[str, Any]
) -> Tensor:
    """log w of logits (N, V)."""
    if not form.activation.exponential or form.normalize not in ("sum", "select"):
        given = {**(variant.output_defaults or {}), **params}
        return _log(probabilities(z, variant.name, **given))
    assert not isinstance(form.gain, FromStatistics)
    s = z * call.per_query(form.gain)[0, 0][:, None]
    if form.normalize == "select":
        s = s.masked_fill(~kept(s.detach(), form.keep), NEG_INF)
    # log w is exact where w underflows.
    lse = s.logsumexp(-1, keepdim=True)
    if form.sink is not None:
        lse = torch.logaddexp(lse, call.per_query(form.sink)[0, 0][:, None])
    return s - lse


def _log(w: Tensor) -> Tensor:
    """log w, −∞ with gradient 0 where w = 0."""
    return w.masked_fill(w == 0, 1.0).log().masked_fill(w == 0, NEG_INF)


@torch.no_grad()
def target_log_probabilities(
    input: Tensor, head: Head, target: Tensor, stats: LossStats, ignore_index: int
) -> Tensor:
    """log w_y (*) of the targets, NaN where they are ignored.

    It follows from ``stats`` where these have the normalizer. Otherwise logits are computed again,
    for some tokens at a time.
    """
    classes, lead = head.weight.shape[0], target.shape
    flat = input.detach().reshape(-1, input.shape[-1])
    score = stats.target_score.reshape(-1)
    with in_full_precision(input.device):
        call = output_call(flat, classes, None)
        _, form = output_form(head.variant, call, lead, head.params)
        offset, shape, sink = (
            None if x is None else call.per_query(x)[0, 0]
            for x in (form.offset, form.shape, form.sink)
        )
        if form.normalize == "sum" and stats.lse is not None:
            lse = stats.lse.reshape(-1)
            found = score - (lse if sink is None else torch.logaddexp(lse, sink))
        elif stats.threshold is not None:
            found = form.activation.value(score - stats.threshold.reshape(-1), shape).log()
        elif form.normalize == "none":
            assert offset is not None
            found = form.activation.value(score - offset, shape).log()
        else:
            found = _by_chunks(flat, head, target.reshape(-1), ignore_index)
    ignored = target == ignore_index
    return found.reshape(lead).masked_fill(ignored, float("nan"))


def _by_chunks(input: Tensor, head: Head, target: Tensor, ignore_index: int) -> Tensor:
    column = target.where(target != ignore_index, 0)[:, None]
    size = max(1, LOGITS // head.weight.shape[0])
    parts = zip(input.split(size), column.split(size))
    found = [log_probabilities(h, head).gather(1, y)[:, 0] for h, y in parts]
    return torch.cat(found) if found else input.new_empty(0)
