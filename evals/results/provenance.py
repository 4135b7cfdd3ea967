"""What made the results of a table: command, commit, versions, seeds, settings.

It is stored as JSON beside the summary, and a line below the table names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commandline.errors import UsageError
from evals.results import statistics
from evals.results.rows import Row, differing, distinct, is_pretrained, is_validation
from evals.results.summary import largest_change, series_of

# Fields of rows that are stored if a row has them. The values of all rows are listed.
_FIELDS = ("commit", "torch", "attnzoo", "device", "data", "schedule")
BROKEN = "§"  # marks a row that does not hold in the second arithmetic
_MODEL = ("model", "fingerprint", "limit", "dtype", "text")


def provenance(rows: Sequence[Row], command: str, note: str | None = None) -> dict[str, Any]:
    """What made these rows of one task or of one pretrained model.

    ``command`` and ``note`` are stored as they are.

    Raises:
        UsageError: there are no rows, or a row was made by code that is not in a commit and no note
            says what was changed.
    """
    if not rows:
        raise UsageError("the folder must have results, got none")
    commits = distinct(rows, "commit")
    unknown = [x for x in commits if x == "unknown" or x.endswith("-dirty")]
    if unknown and not note:
        raise UsageError(
            "results must be made by committed code, so that they can be repeated, or --note must "
            f"say what was changed; got commit {', '.join(unknown)}"
        )
    reported = [row for row in rows if not is_validation(row)]
    if not reported:
        raise UsageError("the folder must have results, got only those of a sweep")
    made_by: dict[str, Any] = {"command": command} | ({"note": note} if note else {})
    for name in (*_FIELDS, *_MODEL):
        if values := distinct(reported, name):
            made_by[name] = values
    if is_pretrained(rows[0]):
        made_by["seeds"] = sorted({row["group"]["seed"] for row in reported})
        samples: dict[int, set[int]] = {}
        for row in reported:
            samples.setdefault(row["x"], set()).add(row["seed"])
        made_by["samples"] = {str(n): len(x) for n, x in sorted(samples.items())}
        return made_by
    made_by["seeds"] = distinct(reported, "seed")
    if swept := [row for row in rows if is_validation(row)]:
        made_by["sweep_seeds"] = distinct(swept, "seed")
    made_by["settings"] = _by_variant(reported)
    return made_by


def _by_variant(rows: Sequence[Row]) -> dict[str, Any]:
    """Settings that all rows share, and under the name of a variant those that differ."""
    names = differing([row["settings"] for row in rows])
    settings: dict[str, Any] = {n: x for n, x in rows[0]["settings"].items() if n not in names}
    for row in rows:
        if values := {name: x for name, x in row["settings"].items() if name in names}:
            settings[series_of(row).label.replace(" · ", " ")] = values
    return settings


def sentence(made_by: Mapping[str, Any], file: str, broken: bool = False) -> str:
    """A line for below the table.

    file: the path of the JSON file, for the link. broken: whether a row of the table does not hold
    in the second run.
    """
    seeds = made_by["seeds"]
    seed_text = _seeds_text(seeds)
    if swept := made_by.get("sweep_seeds"):
        seed_text += f" (sweep: {' and '.join(map(str, swept))})"
    parts = [
        f"Made by `{made_by['command']}`",
        f"commit {' and '.join(made_by['commit'])}",
        f"torch {' and '.join(made_by['torch'])}",
        seed_text,
    ]
    line = f"{', '.join(parts)}; [all settings]({file})."
    if note := made_by.get("note"):
        line += f" {note}"
    if second := made_by.get("arithmetic"):
        run = f"a second run with `{second['environment']}`"
        # A file without the seeds of the second run has the same ones there.
        if second.get("seeds", seeds) != seeds:
            run += f", of {_seeds_text(second['seeds'])}"
        line += f" {BROKEN}: the row does not hold" if broken else " Every row holds"
        line += f" in {run}."
    return line


def holds(made_by: Mapping[str, Any], task: Any) -> dict[str, bool]:
    """Whether each row of a table with a second run holds there, by its label, from the scores.

    A file without the scores of the second run has the answers.
    """
    second = made_by["arithmetic"]
    if "scores" not in second:
        return second.get("holds", {})
    seeds = set(map(str, second.get("seeds", made_by["seeds"])))

    def held(label: str, n: str, after: Mapping[str, float]) -> bool:
        before = {s: x for s, x in made_by["scores"][label].get(n, {}).items() if s in seeds}
        return statistics.holds(before, after, largest_change(task))

    return {
        label: all(held(label, n, after) for n, after in by_length.items())
        for label, by_length in second["scores"].items()
    }


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
