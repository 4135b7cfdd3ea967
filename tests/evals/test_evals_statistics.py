"""Paired tests, Holm's correction, and the marks of tables for them and for unstable rows."""

from __future__ import annotations

import csv
import io
import math

import pytest
import scipy.stats

from evals.reporting.scores import of_group, of_summary
from evals.reporting.tables import legend, score_tables
from evals.results.paired import holm, t_test
from evals.results.summary import Series, groups
from evals.results.summary_csv import csv_text
from helpers.evals_rows import row

SSMAX = Series("ssmax", "none")


@pytest.mark.parametrize("count", [3, 4, 5, 10, 11])
def test_the_paired_t_test_agrees_with_scipy(count: int) -> None:
    for case in range(10):
        differences = [math.sin(1 + 7 * case + i) + 0.1 * case for i in range(count)]
        expected = scipy.stats.ttest_1samp(differences, 0).pvalue
        assert t_test(differences) == pytest.approx(expected, rel=1e-9, abs=1e-14)


def test_the_paired_t_test_of_equal_differences_and_of_few() -> None:
    assert t_test([0.25, 0.25, 0.25]) == 0
    assert t_test([0.9 - 0.6, 0.8 - 0.5, 0.7 - 0.4]) == 0  # these differ by rounding only
    assert t_test([0.0, 0.0, 0.0]) == 1
    assert t_test([0.5, 0.4]) is None


def test_holm_multiplies_by_the_number_of_remaining_comparisons() -> None:
    assert holm({"a": 0.04, "b": 0.001, "c": 0.03, "d": 0.5}) == pytest.approx(
        {"b": 0.004, "c": 0.09, "a": 0.09, "d": 0.5}
    )


def test_differences_from_softmax_are_marked_after_the_correction() -> None:
    noise = (-0.01, 0.0, 0.01, 0.005, -0.005)
    rows = [
        row(variant, score + sign * noise[seed], seed=seed, length=length)
        for variant, length, score, sign in (
            ("softmax", 16, 0.96, 1), ("softmax", 64, 0.5, 1),
            ("ssmax", 16, 0.965, -1), ("ssmax", 64, 0.8, -1),  # far better only at 64
            ("sigmoid", 16, 0.96, 1), ("sigmoid", 64, 0.3, -1),
        )
        for seed in range(5)
    ]  # fmt: skip
    (group,) = groups(rows)
    scores = of_group(group, group.task.score)
    marks = {line.variant: [scores.mark(value) for value in line.values] for line in scores.lines}
    assert marks == {"ssmax": ["", "⁺"], "softmax": ["", ""], "sigmoid": ["", "⁻"]}
    p = group.p_values()
    assert len(p) == 4  # two variants at two lengths
    assert p[SSMAX, 64] == 4 * min(point.p for point in group.points.values() if point.p)
    # A table of one length has fewer comparisons, so their p values are smaller.
    assert group.p_values([64])[SSMAX, 64] == p[SSMAX, 64] / 2
    assert any("Holm's correction for the 4 comparisons" in line for line in legend(group))
    text = "\n".join(cell for line in score_tables(group)[-1].rows for cell in line)
    assert "(p < 0.001)" in text
    (bits,) = groups([r | {"task": "language-model", "metrics": {"bits": r["metrics"]["accuracy"]}}
                      for r in rows])  # fmt: skip
    scores = of_group(bits, bits.task.score)  # of a loss, the lower value is better
    assert {line.variant: scores.mark(line.values[1]) for line in scores.lines}["sigmoid"] == "⁺"


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
    assert any(text in line for line in legend(group)) == noted
    summary = csv_text([group])
    assert [line["at_edge"] for line in csv.DictReader(io.StringIO(summary))] == [str(int(noted))]
    scores = of_summary("max-retrieval", list(csv.DictReader(io.StringIO(summary))))
    assert any(text in line for line in scores.notes()) == noted


def test_a_row_whose_seeds_disagree_is_marked_unstable() -> None:
    rows = [
        row(variant, score, seed=seed)
        for variant, seeds in {"softmax": (0.96, 0.99, 1.0), "ssmax": (0.8, 0.99, 0.98)}.items()
        for seed, score in enumerate(seeds)
    ]
    rows += [row("softmax", 0.1 * seed, seed=seed, length=64) for seed in range(3)]
    (group,) = groups(rows)
    assert [group.name(series) for series in group.series] == ["softmax", "ssmax † 1/3 ‡"]
    assert any("differ by more than 10 points at the train" in line for line in legend(group))
    lines = list(csv.DictReader(io.StringIO(csv_text([group]))))
    assert {line["variant"]: line["unstable"] for line in lines} == {"softmax": "0", "ssmax": "1"}
    losses = [r | {"task": "language-model", "metrics": {"bits": 5 * r["metrics"]["accuracy"]}}
              for r in rows]  # fmt: skip
    assert not any(map(groups(losses)[0].unstable, groups(losses)[0].series))
