"""Builds the launches of the kernels of `flash`. See `attnzoo.backends.triton.common.launch`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.configurations import Config, map_tile, pick
from attnzoo.backends.triton.common.groups import (
    Gradients,
    Normalizers,
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
    backward_rule,
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


def _common(
    q: Tensor, k: Tensor, layout: Layout, extras: Extras, vectors: Vectors, ranges: Tensor | None
) -> dict[str, Any]:
    """The arguments shared by all kernels of `flash`."""
    unit = mask_align(layout.mask)
    terms = {"terms": score_terms(layout, extras), "vectors": vectors}
    return {**common(q, k, layout, ranges, unit), **terms}


def _tile_of(
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
    weight_sum = new_vector(q) if stands_apart(form, layout, extras) else None
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
        **_common(q, k, layout, extras, vectors, ranges),
        **strides(align, q=q, k=k, v=v, o=out), "v": v, "o": out,
        **descriptors(config, arch, config.block_n, k=k, v=v),
        "maps": maps._replace(live=None), "saved": Saved(stat, weight_sum, lse),
        "partials": Partials(), "eps": form.eps or None, "splits": None,
        "rule": rule_of(form, peaked, LATE=late),
        "tile": _tile_of(config, q, v, layout, align, MAP_M=tile and tile[0]),
    }  # fmt: skip
    launch = Launch(flash_forward, programs_of(q, config.block_m), args, config)
    # With a block map, most of the time is spent on the threshold, which is not split.
    splits = 1 if tile else splits_of_keys(q, k, layout, config.block_m, processors)
    launches = [launch] if splits == 1 else split_keys(launch, q, v, splits)
    return [*before, *launches], (out, stat, weight_sum, lse)


def describe_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    stat: Tensor | None, weight_sum: Tensor | None, lse: Tensor | None, layout: Layout,
    form: Form, vectors: Vectors, extras: Extras, maps: Maps, wanted: Collection[str], arch: int,
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
    learned_power = "shape" in grads and form.normalize != "threshold"
    peaked, align = is_peaked(form, v), align_of(q, k, v, out, do, *(grads[x] for x in "qkv"))
    heavy = vectors.shape is not None or peaked or form.normalizer or extras.factor is not None
    tile = _tile(maps, q, k, v)
    terms = extras.key_bias is not None or layout.softcap is not None
    rare = dlse is not None or (tile is not None and terms)
    features = Features(align, tile, heavy, rare, learned_power or _narrow(layout), extras)
    z = stat
    if form.normalize == "online":
        vectors, z = vectors._replace(offset=stat), weight_sum
    elif form.shifted:
        vectors, z = vectors._replace(shape=stat), weight_sum
    normalizers = Normalizers(
        z, per_z=None if z is None else new_vector(q),
        delta=None if form.normalize == "none" else new_vector(q),
        lse=None if dlse is None else lse, dlse=dlse,
    )  # fmt: skip
    calls = _Backward(do, q, k, v, out, layout, form, vectors, extras, maps, normalizers, grads)
    launches = _describe_dq(calls, features, arch) + _describe_dkdv(
        calls, features, arch, processors
    )
    return launches, grads


class _Backward(NamedTuple):
    """What both kernels of the backward read. τ and Z of the forward are in the vectors."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    layout: Layout
    form: Form
    vectors: Vectors
    extras: Extras
    maps: Maps
    normalizers: Normalizers
    grads: dict[str, Tensor]

    def rule(self, **others: Any) -> Rule:
        # The saved stat of a softmax is already multiplied by the unit.
        unit = 1.0 if self.form.normalize == "online" else self.form.unit
        return backward_rule(self.form, is_peaked(self.form, self.v), unit, **others)


def _describe_dq(call: _Backward, features: Features, arch: int) -> list[Launch]:
    do, q, k, v, out, layout, form, vectors, extras, maps, normalizers, grads = call
    mean = _mean_source(form, q)
    # Two loops over the keys
    features = features._replace(heavy=features.heavy or mean == "weights")
    config = _config("dq", arch, q, k, v, layout, features)
    tile, align = features.tile, features.align
    ranges, before = (None, []) if tile else ranges_of(layout, config.block_m, arch)
    gradients = Gradients(
        grads.get("gain"), grads.get("offset", grads.get("base")),
        *(grads.get(name) for name in "shape sink alibi factor decay".split()),
    )  # fmt: skip
    args = {
        **_common(q, k, layout, extras, vectors, ranges),
        **descriptors(config, arch, config.block_n, k=k, v=v),
        **strides(align, q=q, k=k, v=v, o=out, do=do, dq=grads["q"]),
        "v": v, "do": do, "o": out, "dq": grads["q"], "maps": maps._replace(live=None),
        "normalizers": normalizers, "gradients": gradients,
        "rule": call.rule(
            SHAPE_SLOPE=form.shape_act if "shape" in grads else None,
            DISTANCE_SLOPE=form.distance_slope_act if "decay" in grads else None,
            MEAN=mean, PLAIN_DELTA="key_bias" in grads,
        ),
        "tile": _tile_of(config, q, v, layout, align, MAP_M=tile and tile[0]),
    }  # fmt: skip
    return [*before, Launch(flash_dq, programs_of(q, config.block_m), args, config)]


def _describe_dkdv(call: _Backward, features: Features, arch: int, processors: int) -> list[Launch]:
    """Return the launches. If groups are split, replace the gradients of k and v."""
    do, q, k, v, _, layout, _, vectors, extras, maps, normalizers, grads = call
    config = _config("dkdv", arch, q, k, v, layout, features)
    tile, align = features.tile, features.align
    ranges, before = (None, []) if tile else ranges_of(layout, config.block_n, arch, of_keys=True)
    parts = parts_of_group(q, k, config.block_n, processors)
    if parts > 1:
        for name, x in (("k", k), ("v", v)):
            b, h, n, dim = x.shape
            grads[name] = x.new_empty(b, h * parts, n, dim, dtype=torch.float32)
        align = min(align, align_of(q, grads["k"], grads["v"]))
    normalizers = normalizers._replace(z=None)
    if extras.factor is not None:
        normalizers = normalizers._replace(per_z=extras.factor)
    if vectors.sink is None:  # δ contains dlse
        normalizers = normalizers._replace(lse=None, dlse=None)
    vectors, extras = vectors._replace(sink=None), extras._replace(factor=None)
    args = {
        **_common(q, k, layout, extras, vectors, ranges),
        **descriptors(config, arch, config.block_m, q=q, do=do),
        **strides(align, q=q, k=k, v=v, do=do, dk=grads["k"], dv=grads["v"]),
        "v": v, "do": do, "dk": grads["k"], "dv": grads["v"], "normalizers": normalizers,
        "gradients": Gradients(key_bias=grads.get("key_bias")), "rule": call.rule(),
        "tile": _tile_of(
            config, q, v, layout, align, MAP_M=tile and tile[0], MAP_N=tile and tile[1],
            TURNED=config.turned,
        ),
        "parts": parts if parts > 1 else None,
    }  # fmt: skip
    # The kernel takes a part for a group, also in the lists of a block map.
    args["group"] //= parts
    args["maps"], listing = _describe_columns(maps, args)
    zeroed = (grads["key_bias"],) if "key_bias" in grads else ()
    programs = programs_of(k, config.block_n) * parts
    return [*before, *listing, Launch(flash_dkdv, programs, args, config, zeroed)]


def _mean_source(form: Form, q: Tensor) -> str | None:
    """How the kernel computes δ, see `backward_q`."""
    if form.normalize == "threshold":
        return "slopes"
    # The forward rounds φ to 16 bits for φ·v. dO·o then has an error of 2⁻⁹ dO·v, and dS divides it
    # by Z. That is as small as φ is, except in a softmax, where the largest φ is 1.
    if form.normalize == "sum" and q.element_size() == 2:
        return "weights"
    return None if form.normalize == "none" else "output"


def _describe_columns(maps: Maps, dkdv: dict[str, Any]) -> tuple[Maps, list[Launch]]:
    """Return the block map per tile of keys, and a list with the launch that fills the map.

    The list is empty if there is no map. ``dkdv``: the arguments of `flash_dkdv`.
    """
    live, tile = maps.live, dkdv["tile"]
    if live is None:
        return maps, []
    heads, tiles_m, tiles_n = live.shape
    group = dkdv["group"]
    blocks = live.new_empty(heads // group, tiles_n, group * tiles_m, dtype=torch.int32)
    counts = live.new_empty(heads // group, tiles_n, 2, dtype=torch.int32)
    args = {name: dkdv[name] for name in "group queries keys left right".split()} | {
        "live": live, "blocks": blocks, "counts": counts, "CHUNK": 256, "MAP_M": tile.MAP_M.value,
        "MAP_N": tile.MAP_N.value, "SPLIT": tile.SPLIT.value,
        "HAS_MASK": dkdv["visible"].mask is not None,
    }  # fmt: skip
    launch = Launch(list_queries, heads // group * tiles_n, args, Config(1, 256, 4, 1))
    return Maps(blocks, counts), [launch]


def describe_stats(
    q: Tensor, k: Tensor, layout: Layout, arch: int
) -> tuple[list[Launch], Statistics]:
    align = align_of(q, k)
    config = _config("stats", arch, q, k, q, layout, Features(align, narrow=_narrow(layout)))
    lse, entropy = new_vector(q), new_vector(q)
    ranges, before = ranges_of(layout, config.block_m, arch)
    late = _late(q, layout, None, Extras(), arch)
    args = {
        **_common(q, k, layout, Extras(), Vectors(), ranges), **strides(align, q=q, k=k),
        **descriptors(config, arch, config.block_n, k=k), "lse": lse, "entropy": entropy,
        "rule": constants(Rule, UNIT=1.0 / LN2.value, LATE=late),
        "tile": _tile_of(config, q, None, layout, align),
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
    peak, tau = new_vector(q), new_vector(q)
    ranges, before = ranges_of(layout, config.block_m, arch)
    # Each program writes the map entries of its blocks, so blocks must have the size of map tiles.
    assert (config.block_m, config.block_n) == tile
    vectors = Vectors(vectors.gain, shape=vectors.shape)
    args = {
        **_common(q, k, layout, extras._replace(factor=None, peak=None), vectors, ranges),
        **strides(align, q=q, k=k), "peak": peak, "tau": tau, "maps": Maps(*maps),
        "rule": constants(Rule, ACT=form.act, UNIT=1.0, ALPHA=alpha, DISTANCE=form.distance_act),
        "tile": _tile_of(config, q, None, layout, align),
        "FLIPS": vectors.gain is not None or outer_scale(layout) < 0.0,
    }  # fmt: skip
    launch = Launch(threshold, programs_of(q, config.block_m), args, config, zeroed=maps[2:])
    return [*before, launch], (peak, tau, *maps)
