"""The command ``pretrained``: options, plan, workers, report."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from commandline.arguments import add_plugin, either, numbers, seed
from commandline.errors import UsageError
from commandline.files import check_folder, check_writable
from commandline.variants import complete, split_list
from evals.launch import Failure, default_workers
from evals.launch import execute as execute_runs
from evals.measures.metrics import Outcome
from evals.options import Options, check_device, check_unique
from evals.plugins import hash_in, load_plugins
from evals.pretrained.loading import DTYPES, Source
from evals.pretrained.study import (
    MEASURES,
    PretrainedStudy,
    PretrainedTask,
    Reading,
    drawn_from,
    measured,
    opened,
    outlined,
    points_of,
)
from evals.pretrained.substitution import (
    Substitution,
    check_substitution,
    parse_layers,
    parse_substitution,
    substituted,
)
from evals.progress import Progress, clock, counted
from evals.reporting.pretrained import NAME, print_tables, write_report
from evals.results.pretrained import BASELINE
from evals.results.rows import Row, first_error
from evals.results.store import Folder, Shard
from evals.run import AnyRun, RunContext

ABOUT = (
    "Measure a pretrained causal language model with its attention replaced at inference: the "
    "loss at each position, retrieval of facts planted in a text, the sharpness of each head, and "
    "the weight that each head puts on a needle. Nothing is trained."
)
VARIANTS = (
    "softmax,log_n(train_length=2048),adaptive_temperature,entmax,topk(top_k=64),"
    "ssmax(calibrate=512)"
)
LENGTHS, SAMPLES = "512,1024,2048,8192", "20,20,20,5"
RETRY = "Repeat contexts that ended in NaN or out of memory"  # help of --retry-failed


def add_parser(commands: Any) -> None:
    short = "Measure a pretrained language model with other attention variants, without training"
    parser = commands.add_parser(NAME, help=short, description=ABOUT)
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME",
        help="Load this model: a folder, or a name on the Hugging Face hub")  # fmt: skip
    add("--gguf", metavar="FILE", help="Load the model and its tokenizer from this file in it")
    add("--text", type=Path, required=True, metavar="FILE", help="Read this UTF-8 text")
    add("--variants", type=split_list, metavar="a,b(x=1)",
        help="Substitute these variants at inference, also with start='identity' or calibrate=N "
        f"(default: {VARIANTS}, and those of --plugin). The model as loaded is always measured"
        )  # fmt: skip
    add("--layers", default="all", metavar="N-N,N", help="Substitute only in these layers")
    add("--measures", type=split_list, default=list(MEASURES), metavar="NAME,…",
        help=f"Measure these (default: {','.join(MEASURES)})")  # fmt: skip
    add("--lengths", type=numbers, default=numbers(LENGTHS), metavar="N,N,…",
        help=f"Read contexts of these lengths in tokens (default: {LENGTHS})")  # fmt: skip
    add("--samples", type=numbers, metavar="N,N,…",
        help="Read N contexts: one number, or one for each length (default: 20, and 5 at lengths "
        "above 2048)")  # fmt: skip
    add("--seed", type=seed, default=0, metavar="N", help="Draw contexts with seed N (default: 0)")
    add("--greedy", action="store_true", help="Also decode the answers greedily")
    add("--dtype", choices=tuple(DTYPES), default="float32",
        help="Load the parameters in this dtype (default: float32)")  # fmt: skip
    add("--batch", type=int, default=1, metavar="N", help="Read N contexts at once (default: 1)")
    add("--device", default="cpu", metavar="NAME", help="Run on cpu, cuda or cuda:N (default: cpu)")
    add("--workers", type=int, metavar="N",
        help="Use N worker processes (default: one per core or GPU); 0: no worker process"
        )  # fmt: skip
    add("--shard", default="0/1", metavar="I/N",
        help="Run part I of N (I from 0)")  # fmt: skip
    add("--out", type=Path, default=Path("results") / NAME, metavar="DIR",
        help=f"Write results to DIR, or continue those in it (default: results/{NAME})"
        )  # fmt: skip
    add("--retry-failed", action="store_true", help=RETRY)
    add("--verbose", action="store_true", help="Also print all tables, tracebacks and status lines")
    add("--dry-run", action="store_true", help="Estimate the time of the runs, and run nothing")
    add_plugin(parser)


def _shard(text: str) -> Shard:
    """Read I/N, or env, as for the tasks."""
    try:
        return Options.model_validate({"shard": text}).shard
    except ValidationError as error:
        raise UsageError(f"--{first_error(error)}") from error


class _RowListener:
    """Stores the results of runs."""

    def __init__(self, study: PretrainedStudy, folder: Folder) -> None:
        self.study, self.folder = study, folder

    def row(
        self, run: Any, key: str, point: Any, outcome: Outcome, training: dict[str, Any]
    ) -> None:
        self.folder.append(self.study.row(run, key, point, outcome))

    def loss(self, run: AnyRun, step: int, value: float) -> None:
        raise AssertionError("nothing is trained")


def main(args: argparse.Namespace) -> int:
    """Measure, print the tables, and write the report; returns 1 if a run failed, or 0."""
    args.shard = _shard(args.shard)
    study = plan(args)
    folder = Folder(args.out, args.shard)
    all_runs = study.runs()
    shard_runs = all_runs[args.shard.index :: args.shard.count]
    runs = missing(shard_runs, folder, args.retry_failed)
    points = sum(len(run.tests) for run in runs)
    part = f" in shard {args.shard.index} of {args.shard.count}" * (args.shard.count > 1)
    print(f"{NAME}: {study.task.source}, {counted(len(study.specs), 'variant')}, lengths up to "
          f"{max(study.samples)}: {counted(points, 'context')} to read{part}")  # fmt: skip
    for line in warnings(study):
        print(line)
    sys.stdout.flush()
    workers = default_workers(args.device) if args.workers is None else args.workers
    if args.dry_run:
        show_estimate(study, runs, max(1, workers))
        return 0
    failures = execute(study, runs, folder, workers, args)
    for failure in failures:
        print(f"failed: {failure.run}: {failure.reason}", file=sys.stderr)
        if args.verbose:
            print(failure.traceback, file=sys.stderr)
    folder = Folder(args.out, args.shard)
    keys = {key for run in all_runs for tests in run.tests.values() for key in tests}
    missing_rows = len(keys - folder.by_key.keys())
    if missing_rows and args.shard.count > 1 and not failures:
        print(f"This shard is done. {counted(missing_rows, 'result')} of other shards are missing. "
              "The shard that finishes last prints the tables and writes the report.")  # fmt: skip
        return 0
    rows = [row for key, row in folder.by_key.items() if key in keys]
    if rows:
        show(rows, folder, args.out, args.verbose)
    return 1 if failures or all(row["status"] != "ok" for row in rows) else 0


def show(rows: Sequence[Row], folder: Folder, out: Path, verbose: bool) -> None:
    """Print the tables of these rows, and write the report of all rows in the folder."""
    print_tables(rows, verbose)
    page = write_report(list(folder.by_key.values()), out)
    print(f"\nReport: {page}")


def missing(runs: Sequence[Reading], folder: Folder, retry: bool) -> list[Reading]:
    """The runs with the points that have no result yet, or with ``retry`` a failed one."""
    done = {key for key, row in folder.by_key.items() if not retry or row["status"] == "ok"}
    unfinished = (
        replace(run, tests={at: keys for at, keys in run.tests.items() if not keys.keys() <= done})
        for run in runs
    )
    return [run for run in unfinished if run.tests]


def execute(
    study: PretrainedStudy,
    runs: list[Reading],
    folder: Folder,
    workers: int,
    args: argparse.Namespace,
) -> list[Failure]:
    if not runs:
        return []
    # If results cannot be written, the error comes before the work.
    check_writable("--out", args.out)
    progress = Progress(len(runs), verbose=args.verbose)
    context = RunContext(args.device, args.plugin, args.out, hash_in(study.plugins))
    listener = _RowListener(study, folder)
    try:
        if workers > 0:
            _free_memory()  # each worker loads the model itself
        return execute_runs(runs, context, listener, progress, workers)
    finally:
        progress.close()


def _free_memory() -> None:
    """Drop the model of this process."""
    opened.cache_clear()
    drawn_from.cache_clear()
    outlined.cache_clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ---- plan -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> PretrainedStudy:
    """Check the options and draw all contexts before the model is loaded, then try the variants."""
    check_folder("--out", args.out)
    plugins = load_plugins(args.plugin)
    check_measures(args.measures)
    check_unique("--lengths", list(map(str, args.lengths)))
    if args.batch < 1:
        raise UsageError(f"--batch must be an int >= 1, got {args.batch}")
    if args.workers is not None and args.workers < 0:
        raise UsageError(f"--workers must be an int >= 0, got {args.workers}")
    check_device(args.device)
    samples = samples_of(args.lengths, args.samples)
    layers = parse_layers(args.layers)
    texts = args.variants
    if texts is None:
        plugin_variants = [name for name in plugins if not name.startswith("task ")]
        texts = [*split_list(VARIANTS), *plugin_variants]
    specs = [_completed(parse_substitution(text, layers), max(samples)) for text in texts]
    check_unique("--variants", list(map(str, specs)))
    source = Source(args.model, args.gguf, args.dtype, args.device)
    measures = tuple(name for name in MEASURES if name in args.measures)
    if args.greedy and "retrieval" not in measures:
        raise UsageError("--greedy needs the measure retrieval in --measures")
    task = PretrainedTask(source, args.text, measures, args.greedy, args.seed, args.batch).planned()
    outlined(source).check_length("--lengths", max(samples))
    contexts = drawn_from(task)
    for point in points_of(samples):
        contexts.draw(*point)
    for spec in specs:
        check_substitution(spec, outlined(source).model.config, contexts.tokens)
    loaded = opened(source)
    study = PretrainedStudy(
        task, [None, *specs], samples, plugins, loaded.fingerprint(), loaded.limit
    )  # fmt: skip
    first_tokens = contexts.draw(*study.points()[-1]).tokens[None, :16].to(args.device)
    for spec in specs:
        with substituted(loaded.model, spec, contexts.tokens) as model, torch.inference_mode():
            try:
                model(input_ids=first_tokens)
            except (TypeError, ValueError) as error:
                raise UsageError(f"--variants {spec}: {error}") from error
    return study


def check_measures(names: Sequence[str]) -> None:
    """Raise if a measure is unknown or given twice."""
    for name in names:
        if name not in MEASURES:
            raise UsageError(f"--measures must be among {', '.join(MEASURES)}, got {name!r}")
    check_unique("--measures", names)


def samples_of(lengths: Sequence[int], samples: Sequence[int] | None) -> dict[int, int]:
    """The number of samples of each length."""
    if samples is None:
        samples = [20 if length <= 2048 else 5 for length in lengths]
    if len(samples) not in (1, len(lengths)):
        raise UsageError(
            f"--samples must be one number or {len(lengths)}, one for each length, got "
            f"{len(samples)}"
        )
    counts = list(samples) * (1 if len(samples) == len(lengths) else len(lengths))
    return dict(zip(lengths, counts, strict=True))


def _completed(spec: Substitution, longest: int) -> Substitution:
    """With example values for required parameters that were not given."""
    return Substitution(complete(spec.call, longest), spec.layers)


def warnings(study: PretrainedStudy) -> list[str]:
    """A line if some contexts are longer than those of the training."""
    beyond = [n for n in sorted(study.samples) if study.limit is not None and n > study.limit]
    if not beyond:
        return []
    return [
        f"  warning: the model was trained with {study.limit} positions; "
        f"{either(list(map(str, beyond)))} tokens are beyond its trained context"
    ]


def show_estimate(study: PretrainedStudy, runs: Sequence[Reading], workers: int) -> None:
    """Time each variant on two short contexts and print the estimated time of all runs.

    The time of a context of n tokens is taken as a·n + b·n².
    """
    loaded, contexts = opened(study.task.source), drawn_from(study.task)
    total = 0.0
    for spec in study.specs:
        points = [point for run in runs if run.substitution == spec for point in run.tests]
        if not points:
            continue
        times: list[tuple[int, float]] = []
        with substituted(loaded.model, spec, study.task.typical(contexts)) as model:
            shortest = min(study.samples)
            longer = next((n for n in sorted(study.samples) if n > shortest), shortest)
            for length in (shortest, shortest, longer):  # the first is slower
                (outcome,) = measured(study.task, loaded, model, [contexts.draw(length, 0)])
                times.append((length, outcome.cpu_seconds))
        seconds = sum(_extrapolated(times[1:], length) for length, _ in points)
        total += seconds
        name = BASELINE if spec is None else str(spec)
        print(f"  {name}: {clock(seconds)}")
    print(f"about {clock(total / workers)} on {counted(workers, 'worker')} of one core each, plus "
          "the loading of the model")  # fmt: skip


def _extrapolated(times: Sequence[tuple[int, float]], length: int) -> float:
    (m, s), (n, t) = times
    if m == n:
        return t * length / n
    b = max(0.0, (t / n - s / m) / (n - m))
    a = max(0.0, t / n - b * n)
    return a * length + b * length**2
