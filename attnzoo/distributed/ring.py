"""Attention with keys and values that travel around a ring of ranks.

No rank ever holds all keys: its own, those of one other rank, and those that are arriving.
Each rank merges the results over the keys of each rank (`backends.tiled.partials`). In the
backward, the gradients of keys and values travel with them, in fp32, and return to their rank after
R steps.

Bytes sent per rank, with K, V the sizes of its keys and values and dK, dV those of their
gradients in fp32 (fp64 for fp64 inputs):

    forward     (R − 1) · (K + V)
    backward    (R − 1) · (K + V) + R · (dK + dV)
    threshold   (R − 1) · K more in the forward for the row maximum and for each solver step
    statistics  (R − 1) · K more in the forward, and (R − 1) · K + R · dK in the backward if the
                gain is differentiable
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.backends.tiled import partials, walk
from attnzoo.backends.tiled.threshold import MAX_STEPS, largest_excess, newton_step, solved
from attnzoo.backends.tiled.walk import Partial, TiledSaved
from attnzoo.core.collectives import all_reduce, circulate
from attnzoo.distributed.query_chunks import (
    NAMES,
    Meeting,
    QueryChunk,
    Ring,
    flat_gradients,
    go_round_back,
    meetings,
    wanted_names,
    with_tensors,
)


def ring_attention(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[QueryChunk]
) -> tuple[Tensor, Tensor | None]:
    """The output (B, H, N local, Dv) in the dtype of scores, and lse if the calls ask for it."""
    flat = [x for chunk in chunks for x in chunk.tensors()]
    out, lse = _Attention.apply(ring, chunks, q, k, v, *flat)
    return out, lse if chunks[0].formed.call.return_lse else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        chunks: Sequence[QueryChunk],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *flat: Any,
    ) -> tuple[Tensor, Tensor]:
        chunks = with_tensors(chunks, flat)
        if chunks[0].formed.rule.normalize == "threshold":
            saved = _threshold(ring, q, k, v, chunks, needs_grad=any(ctx.needs_input_grad))
        else:
            saved = _sums(ring, q, k, v, chunks)
        out, lse = torch.cat([x.out for x in saved], dim=2), q.new_empty(0)
        if chunks[0].formed.call.return_lse:
            lse = torch.cat([x.lse for x in saved if x.lse is not None], dim=2)
        else:
            ctx.mark_non_differentiable(lse)
        per_chunk = [x for each in saved for x in (each.tau, each.z, each.peak, each.mean)]
        ctx.save_for_backward(q, k, v, out, lse, *per_chunk, *flat)
        ctx.ring = ring
        ctx.chunks = [chunk.with_tensors([None] * len(NAMES)) for chunk in chunks]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        dout, dlse = grad_outputs
        q, k, v, out, lse, *more = ctx.saved_tensors
        flat = more[4 * len(ctx.chunks) :]
        chunks = with_tensors(ctx.chunks, flat)
        wanted = wanted_names(ctx.needs_input_grad[5:], len(chunks))
        saved = []
        for i, chunk in enumerate(chunks):
            tau, z, peak, mean = more[4 * i : 4 * i + 4]
            chunk_lse = lse[:, :, chunk.part] if chunk.formed.call.return_lse else None
            saved.append(TiledSaved(out[:, :, chunk.part], chunk_lse, tau, z, peak, mean))

        def gradients(meeting: Meeting, held: Sequence[Tensor]) -> dict[str, Tensor]:
            chunk, i = meeting.chunk, meeting.number
            call, vectors = chunk.formed.call, chunk.formed.vectors
            # The saved weights include the sink, which `QueryChunk.among` leaves out.
            vectors = vectors._replace(sink=chunks[i].formed.vectors.sink)
            chunk_q, chunk_k, chunk_v = (x.to(call.dtype) for x in (q[:, :, chunk.part], *held))
            chunk_dlse = dlse[:, :, chunk.part] if call.return_lse else None
            names = [name for name in wanted[i] if name != "sink"]
            chunk_dout = dout[:, :, chunk.part]
            formed = chunk.formed._replace(vectors=vectors)
            return walk.gradients(
                formed, chunk_q, chunk_k, chunk_v, saved[i], chunk_dout, chunk_dlse, names
            )

        dq, (dk, dv), others = go_round_back(ctx.ring, chunks, q, (k, v), "kv", wanted, gradients)
        for chunk, each, names, made in zip(chunks, saved, wanted, others, strict=True):
            if "sink" in names:  # from whole rows
                made["sink"] = _sink_gradient(chunk, each, dout[:, :, chunk.part])
        return None, None, dq, dk, dv, *flat_gradients(others, flat)


def _sink_gradient(chunk: QueryChunk, saved: TiledSaved, dout: Tensor) -> Tensor:
    _, rule, vectors, _, _ = chunk.formed
    assert vectors.sink is not None
    z = walk.weight_sum(chunk.formed, saved.tau, saved.z)
    delta = (dout / z[..., None] * saved.out).sum(-1)
    gradient = walk.sink_gradient(rule, delta, vectors.sink, saved.tau, vectors.shape)
    return gradient.sum_to_size(vectors.sink.shape)


def _sums(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[QueryChunk]
) -> list[TiledSaved]:
    """Forms whose partials merge."""
    sums = [partials.nothing(chunk.formed) for chunk in chunks]
    for source, (some_k, some_v) in circulate((k, v), ring.ranks):
        for i, chunk, keys, _ in meetings(ring, chunks, source):
            chunk_k, chunk_v = some_k[:, :, keys], some_v[:, :, keys]
            new = walk.partial(chunk.formed, q[:, :, chunk.part], chunk_k, chunk_v)
            sums[i] = partials.merge(chunk.formed.rule, sums[i], new)
    return [walk.divided(chunk.formed, x) for chunk, x in zip(chunks, sums, strict=True)]


def _threshold(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[QueryChunk], needs_grad: bool
) -> list[TiledSaved]:
    """Solve for the thresholds, with one round of the keys per step, then sum the outputs."""
    tops = [partials.nothing(chunk.formed).z.fill_(walk.NEG_INF) for chunk in chunks]
    for source, (some_k,) in circulate((k,), ring.ranks):
        for i, chunk, keys, _ in meetings(ring, chunks, source):
            new = partials.peaks(chunk.formed, q[:, :, chunk.part], some_k[:, :, keys])
            tops[i] = torch.maximum(tops[i], new)
    tops = [top.masked_fill(top == walk.NEG_INF, 0.0) for top in tops]
    taus = _solve(ring, q, k, chunks, tops)
    sums: list[partials.ThresholdPartial | None] = [None] * len(chunks)
    for source, (some_k, some_v) in circulate((k, v), ring.ranks):
        for i, chunk, keys, _ in meetings(ring, chunks, source):
            chunk_k, chunk_v = some_k[:, :, keys], some_v[:, :, keys]
            chunk_q = q[:, :, chunk.part]
            new = partials.threshold_partial(
                chunk.formed, chunk_q, chunk_k, chunk_v, tops[i], taus[i], needs_grad
            )
            old = sums[i]
            sums[i] = new if old is None else partials.ThresholdPartial(*map(torch.add, old, new))
    saved = []
    for chunk, x, top, tau in zip(chunks, sums, tops, taus, strict=True):
        out, z, _ = partials.nothing(chunk.formed)
        out, z, mean, slope = x or (out, z, torch.zeros_like(out), torch.zeros_like(z))
        mean = mean.div_(slope.masked_fill(slope == 0, 1.0)[..., None]) if needs_grad else None
        done = walk.divided(chunk.formed, Partial(out, z, tau))
        saved.append(done._replace(peak=top, mean=mean))
    return saved


def _solve(
    ring: Ring, q: Tensor, k: Tensor, chunks: Sequence[QueryChunk], tops: Sequence[Tensor]
) -> list[Tensor]:
    """τ of each chunk, relative to the maximum of the scores. All ranks take equally many steps."""
    taus = [torch.zeros_like(top) for top in tops]
    for _ in range(MAX_STEPS):
        sums = [(torch.zeros_like(tau), torch.zeros_like(tau)) for tau in taus]
        for source, (some_k,) in circulate((k,), ring.ranks):
            for i, chunk, keys, _ in meetings(ring, chunks, source):
                chunk_q, chunk_k = q[:, :, chunk.part], some_k[:, :, keys]
                new = partials.threshold_sums(chunk.formed, chunk_q, chunk_k, tops[i], taus[i])
                sums[i] = (sums[i][0] + new[0], sums[i][1] + new[1])
        done = True
        for i, chunk in enumerate(chunks):
            excess, step = newton_step(
                *sums[i], chunk.formed.vectors.shape, chunk.formed.rule.activation
            )
            taus[i] = taus[i] + step
            done = done and (excess.numel() == 0 or solved(largest_excess(excess), step, taus[i]))
        going_on = torch.tensor(0 if done else 1, device=q.device)
        if not bool(all_reduce(going_on, "max", ring.ranks)):
            break
    return taus
