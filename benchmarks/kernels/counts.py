"""Counts what a kernel's loops execute per score element, from its machine code.

A tile loop computes one tile of scores per iteration. All figures are instructions of one thread,
divided by the number of score elements, as if all threads of a block executed each instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.kernels import sass
from benchmarks.kernels.compile import build, reason
from benchmarks.kernels.launches import describe
from benchmarks.kernels.rates import Prediction, blocks_per_processor, predict
from benchmarks.kernels.specializations import Specialization

# Products of a tile with head_dim columns per score element, and conversions of a tile to 16 bits.
# The kernels of linear forms compute no scores.
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4, "dbias": 2, "threshold": 1, "stats": 1}
CONVERTED = {"forward": 1, "dq": 1, "dkdv": 2}
# An iteration of a linear form's loop takes as many tokens as a chunk has (block_m). Chunks differ
# between kernels, so their instructions are also counted per this number of tokens.
TOKENS = 64
# Shorter loops only issue products or copies, for other warps.
SHORTEST = 40
# A loop of a pass has this many mask instructions more per element if it treats edges.
MASK_WORK = 0.5


@dataclass(frozen=True)
class LoopCount:
    """What one iteration of a tile loop executes.

    Attributes:
        name: "full" (no mask), "edge" (with mask), or "all" if all blocks take the same loop. In
            kernels with several passes it is preceded by the pass; see `passes_of`.
        instructions: number in the loop, per warp.
        total, classes, opcodes: instructions per score element; see `sass.CLASSES`.
        tensor_flops: of one iteration of a block of threads. None if the loop has none, or if the
            machine code does not show the size of an instruction.
        tensor_factor: tensor FLOPs issued, divided by those needed.
        element_factor: conversions to 16 bits, divided by those needed.
        barriers: number of barriers and fences in the loop.
        narrow_copies: asynchronous copies of less than 16 bytes.
        per_64_tokens: instructions per warp and TOKENS tokens, in kernels of linear forms. How many
            warps and features share the work is not part of the unit.
    """

    name: str
    instructions: int
    total: float
    classes: dict[str, float]
    opcodes: dict[str, float]
    tensor_flops: int | None
    tensor_factor: float | None
    element_factor: float | None
    barriers: int
    narrow_copies: int
    prediction: Prediction | None
    per_64_tokens: float | None = None

    def share(self, *opcodes: str) -> float:
        return sum(self.opcodes.get(name, 0.0) for name in opcodes)

    def record(self) -> dict[str, Any]:
        record = asdict(self)
        del record["prediction"]
        record["opcodes"] = {name: n for name, n in self.opcodes.items() if n >= 0.02}
        prediction = self.prediction
        return record | {"predicted": None if prediction is None else prediction._asdict()}


@dataclass(frozen=True)
class Profile:
    """A compiled kernel: its resources and its tile loops, by address."""

    spec: Specialization
    tile: tuple[int, int]
    warps: int
    stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    tensor_core: str | None
    copies: str
    loops: tuple[LoopCount, ...]
    cubin: bytes = field(repr=False, default=b"")

    @property
    def main(self) -> LoopCount | None:
        """The loop over full blocks, of the last pass if there are several."""
        full = [loop for loop in self.loops if loop.name.split()[-1] in ("full", "all")]
        # Loops with a mask are all named "all" if the edge adds little. The full one is shorter.
        last = [loop for loop in full if loop.name == full[-1].name]
        return min(last, key=lambda loop: loop.total, default=None)

    def record(self) -> dict[str, Any]:
        figures = (
            "tile", "warps", "stages", "registers", "stack_bytes", "shared_bytes",
            "blocks_per_sm", "tensor_core", "copies",
        )  # fmt: skip
        return {
            **self.spec._asdict(),
            **{name: getattr(self, name) for name in figures},
            "loops": [loop.record() for loop in self.loops],
        }


def profile(spec: Specialization) -> Profile | str:
    """The profile of a kernel, or the reason why it does not compile."""
    try:
        launch = describe(spec)
        done = build(spec, launch)
        usage, text = sass.disassembled(done.asm["cubin"])
    except Exception as error:  # compilers raise many types
        return reason(error)
    config, shared = launch.config, done.metadata.shared
    registers, stack = sass.resources(usage)
    columns = getattr(done.metadata, "tmem_size", 0) or 0
    tile = (config.block_m, config.block_n)
    head_dim = spec.head_dim
    if (constants := launch.args.get("tile")) is not None and constants.BLOCK_D is not None:
        head_dim = constants.BLOCK_D.value
    code = sass.instructions(text)
    names = {x.name for x in code}
    return Profile(
        spec, tile, config.warps, config.stages, registers, stack, shared,
        blocks_per_processor(spec.arch, config.warps, registers, shared, columns),
        sass.tensor_core(text),
        " ".join(word for name, word in sass.COPIES.items() if name in names) or "loads",
        count_loops(code, spec.family, spec.arch, tile, config.warps, head_dim),
        done.asm["cubin"],
    )  # fmt: skip


def count_loops(
    code: Sequence[sass.Instruction],
    kernel: str,
    arch: str,
    tile: tuple[int, int],
    warps: int,
    head_dim: int,
) -> tuple[LoopCount, ...]:
    """The counts of all tile loops of a kernel."""
    tile_loops = [loop for loop in sass.loops(code) if is_tile_loop(loop)]
    each = 32 * warps / (tile[0] * tile[1])  # instructions of a warp -> per thread and element
    passes = passes_of(tile_loops, kernel)
    names = names_of(
        [name for name, _ in passes], [loop.classes["mask"] * each for loop in tile_loops]
    )
    counts = []
    for loop, name, (part, products) in zip(tile_loops, names, passes, strict=True):
        needed = 2 * head_dim * products
        total = len(loop.code) * each
        classes = {kind: loop.classes[kind] * each for kind in sass.KINDS}
        flops = sass.tensor_flops(loop, code, warps)
        issued = None if flops is None else flops / (tile[0] * tile[1])
        packed = 2 * loop.number("F2FP") * each  # F2FP converts two numbers
        prediction = None
        if issued is not None and needed:
            packs = loop.number(*sass.PACKED) * each
            # IMAD is executed by the fp32 pipe. Uniform instructions have their own.
            alu = sum(classes[kind] for kind in ("mask", "maximum", "integer"))
            alu -= loop.number("IMAD") * each
            fp32 = classes["fp32"] + packs
            prediction = predict(arch, total, classes["mufu"], fp32, alu, issued, needed)
        counts.append(
            LoopCount(
                name, len(loop.code), total, classes,
                {opcode: n * each for opcode, n in sorted(loop.opcodes.items())},
                flops,
                issued / needed if issued is not None and needed else None,
                packed / CONVERTED[kernel] if kernel in CONVERTED and part != "mean" else None,
                loop.number(*sass.BARRIERS),
                sum(x.name == "LDGSTS" and "128" not in x.opcode.split(".") for x in loop.code),
                prediction,
                len(loop.code) * TOKENS / tile[0] if kernel == "linear" else None,
            )
        )  # fmt: skip
    return tuple(counts)


def is_tile_loop(loop: sass.Loop) -> bool:
    """Whether a loop computes products, or reads products that other warps compute."""
    return len(loop.code) >= SHORTEST and bool(loop.classes["tensor"] or loop.number("LDTM"))


def passes_of(loops: Sequence[sass.Loop], kernel: str) -> list[tuple[str, int]]:
    """The pass that each loop belongs to, and its products per score element.

    The name is empty if a kernel makes one pass over the tiles. The maximum pass of a threshold
    kernel has less than half of the fp32 and exp2 work of a solver step. The first pass of a dq
    kernel with threshold sums over dO vᵀ, and unlike the second converts no gradient to 16 bits.
    """
    products = PRODUCTS.get(kernel, 0)
    if kernel == "threshold":
        work = [loop.classes["fp32"] + loop.classes["mufu"] for loop in loops]
        return [("maximum" if 2 * n < max(work) else "step", products) for n in work]
    if kernel == "dq":
        converted = [loop.number("F2FP") for loop in loops]
        first = [4 * n < max(converted) for n in converted]
        if any(first):
            return [("mean", 2) if is_first else ("gradient", products) for is_first in first]
    return [("", products)] * len(loops)


def names_of(passes: Sequence[str], masks: Sequence[float]) -> list[str]:
    """Name loops by their pass and their number of mask instructions per element.

    Within a pass, a loop is over full blocks if it has about as few mask instructions as any.
    """
    names = []
    for part, mask in zip(passes, masks, strict=True):
        peers = [m for p, m in zip(passes, masks, strict=True) if p == part]
        kind = "full" if mask < min(peers) + MASK_WORK else "edge"
        if max(peers) < min(peers) + MASK_WORK:
            kind = "all"
        names.append(f"{part} {kind}".strip())
    return names
