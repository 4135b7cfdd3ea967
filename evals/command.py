"""Runs tasks: plans the runs, executes those without results, and shows the results."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from commandline.errors import UsageError
from commandline.files import check_folder, check_writable
from evals.launch import default_workers, execute
from evals.loggers import Logger, open_loggers
from evals.measures.metrics import Outcome
from evals.options import Options
from evals.plan import plan_study
from evals.plugins import load_plugins
from evals.progress import Progress, clock, counted
from evals.results.rows import Row, is_validation
from evals.results.store import Folder
from evals.run import Message, Run, RunContext, point_text
from evals.sweeps import RECORD, record
from evals.task import NOTES, Task, trained_encoding
from evals.tasks.digits.experiment import Experiment

# Writes and prints results, given (rows, results folder, note, verbose).
Write = Callable[[list[Row], Path, str, bool], None]
# The text that shows rows while runs are in progress.
SoFar = Callable[[list[Row]], str]
# Shows results, given the rows of the command, the other rows in its folders, and whether no row of
# the command is missing.
Show = Callable[[list[Row], list[Row], bool], None]


class Failure(NamedTuple):
    """A failed run: its name, the error in one line, and the traceback."""

    run: str
    reason: str
    traceback: str = ""


class Studies:
    """Studies that one pool of workers executes. The loggers get every result too.

    studies: each a `Study` or a `PretrainedStudy` (`evals.pretrained`). options: an `Options`, or
    the options of `pretrained` or `adapt`, which have the same names.
    plugins: maps the names that a plugin registers to the hash of its file. so_far: shows the
    scores of the seeds that all variants have, each time their number has doubled; None: nothing.
    """

    def __init__(
        self,
        studies: Sequence[Any],
        options: Any,
        out: Path,
        plugins: Mapping[str, str],
        so_far: SoFar | None = None,
    ) -> None:
        self.options, self.out, self.so_far = options, out, so_far
        self.plugin_hash = next(iter(plugins.values()), None)
        self.studies = {study.name: study for study in studies}
        self.read_folders()
        if options.retry_failed:  # a failed result is missing until its run is repeated
            for folder in self.folders.values():
                rows = folder.by_key.items()
                folder.by_key = {key: row for key, row in rows if row["status"] == "ok"}
        self.attempted: set[str] = set()  # keys of rows
        self.runs = self.missing_runs()
        # For each study, the number of runs to do of each seed, and of seeds that were shown.
        self.to_do = {
            name: Counter(x.seed for x in self.runs if x.study == name and not x.candidate)
            for name in self.studies
        }
        self.shown: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.loggers: list[Logger] = []

    def read_folders(self) -> None:
        """Read the rows, also those that other shards have added."""
        shard = self.options.shard
        self.folders = {n: Folder(x.folder(self.out), shard) for n, x in self.studies.items()}

    def missing_runs(self) -> list[Run]:
        """The runs of this shard with only their missing rows; those of sweeps come first.

        Those that wait for a sweep have the settings of its first candidate.
        """
        runs: list[Run] = []
        for name, study in self.studies.items():
            by_key = self.folders[name].by_key
            done = by_key.keys() | self.attempted
            runs += [run.without(done) for run in study.runs(by_key, self.options.shard)]
        return sorted((run for run in runs if run.tests), key=lambda run: not run.candidate)

    @property
    def workers(self) -> int:
        workers = self.options.workers
        return default_workers(self.options.device) if workers is None else workers

    def receive(self, run: Run, message: Message) -> None:
        """Show, store or log a message of a run."""
        match message:
            case ("stage", point, fraction):
                stage = "training" if point is None else point_text(point)
                self.progress.update(run.name, fraction, stage)
            case ("loss", step, value):
                self._log(run, run.positions, str(run.variant), {"train/loss": value}, step)
            case ("rows", point, outcomes, training):
                for key, outcome in outcomes.items():
                    self._store(run, key, point, outcome, training)
            case ("failed", reason, text):
                self.failures.append(Failure(run.name, reason, text))
                self._finish(run, "failed")
            case ("done", status):
                self._finish(run, status)
            case ("stopped", text):
                raise OSError(text)

    def _finish(self, run: Run, status: str) -> None:
        """Show that a run is finished and, if more seeds follow, the scores of those so far."""
        self.progress.finish(run.name, status)
        to_do = self.to_do[run.study]
        if run.candidate or self.so_far is None:
            return
        to_do[run.seed] -= 1
        seeds = min((+to_do).keys(), default=0)  # + leaves out counts of 0
        if seeds >= max(1, 2 * self.shown[run.study]):
            self.shown[run.study] = seeds
            rows = [row for row in self.rows(run.study) if row["seed"] < seeds]
            if text := self.so_far(rows):
                self.progress.show(f"\nso far: {text}\n")

    def _store(
        self, run: Run, key: str, point: Any, outcome: Outcome, training: dict[str, Any]
    ) -> None:
        row = self.studies[run.study].row(run, key, point, outcome, training)
        try:
            self.folders[run.study].append(row)
        except UsageError as error:  # an invalid result must not end other runs
            self.failures.append(Failure(run.name, str(error)))
            return
        metrics = {f"test/{name}": value for name, value in outcome.metrics.items()}
        if isinstance(point, int):
            self._log(run, row["series"]["positions"], row["variant"], metrics, point)
        elif self.loggers:
            self._log(run, str(point), row["variant"], metrics, run.settings.steps)

    def _log(
        self, run: Run, place: str, variant: str, values: Mapping[str, float], step: int
    ) -> None:
        parts = [run.study, variant, place, run.candidate, f"seed{run.seed}"]
        is_encoding = trained_encoding(place) == run.positions
        config = {
            "task": run.study, "variant": variant, "seed": run.seed,
            "positions": place if is_encoding else run.positions,
            "condition": None if is_encoding else place,
            "sweep": run.candidate or None, "settings": asdict(run.settings),
        } if self.loggers else {}  # fmt: skip
        for logger in self.loggers:
            for name, value in values.items():
                logger.scalar("/".join(filter(None, parts)), name, value, step, config)

    def show_plan(self) -> None:
        """Print the runs to execute and the combinations left out."""
        shard = self.options.shard
        part = f" in shard {shard.index} of {shard.count}" if shard.count > 1 else ""
        for name, study in self.studies.items():
            folder = self.folders[name].path
            rows, total = self.rows(name), self.total(name)
            runs = [run for run in self.runs if run.study == name]
            print(f"{study.headline(runs)}{part}")
            if rows:
                failed = sum(row["status"] != "ok" for row in rows)
                hint = f"; {failed} failed, --retry-failed repeats them" if failed else ""
                print(f"  {len(rows)} of {total} results are already in {folder}{hint}")
            if self.options.verbose:
                workers = self.workers
                place = f"on {counted(workers, 'worker')}" if workers else "in this process"
                lines = study.details(runs, total, self.out)
                print("\n".join(lines), f"{place}; results in {folder}")
            for line in study.remarks():
                print(line)
            if damaged := self.folders[name].damaged:
                print(f"  warning: skipped {damaged} unreadable line(s) in {folder}")
        sys.stdout.flush()

    def show_estimates(self) -> None:
        """Print the number of runs and, from the medians of stored results, their time."""
        seconds: list[float | None] = []
        for name in self.studies:
            runs = [run for run in self.runs if run.study == name]
            estimates = [self._seconds(run) for run in runs]
            for run, estimate in zip(runs, estimates, strict=True):
                if self.options.verbose:
                    text = "no estimate" if estimate is None else f"about {estimate:.0f} s"
                    print(f"  {run.name}: {counted(len(run.keys), 'result')}, {text}")
            known = [estimate for estimate in estimates if estimate is not None]
            time = f"about {clock(sum(known))} of computing time" if known else "no estimate"
            if missing := len(runs) - len(known):
                time += f"; {counted(missing, 'run')} without stored results of the same kind"
            print(f"{name}: {counted(len(runs), 'run')}, {time}")
            seconds += estimates
        known = [estimate for estimate in seconds if estimate is not None]
        workers = max(1, min(self.workers, len(seconds)))
        time = (
            f"about {clock(sum(known) / workers)} (h:mm:ss or m:ss) on "
            f"{counted(workers, 'worker')}, from the medians of stored results"
        )
        if len(known) < len(seconds):
            time = f"{time}, for {len(known)} of them" if known else "no estimate"
        print(f"Total: {counted(len(seconds), 'run')}, {time}.")

    def _seconds(self, run: Run) -> float | None:
        """The time of a run, from the medians of stored rows, if there are any at each x.

        Rows of other variants count where the variant has none.
        """
        study, rows = self.studies[run.study], self.folders[run.study].by_key.values()
        alike = [row for row in rows if study.alike(run, row)]
        same = [row for row in alike if row["variant"].split("->")[0] == str(run.variant)] or alike
        training = [row.get("train_cpu_seconds", 0.0) for row in same]
        seconds = statistics.median(training) if training else 0.0
        for point, tests in run.tests.items():
            x = point[0] if isinstance(point, tuple) else point
            times = [[row["cpu_seconds"] for row in of if row["x"] == x] for of in (same, alike)]
            if not times[1]:
                return None
            seconds += len(tests) * statistics.median(times[0] or times[1])
        return seconds

    def execute(self) -> None:
        """Execute the missing runs."""
        if not self.runs:
            return
        # If results cannot be written, the error comes before the training.
        for folder in self.folders.values():
            check_writable("--out", folder.path)
        context = RunContext(self.options.device, self.options.plugin, self.out, self.plugin_hash)
        self.progress = Progress(len(self.runs), verbose=self.options.verbose)
        try:
            # The runs after a sweep have the settings that it chose.
            while runs := [run for run in self.missing_runs() if not run.waits]:
                execute(runs, context, self.receive, self.workers)
                self.attempted.update(key for run in runs for key in run.keys)
        finally:
            self.progress.close()
            for logger in self.loggers:
                logger.close()

    def record(self) -> None:
        """Record the choices of the sweeps."""
        for name, study in self.studies.items():
            if study.has_lengths:
                runs = study.runs(self.folders[name].by_key)
                reported = [run for run in runs if not run.candidate]
                record(name, [(str(x.variant), x.positions, x.fields["tuned"]) for x in reported])
        print(f"recorded: {RECORD}")

    def total(self, name: str) -> int:
        """The number of result rows of a study."""
        runs = self.studies[name].runs(self.folders[name].by_key)
        return sum(len(run.keys) for run in runs if not run.candidate)

    def rows(self, name: str) -> list[Row]:
        """The stored result rows of a study."""
        return self.studies[name].rows(self.folders[name].by_key)

    def other_rows(self, rows: Sequence[Row]) -> list[Row]:
        """The stored result rows in these folders other than ``rows``."""
        keys = {row["key"] for row in rows}
        return [
            row
            for folder in self.folders.values()
            for row in folder.by_key.values()
            if row["key"] not in keys and not is_validation(row)
        ]


def _check_record(studies: Studies, options: Options) -> None:
    if options.preset != "quick":
        raise UsageError(f"--record needs --preset quick, got {options.preset!r}")
    for name, study in studies.studies.items():
        if not study.has_lengths:
            continue
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
    tasks: Sequence[Task | Experiment],
    options: Mapping[str, Options],
    out: Path,
    write: Write,
    so_far: SoFar,
) -> int:
    """Run tasks or experiments, show their rows, and return the exit status."""
    shared = next(iter(options.values()))
    check_folder("--out", out)
    plugins = load_plugins(shared.plugin)
    several = len(tasks) > 1
    planned = [plan_study(task, options[task.name], plugins, several) for task in tasks]
    # A shard has only some of the variants of a seed.
    one_shard = shared.shard.count == 1
    studies = Studies(planned, shared, out, plugins, so_far if one_shard else None)
    if not any(map(studies.total, studies.studies)):
        raise UsageError(f"nothing to run: {', '.join(studies.studies)} has no variant")
    if shared.record:
        _check_record(studies, shared)
    if studies.runs and not shared.dry_run:
        studies.loggers = open_loggers(shared.log, out)
    studies.show_plan()
    if shared.dry_run:
        studies.show_estimates()
        return 0

    def show(rows: list[Row], others: list[Row], complete: bool) -> None:
        if shared.record and complete:
            studies.record()
        note = NOTES[shared.preset]
        if others:
            note += f" The folder also has {len(others)} results made with other options."
        # If rows have different versions of a variant, the version in the last of them is shown.
        # The rows of this command are therefore last.
        write([*others, *rows], out, note, shared.verbose)

    return carry_out(studies, show)


def carry_out(studies: Studies, show: Show) -> int:
    """Execute the runs, show their rows, and return the exit status."""
    options = studies.options
    studies.execute()
    failures = list(dict.fromkeys(studies.failures))
    for failure in failures:
        print(f"failed: {failure.run}: {failure.reason}", file=sys.stderr)
        if options.verbose and failure.traceback:
            print(failure.traceback, file=sys.stderr)
    if any(failure.traceback for failure in failures) and not options.verbose:
        print("Repeat the command with --verbose for the traceback.", file=sys.stderr)
    studies.read_folders()
    stored = {name: studies.rows(name) for name in studies.studies}
    missing = {name: studies.total(name) - len(rows) for name, rows in stored.items()}
    if any(missing.values()) and options.shard.count > 1 and not failures:
        left = ", ".join(f"{count} of {name}" for name, count in missing.items() if count)
        print(f"This shard is done. Results of other shards are missing: {left}. The shard that "
              "finishes last prints the tables and writes the report.")  # fmt: skip
        return 0
    rows = [row for of_study in stored.values() for row in of_study]
    if rows:
        show(rows, studies.other_rows(rows), not any(missing.values()))
    nothing = all(row["status"] != "ok" for row in rows)
    return 1 if failures or nothing else 0
