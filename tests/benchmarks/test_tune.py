"""The command python -m benchmarks tune."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from attnzoo.backends.triton.common import measured
from attnzoo.backends.triton.common.tiles import Config, map_tile
from benchmarks.harness.timing import Calls, Spread, WallClock, interleave
from benchmarks.kernels.compile import Compiled
from benchmarks.kernels.specializations import Specialization
from benchmarks.kernels.stored_tiles import check_output, is_stored, store
from benchmarks.kernels.tune import (
    Timed,
    candidates,
    faster,
    table,
    timings,
    with_tile,
)
from commandline.errors import UsageError
from helpers.commands import benchmarks, error_of
from helpers.processes import output_of


@pytest.mark.slow
def test_tune_without_a_gpu_prints_configurations_within_limits() -> None:
    done = benchmarks("tune", "--kernel", "stats", "--head-dim", "64", "--blocks", "32,64",
                      "--warps", "4", "--stages", "1", "--jobs", "1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("Config")]
    assert rows[0] == "Config(64, 64, 4, 1)"
    # Blocks of 32 queries have too few rows for the tensor cores' instruction of sm_90.
    assert set(rows) == {f"Config(64, {n}, 4, 1)" for n in (32, 64)}
    assert "not timed: that requires --device cuda" in done.stdout


def test_both_orientations_of_dkdv_are_tried() -> None:
    sizes = dict(blocks=[32], warps=[4], stages=[1], parts=[])
    spec = Specialization("dkdv", "sm_90", "bf16", 64, "exp")
    configs = candidates(argparse.Namespace(**sizes), spec)
    assert configs == [Config(32, 32, 4, 1), Config(32, 32, 4, 1, transposed=True)]


def test_tiles_of_the_solver_have_the_size_of_the_block_map() -> None:
    sizes = dict(blocks=[16, 32], warps=[4], stages=[1], parts=[])
    spec = Specialization("threshold", "sm_90", "bf16", 64, "entmax15")
    (config,) = candidates(argparse.Namespace(**sizes), spec)
    assert config[:2] == map_tile(64, 16)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kernel", "threshold"), "--activation must belong to a threshold variant"),
        (
            ("--kernel", "stats", "--activation", "sigmoid"),
            "--activation must be exp for --kernel stats, got 'sigmoid'",
        ),
        (("--kernel", "dq", "--head-dim", "300"), "--head-dim must be an int from 1 to 256"),
        (("--kernel", "dq", "--blocks", "64,x"), "must be powers of two >= 16, got '64,x'"),
        (("--kernel", "dq", "--blocks", "48"), "must be powers of two >= 16, got '48'"),
        (("--kernel", "dq", "--warps", "3"), "must be powers of two >= 1, got '3'"),
        (("--kernel", "dq", "--device", "cuda"), "--device cuda: torch sees no CUDA device"),
    ],
)
def test_invalid_options_exit_with_status_2(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "tune", *args)


SMALL, WIDE = (Config(*size, 1, 1) for size in ((16, 16), (32, 64)))


def test_with_tile_changes_only_one_kernel() -> None:
    call = 0, 16, 64, False, torch.device("cpu")
    with with_tile("dq", SMALL):
        assert measured.tile_of_kernel("dq", *call) == SMALL
        assert measured.tile_of_kernel("forward", *call) != SMALL
    assert measured.tile_of_kernel("dq", *call) != SMALL


def timed(ms: float, current: float, difference: float = 0.0) -> Timed:
    return Timed(*(Spread(x, x, x, 3) for x in (ms, ms / current)), difference)


def test_only_a_faster_tile_with_the_same_result_is_stored() -> None:
    assert faster({SMALL: timed(1.0, 2.0), WIDE: timed(0.5, 2.0, difference=0.1)}) == SMALL
    assert faster({SMALL: timed(2.0, 2.0), WIDE: timed(3.0, 2.0)}) is None
    assert faster({}) is None


def test_stored_tiles_are_read_by_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured.read.cache_clear()
    assert measured.read("GPU") == ([], {})
    dq = Specialization("dq", "sm_90", "bf16", 96, "exp")
    for spec, config in ((dq, WIDE), (dq._replace(dtype="fp32"), SMALL), (dq, SMALL)):
        file = store(spec, config, "GPU")
    assert measured.read("GPU") == ([file], {("dq", 16, 128): SMALL, ("dq", 32, 128): SMALL})
    measured.read.cache_clear()


@pytest.mark.parametrize("document", ["[]", '{"device": "other", "triton": "3.6.0"}'])
def test_a_file_that_tiles_cannot_be_added_to_is_refused_before_timing(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    file = tmp_path / "tiles.json"
    check_output(file)
    file.write_text(document)
    with pytest.raises(UsageError, match=r"--output.*tiles\.json"):
        check_output(file)
    assert file.read_text() == document


def test_a_tile_is_stored_only_from_the_call_whose_class_it_serves() -> None:
    spec = Specialization("dq", "sm_90", "bf16", 128, "exp")
    assert is_stored(spec)
    assert is_stored(spec._replace(kernel="threshold", activation="entmax15"))
    for other in (
        {"head_dim": 96}, {"dtype": "fp16"}, {"activation": "relu"}, {"extra": "window"},
    ):  # fmt: skip
        assert not is_stored(spec._replace(**other)), other


class OneRound(WallClock):
    """Times one round only, because Triton's interpreter is slow and its times are meaningless."""

    def rounds(self, calls: Calls, *limits: float) -> dict[str, list[float]]:
        return interleave(calls, 1, 0.0, warmup=0)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("kernel", "activation", "extra"),
    [
        ("dkdv", "sigmoid", ""),
        ("decode", "exp", ""),
        pytest.param("forward", "exp", "all", marks=pytest.mark.slow),
        pytest.param("stats", "exp", "keys", marks=pytest.mark.slow),
        pytest.param("dq", "q_exp", "", marks=pytest.mark.slow),
        pytest.param("decode", "entmax15", "all", marks=pytest.mark.slow),
    ],
)
def test_timings_measure_every_tile_and_compare_results(
    kernel: str, activation: str, extra: str
) -> None:
    spec = Specialization(kernel, "sm_90", "fp32", 16, activation, extra)
    tiles = [SMALL, WIDE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.kernels.tune.TOKENS", 40)
        patch.setattr("benchmarks.kernels.tune.HEADS", 2)
        by_tile = timings(spec, tiles, 40, OneRound(), "cpu")
    assert list(by_tile) == tiles
    for timed in by_tile.values():
        assert timed.milliseconds.median > 0
        assert timed.ratio.median > 0
        assert timed.difference < 1e-4


def test_table_sorts_by_time_and_reports_wrong_results() -> None:
    row = Compiled("dq", "", "sm_90", 4, 100, 0, 0, "HGMMA")
    fast, slow, wrong = (Config(n, n, 4, 1) for n in (16, 32, 64))
    times = {slow: timed(2.0, 2.0), fast: timed(1.0, 2.0), wrong: timed(0.1, 2.0, float("nan"))}
    lines = list(table([(wrong, row), (slow, row), (fast, row)], times))
    assert [line.split(")")[0] for line in lines[:2]] == [
        "Config(16, 16, 4, 1",
        "Config(32, 32, 4, 1",
    ]
    assert "0.500 × current" in lines[0]
    assert lines[2].startswith("Config(64, 64, 4, 1) DIFFERS")


# Triton's launches are only prepared, and so repeated, outside the interpreter.
LAUNCHED = """
from attnzoo.backends.triton.common.tiles import Config
from attnzoo.backends.triton.flash.forward import flash_forward
from benchmarks.harness.timing import WallClock
from benchmarks.kernels import stand_in, tune
from benchmarks.kernels.specializations import Specialization

names, launched = [param.name for param in flash_forward.params], []

def record(*args):  # the kernel's arguments follow grid, stream, function, metadata and hooks
    values = dict(zip(names, args[9:]))
    launched.append((values["tile"].BLOCK_M.value, values["terms"].scale > 0))

class ThreeRounds(WallClock):
    def rounds(self, calls, *limits):
        for _ in range(3):
            for call in calls.values():
                call()
        return {name: [1.0] for name in calls}

stand_in.install(record)
tune.TOKENS, tune.HEADS = 128, 2
tiles = [Config(rows, 32, 4, 1) for rows in (16, 32)]
spec = Specialization("forward", "sm_90", "bf16", 64, "exp", "")
tune.timings(spec, tiles, 128, ThreeRounds(), "cpu")
print(launched)
"""


@pytest.mark.slow
def test_every_timed_call_launches_its_own_tile_and_a_negative_scale_is_compared() -> None:
    tiles = (128, 16, 32)
    first = [(tile, positive) for tile in tiles for positive in (True, False)]
    assert output_of(LAUNCHED) == str(first + [(tile, True) for tile in tiles] * 3)
