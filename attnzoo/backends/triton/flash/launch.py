# ruff: noqa: F403, F405
"""Launches of the kernels of `flash`, as data; see `attnzoo.backends.triton.common.launch`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnzoo.backends.triton.common.configurations import Config, map_tile, pick
from attnzoo.backends.triton.common.launch import *
from attnzoo.backends.triton.flash.backward import flash_dkdv, flash_dq
from attnzoo.backends.triton.flash.forward import flash_forward
from attnzoo.backends.triton.flash.statistics import row_stats
from attnzoo.backends.triton.flash.threshold import list_columns, threshold


def stands_apart(normalize: str, mask: Tensor | None) -> bool:
    """Whether a softmax saves its maximum m and its sum Z as two rows, not as m + log Z.

    A float mask may move all of a row by −1e9, beside which log Z has no digit.
    """
    return normalize == "online" and mask is not None and mask.is_floating_point()


def _config(
    kernel: str,
    arch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: Facts,
    mapped: bool,
    align: int,
    *vectors: Tensor | None,
) -> Config:
    """The row of the table, by what there is beside the plain loop; see `configurations`.

    ``vectors``: those that few forms have.
    """
    extras, dims = count_extras(facts), (q.shape[3], v.shape[3])
    several = dense_mask(facts) or extras > 1 or any(x is not None for x in vectors)
    if align == 1:
        beside = "unaligned"
    elif several or (mapped and _small_tiles(q, k, v, facts)):
        beside = "several"
    elif mapped:
        beside = "listed"
    else:
        filled = any(padded(dim) > dim for dim in dims)
        beside = "one" if extras else "filled" if filled else ""
    config = pick(kernel, arch, 8 * q.element_size(), max(dims), beside)
    split = not extras and beside not in ("several", "unaligned")
    config = config._replace(split=split)
    if not mapped:
        return config
    map_m, map_n = _map_tile(q, k, v, facts)
    block_n = min(map_n, config.block_n) if kernel == "dkdv" else map_n
    return config._replace(block_m=min(map_m, config.block_m), block_n=block_n)


def _small_tiles(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
    return count_extras(facts) > 0 or align_of(q, k, v) == 1


def _map_tile(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[int, int]:
    dim, small = max(q.shape[3], v.shape[3]), _small_tiles(q, k, v, facts)
    return map_tile(dim, 8 * q.element_size(), small)


def _programs(x: Tensor, block: int) -> int:
    return triton.cdiv(x.shape[2], block) * x.shape[0] * x.shape[1]


def describe_forward(
    q: Tensor, k: Tensor, v: Tensor, facts: Facts, form: Form, rows: dict[str, Tensor | None],
    blocks: tuple[Tensor, Tensor] | None, want_lse: bool, arch: int,
) -> tuple[Launch, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """rows: gain, tau, shape and sink. Returns out, the statistic of `flash_forward`, and lse."""
    out = like(q, v.shape[3])
    apart = stands_apart(form.normalize, facts.mask)
    stat, lse = new_row(q, form.normalize != "none", apart), new_row(q, want_lse)
    align = align_of(q, k, v, out)
    peaked = form.normalize == "sum" and v.dtype == torch.float16
    extra = align, rows["shape"], q if peaked else None
    config = _config("forward", arch, q, k, v, facts, blocks is not None, *extra)
    args = {
        **common(q, k, facts), **strides(align, q=q, k=k, v=v, o=out), **values(v),
        **blocks_of(config), **rows, "q": q, "k": k, "v": v, "o": out,
        "stat": stat[0] if apart else stat, "mass": stat[1] if apart else None,
        "lse": lse if want_lse else None,
        "blocks": blocks and blocks[0], "counts": blocks and blocks[1],
        "ACT": form.act, "UNIT": form.unit, "VANISHES": form.vanishes,
        "ONLINE": form.normalize == "online", "SUM": form.normalize in ("sum", "threshold"),
        "PEAKED": peaked,
        "SPLIT": config.split, "MAP_M": _map_tile(q, k, v, facts)[0], "ALIGN": align,
    }  # fmt: skip
    launch = Launch(flash_forward, _programs(q, config.block_m), args, config)
    return launch, (out, stat, lse)


def describe_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    stat: Tensor, lse: Tensor, facts: Facts, form: Form, rows: dict[str, Tensor | None],
    maps: tuple[Tensor, Tensor, Tensor] | None, wanted: dict[str, bool], arch: int,
) -> tuple[list[Launch], tuple[Tensor, ...]]:  # fmt: skip
    """rows: gain, tau, shape and sink. Returns dq, dk, dv and the rows that are wanted or empty."""
    made = {"dq": like(q, q.shape[3]), "dk": like(k, k.shape[3]), "dv": like(v, v.shape[3])}
    made |= {name: new_row(q, wants) for name, wants in wanted.items()}
    online, apart = form.normalize == "online", stands_apart(form.normalize, facts.mask)
    z = stat if form.normalize in ("sum", "threshold") else None
    shared = {
        **common(q, k, facts), **values(v),
        "q": q, "k": k, "v": v, "do": do, "gain": rows["gain"], "shape": rows["shape"],
        "tau": stat[0] if apart else stat if online else rows["tau"],
        "z": stat[1] if apart else z,
        "lse": None if dlse is None else lse, "dlse": dlse,
        "delta": None if form.normalize == "none" else new_row(q),
        "ACT": form.act, "UNIT": form.unit, "VANISHES": form.vanishes,
        "TAU_UNIT": 1.0 if online else form.unit,  # what the forward saved has the unit in it
    }  # fmt: skip
    align = align_of(q, k, v, out, do, made["dq"], made["dk"], made["dv"])
    extra = align, rows["shape"], dlse
    config = _config("dq", arch, q, k, v, facts, maps is not None, *extra)
    dq_args = {
        **shared, **blocks_of(config), "SPLIT": config.split, "ALIGN": align,
        "MAP_M": _map_tile(q, k, v, facts)[0],
        **strides(align, q=q, k=k, v=v, o=out, do=do, dq=made["dq"]), "o": out, "dq": made["dq"],
        **{name: made[name] if wants else None for name, wants in wanted.items()},
        "sink": rows["sink"],
        "SUM": form.normalize in ("sum", "online"), "THRESHOLD": form.normalize == "threshold",
        "blocks": maps and maps[0], "counts": maps and maps[1],
    }  # fmt: skip
    launches = [Launch(flash_dq, _programs(q, config.block_m), dq_args, config)]
    columns = None
    if maps is not None:
        columns, listing = _describe_columns(maps[2], shared["group"])
        launches.append(listing)
    config = _config("dkdv", arch, q, k, v, facts, maps is not None, *extra)
    dkdv_args = {
        **shared, **blocks_of(config), "ALIGN": align,
        **strides(align, q=q, k=k, v=v, do=do, dk=made["dk"], dv=made["dv"]),
        "dk": made["dk"], "dv": made["dv"],
        "blocks": columns and columns[0], "counts": columns and columns[1],
        **dict(zip(("MAP_M", "MAP_N"), _map_tile(q, k, v, facts))),
    }  # fmt: skip
    launches.append(Launch(flash_dkdv, _programs(k, config.block_n), dkdv_args, config))
    return launches, tuple(made.values())


def _describe_columns(live: Tensor, group: int) -> tuple[tuple[Tensor, Tensor], Launch]:
    heads, tiles_m, tiles_n = live.shape
    blocks = live.new_empty(heads // group, tiles_n, group * tiles_m, dtype=torch.int32)
    counts = live.new_empty(heads // group, tiles_n, dtype=torch.int32)
    args = {
        "live": live, "blocks": blocks, "counts": counts,
        "group": group, "tiles_m": tiles_m, "tiles_n": tiles_n, "CHUNK": 256,
    }  # fmt: skip
    return (blocks, counts), Launch(list_columns, counts.numel(), args, Config(1, 256, 4, 1))


def describe_stats(
    q: Tensor, k: Tensor, facts: Facts, arch: int
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """lse and entropy of the un-gained scores, as rows."""
    align = align_of(q, k)
    config = _config("stats", arch, q, k, q, facts, False, align)
    lse, entropy = new_row(q), new_row(q)
    args = {
        **common(q, k, facts), **strides(align, q=q, k=k), **blocks_of(config),
        "q": q, "k": k, "lse": lse, "entropy": entropy, "SPLIT": config.split, "ALIGN": align,
    }  # fmt: skip
    launch = Launch(row_stats, _programs(q, config.block_m), args, config)
    return launch, (lse, entropy)


def empty_maps(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor, Tensor]:
    """blocks, counts and live of `threshold`."""
    block_m, block_n = _map_tile(q, k, v, facts)
    heads = q.shape[0] * q.shape[1]
    tiles = (q.shape[2] + block_m - 1) // block_m, (k.shape[2] + block_n - 1) // block_n
    blocks = q.new_empty(heads, *tiles, dtype=torch.int32)
    counts = q.new_empty(heads, tiles[0], dtype=torch.int32)
    return blocks, counts, q.new_zeros(heads, *tiles, dtype=torch.uint8)


def describe_threshold(
    q: Tensor, k: Tensor, v: Tensor, facts: Facts, form: Form, rows: dict[str, Tensor | None],
    alpha: float | None, arch: int,
) -> tuple[Launch, tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """rows: gain and shape. Returns τ and the maps."""
    align = align_of(q, k)
    config = _config("threshold", arch, q, k, v, facts, True, align)
    tau, maps = new_row(q), empty_maps(q, k, v, facts)
    # The kernel writes the map: its blocks are the map's tiles.
    assert (config.block_m, config.block_n) == _map_tile(q, k, v, facts)
    args = {
        **common(q, k, facts), **strides(align, q=q, k=k), **blocks_of(config), "q": q, "k": k,
        "tau": tau, "blocks": maps[0], "counts": maps[1], "live": maps[2],
        "gain": rows["gain"], "shape": rows["shape"], "ACT": form.act, "ALPHA": alpha,
        "ALIGN": align,
    }  # fmt: skip
    launch = Launch(threshold, _programs(q, config.block_m), args, config)
    return launch, (tau, *maps)
