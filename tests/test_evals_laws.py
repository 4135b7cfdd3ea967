"""The laws: the closed forms hold, and a wrong one is found."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

import evals.laws as laws
from evals.__main__ import main


def test_every_law_holds_and_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for law in laws.LAWS:
        assert f"{law}: " in text
    assert "leading term for n → ∞" in text
    assert (tmp_path / "laws.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "laws.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {int(line["n"]) for line in lines} == set(laws.LENGTHS)
    assert {line["gap"] for line in lines} == {"fixed", "shrinking"}
    assert all(line["failed"] == "0" for line in lines)


@pytest.mark.parametrize(
    "wrong",
    [
        laws.Law("softmax", {}, lambda n, gap: 1 / (1 + n * math.exp(-gap))),  # n for n − 1
        laws.Law("sparsemax", {}, None, laws.entmax_shrinking(1.8)),
        laws.Law("softmax", {}, None, lambda n, kappa: math.nan),
    ],
)
def test_a_wrong_law_is_found(
    wrong: laws.Law, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert laws.main(tmp_path, laws=(wrong,)) == 1
    assert f"broken: {wrong.variant}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("law", "n", "gap", "value"),
    [  # worked by hand
        (laws.softmax_fixed, 2, math.log(3), 3 / 4),
        (laws.sigmoid_fixed, 3, math.log(3), 1 / 2),
        (laws.sparsemax_fixed, 4, 0.5, 5 / 8),
        (laws.entmax15_fixed, 2, 0.0, 1 / 2),
        (laws.entmax15_fixed, 10**12, 1.0, 1 / 4),
        (laws.entmax15_fixed, 4, 2.0, 1.0),
        (laws.with_log_gain(laws.softmax_fixed, 1.0), 5, 1.0, 5 / 9),
    ],
)
def test_closed_forms(law, n: int, gap: float, value: float) -> None:
    assert law(n, gap) == pytest.approx(value, rel=1e-5)


def test_entmax_law_is_not_held_where_its_support_exceeds_n() -> None:
    law = next(law for law in laws.LAWS if str(law) == "sparsemax")
    assert not law.holds(1024, 0.001)
    assert law.holds(1024, laws.KAPPA)
