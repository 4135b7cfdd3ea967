"""The commands ``pretrained`` and ``adapt``: plan, training, workers, report."""

from __future__ import annotations

import argparse
import gc
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
from evals.command import Failure, Studies, carry_out
from evals.measures.arithmetic import is_out_of_memory, lean_arithmetic
from evals.options import check_device, check_unique, read_options, with_local_rank
from evals.plugins import load_plugins
from evals.pretrained import training
from evals.pretrained.loading import Source, load, outline, read_text
from evals.pretrained.options import (
    ADAPT,
    HELD_OUT,
    LORA_RATE,
    OPTIONS,
    VARIANTS,
    AdaptOptions,
    PretrainedOptions,
)
from evals.pretrained.study import (
    PretrainedStudy,
    PretrainedTask,
    drawn_from,
    hash_of,
    typical_tokens,
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
from evals.progress import Progress, counted
from evals.reporting.artifacts import write_pretrained
from evals.results.rows import Row, key_of
from evals.run import NotFinite

FOLDER = "trained"  # of the trained parameters, in --out


def main(args: argparse.Namespace) -> int:
    """Train, measure, print the tables and write the report; returns 1 if a run failed, or 0."""
    options: Any = with_local_rank(read_options(OPTIONS[args.command], args))
    study = plan(options)
    trained = [spec for spec in study.specs if isinstance(spec, Adapted)]
    trainings = [spec for spec in trained if not is_trained(spec)]
    if isinstance(options, AdaptOptions):
        print(f"{ADAPT}: {counted(len(trainings), 'training')} to do")
    studies = Studies([study], options, options.out, study.plugins)
    studies.show_plan()
    if options.dry_run:
        studies.show_estimates()
        return 0
    for option in ("out", "save"):  # if results cannot be written, the error comes before the work
        if (path := getattr(options, option)) is not None:
            check_writable(f"--{option}", path)
    failures = _train(study, trainings, options.verbose)
    if failures:
        failed = [failure.run for failure in failures]
        study = replace(study, specs=[spec for spec in study.specs if str(spec) not in failed])
        studies = Studies([study], options, options.out, study.plugins)
        studies.failures += failures
    if studies.runs and studies.workers > 0:
        for cached in (load, drawn_from, outline, typical_tokens):  # each worker has its own
            cached.cache_clear()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def show(rows: list[Row], others: list[Row], _: bool) -> None:
        write_pretrained(rows, others, options.out, options.verbose)

    status = carry_out(studies, show)
    if options.save is not None and not failures:
        with _opened(study, trained[0]) as model:
            model.save_pretrained(options.save)
        load(study.task.source).tokenizer.save_pretrained(options.save)
        print(f"Model: {options.save}")
    return status


@contextmanager
def _opened(study: PretrainedStudy, spec: Substitution) -> Iterator[Any]:
    """The model with a substitution."""
    task = study.task
    with substituted(load(task.source).model, spec, typical_tokens(task)) as model:
        yield model


def _sequences(study: PretrainedStudy, spec: Adapted) -> Sequences:
    return Sequences(load(study.task.source), typical_tokens(study.task), spec.recipe)


def _train(study: PretrainedStudy, specs: Sequence[Adapted], verbose: bool) -> list[Failure]:
    """Do the trainings; returns the failures, each with the name of its variant."""
    failures: list[Failure] = []
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
                failures.append(Failure(str(spec), str(error).splitlines()[0]))
                progress.finish(str(spec), "failed")
            else:
                progress.finish(str(spec), "trained")
    finally:
        progress.close()
    return failures


# ---- plan -------------------------------------------------------------------------------------


def plan(options: Any) -> PretrainedStudy:
    """Check the options and draw all contexts before the model is loaded, then try the variants."""
    for option in ("out", "save"):
        if (path := getattr(options, option)) is not None:
            check_folder(f"--{option}", path)
    plugins = load_plugins(options.plugin)
    check_device(options.device)
    samples = _samples(options.lengths, options.samples)
    task = _task(options)
    if isinstance(options, AdaptOptions):
        # Without the train length, a table cannot show whether the training worked.
        samples.setdefault(options.train_length, next(iter(samples.values())))
        specs = _trainings(options, task)
    else:
        specs = _substitutions(options, max(samples), plugins)
    model_outline = outline(task.source)
    model_outline.check_length("--lengths", max(options.lengths))
    study = PretrainedStudy(task, specs, samples, plugins, "", model_outline.limit)
    contexts = drawn_from(task)
    for length, count in samples.items():
        for sample in range(count):
            contexts.draw(length, sample)
    for spec in specs:
        check_substitution(spec, model_outline.model.config, typical_tokens(task))
    study = replace(study, fingerprint=load(task.source).fingerprint())
    specs = [_with_file(spec, study, options.out / FOLDER) for spec in specs]
    for spec in specs:
        if spec.bfloat16:
            continue  # the same variant is also there without rounding
        with _opened(study, spec.untrained) as model:
            if isinstance(spec, Adapted):
                training.check_gradients(model, spec, _sequences(study, spec))
    return replace(study, specs=[AS_LOADED, *specs])


def _samples(lengths: Sequence[int], samples: Sequence[int] | None) -> dict[int, int]:
    """The number of samples of each length."""
    if samples is None:
        samples = [20 if length <= 2048 else 5 for length in lengths]
    if len(samples) not in (1, len(lengths)):
        raise UsageError(
            f"--samples must be one number or {len(lengths)}, one for each length, got "
            f"{len(samples)}"
        )
    counts = list(samples) * (len(lengths) if len(samples) == 1 else 1)
    return dict(zip(lengths, counts, strict=True))


def _task(options: Any) -> PretrainedTask:
    source = Source(options.model, options.gguf, options.dtype, options.device)
    text = read_text(options.text)
    task = PretrainedTask(source, text, options.text.name, options.measures, seed=options.seed)
    if isinstance(options, PretrainedOptions):
        if options.greedy and "retrieval" not in options.measures:
            raise UsageError("--greedy needs the measure retrieval in --measures")
        return replace(task, greedy=options.greedy, batch=options.batch)
    if options.eval_text is None:
        share = HELD_OUT if options.held_out is None else options.held_out
        training_text, held_out = split_text(text, share)
        name = f"last {100 * share:g} % of {options.text.name}"
        return replace(task, text=held_out, text_name=name, training=training_text)
    if options.held_out is not None:
        raise UsageError("--held-out must not be given with --eval-text")
    eval_text = read_text(options.eval_text, "--eval-text")
    if eval_text == text:
        raise UsageError("--eval-text must be another text than --text")
    return replace(task, text=eval_text, text_name=options.eval_text.name, training=text)


def split_text(text: str, share: float) -> tuple[str, str]:
    """Hold out the last share of a text, cut at the end of a line."""
    if not 0 < share < 1:
        raise UsageError(f"--held-out must be between 0 and 1, got {share}")
    cut = text.find("\n", int(len(text) * (1 - share))) + 1
    if cut == 0:
        raise UsageError(
            f"--text must have a line that ends in its last {100 * share:g} %, so that this part "
            "can be held out"
        )
    return text[:cut], text[cut:]


def _substitutions(options: Any, longest: int, plugins: Mapping[str, str]) -> list[Substitution]:
    """The variants of ``pretrained``, with example values for required parameters."""
    texts = options.variants
    if texts is None:
        plugin_variants = [name for name in plugins if not name.startswith("task ")]
        texts = [*split_list(VARIANTS), *plugin_variants]
    parsed = [parse_substitution(text, options.layers) for text in texts]
    specs = [replace(spec, call=complete(spec.call, longest)) for spec in parsed]
    check_unique("--variants", list(map(str, specs)))
    if options.bfloat16 and options.dtype != "float32":
        raise UsageError(f"--bfloat16 must be given with --dtype float32, got {options.dtype}")
    return [replace(spec, bfloat16=what) for what in ("", *options.bfloat16) for spec in specs]


def _trainings(options: Any, task: PretrainedTask) -> list[Substitution]:
    """The variants of ``adapt``: those that are trained, and those that they are compared with."""
    if options.lora:
        training.check_peft()
    elif options.lora_learning_rate is not None:
        raise UsageError("--lora-learning-rate needs --lora")
    rate = (options.lora_learning_rate or LORA_RATE) if options.lora else 0.0
    text = hash_of(task.training or "")
    recipe = Recipe(text, options.train_length, options.steps, options.batch,
                    options.learning_rate, 0, options.lora, rate)  # fmt: skip
    starts = [training.parse_training(text, options.layers, recipe) for text in options.variants]
    check_unique("--variants", list(map(str, starts)))
    if options.save is not None and len(starts) * len(options.seeds) != 1:
        raise UsageError(
            f"--save needs one variant and one seed, got {counted(len(starts), 'variant')}, "
            f"{counted(len(options.seeds), 'seed')}"
        )
    model_outline = outline(task.source)
    if is_converted(model_outline.model):
        raise UsageError(f"--model {task.source}: attnzoo has already converted this model")
    model_outline.check_length("--train-length", options.train_length)
    Sequences(model_outline, typical_tokens(task), recipe)  # raises if the text is too short
    specs: list[Substitution] = []
    for start in starts:
        specs += training.references(start)
        specs += [replace(start, recipe=replace(recipe, seed=number)) for number in options.seeds]
    return list({str(spec): spec for spec in specs}.values())


def _with_file(spec: Substitution, study: PretrainedStudy, folder: Path) -> Substitution:
    """A trained variant with the file of its training."""
    if not isinstance(spec, Adapted):
        return spec
    key = key_of({"model": study.fingerprint, "device": study.device_kind,
                  "plugin": study.plugins.get(spec.call.name), **spec.identity()})  # fmt: skip
    return replace(spec, file=folder / f"{key}.safetensors")
