"""Partial results of splits of the keys: stored by the programs of each split, then merged.

For the partial results (m, Z, o) of a form, see `fold`. m and Z are fp32 [B·Hkv, splits, rows], and
o is fp32 [B·Hkv, splits, rows, DV]. Row r belongs to the group's head r // queries and to query
r % queries. `flash` has groups of one head.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.fold import finish
from attnzoo.backends.triton.common.tile import load_tile, load_vectors, store_tile

# Largest number of splits. One program merges the results of all splits.
MOST_SPLITS = tl.constexpr(256)
# Arguments that only the merge reads and writes, if there are splits.
OF_MERGE = ("lse", "sink", "factor", "eps")


@triton.jit
def store_split(
    part, m_part, z_part, at, index, rows, dv, acc, m, z,
    ONLINE: tl.constexpr, SUM: tl.constexpr, SHIFTED: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Store the partial result of the rows at + index. m_part and z_part are None if not needed."""
    if ONLINE or SHIFTED:
        tl.store(m_part + at + index, m, mask=index < rows)
    if SUM or ONLINE:
        tl.store(z_part + at + index, z, mask=index < rows)
    store_tile(part + at * DV, index, DV, rows, dv, DV, acc)


@triton.jit(do_not_specialize="o_b o_h o_n heads group queries splits".split())
def merge_splits(
    part, m, z, o, stat, weight_sum, lse, tau, shape, sink, factor,
    o_b, o_h, o_n, eps, heads, group, queries, splits,
    ACT: tl.constexpr, UNIT: tl.constexpr, ONLINE: tl.constexpr, SUM: tl.constexpr,
    NORMALIZER: tl.constexpr, SHIFTED: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of all splits into the output of one query.

    Grid: one program per (batch, head, query). stat, weight_sum and lse: see `flash_forward`.
    """
    row = tl.program_id(0).to(tl.int64)
    rows_here = group * queries
    b, h, i = row // (heads * queries), row // queries % heads, row % queries
    one = tl.zeros([1], tl.int32)
    vectors = load_vectors(
        one[:, None], row, 1.0, None, tau, shape, None, None, None, 1, UNIT, UNIT
    )
    start = row // rows_here * splits * rows_here + row % rows_here
    every = tl.arange(0, MOST_SPLITS)[None, :]
    total, base = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    top = total
    if ONLINE or SHIFTED:
        peaks = tl.load(m + start + every * rows_here, mask=every < splits, other=float("-inf"))
        top = tl.max(peaks, 1)
        base = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(peaks - base[:, None])
        sums = tl.load(z + start + every * rows_here, mask=every < splits, other=0.0)
        total = tl.sum(sums * decay, 1)
    elif SUM:
        total = tl.sum(tl.load(z + start + every * rows_here, mask=every < splits, other=0.0), 1)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    dv = tl.arange(0, BLOCK_DV)
    for low in range(0, splits, CHUNK):
        s = low + tl.arange(0, CHUNK)
        tile = load_tile(part + start * DV, s, rows_here * DV, splits, dv, DV, True)  # [CHUNK, DV]
        if ONLINE or SHIFTED:
            peak = tl.load(m + start + s * rows_here, mask=s < splits, other=float("-inf"))
            tile *= tl.exp2(peak - base)[:, None]
        acc += tl.sum(tile, 0)[None, :]
    acc = finish(
        acc, top, total, row, one, 1, vectors, stat, weight_sum, lse, sink, tau, factor,
        eps, ACT, UNIT, ONLINE, SUM, NORMALIZER, SHIFTED,
    )  # fmt: skip
    store_tile(o + b * o_b + h * o_h + i * o_n, one, 0, 1, dv, DV, acc)
