"""What `python -m evals pretrained` and `adapt` measure: points (length, sample), keys and rows.

A point is one context, read with one variant. A run is some points of one variant and length, about
as much work as the longest context, so that workers share the work evenly and the time left is
about right.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from commandline.arguments import either
from evals.measures.arithmetic import is_out_of_memory, rounded_products
from evals.measures.metrics import Outcome
from evals.pretrained import contexts, heads, positions, retrieval
from evals.pretrained.loading import Loaded, Source, load, outline
from evals.pretrained.reading import Reader, only
from evals.pretrained.substitution import Substitution, is_converted, substituted
from evals.pretrained.training import Adapted, read_stored
from evals.progress import counted
from evals.results.rows import PRETRAINED, Row, key_of
from evals.results.store import UNSHARDED, Shard
from evals.run import Emit, Run, RunContext
from evals.study import row_of
from evals.tasks.draws import GENERATOR

MEASURES = ("loss", "retrieval", "sharpness", "dispersion")
_VERSION = 2  # change it when the measures change
_QUADRATIC = 4096  # tokens at which attention costs about as much as the rest of a small model
_PIECE = 256  # tokens read at once where attention has dense weights
ContextPoint = tuple[int, int]  # length, sample


@dataclass(frozen=True)
class PretrainedTask:
    """What all points of a command share.

    text, text_name: the text of the contexts, and its name in tables. training: the text to train
    on, if there is one.
    """

    source: Source
    text: str
    text_name: str
    measures: tuple[str, ...] = MEASURES
    greedy: bool = False
    seed: int = 0
    batch: int = 1
    training: str | None = None

    @property
    def data(self) -> str:
        """The texts and the version of the contexts."""
        trained = "" if self.training is None else f" trained-on-{hash_of(self.training)}"
        return f"{hash_of(self.text)} contexts-{contexts.VERSION} {GENERATOR}{trained}"

    @property
    def planted(self) -> bool:
        """Whether facts are planted in the contexts."""
        return not {"retrieval", "dispersion"}.isdisjoint(self.measures)


@cache
def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def drawn_from(task: PretrainedTask) -> contexts.Contexts:
    """The contexts of a task, made once in each process."""
    return contexts.Contexts(outline(task.source), task.text, task.planted, task.seed)


@cache
def typical_tokens(task: PretrainedTask) -> Tensor:
    """The tokens (N,) to train and to calibrate variants on."""
    if task.training is None:
        return drawn_from(task).tokens
    return outline(task.source).tokens(task.training)


@torch.inference_mode()
def measured(
    task: PretrainedTask,
    loaded: Loaded,
    model: Any,
    batch: Sequence[contexts.Context],
    piece: int | None = None,
) -> list[Outcome]:
    """Read contexts of equal length with a model and measure each of them.

    piece: the number of tokens that are read at once; None is all.
    """
    began = time.process_time()
    reader, converted = Reader(model), is_converted(model)
    ids = torch.stack([context.tokens for context in batch])
    sharp = converted and "sharpness" in task.measures
    before, cache, ids_left = reader.read_pieces(ids, piece or ids.shape[1])
    with heads.recorded_weights(model, heads.ROWS) if sharp else nullcontext([]) as layers:
        hidden, cache = reader.read(ids_left, cache)
    hidden = hidden if before is None else torch.cat((before, hidden), 1)
    losses = reader.losses(hidden[:, :-1], ids[:, 1:]) if "loss" in task.measures else None
    by_head = heads.sharpness(layers) if layers else {}
    results: list[tuple[dict[str, float], dict[str, list[float]]]] = []
    for index, context in enumerate(batch):
        metrics: dict[str, float] = {}
        curves: dict[str, list[float]] = {}
        results.append((metrics, curves))
        if losses is not None:
            means, bins = positions.by_position(losses[index], context.is_text)
            metrics |= means
            curves |= bins
        for name, values in by_head.items():
            _add_heads(name, values[index], layers, metrics, curves)
        if not task.planted:
            continue
        context_cache = cache if len(batch) == 1 else only(cache, index)
        metrics["needle_depth"] = float(context.needle[0]) / len(context.tokens)
        if "retrieval" in task.measures:
            tokenizer = loaded.tokenizer if task.greedy else None
            metrics |= retrieval.scores(reader, context_cache, context.questions, tokenizer)
        if "dispersion" in task.measures and converted:  # at the end of the needle's question
            prompt = next(q.prompt for q in context.questions if q.task == contexts.NEEDLE)
            with heads.recorded_weights(model, 1) as rows:
                reader.read(prompt[None], context_cache)
            total = len(context.tokens) + len(prompt)
            for name, values in heads.dispersion(rows, context.needle, total).items():
                _add_heads(name, values[0], rows, metrics, curves)
            metrics["needle_weight_max"] = max(curves["head_needle_weight"])
    seconds = (time.process_time() - began) / len(batch)
    return [_outcome(metrics, curves, seconds) for metrics, curves in results]


def _add_heads(
    name: str,
    values: Tensor,
    layers: Sequence[heads.LayerWeights],
    metrics: dict[str, float],
    curves: dict[str, list[float]],
) -> None:
    """Add a measure of each head, with four digits because there are hundreds, and its mean."""
    metrics[name] = float(values.mean())
    curves[f"head_{name}"] = [float(f"{x:.4g}") for x in values.tolist()]
    curves["heads"] = [float(w.shape[1]) for w, _ in layers]


def _outcome(metrics: dict[str, float], curves: dict[str, list[float]], seconds: float) -> Outcome:
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    broken += [name for name, values in curves.items() if not all(map(math.isfinite, values))]
    if broken:
        return Outcome("nan", f"not finite: {', '.join(broken)}", cpu_seconds=seconds)
    return Outcome("ok", "", metrics, curves, seconds)


def read(run: Run, context: RunContext, emit: Emit) -> str:
    """The work of a run: read its contexts. Its variant is a `Substitution`, and its settings are
    the `PretrainedTask`."""
    task = replace(run.settings, source=replace(run.settings.source, device=context.device))
    points: list[ContextPoint] = list(run.tests)
    emit(("stage", points[0], 0.0))
    spec, source = run.variant, task.source
    if spec.bfloat16 == "model":
        source = replace(source, dtype="bfloat16")
    loaded, text_contexts = load(source), drawn_from(task)
    with ExitStack() as stack:
        model = stack.enter_context(substituted(loaded.model, spec, typical_tokens(task)))
        piece = None
        if spec.bfloat16 == "products":
            # Models compute the angles of RoPE in fp32 in every dtype.
            angles = [module for module in model.modules() if hasattr(module, "inv_freq")]
            stack.enter_context(rounded_products("bfloat16", angles))
            piece = _PIECE
        for start in range(0, len(points), task.batch):
            batch = points[start : start + task.batch]
            emit(("stage", batch[0], start / len(points)))
            batch_contexts = [text_contexts.draw(*point) for point in batch]
            try:
                outcomes = measured(task, loaded, model, batch_contexts, piece)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                outcomes = [Outcome("oom", str(error).split("\n")[0])] * len(batch)
            for point, outcome in zip(batch, outcomes, strict=True):
                emit(("rows", point, dict.fromkeys(run.tests[point], outcome), {}))
    return "done"


def _work(length: int) -> float:
    """About the cost of a context, in tokens."""
    return length * (1 + length / _QUADRATIC)


@dataclass(frozen=True)
class PretrainedStudy:
    """A planned command.

    specs: the substitutions. samples: the number of samples of each length. plugins: maps variants
    of the plugin to a hash of its file. fingerprint, limit: of the model.
    """

    task: PretrainedTask
    specs: Sequence[Substitution]
    samples: Mapping[int, int]
    plugins: Mapping[str, str]
    fingerprint: str
    limit: int | None

    name: ClassVar = PRETRAINED

    def folder(self, out: Path) -> Path:
        """The folder of the rows."""
        return out

    def _key(self, spec: Substitution, point: ContextPoint) -> str:
        return key_of({
            "task": PRETRAINED, "version": _VERSION, "model": self.fingerprint,
            "data": self.task.data, "device": self.device_kind, "variant": spec.identity(),
            "plugin": self.plugins.get(spec.call.name), "seed": self.task.seed,
            "length": point[0], "sample": point[1], "measures": sorted(self.task.measures),
            "greedy": self.task.greedy,
        })  # fmt: skip

    @property
    def device_kind(self) -> str:
        return self.task.source.device.split(":")[0]

    def runs(self, by_key: Mapping[str, Row], shard: Shard = UNSHARDED) -> list[Run]:
        """The runs of a shard: for each variant the points in lists of one length, the longest
        first. The work of a list is at most that of the longest context."""
        runs = []
        for spec, length in product(self.specs, sorted(self.samples, reverse=True)):
            count = self.samples[length]
            size = max(1, int(_work(max(self.samples)) / _work(length)))
            for first in range(0, count, size):
                samples = range(first, min(first + size, count))
                label = f"{spec}, bfloat16 {spec.bfloat16}" if spec.bfloat16 else str(spec)
                name = f"{label}, n = {length}, samples {first} to {samples[-1]}"
                tests = {(length, x): {self._key(spec, (length, x)): None} for x in samples}
                runs.append(Run(PRETRAINED, name, read, spec, self.task.seed, self.task, tests))
        return runs[shard.index :: shard.count]

    def rows(self, by_key: Mapping[str, Row]) -> list[Row]:
        """The stored rows that belong to this study."""
        return [by_key[key] for run in self.runs({}) for key in run.keys if key in by_key]

    def alike(self, run: Run, row: Row) -> bool:
        """Whether a run takes about as long as that of a stored row of the same variant and x."""
        return row["group"] == self._group()

    def headline(self, runs: Sequence[Run]) -> str:
        """The study and the number of contexts to read, in one line."""
        contexts = counted(sum(len(run.tests) for run in runs), "context")
        return (
            f"{self.task.source}: {counted(len(self.specs), 'variant')}, lengths up to "
            f"{max(self.samples)}: {contexts} to read"
        )

    def details(self, runs: Sequence[Run], total: int, out: Path) -> list[str]:
        """More lines about the study."""
        samples = ", ".join(f"{count} at n = {length}" for length, count in self.samples.items())
        return [f"  samples: {samples}"]

    def remarks(self) -> list[str]:
        """A warning of lengths that the model was not trained with."""
        beyond = [str(n) for n in sorted(self.samples) if n > (self.limit or n)]
        if not beyond:
            return []
        return [
            f"  warning: the model was trained with {self.limit} positions; "
            f"{either(beyond)} tokens are beyond its trained context"
        ]

    def _contexts(self) -> dict[str, Any]:
        """What decides which contexts are read."""
        task = self.task
        return {"fingerprint": self.fingerprint, "dtype": task.source.dtype,
                "planted": task.planted, "data": task.data}  # fmt: skip

    def _group(self) -> dict[str, Any]:
        """What all rows of one table share."""
        return {**self._contexts(), "seed": self.task.seed, "device": self.device_kind}

    def row(self, run: Run, key: str, point: ContextPoint, outcome: Outcome, _: Any) -> Row:
        """The result row of one point."""
        task, spec = self.task, run.variant
        plugin = self.plugins.get(spec.call.name)
        layers = "all" if spec.layers is None else ",".join(map(str, spec.layers))
        row = row_of(run, key, outcome, {
            "variant": str(spec),
            "seed": point[1],
            "x": point[0],
            "series": {"layers": layers} | ({"bfloat16": spec.bfloat16} if spec.bfloat16 else {}),
            "group": self._group(),
            "version": f"plugin {plugin}" if plugin else "built in",
            "settings": {},
            "model": str(task.source),
            "limit": self.limit,
            "text": task.text_name,
            "plugin": plugin,
            "device": task.source.device,
            **self._contexts(),
        })  # fmt: skip
        if isinstance(spec, Adapted) and spec.file is not None:
            stored = read_stored(spec.file)
            row["training"] = stored.fields
            if outcome.status == "ok":
                row["curves"] = {**outcome.curves, **stored.curves}
        return row
