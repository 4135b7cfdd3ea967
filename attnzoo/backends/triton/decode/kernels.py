"""Pairwise attention of few queries, with the keys split among programs.

`decode` and `decode_products` have one program per (batch, key/value head, split of the keys). A
program reads the queries of all heads of the group as one tile, reads each of its keys and values
once, and writes a partial result, see `merge`, or with one split the final result. The other
kernels have one program per (batch, head, query).

If scores are needed before the weights (for a threshold, or a gain from statistics),
`decode_products` first writes the products q kᵀ, 4 bytes per row and key. The following kernels
read the products instead of the keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.fold import factored, finish, walk
from attnzoo.backends.triton.common.groups import (
    INTEGERS,
    KeySides,
    MaskStrides,
    Matrix,
    MatrixPages,
    Scoring,
    Side,
    Size,
)
from attnzoo.backends.triton.common.merge import load_peaks, splits_of_row, store_split
from attnzoo.backends.triton.common.scores import capped, load_head, load_vectors, scores
from attnzoo.backends.triton.common.tile import SMALLEST, load_block, store_tile, times
from attnzoo.backends.triton.flash.segments import narrowed
from attnzoo.backends.triton.flash.statistics import add_scores, store_statistics
from attnzoo.backends.triton.flash.threshold import MAX_STEPS, newton, store_threshold


class Rows(NamedTuple):
    """The rows of a program: the queries of all heads of a group.

    Lanes beyond the last row repeat the last row, so that loads need no mask.
    """

    batch: Any
    kv_head: Any
    at: Any  # offset of the group in vectors [B, H, Nq]
    partial: Any  # offset of the split in `Partials`
    count: Any
    lane: Any  # [BM]: 0 … BM − 1
    row: Any  # [BM, 1], as head and query
    head: Any
    query: Any
    entry: Any  # [BM], offset of the row's query from the first element of its batch entry


@triton.jit
def rows_of_program(heads, group, queries, splits, q_h, q_n, tile):
    count, split = group * queries, tl.program_id(0) % splits
    bh = (tl.program_id(0) // splits).to(tl.int64)
    b, hk, lane = bh // (heads // group), bh % (heads // group), tl.arange(0, tile.BLOCK_M)
    row = tl.minimum(lane, count - 1)[:, None]
    head, query = hk * group + row // queries, row % queries
    entry = tl.reshape((head * q_h + query.to(tl.int64) * q_n) * tile.ALIGN, [tile.BLOCK_M])
    partial = (bh * splits + split) * count
    return Rows(b, hk, bh * count, partial, count, lane, row, head, query, entry)


@triton.jit
def pages_of(batch, page_stride, keys, blocks, visible, tile):
    """The `MatrixPages` of k or v of a batch entry."""
    missing = keys - tl.load(visible.used + batch)
    return MatrixPages(visible.table + batch * blocks, missing, page_stride * tile.ALIGN, tile.PAGE)


@triton.jit
def blocks_of_split(batch, keys, first, last, span, splits, visible, tile):
    """Return the blocks of keys [low, high).

    The splits share the ``ranges``, see `flash.segments`, or the keys that are in pages.
    """
    if visible.ranges is not None:
        first, last = narrowed(first, last, visible.ranges, batch, tile.BLOCK_N)
        span = tl.cdiv(last - first, splits)
    if visible.used is not None:
        missing = keys - tl.load(visible.used + batch)
        first = tl.minimum(tl.maximum(first, missing // tile.BLOCK_N), last)
        span = tl.cdiv(last - first, splits)
    low = first + tl.program_id(0) % splits * span
    return low, tl.minimum(low + span, last)


@triton.jit(do_not_specialize=INTEGERS)
def decode_products(
    q, k, products,  # fp32 [B·Hkv, rows, width], q kᵀ
    partials,  # m, and for statistics z and t
    lse, entropy,  # for statistics with one split, instead of the partials; else None
    vectors, terms, visible, q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    heads, group, queries, keys, blocks, left, right, first, last, span, splits, width, rule, tile,
):  # fmt: skip
    """Write q kᵀ and the maximum m of each row; for statistics also Z and T, or lse and entropy."""
    size, strides = Size(queries, keys, left, right), MaskStrides(mask_b, mask_h, mask_m, mask_n, 1)
    rows = rows_of_program(heads, group, queries, splits, q_h, q_n, tile)
    b, hk, i, exists = rows.batch, rows.kv_head, rows.query, rows.lane < rows.count
    loaded = load_vectors(rows.row, rows.at, rows.count, vectors, terms, rule)
    head = load_head(b, rows.head, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    d, local = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_N)
    # A row index is an offset in elements: stride 1, no bound.
    q_matrix = Matrix(q + b * q_b * tile.ALIGN, 1, 1 << 62, None, b, b)
    q_tile = load_block(q_matrix, b * 0, rows.entry, d, tile.D, False)  # [BM, D]
    q_side = Side(q_tile, q_matrix, b * 0, rows.entry)
    if visible.table is None:
        k += (b * k_b + hk * k_h) * tile.ALIGN
        k_matrix = Matrix(k, k_n * tile.ALIGN, keys, None, b, hk)
    else:
        pages = pages_of(b, k_b, keys, blocks, visible, tile)
        k_matrix = Matrix(k + hk * k_h * tile.ALIGN, k_n * tile.ALIGN, keys, None, b, hk, pages)
    # [BM, 1]. products + j points to the products with key j.
    products += (rows.at + rows.row) * width - first * tile.BLOCK_N
    m = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    z, t = tl.zeros([tile.BLOCK_M], tl.float32), tl.zeros([tile.BLOCK_M], tl.float32)
    low, high = blocks_of_split(b, keys, first, last, span, splits, visible, tile)
    for n in range(low, high):
        start = n * tile.BLOCK_N
        j = (start + local)[None, :]  # [1, BN]
        k_tile = load_block(k_matrix, start, local, d, tile.D, True)  # [BN, D]
        product = times(q_side, Side(k_tile, k_matrix, start, local), tile.D, tile)  # [BM, BN]
        tl.store(products + j, product, mask=exists[:, None])
        product = capped(product, terms.inner, tile.PRECISION)
        s, one = factored(product, None, i, j, scoring, rule, True, True)  # [BM, BN], [BM]
        if partials.z is None and entropy is None:
            m = tl.maximum(m, tl.max(s, 1))
        else:
            m, z, t = add_scores(m, z, t, s, one, True)
    if entropy is not None:
        at = rows.at + rows.lane
        store_statistics(m, z, t, lse + at, entropy + at, exists)
    else:
        at = rows.partial + rows.lane
        tl.store(partials.m + at, m, mask=exists)
        if partials.z is not None:
            tl.store(partials.z + at, z, mask=exists)
            tl.store(partials.t + at, t, mask=exists)


@triton.jit(do_not_specialize=INTEGERS)
def decode(
    q, k, v, products,  # either q and k, or products of an earlier pass; the others are None
    o, saved, partials,  # o and saved for one split, else partials
    vectors, terms, visible,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    eps, heads, group, queries, keys, blocks, left, right, first, last, span, splits, width, rule,
    tile,
):  # fmt: skip
    """Write the partial result of this program's split, or the output of the only split."""
    size, strides = Size(queries, keys, left, right), MaskStrides(mask_b, mask_h, mask_m, mask_n, 1)
    rows = rows_of_program(heads, group, queries, splits, q_h, q_n, tile)
    b, hk, i, lane = rows.batch, rows.kv_head, rows.query, rows.lane
    loaded = load_vectors(rows.row, rows.at, rows.count, vectors, terms, rule)
    head = load_head(b, rows.head, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    d, dv = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_DV)
    if visible.table is None:
        v += (b * v_b + hk * v_h) * tile.ALIGN
        v_matrix = Matrix(v, v_n * tile.ALIGN, keys, None, b, hk)
    else:
        pages = pages_of(b, v_b, keys, blocks, visible, tile)
        v_matrix = Matrix(v + hk * v_h * tile.ALIGN, v_n * tile.ALIGN, keys, None, b, hk, pages)
    if k is None:
        # Pointers [BM, 1] to the products with key 0
        q_side = products + (rows.at + rows.row) * width - first * tile.BLOCK_N
        sides = KeySides(None, v_matrix, None, dv)
    else:
        # A row index is an offset in elements: stride 1, no bound.
        q_matrix = Matrix(q + b * q_b * tile.ALIGN, 1, 1 << 62, None, b, b)
        q_tile = load_block(q_matrix, b * 0, rows.entry, d, tile.D, False)  # [BM, D]
        q_side = Side(q_tile, q_matrix, b * 0, rows.entry)
        if visible.table is None:
            k += (b * k_b + hk * k_h) * tile.ALIGN
            sides = KeySides(Matrix(k, k_n * tile.ALIGN, keys, None, b, hk), v_matrix, d, dv)
        else:
            pages = pages_of(b, k_b, keys, blocks, visible, tile)
            k += hk * k_h * tile.ALIGN
            k_matrix = Matrix(k, k_n * tile.ALIGN, keys, None, b, hk, pages)
            sides = KeySides(k_matrix, v_matrix, d, dv)
    m = tl.full([tile.BLOCK_M], float("-inf") if rule.ONLINE else 0.0, tl.float32)
    z, peak = tl.zeros([tile.BLOCK_M], tl.float32), tl.full([tile.BLOCK_M], SMALLEST, tl.float32)
    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_DV], tl.float32)
    low, high = blocks_of_split(b, keys, first, last, span, splits, visible, tile)
    acc, m, z, peak = walk(
        acc, m, z, peak, low, high, q_side, None, i, sides, scoring, None, rule, tile, True
    )
    if rule.PEAKED:
        acc *= peak[:, None]
    if partials.o is None:
        acc = finish(acc, m, z, rows.at, lane, rows.count, loaded, vectors, terms, saved, eps, rule)
        o += (b * o_b + rows.head * o_h + i.to(tl.int64) * o_n) * tile.ALIGN  # [BM, 1]
        store_tile(o, lane, 0, rows.count, dv, tile.DV, acc)
    else:
        store_split(partials, rows.partial, lane, rows.count, dv, acc, m, z, rule, tile)


@triton.jit(do_not_specialize=INTEGERS)
def decode_stats(partials, lse, entropy, group, queries, splits):
    """Write lse and entropy of one query, from the partial results of all splits."""
    row = tl.program_id(0).to(tl.int64)
    start, at, exists = splits_of_row(row, group * queries, splits)
    m, top, base = load_peaks(partials, start, at, exists)
    # A split without keys has m = −∞ and Z = T = 0. Its shift must be finite: −∞ · 0 is NaN.
    shift = tl.maximum(m - base[:, None], -200.0)  # [1, MOST_SPLITS]
    z = tl.load(partials.z + start + at, mask=exists, other=0.0)
    t = tl.load(partials.t + start + at, mask=exists, other=0.0)
    z, t = tl.sum(tl.exp2(shift) * z, 1), tl.sum(tl.exp2(shift) * (t + shift * z), 1)
    at = row + tl.arange(0, 1)
    store_statistics(top, z, t, lse + at, entropy + at, at >= 0)


@triton.jit(do_not_specialize=INTEGERS)
def decode_threshold(
    products, partials, candidates, solved,  # candidates: fp32, shaped as products
    vectors, terms, visible, mask_b, mask_h, mask_m, mask_n,
    heads, group, queries, keys, left, right, first, splits, width, rule, tile, BLOCK: tl.constexpr,
):  # fmt: skip
    """Solve for τ of one query; see `flash.threshold`.

    A key has weight 0 if its score is 1/(α−1) or more below the maximum. The other scores are first
    copied to ``candidates``: of 32768 standard Gaussian scores 0.1 % at α = 2, 2 % at α = 1.5, and
    all as α → 1. Each step of the solver reads only the copies.
    """
    row, zero = tl.program_id(0).to(tl.int64), tl.zeros([1, 1], tl.int32)
    b, h = row // (heads * queries), row // queries % heads
    i = zero + (row % queries).to(tl.int32)
    size, strides = Size(queries, keys, left, right), MaskStrides(mask_b, mask_h, mask_m, mask_n, 1)
    loaded = load_vectors(zero, row, 1, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    a = loaded.shape - 1.0  # α − 1, [1, 1]
    if rule.ALPHA is not None:
        a = tl.full([1, 1], rule.ALPHA - 1.0, tl.float32)
    start, at, exists = splits_of_row(row, group * queries, splits)
    _peaks, top, base = load_peaks(partials, start, at, exists)  # [1]
    products += row * width
    candidates += row * width
    column = tl.arange(0, BLOCK)[None, :]
    length, has_nan, largest = 0, 0, tl.full([1], float("-inf"), tl.float32)
    for n in range(0, width, BLOCK):
        # [1, BLOCK]. Beyond the width there are no keys, so the scores are −∞.
        product = tl.load(products + n + column, mask=n + column < width, other=0.0)
        product = capped(product, terms.inner, tile.PRECISION)
        j = first * tile.BLOCK_N + n + column
        s, _ = scores(product, i, j, scoring, rule, True, True)
        alive = (s - top[:, None] > -1.0 / a).to(tl.int32)
        tl.store(candidates + length + tl.cumsum(alive, 1) - 1, s - base[:, None], mask=alive > 0)
        length += tl.sum(alive)
        has_nan = tl.maximum(has_nan, tl.max((s != s).to(tl.int32)))
        if rule.PLAIN:
            signed = tl.where(loaded.factor < 0.0, -product, product)
            signed = tl.where(s > float("-inf"), signed, float("-inf"))
            largest = tl.maximum(largest, tl.max(signed, 1))
    t = tl.zeros([1], tl.float32)  # τ − base
    unsolved, step = length > 0, 0
    tl.debug_barrier()  # threads read candidates that other threads wrote
    while unsolved:
        z, slopes = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
        for n in range(0, length, BLOCK):
            x = tl.load(candidates + n + column, mask=n + column < length, other=float("-inf"))
            phi, slope = rule.ACT(x - t[:, None], loaded.shape)
            z += tl.sum(phi, 1)
            slopes += tl.sum(slope, 1)
        t, is_unsolved = newton(t, z, slopes, tl.reshape(a, [1]))
        step += 1
        unsolved = (tl.max(is_unsolved.to(tl.int32), 0) > 0) & (step < MAX_STEPS)
    # tl.max ignores NaN, so τ is set to NaN for queries with NaN among their scores.
    t = tl.where(has_nan > 0, float("nan"), t)
    peak_score = base
    if rule.PLAIN:  # a product, see `scores`
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        peak_score = tl.where(tl.reshape(loaded.factor, [1]) < 0.0, -largest, largest)
    at = row + tl.arange(0, 1)
    store_threshold(solved.peak, solved.tau, at, peak_score, base, t, tl.arange(0, 1) == 0)
