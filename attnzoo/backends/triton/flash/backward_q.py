"""Backward of every pairwise form, from the saved per-query vectors τ and Z.

    dV_j  = Σ_i φ_ij/Z_i dO_i          dS_ij = φ'_ij (dO_i·v_j − δ_i) / Z_i
    dq_i  = gain_i · scale · Σ_j dS_ij k_j      dk_j = scale · Σ_i gain_i dS_ij q_i
    With a normalizer μ ≠ φ: dS_ij = (φ'_ij dO_i·v_j − μ'_ij δ_i) / Z_i
    δ_i, by MEAN   "output": dO_i·o_i              "weights": Σ_j φ_ij dO_i·v_j / Z_i
                   "slopes": Σ_j φ'_ij dO_i·v_j / Σ_j φ'_ij       None: 0
    A gradient dlse_i of lse is subtracted from δ_i / Z_i, divided by Z_i without the sink, because
    lse does not include the sink.
    With dropout, dO_i·v_j is 0 for dropped weights and divided by 1 − p for the others, and dV has
    the φ_ij after dropout.

`flash_dq` has one program per (batch, head, block of queries). It loops over the keys that
causality and window allow, and writes δ, dq and the gradients of per-query vectors. dv and
dk are in `backward_kv`.

There are no atomics, so results are deterministic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.dropout import drop
from attnzoo.backends.triton.common.groups import (
    INTEGERS,
    KeySides,
    MaskStrides,
    Matrix,
    Scoring,
    Side,
    Size,
)
from attnzoo.backends.triton.common.scores import (
    activate,
    by_distance,
    cap_slope,
    capped,
    load_head,
    load_vectors,
    score_gradients,
    scores,
    select,
)
from attnzoo.backends.triton.common.tile import (
    SMALLEST,
    dot,
    load_block,
    load_queries,
    relative,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.segments import blocks_of_keys, list_of_keys


class RowNormalizers(NamedTuple):
    """`Normalizers` of the queries of a program, loaded: [BM, 1] each."""

    per_z: Any
    dlse: Any  # dlse / Z without the sink
    sink: Any  # the sink, as an argument of the activation
    sink_per_z: Any  # 1/Z, of the sink's weight


class RowSums(NamedTuple):
    """Sums over the keys, [BM] each, of which only those that are wanted are computed."""

    ds: Any  # Σ dS
    distance: Any  # Σ dS |i − j|
    product: Any  # Σ dS q·k, or Σ dS tanh
    weight: Any  # Σ φ dP
    shape: Any  # Σ ∂φ/∂shape (dP − δ) / Z
    decay: Any  # Σ dS ∂s/∂decay
    before: Any  # Σ dS of the keys radius positions or more before the query
    after: Any  # likewise after it


@triton.jit(do_not_specialize=INTEGERS)
def flash_dq(
    q, k, v, o, do, dq, k_descriptor, v_descriptor,  # descriptors for TMA, or both None
    vectors, terms, visible, maps, normalizers, gradients,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    mask_b, mask_h, mask_m, mask_n, heads, group, queries, keys, left, right, rule, tile,
):  # fmt: skip
    """Write dq, δ and the gradients of per-query vectors for a block of queries."""
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_side = Side(q_tile, q_matrix, block.first, block.local)
    i = index[:, None]  # [BM, 1]
    k += (b * k_b + hk * k_h) * tile.ALIGN
    v += (b * v_b + hk * v_h) * tile.ALIGN
    do += (b * do_b + h * do_h) * tile.ALIGN
    dq += (b * dq_b + h * dq_h) * tile.ALIGN
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    d, dv = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_DV)
    do_matrix = Matrix(do, do_n * tile.ALIGN, queries, None, b, h)
    do_tile = load_block(do_matrix, block.first, block.local, dv, tile.DV, True)  # [BM, DV]
    do_side = Side(do_tile, do_matrix, block.first, block.local)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, k_descriptor, b, hk)
    v_matrix = Matrix(v, v_n * tile.ALIGN, keys, v_descriptor, b, hk)
    sides = KeySides(k_matrix, v_matrix, d, dv)
    row = _load_normalizers(i, block.at, queries, loaded.tau, vectors, normalizers, terms, rule)

    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    blocks = maps.blocks
    if maps.blocks is not None:
        map_row, start = list_of_keys(block, heads, size, tile)
        blocks += start
        low, high = 0, tl.load(maps.counts + map_row)
    mean = tl.zeros([tile.BLOCK_M, 1], tl.float32)
    if rule.MEAN == "output":
        o += (b * o_b + h * o_h) * tile.ALIGN
        o_matrix = Matrix(o, o_n * tile.ALIGN, queries, None, b, h)
        mean = _output_products(mean, do_side, o_matrix, tile)
    elif rule.MEAN is not None:
        mean, dshape = _mean_over_keys(
            low, high, q_side, do_side, i, sides, scoring, blocks, row.per_z, rule, tile
        )
        if rule.MEAN == "slopes" and gradients.shape is not None:
            tl.store(gradients.shape + block.at + index, dshape, mask=index < queries)
    if gradients.sink is not None:
        # The sink acts as a key whose value is 0.
        _, _, _, slope = activate(row.sink, loaded.shape, None, rule, False)
        dsink = -slope * mean * row.sink_per_z
        tl.store(gradients.sink + block.at + i, dsink, mask=i < queries)
    mean *= row.per_z  # δ/Z from here on
    if normalizers.dlse is not None:
        mean -= row.dlse
    if rule.MEAN is not None:
        # `flash_dkdv` multiplies dS, with δ in it, by the gain.
        gained = mean if rule.PLAIN_DELTA else mean * loaded.gain
        tl.store(normalizers.delta + block.at + i, gained, mask=i < queries)
    # dgain is q·Σ dS k, but a wide q does not fit in registers after the loop, and with a softcap
    # the sum over keys contains its slope.
    WIDE: tl.constexpr = tile.BLOCK_D > 128 and tile.PART is None
    PRODUCTS: tl.constexpr = gradients.gain is not None and (WIDE or terms.inner is not None)
    # acc: Σ dS k, where dS includes the gain by distance. With PEAKED, acc is relative to the
    # running maximum of |dS|.
    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_D], tl.float32)
    peak_ds = tl.full([tile.BLOCK_M], SMALLEST, tl.float32)
    zero = tl.zeros([tile.BLOCK_M], tl.float32)
    table_rows = i  # pointers [BM, 1] to the rows of gradients.table
    if gradients.table is not None:
        table_rows = gradients.table + (block.at + i) * (2 * terms.radius + 1)
    sums = RowSums(zero, zero, zero, zero, zero, zero, zero, zero)
    if tile.SPLIT and maps.blocks is None:
        acc, peak_ds, sums = _sum_over_keys(
            acc, peak_ds, sums, low, full, q_side, do_side, i, sides, scoring, row, mean, None,
            gradients, table_rows, rule, tile, PRODUCTS, False,
        )  # fmt: skip
        low = full
    acc, peak_ds, sums = _sum_over_keys(
        acc, peak_ds, sums, low, high, q_side, do_side, i, sides, scoring, row, mean, blocks,
        gradients, table_rows, rule, tile, PRODUCTS, True,
    )  # fmt: skip
    if rule.PEAKED:
        acc *= peak_ds[:, None]
    # The scale multiplies the sum [BM, D] once, instead of dS [BM, BN] in each block.
    acc *= terms.scale if terms.inner is None else terms.scale * terms.inner
    if gradients.gain is not None:
        # dgain is computed before acc is multiplied by the gain: q·dq / gain would fail where the
        # gain is 0, for example log 1.
        product = sums.product * terms.scale if PRODUCTS else _row_products(q_side, acc, 0, tile.D)
        tl.store(gradients.gain + block.at + index, product, mask=index < queries)
    if vectors.gain is not None:
        acc *= tl.load(vectors.gain + block.at + i, mask=i < queries, other=0.0)
    _store_sums(sums, block.at, index, queries, gradients, table_rows, terms, rule)
    store_tile(dq, index, dq_n * tile.ALIGN, queries, d, tile.D, acc)


@triton.jit
def _load_normalizers(i, at, count, tau, vectors, normalizers, terms, rule):
    """Return the `RowNormalizers` of the queries i [BM, 1]. Store 1/Z."""
    per_z = tl.full(i.shape, 1.0, tl.float32)
    sink, dlse, sink_per_z = per_z, per_z, per_z
    # The Z saved for a softmax is without the sink. Without a saved Z, tau includes the sink.
    ADDS_SINK: tl.constexpr = vectors.sink is not None and rule.ONLINE
    if vectors.sink is not None:
        sink = tl.load(vectors.sink + at + i, mask=i < count, other=0.0) * rule.UNIT - tau
        if ADDS_SINK:
            # The maximum may lie far below the sink, whose exponential would then overflow. All
            # other weights are 0.
            far = sink > 126.0
            sink = tl.minimum(sink, 126.0)
    if normalizers.dlse is not None:
        dlse = tl.load(normalizers.dlse + at + i, mask=i < count, other=0.0)
    if normalizers.z is not None:
        z = tl.load(normalizers.z + at + i, mask=i < count, other=1.0)
        dlse /= z
        if ADDS_SINK:
            z += tl.exp2(sink)
        per_z = 1.0 / z
        sink_per_z = per_z
        if ADDS_SINK:
            per_z = tl.where(far, 0.0, per_z)
        tl.store(normalizers.per_z + at + i, per_z, mask=i < count)
    if terms.factor is not None:
        per_z = tl.load(terms.factor + at + i, mask=i < count, other=0.0)
    return RowNormalizers(per_z, dlse, sink, sink_per_z)


@triton.jit
def _store_sums(sums, at, index, count, gradients, table_rows, terms, rule):
    inside = index < count
    if gradients.offset is not None:
        tl.store(gradients.offset + at + index, -sums.ds, mask=inside)
    if gradients.factor is not None:
        tl.store(gradients.factor + at + index, sums.weight, mask=inside)
    if gradients.shape is not None and rule.MEAN != "slopes":  # else see `_mean_over_keys`
        tl.store(gradients.shape + at + index, sums.shape, mask=inside)
    if gradients.slopes is not None:
        tl.store(gradients.slopes + at + index, -sums.distance, mask=inside)
    if gradients.table is not None:
        tl.store(table_rows, sums.before[:, None], mask=inside[:, None])
        tl.store(table_rows + 2 * terms.radius, sums.after[:, None], mask=inside[:, None])
    if gradients.decay is not None:
        tl.store(gradients.decay + at + index, sums.decay, mask=inside)


@triton.jit
def _output_products(total, do_side, o_matrix, tile):
    """Add dO_i·o_i to the total [BM, 1].

    In slices of the columns, because two tiles of 256 columns do not fit in registers.
    """
    SLICE: tl.constexpr = min(tile.BLOCK_DV, 64)
    for column in range(0, tile.DV, SLICE):
        columns = column + tl.arange(0, SLICE)
        do_part = load_block(do_side.matrix, do_side.first, do_side.local, columns, tile.DV, True)
        o_part = load_block(o_matrix, do_side.first, do_side.local, columns, tile.DV, True)
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
        product += _row_products(q_side, high, first + WIDTH // 2, D)
    else:
        columns = first + tl.arange(0, WIDTH)
        q_part = load_block(q_side.matrix, q_side.first, q_side.local, columns, D, True)
        product = tl.sum(q_part.to(tl.float32) * x, 1)
    return product


@triton.jit
def _weights(
    n, blocks, q_side, do_side, i, sides, scoring, rule, tile, EDGE: tl.constexpr,
    HIDES: tl.constexpr,
):  # fmt: skip
    """Return j [1, BN], k [BN, D], and q·k, s − τ, the visible keys, φ, φ', μ' and dO·v [BM, BN].

    They are those of block n, or of the block in entry n of the list ``blocks``. With a softcap,
    tanh takes the place of q·k.
    """
    block = n
    if blocks is not None:
        block = tl.load(blocks + n)
    first, local = block * tile.BLOCK_N, tl.arange(0, tile.BLOCK_N)
    j = (first + local)[None, :]
    k_tile = load_block(sides.k, first, local, sides.d, tile.D, EDGE)
    v_tile = load_block(sides.v, first, local, sides.dv, tile.DV, EDGE)  # [BN, DV]
    product = times(q_side, Side(k_tile, sides.k, first, local), tile.D, tile)
    product = capped(product, scoring.terms.inner, tile.PRECISION)
    s, seen = scores(product, i, j, scoring, rule, EDGE, HIDES)
    s = select(s, j, scoring.loaded, scoring.terms, rule)
    x = s - scoring.loaded.tau
    phi, slope, _, mu_slope = activate(x, scoring.loaded.shape, seen, rule, HIDES)
    dp = times(do_side, Side(v_tile, sides.v, first, local), tile.DV, tile)
    if scoring.terms.seed is not None:
        dp = drop(dp, scoring.loaded.hash, j, scoring.terms) * scoring.terms.keep_scale
    return j, k_tile, product, x, seen, phi, slope, mu_slope, dp


@triton.jit
def _mean_over_keys(low, high, q_side, do_side, i, sides, scoring, blocks, per_z, rule, tile):
    """Return δ_i [BM, 1] and dshape_i [BM].

    If MEAN is "slopes", δ_i = Σ_j φ'_ij dO_i·v_j / Σ_j φ'_ij, and dshape_i =
    Σ_j ∂φ_ij/∂shape (dO_i·v_j − δ_i), or 0 without SHAPE_SLOPE. Z_i is 1 up to rounding.
    Otherwise δ_i = Σ_j φ_ij dO_i·v_j / Z_i, and dshape_i is 0.
    """
    SLOPES: tl.constexpr = rule.MEAN == "slopes"
    zero = tl.zeros([tile.BLOCK_M], tl.float32)
    change, slope_sum, shape_change, shape_sum = zero, zero, zero, zero
    for n in range(low, high):
        _, _, _, x, _, phi, slope, _, dp = _weights(
            n, blocks, q_side, do_side, i, sides, scoring, rule, tile, True, True
        )
        change += tl.sum((slope if SLOPES else phi) * dp, 1)
        slope_sum += tl.sum(slope, 1)
        if SLOPES and rule.SHAPE_SLOPE is not None:
            shape_slope = rule.SHAPE_SLOPE(x, scoring.loaded.shape)
            shape_change += tl.sum(shape_slope * dp, 1)
            shape_sum += tl.sum(shape_slope, 1)
    if SLOPES:
        change /= tl.where(slope_sum == 0.0, 1.0, slope_sum)
        shape_change -= change * shape_sum
        mean = change[:, None]
    else:
        mean = change[:, None] * per_z
    return mean, shape_change


@triton.jit
def store_table_entries(ds, table_rows, i, j, size, radius):
    """Store the gradients of a table's entries, for the queries i.

    Return the sums [BM] of the first and of the last entry. Each other entry belongs to one key of
    a query, so no two stores meet.
    """
    entry = j - (i + (size.keys - size.queries - radius))  # [BM, BN], not clamped
    is_first, is_last = entry <= 0, entry >= 2 * radius
    before = tl.sum(tl.where(is_first, ds, 0.0), 1)
    after = tl.sum(tl.where(is_last, ds, 0.0), 1)
    tl.store(table_rows + entry, ds, mask=(i < size.queries) & ~(is_first | is_last))
    return before, after


@triton.jit
def _sum_over_keys(
    acc, peak_ds, sums, low, high, q_side, do_side, i, sides, scoring, row, mean, blocks,
    gradients, table_rows, rule, tile, PRODUCTS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys [low, high) to Σ dS k and to the sums that are wanted."""
    terms, size, decay = scoring.terms, scoring.size, scoring.head.decay
    ds_sum, distance_sum, product_sum = sums.ds, sums.distance, sums.product
    weight_sum, shape_sum, decay_sum = sums.weight, sums.shape, sums.decay
    before_sum, after_sum = sums.before, sums.after
    HIDES: tl.constexpr = EDGE or rule.HIDES
    for n in range(low, high):
        j, k_tile, product, x, seen, phi, slope, mu_slope, dp = _weights(
            n, blocks, q_side, do_side, i, sides, scoring, rule, tile, EDGE, HIDES
        )
        # ``row.per_z`` and the mean are [BM, 1], the tiles [BM, BN].
        if gradients.factor is not None:
            weight_sum += tl.sum(phi * dp, 1)
        dp *= row.per_z
        if rule.SHAPE_SLOPE is not None and rule.MEAN != "slopes":
            shape_slope = rule.SHAPE_SLOPE(x, scoring.loaded.shape)
            if HIDES and not rule.VANISHES:
                shape_slope = tl.where(seen, shape_slope, 0.0)
            shape_sum += tl.sum(shape_slope * (dp - mean), 1)
        ds = score_gradients(dp, mean, slope, mu_slope, rule)
        if gradients.offset is not None:
            ds_sum += tl.sum(ds, 1)
        if gradients.slopes is not None:
            distance_sum += tl.sum(ds * tl.abs(i + (size.keys - size.queries) - j), 1)
        if gradients.table is not None:
            before, after = store_table_entries(ds, table_rows, i, j, size, terms.radius)
            before_sum += before
            after_sum += after
        if rule.DISTANCE_SLOPE is not None:
            da, dm = by_distance(rule.DISTANCE_SLOPE, i, j, size, decay)
            logit = product * (scoring.loaded.factor * (1.0 / rule.SCORE_UNIT))
            decay_sum += tl.sum(ds * (da * logit + dm), 1)
        if rule.DISTANCE is not None:
            a, _ = by_distance(rule.DISTANCE, i, j, size, decay)
            ds *= a
        if PRODUCTS:
            product_sum += tl.sum(ds * product, 1)
        ds = cap_slope(ds, product, terms.inner)
        if rule.PEAKED:
            # φ' of a query that does not exist may be ∞, and ∞ · 0 has no maximum.
            ds = tl.where(i < size.queries, ds, 0.0)
            ds, acc, peak_ds = relative(ds, acc, peak_ds, 1)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, tile.PRECISION)  # [BM, D]
    sums = RowSums(
        ds_sum, distance_sum, product_sum, weight_sum, shape_sum, decay_sum, before_sum, after_sum
    )
    return acc, peak_ds, sums
