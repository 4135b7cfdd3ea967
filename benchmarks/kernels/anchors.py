"""Compiles attention kernels of others like ours, to compare their loops.

- Triton's tutorial 06, "Fused Attention", from a file that the user gives.
- FlexAttention's templates, from the installed torch, causal and without a change of scores.

None of their code is in this repository. Both compute softmax; the backward of both computes dK, dV
and dQ in one kernel. The tutorial rounds to fp16, which is counted like bf16.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.kernels import sass
from benchmarks.kernels.compile import reason
from benchmarks.kernels.counts import LoopCount, count_loops
from commandline.errors import UsageError

HEAD_DIMS = (64, 128)


class Task(NamedTuple):
    """One kernel to compile. source: the tutorial's file, or empty for FlexAttention."""

    source: str
    backward: bool
    arch: str
    head_dim: int

    @property
    def name(self) -> str:
        return "tutorial" if self.source else "flex"


@dataclass(frozen=True)
class Anchor:
    """The loop over full blocks of a kernel of others."""

    name: str
    kernel: str
    arch: str
    head_dim: int
    registers: int
    stack_bytes: int
    loop: LoopCount

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "loop": self.loop.record()}


class Tile(NamedTuple):
    """The tile of each loop of a kernel."""

    forward: tuple[int, int]
    dkdv: tuple[int, int]
    dq: tuple[int, int]


def tasks(
    source: str | None, flex: bool, archs: list[str], kernels: Collection[str]
) -> Iterator[Task]:
    """The kernels to compile beside these kernels of ours."""
    sources = ([source] if source else []) + ([""] if flex else [])
    passes = [False] if "forward" in kernels else []
    passes += [True] if {"dq", "dkdv"} & set(kernels) else []
    for name, arch, dim, backward in product(sources, archs, HEAD_DIMS, passes):
        yield Task(name, backward, arch, dim)


def check_tutorial(path: str) -> None:
    """Raises UsageError if the file does not define the tutorial's kernels."""
    try:
        module = loaded(Path(path), 90)
    except Exception as error:  # the file may raise anything
        raise UsageError(f"--tutorial {path}: {type(error).__name__}: {error}") from None
    for name in ("_attn_fwd", "_attn_bwd"):
        if not hasattr(module, name):
            raise UsageError(f"--tutorial {path} must define {name}, as Triton's tutorial 06 does")


def count(task: Task) -> list[Anchor] | str:
    """The counts of a kernel, or the reason why it does not compile."""
    try:
        build = compile_tutorial if task.source else compile_flex
        done, tile, warps = build(task)
        usage, text = sass.disassembled(done.asm["cubin"])
    except Exception as error:  # compilers raise many types
        return reason(error)
    code, anchors = sass.instructions(text), []
    for kernel in ("dkdv", "dq") if task.backward else ("forward",):
        loops = count_loops(code, kernel, task.arch, getattr(tile, kernel), warps, task.head_dim)
        # Loops of other tiles or products have another number of FLOPs.
        matching = [x for x in loops if x.tensor_factor is None or abs(x.tensor_factor - 1) < 0.01]
        if matching:
            best = min(matching, key=lambda loop: (loop.classes["mask"], loop.total))
            place = (task.name, kernel, task.arch, task.head_dim)
            anchors.append(Anchor(*place, *sass.resources(usage), replace(best, name="full")))
    return anchors


def compiled(function: Any, arch: int, values: Mapping[str, Any], warps: int, stages: int) -> Any:
    """Compile for values that are types, such as "*fp16" and "i32", or constants.

    A type that ends in ":16" is aligned to 16 bytes, or divisible by 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, aligned = {}, {}, {}
    for n, param in enumerate(function.params):
        if param.name not in values:
            raise UsageError(f"the parameter {param.name} of {function.__name__} is not known")
        value = values[param.name]
        if param.is_constexpr or not isinstance(value, str):
            signature[param.name], constants[param.name] = "constexpr", value
        else:
            signature[param.name] = value.removesuffix(":16")
            if value.endswith(":16"):
                aligned[n,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


# ---- Triton's tutorial ------------------------------------------------------------------------


def loaded(path: Path, arch: int) -> ModuleType:
    """Import the tutorial as on a machine with this GPU, which it asks for when it is imported."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_active_torch_device=lambda: torch.device("cpu"),
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_benchmarker=lambda: None,
    )
    with (
        mock.patch.object(type(triton.runtime.driver), "active", driver),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
    ):
        return imported(path)


def imported(path: Path) -> ModuleType:
    name = f"attnzoo_anchor_{path.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_tutorial(task: Task) -> tuple[Any, Tile, int]:
    arch, dim = int(task.arch.removeprefix("sm_")), task.head_dim
    module = loaded(Path(task.source), arch)
    tma = arch >= 90
    warps, stages = (4, 5) if task.backward else (8, 2) if tma and dim > 64 else (4, 3)
    # Tiles and warps as in the tutorial's backward, and among those of its forward
    tile = Tile((128, min(dim, 128 if tma else 64)), (128, 32), (128, 32))
    m, n = tile.forward
    values: dict[str, Any] = {
        **dict.fromkeys("Q K V Out DO DQ DK DV".split(), "*fp16:16"),
        **dict.fromkeys(("M", "D"), "*fp32:16"), "sm_scale": "fp32", "Z": "i32", "H": "i32",
        "N_CTX": "i32:16", "HEAD_DIM": dim, "BLOCK_M": m, "BLOCK_N": n, "CAUSAL": True,
        "STAGE": 3, "FP8_OUTPUT": False, "warp_specialize": False, "IS_HOPPER": arch // 10 == 9,
        "BLOCK_M1": 32, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 32, "BLK_SLICE_FACTOR": 2,
        "dtype": None,
    }  # fmt: skip
    names = [f"stride_{x}{y}" for x in "qkvo" for y in "zhmnk"]
    values |= dict.fromkeys([*names, "stride_z", "stride_h", "stride_tok"], "i32:16")
    values |= dict.fromkeys(("stride_qk", "stride_kk", "stride_vn", "stride_on", "stride_d"), 1)
    for name, rows in {"q": m, "k": n, "v": n, "o": m}.items():
        described = f"tensordesc<fp16[{rows}, {dim}]>"
        values[f"desc_{name}"] = described if tma else "*fp16:16"
    forward = getattr(module, "_attn_fwd_tma", None) if tma else None
    function = module._attn_bwd if task.backward else forward or module._attn_fwd
    while not hasattr(function, "params"):  # below the autotuner
        function = function.fn
    return compiled(function, arch, values, warps, stages), tile, warps


# ---- FlexAttention ----------------------------------------------------------------------------

# A call with 2 batches, 16 heads and 4096 tokens; blocks of the mask are 128 x 128.
BATCH, HEADS, TOKENS, BLOCK = 2, 16, 4096, 128
LISTS = ("KV_NUM_BLKS", "KV_IDX", "Q_NUM_BLKS", "Q_IDX")


def compile_flex(task: Task) -> tuple[Any, Tile, int]:
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    arch, dim = int(task.arch.removeprefix("sm_")), task.head_dim
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)):
        choose = CUDAConfigHeuristic()
        if task.backward:
            config: Any = choose.get_flex_attn_bwd_configs(dim, torch.bfloat16)[-1]
        else:
            config = choose.get_flex_attn_fwd_configs(dim, torch.bfloat16)[-1]
    if task.backward:
        tile = Tile((0, 0), (config.block_m1, config.block_n1), (config.block_m2, config.block_n2))
        sizes = {
            "BLOCK_M1": config.block_m1, "BLOCK_N1": config.block_n1,
            "BLOCK_M2": config.block_m2, "BLOCK_N2": config.block_n2, "WRITE_DQ": True,
        }  # fmt: skip
    else:
        tile = Tile((config.block_m, config.block_n), (0, 0), (0, 0))
        sizes = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
                 "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}  # fmt: skip
    options = {
        "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
        "IS_DIVISIBLE": True, "SM_SCALE": dim**-0.5, "GQA_SHARED_HEADS": 1,
        "HAS_FULL_BLOCKS": True, "QK_HEAD_DIM": dim, "QK_HEAD_DIM_ROUNDED": dim,
        "V_HEAD_DIM": dim, "V_HEAD_DIM_ROUNDED": dim, "SAFE_HEAD_DIM": True, "USE_TMA": False,
        "SPARSE_Q_BLOCK_SIZE": BLOCK, "SPARSE_KV_BLOCK_SIZE": BLOCK, **sizes,
    }  # fmt: skip
    source = rendered("flex_backwards" if task.backward else "flex_attention", options, dim)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"flex_{task.arch}_{dim}_{'bwd' if task.backward else 'fwd'}.py"
        path.write_text(source)
        function = imported(path).kernel
        values = {
            param.name: "*i32:16" if param.name.endswith(("_BLKS", "_IDX"))
            else "*fp32:16" if param.name in ("arg_LSE", "arg_MAX", "arg_DELTA") else "*bf16:16"
            for param in function.params
        }  # fmt: skip
        done = compiled(function, arch, values, config.num_warps, config.num_stages)
    return done, tile, config.num_warps


def rendered(template: str, options: dict[str, Any], dim: int) -> str:
    """The source that inductor makes of a template, for contiguous tensors of constant size."""
    import jinja2
    from torch._inductor.kernel.flex.common import load_flex_template

    parts = [template, "utilities"] + (["common"] if template == "flex_attention" else [])
    text = "\n".join(load_flex_template(name) for name in parts)
    arguments: list[str] = []
    defines = "\n".join(
        [f"{name} : tl.constexpr = {value!r}" for name, value in options.items()]
        + ["INDEX_DTYPE : tl.constexpr = tl.int32", 'FLOAT32_PRECISION : tl.constexpr = "ieee"']
    )

    def sizes(name: str) -> tuple[int, ...]:
        blocks = TOKENS // BLOCK
        if name.removeprefix("FULL_") in LISTS:
            return (1, 1, blocks) if name.endswith("_BLKS") else (1, 1, blocks, blocks)
        return BATCH, HEADS, TOKENS, dim

    def stride(name: str, axis: int | None = None) -> str:
        strides, step = [], 1
        for size in reversed(sizes(name)):
            strides.insert(0, step)
            step *= size
        return ", ".join(map(str, strides)) if axis is None else str(strides[axis])

    def def_kernel(*names: str) -> str:
        arguments.extend(f"arg_{name}" for name in names)
        body = "\n".join([defines, *(f"{name} = arg_{name}" for name in names)])
        return f"@triton.jit\ndef kernel({', '.join(arguments)}, out):\n{indented(body, 1)}"

    def modification(
        subgraph_number: int, output_name: str | None, score: str = "", out: str = "",
        grad_score_mod: str = "", m: str = "", n: str = "", **_: Any,
    ) -> str:  # fmt: skip
        """The code of score_mod (none), its gradient, mask_mod (causal), and captured tensors."""
        made = {
            "mask_mod_output": f"{m} >= {n}", "post_mod_scores": score,
            "grad_scores": grad_score_mod,
        }  # fmt: skip
        return f"{output_name} = {made[output_name]}" if output_name in made else "pass"

    def store_output(
        index: tuple[str, ...], value: str, mask: str, indent_width: int = 4, **_: Any
    ) -> str:
        at = " + ".join(f"({i}) * {s}" for i, s in zip(index, stride("Q").split(", "), strict=True))
        return f"tl.store(out + {at}, {value}, mask={mask})"

    hooks = {
        "def_kernel": def_kernel, "stride": stride, "modification": modification,
        "size": lambda name, axis: str(sizes(name)[axis]), "store_output": store_output,
        "gen_argdefs": lambda: ", ".join(arguments), "gen_defines": lambda: indented(defines, 1),
    }  # fmt: skip

    def except_first(text: str, levels: int) -> str:
        first, *others = text.splitlines()
        return "\n".join([first.strip(), *("    " * levels + line.strip() for line in others)])

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = except_first
    body = environment.from_string(text).render(**options, **hooks)
    return f"import triton\nimport triton.language as tl\n\n{body}\n"


def indented(text: str, levels: int) -> str:
    return "\n".join("    " * levels + line for line in text.splitlines())
