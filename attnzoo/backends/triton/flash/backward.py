"""Backward of every pairwise form, from the saved per-query vectors τ and Z.

    dV_j  = Σ_i φ_ij/Z_i dO_i          dS_ij = φ'_ij (dO_i·v_j − δ_i) / Z_i  (+ e^{s−lse} dlse_i)
    dq_i  = gain_i · scale · Σ_j dS_ij k_j      dk_j = scale · Σ_i gain_i dS_ij q_i
    δ_i   = dO_i·o_i if SUM;  Σ_j φ'_ij dO_i·v_j / Σ_j φ'_ij if THRESHOLD;  otherwise 0

`flash_dq` has one program per (batch, head, block of queries). It loops over the keys that
causality and window allow, and writes δ, dq and the gradients of per-query vectors. `flash_dkdv`
is launched after `flash_dq` and has one program per (batch, key/value head, block of keys). It
loops over the queries that may see its keys, and writes dk and dv. Its tiles of scores are
transposed (k qᵀ), so that they can be multiplied with dO and q directly.

There are no atomics, so results are deterministic.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    activate,
    dot,
    in_unit,
    key_blocks,
    load_block,
    load_segments,
    load_tile,
    load_vectors,
    query_blocks,
    query_tile,
    scores,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.forward import RUNTIME as FORWARD

RUNTIME = (*FORWARD, *"do_b do_h do_n dq_b dq_h dq_n dk_b dk_h dk_n dv_b dv_h dv_n".split())


@triton.jit(do_not_specialize=[n for n in RUNTIME if n[:2] not in ("dk", "dv")])
def flash_dq(
    q, k, v, o, do, dq,
    delta, dgain, dtau, dsink, dalibi,  # vectors to write, or None
    gain, tau, z, shape, sink, alibi, lse, dlse,  # vectors or None
    mask, q_segments, k_segments, blocks, counts,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    mask_b, mask_h, mask_m, mask_n,
    scale, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    SUM: tl.constexpr, THRESHOLD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MAP_M: tl.constexpr,
    PART: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, δ and the gradients of per-query vectors for a block of queries."""
    b, h, at, start, index, q_side = query_tile(
        q, q_b, q_h, q_n, heads, queries, D, BLOCK_D, BLOCK_M, ALIGN
    )
    i = index[:, None]
    hk = h // group
    k += (b * k_b + hk * k_h) * ALIGN
    v += (b * v_b + hk * v_h) * ALIGN
    do += (b * do_b + h * do_h) * ALIGN
    dq += (b * dq_b + h * dq_h) * ALIGN
    mask_at = h * 0
    if mask is not None:
        mask_at = b * mask_b + h * mask_h
    if k_segments is not None:
        k_segments += b * keys
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    do_matrix = (do, do_n * ALIGN, queries, None, b, h)
    do_tile = load_block(do_matrix, start, q_side[3], dv, DV, True)  # [BM, DV]
    do_side = (do_tile, do_matrix, start, q_side[3])
    vectors = load_vectors(i, at, scale, gain, tau, shape, alibi, queries, UNIT, TAU_UNIT)
    segment = load_segments(q_segments, b * queries, i, queries)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi)
    size = (queries, keys, left, right)
    k_matrix = (k, k_n * ALIGN, keys, None, b, hk)
    v_matrix = (v, v_n * ALIGN, keys, None, b, hk)
    tiles_kv = (k_matrix, v_matrix, d, dv)
    per_z = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    lse_i, dlse_i = per_z, per_z
    if z is not None:
        per_z = 1.0 / tl.load(z + at + i, mask=i < queries, other=1.0)
    if dlse is not None:
        lse_i = tl.load(lse + at + i, mask=i < queries, other=float("-inf"))
        lse_i = tl.where(lse_i == float("-inf"), 0.0, in_unit(lse_i, UNIT))
        dlse_i = tl.load(dlse + at + i, mask=i < queries, other=0.0)

    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    if blocks is not None:
        map_row = (b * heads + h) * tl.cdiv(queries, MAP_M) + start // MAP_M
        blocks += map_row * tl.cdiv(keys, BLOCK_N)
        low, high = 0, tl.load(counts + map_row)
    mean = tl.zeros([BLOCK_M, 1], tl.float32)
    if SUM:
        o += (b * o_b + h * o_h) * ALIGN
        o_tile = load_tile(o, index, o_n * ALIGN, queries, dv, DV, True)
        mean = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)[:, None]
    if THRESHOLD:
        mean = _threshold_mean(
            low, high, q_side, do_side, i, tiles_kv, size, vectors, segment, where, blocks,
            ACT, UNIT, VANISHES, D, DV, BLOCK_M, BLOCK_N, PART, PRECISION,
        )[:, None]  # fmt: skip
    if SUM or THRESHOLD:
        tl.store(delta + at + i, mean, mask=i < queries)
    if dsink is not None:
        # The sink acts as a key whose value is 0.
        last = tl.load(sink + at + i, mask=i < queries, other=0.0) * UNIT
        last -= vectors[1]
        last = ACT(last, vectors[2])[1]
        tl.store(dsink + at + i, -last * mean * per_z, mask=i < queries)

    # acc: Σ dS k, total: Σ dS, dist: Σ dS |i − j|
    TOTAL: tl.constexpr = dtau is not None
    DISTANCE: tl.constexpr = dalibi is not None
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total, dist = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if blocks is not None or not SPLIT:
        acc, total, dist = _sum_over_keys(
            acc, total, dist, low, high, q_side, do_side, i, tiles_kv, size, vectors, segment,
            per_z, mean, lse_i, dlse_i, dlse, where, blocks,
            ACT, UNIT, VANISHES, TOTAL, DISTANCE, D, DV, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip
    else:
        acc, total, dist = _sum_over_keys(
            acc, total, dist, low, full, q_side, do_side, i, tiles_kv, size, vectors, segment,
            per_z, mean, lse_i, dlse_i, dlse, where, None,
            ACT, UNIT, VANISHES, TOTAL, DISTANCE, D, DV, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
        acc, total, dist = _sum_over_keys(
            acc, total, dist, full, high, q_side, do_side, i, tiles_kv, size, vectors, segment,
            per_z, mean, lse_i, dlse_i, dlse, where, None,
            ACT, UNIT, VANISHES, TOTAL, DISTANCE, D, DV, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip
    acc *= scale
    if dgain is not None:
        # dgain is computed before acc is multiplied by the gain: q·dq / gain would fail where the
        # gain is 0, for example log 1.
        tl.store(
            dgain + at + index, tl.sum(q_side[0].to(tl.float32) * acc, 1), mask=index < queries
        )
    if gain is not None:
        acc *= tl.load(gain + at + i, mask=i < queries, other=0.0)
    if dtau is not None:
        tl.store(dtau + at + index, -total, mask=index < queries)
    if dalibi is not None:
        tl.store(dalibi + at + index, -dist, mask=index < queries)
    store_tile(dq, index, dq_n * ALIGN, queries, d, D, acc)


@triton.jit
def _threshold_mean(
    low, high, q_side, do_side, i, tiles_kv, size, vectors, segment, where, blocks,
    ACT: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return δ_i = Σ_j φ'_ij dO_i·v_j / Σ_j φ'_ij [BM], for threshold forms."""
    k, v, d, dv = tiles_kv
    local = tl.arange(0, BLOCK_N)
    change, slope_sum = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for n in range(low, high):
        block = n
        if blocks is not None:
            block = tl.load(blocks + n)
        first = block * BLOCK_N
        j = first + local
        k_tile = load_block(k, first, local, d, D, True)
        v_tile = load_block(v, first, local, dv, DV, True)
        k_side, v_side = (k_tile, k, first, local), (v_tile, v, first, local)
        product = times(q_side, k_side, D, PART, PRECISION)  # [BM, BN]
        s, seen = scores(product, i, j[None, :], vectors, segment, where, size, UNIT, True, True)
        slope = activate(ACT, s - vectors[1], vectors[2], seen, not VANISHES)[1]
        dp = times(do_side, v_side, DV, PART, PRECISION)  # [BM, BN]
        change += tl.sum(slope * dp, 1)
        slope_sum += tl.sum(slope, 1)
    return change / tl.where(slope_sum == 0.0, 1.0, slope_sum)


@triton.jit
def _sum_over_keys(
    acc, total, dist, low, high, q_side, do_side, i, tiles_kv, size, vectors, segment,
    per_z, mean, lse_i, dlse_i, dlse, where, blocks,
    ACT: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr, TOTAL: tl.constexpr,
    DISTANCE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys [low, high) to Σ dS k, Σ dS and Σ dS |i − j|."""
    k, v, d, dv = tiles_kv
    local = tl.arange(0, BLOCK_N)
    HIDES: tl.constexpr = EDGE or where[0] is not None or where[4] is not None
    for n in range(low, high):
        block = n
        if blocks is not None:
            block = tl.load(blocks + n)
        first = block * BLOCK_N
        j = first + local
        k_tile = load_block(k, first, local, d, D, EDGE)  # [BN, D]
        v_tile = load_block(v, first, local, dv, DV, EDGE)  # [BN, DV]
        k_side, v_side = (k_tile, k, first, local), (v_tile, v, first, local)
        product = times(q_side, k_side, D, PART, PRECISION)  # [BM, BN]
        s, seen = scores(product, i, j[None, :], vectors, segment, where, size, UNIT, EDGE, HIDES)
        slope = activate(ACT, s - vectors[1], vectors[2], seen, HIDES and not VANISHES)[1]
        dp = times(do_side, v_side, DV, PART, PRECISION)  # [BM, BN]
        ds = slope * (dp - mean) * per_z
        if dlse is not None:
            # φ(s − τ) cannot be used here: τ includes the sink, lse does not.
            ds += tl.exp2(s - lse_i) * dlse_i
        if TOTAL:
            total += tl.sum(ds, 1)
        if DISTANCE:
            dist += tl.sum(ds * tl.abs(i + (size[1] - size[0]) - j[None, :]), 1)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, PRECISION)  # [BM, D]
    return acc, total, dist


@triton.jit(do_not_specialize=[n for n in RUNTIME if n[:2] not in ("dq", "o_")])
def flash_dkdv(
    q, k, v, do, dk, dv,
    gain, tau, z, shape, alibi, lse, dlse, delta,  # vectors or None
    mask, q_segments, k_segments,
    blocks, counts,  # query tiles with nonzero weights, per tile of MAP_N keys; or None
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dk_b, dk_h, dk_n,
    dv_b, dv_h, dv_n, mask_b, mask_h, mask_m, mask_n,
    scale, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAP_M: tl.constexpr, MAP_N: tl.constexpr,
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
    start, j_local = tile * BLOCK_N, tl.arange(0, BLOCK_N)
    j = start + j_local  # [BN]
    if k_segments is not None:
        k_segments += b * keys
    size = (queries, keys, left, right)
    d, d_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_matrix = (k, k_n * ALIGN, keys, None, b, hk)
    v_matrix = (v, v_n * ALIGN, keys, None, b, hk)
    k_tile = load_block(k_matrix, start, j_local, d, D, True)  # [BN, D]
    v_tile = load_block(v_matrix, start, j_local, d_v, DV, True)  # [BN, DV]
    k_side, v_side = (k_tile, k_matrix, start, j_local), (v_tile, v_matrix, start, j_local)
    local = tl.arange(0, BLOCK_M)
    low, high = query_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    tiles_m = high - low
    steps = group * tiles_m
    if blocks is not None:
        tiles_m = tl.cdiv(queries, MAP_M)
        map_row = bh * tl.cdiv(keys, MAP_N) + start // MAP_N
        steps = tl.load(counts + map_row) * (MAP_M // BLOCK_M)
        blocks += map_row * group * tiles_m
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # A single loop runs over the heads of the group and their blocks of queries, because nested
    # loops need twice as many registers.
    for step in range(steps):
        if blocks is not None:
            PARTS: tl.constexpr = MAP_M // BLOCK_M
            entry = tl.load(blocks + step // PARTS)
            h = hk * group + entry // tiles_m
            begin = entry % tiles_m * MAP_M + step % PARTS * BLOCK_M
        else:
            h = hk * group + step // tiles_m
            begin = (low + step % tiles_m) * BLOCK_M
        index = begin + local  # [BM]
        i, at = index[None, :], (b * heads + h) * queries
        q_at, do_at = (b * q_b + h * q_h) * ALIGN, (b * do_b + h * do_h) * ALIGN
        q_matrix = (q + q_at, q_n * ALIGN, queries, None, b, h)
        do_matrix = (do + do_at, do_n * ALIGN, queries, None, b, h)
        q_tile = load_block(q_matrix, begin, local, d, D, True)  # [BM, D]
        do_tile = load_block(do_matrix, begin, local, d_v, DV, True)  # [BM, DV]
        vectors = load_vectors(i, at, scale, gain, tau, shape, alibi, queries, UNIT, TAU_UNIT)
        segment = load_segments(q_segments, b * queries, i, queries)
        mask_at = h * 0
        if mask is not None:
            mask_at = b * mask_b + h * mask_h
        where = (mask, mask_at, mask_m, mask_n, k_segments, alibi)
        q_side = (q_tile, q_matrix, begin, local)
        do_side = (do_tile, do_matrix, begin, local)
        product = times(k_side, q_side, D, PART, PRECISION)  # [BN, BM]
        s, seen = scores(product, i, j[:, None], vectors, segment, where, size, UNIT, True, True)
        p, slope = activate(ACT, s - vectors[1], vectors[2], seen, not VANISHES)
        if z is not None:
            per_z = 1.0 / tl.load(z + at + i, mask=i < queries, other=1.0)
            p, slope = p * per_z, slope * per_z
        acc_v = dot(p.to(do_tile.dtype), do_tile, acc_v, PRECISION)  # [BN, DV]
        dp = times(v_side, do_side, DV, PART, PRECISION)  # [BN, BM]
        if delta is not None:
            dp -= tl.load(delta + at + i, mask=i < queries, other=0.0)
        ds = slope * dp
        if dlse is not None:
            lse_i = tl.load(lse + at + i, mask=i < queries, other=float("-inf"))
            lse_i = tl.where(lse_i == float("-inf"), 0.0, in_unit(lse_i, UNIT))
            ds += tl.exp2(s - lse_i) * tl.load(dlse + at + i, mask=i < queries, other=0.0)
        if gain is not None:
            ds *= tl.load(gain + at + i, mask=i < queries, other=0.0)
        acc_k = dot(ds.to(q_tile.dtype), q_tile, acc_k, PRECISION)  # [BN, D]
    store_tile(dk, j, dk_n * ALIGN, keys, d, D, acc_k * scale)
    store_tile(dv, j, dv_n * ALIGN, keys, d_v, DV, acc_v)
