"""Means, intervals, paired tests and Holm's correction, and the marks of tables for them."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
import scipy.stats

from evals.reporting.tables import ERROR, notes, shown, tables_of_task, verdict
from evals.results.statistics import estimate, holm, t_test
from evals.results.summary import Series, groups
from evals.results.summary_csv import csv_text, summary_of
from evals.task import Metric
from helpers.evals_rows import grid, row

SSMAX = Series("ssmax")
PERCENT = Metric("", "", factor=100, digits=1)


def test_estimates_of_three_one_and_no_seeds() -> None:
    # The standard error is 0.2 / √3.
    assert shown(estimate([0.5, 0.7, 0.9]), PERCENT, ERROR) == "70.0 ±11.5"
    assert shown(estimate([0.25]), PERCENT, ERROR, sign=True) == "+25.0"
    assert shown(estimate([]), PERCENT) == "—"


@pytest.mark.parametrize("count", [2, 5, 10])
def test_intervals_cover_the_mean_of_normal_scores_in_95_percent_of_cases(count: int) -> None:
    draws = np.random.Generator(np.random.Philox(count)).normal(size=(4000, count))
    ends = [one.interval for x in draws.tolist() if (one := estimate(x)) and one.interval]
    covered = sum(low <= 0 <= high for low, high in ends) / len(draws)
    assert covered == pytest.approx(0.95, abs=0.011)  # three standard errors of 4000 draws


@pytest.mark.parametrize("count", [3, 4, 5, 10, 11])
def test_the_paired_t_test_is_student_s(count: int) -> None:
    for case in range(10):
        differences = [math.sin(1 + 7 * case + i) + 0.1 * case for i in range(count)]
        mean = sum(differences) / count
        error = (sum((x - mean) ** 2 for x in differences) / (count - 1) / count) ** 0.5
        expected = 2 * scipy.stats.t.sf(abs(mean / error), count - 1)
        assert t_test(differences) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([0.25, 0.25, 0.25], 0),
        ([0.9 - 0.6, 0.8 - 0.5, 0.7 - 0.4], 0),  # these differ by rounding only
        ([0.0, 0.0, 0.0], 1),
        ([0.5, 0.4], None),
    ],
)
def test_the_paired_t_test_of_equal_differences_and_of_few(
    differences: list[float], p: float | None
) -> None:
    assert t_test(differences) == p


def test_holm_multiplies_by_the_number_of_remaining_comparisons() -> None:
    assert holm({"a": 0.04, "b": 0.001, "c": 0.03, "d": 0.5}) == pytest.approx(
        {"b": 0.004, "c": 0.09, "a": 0.09, "d": 0.5}
    )


def test_differences_from_softmax_are_marked_after_the_correction() -> None:
    noise = (-0.01, 0.0, 0.01, 0.005, -0.005)
    scores = {
        "softmax": {16: (0.96, 1), 64: (0.5, 1)},
        "ssmax": {16: (0.965, -1), 64: (0.8, -1)},  # far better only at 64
        "sigmoid": {16: (0.96, 1), 64: (0.3, -1)},
    }
    rows = grid({
        variant: {n: [score + sign * x for x in noise] for n, (score, sign) in by_length.items()}
        for variant, by_length in scores.items()
    })  # fmt: skip
    (group,) = groups(rows)
    summary = summary_of(group)
    marks = {s.variant: [verdict(summary, s, x) for x in (16, 64)] for s in group.series}
    assert marks == {"ssmax": ["", "⁺"], "softmax": ["", ""], "sigmoid": ["", "⁻"]}
    assert len(summary.p) == 4  # two variants at two lengths
    tests = [t_test(point.versus_baseline) for point in group.points.values()]
    assert group.p_values()[SSMAX, 64] == 4 * min(p for p in tests if p)
    # A table of one length has fewer comparisons, so their p values are smaller.
    assert group.p_values([64])[SSMAX, 64] == group.p_values()[SSMAX, 64] / 2
    assert any("Holm's correction for the 4 comparisons" in line for line in notes(summary))
    (table,) = (t for t in tables_of_task(group, summary) if "paired by seed" in t.title)
    assert [line[0] for line in table.rows] == ["ssmax", "sigmoid"]
    assert "(p < 0.001)" in table.rows[0][2]
    (bits,) = groups([r | {"task": "language-model", "metrics": {"bits": r["metrics"]["accuracy"]}}
                      for r in rows])  # fmt: skip
    # Of a loss, the lower value is better.
    assert verdict(summary_of(bits), Series("sigmoid"), 64) == "⁺"


@pytest.mark.parametrize(
    ("chosen", "score", "noted"),
    [(0.001, 0.5, True), (0.01, 0.5, True), (0.003, 0.5, False), (0.001, 1.0, False)],
)
def test_notes_name_untrained_rows_with_a_choice_at_the_edge_of_the_sweep(
    chosen: float, score: float, noted: bool
) -> None:
    tried = [{"values": {"learning_rate": x}, "scores": [score]} for x in (0.001, 0.003, 0.01)]
    tuned = {"values": {"learning_rate": chosen}, "tried": tried}
    (group,) = groups([row("sigmoid", score) | {"tuned": tuned}])
    text = "For sigmoid the best value was the smallest or largest of the sweep"
    assert any(text in line for line in notes(summary_of(group))) == noted
    (line,) = csv.DictReader(io.StringIO(csv_text([group])))
    assert line["at_edge"] == str(int(noted))


def test_a_row_whose_seeds_disagree_is_marked_unstable() -> None:
    rows = grid({"softmax": {16: (0.96, 0.99, 1.0), 64: (0.0, 0.1, 0.2)},
                 "ssmax": {16: (0.8, 0.99, 0.98)}})  # fmt: skip
    (group,) = groups(rows)
    assert list(map(group.name, group.series)) == ["softmax", "ssmax † 1/3 ‡"]
    assert any("differ by more than 10 points" in line for line in notes(summary_of(group)))
    lines = csv.DictReader(io.StringIO(csv_text([group])))
    assert {line["variant"]: line["unstable"] for line in lines} == {"softmax": "0", "ssmax": "1"}
    (losses,) = groups([
        r | {"task": "language-model", "metrics": {"bits": 5 * r["metrics"]["accuracy"]}}
        for r in rows
    ])  # fmt: skip
    assert not any(losses.facts(series).unstable for series in losses.series)
