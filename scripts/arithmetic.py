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

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "backends core distributed functional integrations losses nn variants".split()
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
)  # fmt: skip


def settings() -> dict[str, tuple[str, dict[str, str]]]:
    """The marker of the tests and the environment variables of each setting, by its name."""
    one, two = ({f"{x}_NUM_THREADS": n for x in ("OMP", "MKL")} for n in "12")
    cores = ["Haswell", "Nehalem"]
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        cores.append("SkylakeX")
    of_torch = {
        "default, 1 thread": {"ATEN_CPU_CAPABILITY": "default", **one},
        "avx2, 1 thread": {"ATEN_CPU_CAPABILITY": "avx2", **one},
        f"{capability}, 2 threads": two,
        "MKL compatible, 1 thread": {"MKL_CBWR": "COMPATIBLE", **one},
    }
    return {
        **{name: ("not interpreter", values) for name, values in of_torch.items()},
        **{name: ("interpreter", {"OPENBLAS_CORETYPE": name}) for name in cores},
    }


def run_tests(name: str, marker: str, values: dict[str, str]) -> bool:
    """Run the tests with this marker and these environment variables; True if all pass.

    Starts one process if OMP_NUM_THREADS is 2, otherwise two workers.
    """
    workers = [] if values.get("OMP_NUM_THREADS") == "2" else ["-n", "2", "--dist", "worksteal"]
    others = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=60"]
    command += ["-m", f"not slow and {marker}", *workers, *(f"tests/{x}" for x in FOLDERS)]
    print(f"\n== {name}", flush=True)
    start = time.monotonic()
    done = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env={**others, **values})
    result = "failed" if done.returncode else "passed"
    print(f"== {name}: {result}, {time.monotonic() - start:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    failed = [name for name, setting in settings().items() if not run_tests(name, *setting)]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\npassed under every setting")
    sys.exit(bool(failed))
