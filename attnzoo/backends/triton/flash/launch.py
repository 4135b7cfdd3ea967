"""Builds the launches of the kernels of `flash`; see `common.launch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import kernel_operands, launch, measured, tiles
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.groups import (
    Maps,
    Partials,
    RuleConstants,
    Saved,
    Tile,
    constants,
)
from attnzoo.backends.triton.common.kernel_operands import Solved, like, new_vector, unit_of
from attnzoo.backends.triton.common.launch import Launch, descriptors, strides
from attnzoo.backends.triton.common.merge import split_keys
from attnzoo.backends.triton.flash.forward import flash_forward
from attnzoo.backends.triton.flash.parts import programs_of, splits_of_keys
from attnzoo.backends.triton.flash.segments import ranges_of
from attnzoo.backends.triton.flash.selection import ALL_KEYS, select_keys
from attnzoo.backends.triton.flash.statistics import row_stats
from attnzoo.backends.triton.flash.threshold import threshold
from attnzoo.core.forms import Statistics


def config_of(
    kernel: str, arch: int, q: Tensor, v: Tensor, layout: Layout, rule: Rule | None,
    vectors: Vectors, terms: Terms, map_size: tuple[int, int] | None,
    dropout: Dropout = NO_DROPOUT,
) -> tiles.Config:  # fmt: skip
    """Return the tile of a kernel. With a block map, blocks divide the tiles of the map."""
    dim, bits = max(q.shape[3], v.shape[3]), 8 * q.element_size()
    if rule is not None and rule.normalize == "select":
        slopes = layout.relative_bias
        biased = layout.mask is not None or (slopes is not None and slopes.dim() == 2)
        return tiles.selection_tile(kernel, arch, bits, dim, biased)
    safe = launch.is_safe(kernel, v, layout, rule, vectors, terms, dropout)
    if map_size is None:
        return measured.tile_of_kernel(kernel, arch, bits, dim, safe, q.device)
    map_m, map_n = map_size
    if kernel == "threshold":  # writes the map entries of its blocks
        config = measured.tile_of_kernel(kernel, arch, bits, dim, safe, q.device)
        return config._replace(block_m=map_m, block_n=map_n)
    # The lists of a map are of its tiles of keys. Measured tiles are not used: with the larger
    # blocks of a map they may not fit in shared memory.
    config = tiles.tile_of_table(kernel, arch, bits, dim, safe)
    block_n = min(map_n, config.block_n) if kernel == "dkdv" else map_n
    return config._replace(block_m=min(map_m, config.block_m), block_n=block_n)


def tile_constants(
    config: tiles.Config, q: Tensor, v: Tensor | None, layout: Layout, **others: Any
) -> Tile:
    # Few blocks are full in a window or a segment.
    split = layout.left is None and layout.k_segments is None
    unit = launch.mask_align(layout.mask)
    return launch.tile_of(config, q, v, SPLIT=split, MASK_ALIGN=unit, **others)


def map_size_of(q: Tensor, v: Tensor) -> tiles.MapTile:
    return tiles.map_tile(max(q.shape[3], v.shape[3]), 8 * q.element_size())


def factor_after_maximum(
    config: tiles.Config, q: Tensor, layout: Layout, vectors: Vectors, terms: Terms, arch: int
) -> str | None:
    """How a softmax applies the factor of q kᵀ after the maximum; None: before. See `factor_out`.

    Possible only if scores are multiples of the products. With ``part`` in the tile, q is read in
    parts from memory, where its sign cannot be changed. A changed wide q costs many registers.
    """
    if kernel_operands.adds_terms(layout, vectors, terms):
        return None
    if vectors.gain is None and launch.outer_scale(layout) >= 0:
        return "keep"
    widest = 64 if arch // 10 == 10 else 128
    flips = config.part is None and q.element_size() == 2 and q.shape[3] <= widest
    return "flip" if flips else None


def describe_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, rule: Rule, vectors: Vectors, terms: Terms,
    solved: Solved, want_lse: bool, arch: int, processors: int, dropout: Dropout = NO_DROPOUT,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]:  # fmt: skip
    """Return the launches and their results: out, stat, weight_sum and lse, see `flash_forward`."""
    out, lse = like(q, v.shape[3]), new_vector(q) if want_lse else None
    stat = None if rule.normalize == "none" else new_vector(q)
    two = kernel_operands.saves_weight_sum(rule, layout, vectors, terms, want_lse)
    weight_sum = new_vector(q) if two else None
    size = None if solved.blocks is None else map_size_of(q, v)
    config = config_of("forward", arch, q, v, layout, rule, vectors, terms, size, dropout)
    after = None
    if rule.online and solved.cut is None:
        after = factor_after_maximum(config, q, layout, vectors, terms, arch)
    ranges, before = (None, []) if size else ranges_of(layout, config.block_m, arch)
    rule_constants = launch.constants_of(rule, v, LATE=after)
    args = {
        **launch.arguments_of(
            q, k, layout, rule_constants, vectors, terms, ranges, solved, dropout=dropout
        ),
        **strides(unit_of(q), q=q, k=k, v=v, o=out), "v": v, "o": out,
        **descriptors(config, arch, k=k, v=v),
        "maps": Maps(solved.blocks, solved.counts), "saved": Saved(stat, weight_sum, lse),
        "partials": Partials(), "eps": rule.eps or None, "splits": None,
        "tile": tile_constants(config, q, v, layout, MAP_M=size and size.queries),
    }  # fmt: skip
    forward = Launch(flash_forward, programs_of(q, config.block_m), args, config)
    # With a block map, most of the time is spent on the threshold, which is not split.
    splits = 1 if size else splits_of_keys(q, k, layout, config.block_m, processors)
    launches = [forward]
    if splits > 1:
        walk = forward._replace(programs=forward.programs * splits)
        launches = split_keys(walk, q, v, splits, groups=q.shape[1])
    return [*before, *launches], (out, stat, weight_sum, lse)


def describe_stats(
    q: Tensor, k: Tensor, layout: Layout, only_peak: bool, arch: int
) -> tuple[list[Launch], Statistics | Tensor]:
    """Return the launches, and the statistics or, if ``only_peak``, the largest scores."""
    config = config_of("stats", arch, q, q, layout, None, Vectors(), Terms(), None)
    results = new_vector(q) if only_peak else Statistics(new_vector(q), new_vector(q))
    outputs = {"peak": results} if isinstance(results, Tensor) else results._asdict()
    ranges, before = ranges_of(layout, config.block_m, arch)
    after = factor_after_maximum(config, q, layout, Vectors(), Terms(), arch)
    rule = constants(RuleConstants, UNIT=1.0 / LN2.value, LATE=after)
    args = {
        **launch.arguments_of(q, k, layout, rule, Vectors(), Terms(), ranges),
        **strides(unit_of(q), q=q, k=k), **descriptors(config, arch, k=k),
        "lse": None, "entropy": None, "peak": None, **outputs,
        "tile": tile_constants(config, q, None, layout),
    }  # fmt: skip
    stats = Launch(row_stats, programs_of(q, config.block_m), args, config)
    return [*before, stats], results


def new_solved(q: Tensor, k: Tensor, v: Tensor) -> Solved:
    """Return new, uninitialized tensors."""
    heads, (map_m, map_n) = q.shape[0] * q.shape[1], map_size_of(q, v)
    # Not `triton.cdiv`: lengths may have no values, and fake functions run without Triton.
    rows, columns = (q.shape[2] + map_m - 1) // map_m, (k.shape[2] + map_n - 1) // map_n
    blocks = q.new_empty(heads, rows, columns, dtype=torch.int32)
    counts = q.new_empty(heads, rows, dtype=torch.int32)
    live = q.new_empty(heads, rows, columns, dtype=torch.uint8)
    return Solved(new_vector(q), new_vector(q), blocks, counts, live)


def describe_threshold(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, rule: Rule, vectors: Vectors, terms: Terms,
    arch: int,
) -> tuple[list[Launch], Solved]:  # fmt: skip
    """Return the launches and their result."""
    phi, solved = rule.activation, new_solved(q, k, v)
    size = map_size_of(q, v)
    config = config_of("threshold", arch, q, v, layout, rule, vectors, terms, size)
    ranges, before = ranges_of(layout, config.block_m, arch)
    flips = vectors.gain is not None or launch.outer_scale(layout) < 0.0
    rule_constants = constants(
        RuleConstants, ACT=launch.function("Activation.triton", phi.triton), UNIT=1.0,
        ALPHA=launch.alpha_of(rule), DISTANCE=launch.distance_of(rule),
        LATE="flip" if flips else "keep",
    )  # fmt: skip
    args = {
        **launch.arguments_of(q, k, layout, rule_constants, vectors, terms, ranges),
        **strides(unit_of(q), q=q, k=k), "solved": solved,
        "tile": tile_constants(config, q, None, layout),
    }  # fmt: skip
    assert solved.live is not None
    programs = programs_of(q, config.block_m)
    solver = Launch(threshold, programs, args, config, zeroed=(solved.live,))
    return [*before, solver], solved


def describe_selection(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, rule: Rule, vectors: Vectors, terms: Terms,
    arch: int,
) -> tuple[list[Launch], Solved]:  # fmt: skip
    """Return the launches and their result."""
    solved = new_selection(q)
    keep = None if rule.keep is None else min(rule.keep, ALL_KEYS.value)
    config = config_of("selection", arch, q, v, layout, rule, vectors, terms, None)
    ranges, before = ranges_of(layout, config.block_m, arch)
    args = {
        **launch.arguments_of(
            q, k, layout, launch.constants_of(rule, v), vectors, terms, ranges
        ),
        **strides(unit_of(q), q=q, k=k), "solved": solved, "keep": keep,
        "mass": rule.mass, "tile": tile_constants(config, q, None, layout),
    }  # fmt: skip
    return [*before, Launch(select_keys, programs_of(q, config.block_m), args, config)], solved


def new_selection(q: Tensor) -> Solved:
    """Return new, uninitialized tensors."""
    last = q.new_empty(q.shape[:3], dtype=torch.int32)
    return Solved(cut=new_vector(q), last=last)
