"""The command ``adapt``: train what variants learn in a pretrained model, then measure it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from commandline.arguments import add_plugin, numbers, seed
from commandline.errors import UsageError
from commandline.files import NotWritten, check_folder, check_writable
from commandline.variants import VariantCall, split_list
from evals.measures.arithmetic import is_out_of_memory, lean_arithmetic
from evals.measures.metrics import Outcome
from evals.options import check_device, check_unique
from evals.plugins import load_plugins
from evals.pretrained import command, lora
from evals.pretrained.adapting import (
    Adapted,
    HeldOut,
    Recipe,
    Sequences,
    check_gradients,
    is_trained,
    loss_of,
    read_stored,
    train,
    training_tokens,
)
from evals.pretrained.loading import DTYPES, Loaded, Source
from evals.pretrained.starts import parse_start, references
from evals.pretrained.study import (
    MEASURES,
    ContextPoint,
    PretrainedStudy,
    Reading,
    drawn_from,
    opened,
    outlined,
    points_of,
)
from evals.pretrained.substitution import (
    Substitution,
    check_substitution,
    is_converted,
    parse_layers,
    substituted,
)
from evals.progress import Progress, clock, counted
from evals.results.rows import Row, key_of
from evals.results.store import UNSHARDED, Folder
from evals.run import NotFinite
from evals.task import Schedule

NAME = "adapt"
ABOUT = (
    "Train only what a variant learns in a pretrained causal language model, on short sequences of "
    "a text, and measure it on long contexts of a text that it was not trained on. Also measured: "
    "the model as loaded, the variant where it equals softmax, the variant calibrated without "
    "training, and the variant at the start of the training."
)
VARIANTS, LENGTHS, MEASURED = "ssmax", "512,1024,2048,4096,8192", "loss,retrieval"
FOLDER = "trained"  # of the trained parameters, in --out
LORA_RATE = 3e-4


def add_parser(commands: Any) -> None:
    short = "Train only what a variant learns in a pretrained model, and measure it at long lengths"
    parser = commands.add_parser(NAME, help=short, description=ABOUT)
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME",
        help="Load this model: a folder, or a name on the Hugging Face hub")  # fmt: skip
    add("--gguf", metavar="FILE", help="Load the model and its tokenizer from this file in it")
    add("--text", type=Path, required=True, metavar="FILE", help="Train on this UTF-8 text")
    add("--eval-text", type=Path, metavar="FILE",
        help="Measure on this text (default: the end of --text, which is not trained on)"
        )  # fmt: skip
    add("--held-out", type=float, metavar="X",
        help="Hold out this share of --text (default: 0.2)")  # fmt: skip
    add("--variants", type=split_list, default=split_list(VARIANTS), metavar="a,b(x=1)",
        help="Train these variants, also with start='identity', calibrate=N or learn='x y', the "
        f"parameters to train (default: {VARIANTS})")  # fmt: skip
    add("--layers", default="all", metavar="N-N,N", help="Substitute only in these layers")
    add("--train-length", type=int, default=512, metavar="N",
        help="Train on sequences of N tokens (default: 512)")  # fmt: skip
    add("--steps", type=int, default=100, metavar="N", help="Train for N steps (default: 100)")
    add("--batch", type=int, default=4, metavar="N", help="Sequences per step (default: 4)")
    add("--learning-rate", type=float, default=0.01, metavar="X",
        help="Peak learning rate of the variant's parameters (default: 0.01)")  # fmt: skip
    add("--lora", type=int, default=0, metavar="RANK",
        help="Also train LoRA of this rank in all linear layers, with peft")  # fmt: skip
    add("--lora-learning-rate", type=float, metavar="X",
        help=f"Peak learning rate of LoRA (default: {LORA_RATE:g})")  # fmt: skip
    add("--seeds", type=_seeds, default=[0], metavar="N,N,…",
        help="Train once with each of these seeds (default: 0)")  # fmt: skip
    add("--seed", type=seed, default=0, metavar="N", help="Draw contexts with seed N (default: 0)")
    add("--measures", type=split_list, default=split_list(MEASURED), metavar="NAME,…",
        help=f"Measure these of {', '.join(MEASURES)} (default: {MEASURED})")  # fmt: skip
    add("--lengths", type=numbers, default=numbers(LENGTHS), metavar="N,N,…",
        help=f"Read contexts of these lengths in tokens (default: {LENGTHS})")  # fmt: skip
    add("--samples", type=numbers, metavar="N,N,…",
        help="Read N contexts: one number, or one for each length (default: 20, and 5 at lengths "
        "above 2048)")  # fmt: skip
    add("--dtype", choices=tuple(DTYPES), default="float32",
        help="Load the frozen parameters in this dtype; trained ones are float32 "
        "(default: float32)")  # fmt: skip
    add("--device", default="cpu", metavar="NAME", help="Run on cpu, cuda or cuda:N (default: cpu)")
    add("--workers", type=int, metavar="N",
        help="Measure with N worker processes (default: one per core or GPU); 0: none"
        )  # fmt: skip
    add("--out", type=Path, default=Path("results") / NAME, metavar="DIR",
        help=f"Write results to DIR, or continue those in it (default: results/{NAME})"
        )  # fmt: skip
    add("--save", type=Path, metavar="DIR", help="Save the trained model to DIR (only one model)")
    add("--retry-failed", action="store_true", help=command.RETRY)
    add("--verbose", action="store_true", help="Also print all tables, tracebacks and status lines")
    add("--dry-run", action="store_true", help="Estimate the time of the runs, and run nothing")
    add_plugin(parser)


def _seeds(text: str) -> list[int]:
    return [seed(part) for part in text.split(",")]


@dataclass(frozen=True)
class AdaptStudy(PretrainedStudy):
    """A study whose rows also say what was trained and how."""

    def row(self, run: Reading, key: str, point: ContextPoint, outcome: Outcome) -> Row:
        row = super().row(run, key, point, outcome)
        if isinstance(run.substitution, Adapted):
            stored = read_stored(run.substitution.file)
            costs = {n: stored.about[n] for n in ("seconds", "cpu_seconds", "parameters")}
            row["training"] = {**stored.about["settings"], **costs}
            if outcome.status == "ok":
                row["curves"] = {**row["curves"], **stored.curves}
        return row


def main(args: argparse.Namespace) -> int:
    """Train, measure, print the tables, write the report; returns 1 if a run failed, or 0."""
    study = plan(args)
    trained = [spec for spec in study.specs if isinstance(spec, Adapted)]
    untrained = [spec for spec in trained if not is_trained(spec)]
    print(f"{NAME}: {study.task.source}, {counted(len(untrained), 'training')} to do, "
          f"{counted(len(study.specs), 'variant')} to measure, lengths up to {max(study.samples)}"
          )  # fmt: skip
    for line in command.warnings(study):
        print(line)
    sys.stdout.flush()
    folder = Folder(args.out, UNSHARDED)
    workers = command.default_workers(args.device) if args.workers is None else args.workers
    if args.dry_run:
        _estimate(study, untrained)
        # Trained variants are timed as they are at the start.
        runs = [
            replace(run, substitution=_start_of(run.substitution))
            for run in command.missing(study.runs(), folder, args.retry_failed)
        ]
        study = replace(study, specs=[_start_of(spec) for spec in study.specs])
        command.show_estimate(study, runs, max(1, workers))
        return 0
    if args.save is not None:
        check_writable("--save", args.save)
    check_writable("--out", args.out)
    failed = _train(study, untrained, args.verbose)
    study = replace(study, specs=[spec for spec in study.specs if spec not in failed])
    all_runs = study.runs()
    runs = command.missing(all_runs, folder, args.retry_failed)
    failures = command.execute(study, runs, folder, workers, args)
    for failure in failures:
        print(f"failed: {failure.run}: {failure.reason}", file=sys.stderr)
        if args.verbose:
            print(failure.traceback, file=sys.stderr)
    folder = Folder(args.out, UNSHARDED)
    keys = {key for run in all_runs for tests in run.tests.values() for key in tests}
    rows = [row for key, row in folder.by_key.items() if key in keys]
    if rows:
        command.show(rows, folder, args.out, args.verbose)
    if args.save is not None and not failed:
        _save(study, trained[0], args.save)
    return 1 if failed or failures or all(row["status"] != "ok" for row in rows) else 0


def _start_of(spec: Substitution | None) -> Substitution | None:
    return _Start(spec.call, spec.layers, spec) if isinstance(spec, Adapted) else spec


def _save(study: PretrainedStudy, spec: Adapted, out: Path) -> None:
    loaded, task = opened(study.task.source), study.task
    with substituted(loaded.model, spec, task.typical(drawn_from(task))) as model:
        model.save_pretrained(out)
        loaded.tokenizer.save_pretrained(out)
    print(f"Model: {out}")


# ---- training ---------------------------------------------------------------------------------


@contextmanager
def _prepared(study: PretrainedStudy, spec: Adapted) -> Iterator[tuple[Loaded, Any]]:
    """The model at the start of a training, and its tokens; restores the model."""
    loaded, tokens = opened(study.task.source), study.task.typical(drawn_from(study.task))
    start = _Start(spec.call, spec.layers, spec)
    with substituted(loaded.model, start, tokens) as model:
        yield loaded, model


@dataclass(frozen=True)
class _Start(Substitution):
    """The start of a training, in place of its end."""

    of: Adapted | None = None

    def __str__(self) -> str:
        return str(self.of)

    @property
    def in_place(self) -> bool:
        assert self.of is not None
        return self.of.in_place

    def onto(self, model: Any, tokens: Any) -> Any:
        assert self.of is not None
        return self.of.prepared(model, tokens)[0]


def _train(study: PretrainedStudy, specs: Sequence[Adapted], verbose: bool) -> list[Adapted]:
    """Do the trainings; returns those that failed."""
    failed: list[Adapted] = []
    progress = Progress(len(specs), verbose=verbose)
    try:
        for spec in specs:
            name = str(spec)
            report = partial(progress.update, name, stage="training")
            try:
                with lean_arithmetic(), _prepared(study, spec) as (loaded, model):
                    train(spec, loaded, model, study.task.typical(drawn_from(study.task)), report)
            except NotWritten:
                raise
            except (NotFinite, MemoryError, RuntimeError) as error:
                if not (isinstance(error, NotFinite) or is_out_of_memory(error)):
                    raise
                print(f"failed: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
                failed.append(spec)
            progress.finish(name, "failed" if spec in failed else "trained")
    finally:
        progress.close()
    return failed


def _estimate(study: PretrainedStudy, specs: Sequence[Adapted]) -> None:
    """Time two steps of each training and print the estimated time of all of its steps."""
    for spec in specs:
        recipe = spec.settings
        with lean_arithmetic(), _prepared(study, spec) as (loaded, model):
            sequences = Sequences(loaded, study.task.typical(drawn_from(study.task)), recipe)
            seconds = 0.0
            for _ in range(2):  # the first is slower
                began = time.perf_counter()
                loss_of(model, sequences.batch(0, recipe.batch)).backward()
                seconds = time.perf_counter() - began
        print(f"  {spec}: {clock(seconds * recipe.steps)}")


# ---- plan -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> AdaptStudy:
    """Check the options and draw all contexts before the model is loaded, then try the variants."""
    for option, path in (("--out", args.out), ("--save", args.save)):
        if path is not None:
            check_folder(option, path)
    plugins = load_plugins(args.plugin)
    command.check_measures(args.measures)
    for option in ("lengths", "seeds"):
        check_unique(f"--{option}", list(map(str, getattr(args, option))))
    for option, least in (("train_length", 2), ("lora", 0), ("workers", 0)):
        value = getattr(args, option)
        if value is not None and value < least:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} must be an int >= {least}, got {value}")
    rate = LORA_RATE if args.lora_learning_rate is None else args.lora_learning_rate
    if args.lora_learning_rate is not None and not args.lora:
        raise UsageError("--lora-learning-rate needs --lora")
    if not 0 < rate < float("inf"):
        raise UsageError(f"--lora-learning-rate must be finite and > 0, got {rate}")
    try:
        Schedule(steps=args.steps, batch=args.batch, learning_rate=args.learning_rate)
    except ValueError as error:
        raise UsageError(f"--{str(error).replace('_', '-', 1)}") from error
    if args.lora:
        lora.check()
    check_device(args.device)
    task = _task(args).planned()
    samples = command.samples_of(args.lengths, args.samples)
    # Without the train length, a table cannot show whether the training worked.
    samples.setdefault(args.train_length, next(iter(samples.values())))
    starts = [parse_start(text, parse_layers(args.layers), args.lora) for text in args.variants]
    if args.save is not None and len(starts) * len(args.seeds) != 1:
        raise UsageError("--save needs one variant and one seed, got "
                         f"{counted(len(starts), 'variant')}, {counted(len(args.seeds), 'seed')}"
                         )  # fmt: skip
    recipe = Recipe(task.hashes[0], args.train_length, args.steps, args.batch,
                    args.learning_rate, 0, args.lora, rate if args.lora else 0.0)  # fmt: skip
    trained = [Adapted(start.call, start.layers, recipe, learn) for start, learn in starts]
    check_unique("--variants", list(map(str, trained)))
    model_outline = outlined(task.source)
    if is_converted(model_outline.model):
        raise UsageError(f"--model {task.source}: attnzoo has already converted this model")
    model_outline.check_length("--train-length", args.train_length)
    model_outline.check_length("--lengths", max(args.lengths))
    Sequences(model_outline, training_tokens(task), recipe)  # raises if the text is too short
    contexts = drawn_from(task)
    for point in points_of(samples):
        contexts.draw(*point)
    for start, learn in starts:
        tokens = training_tokens(task)
        check_substitution(start, model_outline.model.config, tokens, learn=learn or None)
    loaded = opened(task.source)
    fingerprint = loaded.fingerprint()
    specs: dict[str, Substitution] = {}
    for start, learn in starts:
        for reference in references(start, learn, args.train_length):
            specs[str(reference)] = reference
        for number in args.seeds:
            seed_recipe = replace(recipe, seed=number)
            adapted = Adapted(start.call, start.layers, seed_recipe, learn)
            key = key_of({"model": fingerprint, "device": args.device.split(":")[0],
                          "plugin": plugins.get(start.call.name), **adapted.identity()}
                         )  # fmt: skip
            adapted = replace(adapted, file=args.out / FOLDER / f"{key}.safetensors")
            specs[str(adapted)] = adapted
    study = AdaptStudy(task, [None, *specs.values()], samples, plugins, fingerprint, loaded.limit)
    _try(study)
    return study


def _task(args: argparse.Namespace) -> HeldOut:
    """The task, with the text held out of the training."""
    source = Source(args.model, args.gguf, args.dtype, args.device)
    measures = tuple(name for name in MEASURES if name in args.measures)
    share = 0.2 if args.held_out is None else args.held_out
    if not 0 < share < 1:
        raise UsageError(f"--held-out must be between 0 and 1, got {share}")
    if args.eval_text is None:
        return HeldOut(source, args.text, measures, seed=args.seed, training=args.text,
                       share=share)  # fmt: skip
    if args.held_out is not None:
        raise UsageError("--held-out must not be given with --eval-text")
    task = HeldOut(source, args.eval_text, measures, seed=args.seed, training=args.text)
    if task.read() == task.training_text():
        raise UsageError("--eval-text must be another text than --text")
    return task


def _try(study: AdaptStudy) -> None:
    """Substitute every variant once, and check that the trained parameters have gradients."""
    loaded, task = opened(study.task.source), study.task
    assert isinstance(task, HeldOut)
    tokens = training_tokens(task)
    checked: set[tuple[VariantCall, Any]] = set()
    for spec in study.specs:
        if isinstance(spec, Adapted):
            sequences = Sequences(loaded, tokens, spec.settings)
            if (spec.call, spec.learn) not in checked and not spec.file.exists():
                with _prepared(study, spec) as (_, model):
                    check_gradients(model, spec, sequences)
            checked.add((spec.call, spec.learn))
        elif spec is not None:
            with substituted(loaded.model, spec, tokens):
                pass
