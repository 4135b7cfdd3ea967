"""dV and dK of every pairwise form. The formulas are in `backward_q`.

`flash_dkdv` is launched after `flash_dq`, which writes δ. It has one program per (batch, key/value
head, block of keys), which loops over the queries that may see its keys, in all query heads of the
group. Its tiles of scores are transposed (k qᵀ), so that they can be multiplied with dO and q
directly.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    activate,
    dot,
    in_unit,
    load_block,
    load_segments,
    query_blocks,
    scores,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.backward_q import RUNTIME


@triton.jit(do_not_specialize=[n for n in RUNTIME if n[:2] not in ("dq", "o_")])
def flash_dkdv(
    q, k, v, do, dk, dv,
    q_descriptor, do_descriptor,  # for TMA, with blocks of BLOCK_M rows; or None
    gain, tau, z, shape, alibi, lse, dlse, delta,  # vectors or None
    mask, q_segments, k_segments,
    blocks, counts,  # query tiles with nonzero weights, per tile of MAP_N keys; or None
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dk_b, dk_h, dk_n,
    dv_b, dv_h, dv_n, mask_b, mask_h, mask_m, mask_n,
    scale, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    MAP_M: tl.constexpr, MAP_N: tl.constexpr,
    PART: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv for a block of keys."""
    tiles = tl.cdiv(keys, BLOCK_N)
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)  # batch · Hkv + key/value head
    kv_heads = heads // group
    b, hk = bh // kv_heads, bh % kv_heads
    k += (b * k_b + hk * k_h) * ALIGN
    v += (b * v_b + hk * v_h) * ALIGN
    dk += (b * dk_b + hk * dk_h) * ALIGN
    dv += (b * dv_b + hk * dv_h) * ALIGN
    start, local = tile * BLOCK_N, tl.arange(0, BLOCK_N)
    j = start + local  # [BN]
    if k_segments is not None:
        k_segments += b * keys
    size = (queries, keys, left, right)
    d, d_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_matrix = (k, k_n * ALIGN, keys, None, b, hk)
    v_matrix = (v, v_n * ALIGN, keys, None, b, hk)
    k_tile = load_block(k_matrix, start, local, d, D, True)  # [BN, D]
    v_tile = load_block(v_matrix, start, local, d_v, DV, True)  # [BN, DV]
    k_side, v_side = (k_tile, k_matrix, start, local), (v_tile, v_matrix, start, local)
    # The first query head of the group.
    h = hk * group
    q += (b * q_b + h * q_h) * ALIGN
    do += (b * do_b + h * do_h) * ALIGN
    at = (b * heads + h) * queries
    mask_at = at * 0
    if mask is not None:
        mask_at = b * mask_b + h * mask_h
    q_side = (q, q_h * ALIGN, q_n * ALIGN, q_descriptor, d)
    do_side = (do, do_h * ALIGN, do_n * ALIGN, do_descriptor, d_v)
    head = (b, h, at, mask_at, group)
    vectors = (gain, tau, z, shape, alibi, lse, dlse, delta, scale)
    where = (mask, mask_h, mask_m, mask_n, k_segments, q_segments)
    low, high = query_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if blocks is not None:
        tiles_m = tl.cdiv(queries, MAP_M)
        map_row = bh * tl.cdiv(keys, MAP_N) + start // MAP_N
        steps = tl.load(counts + map_row) * (MAP_M // BLOCK_M)
        blocks += map_row * group * tiles_m
        acc_k, acc_v = _sum_over_queries(
            acc_k, acc_v, (0, 0, 0, 0), steps, k_side, v_side, q_side, do_side, j, head, vectors,
            where, size, blocks, tiles_m,
            ACT, UNIT, TAU_UNIT, VANISHES, D, DV, BLOCK_M, MAP_M, PART, True, PRECISION,
        )  # fmt: skip
    elif SPLIT:
        first, last = _full_blocks(start, low, high, size, BLOCK_M, BLOCK_N)
        steps = (first - low + high - last) * group
        acc_k, acc_v = _sum_over_queries(
            acc_k, acc_v, (low, first, last, high), steps, k_side, v_side, q_side, do_side, j,
            head, vectors, where, size, None, 0,
            ACT, UNIT, TAU_UNIT, VANISHES, D, DV, BLOCK_M, MAP_M, PART, True, PRECISION,
        )  # fmt: skip
        acc_k, acc_v = _sum_over_queries(
            acc_k, acc_v, (first, last, last, last), (last - first) * group, k_side, v_side,
            q_side, do_side, j, head, vectors, where, size, None, 0,
            ACT, UNIT, TAU_UNIT, VANISHES, D, DV, BLOCK_M, MAP_M, PART, False, PRECISION,
        )  # fmt: skip
    else:
        acc_k, acc_v = _sum_over_queries(
            acc_k, acc_v, (low, high, high, high), (high - low) * group, k_side, v_side,
            q_side, do_side, j, head, vectors, where, size, None, 0,
            ACT, UNIT, TAU_UNIT, VANISHES, D, DV, BLOCK_M, MAP_M, PART, True, PRECISION,
        )  # fmt: skip
    store_tile(dk, j, dk_n * ALIGN, keys, d, D, acc_k * scale)
    store_tile(dv, j, dv_n * ALIGN, keys, d_v, DV, acc_v)


@triton.jit
def _full_blocks(start, low, high, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first, last): in the blocks [first, last) all queries exist and see all keys.

    ``low`` and ``high`` are from `query_blocks`. Keys that do not exist need no attention: each
    key has its own row of the result, and rows beyond the last key are not stored.
    """
    queries, keys, left, right = size
    first, last = low, queries // BLOCK_M
    if right is not None:
        last_key = tl.minimum(start + BLOCK_N, keys) - 1
        first = tl.cdiv(tl.maximum(last_key - right + queries - keys, 0), BLOCK_M)
    if left is not None:
        last = tl.minimum(tl.maximum(start + left + 1 + queries - keys, 0) // BLOCK_M, last)
    first = tl.minimum(tl.maximum(first, low), high)
    return first, tl.minimum(tl.maximum(last, first), high)


@triton.jit
def _load_vector(vector, at, local, rest, other, EDGE: tl.constexpr):
    """Load the entries at + local, of which ``rest`` are left, as [1, BM]."""
    if EDGE:
        return tl.load(vector + at + local, mask=local < rest, other=other)[None, :]
    return tl.load(vector + at + local)[None, :]


@triton.jit
def _sum_over_queries(
    acc_k, acc_v, span, steps, k_side, v_side, q_side, do_side, j, head, vectors, where, size,
    blocks, tiles_m,
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, MAP_M: tl.constexpr,
    PART: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add blocks of queries of all heads to dk / scale [BN, D] and dv [BN, DV].

    ``span`` (low, first, last, high): the blocks [low, first) and [last, high) of each head.
    With ``blocks``, a list of tiles, ``span`` is not used.
    """
    q, q_h, q_n, q_descriptor, d = q_side
    do, do_h, do_n, do_descriptor, d_v = do_side
    b, h, at, mask_at, group = head
    gain, tau, z, shape, alibi, lse, dlse, delta, scale = vectors
    mask, mask_h, mask_m, mask_n, k_segments, q_segments = where
    queries, keys = size[0], size[1]
    low, first, last, high = span
    HIDES: tl.constexpr = EDGE or mask is not None or k_segments is not None
    PARTS: tl.constexpr = MAP_M // BLOCK_M
    local = tl.arange(0, BLOCK_M)
    if blocks is None:
        start = tl.where(low == first, last, low)
        block, turn = start, tl.to_tensor(0)  # turn: index of the head in its group
    # A single loop runs over the heads of the group and their blocks of queries, because nested
    # loops need twice as many registers.
    for step in range(steps):
        if blocks is not None:
            entry = tl.load(blocks + step // PARTS)
            turn = entry // tiles_m
            block = entry % tiles_m * PARTS + step % PARTS
        begin = block * BLOCK_M
        index = begin + local  # [BM]
        i, row, rest = index[None, :], at + turn.to(tl.int64) * queries + begin, queries - begin
        h_now = (h + turn).to(tl.int32)
        q_matrix = (q + turn.to(tl.int64) * q_h, q_n, queries, q_descriptor, b.to(tl.int32), h_now)
        do_matrix = (
            do + turn.to(tl.int64) * do_h, do_n, queries, do_descriptor, b.to(tl.int32), h_now,
        )  # fmt: skip
        q_tile = load_block(q_matrix, begin, local, d, D, EDGE)  # [BM, D]
        do_tile = load_block(do_matrix, begin, local, d_v, DV, EDGE)  # [BM, DV]
        # Per-query vectors [1, BM]: see `load_vectors`.
        one = tl.full([1, BLOCK_M], 1.0, tl.float32)
        factor, tau_i, shape_i, slope_i, gain_i = one * (scale * UNIT), one * 0, one * 0, one * 0, one
        if gain is not None:
            gain_i = _load_vector(gain, row, local, rest, 0.0, EDGE)
            factor *= gain_i
        if tau is not None:
            tau_i = _load_vector(tau, row, local, rest, 0.0, EDGE)
            if HIDES:
                # A query without keys has τ = log 0 = −∞, and −∞ of hidden keys minus that is NaN.
                tau_i = tl.where(tau_i == float("-inf"), 0.0, tau_i)
            tau_i *= TAU_UNIT
        if shape is not None:
            shape_i = _load_vector(shape, row, local, rest, 1.5, EDGE)
        if alibi is not None:
            slope_i = _load_vector(alibi, row, local, rest, 0.0, EDGE) * UNIT
        segment = load_segments(q_segments, b * queries, i, queries)
        mask_now = mask_at
        if mask is not None:
            mask_now += turn.to(tl.int64) * mask_h
        q_now, do_now = (q_tile, q_matrix, begin, local), (do_tile, do_matrix, begin, local)
        product = times(k_side, q_now, D, PART, PRECISION)  # [BN, BM]
        s, seen = scores(
            product, i, j[:, None], (factor, tau_i, shape_i, slope_i), segment,
            (mask, mask_now, mask_m, mask_n, k_segments, alibi), size, UNIT, EDGE, HIDES,
        )  # fmt: skip
        p, slope = activate(ACT, s - tau_i, shape_i, seen, HIDES and not VANISHES)
        # dS and its factors: gain / Z (dO·v − δ).
        if z is not None:
            per_z = 1.0 / _load_vector(z, row, local, rest, 1.0, EDGE)
            p *= per_z
            gain_z = gain_i * per_z
        else:
            gain_z = gain_i
        acc_v = dot(p.to(do_tile.dtype), do_tile, acc_v, PRECISION)  # [BN, DV]
        dp = times(v_side, do_now, DV, PART, PRECISION) * gain_z  # [BN, BM]
        if delta is not None:
            dp -= _load_vector(delta, row, local, rest, 0.0, EDGE) * gain_z
        ds = slope * dp
        if dlse is not None:
            lse_i = _load_vector(lse, row, local, rest, float("-inf"), EDGE)
            lse_i = tl.where(lse_i == float("-inf"), 0.0, in_unit(lse_i, UNIT))
            dlse_i = _load_vector(dlse, row, local, rest, 0.0, EDGE)
            ds += tl.exp2(s - lse_i) * (dlse_i * gain_i)
        acc_k = dot(ds.to(q_tile.dtype), q_tile, acc_k, PRECISION)  # [BN, D]
        if blocks is None:
            block += 1
            block = tl.where(block == first, last, block)
            # After the last block of a head comes the first block of the next head.
            ends = block == high
            turn += ends.to(tl.int32)
            block = tl.where(ends, start, block)
    return acc_k, acc_v
