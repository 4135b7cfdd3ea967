"""Runs tasks: plans the runs, executes those without results, and shows the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from commandline.files import check_folder, check_writable
from evals.experiment import Experiment
from evals.harness import costs
from evals.harness.any_run import AnyRun, RunContext
from evals.harness.loggers import Logger, open_loggers
from evals.harness.options import Options
from evals.harness.planning import plan_study
from evals.harness.plugins import hash_in, load_plugins
from evals.harness.pool import Failure, Pool, default_workers, execute_here, worker_devices
from evals.harness.progress import Progress, counted
from evals.harness.study import Study
from evals.harness.sweeps import RECORD, record
from evals.harness.trials import TrialStudy, plan_trials
from evals.measures.metrics import Outcome
from evals.results.rows import is_validation
from evals.results.store import Folder, Row
from evals.task import NOTES, Task

# Writes and prints results, given (rows, results folder, note, verbose).
Show = Callable[[list[Row], Path, str, bool], None]


class Studies:
    """The studies of several tasks, executed by one pool of workers.

    The result rows and models of a task are stored in ``out``/<task>. The loggers get every result
    too.
    """

    def __init__(
        self,
        studies: Sequence[Study | TrialStudy],
        options: Options,
        out: Path,
        plugin_hash: str | None,
    ) -> None:
        self.options, self.out, self.plugin_hash = options, out, plugin_hash
        self.studies: dict[str, Any] = {study.task.name: study for study in studies}
        self.folders = {name: Folder(out / name, options.shard) for name in self.studies}
        # The runs to do. Those that wait for a sweep have the settings of its first candidate.
        self.runs: list[AnyRun] = [*self._sweep_runs(), *self._reported_runs(undecided=True)]
        self.loggers: list[Logger] = []

    def _sweep_runs(self) -> list[AnyRun]:
        shard, retry = self.options.shard, self.options.retry_failed
        runs: list[AnyRun] = []
        for name, study in self.studies.items():
            if isinstance(study, Study):
                runs += study.sweep_runs(self.folders[name].by_key, shard, retry)
        return runs

    def _reported_runs(self, undecided: bool = False) -> list[AnyRun]:
        shard, retry = self.options.shard, self.options.retry_failed
        runs: list[AnyRun] = []
        for name, study in self.studies.items():
            options = {"undecided": undecided} if isinstance(study, Study) else {}
            runs += study.runs(self.folders[name].by_key, shard, retry, **options)
        return runs

    @property
    def workers(self) -> int:
        workers = self.options.workers
        return default_workers(self.options.device) if workers is None else workers

    def row(
        self, run: AnyRun, key: str, point: Any, outcome: Outcome, training: dict[str, Any]
    ) -> None:
        """Store and log one result row of a run."""
        study = self.studies[run.task]
        row = study.row(run, key, point, outcome, training)
        self.folders[run.task].append(row)
        for logger in self.loggers:
            for name, value in outcome.metrics.items():
                at, step = study.log_at(run, row)
                logger.scalar(at, f"test/{name}", value, step)

    def loss(self, run: AnyRun, step: int, value: float) -> None:
        """Log a training loss of a run."""
        for logger in self.loggers:
            logger.scalar(run.log_name, "train/loss", value, step)

    def show_plan(self) -> None:
        """Print the runs to execute and the combinations left out."""
        shard, verbose = self.options.shard, self.options.verbose
        part = f" in shard {shard.index} of {shard.count}" if shard.count > 1 else ""
        for name, study in self.studies.items():
            stored = len(study.rows(self.folders[name].by_key))
            runs = [run for run in self.runs if run.task == name]
            print(f"{study.headline(len(runs))}{part}")
            if stored:
                total = sum(1 for _ in study.row_specs())
                print(f"  {stored} of {total} results are already in {self.out / name}")
            if verbose:
                place = (
                    f"on {counted(self.workers, 'worker')}" if self.workers else "in this process"
                )
                lines = study.details(runs, self.out)
                print("\n".join(lines), f"{place}; results in {self.out / name}")
            for line in study.left_out_lines():
                print(line)
            if damaged := self.folders[name].damaged:
                print(f"  warning: skipped {damaged} unreadable line(s) in {self.out / name}")
        sys.stdout.flush()

    def execute(self) -> list[Failure]:
        """Execute the runs and return the failures."""
        if not self.runs:
            return []
        context = RunContext(self.options.device, self.options.plugin, self.out, self.plugin_hash)
        # If results cannot be written, the error comes before the training.
        for name in self.studies:
            check_writable("--out", self.out / name)
        progress = Progress(len(self.runs), verbose=self.options.verbose)
        try:
            failures = self._execute(self._sweep_runs(), context, progress)
            return failures + self._execute(self._reported_runs(), context, progress)
        finally:
            progress.close()
            for logger in self.loggers:
                logger.close()

    def _execute(
        self, runs: Sequence[AnyRun], context: RunContext, progress: Progress
    ) -> list[Failure]:
        if not runs:
            return []
        if self.workers == 0:
            return execute_here(runs, context, self, progress)
        devices = worker_devices(self.options.device, min(self.workers, len(runs)))
        contexts = [replace(context, device=device) for device in devices]
        return Pool(contexts, self, progress).execute(runs)

    def record(self) -> None:
        """Record the choices of the sweeps."""
        for name, study in self.studies.items():
            choices = study.choices(self.folders[name].by_key).items()
            record(
                name, [(str(variant), at, choice) for (at, variant), choice in choices if choice]
            )
        print(f"recorded: {RECORD}")

    def missing(self) -> dict[str, int]:
        """The incomplete tasks by name, each with the number of its missing result rows."""
        missing = {}
        for name, study in self.studies.items():
            self.folders[name] = Folder(self.out / name, self.options.shard)
            total = sum(1 for _ in study.row_specs())
            if count := total - len(study.rows(self.folders[name].by_key)):
                missing[name] = count
        return missing

    def rows(self) -> list[Row]:
        """The stored result rows of these studies."""
        return [
            row
            for name, study in self.studies.items()
            for row in study.rows(self.folders[name].by_key)
        ]

    def other_rows(self) -> list[Row]:
        """The stored result rows of these tasks that were produced with other options."""
        keys = {row["key"] for row in self.rows()}
        folders = self.folders.values()
        return [
            row
            for folder in folders
            for row in folder.by_key.values()
            if row["key"] not in keys and not is_validation(row)
        ]


def _planned(
    task: Task | Experiment, options: Options, plugins: Mapping[str, str]
) -> Study | TrialStudy:
    if isinstance(task, Experiment):
        return plan_trials(task, options, plugins)
    return plan_study(task, options, plugins)


def _check_record(studies: Studies, options: Options) -> None:
    if options.preset != "quick":
        raise UsageError(f"--record needs --preset quick, got {options.preset!r}")
    for name, study in studies.studies.items():
        if not isinstance(study, Study) or not study.sweep.grid:
            raise UsageError(f"--record needs a sweep, and {name} has none here")
        preset = study.task.presets["quick"].settings
        changed = [x for x, value in vars(study.settings).items() if value != vars(preset)[x]]
        if changed:
            raise UsageError(
                "--record needs the settings of preset quick, because presets use the choices, got "
                f"another {', '.join(changed)}"
            )


def run_tasks(
    tasks: Sequence[Task | Experiment], options: Mapping[str, Options], out: Path, show: Show
) -> int:
    """Run tasks or experiments, show their rows, and return the exit status."""
    shared = next(iter(options.values()))
    check_folder("--out", out)
    plugins = load_plugins(shared.plugin)
    planned = [_planned(task, options[task.name], plugins) for task in tasks]
    if not any(list(study.row_specs()) for study in planned):
        raise UsageError(f"nothing to run: {', '.join(task.name for task in tasks)} has no variant")
    studies = Studies(planned, shared, out, hash_in(plugins))
    if shared.record:
        _check_record(studies, shared)
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
    missing = studies.missing()
    if missing and shared.shard.count > 1 and not failures:
        left = ", ".join(f"{count} of {name}" for name, count in missing.items())
        print(f"This shard is done. Results of other shards are missing: {left}. The shard that "
              "finishes last prints the scores and writes the report.")  # fmt: skip
        return 0
    if shared.record and not missing:
        studies.record()
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
