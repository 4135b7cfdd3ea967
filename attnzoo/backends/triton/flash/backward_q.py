"""Backward of every pairwise form, from the saved per-query vectors τ and Z.

    dV_j  = Σ_i φ_ij/Z_i dO_i          dS_ij = φ'_ij (dO_i·v_j − δ_i) / Z_i
    dq_i  = gain_i · scale · Σ_j dS_ij k_j      dk_j = scale · Σ_i gain_i dS_ij q_i
    With a normalizer μ ≠ φ: dS_ij = (φ'_ij dO_i·v_j − μ'_ij δ_i) / Z_i
    δ_i, by MEAN   "output": dO_i·o_i              "weights": Σ_j φ_ij dO_i·v_j / Z_i
                   "slopes": Σ_j φ'_ij dO_i·v_j / Σ_j φ'_ij       None: 0
    A gradient dlse_i of lse is subtracted from δ_i / Z_i, divided by Z_i without the sink, because
    lse does not include the sink.

`flash_dq` has one program per (batch, head, block of queries). It loops over the keys that
causality and window allow, and writes δ, dq and the gradients of per-query vectors. dv and
dk are in `backward_kv`.

There are no atomics, so results are deterministic.
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
    key_blocks,
    load_block,
    load_decay,
    load_segments,
    load_vectors,
    place_mask,
    query_tile,
    relative,
    scores,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.forward import RUNTIME as FORWARD
from attnzoo.backends.triton.flash.segments import narrowed

RUNTIME = (*FORWARD, *"do_b do_h do_n dq_b dq_h dq_n dk_b dk_h dk_n dv_b dv_h dv_n".split())


@triton.jit(do_not_specialize=[n for n in RUNTIME if n[:2] not in ("dk", "dv")])
def flash_dq(
    q, k, v, o, do, dq,
    k_descriptor, v_descriptor,  # for TMA, with blocks of BLOCK_N rows; or None
    # Vectors to write, or None. delta: gain · δ/Z, or δ/Z with PLAIN_DELTA. dtau: of τ or of base.
    delta, per_z, dgain, dtau, dshape, dsink, dalibi, dfactor, ddecay,
    gain, tau, z, shape, sink, alibi, dlse, key_bias, base, peak, factor,  # vectors or None
    decay,  # [B, H] or None
    mask, q_segments, k_segments, ranges, blocks, counts,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    mask_b, mask_h, mask_m, mask_n,
    scale, inner, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, UNIT: tl.constexpr, TAU_UNIT: tl.constexpr, VANISHES: tl.constexpr,
    SHAPE_SLOPE: tl.constexpr,  # function of (x, shape) that returns ∂φ/∂shape, or None
    DISTANCE: tl.constexpr, DISTANCE_SLOPE: tl.constexpr,  # functions of (t, decay), or None
    MEAN: tl.constexpr, PLAIN_DELTA: tl.constexpr,
    NORMALIZER: tl.constexpr, PEAKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MAP_M: tl.constexpr,
    PART: tl.constexpr, ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, δ and the gradients of per-query vectors for a block of queries."""
    b, h, at, start, index, q, q_tile = query_tile(
        q, q_b, q_h, q_n, heads, queries, D, BLOCK_D, BLOCK_M, ALIGN
    )
    q_side = (q_tile, (q, q_n * ALIGN, queries, None, b, h), start, tl.arange(0, BLOCK_M))
    i = index[:, None]
    hk = h // group
    k += (b * k_b + hk * k_h) * ALIGN
    v += (b * v_b + hk * v_h) * ALIGN
    do += (b * do_b + h * do_h) * ALIGN
    dq += (b * dq_b + h * dq_h) * ALIGN
    mask_at = place_mask(mask, b, h, mask_b, mask_h, MASK_ALIGN)
    if mask_m is not None:
        mask_m = mask_m.to(tl.int64) * MASK_ALIGN
    if k_segments is not None:
        k_segments += b * keys
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    do_matrix = (do, do_n * ALIGN, queries, None, b, h)
    do_tile = load_block(do_matrix, start, q_side[3], dv, DV, True)  # [BM, DV]
    do_side = (do_tile, do_matrix, start, q_side[3])
    vectors = load_vectors(
        i, at, scale, gain, tau, shape, alibi, base, peak, queries, UNIT, TAU_UNIT
    )
    segment = load_segments(q_segments, b * queries, i, queries)
    decay_h = load_decay(decay, b * heads + h)
    terms = (key_bias, (b * heads + h) * keys, base, inner, decay_h, peak)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, terms)
    size = (queries, keys, left, right)
    b_now, h_now = b.to(tl.int32), hk.to(tl.int32)
    k_matrix = (k, k_n * ALIGN, keys, k_descriptor, b_now, h_now)
    v_matrix = (v, v_n * ALIGN, keys, v_descriptor, b_now, h_now)
    tiles_kv = (k_matrix, v_matrix, d, dv)
    per_z_i = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    last, dlse_i, sink_per_z = per_z_i, per_z_i, per_z_i
    if sink is not None:
        last = tl.load(sink + at + i, mask=i < queries, other=0.0) * UNIT - vectors[1]
        if tau is not None:
            # The saved statistic of a softmax may lie far below the sink, whose exponential would
            # then overflow. All other weights are 0.
            far = last > 126.0
            last = tl.minimum(last, 126.0)
    if dlse is not None:
        dlse_i = tl.load(dlse + at + i, mask=i < queries, other=0.0)
    if z is not None:
        z_i = tl.load(z + at + i, mask=i < queries, other=1.0)
        dlse_i /= z_i  # lse does not include the sink
        if sink is not None and tau is not None:
            z_i += tl.exp2(last)
        per_z_i = 1.0 / z_i
        sink_per_z = per_z_i
        if sink is not None and tau is not None:
            per_z_i = tl.where(far, 0.0, per_z_i)
        tl.store(per_z + at + i, per_z_i, mask=i < queries)
    if factor is not None:
        per_z_i = tl.load(factor + at + i, mask=i < queries, other=0.0)

    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    tile_row = b * tl.cdiv(queries, BLOCK_M) + start // BLOCK_M
    low, high = narrowed(low, high, ranges, tile_row, BLOCK_N)
    if blocks is not None:
        map_row = (b * heads + h) * tl.cdiv(queries, MAP_M) + start // MAP_M
        blocks += map_row * tl.cdiv(keys, BLOCK_N)
        low, high = 0, tl.load(counts + map_row)
    mean = tl.zeros([BLOCK_M, 1], tl.float32)
    THRESHOLD: tl.constexpr = MEAN == "slopes"
    if MEAN == "output":
        o += (b * o_b + h * o_h) * ALIGN
        o_matrix = (o, o_n * ALIGN, queries, None, b, h)
        mean = _output_products(mean, do_matrix, o_matrix, start, q_side[3], DV, BLOCK_DV)
    if THRESHOLD or MEAN == "weights":
        mean, change = _mean_over_keys(
            low, high, q_side, do_side, i, tiles_kv, size, vectors, segment, where, blocks, per_z_i,
            ACT, DISTANCE, SHAPE_SLOPE, THRESHOLD, NORMALIZER, UNIT, VANISHES, D, DV, BLOCK_M,
            BLOCK_N, PART, PRECISION,
        )  # fmt: skip
    if THRESHOLD and dshape is not None:
        tl.store(dshape + at + index, change, mask=index < queries)
    if dsink is not None:
        # The sink acts as a key whose value is 0.
        slope = ACT(last, vectors[2])[3 if NORMALIZER else 1]
        tl.store(dsink + at + i, -slope * mean * sink_per_z, mask=i < queries)
    mean *= per_z_i
    if dlse is not None:
        mean -= dlse_i
    if MEAN is not None:
        # `flash_dkdv` multiplies the whole of dS by the gain.
        gained = mean
        if gain is not None and not PLAIN_DELTA:
            gained *= tl.load(gain + at + i, mask=i < queries, other=0.0)
        tl.store(delta + at + i, gained, mask=i < queries)
    # A threshold's dshape is known, see `_mean_over_keys`.
    SHAPE: tl.constexpr = None if THRESHOLD else SHAPE_SLOPE
    TOTAL: tl.constexpr = dtau is not None
    AMOUNT: tl.constexpr = dfactor is not None
    DISTANT: tl.constexpr = dalibi is not None
    # dgain is q·Σ dS k, but a wide q does not fit in registers after the loop, and with a softcap
    # the sum over keys contains its slope.
    WIDE: tl.constexpr = BLOCK_D > 128 and PART is None
    PRODUCTS: tl.constexpr = dgain is not None and (WIDE or inner is not None)
    # acc: Σ dS k, where dS includes the gain by distance. sums: Σ dS, Σ dS |i − j|, Σ dS q·k or
    # Σ dS tanh, Σ φ dP, Σ ∂φ/∂shape (dP/Z − δ/Z), and Σ dS ∂s/∂decay.
    # With PEAKED, acc is relative to the running maximum of |dS|.
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_ds = tl.full([BLOCK_M], SMALLEST, tl.float32)
    nothing = tl.zeros([BLOCK_M], tl.float32)
    sums = (nothing, nothing, nothing, nothing, nothing, nothing)
    if SPLIT and blocks is None:
        acc, peak_ds, sums = _sum_over_keys(
            acc, peak_ds, sums, low, full, q_side, do_side, i, tiles_kv, size, vectors, segment,
            per_z_i, mean, where, None,
            ACT, SHAPE, DISTANCE, DISTANCE_SLOPE, UNIT, VANISHES, TOTAL, DISTANT, PRODUCTS, AMOUNT,
            NORMALIZER, PEAKED, D, DV, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
        low = full
    acc, peak_ds, sums = _sum_over_keys(
        acc, peak_ds, sums, low, high, q_side, do_side, i, tiles_kv, size, vectors, segment,
        per_z_i, mean, where, blocks,
        ACT, SHAPE, DISTANCE, DISTANCE_SLOPE, UNIT, VANISHES, TOTAL, DISTANT, PRODUCTS, AMOUNT,
        NORMALIZER, PEAKED, D, DV, BLOCK_N, PART, True, PRECISION,
    )  # fmt: skip
    total, dist, products, amount, change, decays = sums
    if PEAKED:
        acc *= peak_ds[:, None]
    acc *= scale if inner is None else scale * inner
    if dgain is not None:
        # dgain is computed before acc is multiplied by the gain: q·dq / gain would fail where the
        # gain is 0, for example log 1.
        if PRODUCTS:
            products *= scale
        else:
            products = _row_products(q_side, acc, 0, D)
        tl.store(dgain + at + index, products, mask=index < queries)
    if gain is not None:
        acc *= tl.load(gain + at + i, mask=i < queries, other=0.0)
    if dtau is not None:
        tl.store(dtau + at + index, -total, mask=index < queries)
    if dfactor is not None:
        tl.store(dfactor + at + index, amount, mask=index < queries)
    if SHAPE is not None:
        tl.store(dshape + at + index, change, mask=index < queries)
    if dalibi is not None:
        tl.store(dalibi + at + index, -dist, mask=index < queries)
    if ddecay is not None:
        tl.store(ddecay + at + index, decays, mask=index < queries)
    store_tile(dq, index, dq_n * ALIGN, queries, d, D, acc)


@triton.jit
def _output_products(
    total, do_matrix, o_matrix, start, local, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Add dO_i·o_i to the total [BM, 1].

    In slices of the columns, because two whole tiles of 256 columns do not fit in registers.
    """
    SLICE: tl.constexpr = min(BLOCK_DV, 64)
    for column in range(0, DV, SLICE):
        columns = column + tl.arange(0, SLICE)
        do_part = load_block(do_matrix, start, local, columns, DV, True)
        o_part = load_block(o_matrix, start, local, columns, DV, True)
        total += tl.sum(do_part.to(tl.float32) * o_part.to(tl.float32), 1)[:, None]
    return total


@triton.jit
def _row_products(q_side, x, first, D: tl.constexpr):
    """Return Σ_d q_id x_id [BM], for the columns of q from ``first`` on.

    q is loaded again, because it would take registers during the loop, and 32 columns at a time,
    because x takes most registers.
    """
    WIDTH: tl.constexpr = x.shape[1]
    if WIDTH > 32:
        halves = tl.permute(tl.reshape(x, [x.shape[0], 2, WIDTH // 2]), [0, 2, 1])
        low, high = tl.split(halves)
        product = _row_products(q_side, low, first, D)
        tl.debug_barrier()
        product += _row_products(q_side, high, first + WIDTH // 2, D)
    else:
        columns = first + tl.arange(0, WIDTH)
        q_part = load_block(q_side[1], q_side[2], q_side[3], columns, D, True)
        product = tl.sum(q_part.to(tl.float32) * x, 1)
    return product


@triton.jit
def _mean_over_keys(
    low, high, q_side, do_side, i, tiles_kv, size, vectors, segment, where, blocks, per_z_i,
    ACT: tl.constexpr, DISTANCE: tl.constexpr, SHAPE_SLOPE: tl.constexpr, THRESHOLD: tl.constexpr,
    NORMALIZER: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return δ_i [BM, 1] and dshape_i [BM].

    With THRESHOLD, δ_i = Σ_j φ'_ij dO_i·v_j / Σ_j φ'_ij, and dshape_i =
    Σ_j ∂φ_ij/∂shape (dO_i·v_j − δ_i), or 0 without SHAPE_SLOPE. Z_i is 1 up to rounding.
    Otherwise δ_i = Σ_j φ_ij dO_i·v_j / Z_i, and dshape_i is 0.
    """
    k, v, d, dv = tiles_kv
    local, nothing = tl.arange(0, BLOCK_N), tl.zeros([BLOCK_M], tl.float32)
    change, slope_sum, shape_change, shape_sum = nothing, nothing, nothing, nothing
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
        product = capped(product, where[6][3], PRECISION)
        s, seen = scores(
            product, i, j[None, :], vectors, segment, where, size, UNIT, DISTANCE, True, True
        )
        if NORMALIZER:
            phi, slope, _mu, _other = activate_both(
                ACT, s - vectors[1], vectors[2], seen, not VANISHES
            )
        else:
            phi, slope = activate(ACT, s - vectors[1], vectors[2], seen, not VANISHES)
        dp = times(do_side, v_side, DV, PART, PRECISION)  # [BM, BN]
        change += tl.sum((slope if THRESHOLD else phi) * dp, 1)
        slope_sum += tl.sum(slope, 1)
        if THRESHOLD and SHAPE_SLOPE is not None:
            shape_slope = SHAPE_SLOPE(s - vectors[1], vectors[2])
            shape_change += tl.sum(shape_slope * dp, 1)
            shape_sum += tl.sum(shape_slope, 1)
    if THRESHOLD:
        change /= tl.where(slope_sum == 0.0, 1.0, slope_sum)
        shape_change -= change * shape_sum
        mean = change[:, None]
    else:
        mean = change[:, None] * per_z_i
    return mean, shape_change


@triton.jit
def _sum_over_keys(
    acc, peak_ds, sums, low, high, q_side, do_side, i, tiles_kv, size, vectors, segment, per_z_i,
    mean, where, blocks,
    ACT: tl.constexpr, SHAPE: tl.constexpr, DISTANCE: tl.constexpr, DISTANCE_SLOPE: tl.constexpr,
    UNIT: tl.constexpr, VANISHES: tl.constexpr,
    TOTAL: tl.constexpr, DISTANT: tl.constexpr, PRODUCTS: tl.constexpr, AMOUNT: tl.constexpr,
    NORMALIZER: tl.constexpr, PEAKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys [low, high) to Σ dS k and to ``sums``, of those that are wanted."""
    k, v, d, dv = tiles_kv
    total, dist, products, amount, change, decays = sums
    local = tl.arange(0, BLOCK_N)
    HIDES: tl.constexpr = (
        EDGE or where[0] is not None or where[4] is not None or where[6][0] is not None
    )
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
        product = capped(product, where[6][3], PRECISION)
        s, seen = scores(
            product, i, j[None, :], vectors, segment, where, size, UNIT, DISTANCE, EDGE, HIDES
        )
        MASKED: tl.constexpr = HIDES and not VANISHES
        if NORMALIZER:
            phi, slope, _mu, other = activate_both(ACT, s - vectors[1], vectors[2], seen, MASKED)
        else:
            phi, slope = activate(ACT, s - vectors[1], vectors[2], seen, MASKED)
        dp = times(do_side, v_side, DV, PART, PRECISION)  # [BM, BN]
        if AMOUNT:
            amount += tl.sum(phi * dp, 1)
        if SHAPE is not None:
            shape_slope = SHAPE(s - vectors[1], vectors[2])
            if HIDES and not VANISHES:
                shape_slope = tl.where(seen, shape_slope, 0.0)
            change += tl.sum(shape_slope * (dp * per_z_i - mean), 1)
        ds = slope * dp * per_z_i - other * mean if NORMALIZER else slope * (dp * per_z_i - mean)
        if TOTAL:
            total += tl.sum(ds, 1)
        if DISTANT:
            dist += tl.sum(ds * tl.abs(i + (size[1] - size[0]) - j[None, :]), 1)
        if DISTANCE_SLOPE is not None:
            da, dm = by_distance(DISTANCE_SLOPE, i, j[None, :], size, where[6][4])
            logit = product * (vectors[0] * (1.0 / UNIT))
            decays += tl.sum(ds * (da * logit + dm), 1)
        if DISTANCE is not None:
            ds *= by_distance(DISTANCE, i, j[None, :], size, where[6][4])[0]
        if PRODUCTS:
            products += tl.sum(ds * product, 1)
        if where[6][3] is not None:
            ds *= (1.0 - product) * (1.0 + product)
        if PEAKED:
            # φ' of a query that does not exist may be ∞, and ∞ · 0 has no maximum.
            ds = tl.where(i < size[0], ds, 0.0)
            ds, acc, peak_ds = relative(ds, acc, peak_ds, 1)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, PRECISION)  # [BM, D]
    return acc, peak_ds, (total, dist, products, amount, change, decays)
