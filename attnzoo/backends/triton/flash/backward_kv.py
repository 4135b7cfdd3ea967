"""dV and dK of every pairwise form. The formulas are in `backward_q`.

`flash_dkdv` is launched after `flash_dq`, which writes δ. It has one program per (batch, key/value
head, block of keys), which loops over the queries that may see its keys, in all query heads of the
group. With ``parts``, there is one program per part of the group, and the parts' gradients are
summed after the kernel. The tiles have one of two orientations:

- rows are keys: scores k qᵀ [BN, BM], and dV += p dO [BN, DV];
- TURNED, rows are queries: scores q kᵀ [BM, BN], and dVᵀ += dOᵀ p [DV, BN].

Tensor cores multiply 16 rows per warp, and on sm_90 and newer 64 rows per four warps. A block of
few keys is TURNED there, because q and dOᵀ have enough rows.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    SMALLEST,
    activate,
    activate_both,
    by_distance,
    capped,
    dot,
    load_block,
    load_decay,
    load_segments,
    place_mask,
    query_blocks,
    relative,
    scores,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.backward_q import RUNTIME
from attnzoo.backends.triton.flash.query_lists import TILES, full_blocks
from attnzoo.backends.triton.flash.segments import narrowed


@triton.jit(do_not_specialize=[*(n for n in RUNTIME if n[:2] not in ("dq", "o_")), "parts"])
def flash_dkdv(
    q, k, v, do, dk, dv,
    dkey_bias,  # fp32 [2, B, H, Nk], initially 0, or None; the gradient is the sum of both parts
    q_descriptor, do_descriptor,  # for TMA, with blocks of BLOCK_M rows; or None
    gain, tau, per_z, shape, alibi, delta, key_bias, base, peak,  # vectors or None
    decay,  # [B, H] or None
    mask, q_segments, k_segments, ranges,
    blocks, counts,  # from `list_queries`, per tile of MAP_N keys; or None
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dk_b, dk_h, dk_n,
    dv_b, dv_h, dv_n, mask_b, mask_h, mask_m, mask_n,
    scale, inner, heads, group, queries, keys, left, right,
    parts,  # number of parts of each group, which are then the groups; or None
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    NORMALIZER: tl.constexpr, PEAKED: tl.constexpr, DISTANCE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    MAP_M: tl.constexpr, MAP_N: tl.constexpr, TURNED: tl.constexpr,
    PART: tl.constexpr, ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv for a block of keys."""
    tiles = tl.cdiv(keys, BLOCK_N)
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)  # batch · Hkv + key/value head
    kv_heads = heads // group
    b, hk = bh // kv_heads, bh % kv_heads
    of_kv = hk  # the head of k and v; dk and dv have one head per part
    if parts is not None:
        of_kv = hk // parts
    k += (b * k_b + of_kv * k_h) * ALIGN
    v += (b * v_b + of_kv * v_h) * ALIGN
    start, local = tile * BLOCK_N, tl.arange(0, BLOCK_N)
    j = start + local  # [BN]
    d, d_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_matrix = (k, k_n * ALIGN, keys, None, b, of_kv)
    v_matrix = (v, v_n * ALIGN, keys, None, b, of_kv)
    k_tile = load_block(k_matrix, start, local, d, D, True)  # [BN, D]
    v_tile = load_block(v_matrix, start, local, d_v, DV, True)  # [BN, DV]
    k_side, v_side = (k_tile, k_matrix, start, local), (v_tile, v_matrix, start, local)
    # The first query head of the group.
    h = hk * group
    q += (b * q_b + h * q_h) * ALIGN
    do += (b * do_b + h * do_h) * ALIGN
    at = (b * heads + h) * queries
    mask_at = place_mask(mask, b, h, mask_b, mask_h, MASK_ALIGN)
    if mask_m is not None:
        mask_m = mask_m.to(tl.int64) * MASK_ALIGN
    if mask is not None:
        mask_at += start.to(tl.int64) * (1 if mask_n is None else mask_n)
        mask_h = mask_h.to(tl.int64) * MASK_ALIGN
    if k_segments is not None:
        k_segments += b * keys + start
    q_side = (q, q_h.to(tl.int64) * ALIGN, q_n * ALIGN, q_descriptor, d)
    do_side = (do, do_h.to(tl.int64) * ALIGN, do_n * ALIGN, do_descriptor, d_v)
    bias_at = (b * heads + h) * keys + start
    if dkey_bias is not None:
        dkey_bias += bias_at
    if decay is not None:
        decay += b * heads + h
    head = (b, h, at, mask_at, bias_at)
    vectors = (gain, tau, per_z, shape, alibi, delta, scale, base, inner, decay, peak)
    where = (mask, mask_h, mask_m, mask_n, k_segments, q_segments, key_bias)
    size = (queries, keys - start, left, right)
    low, high = query_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    low, high = narrowed(low, high, ranges, b * tiles + tile, BLOCK_M)
    acc_k = tl.zeros([BLOCK_D, BLOCK_N] if TURNED else [BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_DV, BLOCK_N] if TURNED else [BLOCK_N, BLOCK_DV], tl.float32)
    # With PEAKED, these sums are relative to the running maxima of |dS| and |p|.
    peaks = (tl.full([BLOCK_N], SMALLEST, tl.float32), tl.full([BLOCK_N], SMALLEST, tl.float32))
    PARTS: tl.constexpr = 1 if blocks is None else MAP_M // BLOCK_M
    # Blocks that need masks are in ``span`` or in a list. With SPLIT, the others follow.
    span, steps = (low, high, high, high), (high - low) * group
    if blocks is not None:
        map_row = bh * tl.cdiv(keys, MAP_N) + start // MAP_N
        most = group * tl.cdiv(queries, MAP_M)
        blocks += map_row * most
        steps = tl.load(counts + 2 * map_row) * PARTS
    elif SPLIT:
        HAS_MASK: tl.constexpr = mask is not None
        first, last = full_blocks(
            start, low, high, (queries, keys, left, right), BLOCK_M, BLOCK_N, HAS_MASK
        )
        span, steps = (low, first, last, high), (first - low + high - last) * group
    acc_k, acc_v, peaks = _sum_over_queries(
        acc_k, acc_v, peaks, span, steps, k_side, v_side, q_side, do_side, head, vectors, where,
        size, blocks, keys, dkey_bias,
        ACT, UNIT, TAU_UNIT, VANISHES, NORMALIZER, PEAKED, DISTANCE,
        D, DV, BLOCK_M, PARTS, PART, TURNED, True, PRECISION,
    )  # fmt: skip
    if SPLIT:
        if blocks is not None:
            full = tl.load(counts + 2 * map_row + 1)
            blocks += most - full
            steps = full * PARTS
        else:
            span, steps = (first, last, last, last), (last - first) * group
        if dkey_bias is not None:
            dkey_bias += tl.num_programs(0).to(tl.int64) // tiles * group * keys
        acc_k, acc_v, peaks = _sum_over_queries(
            acc_k, acc_v, peaks, span, steps, k_side, v_side, q_side, do_side, head, vectors,
            where, size, blocks, keys, dkey_bias,
            ACT, UNIT, TAU_UNIT, VANISHES, NORMALIZER, PEAKED, DISTANCE,
            D, DV, BLOCK_M, PARTS, PART, TURNED, False, PRECISION,
        )  # fmt: skip
    dk += (b * dk_b + hk * dk_h) * ALIGN
    dv += (b * dv_b + hk * dv_h) * ALIGN
    if TURNED:
        acc_k, acc_v = tl.trans(acc_k), tl.trans(acc_v)
    if PEAKED:
        acc_k *= peaks[0][:, None]
        acc_v *= peaks[1][:, None]
    acc_k *= scale if inner is None else scale * inner
    store_tile(dk, j, dk_n * ALIGN, keys, d, D, acc_k)
    store_tile(dv, j, dv_n * ALIGN, keys, d_v, DV, acc_v)


@triton.jit
def _load_vector(vector, at, local, rest, other, EDGE: tl.constexpr):
    """Load the entries at + local, of which ``rest`` are left. ``local``: [1, BM] or [BM, 1]."""
    if EDGE:
        return tl.load(vector + at + local, mask=local < rest, other=other)
    return tl.load(vector + at + local)


@triton.jit
def _load_vectors(
    vectors, row, i, rest, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, HIDES: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Return the gain, and what `load_vectors` returns, of the queries row + i."""
    gain, tau, _, shape, alibi, _, scale, base, _, _, peak = vectors
    one = tl.full(i.shape, 1.0, tl.float32)
    factor, gain_i = one * (scale * UNIT), one
    zero = one * 0
    tau_i, shape_i, slope_i, base_i, peak_i = zero, zero, zero, zero, zero
    if gain is not None:
        gain_i = _load_vector(gain, row, i, rest, 0.0, EDGE)
        factor *= gain_i
    if tau is not None:
        tau_i = _load_vector(tau, row, i, rest, 0.0, EDGE)
        if HIDES:
            # A query without keys has τ = log 0 = −∞, and −∞ of hidden keys minus that is NaN.
            tau_i = tl.where(tau_i == float("-inf"), 0.0, tau_i)
        tau_i *= TAU_UNIT
    if shape is not None:
        shape_i = _load_vector(shape, row, i, rest, 1.5, EDGE)
    if alibi is not None:
        slope_i = _load_vector(alibi, row, i, rest, 0.0, EDGE) * UNIT
    if base is not None:
        base_i = _load_vector(base, row, i, rest, 0.0, EDGE)
    threshold = zero
    if peak is not None:
        peak_i = _load_vector(peak, row, i, rest, 0.0, EDGE)
        threshold, tau_i = tau_i, zero
    return gain_i, (factor, tau_i, shape_i, slope_i, base_i, peak_i, threshold)


@triton.jit
def _limited(seen, i, j, offset, left, right, TURNED: tl.constexpr):
    """Return the keys in ``seen`` that causality and window allow.

    Query index + offset is the index of the key at the same position. One limit per row needs fewer
    registers than one per column.
    """
    if right is not None:
        inside = (j <= i + (offset + right)) if TURNED else (j - (offset + right) <= i)
        seen = seen & inside
    if left is not None:
        inside = (j >= i + (offset - left)) if TURNED else (j - (offset - left) >= i)
        seen = seen & inside
    return seen


@triton.jit
def _sum_over_queries(
    acc_k, acc_v, peaks, span, steps, k_side, v_side, q_side, do_side, head, vectors, where, size,
    blocks, all_keys, dkey_bias,
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    NORMALIZER: tl.constexpr, PEAKED: tl.constexpr, DISTANCE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, TURNED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add blocks of queries of all heads to dk / scale [BN, D] and dv [BN, DV], or [D, BN].

    ``span`` (low, first, last, high): the blocks [low, first) and [last, high) of each head.
    With ``blocks``, a list of tiles of PARTS blocks (see `list_queries`), ``span`` is not used.
    Blocks of the same head follow each other. After the last of them, Σ_i dS_ij is stored in
    dkey_bias. Then ``delta`` is δ/Z, otherwise gain · δ/Z.
    """
    q, q_h, q_n, q_descriptor, d = q_side
    do, do_h, do_n, do_descriptor, d_v = do_side
    b, h, at, mask_at, bias_at = head
    _, _, per_z, _, alibi, delta, _, base, inner, decay, peak = vectors
    mask, mask_h, mask_m, mask_n, k_segments, q_segments, key_bias = where
    queries, keys, left, right = size
    low, first, last, high = span
    peak_ds, peak_p = peaks
    MASKED: tl.constexpr = mask is not None or k_segments is not None
    HIDES: tl.constexpr = EDGE or MASKED
    ADDED: tl.constexpr = (
        mask is not None or key_bias is not None or alibi is not None or base is not None
        or DISTANCE is not None
    )  # fmt: skip
    local = tl.arange(0, BLOCK_M)
    # Indices in `scores` are relative to the first query and the first key of the block.
    i = tl.expand_dims(local, 1 if TURNED else 0)
    j = tl.expand_dims(k_side[3], 0 if TURNED else 1)
    if blocks is None:
        start = tl.where(low == first, last, low)
        block, turn = start, tl.full([], 0, tl.int32)  # turn: index of the head in its group
    total = tl.zeros([k_side[3].shape[0]], tl.float32)
    # A single loop runs over the heads of the group and their blocks of queries, because nested
    # loops need twice as many registers.
    for step in range(steps):
        if blocks is not None:
            entry = tl.load(blocks + step // PARTS)
            turn, block = entry // TILES, entry % TILES * PARTS + step % PARTS
        begin = block * BLOCK_M
        row, rest = at + turn.to(tl.int64) * queries + begin, queries - begin
        h_now = (h + turn).to(tl.int32)
        q_matrix = (q + turn.to(tl.int64) * q_h, q_n, queries, q_descriptor, b.to(tl.int32), h_now)
        do_matrix = (
            do + turn.to(tl.int64) * do_h, do_n, queries, do_descriptor, b.to(tl.int32), h_now,
        )  # fmt: skip
        q_tile = load_block(q_matrix, begin, local, d, D, EDGE)  # [BM, D]
        do_tile = load_block(do_matrix, begin, local, d_v, DV, EDGE)  # [BM, DV]
        q_now, do_now = (q_tile, q_matrix, begin, local), (do_tile, do_matrix, begin, local)
        if TURNED:
            product = times(q_now, k_side, D, PART, PRECISION)  # [BM, BN]
            dp = times(do_now, v_side, DV, PART, PRECISION)
        else:
            product = times(k_side, q_now, D, PART, PRECISION)  # [BN, BM]
            dp = times(v_side, do_now, DV, PART, PRECISION)
        product = capped(product, inner, PRECISION)
        gain_i, loaded = _load_vectors(vectors, row, i, rest, UNIT, TAU_UNIT, HIDES, EDGE)
        segment = load_segments(q_segments, b * queries + begin, i, rest)
        mask_now = mask_at
        if mask is not None:
            mask_now += turn.to(tl.int64) * mask_h
            if mask_m is not None:
                mask_now += begin.to(tl.int64) * mask_m
        size_now = (rest, keys, None, None)
        decay_now = load_decay(decay, turn)
        terms = (key_bias, bias_at + turn.to(tl.int64) * all_keys, base, inner, decay_now, peak)
        s, seen = scores(
            product, i, j, loaded, segment,
            (mask, mask_now, mask_m, mask_n, k_segments, alibi, terms),
            size_now, UNIT, DISTANCE, EDGE, MASKED,
        )  # fmt: skip
        if EDGE:
            # Queries that do not exist are loaded as 0. Added terms may make φ of their scores ∞,
            # and ∞ · 0 is NaN; φ of 0 may be the running maximum. Keys that do not exist need no
            # comparison: their results are not stored.
            seen = _limited(seen & (i < rest), i, j, keys - rest, left, right, TURNED)
            # Otherwise `activate` sets the weights of hidden keys to 0.
            if VANISHES and (ADDED or PEAKED or left is not None or right is not None):
                s = tl.where(seen, s, float("-inf"))
        HIDDEN: tl.constexpr = HIDES and not VANISHES
        if NORMALIZER:
            p, slope, _mu, other = activate_both(ACT, s - loaded[1], loaded[2], seen, HIDDEN)
        else:
            p, slope = activate(ACT, s - loaded[1], loaded[2], seen, HIDDEN)
        row_factor = gain_i
        if per_z is not None:
            per_z_i = _load_vector(per_z, row, i, rest, 1.0, EDGE)
            p *= per_z_i
            row_factor = per_z_i if dkey_bias is not None else gain_i * per_z_i
        if per_z is not None or dkey_bias is None:
            dp *= row_factor
        if NORMALIZER:
            ds = slope * dp - other * _load_vector(delta, row, i, rest, 0.0, EDGE)
        else:
            if delta is not None:
                dp -= _load_vector(delta, row, i, rest, 0.0, EDGE)
            ds = slope * dp
        if dkey_bias is not None:
            total += tl.sum(ds, 0 if TURNED else 1)
            ds *= gain_i
        if DISTANCE is not None:
            ds *= by_distance(DISTANCE, i, j, size_now, decay_now)[0]
        if inner is not None:
            ds *= (1.0 - product) * (1.0 + product)
        if PEAKED:
            p, acc_v, peak_p = relative(p, acc_v, peak_p, 0 if TURNED else 1)
            ds, acc_k, peak_ds = relative(ds, acc_k, peak_ds, 0 if TURNED else 1)
        p, ds = p.to(do_tile.dtype), ds.to(q_tile.dtype)
        if TURNED:
            acc_v = dot(tl.trans(do_tile), p, acc_v, PRECISION)  # [DV, BN]
            acc_k = dot(tl.trans(q_tile), ds, acc_k, PRECISION)  # [D, BN]
        else:
            acc_v = dot(p, do_tile, acc_v, PRECISION)  # [BN, DV]
            acc_k = dot(ds, q_tile, acc_k, PRECISION)  # [BN, D]
        if blocks is None:
            block += 1
            block = tl.where(block == first, last, block)
            # After the last block of a head comes the first block of the next head.
            ends = block == high
            following = turn + ends.to(tl.int32)
            block = tl.where(ends, start, block)
        elif dkey_bias is not None:
            # No entry has the head 2047.
            entry = tl.load(blocks + (step + 1) // PARTS, mask=step + 1 < steps, other=0x7FFFFFFF)
            following = entry // TILES
        if dkey_bias is not None:
            ends = following != turn
            # The interpreter does not combine this scalar with a block by "and".
            inside = k_side[3] < tl.where(ends, keys, 0)
            tl.store(dkey_bias + turn.to(tl.int64) * all_keys + k_side[3], total, mask=inside)
            total = tl.where(ends, 0.0, total)
        if blocks is None:
            turn = following
    return acc_k, acc_v, (peak_ds, peak_p)
