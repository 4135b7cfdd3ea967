"""A study: the runs of one task, from its variants, position encodings, seeds and settings.

The key of a row is a hash of its settings, variants with all parameters, position encoding, seed
and length, of the versions of the task's data and of the evaluation, the kind of device and the
files of plugins. An interrupted study therefore finds its rows again, and rows of other settings
are never reused. A key has neither the code of the built-in variants nor the versions of torch and
attnzoo: rows that were made before a change of these are reused. Rows name their commit and
versions, and reports warn if these differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from commandline.variants import Spec, VariantCall
from evals.harness.any_run import AnyRun
from evals.harness.plan import key_of, origin
from evals.harness.progress import counted
from evals.harness.runs import Run
from evals.harness.sweeps import SWEEP_SEEDS, Choice, Sweep, Values, choose
from evals.measures.metrics import Outcome
from evals.results.store import UNSHARDED, Row, Shard
from evals.results.tuned import values_text
from evals.task import VALIDATION, Settings, Task

_NONE: Mapping[str, float] = {}  # no tuned values
EVALUATION = 2  # version of the evaluation code: part of every row's key


# A variant to train, with its position encoding.
TrainedVariant = tuple[str, VariantCall]


class RowSpec(NamedTuple):
    """The variant, position encoding, seed and eval length of one result row."""

    spec: Spec
    positions: str
    seed: int
    length: int


@dataclass(frozen=True)
class Study:
    """The runs of one task.

    plugins: maps the names that a plugin registers to the hash of its file; a changed file
    changes the keys. left_out: the reason for each unsupported pair of variant and position
    encoding. sweep: the sweep before the reported runs. variant_settings: settings that only some
    variants have, by their names.
    """

    task: Task
    specs: tuple[Spec, ...]
    positions: tuple[str, ...]
    seeds: int
    lengths: tuple[int, ...]
    settings: Settings
    device: str = "cpu"
    plugins: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[tuple[Spec, str], str] = field(default_factory=dict)
    sweep: Sweep = field(default_factory=Sweep)
    variant_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def row_specs(self) -> Iterator[RowSpec]:
        """The specs of all result rows, ordered by seed.

        In this order, the results of the first seed cover all variants.
        """
        for seed in range(self.seeds):
            for positions in self.positions:
                for spec in self.specs:
                    if (spec, positions) not in self.left_out:
                        for length in self.lengths:
                            yield RowSpec(spec, positions, seed, length)

    def trained(self) -> list[TrainedVariant]:
        """The variants that are trained, with their position encodings."""
        return list(dict.fromkeys((row.positions, row.spec.train) for row in self.row_specs()))

    def settings_with(self, variant: VariantCall, values: Mapping[str, float]) -> Settings:
        """The settings of a variant, with tuned values."""
        return replace(self.settings, **{**self.variant_settings.get(variant.name, {}), **values})

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

    def _shared(self, variant: VariantCall) -> dict[str, object]:
        """The settings in which this variant may differ from others of the same table, with what
        the table says in place of their values; None if it leaves them out."""
        settings = self.settings.identity()
        own_values = {
            name: settings.get(name) for name in self.variant_settings.get(variant.name, {})
        }
        return {**own_values, **self.sweep.words}

    def _variant(self, variant: VariantCall) -> dict[str, object]:
        identity = variant.identity()
        if variant.name in self.plugins:
            identity["plugin"] = self.plugins[variant.name]
        return identity

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

    def row_key(self, row: RowSpec, values: Mapping[str, float] = _NONE) -> str:
        """The key of one row. values: the tuned values."""
        spec, positions, seed, length = row
        shared = self._shared(spec.train)
        return key_of(
            ({"shared": shared} if shared else {})
            | {
                "training": self.training_key(spec.train, positions, seed, values),
                "test": self._variant(spec.test),
                "length": length,
                "sequences": self.settings.sequences(length),
                "evaluation": EVALUATION,
            }
        )

    def _validation_key(self, trained: TrainedVariant, values: Values, seed: int) -> str:
        """The key of a result of the sweep."""
        positions, variant = trained
        length = self.settings.train_longest
        return key_of(
            {
                "training": self.training_key(variant, positions, seed, values),
                "length": length,
                "sequences": self.settings.sequences(length),
                "evaluation": EVALUATION,
                "split": VALIDATION,
            }
        )

    def version(self, spec: Spec) -> str:
        """A hash of the spec's variants, their parameters with defaults, and the plugin's file."""
        return key_of({"train": self._variant(spec.train), "test": self._variant(spec.test)})

    def rows(self, by_key: Mapping[str, Row]) -> list[Row]:
        """Select the stored rows that belong to this study, in the order of `row_specs`."""
        choices = self.choices(by_key)
        chosen = ((row, choices[row.positions, row.spec.train]) for row in self.row_specs())
        keys = (self.row_key(row, choice.values) for row, choice in chosen if choice is not None)
        return [by_key[key] for key in keys if key in by_key]

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
        tests: dict[tuple[int, str, VariantCall], dict[int, dict[str, VariantCall | None]]] = {}
        for row in self.row_specs():
            lengths = tests.setdefault((row.seed, row.positions, row.spec.train), {})
            choice = choices[row.positions, row.spec.train]
            if choice is None:
                continue
            key = self.row_key(row, choice.values)
            if key not in by_key or (retry and by_key[key]["status"] != "ok"):
                substitute = row.spec.test if row.spec.is_substitution else None
                lengths.setdefault(row.length, {})[key] = substitute
        if self.sweep.grid:
            shard_variants = self._swept(shard)
            shard_tests = [item for item in tests.items() if item[0][1:] in shard_variants]
        else:
            shard_tests = list(tests.items())[shard.index :: shard.count]
        return [
            self._reported_run((positions, variant), seed, missing, choices[positions, variant])
            for (seed, positions, variant), missing in shard_tests
            if missing
        ]

    def sweep_runs(
        self, by_key: Mapping[str, Row], shard: Shard = UNSHARDED, retry: bool = False
    ) -> list[Run]:
        """The shard's runs of the sweep that have no result yet, or with ``retry`` a failed one."""
        runs = []
        for seed in SWEEP_SEEDS if self.sweep.grid else ():
            for trained in self._swept(shard):
                for values in self.sweep.candidates:
                    key = self._validation_key(trained, values, seed)
                    if key not in by_key or (retry and by_key[key]["status"] != "ok"):
                        positions, variant = trained
                        runs.append(
                            Run(
                                self.task.name, variant, seed, self.settings_with(variant, values),
                                {self.settings.train_longest: {key: None}}, positions,
                                self.training_key(variant, positions, seed, values),
                                values_text(values), {"split": VALIDATION},
                            )
                        )  # fmt: skip
        return runs

    def _swept(self, shard: Shard) -> list[TrainedVariant]:
        """The shard's variants in a study with a sweep."""
        return self.trained()[shard.index :: shard.count]

    def _reported_run(
        self,
        trained: TrainedVariant,
        seed: int,
        tests: dict[int, dict[str, VariantCall | None]],
        choice: Choice | None,
    ) -> Run:
        positions, variant = trained
        assert choice is not None
        fields: dict[str, Any] = {}
        if shared := self._shared(variant):
            fields["shared"] = shared
        if self.sweep.names:
            fields["tuned"] = {"values": choice.values, "tried": list(choice.tried)}
        return Run(
            self.task.name, variant, seed, self.settings_with(variant, choice.values), tests,
            positions, self.training_key(variant, positions, seed, choice.values), fields=fields,
        )  # fmt: skip

    def row(
        self, run: Run, key: str, point: int, outcome: Outcome, training: dict[str, Any]
    ) -> Row:
        """The result row of one (variant, position encoding, seed, eval length)."""
        substitute = run.tests[point][key]
        return {
            "key": key,
            "task": self.task.name,
            "variant": str(run.variant) if substitute is None else f"{run.variant}->{substitute}",
            "positions": run.positions,
            "seed": run.seed,
            "length": point,
            "status": outcome.status,
            "message": outcome.message,
            "metrics": outcome.metrics,
            "curves": outcome.curves,
            "learned": training["learned"] if substitute is None else {},
            "chance": self.task.chance(self.settings),
            "sequences": self.settings.sequences(point),
            "settings": run.settings.identity(),
            "version": self.version(Spec(run.variant, substitute or run.variant)),
            "schedule": run.settings.schedule_text(self.sweep.names),
            "data": self._data(),
            "device": self.device,
            **origin(),
            "cpu_seconds": round(outcome.cpu_seconds, 3),
            "train_cpu_seconds": round(training["train_cpu_seconds"], 3),
            "training": run.training_key,
            **run.fields,
        }

    def log_at(self, run: Run, row: Row) -> tuple[str, int]:
        """The name and the step under which loggers show the metrics of a row."""
        sweep = f"/{run.candidate}" if run.candidate else ""
        name = f"{self.task.name}/{row['variant']}/{row['positions']}{sweep}/seed{row['seed']}"
        return name, row["length"]

    def headline(self, runs: int) -> str:
        """The study in one line; ``runs`` is the number of runs to execute."""
        plain = self.positions == ("none",)
        encodings = "" if plain else f", position encoding {' and '.join(self.positions)}"
        return (
            f"{self.task.name}: {counted(len(self.specs), 'variant')}, "
            f"{counted(self.seeds, 'seed')}{encodings}, train length "
            f"{self.settings.train_longest}, eval lengths up to {max(self.lengths)}: "
            f"{counted(runs, 'run')} to do"
            + (f", with a sweep of {' and '.join(self.sweep.grid)}" if self.sweep.grid else "")
        )

    def details(self, runs: Sequence[AnyRun], out: Path) -> list[str]:
        """More lines about the study and its missing results."""
        trainings = sum(not run.model(out).exists() for run in runs if isinstance(run, Run))
        reported = [run for run in runs if isinstance(run, Run) and not run.candidate]
        missing = sum(len(tests) for run in reported for tests in run.tests.values())
        candidates = [values_text(values) for values in self.sweep.candidates]
        sweep = f"{len(runs) - len(reported)} runs to do with {'; '.join(candidates)}"
        return [
            f"  eval lengths: {', '.join(map(str, self.lengths))}",
            f"  schedule: {self.settings.schedule_text(self.sweep.names)}",
            *([f"  sweep: {sweep}"] if self.sweep.grid else []),
            f"  to do: {counted(trainings, 'training')} and {missing} of "
            f"{sum(1 for _ in self.row_specs())} results",
        ]

    def left_out_lines(self) -> list[str]:
        """A line for each unsupported combination."""
        return [
            f"  left out: {spec} with position encoding {positions}: {reason}"
            for (spec, positions), reason in self.left_out.items()
        ]
