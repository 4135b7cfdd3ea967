"""Forward and backward of the form `Shares`, with β_ij = σ(s_ij) and ℓ_ij = −log(1 − β_ij).

    w_ij  = exp(s_ij − Σ_{l ≥ j} ℓ_il)                  o_i  = Σ_j w_ij v_j
    dS_ij = g_ij − β_ij Σ_{l ≤ j} g_il                  g_ij = w_ij dO_i·v_j
    dq_i  = scale · Σ_j dS_ij k_j       dk_j = scale · Σ_i dS_ij q_i       dv_j = Σ_i w_ij dO_i

ℓ is the softplus of s. A hidden key has s = −∞, so ℓ = β = w = 0 without further code.

The weights need sums over later keys, dS sums over earlier ones. `shares_forward` therefore visits
the blocks of keys from the last one back. `shares_dq` does so too, and stores the sum of ℓ over the
keys after each block. Then it goes forward through the blocks, and stores the sum of g over the
keys before each one. `shares_dkdv` reads both sums, the `Carried` of its block. A sum is never a
difference of sums, which would have no correct digit where a query has seen many keys.

There are no atomics, so results are deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.activations import softplus
from attnzoo.backends.triton.common.groups import INTEGERS, MaskStrides, Matrix, Scoring, Side, Size
from attnzoo.backends.triton.common.scores import (
    cap_slope,
    capped,
    load_head,
    load_vector,
    load_vectors,
    scores,
)
from attnzoo.backends.triton.common.tile import (
    dot,
    load_block,
    load_queries,
    query_blocks,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.backward_kv import GroupMatrices
from attnzoo.backends.triton.flash.backward_q import store_table_entries
from attnzoo.backends.triton.flash.query_lists import full_blocks
from attnzoo.backends.triton.flash.segments import blocks_of_keys, narrowed

LOG2E = tl.constexpr(1.4426950408889634)
# Larger scores, times log2 e, are replaced: β is 1, and 2^-150 of the stick is 0 in fp32.
MOST = tl.constexpr(150.0)


class Carried(NamedTuple):
    """Sums of each query over the keys outside a block, fp32 [B, H, blocks of keys, Nq].

    Initially 0, because `shares_dkdv` reads entries of blocks in which a query sees no key.
    """

    later: Any  # Σ ℓ of the keys after the block
    earlier: Any  # Σ g of the keys before the block


class BiasSums(NamedTuple):
    """Sums over the keys, [BM] each, of which only those that are wanted are computed."""

    distance: Any  # Σ dS |i − j|
    before: Any  # Σ dS of the keys radius positions or more before the query
    after: Any  # likewise after it


@triton.jit(do_not_specialize=INTEGERS)
def shares_forward(
    q, k, v, o, k_descriptor, v_descriptor,  # descriptors for TMA, or both None
    vectors, terms, visible,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    heads, group, queries, keys, left, right, rule, tile,
):  # fmt: skip
    """Write o for a block of queries."""
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    i = index[:, None]  # [BM, 1]
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_side = Side(q_tile, q_matrix, block.first, block.local)
    k += (b * k_b + hk * k_h) * tile.ALIGN
    v += (b * v_b + hk * v_h) * tile.ALIGN
    o += (b * o_b + h * o_h) * tile.ALIGN
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, k_descriptor, b, hk)
    v_matrix = Matrix(v, v_n * tile.ALIGN, keys, v_descriptor, b, hk)
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)

    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_DV], tl.float32)
    later = tl.zeros([tile.BLOCK_M], tl.float32)
    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    if not tile.SPLIT:
        full = low
    acc, later = _walk_back(
        acc, later, full, high, q_side, i, k_matrix, v_matrix, scoring, rule, tile, True
    )
    if tile.SPLIT:
        acc, later = _walk_back(
            acc, later, low, full, q_side, i, k_matrix, v_matrix, scoring, rule, tile, False
        )
    store_tile(o, index, o_n * tile.ALIGN, queries, tl.arange(0, tile.BLOCK_DV), tile.DV, acc)


@triton.jit
def _walk_back(
    acc, later, low, high, q_side, i, k_matrix, v_matrix, scoring, rule, tile, EDGE: tl.constexpr
):  # fmt: skip
    """Add the blocks of keys [low, high) to o and Σ ℓ, the last one first."""
    local, dv = tl.arange(0, tile.BLOCK_N), tl.arange(0, tile.BLOCK_DV)
    for n in range(low, high):
        first = tl.full([], tile.BLOCK_N, tl.int32) * (high - 1 - n + low)
        _, _, x = _scores(first, q_side, i, k_matrix, scoring, rule, tile, EDGE)
        w, _, later = _weigh(x, later)
        v_tile = load_block(v_matrix, first, local, dv, tile.DV, EDGE)  # [BN, DV]
        acc = dot(w.to(v_tile.dtype), v_tile, acc, tile.PRECISION)  # [BM, DV]
    return acc, later


@triton.jit
def _scores(first, q_side, i, k_matrix, scoring, rule, tile, EDGE: tl.constexpr):
    """Return k [BN, D], and q·k and the scores times log2 e [BM, BN], of the keys from ``first``.

    With a softcap, tanh takes the place of q·k.
    """
    local, d = tl.arange(0, tile.BLOCK_N), tl.arange(0, tile.BLOCK_D)
    k_tile = load_block(k_matrix, first, local, d, tile.D, EDGE)
    product = times(q_side, Side(k_tile, k_matrix, first, local), tile.D, tile)
    product = capped(product, scoring.terms.inner, tile.PRECISION)
    return k_tile, product, _unit_scores(product, i, (first + local)[None, :], scoring, rule, EDGE)


@triton.jit
def _unit_scores(product, i, j, scoring, rule, EDGE: tl.constexpr):
    HIDES: tl.constexpr = EDGE or rule.HIDES
    x, _ = scores(product, i, j, scoring, rule, EDGE, HIDES)
    return tl.where(x > MOST, MOST, x)  # NaN stays NaN


@triton.jit
def _weigh(x, later):
    """Return w and β [BM, BN], and Σ ℓ [BM] with the keys of the block.

    x: scores times log2 e. later: Σ ℓ of the keys after the block.
    """
    cost, share = softplus(x, None)
    total = later[:, None] + tl.cumsum(cost, 1, reverse=True)
    return tl.exp2(x - total * LOG2E), share, later + tl.sum(cost, 1)


@triton.jit
def _score_gradients(dp, w, share, earlier):
    """Return dS [BM, BN], and Σ g [BM] with the keys of the block; dP = dO·v."""
    g = w * dp
    ds = g - share * (earlier[:, None] + tl.cumsum(g, 1))
    return ds, earlier + tl.sum(g, 1)


@triton.jit(do_not_specialize=INTEGERS)
def shares_dq(
    q, k, v, do, dq, k_descriptor, v_descriptor,  # descriptors for TMA, or both None
    vectors, terms, visible, gradients,
    carried,  # written
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    mask_b, mask_h, mask_m, mask_n, heads, group, queries, keys, left, right, rule, tile,
):  # fmt: skip
    """Write dq, `Carried` and the gradients of ALiBi or a table for a block of queries."""
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    i = index[:, None]  # [BM, 1]
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_side = Side(q_tile, q_matrix, block.first, block.local)
    k += (b * k_b + hk * k_h) * tile.ALIGN
    v += (b * v_b + hk * v_h) * tile.ALIGN
    do += (b * do_b + h * do_h) * tile.ALIGN
    dq += (b * dq_b + h * dq_h) * tile.ALIGN
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, k_descriptor, b, hk)
    v_matrix = Matrix(v, v_n * tile.ALIGN, keys, v_descriptor, b, hk)
    do_matrix = Matrix(do, do_n * tile.ALIGN, queries, None, b, h)
    d, dv = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_DV)
    do_tile = load_block(do_matrix, block.first, block.local, dv, tile.DV, True)  # [BM, DV]
    do_side = Side(do_tile, do_matrix, block.first, block.local)
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    at = block.at * tl.cdiv(keys, tile.BLOCK_N) + index  # of block 0 in `Carried`

    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    if not tile.SPLIT:
        full = low
    later = tl.zeros([tile.BLOCK_M], tl.float32)
    later = _store_later(
        later, full, high, q_side, i, k_matrix, scoring, carried.later + at, rule, tile, True
    )
    if tile.SPLIT:
        later = _store_later(
            later, low, full, q_side, i, k_matrix, scoring, carried.later + at, rule, tile, False
        )
    tl.debug_barrier()  # another thread may read what a thread has stored
    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_D], tl.float32)
    earlier = tl.zeros([tile.BLOCK_M], tl.float32)
    sums = BiasSums(earlier, earlier, earlier)
    table_rows = i  # pointers [BM, 1] to the rows of gradients.table
    if gradients.table is not None:
        table_rows = gradients.table + (block.at + i) * (2 * terms.radius + 1)
    if tile.SPLIT:
        acc, earlier, sums = _walk_forward(
            acc, earlier, sums, low, full, q_side, do_side, i, k_matrix, v_matrix, scoring,
            carried, at, gradients, table_rows, rule, tile, False,
        )  # fmt: skip
    acc, earlier, sums = _walk_forward(
        acc, earlier, sums, full, high, q_side, do_side, i, k_matrix, v_matrix, scoring, carried,
        at, gradients, table_rows, rule, tile, True,
    )  # fmt: skip
    inside = index < queries
    if gradients.slopes is not None:
        tl.store(gradients.slopes + block.at + index, -sums.distance, mask=inside)
    if gradients.table is not None:
        tl.store(table_rows, sums.before[:, None], mask=inside[:, None])
        tl.store(table_rows + 2 * terms.radius, sums.after[:, None], mask=inside[:, None])
    acc *= terms.scale if terms.inner is None else terms.scale * terms.inner
    store_tile(dq, index, dq_n * tile.ALIGN, queries, d, tile.D, acc)


@triton.jit
def _store_later(
    later, low, high, q_side, i, k_matrix, scoring, stored, rule, tile, EDGE: tl.constexpr
):  # fmt: skip
    """Store Σ ℓ of the keys after each of the blocks [low, high), the last one first."""
    queries = scoring.size.queries
    inside = q_side.first + q_side.local < queries
    for n in range(low, high):
        column = high - 1 - n + low
        first = tl.full([], tile.BLOCK_N, tl.int32) * column
        tl.store(stored + column * queries.to(tl.int64), later, mask=inside)
        _, _, x = _scores(first, q_side, i, k_matrix, scoring, rule, tile, EDGE)
        cost, _ = softplus(x, None)
        later += tl.sum(cost, 1)
    return later


@triton.jit
def _walk_forward(
    acc, earlier, sums, low, high, q_side, do_side, i, k_matrix, v_matrix, scoring, carried, at,
    gradients, table_rows, rule, tile, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys [low, high) to Σ dS k and the sums. Store Σ g of the keys before."""
    size, queries = scoring.size, scoring.size.queries
    distance_sum, before_sum, after_sum = sums.distance, sums.before, sums.after
    inside = q_side.first + q_side.local < queries
    local, dv = tl.arange(0, tile.BLOCK_N), tl.arange(0, tile.BLOCK_DV)
    for column in range(low, high):
        first = tl.full([], tile.BLOCK_N, tl.int32) * column
        offset = at + column * queries.to(tl.int64)
        later = tl.load(carried.later + offset, mask=inside, other=0.0)  # [BM]
        tl.store(carried.earlier + offset, earlier, mask=inside)
        k_tile, product, x = _scores(first, q_side, i, k_matrix, scoring, rule, tile, EDGE)
        w, share, _ = _weigh(x, later)
        v_tile = load_block(v_matrix, first, local, dv, tile.DV, EDGE)  # [BN, DV]
        dp = times(do_side, Side(v_tile, v_matrix, first, local), tile.DV, tile)  # [BM, BN]
        ds, earlier = _score_gradients(dp, w, share, earlier)
        j = (first + local)[None, :]
        if gradients.slopes is not None:
            distance_sum += tl.sum(ds * tl.abs(i + (size.keys - size.queries) - j), 1)
        if gradients.table is not None:
            before, after = store_table_entries(ds, table_rows, i, j, size, scoring.terms.radius)
            before_sum += before
            after_sum += after
        ds = cap_slope(ds, product, scoring.terms.inner)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, tile.PRECISION)  # [BM, D]
    return acc, earlier, BiasSums(distance_sum, before_sum, after_sum)


class Members(NamedTuple):
    """What the query heads of a group share, of which a program visits one after the other."""

    batch: Any
    head: Any  # the first query head of the group
    heads: Any  # number of all query heads
    q: Any  # `GroupMatrices`
    do: Any
    vectors: Any
    terms: Any
    visible: Any
    strides: Any
    size: Any
    carried: Any


@triton.jit(do_not_specialize=INTEGERS)
def shares_dkdv(
    q, k, v, do, dk, dv, q_descriptor, do_descriptor,  # descriptors for TMA, or both None
    vectors, terms, visible, carried,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dk_b, dk_h, dk_n,
    dv_b, dv_h, dv_n, mask_b, mask_h, mask_m, mask_n, heads, group, queries, keys, left, right,
    rule, tile,
):  # fmt: skip
    """Write dk and dv for a block of keys, whose size is that of `shares_dq`."""
    size = Size(queries, keys, left, right)
    columns = tl.cdiv(keys, tile.BLOCK_N)
    column = tl.program_id(0) % columns
    bh = (tl.program_id(0) // columns).to(tl.int64)  # batch · Hkv + key/value head
    kv_heads = heads // group
    b, hk = bh // kv_heads, bh % kv_heads
    h = hk * group
    start, local = column * tile.BLOCK_N, tl.arange(0, tile.BLOCK_N)
    d, d_v = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_DV)
    k += (b * k_b + hk * k_h) * tile.ALIGN
    v += (b * v_b + hk * v_h) * tile.ALIGN
    dk += (b * dk_b + hk * dk_h) * tile.ALIGN
    dv += (b * dv_b + hk * dv_h) * tile.ALIGN
    q += (b * q_b + h * q_h) * tile.ALIGN
    do += (b * do_b + h * do_h) * tile.ALIGN
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, None, b, hk)
    v_matrix = Matrix(v, v_n * tile.ALIGN, keys, None, b, hk)
    k_side = Side(load_block(k_matrix, start, local, d, tile.D, True), k_matrix, start, local)
    v_side = Side(load_block(v_matrix, start, local, d_v, tile.DV, True), v_matrix, start, local)
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    ALIGN: tl.constexpr = tile.ALIGN
    q_heads = GroupMatrices(q, q_h.to(tl.int64) * ALIGN, q_n * ALIGN, q_descriptor, d)
    do_heads = GroupMatrices(do, do_h.to(tl.int64) * ALIGN, do_n * ALIGN, do_descriptor, d_v)
    members = Members(
        b, h, heads, q_heads, do_heads, vectors, terms, visible, strides, size, carried
    )

    low, high = query_blocks(start, queries, keys, left, right, tile.BLOCK_M, tile.BLOCK_N)
    low, high = narrowed(low, high, visible.ranges, b * columns + column, tile.BLOCK_M)
    first, last = high, high
    if tile.SPLIT:
        # As with a mask, no block is full where keys do not exist: they would count as later keys.
        first, last = full_blocks(start, low, high, size, tile.BLOCK_M, tile.BLOCK_N, True)
    acc_k = tl.zeros([tile.BLOCK_D, tile.BLOCK_N], tl.float32)
    acc_v = tl.zeros([tile.BLOCK_DV, tile.BLOCK_N], tl.float32)
    # The blocks [low, first) and [last, high), then those between, of each head
    acc_k, acc_v = _sum_over_queries(
        acc_k, acc_v, low, first, last - first, high - low - (last - first), group, k_side, v_side,
        members, rule, tile, True,
    )  # fmt: skip
    if tile.SPLIT:
        acc_k, acc_v = _sum_over_queries(
            acc_k, acc_v, first, last, 0, last - first, group, k_side, v_side, members, rule, tile,
            False,
        )  # fmt: skip
    acc_k *= terms.scale if terms.inner is None else terms.scale * terms.inner
    store_tile(dk, start + local, dk_n * tile.ALIGN, keys, d, tile.D, tl.trans(acc_k))
    store_tile(dv, start + local, dv_n * tile.ALIGN, keys, d_v, tile.DV, tl.trans(acc_v))


@triton.jit
def _sum_over_queries(
    acc_k, acc_v, low, gap, skipped, count, group, k_side, v_side, members, rule, tile,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Add ``count`` blocks of queries of each head, from ``low`` on, without the gap.

    The gap are ``skipped`` blocks from ``gap`` on.
    """
    queries, keys, heads = members.size.queries, members.size.keys, members.heads
    terms, visible, strides = members.terms, members.visible, members.strides
    local, b, q, do = tl.arange(0, tile.BLOCK_M), members.batch, members.q, members.do
    j = (k_side.first + k_side.local)[None, :]  # [1, BN]
    # One loop, because two nested loops would keep twice as much in registers.
    for step in range(count * group):
        member, n = step // count, low + step % count
        n = tl.where(n >= gap, n + skipped, n)
        h, first = members.head + member, tl.full([], tile.BLOCK_M, tl.int32) * n
        index = first + local
        i = index[:, None]  # [BM, 1]
        q_matrix = Matrix(q.base + member * q.head_stride, q.stride, queries, q.descriptor, b, h)
        do_matrix = Matrix(
            do.base + member * do.head_stride, do.stride, queries, do.descriptor, b, h
        )
        q_tile = load_block(q_matrix, first, local, q.columns, tile.D, EDGE)  # [BM, D]
        do_tile = load_block(do_matrix, first, local, do.columns, tile.DV, EDGE)  # [BM, DV]
        product = times(Side(q_tile, q_matrix, first, local), k_side, tile.D, tile)  # [BM, BN]
        product = capped(product, terms.inner, tile.PRECISION)
        row = (b * heads + h) * queries
        loaded = load_vectors(i, row, queries, members.vectors, terms, rule, EDGE)
        head = load_head(b, h, i, heads, terms, visible, strides, members.size)
        scoring = Scoring(loaded, head, members.vectors, terms, visible, strides, members.size)
        x = _unit_scores(product, i, j, scoring, rule, EDGE)
        at = row * tl.cdiv(keys, tile.BLOCK_N)
        at += k_side.first // tile.BLOCK_N * queries.to(tl.int64)
        later = load_vector(members.carried.later, at, index, queries, 0.0, EDGE)  # [BM]
        earlier = load_vector(members.carried.earlier, at, index, queries, 0.0, EDGE)
        w, share, _ = _weigh(x, later)
        acc_v = dot(tl.trans(do_tile), w.to(do_tile.dtype), acc_v, tile.PRECISION)  # [DV, BN]
        dp = times(Side(do_tile, do_matrix, first, local), v_side, tile.DV, tile)  # [BM, BN]
        ds, _ = _score_gradients(dp, w, share, earlier)
        ds = cap_slope(ds, product, terms.inner)
        acc_k = dot(tl.trans(q_tile), ds.to(q_tile.dtype), acc_k, tile.PRECISION)  # [D, BN]
    return acc_k, acc_v
