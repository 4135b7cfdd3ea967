"""The command that times packed sequences: its table, file, checks and exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.core import registry
from benchmarks.__main__ import main
from benchmarks.harness.cases import Case
from benchmarks.suites.packed import CALLS, ragged

SMALL = [
    "packed", "--sequences", "3", "--length", "16", "--heads", "2", "--head-dim", "8",
    "--repeats", "3", "--threads", "1",
]  # fmt: skip


@pytest.mark.slow
def test_table_and_file_list_every_variant_with_a_form_and_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main([*SMALL, "--most", "1e9", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    keys = [(row["variant"], row["direction"]) for row in rows]
    cases = [(v, Case.parse(v, 16)) for v in attnzoo.list_variants()]
    with_forms = [v for v, case in cases if case.pairwise or case.linear or case.shares]
    assert keys == [(v, d) for v in with_forms for d in ("forward", "both")]
    for row in rows:
        assert row["wrong"] == []
        assert tuple(row["ratios"]) == CALLS
        assert all(spread["count"] == 3 for spread in row["ratios"].values())
    text = capsys.readouterr().out
    assert "3 × 16 tokens, H=2 D=8 float32, causal, 1 threads; ragged lengths have 1.17 ×" in text


def test_too_large_a_ratio_is_named_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    line = [*SMALL, "--variants", "softmax", "--direction", "forward", "--most", "1e-6"]
    assert main(line) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [error.split(": ")[0] for error in errors] == [f"softmax, forward, {x}" for x in CALLS]
    assert errors[0].endswith("× the batch, at most 1e-06")


def test_wrong_output_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attnzoo.varlen_attention

    def wrong(*args: Any, **options: Any) -> Tensor:
        out = right(*args, **options)
        return torch.cat([out[:-1], out[:1]])

    monkeypatch.setattr(attnzoo, "varlen_attention", wrong)
    line = [*SMALL, "--variants", "softmax", "--direction", "forward", "--most", "1e9"]
    assert main(line) == 1
    assert capsys.readouterr().err == (
        "softmax, forward, varlen: wrong output\nsoftmax, forward, ragged segments: wrong output\n"
    )


def test_a_variant_whose_form_is_shares_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    line = [*SMALL, "--variants", "stick_breaking", "--direction", "forward", "--most", "1e9"]
    assert main(line) == 0
    assert "stick_breaking        forward" in capsys.readouterr().out


def test_variants_without_a_form_are_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(q: Tensor, k: Tensor, call: attnzoo.Call) -> Tensor:
        return call.softmax(call.scores(q, k))

    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    attnzoo.register_variant(attnzoo.Variant("formless", "f", "p", weights))
    assert main([*SMALL, "--variants", "formless"]) == 2
    assert "--variants must list variants with a form, got formless" in capsys.readouterr().err
    assert main([*SMALL, "--direction", ""]) == 2
    assert "--direction must list some of forward, both" in capsys.readouterr().err


def test_ragged_lengths_have_the_same_sum() -> None:
    for sequences, length in ((1, 7), (2, 10), (3, 16), (16, 512), (5, 33)):
        lengths = ragged(sequences, length)
        assert (len(lengths), sum(lengths)) == (sequences, sequences * length)
        assert sequences == 1 or len(set(lengths)) == sequences
