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
result. Without causality all tokens read one state, there is no sum within a chunk, and the
operands that only this sum reads are None.

Sums are accumulated in fp32. How states are stored is described in `state`: fp32 for fp32 features,
multiplied in tf32x3. For bf16 features, a number is stored as two bf16 numbers whose sum is
accurate to 2⁻¹⁶, and each is multiplied separately. This takes as much memory and as many tensor
core operations as fp32 in tf32, which is accurate to 2⁻¹¹. Tiles are copied to shared memory as
they are, 16 bytes at a time.

Features are processed in blocks of BLOCK_F, values in a single block of BLOCK_DV. All tensors are
contiguous: features [B·H, N, F], values [B·H, N, DV] and vectors [B·H, N], where H is the number of
query heads or of key/value heads, and states [B·Hkv, chunks, F, WIDTH].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import dot
from attnzoo.backends.triton.linear.state import NORMALIZER

COLUMNS = tl.constexpr(NORMALIZER)


class Sizes(NamedTuple):
    """Constants of a launch."""

    F: int  # features of a token
    BLOCK_F: int
    DV: int
    BLOCK_DV: int
    CHUNK: int  # tokens per chunk
    GROUP: int  # query heads per key/value head
    PRECISION: str


class Chunk(NamedTuple):
    """A chunk of tokens."""

    head: Any  # batch · heads + head
    number: Any
    first: Any  # index of its first token
    local: Any  # [C]: 0 … CHUNK − 1
    length: Any  # of the sequence


@triton.jit
def chunk_of(program, length, sizes):
    chunks = tl.cdiv(length, sizes.CHUNK)
    number = program % chunks
    head = (program // chunks).to(tl.int64)
    return Chunk(head, number, number * sizes.CHUNK, tl.arange(0, sizes.CHUNK), length)


@triton.jit
def entries(matrices, head, chunk, columns, WIDTH: tl.constexpr):
    """Return pointers to the rows of a chunk in matrices [B·H, N, WIDTH], and which exist."""
    at = matrices + head * chunk.length * WIDTH + chunk.first.to(tl.int64) * WIDTH
    at = at + (chunk.local[:, None] * WIDTH + columns[None, :])
    inside = (chunk.local < chunk.length - chunk.first)[:, None]
    # Columns begin at a multiple of their number, so without a remainder none are outside.
    if tl.constexpr(WIDTH) == 0 or tl.constexpr(WIDTH) % columns.shape[0] != 0:
        inside = inside & (columns < WIDTH)[None, :]
    return at, inside


@triton.jit
def load(matrices, head, chunk, columns, WIDTH: tl.constexpr):
    """Load the rows of a chunk, 0 beyond the sequence and beyond the last column."""
    at, inside = entries(matrices, head, chunk, columns, WIDTH)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store(matrices, head, chunk, columns, WIDTH: tl.constexpr, value):
    at, inside = entries(matrices, head, chunk, columns, WIDTH)
    tl.store(at, value.to(matrices.dtype.element_ty), mask=inside)


@triton.jit
def load_vector(vectors, head, chunk):
    at = vectors + head * chunk.length + chunk.first + chunk.local
    return tl.load(at, mask=chunk.local < chunk.length - chunk.first, other=0.0)


@triton.jit
def state_of(states, head, chunk, chunks, CAUSAL: tl.constexpr, sizes, layout):
    """Return a pointer to the state that the tokens of a chunk read."""
    state = states + head * chunks * (sizes.F * layout.WIDTH)
    if CAUSAL:
        state += chunk.number.to(tl.int64) * (sizes.F * layout.WIDTH)
    return state


@triton.jit
def load_values(state, part, f, d, sizes, layout):
    """Return one part of the values of a state: [BF, BDv]. The sum of all parts is the value."""
    inside = (f < sizes.F)[:, None] & (d < layout.VALUES)[None, :]
    at = f[:, None] * layout.WIDTH + (d + part * layout.VALUES)[None, :]
    return tl.load(state + at, mask=inside, other=0.0)


@triton.jit
def load_normalizer(state, f, sizes, layout):
    """Return the column for v' = 1: [BF, COLUMNS] in bf16, to be added up, or [BF, 1] in fp32."""
    NUMBERS: tl.constexpr = layout.PARTS * layout.VALUES
    if layout.PARTS == 1:
        return tl.load(state + (f * layout.WIDTH + NUMBERS), mask=f < sizes.F, other=0.0)[:, None]
    else:
        at = f[:, None] * layout.WIDTH + (tl.arange(0, COLUMNS) + NUMBERS)[None, :]
        return tl.load(state + at, mask=(f < sizes.F)[:, None], other=0.0)


@triton.jit
def times_state(acc, x, state, f, d, TRANSPOSED: tl.constexpr, sizes, layout):
    """Return acc + x S for x [C, BF], or acc + x Sᵀ for x [C, BDv], without S's last column."""
    for part in tl.static_range(layout.PARTS):
        s = load_values(state, part, f, d, sizes, layout)
        acc = dot(x, tl.trans(s) if TRANSPOSED else s, acc, sizes.PRECISION)
    return acc


@triton.jit
def store_state(state, f, d, s, normalizer, HALVES: tl.constexpr, sizes, layout):
    """Store a state [BF, BDv], whose columns beyond DV must be 0: they are written as padding.

    Each column of ``normalizer`` [BF, COLUMNS] is the column for v' = 1. With HALVES, this is the
    sum of an even and an odd column.
    """
    NUMBERS: tl.constexpr = layout.PARTS * layout.VALUES
    row, column = f[:, None] * layout.WIDTH, tl.arange(0, COLUMNS)[None, :]
    exists = (f < sizes.F)[:, None]
    inside = exists & (d < layout.VALUES)[None, :]
    if not HALVES:
        normalizer = tl.where(column % 2 == 0, normalizer, 0.0)
    if layout.PARTS == 1:
        at = state + row
        tl.store(at + d[None, :], s, mask=inside)
        total = tl.sum(tl.where(column < 2, normalizer, 0.0), 1)[:, None]
        four = tl.arange(0, 4)[None, :]
        tl.store(at + NUMBERS + four, tl.where(four == 0, total, 0.0), mask=exists)
    else:
        at = state + (row + d[None, :])
        high = upper_half(s)
        tl.store(at, high.to(tl.bfloat16), mask=inside)
        tl.store(at + layout.VALUES, (s - high).to(tl.bfloat16), mask=inside)
        at = state + (row + (column + NUMBERS))
        tl.store(at, in_parts(normalizer, column // 2), mask=exists)


@triton.jit
def upper_half(x):
    """Return x without the lower 16 bits of its mantissa, which leaves a bf16 number, in fp32."""
    bits = x.to(tl.int32, bitcast=True) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_parts(x, part):
    """Return part 0, 1 or 2 of three bf16 numbers whose sum is x, and 0 for other parts."""
    high = upper_half(x)
    middle = upper_half(x - high)
    value = tl.where(part == 0, high, tl.where(part == 1, middle, x - high - middle))
    return tl.where(part < 3, value, 0.0).to(tl.bfloat16)


@triton.jit(do_not_specialize=["length", "chunks", "spans", "span"])
def linear_states(
    features, values,  # of GROUP heads per state
    delta,  # vector, for R: −δ is the last column of its values; None for S
    first,  # [B·Hkv, F, WIDTH] in fp32 or None: the initial state
    states,  # [B·Hkv, chunks, F, WIDTH] or None: the state before each chunk
    last,  # [B·Hkv, spans, F, WIDTH] in fp32: first + the sum over each span of chunks
    length, chunks, spans, span,  # span: chunks per program
    sizes, layout, fp32_layout,
):  # fmt: skip
    FEATURES: tl.constexpr = (sizes.F + sizes.BLOCK_F - 1) // sizes.BLOCK_F
    f = tl.program_id(0) % FEATURES * sizes.BLOCK_F + tl.arange(0, sizes.BLOCK_F)  # [BF]
    part = tl.program_id(0) // FEATURES % spans
    hk = (tl.program_id(0) // FEATURES // spans).to(tl.int64)
    d, local = tl.arange(0, sizes.BLOCK_DV), tl.arange(0, sizes.CHUNK)
    dtype = features.dtype.element_ty
    s = tl.zeros([sizes.BLOCK_F, sizes.BLOCK_DV], tl.float32)
    # With delta, which has more digits than bf16, even columns are sums of the upper halves of the
    # mantissas, and odd columns of the lower halves.
    even = (tl.arange(0, COLUMNS) % 2 == 0)[None, :]
    normalizer = tl.zeros([sizes.BLOCK_F, COLUMNS], tl.float32)
    if first is not None:
        state = first + hk * (sizes.F * fp32_layout.WIDTH)
        s = load_values(state, 0, f, d, sizes, fp32_layout)
        normalizer = tl.where(even, load_normalizer(state, f, sizes, fp32_layout), 0.0)
    for step in range(part * span, tl.minimum(part * span + span, chunks)):
        number = step
        if delta is not None:
            number = chunks - 1 - step
        if states is not None:
            state = states + (hk * chunks + number) * (sizes.F * layout.WIDTH)
            store_state(state, f, d, s, normalizer, delta is not None, sizes, layout)
        for member in range(sizes.GROUP):
            head = hk * sizes.GROUP + member
            chunk = Chunk(head, number, number * sizes.CHUNK, local, length)
            x_tile = load(features, head, chunk, f, sizes.F)  # [C, BF]
            y_tile = load(values, head, chunk, d, sizes.DV)  # [C, BDv]
            column = tl.full([sizes.CHUNK, COLUMNS], 1.0, tl.float32)
            if delta is not None:
                column = -load_vector(delta, head, chunk)[:, None]
                high = upper_half(column) if dtype == tl.bfloat16 else column
                column = tl.where(even, high, column - high)
            normalizer = dot(tl.trans(x_tile), column.to(dtype), normalizer, sizes.PRECISION)
            s = dot(tl.trans(x_tile), y_tile.to(dtype), s, sizes.PRECISION)  # [BF, BDv]
    state = last + (hk * spans + part) * (sizes.F * fp32_layout.WIDTH)
    store_state(state, f, d, s, normalizer, delta is not None, sizes, fp32_layout)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_output(
    x, y, v, states, out, z,  # y and v: None without causality
    length, chunks,  # chunks: number of states per key/value head
    sizes, layout,
):  # fmt: skip
    chunk = chunk_of(tl.program_id(0), length, sizes)
    local, d, hk = chunk.local, tl.arange(0, sizes.BLOCK_DV), chunk.head // sizes.GROUP
    state = state_of(states, hk, chunk, chunks, y is not None, sizes, layout)
    dtype = x.dtype.element_ty  # fp32 or bf16: weights may exceed the range of fp16
    acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_DV], tl.float32)
    # The denominators are the sums of the columns. A vector product is one column in fp32.
    total = tl.zeros([sizes.CHUNK, COLUMNS if dtype == tl.bfloat16 else 1], tl.float32)
    a = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
    for start in range(0, sizes.F, sizes.BLOCK_F):
        f = start + tl.arange(0, sizes.BLOCK_F)
        x_tile = load(x, chunk.head, chunk, f, sizes.F)  # [C, BF]
        acc = times_state(acc, x_tile, state, f, d, False, sizes, layout)  # [C, BDv]
        normalizer = load_normalizer(state, f, sizes, layout)
        if dtype == tl.bfloat16:
            total = dot(x_tile, normalizer, total, sizes.PRECISION)
        else:
            total += tl.sum(x_tile * tl.trans(normalizer), 1)[:, None]
        if y is not None:
            y_tile = load(y, hk, chunk, f, sizes.F)  # [C, BF]
            a = dot(x_tile, tl.trans(y_tile), a, sizes.PRECISION)  # [queries, keys]
    denominator = tl.sum(total, 1)
    if y is not None:
        a = tl.where(local[:, None] >= local[None, :], a, 0.0)  # y_tile is 0 beyond the last key
        denominator += tl.sum(a, 1)
        v_tile = load(v, hk, chunk, d, sizes.DV)  # [C, BDv]
        acc = dot(a.to(dtype), v_tile.to(dtype), acc, sizes.PRECISION)
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    at = z + chunk.head * length + chunk.first + local
    tl.store(at, denominator, mask=local < length - chunk.first)
    store(out, chunk.head, chunk, d, sizes.DV, acc / denominator[:, None])


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dx(
    y, v, g, delta, states, dx, length, chunks, sizes, layout  # y and v: None without causality
):  # fmt: skip
    chunk = chunk_of(tl.program_id(0), length, sizes)
    local, d, hk = chunk.local, tl.arange(0, sizes.BLOCK_DV), chunk.head // sizes.GROUP
    state = state_of(states, hk, chunk, chunks, y is not None, sizes, layout)
    dtype = dx.dtype.element_ty
    g_tile = load(g, chunk.head, chunk, d, sizes.DV)  # [C, BDv]
    d_i = load_vector(delta, chunk.head, chunk)[:, None]
    dp = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
    if y is not None:
        v_tile = load(v, hk, chunk, d, sizes.DV)  # [C, BDv]
        dp = dot(g_tile, tl.trans(v_tile.to(dtype)), None, sizes.PRECISION) - d_i
        dp = tl.where(local[:, None] >= local[None, :], dp, 0.0)  # [queries, keys]
    for start in range(0, sizes.F, sizes.BLOCK_F):
        f = start + tl.arange(0, sizes.BLOCK_F)
        acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_F], tl.float32)
        acc = times_state(acc, g_tile, state, f, d, True, sizes, layout)  # [C, BF]
        normalizer = tl.sum(load_normalizer(state, f, sizes, layout).to(tl.float32), 1)
        acc -= d_i * normalizer[None, :]
        if y is not None:
            y_tile = load(y, hk, chunk, f, sizes.F)  # [C, BF]
            acc = dot(dp.to(dtype), y_tile, acc, sizes.PRECISION)
        store(dx, chunk.head, chunk, f, sizes.F, acc)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dv(
    x, y, g, states, dv, length, chunks, sizes, layout  # x and g: None without causality
):  # fmt: skip
    chunk = chunk_of(tl.program_id(0), length, sizes)
    local, d = chunk.local, tl.arange(0, sizes.BLOCK_DV)
    state = state_of(states, chunk.head, chunk, chunks, x is not None, sizes, layout)
    acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_DV], tl.float32)
    for start in range(0, sizes.F, sizes.BLOCK_F):
        f = start + tl.arange(0, sizes.BLOCK_F)
        y_tile = load(y, chunk.head, chunk, f, sizes.F)  # [C, BF]
        acc = times_state(acc, y_tile, state, f, d, False, sizes, layout)  # [C, BDv]
    if x is not None:
        for member in range(sizes.GROUP):
            head = chunk.head * sizes.GROUP + member
            a = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
            for start in range(0, sizes.F, sizes.BLOCK_F):
                f = start + tl.arange(0, sizes.BLOCK_F)
                y_tile = load(y, chunk.head, chunk, f, sizes.F)  # [C, BF]
                x_tile = load(x, head, chunk, f, sizes.F)  # [C, BF]
                a = dot(y_tile, tl.trans(x_tile), a, sizes.PRECISION)  # [keys, queries]
            a = tl.where(local[None, :] >= local[:, None], a, 0.0)
            g_tile = load(g, head, chunk, d, sizes.DV)  # [C, BDv]
            acc = dot(a.to(y.dtype.element_ty), g_tile, acc, sizes.PRECISION)
    store(dv, chunk.head, chunk, d, sizes.DV, acc)


@triton.jit(do_not_specialize=["length", "chunks"])
def linear_dy(
    x, v, g, delta, states, dy, length, chunks, sizes, layout  # x, g, delta: None without causality
):  # fmt: skip
    FEATURES: tl.constexpr = (sizes.F + sizes.BLOCK_F - 1) // sizes.BLOCK_F
    chunk = chunk_of(tl.program_id(0) // FEATURES, length, sizes)
    f = tl.program_id(0) % FEATURES * sizes.BLOCK_F + tl.arange(0, sizes.BLOCK_F)  # [BF]
    local, d = chunk.local, tl.arange(0, sizes.BLOCK_DV)
    state = state_of(states, chunk.head, chunk, chunks, x is not None, sizes, layout)
    dtype = dy.dtype.element_ty
    v_tile = load(v, chunk.head, chunk, d, sizes.DV).to(dtype)  # [C, BDv]
    normalizer = tl.sum(load_normalizer(state, f, sizes, layout).to(tl.float32), 1)
    acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_F], tl.float32) + normalizer[None, :]
    acc = times_state(acc, v_tile, state, f, d, True, sizes, layout)  # [C, BF]
    if x is not None:
        for member in range(sizes.GROUP):
            head = chunk.head * sizes.GROUP + member
            g_tile = load(g, head, chunk, d, sizes.DV)  # [C, BDv]
            d_i = load_vector(delta, head, chunk)[None, :]
            dp = dot(v_tile, tl.trans(g_tile), None, sizes.PRECISION) - d_i
            dp = tl.where(local[None, :] >= local[:, None], dp, 0.0)  # [keys, queries]
            x_tile = load(x, head, chunk, f, sizes.F)  # [C, BF]
            acc = dot(dp.to(dtype), x_tile, acc, sizes.PRECISION)
    store(dy, chunk.head, chunk, f, sizes.F, acc)
