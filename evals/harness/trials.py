"""The study of an experiment: its output layers, conditions and seeds.

A run is an output layer with one seed; its points are the conditions. Keys and result files work as
those of `evals.harness.study`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from commandline.arguments import did_you_mean, either
from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_specs
from evals.experiment import Experiment, Result
from evals.harness.any_run import AnyRun, Emit, RunContext
from evals.harness.options import Options
from evals.harness.plan import check_device, check_unique, chosen_settings, key_of, origin
from evals.harness.progress import counted
from evals.harness.training import NotFinite, fit
from evals.measures.arithmetic import is_out_of_memory
from evals.measures.metrics import Outcome
from evals.results.store import UNSHARDED, Row, Shard
from evals.task import EVERY_VARIANT, Schedule
from evals.tasks import EXPERIMENTS

EVALUATION = 1  # version of the evaluation code: part of every row's key


@dataclass(frozen=True)
class Trials(AnyRun):
    """The trials of one output layer with one seed: ``tests`` has the key of each condition."""

    tests: dict[str, dict[str, None]]

    def __str__(self) -> str:
        return f"{self.task} {self.variant} seed {self.seed}"

    @property
    def log_name(self) -> str:
        return f"{self.task}/{self.variant}/seed{self.seed}"

    def point_text(self, point: str) -> str:
        return point

    def execute(self, context: RunContext, emit: Emit) -> str:
        failed = 0
        for number, (condition, tests) in enumerate(self.tests.items()):
            emit(("stage", condition, number / len(self.tests)))
            outcome = self.outcome(condition, context.device)
            failed += outcome.status != "ok"
            emit(("rows", condition, dict.fromkeys(tests, outcome), {}))
        return f"failed under {counted(failed, 'condition')}" if failed else "done"

    def outcome(self, condition: str, device: str) -> Outcome:
        """Train and measure under one condition."""
        experiment = EXPERIMENTS[self.task]
        # Conditions have different numbers of trainings, so their losses have no common steps.
        training = partial(fit, schedule=self.settings, report=lambda *_: None)
        began = time.process_time()
        try:
            result = experiment.train_and_measure(
                self.variant, condition, self.seed, self.settings, device, training
            )
        except (NotFinite, MemoryError, RuntimeError) as error:
            if not isinstance(error, NotFinite) and not is_out_of_memory(error):
                raise
            status = "nan" if isinstance(error, NotFinite) else "oom"
            reason = str(error).split("\n")[0] or type(error).__name__
            return Outcome(status, f"training: {reason}")
        return _outcome(experiment, result, time.process_time() - began)

    def estimated_seconds(self, device: str) -> float:
        """An estimate of the time of the run, extrapolated from runs with few steps."""
        low, high = max(1, self.settings.steps // 20), max(2, self.settings.steps // 10)
        self._seconds(1, device)  # the first run also loads the data
        low_seconds, high_seconds = self._seconds(low, device), self._seconds(high, device)
        # Tests of the model take the same time for any number of steps.
        per_step = max(0.0, high_seconds - low_seconds) / (high - low)
        return low_seconds + per_step * (self.settings.steps - low)

    def _seconds(self, steps: int, device: str) -> float:
        """The time of the run with this number of steps."""
        short = replace(self, settings=replace(self.settings, steps=steps))
        clock = time.process_time if device == "cpu" else time.perf_counter
        began = clock()
        for condition in self.tests:
            short.outcome(condition, device)
        return clock() - began


def _outcome(experiment: Experiment, result: Result, seconds: float) -> Outcome:
    """The outcome of a result. Only optional metrics may be undefined; they are left out."""
    optional = {metric.name for metric in experiment.metrics if metric.optional}
    metrics = {
        name: value
        for name, value in result.metrics.items()
        if name not in optional or value == value  # NaN differs from itself
    }
    numbers = [*metrics.values(), *result.curve.values()]
    if not all(abs(value) < float("inf") for value in numbers):
        return Outcome("nan", "a metric is not finite", cpu_seconds=seconds)
    curve = {"x": [*map(float, result.curve)], "score": [*result.curve.values()]}
    return Outcome("ok", "", metrics, curve if result.curve else {}, seconds)


class TrialSpec(NamedTuple):
    """The output layer, seed and condition of one result row."""

    variant: VariantCall
    seed: int
    condition: str


@dataclass(frozen=True)
class TrialStudy:
    """The trials of one experiment.

    left_out: the reason for each unsupported pair of an output layer and a condition.
    """

    task: Experiment
    variants: tuple[VariantCall, ...]
    conditions: tuple[str, ...]
    seeds: int
    settings: Schedule
    device: str = "cpu"
    plugins: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[tuple[VariantCall, str], str] = field(default_factory=dict)

    def row_specs(self) -> Iterator[TrialSpec]:
        """The specs of all result rows, ordered by seed."""
        for seed in range(self.seeds):
            for variant in self.variants:
                for condition in self.conditions:
                    if (variant, condition) not in self.left_out:
                        yield TrialSpec(variant, seed, condition)

    def _variant(self, variant: VariantCall) -> dict[str, object]:
        identity = self.task.identity(variant)
        if variant.name in self.plugins:
            identity["plugin"] = self.plugins[variant.name]
        return identity

    def row_key(self, row: TrialSpec) -> str:
        """The key of one row."""
        return key_of(
            {
                "experiment": self.task.name,
                "data": self.task.data_version(),
                "settings": self.settings.identity(),
                "device": self.device.split(":")[0],
                "variant": self._variant(row.variant),
                "condition": row.condition,
                "seed": row.seed,
                "evaluation": EVALUATION,
            }
        )

    def rows(self, by_key: Mapping[str, Row]) -> list[Row]:
        """Select the stored rows that belong to this study, in the order of `row_specs`."""
        keys = map(self.row_key, self.row_specs())
        return [by_key[key] for key in keys if key in by_key]

    def runs(
        self, by_key: Mapping[str, Row], shard: Shard = UNSHARDED, retry: bool = False
    ) -> list[Trials]:
        """The shard's runs, with only their missing rows. ``retry`` also repeats failed rows."""
        tests: dict[tuple[int, VariantCall], dict[str, dict[str, None]]] = {}
        for row in self.row_specs():
            conditions = tests.setdefault((row.seed, row.variant), {})
            key = self.row_key(row)
            if key not in by_key or (retry and by_key[key]["status"] != "ok"):
                conditions[row.condition] = {key: None}
        chosen = list(tests.items())[shard.index :: shard.count]
        return [
            Trials(self.task.name, variant, seed, self.settings, missing)
            for (seed, variant), missing in chosen
            if missing
        ]

    def row(
        self, run: Trials, key: str, point: str, outcome: Outcome, training: dict[str, Any]
    ) -> Row:
        """The result row of one output layer, condition and seed."""
        return {
            "key": key,
            "task": self.task.name,
            "variant": str(run.variant),
            "condition": point,
            "seed": run.seed,
            "status": outcome.status,
            "message": outcome.message,
            "metrics": outcome.metrics,
            "curves": outcome.curves,
            "chance": self.task.chance(),
            "settings": self.settings.identity(),
            "version": key_of(self._variant(run.variant)),
            "schedule": self.settings.schedule,
            "data": self.task.data_version(),
            "device": self.device,
            "cpu_seconds": round(outcome.cpu_seconds, 3),
            **origin(),
        }

    def log_at(self, run: Trials, row: Row) -> tuple[str, int]:
        """The name and the step under which loggers show the metrics of a row."""
        name = f"{self.task.name}/{row['variant']}/{row['condition']}/seed{row['seed']}"
        return name, self.settings.steps

    def headline(self, runs: int) -> str:
        return (
            f"{self.task.name}: {counted(len(self.variants), 'output layer')}, "
            f"{counted(len(self.conditions), 'condition')}, {counted(self.seeds, 'seed')}: "
            f"{counted(runs, 'run')} to do"
        )

    def details(self, runs: Sequence[AnyRun], out: Any) -> list[str]:
        missing = sum(len(run.tests) for run in runs)
        return [
            f"  conditions: {', '.join(self.conditions)}",
            f"  schedule: {self.settings.schedule}",
            f"  to do: {missing} of {sum(1 for _ in self.row_specs())} results",
        ]

    def left_out_lines(self) -> list[str]:
        return [
            f"  left out: {variant} under {condition}: {reason}"
            for (variant, condition), reason in self.left_out.items()
        ]


def plan_trials(task: Experiment, options: Options, plugins: Mapping[str, str]) -> TrialStudy:
    """Check the options and make the study.

    Raises:
        UsageError: an option is invalid, or an output layer is unsupported under all conditions.
    """
    if options.preset not in task.presets:
        known = ", ".join(task.presets)
        raise UsageError(f"{task.name} has no preset {options.preset!r}; it has: {known}")
    for name, why in (
        ("positions", "it has no attention"),
        ("lengths", "it has conditions instead of lengths"),
        ("output", "--variants are its output layers"),
        ("sweep", "its settings are not tuned"),
    ):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} must not be given for {task.name}: {why}")
    preset = task.presets[options.preset]
    check_device(options.device)
    settings = chosen_settings(task.name, preset.settings, options)
    conditions = tuple(options.conditions or preset.conditions or task.conditions)
    for name in conditions:
        if name not in task.conditions:
            hint = did_you_mean(name, task.conditions)
            known = either(tuple(task.conditions))
            raise UsageError(f"--conditions of {task.name} must be {known}, got {name!r}{hint}")
    check_unique("--conditions", conditions)
    variants = _variants(task, options, preset.variants, plugins)
    return TrialStudy(
        task,
        variants,
        conditions,
        preset.seeds if options.seeds is None else options.seeds,
        settings,
        options.device,
        plugins,
        _left_out(task, variants, conditions),
    )


def _variants(
    task: Experiment, options: Options, default: Sequence[str], plugins: Mapping[str, str]
) -> tuple[VariantCall, ...]:
    texts = options.variants
    if texts is None:
        default = task.every_variant() if tuple(default) == EVERY_VARIANT else default
        plugin_variants = [
            name for name in plugins if name not in default and not name.startswith("task ")
        ]
        texts = [*default, *plugin_variants]
    specs = parse_specs(list(texts))
    for spec in specs:
        if spec.is_substitution:
            raise UsageError(f"--variants of {task.name} must be output layers, got {str(spec)!r}")
    layers = tuple(task.completed(spec.train) for spec in specs)
    check_unique("--variants", list(map(str, layers)))
    return layers


def _left_out(
    task: Experiment, variants: Sequence[VariantCall], conditions: Sequence[str]
) -> dict[tuple[VariantCall, str], str]:
    left_out: dict[tuple[VariantCall, str], str] = {}
    for variant in variants:
        reasons = {name: task.unsupported(variant, name) for name in conditions}
        left_out |= {
            (variant, name): reason for name, reason in reasons.items() if reason is not None
        }
        if all(reason is not None for reason in reasons.values()):
            raise UsageError(f"output layer {variant}: {reasons[conditions[0]]}")
    return left_out
