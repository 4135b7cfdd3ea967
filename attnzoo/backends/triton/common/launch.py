"""Kernel launches as data: built from the tensors of a call, then run.

Building is separate from running, so that every launch can be compiled for any architecture without
a GPU. To do so, pass tensors on the device "meta" to the ``describe`` functions.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from attnzoo.backends.dropout import in_24_bits, keep_scale
from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common.groups import (
    RuleConstants,
    ScoreTerms,
    Tile,
    Visible,
    constants,
)
from attnzoo.backends.triton.common.kernel_operands import (
    UNSOLVED,
    Solved,
    adds_terms,
    has_aligned_rows,
    is_peaked,
    unit_of,
)
from attnzoo.backends.triton.common.tile import INTERPRETED
from attnzoo.backends.triton.common.tiles import ALL, Config

# Programs per multiprocessor, where a kernel's work can be split.
PER_PROCESSOR = 2
PARTIALS = 32  # partial results per iteration of `merge_splits`


class Launch(NamedTuple):
    kernel: Any
    programs: int
    args: dict[str, Any]
    config: Config
    zeroed: tuple[Tensor, ...] = ()  # the new tensors that must be 0 before the launch

    @property
    def options(self) -> dict[str, Any]:
        # enable_fp_fusion is set because Triton warns about its default, which will change.
        options = {"num_warps": self.config.warps, "num_stages": self.config.stages}
        return {**options, "enable_fp_fusion": True, "maxnreg": self.config.registers}


@cache
def architecture(device: torch.device) -> int:
    if INTERPRETED.value:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of the GPU."""
    if INTERPRETED.value:
        return 4  # so that short sequences are split among several programs
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(launch: Launch) -> Any:
    """Launch the kernel. Return the compiled kernel, or None in the interpreter."""
    for x in launch.zeroed:
        x.zero_()
    if launch.programs == 0:
        return None
    device = next(x.device for x in launch.args.values() if isinstance(x, Tensor))
    with on_device(device):
        return launch.kernel[(launch.programs,)](**launch.args, **launch.options)


def row_launch(kernel: Any, args: dict[str, Any], q: Tensor) -> Launch:
    """Return a launch with one program per (batch, head, query)."""
    kernel_args = {name: args[name] for name in kernel.arg_names}
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return Launch(kernel, rows, kernel_args, Config(1, 1, 4, 1, registers=ALL))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Select the device, because Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


# Architectures, divided by 10, whose kernels load tiles by TMA. 0 is the interpreter.
TMA = (0, 9, 10)


def descriptors(config: Config, arch: int, **tensors: Tensor) -> dict[str, Any]:
    """Return "name_descriptor" for each tensor: its TMA descriptor, or None for all of them.

    ``tensors``: those of q, k, v and do whose blocks a loop loads. With ``part``, tiles are loaded
    in parts, for which there is no descriptor. TMA for some tensors and pointers for others would
    need both kinds of barriers.
    """
    use = arch // 10 in TMA and config.part is None and all(map(fits_tma, tensors.values()))
    rows = {"k": config.block_n, "v": config.block_n, "q": config.block_m, "do": config.block_m}
    return {f"{n}_descriptor": descriptor(x, rows[n]) if use else None for n, x in tensors.items()}


def descriptor(x: Tensor, rows: int) -> TensorDescriptor | str:
    """For a meta tensor, return the descriptor's type, which is what a compilation needs."""
    # Columns beyond the tensor are loaded as 0, so the block may be padded.
    shape = [1, 1, rows, padded(x.shape[3])]
    if x.is_meta:
        return f"tensordesc<{'bf16' if x.dtype == torch.bfloat16 else 'fp16'}{shape}>"
    return TensorDescriptor(x, list(x.shape), [*_steps(x), 1], shape)


def fits_tma(x: Tensor) -> bool:
    """True if x has 16 bits per element, and a shape and strides that TMA can use."""
    return x.element_size() == 2 and x.numel() > 0 and all(s > 0 for s in _steps(x))


def _steps(x: Tensor) -> list[int]:
    """The strides of (B, H, N). Those of dimensions of size 1 are never used: any will do."""
    return [s if n > 1 else padded(x.shape[3]) for n, s in zip(x.shape[:3], x.stride())]


def strides(unit: int, **tensors: Tensor) -> dict[str, int]:
    """The strides of (B, H, N), in units of elements; 0 where a step is never taken."""
    steps = {
        f"{name}_{axis}": x.stride(n) if x.shape[n] > 1 and x.numel() else 0
        for name, x in tensors.items()
        for n, axis in enumerate("bhn")
    }
    assert not any(step % unit for step in steps.values()), f"strides must be aligned, got {steps}"
    return {name: step // unit for name, step in steps.items()}


def mask_align(mask: Tensor | None) -> int:
    """Return the number of entries in 16 bytes if the mask's strides allow wide loads, else 1."""
    if mask is None or mask.stride(3) != 1 or not has_aligned_rows(mask):
        return 1
    return unit_of(mask)


def arguments_of(
    q: Tensor, k: Tensor, layout: Layout, rule: RuleConstants, vectors: Vectors, terms: Terms,
    ranges: Tensor | None, solved: Solved = UNSOLVED, mask_unit: int | None = None,
    dropout: Dropout = NO_DROPOUT,
) -> dict[str, Any]:  # fmt: skip
    """The arguments shared by all kernels that read q and k. PLAIN and HIDES of ``rule`` are set.

    The strides of the mask are in units of ``mask_unit`` entries, by default of `mask_align`. In
    `decode`, which does not copy masks to align them, the unit is 1: otherwise a mask that grows
    with the keys would change the compiled kernel.
    """
    heads, kv_heads, mask = q.shape[1], k.shape[1], layout.mask
    b = h = m = n = None
    if mask is not None:
        unit = mask_align(mask) if mask_unit is None else mask_unit
        b, h, m, n = mask.stride()
        b, h, m = (s // unit if size > 1 else 0 for s, size in zip((b, h, m), mask.shape))
        m, n = None if mask.shape[2] == 1 else m, None if n == 1 else n
    plain = not adds_terms(layout, vectors, terms)
    hides = any(x is not None for x in (mask, layout.k_segments, terms.key_bias, solved.cut))
    inner = None if layout.softcap is None else layout.scale / layout.softcap
    slopes, table, radius = layout.relative_bias, None, None
    if slopes is not None and slopes.dim() == 2:
        slopes, table, radius = None, slopes, constexpr(slopes.shape[1] // 2)
    score_terms = ScoreTerms(
        outer_scale(layout), inner, slopes, table, radius, tau=solved.tau, peak=solved.peak,
        cut=solved.cut, last=solved.last, **terms._asdict(),
    )  # fmt: skip
    if dropout.seed is not None:
        score_terms = score_terms._replace(
            seed=dropout.seed, dropout_p=in_24_bits(dropout.dropout_p),
            keep_scale=keep_scale(dropout.dropout_p),
        )  # fmt: skip
    return {
        "q": q, "k": k, "heads": heads, "group": heads // kv_heads if kv_heads else 1,
        "queries": q.shape[2], "keys": k.shape[2], "left": layout.left, "right": layout.right,
        "visible": Visible(mask, layout.q_segments, layout.k_segments, ranges),
        "mask_b": b, "mask_h": h, "mask_m": m, "mask_n": n,
        "terms": score_terms, "vectors": vectors,
        "rule": rule._replace(
            SCORE_UNIT=rule.SCORE_UNIT or rule.UNIT, **constants(dict, PLAIN=plain, HIDES=hides)
        ),
    }  # fmt: skip


def outer_scale(layout: Layout) -> float:
    """The factor of q·k, or of tanh(inner · q·k) with a softcap."""
    return layout.scale if layout.softcap is None else layout.softcap


def constants_of(rule: Rule, values: Tensor, **others: Any) -> RuleConstants:
    phi = rule.activation
    return constants(
        RuleConstants, ACT=function("Activation.triton", phi.triton), UNIT=phi.unit,
        SCORE_UNIT=1.0 if rule.normalize == "select" else None, VANISHES=phi.vanishes,
        NORMALIZER=phi.normalizer is not None, SHIFTED=phi.shifted,
        PEAKED=is_peaked(rule, values), ONLINE=rule.online,
        SUM=rule.normalize in ("sum", "threshold") and not rule.online,
        DISTANCE=distance_of(rule), **others,
    )  # fmt: skip


def alpha_of(rule: Rule) -> float | None:
    """Return α as a number, or None if the per-query vector ``shape`` holds α."""
    alpha = rule.activation.alpha
    return None if isinstance(alpha, str) else alpha


def distance_of(rule: Rule) -> Any:
    return rule.distance and function("Distance.triton", rule.distance.triton)


def function(field: str, path: str | None) -> Any:
    """The Triton function at ``path``, "module:name", which the ``field`` of a class holds."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{field} must name a function as 'module:name', got {path!r}: {error}"
        ) from error


def tile_of(config: Config, q: Tensor, v: Tensor | None = None, **others: Any) -> Tile:
    """The constants of a tile for queries, and for values in kernels that read them."""
    sizes = {} if v is None else {"DV": v.shape[3], "BLOCK_DV": padded(v.shape[3])}
    # For fp32: a tf32 product has 11 bits, and "ieee" uses no tensor cores. "tf32x3" adds three
    # products of the high and low parts of both operands, which keeps fp32 accuracy.
    return constants(
        Tile, D=q.shape[3], BLOCK_D=padded(q.shape[3]), ALIGN=unit_of(q), BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, PART=config.part,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", **sizes, **others,
    )  # fmt: skip


def is_safe(
    kernel: str, v: Tensor, layout: Layout, rule: Rule | None, vectors: Vectors, terms: Terms,
    dropout: Dropout = NO_DROPOUT,
) -> bool:  # fmt: skip
    """Whether a kernel may need many registers, and so has the tile of the table SAFE.

    A window needs few registers. dK/dV accumulates two gradients, and has registers for no other
    term. The gradient of a mask has registers for the mask, and for no other term.
    """
    added = (
        layout.relative_bias, layout.k_segments, layout.mask, layout.softcap, terms.key_bias,
        dropout.seed,
    )  # fmt: skip
    number = sum(x is not None for x in added)
    if kernel == "dkdv" and rule is not None:
        phi = rule.activation
        # φ and φ' are both kept, and computed from an exponential.
        both = rule.normalize == "sum" and phi.unit != 1.0 and not phi.exponential
        if number or both or rule.normalize == "threshold":
            return True
    # An activation that varies with the query, or has several results per score
    varies = vectors.shape is not None or terms.factor is not None
    normalizer = rule is not None and rule.activation.normalizer is not None
    many_results = normalizer or (rule is not None and is_peaked(rule, v))
    # Entries with an address each
    dense = layout.mask is not None and layout.mask.shape[2] > 1 and kernel != "dbias"
    dense = dense or (layout.relative_bias is not None and layout.relative_bias.dim() == 2)
    return number > 1 or dense or terms.decay is not None or varies or many_results
