"""Attention in which no rank holds all keys: the ring, and the states of linear forms.

A linear form sends the state of each chunk, whose size does not depend on the number of tokens.
Bytes sent per rank: (R − 1) · chunks per rank · size of a state; as many for its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.backends import linear
from attnzoo.backends.shared_operands import Terms, Vectors
from attnzoo.backends.tiled.walk import PairwiseCall
from attnzoo.core.activations import IDENTITY
from attnzoo.core.call import Call, in_full_precision
from attnzoo.core.collectives import all_gather
from attnzoo.core.forms import Form, FromStatistics, Linear, NoForm, Pairwise
from attnzoo.distributed.gather_methods import Result
from attnzoo.distributed.inputs import Inputs, placeholder
from attnzoo.distributed.query_chunks import QueryChunk, Ring
from attnzoo.distributed.ring import ring_attention
from attnzoo.distributed.statistics import ring_statistics
from attnzoo.functional.linear_attention import scan_for
from attnzoo.functional.prepare import ValidatedCall


def ring_method(inputs: Inputs, readies: list[ValidatedCall], forms: list[Form]) -> Result:
    """Run the form of each chunk; see `circulating_form`."""
    call = readies[0].call
    with in_full_precision(call.device):
        if isinstance(forms[0], Linear) and inputs.sums_states(forms[0], call):
            linears = [form for form in forms if isinstance(form, Linear)]
            return _by_states(inputs, readies, linears).to(call.input_dtype), None
        out, lse = _by_ring(inputs, readies, forms)
    return out.to(call.input_dtype), lse


def chunks_of(inputs: Inputs, full_inputs: Inputs) -> list[ValidatedCall]:
    """The call of each chunk of this rank with all keys of the sequence."""
    shards = inputs.shards
    k, v = (placeholder(x, shards.total) for x in (inputs.k, inputs.v))
    grads = torch.is_grad_enabled() and (inputs.k.requires_grad or inputs.v.requires_grad)
    readies = []
    for part, at in zip(shards.in_shard(), shards.in_sequence(inputs.ranks.rank), strict=True):
        ready = full_inputs.of_chunk(part, at.start, shards.total, k, v)
        needs_grad = ready.call.needs_grad or grads
        readies.append(ready._replace(call=replace(ready.call, needs_grad=needs_grad)))
    return readies


def circulating_form(inputs: Inputs, ready: ValidatedCall, forms: Sequence[Form]) -> Form:
    """The form of a chunk that the ring runs. Raises ValueError if there is none."""
    name = ready.variant.name
    linears = [form for form in forms if isinstance(form, Linear)]
    pairwise = [form for form in forms if isinstance(form, Pairwise)]
    if linears and inputs.sums_states(linears[0], ready.call):
        return linears[0]
    if ready.call.return_lse and not any(form.softmax for form in pairwise):
        reason = "return_lse must be False, except for a softmax"
    elif pairwise and pairwise[0].normalize != "select":
        return pairwise[0]
    elif pairwise:
        reason = f"{name} selects keys, which needs all scores of a row"
    elif linears and ready.call.softcap is None:
        return linears[0]
    elif linears:
        reason = "softcap must be None for a linear form: there is no score to cap"
    else:
        why = [form.why for form in forms if isinstance(form, NoForm) and form.kind == "pairwise"]
        reason = why[0] if why else f"{name} has no pairwise or linear form"
    raise ValueError(
        f"method 'ring' does not support this call: {reason}; 'all_gather' and 'ulysses' do"
    )


def _by_ring(inputs: Inputs, readies: list[ValidatedCall], forms: list[Form]) -> Result:
    q, k, v, calls = inputs.q, inputs.k, inputs.v, [ready.call for ready in readies]
    pairwise = [form for form in forms if isinstance(form, Pairwise)]
    if not pairwise:
        linears = [form for form in forms if isinstance(form, Linear)]
        q, k, v, calls, pairwise = _as_pairwise(inputs, calls, linears)
    ring, parts = Ring(inputs.shards, inputs.ranks), inputs.shards.in_shard()
    chunks = [
        QueryChunk(part, PairwiseCall.of(call, form))
        for part, call, form in zip(parts, calls, pairwise, strict=True)
    ]
    gain = pairwise[0].gain
    if isinstance(gain, FromStatistics):
        with torch.set_grad_enabled(torch.is_grad_enabled() and gain.differentiable):
            statistics = ring_statistics(ring, q, k, [_bare(chunk) for chunk in chunks])
        chunks = [
            QueryChunk(part, PairwiseCall.of(call, replace(form, gain=form.gain.of(each))))
            for part, call, form, each in zip(parts, calls, pairwise, statistics, strict=True)
            if isinstance(form.gain, FromStatistics)
        ]
    return ring_attention(ring, q, k, v, chunks)


def _bare(chunk: QueryChunk) -> QueryChunk:
    """Without the vectors of the form: statistics are those of the logits with their bias."""
    return chunk._replace(formed=chunk.formed._replace(vectors=Vectors(), terms=Terms()))


def _as_pairwise(
    inputs: Inputs, calls: list[Call], forms: list[Linear]
) -> tuple[Tensor, Tensor, Tensor, list[Call], list[Pairwise]]:
    """Features in place of queries and keys; φ is then the identity."""
    qs, ks, vs, made = [], [], [], []
    for part, call, form in zip(inputs.shards.in_shard(), calls, forms, strict=True):
        q, k, v = (x[:, :, part] for x in (inputs.q, inputs.k, inputs.v))
        if form.per_query_head:
            call, (k, v) = call.with_repeated_keys(k, v)
        at = call.query_positions
        qs.append(form.of_queries(call.scale * q.to(call.dtype), at))
        ks.append(form.features(k.to(call.dtype), at))
        vs.append(v)
        made.append(replace(call, scale=1.0))
    q, k, v = (torch.cat(xs, dim=2) for xs in (qs, ks, vs))
    return q, k, v, made, [Pairwise(IDENTITY, "sum")] * len(made)


def _by_states(inputs: Inputs, readies: list[ValidatedCall], forms: list[Linear]) -> Tensor:
    """Each rank adds up the states of the chunks that its queries see."""
    shards, ranks = inputs.shards, inputs.ranks
    calls, states = [], []
    for part, at, ready, form in zip(
        shards.in_shard(), shards.in_sequence(ranks.rank), readies, forms, strict=True
    ):
        call = ready.call
        mask = None if call.mask is None else call.mask[..., at]
        call = replace(call, keys=shards.chunk, key_origin=at.start, mask=mask)
        if linear.sums_in_fp64(form, call):
            call = replace(call, dtype=torch.float64)
        calls.append(call)
        states.append(linear.state_of(inputs.k[:, :, part], inputs.v[:, :, part], call, form))
    everyone = shards.to_sequence(all_gather(torch.stack(states), 0, ranks), 0)
    out = []
    for part, chunk, call, form in zip(
        shards.in_shard(), shards.owned(ranks.rank), calls, forms, strict=True
    ):
        q, k, v = (x[:, :, part] for x in (inputs.q, inputs.k, inputs.v))
        if call.right != 0:
            out.append(linear.read(q, everyone.sum(0), call, form))
            continue
        scan = scan_for(form, call).scan
        assert scan is not None
        out.append(scan(q, k, v, call, form, everyone[:chunk].sum(0))[0])
    return torch.cat(out, dim=2)
