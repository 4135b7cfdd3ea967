"""What `python -m evals pretrained` runs: points (variant, length, sample), their keys and rows.

A point is one context, read with one variant. A run is some points of one variant, about as much
work as the longest context, so that workers share the work evenly and the time left is about right.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch

from commandline.errors import UsageError
from commandline.variants import VariantCall
from evals.measures.arithmetic import is_out_of_memory
from evals.measures.metrics import Outcome
from evals.pretrained import contexts, heads, positions, retrieval
from evals.pretrained.loading import Loaded, Source, load, outline, read_text
from evals.pretrained.reading import Reader, only
from evals.pretrained.substitution import Substitution, is_converted, substituted
from evals.results.pretrained import BASELINE
from evals.results.rows import PRETRAINED, Row, key_of, origin
from evals.run import AnyRun, Emit, RunContext
from evals.tasks.draws import GENERATOR

MEASURES = ("loss", "retrieval", "sharpness", "dispersion")
_PLANTED = ("retrieval", "dispersion")
_VERSION = 2  # change it when the measures change
_QUADRATIC = 4096  # tokens at which attention costs about as much as the rest of a small model
ContextPoint = tuple[int, int]  # length, sample


@dataclass(frozen=True)
class PretrainedTask:
    """What all points of a command share.

    hashes: hashes of the texts, which must not change after the command is planned; see `planned`.
    """

    source: Source
    text: Path
    measures: tuple[str, ...] = MEASURES
    greedy: bool = False
    seed: int = 0
    batch: int = 1
    hashes: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        """The text and the version of the contexts. Only of a planned task."""
        return f"{self.hashes[-1]} contexts-{contexts.VERSION} {GENERATOR}"

    @property
    def planted(self) -> bool:
        """Whether facts are planted in the contexts."""
        return any(name in _PLANTED for name in self.measures)

    @property
    def text_name(self) -> str:
        """The text in words, for tables."""
        return self.text.name

    def planned(self) -> Self:
        """The task with the hashes of its texts, which are checked when they are read again."""
        return replace(self, hashes=tuple(map(text_hash, self.texts())))

    def read(self) -> str:
        """The text from which contexts are drawn."""
        return self.texts()[-1]

    def texts(self) -> tuple[str, ...]:
        """All texts that the command reads; that of the contexts is the last.

        Raises:
            UsageError: a text is not the one of the plan.
        """
        texts = self._read()
        if self.hashes and self.hashes != tuple(map(text_hash, texts)):
            raise UsageError(f"{self.text_name} changed after the start; run the command again")
        return texts

    def _read(self) -> tuple[str, ...]:
        return (read_text(self.text),)

    def typical(self, drawn: contexts.Contexts) -> torch.Tensor:
        """The tokens to calibrate variants on."""
        return drawn.tokens


@cache
def opened(source: Source) -> Loaded:
    """The model, loaded once in each process."""
    return load(source)


@cache
def outlined(source: Source) -> Loaded:
    """The model without its weights, made once in each process."""
    return outline(source)


@cache
def drawn_from(task: PretrainedTask) -> contexts.Contexts:
    """The contexts of a task, made once in each process."""
    return contexts.Contexts(outlined(task.source), task.read(), task.planted, task.seed)


@torch.inference_mode()
def measured(
    task: PretrainedTask, loaded: Loaded, model: Any, batch: Sequence[contexts.Context]
) -> list[Outcome]:
    """Read contexts of equal length with a model and measure each of them."""
    began = time.process_time()
    reader = Reader(model)
    ids = torch.stack([context.tokens for context in batch])
    converted = is_converted(model)
    records_weights = converted and "sharpness" in task.measures
    with heads.Weights(model, heads.ROWS) if records_weights else nullcontext() as weights:
        hidden, cache = reader.read(ids)
    results: list[tuple[dict[str, float], dict[str, list[float]]]] = [({}, {}) for _ in batch]
    if "loss" in task.measures:
        losses = reader.losses(hidden[:, :-1], ids[:, 1:])
        for (metrics, curves), loss, context in zip(results, losses, batch, strict=True):
            means, bins = positions.by_position(loss, context.is_text)
            metrics |= means
            curves |= bins
    if weights is not None:
        counts = [float(w.shape[1]) for w, _ in weights.layers]
        for name, values in heads.sharpness(weights).items():
            for (metrics, curves), head_values in zip(results, values, strict=True):
                metrics[name] = float(head_values.mean())
                curves |= {f"head_{name}": _short(head_values), "heads": counts}
    for index, ((metrics, curves), context) in enumerate(zip(results, batch, strict=True)):
        if not task.planted:
            continue
        context_cache = cache if len(batch) == 1 else only(cache, index)
        metrics["needle_depth"] = float(context.needle[0]) / len(context.tokens)
        if "retrieval" in task.measures:
            tokenizer = loaded.tokenizer if task.greedy else None
            metrics |= retrieval.scores(reader, context_cache, context.questions, tokenizer)
        if "dispersion" in task.measures and converted:
            _disperse(reader, context_cache, context, metrics, curves)
    seconds = (time.process_time() - began) / len(batch)
    return [_outcome(metrics, curves, seconds) for metrics, curves in results]


def _disperse(
    reader: Reader,
    cache: Any,
    context: contexts.Context,
    metrics: dict[str, float],
    curves: dict[str, list[float]],
) -> None:
    """Add the dispersion at the needle, at the end of its question."""
    prompt = next(q.prompt for q in context.questions if q.task == contexts.NEEDLE)
    with heads.Weights(reader.model, 1) as weights:
        reader.read(prompt[None], cache)
    total = len(context.tokens) + len(prompt)
    for name, values in heads.dispersion(weights, context.needle, total).items():
        metrics[name] = float(values.mean())
        curves[f"head_{name}"] = _short(values[0])
    curves["heads"] = [float(w.shape[1]) for w, _ in weights.layers]
    metrics["needle_weight_max"] = max(curves["head_needle_weight"])


def _short(values: torch.Tensor) -> list[float]:
    """Numbers with four digits, because a row has hundreds of them."""
    return [float(f"{x:.4g}") for x in values.tolist()]


def _outcome(metrics: dict[str, float], curves: dict[str, list[float]], seconds: float) -> Outcome:
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    broken += [name for name, values in curves.items() if not all(map(math.isfinite, values))]
    if broken:
        return Outcome("nan", f"not finite: {', '.join(broken)}", cpu_seconds=seconds)
    return Outcome("ok", "", metrics, curves, seconds)


@dataclass(frozen=True)
class Reading(AnyRun):
    """A run. ``settings`` is the `PretrainedTask`; tests[(length, sample)] has the key of the row.

    label: the name, which stays the same when only some points are left.
    """

    substitution: Substitution | None
    label: str

    def __str__(self) -> str:
        return self.label

    @property
    def name(self) -> str:
        return BASELINE if self.substitution is None else str(self.substitution)

    @property
    def log_name(self) -> str:
        return f"{self.task}/{self.name}"

    def point_text(self, point: ContextPoint) -> str:
        return f"n = {point[0]}, sample {point[1]}"

    def execute(self, context: RunContext, emit: Emit) -> str:
        settings: PretrainedTask = self.settings
        task = replace(settings, source=replace(settings.source, device=context.device))
        points: list[ContextPoint] = list(self.tests)
        emit(("stage", points[0], 0.0))
        loaded, text_contexts = opened(task.source), drawn_from(task)
        total, done = sum(work(length) for length, _ in points), 0.0
        with substituted(loaded.model, self.substitution, task.typical(text_contexts)) as model:
            for batch in _batches(points, task.batch):
                emit(("stage", batch[0], done / total))
                batch_contexts = [text_contexts.draw(*point) for point in batch]
                try:
                    outcomes = measured(task, loaded, model, batch_contexts)
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    outcomes = [Outcome("oom", str(error).split("\n")[0])] * len(batch)
                for point, outcome in zip(batch, outcomes, strict=True):
                    emit(("rows", point, dict.fromkeys(self.tests[point], outcome), {}))
                done += sum(work(length) for length, _ in batch)
        return "done"


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def work(length: int) -> float:
    """About the cost of a context, in tokens."""
    return length * (1 + length / _QUADRATIC)


def _batches(points: Sequence[ContextPoint], size: int) -> Iterator[list[ContextPoint]]:
    """Points of equal length, at most ``size`` at a time."""
    for _, group in groupby(points, key=lambda point: point[0]):
        equal_length = list(group)
        for start in range(0, len(equal_length), size):
            yield equal_length[start : start + size]


def points_of(samples: Mapping[int, int]) -> list[ContextPoint]:
    """The points of one variant for these numbers of samples of each length."""
    ordered = sorted(samples.items(), reverse=True)
    return [(length, sample) for length, count in ordered for sample in range(count)]


@dataclass(frozen=True)
class PretrainedStudy:
    """A planned command.

    specs: the substitutions; None is the model as loaded. samples: the number of samples of each
    length. plugins: maps variants of the plugin to a hash of its file.
    """

    task: PretrainedTask
    specs: Sequence[Substitution | None]
    samples: Mapping[int, int]
    plugins: Mapping[str, str]
    fingerprint: str
    limit: int | None

    def points(self) -> list[ContextPoint]:
        """All points of one variant, the longest first."""
        return points_of(self.samples)

    def key(self, spec: Substitution | None, point: ContextPoint) -> str:
        variant = None if spec is None else spec.identity()
        plugin = None if spec is None else self._plugin(spec)
        return key_of({
            "task": PRETRAINED, "version": _VERSION, "model": self.fingerprint,
            "data": self.task.data, "device": self.task.source.device.split(":")[0],
            "variant": variant, "plugin": plugin, "seed": self.task.seed,
            "length": point[0], "sample": point[1], "measures": sorted(self.task.measures),
            "greedy": self.task.greedy,
        })  # fmt: skip

    def _plugin(self, spec: Substitution) -> str | None:
        return self.plugins.get(spec.call.name)

    def runs(self) -> list[Reading]:
        """All runs, also of points that have results."""
        runs: list[Reading] = []
        for spec in self.specs:
            call = VariantCall(BASELINE) if spec is None else spec.call
            for points in _shares(self.points()):
                tests = {point: {self.key(spec, point): None} for point in points}
                label = f"{BASELINE if spec is None else spec}, {_range(points)}"
                runs.append(
                    Reading(PRETRAINED, call, self.task.seed, self.task, tests, spec, label)
                )
        return runs

    def row(self, run: Reading, key: str, point: ContextPoint, outcome: Outcome) -> Row:
        """The result row of one point."""
        layers = None if run.substitution is None else run.substitution.layers
        return {
            "key": key,
            "task": PRETRAINED,
            "model": str(self.task.source),
            "fingerprint": self.fingerprint,
            "limit": self.limit,
            "dtype": self.task.source.dtype,
            "text": self.task.text_name,
            "variant": run.name,
            "layers": "all" if layers is None else ",".join(map(str, layers)),
            "plugin": None if run.substitution is None else self._plugin(run.substitution),
            "length": point[0],
            "sample": point[1],
            "seed": self.task.seed,
            "planted": self.task.planted,
            "status": outcome.status,
            "message": outcome.message,
            "metrics": outcome.metrics,
            "curves": outcome.curves,
            "cpu_seconds": round(outcome.cpu_seconds, 3),
            "version": f"measures-{_VERSION}",
            "data": self.task.data,
            "device": self.task.source.device,
            **origin(),
        }


def _range(points: Sequence[ContextPoint]) -> str:
    """The points of a run in words.

    >>> _range([(1024, 18), (1024, 19), (512, 0)])
    'n = 1024 sample 18 to n = 512 sample 0'
    """
    ends = [f"n = {length} sample {sample}" for length, sample in (points[0], points[-1])]
    return " to ".join(dict.fromkeys(ends))


def _shares(points: Sequence[ContextPoint]) -> Iterator[list[ContextPoint]]:
    """Points in order, in lists of about the work of the first point."""
    share: list[ContextPoint] = []
    for point in points:
        if share and sum(work(n) for n, _ in [*share, point]) > work(points[0][0]):
            yield share
            share = []
        share.append(point)
    if share:
        yield share
