"""Statistics of the logits when the keys travel around a ring; see `distributed.ring`.

With p_r = Z_r e^{m_r − m} / Z, the share of the keys of rank r, the entropy of the whole row is
H = Σ_r p_r · (H_r − log p_r).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.backends.tiled.statistics import (
    PartialStatistics,
    statistics,
    statistics_gradients,
)
from attnzoo.backends.tiled.walk import NEG_INF
from attnzoo.core.collectives import circulate
from attnzoo.core.forms import Statistics
from attnzoo.distributed.query_chunks import (
    Meeting,
    QueryChunk,
    Ring,
    flat_gradients,
    go_round_back,
    meetings,
    wanted_names,
    with_tensors,
)


def ring_statistics(
    ring: Ring, q: Tensor, k: Tensor, chunks: Sequence[QueryChunk]
) -> tuple[Statistics, ...]:
    """lse and entropy of the queries of each chunk, over all keys."""
    flat = [x for chunk in chunks for x in chunk.tensors()]
    flat_results = _Statistics.apply(ring, chunks, q, k, *flat)
    return tuple(Statistics(*flat_results[2 * i : 2 * i + 2]) for i in range(len(chunks)))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, chunks: Sequence[QueryChunk], q: Tensor, k: Tensor, *flat: Any
    ) -> tuple[Tensor, ...]:
        chunks = with_tensors(chunks, flat)
        partials: list[PartialStatistics | None] = [None] * len(chunks)
        for source, (held,) in circulate((k,), ring.ranks):
            for i, chunk, keys, _ in meetings(ring, chunks, source):
                new = statistics(chunk.formed.call, q[:, :, chunk.part], held[:, :, keys])
                old = partials[i]
                partials[i] = new if old is None else _merge(old, new)
        done = [x or _of_nothing(chunk) for x, chunk in zip(partials, chunks, strict=True)]
        ctx.save_for_backward(q, k, *(x for each in done for x in each), *flat)
        ctx.ring = ring
        ctx.chunks = [chunk.with_tensors([None] * len(chunk.tensors())) for chunk in chunks]
        return tuple(x for each in done for x in each.all_keys)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        q, k, *more = ctx.saved_tensors
        size = 3 * len(ctx.chunks)
        flat = more[size:]
        chunks = with_tensors(ctx.chunks, flat)
        wanted = wanted_names(ctx.needs_input_grad[4:], len(chunks))

        def gradients(meeting: Meeting, held: Sequence[Tensor]) -> dict[str, Tensor]:
            chunk, i = meeting.chunk, meeting.number
            call = chunk.formed.call
            chunk_q, chunk_k = (x.to(call.dtype) for x in (q[:, :, chunk.part], *held))
            partial = PartialStatistics(*more[3 * i : 3 * i + 3])
            grads = Statistics(*grad_outputs[2 * i : 2 * i + 2])
            return statistics_gradients(call, chunk_q, chunk_k, partial, grads, wanted[i])

        dq, (dk,), others = go_round_back(ctx.ring, chunks, q, (k,), "k", wanted, gradients)
        return None, None, dq, dk, *flat_gradients(others, flat)


def _of_nothing(chunk: QueryChunk) -> PartialStatistics:
    call = chunk.formed.call
    rows = (call.batch, call.heads, call.queries)
    peak = torch.full(rows, NEG_INF, dtype=call.dtype, device=call.device)
    return PartialStatistics(peak, torch.zeros_like(peak), torch.zeros_like(peak))


def _merge(a: PartialStatistics, b: PartialStatistics) -> PartialStatistics:
    """The statistics over the keys of both."""
    peak = torch.maximum(a.peak, b.peak)
    empty = peak == NEG_INF
    anchor = peak.masked_fill(empty, 0.0)
    first, second = (x.peak - anchor + x.log_sum for x in (a, b))
    log_sum = torch.logaddexp(first, second).masked_fill(empty, 0.0)
    entropy = torch.zeros_like(peak)
    for part, log_share in ((a, first - log_sum), (b, second - log_sum)):
        p = log_share.exp()
        entropy += p * (part.entropy - log_share.masked_fill(p == 0, 0.0))
    return PartialStatistics(peak, log_sum, entropy)
