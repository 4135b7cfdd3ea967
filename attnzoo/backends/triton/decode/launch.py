"""Builds the launches of the kernels of `decode`; see `common.launch`.

``processors`` is the number of multiprocessors of the GPU. The keys are split so that each
multiprocessor has work. The number of splits affects only the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import launch, measured, prepared
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.groups import Partials, RuleConstants, Saved, Tile, constants
from attnzoo.backends.triton.common.kernel_operands import (
    UNSOLVED,
    Paged,
    Solved,
    like,
    new_vector,
    unit_of,
)
from attnzoo.backends.triton.common.launch import Launch
from attnzoo.backends.triton.common.merge import MOST_SPLITS, new_partial, split_keys
from attnzoo.backends.triton.decode import kernels
from attnzoo.backends.triton.flash.segments import ranges_of

# Fewest keys per split. A split with fewer keys costs more time than it saves.
LEAST_KEYS = 256
# Unit of `key_range`, in keys. The unit must not depend on the kernel's block size, because fake
# functions need the sizes of results without a device.
KEYS = 128
# Scores per iteration of the threshold kernel.
SCORES = 2048


def run(describe: Callable[..., Any], q: Tensor, *operands: Any) -> Any:
    """Run the launches that ``describe`` returns, and return its results."""
    machine = launch.architecture(q.device), launch.processors(q.device)
    return prepared.launch(describe, q, *operands, *machine)


def key_range(q: Tensor, keys: int, layout: Layout) -> tuple[int, int]:
    """Return the range [first, last) of keys that any query may see, in units of KEYS keys."""
    queries = q.shape[2]
    low = 0 if layout.left is None else max(0, keys - queries - layout.left)
    return low // KEYS, (keys + KEYS - 1) // KEYS


def new_products(q: Tensor, k: Tensor, paged: Paged, layout: Layout) -> Tensor:
    """Return an empty tensor for q kᵀ: fp32 (B, Hkv, queries × group, keys in `key_range`)."""
    first, last = key_range(q, paged.keys(k), layout)
    rows = q.shape[1] * q.shape[2] // max(1, k.shape[1])
    shape = q.shape[0], k.shape[1], rows, (last - first) * KEYS
    return q.new_empty(shape, dtype=torch.float32)


def _splits(
    q: Tensor, k: Tensor, paged: Paged, layout: Layout, block_n: int, processors: int
) -> dict[str, int]:
    """Return the blocks of keys [first, last), and the number of splits of ``span`` blocks each."""
    unit, keys = KEYS // block_n, paged.keys(k)
    first, last = (unit * x for x in key_range(q, keys, layout))
    blocks, keys = last - first, keys - first * block_n
    wanted = triton.cdiv(launch.PER_PROCESSOR * processors, max(1, q.shape[0] * k.shape[1]))
    wanted = max(1, min(wanted, MOST_SPLITS.value, keys // LEAST_KEYS))
    span = max(1, triton.cdiv(blocks, wanted))
    splits, width = max(1, triton.cdiv(blocks, span)), blocks * block_n
    return {"first": first, "last": last, "span": span, "splits": splits, "width": width}


def _walk(
    kernel: Any, q: Tensor, k: Tensor, paged: Paged, layout: Layout, rule: Rule | None,
    vectors: Vectors, terms: Terms, rule_constants: RuleConstants, arch: int, processors: int,
    solved: Solved = UNSOLVED, **operands: Any,
) -> list[Launch]:  # fmt: skip
    """Return launches of which the last is that of a kernel with a loop over keys.

    ``operands``: the other arguments of the kernel, with v and o if it reads values.
    """
    tensors = {"q": q, "k": k, **{name: operands[name] for name in "vo" if name in operands}}
    v = operands.get("v")
    # One tile holds all queries.
    ranges, before = ranges_of(layout, triton.next_power_of_2(max(1, q.shape[2])), arch)
    args = {
        **launch.arguments_of(q, k, layout, rule_constants, vectors, terms, ranges, solved, 1),
        **launch.strides(unit_of(q), **tensors), "partials": Partials(), "blocks": None,
        **operands,
    }  # fmt: skip
    if paged.table is not None:
        args["visible"] = args["visible"]._replace(table=paged.table, used=paged.used)
        args |= {"keys": paged.longest, "blocks": paged.table.shape[1]}
    block_m = max(16, triton.next_power_of_2(args["group"] * args["queries"]))
    shared_mask = layout.mask is None or layout.mask.shape[1] == 1
    if shared_mask:
        args["mask_h"] = None
    values = k if v is None else v
    safe = not shared_mask or block_m * q.element_size() > 64
    safe |= launch.is_safe("decode", values, layout, rule, vectors, terms)
    dim, bits = max(q.shape[3], values.shape[3]), 8 * q.element_size()
    config = measured.tile_of_kernel("decode", arch, bits, dim, safe, q.device)
    config = config._replace(block_m=block_m)
    args.update(_splits(q, k, paged, layout, config.block_n, processors))
    pages = {} if paged.table is None else {"PAGE": k.shape[2]}
    args["tile"] = launch.tile_of(config, q, v, **pages)
    programs = q.shape[0] * k.shape[1] * args["splits"] if q.numel() else 0
    # Products of keys in other segments, or in no page, are not computed, and stay 0.
    skips = v is None and (ranges is not None or paged.table is not None)
    zeroed = (args["products"],) if skips else ()
    return [*before, Launch(kernel, programs, args, config, zeroed)]


def describe_statistics(
    q: Tensor, k: Tensor, paged: Paged, layout: Layout, arch: int, processors: int
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """Return the launches and their results: products, lse and entropy of the logits."""
    products, lse, entropy = new_products(q, k, paged, layout), new_vector(q), new_vector(q)
    rule = constants(RuleConstants, UNIT=1 / LN2.value)
    launches = _walk(
        kernels.decode_products, q, k, paged, layout, None, Vectors(), Terms(), rule, arch,
        processors, products=products, lse=lse, entropy=entropy,
    )  # fmt: skip
    args = launches[-1].args
    if (splits := args["splits"]) > 1:
        m, z, t = (new_partial(q, k.shape[1], splits) for _ in range(3))
        args["partials"] = Partials(None, m, z, t)
        launches.append(launch.row_launch(kernels.decode_stats, dict(args), q))
        args.update(lse=None, entropy=None)
    return launches, (products, lse, entropy)


def _describe_threshold(
    q: Tensor, k: Tensor, paged: Paged, layout: Layout, rule: Rule, vectors: Vectors, terms: Terms,
    arch: int, processors: int,
) -> tuple[list[Launch], Tensor, Solved]:  # fmt: skip
    """Return the launches, the products, and τ with its peak."""
    products, solved = new_products(q, k, paged, layout), Solved(new_vector(q), new_vector(q))
    scores = {"UNIT": 1.0, "DISTANCE": launch.distance_of(rule)}
    scored = vectors._replace(shape=None)  # by which scores do not change
    launches = _walk(
        kernels.decode_products, q, k, paged, layout, None, scored, terms,
        constants(RuleConstants, **scores), arch, processors, products=products, lse=None,
        entropy=None,
    )  # fmt: skip
    args = launches[-1].args
    args["partials"] = Partials(m=new_partial(q, k.shape[1], args["splits"]))
    act = launch.function("Activation.triton", rule.activation.triton)
    solver = {
        **args, "candidates": torch.empty_like(products), "solved": solved, "vectors": vectors,
        "rule": args["rule"]._replace(**constants(dict, ACT=act, ALPHA=launch.alpha_of(rule))),
        "tile": Tile(BLOCK_N=args["tile"].BLOCK_N, PRECISION=args["tile"].PRECISION),
        "BLOCK": 256 if arch == 0 else SCORES,
    }  # fmt: skip
    launches.append(launch.row_launch(kernels.decode_threshold, solver, q))
    return launches, products, solved


def describe_decode(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, paged: Paged, layout: Layout,
    rule: Rule, vectors: Vectors, terms: Terms, want_lse: bool, arch: int, processors: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Return the launches and their results: out and lse."""
    launches: list[Launch] = []
    solved = UNSOLVED
    if rule.normalize == "threshold":
        launches, products, solved = _describe_threshold(
            q, k, paged, layout, rule, vectors, terms, arch, processors
        )
    out, lse = like(q, v.shape[3]), new_vector(q) if want_lse else None
    *before, walk = _walk(
        kernels.decode, q, k, paged, layout, rule, vectors, terms, launch.constants_of(rule, v),
        arch, processors, solved, v=v, o=out, products=products, saved=Saved(lse=lse),
        eps=rule.eps or None,
    )  # fmt: skip
    if products is not None:
        walk.args.update(q=None, k=None)
    splits = walk.args["splits"]
    walks = [walk] if splits == 1 else split_keys(walk, q, v, splits, groups=k.shape[1])
    return [*launches, *before, *walks], (out, lse)
