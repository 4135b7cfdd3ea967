"""Prints a task's score table at the end of a study, and with --verbose more tables."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence

from commandline.table import Table
from evals.reporting.scores import EFFECTIVE_SHARE, ScoreLine, Scores, of_group
from evals.reporting.tables import PARTIAL, cost_table, legend, score_tables, settings_table
from evals.results.summary import Group, Series, failures, version_warnings
from evals.theory import trained_heads as theory
from evals.theory.trained_heads import Heads

EFFECTIVE = "effective length"
FEW = 5  # without --verbose, at most this many failures are listed


def print_group(group: Group, heads: Sequence[Heads], verbose: bool) -> None:
    """Print the scores of a group, and with ``verbose`` more tables and all failures."""
    table = score_table(group)
    print(f"\n{table.text()}")
    if EFFECTIVE in table.header:
        print(
            f"{EFFECTIVE}: the longest n up to which the score stays above "
            f"{EFFECTIVE_SHARE:.0%} of its value at train length"
        )
    if verbose:
        tuning = settings_table(group)
        for table in [
            *score_tables(group)[1:],
            *([tuning] if tuning else []),
            *theory.tables(group, heads),
            cost_table(group),
        ]:
            print(f"\n{table.text()}")
        print(f"\nschedule: {group.rows[0]['schedule']}")
    for line in legend(group):
        print(line)
    failed = failures(group)
    for line in failed if verbose else failed[:FEW]:
        print(line)
    if len(failed) > FEW and not verbose:
        print(f"failed: {len(failed) - FEW} more; --verbose lists all")
    for line in version_warnings([group]):
        print(line)


def score_table(group: Group) -> Table:
    """A table of scores: one row per variant, one column per eval length. It has no standard errors
    if the terminal is too narrow for them."""
    scores = of_group(group, group.task.score)
    table = _table(group, scores, errors=True)
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    wide = max(map(len, table.text().splitlines()[2:]))
    return table if wide <= room else _table(group, scores, errors=False)


def _table(group: Group, scores: Scores, errors: bool) -> Table:
    score, seeds = scores.metric, len(group.seeds)
    better = "lower" if score.lower_is_better else "higher"
    over = (
        "1 seed" if seeds == 1 else f"mean {'± standard error ' if errors else ''}of {seeds} seeds"
    )
    distinction = f" ({group.distinction})" if group.distinction else ""
    title = (
        f"{group.task.name}{distinction}: {score.title} ({better} is better) by eval length n; "
        f"train length {scores.train_length}, chance {scores.shown(group.chance)}, {over}"
    )
    shown = scores.has_effective
    rows = [
        [group.name(Series(line.variant, line.encoding)), *_values(scores, line, errors)]
        + ([line.effective_text] if shown else [])
        for line in scores.lines
    ]
    header = ["variant", *(f"n = {n}" for n in scores.lengths), *([EFFECTIVE] if shown else [])]
    return Table(title, header, rows)


def _values(scores: Scores, line: ScoreLine, errors: bool) -> list[str]:
    texts = []
    for value in line.values:
        if value.mean is None:
            texts.append(value.failed or "—")
            continue
        text = scores.shown(value.mean)
        if errors and value.error is not None:
            text += f" ±{scores.shown(value.error)}"
        texts.append(text + scores.mark(value) + (PARTIAL if value.failed else ""))
    return texts
