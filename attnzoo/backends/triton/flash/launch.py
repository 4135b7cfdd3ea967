"""Builds the launches of the kernels of `flash`. See `attnzoo.backends.triton.common.launch`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.configurations import Config, map_tile, pick
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
    arguments,
    blocks_of,
    common,
    count_extras,
    dense_mask,
    descriptors,
    fits_tma,
    mask_align,
    outer_scale,
    padded,
    stride_align,
    strides,
    values,
)
from attnzoo.backends.triton.flash.backward_kv import flash_dkdv
from attnzoo.backends.triton.flash.backward_q import flash_dq
from attnzoo.backends.triton.flash.forward import flash_forward
from attnzoo.backends.triton.flash.parts import (
    parts_of_group,
    programs_of,
    split_keys,
    splits_of_keys,
)
from attnzoo.backends.triton.flash.query_lists import list_queries
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


def _config(
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


def _common(q: Tensor, k: Tensor, layout: Layout) -> dict[str, Any]:
    unit = mask_align(layout.mask)
    return {**common(q, k, layout, unit), "MASK_ALIGN": unit}


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


def _narrow(layout: Layout) -> bool:
    """Whether there is a dense mask whose strides or address allow no wide loads."""
    mask = layout.mask
    if mask is None or not dense_mask(layout):
        return False
    return mask_align(mask) == 1 or mask.data_ptr() % 16 != 0


def _tile(maps: Maps, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int] | None:
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
    tile = _tile(maps, q, k, v)
    heavy, narrow = vectors.shape is not None, _narrow(layout)
    features = Features(align, tile, heavy, rare=peaked, narrow=narrow, extras=extras)
    config = _config("forward", arch, q, k, v, layout, features)
    online = form.normalize == "online"
    late = _late(q, layout, vectors.gain, extras, arch) if online else None
    ranges, before = (None, []) if tile else ranges_of(layout, config.block_m, arch)
    args = {
        **_common(q, k, layout), **strides(align, q=q, k=k, v=v, o=out), **values(v),
        **blocks_of(config), **arguments(vectors, extras), "q": q, "k": k, "v": v, "o": out,
        **descriptors(config, arch, config.block_n, k=k, v=v),
        "stat": stat, "weight_sum": weight_sum, "lse": lse, "ranges": ranges,
        "blocks": maps.blocks, "counts": maps.counts,
        "ACT": form.act, "DISTANCE": form.distance_act, "UNIT": form.unit,
        "VANISHES": form.vanishes, "ONLINE": online, "SUM": form.normalize in ("sum", "threshold"),
        "PEAKED": peaked, "LATE": late, "NORMALIZER": form.normalizer, "SHIFTED": form.shifted,
        "eps": form.eps or None,
        "SPLIT": config.split, "MAP_M": 0 if tile is None else tile[0], "ALIGN": align,
        "splits": None,
    }  # fmt: skip
    launch = Launch(flash_forward, programs_of(q, config.block_m), args, config)
    # With a block map, most of the time is spent on the threshold, which is not split.
    splits = 1 if tile else splits_of_keys(q, k, layout, config.block_m, processors)
    launches = [launch] if splits == 1 else split_keys(launch, q, v, splits)
    return [*before, *launches], (out, stat, weight_sum, lse)


def describe_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    stat: Tensor | None, weight_sum: Tensor | None, layout: Layout, form: Form,
    vectors: Vectors, extras: Extras, maps: Maps, wanted: Collection[str], arch: int,
    processors: int,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    """Return the launches, and the gradients of q, k, v and the wanted vectors by name.

    The gradients of k and v are sums over the query heads of a group. If the groups are split (see
    `parts`), they are in fp32 with one head per part, and the caller adds the parts.
    """
    grads = {"q": like(q, q.shape[3]), "k": like(k, k.shape[3]), "v": like(v, v.shape[3])}
    grads |= {name: new_vector(q) for name in wanted if name not in grads}
    if "key_bias" in wanted:
        b, h, n = q.shape[0], q.shape[1], k.shape[2]
        grads["key_bias"] = q.new_empty(2, b, h, n, dtype=torch.float32)
    online, tau, z, shape = form.normalize == "online", vectors.offset, stat, vectors.shape
    if online:
        tau, z = stat, weight_sum
    elif form.shifted:
        shape, z = stat, weight_sum
    peaked = is_peaked(form, v)
    shared = {
        **_common(q, k, layout), **values(v),
        "q": q, "k": k, "v": v, "do": do, "gain": vectors.gain, "shape": shape,
        "tau": tau, "per_z": None if z is None else new_vector(q),
        "key_bias": extras.key_bias, "base": extras.base, "peak": extras.peak,
        "decay": extras.decay, "DISTANCE": form.distance_act,
        "delta": None if form.normalize == "none" else new_vector(q),
        "ACT": form.act, "UNIT": form.unit, "VANISHES": form.vanishes,
        "NORMALIZER": form.normalizer, "PEAKED": peaked,
        "TAU_UNIT": 1.0 if online else form.unit,  # the saved stat is already multiplied by unit
    }  # fmt: skip
    align = align_of(q, k, v, out, do, grads["q"], grads["k"], grads["v"])
    heavy = vectors.shape is not None or peaked or form.normalizer or extras.factor is not None
    tile = _tile(maps, q, k, v)
    map_args = dict(zip(("MAP_M", "MAP_N"), tile or (0, 0)))
    terms = extras.key_bias is not None or layout.softcap is not None
    learned_power = "shape" in grads and form.normalize != "threshold"
    rare = dlse is not None or (tile is not None and terms)
    narrow = learned_power or _narrow(layout)
    features = Features(align, tile, heavy, rare, narrow, extras)
    mean = _mean_source(form, q)
    twice = features._replace(heavy=heavy or mean == "weights")  # two loops over the keys
    config = _config("dq", arch, q, k, v, layout, twice)
    ranges, before = (None, []) if tile else ranges_of(layout, config.block_m, arch)
    dq_args = {
        **shared, **blocks_of(config), "SPLIT": config.split, "ALIGN": align,
        "MAP_M": map_args["MAP_M"],
        **descriptors(config, arch, config.block_n, k=k, v=v),
        **strides(align, q=q, k=k, v=v, o=out, do=do, dq=grads["q"]), "o": out, "dq": grads["q"],
        "z": z, "dlse": dlse, "dgain": grads.get("gain"),
        "dtau": grads.get("offset", grads.get("base")),
        "dsink": grads.get("sink"), "dfactor": grads.get("factor"), "factor": extras.factor,
        "PLAIN_DELTA": "key_bias" in grads, "dshape": grads.get("shape"),
        "dalibi": grads.get("alibi"), "sink": vectors.sink,
        "SHAPE_SLOPE": form.shape_act if "shape" in grads else None,
        "ddecay": grads.get("decay"),
        "DISTANCE_SLOPE": form.distance_slope_act if "decay" in grads else None,
        "MEAN": mean,
        "blocks": maps.blocks, "counts": maps.counts, "ranges": ranges,
    }  # fmt: skip
    launches = [*before, Launch(flash_dq, programs_of(q, config.block_m), dq_args, config)]
    config = _config("dkdv", arch, q, k, v, layout, features)
    ranges, before = (None, []) if tile else ranges_of(layout, config.block_n, arch, of_keys=True)
    parts = parts_of_group(q, k, config.block_n, processors)
    if parts > 1:
        for name, x in (("k", k), ("v", v)):
            b, h, n, dim = x.shape
            grads[name] = x.new_empty(b, h * parts, n, dim, dtype=torch.float32)
        # The kernel takes a part for a group, also in the lists of a block map.
        shared |= {"group": shared["group"] // parts}
        align = min(align, align_of(q, grads["k"], grads["v"]))
    columns, listing = _describe_columns(maps, {**shared, **map_args, "SPLIT": config.split})
    dkdv_args = {
        **shared, **blocks_of(config), "SPLIT": config.split, "ALIGN": align,
        "parts": parts if parts > 1 else None,
        "TURNED": config.turned,
        **descriptors(config, arch, config.block_m, q=q, do=do),
        **strides(align, q=q, k=k, v=v, do=do, dk=grads["k"], dv=grads["v"]),
        "dk": grads["k"], "dv": grads["v"], "blocks": columns.blocks, "counts": columns.counts,
        **map_args, "dkey_bias": grads.get("key_bias"), "ranges": ranges,
    }  # fmt: skip
    if extras.factor is not None:
        dkdv_args["per_z"] = extras.factor
    zeroed = ("dkey_bias",) if "key_bias" in grads else ()
    programs = programs_of(k, config.block_n) * parts
    launches += [*before, *listing, Launch(flash_dkdv, programs, dkdv_args, config, zeroed)]
    return launches, grads


def _mean_source(form: Form, q: Tensor) -> str | None:
    """How the kernel computes δ, see `backward_q`."""
    if form.normalize == "threshold":
        return "slopes"
    # The forward rounds φ to 16 bits for φ·v. dO·o then has an error of 2⁻⁹ dO·v, and dS divides it
    # by Z. That is as small as φ is, except in a softmax, where the largest φ is 1.
    if form.normalize == "sum" and q.element_size() == 2:
        return "weights"
    return None if form.normalize == "none" else "output"


def _describe_columns(maps: Maps, given: dict[str, Any]) -> tuple[Maps, list[Launch]]:
    """Return the block map per tile of keys, and a list with the launch that fills the map.

    The list is empty if there is no map.
    """
    live = maps.live
    if live is None:
        return maps, []
    heads, tiles_m, tiles_n = live.shape
    group = given["group"]
    blocks = live.new_empty(heads // group, tiles_n, group * tiles_m, dtype=torch.int32)
    counts = live.new_empty(heads // group, tiles_n, 2, dtype=torch.int32)
    names = "group queries keys left right MAP_M MAP_N SPLIT".split()
    args = {"live": live, "blocks": blocks, "counts": counts, "CHUNK": 256}
    args |= {name: given[name] for name in names}
    args["HAS_MASK"] = given["mask"] is not None
    launch = Launch(list_queries, heads // group * tiles_n, args, Config(1, 256, 4, 1))
    return Maps(blocks, counts), [launch]


def describe_stats(
    q: Tensor, k: Tensor, layout: Layout, arch: int
) -> tuple[list[Launch], Statistics]:
    align = align_of(q, k)
    config = _config("stats", arch, q, k, q, layout, Features(align, narrow=_narrow(layout)))
    lse, entropy = new_vector(q), new_vector(q)
    ranges, before = ranges_of(layout, config.block_m, arch)
    args = {
        **_common(q, k, layout), **strides(align, q=q, k=k), **blocks_of(config),
        **descriptors(config, arch, config.block_n, k=k), "q": q, "k": k, "lse": lse,
        "entropy": entropy, "LATE": _late(q, layout, None, Extras(), arch), "SPLIT": config.split,
        "ALIGN": align, "ranges": ranges,
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
    config = _config("threshold", arch, q, k, v, layout, features)
    maps = empty_maps(q, k, v, layout, vectors.shape, extras)
    peak, tau, (blocks, counts, live) = new_vector(q), new_vector(q), maps
    ranges, before = ranges_of(layout, config.block_m, arch)
    # Each program writes the map entries of its blocks, so blocks must have the size of map tiles.
    assert (config.block_m, config.block_n) == tile
    args = {
        **_common(q, k, layout), **strides(align, q=q, k=k), **blocks_of(config), "q": q, "k": k,
        "peak": peak, "tau": tau, "blocks": blocks, "counts": counts, "live": live,
        "gain": vectors.gain, "shape": vectors.shape, "key_bias": extras.key_bias,
        "base": extras.base, "decay": extras.decay, "ACT": form.act, "ALPHA": alpha,
        "DISTANCE": form.distance_act,
        "SPLIT": config.split, "FLIPS": vectors.gain is not None or outer_scale(layout) < 0.0,
        "ALIGN": align, "ranges": ranges,
    }  # fmt: skip
    launch = Launch(threshold, programs_of(q, config.block_m), args, config, zeroed=("live",))
    return [*before, launch], (peak, tau, blocks, counts, live)
