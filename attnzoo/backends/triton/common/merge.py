"""Partial results of splits of the keys: stored by the programs of each split, then merged.

For the partial results (m, Z, o) of a form, see `fold`; for their shapes, see `Partials`. Row r
belongs to the group's head r // queries and to query r % queries. `flash` has groups of one head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.common.fold import finish
from attnzoo.backends.triton.common.groups import (
    INTEGERS,
    Partials,
    RuleConstants,
    Saved,
    ScoreTerms,
    Tile,
)
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


@triton.jit
def splits_of_row(row, rows, splits):
    """Return the offset of a row in `Partials`, those of the splits from there, and which exist."""
    split = tl.arange(0, MOST_SPLITS)[None, :]  # [1, MOST_SPLITS]
    return row // rows * splits * rows + row % rows, split * rows, split < splits


@triton.jit
def load_peaks(partials, start, at, exists):
    """Return m of each split, their maximum, and the maximum as a finite base: 0 if it is −∞."""
    m = tl.load(partials.m + start + at, mask=exists, other=float("-inf"))  # [1, MOST_SPLITS]
    top = tl.max(m, 1)  # [1]
    return m, top, tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=INTEGERS)
def merge_splits(
    partials, o, vectors, terms, saved, o_b, o_h, o_n, eps, heads, group, queries, splits,
    rule, tile, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of all splits. Grid: one program per (batch, head, query)."""
    row, rows = tl.program_id(0).to(tl.int64), group * queries
    b, h, i = row // (heads * queries), row // queries % heads, row % queries
    first, dv = tl.zeros([1], tl.int32), tl.arange(0, tile.BLOCK_DV)
    loaded = load_vectors(first[:, None], row, 1, vectors, terms, rule)
    start, at, exists = splits_of_row(row, rows, splits)
    m, z, base = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    if rule.ONLINE or rule.SHIFTED:
        peaks, m, base = load_peaks(partials, start, at, exists)
    if rule.ONLINE or rule.SUM:
        sums = tl.load(partials.z + start + at, mask=exists, other=0.0)  # [1, MOST_SPLITS]
        if rule.ONLINE or rule.SHIFTED:
            sums *= tl.exp2(peaks - base[:, None])
        z = tl.sum(sums, 1)
    acc = tl.zeros([1, tile.BLOCK_DV], tl.float32)
    for low in range(0, splits, CHUNK):
        s = low + tl.arange(0, CHUNK)
        outs = load_tile(  # [CHUNK, DV]
            partials.o + start * tile.DV, s, rows * tile.DV, splits, dv, tile.DV, True
        )
        if rule.ONLINE or rule.SHIFTED:
            peak = tl.load(partials.m + start + s * rows, mask=s < splits, other=float("-inf"))
            outs *= tl.exp2(peak - base)[:, None]
        acc += tl.sum(outs, 0)[None, :]
    acc = finish(acc, m, z, row, first, 1, loaded, vectors, terms, saved, eps, rule)
    store_tile(o + b * o_b + h * o_h + i * o_n, first, 0, 1, dv, tile.DV, acc)


def new_partial(q: Tensor, groups: int, splits: int, *dim: int) -> Tensor:
    """Return an empty tensor for a field of `Partials`, for ``groups`` groups of heads."""
    rows = q.shape[1] * q.shape[2] // max(1, groups)
    return q.new_empty(q.shape[0], groups, splits, rows, *dim, dtype=torch.float32)


def split_keys(launch: Launch, q: Tensor, v: Tensor, splits: int, groups: int) -> list[Launch]:
    """Return the launches of all splits and of their merge.

    ``launch``: as for one split, but with the number of programs of all splits.
    """
    args, size = {**launch.args, "splits": splits}, (q, groups, splits)
    vectors, terms, rule, tile = (args[name] for name in ("vectors", "terms", "rule", "tile"))
    partials = Partials(
        o=new_partial(*size, v.shape[3]),
        m=new_partial(*size) if rule.ONLINE or rule.SHIFTED else None,
        z=new_partial(*size) if rule.ONLINE or rule.SUM else None,
    )
    # Neither kernel is compiled for what only the other one reads.
    walk = {
        **args, "o": None, "saved": Saved(), "partials": partials, "eps": None,
        "vectors": vectors._replace(sink=None), "terms": terms._replace(factor=None),
    }  # fmt: skip
    names = "ACT UNIT SCORE_UNIT ONLINE SUM NORMALIZER SHIFTED".split()
    merge = {
        **args, **strides(1, o=args["o"]), "partials": partials,
        "group": q.shape[1] // max(1, groups), "vectors": vectors._replace(gain=None, offset=None),
        "terms": ScoreTerms(1.0, factor=terms.factor, tau=terms.tau),
        "rule": RuleConstants(**{name: getattr(rule, name) for name in names}),
        "tile": Tile(DV=tile.DV, BLOCK_DV=tile.BLOCK_DV), "CHUNK": PARTIALS,
    }  # fmt: skip
    return [launch._replace(args=walk), row_launch(merge_splits, merge, q)]
