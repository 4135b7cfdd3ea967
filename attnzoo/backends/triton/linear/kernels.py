"""Linear forms chunk by chunk: states between chunks, and the output and gradients of a chunk.

With features x = ψ(q), y = ψ(k), and v' = [v, 1], whose last column gives the denominator:

    S_c = S_0 + Σ_{j before chunk c} y_j v'_jᵀ
    [Z_i o_i, Z_i] = x_i S_c + Σ_{j ≤ i in c} (x_i·y_j) v'_j
    dx_i = (g_i S_cᵀ + Σ_{j ≤ i in c} (g_i·v'_j) y_j) / Z_i,  g = [dO, −δ],  δ = dO·o
    dv_j = y_j R_c + Σ_{i ≥ j in c} (y_j·x_i)/Z_i dO_i,  R_c = R_0 + Σ_{i after c} x_i g_iᵀ / Z_i
    dy_j = v'_j R_cᵀ + Σ_{i ≥ j in c} (g_i·v'_j)/Z_i x_i

`linear_states` computes S. It also computes R, from the last chunk to the first, with features x/Z
and values g. It has one program per (batch, key/value head, span of chunks, block of features).
`linear_output` and `linear_dx` have one program per (batch, head, chunk of tokens), `linear_dv` one
per (batch, key/value head, chunk), and `linear_dy` one per (batch, key/value head, chunk, block of
features). A program reads the state, features and values of its chunk, and writes the chunk's
result. Without CAUSAL all queries read one state, and there is no sum within a chunk.

States are fp32. They are multiplied in tf32 by bf16 features, which tf32 represents exactly, and in
tf32x3 by fp32 features. A row of a state in memory has Dv columns, padded to a multiple of four,
then the column for v' = 1 (or g = −δ), then three unused columns, so that every row begins at a
multiple of 16 bytes.

Features are processed in blocks of BLOCK_F, values in a single block of BLOCK_DV. All matrices are
contiguous.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import dot


@triton.jit
def load(base, rows, columns, count, WIDTH: tl.constexpr):
    """Load the entries [rows, columns] of a contiguous matrix (count, WIDTH), 0 outside it."""
    inside = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    return tl.load(base + at, mask=inside, other=0.0)


@triton.jit
def store(base, rows, columns, count, WIDTH: tl.constexpr, value):
    inside = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(base + at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_state(at, f, d, F: tl.constexpr, DV: tl.constexpr):
    """Return the columns of values [BF, BDv] of a state, and the column for v' = 1 [BF]."""
    RD: tl.constexpr = (DV + 3) // 4 * 4
    inside = (f < F)[:, None] & (d < DV)[None, :]
    s = tl.load(at + f[:, None] * (RD + 4) + d[None, :], mask=inside, other=0.0)
    return s, tl.load(at + f * (RD + 4) + RD, mask=f < F, other=0.0)


@triton.jit
def store_state(at, f, d, s, last, F: tl.constexpr, DV: tl.constexpr):
    """Store a state. Columns of s beyond DV must be 0, because they are written as padding."""
    RD: tl.constexpr = (DV + 3) // 4 * 4
    inside = (f < F)[:, None] & (d < RD)[None, :]
    tl.store(at + f[:, None] * (RD + 4) + d[None, :], s, mask=inside)
    four = tl.arange(0, 4)[None, :]
    tl.store(at + f[:, None] * (RD + 4) + RD + four,
             tl.where(four == 0, last[:, None], 0.0), mask=(f < F)[:, None])  # fmt: skip


@triton.jit(do_not_specialize=["length", "chunks", "spans", "span"])
def linear_states(
    x, y,  # [B·Hkv·GROUP, N, F] and [.., N, Dv]: a state is the sum over the heads of a group
    first,  # [B·Hkv, F, WIDTH] or None: the initial state
    states,  # [B·Hkv, chunks, F, WIDTH] or None: the state before each chunk
    last,  # [B·Hkv, spans, F, WIDTH]: first + the sum over each span of chunks
    z, delta,  # vectors or None; if given, x is divided by z, and the last column of y is −δ
    length, chunks, spans, span,  # span: chunks per program
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    FEATURES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    SIZE: tl.constexpr = F * ((DV + 3) // 4 * 4 + 4)
    f = tl.program_id(0) % FEATURES * BLOCK_F + tl.arange(0, BLOCK_F)  # [BF]
    part = tl.program_id(0) // FEATURES % spans
    bh = (tl.program_id(0) // FEATURES // spans).to(tl.int64)
    d = tl.arange(0, BLOCK_DV)
    s, normalizer = tl.zeros([BLOCK_F, BLOCK_DV], tl.float32), tl.zeros([BLOCK_F], tl.float32)
    if first is not None:
        s, normalizer = load_state(first + bh * SIZE, f, d, F, DV)
    for step in range(part * span, tl.minimum(part * span + span, chunks)):
        chunk = step
        if REVERSE:
            chunk = chunks - 1 - step
        if states is not None:
            store_state(states + (bh * chunks + chunk) * SIZE, f, d, s, normalizer, F, DV)
        i = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
        for member in range(GROUP):
            at = (bh * GROUP + member) * length
            x_tile = load(x + at * F, i, f, length, F)  # [C, BF]
            y_tile = load(y + at * DV, i, d, length, DV)  # [C, BDv]
            if z is None:
                normalizer += tl.sum(x_tile.to(tl.float32), 0)
                s = dot(tl.trans(x_tile), y_tile.to(x_tile.dtype), s, PRECISION)  # [BF, BDv]
            else:
                denominator = tl.load(z + at + i, mask=i < length, other=1.0)[:, None]
                d_i = tl.load(delta + at + i, mask=i < length, other=0.0)[:, None]
                scaled = x_tile.to(tl.float32) / denominator
                normalizer -= tl.sum(scaled * d_i, 0)
                s = dot(tl.trans(scaled), y_tile.to(tl.float32), s, PRECISION)
    store_state(last + (bh * spans + part) * SIZE, f, d, s, normalizer, F, DV)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_output(
    x, y, v, states, out, z,  # y and v: None unless CAUSAL
    length, chunks,  # chunks: number of states per sequence
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    chunk = tl.program_id(0) % parts
    bh = (tl.program_id(0) // parts).to(tl.int64)
    hk = bh // GROUP
    i = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    SIZE: tl.constexpr = F * ((DV + 3) // 4 * 4 + 4)
    state = states + hk * chunks * SIZE
    if CAUSAL:
        state += chunk.to(tl.int64) * SIZE
    acc, denominator = tl.zeros([CHUNK, BLOCK_DV], tl.float32), tl.zeros([CHUNK], tl.float32)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        x_tile = load(x + bh * length * F, i, f, length, F)  # [C, BF]
        s, normalizer = load_state(state, f, d, F, DV)
        acc = dot(x_tile.to(tl.float32), s, acc, PRECISION)
        denominator += tl.sum(x_tile.to(tl.float32) * normalizer[None, :], 1)
        if CAUSAL:
            y_tile = load(y + hk * length * F, i, f, length, F)  # [C, BF]
            a = dot(x_tile, tl.trans(y_tile), a, PRECISION)
    if CAUSAL:
        a = tl.where(i[:, None] >= i[None, :], a, 0.0)  # y_tile is 0 beyond the last key
        denominator += tl.sum(a, 1)
        v_tile = load(v + hk * length * DV, i, d, length, DV)  # [C, BDv]
        dtype = x.dtype.element_ty  # fp32 or bf16: weights may exceed the range of fp16
        acc = dot(a.to(dtype), v_tile.to(dtype), acc, PRECISION)
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(z + bh * length + i, denominator, mask=i < length)
    store(out + bh * length * DV, i, d, length, DV, acc / denominator[:, None])


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dx(
    y, v, do, states, z, delta, dx, length, chunks,
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    chunk = tl.program_id(0) % parts
    bh = (tl.program_id(0) // parts).to(tl.int64)
    hk = bh // GROUP
    i = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    SIZE: tl.constexpr = F * ((DV + 3) // 4 * 4 + 4)
    state = states + hk * chunks * SIZE
    if CAUSAL:
        state += chunk.to(tl.int64) * SIZE
    dtype = dx.dtype.element_ty
    do_tile = load(do + bh * length * DV, i, d, length, DV)  # [C, BDv]
    denominator = tl.load(z + bh * length + i, mask=i < length, other=1.0)[:, None]
    d_i = tl.load(delta + bh * length + i, mask=i < length, other=0.0)[:, None]
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    if CAUSAL:
        v_tile = load(v + hk * length * DV, i, d, length, DV)  # [C, BDv]
        dp = dot(do_tile.to(dtype), tl.trans(v_tile.to(dtype)), None, PRECISION) - d_i
        dp = tl.where(i[:, None] >= i[None, :], dp / denominator, 0.0)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        s, normalizer = load_state(state, f, d, F, DV)
        acc = dot(do_tile.to(tl.float32), tl.trans(s), None, PRECISION)  # [C, BF]
        acc = (acc - d_i * normalizer[None, :]) / denominator
        if CAUSAL:
            y_tile = load(y + hk * length * F, i, f, length, F)  # [C, BF]
            acc = dot(dp.to(dtype), y_tile, acc, PRECISION)
        store(dx + bh * length * F, i, f, length, F, acc)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dv(
    x, y, do, states, z, dv, length, chunks,  # x, do and z: None unless CAUSAL
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    chunk = tl.program_id(0) % parts
    hk = (tl.program_id(0) // parts).to(tl.int64)
    j = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    SIZE: tl.constexpr = F * ((DV + 3) // 4 * 4 + 4)
    state = states + hk * chunks * SIZE
    if CAUSAL:
        state += chunk.to(tl.int64) * SIZE
    acc = tl.zeros([CHUNK, BLOCK_DV], tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        y_tile = load(y + hk * length * F, j, f, length, F)  # [C, BF]
        acc = dot(y_tile.to(tl.float32), load_state(state, f, d, F, DV)[0], acc, PRECISION)
    if CAUSAL:
        dtype = y.dtype.element_ty
        for member in range(GROUP):
            at = (hk * GROUP + member) * length
            a = tl.zeros([CHUNK, CHUNK], tl.float32)
            for start in range(0, F, BLOCK_F):
                f = start + tl.arange(0, BLOCK_F)
                y_tile = load(y + hk * length * F, j, f, length, F)
                x_tile = load(x + at * F, j, f, length, F)
                a = dot(y_tile, tl.trans(x_tile), a, PRECISION)  # [keys, queries]
            denominator = tl.load(z + at + j, mask=j < length, other=1.0)[None, :]
            a = tl.where(j[None, :] >= j[:, None], a / denominator, 0.0)
            do_tile = load(do + at * DV, j, d, length, DV)  # [C, BDv]
            acc = dot(a.to(dtype), do_tile.to(dtype), acc, PRECISION)
    store(dv + hk * length * DV, j, d, length, DV, acc)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dy(
    x, v, do, states, z, delta, dy, length, chunks,  # x, do, z and delta: None unless CAUSAL
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    FEATURES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    f = tl.program_id(0) % FEATURES * BLOCK_F + tl.arange(0, BLOCK_F)  # [BF]
    chunk = tl.program_id(0) // FEATURES % parts
    hk = (tl.program_id(0) // FEATURES // parts).to(tl.int64)
    j = chunk * CHUNK + tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    SIZE: tl.constexpr = F * ((DV + 3) // 4 * 4 + 4)
    state = states + hk * chunks * SIZE
    if CAUSAL:
        state += chunk.to(tl.int64) * SIZE
    dtype = dy.dtype.element_ty
    v_tile = load(v + hk * length * DV, j, d, length, DV)  # [C, BDv]
    r, normalizer = load_state(state, f, d, F, DV)
    acc = dot(v_tile.to(tl.float32), tl.trans(r), None, PRECISION) + normalizer[None, :]  # [C, BF]
    if CAUSAL:
        for member in range(GROUP):
            at = (hk * GROUP + member) * length
            do_tile = load(do + at * DV, j, d, length, DV)  # [C, BDv]
            denominator = tl.load(z + at + j, mask=j < length, other=1.0)[None, :]
            d_i = tl.load(delta + at + j, mask=j < length, other=0.0)[None, :]
            dp = dot(v_tile.to(dtype), tl.trans(do_tile.to(dtype)), None, PRECISION) - d_i
            dp = tl.where(j[None, :] >= j[:, None], dp / denominator, 0.0)  # [keys, queries]
            acc = dot(dp.to(dtype), load(x + at * F, j, f, length, F), acc, PRECISION)
    store(dy + hk * length * F, j, f, length, F, acc)
