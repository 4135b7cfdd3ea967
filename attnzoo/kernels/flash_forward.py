"""Forward: o_i = Σ_j φ(s_ij − τ_i) v_j / Z_i, a block of queries walking over the keys once.

``ONLINE`` (φ = exp, normalized): a running maximum stands for τ and the partial is (m, Z, o).
``SUM``: τ is 0 or given, the partial is (Z, o). Neither: no normalizer, the partial is o.
A sink and the division enter once, at the end.

``PEAKED`` (φ unbounded, values in fp16): o is kept in units of the largest φ so far, for fp16 ends
at 65504 and a polynomial does not.
"""

import triton
import triton.language as tl

from attnzoo.kernels.tile import (
    activate,
    dot,
    key_blocks,
    load_rows,
    load_segments,
    load_tile,
    scores,
    store_tile,
    times,
)

# Lengths and strides change from call to call: none of them may compile a kernel anew.
RUNTIME = (
    "q_b q_h q_n k_b k_h k_n v_b v_h v_n o_b o_h o_n mask_b mask_h mask_m mask_n "
    "heads group queries keys left right"
).split()


@triton.jit(do_not_specialize=RUNTIME)
def flash_forward(
    # stat: log2 Σ with the sink (ONLINE), or Z (SUM); with mass, both rows or None, m and Z apart
    q, k, v, o, stat, mass, lse,
    gain, tau, shape, sink, alibi,  # rows or None
    mask, q_segments, k_segments,
    blocks, counts,  # of each tile of MAP_M queries: the blocks of keys that hold weight; or None
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    scale, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr,
    ONLINE: tl.constexpr, SUM: tl.constexpr, PEAKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, MAP_M: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(queries, BLOCK_M)
    # The last rows first: under causality they have the most keys, and nobody waits for them.
    tile = tiles - 1 - tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    # Strides come in units of ALIGN: their divisibility, and with it the width of loads, is known.
    q += (b * q_b + h * q_h) * ALIGN
    k += (b * k_b + (h // group) * k_h) * ALIGN
    v += (b * v_b + (h // group) * v_h) * ALIGN
    o += (b * o_b + h * o_h) * ALIGN
    mask_at = h * 0
    if mask is not None:
        mask_at = b * mask_b + h * mask_h
    if k_segments is not None:
        k_segments += b * keys
    at, start = bh * queries, tile * BLOCK_M
    index = start + tl.arange(0, BLOCK_M)  # [BM]
    i = index[:, None]
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_tile = load_tile(q, index, q_n * ALIGN, queries, d, D, True)  # [BM, D]
    q_side = (q_tile, q, index, q_n * ALIGN, queries)
    rows = load_rows(i, at, scale, gain, tau, shape, alibi, queries, UNIT, UNIT)  # each [BM, 1]
    segment = load_segments(q_segments, b * queries, i, queries)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi)
    size = (queries, keys, left, right)
    tiles_kv = (k, v, k_n * ALIGN, v_n * ALIGN, d, dv)

    # The running maximum of the scores (ONLINE), or of φ (PEAKED).
    m = tl.full([BLOCK_M], float("-inf") if ONLINE else 1.0, tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    if blocks is not None:
        line = bh * tl.cdiv(queries, MAP_M) + start // MAP_M
        blocks += line * tl.cdiv(keys, BLOCK_N)
        low, high = 0, tl.load(counts + line)
    if blocks is not None or not SPLIT:
        acc, m, z = _walk(
            acc, m, z, low, high, q_side, i, tiles_kv, size, rows, segment, where, blocks,
            ACT, UNIT, VANISHES, ONLINE, SUM, PEAKED, D, DV, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip
    else:
        acc, m, z = _walk(
            acc, m, z, low, full, q_side, i, tiles_kv, size, rows, segment, where, None,
            ACT, UNIT, VANISHES, ONLINE, SUM, PEAKED, D, DV, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
        acc, m, z = _walk(
            acc, m, z, full, high, q_side, i, tiles_kv, size, rows, segment, where, None,
            ACT, UNIT, VANISHES, ONLINE, SUM, PEAKED, D, DV, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip

    if ONLINE:
        if lse is not None:  # −∞ for a row without keys
            tl.store(lse + at + index, (m + tl.log2(z)) / UNIT, mask=index < queries)
        if sink is not None:
            last = tl.load(sink + at + index, mask=index < queries, other=0.0) * UNIT
            top = tl.maximum(m, last)
            top = tl.where(top == float("-inf"), 0.0, top)
            down = tl.exp2(m - top)
            acc *= down[:, None]
            z = z * down + tl.exp2(last - top)
            m = top
        divisor = tl.where(z == 0.0, 1.0, z)
        acc /= divisor[:, None]
        if mass is None:
            tl.store(stat + at + index, m + tl.log2(z), mask=index < queries)
        else:
            tl.store(stat + at + index, m, mask=index < queries)
            tl.store(mass + at + index, divisor, mask=index < queries)
    elif SUM:
        if sink is not None:
            last = tl.load(sink + at + i, mask=i < queries, other=0.0) * UNIT
            z += tl.sum(ACT(last, rows[2])[0], 1)
        z = tl.where(z == 0.0, 1.0, z)
        if PEAKED:
            acc *= (m / z)[:, None]
        else:
            acc /= z[:, None]
        tl.store(stat + at + index, z, mask=index < queries)
        if tau is not None:
            acc += rows[1] - rows[1]  # NaN where scores were: maxima drop it, and with it the row
    store_tile(o, index, o_n * ALIGN, queries, dv, DV, acc)


@triton.jit
def _walk(
    acc, m, z, low, high, q_side, i, tiles_kv, size, rows, segment, where, blocks,
    ACT: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr, ONLINE: tl.constexpr,
    SUM: tl.constexpr, PEAKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PART: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial (acc, m, z) after the blocks of keys [low, high)."""
    k, v, k_n, v_n, d, dv = tiles_kv
    HIDES: tl.constexpr = EDGE or where[0] is not None or where[4] is not None
    for n in range(low, high):
        block = n
        if blocks is not None:
            block = tl.load(blocks + n)
        j = block * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
        k_tile = load_tile(k, j, k_n, size[1], d, D, EDGE)  # [BN, D]
        k_side = (k_tile, k, j, k_n, size[1])
        product = times(q_side, k_side, D, PART, PRECISION)  # [BM, BN]
        s, seen = scores(product, i, j[None, :], rows, segment, where, size, UNIT, EDGE, HIDES)
        if ONLINE:
            m_new = tl.maximum(m, tl.max(s, 1))
            base = m_new
            if HIDES:
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - base[:, None])
            decay = tl.exp2(m - base)
            z = z * decay + tl.sum(p, 1)
            acc *= decay[:, None]
            m = m_new
        else:
            s -= rows[1]
            p = activate(ACT, s, rows[2], seen, HIDES and not VANISHES)[0]
            if SUM:
                z += tl.sum(p, 1)
            if PEAKED:
                m_new = tl.maximum(m, tl.max(p, 1))
                acc *= (m / m_new)[:, None]
                p /= m_new[:, None]
                m = m_new
        v_tile = load_tile(v, j, v_n, size[1], dv, DV, EDGE)  # [BN, DV]
        acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)
    return acc, m, z
