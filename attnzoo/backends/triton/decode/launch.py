"""Builds the launches of the kernels of `decode`; see `common.launch`.

``processors`` is the number of multiprocessors of the GPU. The keys are split so that each
multiprocessor has work. The number of splits affects only the order of summation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.groups import Partials, Rule, Saved, Tile, constants
from attnzoo.backends.triton.common.kernel_operands import (
    Extras,
    Form,
    is_peaked,
    like,
    new_vector,
)
from attnzoo.backends.triton.common.launch import (
    PER_PROCESSOR,
    Launch,
    align_of,
    common,
    is_safe,
    row_launch,
    rule_of,
    score_terms,
    strides,
    tile_of,
)
from attnzoo.backends.triton.common.measured import tile_of_kernel
from attnzoo.backends.triton.common.merge import MOST_SPLITS, merge_launch, without_merge
from attnzoo.backends.triton.common.tiles import Config
from attnzoo.backends.triton.decode import kernels
from attnzoo.backends.triton.flash.segments import ranges_of

# Fewest keys per split. A split with fewer keys costs more time than it saves.
LEAST_KEYS = 256
# Unit of `key_range`, in keys. The unit must not depend on the kernel's block size, because fake
# functions need the sizes of results without a device.
KEYS = 128
# Scores per iteration of the threshold kernel.
SCORES = 2048


class Splits(NamedTuple):
    """The blocks of keys [first, last), split among ``number`` programs of ``span`` blocks each."""

    first: int
    last: int
    span: int
    number: int


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


def _splits(q: Tensor, k: Tensor, layout: Layout, config: Config, processors: int) -> Splits:
    unit = KEYS // config.block_n
    first, last = (unit * x for x in key_range(q, k, layout))
    blocks, keys = last - first, k.shape[2] - first * config.block_n
    wanted = triton.cdiv(PER_PROCESSOR * processors, max(1, q.shape[0] * k.shape[1]))
    wanted = max(1, min(wanted, MOST_SPLITS.value, keys // LEAST_KEYS))
    span = max(1, triton.cdiv(blocks, wanted))
    return Splits(first, last, span, max(1, triton.cdiv(blocks, span)))


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, form: Form | None, vectors: Vectors,
    extras: Extras, arch: int, processors: int,
) -> tuple[dict[str, Any], Config, Splits, list[Launch]]:  # fmt: skip
    """Return the arguments and configuration of kernels with a loop over keys, and the splits.

    The launches, if any, must run before.
    """
    dim, bits = max(q.shape[3], v.shape[3]), 8 * q.element_size()
    block_m = max(16, triton.next_power_of_2(_rows(q, k)))
    per_head = layout.mask is not None and layout.mask.shape[1] > 1
    many_rows = block_m * q.element_size() > 64
    safe = per_head or many_rows or is_safe("decode", q, k, v, layout, form, vectors, extras)
    config = tile_of_kernel("decode", arch, bits, dim, safe, q.device)._replace(block_m=block_m)
    splits = _splits(q, k, layout, config, processors)
    # One tile holds all queries.
    ranges, before = ranges_of(layout, triton.next_power_of_2(max(1, q.shape[2])), arch)
    args = {
        **common(q, k, layout, ranges, 1), "terms": score_terms(layout, extras),
        "first": splits.first, "last": splits.last, "span": splits.span,
        "splits": splits.number, "width": (splits.last - splits.first) * config.block_n,
    }  # fmt: skip
    if layout.mask is not None and layout.mask.shape[1] == 1:
        args["mask_h"] = None
    return args, config, splits, before


def _partial(q: Tensor, k: Tensor, splits: Splits, *dim: int) -> Tensor:
    shape = q.shape[0], k.shape[1], splits.number, _rows(q, k), *dim
    return q.new_empty(shape, dtype=torch.float32)


def _programs(q: Tensor, k: Tensor, splits: Splits) -> int:
    return q.shape[0] * k.shape[1] * splits.number if q.numel() else 0


def _products_pass(
    q: Tensor, k: Tensor, gain: Tensor | None, extras: Extras, rule: Rule, layout: Layout,
    arch: int, processors: int, statistics: tuple[Tensor, Tensor] | None,
) -> tuple[list[Launch], dict[str, Any], Tensor]:  # fmt: skip
    """Return the launches that compute q kᵀ, their arguments, and the tensor for q kᵀ.

    With one split, the last launch writes the ``statistics`` lse and entropy, if wanted.
    """
    args, config, splits, before = _arguments(
        q, k, k, layout, None, Vectors(gain), extras, arch, processors
    )
    align, products = align_of(q, k), new_products(q, k, layout)
    lse = entropy = None
    if statistics is not None and splits.number == 1:
        partials, (lse, entropy) = Partials(), statistics
    else:
        z, t = (None if statistics is None else _partial(q, k, splits) for _ in range(2))
        partials = Partials(None, _partial(q, k, splits), z, t)
    args |= {
        **strides(align, q=q, k=k), "products": products, "partials": partials,
        "lse": lse, "entropy": entropy, "vectors": Vectors(gain), "rule": rule,
        "tile": tile_of(config, q, ALIGN=align),
    }  # fmt: skip
    # Products of keys in other segments are not computed. The operator returns them as 0.
    zeroed = (products,) if before else ()
    launch = Launch(kernels.decode_products, _programs(q, k, splits), args, config, zeroed)
    return [*before, launch], args, products


def describe_statistics(
    q: Tensor, k: Tensor, layout: Layout, arch: int, processors: int
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """Return the launches and their results: products, lse and entropy of the logits."""
    rule, lse, entropy = constants(Rule, UNIT=1 / LN2.value), new_vector(q), new_vector(q)
    launches, args, products = _products_pass(
        q, k, None, Extras(), rule, layout, arch, processors, (lse, entropy)
    )
    if args["splits"] > 1:
        merge_args = {**args, "lse": lse, "entropy": entropy}
        launches.append(row_launch(kernels.decode_stats, merge_args, q))
    return launches, (products, lse, entropy)


def describe_threshold(
    q: Tensor, k: Tensor, layout: Layout, form: Form, vectors: Vectors, extras: Extras,
    alpha: float | None, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the launches, the products, the peak and τ.

    Only gain and shape of ``vectors`` are read.
    """
    extras = extras._replace(factor=None, peak=None)
    rule = constants(Rule, UNIT=1.0, DISTANCE=form.distance_act)
    walk, args, products = _products_pass(
        q, k, vectors.gain, extras, rule, layout, arch, processors, None
    )
    peak, tau = new_vector(q), new_vector(q)
    args = {
        **args, "candidates": torch.empty_like(products), "peak": peak, "tau": tau,
        "vectors": Vectors(vectors.gain, shape=vectors.shape),
        "rule": constants(Rule, ACT=form.act, UNIT=1.0, DISTANCE=form.distance_act, ALPHA=alpha),
        "tile": Tile(BLOCK_N=args["tile"].BLOCK_N, PRECISION=args["tile"].PRECISION),
        "BLOCK": 256 if arch == 0 else SCORES,
    }  # fmt: skip
    return [*walk, row_launch(kernels.decode_threshold, args, q)], (products, peak, tau)


def describe_decode(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, layout: Layout, form: Form,
    vectors: Vectors, extras: Extras, want_lse: bool, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Return the launches and their results: out and lse."""
    out, lse = like(q, v.shape[3]), new_vector(q) if want_lse else None
    args, config, splits, before = _arguments(
        q, k, v, layout, form, vectors, extras, arch, processors
    )
    online, sums = form.normalize == "online", form.normalize in ("sum", "threshold")
    align = align_of(q, k, v, out)
    args |= {
        **strides(align, q=q, k=k, v=v, o=out), "v": v, "products": products, "vectors": vectors,
        "o": out, "saved": Saved(lse=lse), "partials": Partials(), "eps": form.eps or None,
        "rule": rule_of(form, is_peaked(form, v)), "tile": tile_of(config, q, v, ALIGN=align),
    }  # fmt: skip
    if products is not None:
        args |= {"q": None, "k": None}
    programs = _programs(q, k, splits)
    if splits.number == 1:
        return [*before, Launch(kernels.decode, programs, args, config)], (out, lse)
    partials = Partials(
        _partial(q, k, splits, v.shape[3]),
        _partial(q, k, splits) if online or form.shifted else None,
        _partial(q, k, splits) if online or sums else None,
    )
    walk = {**without_merge(args), "o": None, "partials": partials}
    merge = merge_launch(args, partials, q, splits.number, args["group"])
    return [*before, Launch(kernels.decode, programs, walk, config), merge], (out, lse)
