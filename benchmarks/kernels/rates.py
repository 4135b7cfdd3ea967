"""Documented rates of GPUs, and the speed that they allow for counted instructions.

A predicted speed is an upper bound for a loop whose data is in shared memory in time. It assumes
that the busiest pipe is always busy. Rates are per multiprocessor and clock, in operations of one
thread. The rates of fp32, comparisons (alu) and exp2 (mufu) are those of the table "Throughput of
native arithmetic instructions" in NVIDIA's CUDA C++ Programming Guide. The rate of tensor cores is
the TFLOP/s of bf16 without sparsity in the data sheet, divided by multiprocessors and clock.
"""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """The GPU that stands for an architecture.

    threads, blocks, registers, shared, tensor_memory: limits of one multiprocessor. Each block of
    threads takes ``reserved`` bytes of its shared memory besides its own. tensor_memory is the
    number of columns that tcgen05 can use.
    """

    device: str
    processors: int
    clock: float  # Hz
    tensor: int  # FLOP in bf16
    fp32: int
    shared: int
    mufu: int = 16
    alu: int = 64
    issue: int = 128  # four warps
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536
    reserved: int = 1024
    tensor_memory: int = 0


RATES = {
    # 312 TFLOP/s, boost clock 1410 MHz
    "sm_80": Rates("A100 SXM", 108, 1.41e9, tensor=2048, fp32=64, shared=167_936),
    # 989 TFLOP/s. The data sheet gives no clock; 1830 MHz is the clock of this figure.
    "sm_90": Rates("H100 SXM", 132, 1.83e9, tensor=4096, fp32=128, shared=233_472),
    # 2250 TFLOP/s. The data sheet gives no clock; 1855 MHz is the clock of this figure.
    "sm_100": Rates("B200", 148, 1.855e9, tensor=8192, fp32=128, shared=233_472, tensor_memory=512),
}
PIPES = ("issue", "mufu", "fp32", "alu")


class Prediction(NamedTuple):
    """The speed of a loop at documented rates.

    Attributes:
        cycles: clocks per score element that each pipe of a multiprocessor is busy.
        bound: the pipe that is busy for the longest time.
        tflops: useful TFLOP/s of the GPU if tensor cores and other pipes do not overlap.
        tflops_overlap: the same if they overlap completely.
    """

    cycles: dict[str, float]
    bound: str
    tflops: float
    tflops_overlap: float

    @property
    def others(self) -> float:
        """Clocks per score element of the busiest pipe besides the tensor cores."""
        return max(self.cycles[name] for name in PIPES)

    @property
    def serial(self) -> float:
        """Clocks per score element if tensor cores and other pipes do not overlap."""
        return self.cycles["tensor"] + self.others


def predict(
    arch: str, total: float, mufu: float, fp32: float, alu: float, issued: float, needed: float
) -> Prediction:
    """Predict from the instructions per score element, and FLOPs per element issued and needed.

    A packed fp32 instruction counts as two in ``fp32``.
    """
    rates = RATES[arch]
    cycles = {
        "tensor": issued / rates.tensor,
        "issue": total / rates.issue,
        "mufu": mufu / rates.mufu,
        "fp32": fp32 / rates.fp32,
        "alu": alu / rates.alu,
    }
    others = max(cycles[name] for name in PIPES)
    speed = needed * rates.processors * rates.clock / 1e12
    return Prediction(
        cycles,
        max(cycles, key=lambda name: cycles[name]),
        speed / (cycles["tensor"] + others),
        speed / max(cycles["tensor"], others),
    )


def blocks_per_processor(
    arch: str, warps: int, registers: int, shared: int, tensor_memory: int = 0
) -> int:
    """How many blocks of threads fit on a multiprocessor at the same time."""
    rates = RATES[arch]
    per_warp = -(-registers // 8) * 8 * 32  # registers are given to a warp in units of 256
    limits = [
        rates.blocks,
        rates.threads // (32 * warps),
        # Warps are given to the four schedulers in turn.
        rates.registers // 4 // per_warp * 4 // warps,
        rates.shared // (shared + rates.reserved),
    ]
    if tensor_memory:
        limits.append(rates.tensor_memory // tensor_memory)
    return min(limits)
