"""Makes rows of eval results for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.results.rows import Row
from evals.study import version_of
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
    settings: Mapping[str, Any] = SETTINGS,
    shared: Mapping[str, Any] = {},
    data: str = "made by hand",
    device: str = "cpu",
    version: str = "",
    **more: Any,
) -> Row:
    """The result of one run with this score. None stands for a run that was out of memory.

    shared: settings that differ between variants, with what the table says in their place; None if
    it says nothing.
    """
    metrics = {} if score is None else {TASKS[task].score.name: score}
    differing = {name: settings.get(name) for name in shared}
    return {
        "key": f"{task} {variant} {positions} {seed} {length}",
        "task": task, "variant": variant, "seed": seed, "x": length,
        "series": {"positions": positions},
        "group": group({**settings, **shared}, data, device),
        "status": "oom" if score is None else "ok",
        "message": "out of memory" if score is None else "",
        "metrics": metrics, "curves": {}, "learned": {}, "chance": 0.1, "sequences": 8,
        "settings": settings, "schedule": "one-cycle cosine, 10 steps", "data": data,
        "device": device, "version": version_of(version or variant, differing),
        "torch": "2", "attnzoo": "0", "commit": "abc",
        "cpu_seconds": 1.0, "train_cpu_seconds": 2.0, "training": f"{variant} {seed}",
        **more,
    }  # fmt: skip


def group(settings: Mapping[str, Any], data: str, device: str = "cpu") -> dict[str, Any]:
    """What the rows of one table share."""
    shown = {name: value for name, value in settings.items() if value is not None}
    return {**shown, "data": data, "device": device.split(":")[0]}


def trial(one: Row, **more: Any) -> Row:
    """The row of a task as that of an experiment under the condition "clean"."""
    return one | {"task": "classification", "x": "clean", "series": {}, "key": "trial", **more}


def pretrained(variant: str, length: int, sample: int, **more: Any) -> Row:
    """The result of one sample of a pretrained model."""
    contexts = {
        "fingerprint": "f", "dtype": "float32", "data": "d", "seed": 0, "planted": True
    } | {name: more[name] for name in ("fingerprint", "dtype", "data") if name in more}  # fmt: skip
    return {
        "task": "pretrained", "variant": variant, "series": {"layers": "all"}, "model": "tiny",
        "limit": 64, "text": "text.txt", "x": length, "seed": sample, "status": "ok",
        "message": "", "curves": {}, "cpu_seconds": 1.0, "version": "built in", "commit": "abc",
        "torch": "2", "attnzoo": "0", "device": "cpu", "settings": {},
        "key": f"{variant} {length} {sample}", "metrics": {"loss": 3.0},
        **{name: contexts[name] for name in ("fingerprint", "dtype", "data", "planted")},
        "group": {**contexts, "device": "cpu"},
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
