"""Forward of every pairwise form: o = Σ_j φ(s_ij − τ_i) v_j / Z_i.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q once,
loops once over the keys and values that causality and window allow (see `fold`), and writes its
block of o and, if wanted, its part of lse and of the per-query vectors for the backward.

With ``splits``, there is one program per (batch, head, block of queries, split of the keys), which
writes partial results for `merge_splits`.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.fold import factor_out, finish, walk
from attnzoo.backends.triton.common.groups import (
    INTEGERS,
    KeySides,
    MaskStrides,
    Matrix,
    Scoring,
    Side,
    Size,
)
from attnzoo.backends.triton.common.merge import store_split
from attnzoo.backends.triton.common.scores import load_head, load_vectors
from attnzoo.backends.triton.common.tile import SMALLEST, load_queries, store_tile
from attnzoo.backends.triton.flash.segments import blocks_of_keys, list_of_keys


@triton.jit(do_not_specialize=INTEGERS)
def flash_forward(
    q, k, v, o, k_descriptor, v_descriptor,  # descriptors for TMA, or both None
    vectors, terms, visible,
    maps,  # key blocks with nonzero weights, per tile of MAP_M queries
    saved, partials,  # with splits, the partials are written instead of o and saved
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    eps, heads, group, queries, keys, left, right, splits, rule, tile,
):  # fmt: skip
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile, splits)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    i = index[:, None]  # [BM, 1]
    k += (b * k_b + hk * k_h) * tile.ALIGN
    v += (b * v_b + hk * v_h) * tile.ALIGN
    if splits is None:
        o += (b * o_b + h * o_h) * tile.ALIGN
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, k_descriptor, b, hk)
    v_matrix = Matrix(v, v_n * tile.ALIGN, keys, v_descriptor, b, hk)
    dv = tl.arange(0, tile.BLOCK_DV)
    sides = KeySides(k_matrix, v_matrix, tl.arange(0, tile.BLOCK_D), dv)
    factor = None  # scores are computed before the maximum
    if rule.LATE is not None:
        q_tile, factor = factor_out(q_tile, loaded.factor, rule.LATE)
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_side = Side(q_tile, q_matrix, block.first, block.local)

    # m is the running maximum of the scores (ONLINE), or of 0 and the scores (SHIFTED).
    m = tl.full([tile.BLOCK_M], float("-inf") if rule.ONLINE else 0.0, tl.float32)
    peak = tl.full([tile.BLOCK_M], SMALLEST, tl.float32)
    z = tl.zeros([tile.BLOCK_M], tl.float32)
    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_DV], tl.float32)
    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    blocks = maps.blocks
    if maps.blocks is not None:
        row, start = list_of_keys(block, heads, size, tile)
        blocks += start
        low, high = 0, tl.load(maps.counts + row)
    if splits is not None:
        split, span = tl.program_id(0) % splits, tl.cdiv(high - low, splits)
        low = tl.minimum(low + split * span, high)
        high = tl.minimum(low + span, high)
        full = tl.minimum(tl.maximum(full, low), high)
    # Two loops, because masks and bounds cost instructions for each score, and most blocks need
    # none. The list of a block map is walked in one loop, with masks.
    if tile.SPLIT and maps.blocks is None:
        acc, m, z, peak = walk(
            acc, m, z, peak, low, full, q_side, factor, i, sides, scoring, None, rule, tile, False
        )
        low = full
    acc, m, z, peak = walk(
        acc, m, z, peak, low, high, q_side, factor, i, sides, scoring, blocks, rule, tile, True
    )
    if rule.PEAKED:
        acc *= peak[:, None]
    if terms.seed is not None:
        acc *= terms.keep_scale

    if splits is not None:
        at = block.at * splits + split * queries
        store_split(partials, at, index, queries, dv, acc, m, z, rule, tile)
    else:
        acc = finish(acc, m, z, block.at, index, queries, loaded, vectors, terms, saved, eps, rule)
        store_tile(o, index, o_n * tile.ALIGN, queries, dv, tile.DV, acc)
