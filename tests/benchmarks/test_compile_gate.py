"""python -m benchmarks compile: what it reads off the machine code, and what it calls wrong."""

from __future__ import annotations

import inspect
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

import attnzoo
from attnzoo.backends.triton.common import configurations as configs
from attnzoo.backends.triton.decode import launch as launch_decode
from attnzoo.backends.triton.flash import launch
from benchmarks.kernels.activations import activations
from benchmarks.kernels.cells import (
    ARCHITECTURES,
    HEAD_DIMS,
    KERNELS,
    STAGES,
    Cell,
    cells,
    quick_cells,
)
from benchmarks.kernels.compile import Compiled
from benchmarks.kernels.launches import describe
from commandline.errors import UsageError
from helpers.commands import benchmarks, error_of


@pytest.mark.slow
def test_compiles_a_kernel_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "compiled.json"
    done = benchmarks(
        "compile", "--arch", "sm_90", "--head-dims", "64", "--kernels", "stats", "--jobs", "1",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["config"] for row in rows] == [
        "exp D=64 bf16",
        "exp D=64 fp32",
        "exp D=64 bf16 all",
        "exp D=64 bf16 all unaligned",
    ]
    for row in rows:
        assert set(row) == {
            "kernel", "config", "arch", "registers", "spill_bytes", "shared_bytes", "tensor_core",
        }  # fmt: skip
        assert 0 < row["registers"] <= 255
        assert row["spill_bytes"] == 0
        assert row["tensor_core"] == "HGMMA"
        assert str(row["registers"]) in done.stdout


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Compiled("dq", "c", "sm_90", 255, 8, 0, "HGMMA"), "spills 8 bytes"),
        (Compiled("dq", "c", "sm_90", 255, 0, 101, "HGMMA"), "101 bytes of shared memory of 100"),
        (Compiled("dq", "c", "sm_90", 255, 0, 100, None), "no tensor-core"),
        (Compiled("dq", "c", "sm_90", 255, 0, 100, "HMMA"), None),
    ],
)
def test_what_is_wrong(row: Compiled, words: str | None) -> None:
    said = row.unsound(sixteen_bit=True, limit=100)
    assert said is None if words is None else words in str(said)


def test_fp32_may_do_without_tensor_cores() -> None:
    row = Compiled("dq", "c", "sm_90", 100, 0, 0, None)
    assert row.unsound(sixteen_bit=False, limit=100) is None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--arch", "sm_70", "--arch must be of sm_80, sm_90, sm_100, got 'sm_70'"),
        ("--head-dims", "300", "--head-dims must be numbers from 1 to 256"),
        ("--head-dims", "x", "--head-dims must be numbers"),
        ("--kernels", "encode", "--kernels must be of forward"),
        ("--quick", "--head-dims=64", "--quick has its own head dimensions"),
        ("--jobs", "0", "--jobs must be at least 1"),
        ("--json", ".", "--json must be a file, . is a folder"),
        ("--json", "/dev/null/x.json", "--json /dev/null/x.json: "),
    ],
)
def test_bad_options_are_refused(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "compile", option, value)


def test_every_row_of_the_table_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    met, few = set(), set()

    def spy(kernel: str, arch: int, bits: int, head_dim: int, beside: str) -> configs.Config:
        rows = configs.find(kernel, arch, bits, beside)
        config = configs.of_dim(rows, head_dim)
        met.add((id(rows), config))
        return config

    def spy_on_decode(*args: Any) -> configs.Config:
        few.add(found := configs.decode_config(*args))
        return found

    monkeypatch.setattr(launch, "pick", spy)
    monkeypatch.setattr(launch_decode, "decode_config", spy_on_decode)
    found = list(cells(list(ARCHITECTURES), list(HEAD_DIMS)))
    for cell in found:
        describe(cell)
    linear = {(c.dtype, c.kernel) for c in found if c.family == "linear"}
    assert linear == {(d, f"linear {x}") for d in ("bf16", "fp32") for x in configs.LINEAR_KERNELS}
    assert few == {c for table in configs.DECODE.values() for rows in table.values() for c in rows}
    listed = [rows for table in configs.TABLE.values() for rows in table.values()]
    assert met == {(id(rows), config) for rows in listed for config in rows}


def key(cell: Cell) -> tuple:
    """What Triton compiles: cells with one key would be one kernel, compiled twice."""
    launch, kinds = describe(cell), []
    for name, parameter in inspect.signature(launch.kernel.fn).parameters.items():
        value = launch.args[name]
        if parameter.annotation is tl.constexpr or value is None:
            kinds.append((name, repr(value)))
        else:
            kinds.append((name, value.dtype if isinstance(value, torch.Tensor) else type(value)))
    return launch.kernel, cell.arch, *kinds, repr(launch.options)


def test_no_kernel_is_compiled_twice() -> None:
    found = [key(cell) for cell in cells(list(ARCHITECTURES), list(HEAD_DIMS))]
    assert len(set(found)) == len(found)


def test_quick_compiles_what_most_calls_use() -> None:
    """Plain calls, causal or full, with or without a gain, of every kernel: a part of the table."""
    found = list(quick_cells(list(ARCHITECTURES)))
    assert set(found) < set(cells(list(ARCHITECTURES), list(HEAD_DIMS)))
    assert len(found) < 250
    for arch, dim in product(ARCHITECTURES, (64, 128)):
        here = [c for c in found if (c.arch, c.head_dim) == (arch, dim)]
        assert {c.family for c in here} == set(KERNELS)
        for kernel in ("forward", "dq", "dkdv"):
            launches = [describe(c) for c in here if (c.kernel, c.activation) == (kernel, "exp")]
            calls = {(x.args["right"] is None, x.args["gain"] is None) for x in launches}
            assert calls == set(product((True, False), repeat=2))


def test_every_kernel_architecture_and_activation_is_compiled() -> None:
    found = list(cells(list(ARCHITECTURES), list(HEAD_DIMS)))
    assert {cell.family for cell in found} == set(KERNELS)
    for arch, stage in product(ARCHITECTURES, (*STAGES, "decode", "decode products")):
        assert any((c.arch, c.kernel) == (arch, stage) for c in found)
    every = {"exp", "sigmoid", "entmax15", "q_exp", "taylor2"}
    filled = {48: {"exp", "sigmoid"}, 96: {"exp", "sigmoid", "entmax15"}, 192: {"exp", "sigmoid"}}
    for arch, dim in product(ARCHITECTURES, HEAD_DIMS):
        flash = [c for c in found if c.family not in ("linear", "decode")]
        names = {c.activation for c in flash if (c.arch, c.head_dim) == (arch, dim)}
        assert names == filled.get(dim, every)


def test_two_activations_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnzoo.core.registry, "_VARIANTS", dict(attnzoo.core.registry._VARIANTS))
    own = attnzoo.Activation("exp", torch.exp, lambda s, phi, shape: phi, triton="elsewhere:exp")
    attnzoo.register_variant(
        attnzoo.Variant(
            "other",
            "",
            "",
            lambda q, k, call: q,
            forms=lambda call: (attnzoo.Pairwise(own, "sum"),),
        )
    )
    with pytest.raises(UsageError, match="different activations of the name 'exp'"):
        activations()
