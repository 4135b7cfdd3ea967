"""Builds the launches of the kernels of `decode`; see `common.launch`.

``processors`` is the number of multiprocessors of the GPU. The keys are split so that each
multiprocessor has work. The number of splits affects only the order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common import measured
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.groups import Partials, Rule, Saved, Tile, constants
from attnzoo.backends.triton.common.kernel_operands import Extras, Form, like, new_vector
from attnzoo.backends.triton.common.launch import (
    PER_PROCESSOR,
    Launch,
    align_of,
    arguments_of,
    is_safe,
    row_launch,
    rule_of,
    strides,
    tile_of,
)
from attnzoo.backends.triton.common.merge import MOST_SPLITS, merge_launch, without_merge
from attnzoo.backends.triton.decode import kernels
from attnzoo.backends.triton.flash.segments import ranges_of

# Fewest keys per split. A split with fewer keys costs more time than it saves.
LEAST_KEYS = 256
# Unit of `key_range`, in keys. The unit must not depend on the kernel's block size, because fake
# functions need the sizes of results without a device.
KEYS = 128
# Scores per iteration of the threshold kernel.
SCORES = 2048


def key_range(q: Tensor, k: Tensor, layout: Layout) -> tuple[int, int]:
    """Return the range [first, last) of keys that any query may see, in units of KEYS keys."""
    queries, keys = q.shape[2], k.shape[2]
    low = 0 if layout.left is None else max(0, keys - queries - layout.left)
    return low // KEYS, (keys + KEYS - 1) // KEYS


def new_products(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """Return an empty tensor for q kᵀ: fp32 (B, Hkv, queries × group, keys in `key_range`)."""
    first, last = key_range(q, k, layout)
    shape = q.shape[0], k.shape[1], _rows(q, k), (last - first) * KEYS
    return q.new_empty(shape, dtype=torch.float32)


def _rows(q: Tensor, k: Tensor) -> int:
    return q.shape[1] // max(1, k.shape[1]) * q.shape[2]


def _splits(q: Tensor, k: Tensor, layout: Layout, block_n: int, processors: int) -> dict[str, int]:
    """Return the blocks of keys [first, last), and the number of splits of ``span`` blocks each."""
    unit = KEYS // block_n
    first, last = (unit * x for x in key_range(q, k, layout))
    blocks, keys = last - first, k.shape[2] - first * block_n
    wanted = triton.cdiv(PER_PROCESSOR * processors, max(1, q.shape[0] * k.shape[1]))
    wanted = max(1, min(wanted, MOST_SPLITS.value, keys // LEAST_KEYS))
    span = max(1, triton.cdiv(blocks, wanted))
    splits = max(1, triton.cdiv(blocks, span))
    return {"first": first, "last": last, "span": span, "splits": splits}


def _walk(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor | None, layout: Layout,
    form: Form | None, vectors: Vectors, extras: Extras, arch: int, processors: int,
    **operands: Any,
) -> list[Launch]:  # fmt: skip
    """Return launches of which the last is that of a kernel with a loop over keys."""
    tensors = {name: x for name, x in zip("qkvo", (q, k, v, out)) if x is not None}
    align, values = align_of(*tensors.values()), k if v is None else v
    dim, bits = max(q.shape[3], values.shape[3]), 8 * q.element_size()
    block_m = max(16, triton.next_power_of_2(_rows(q, k)))
    per_head = layout.mask is not None and layout.mask.shape[1] > 1
    many_rows = block_m * q.element_size() > 64
    safe = per_head or many_rows
    safe |= is_safe("decode", values, align, layout, form, vectors, extras)
    config = measured.tile_of_kernel("decode", arch, bits, dim, safe, q.device)
    config = config._replace(block_m=block_m)
    splits = _splits(q, k, layout, config.block_n, processors)
    # One tile holds all queries.
    ranges, before = ranges_of(layout, triton.next_power_of_2(max(1, q.shape[2])), arch)
    args = {
        **arguments_of(q, k, layout, extras, vectors, ranges, 1), **tensors,
        **strides(align, **tensors), "tile": tile_of(config, q, v, ALIGN=align),
        **splits, "width": (splits["last"] - splits["first"]) * config.block_n,
        "partials": Partials(), **operands,
    }  # fmt: skip
    if layout.mask is not None and layout.mask.shape[1] == 1:
        args["mask_h"] = None
    programs = q.shape[0] * k.shape[1] * splits["splits"] if q.numel() else 0
    return [*before, Launch(kernel, programs, args, config)]


def _products_walk(
    q: Tensor, k: Tensor, layout: Layout, extras: Extras, arch: int, processors: int,
    gain: Tensor | None, rule: Rule,
) -> list[Launch]:  # fmt: skip
    """Return launches of which the last computes q kᵀ. Its other results are set by the caller."""
    products = new_products(q, k, layout)
    *before, walk = _walk(
        kernels.decode_products, q, k, None, None, layout, None, Vectors(gain), extras, arch,
        processors, products=products, lse=None, entropy=None, rule=rule,
    )  # fmt: skip
    # Products of keys in other segments are not computed, and stay 0.
    return [*before, walk._replace(zeroed=(products,) if before else ())]


def _partial(q: Tensor, k: Tensor, walk: Launch, *dim: int) -> Tensor:
    """Return an empty tensor for a field of `Partials`."""
    shape = q.shape[0], k.shape[1], walk.args["splits"], _rows(q, k), *dim
    return q.new_empty(shape, dtype=torch.float32)


def describe_statistics(
    q: Tensor, k: Tensor, layout: Layout, arch: int, processors: int
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """Return the launches and their results: products, lse and entropy of the logits."""
    rule, lse, entropy = constants(Rule, UNIT=1 / LN2.value), new_vector(q), new_vector(q)
    *launches, walk = _products_walk(q, k, layout, Extras(), arch, processors, None, rule)
    args = {**walk.args, "lse": lse, "entropy": entropy}
    if args["splits"] == 1:
        launches.append(walk._replace(args=args))
    else:
        m, z, t = (_partial(q, k, walk) for _ in range(3))
        partials = Partials(None, m, z, t)
        launches.append(walk._replace(args={**walk.args, "partials": partials}))
        launches.append(row_launch(kernels.decode_stats, {**args, "partials": partials}, q))
    return launches, (args["products"], lse, entropy)


def _describe_threshold(
    q: Tensor, k: Tensor, layout: Layout, form: Form, alpha: float | None, vectors: Vectors,
    extras: Extras, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the launches and their results: products, τ and the peak that it is relative to."""
    rule = constants(Rule, UNIT=1.0, DISTANCE=form.distance_act)
    extras = extras._replace(factor=None, peak=None)
    *before, walk = _products_walk(q, k, layout, extras, arch, processors, vectors.gain, rule)
    walk.args["partials"] = Partials(m=_partial(q, k, walk))
    products, tau, peak = walk.args["products"], new_vector(q), new_vector(q)
    tile = walk.args["tile"]
    args = {
        **walk.args, "candidates": torch.empty_like(products), "peak": peak, "tau": tau,
        "vectors": Vectors(vectors.gain, shape=vectors.shape),
        "rule": constants(Rule, ACT=form.act, UNIT=1.0, DISTANCE=form.distance_act, ALPHA=alpha),
        "tile": Tile(BLOCK_N=tile.BLOCK_N, PRECISION=tile.PRECISION),
        "BLOCK": 256 if arch == 0 else SCORES,
    }  # fmt: skip
    solver = row_launch(kernels.decode_threshold, args, q)
    return [*before, walk, solver], (products, tau, peak)


def describe_decode(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, layout: Layout, form: Form,
    alpha: float | None, vectors: Vectors, extras: Extras, want_lse: bool, arch: int,
    processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Return the launches and their results: out and lse."""
    launches: list[Launch] = []
    if form.normalize == "threshold":
        launches, (products, tau, peak) = _describe_threshold(
            q, k, layout, form, alpha, vectors, extras, arch, processors
        )
        vectors, extras = vectors._replace(offset=tau), extras._replace(peak=peak)
    out, lse = like(q, v.shape[3]), new_vector(q) if want_lse else None
    rule = rule_of(form, v)
    *before, walk = _walk(
        kernels.decode, q, k, v, out, layout, form, vectors, extras, arch, processors,
        products=products, saved=Saved(lse=lse), eps=form.eps or None, rule=rule,
    )  # fmt: skip
    launches += before
    if products is not None:
        walk.args.update(q=None, k=None)
    if walk.args["splits"] == 1:
        return [*launches, walk], (out, lse)
    online, sums = form.normalize == "online", form.normalize in ("sum", "threshold")
    partials = Partials(
        _partial(q, k, walk, v.shape[3]),
        _partial(q, k, walk) if online or form.shifted else None,
        _partial(q, k, walk) if online or sums else None,
    )
    merge = merge_launch(walk.args, partials, q, walk.args["splits"], walk.args["group"])
    args = {**without_merge(walk.args), "o": None, "partials": partials}
    return [*launches, walk._replace(args=args), merge], (out, lse)
