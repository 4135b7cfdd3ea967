"""Makes rows of eval results for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.results.store import Row
from evals.tasks import TASKS

SETTINGS = {"steps": 10, "batch": 2, "train_shortest": 5, "train_longest": 16}


def row(
    variant: str,
    score: float | None,
    *,
    task: str = "max-retrieval",
    positions: str = "none",
    seed: int = 0,
    length: int = 16,
    **more: Any,
) -> Row:
    """The result of one run with this score. None stands for a run that was out of memory."""
    metrics = {} if score is None else {TASKS[task].score.name: score}
    return {
        "key": f"{task} {variant} {positions} {seed} {length}",
        "task": task, "variant": variant, "positions": positions, "seed": seed, "length": length,
        "status": "oom" if score is None else "ok",
        "message": "out of memory" if score is None else "",
        "metrics": metrics, "curves": {}, "learned": {}, "chance": 0.1, "sequences": 8,
        "settings": SETTINGS, "schedule": "one-cycle cosine, 10 steps", "data": "made by hand",
        "device": "cpu", "version": variant, "torch": "2", "attnzoo": "0", "commit": "abc",
        "cpu_seconds": 1.0, "train_cpu_seconds": 2.0, "training": f"{variant} {seed}",
        **more,
    }  # fmt: skip


def grid(scores: Mapping[str, Mapping[int, Sequence[float | None]]], **more: Any) -> list[Row]:
    """Rows of variants at some lengths, with one score for each seed."""
    return [
        row(variant, score, seed=seed, length=length, **more)
        for variant, by_length in scores.items()
        for length, of_seeds in by_length.items()
        for seed, score in enumerate(of_seeds)
    ]


def written(folder: Path, rows: list[Row]) -> Path:
    """Writes each row to TASK/rows.jsonl in the folder, as the evals do, and returns the folder."""
    for one in rows:
        file = folder / one["task"] / "rows.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps(one) + "\n")
    return folder


def stored(out: Path, task: str = "max-retrieval") -> list[Row]:
    """The rows of all files of a task in an output folder."""
    files = sorted((out / task).glob("rows*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
