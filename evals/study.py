"""One run of a task from options to results: check, plan, run what is missing, summarize, show."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import attnzoo
from evals.cells import Refused, Study, VariantCall, check_spec, parse_specs
from evals.jobs import Context, Job, load_plugin
from evals.metrics import METRICS, Outcome
from evals.pool import Pool, default_workers, run_here, worker_devices
from evals.progress import Progress
from evals.store import Row, Rows, write_whole
from evals.summary import Summary, csv_text, summarize
from evals.tables import accuracy_tables, cause_tables, cost_table, more_tables


@dataclass(frozen=True)
class Options:
    """What the command line says; None means what the preset says."""

    preset: str = "quick"
    variants: Sequence[str] | None = None
    seeds: int | None = None
    lengths: Sequence[int] | None = None
    settings: dict[str, Any] | None = None  # fields of the task's Settings
    plugin: Path | None = None
    workers: int | None = None
    out: Path | None = None
    device: str = "cpu"
    dry_run: bool = False


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise Refused(f"--device must be cpu, cuda or cuda:N, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise Refused(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda":
        index, count = torch.device(device).index or 0, torch.cuda.device_count()
        if index >= count:
            raise Refused(f"--device {device}: torch sees {count} CUDA devices")


def _positive(name: str, value: int, least: int = 1) -> None:
    if value < least:
        raise Refused(f"{name} must be at least {least}, got {value}")


def plan_study(task: ModuleType, options: Options) -> Study:
    """The checked study; whatever cannot be run is refused here, before anything is written."""
    preset = task.PRESETS[options.preset]
    plugins: dict[str, str] = {}
    if options.plugin is not None:
        before = set(attnzoo.list_variants())
        load_plugin(options.plugin)
        digest = hashlib.sha256(options.plugin.read_bytes()).hexdigest()
        plugins = dict.fromkeys(set(attnzoo.list_variants()) - before, digest)
        if not plugins:
            raise Refused(f"--plugin {options.plugin} registered no variant")
    _check_device(options.device)
    if options.workers is not None:
        _positive("--workers", options.workers, 0)
    seeds = preset.seeds if options.seeds is None else options.seeds
    _positive("--seeds", seeds)
    lengths = list(preset.lengths if options.lengths is None else options.lengths)
    for length in lengths:
        _positive("--lengths", length, 2)
    if len(set(lengths)) < len(lengths):
        raise Refused(f"--lengths names a length twice: {lengths}")
    settings = replace(preset.settings, **(options.settings or {}))
    _positive("--steps", settings.steps)
    specs = parse_specs(list(preset.variants if options.variants is None else options.variants))
    tried = sorted({settings.train_shortest, settings.train_longest, *lengths})
    for spec in specs:
        check_spec(spec, tried, settings.width, settings.score_scale)
    return Study(
        task.NAME,
        tuple(specs),
        seeds,
        tuple(sorted(lengths)),
        settings,
        options.device,
        plugins,
    )


def plan_jobs(study: Study, rows: Rows) -> list[Job]:
    """The jobs whose rows are not there yet, seed by seed so that early results are comparable."""
    jobs = []
    for seed in range(study.seeds):
        for variant in dict.fromkeys(spec.train for spec in study.specs):
            tests: dict[int, dict[str, VariantCall | None]] = {}
            for length in study.lengths:
                for spec in study.specs:
                    key = study.row_key(spec, seed, length)
                    if spec.train == variant and key not in rows.by_key:
                        swapped = spec.test if spec.is_swap else None
                        tests.setdefault(length, {})[key] = swapped
            if tests:
                jobs.append(Job(variant, seed, study.training_key(variant, seed), tests))
    return jobs


@cache
def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it; "unknown" without git."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no") else head


def _row(study: Study, job: Job, key: str, length: int, outcome: Outcome, trained: float) -> Row:
    """What is stored of one (variant, seed, length)."""
    swapped = job.tests[length][key]
    settings = study.settings
    return {
        "key": key,
        "task": study.task,
        "variant": str(job.variant) if swapped is None else f"{job.variant}->{swapped}",
        "seed": job.seed,
        "length": length,
        "status": outcome.status,
        "message": outcome.message,
        **{name: outcome.metrics.get(name) for name in METRICS},
        "best_keys": outcome.best_keys,
        "sequences": settings.sequences(length),
        "steps": settings.steps,
        "schedule": settings.schedule,
        "scale": settings.scale,
        "dtype": settings.dtype,
        "device": study.device,
        "torch": torch.__version__,
        "commit": commit(),
        "cpu_seconds": round(outcome.cpu_seconds, 3),
        "train_cpu_seconds": round(trained, 3),
        "training": job.training_key,
    }


def _print_plan(study: Study, jobs: list[Job], out: Path, workers: int) -> None:
    total = len(study.specs) * study.seeds * len(study.lengths)
    missing = sum(len(tests) for job in jobs for tests in job.tests.values())
    trainings = len(jobs) - sum((out / "models" / f"{j.training_key}.pt").exists() for j in jobs)
    print(f"{study.task}: {len(study.specs)} variants × {study.seeds} seeds × {len(study.lengths)}"
          f" lengths = {total} rows, {total - missing} of them there already")  # fmt: skip
    print(f"schedule: {study.settings.schedule}; scale: {study.settings.scale}")
    print(f"to do: {trainings} trainings, {missing} rows on {workers} worker(s), in {out}")


def run_study(task: ModuleType, options: Options) -> int:
    """Run, write and print everything; the exit status."""
    if find_spec("matplotlib") is None:  # now, and not after an hour of training
        raise Refused("the plots need matplotlib: install the extra, attnzoo[evals]")
    study = plan_study(task, options)
    out = options.out or Path("results") / f"{task.NAME}-{options.preset}"
    if out.exists() and not out.is_dir():
        raise Refused(f"--out must be a folder, got {str(out)!r}")
    rows = Rows(out / "rows.jsonl")
    jobs = plan_jobs(study, rows)
    workers = default_workers(options.device) if options.workers is None else options.workers
    _print_plan(study, jobs, out, workers)
    print(task.PRESETS[options.preset].note, flush=True)
    if rows.damaged:
        print(f"{rows.damaged} unreadable line(s) of {rows.path.name} skipped")
    if options.dry_run:
        for job in jobs:
            print(f"  {job}: {sum(map(len, job.tests.values()))} rows, n = {list(job.tests)}")
        return 0
    failures = _run_jobs(task, study, options, jobs, rows, out, workers)
    summary = summarize(study, rows.by_key)
    _write_and_print(task, study, options, summary, rows, out)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _run_jobs(
    task: ModuleType,
    study: Study,
    options: Options,
    jobs: list[Job],
    rows: Rows,
    out: Path,
    workers: int,
) -> list[str]:
    if not jobs:
        return []

    def on_row(job: Job, key: str, length: int, outcome: Outcome, trained: float) -> None:
        rows.append(_row(study, job, key, length, outcome, trained))

    here = Context(task.__name__, study.settings, options.device, options.plugin, out / "models")
    progress = Progress(len(jobs))
    try:
        if workers == 0:
            return run_here(jobs, here, on_row, progress)
        devices = worker_devices(options.device, min(workers, len(jobs)))
        contexts = [replace(here, device=device) for device in devices]
        return Pool(contexts, on_row, progress).run(jobs)
    finally:
        progress.close()


def _about(task: ModuleType) -> str:
    """The second paragraph of a task's docstring: what it is."""
    return " ".join((task.__doc__ or "\n\n").split("\n\n")[1].split())


def _provenance(study: Study, rows: Rows) -> dict[str, str]:
    """Commits and torch versions of the study's rows: more than one means a mixed file."""
    mine = [
        rows.by_key[key]
        for spec in study.specs
        for seed in range(study.seeds)
        for length in study.lengths
        if (key := study.row_key(spec, seed, length)) in rows.by_key
    ]
    return {
        name: ", ".join(sorted({str(row[name]) for row in mine}))
        for name in ("commit", "torch", "device", "dtype")
    }


def _write_and_print(
    task: ModuleType, study: Study, options: Options, summary: Summary, rows: Rows, out: Path
) -> None:
    from evals.plots import heat_map, metric_plot, png  # matplotlib: not in workers
    from evals.report import report_html

    settings = study.settings
    trained = (settings.train_shortest, settings.train_longest)
    write_whole(out / "summary.csv", csv_text(summary, study.task, task.CHANCE))
    accuracy = metric_plot(summary, "accuracy", "Accuracy, %", 100, False, task.CHANCE, trained)
    weight = metric_plot(summary, "max_weight", "Weight on the true key", 1, True, None, trained)
    figures = {
        "accuracy.png": ("Accuracy against n", accuracy),
        "weight.png": ("Weight on the true key against n", weight),
        "best_keys.png": ("Mean weight of the 16 best keys against n", heat_map(summary)),
    }
    pictures, files = {}, ["report.html", "summary.csv", "rows.jsonl"]
    for name, (words, figure) in figures.items():
        if figure is not None:
            pictures[words] = png(figure)
            write_whole(out / name, pictures[words])
            files.append(name)
    published = task.PUBLISHED if options.preset == "paper" else None
    tables = accuracy_tables(summary, task.CHANCE, published)
    causes, costs = cause_tables(summary), cost_table(summary.costs)
    note = task.PRESETS[options.preset].note
    failed = [
        f"{point.variant}, n = {point.length}: {message}"
        for point in summary.points
        for message in point.messages
    ]
    provenance = _provenance(study, rows)
    facts = {
        "task": study.task,
        "preset": options.preset,
        "seeds": study.seeds,
        "lengths": ", ".join(map(str, study.lengths)),
        "schedule": settings.schedule,
        **{name: value for name, value in vars(settings).items() if name != "dtype"},
        **provenance,
        "cores": default_workers("cpu"),
    }
    page = report_html(
        f"attnzoo: {study.task}", [_about(task), note, *failed], tables, pictures,
        [*causes, *more_tables(summary), costs], facts,
    )  # fmt: skip
    write_whole(out / "report.html", page)
    for table in [*tables, *causes, costs]:
        print(f"\n{table.text()}")
    print(f"\nschedule: {settings.schedule}; scale: {settings.scale}; chance: {task.CHANCE:.0%}")
    if any(point.failures for point in summary.points):
        print("* some seeds failed or are missing and are left out of the mean")
    for line in failed:
        print(f"failed: {line}")
    for name in ("commit", "torch"):
        if ", " in provenance[name]:
            print(f"warning: rows of several values of {name}: {provenance[name]}")
    print(f"written to {out}: {', '.join(files)}")
