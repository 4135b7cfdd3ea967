"""Builds the launches of the backward of `flash`; see `launch`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.groups import (
    Gradients,
    Normalizers,
    Rule,
)
from attnzoo.backends.triton.common.kernel_operands import (
    Extras,
    Form,
    Maps,
    is_peaked,
    like,
    new_vector,
)
from attnzoo.backends.triton.common.launch import (
    Launch,
    align_of,
    descriptors,
    rule_of,
    strides,
)
from attnzoo.backends.triton.common.tiles import Config
from attnzoo.backends.triton.flash.backward_kv import flash_dkdv
from attnzoo.backends.triton.flash.backward_q import flash_dq
from attnzoo.backends.triton.flash.launch import (
    arguments_of,
    config_of,
    constants_of,
    map_size_of,
)
from attnzoo.backends.triton.flash.parts import (
    parts_of_group,
    programs_of,
)
from attnzoo.backends.triton.flash.query_lists import list_queries
from attnzoo.backends.triton.flash.segments import ranges_of


def describe_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    stat: Tensor | None, weight_sum: Tensor | None, layout: Layout, form: Form, vectors: Vectors,
    extras: Extras, maps: Maps, wanted: Collection[str], arch: int, processors: int,
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
    align = align_of(q, k, v, out, do, *(grads[x] for x in "qkv"))
    size = None if maps.blocks is None else map_size_of(q, v)
    of_dq, of_dkdv = (
        config_of(kernel, arch, q, v, align, layout, form, vectors, extras, size)
        for kernel in ("dq", "dkdv")
    )
    z = stat
    if form.normalize == "online":
        vectors, z = vectors._replace(offset=stat), weight_sum
    elif form.shifted:
        vectors, z = vectors._replace(shape=stat), weight_sum
    normalizers = Normalizers(
        z, per_z=None if z is None else new_vector(q),
        delta=None if form.normalize == "none" else new_vector(q), dlse=dlse,
    )  # fmt: skip
    call = _Backward(
        do, q, k, v, out, layout, form, vectors, extras, maps, normalizers, grads,
        size, align,
    )  # fmt: skip
    launches = [
        *_describe_dq(call, of_dq, arch), *_describe_dkdv(call, of_dkdv, arch, processors)
    ]  # fmt: skip
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
    map_size: tuple[int, int] | None
    align: int

    def rule(self, **others: Any) -> Rule:
        # The saved stat of a softmax is already multiplied by the unit.
        unit = 1.0 if self.form.normalize == "online" else self.form.unit
        return rule_of(self.form, is_peaked(self.form, self.v), TAU_UNIT=unit, **others)


def _describe_dq(call: _Backward, config: Config, arch: int) -> list[Launch]:
    do, q, k, v, out, layout, form, vectors, extras, maps, normalizers, grads, size, align = call
    ranges, before = (None, []) if size else ranges_of(layout, config.block_m, arch)
    gradients = Gradients(
        grads.get("gain"), grads.get("offset", grads.get("base")),
        *(grads.get(name) for name in "shape sink alibi factor decay".split()),
    )  # fmt: skip
    args = {
        **arguments_of(q, k, layout, extras, vectors, ranges),
        **descriptors(config, arch, config.block_n, k=k, v=v),
        **strides(align, q=q, k=k, v=v, o=out, do=do, dq=grads["q"]),
        "v": v, "do": do, "o": out, "dq": grads["q"], "maps": maps._replace(live=None),
        "normalizers": normalizers, "gradients": gradients,
        "rule": call.rule(
            SHAPE_SLOPE=form.shape_act if "shape" in grads else None,
            DISTANCE_SLOPE=form.distance_slope_act if "decay" in grads else None,
            MEAN=_mean_source(form, q), PLAIN_DELTA="key_bias" in grads,
        ),
        "tile": constants_of(config, q, v, layout, align, MAP_M=size and size[0]),
    }  # fmt: skip
    return [*before, Launch(flash_dq, programs_of(q, config.block_m), args, config)]


def _describe_dkdv(call: _Backward, config: Config, arch: int, processors: int) -> list[Launch]:
    """Return the launches. If groups are split, replace the gradients of k and v."""
    do, q, k, v, _, layout, _, vectors, extras, maps, normalizers, grads, size, align = call
    ranges, before = (None, []) if size else ranges_of(layout, config.block_n, arch, of_keys=True)
    parts = parts_of_group(q, k, config.block_n, processors)
    if parts > 1:
        for name, x in (("k", k), ("v", v)):
            b, h, n, dim = x.shape
            grads[name] = x.new_empty(b, h * parts, n, dim, dtype=torch.float32)
        align = min(align, align_of(q, grads["k"], grads["v"]))
    normalizers = normalizers._replace(z=None, dlse=None)  # δ contains dlse
    if extras.factor is not None:
        normalizers = normalizers._replace(per_z=extras.factor)
    vectors, extras = vectors._replace(sink=None), extras._replace(factor=None)
    args = {
        **arguments_of(q, k, layout, extras, vectors, ranges),
        **descriptors(config, arch, config.block_m, q=q, do=do),
        **strides(align, q=q, k=k, v=v, do=do, dk=grads["k"], dv=grads["v"]),
        "v": v, "do": do, "dk": grads["k"], "dv": grads["v"], "normalizers": normalizers,
        "gradients": Gradients(key_bias=grads.get("key_bias")), "rule": call.rule(),
        "tile": constants_of(
            config, q, v, layout, align, MAP_M=size and size[0], MAP_N=size and size[1],
            TRANSPOSED=config.transposed,
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
