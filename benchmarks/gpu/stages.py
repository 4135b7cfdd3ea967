"""The stages of `python -m benchmarks gpu`: lists of steps, the most valuable first."""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.gpu import checks
from benchmarks.gpu.session import Step

PYTHON = (sys.executable, "-m")
BENCHMARKS = (*PYTHON, "benchmarks")
COMPILE_LIMIT = 45.0  # seconds without a line in which a process may compile its kernels

MAIN = ("softmax", "ssmax", "sigmoid", "entmax", "sparsemax", "relu", "sink", "softpick")
OTHERS = (
    "log_n", "adaptive_temperature", "asentmax", "forgetting", "scale_invariant", "taylor", "relu2",
    "position_temperature", "silu", "lssa", "screening",
)  # fmt: skip
GAINS = "softmax,ssmax,log_n"
SHARES, SELECTION = ("stick_breaking",), ("topk", "top_p")
THRESHOLDS = ("entmax", "sparsemax", "asentmax")
LINEAR = ("taylor", "elu", "cosformer", "hedgehog")


def timing(line: str, expected: float, variants: tuple[str, ...]) -> Step:
    """A benchmark with one setting. ``line`` is its command line without variants."""
    line = " ".join(line.split())
    command = (*BENCHMARKS, *line.split(), "--device", "cuda")
    limit = max(60.0, 3 * expected)
    return Step(line, command, expected, limit, variants, "--variants", COMPILE_LIMIT)


def attention(
    length: int, dim: int, expected: float, variants: tuple[str, ...], options: str = "",
    baselines: str = "flash,cudnn", mask: str = "causal", inputs: str = "iid",
) -> Step:  # fmt: skip
    line = f"attention --lengths {length} --head-dim {dim} --mask {mask} --inputs {inputs}"
    return timing(f"{line} --baselines {baselines} {options}", expected, variants)


def gain() -> Step:
    """What a gain costs at short lengths. Two settings, so it has no items."""
    line = "attention --lengths 1024,4096 --head-dim 128 --mask causal --inputs iid --baselines "
    line += f"flash --direction forward --no-memory --backend flash --variants {GAINS}"
    return Step(line, (*BENCHMARKS, *line.split(), "--device", "cuda"), 12, 60)


def decode(length: int, batch: int, expected: float) -> Step:
    return timing(f"decode --lengths {length} --batches {batch}", expected, MAIN)


def linear(length: int, expected: float) -> Step:
    line = f"linear --lengths {length}"
    return timing(line, expected, LINEAR)


def tune(kernel: str, dim: int, activation: str = "exp") -> Step:
    line = f"tune --kernel {kernel} --head-dim {dim} --activation {activation} --stages 2,3"
    return Step(line, (*BENCHMARKS, *line.split(), "--device", "cuda"), 45, 100)


SMOKE = Step(
    "checks", (*BENCHMARKS, "check"), 60, 150, checks.NAMES, "--only", COMPILE_LIMIT
)  # fmt: skip
TESTS = Step(
    "tests",
    (*PYTHON, "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-n", "8", "tests/gpu",
     "--max-worker-restart=24", "--durations=15"),
    100, 130, journaled=False,
)  # fmt: skip
NO_MEMORY = "--no-memory"

CONTACT = (
    SMOKE,
    TESTS,
    attention(16384, 128, 25, MAIN, NO_MEMORY),
    decode(65536, 1, 12),
    gain(),
    attention(16384, 64, 20, MAIN, NO_MEMORY),
    attention(16384, 128, 12, THRESHOLDS, NO_MEMORY, inputs="block-sparse"),
    replace(attention(16384, 128, 25, OTHERS, NO_MEMORY), name="attention, other variants"),
    linear(16384, 15),
    decode(4096, 1, 10),
    attention(16384, 128, 6, SHARES, f"--backend flash_shares {NO_MEMORY}"),
    attention(16384, 128, 14, SELECTION, f"--backend flash {NO_MEMORY}"),
)
TUNE = (
    *(tune(kernel, dim) for dim in (128, 64) for kernel in ("forward", "dkdv", "dq")),
    tune("threshold", 128, "entmax15"),
    tune("decode", 128),
)
TABLES = (
    *(attention(16384, dim, 70, (*MAIN, *OTHERS)) for dim in (128, 64)),
    decode(65536, 1, 12),
    decode(4096, 1, 10),
    linear(16384, 15),
    attention(16384, 128, 25, THRESHOLDS, baselines="flash,cudnn,adasplash", inputs="block-sparse"),
    Step("losses", (*BENCHMARKS, "losses", "--device", "cuda"), 60, 120),
    *(attention(n, dim, 25, MAIN) for n in (4096, 1024, 65536) for dim in (128, 64)),
    attention(16384, 128, 25, MAIN, mask="full"),
    attention(4096, 128, 30, ("softmax", "sigmoid"), baselines="flash,cudnn,flex"),
    linear(131072, 20),
    decode(262144, 1, 15),
    decode(16384, 32, 15),
)

# A small check for each kernel.
KERNELS = {
    "flash_forward": "tma-forward", "flash_dq": "tma-backward", "flash_dkdv": "tma-backward",
    "threshold": "entmax", "decode": "decode-softmax",
}  # fmt: skip
SANITIZED = (
    "tma-forward,tma-backward,unaligned,entmax,segments,decode-softmax,pages-softmax,linear-elu"
)


def sanitizer(tool: str) -> Step:
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "4", *BENCHMARKS, "check")
    # Without torch's cache, reads beyond a tensor are reads beyond an allocation.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ("--no-compare", "--only", SANITIZED)
    return Step(f"compute-sanitizer {tool}", (*command, *options), 40, 90, env=env)


def counters(kernel: str) -> Step:
    """Nsight Compute's counters of one launch of a kernel, as CSV in the log."""
    command = ("ncu", "--set", "detailed", "--clock-control", "none", "--csv", "-c", "1")
    check = (*BENCHMARKS, "check", "--no-compare", "--only", KERNELS[kernel])
    return Step(f"ncu {kernel}", (*command, "-k", f"regex:^{kernel}$", *check), 25, 60)


PROFILE = (
    *(sanitizer(tool) for tool in ("memcheck", "racecheck")),
    *(counters(kernel) for kernel in KERNELS),
)
STAGES = {"contact": CONTACT, "tune": TUNE, "tables": TABLES, "profile": PROFILE}
WHAT = {
    "contact": "checks, the GPU tests, first timings",
    "tune": "block sizes of the kernels of softmax, of a threshold and of decoding",
    "tables": "the timings of the published tables",
    "profile": "memory and race checks, and counters of one launch of each kernel",
}


def seconds(stage: str) -> float:
    """The expected seconds of a stage on an H100, without compilation: an estimate."""
    return sum(step.expected for step in STAGES[stage])


# ---- rehearsal ----------------------------------------------------------------------------------

FAST = "--repeats 2 --min-seconds 0.001 --threads 1 --device cpu --dtype float32 --lengths 64"
SMALL = {
    "attention": f"{FAST} --heads 2 --head-dim 16 --no-memory --baselines sdpa --backend tiled "
    "--direction forward",
    "decode": f"{FAST} --heads 2 --kv-heads 2 --head-dim 16 --backend tiled",
    "linear": f"{FAST} --heads 2 --head-dim 16 --direction forward --backend linear",
    "losses": "--quick --tokens 32 --classes 100 --many-classes 200 --dims 4 --repeats 2 "
    "--min-seconds 0.001 --threads 1 --device cpu --variants softmax,entmax --no-memory",
    "tune": "--device cpu --blocks 64 --warps 4 --stages 2 --jobs 1",
    "check": "--device cpu",
}
INTERPRETED = ("fp32-forward", "odd-dims", "decode-ssmax")


def rehearsed(step: Step) -> Step:
    """The step on a CPU, with few and small inputs. Checks run in Triton's interpreter."""
    words = [word for word in step.command if word in SMALL]
    if not words or step.command[0] != sys.executable:
        return step
    env = {"TRITON_INTERPRET": "1"} if words[0] == "check" else {}
    items = step.items[:2]
    if words[0] == "check":
        items = INTERPRETED
    command = (*step.command, *SMALL[words[0]].split())
    return replace(step, command=command, items=items, env=env)
