"""python -m benchmarks tune: what it tries, how it ranks, and that a wrong result is no winner."""

from __future__ import annotations

import pytest

from attnzoo.backends.triton.common.configurations import Config
from attnzoo.backends.triton.flash import launch
from benchmarks.harness.timing import Calls, Spread, WallClock, interleave
from benchmarks.kernels.cells import Cell
from benchmarks.kernels.compile import Compiled
from benchmarks.kernels.tune import Tile, Timed, replaced, table, timings
from helpers.commands import benchmarks, error_of


@pytest.mark.slow
def test_without_a_gpu_it_prints_what_compiles_within_the_limits() -> None:
    done = benchmarks("tune", "--kernel", "stats", "--head-dim", "64", "--blocks", "32,64",
                      "--warps", "4", "--stages", "1", "--jobs", "1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("Config")]
    assert rows[0] == "Config(64, 64, 4, 1)"
    assert set(rows) == {f"Config({m}, {n}, 4, 1)" for m in (32, 64) for n in (32, 64)}
    assert "nothing was timed" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kernel", "threshold"), "--kernel threshold is for a threshold's activation"),
        (
            ("--kernel", "stats", "--activation", "sigmoid"),
            "--kernel stats is for --activation exp",
        ),
        (("--kernel", "dq", "--head-dim", "300"), "--head-dim must be from 1 to 256, got 300"),
        (("--kernel", "dq", "--blocks", "64,x"), "expected powers of two from 16 on"),
        (("--kernel", "dq", "--blocks", "48"), "expected powers of two from 16 on"),
        (("--kernel", "dq", "--warps", "3"), "expected powers of two from 1 on"),
    ],
)
def test_bad_options_are_refused(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "tune", *args)


SMALL, WIDE = (Tile(Config(*size, 1, 1), None) for size in ((16, 16), (32, 64)))


def test_a_replaced_row_is_that_kernels_alone() -> None:
    with replaced("dq", SMALL):
        assert launch.pick("dq", 0, 16, 64, "") == SMALL.config
        assert launch.pick("forward", 0, 16, 64, "") != SMALL.config
    assert launch.pick("dq", 0, 16, 64, "") != SMALL.config


class OneRound(WallClock):
    """The interpreter is slow, and how slow tells nothing about a kernel."""

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
        pytest.param("threshold", "q_exp", "", marks=pytest.mark.slow),
        pytest.param("decode", "entmax15", "all", marks=pytest.mark.slow),
    ],
)
def test_times_each_and_finds_the_same_result(kernel: str, activation: str, extra: str) -> None:
    cell = Cell(kernel, "sm_90", "fp32", 16, activation, extra)
    mapped = kernel == "threshold"
    tiles = [Tile(t.config, t.config[:2] if mapped else None) for t in (SMALL, WIDE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.kernels.tune.TOKENS", 40)
        patch.setattr("benchmarks.kernels.tune.HEADS", 2)
        found = timings(cell, tiles, 40, OneRound(), "cpu")
    assert list(found) == tiles
    for timed in found.values():
        assert timed.milliseconds.median > 0
        assert timed.of_table.median > 0
        assert timed.difference < 1e-4


def test_the_fastest_comes_first_and_a_wrong_one_is_named() -> None:
    row = Compiled("dq", "", "sm_90", 100, 0, 0, "HGMMA")
    fast, slow, wrong = (Tile(Config(n, n, 4, 1), None) for n in (16, 32, 64))

    def timed(ms: float, difference: float) -> Timed:
        return Timed(*(Spread(x, x, x, 3) for x in (ms, ms / 2)), difference)

    times = {slow: timed(2.0, 0.0), fast: timed(1.0, 0.0), wrong: timed(0.1, float("nan"))}
    lines = list(table([(wrong, row), (slow, row), (fast, row)], times))
    assert [line.split(")")[0] for line in lines[:2]] == [
        "Config(16, 16, 4, 1",
        "Config(32, 32, 4, 1",
    ]
    assert "0.500 of the table's" in lines[0]
    assert lines[2].startswith("Config(64, 64, 4, 1) DIFFERS")
