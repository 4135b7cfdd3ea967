"""The commands ``pretrained`` and ``adapt``: plan, training, workers, report."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commandline.errors import UsageError
from commandline.files import check_folder, check_writable
from commandline.variants import complete, split_list
from evals.command import Studies, carry_out
from evals.launch import Failure
from evals.measures.arithmetic import is_out_of_memory, lean_arithmetic
from evals.options import check_device, check_unique
from evals.plugins import load_plugins
from evals.pretrained import training
from evals.pretrained.loading import Source, load, outline
from evals.pretrained.options import ADAPT, HELD_OUT, LORA_RATE, VARIANTS, samples_of
from evals.pretrained.study import (
    PretrainedStudy,
    PretrainedTask,
    drawn_from,
    measured,
    typical_tokens,
    work,
)
from evals.pretrained.substitution import (
    AS_LOADED,
    Substitution,
    check_substitution,
    is_converted,
    parse_substitution,
    substituted,
)
from evals.pretrained.training import Adapted, Recipe, Sequences, is_trained
from evals.progress import Progress, clock, counted
from evals.reporting.artifacts import write_pretrained
from evals.results.rows import Row, key_of
from evals.run import NotFinite

FOLDER = "trained"  # of the trained parameters, in --out


def main(args: argparse.Namespace) -> int:
    """Train, measure, print the tables and write the report; returns 1 if a run failed, or 0."""
    study = plan(args)
    trained = [spec for spec in study.specs if isinstance(spec, Adapted)]
    trainings = [spec for spec in trained if not is_trained(spec)]
    if args.command == ADAPT:
        print(f"{ADAPT}: {counted(len(trainings), 'training')} to do")
    studies = Studies([study], args, args.out, study.plugins)
    studies.show_plan()
    if args.dry_run:
        show_estimate(study, trainings, studies)
        return 0
    for option in ("out", "save"):  # if results cannot be written, the error comes before the work
        if (path := getattr(args, option)) is not None:
            check_writable(f"--{option}", path)
    failed = _train(study, trainings, args.verbose)
    if failed:
        study = replace(study, specs=[spec for spec in study.specs if str(spec) not in failed])
        studies = Studies([study], args, args.out, study.plugins)
    if studies.runs and studies.workers > 0:
        for cached in (load, drawn_from, outline, typical_tokens):  # each worker has its own
            cached.cache_clear()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def show(rows: list[Row], others: list[Row]) -> None:
        write_pretrained(rows, others, args.out, args.verbose)

    status = carry_out(studies, show, list(failed.values()))
    if args.save is not None and not failed:
        with _opened(study, trained[0]) as model:
            model.save_pretrained(args.save)
        load(study.task.source).tokenizer.save_pretrained(args.save)
        print(f"Model: {args.save}")
    return status


@contextmanager
def _opened(study: PretrainedStudy, spec: Substitution) -> Iterator[Any]:
    """The model with a substitution."""
    task = study.task
    with substituted(load(task.source).model, spec, typical_tokens(task)) as model:
        yield model


def _sequences(study: PretrainedStudy, spec: Adapted) -> Sequences:
    return Sequences(load(study.task.source), typical_tokens(study.task), spec.recipe)


def _train(study: PretrainedStudy, specs: Sequence[Adapted], verbose: bool) -> dict[str, Failure]:
    """Do the trainings; returns the failures by the name of the variant."""
    failed: dict[str, Failure] = {}
    progress = Progress(len(specs), verbose=verbose)
    try:
        for spec in specs:
            report = partial(progress.update, str(spec), stage="training")
            try:
                with lean_arithmetic(), _opened(study, spec.untrained) as model:
                    training.train(spec, model, _sequences(study, spec), report)
            except (NotFinite, MemoryError, RuntimeError) as error:
                if not (isinstance(error, NotFinite) or is_out_of_memory(error)):
                    raise
                failed[str(spec)] = Failure(str(spec), str(error).splitlines()[0])
            progress.finish(str(spec), "failed" if str(spec) in failed else "trained")
    finally:
        progress.close()
    return failed


def show_estimate(study: PretrainedStudy, trainings: Sequence[Adapted], studies: Studies) -> None:
    """Time each variant on a short context and print the estimated time of all runs.

    A training is timed by its first two steps. Trained variants are timed at the start of the
    training.
    """
    for spec in trainings:
        sequences, seconds = _sequences(study, spec), 0.0
        with lean_arithmetic(), _opened(study, spec.untrained) as model:
            for _ in range(2):  # the first is slower
                began = time.perf_counter()
                training.loss_of(model, sequences.batch(0, spec.recipe.batch)).backward()
                seconds = time.perf_counter() - began
        print(f"  {spec}: {clock(seconds * spec.recipe.steps)}")
    runs: list[Any] = studies.runs
    workers = max(1, studies.workers)
    loaded, shortest, total = load(study.task.source), min(study.samples), 0.0
    context = drawn_from(study.task).draw(shortest, 0)
    for spec in study.specs:
        lengths = [length for run in runs if run.substitution == spec for length, _ in run.tests]
        if not lengths:
            continue
        with _opened(study, spec.untrained) as model:
            _, outcome = (  # the first is slower
                measured(study.task, loaded, model, [context])[0] for _ in range(2)
            )
        seconds = outcome.cpu_seconds * sum(map(work, lengths)) / work(shortest)
        total += seconds
        print(f"  {spec}: {clock(seconds)}")
    print(f"about {clock(total / workers)} on {counted(workers, 'worker')} of one core each, plus "
          "the loading of the model")  # fmt: skip


# ---- plan -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> PretrainedStudy:
    """Check the options and draw all contexts before the model is loaded, then try the variants."""
    for option in ("out", "save"):
        if (path := getattr(args, option)) is not None:
            check_folder(f"--{option}", path)
    plugins = load_plugins(args.plugin)
    check_device(args.device)
    samples = samples_of(args.lengths, args.samples)
    task = _task(args).planned()
    if args.command == ADAPT:
        # Without the train length, a table cannot show whether the training worked.
        samples.setdefault(args.train_length, next(iter(samples.values())))
        specs = _trainings(args, task)
    else:
        specs = _substitutions(args, max(samples), plugins)
    model_outline = outline(task.source)
    model_outline.check_length("--lengths", max(args.lengths))
    study = PretrainedStudy(task, specs, samples, plugins, "", model_outline.limit)
    contexts = drawn_from(task)
    for share in study.shares():
        for point in share:
            contexts.draw(*point)
    for spec in specs:
        check_substitution(spec, model_outline.model.config, typical_tokens(task))
    study = replace(study, fingerprint=load(task.source).fingerprint())
    specs = [_with_file(spec, study, args.out / FOLDER) for spec in specs]
    for spec in specs:
        with _opened(study, spec.untrained) as model:
            if isinstance(spec, Adapted):
                training.check_gradients(model, spec, _sequences(study, spec))
    return replace(study, specs=[AS_LOADED, *specs])


def _task(args: argparse.Namespace) -> PretrainedTask:
    source = Source(args.model, args.gguf, args.dtype, args.device)
    task = PretrainedTask(source, args.text, args.measures, seed=args.seed)
    if args.command != ADAPT:
        if args.greedy and "retrieval" not in args.measures:
            raise UsageError("--greedy needs the measure retrieval in --measures")
        return replace(task, greedy=args.greedy, batch=args.batch)
    if args.eval_text is None:
        share = HELD_OUT if args.held_out is None else args.held_out
        if not 0 < share < 1:
            raise UsageError(f"--held-out must be between 0 and 1, got {share}")
        return replace(task, training=args.text, share=share)
    if args.held_out is not None:
        raise UsageError("--held-out must not be given with --eval-text")
    task = replace(task, text=args.eval_text, training=args.text)
    if len(set(task.texts())) == 1:
        raise UsageError("--eval-text must be another text than --text")
    return task


def _substitutions(
    args: argparse.Namespace, longest: int, plugins: Mapping[str, str]
) -> list[Substitution]:
    """The variants of ``pretrained``, with example values for required parameters."""
    texts = args.variants
    if texts is None:
        plugin_variants = [name for name in plugins if not name.startswith("task ")]
        texts = [*split_list(VARIANTS), *plugin_variants]
    parsed = [parse_substitution(text, args.layers) for text in texts]
    specs = [replace(spec, call=complete(spec.call, longest)) for spec in parsed]
    check_unique("--variants", list(map(str, specs)))
    return specs


def _trainings(args: argparse.Namespace, task: PretrainedTask) -> list[Substitution]:
    """The variants of ``adapt``: those that are trained, and those that they are compared with."""
    rate = args.lora_learning_rate or LORA_RATE
    if args.lora:
        training.check_peft()
    elif args.lora_learning_rate is not None:
        raise UsageError("--lora-learning-rate needs --lora")
    recipe = Recipe(task.hashes[0], args.train_length, args.steps, args.batch,
                    args.learning_rate, 0, args.lora, rate if args.lora else 0.0)  # fmt: skip
    starts = [training.parse_training(text, args.layers, recipe) for text in args.variants]
    check_unique("--variants", list(map(str, starts)))
    if args.save is not None and len(starts) * len(args.seeds) != 1:
        raise UsageError(
            f"--save needs one variant and one seed, got {counted(len(starts), 'variant')}, "
            f"{counted(len(args.seeds), 'seed')}"
        )
    model_outline = outline(task.source)
    if is_converted(model_outline.model):
        raise UsageError(f"--model {task.source}: attnzoo has already converted this model")
    model_outline.check_length("--train-length", args.train_length)
    Sequences(model_outline, typical_tokens(task), recipe)  # raises if the text is too short
    specs: list[Substitution] = []
    for start in starts:
        specs += training.references(start)
        specs += [replace(start, recipe=replace(recipe, seed=number)) for number in args.seeds]
    return list({str(spec): spec for spec in specs}.values())


def _with_file(spec: Substitution, study: PretrainedStudy, folder: Path) -> Substitution:
    """A trained variant with the file of its training."""
    if not isinstance(spec, Adapted):
        return spec
    key = key_of({"model": study.fingerprint, "device": study.device_kind,
                  "plugin": study.plugins.get(spec.call.name), **spec.identity()})  # fmt: skip
    return replace(spec, file=folder / f"{key}.safetensors")
