"""Tables of results for README and papers, and the command ``export``."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.reporting.readme_tables import overview
from evals.reporting.scores import of_group, of_summary
from evals.results.store import Row
from evals.results.summary import csv_text, groups
from helpers.evals_rows import row


def rows(scores: dict[str, tuple[float | None, ...]], lengths: tuple[int, ...]) -> list[Row]:
    """Two seeds of max-retrieval with the same score; the train length is 16."""
    return [
        row(variant, score, seed=seed, length=length)
        for variant, values in scores.items()
        for length, score in zip(lengths, values, strict=True)
        for seed in (0, 1)
    ]


def table_rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_overview_shows_both_ends_and_the_effective_length(tmp_path: Path) -> None:
    found = rows(
        {
            "softmax": (1.0, 0.86, 0.85, 0.3),  # 85 % is not above 85 %
            "ssmax": (1.0, 0.9, 0.9, 0.88),
            "sigmoid": (0.9, 0.9, 0.9, 0.2),  # not trained
            "dips": (1.0, 0.5, 0.99, 0.1),
            "fails": (1.0, 0.9, None, None),
        },
        (16, 32, 64, 128),
    )
    assert overview(tmp_path) == "Nothing has been measured yet.\n"
    (tmp_path / "max-retrieval.csv").write_text(csv_text(groups(found)))
    text = overview(tmp_path)
    assert text.splitlines()[0] == (
        "| variant | accuracy (%) at the train length, n = 16 | accuracy (%) at n = 128 "
        "| effective length, n |"
    )
    assert table_rows(text) == [
        ["`ssmax`", "100.0", "88.0", "≥ 128"],
        ["`softmax`", "100.0", "30.0", "32"],
        ["`sigmoid` † 2/2", "90.0", "20.0", "—"],
        ["`dips`", "100.0", "10.0", "16"],
        ["`fails`", "100.0", "—", "32"],
    ]
    assert "mean of 2 seeds, chance 10 %" in text
    assert "above 85 % of its value at the train length" in text
    assert "† k/2: did not reach 95 % at the train length (n = 16) in k of 2 seeds" in text


def test_rows_and_their_summary_give_the_same_scores() -> None:
    (group,) = groups(rows({"softmax": (0.98, 0.5), "ssmax": (0.9, None)}, (16, 64)))
    summary = [
        dict(zip(lines[0].split(","), line.split(","), strict=True))
        for lines in [csv_text([group]).replace('"one-cycle cosine, 10 steps"', "x").splitlines()]
        for line in lines[1:]
    ]
    one, other = of_group(group, group.task.score), of_summary("max-retrieval", summary)
    assert one.lines == other.lines
    assert (one.lengths, one.train_length, one.chance) == ([16, 64], 16, pytest.approx(0.1))
    assert one.title == other.title
    assert one.notes() == other.notes()
