"""Run the quick tests of the library with several vector units and BLAS kernels of this CPU.

This is `make test-arithmetic`. Results depend on the order of additions, which differs between
vector units, numbers of threads and BLAS kernels. Tests must pass with all of them. Tests of torch
code run once for each setting of ATen and MKL. Tests in Triton's interpreter, where numpy
multiplies matrices, run once for each OpenBLAS kernel. The best vector unit with one thread, and
the OpenBLAS kernel that numpy chooses, are left to `make test`. The exit status is 1 if a test
fails.

    python scripts/arithmetic.py [arguments of pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    f"tests/{name}"
    for name in "backends core distributed functional integrations losses nn variants".split()
]
SETTINGS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
OF_NUMPY = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def torch_settings() -> dict[str, dict[str, str]]:
    """The environment variables of each setting of ATen and MKL, by the name of the setting."""
    found = {
        "default, 1 thread": {"ATEN_CPU_CAPABILITY": "default"},
        "avx2, 1 thread": {"ATEN_CPU_CAPABILITY": "avx2"},
        f"{torch.backends.cpu.get_cpu_capability()}, 2 threads": {},
        "MKL compatible, 1 thread": {"MKL_CBWR": "COMPATIBLE"},
    }
    for name, values in found.items():
        threads = name.split(", ")[1][0]
        values.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    return found


def numpy_settings() -> dict[str, dict[str, str]]:
    cores = ["Haswell", "Nehalem"]
    if np._core._multiarray_umath.__cpu_features__.get("AVX512F"):
        cores.append("SkylakeX")
    return {name: {"OPENBLAS_CORETYPE": name} for name in cores}


def run(name: str, marker: str, values: dict[str, str], cleared: tuple[str, ...]) -> bool:
    """Run the tests with this marker and these environment variables; True if all pass.

    Removes the ``cleared`` variables first. Starts one process if OMP_NUM_THREADS is 2, otherwise
    two workers.
    """
    workers = [] if values.get("OMP_NUM_THREADS") == "2" else ["-n", "2", "--dist", "worksteal"]
    environment = {key: value for key, value in os.environ.items() if key not in cleared}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=60"]
    command += ["-m", f"not slow and {marker}", *workers, *FOLDERS, *sys.argv[1:]]
    print(f"\n== {name}", flush=True)
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env={**environment, **values}).returncode
    passed, seconds = "failed" if status else "passed", time.monotonic() - start
    print(f"== {name}: {passed}, {seconds:.0f} s", flush=True)
    return status == 0


def main() -> int:
    failed = [
        name
        for name, values in torch_settings().items()
        if not run(name, "not interpreter", values, SETTINGS)
    ]
    failed += [
        name
        for name, values in numpy_settings().items()
        if not run(name, "interpreter", values, OF_NUMPY)
    ]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\npassed under every setting")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
