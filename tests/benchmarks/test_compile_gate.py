"""The command python -m benchmarks compile."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

import attnzoo
from attnzoo.backends.triton.common import measured, tiles
from attnzoo.backends.triton.common.groups import mapped
from attnzoo.core import registry
from benchmarks.kernels.activations import activations, plugin_activations
from benchmarks.kernels.compile import Compiled, problem, selected
from benchmarks.kernels.launches import describe
from benchmarks.kernels.specializations import (
    ARCHITECTURES,
    HEAD_DIMS,
    KERNELS,
    MODELS,
    STAGES,
    Specialization,
    quick_specializations,
    specializations,
)
from commandline.errors import UsageError
from helpers.commands import benchmarks, error_of


@pytest.mark.slow
def test_compile_writes_resource_usage_to_json(tmp_path: Path) -> None:
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
        "exp D=64 bf16 mask",
        "exp D=64 bf16 peak",
        "exp D=64 bf16 softcap",
        "exp D=64 bf16 fp32 mask",
    ]
    for row in rows:
        assert set(row) == {
            "kernel", "config", "arch", "warps", "registers", "spill_bytes", "shared_bytes",
            "tensor_core",
        }  # fmt: skip
        assert 0 < row["registers"] <= 255
        assert row["spill_bytes"] == 0
        assert row["tensor_core"] == "HGMMA"
        assert str(row["registers"]) in done.stdout


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            Compiled("dq", "c", "sm_90", 8, 255, 9, 0, "HGMMA"),
            "spills 9 bytes of registers, limit 8",
        ),
        (
            Compiled("dq", "c", "sm_90", 8, 255, 8, 101, "HGMMA"),
            "101 bytes of shared memory, limit 100",
        ),
        (
            Compiled("dq", "c", "sm_90", 16, 129, 0, 100, "HGMMA"),
            "needs 69632 registers for 16 warps, limit 65536",
        ),
        (Compiled("dq", "c", "sm_90", 16, 128, 0, 100, "HGMMA"), None),
        (Compiled("dq", "c", "sm_90", 8, 255, 0, 100, None), "no tensor-core"),
        (Compiled("dq", "c", "sm_90", 8, 255, 0, 100, "HMMA"), "HMMA instead of HGMMA"),
    ],
)
def test_violation_names_the_exceeded_limit(row: Compiled, words: str | None) -> None:
    violated = row.violation(100, 8, "HGMMA")
    assert violated is None if words is None else words in str(violated)


def test_fp32_kernels_need_no_tensor_cores_and_safe_ones_not_those_of_the_generation() -> None:
    row = Compiled("dq", "c", "sm_90", 8, 100, 0, 0, None)
    assert row.violation(100, 0, None) is None
    assert replace(row, tensor_core="HMMA").violation(100, 0, "") is None


@pytest.mark.parametrize(
    ("spec", "version", "spilled"),
    [
        (Specialization("dq", "sm_90", "bf16", 64, "exp"), "3.9.0", 0),
        (Specialization("dq", "sm_90", "bf16", 128, "exp", "alibi"), "4.0", 0),
        (Specialization("dq", "sm_90", "bf16", 64, "exp"), "3.6.0", 128),
        (Specialization("dq", "sm_90", "bf16", 256, "exp"), "3.9.0", 64),
        (Specialization("dq", "sm_90", "fp32", 64, "exp"), "3.9.0", 64),
        (Specialization("dq", "sm_90", "bf16", 64, "exp", "mask"), "3.9.0", 64),
        (Specialization("dkdv", "sm_90", "bf16", 64, "exp", "alibi"), "3.9.0", 64),
        (Specialization("dq", "sm_90", "bf16", 64, "exp", "all"), "3.9.0", 512),
        (Specialization("linear dx", "sm_90", "bf16", 64), "3.9.0", 0),
    ],
)
def test_plain_calls_in_bf16_may_not_spill(
    spec: Specialization, version: str, spilled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    row = Compiled(spec.kernel, spec.config, spec.arch, 4, 255, spilled, 0, "HGMMA")
    assert problem(spec, row) is None
    assert "spills" in str(problem(spec, replace(row, spill_bytes=spilled + 4)))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--arch", "sm_70", "--arch must list some of sm_80, sm_90, sm_100, got 'sm_70'"),
        ("--head-dims", "300", "--head-dims must be multiples of 8 from 8 to 256"),
        ("--head-dims", "36", "--head-dims must be multiples of 8"),
        ("--kernels", "encode", "--kernels must list some of forward"),
        ("--quick", "--head-dims=64", "--head-dims cannot be combined with --quick"),
        ("--jobs", "0", "--jobs must be an int >= 1, got 0"),
        ("--json", ".", "--json must be a file, got the folder ."),
        ("--json", "/dev/null/x.json", "--json /dev/null/x.json: "),
        ("--json", "/proc/x.json", "--json /proc/x.json: "),
    ],
)
def test_invalid_options_exit_with_status_2(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "compile", option, value)


def test_quick_with_a_plugin_is_an_error() -> None:
    args = argparse.Namespace(
        jobs=1, json=None, arch="sm_90", kernels="dq", quick=True, head_dims=None,
        plugin=Path("own.py"),
    )  # fmt: skip
    with pytest.raises(UsageError, match="--quick cannot be combined with --plugin"):
        selected(args)


def test_a_plugin_compiles_the_activations_that_no_other_variant_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the library too."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    file = tmp_path / "gate_plugin.py"
    file.write_text("""
from attnzoo import Activation, Pairwise, Variant, register_variant
from attnzoo.core.activations import EXP, TRITON

NEW = Activation("new", lambda s, shape: s, lambda s, phi, shape: s, triton=TRITON + "new")
for name, activation in (("gate_exp", EXP), ("gate_new", NEW)):
    forms = lambda call, activation=activation: (Pairwise(activation, "sum"),)
    variant = Variant(name=name, formula="", paper="", weights=lambda q, k, call: q, forms=forms)
    register_variant(variant)
""")
    assert plugin_activations(file) == ["new"]


def test_every_tile_of_the_tables_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    def spy(kernel: str, arch: int, bits: int, head_dim: int, safe: bool, device: Any) -> Any:
        config = tiles.tile_of_table(kernel, arch, bits, head_dim, safe)
        used.add((kernel, bits, config))
        return config

    monkeypatch.setattr(measured, "tile_of_kernel", spy)
    every = list(specializations(list(ARCHITECTURES), list(HEAD_DIMS)))
    for spec in every:
        describe(spec)
    linear = {(c.dtype, c.kernel) for c in every if c.family == "linear"}
    assert linear == {(d, f"linear {x}") for d in ("bf16", "fp32") for x in tiles.LINEAR_KERNELS}
    rows = [*tiles.PLAIN.items(), *tiles.SAFE.items()]
    rows += [((name, 16), row) for x in tiles.OVERRIDES.values() for (_, name), row in x.items()]
    assert used == {(*key, config) for key, row in rows for config in row.values()}


def kind_of(value: Any) -> Any:
    """What the compiled code knows of an argument: of a pointer its type and alignment."""
    if isinstance(value, tl.constexpr) or value is None or callable(value):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return type(value)


def key(spec: Specialization) -> tuple:
    """The kernel, architecture, arguments and options that determine the compiled code."""
    launch, kinds = describe(spec), []
    for name, parameter in inspect.signature(launch.kernel.fn).parameters.items():
        value = launch.args[name]
        constant = parameter.annotation is tl.constexpr
        kinds.append((name, repr(value) if constant else mapped(lambda x, path: kind_of(x), value)))
    return launch.kernel, spec.arch, *kinds, repr(launch.options)


def test_no_kernel_is_compiled_twice() -> None:
    keys = [key(spec) for spec in specializations(list(ARCHITECTURES), list(HEAD_DIMS))]
    assert len(set(keys)) == len(keys)


def test_quick_compiles_every_kernel_in_few_specializations() -> None:
    """The flash kernels are compiled for causal and full calls, with and without a gain."""
    quick = list(quick_specializations(list(ARCHITECTURES)))
    assert set(quick) < set(specializations(list(ARCHITECTURES), list(HEAD_DIMS)))
    assert len(quick) < 365
    for arch, dim in product(ARCHITECTURES, (64, 128)):
        here = [c for c in quick if (c.arch, c.head_dim) == (arch, dim)]
        once = {"rows", "segments"} if dim != 64 else set()
        assert {c.family for c in here} == set(KERNELS) - once
        for kernel in ("forward", "dq", "dkdv"):
            launches = [describe(c) for c in here if (c.kernel, c.activation) == (kernel, "exp")]
            calls = {(x.args["right"] is None, x.args["vectors"].gain is None) for x in launches}
            assert calls == set(product((True, False), repeat=2))


def test_every_kernel_architecture_and_activation_is_compiled() -> None:
    table = list(specializations(list(ARCHITECTURES), list(HEAD_DIMS)))
    assert {spec.family for spec in table} == set(KERNELS)
    for arch, stage in product(ARCHITECTURES, (*STAGES, "decode", "decode products")):
        assert any((c.arch, c.kernel) == (arch, stage) for c in table)
    every = {"exp", "exp-select", "exp-mass", "sigmoid", "entmax15", "q_exp", "taylor2"}
    rare = {"relu", "relu_power", "silu", "softpick", "softplus"}
    filled = {48: {"exp", "sigmoid"}, 96: {"exp", "sigmoid", "entmax15"}, 192: {"exp", "sigmoid"}}
    for arch, dim in product(ARCHITECTURES, HEAD_DIMS):
        flash = [c for c in table if c.family not in ("linear", "decode", "shares", "rows")]
        names = {c.activation for c in flash if (c.arch, c.head_dim) == (arch, dim)}
        assert names - rare == filled.get(dim, every)
        assert names & rare == (rare if dim in (64, 128) else set())


def test_calls_of_models_are_compiled() -> None:
    """Padding masks, and dense boolean masks of calls that are not causal."""
    table = set(specializations(list(ARCHITECTURES), list(HEAD_DIMS)))
    for arch, kernel in product(ARCHITECTURES, ("forward", "dq", "dkdv")):
        for extra, dense in (("keys", False), *((e, "bool" in e) for e in MODELS)):
            spec = Specialization(kernel, arch, "bf16", 128, "exp", extra)
            assert spec in table
            args = describe(spec).args
            assert args["visible"].mask.dtype == torch.uint8
            assert (args["mask_m"] is not None) == dense
            assert (args["right"] is None, args["vectors"].gain is None) == 2 * (extra != "keys",)


def test_two_activations_with_one_name_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnzoo.core.registry, "_VARIANTS", dict(attnzoo.core.registry._VARIANTS))
    activation = attnzoo.Activation(
        "exp", torch.exp, lambda s, phi, shape: phi, triton="elsewhere:exp"
    )
    attnzoo.register_variant(
        attnzoo.Variant(
            "other",
            "",
            "",
            lambda q, k, call: q,
            forms=lambda call: (attnzoo.Pairwise(activation, "sum"),),
        )
    )
    with pytest.raises(UsageError, match="different activations named 'exp'"):
        activations()
