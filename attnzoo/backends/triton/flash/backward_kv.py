"""dV and dK of every pairwise form. The formulas are in `backward_q`.

`flash_dkdv` is launched after `flash_dq`, which writes δ. It has one program per (batch, key/value
head, block of keys), which loops over the queries that may see its keys, in all query heads of the
group. With ``parts``, there is one program per part of the group, and the parts' gradients are
summed after the kernel. The tiles have one of two orientations:

- rows are keys: scores k qᵀ [BN, BM], and dV += p dO [BN, DV];
- TRANSPOSED, rows are queries: scores q kᵀ [BM, BN], and dVᵀ += dOᵀ p [DV, BN].

Tensor cores multiply 16 rows per warp, and on sm_90 and newer 64 rows per four warps. There, a tile
of few keys may be TRANSPOSED, because q and dOᵀ have enough rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.groups import INTEGERS, MaskStrides, Matrix, Side, Size
from attnzoo.backends.triton.common.tile import (
    SMALLEST,
    dot,
    load_block,
    query_blocks,
    relative,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.query_lists import TILES, full_blocks
from attnzoo.backends.triton.flash.score_step import Group, first_head, score_step
from attnzoo.backends.triton.flash.segments import narrowed


class Span(NamedTuple):
    """The blocks [low, first) and [last, high) of queries, of each head."""

    low: Any
    first: Any
    last: Any
    high: Any


class Sums(NamedTuple):
    """dk / scale [BN, D] and dv [BN, DV], or their transposes.

    With PEAKED, they are relative to the running maxima of |dS| and |p| [BN].
    """

    k: Any
    v: Any
    peak_ds: Any
    peak_p: Any


class GroupMatrices(NamedTuple):
    """A matrix of each query head of a group; see `Matrix`."""

    base: Any  # pointer to the first head of the group
    head_stride: Any
    stride: Any
    descriptor: Any
    columns: Any


@triton.jit(do_not_specialize=INTEGERS)
def flash_dkdv(
    q, k, v, do, dk, dv, q_descriptor, do_descriptor,  # descriptors for TMA, or both None
    vectors, terms, visible,
    maps,  # from `list_queries`, per tile of MAP_N keys
    normalizers,
    gradients,  # of the key bias
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dk_b, dk_h, dk_n,
    dv_b, dv_h, dv_n, mask_b, mask_h, mask_m, mask_n, heads, group, queries, keys, left, right,
    parts,  # number of parts of each group, which are then the groups; or None
    rule, tile,
):  # fmt: skip
    """Write dk and dv for a block of keys."""
    tiles = tl.cdiv(keys, tile.BLOCK_N)
    column = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)  # batch · Hkv + key/value head
    kv_heads = heads // group
    b, hk = bh // kv_heads, bh % kv_heads
    of_kv = hk  # the head of k and v; dk and dv have one head per part
    if parts is not None:
        of_kv = hk // parts
    k += (b * k_b + of_kv * k_h) * tile.ALIGN
    v += (b * v_b + of_kv * v_h) * tile.ALIGN
    start, local = column * tile.BLOCK_N, tl.arange(0, tile.BLOCK_N)
    d, d_v = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_DV)
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, None, b, of_kv)
    v_matrix = Matrix(v, v_n * tile.ALIGN, keys, None, b, of_kv)
    k_tile = load_block(k_matrix, start, local, d, tile.D, True)  # [BN, D]
    v_tile = load_block(v_matrix, start, local, d_v, tile.DV, True)  # [BN, DV]
    k_side = Side(k_tile, k_matrix, start, local)
    v_side = Side(v_tile, v_matrix, start, local)
    h = hk * group  # the first query head of the group
    q += (b * q_b + h * q_h) * tile.ALIGN
    do += (b * do_b + h * do_h) * tile.ALIGN
    ALIGN: tl.constexpr = tile.ALIGN
    q_heads = GroupMatrices(q, q_h.to(tl.int64) * ALIGN, q_n * ALIGN, q_descriptor, d)
    do_heads = GroupMatrices(do, do_h.to(tl.int64) * ALIGN, do_n * ALIGN, do_descriptor, d_v)
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    bias_at = (b * heads + h) * keys + start
    dkey_bias = gradients.key_bias
    if gradients.key_bias is not None:
        dkey_bias += bias_at
    size = Size(queries, keys, left, right)
    head = first_head(b, h, heads, start, bias_at, terms, visible, strides, size)
    members = Group(
        b, h, (b * heads + h) * queries, head, Size(queries, keys - start, left, right), keys,
        vectors, terms, visible, strides, normalizers,
    )  # fmt: skip
    low, high = query_blocks(start, queries, keys, left, right, tile.BLOCK_M, tile.BLOCK_N)
    low, high = narrowed(low, high, visible.ranges, b * tiles + column, tile.BLOCK_M)
    sums = _no_sums(tile)
    PARTS: tl.constexpr = 1 if maps.blocks is None else tile.MAP_M // tile.BLOCK_M
    # Blocks that need masks are in ``span`` or in a list. With SPLIT, the others follow.
    span, steps, blocks = Span(low, high, high, high), (high - low) * group, maps.blocks
    if maps.blocks is not None:
        map_row = bh * tl.cdiv(keys, tile.MAP_N) + start // tile.MAP_N
        most = group * tl.cdiv(queries, tile.MAP_M)
        blocks += map_row * most
        steps = tl.load(maps.counts + 2 * map_row) * PARTS
    elif tile.SPLIT:
        HAS_MASK: tl.constexpr = visible.mask is not None
        first, last = full_blocks(start, low, high, size, tile.BLOCK_M, tile.BLOCK_N, HAS_MASK)
        span, steps = Span(low, first, last, high), (first - low + high - last) * group
    sums = _sum_over_queries(
        sums, span, steps, k_side, v_side, q_heads, do_heads, members, dkey_bias, blocks, rule,
        tile, PARTS, True,
    )  # fmt: skip
    if tile.SPLIT:
        if maps.blocks is not None:
            full = tl.load(maps.counts + 2 * map_row + 1)
            blocks += most - full
            steps = full * PARTS
        else:
            span, steps = Span(first, last, last, last), (last - first) * group
        if gradients.key_bias is not None:
            # The second loop stores its sums in the second half of [2, B, H, Nk], so that it need
            # not read and add those of the first.
            dkey_bias += tl.num_programs(0).to(tl.int64) // tiles * group * keys
        sums = _sum_over_queries(
            sums, span, steps, k_side, v_side, q_heads, do_heads, members, dkey_bias, blocks, rule,
            tile, PARTS, False,
        )  # fmt: skip
    dk += (b * dk_b + hk * dk_h) * tile.ALIGN
    dv += (b * dv_b + hk * dv_h) * tile.ALIGN
    acc_k, acc_v = sums.k, sums.v
    if tile.TRANSPOSED:
        acc_k, acc_v = tl.trans(acc_k), tl.trans(acc_v)
    if rule.PEAKED:
        acc_k *= sums.peak_ds[:, None]
        acc_v *= sums.peak_p[:, None]
    if terms.seed is not None:
        acc_v *= terms.keep_scale
    acc_k *= terms.scale if terms.inner is None else terms.scale * terms.inner
    store_tile(dk, start + local, dk_n * tile.ALIGN, keys, d, tile.D, acc_k)
    store_tile(dv, start + local, dv_n * tile.ALIGN, keys, d_v, tile.DV, acc_v)


@triton.jit
def _no_sums(tile):
    TRANSPOSED: tl.constexpr = tile.TRANSPOSED
    acc_k = tl.zeros(
        [tile.BLOCK_D, tile.BLOCK_N] if TRANSPOSED else [tile.BLOCK_N, tile.BLOCK_D], tl.float32
    )
    acc_v = tl.zeros(
        [tile.BLOCK_DV, tile.BLOCK_N] if TRANSPOSED else [tile.BLOCK_N, tile.BLOCK_DV], tl.float32
    )
    peak = tl.full([tile.BLOCK_N], SMALLEST, tl.float32)
    return Sums(acc_k, acc_v, peak, peak)


@triton.jit
def _sum_over_queries(
    sums, span, steps, k_side, v_side, q_heads, do_heads, group, dkey_bias, blocks, rule, tile,
    PARTS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add blocks of queries of all heads of the group to the `Sums`.

    ``blocks``: a list of tiles of PARTS blocks (see `list_queries`), or None: those of ``span``.
    Blocks of the same head follow each other. After the last of them, Σ_i dS_ij is stored in
    dkey_bias, a pointer to the first key, unless that is None.
    """
    b, queries = group.batch, group.size.queries
    acc_k, acc_v, peak_ds, peak_p = sums.k, sums.v, sums.peak_ds, sums.peak_p
    local = tl.arange(0, tile.BLOCK_M)
    # Indices in `scores` are relative to the first query and the first key of the block.
    i = tl.expand_dims(local, 1 if tile.TRANSPOSED else 0)
    j = tl.expand_dims(k_side.local, 0 if tile.TRANSPOSED else 1)
    if blocks is None:
        # The first block of a head; there may be none before the gap.
        start = tl.where(span.low == span.first, span.last, span.low)
        block, member = start, tl.full([], 0, tl.int32)  # member: index of the head in its group
    total = tl.zeros([k_side.local.shape[0]], tl.float32)
    # A single loop runs over the heads of the group and their blocks of queries, because nested
    # loops need twice as many registers. Head and block are carried along, because a division per
    # step would cost more.
    for step in range(steps):
        if blocks is not None:
            entry = tl.load(blocks + step // PARTS)
            # The interpreter has no int % constexpr.
            part = step % tl.full([], PARTS, tl.int32)
            member, block = entry // TILES, entry % TILES * PARTS + part
        begin = block * tile.BLOCK_M
        h = group.head + member
        q_matrix = Matrix(
            q_heads.base + member.to(tl.int64) * q_heads.head_stride, q_heads.stride, queries,
            q_heads.descriptor, b, h,
        )  # fmt: skip
        do_matrix = Matrix(
            do_heads.base + member.to(tl.int64) * do_heads.head_stride, do_heads.stride, queries,
            do_heads.descriptor, b, h,
        )  # fmt: skip
        q_tile = load_block(q_matrix, begin, local, q_heads.columns, tile.D, EDGE)  # [BM, D]
        do_tile = load_block(do_matrix, begin, local, do_heads.columns, tile.DV, EDGE)  # [BM, DV]
        q_side = Side(q_tile, q_matrix, begin, local)
        do_side = Side(do_tile, do_matrix, begin, local)
        if tile.TRANSPOSED:
            product = times(q_side, k_side, tile.D, tile)  # [BM, BN]
            dp = times(do_side, v_side, tile.DV, tile)
        else:
            product = times(k_side, q_side, tile.D, tile)  # [BN, BM]
            dp = times(v_side, do_side, tile.DV, tile)
        p, ds, total = score_step(
            product, dp, total, i, j, member, begin, group, dkey_bias, rule, tile, EDGE
        )
        if rule.PEAKED:
            p, acc_v, peak_p = relative(p, acc_v, peak_p, 0 if tile.TRANSPOSED else 1)
            ds, acc_k, peak_ds = relative(ds, acc_k, peak_ds, 0 if tile.TRANSPOSED else 1)
        p, ds = p.to(do_tile.dtype), ds.to(q_tile.dtype)
        if tile.TRANSPOSED:
            acc_v = dot(tl.trans(do_tile), p, acc_v, tile.PRECISION)  # [DV, BN]
            acc_k = dot(tl.trans(q_tile), ds, acc_k, tile.PRECISION)  # [D, BN]
        else:
            acc_v = dot(p, do_tile, acc_v, tile.PRECISION)  # [BN, DV]
            acc_k = dot(ds, q_tile, acc_k, tile.PRECISION)  # [BN, D]
        if blocks is None:
            block += 1
            block = tl.where(block == span.first, span.last, block)
            # After the last block of a head comes the first block of the next head.
            ends = block == span.high
            following = member + ends.to(tl.int32)
            block = tl.where(ends, start, block)
        elif dkey_bias is not None:
            # No entry has the head 2047.
            entry = tl.load(blocks + (step + 1) // PARTS, mask=step + 1 < steps, other=0x7FFFFFFF)
            following = entry // TILES
        if dkey_bias is not None:
            ends = following != member
            # The interpreter does not combine this scalar with a block by "and".
            inside = k_side.local < tl.where(ends, group.size.keys, 0)
            at = dkey_bias + member.to(tl.int64) * group.keys + k_side.local
            tl.store(at, total, mask=inside)
            total = tl.where(ends, 0.0, total)
        if blocks is None:
            member = following
    return Sums(acc_k, acc_v, peak_ds, peak_p)
