"""The command ``benchmarks distributed`` checks results and bytes on ranks of its own."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.cases import Case
from benchmarks.harness.traffic import Sizes, Traffic, formula
from benchmarks.suites import distributed
from commandline.errors import UsageError


@pytest.mark.slow
def test_the_command_compares_results_and_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    options = "--variants softmax,entmax,elu,topk --length 32 --heads 3 --kv-heads 1 --head-dim 8"
    assert main(["distributed", *options.split(), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12
    assert [row["variant"] for row in rows if row["rejected"]] == ["topk"]
    for row in rows:
        if not row["rejected"]:
            assert row["error"] < 1e-5
            assert row["forward"] == row["forward_formula"] > 0
            assert row["backward"] == row["backward_formula"] > 0
    assert "predicted ms at 50 GB/s" in capfd.readouterr().out


def test_formulas_by_hand() -> None:
    # 2 ranks, 10 tokens each, 4 heads, 2 key/value heads, D = 8: K = V = 640 bytes, Q = O = 1280
    sizes = Sizes(2, 1, 4, 2, 10, 8, 8, 4)
    softmax = Case.parse("softmax", 20)
    assert formula("all_gather", softmax, sizes, 0) == Traffic(1280, 1280)
    assert formula("ring", softmax, sizes, 0) == Traffic(1280, 1280 + 2 * 1280)
    # Half of Q and O, and one of two key/value heads
    assert formula("ulysses", softmax, sizes, 0) == Traffic(1280 + 640, 1280 + 640)
    threshold = formula("ring", Case.parse("entmax", 20), sizes, 0, solver_steps=4)
    assert threshold == Traffic(1280 + 5 * 640, 1280 + 2 * 1280)


def parsed(options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    distributed.add_parser(parser.add_subparsers())
    return parser.parse_args(["distributed", *options.split()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--length 30", "--length must be a multiple of 4, got 30"),
        ("--heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads, got 3"),
        ("--methods=", "--methods must list some of ulysses, all_gather, ring, got ''"),
    ],
)
def test_wrong_options(options: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        distributed.run(parsed(options))
