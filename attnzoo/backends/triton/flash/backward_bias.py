"""The gradient of a dense float mask: Σ dS over the batches and heads that share an entry.

`flash_dbias` is launched after `flash_dq`, which writes δ. It has one program per tile of the mask.
A program loops over these batches and heads in a fixed order, computes dS of its tile for each, as
`backward_kv` does, and stores the sum. Memory is that of the mask. Tiles that causality or the
window hide are stored as 0.

A mask with one row for all queries has the gradient of a key bias, which `flash_dkdv` writes.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.groups import INTEGERS, MaskStrides, Matrix, Side, Size
from attnzoo.backends.triton.common.tile import key_blocks, load_block, times
from attnzoo.backends.triton.flash.score_step import Group, first_head, gradients_of_scores


@triton.jit(do_not_specialize=INTEGERS)
def flash_dbias(
    q, k, v, do, dbias,
    q_descriptor, k_descriptor, v_descriptor, do_descriptor,  # descriptors for TMA, or all None
    vectors, terms, visible, normalizers,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dbias_b, dbias_h, dbias_m,
    mask_b, mask_h, mask_m, mask_n, heads, group, queries, keys, left, right,
    batches, sharing,  # numbers of batches and of heads that share an entry
    rule, tile,
):  # fmt: skip
    """Write dbias for a block of queries and a block of keys."""
    tiles_m, tiles_n = tl.cdiv(queries, tile.BLOCK_M), tl.cdiv(keys, tile.BLOCK_N)
    program = tl.program_id(0)
    row, column = program // tiles_n % tiles_m, program % tiles_n
    index = (program // tiles_n // tiles_m).to(tl.int64)
    own_heads = heads // sharing  # of dbias
    b, h = index // own_heads, index % own_heads
    low_head, high_head = h, h + sharing
    begin, start = row * tile.BLOCK_M, column * tile.BLOCK_N
    local_m, local_n = tl.arange(0, tile.BLOCK_M), tl.arange(0, tile.BLOCK_N)
    i, j = local_m[:, None], local_n[None, :]
    # The indices of rows are int64, because a mask may have more than 2^31 entries.
    dbias += b * dbias_b + h * dbias_h + begin.to(tl.int64) * dbias_m + start
    d, dv = tl.arange(0, tile.BLOCK_D), tl.arange(0, tile.BLOCK_DV)
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    size = Size(queries, keys, left, right)
    of_tile = Size(queries, keys - start, left, right)
    low, _, high = key_blocks(begin, queries, keys, left, right, tile.BLOCK_M, tile.BLOCK_N)
    steps = tl.where((column >= low) & (column < high), batches * sharing, 0)
    total = tl.zeros([tile.BLOCK_M, tile.BLOCK_N], tl.float32)
    for _ in range(steps):
        hk, at = h // group, b * heads + h
        q_matrix = Matrix(
            q + (b * q_b + h * q_h) * tile.ALIGN, q_n * tile.ALIGN, queries, q_descriptor, b, h
        )
        do_matrix = Matrix(
            do + (b * do_b + h * do_h) * tile.ALIGN, do_n * tile.ALIGN, queries, do_descriptor, b, h
        )
        k_matrix = Matrix(
            k + (b * k_b + hk * k_h) * tile.ALIGN, k_n * tile.ALIGN, keys, k_descriptor, b, hk
        )
        v_matrix = Matrix(
            v + (b * v_b + hk * v_h) * tile.ALIGN, v_n * tile.ALIGN, keys, v_descriptor, b, hk
        )
        q_tile = load_block(q_matrix, begin, local_m, d, tile.D, True)  # [BM, D]
        k_tile = load_block(k_matrix, start, local_n, d, tile.D, True)  # [BN, D]
        do_tile = load_block(do_matrix, begin, local_m, dv, tile.DV, True)  # [BM, DV]
        v_tile = load_block(v_matrix, start, local_n, dv, tile.DV, True)  # [BN, DV]
        q_side, k_side = (
            Side(q_tile, q_matrix, begin, local_m),
            Side(k_tile, k_matrix, start, local_n),
        )
        do_side, v_side = (
            Side(do_tile, do_matrix, begin, local_m),
            Side(v_tile, v_matrix, start, local_n),
        )
        product = times(q_side, k_side, tile.D, tile)  # [BM, BN]
        dp = times(do_side, v_side, tile.DV, tile)  # [BM, BN]
        head = first_head(b, h, heads, start, at * keys + start, terms, visible, strides, size)
        group_now = Group(
            b, h, at * queries, head, of_tile, keys, vectors, terms, visible, strides, normalizers
        )  # fmt: skip
        _, _, ds, _, _ = gradients_of_scores(
            product, dp, i, j, h * 0, begin, group_now, rule, tile, True
        )
        total += ds
        h += 1
        ends = h == high_head
        b += ends.to(tl.int64)
        h = tl.where(ends, low_head, h)
    inside = (i < queries - begin) & (j < keys - start)
    tl.store(dbias + i.to(tl.int64) * dbias_m + j, total.to(dbias.dtype.element_ty), mask=inside)
