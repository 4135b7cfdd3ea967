"""Runs tasks: plans the runs, executes those without results, and shows the results."""

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
from evals.harness.plugins import load_plugins
from evals.harness.pool import Failure, Pool, default_workers, execute_here, worker_devices
from evals.harness.progress import Progress, counted
from evals.harness.runs import Context, Run
from evals.harness.study import Study, plan_study
from evals.measures.metrics import Outcome
from evals.results.store import Folder, Row
from evals.task import NOTES, Task

# Writes and prints results, given (rows, results folder, note, verbose).
Show = Callable[[list[Row], Path, str, bool], None]


class Studies:
    """The studies of several tasks, executed by one pool of workers.

    The result rows and models of a task are stored in ``out``/<task>. The loggers get every result
    too.
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

    def row(
        self, run: Run, key: str, length: int, outcome: Outcome, training: dict[str, Any]
    ) -> None:
        """Store and log one result row of a run."""
        study = self.studies[run.task]
        row = _row(study, run, key, length, outcome, training)
        self.folders[run.task].append(row)
        for logger in self.loggers:
            for name, value in outcome.metrics.items():
                logger.scalar(f"{run.task}/{row['variant']}/{run.positions}/seed{run.seed}",
                              f"test/{name}", value, length)  # fmt: skip

    def loss(self, run: Run, step: int, value: float) -> None:
        """Log a training loss of a run."""
        for logger in self.loggers:
            name = f"{run.task}/{run.variant}/{run.positions}/seed{run.seed}"
            logger.scalar(name, "train/loss", value, step)

    def show_plan(self) -> None:
        """Print the runs to execute and the combinations left out."""
        shard, verbose = self.options.shard, self.options.verbose
        part = f" in shard {shard.index} of {shard.count}" if shard.count > 1 else ""
        for name, study in self.studies.items():
            total = sum(1 for _ in study.row_specs())
            found = len(study.rows(self.folders[name].by_key))
            mine = [run for run in self.runs if run.task == name]
            plain = study.positions == ("none",)
            encodings = "" if plain else f", position encoding {' and '.join(study.positions)}"
            print(f"{name}: {counted(len(study.specs), 'variant')}, {counted(study.seeds, 'seed')}"
                  f"{encodings}, train length "
                  f"{study.settings.train_longest}, eval lengths up to {max(study.lengths)}: "
                  f"{counted(len(mine), 'run')} to do{part}")  # fmt: skip
            if found:
                print(f"  {found} of {total} results are already in {self.out / name}")
            if verbose:
                context = Context(self.options.device, None, self.out)
                trainings = sum(not context.model(run).exists() for run in mine)
                missing = sum(len(tests) for run in mine for tests in run.tests.values())
                print(f"  eval lengths: {', '.join(map(str, study.lengths))}")
                print(f"  schedule: {study.settings.schedule}")
                place = (
                    f"on {counted(self.workers, 'worker')}" if self.workers else "in this process"
                )
                print(f"  to do: {counted(trainings, 'training')} and {missing} of {total} results"
                      f" {place}; results in {self.out / name}")  # fmt: skip
            for (spec, positions), reason in study.left_out.items():
                print(f"  left out: {spec} with position encoding {positions}: {reason}")
            if damaged := self.folders[name].damaged:
                print(f"  warning: skipped {damaged} unreadable line(s) in {self.out / name}")
        sys.stdout.flush()

    def execute(self) -> list[Failure]:
        """Execute the runs and return the failures."""
        if not self.runs:
            return []
        context = Context(self.options.device, self.options.plugin, self.out)
        # If the folder cannot be made, the error comes before the training.
        self.out.mkdir(parents=True, exist_ok=True)
        progress = Progress(len(self.runs), verbose=self.options.verbose)
        try:
            if self.workers == 0:
                return execute_here(self.runs, context, self, progress)
            devices = worker_devices(self.options.device, min(self.workers, len(self.runs)))
            contexts = [replace(context, device=device) for device in devices]
            return Pool(contexts, self, progress).execute(self.runs)
        finally:
            progress.close()
            for logger in self.loggers:
                logger.close()

    def missing(self) -> dict[str, int]:
        """The incomplete tasks by name, each with the number of its missing result rows."""
        lacks = {}
        for name, study in self.studies.items():
            self.folders[name] = Folder(self.out / name, self.options.shard)
            total = sum(1 for _ in study.row_specs())
            if left := total - len(study.rows(self.folders[name].by_key)):
                lacks[name] = left
        return lacks

    def rows(self) -> list[Row]:
        """The stored result rows of these studies."""
        return [
            row
            for name, study in self.studies.items()
            for row in study.rows(self.folders[name].by_key)
        ]

    def other_rows(self) -> list[Row]:
        """The stored result rows of these tasks that were produced with other options."""
        mine = {row["key"] for row in self.rows()}
        folders = self.folders.values()
        return [row for at in folders for row in at.by_key.values() if row["key"] not in mine]


def _row(
    study: Study, run: Run, key: str, length: int, outcome: Outcome, training: dict[str, Any]
) -> Row:
    """The result row of one (variant, position encoding, seed, eval length)."""
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
        "data": study.task.data_version(),
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
    studies = Studies(
        [plan_study(task, options[task.name], plugins) for task in tasks], shared, out
    )
    if studies.runs and not shared.dry_run:
        studies.loggers = open_loggers(shared.log, out)
    studies.show_plan()
    if shared.dry_run:
        costs.show(studies.runs, shared.device, studies.workers, shared.verbose)
        return 0
    failures = studies.execute()
    for failure in failures:
        print(f"failed: {failure.run}: {failure.reason}", file=sys.stderr)
        if shared.verbose:
            print(failure.traceback, file=sys.stderr)
    if any(failure.traceback for failure in failures) and not shared.verbose:
        print("Repeat the command with --verbose for the traceback.", file=sys.stderr)
    lacks = studies.missing()
    if lacks and shared.shard.count > 1 and not failures:
        left = ", ".join(f"{count} of {name}" for name, count in lacks.items())
        print(f"This shard is done. Results of other shards are missing: {left}. The shard that "
              "finishes last prints the scores and writes the report.")  # fmt: skip
        return 0
    rows, others = studies.rows(), studies.other_rows()
    if rows:
        note = NOTES[shared.preset]
        if others:
            note += f" The folder also has {len(others)} results made with other options."
        # If rows have different versions of a variant, the version in the last of them is shown.
        # The rows of this command are therefore last.
        show([*others, *rows], out, note, shared.verbose)
    nothing = all(row["status"] != "ok" for row in rows)
    return 1 if failures or nothing else 0
