"""The command python -m benchmarks rows."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.kernels import rows
from helpers.commands import error_of
from helpers.row_softmax import assert_softmax

TINY = ["rows", "--device", "cpu", "--columns", "200,300", "--rows", "3,2", "--rounds", "3"]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_SECONDS", 0.0)


@pytest.mark.slow  # numba compiles the loops
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
    assert sizes == [(3, 200)] * 7 + [(2, 300)] * 7
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


@pytest.mark.slow
def test_wrong_algorithm_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.kernels import row_loops

    correct = row_loops.two_pass

    def wrong(x: Any, out: Any) -> None:
        correct(x, out)
        out *= 1.001

    monkeypatch.setattr(row_loops, "two_pass", wrong)
    assert main(TINY) == 1
    output = capsys.readouterr().out
    assert len(re.findall(r"two-pass +1\.0e-03 +WRONG, not timed", output)) == 2


@pytest.mark.slow
def test_rows_command_finds_all_columns_as_the_largest() -> None:
    assert main([*TINY[:3], "--columns", "6", "--rows", "2", "--top", "6", "--rounds", "3"]) == 0


def test_nan_is_an_error() -> None:
    result = rows.Result(1, 1, "a", float("nan"), 1.0)
    assert result.wrong
    assert result.record()["error"] is None
    assert not rows.Result(1, 1, "a", 0.5, 1.0).wrong


def test_error_of_small_weights_is_relative_to_the_least_normal_number() -> None:
    exact = torch.tensor([[0.75, 2e-5]], dtype=torch.float64)
    assert rows.error_of(exact.half(), exact) <= torch.finfo(torch.float16).eps
    assert rows.error_of(exact.half() * 1.01, exact) > 0.009


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", "3"), "--rows requires --columns"),
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


def test_top_k_on_a_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "--top requires --device cpu" in error_of(capsys, "rows", "--top", "3")


def test_missing_numba_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "installed", lambda package: package != "numba")
    message = "rows on a CPU requires numba. Install it with: pip install -e '.[rows]'"
    assert message in error_of(capsys, *TINY)


def test_sizes_default_to_arrays_of_equal_size() -> None:
    assert rows.sizes_of(Namespace(columns=None, rows=None, device="cpu")) == [*rows.SIZES["cpu"]]
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
        algorithm.compute()
        assert_softmax(algorithm.out, x, 64)
