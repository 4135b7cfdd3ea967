"""One run from options to results: check, plan, run what is missing, summarize, show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from commandline.checkout import commit
from commandline.errors import UsageError
from commandline.variants import Spec
from evals.harness import costs
from evals.harness.loggers import Logger, open_loggers
from evals.harness.options import Options
from evals.harness.pool import Pool, default_workers, run_here, worker_devices
from evals.harness.progress import Progress
from evals.harness.runs import Context, Run
from evals.harness.study import Study, load_plugins, plan_study
from evals.measures.metrics import Outcome
from evals.results.store import Folder, Row
from evals.task import NOTES, Task

# (rows, the run's folder, a note on them): writes and prints what a run ends with.
Show = Callable[[list[Row], Path, str], None]


class Studies:
    """Several tasks' studies, executed by one pool of workers.

    Each task has its own folder of rows and models in ``out``; what a worker says becomes a row
    there, and goes to the loggers.
    """

    def __init__(self, studies: Sequence[Study], options: Options, out: Path) -> None:
        self.options, self.out = options, out
        self.studies = {study.task.name: study for study in studies}
        self.folders = {name: Folder(out / name, options.shard) for name in self.studies}
        self.runs = [
            run
            for name, study in self.studies.items()
            for run in study.runs(self.folders[name].by_key, options.shard, options.retry_failed)
        ]
        self.loggers: list[Logger] = []

    @property
    def workers(self) -> int:
        given = self.options.workers
        return default_workers(self.options.device) if given is None else given

    # ---- what the runs say

    def row(
        self, run: Run, key: str, length: int, outcome: Outcome, training: dict[str, Any]
    ) -> None:
        study = self.studies[run.task]
        row = _row(study, run, key, length, outcome, training)
        self.folders[run.task].append(row)
        for logger in self.loggers:
            for name, value in outcome.metrics.items():
                logger.scalar(f"{run.task}/{row['variant']}/{run.positions}/seed{run.seed}",
                              f"test/{name}", value, length)  # fmt: skip

    def loss(self, run: Run, step: int, value: float) -> None:
        for logger in self.loggers:
            name = f"{run.task}/{run.variant}/{run.positions}/seed{run.seed}"
            logger.scalar(name, "train/loss", value, step)

    # ---- the run

    def show_plan(self) -> None:
        """What is to be done, and what is left out."""
        for name, study in self.studies.items():
            total = sum(1 for _ in study.row_specs())
            there = len(study.rows(self.folders[name].by_key))
            mine = [run for run in self.runs if run.task == name]
            context = Context(self.options.device, None, self.out)
            trainings = sum(not context.model(run).exists() for run in mine)
            missing = sum(len(tests) for run in mine for tests in run.tests.values())
            print(f"{name}: {len(study.specs)} variants × {len(study.positions)} positions × "
                  f"{study.seeds} seeds × {len(study.lengths)} lengths = {total} rows, {there} of "
                  f"them there already")  # fmt: skip
            print(f"  positions: {', '.join(study.positions)}; schedule: {study.settings.schedule}")
            shard = self.options.shard
            part = f" (shard {shard.index} of {shard.count})" if shard.count > 1 else ""
            print(f"  to do{part}: {trainings} trainings, {missing} rows on {self.workers} "
                  f"worker(s), in {self.out / name}")  # fmt: skip
            for (spec, positions), reason in study.left_out.items():
                print(f"  left out: {spec} with positions {positions}: {reason}")
            if damaged := self.folders[name].damaged:
                print(f"  {damaged} unreadable line(s) of {name}'s rows skipped")
        print(NOTES[self.options.preset], flush=True)

    def execute(self) -> list[str]:
        """Execute the runs and return a text for each failure."""
        if not self.runs:
            return []
        context = Context(self.options.device, self.options.plugin, self.out)
        self.loggers = open_loggers(self.options.log, self.out)
        self.out.mkdir(parents=True, exist_ok=True)  # here, and not after a training
        progress = Progress(len(self.runs))
        try:
            if self.workers == 0:
                return run_here(self.runs, context, self, progress)
            devices = worker_devices(self.options.device, min(self.workers, len(self.runs)))
            contexts = [replace(context, device=device) for device in devices]
            return Pool(contexts, self, progress).run(self.runs)
        finally:
            progress.close()
            for logger in self.loggers:
                logger.close()

    def missing(self) -> dict[str, int]:
        """How many rows each task still lacks, other shards' included."""
        lacks = {}
        for name, study in self.studies.items():
            self.folders[name] = Folder(self.out / name, self.options.shard)
            total = sum(1 for _ in study.row_specs())
            if left := total - len(study.rows(self.folders[name].by_key)):
                lacks[name] = left
        return lacks

    def rows(self) -> list[Row]:
        """The rows of these studies."""
        return [
            row
            for name, study in self.studies.items()
            for row in study.rows(self.folders[name].by_key)
        ]

    def other_rows(self) -> list[Row]:
        """The rows of these tasks that earlier runs with other options left in the folders."""
        mine = {row["key"] for row in self.rows()}
        folders = self.folders.values()
        return [row for at in folders for row in at.by_key.values() if row["key"] not in mine]


def _row(
    study: Study, run: Run, key: str, length: int, outcome: Outcome, training: dict[str, Any]
) -> Row:
    """What is stored of one (variant, positions, seed, length)."""
    substitute = run.tests[length][key]
    settings = study.settings
    return {
        "key": key,
        "task": study.task.name,
        "variant": str(run.variant) if substitute is None else f"{run.variant}->{substitute}",
        "positions": run.positions,
        "seed": run.seed,
        "length": length,
        "status": outcome.status,
        "message": outcome.message,
        "metrics": outcome.metrics,
        "curves": outcome.curves,
        "learned": training["learned"] if substitute is None else {},
        "chance": study.task.chance(settings),
        "sequences": settings.sequences(length),
        "settings": settings.identity(),
        "version": study.version(Spec(run.variant, substitute or run.variant)),
        "schedule": settings.schedule,
        "data": study.task.data(),
        "device": study.device,
        "torch": torch.__version__,
        "attnzoo": version("attnzoo"),
        "commit": commit() or "unknown",
        "cpu_seconds": round(outcome.cpu_seconds, 3),
        "train_cpu_seconds": round(training["train_cpu_seconds"], 3),
        "training": run.training_key,
    }


def run_tasks(tasks: Sequence[Task], options: Mapping[str, Options], out: Path, show: Show) -> int:
    """Run tasks, show their rows, and return the exit status."""
    shared = next(iter(options.values()))
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out must be a folder, got {str(out)!r}")
    plugins = load_plugins(shared.plugin)
    studies = [plan_study(task, options[task.name], plugins) for task in tasks]
    every = Studies(studies, shared, out)
    every.show_plan()
    if shared.dry_run:
        costs.show(every.runs, shared.device, every.workers)
        return 0
    failures = every.execute()
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    lacks = every.missing()
    if lacks and shared.shard.count > 1 and not failures:
        left = ", ".join(f"{name} {count}" for name, count in lacks.items())
        print(f"rows are missing, of other shards or failed ({left}): results are written by the "
              "run that finds all of them")  # fmt: skip
        return 0
    rows, others = every.rows(), every.other_rows()
    if rows:
        note = NOTES[shared.preset]
        if others:
            note += f" (of the last run; {len(others)} rows of earlier ones are shown, too)"
        show([*others, *rows], out, note)  # where versions differ the last count
    nothing = all(row["status"] != "ok" for row in rows)
    return 1 if failures or nothing else 0
