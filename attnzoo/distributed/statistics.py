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
from attnzoo.distributed.rows import (
    Meeting,
    Ring,
    Rows,
    flat_gradients,
    go_round_back,
    meetings,
    wanted_names,
    with_tensors,
)


def ring_statistics(
    ring: Ring, q: Tensor, k: Tensor, rows: Sequence[Rows]
) -> tuple[Statistics, ...]:
    """lse and entropy of the queries of each chunk, over all keys."""
    flat = [x for mine in rows for x in mine.tensors()]
    found = _Statistics.apply(ring, rows, q, k, *flat)
    return tuple(Statistics(*found[2 * i : 2 * i + 2]) for i in range(len(rows)))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, rows: Sequence[Rows], q: Tensor, k: Tensor, *flat: Any
    ) -> tuple[Tensor, ...]:
        rows = with_tensors(rows, flat)
        found: list[PartialStatistics | None] = [None] * len(rows)
        for source, (held,) in circulate((k,), ring.ranks):
            for i, mine, keys, _ in meetings(ring, rows, source):
                new = statistics(mine.formed.call, q[:, :, mine.part], held[:, :, keys])
                old = found[i]
                found[i] = new if old is None else _merge(old, new)
        done = [x or _of_nothing(mine) for x, mine in zip(found, rows, strict=True)]
        ctx.save_for_backward(q, k, *(x for each in done for x in each), *flat)
        ctx.ring = ring
        ctx.rows = [mine.with_tensors([None] * len(mine.tensors())) for mine in rows]
        return tuple(x for each in done for x in each.all_keys)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        q, k, *more = ctx.saved_tensors
        size = 3 * len(ctx.rows)
        flat = more[size:]
        rows = with_tensors(ctx.rows, flat)
        wanted = wanted_names(ctx.needs_input_grad[4:], len(rows))

        def gradients(meeting: Meeting, held: Sequence[Tensor]) -> dict[str, Tensor]:
            mine, i = meeting.rows, meeting.number
            call = mine.formed.call
            own_q, own_k = (x.to(call.dtype) for x in (q[:, :, mine.part], *held))
            found = PartialStatistics(*more[3 * i : 3 * i + 3])
            given_of = Statistics(*grad_outputs[2 * i : 2 * i + 2])
            return statistics_gradients(call, own_q, own_k, found, given_of, wanted[i])

        dq, (dk,), others = go_round_back(ctx.ring, rows, q, (k,), "k", wanted, gradients)
        return None, None, dq, dk, *flat_gradients(others, flat)


def _of_nothing(mine: Rows) -> PartialStatistics:
    call = mine.formed.call
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
