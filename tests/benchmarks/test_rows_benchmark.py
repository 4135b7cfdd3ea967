"""Softmax over rows compiled with numba, and the command python -m benchmarks rows."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.kernels import row_loops, rows
from helpers.commands import error_of
from helpers.row_softmax import assert_softmax, exact, special_rows

SOFTMAX = ("three_pass", "three_pass_stored", "online", "two_pass")
LANES = row_loops.LANES
algorithms = pytest.mark.parametrize("name", SOFTMAX)
# Compiling a function takes up to two seconds.
pytestmark = pytest.mark.slow


def softmax(name: str, x: Tensor) -> Tensor:
    out = torch.full_like(x, 7.0)
    getattr(row_loops, name)(x.numpy(), out.numpy())
    return out


def fused(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = torch.full((len(x), k), 7.0), torch.full((len(x), k), -1)
    row_loops.online_top(x.numpy(), values.numpy(), columns.numpy())
    return values, columns


def separate(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = torch.full((len(x), k), 7.0), torch.full((len(x), k), -1)
    row_loops.top(softmax("three_pass", x).numpy(), values.numpy(), columns.numpy())
    return values, columns


# ---- the loops ----------------------------------------------------------------------------------


@algorithms
def test_rows_of_any_length_agree_with_the_definition(name: str) -> None:
    for columns in (1, 3, LANES - 1, LANES, LANES + 1, 10 * LANES, 20 * LANES + 7):
        x = 5 * torch.randn(3, columns)
        assert_softmax(softmax(name, x), x, LANES)


@algorithms
def test_large_and_hidden_entries(name: str) -> None:
    for row in special_rows(3 * LANES + 5, torch.float32).values():
        assert_softmax(softmax(name, row[None]), row[None], LANES)


@algorithms
def test_a_maximum_that_rises_in_each_block(name: str) -> None:
    x = torch.arange(6.0 * LANES)[None]
    assert_softmax(softmax(name, x), x, LANES)
    assert_softmax(softmax(name, -x), -x, LANES)


@algorithms
def test_hidden_rows_are_zero_and_nan_stays_in_its_row(name: str) -> None:
    x = torch.randn(5, 2 * LANES + 1)
    x[0] = -torch.inf
    x[1, 3] = torch.nan
    x[2, -1] = torch.inf
    x[3, 0] = x[3, -1] = torch.inf
    found = softmax(name, x)
    assert bool((found[0] == 0).all())
    assert bool(found[1:4].isnan().all())
    assert_softmax(found[4:], x[4:], LANES)


def test_two_pass_at_the_ends_of_its_range() -> None:
    for end in (1e5, -0.99e5):
        x = end - torch.arange(100.0)[None]
        assert_softmax(softmax("two_pass", x), x, LANES)


@pytest.mark.parametrize("run", [fused, separate])
def test_top_k_agrees_with_the_definition(run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    for columns, k in ((5, 5), (LANES, 3), (7 * LANES + 3, 5), (LANES + 1, 1)):
        x = 5 * torch.randn(4, columns)
        values, found = run(x, k)
        expected = exact(x).topk(k, 1)
        assert torch.equal(found, expected.indices)
        torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("run", [fused, separate])
def test_top_k_of_equal_entries_takes_the_first(
    run: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    x = torch.zeros(1, 3 * LANES)
    x[0, 2 * LANES + 5] = 2.0
    x[0, [9, LANES, LANES + 4]] = 1.0
    _, found = run(x, 5)
    assert found.tolist() == [[2 * LANES + 5, 9, LANES, LANES + 4, 0]]


def test_fused_top_k_of_hidden_rows_and_nan() -> None:
    x = torch.randn(2, LANES)
    x[0] = -torch.inf
    x[1, -1] = torch.nan
    values, columns = fused(x, 3)
    assert values[0].tolist() == [0.0, 0.0, 0.0]
    assert columns[0].tolist() == [0, 1, 2]
    assert bool(values[1].isnan().all())


@pytest.mark.parametrize("name", [*SOFTMAX, "online_top"])
def test_exponentials_are_vectorized(name: str) -> None:
    """A scalar fma occurs only in the remainder of a loop."""
    x = torch.randn(2, 3)
    _ = fused(x, 1) if name == "online_top" else softmax(name, x)
    (code,) = getattr(row_loops, name).inspect_llvm().values()
    assert len(re.findall(r"call <\d+ x float> @llvm\.fma\.v\d+f32", code)) >= 7


def test_powers_of_two_are_exact() -> None:
    n = np.arange(-130, 1).astype(np.float32)
    found = np.array([row_loops.power_of_two(x) for x in n], np.float32)
    assert np.array_equal(found, np.where(n > -127, np.ldexp(1.0, n.astype(int)), 0.0))


# ---- the command --------------------------------------------------------------------------------

TINY = ["rows", "--device", "cpu", "--columns", "200,300", "--rows", "3,2", "--rounds", "3"]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_SECONDS", 0.0)


def test_rows_command_measures_each_algorithm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main([*TINY, "--top", "4", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["environment"]["numba"]
    assert document["settings"]["top"] == 4
    sizes = [(row["rows"], row["columns"]) for row in document["rows"]]
    names = [row["algorithm"] for row in document["rows"]]
    assert sizes == [(3, 200)] * 8 + [(2, 300)] * 8
    assert {rows.THREE, rows.ONLINE, rows.TWO, rows.THEN_TOP, rows.FUSED} < set(names)
    for row in document["rows"]:
        assert row["seconds"]["median"] > 0
        assert row["seconds"]["count"] >= 3
        assert row["speedup"]["lower"] <= row["speedup"]["median"] <= row["speedup"]["upper"]
        assert row["error"] < 1e-5
        if row["algorithm"] in (rows.THREE, rows.THEN_TOP):
            assert row["speedup"]["median"] == 1
    output = capsys.readouterr().out
    assert "3 rows × 200 columns, float32" in output
    assert output.count("up to 1.28 AVX-512, 1.18 AVX2") == 2
    assert output.count("up to 5") == 2


def test_wrong_algorithm_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = row_loops.two_pass

    def wrong(x: Any, out: Any) -> None:
        correct(x, out)
        out *= 1.001

    monkeypatch.setattr(row_loops, "two_pass", wrong)
    assert main(TINY) == 1
    output = capsys.readouterr().out
    assert len(re.findall(r"two-pass +1\.0e-03 +WRONG, not timed", output)) == 2


def test_nan_is_an_error() -> None:
    assert rows.Result(1, 1, "a", float("nan"), 1.0).wrong
    assert not rows.Result(1, 1, "a", 0.5, 1.0).wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", "3"), "--rows cannot be used without --columns"),
        (("--columns", "8,9", "--rows", "1,2,3"), "one for each of the 2 numbers of --columns"),
        (("--columns", "0"), "--columns: must be positive ints separated by commas"),
        (("--columns", "9,4"), "--top must be at most the 4 columns of a row, got 5"),
        (("--top", "0"), "--top: must be an int from 1"),
        (("--dtype", "float16"), "--dtype must be float32 on a CPU, got float16"),
        (("--rounds", "2"), "--rounds: must be an int from 3 to 1000000, got '2'"),
        (("--json", "."), "--json must be a file, got the folder ."),
    ],
)
def test_invalid_options_exit_with_status_2(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "rows", "--device", "cpu", *options)


def test_missing_numba_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "installed", lambda package: package != "numba")
    message = "rows on a CPU requires numba. Install it with: pip install -e '.[rows]'"
    assert message in error_of(capsys, *TINY)


def test_sizes_default_to_arrays_of_equal_size() -> None:
    assert rows.sizes_of(Namespace(columns=None, rows=None)) == list(rows.SIZES)
    assert rows.sizes_of(Namespace(columns=[2**10, 2**26], rows=None)) == [
        (2**15, 2**10),
        (1, 2**26),
    ]
    assert rows.sizes_of(Namespace(columns=[8, 9], rows=[3])) == [(3, 8), (3, 9)]


@pytest.mark.interpreter
def test_algorithms_on_a_gpu_agree_with_the_definition() -> None:
    x = torch.randn(3, 100)
    made = dict(rows.on_gpu(x))
    assert list(made) == [rows.THREE, rows.ONLINE, rows.TWO, "torch, softmax"]
    for algorithm in made.values():
        algorithm.out.fill_(7.0)
        algorithm.run()
        assert_softmax(algorithm.out, x, 64)
