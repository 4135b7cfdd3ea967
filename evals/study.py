"""A study: the runs of one task or experiment, from its variants, seeds and settings.

The key of a row is a hash of its settings, variants with all parameters, position encoding, seed
and x, of the versions of the task's data and of the evaluation, the kind of device and the files of
plugins. An interrupted study therefore finds its rows again, and rows of other settings are never
reused. A key has neither the code of the built-in variants nor the versions of torch and attnzoo:
rows that were made before a change of these are reused. Rows name their commit and versions, and
reports warn if these differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from commandline.variants import Spec, VariantCall
from evals.measures.metrics import Outcome
from evals.progress import counted
from evals.results.old_rows import version_of
from evals.results.rows import Row, key_of, origin
from evals.results.store import UNSHARDED, Shard
from evals.results.tuned import values_text
from evals.run import Run
from evals.sweeps import SWEEP_SEEDS, Choice, Sweep, Values, choose
from evals.task import VALIDATION

_NONE: Mapping[str, float] = {}  # no tuned values
# The version of the evaluation code, by the axis: part of every row's key.
EVALUATION = {"n": 2, "condition": 1}
_TEST_SIZES = ("test_sequences", "test_least", "test_items")

# A variant to train, with its position encoding.
TrainedVariant = tuple[str, VariantCall]


class RowSpec(NamedTuple):
    """The variant, position encoding, seed and x (eval length or condition) of one result row."""

    spec: Spec
    positions: str
    seed: int
    x: Any


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

    def folder(self, out: Path) -> Path:
        """The folder of the rows."""
        return out / self.name

    @property
    def total(self) -> int:
        """The number of result rows."""
        return sum(1 for _ in self.row_specs())

    @property
    def has_lengths(self) -> bool:
        """Whether x is a length and one training has all of them; otherwise x is a condition."""
        return self.task.axis == "n"

    def row_specs(self) -> Iterator[RowSpec]:
        """The specs of all result rows, ordered by seed.

        In this order, the results of the first seed cover all variants.
        """
        for seed in range(self.seeds):
            for positions in self.positions:
                for spec in self.specs:
                    for x in self.xs:
                        if not {(spec, positions), (spec, x)} & self.left_out.keys():
                            yield RowSpec(spec, positions, seed, x)

    def trained(self) -> list[TrainedVariant]:
        """The variants that are trained, with their position encodings."""
        return list(dict.fromkeys((row.positions, row.spec.train) for row in self.row_specs()))

    def settings_with(self, variant: VariantCall, values: Mapping[str, float]) -> Any:
        """The settings of a variant, with tuned values."""
        return replace(self.settings, **{**self.variant_settings.get(variant.name, {}), **values})

    # ---- keys

    def choice(self, trained: TrainedVariant, by_key: Mapping[str, Row]) -> Choice | None:
        """The tuned values of a variant; None while results of its sweep are missing."""
        positions, variant = trained
        if self.sweep.recorded is not None:
            return self.sweep.recorded.get((str(variant), positions), Choice({}))
        if not self.sweep.grid:
            return Choice({})
        candidates, candidate_rows = self.sweep.candidates, []
        for values in candidates:
            keys = [self._validation_key(trained, values, seed) for seed in SWEEP_SEEDS]
            if any(key not in by_key for key in keys):
                return None
            candidate_rows.append([by_key[key] for key in keys])
        score = self.task.score
        return choose(candidates, candidate_rows, score.name, score.lower_is_better)

    def choices(self, by_key: Mapping[str, Row]) -> dict[TrainedVariant, Choice | None]:
        """The choice of each trained variant."""
        return {trained: self.choice(trained, by_key) for trained in self.trained()}

    def _shared(self, variant: VariantCall) -> dict[str, Any]:
        """The settings in which this variant may differ from others of the same table, with what
        the table says in place of their values; None if it leaves them out."""
        settings = self.settings.identity()
        own_values = self.variant_settings.get(variant.name, {})
        return {**{name: settings.get(name) for name in own_values}, **self.sweep.words}

    def _variant(self, variant: VariantCall) -> dict[str, object]:
        plugin = self.plugins.get(variant.name)
        return self.task.identity(variant) | ({} if plugin is None else {"plugin": plugin})

    def _data(self) -> str:
        """The version of the data and the model, with the hash of a plugin that defines either.

        A table only combines rows in which it is equal.
        """
        output = self.settings.output_layer
        names = [f"task {self.task.name}", *([] if output is None else [output.name])]
        hashes = dict.fromkeys(self.plugins[name] for name in names if name in self.plugins)
        return ", ".join([self.task.data_version(), *(f"plugin {x[:8]}" for x in hashes)])

    def training_key(
        self, variant: VariantCall, positions: str, seed: int, values: Mapping[str, float] = _NONE
    ) -> str:
        """The key of one training, also used for inference-time substitutions in that model.

        values: the tuned values.
        """
        plugin = self.plugins.get(f"task {self.task.name}")
        output = self.settings.output_layer
        return key_of(
            ({} if plugin is None else {"plugin": plugin})
            | ({} if output is None else {"output": self._variant(output)})
            | {
                "task": self.task.name,
                "data": self.task.data_version(),
                "schedule": "one-cycle cosine",
                "settings": self.settings_with(variant, values).identity(),
                "device": self.device.split(":")[0],
                "train": self._variant(variant),
                "positions": positions,
                "seed": seed,
            }
        )

    def _at_length(
        self, variant: VariantCall, positions: str, seed: int, length: int, values: Values | Any
    ) -> dict[str, object]:
        """What the keys of reported results and of a sweep share."""
        return {
            "training": self.training_key(variant, positions, seed, values),
            "length": length,
            "sequences": self.settings.sequences(length),
            "evaluation": EVALUATION["n"],
        }

    def row_key(self, row: RowSpec, values: Mapping[str, float] = _NONE) -> str:
        """The key of one row. values: the tuned values."""
        spec, positions, seed, x = row
        if self.has_lengths:
            shared = self._shared(spec.train)
            identity = self._at_length(spec.train, positions, seed, x, values)
            identity["test"] = self._variant(spec.test)
            return key_of(identity | ({"shared": shared} if shared else {}))
        return key_of(
            {
                "experiment": self.task.name,
                "data": self.task.data_version(),
                "settings": self.settings.identity(),
                "device": self.device.split(":")[0],
                "variant": self._variant(spec.train),
                "condition": x,
                "seed": seed,
                "evaluation": EVALUATION["condition"],
            }
        )

    def _validation_key(self, trained: TrainedVariant, values: Values, seed: int) -> str:
        """The key of a result of the sweep."""
        positions, variant = trained
        identity = self._at_length(variant, positions, seed, self.settings.train_longest, values)
        return key_of(identity | {"split": VALIDATION})

    # ---- runs

    def rows(self, by_key: Mapping[str, Row]) -> list[Row]:
        """Select the stored rows that belong to this study, in the order of `row_specs`."""
        choices = self.choices(by_key)
        selected = []
        for spec in self.row_specs():
            choice = choices[spec.positions, spec.spec.train]
            if choice is not None and (row := by_key.get(self.row_key(spec, choice.values))):
                # The group of a row from an older file lacks the sizes of the test sets.
                settings = row["settings"] | self._shared(spec.spec.train)
                selected.append(row | {"group": self._group(settings)})
        return selected

    def runs(
        self,
        by_key: Mapping[str, Row],
        shard: Shard = UNSHARDED,
        retry: bool = False,
        undecided: bool = False,
    ) -> list[Run]:
        """The shard's runs, each with only its missing rows. ``retry`` also repeats failed rows.

        Variants whose sweep is not finished have no runs; with ``undecided`` they have runs with
        the first candidate, for estimates. All runs of a variant with a sweep are in one shard.
        """
        choices = self.choices(by_key)
        if undecided and self.sweep.grid:
            first = Choice(self.sweep.candidates[0])
            choices = {trained: choice or first for trained, choice in choices.items()}
        tests: dict[tuple[int, str, VariantCall], dict[Any, dict[str, VariantCall | None]]] = {}
        for row in self.row_specs():
            missing = tests.setdefault((row.seed, row.positions, row.spec.train), {})
            choice = choices[row.positions, row.spec.train]
            if choice is None:
                continue
            key = self.row_key(row, choice.values)
            if to_do(key, by_key, retry):
                substitute = row.spec.test if row.spec.is_substitution else None
                missing.setdefault(row.x, {})[key] = substitute
        if self.sweep.grid:
            shard_variants = self._swept(shard)
            shard_tests = [item for item in tests.items() if item[0][1:] in shard_variants]
        else:
            shard_tests = list(tests.items())[shard.index :: shard.count]
        return [
            self._run(variant, positions, seed, missing, choices[positions, variant])
            for (seed, positions, variant), missing in shard_tests
            if missing
        ]

    def sweep_runs(
        self, by_key: Mapping[str, Row], shard: Shard = UNSHARDED, retry: bool = False
    ) -> list[Run]:
        """The shard's runs of the sweep that have no result yet, or with ``retry`` a failed one."""
        runs = []
        for seed in SWEEP_SEEDS if self.sweep.grid else ():
            for positions, variant in self._swept(shard):
                for values in self.sweep.candidates:
                    key = self._validation_key((positions, variant), values, seed)
                    if to_do(key, by_key, retry):
                        tests: dict[Any, Any] = {self.settings.train_longest: {key: None}}
                        run = self._run(variant, positions, seed, tests, Choice(values))
                        fields = {"split": VALIDATION}
                        runs.append(replace(run, candidate=values_text(values), fields=fields))
        return runs

    def _swept(self, shard: Shard) -> list[TrainedVariant]:
        """The shard's variants in a study with a sweep."""
        return self.trained()[shard.index :: shard.count]

    def _run(
        self,
        variant: VariantCall,
        positions: str,
        seed: int,
        tests: dict[Any, dict[str, VariantCall | None]],
        choice: Choice | None,
    ) -> Run:
        assert choice is not None
        settings = self.settings_with(variant, choice.values)
        if not self.has_lengths:
            return Run(self.task.name, variant, seed, settings, tests)
        fields: dict[str, Any] = {}
        if self.sweep.names:
            fields["tuned"] = {"values": choice.values, "tried": list(choice.tried)}
        return Run(
            self.task.name, variant, seed, settings, tests, positions,
            self.training_key(variant, positions, seed, choice.values), fields=fields,
        )  # fmt: skip

    # ---- rows

    def row(
        self, run: Run, key: str, point: Any, outcome: Outcome, training: dict[str, Any]
    ) -> Row:
        """The result row of one variant, position encoding, seed and x."""
        substitute, shared = run.tests[point][key], self._shared(run.variant)
        settings = run.settings.identity()
        row = {
            "key": key,
            "task": self.task.name,
            "variant": str(Spec(run.variant, substitute or run.variant)),
            "seed": run.seed,
            "x": point,
            "series": {"positions": run.positions} if self.has_lengths else {},
            "group": self._group(settings | shared),
            "version": self._version(
                run, substitute, {name: settings.get(name) for name in shared}
            ),
            "settings": settings,
            "status": outcome.status,
            "message": outcome.message,
            "metrics": outcome.metrics,
            "curves": outcome.curves,
            "chance": self.task.chance(self.settings),
            "schedule": run.settings.schedule_text(self.sweep.names),
            "data": self._data(),
            "device": self.device,
            "cpu_seconds": round(outcome.cpu_seconds, 3),
            **origin(),
            **run.fields,
        }
        if self.has_lengths:
            row |= {
                "learned": training["learned"] if substitute is None else {},
                "sequences": self.settings.sequences(point),
                "train_cpu_seconds": round(training["train_cpu_seconds"], 3),
                "training": run.training_key,
            }
        return row

    def _group(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What all rows of one table share."""
        sizes = {name: getattr(self.settings, name) for name in _TEST_SIZES if self.has_lengths}
        origins = {"data": self._data(), "device": self.device.split(":")[0]}
        return {n: x for n, x in settings.items() if x is not None} | sizes | origins

    def _version(self, run: Run, substitute: VariantCall | None, differing: dict[str, Any]) -> str:
        """A hash of the variants with all parameters, their settings, and the plugin's file."""
        variant = self._variant(run.variant)
        if not self.has_lengths:
            return key_of(variant)
        test = self._variant(substitute or run.variant)
        return version_of(key_of({"train": variant, "test": test}), differing)

    # ---- texts

    def log_at(self, run: Run, row: Row) -> tuple[str, int]:
        """The name and the step under which loggers show the metrics of a row."""
        if self.has_lengths:
            return run.log_name(row["variant"], run.positions), row["x"]
        return run.log_name(row["variant"], row["x"]), self.settings.steps

    def headline(self, runs: Sequence[Any]) -> str:
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

    def details(self, runs: Sequence[Any], out: Path) -> list[str]:
        """More lines about the study and its missing results."""
        reported = [run for run in runs if not run.candidate]
        missing = sum(len(tests) for run in reported for tests in run.tests.values())
        results = f"{missing} of {self.total} results"
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


def to_do(key: str, by_key: Mapping[str, Row], retry: bool) -> bool:
    """Whether a row is missing, or with ``retry`` has failed."""
    return key not in by_key or (retry and by_key[key]["status"] != "ok")
