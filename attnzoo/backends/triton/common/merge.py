"""Partial results of splits of the keys: stored by the programs of each split, then merged.

For the partial results (m, Z, o) of a form, see `fold`. m and Z are fp32 [B·Hkv, splits, rows], and
o is fp32 [B·Hkv, splits, rows, DV]. Row r belongs to the group's head r // queries and to query
r % queries. `flash` has groups of one head.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.common.fold import finish
from attnzoo.backends.triton.common.groups import Partials, Rule, Saved, ScoreTerms, Tile
from attnzoo.backends.triton.common.launch import PARTIALS, Launch, row_launch, strides
from attnzoo.backends.triton.common.scores import load_vectors
from attnzoo.backends.triton.common.tile import load_tile, store_tile

# Largest number of splits. One program merges the results of all splits.
MOST_SPLITS = tl.constexpr(256)


@triton.jit
def store_split(partials, at, index, rows, dv, acc, m, z, rule, tile):
    """Store the partial result of the rows at + index."""
    if rule.ONLINE or rule.SHIFTED:
        tl.store(partials.m + at + index, m, mask=index < rows)
    if rule.SUM or rule.ONLINE:
        tl.store(partials.z + at + index, z, mask=index < rows)
    store_tile(partials.o + at * tile.DV, index, tile.DV, rows, dv, tile.DV, acc)


@triton.jit(do_not_specialize="o_b o_h o_n heads group queries splits".split())
def merge_splits(
    partials, o, vectors, terms, saved, o_b, o_h, o_n, eps, heads, group, queries, splits,
    rule, tile, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of all splits into the output of one query.

    Grid: one program per (batch, head, query).
    """
    row = tl.program_id(0).to(tl.int64)
    rows_here = group * queries
    b, h, i = row // (heads * queries), row // queries % heads, row % queries
    one = tl.zeros([1], tl.int32)
    loaded = load_vectors(one[:, None], row, 1, vectors, terms, rule.UNIT, rule.UNIT)
    start = row // rows_here * splits * rows_here + row % rows_here
    every = tl.arange(0, MOST_SPLITS)[None, :]
    total, base = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    top = total
    if rule.ONLINE or rule.SHIFTED:
        # [1, MOST_SPLITS]
        peaks = tl.load(
            partials.m + start + every * rows_here, mask=every < splits, other=float("-inf")
        )
        top = tl.max(peaks, 1)
        base = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.exp2(peaks - base[:, None])
        sums = tl.load(partials.z + start + every * rows_here, mask=every < splits, other=0.0)
        total = tl.sum(sums * decay, 1)
    elif rule.SUM:
        total = tl.sum(
            tl.load(partials.z + start + every * rows_here, mask=every < splits, other=0.0), 1
        )
    acc = tl.zeros([1, tile.BLOCK_DV], tl.float32)
    dv = tl.arange(0, tile.BLOCK_DV)
    for low in range(0, splits, CHUNK):
        s = low + tl.arange(0, CHUNK)
        # [CHUNK, DV]
        outs = load_tile(
            partials.o + start * tile.DV, s, rows_here * tile.DV, splits, dv, tile.DV, True
        )
        if rule.ONLINE or rule.SHIFTED:
            peak = tl.load(partials.m + start + s * rows_here, mask=s < splits, other=float("-inf"))
            outs *= tl.exp2(peak - base)[:, None]
        acc += tl.sum(outs, 0)[None, :]
    acc = finish(acc, top, total, row, one, 1, loaded, vectors, terms, saved, eps, rule)
    store_tile(o + b * o_b + h * o_h + i * o_n, one, 0, 1, dv, tile.DV, acc)


def merge_launch(
    walk: dict[str, Any], partials: Partials, q: Tensor, splits: int, group: int
) -> Launch:
    """Return the launch of `merge_splits`.

    ``walk``: the arguments of a launch that would write the output without splits.
    """
    terms, rule, tile = walk["terms"], walk["rule"], walk["tile"]
    names = "ACT UNIT ONLINE SUM NORMALIZER SHIFTED".split()
    args = {
        **walk, **strides(1, o=walk["o"]), "partials": partials, "splits": splits, "group": group,
        # The merge is not compiled for what only the walk reads.
        "vectors": walk["vectors"]._replace(gain=None),
        "terms": ScoreTerms(1.0, factor=terms.factor),
        "rule": Rule(**{name: getattr(rule, name) for name in names}),
        "tile": Tile(DV=tile.DV, BLOCK_DV=tile.BLOCK_DV), "CHUNK": PARTIALS,
    }  # fmt: skip
    return row_launch(merge_splits, args, q)


def without_merge(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel that walks over a split, without those that only the merge uses."""
    vectors, terms = args["vectors"], args["terms"]
    return {
        **args, "vectors": vectors._replace(sink=None), "terms": terms._replace(factor=None),
        "saved": Saved(), "eps": None,
    }  # fmt: skip
