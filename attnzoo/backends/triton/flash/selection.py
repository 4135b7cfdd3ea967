"""Finds the largest scores of each query: a number that cuts them off, and where ties end.

There are ``keep`` of them, or the fewest whose softmax weights reach ``mass``.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q and,
in each pass, the keys that causality and window allow. It writes its block of ``cut`` and ``last``:
a key j is selected if its score is above the cut, or equal to it and j ≤ last.

Numbers of fp32, read as integers, have the order of the numbers (`as_number`). The cut is searched
among these integers. Each pass counts the scores that reach three pivots and leaves a quarter of
the integers, the first pass half of them, so any scores take at most 17 passes. The search of a
query ends earlier if exactly ``keep`` scores reach a pivot. Scores are compared as numbers, so
that −0 equals 0. If more scores are equal to the cut than fit, one more pass counts them from the
first key on.

With a mass, a pass before the search finds the largest score, and each pass of the search also sums
the weights exp(s − largest score) of the scores that reach a pivot. Each block is added in the same
order in every pass, so a lower pivot never has a smaller sum, although sums are rounded. The search
of a query ends earlier if one score is left in the range.

The forward and the backward compute the scores again, and compare them with the cut. A score that
is rounded in another way there may be on the other side of the cut, and with it all keys that tie
with it. So no bit may differ. All kernels of such a call have the block sizes of one tile, see
`tiles.selection_tile`, and compute q kᵀ, not k qᵀ. `scores` adds the terms in the unit 1, and
rounds or fuses each product in it explicitly.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.groups import INTEGERS, MaskStrides, Matrix, Scoring, Side, Size
from attnzoo.backends.triton.common.scores import load_head, load_vectors
from attnzoo.backends.triton.common.tile import SMALLEST, load_queries
from attnzoo.backends.triton.flash.segments import blocks_of_keys
from attnzoo.backends.triton.flash.threshold import block_scores

LOWEST = tl.constexpr(2**31 - 2139095041)  # ordinal of −∞
HIGHEST = tl.constexpr(2**31 + 2139095040)  # ordinal of ∞
ALL_KEYS = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=INTEGERS)
def select_keys(
    q, k, solved, vectors, terms, visible,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    heads, group, queries, keys, left, right, keep, mass, rule, tile,
):  # fmt: skip
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    i = index[:, None]  # [BM, 1]
    k += (b * k_b + hk * k_h) * tile.ALIGN
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, None, b, hk)
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_side = Side(q_tile, q_matrix, block.first, block.local)
    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    if not tile.SPLIT:
        full = low

    # The cut is one of the ordinals [lowest, beyond). ``reached`` scores reach the lowest one, and
    # ``above`` the first one beyond. All are [BM].
    lowest = tl.full([tile.BLOCK_M], LOWEST, tl.uint32)
    beyond = tl.where(index < queries, tl.full([tile.BLOCK_M], HIGHEST + 1, tl.uint32), lowest + 1)
    above, no_weight = tl.zeros([tile.BLOCK_M], tl.int32), tl.zeros([tile.BLOCK_M], tl.float32)
    reached, step = above, 0
    # Totals are numbers of keys, or their weights relative to the largest score, ``top``.
    # ``total_above`` is that of the scores counted by ``above``.
    if mass is None:
        top, target, total_above = None, keep, above
    else:
        top, target, total_above = no_weight + float("-inf"), no_weight, no_weight
        if tile.SPLIT:
            top = find_top(top, low, full, q_side, i, k_matrix, scoring, rule, tile, False)
        top = find_top(top, full, high, q_side, i, k_matrix, scoring, rule, tile, True)
        top = tl.where(top == float("-inf"), 0.0, top)
    while tl.max((beyond - lowest > 1).to(tl.int32), 0) > 0:
        width = beyond - lowest
        # The first pivot is the smallest finite number, so a query with fewer than ``keep`` keys,
        # or with none, ends in the first pass.
        lower = tl.where(step == 0, lowest + 1, lowest + (width + 3) // 4)
        middle, upper = lowest + (width + 1) // 2, beyond - width // 4
        pivots = as_number(lower), as_number(middle), as_number(upper)
        counts = tl.zeros([tile.BLOCK_M], tl.int32)
        counts, weights = (counts, counts, counts), (no_weight, no_weight, no_weight)
        if tile.SPLIT:
            counts, weights = sum_scores(
                counts, weights, low, full, pivots, top, q_side, i, k_matrix, scoring, rule, tile,
                False,
            )  # fmt: skip
        counts, weights = sum_scores(
            counts, weights, full, high, pivots, top, q_side, i, k_matrix, scoring, rule, tile, True
        )
        if mass is None:
            totals = counts
        else:
            totals = weights
            # In the first pass, the first weight is that of all keys. The product may underflow.
            target = tl.where(step == 0, tl.maximum(mass * weights[0], SMALLEST), target)
        lowest, beyond, reached, above, total_above = narrow(
            lowest, beyond, reached, above, total_above, lower, counts[0], totals[0], target
        )
        lowest, beyond, reached, above, total_above = narrow(
            lowest, beyond, reached, above, total_above, middle, counts[1], totals[1], target
        )
        lowest, beyond, reached, above, total_above = narrow(
            lowest, beyond, reached, above, total_above, upper, counts[2], totals[2], target
        )
        # With a mass, one score that is left is the last one.
        wanted = keep if mass is None else above + 1
        beyond = tl.where(reached == wanted, lowest + 1, beyond)
        step += 1
    cut, last = as_number(lowest), tl.full([tile.BLOCK_M], ALL_KEYS, tl.int32)
    if mass is None:
        # A query with fewer than ``keep`` keys has reached = 0, and the cut −∞.
        ties, room = reached > keep, keep - above
    else:
        ties = reached > above + 1
        weight = tl.exp2(tl.where(ties, cut - top, 0.0) * rule.UNIT)
        room = tl.where(ties, tl.ceil((target - total_above) / weight), 0.0)
        room = tl.minimum(room, (reached - above).to(tl.float32)).to(tl.int32)
        ties = ties & (room < reached - above)
    if tl.max(ties.to(tl.int32), 0) > 0:
        end, count = tl.zeros([tile.BLOCK_M], tl.int32), tl.zeros([tile.BLOCK_M], tl.int32)
        if tile.SPLIT:
            end, count = find_last(
                end, count, low, full, cut, room, q_side, i, k_matrix, scoring, rule, tile, False
            )
        end, count = find_last(
            end, count, full, high, cut, room, q_side, i, k_matrix, scoring, rule, tile, True
        )
        last = tl.where(ties, end, last)
    tl.store(solved.cut + block.at + index, cut, mask=index < queries)
    tl.store(solved.last + block.at + index, last, mask=index < queries)


@triton.jit
def as_number(ordinal):
    """Return the fp32 numbers with these ordinals. Negative numbers have their other bits flipped.

    Beyond that of ∞ they are NaN, which no score reaches.
    """
    bits = (ordinal ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def narrow(lowest, beyond, reached, above, total_above, pivot, count, total, target):
    """Return the range of ordinals with its counts and total, after a pivot.

    count, total: of the scores that reach the pivot. The pivots of a pass come in ascending order.
    One above the range changes nothing. A total of NaN does not reach the target.
    """
    inside, reaches = pivot < beyond, total >= target
    enough, few = inside & reaches, inside & (reaches == 0)
    lowest, reached = tl.where(enough, pivot, lowest), tl.where(enough, count, reached)
    beyond, above = tl.where(few, pivot, beyond), tl.where(few, count, above)
    return lowest, beyond, reached, above, tl.where(few, total, total_above)


@triton.jit
def find_top(top, low, high, q_side, i, k_matrix, scoring, rule, tile, EDGE: tl.constexpr):
    """Return the maximum of ``top`` [BM] and the scores of the blocks [low, high)."""
    for block in range(low, high):
        s = block_scores(block, q_side, i, k_matrix, scoring, rule, tile, EDGE)  # [BM, BN]
        top = tl.maximum(top, tl.max(s, 1))
    return top


@triton.jit
def sum_scores(
    counts, weights, low, high, pivots, top, q_side, i, k_matrix, scoring, rule, tile,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Add how many scores of the blocks [low, high) reach each of the three pivots [BM].

    With ``top`` [BM], also add their weights exp(s − top).
    """
    lower, middle, upper = counts
    lower_weight, middle_weight, upper_weight = weights
    for block in range(low, high):
        s = block_scores(block, q_side, i, k_matrix, scoring, rule, tile, EDGE)  # [BM, BN]
        lower += tl.sum((s >= pivots[0][:, None]).to(tl.int32), 1)
        middle += tl.sum((s >= pivots[1][:, None]).to(tl.int32), 1)
        upper += tl.sum((s >= pivots[2][:, None]).to(tl.int32), 1)
        if top is not None:
            w = tl.exp2((s - top[:, None]) * rule.UNIT)  # [BM, BN]
            lower_weight += tl.sum(tl.where(s >= pivots[0][:, None], w, 0.0), 1)
            middle_weight += tl.sum(tl.where(s >= pivots[1][:, None], w, 0.0), 1)
            upper_weight += tl.sum(tl.where(s >= pivots[2][:, None], w, 0.0), 1)
    return (lower, middle, upper), (lower_weight, middle_weight, upper_weight)


@triton.jit
def find_last(
    last, count, low, high, cut, room, q_side, i, k_matrix, scoring, rule, tile, EDGE: tl.constexpr
):
    """Return the key [BM] at which ``room`` scores equal to the cut are counted, and the count."""
    for block in range(low, high):
        s = block_scores(block, q_side, i, k_matrix, scoring, rule, tile, EDGE)  # [BM, BN]
        tied = (s == cut[:, None]).to(tl.int32)
        number = count[:, None] + tl.cumsum(tied, 1)
        j = block * tile.BLOCK_N + tl.arange(0, tile.BLOCK_N)[None, :]
        ends = (tied > 0) & (number == room[:, None])
        last = tl.maximum(last, tl.max(tl.where(ends, j, 0), 1))
        count += tl.sum(tied, 1)
    return last, count
