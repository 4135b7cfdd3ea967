"""Runs tasks: plans the runs, executes those without results, and shows the results."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from commandline.files import check_folder, check_writable
from evals.launch import Failure, default_workers, execute
from evals.loggers import Logger, open_loggers
from evals.measures.metrics import Outcome
from evals.options import Options
from evals.plan import plan_study
from evals.plugins import load_plugins
from evals.progress import Progress, clock, counted
from evals.results.rows import Row, is_validation
from evals.results.store import Folder
from evals.run import AnyRun, Run, RunContext
from evals.study import Study
from evals.sweeps import RECORD, record
from evals.task import NOTES, TUNABLE, Task
from evals.tasks.digits.experiment import Experiment

# Writes and prints results, given (rows, results folder, note, verbose).
Write = Callable[[list[Row], Path, str, bool], None]
# Shows results, given the rows of the command and the other rows in its folders.
Show = Callable[[list[Row], list[Row]], None]


class Studies:
    """Studies that one pool of workers executes. The loggers get every result too.

    studies: each a `Study` or a `PretrainedStudy` (`evals.pretrained`). options: an `Options`, or
    the options of `pretrained` or `adapt`, which have the same names.
    plugins: maps the names that a plugin registers to the hash of its file.
    """

    def __init__(
        self,
        studies: Sequence[Any],
        options: Any,
        out: Path,
        plugins: Mapping[str, str],
    ) -> None:
        self.options, self.out = options, out
        self.plugin_hash = next(iter(plugins.values()), None)
        self.studies = {study.name: study for study in studies}
        self.folders = self._read_folders()
        # The runs to do. Those that wait for a sweep have the settings of its first candidate.
        self.runs = [*self._missing_runs(True), *self._missing_runs(False, undecided=True)]
        self.loggers: list[Logger] = []

    def _read_folders(self) -> dict[str, Folder]:
        shard = self.options.shard
        return {name: Folder(x.folder(self.out), shard) for name, x in self.studies.items()}

    def _missing_runs(self, sweep: bool, undecided: bool = False) -> list[AnyRun]:
        """The runs of sweeps, or those after the sweeps."""
        shard, retry, runs = self.options.shard, self.options.retry_failed, list[AnyRun]()
        for name, study in self.studies.items():
            by_key = self.folders[name].by_key
            if not sweep:
                runs += study.runs(by_key, shard, retry, undecided)
            elif isinstance(study, Study):
                runs += study.sweep_runs(by_key, shard, retry)
        return runs

    @property
    def swept(self) -> dict[str, Study]:
        """The studies of tasks. Only these have sweeps."""
        return {n: x for n, x in self.studies.items() if isinstance(x, Study) and x.has_lengths}

    @property
    def workers(self) -> int:
        workers = self.options.workers
        return default_workers(self.options.device) if workers is None else workers

    def row(
        self, run: Any, key: str, point: Any, outcome: Outcome, training: dict[str, Any]
    ) -> None:
        """Store and log one result row of a run."""
        study = self.studies[run.task]
        row = study.row(run, key, point, outcome, training)
        self.folders[run.task].append(row)
        if isinstance(study, Study):
            at, step = study.log_at(run, row)
            for logger in self.loggers:
                for name, value in outcome.metrics.items():
                    logger.scalar(at, f"test/{name}", value, step)

    def loss(self, run: Run, step: int, value: float) -> None:
        """Log a training loss of a run."""
        name = run.log_name(str(run.variant), run.positions)
        for logger in self.loggers:
            logger.scalar(name, "train/loss", value, step)

    def show_plan(self) -> None:
        """Print the runs to execute and the combinations left out."""
        shard = self.options.shard
        part = f" in shard {shard.index} of {shard.count}" if shard.count > 1 else ""
        for name, study in self.studies.items():
            folder = self.folders[name].path
            stored = len(study.rows(self.folders[name].by_key))
            runs = [run for run in self.runs if run.task == name]
            print(f"{study.headline(runs)}{part}")
            if stored:
                print(f"  {stored} of {study.total} results are already in {folder}")
            if self.options.verbose:
                workers = self.workers
                place = f"on {counted(workers, 'worker')}" if workers else "in this process"
                lines = study.details(runs, self.out)
                print("\n".join(lines), f"{place}; results in {folder}")
            for line in study.remarks():
                print(line)
            if damaged := self.folders[name].damaged:
                print(f"  warning: skipped {damaged} unreadable line(s) in {folder}")
        sys.stdout.flush()

    def show_estimates(self) -> None:
        """Print the number of runs and, from the medians of stored results, their time."""
        total, unknown = 0.0, 0
        for name in self.studies:
            runs = [run for run in self.runs if run.task == name]
            rows = list(self.folders[name].by_key.values())
            estimates = [_seconds(run, rows) for run in runs]
            known = [seconds for seconds in estimates if seconds is not None]
            for run, seconds in zip(runs, estimates, strict=True):
                if self.options.verbose:
                    text = "no estimate" if seconds is None else f"about {seconds:.0f} s"
                    print(
                        f"  {run}: {counted(sum(map(len, run.tests.values())), 'result')}, {text}"
                    )
            time = f"about {clock(sum(known))} of computing time" if known else "no estimate"
            if missing := len(runs) - len(known):
                time += f"; {counted(missing, 'run')} without stored results of the same kind"
            print(f"{name}: {counted(len(runs), 'run')}, {time}")
            total += sum(known)
            unknown += missing
        workers = max(1, min(self.workers, len(self.runs)))
        time = (
            f"about {clock(total / workers)} (h:mm:ss or m:ss) on {counted(workers, 'worker')}, "
            "from the medians of stored results"
        )
        if unknown:
            known_runs = len(self.runs) - unknown
            time = f"{time}, for {known_runs} of them" if known_runs else "no estimate"
        print(f"Total: {counted(len(self.runs), 'run')}, {time}.")

    def execute(self) -> list[Failure]:
        """Execute the runs and return the failures."""
        if not self.runs:
            return []
        # If results cannot be written, the error comes before the training.
        for folder in self.folders.values():
            check_writable("--out", folder.path)
        context = RunContext(self.options.device, self.options.plugin, self.out, self.plugin_hash)
        progress = Progress(len(self.runs), verbose=self.options.verbose)
        try:
            failures = []
            for sweep in (True, False):  # the runs after a sweep have the settings that it chose
                runs = self._missing_runs(sweep)
                failures += execute(runs, context, self, progress, self.workers)
            return failures
        finally:
            progress.close()
            for logger in self.loggers:
                logger.close()

    def record(self) -> None:
        """Record the choices of the sweeps."""
        for name, study in self.swept.items():
            choices = study.choices(self.folders[name].by_key).items()
            record(
                name, [(str(variant), at, choice) for (at, variant), choice in choices if choice]
            )
        print(f"recorded: {RECORD}")

    def missing(self) -> dict[str, int]:
        """The incomplete studies by name, each with the number of its missing result rows."""
        self.folders = self._read_folders()  # other shards have added rows
        counts = {
            name: study.total - len(study.rows(self.folders[name].by_key))
            for name, study in self.studies.items()
        }
        return {name: count for name, count in counts.items() if count}

    def rows(self) -> list[Row]:
        """The stored result rows of these studies."""
        return [
            row
            for name, study in self.studies.items()
            for row in study.rows(self.folders[name].by_key)
        ]

    def other_rows(self) -> list[Row]:
        """The stored result rows in these folders that were produced with other options."""
        keys = {row["key"] for row in self.rows()}
        return [
            row
            for folder in self.folders.values()
            for row in folder.by_key.values()
            if row["key"] not in keys and not is_validation(row)
        ]


def _seconds(run: AnyRun, rows: Sequence[Row]) -> float | None:
    """The time of a run, from the medians of stored rows with the same settings, if there are any.

    Rows of other variants count where the variant has none.
    """
    alike = [row for row in rows if _kind(row["settings"]) == _kind(run.settings.identity())]
    same = [row for row in alike if row["variant"].split("->")[0] == str(run.variant)] or alike
    training = [row.get("train_cpu_seconds", 0.0) for row in same]
    seconds = statistics.median(training) if training else 0.0
    for x, tests in run.tests.items():
        times = [[row["cpu_seconds"] for row in part if row["x"] == x] for part in (same, alike)]
        if not times[1]:
            return None
        seconds += len(tests) * statistics.median(times[0] or times[1])
    return seconds


def _kind(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide how long a run takes."""
    return {name: value for name, value in settings.items() if name not in TUNABLE}


def _check_record(studies: Studies, options: Options) -> None:
    if options.preset != "quick":
        raise UsageError(f"--record needs --preset quick, got {options.preset!r}")
    for name, study in studies.swept.items():
        if not study.sweep.grid:
            raise UsageError(f"--record needs a sweep, and {name} has none here")
        preset = study.task.presets["quick"].settings
        changed = [x for x, value in vars(study.settings).items() if value != vars(preset)[x]]
        if changed:
            raise UsageError(
                "--record needs the settings of preset quick, because presets use the choices, got "
                f"another {', '.join(changed)}"
            )


def run_tasks(
    tasks: Sequence[Task | Experiment], options: Mapping[str, Options], out: Path, write: Write
) -> int:
    """Run tasks or experiments, show their rows, and return the exit status."""
    shared = next(iter(options.values()))
    check_folder("--out", out)
    plugins = load_plugins(shared.plugin)
    several = len(tasks) > 1
    planned = [plan_study(task, options[task.name], plugins, several) for task in tasks]
    if not any(study.total for study in planned):
        raise UsageError(f"nothing to run: {', '.join(task.name for task in tasks)} has no variant")
    studies = Studies(planned, shared, out, plugins)
    if shared.record:
        _check_record(studies, shared)
    if studies.runs and not shared.dry_run:
        studies.loggers = open_loggers(shared.log, out)
    studies.show_plan()
    if shared.dry_run:
        studies.show_estimates()
        return 0

    def show(rows: list[Row], others: list[Row]) -> None:
        if shared.record and not studies.missing():
            studies.record()
        note = NOTES[shared.preset]
        if others:
            note += f" The folder also has {len(others)} results made with other options."
        # If rows have different versions of a variant, the version in the last of them is shown.
        # The rows of this command are therefore last.
        write([*others, *rows], out, note, shared.verbose)

    return carry_out(studies, show)


def carry_out(studies: Studies, show: Show, failures: Sequence[Failure] = ()) -> int:
    """Execute the runs, show their rows, and return the exit status.

    failures: of work before the runs.
    """
    options = studies.options
    failures = [*failures, *studies.execute()]
    for failure in failures:
        print(f"failed: {failure.run}: {failure.reason}", file=sys.stderr)
        if options.verbose and failure.traceback:
            print(failure.traceback, file=sys.stderr)
    if any(failure.traceback for failure in failures) and not options.verbose:
        print("Repeat the command with --verbose for the traceback.", file=sys.stderr)
    missing = studies.missing()
    if missing and options.shard.count > 1 and not failures:
        left = ", ".join(f"{count} of {name}" for name, count in missing.items())
        print(f"This shard is done. Results of other shards are missing: {left}. The shard that "
              "finishes last prints the tables and writes the report.")  # fmt: skip
        return 0
    rows = studies.rows()
    if rows:
        show(rows, studies.other_rows())
    nothing = all(row["status"] != "ok" for row in rows)
    return 1 if failures or nothing else 0
