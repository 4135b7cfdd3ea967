"""A stand-in for the GPU driver: Triton compiles and binds kernels, but launches nothing.

The host's part of a kernel call can then be timed and tested without a GPU: validation, planning,
allocation of the outputs, and Triton's binding of arguments. The outputs are uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ARCHITECTURE = 90
# What Triton asks of a driver before it launches a kernel: shared memory, registers, processors.
DEVICE = {"max_shared_mem": 232_448, "max_num_regs": 65_536, "multiprocessor_count": 132}
THREADS = 1024  # largest number of threads per program

Launcher = Callable[..., None]


class Driver:
    """Replaces `triton.runtime.driver.active`. ``launched`` gets the arguments of each launch."""

    def __init__(self, launched: Launcher) -> None:
        self.utils, self.launcher_cls = self, lambda source, metadata: launched

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {**DEVICE, "warpSize": 32}

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, THREADS  # module, function, registers, spills, threads

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install(launched: Launcher = lambda *args: None) -> None:
    """Replace Triton's driver for the rest of the process; kernels then accept CPU tensors."""
    from triton.runtime import driver

    from attnzoo.backends.triton.common import launch
    from attnzoo.backends.triton.flash import backend

    stand_in: Any = Driver(launched)
    driver.set_active(stand_in)
    launch.architecture = lambda device: ARCHITECTURE
    launch.processors = lambda device: DEVICE["multiprocessor_count"]
    backend.unsupported_here = lambda call, other: None
