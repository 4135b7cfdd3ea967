"""Linear forms chunk by chunk: states between chunks, and the output and gradients of a chunk.

With features x = ψ(q), y = ψ(k), and v' = [v, 1], whose last column gives the denominator:

    S_c = S_0 + Σ_{j before chunk c} y_j v'_jᵀ
    [Z_i o_i, Z_i] = x_i S_c + Σ_{j ≤ i in c} (x_i·y_j) v'_j
    dx_i = g_i S_cᵀ + Σ_{j ≤ i in c} (g_i·v'_j) y_j,  g = [G, −δ],  G = dO/Z,  δ = G·o
    dv_j = y_j R_c + Σ_{i ≥ j in c} (y_j·x_i) G_i,  R_c = R_0 + Σ_{i after c} x_i g_iᵀ
    dy_j = v'_j R_cᵀ + Σ_{i ≥ j in c} (g_i·v'_j) x_i

`linear_states` computes S. It also computes R, from the last chunk to the first, with values g.
It has one program per (batch, key/value head, span of chunks, block of features).
`linear_output` and `linear_dx` have one program per (batch, head, chunk of tokens), `linear_dv` one
per (batch, key/value head, chunk), and `linear_dy` one per (batch, key/value head, chunk, block of
features). A program reads the state, features and values of its chunk, and writes the chunk's
result. Without CAUSAL all queries read one state, and there is no sum within a chunk.

Sums are accumulated in fp32. How the states of chunks are stored is described in `state`: fp32 for
fp32 features, multiplied in tf32x3. For bf16 features, a number is stored as two bf16 numbers whose
sum is accurate to 2⁻¹⁶, and each is multiplied separately. This takes as much memory and as many
tensor core operations as fp32 in tf32, which is accurate to 2⁻¹¹. Tiles are copied to shared memory
as they are, 16 bytes at a time.

Features are processed in blocks of BLOCK_F, values in a single block of BLOCK_DV. All matrices are
contiguous.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import dot

# Columns of a normalizer in bf16. A block must have enough of them for copies of 16 bytes.
COLUMNS = tl.constexpr(32)


@triton.jit
def load(base, first, local, columns, count, WIDTH: tl.constexpr):
    """Load the rows first + local of a contiguous matrix (count, WIDTH), 0 outside it."""
    at = base + first.to(tl.int64) * WIDTH + (local[:, None] * WIDTH + columns[None, :])
    inside = (local < count - first)[:, None]
    # Columns begin at a multiple of their number, so without a remainder none are outside.
    if tl.constexpr(WIDTH) == 0 or tl.constexpr(WIDTH) % columns.shape[0] != 0:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_vector(base, first, local, count, other):
    return tl.load(base + first + local, mask=local < count - first, other=other)


@triton.jit
def store(base, first, local, columns, count, WIDTH: tl.constexpr, value):
    at = base + first.to(tl.int64) * WIDTH + (local[:, None] * WIDTH + columns[None, :])
    inside = (local < count - first)[:, None]
    if tl.constexpr(WIDTH) == 0 or tl.constexpr(WIDTH) % columns.shape[0] != 0:
        inside = inside & (columns < WIDTH)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def state_size(state, F: tl.constexpr, DV: tl.constexpr):
    """Return the number of entries of a state."""
    if state.dtype.element_ty == tl.float32:
        return F * ((DV + 3) // 4 * 4 + 4)
    else:
        return F * ((DV + 7) // 8 * 16 + COLUMNS)


@triton.jit
def part_of_state(state, f, d, PART: tl.constexpr, F: tl.constexpr, DV: tl.constexpr):
    """Load the columns of values [BF, BDv] of a state in bf16: PART 0 or 1, to be added up."""
    RD: tl.constexpr = (DV + 7) // 8 * 8
    inside = (f < F)[:, None] & (d < RD)[None, :]
    at = f[:, None] * (2 * RD + COLUMNS) + (PART * RD + d)[None, :]
    return tl.load(state + at, mask=inside, other=0.0)


@triton.jit
def load_state(state, f, d, F: tl.constexpr, DV: tl.constexpr):
    """Return the columns of values [BF, BDv] of a state in fp32."""
    RD: tl.constexpr = (DV + 3) // 4 * 4
    inside = (f < F)[:, None] & (d < RD)[None, :]
    return tl.load(state + (f[:, None] * (RD + 4) + d[None, :]), mask=inside, other=0.0)


@triton.jit
def load_normalizer(state, f, F: tl.constexpr, DV: tl.constexpr):
    """Return the column for v' = 1: [BF, COLUMNS] in bf16, to be added up, or [BF, 1] in fp32."""
    if state.dtype.element_ty == tl.float32:
        RD: tl.constexpr = (DV + 3) // 4 * 4
        return tl.load(state + (f * (RD + 4) + RD), mask=f < F, other=0.0)[:, None]
    else:
        WIDE: tl.constexpr = (DV + 7) // 8 * 16
        at = f[:, None] * (WIDE + COLUMNS) + (WIDE + tl.arange(0, COLUMNS))[None, :]
        return tl.load(state + at, mask=(f < F)[:, None], other=0.0)


@triton.jit
def times_state(
    acc, x, state, f, d, F: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return acc + x S for x [C, BF], or acc + x Sᵀ for x [C, BDv] if BACK.

    The last column of S does not take part.
    """
    if state.dtype.element_ty == tl.float32:
        s = load_state(state, f, d, F, DV)
        acc = dot(x.to(tl.float32), tl.trans(s) if BACK else s, acc, PRECISION)
    else:
        s = part_of_state(state, f, d, 0, F, DV)
        acc = dot(x, tl.trans(s) if BACK else s, acc, PRECISION)
        s = part_of_state(state, f, d, 1, F, DV)
        acc = dot(x, tl.trans(s) if BACK else s, acc, PRECISION)
    return acc


@triton.jit
def store_state(state, f, d, s, last, F: tl.constexpr, DV: tl.constexpr, HALVES: tl.constexpr):
    """Store a state. Columns of s beyond DV must be 0, because they are written as padding.

    Each column of ``last`` [BF, COLUMNS] is the column for v' = 1. With HALVES, this is the sum of
    an even and an odd column.
    """
    four, column = tl.arange(0, 4)[None, :], tl.arange(0, COLUMNS)[None, :]
    if not HALVES:
        last = tl.where(column % 2 == 0, last, 0.0)
    if state.dtype.element_ty == tl.float32:
        RD: tl.constexpr = (DV + 3) // 4 * 4
        at = state + f[:, None] * (RD + 4)
        tl.store(at + d[None, :], s, mask=(f < F)[:, None] & (d < RD)[None, :])
        total = tl.sum(tl.where(column < 2, last, 0.0), 1)[:, None]
        tl.store(at + RD + four, tl.where(four == 0, total, 0.0), mask=(f < F)[:, None])
    else:
        HALF: tl.constexpr = (DV + 7) // 8 * 8
        inside = (f < F)[:, None] & (d < HALF)[None, :]
        at = state + (f[:, None] * (2 * HALF + COLUMNS) + d[None, :])
        high = upper_half(s)
        tl.store(at, high.to(tl.bfloat16), mask=inside)
        tl.store(at + HALF, (s - high).to(tl.bfloat16), mask=inside)
        at = state + (f[:, None] * (2 * HALF + COLUMNS) + (2 * HALF + column))
        tl.store(at, in_parts(last, column // 2), mask=(f < F)[:, None])


@triton.jit
def upper_half(x):
    """Return x without the lower 16 bits of its mantissa, which leaves a bf16 number, in fp32."""
    bits = x.to(tl.int32, bitcast=True) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_parts(x, part):
    """Return the given part, 0 to 2, of three bf16 numbers with the sum x; 0 for other parts."""
    high = upper_half(x)
    middle = upper_half(x - high)
    found = tl.where(part == 0, high, tl.where(part == 1, middle, x - high - middle))
    return tl.where(part < 3, found, 0.0).to(tl.bfloat16)


@triton.jit(do_not_specialize=["length", "chunks", "spans", "span"])
def linear_states(
    x, y,  # [B·Hkv·GROUP, N, F] and [.., N, Dv]: a state is the sum over the heads of a group
    first,  # [B·Hkv, F, WIDTH] in fp32 or None: the initial state
    states,  # [B·Hkv, chunks, F, WIDTH] or None: the state before each chunk
    last,  # [B·Hkv, spans, F, WIDTH] in fp32: first + the sum over each span of chunks
    delta,  # vector or None; if given, the last column of y is −δ instead of 1
    length, chunks, spans, span,  # span: chunks per program
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    FEATURES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    begin = tl.program_id(0) % FEATURES * BLOCK_F
    f = begin + tl.arange(0, BLOCK_F)  # [BF]
    part = tl.program_id(0) // FEATURES % spans
    bh = (tl.program_id(0) // FEATURES // spans).to(tl.int64)
    d, local = tl.arange(0, BLOCK_DV), tl.arange(0, CHUNK)
    dtype = x.dtype.element_ty
    s = tl.zeros([BLOCK_F, BLOCK_DV], tl.float32)
    # With delta, even and odd columns are sums of the upper and lower halves of the mantissas.
    normalizer = tl.zeros([BLOCK_F, COLUMNS], tl.float32)
    even = (tl.arange(0, COLUMNS) % 2 == 0)[None, :]
    if first is not None:
        state = first + bh * state_size(first, F, DV)
        s = load_state(state, f, d, F, DV)
        normalizer += load_normalizer(state, f, F, DV)
        if delta is not None:
            normalizer = tl.where(even, normalizer, 0.0)
    for step in range(part * span, tl.minimum(part * span + span, chunks)):
        chunk = step
        if REVERSE:
            chunk = chunks - 1 - step
        if states is not None:
            state = states + (bh * chunks + chunk) * state_size(states, F, DV)
            store_state(state, f, d, s, normalizer, F, DV, delta is not None)
        i = chunk * CHUNK
        for member in range(GROUP):
            at = (bh * GROUP + member) * length
            x_tile = load(x + at * F, i, local, f, length, F)  # [C, BF]
            y_tile = load(y + at * DV, i, local, d, length, DV)  # [C, BDv]
            column = tl.full([CHUNK, COLUMNS], 1.0, tl.float32)
            if delta is not None:
                column = -load_vector(delta + at, i, local, length, 0.0)[:, None]
                high = upper_half(column) if dtype == tl.bfloat16 else column
                column = tl.where(even, high, column - high)
            normalizer = dot(tl.trans(x_tile), column.to(dtype), normalizer, PRECISION)
            s = dot(tl.trans(x_tile), y_tile.to(dtype), s, PRECISION)  # [BF, BDv]
    store_state(
        last + (bh * spans + part) * state_size(last, F, DV),
        f,
        d,
        s,
        normalizer,
        F,
        DV,
        delta is not None,
    )


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
    first, local = chunk * CHUNK, tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    state = states + hk * chunks * state_size(states, F, DV)
    if CAUSAL:
        state += chunk.to(tl.int64) * state_size(states, F, DV)
    dtype = x.dtype.element_ty  # fp32 or bf16: weights may exceed the range of fp16
    acc = tl.zeros([CHUNK, BLOCK_DV], tl.float32)
    # The denominators are the sums of the columns. A vector product is one column in fp32.
    total = tl.zeros([CHUNK, COLUMNS if dtype == tl.bfloat16 else 1], tl.float32)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        x_tile = load(x + bh * length * F, first, local, f, length, F)  # [C, BF]
        acc = times_state(acc, x_tile, state, f, d, F, DV, False, PRECISION)
        normalizer = load_normalizer(state, f, F, DV)
        if dtype == tl.bfloat16:
            total = dot(x_tile, normalizer, total, PRECISION)
        else:
            total += tl.sum(x_tile * tl.trans(normalizer), 1)[:, None]
        if CAUSAL:
            y_tile = load(y + hk * length * F, first, local, f, length, F)  # [C, BF]
            a = dot(x_tile, tl.trans(y_tile), a, PRECISION)
    denominator = tl.sum(total, 1)
    if CAUSAL:
        a = tl.where(local[:, None] >= local[None, :], a, 0.0)  # y_tile is 0 beyond the last key
        denominator += tl.sum(a, 1)
        v_tile = load(v + hk * length * DV, first, local, d, length, DV)  # [C, BDv]
        acc = dot(a.to(dtype), v_tile.to(dtype), acc, PRECISION)
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(z + bh * length + first + local, denominator, mask=local < length - first)
    store(out + bh * length * DV, first, local, d, length, DV, acc / denominator[:, None])


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dx(
    y, v, g, states, delta, dx, length, chunks,
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    chunk = tl.program_id(0) % parts
    bh = (tl.program_id(0) // parts).to(tl.int64)
    hk = bh // GROUP
    first, local = chunk * CHUNK, tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    state = states + hk * chunks * state_size(states, F, DV)
    if CAUSAL:
        state += chunk.to(tl.int64) * state_size(states, F, DV)
    dtype = dx.dtype.element_ty
    g_tile = load(g + bh * length * DV, first, local, d, length, DV)  # [C, BDv]
    d_i = load_vector(delta + bh * length, first, local, length, 0.0)[:, None]
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    if CAUSAL:
        v_tile = load(v + hk * length * DV, first, local, d, length, DV)  # [C, BDv]
        dp = dot(g_tile, tl.trans(v_tile.to(dtype)), None, PRECISION) - d_i
        dp = tl.where(local[:, None] >= local[None, :], dp, 0.0)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        acc = tl.zeros([CHUNK, BLOCK_F], tl.float32)
        acc = times_state(acc, g_tile, state, f, d, F, DV, True, PRECISION)  # [C, BF]
        normalizer = tl.sum(load_normalizer(state, f, F, DV).to(tl.float32), 1)
        acc -= d_i * normalizer[None, :]
        if CAUSAL:
            y_tile = load(y + hk * length * F, first, local, f, length, F)  # [C, BF]
            acc = dot(dp.to(dtype), y_tile, acc, PRECISION)
        store(dx + bh * length * F, first, local, f, length, F, acc)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dv(
    x, y, g, states, dv, length, chunks,  # x and g: None unless CAUSAL
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    chunk = tl.program_id(0) % parts
    hk = (tl.program_id(0) // parts).to(tl.int64)
    first, local = chunk * CHUNK, tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    state = states + hk * chunks * state_size(states, F, DV)
    if CAUSAL:
        state += chunk.to(tl.int64) * state_size(states, F, DV)
    acc = tl.zeros([CHUNK, BLOCK_DV], tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        y_tile = load(y + hk * length * F, first, local, f, length, F)  # [C, BF]
        acc = times_state(acc, y_tile, state, f, d, F, DV, False, PRECISION)
    if CAUSAL:
        dtype = y.dtype.element_ty
        for member in range(GROUP):
            at = (hk * GROUP + member) * length
            a = tl.zeros([CHUNK, CHUNK], tl.float32)
            for start in range(0, F, BLOCK_F):
                f = start + tl.arange(0, BLOCK_F)
                y_tile = load(y + hk * length * F, first, local, f, length, F)
                x_tile = load(x + at * F, first, local, f, length, F)
                a = dot(y_tile, tl.trans(x_tile), a, PRECISION)  # [keys, queries]
            a = tl.where(local[None, :] >= local[:, None], a, 0.0)
            g_tile = load(g + at * DV, first, local, d, length, DV)  # [C, BDv]
            acc = dot(a.to(dtype), g_tile, acc, PRECISION)
    store(dv + hk * length * DV, first, local, d, length, DV, acc)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dy(
    x, v, g, states, delta, dy, length, chunks,  # x, g and delta: None unless CAUSAL
    GROUP: tl.constexpr, F: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(length, CHUNK)
    FEATURES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    f = tl.program_id(0) % FEATURES * BLOCK_F + tl.arange(0, BLOCK_F)  # [BF]
    chunk = tl.program_id(0) // FEATURES % parts
    hk = (tl.program_id(0) // FEATURES // parts).to(tl.int64)
    first, local = chunk * CHUNK, tl.arange(0, CHUNK)  # [C]
    d = tl.arange(0, BLOCK_DV)
    state = states + hk * chunks * state_size(states, F, DV)
    if CAUSAL:
        state += chunk.to(tl.int64) * state_size(states, F, DV)
    dtype = dy.dtype.element_ty
    v_tile = load(v + hk * length * DV, first, local, d, length, DV).to(dtype)  # [C, BDv]
    normalizer = tl.sum(load_normalizer(state, f, F, DV).to(tl.float32), 1)
    acc = tl.zeros([CHUNK, BLOCK_F], tl.float32) + normalizer[None, :]
    acc = times_state(acc, v_tile, state, f, d, F, DV, True, PRECISION)  # [C, BF]
    if CAUSAL:
        for member in range(GROUP):
            at = (hk * GROUP + member) * length
            g_tile = load(g + at * DV, first, local, d, length, DV)  # [C, BDv]
            d_i = load_vector(delta + at, first, local, length, 0.0)[None, :]
            dp = dot(v_tile, tl.trans(g_tile), None, PRECISION) - d_i
            dp = tl.where(local[None, :] >= local[:, None], dp, 0.0)  # [keys, queries]
            x_tile = load(x + at * F, first, local, f, length, F)
            acc = dot(dp.to(dtype), x_tile, acc, PRECISION)
    store(dy + hk * length * F, first, local, f, length, F, acc)
