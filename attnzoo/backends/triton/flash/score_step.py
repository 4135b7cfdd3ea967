"""The weights and dS of a block of queries and a block of keys, for dK/dV and a mask's gradient."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo.backends.triton.common.dropout import drop
from attnzoo.backends.triton.common.groups import Head, Scoring, Size
from attnzoo.backends.triton.common.scores import (
    activate,
    by_distance,
    cap_slope,
    capped,
    load_decay,
    load_segments,
    load_vector,
    load_vectors,
    score_gradients,
    scores,
    select,
)


class Group(NamedTuple):
    """What the scores of a group's queries with a block of keys are made from.

    Sizes, and offsets in per-key data, begin at the first key of the block.
    """

    batch: Any
    head: Any  # the first query head of the group
    at: Any  # its offset in vectors [B, H, Nq]
    start: Any  # `Head` of the first query head, without segment and decay
    size: Any
    keys: Any  # number of all keys
    vectors: Any
    terms: Any
    visible: Any
    strides: Any
    normalizers: Any


@triton.jit
def first_head(b, h, heads, start, bias_at, terms, visible, strides, size):
    """Return the `Head` of h for the keys from ``start`` on, without segment and decay."""
    mask = b * 0 if strides.head is None else h * 0
    if visible.mask is not None:
        mask += b * strides.batch * strides.align + h * strides.head * strides.align
        mask += start.to(tl.int64) * (1 if strides.key is None else strides.key)
    table = h if terms.table is None else h * (2 * terms.radius + 1)
    return Head(mask, b * size.keys + start, bias_at, table, b * heads + h, start)


@triton.jit
def _limited(seen, i, j, offset, left, right, TRANSPOSED: tl.constexpr):
    """Return the keys in ``seen`` that causality and window allow.

    Query index + offset is the index of the key at the same position. One limit per row needs fewer
    registers than one per column.
    """
    if right is not None:
        inside = (j <= i + (offset + right)) if TRANSPOSED else (j - (offset + right) <= i)
        seen = seen & inside
    if left is not None:
        inside = (j >= i + (offset - left)) if TRANSPOSED else (j - (offset - left) >= i)
        seen = seen & inside
    return seen


@triton.jit
def _head_now(group, member, begin, i, count):
    """Return the `Head` of a member of the group, for the queries begin + i."""
    start, strides, visible = group.start, group.strides, group.visible
    segment = load_segments(visible.q_segments, group.batch * group.size.queries + begin, i, count)
    mask = start.mask
    if visible.mask is not None:
        mask += member.to(tl.int64) * (strides.head.to(tl.int64) * strides.align)
        if strides.query is not None:
            mask += begin.to(tl.int64) * (strides.query.to(tl.int64) * strides.align)
    key_bias = start.key_bias + member.to(tl.int64) * group.keys
    table = start.table
    if group.terms.table is not None:
        table += member * (2 * group.terms.radius + 1)
    decay = load_decay(group.terms.decay, start.decay + member)
    return Head(mask, start.k_segments, key_bias, table, decay, segment)


@triton.jit
def score_step(
    product, dp, total, i, j, member, begin, group, dkey_bias, rule, tile, EDGE: tl.constexpr
):
    """Return the weights, the gradient of q·k, and ``total`` [BN], to which Σ_i dS_ij is added.

    Without a gradient of a key bias, ``total`` stays as it is.
    The gradient of q·k is dS times the gain, [BN, BM], or [BM, BN] with TRANSPOSED, as the
    ``product`` q·k and ``dp`` dO·v.
    """
    product, p, ds, gain, decay = gradients_of_scores(
        product, dp, i, j, member, begin, group, rule, tile, EDGE
    )
    if dkey_bias is not None:
        total += tl.sum(ds, 0 if tile.TRANSPOSED else 1)
    if rule.PLAIN_DELTA:
        ds *= gain
    if rule.DISTANCE is not None:
        size = Size(group.size.queries - begin, group.size.keys, None, None)
        a, _ = by_distance(rule.DISTANCE, i, j, size, decay)
        ds *= a
    return p, cap_slope(ds, product, group.terms.inner), total


@triton.jit
def gradients_of_scores(product, dp, i, j, member, begin, group, rule, tile, EDGE: tl.constexpr):
    """Return the product after a softcap, the weights, dS, the gain and the decay.

    dS contains the gain, unless PLAIN_DELTA. It is shaped as in `score_step`.
    """
    visible, terms, normalizers, size = group.visible, group.terms, group.normalizers, group.size
    MASKED: tl.constexpr = visible.mask is not None or visible.k_segments is not None
    HIDES: tl.constexpr = EDGE or MASKED
    WINDOW: tl.constexpr = size.left is not None or size.right is not None
    # ``row``: offset of the block in vectors [B, H, Nq]. ``count``: number of queries from it on.
    row, count = group.at + member.to(tl.int64) * size.queries + begin, size.queries - begin
    product = capped(product, terms.inner, tile.PRECISION)
    loaded = load_vectors(i, row, count, group.vectors, terms, rule, EDGE)
    head = _head_now(group, member, begin, i, count)
    size_now = Size(count, size.keys, None, None)
    scoring = Scoring(loaded, head, group.vectors, terms, visible, group.strides, size_now)
    s, seen = scores(product, i, j, scoring, rule, EDGE, MASKED)
    column = j + (group.keys - size.keys)  # j begins at the first key of the block
    s = select(s, column, loaded, terms, rule)
    if EDGE:
        # Queries that do not exist are loaded as 0. Added terms may make φ of their scores ∞, and
        # ∞ · 0 is NaN; φ of 0 may be the running maximum. Keys that do not exist need no
        # comparison: their results are not stored.
        seen = _limited(
            seen & (i < count), i, j, size.keys - count, size.left, size.right, tile.TRANSPOSED
        )
        # Otherwise `activate` sets the weights of hidden keys to 0.
        if rule.VANISHES and (not rule.PLAIN or rule.PEAKED or WINDOW):
            s = tl.where(seen, s, float("-inf"))
    p, slope, _, mu_slope = activate(s - loaded.tau, loaded.shape, seen, rule, HIDES)
    # δ includes 1/Z and, unless PLAIN_DELTA, the gain. So must dP.
    dp_factor = tl.full(i.shape, 1.0, tl.float32) if rule.PLAIN_DELTA else loaded.gain
    if normalizers.per_z is not None:
        per_z = load_vector(normalizers.per_z, row, i, count, 1.0, EDGE)
        p *= per_z
        dp_factor *= per_z
    if terms.seed is not None:
        p = drop(p, loaded.hash, column, terms)  # `flash_dkdv` divides dv by 1 − p
        dp = drop(dp, loaded.hash, column, terms)
        dp_factor *= terms.keep_scale
    delta = 0.0
    if normalizers.delta is not None:
        delta = load_vector(normalizers.delta, row, i, count, 0.0, EDGE)
    ds = score_gradients(dp * dp_factor, delta, slope, mu_slope, rule)
    return product, p, ds, loaded.gain, head.decay
