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

With ``bounds``, tokens are sorted by segment (`attnzoo.backends.packed_tokens`), and all sums are
over one segment: S_c is the sum over the earlier keys of the segment that reaches across the start
of chunk c, which only its queries read, and R_c that over the later queries of the segment that
reaches across the chunk's end. Without causality the sum within a chunk is over all keys of the
segment. Keys after the chunk, or queries before it, then have a state too, in ``others``.

Sums are accumulated in fp32. How states are stored is described in `state`: fp32 for fp32 features,
multiplied in tf32x3. For bf16 features, a number is stored as two bf16 numbers whose sum is
accurate to 2⁻¹⁶, and each is multiplied separately. This takes as much memory and as many tensor
core operations as fp32 in tf32, which is accurate to 2⁻¹¹. Tiles are copied to shared memory as
they are, 16 bytes at a time.

Features are processed in blocks of BLOCK_F, values in a single block of BLOCK_DV. All tensors are
contiguous: features [B·H, N, F], values [B·H, N, DV] and vectors [B·H, N], where H is the number of
query heads or of key/value heads, and states [B·Hkv, chunks, F, WIDTH]. The element type of a state
determines its layout.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import dot
from attnzoo.backends.triton.linear.state import layout as state_layout

layout_of = triton.constexpr_function(state_layout)
# Columns of the product that sums the column for v' = 1: those of a bf16 state.
COLUMNS = tl.constexpr(32)


class Sizes(NamedTuple):
    """Constants of a launch."""

    F: int  # features of a token
    BLOCK_F: int
    DV: int
    BLOCK_DV: int
    CHUNK: int  # tokens per chunk
    GROUP: int  # query heads per key/value head
    PRECISION: str
    HEADS: int  # with bounds: heads per batch of the features in `linear_states`, or of programs


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
def bounds_of(bounds, batch, chunk):
    """Return where each row's segment begins and ends, [C] each, from the chunk's first token."""
    at = bounds + batch * (2 * chunk.length) + chunk.first + chunk.local
    inside = chunk.local < chunk.length - chunk.first
    first = tl.load(at, mask=inside, other=0) - chunk.first
    return first, tl.load(at + chunk.length, mask=inside, other=0) - chunk.first


@triton.jit
def crossing(x, bounds, batch, chunk, AFTER: tl.constexpr, sizes):
    """Return x with 0 in rows whose segment ends at the chunk's start, or with AFTER at its end."""
    if bounds is not None:
        first, last = bounds_of(bounds, batch, chunk)
        rows = last > sizes.CHUNK if AFTER else first < 0
        x = tl.where(rows[:, None], x, 0.0)
    return x


@triton.jit
def hide(a, bounds, others, batch, chunk, QUERIES: tl.constexpr):
    """Return a with 0 where query and key do not meet; QUERIES: rows are queries, not keys."""
    row, column = chunk.local[:, None], chunk.local[None, :]
    if bounds is None:
        seen = row >= column if QUERIES else column >= row
    else:
        first, last = bounds_of(bounds, batch, chunk)
        if others is None:
            if QUERIES:
                last = tl.minimum(last, chunk.local + 1)
            else:
                first = tl.maximum(first, chunk.local)
        seen = (column >= first[:, None]) & (column < last[:, None])
    return tl.where(seen, a, 0.0)


@triton.jit
def state_of(states, head, chunk, sizes):
    """Return a pointer to the state before a chunk, or, if ``chunk`` is None, of all tokens."""
    layout: tl.constexpr = layout_of(sizes.DV, states.dtype.element_ty.primitive_bitwidth)
    if chunk is not None:
        head = head * tl.cdiv(chunk.length, sizes.CHUNK) + chunk.number
    return states + head * (sizes.F * layout.WIDTH)


@triton.jit
def load_values(state, part, f, d, sizes):
    """Return one part of the values of a state: [BF, BDv]. The sum of all parts is the value."""
    layout: tl.constexpr = layout_of(sizes.DV, state.dtype.element_ty.primitive_bitwidth)
    inside = (f < sizes.F)[:, None] & (d < layout.VALUES)[None, :]
    at = f[:, None] * layout.WIDTH + (d + part * layout.VALUES)[None, :]
    return tl.load(state + at, mask=inside, other=0.0)


@triton.jit
def load_normalizer(state, f, sizes):
    """Return the columns for v' = 1, whose sum is the normalizer: [BF, NORMALIZER]."""
    layout: tl.constexpr = layout_of(sizes.DV, state.dtype.element_ty.primitive_bitwidth)
    column = layout.PARTS * layout.VALUES + tl.arange(0, layout.NORMALIZER)
    at = f[:, None] * layout.WIDTH + column[None, :]
    return tl.load(state + at, mask=(f < sizes.F)[:, None], other=0.0)


@triton.jit
def normalizer_of(state, f, sizes):
    """Return the last column of a state in fp32: [BF]."""
    return tl.sum(load_normalizer(state, f, sizes).to(tl.float32), 1)


@triton.jit
def times_state(acc, x, state, f, d, TRANSPOSED: tl.constexpr, sizes):
    """Return acc + x S for x [C, BF], or acc + x Sᵀ for x [C, BDv], without S's last column."""
    layout: tl.constexpr = layout_of(sizes.DV, state.dtype.element_ty.primitive_bitwidth)
    for part in tl.static_range(tl.constexpr(layout.PARTS)):
        s = load_values(state, part, f, d, sizes)
        acc = dot(x, tl.trans(s) if TRANSPOSED else s, acc, sizes.PRECISION)
    return acc


@triton.jit
def read(acc, total, x, state, f, d, sizes):
    """Return acc + x S [C, BDv], and columns whose sum is larger by x times S's last column."""
    acc = times_state(acc, x, state, f, d, False, sizes)
    normalizer = load_normalizer(state, f, sizes)
    if x.dtype == tl.bfloat16:
        total = dot(x, normalizer, total, sizes.PRECISION)
    else:
        total += tl.sum(x * tl.sum(normalizer, 1)[None, :], 1)[:, None]
    return acc, total


@triton.jit
def read_rows(acc, total, x, chunk, state, bounds, batch, AFTER: tl.constexpr, sizes):
    """`read` all features of the rows of `crossing`.

    It is a loop of its own: with the masked rows, those of the products within a chunk spilled.
    """
    d = tl.arange(0, sizes.BLOCK_DV)
    for start in range(0, sizes.F, sizes.BLOCK_F):
        f = start + tl.arange(0, sizes.BLOCK_F)
        x_tile = load(x, chunk.head, chunk, f, sizes.F)  # [C, BF]
        x_tile = crossing(x_tile, bounds, batch, chunk, AFTER, sizes)
        acc, total = read(acc, total, x_tile, state, f, d, sizes)
    return acc, total


@triton.jit
def add_dx(acc, g, d_i, state, f, d, sizes):
    """Return acc + g Sᵀ [C, BF] for g [C, BDv] and −δ [C, 1] as its last column."""
    acc = times_state(acc, g, state, f, d, True, sizes)
    return acc - d_i * normalizer_of(state, f, sizes)[None, :]


@triton.jit
def store_state(state, f, d, s, normalizer, sizes):
    """Store a state [BF, BDv], whose columns beyond DV must be 0: they are written as padding.

    The column for v' = 1 is the sum of the columns 0 and 1 of ``normalizer`` [BF, COLUMNS], where
    all even columns are equal, and all odd ones.
    """
    layout: tl.constexpr = layout_of(sizes.DV, state.dtype.element_ty.primitive_bitwidth)
    exists, column = (f < sizes.F)[:, None], tl.arange(0, COLUMNS)[None, :]
    row = state + f[:, None] * layout.WIDTH  # [BF, 1]
    inside = exists & (d < layout.VALUES)[None, :]
    last = row + layout.PARTS * layout.VALUES
    if layout.PARTS == 1:
        tl.store(row + d[None, :], s, mask=inside)
        # Triton cannot index the columns of a tile, so that two are read as a sum.
        total = tl.sum(tl.where(column < 2, normalizer, 0.0), 1)[:, None]  # [BF, 1]
        four = tl.arange(0, layout.NORMALIZER)[None, :]
        tl.store(last + four, tl.where(four == 0, total, 0.0), mask=exists)
    else:
        high = upper_half(s)
        tl.store(row + d[None, :], high.to(tl.bfloat16), mask=inside)
        tl.store(row + (d + layout.VALUES)[None, :], (s - high).to(tl.bfloat16), mask=inside)
        tl.store(last + column, in_parts(normalizer, column // 2), mask=exists)


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


@triton.jit(do_not_specialize=["length", "spans", "span"])
def linear_states(
    features, values,  # of GROUP heads per state
    delta,  # vector, for R: −δ is the last column of its values; None for S
    first,  # [B·Hkv, F, WIDTH] in fp32 or None: the initial state
    states,  # [B·Hkv, chunks, F, WIDTH] or None: the state before each chunk
    last,  # [B·Hkv, spans, F, WIDTH] in fp32: first + the sum over each span of chunks
    bounds,  # int32 [B, 2, N] or None: where segments begin and end
    length, spans, span,  # span: chunks per program
    BACKWARDS: tl.constexpr,  # from the last chunk to the first
    sizes,
):  # fmt: skip
    FEATURES: tl.constexpr = (sizes.F + sizes.BLOCK_F - 1) // sizes.BLOCK_F
    f = tl.program_id(0) % FEATURES * sizes.BLOCK_F + tl.arange(0, sizes.BLOCK_F)  # [BF]
    part = tl.program_id(0) // FEATURES % spans
    hk = (tl.program_id(0) // FEATURES // spans).to(tl.int64)
    d, local = tl.arange(0, sizes.BLOCK_DV), tl.arange(0, sizes.CHUNK)
    dtype = features.dtype.element_ty
    s = tl.zeros([sizes.BLOCK_F, sizes.BLOCK_DV], tl.float32)
    # The column for v' = 1 is a product of its own, so that BLOCK_DV need not be DV + 1, padded.
    # An even and an odd column add up to the column for v' = 1, of which each is half. −δ has more
    # digits than bf16: even columns add the upper halves of its mantissas, odd ones the lower.
    even = (tl.arange(0, COLUMNS) % 2 == 0)[None, :]
    normalizer = tl.zeros([sizes.BLOCK_F, COLUMNS], tl.float32)
    if first is not None:
        state = state_of(first, hk, None, sizes)
        s = load_values(state, 0, f, d, sizes)
        normalizer += 0.5 * tl.sum(load_normalizer(state, f, sizes), 1)[:, None]
    chunks = tl.cdiv(length, sizes.CHUNK)
    for step in range(part * span, tl.minimum(part * span + span, chunks)):
        number = chunks - 1 - step if BACKWARDS else step
        chunk = Chunk(hk, number, number * sizes.CHUNK, local, length)
        if states is not None:
            store_state(state_of(states, hk, chunk, sizes), f, d, s, normalizer, sizes)
        batch = hk * sizes.GROUP // sizes.HEADS if bounds is not None else 0
        if bounds is not None:
            # The sum goes on if its segment, that of the first token, crosses the chunk.
            at = bounds + batch * (2 * length) + chunk.first
            end = chunk.first + sizes.CHUNK
            # Not `tl.where`, which Triton 3.9 does not compile here for sm_100.
            if (tl.load(at) >= chunk.first) | (tl.load(at + length) <= end):
                s = tl.zeros([sizes.BLOCK_F, sizes.BLOCK_DV], tl.float32)
                normalizer = tl.zeros([sizes.BLOCK_F, COLUMNS], tl.float32)
        for member in range(sizes.GROUP):
            head = hk * sizes.GROUP + member
            x_tile = load(features, head, chunk, f, sizes.F)  # [C, BF]
            y_tile = load(values, head, chunk, d, sizes.DV)  # [C, BDv]
            x_tile = crossing(x_tile, bounds, batch, chunk, not BACKWARDS, sizes)
            y_tile = crossing(y_tile, bounds, batch, chunk, not BACKWARDS, sizes)
            column = tl.full([sizes.CHUNK, COLUMNS], 0.5, tl.float32)
            if delta is not None:
                column = -load_vector(delta, head, chunk)[:, None]
                high = upper_half(column) if dtype == tl.bfloat16 else column
                column = tl.where(even, high, column - high)  # [C, COLUMNS]
            # Tokens beyond the sequence have features of 0.
            normalizer = dot(tl.trans(x_tile), column.to(dtype), normalizer, sizes.PRECISION)
            s = dot(tl.trans(x_tile), y_tile.to(dtype), s, sizes.PRECISION)  # [BF, BDv]
    store_state(state_of(last, hk * spans + part, None, sizes), f, d, s, normalizer, sizes)


@triton.jit(do_not_specialize=["length"])
def linear_output(
    x, y, v, states, others, bounds, out, z,  # y and v: None if all tokens read one state
    length, sizes,
):  # fmt: skip
    chunk = chunk_of(tl.program_id(0), length, sizes)
    d, hk = tl.arange(0, sizes.BLOCK_DV), chunk.head // sizes.GROUP
    batch = chunk.head // sizes.HEADS if bounds is not None else 0
    state = state_of(states, hk, chunk if y is not None else None, sizes)
    dtype = x.dtype.element_ty  # fp32 or bf16: weights may exceed the range of fp16
    acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_DV], tl.float32)
    # The denominators are the sums of the columns. A vector product is one column in fp32.
    total = tl.zeros([sizes.CHUNK, COLUMNS if dtype == tl.bfloat16 else 1], tl.float32)
    if bounds is not None:
        acc, total = read_rows(acc, total, x, chunk, state, bounds, batch, False, sizes)
    if others is not None:
        other = state_of(others, hk, chunk, sizes)
        acc, total = read_rows(acc, total, x, chunk, other, bounds, batch, True, sizes)
    a = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
    for start in range(0, sizes.F, sizes.BLOCK_F):
        f = start + tl.arange(0, sizes.BLOCK_F)
        x_tile = load(x, chunk.head, chunk, f, sizes.F)  # [C, BF]
        if bounds is None:
            acc, total = read(acc, total, x_tile, state, f, d, sizes)  # [C, BDv]
        if y is not None:
            y_tile = load(y, hk, chunk, f, sizes.F)  # [C, BF]
            a = dot(x_tile, tl.trans(y_tile), a, sizes.PRECISION)  # [queries, keys]
    denominator = tl.sum(total, 1)
    if y is not None:
        a = hide(a, bounds, others, batch, chunk, True)  # y_tile is 0 beyond the last key
        denominator += tl.sum(a, 1)
        v_tile = load(v, hk, chunk, d, sizes.DV)  # [C, BDv]
        acc = dot(a.to(dtype), v_tile.to(dtype), acc, sizes.PRECISION)
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    at = z + chunk.head * length + chunk.first + chunk.local
    tl.store(at, denominator, mask=chunk.local < length - chunk.first)
    store(out, chunk.head, chunk, d, sizes.DV, acc / denominator[:, None])


@triton.jit(do_not_specialize=["length"])
def linear_dx(
    y, v, g, delta, states, others, bounds, dx,  # y and v: None if all tokens read one state
    length, sizes,
):  # fmt: skip
    chunk = chunk_of(tl.program_id(0), length, sizes)
    d, hk = tl.arange(0, sizes.BLOCK_DV), chunk.head // sizes.GROUP
    batch = chunk.head // sizes.HEADS if bounds is not None else 0
    state = state_of(states, hk, chunk if y is not None else None, sizes)
    dtype = dx.dtype.element_ty
    g_tile = load(g, chunk.head, chunk, d, sizes.DV)  # [C, BDv]
    d_i = load_vector(delta, chunk.head, chunk)[:, None]
    dp = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
    if y is not None:
        v_tile = load(v, hk, chunk, d, sizes.DV)  # [C, BDv]
        dp = dot(g_tile, tl.trans(v_tile.to(dtype)), None, sizes.PRECISION) - d_i
        dp = hide(dp, bounds, others, batch, chunk, True)  # [queries, keys]
    STAGES: tl.constexpr = None if others is None else 1  # more stages spill with two states
    for start in tl.range(0, sizes.F, sizes.BLOCK_F, num_stages=STAGES):
        f = start + tl.arange(0, sizes.BLOCK_F)
        acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_F], tl.float32)
        acc = add_dx(acc, g_tile, d_i, state, f, d, sizes)
        # Rows of the product are hidden, because G with hidden rows would be another operand in
        # shared memory.
        acc = crossing(acc, bounds, batch, chunk, False, sizes)
        if others is not None:
            after = tl.zeros([sizes.CHUNK, sizes.BLOCK_F], tl.float32)
            after = add_dx(after, g_tile, d_i, state_of(others, hk, chunk, sizes), f, d, sizes)
            acc += crossing(after, bounds, batch, chunk, True, sizes)
        if y is not None:
            y_tile = load(y, hk, chunk, f, sizes.F)  # [C, BF]
            acc = dot(dp.to(dtype), y_tile, acc, sizes.PRECISION)
        store(dx, chunk.head, chunk, f, sizes.F, acc)


@triton.jit(do_not_specialize=["length"])
def linear_dv(
    x, y, g, states, others, bounds, dv,  # x and g: None if all tokens read one state
    length, sizes,
):  # fmt: skip
    chunk = chunk_of(tl.program_id(0), length, sizes)
    d = tl.arange(0, sizes.BLOCK_DV)
    batch = chunk.head // sizes.HEADS if bounds is not None else 0
    state = state_of(states, chunk.head, chunk if x is not None else None, sizes)
    acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_DV], tl.float32)
    for start in range(0, sizes.F, sizes.BLOCK_F):
        f = start + tl.arange(0, sizes.BLOCK_F)
        y_tile = load(y, chunk.head, chunk, f, sizes.F)  # [C, BF]
        reader = crossing(y_tile, bounds, batch, chunk, True, sizes)
        acc = times_state(acc, reader, state, f, d, False, sizes)  # [C, BDv]
        if others is not None:
            reader = crossing(y_tile, bounds, batch, chunk, False, sizes)
            other = state_of(others, chunk.head, chunk, sizes)
            acc = times_state(acc, reader, other, f, d, False, sizes)
    if x is not None:
        for member in range(sizes.GROUP):
            head = chunk.head * sizes.GROUP + member
            a = tl.zeros([sizes.CHUNK, sizes.CHUNK], tl.float32)
            for start in range(0, sizes.F, sizes.BLOCK_F):
                f = start + tl.arange(0, sizes.BLOCK_F)
                y_tile = load(y, chunk.head, chunk, f, sizes.F)  # [C, BF]
                x_tile = load(x, head, chunk, f, sizes.F)  # [C, BF]
                a = dot(y_tile, tl.trans(x_tile), a, sizes.PRECISION)  # [keys, queries]
            a = hide(a, bounds, others, batch, chunk, False)
            g_tile = load(g, head, chunk, d, sizes.DV)  # [C, BDv]
            acc = dot(a.to(y.dtype.element_ty), g_tile, acc, sizes.PRECISION)
    store(dv, chunk.head, chunk, d, sizes.DV, acc)


@triton.jit(do_not_specialize=["length"])
def linear_dy(
    x, v, g, delta, states, others, bounds, dy,  # x, g, delta: None if all tokens read one state
    length, sizes,
):  # fmt: skip
    FEATURES: tl.constexpr = (sizes.F + sizes.BLOCK_F - 1) // sizes.BLOCK_F
    chunk = chunk_of(tl.program_id(0) // FEATURES, length, sizes)
    f = tl.program_id(0) % FEATURES * sizes.BLOCK_F + tl.arange(0, sizes.BLOCK_F)  # [BF]
    d = tl.arange(0, sizes.BLOCK_DV)
    batch = chunk.head // sizes.HEADS if bounds is not None else 0
    state = state_of(states, chunk.head, chunk if x is not None else None, sizes)
    dtype = dy.dtype.element_ty
    v_tile = load(v, chunk.head, chunk, d, sizes.DV).to(dtype)  # [C, BDv]
    acc = tl.zeros([sizes.CHUNK, sizes.BLOCK_F], tl.float32)
    acc += crossing(normalizer_of(state, f, sizes)[None, :], bounds, batch, chunk, True, sizes)
    reader = crossing(v_tile, bounds, batch, chunk, True, sizes)
    acc = times_state(acc, reader, state, f, d, True, sizes)  # [C, BF]
    if others is not None:
        other = state_of(others, chunk.head, chunk, sizes)
        acc += crossing(normalizer_of(other, f, sizes)[None, :], bounds, batch, chunk, False, sizes)
        reader = crossing(v_tile, bounds, batch, chunk, False, sizes)
        acc = times_state(acc, reader, other, f, d, True, sizes)
    if x is not None:
        for member in range(sizes.GROUP):
            head = chunk.head * sizes.GROUP + member
            g_tile = load(g, head, chunk, d, sizes.DV)  # [C, BDv]
            d_i = load_vector(delta, head, chunk)[None, :]
            dp = dot(v_tile, tl.trans(g_tile), None, sizes.PRECISION) - d_i
            dp = hide(dp, bounds, others, batch, chunk, False)  # [keys, queries]
            x_tile = load(x, head, chunk, f, sizes.F)  # [C, BF]
            acc = dot(dp.to(dtype), x_tile, acc, sizes.PRECISION)
    store(dy, chunk.head, chunk, f, sizes.F, acc)
