"""The command compare: gains, bounds, missing results, and which rows hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evals.__main__ import main
from evals.reporting import compare
from evals.results.summary import groups
from helpers.evals_rows import SETTINGS, grid, row, written


def both(tmp_path: Path, before: list, after: list) -> list[str]:
    return [str(written(tmp_path / "a", before)), str(written(tmp_path / "b", after))]


def test_compare_shows_gains_and_fails_below_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = grid({"softmax": {16: (0.8, 0.8)}, "ssmax": {16: (0.9,)}})
    after = grid({"softmax": {16: (0.75, 0.77)}, "ssmax": {16: (0.95,)}})
    folders = both(tmp_path, before, after)
    assert main(["compare", *folders]) == 0
    text = capsys.readouterr().out
    assert re.search(r"softmax +16 +80\.0 ±0\.0 +76\.0 ±1\.0 +-4\.0 ±1\.0", text)
    assert re.search(r"ssmax +16 +90\.0 +95\.0 +\+5\.0", text)
    assert main(["compare", *folders, "--fail-below", "-4.5"]) == 0
    assert main(["compare", *folders, "--fail-below", "-3.5"]) == 1
    text = capsys.readouterr().out
    assert "below -3.5: max-retrieval, softmax, n = 16: -4.0" in text
    assert "1 of 2 gains are at least -3.5" in text


def test_compare_notes_seeds_that_only_b_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = both(tmp_path, [row("softmax", 0.5)], grid({"softmax": {16: (0.6, 0.6)}}))
    note = "note: max-retrieval has seeds in B that A lacks"
    assert main(["compare", *folders]) == 0
    assert note in capsys.readouterr().out
    assert main(["compare", folders[0], folders[0]]) == 0
    assert note not in capsys.readouterr().out


def test_compare_rejects_a_nan_bound_and_reports_different_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = both(tmp_path, [row("softmax", 0.5)], [row("softmax", 0.5, data="other")])
    assert main(["compare", *folders, "--fail-below", "nan"]) == 2
    with pytest.raises(SystemExit):
        main(["compare", *folders, "--fail-below", "x"])
    assert "error: --fail-below must be a number, got 'x'\n" in capsys.readouterr().err
    assert main(["compare", *folders, "--fail-below", "-100"]) == 0
    assert "has data = made by hand in A and other in B" in capsys.readouterr().out


def test_compare_counts_a_lower_loss_as_a_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"task": "language-model", "positions": "rope"}
    folders = both(tmp_path, [row("softmax", 3.0, **task)], [row("softmax", 2.5, **task)])
    assert main(["compare", *folders, "--fail-below", "0.4"]) == 0
    assert main(["compare", *folders[::-1], "--fail-below", "0"]) == 1
    assert "+0.50" in capsys.readouterr().out


@pytest.mark.parametrize("after", [[], [row("softmax", None)]], ids=["missing", "failed"])
def test_compare_fails_for_results_missing_in_b(
    after: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = both(tmp_path, [row("softmax", 0.5)], [row("ssmax", 0.5), *after])
    assert main(["compare", *folders]) == 0
    assert main(["compare", *folders, "--fail-below", "-100"]) == 1
    assert "B has no seed 0" in capsys.readouterr().out


def test_compare_prints_which_rows_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(softmax: float, ssmax: float) -> list:
        scores = {"softmax": (softmax, softmax + 0.01), "ssmax": (ssmax, ssmax + 0.01)}
        return grid({name: dict.fromkeys((16, 64), seeds) for name, seeds in scores.items()})

    folders = both(tmp_path, rows(0.5, 0.9), rows(0.505, 0.3))
    assert main(["compare", *folders, "--holds"]) == 1
    text = capsys.readouterr().out
    assert "max-retrieval, softmax: holds\n" in text
    assert "max-retrieval, ssmax: does not hold at n = 16 (90.5 in A, 30.5 in B), n = 64 (" in text
    assert "1 of 2 rows hold: at every length their 95 % intervals" in text
    assert main(["compare", folders[0], folders[0], "--holds"]) == 0
    assert "2 of 2 rows hold" in capsys.readouterr().out
    less = [one for one in rows(0.5, 0.9) if one["seed"] == 0 or one["x"] == 64]
    written(tmp_path / "c", less)
    assert main(["compare", folders[0], str(tmp_path / "c"), "--holds"]) == 1
    assert "0 of 2 rows hold" in capsys.readouterr().out  # seed 1 is missing
    assert main(["compare", *folders]) == 0


def test_compare_reports_a_different_setting_and_rejects_several_settings_of_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = row("softmax", 0.5, settings={**SETTINGS, "steps": 11})
    folders = both(tmp_path, [row("softmax", 0.5)], [other])
    assert main(["compare", *folders]) == 0
    assert "max-retrieval has steps = 10 in A and 11 in B" in capsys.readouterr().out
    written(tmp_path / "b", [row("softmax", 0.5, seed=7)])
    assert main(["compare", *folders]) == 2
    error = capsys.readouterr().err
    assert "B must have results of max-retrieval with equal" in error
    assert "got 2 groups: steps 10; steps 11" in error
    needle = written(tmp_path / "c", [row("softmax", 0.5, task="needle")])
    assert main(["compare", str(needle), folders[1]]) == 0  # A has no results of max-retrieval


def test_which_rows_hold_needs_two_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = both(tmp_path, [row("softmax", 0.5)], [row("softmax", 0.501)])
    assert main(["compare", *folders, "--holds"]) == 2
    assert "two or more seeds on both sides, got one of max-retrieval" in capsys.readouterr().err


def test_a_row_with_one_seed_left_is_tested_by_its_change_only() -> None:
    """The other seed failed in both runs, so that there is no interval."""
    before, after, far = (
        groups(grid({"softmax": {16: (score, None)}})) for score in (0.5, 0.51, 0.7)
    )
    (change,) = compare.changes(before, after)
    assert change.holds
    (change,) = compare.changes(before, far)
    assert not change.holds


def test_a_row_whose_seeds_change_places_does_not_hold() -> None:
    """Both intervals are wide and overlap, but rounding decides which seeds learn."""
    first, second = [0.1, 0.1, 0.1, 0.98, 0.98], [0.98, 0.98, 0.1, 0.1, 0.1]
    before, after = (groups(grid({"cosformer": {16: scores}})) for scores in (first, second))
    (change,) = compare.changes(before, after)
    assert not change.holds
    (same,) = compare.changes(before, before)
    assert same.holds
