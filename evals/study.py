"""A study: the runs of one task or experiment, from its variants, seeds and settings.

The key of a row is a hash of its settings, variants with all parameters, position encoding, seed
and x, of the versions of the task's data and of the evaluation, the kind of device and the files of
plugins. An interrupted study therefore finds its rows again, and rows of other settings are never
reused. A key has neither the code of the built-in variants nor the versions of torch and attnzoo:
rows that were made before a change of these are reused. Rows name their commit and versions, and
reports warn if these differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from commandline.variants import Spec, VariantCall
from evals.measures.metrics import Outcome
from evals.progress import counted
from evals.results.rows import Row, key_of, origin
from evals.results.store import UNSHARDED, Shard
from evals.results.tuned import values_text
from evals.run import Run, Substitutes, train_for_each, train_once
from evals.sweeps import NOT_TUNED, SWEEP_SEEDS, Choice, Sweep, choose
from evals.task import TUNABLE, VALIDATION, trained_encoding

# The version of the evaluation code, by the axis: part of every row's key.
EVALUATION = {"n": 2, "condition": 1}
_TEST_SIZES = ("test_sequences", "test_least", "test_items")

# A variant to train, with its position encoding.
TrainedVariant = tuple[str, VariantCall]


def row_of(run: Run, key: str, outcome: Outcome, fields: Mapping[str, Any]) -> Row:
    """The result row of an outcome. ``fields`` has its further fields."""
    return {
        "key": key,
        "task": run.study,
        "status": outcome.status,
        "message": outcome.message,
        "metrics": outcome.metrics,
        "curves": outcome.curves,
        "cpu_seconds": round(outcome.cpu_seconds, 3),
        **origin(),
        **fields,
    }


def version_of(version: str, differing: Mapping[str, Any]) -> str:
    """What all rows of a line share: the version of the variant, and the settings that differ from
    those of other variants."""
    return f"{version} {json.dumps(differing, sort_keys=True)}" if differing else version


@dataclass(frozen=True)
class Study:
    """The runs of one task or experiment.

    xs: the eval lengths or the conditions. plugins: maps the names that a plugin registers to the
    hash of its file; a changed file changes the keys. left_out: the reason for each unsupported
    pair of a variant and a position encoding or condition. sweep: the sweep before the reported
    runs. variant_settings: settings that only some variants have, by their names.
    """

    task: Any
    specs: tuple[Spec, ...]
    positions: tuple[str, ...]
    seeds: int
    xs: tuple[Any, ...]
    settings: Any
    device: str = "cpu"
    plugins: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[tuple[Spec, str], str] = field(default_factory=dict)
    sweep: Sweep = field(default_factory=Sweep)
    variant_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def has_lengths(self) -> bool:
        """Whether x is a length and one training has all of them; otherwise x is a condition."""
        return self.task.axis == "n"

    def folder(self, out: Path) -> Path:
        """The folder of the rows."""
        return out / self.name

    # ---- runs

    def runs(self, by_key: Mapping[str, Row], shard: Shard = UNSHARDED) -> list[Run]:
        """The runs of a shard: those of the sweep, then the reported ones, ordered by seed.

        In this order, the results of the first seed cover all variants. All runs of a variant with
        a sweep are in one shard.
        """
        trained = list(dict.fromkeys(
            (trained_encoding(positions), spec.train)
            for positions in self.positions for spec in self.specs
            if any(self._supports(spec, positions, x) for x in self.xs)
        ))  # fmt: skip
        sweep = []
        if self.sweep.grid:
            trained = trained[shard.index :: shard.count]
            sweep = [
                run for seed in SWEEP_SEEDS for of in trained for run in self._candidates(of, seed)
            ]
        choices = {of: self.choice(of, by_key) for of in trained}
        reported = [
            self._run(of, seed, choices[of]) for seed in range(self.seeds) for of in trained
        ]
        return [*sweep, *(reported if sweep else reported[shard.index :: shard.count])]

    def _supports(self, spec: Spec, positions: str, x: Any) -> bool:
        return not {(spec, positions), (spec, x)} & self.left_out.keys()

    def rope_scaling(self, positions: str, length: int) -> dict[str, Any] | None:
        """The scaling of RoPE that an encoding such as "rope->yarn" substitutes at an eval length.

        The factor is the number of tokens divided by that at the train length, or 1 if it is less.
        """
        _, _, kind = positions.partition("->")
        if not kind:
            return None
        trained, tokens = map(self.task.tokens, (self.settings.train_longest, length))
        length_trained = {"original_max_position_embeddings": trained} if kind == "yarn" else {}
        return {"rope_type": kind, "factor": max(1.0, tokens / trained), **length_trained}

    def choice(self, trained: TrainedVariant, by_key: Mapping[str, Row]) -> Choice | None:
        """The tuned values of a variant; None while results of its sweep are missing."""
        positions, variant = trained
        if self.sweep.recorded is not None:
            return self.sweep.recorded.get((str(variant), positions), NOT_TUNED)
        if not self.sweep.grid:
            return NOT_TUNED
        seeds = [self._candidates(trained, seed) for seed in SWEEP_SEEDS]
        if any(key not in by_key for runs in seeds for run in runs for key in run.keys):
            return None
        rows = [[[by_key[key] for key in run.keys] for run in runs] for runs in zip(*seeds)]
        score = self.task.score
        return choose(self.sweep.candidates, rows, score.name, score.lower_is_better)

    def _candidates(self, trained: TrainedVariant, seed: int) -> list[Run]:
        """The runs of the sweep of a variant with one seed."""
        choices = [{"values": values, "tried": []} for values in self.sweep.candidates]
        return [self._run(trained, seed, choice, of_sweep=True) for choice in choices]

    def _run(
        self, trained: TrainedVariant, seed: int, choice: Choice | None, of_sweep: bool = False
    ) -> Run:
        """A run with all its tests. None: the sweep that chooses its settings is not finished."""
        positions, variant = trained
        values = self.sweep.candidates[0] if choice is None else choice["values"]
        own_settings = self.variant_settings.get(variant.name, {})
        words = values_text(values) if of_sweep else ""
        name = [self.name, str(variant), positions, words, f"seed {seed}"]
        fields = {"tuned": choice} if self.sweep.names else {}
        run = Run(
            self.name,
            " ".join(word for word in name if word not in ("", "none")),
            train_once if self.has_lengths else train_for_each,
            variant, seed, replace(self.settings, **{**own_settings, **values}), {}, positions,
            candidate=words,
            waits=choice is None,
            fields={"split": VALIDATION} if of_sweep else fields,
        )  # fmt: skip
        run = replace(run, training_key=self._training_key(run) if self.has_lengths else "")
        tests: dict[Any, dict[str, Substitutes]] = {}
        if of_sweep:
            tests = {n: {self._key(run, n, variant): Substitutes()} for n in self.sweep.lengths}
        else:
            encodings = [x for x in self.positions if trained_encoding(x) == positions]
            for encoding, spec, x in product(encodings, self.specs, self.xs):
                if spec.train == variant and self._supports(spec, encoding, x):
                    scaling = self.rope_scaling(encoding, x)
                    substitutes = Substitutes(spec.test if spec.is_substitution else None, scaling)
                    tests.setdefault(x, {})[self._key(run, x, spec.test, scaling)] = substitutes
        return replace(run, tests=tests)

    # ---- keys

    def _training_key(self, run: Run) -> str:
        """The key of one training, also used for inference-time substitutions in that model."""
        plugin = self.plugins.get(f"task {self.name}")
        output = self.settings.output_layer
        return key_of(
            ({} if plugin is None else {"plugin": plugin})
            | ({} if output is None else {"output": self._variant(output)})
            | {
                "task": self.name,
                "data": self.task.data_version(self.settings),
                "schedule": "one-cycle cosine",
                "settings": run.settings.identity(),
                "device": self.device.split(":")[0],
                "train": self._variant(run.variant),
                "positions": run.positions,
                "seed": run.seed,
            }
        )

    def _key(
        self, run: Run, x: Any, test: VariantCall, rope_scaling: Mapping[str, Any] | None = None
    ) -> str:
        """The key of the row of one variant and scaling of RoPE at x."""
        if not self.has_lengths:
            return key_of({
                "experiment": self.name,
                "data": self.task.data_version(self.settings),
                "settings": self.settings.identity(),
                "device": self.device.split(":")[0],
                "variant": self._variant(run.variant),
                "condition": x,
                "seed": run.seed,
                "evaluation": EVALUATION["condition"],
            })  # fmt: skip
        identity = {
            "training": run.training_key,
            "length": x,
            "sequences": self.settings.sequences(x),
            "evaluation": EVALUATION["n"],
        }
        if run.candidate:
            return key_of(identity | {"split": VALIDATION})
        shared = self._shared(run.variant)
        shared_settings = {"shared": shared} if shared else {}
        scaled = {"rope_scaling": rope_scaling} if rope_scaling else {}
        return key_of(identity | {"test": self._variant(test)} | shared_settings | scaled)

    def _variant(self, variant: VariantCall) -> dict[str, object]:
        plugin = self.plugins.get(variant.name)
        before = {} if variant.before is None else {"before": self._variant(variant.before)}
        plugins = {} if plugin is None else {"plugin": plugin}
        return self.task.identity(variant) | plugins | before

    def _shared(self, variant: VariantCall) -> dict[str, Any]:
        """The settings in which this variant may differ from others of the same table, with what
        the table says in place of their values; None if it leaves them out."""
        settings = self.settings.identity()
        own_values = self.variant_settings.get(variant.name, {})
        return {**{name: settings.get(name) for name in own_values}, **self.sweep.words}

    # ---- rows

    def rows(self, by_key: Mapping[str, Row]) -> list[Row]:
        """The stored rows that belong to this study, in the order of its seeds and variants."""
        runs = [run for run in self.runs(by_key) if not run.candidate and not run.waits]
        rows = [by_key[key] for run in runs for key in run.keys if key in by_key]
        specs = [str(spec) for spec in self.specs]
        encodings = {positions: number for number, positions in enumerate(self.positions)}
        return sorted(rows, key=lambda row: (
            row["seed"], encodings.get(row["series"].get("positions"), 0),
            specs.index(row["variant"]),
        ))  # fmt: skip

    def row(
        self, run: Run, key: str, point: Any, outcome: Outcome, training: Mapping[str, Any]
    ) -> Row:
        """The result row of one variant, position encoding, seed and x."""
        (substitute, scaling), shared = run.tests[point][key], self._shared(run.variant)
        positions = f"{run.positions}->{scaling['rope_type']}" if scaling else run.positions
        settings, variant = run.settings.identity(), self._variant(run.variant)
        version = key_of(variant)
        if self.has_lengths:
            test = self._variant(substitute or run.variant)
            differing = {name: settings.get(name) for name in shared}
            version = version_of(key_of({"train": variant, "test": test}), differing)
        fields: dict[str, Any] = {
            "variant": str(Spec(run.variant, substitute or run.variant)),
            "seed": run.seed,
            "x": point,
            "series": {"positions": positions} if self.has_lengths else {},
            "group": self._group(settings | shared),
            "version": version,
            "settings": settings,
            "chance": self.task.chance(self.settings),
            "schedule": run.settings.schedule_text(self.sweep.names),
            "data": self._data(),
            "device": self.device,
        }
        if self.has_lengths:
            fields |= {
                "learned": training["learned"] if substitute is None else {},
                "sequences": self.settings.sequences(point),
                "train_cpu_seconds": round(training["train_cpu_seconds"], 3),
                "training": run.training_key,
            }
        return row_of(run, key, outcome, {**fields, **run.fields})

    def _group(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What all rows of one table share."""
        origins = {"data": self._data(), "device": self.device.split(":")[0]}
        sizes = {name: getattr(self.settings, name) for name in _TEST_SIZES if self.has_lengths}
        return {n: x for n, x in settings.items() if x is not None} | sizes | origins

    def _data(self) -> str:
        """The version of the data and the model, with the hash of a plugin that defines either.

        A table only combines rows in which it is equal.
        """
        output = self.settings.output_layer
        names = [f"task {self.name}", *([] if output is None else [output.name])]
        hashes = dict.fromkeys(self.plugins[name] for name in names if name in self.plugins)
        return ", ".join(
            [self.task.data_version(self.settings), *(f"plugin {x[:8]}" for x in hashes)]
        )

    def alike(self, run: Run, row: Row) -> bool:
        """Whether a run takes about as long as that of a stored row of the same variant and x."""
        kinds = [
            {name: value for name, value in settings.items() if name not in TUNABLE}
            for settings in (run.settings.identity(), row["settings"])
        ]
        return kinds[0] == kinds[1]

    # ---- texts

    def headline(self, runs: Sequence[Run]) -> str:
        """The study and the number of runs to execute, in one line."""
        seeds, to_do = counted(self.seeds, "seed"), f"{counted(len(runs), 'run')} to do"
        if not self.has_lengths:
            layers, conditions = len(self.specs), counted(len(self.xs), "condition")
            layer_count = counted(layers, "output layer")
            return f"{self.task.name}: {layer_count}, {conditions}, {seeds}: {to_do}"
        plain = self.positions == ("none",)
        encodings = "" if plain else f", position encoding {' and '.join(self.positions)}"
        return (
            f"{self.task.name}: {counted(len(self.specs), 'variant')}, {seeds}{encodings}, "
            f"train length {self.settings.train_longest}, eval lengths up to {max(self.xs)}: "
            f"{to_do}"
            + (f", with a sweep of {' and '.join(self.sweep.grid)}" if self.sweep.grid else "")
        )

    def details(self, runs: Sequence[Run], total: int, out: Path) -> list[str]:
        """More lines about the study and its missing results, of ``total``."""
        reported = [run for run in runs if not run.candidate]
        results = f"{sum(len(run.keys) for run in reported)} of {total} results"
        trainings = sum(not run.model(out).exists() for run in runs)
        candidates = [values_text(values) for values in self.sweep.candidates]
        sweep = f"{len(runs) - len(reported)} runs to do with {'; '.join(candidates)}"
        names = "eval lengths" if self.has_lengths else "conditions"
        return [
            f"  {names}: {', '.join(map(str, self.xs))}",
            f"  schedule: {self.settings.schedule_text(self.sweep.names)}",
            *([f"  sweep: {sweep}"] if self.sweep.grid else []),
            f"  to do: {counted(trainings, 'training')} and {results}"
            if self.has_lengths
            else f"  to do: {results}",
        ]

    def remarks(self) -> list[str]:
        """A line for each unsupported combination."""
        link = "with position encoding" if self.has_lengths else "under"
        return [
            f"  left out: {spec} {link} {name}: {reason}"
            for (spec, name), reason in self.left_out.items()
        ]
