"""Sweeps: each variant gets the best of some candidate settings before its reported runs.

For each variant and position encoding, every candidate is trained with the seeds `SWEEP_SEEDS`,
which are never reported. It is scored on the split "validation" at two lengths: the train length,
and a longer one that is not reported. At the train length alone many candidates are equally good,
and longer inputs tell them apart. The candidate with the best mean score is chosen; of means within
`TIE` of the best, the one with the smaller values. A candidate with a failed seed is only chosen if
every candidate has one.

`record` writes the choices to the file `RECORD` of the repository. A preset with the sweep
"recorded", such as ``paper``, uses these values and runs no sweep of its own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from commandline.files import write_whole
from evals.options import Options
from evals.results.store import Row
from evals.results.tuned import TUNED
from evals.task import RECORDED, Preset, Settings

SWEEP_SEEDS = (1000, 1001)
# Mean scores that differ from the best by at most this share of it count as equal. Two seeds cannot
# tell them apart, and smaller learning rates are less often unstable.
TIE = 0.005
RECORD = Path(__file__).parent / "tasks" / "tuned.json"

Values = dict[str, float]
# "values": those that a variant is trained with, {} if it was not tuned. "tried": for each
# candidate its "values" and its "scores", one per seed (None: failed).
Choice = Mapping[str, Any]
NOT_TUNED: Choice = {"values": {}, "tried": []}


@dataclass(frozen=True)
class Sweep:
    """A sweep, or choices of an earlier one.

    grid: the candidate values of each setting; {} if there is no sweep. lengths: those at which
    candidates are scored. recorded: the choices of an earlier sweep by (variant, position
    encoding); None if they are not used.
    """

    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    recorded: Mapping[tuple[str, str], Choice] | None = None

    @property
    def candidates(self) -> list[Values]:
        """All combinations, those with smaller values first."""
        ordered = [sorted(values) for values in self.grid.values()]
        return [dict(zip(self.grid, values)) for values in itertools.product(*ordered)]

    @property
    def names(self) -> list[str]:
        """The tuned settings."""
        if self.recorded is not None:
            return sorted({name for choice in self.recorded.values() for name in choice["values"]})
        return list(self.grid)

    @property
    def words(self) -> dict[str, str]:
        """For each tuned setting a word, in place of a value that all variants share."""
        return dict.fromkeys(self.names, TUNED)


def choose(
    candidates: Sequence[Values],
    rows: Sequence[Sequence[Sequence[Row]]],
    score: str,
    lower_is_better: bool,
) -> Choice:
    """The choice, from the rows of each candidate, for each seed one row per length."""
    tried, means = [], []
    for values, of_candidate in zip(candidates, rows, strict=True):
        scores = [_mean(seed_rows, score) for seed_rows in of_candidate]
        valid = [x for x in scores if x is not None]
        mean = sum(valid) / len(valid) if len(valid) == len(scores) else math.inf
        means.append(mean if lower_is_better or mean == math.inf else -mean)
        tried.append({"values": values, "scores": scores})
    best = min(means)
    bound = best + TIE * abs(best)
    chosen = next(c for c, mean in zip(candidates, means, strict=True) if mean <= bound)
    return {"values": chosen, "tried": tried}


def _mean(rows: Sequence[Row], score: str) -> float | None:
    """The mean score of rows; None if one of them failed."""
    if any(row["status"] != "ok" for row in rows):
        return None
    return sum(row["metrics"][score] for row in rows) / len(rows)


def plan_sweep(
    task: str, preset: Preset, options: Options, settings: Settings, reported: Collection[int]
) -> Sweep:
    """The sweep of the options, or else that of the preset.

    A setting given with --set is not tuned by the preset's sweep. reported: the eval lengths.

    Raises:
        UsageError: --sweep and --set name the same setting, or an eval length is the longer one of
            the two at which candidates are scored.
    """
    fixed, option = set(options.settings), options.sweep
    if isinstance(option, Mapping) and (twice := sorted(fixed & set(option))):
        raise UsageError(f"--sweep and --set must not name the same setting, got {twice[0]} twice")
    sweep = preset.sweep if option is None else option
    if sweep != RECORDED:
        assert isinstance(sweep, Mapping)
        grid = {name: tuple(values) for name, values in sweep.items() if name not in fixed}
        if not grid:
            return Sweep()
        longer = settings.beyond_training(preset.validation)
        if longer in reported:
            raise UsageError(
                f"--lengths of {task} must not have {longer}, at which the sweep scores its "
                f"candidates, got {','.join(map(str, sorted(reported)))}"
            )
        return Sweep(grid, (settings.train_longest, longer))
    choices = {}
    for variant, encodings in _read().get(task, {}).items():
        for positions, choice in encodings.items():
            if values := {n: x for n, x in choice["values"].items() if n not in fixed}:
                choices[variant, positions] = {"values": values, "tried": choice["tried"]}
    return Sweep(recorded=choices)


def _read() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def record(task: str, choices: Iterable[tuple[str, str, Choice]]) -> None:
    """Add the choices (variant, position encoding, choice) of a task to `RECORD`."""
    tasks = _read()
    for variant, positions, choice in choices:
        tasks.setdefault(task, {}).setdefault(variant, {})[positions] = choice
    write_whole(RECORD, json.dumps(tasks, indent=1, sort_keys=True) + "\n")
