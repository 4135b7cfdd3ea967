"""Builds the launches of the kernels of `flash`. See `attnzoo.backends.triton.common.launch`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.configurations import Config, map_tile, pick
from attnzoo.backends.triton.common.groups import (
    Partials,
    Rule,
    Saved,
    Tile,
    constants,
)
from attnzoo.backends.triton.common.kernel_operands import (
    Extras,
    Form,
    Maps,
    adds_terms,
    is_peaked,
    like,
    new_vector,
    stands_apart,
)
from attnzoo.backends.triton.common.launch import (
    TMA,
    Launch,
    align_of,
    common,
    count_extras,
    dense_mask,
    descriptors,
    fits_tma,
    mask_align,
    outer_scale,
    padded,
    rule_of,
    score_terms,
    stride_align,
    strides,
    tile_of,
)
from attnzoo.backends.triton.flash.forward import flash_forward
from attnzoo.backends.triton.flash.parts import (
    programs_of,
    split_keys,
    splits_of_keys,
)
from attnzoo.backends.triton.flash.segments import ranges_of
from attnzoo.backends.triton.flash.statistics import row_stats
from attnzoo.backends.triton.flash.threshold import threshold
from attnzoo.core.forms import Statistics


class Features(NamedTuple):
    """What the configuration of a kernel depends on besides its operands and layout.

    tile: the tile of the block map, if there is one. heavy: the activation needs many registers.
    rare: the call has a feature of "several" that its layout does not show. narrow: a dense mask
    allows no wide loads. extras: those of the call.
    """

    align: int
    tile: tuple[int, int] | None = None
    heavy: bool = False
    rare: bool = False
    narrow: bool = False
    extras: Extras = Extras()


def config_of(
    kernel: str, arch: int, q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features
) -> Config:
    """Return the configuration for the features of a call; see `configurations`."""
    align, tile, heavy, rare, narrow, given = features
    extras = count_extras(layout, given.key_bias)
    dims, bits = (q.shape[3], v.shape[3]), 8 * q.element_size()
    mapped = tile is not None
    several = rare or dense_mask(layout) or extras > 1
    narrow |= mapped and tile != map_tile(max(dims), bits, False)
    pointers = kernel == "forward" and arch // 10 in TMA and not (fits_tma(k) and fits_tma(v))
    if align == 1:
        feature = "listed unaligned" if mapped else "unaligned"
    elif narrow or (several and pointers):
        feature = "narrow"
    elif given.decay is not None:
        alone = "listed distance" if mapped else "distance"
        feature = "narrow" if several or heavy or pointers else alone
    elif several:
        feature = "listed several" if mapped or heavy else "several"
    elif heavy:
        feature = "heavy"
    elif pointers:
        feature = "filled"
    elif mapped:
        feature = "listed"
    else:
        filled = any(padded(dim) > dim for dim in dims)
        feature = "one" if extras else "filled" if filled else ""
    config = pick(kernel, arch, bits, max(dims), feature)
    splits = layout.left is None and layout.k_segments is None
    split = splits and align > 1 and feature != "narrow"
    config = config._replace(split=split)
    if tile is None:
        return config
    map_m, map_n = tile
    block_n = min(map_n, config.block_n) if kernel == "dkdv" else map_n
    return config._replace(block_m=min(map_m, config.block_m), block_n=block_n)


def arguments_of(
    q: Tensor, k: Tensor, layout: Layout, extras: Extras, vectors: Vectors, ranges: Tensor | None
) -> dict[str, Any]:
    """The arguments shared by all kernels of `flash`."""
    unit = mask_align(layout.mask)
    terms = {"terms": score_terms(layout, extras), "vectors": vectors}
    return {**common(q, k, layout, ranges, unit), **terms}


def constants_of(
    config: Config, q: Tensor, v: Tensor | None, layout: Layout, align: int, **others: Any
) -> Tile:
    unit = mask_align(layout.mask)
    return tile_of(config, q, v, SPLIT=config.split, ALIGN=align, MASK_ALIGN=unit, **others)


def _new_tile(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, shape: Tensor | None, extras: Extras
) -> tuple[int, int]:  # fmt: skip
    """The tile of a block map that is to be made.

    It does not depend on addresses, because a fake tensor has none.
    """
    dim, bits, mask = max(q.shape[3], v.shape[3]), 8 * q.element_size(), layout.mask
    several, distance = count_extras(layout, extras.key_bias) > 1, extras.decay is not None
    small = stride_align(q, k, v) == 1
    if bits == 32 or shape is not None:
        small |= dense_mask(layout) or several or distance
    elif distance:
        small |= dense_mask(layout) or several
    elif mask is not None and dense_mask(layout):
        small |= several or mask_align(mask) == 1 or mask.element_size() > q.element_size()
    return map_tile(dim, bits, small)


def narrow_mask(layout: Layout) -> bool:
    """Whether there is a dense mask whose strides or address allow no wide loads."""
    mask = layout.mask
    if mask is None or not dense_mask(layout):
        return False
    return mask_align(mask) == 1 or mask.data_ptr() % 16 != 0


def map_tile_of(maps: Maps, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int] | None:
    """The tile of a block map, from its shape; None if there is no map.

    Strides do not determine the tile, because saved tensors may return with other strides. If both
    tiles give the same shape, each covers the whole matrix in the dimensions where they differ.
    """
    if maps.blocks is None:
        return None
    dim, bits = max(q.shape[3], v.shape[3]), 8 * q.element_size()
    large, small = map_tile(dim, bits, False), map_tile(dim, bits, True)
    return large if _tiles(large, q, k) == maps.blocks.shape[1:] else small


def _tiles(tile: tuple[int, int], q: Tensor, k: Tensor) -> tuple[int, int]:
    """Number of tiles along the queries and the keys, as Python ints for lengths without values."""
    return (q.shape[2] + tile[0] - 1) // tile[0], (k.shape[2] + tile[1] - 1) // tile[1]


def _late(q: Tensor, layout: Layout, gain: Tensor | None, extras: Extras, arch: int) -> str | None:
    """How a softmax applies the factor of q kᵀ after the maximum; None: before. See `factor_out`.

    Possible only if scores are multiples of the products. A wide q in fp32 is read in parts from
    memory, where its sign cannot be changed, and a changed q costs many registers.
    """
    if adds_terms(layout, extras):
        return None
    if gain is None and outer_scale(layout) >= 0:
        return "keep"
    widest = 64 if arch // 10 == 10 else 128
    return "flip" if q.element_size() == 2 and q.shape[3] <= widest else None


def describe_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, form: Form, vectors: Vectors, extras: Extras,
    maps: Maps, want_lse: bool, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]:  # fmt: skip
    """Return the launches and their results: out, stat, weight_sum and lse, see `flash_forward`."""
    out = like(q, v.shape[3])
    stat = None if form.normalize == "none" else new_vector(q)
    weight_sum = new_vector(q) if stands_apart(form, layout, vectors, extras, want_lse) else None
    lse = new_vector(q) if want_lse else None
    align = align_of(q, k, v, out)
    peaked = is_peaked(form, v)
    tile = map_tile_of(maps, q, k, v)
    heavy, narrow = vectors.shape is not None, narrow_mask(layout)
    features = Features(align, tile, heavy, rare=peaked, narrow=narrow, extras=extras)
    config = config_of("forward", arch, q, k, v, layout, features)
    online = form.normalize == "online"
    late = _late(q, layout, vectors.gain, extras, arch) if online else None
    ranges, before = (None, []) if tile else ranges_of(layout, config.block_m, arch)
    args = {
        **arguments_of(q, k, layout, extras, vectors, ranges),
        **strides(align, q=q, k=k, v=v, o=out), "v": v, "o": out,
        **descriptors(config, arch, config.block_n, k=k, v=v),
        "maps": maps._replace(live=None), "saved": Saved(stat, weight_sum, lse),
        "partials": Partials(), "eps": form.eps or None, "splits": None,
        "rule": rule_of(form, peaked, LATE=late),
        "tile": constants_of(config, q, v, layout, align, MAP_M=tile and tile[0]),
    }  # fmt: skip
    launch = Launch(flash_forward, programs_of(q, config.block_m), args, config)
    # With a block map, most of the time is spent on the threshold, which is not split.
    splits = 1 if tile else splits_of_keys(q, k, layout, config.block_m, processors)
    launches = [launch] if splits == 1 else split_keys(launch, q, v, splits)
    return [*before, *launches], (out, stat, weight_sum, lse)


def describe_stats(
    q: Tensor, k: Tensor, layout: Layout, arch: int
) -> tuple[list[Launch], Statistics]:
    align = align_of(q, k)
    config = config_of("stats", arch, q, k, q, layout, Features(align, narrow=narrow_mask(layout)))
    lse, entropy = new_vector(q), new_vector(q)
    ranges, before = ranges_of(layout, config.block_m, arch)
    late = _late(q, layout, None, Extras(), arch)
    args = {
        **arguments_of(q, k, layout, Extras(), Vectors(), ranges), **strides(align, q=q, k=k),
        **descriptors(config, arch, config.block_n, k=k), "lse": lse, "entropy": entropy,
        "rule": constants(Rule, UNIT=1.0 / LN2.value, LATE=late),
        "tile": constants_of(config, q, None, layout, align),
    }  # fmt: skip
    launch = Launch(row_stats, programs_of(q, config.block_m), args, config)
    return [*before, launch], Statistics(lse, entropy)


def empty_maps(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, shape: Tensor | None, extras: Extras
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return new, uninitialized tensors for the fields of `Maps`."""
    heads = q.shape[0] * q.shape[1]
    tiles = _tiles(_new_tile(q, k, v, layout, shape, extras), q, k)
    blocks = q.new_empty(heads, *tiles, dtype=torch.int32)
    counts = q.new_empty(heads, tiles[0], dtype=torch.int32)
    return blocks, counts, q.new_empty(heads, *tiles, dtype=torch.uint8)


def describe_threshold(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, form: Form, vectors: Vectors, extras: Extras,
    alpha: float | None, arch: int,
) -> tuple[list[Launch], tuple[Tensor, ...]]:  # fmt: skip
    """Return the launches, the peak, τ and the block map.

    Only gain and shape of ``vectors`` are read.
    """
    align = align_of(q, k)
    tile = _new_tile(q, k, v, layout, vectors.shape, extras)
    features = Features(stride_align(q, k), tile, extras=extras)
    config = config_of("threshold", arch, q, k, v, layout, features)
    maps = empty_maps(q, k, v, layout, vectors.shape, extras)
    peak, tau = new_vector(q), new_vector(q)
    ranges, before = ranges_of(layout, config.block_m, arch)
    # Each program writes the map entries of its blocks, so blocks must have the size of map tiles.
    assert (config.block_m, config.block_n) == tile
    vectors = Vectors(vectors.gain, shape=vectors.shape)
    args = {
        **arguments_of(q, k, layout, extras._replace(factor=None, peak=None), vectors, ranges),
        **strides(align, q=q, k=k), "peak": peak, "tau": tau, "maps": Maps(*maps),
        "rule": constants(Rule, ACT=form.act, UNIT=1.0, ALPHA=alpha, DISTANCE=form.distance_act),
        "tile": constants_of(config, q, None, layout, align),
        "FLIPS": vectors.gain is not None or outer_scale(layout) < 0.0,
    }  # fmt: skip
    launch = Launch(threshold, programs_of(q, config.block_m), args, config, zeroed=maps[2:])
    return [*before, launch], (peak, tau, *maps)
