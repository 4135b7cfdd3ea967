"""Losses and gradients of an output layer, computed for a chunk of tokens at a time.

A chunk has the logits Z = h·Eᵀ + b. The gradient dZ of the logits gives dh = dZ·E, dE += dZᵀ·h and
db += Σ dZ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.core.call import score_dtype
from attnzoo.core.device import is_cpu
from attnzoo.losses.rules import LossRule, Options, Tokens

NAN = float("nan")
# On a CPU a chunk has up to CHUNK tokens, but at most 1/16 of all tokens, so that its logits take
# at most 1/16 of the memory of all logits. It may exceed both if it has at most SMALL logits.
CHUNK = 256
SMALL = 2**20
BLOCK = 2**17  # logits per elementwise block: 512 KiB in fp32 stay in the cache of a core
CLASSES = 512  # rows of E that are copied at a time
# On a GPU a chunk has up to LARGE logits, 512 MiB in fp32, but at least CHUNK tokens. Each chunk
# reads and writes the gradient of E, which takes longer than its products if the chunk is small.
# A chunk is one block. Its loss holds one to five tensors in the shape of its logits.
LARGE = 2**27
TILE = 128  # tokens per tile of a product; a chunk has whole tiles
COPIED = 2**26  # numbers of E that are copied at a time


class Layer(NamedTuple):
    """An output layer, or logits, with the K classes of this process."""

    input: Tensor  # h [N, d]; without weight, the logits [N, K]
    weight: Tensor | None  # E [K, d]
    bias: Tensor | None  # b [K]
    class_mask: Tensor | None  # bool [1|N, K]


# Outputs with one entry per token, and their values at ignored tokens.
PER_TOKEN = {"loss": 0.0, "statistic": NAN, "power_sum": NAN, "target_score": NAN, "support": 0.0}


def losses(
    layer: Layer, tokens: Tokens, rule: LossRule, options: Options, wanted: list[str]
) -> dict[str, Tensor]:
    """The outputs of `PER_TOKEN`, and the ``wanted`` gradients of Σ factor · loss, by name.

    All are in the dtype of scores. Missing statistics are tensors of shape (0,). ``hidden`` of
    ``tokens`` is not read: `Layer.class_mask` has no copy for all tokens.
    """
    dtype, count, shard = score_dtype(layer.input), len(tokens.target), tokens.shard
    classes = layer.input.shape[1] if layer.weight is None else len(layer.weight)
    operands = {**layer._asdict(), **tokens.vectors._asdict()}
    shapes = {name: operands[name].shape for name in wanted}
    # Contiguous also if the operands are not, as `torch.compile` expects.
    result = {name: layer.input.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    for name, fill in PER_TOKEN.items():
        length = count if options.want_stats or name == "loss" else 0
        result[name] = layer.input.new_full((length,), fill, dtype=dtype)
    # All ranks must have the same chunks, because each chunk exchanges sums.
    size = chunk_size(count, shard.most(classes), layer.input.device)
    chunks = _chunks(tokens.target != options.ignore_index, size)
    usable = _usable_classes(layer) if "input" in wanted else None
    most = chunks[0][1] if chunks else 0
    logits = layer.input.new_empty((most, classes), dtype=dtype)
    # Each block of some of the classes exchanges sums, which costs more than a cache miss.
    step = max(1, BLOCK // max(classes, 1)) if is_cpu(logits.device) and not shard.group else most
    # Nothing in this loop may wait for a GPU.
    for part, length in chunks:
        z = chunk_logits(layer, part, logits[:length])
        chunk = tokens.rows(part)
        if (mask := layer.class_mask) is not None:
            chunk = chunk._replace(hidden=~(mask if len(mask) == 1 else mask[part]))
        by_name: dict[str, list[Tensor]] = {}
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            for name, values in rule(z[rows], chunk.rows(rows), wanted, options).items():
                by_name.setdefault(name, []).append(values)
        for name, blocks in by_name.items():
            result[name][part] = torch.cat(blocks).to(dtype)
        _propagate(layer, part, z, result, options.sparse, usable)
    if layer.weight is not None and "input" in wanted:
        result["input"] = shard.sum(result["input"])
    return result


def chunk_size(tokens: int, classes: int, device: torch.device) -> int:
    """The largest number of tokens per chunk."""
    if is_cpu(device):
        return max(1, min(CHUNK, tokens // 16), SMALL // max(classes, 1))
    return max(CHUNK, LARGE // max(classes, 1) // TILE * TILE)


def _chunks(counted: Tensor, size: int) -> list[tuple[slice | Tensor, int]]:
    """The tokens of each chunk without ignored ones, and their number.

    The host waits for the device here, once if no token is ignored, else twice.
    """
    tokens = counted.nonzero()[:, 0]
    starts = range(0, len(tokens), size)
    lengths = [min(size, len(tokens) - start) for start in starts]
    if len(tokens) == len(counted):
        return [(slice(start, start + n), n) for start, n in zip(starts, lengths)]
    parts = tokens.split(size) if len(tokens) else ()
    ends = torch.stack([x for part in parts for x in (part[0], part[-1])]).tolist() if parts else []
    return [
        # A slice avoids copies of the tokens.
        (slice(first, last + 1) if last - first + 1 == n else part, n)
        for part, n, first, last in zip(parts, lengths, ends[::2], ends[1::2])
    ]


def chunk_logits(layer: Layer, part: slice | Tensor, out: Tensor) -> Tensor:
    h, weight = layer.input[part], layer.weight
    if weight is None:
        return out.copy_(h)
    if weight.dtype == out.dtype:
        torch.mm(h, weight.T, out=out)
    elif has_mixed_products(weight):
        torch.mm(h, weight.T, out_dtype=out.dtype, out=out)
    else:
        h = h.to(out.dtype)
        for classes in _classes(weight):
            out[:, classes] = h @ weight[classes].to(out.dtype).T
    return out if layer.bias is None else out.add_(layer.bias)


def has_mixed_products(weight: Tensor) -> bool:
    """Whether products of 16-bit operands can be fp32."""
    return weight.is_cuda


def _usable_classes(layer: Layer) -> Tensor | None:
    """The visible classes, if rows of other classes are not finite. None: all may be read.

    A product with 0 would pass on NaN.
    """
    weight, mask = layer.weight, layer.class_mask
    if weight is None or mask is None or len(mask) != 1:
        return None
    finite = [(weight[c].isfinite().all(1) | mask[0, c]).all() for c in _classes(weight)]
    return None if bool(torch.stack(finite).all()) else mask[0].nonzero()[:, 0]


def _propagate(
    layer: Layer, part: slice | Tensor, dz: Tensor, gradients: dict[str, Tensor], sparse: bool,
    usable: Tensor | None,
) -> None:  # fmt: skip
    """``usable``: from `_usable_classes`."""
    weight = layer.weight
    if "bias" in gradients:
        gradients["bias"] += dz.sum(0)
    if weight is None:
        if "input" in gradients:
            gradients["input"][part] = dz
        return
    if not {"input", "weight"} & gradients.keys():
        return
    # A GPU would have to tell the host which columns these are. It multiplies all instead.
    used = _nonzero_columns(dz) if sparse and is_cpu(dz.device) else usable
    if used is not None and (usable is not None or 2 * len(used) < len(weight)):
        _propagate_columns(layer, part, dz, gradients, used)
    elif weight.dtype != dz.dtype and has_mixed_products(weight):
        _propagate_on_tensor_cores(layer, part, dz.to(weight.dtype), gradients)
    else:
        _propagate_all(layer, part, dz, gradients)


def _propagate_all(
    layer: Layer, part: slice | Tensor, dz: Tensor, gradients: dict[str, Tensor]
) -> None:
    weight = layer.weight
    assert weight is not None
    if "weight" in gradients:
        h = layer.input[part].to(dz.dtype)
        gradients["weight"].addmm_(dz.T, h)
    if "input" in gradients and weight.dtype == dz.dtype:
        gradients["input"][part] = dz @ weight
    elif "input" in gradients:
        dh = dz.new_zeros(len(dz), weight.shape[1])
        for classes in _classes(weight):
            dh.addmm_(dz[:, classes], weight[classes].to(dz.dtype))
        gradients["input"][part] = dh


def _nonzero_columns(dz: Tensor) -> Tensor:
    """Indices of the classes whose column of dz contains a nonzero number or NaN."""
    # Unlike dz != 0, the reductions allocate no tensor in the shape of dz.
    return ((dz.amax(0) != 0) | (dz.amin(0) != 0)).nonzero()[:, 0]


def _propagate_columns(
    layer: Layer, part: slice | Tensor, dz: Tensor, gradients: dict[str, Tensor], used: Tensor
) -> None:
    """Like `_propagate_all`, but reads only the columns ``used`` of dz. The others must be 0."""
    weight, h = layer.weight, layer.input[part].to(dz.dtype)
    assert weight is not None
    dh = torch.zeros_like(h)
    for classes in used.split(_step(weight)):
        some = dz.index_select(1, classes)
        if "weight" in gradients:
            gradients["weight"].index_add_(0, classes, some.T @ h)
        if "input" in gradients:
            dh.addmm_(some, weight[classes].to(dz.dtype))
    if "input" in gradients:
        gradients["input"][part] = dh


def _propagate_on_tensor_cores(
    layer: Layer, part: slice | Tensor, dz: Tensor, gradients: dict[str, Tensor]
) -> None:
    """Like `_propagate_all`, but with 16-bit operands and fp32 sums."""
    assert layer.weight is not None
    for name, a, b in (("weight", dz.T, layer.input[part]), ("input", dz, layer.weight)):
        if name in gradients:
            product = torch.mm(a, b, out_dtype=gradients[name].dtype)
            if name == "weight":
                gradients[name] += product
            else:
                gradients[name][part] = product


def _classes(weight: Tensor) -> Iterator[slice]:
    step = _step(weight)
    for start in range(0, len(weight), step):
        yield slice(start, min(start + step, len(weight)))


def _step(weight: Tensor) -> int:
    """The number of rows of E that are copied at a time."""
    return CLASSES if is_cpu(weight.device) else max(CLASSES, COPIED // max(weight.shape[1], 1))
