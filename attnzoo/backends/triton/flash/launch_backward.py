"""Builds the launches of the backward of `flash`; see `common.launch`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import launch
from attnzoo.backends.triton.common.groups import Gradients, Maps, Normalizers, RuleConstants
from attnzoo.backends.triton.common.kernel_operands import Solved, like, new_vector, unit_of
from attnzoo.backends.triton.common.launch import Launch, descriptors, strides
from attnzoo.backends.triton.common.tiles import Config, MapTile
from attnzoo.backends.triton.flash import launch as flash
from attnzoo.backends.triton.flash.backward_bias import flash_dbias
from attnzoo.backends.triton.flash.backward_kv import flash_dkdv
from attnzoo.backends.triton.flash.backward_q import flash_dq
from attnzoo.backends.triton.flash.parts import parts_of_group, programs_of
from attnzoo.backends.triton.flash.query_lists import list_queries
from attnzoo.backends.triton.flash.segments import ranges_of


class BackwardInputs(NamedTuple):
    """What the kernels of dQ and of dK/dV read. Fields are those of `describe_backward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    do: Tensor
    layout: Layout
    rule: Rule
    vectors: Vectors
    terms: Terms
    solved: Solved
    normalizers: Normalizers
    dropout: Dropout
    plain: bool  # `RuleConstants.PLAIN_DELTA`
    arch: int

    def arguments(self, constants: RuleConstants, ranges: Tensor | None) -> dict[str, Any]:
        return launch.arguments_of(
            self.q, self.k, self.layout, constants, self.vectors, self.terms, ranges, self.solved,
            dropout=self.dropout,
        ) | {"v": self.v, "do": self.do, "normalizers": self.normalizers}  # fmt: skip


def describe_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    stat: Tensor | None, weight_sum: Tensor | None, layout: Layout, rule: Rule, vectors: Vectors,
    terms: Terms, solved: Solved, bias: Tensor | None, wanted: Collection[str], arch: int,
    processors: int, dropout: Dropout = NO_DROPOUT,
) -> tuple[list[Launch], dict[str, Tensor]]:  # fmt: skip
    """Return the launches, and the gradients of q, k, v and the wanted vectors by name.

    The gradients of k and v are sums over the query heads of a group. If the groups are split (see
    `parts`), they are in fp32 with one head per part, and the caller adds the parts. They are
    uninitialized if none of "k", "v" and "key_bias" is wanted.
    ``bias``: the dense float mask if its gradient is wanted, else None. Its expanded dimensions may
    have size 1 in the mask of the layout.
    """
    grads = {name: like(x, x.shape[3]) for name, x in zip("qkv", (q, k, v))}
    grads |= {name: new_vector(q) for name in wanted if name not in grads}
    if bias is not None:
        grads["mask"] = like(bias, bias.shape[3])
    if "key_bias" in wanted:
        b, h, n = q.shape[0], q.shape[1], k.shape[2]
        grads["key_bias"] = q.new_empty(2, b, h, n, dtype=torch.float32)
    size = None if solved.blocks is None else flash.map_size_of(q, v)
    of_dq, of_dkdv = (
        flash.config_of(kernel, arch, q, v, layout, rule, vectors, terms, size, dropout)
        for kernel in ("dq", "dkdv")
    )
    z = stat
    if rule.online:
        solved, z = solved._replace(tau=stat), weight_sum
    elif rule.activation.shifted:
        vectors, z = vectors._replace(shape=stat), weight_sum
    normalizers = Normalizers(
        z, per_z=None if z is None else new_vector(q),
        delta=None if rule.normalize == "none" else new_vector(q), dlse=dlse,
    )  # fmt: skip
    plain = bias is not None or "key_bias" in grads
    inputs = BackwardInputs(
        q, k, v, out, do, layout, rule, vectors, terms, solved, normalizers, dropout, plain, arch
    )
    launches = _describe_dq(inputs, of_dq, size, grads)

    # δ contains dlse. The sink is in per_z or in tau already, the factor in per_z.
    normalizers = normalizers._replace(z=None, dlse=None)
    if terms.factor is not None:
        normalizers = normalizers._replace(per_z=terms.factor)
    inputs = inputs._replace(
        vectors=vectors._replace(sink=None), terms=terms._replace(factor=None),
        normalizers=normalizers,
    )  # fmt: skip
    of_keys = not {"k", "v", "key_bias"}.isdisjoint(wanted)
    if bias is not None or of_keys:
        launches += _describe_dkdv(inputs, of_dkdv, size, grads, processors, of_keys)
    return launches, grads


def _describe_dq(
    inputs: BackwardInputs, config: Config, size: MapTile | None, grads: dict[str, Tensor]
) -> list[Launch]:
    """The launches that fill dQ and the gradients of vectors.

    A table of biases by relative position gets its gradient here: ``grads`` then has the rows of
    the table, [B, H, Nq, 2R + 1].
    """
    q, k, v, layout, rule = inputs.q, inputs.k, inputs.v, inputs.layout, inputs.rule
    slopes, table = grads.get("relative_bias"), None
    if slopes is not None and (values := layout.relative_bias) is not None and values.dim() == 2:
        slopes, table = None, slopes.new_empty(*slopes.shape, values.shape[1])
        grads["relative_bias"] = table
        config = _with_addresses(config, mapped=size is not None)
        if rule.normalize == "select":  # two stages do not fit in the shared memory of sm_80
            config = config._replace(stages=1)
    of_vectors = {n: grads.get(n) for n in "gain offset shape sink factor decay".split()}
    constants = launch.constants_of(
        rule, v, **_slopes(rule, grads), MEAN=_mean_source(rule, q), PLAIN_DELTA=inputs.plain
    )
    ranges, before = (None, []) if size else ranges_of(layout, config.block_m, inputs.arch)
    args = {
        **inputs.arguments(constants, ranges),
        **descriptors(config, inputs.arch, k=k, v=v),
        **strides(unit_of(q), q=q, k=k, v=v, o=inputs.out, do=inputs.do, dq=grads["q"]),
        "o": inputs.out, "dq": grads["q"], "maps": Maps(inputs.solved.blocks, inputs.solved.counts),
        "gradients": Gradients(**of_vectors, slopes=slopes, table=table),
        "tile": flash.tile_constants(config, q, v, layout, MAP_M=size and size.queries),
    }  # fmt: skip
    zeroed = () if table is None else (table,)
    return [*before, Launch(flash_dq, programs_of(q, config.block_m), args, config, zeroed)]


def _describe_dkdv(
    inputs: BackwardInputs, config: Config, size: MapTile | None, grads: dict[str, Tensor],
    processors: int, of_keys: bool,
) -> list[Launch]:  # fmt: skip
    """The launches that fill the gradient of a mask, and dK and dV if ``of_keys``.

    A program takes a part of a group of heads for its group, also in the lists of a map.
    """
    q, k, v, layout, arch = inputs.q, inputs.k, inputs.v, inputs.layout, inputs.arch
    ranges, before = (None, []) if size else ranges_of(layout, config.block_n, arch, of_keys=True)
    parts = parts_of_group(q, k, config.block_n, processors) if of_keys else 1
    if parts > 1:
        for name, x in (("k", k), ("v", v)):
            b, h, n, dim = x.shape
            grads[name] = x.new_empty(b, h * parts, n, dim, dtype=torch.float32)
    constants = launch.constants_of(inputs.rule, v, PLAIN_DELTA=inputs.plain)
    args = {
        **inputs.arguments(constants, ranges),
        **descriptors(config, arch, q=q, do=inputs.do),
        **strides(unit_of(q), q=q, k=k, v=v, do=inputs.do, dk=grads["k"], dv=grads["v"]),
        "dk": grads["k"], "dv": grads["v"],
        "gradients": Gradients(key_bias=grads.get("key_bias")),
        "tile": flash.tile_constants(
            config, q, v, layout, MAP_M=size and size.queries, MAP_N=size and size.keys,
            TRANSPOSED=config.transposed,
        ),
        "parts": parts if parts > 1 else None,
    }  # fmt: skip
    of_bias = [_describe_dbias(inputs, args, grads["mask"])] if "mask" in grads else []
    if not of_keys:
        return of_bias
    args["group"] //= parts
    args["maps"], lists = _describe_lists(inputs.solved.live, args)
    zeroed = (grads["key_bias"],) if "key_bias" in grads else ()
    programs = programs_of(k, config.block_n) * parts
    return [*of_bias, *before, *lists, Launch(flash_dkdv, programs, args, config, zeroed)]


def _describe_dbias(inputs: BackwardInputs, dkdv: dict[str, Any], dbias: Tensor) -> Launch:
    """The launch that fills dbias. ``dkdv``: the arguments of `flash_dkdv`."""
    q, k, v, do, arch = inputs.q, inputs.k, inputs.v, inputs.do, inputs.arch
    config = flash.config_of(
        "dbias", arch, q, v, inputs.layout, inputs.rule, inputs.vectors, inputs.terms, None,
        inputs.dropout,
    )  # fmt: skip
    tile = flash.tile_constants(config, q, v, inputs.layout, TRANSPOSED=True)
    b, h, queries, keys = dbias.shape
    args = {name: dkdv[name] for name in flash_dbias.arg_names if name in dkdv} | {
        **descriptors(config, arch, q=q, k=k, v=v, do=do),
        **dict(zip(("dbias_b", "dbias_h", "dbias_m"), dbias.stride())),
        "dbias": dbias, "visible": dkdv["visible"]._replace(ranges=None), "tile": tile,
        "batches": q.shape[0] if b == 1 else 1, "sharing": q.shape[1] if h == 1 else 1,
    }  # fmt: skip
    programs = b * h * triton.cdiv(queries, config.block_m) * triton.cdiv(keys, config.block_n)
    return Launch(flash_dbias, programs, args, config)


def _with_addresses(config: Config, mapped: bool) -> Config:
    """The tile of dQ if the gradient of each score has an address, which needs two registers.

    Blocks of keys are those of a block map.
    """
    if mapped:
        return config._replace(warps=8, part=64)
    return config._replace(block_n=min(32, config.block_n))


def _slopes(rule: Rule, grads: Collection[str]) -> dict[str, Any]:
    """The functions for the slopes that the wanted gradients need."""
    slopes: dict[str, Any] = {}
    if "shape" in grads:
        path = rule.activation.triton_shape_slope
        slopes["SHAPE_SLOPE"] = launch.function("Activation.triton_shape_slope", path)
    if "decay" in grads and rule.distance is not None:
        path = rule.distance.triton_slope
        slopes["DISTANCE_SLOPE"] = launch.function("Distance.triton_slope", path)
    return slopes


def _mean_source(rule: Rule, q: Tensor) -> str | None:
    """How the kernel computes δ, see `backward_q`."""
    if rule.normalize == "threshold":
        return "slopes"
    # The forward rounds φ to 16 bits for φ·v. dO·o then has an error of 2⁻⁹ dO·v, and dS divides it
    # by Z. That is as small as φ is, except in a softmax, where the largest φ is 1.
    if rule.normalize == "sum" and not rule.online and q.element_size() == 2:
        return "weights"
    return None if rule.normalize == "none" else "output"


def _describe_lists(live: Tensor | None, dkdv: dict[str, Any]) -> tuple[Maps, list[Launch]]:
    """Return the block map per tile of keys, and a list with the launch that fills the map.

    The list is empty if there is no map. ``dkdv``: the arguments of `flash_dkdv`.
    """
    if live is None:
        return Maps(), []
    tile = dkdv["tile"]
    heads, tiles_m, tiles_n = live.shape
    group = dkdv["group"]
    blocks = live.new_empty(heads // group, tiles_n, group * tiles_m, dtype=torch.int32)
    counts = live.new_empty(heads // group, tiles_n, 2, dtype=torch.int32)
    args = {name: dkdv[name] for name in "group queries keys left right".split()} | {
        "live": live, "blocks": blocks, "counts": counts, "CHUNK": 256, "MAP_M": tile.MAP_M.value,
        "MAP_N": tile.MAP_N.value, "SPLIT": tile.SPLIT.value,
        "HAS_MASK": dkdv["visible"].mask is not None,
    }  # fmt: skip
    programs = heads // group * tiles_n
    return Maps(blocks, counts), [Launch(list_queries, programs, args, Config(1, 256, 4, 1))]
