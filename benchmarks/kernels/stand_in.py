"""A stand-in for the GPU driver: Triton compiles and binds kernels, but launches nothing.

The host's part of a kernel call can then be timed and tested without a GPU: validation, planning,
allocation of the outputs, and Triton's binding of arguments. The outputs are uninitialized memory.

With a stand-in for libcuda (`build`), Triton's own driver runs, with its launchers and its encoding
of tensor maps. The stand-in checks them against the limits of CUDA.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
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
    """Replace Triton's driver until the process ends; kernels then accept CPU tensors.

    In the environment of `with_libcuda`, the driver is Triton's own, over a stand-in for libcuda.
    """
    from triton.runtime import driver

    from attnzoo.backends.triton.common import launch
    from attnzoo.backends.triton.flash import backend

    folder = os.environ.get(FOLDER)
    stand_in: Any = Driver(launched) if folder is None else nvidia_driver(Path(folder))
    driver.set_active(stand_in)
    launch.architecture = lambda device: ARCHITECTURE
    launch.processors = lambda device: DEVICE["multiprocessor_count"]
    backend.unsupported_here = lambda call, other: None


# ---- with Triton's own driver -------------------------------------------------------------------

FOLDER = "ATTNZOO_STAND_IN"  # environment variable: the folder with the stand-in for libcuda


def build(folder: Path) -> None:
    """Compile the stand-in for libcuda into a folder, with gcc and the CUDA header of Triton.

    Raises:
        OSError: there is no gcc.
        RuntimeError: gcc failed.
    """
    import triton

    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_suffix(".c")
    target = folder / "libcuda.so.1"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-I", str(header)]
    done = subprocess.run(
        [*command, "-o", str(target), str(source)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"gcc failed: {done.stderr.strip()}")


def with_libcuda(folder: Path) -> dict[str, str]:
    """The environment variables of a process whose `install` uses the stand-in in ``folder``."""
    return {FOLDER: str(folder), "TRITON_LIBCUDA_PATH": str(folder)}


def nvidia_driver(folder: Path) -> Any:
    """Triton's driver for NVIDIA GPUs over the stand-in in ``folder``, for CPU tensors."""
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia import driver as nvidia

    class NvidiaDriver(nvidia.CudaDriver):
        def __init__(self) -> None:  # the class's own asks torch for the CUDA device
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_device_capability = lambda device=None: divmod(ARCHITECTURE, 10)
            self.get_current_stream = lambda device=None: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    return NvidiaDriver()
