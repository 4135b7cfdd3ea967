"""Reads machine code (SASS): instructions, loops, and what a loop executes.

The text is that of `cuobjdump`, which ships with Triton. A loop is a natural loop of the control
flow graph: all blocks from which a backward branch is reached without leaving through the header.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

# Opcodes, without their modifiers, by class. Opcodes of the uniform datapath, which computes once
# per warp, start with U and are "uniform" unless listed here. All others are "other".
CLASSES = {
    "fp32": "FADD FMUL FFMA FADD2 FMUL2 FFMA2",
    "mufu": "MUFU",
    "conversion": "F2F F2FP I2F F2I I2FP F2IP I2I HADD2 HMUL2 HFMA2",
    "mask": "ISETP FSEL FSETP SEL PLOP3 FSET P2R R2P CSEL",
    "maximum": "FMNMX FMNMX3",
    "integer": "IADD3 IADD IMAD LEA LOP3 LOP SHF IMNMX VIADD VIMNMX VIMNMX3 VIADDMNMX "
    "IABS PRMT MOV BFE POPC FLO CS2R REDUX",
    "shared": "LDS STS LDSM STSM ATOMS SHFL LDTM STTM",
    "global": "LDG STG LDGSTS LDGDEPBAR RED ATOMG ATOM UTMALDG UTMASTG UTMAPF UTMACMDFLUSH UBLKCP",
    "tensor": "HMMA HGMMA IMMA QGMMA UTCHMMA",
    "sync": "BAR MEMBAR FENCE DEPBAR WARPSYNC SYNCS BSYNC BSSY WARPGROUP WARPGROUPDEPBAR ERRBAR "
    "CCTL NANOSLEEP YIELD ELECT VOTE VOTEU UTCBAR UCGABAR_ARV UCGABAR_WAIT",
}
# All classes, in the order of tables
KINDS = (
    "fp32", "mufu", "conversion", "mask", "maximum", "integer", "uniform", "shared", "global",
    "sync", "tensor", "other",
)  # fmt: skip
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}
# Instructions that compute two fp32 results per thread
PACKED = ("FADD2", "FMUL2", "FFMA2")
# The tensor-core instruction of each generation: mma, wgmma and tcgen05
TENSOR_CORE = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
# Instructions that copy a tile to shared memory: a tensor map's copy, and copies of 16 bytes.
COPIES = {"UTMALDG": "TMA", "LDGSTS": "cp.async"}
BARRIERS = ("BAR", "MEMBAR", "FENCE", "ERRBAR", "WARPSYNC", "SYNCS", "UTCBAR")
WAITING = ("SYNCS", "NANOSLEEP")

LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);",
    re.MULTILINE,
)


class Instruction(NamedTuple):
    address: int
    guard: str  # predicate, such as "!P0"; empty if the instruction is always executed
    opcode: str  # with modifiers, such as "HGMMA.64x128x16.F32.BF16"
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def kind(self) -> str:
        uniform = self.name.startswith("U") or self.name in ("R2UR", "S2UR")
        return CLASS_OF.get(self.name, "uniform" if uniform else "other")

    @property
    def target(self) -> int | None:
        """The address that a branch jumps to."""
        if self.name != "BRA":
            return None
        address = re.search(r"\b0x([0-9a-f]+)\s*$", self.operands)
        return int(address[1], 16) if address else None

    @property
    def conditional(self) -> bool:
        """Whether the instruction after this one may be executed next, if this one is a branch."""
        in_operands = re.match(r"!?U?P\d|UR\d", self.operands.strip()) is not None
        return (self.guard not in ("", "PT", "UPT")) or in_operands


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop, without those of loops inside that only wait for a barrier."""

    code: tuple[Instruction, ...]

    @property
    def start(self) -> int:
        return self.code[0].address

    @cached_property
    def opcodes(self) -> Counter[str]:
        return Counter(instruction.name for instruction in self.code)

    @cached_property
    def classes(self) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.code)

    def number(self, *opcodes: str) -> int:
        return sum(self.opcodes[name] for name in opcodes)


def disassembled(cubin: bytes) -> tuple[str, str]:
    """The resource usage and the machine code, as printed by cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        texts = []
        for flag in ("-res-usage", "--dump-sass"):
            done = subprocess.run([tool, flag, file], capture_output=True, text=True, check=True)
            texts.append(done.stdout + done.stderr)
    return texts[0], texts[1]


def resources(usage: str) -> tuple[int, int]:
    """Registers per thread, and bytes of stack, which hold spilled registers."""
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return int(match[1]), int(match[2])


def tensor_core(code: str) -> str | None:
    names = TENSOR_CORE.values()
    return next((name for name in names if re.search(rf"\b{name}\b", code)), None)


def instructions(code: str) -> list[Instruction]:
    return [
        Instruction(int(m["address"], 16), m["guard"] or "", m["opcode"], m["operands"])
        for m in LINE.finditer(code)
    ]


# ---- loops ------------------------------------------------------------------------------------


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """The innermost loops, by address. Loops that only wait for a barrier do not count as loops."""
    blocks = basic_blocks(code)
    bodies = natural_loops(successors(blocks))

    def content(numbers: Iterable[int]) -> list[Instruction]:
        return [x for n in sorted(numbers) for x in blocks[n]]

    waiting = [body for body in bodies if waits(content(body))]
    working = [body for body in bodies if body not in waiting]
    inner = [body for body in working if not any(other < body for other in working)]
    idle = {n for body in waiting for n in body}
    return sorted((Loop(tuple(content(body - idle))) for body in inner), key=lambda x: x.start)


def waits(code: Sequence[Instruction]) -> bool:
    """Whether a loop only waits for a barrier: it is short, and tests a barrier or sleeps."""
    return len(code) < 10 and any(x.name in WAITING for x in code)


def basic_blocks(code: Sequence[Instruction]) -> list[list[Instruction]]:
    targets = {x.target for x in code}
    blocks: list[list[Instruction]] = [[]]
    for instruction in code:
        if instruction.address in targets and blocks[-1]:
            blocks.append([])
        blocks[-1].append(instruction)
        if instruction.name in ("BRA", "EXIT", "RET"):
            blocks.append([])
    return [block for block in blocks if block]


def successors(blocks: list[list[Instruction]]) -> list[list[int]]:
    number = {block[0].address: n for n, block in enumerate(blocks)}
    targets = []
    for n, block in enumerate(blocks):
        last, after = block[-1], []
        if last.target is not None:
            after += [number[last.target]] if last.target in number else []
        leaves = last.name in ("BRA", "EXIT", "RET") and not last.conditional
        if not leaves and n + 1 < len(blocks):
            after.append(n + 1)
        targets.append(after)
    return targets


def natural_loops(after: list[list[int]]) -> list[frozenset[int]]:
    """The loops of a graph whose node 0 is the entry; loops with the same header are one loop."""
    before: list[list[int]] = [[] for _ in after]
    for n, targets in enumerate(after):
        for target in targets:
            before[target].append(n)
    dominators = dominated(after, before)
    bodies: dict[int, set[int]] = {}
    for n, targets in enumerate(after):
        for header in targets:
            if header not in dominators.get(n, ()):
                continue
            body = bodies.setdefault(header, {header})
            todo = [n]
            while todo:
                node = todo.pop()
                if node not in body:
                    body.add(node)
                    todo += [m for m in before[node] if m in dominators]
    return [frozenset(body) for body in bodies.values()]


def dominated(after: list[list[int]], before: list[list[int]]) -> dict[int, set[int]]:
    """For each node that is reached from node 0, the nodes on every way to it, and itself."""
    reached, todo = {0}, [0]
    while todo:
        for target in after[todo.pop()]:
            if target not in reached:
                reached.add(target)
                todo.append(target)
    dominators = {n: set(reached) for n in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for n in sorted(reached - {0}):
            ways = [dominators[m] for m in before[n] if m in reached]
            new = set.intersection(*ways) | {n}
            changed |= new != dominators[n]
            dominators[n] = new
    return dominators


# ---- tensor cores -----------------------------------------------------------------------------


def tensor_flops(loop: Loop, code: Sequence[Instruction], warps: int) -> int | None:
    """FLOPs of the tensor-core instructions that a block of threads executes in one iteration.

    None if the loop has none, or if the size of one is not known.
    """
    total = 0
    for instruction in loop.code:
        if instruction.kind == "tensor":
            flops = flops_of(instruction, code, warps)
            if flops is None:
                return None
            total += flops
    return total or None


def flops_of(instruction: Instruction, code: Sequence[Instruction], warps: int) -> int | None:
    if instruction.name == "HMMA":  # one per warp: 16 x 8 x K
        deep = re.search(r"\.168(\d+)", instruction.opcode)
        return None if deep is None else 2 * 16 * 8 * int(deep[1]) * warps
    if instruction.name == "HGMMA":  # one per four warps
        size = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.opcode)
        if size is None:
            return None
        m, n, k = map(int, size.groups())
        return 2 * m * n * k * warps // 4
    if instruction.name == "UTCHMMA":  # one per block of threads; only one thread executes it
        word = descriptor(instruction, code)
        if word is None:
            return None
        # Fields of the instruction descriptor of tcgen05.mma (PTX ISA): the type of a, n and m.
        # 32 bytes of a row of a are multiplied: 16 numbers in fp16 (0) or bf16 (1), 8 in tf32 (2).
        deep = 16 if (word >> 7 & 0x7) < 2 else 8
        n, m = 8 * (word >> 17 & 0x3F), 16 * (word >> 24 & 0x1F)
        return 2 * m * n * deep
    return None


def descriptor(instruction: Instruction, code: Sequence[Instruction]) -> int | None:
    """The constant in the uniform register ``idesc`` of a tcgen05 instruction."""
    match = re.search(r"idesc\[(UR\d+)\]", instruction.operands)
    if match is None:
        return None
    register = match[1]
    for x in reversed([x for x in code if x.address < instruction.address]):
        written = [part.strip() for part in x.operands.split(",")]
        if written[0] != register:
            continue
        if x.name not in ("UMOV", "MOV", "R2UR") or x.guard:
            return None
        source = written[-1]
        if re.fullmatch(r"0x[0-9a-f]+", source):
            return int(source, 16)
        register = source
    return None
