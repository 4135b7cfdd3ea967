"""Launches of the kernels of `decode`, as data; see `launch`.

``processors`` is how many a GPU has: the keys are split until there is work for all of them. A
result depends on the splits as on any order of summation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.configurations import ALL, Config, decode_config
from attnzoo.backends.triton.common.kernel_operands import Form, like, new_vector
from attnzoo.backends.triton.common.launch import (
    Launch,
    align_of,
    arguments,
    blocks_of,
    common,
    count_extras,
    dense_mask,
    interpreted,
    strides,
    values,
)
from attnzoo.backends.triton.decode import kernels

# A split is worth a program's start and its partial from here on.
LEAST_KEYS = 256
# Programs that a processor runs at once, at the least.
PER_PROCESSOR = 2
# The keys in reach are taken in such units, whatever a kernel's blocks: a tracer has to know.
KEYS = 128
# Scores that a program of the threshold takes at once.
SCORES = 2048
PARTIALS = 32


class Splits(NamedTuple):
    """Blocks of keys [first, last), ``span`` of them for each of ``number`` programs."""

    first: int
    last: int
    span: int
    number: int


def processors(device: torch.device) -> int:
    if interpreted():
        return 4  # so that short sequences have several splits
    return torch.cuda.get_device_properties(device).multi_processor_count


def reach(q: Tensor, k: Tensor, layout: Layout) -> tuple[int, int]:
    """The units of KEYS keys that some query may see: [first, last)."""
    queries, keys = q.shape[2], k.shape[2]
    low = 0 if layout.left is None else max(0, keys - queries - layout.left)
    return low // KEYS, (keys + KEYS - 1) // KEYS


def new_products(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """q kᵀ of the keys in reach: fp32 (B, Hkv, rows of a group, keys)."""
    first, last = reach(q, k, layout)
    shape = q.shape[0], k.shape[1], _rows(q, k), (last - first) * KEYS
    return q.new_empty(shape, dtype=torch.float32)


def _rows(q: Tensor, k: Tensor) -> int:
    return q.shape[1] // max(1, k.shape[1]) * q.shape[2]


def _splits(q: Tensor, k: Tensor, layout: Layout, config: Config, processors: int) -> Splits:
    unit = KEYS // config.block_n
    first, last = (unit * x for x in reach(q, k, layout))
    blocks = last - first
    wanted = triton.cdiv(PER_PROCESSOR * processors, max(1, q.shape[0] * k.shape[1]))
    wanted = max(1, min(wanted, kernels.MOST_SPLITS.value, blocks * config.block_n // LEAST_KEYS))
    span = max(1, triton.cdiv(blocks, wanted))
    return Splits(first, last, span, max(1, triton.cdiv(blocks, span)))


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, arch: int, processors: int
) -> tuple[dict[str, Any], Config, Splits]:
    """What all kernels that walk over keys take."""
    dim, block_m = max(q.shape[3], v.shape[3]), max(16, triton.next_power_of_2(_rows(q, k)))
    many = block_m * q.element_size() > 64
    apart = layout.mask is not None and layout.mask.shape[1] > 1  # an address for each row and key
    safe = many or apart or dense_mask(layout) or count_extras(layout) > 1 or align_of(q, k, v) == 1
    config = decode_config(arch, 8 * q.element_size(), dim, safe)._replace(block_m=block_m)
    splits = _splits(q, k, layout, config, processors)
    args = {
        **common(q, k, layout), "first": splits.first, "last": splits.last, "span": splits.span,
        "splits": splits.number, "width": (splits.last - splits.first) * config.block_n,
        **blocks_of(config),
    }  # fmt: skip
    if layout.mask is not None and layout.mask.shape[1] == 1:
        args["mask_h"] = None
    return args, config, splits


def _partial(q: Tensor, k: Tensor, splits: Splits, *dim: int) -> Tensor:
    shape = q.shape[0], k.shape[1], splits.number, _rows(q, k), *dim
    return q.new_empty(shape, dtype=torch.float32)


def _programs(q: Tensor, k: Tensor, splits: Splits) -> int:
    return q.shape[0] * k.shape[1] * splits.number if q.numel() else 0


def _row_launch(kernel: Any, args: dict[str, Any], q: Tensor) -> Launch:
    """One program for each row."""
    taken = {name: args[name] for name in kernel.arg_names}
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return Launch(kernel, rows, taken, Config(1, 1, 4, 1, registers=ALL))


def _described(
    q: Tensor, k: Tensor, gain: Tensor | None, unit: float, layout: Layout, arch: int,
    processors: int, stats: bool,
) -> tuple[Launch, dict[str, Any], Tensor]:  # fmt: skip
    """The pass that writes the products, what it takes and leaves, and the products."""
    args, config, splits = _arguments(q, k, q, layout, arch, processors)
    align, products = align_of(q, k), new_products(q, k, layout)
    args |= {
        **strides(align, q=q, k=k), "q": q, "k": k, "products": products,
        "m": _partial(q, k, splits), "z": _partial(q, k, splits) if stats else None,
        "t": _partial(q, k, splits) if stats else None,
        "gain": gain, "UNIT": unit, "ALIGN": align,
    }  # fmt: skip
    return Launch(kernels.decode_products, _programs(q, k, splits), args, config), args, products


def describe_statistics(
    q: Tensor, k: Tensor, layout: Layout, arch: int, processors: int
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """Products, lse and entropy of the scores without a gain."""
    unit = 1 / LN2.value
    walk, args, products = _described(q, k, None, unit, layout, arch, processors, True)
    lse, entropy = new_vector(q), new_vector(q)
    merge = _row_launch(kernels.decode_stats, {**args, "lse": lse, "entropy": entropy}, q)
    return [walk, merge], (products, lse, entropy)


def describe_threshold(
    q: Tensor, k: Tensor, layout: Layout, form: Form, vectors: Vectors,
    alpha: float | None, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:  # fmt: skip
    """Of the vectors gain and shape. Returns the products and τ."""
    walk, args, products = _described(q, k, vectors.gain, 1.0, layout, arch, processors, False)
    tau = new_vector(q)
    args = {
        **args, "few": torch.empty_like(products), "tau": tau, "shape": vectors.shape,
        "ACT": form.act, "ALPHA": alpha, "BLOCK": 256 if arch == 0 else SCORES,
    }  # fmt: skip
    return [walk, _row_launch(kernels.decode_threshold, args, q)], (products, tau)


def describe_decode(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, layout: Layout, form: Form,
    vectors: Vectors, want_lse: bool, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Returns out and lse."""
    args, config, splits = _arguments(q, k, v, layout, arch, processors)
    out, lse = like(q, v.shape[3]), new_vector(q) if want_lse else None
    online, sums = form.normalize == "online", form.normalize in ("sum", "threshold")
    align = align_of(q, k, v)
    args |= {
        **strides(align, q=q, k=k, v=v), **values(v), **strides(1, o=out),
        **arguments(vectors),
        "q": None if products is not None else q, "k": None if products is not None else k,
        "v": v, "products": products,
        "o": out, "lse": lse, "part": _partial(q, k, splits, v.shape[3]),
        "m": _partial(q, k, splits) if online else None,
        "z": _partial(q, k, splits) if online or sums else None,
        "ACT": form.act, "UNIT": form.unit, "VANISHES": form.vanishes, "ONLINE": online,
        "SUM": sums, "PEAKED": form.normalize == "sum" and v.dtype == torch.float16,
        "ALIGN": align, "CHUNK": PARTIALS,
    }  # fmt: skip
    taken = {name: args[name] for name in kernels.decode.arg_names}
    walk = Launch(kernels.decode, _programs(q, k, splits), taken, config)
    return [walk, _row_launch(kernels.decode_merge, args, q)], (out, lse)
