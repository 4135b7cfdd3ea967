"""A study: the runs of one task, from its variants, position encodings, seeds and settings.

The key of a row is a hash of everything that its scores depend on. An interrupted study therefore
finds its rows again, and rows of other settings are never reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attnzoo
from commandline.arguments import either
from commandline.errors import UsageError
from commandline.variants import (
    Spec,
    VariantCall,
    complete,
    every_variant,
    parse_specs,
)
from evals.harness.any_run import AnyRun
from evals.harness.options import Options
from evals.harness.plan import check_device, check_unique, chosen_settings, key_of, origin
from evals.harness.progress import counted
from evals.harness.runs import Run
from evals.measures.heads import own_parameters
from evals.measures.metrics import Outcome
from evals.results.store import WHOLE, Row, Shard
from evals.task import EVERY_VARIANT, Settings, Task

EVALUATION = 2  # version of the evaluation code: part of every row's key


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
    encoding.
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

    def _variant(self, variant: VariantCall) -> dict[str, object]:
        identity = variant.identity()
        if variant.name in self.plugins:
            identity["plugin"] = self.plugins[variant.name]
        return identity

    def training_key(self, variant: VariantCall, positions: str, seed: int) -> str:
        """The key of one training, also used for inference-time substitutions in that model."""
        plugin = self.plugins.get(f"task {self.task.name}")
        output = self.settings.output_layer
        return key_of(
            ({} if plugin is None else {"plugin": plugin})
            | ({} if output is None else {"output": self._variant(output)})
            | {
                "task": self.task.name,
                "data": self.task.data_version(),
                "schedule": "one-cycle cosine",
                "settings": self.settings.identity(),
                "device": self.device.split(":")[0],
                "train": self._variant(variant),
                "positions": positions,
                "seed": seed,
            }
        )

    def row_key(self, row: RowSpec) -> str:
        """The key of one row."""
        spec, positions, seed, length = row
        return key_of(
            {
                "training": self.training_key(spec.train, positions, seed),
                "test": self._variant(spec.test),
                "length": length,
                "sequences": self.settings.sequences(length),
                "evaluation": EVALUATION,
            }
        )

    def version(self, spec: Spec) -> str:
        """A hash of the spec's variants, their parameters with defaults, and the plugin's file."""
        return key_of({"train": self._variant(spec.train), "test": self._variant(spec.test)})

    def rows(self, by_key: Mapping[str, Row]) -> list[Row]:
        """Select the stored rows that belong to this study, in the order of `row_specs`."""
        keys = map(self.row_key, self.row_specs())
        return [by_key[key] for key in keys if key in by_key]

    def runs(
        self, by_key: Mapping[str, Row], shard: Shard = WHOLE, retry: bool = False
    ) -> list[Run]:
        """The shard's runs, each with only its missing rows. ``retry`` also repeats failed rows."""
        tests: dict[tuple[int, str, VariantCall], dict[int, dict[str, VariantCall | None]]] = {}
        for row in self.row_specs():
            lengths = tests.setdefault((row.seed, row.positions, row.spec.train), {})
            key = self.row_key(row)
            if key not in by_key or (retry and by_key[key]["status"] != "ok"):
                substitute = row.spec.test if row.spec.is_substitution else None
                lengths.setdefault(row.length, {})[key] = substitute
        mine = list(tests.items())[shard.index :: shard.count]
        return [
            Run(self.task.name, variant, seed, self.settings, missing, positions,
                self.training_key(variant, positions, seed))
            for (seed, positions, variant), missing in mine
            if missing
        ]  # fmt: skip

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
            "settings": self.settings.identity(),
            "version": self.version(Spec(run.variant, substitute or run.variant)),
            "schedule": self.settings.schedule,
            "data": self.task.data_version(),
            "device": self.device,
            **origin(),
            "cpu_seconds": round(outcome.cpu_seconds, 3),
            "train_cpu_seconds": round(training["train_cpu_seconds"], 3),
            "training": run.training_key,
        }

    def log_at(self, row: Row) -> tuple[str, int]:
        """The name and the step under which loggers show the metrics of a row."""
        name = f"{self.task.name}/{row['variant']}/{row['positions']}/seed{row['seed']}"
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
        )

    def details(self, runs: Sequence[AnyRun], out: Path) -> list[str]:
        """More lines about the study and its missing results."""
        trainings = sum(not run.model(out).exists() for run in runs if isinstance(run, Run))
        missing = sum(len(tests) for run in runs for tests in run.tests.values())
        return [
            f"  eval lengths: {', '.join(map(str, self.lengths))}",
            f"  schedule: {self.settings.schedule}",
            f"  to do: {counted(trainings, 'training')} and {missing} of "
            f"{sum(1 for _ in self.row_specs())} results",
        ]

    def left_out_lines(self) -> list[str]:
        """A line for each unsupported combination."""
        return [
            f"  left out: {spec} with position encoding {positions}: {reason}"
            for (spec, positions), reason in self.left_out.items()
        ]


def plan_study(task: Task, options: Options, plugins: Mapping[str, str]) -> Study:
    """Check the options and make the study.

    Raises:
        UsageError: an option is invalid, or a variant supports none of the encodings.
    """
    if options.preset not in task.presets:
        known = ", ".join(task.presets)
        raise UsageError(f"{task.name} has no preset {options.preset!r}; it has: {known}")
    if options.conditions is not None:
        raise UsageError(f"--conditions must not be given for {task.name}: it has lengths instead")
    preset = task.presets[options.preset]
    check_device(options.device)
    seeds = preset.seeds if options.seeds is None else options.seeds
    settings = chosen_settings(task.name, preset.settings, options)
    asked = list(preset.lengths if options.lengths is None else options.lengths)
    check_unique("--lengths", asked)
    # Results always include the train length.
    lengths = tuple(sorted({settings.train_longest, *asked}))
    positions = preset.positions if options.positions is None else tuple(options.positions)
    if options.positions is not None and not set(positions) <= set(task.positions):
        raise UsageError(
            f"--positions of {task.name} must be {either(task.positions)}, "
            f"got {', '.join(positions)}"
        )
    check_unique("--positions", positions)
    for length in (settings.train_shortest, *lengths):
        _check_data(task, length, settings, options.verbose)
    for encoding in positions:
        try:
            task.build(VariantCall("softmax"), encoding, settings)
        except (ValueError, TypeError) as error:
            raise UsageError(f"settings: {error}") from error
    if options.variants is None:
        texts = list(preset.variants)
        if preset.variants == EVERY_VARIANT:
            texts = every_variant(task.tokens(settings.train_longest))
        texts += [name for name in plugins if name not in texts and not name.startswith("task ")]
    else:
        texts = list(options.variants)
    longest = max(task.tokens(max(p.lengths)) for p in task.presets.values())
    specs = tuple(
        Spec(complete(spec.train, longest), complete(spec.test, longest))
        for spec in parse_specs(texts)
    )
    check_unique("--variants", list(map(str, specs)))
    sizes = sorted({task.tokens(n) for n in (settings.train_shortest, *lengths)})
    left_out = _left_out(specs, positions, sizes)
    return Study(
        task, specs, positions, seeds, lengths, settings, options.device, plugins, left_out
    )


def _check_data(task: Task, length: int, settings: Settings, verbose: bool) -> None:
    """Draw one sequence; raises UsageError if the task does not support this length."""
    try:
        task.batch(0, "test", length, 0, 1, settings)
    except UsageError:
        raise
    except Exception as error:
        if verbose:
            raise
        raise UsageError(
            f"{task.name}: draw failed at length {length}: {type(error).__name__}: {error}\n"
            "Repeat the command with --verbose for the traceback."
        ) from error


def _left_out(
    specs: tuple[Spec, ...], positions: tuple[str, ...], sizes: list[int]
) -> dict[tuple[Spec, str], str]:
    """The reason for each unsupported pair of a variant and a position encoding.

    Raises:
        UsageError: a variant supports none of the position encodings.
    """
    found: dict[tuple[Spec, str], str] = {}
    for spec in specs:
        for encoding in positions:
            for variant in dict.fromkeys((spec.train, spec.test)):
                if (reason := unsupported(variant, sizes, encoding)) is not None:
                    found[spec, encoding] = reason
        mine = [reason for (other, _), reason in found.items() if other == spec]
        if len(mine) == len(positions):
            known = {spec.train.name, spec.test.name} <= {*attnzoo.list_variants()}
            hint = "" if known else "; --plugin FILE.py loads your own variant"
            raise UsageError(f"variant {spec}: {mine[0]}{hint}")
    return found


def unsupported(variant: VariantCall, sizes: list[int], positions: str) -> str | None:
    """The reason why a variant does not support these numbers of keys or this encoding, or None."""
    try:
        module = attnzoo.nn.Attention(variant.name, 1, **variant.params)
        options = {"alibi": torch.ones(1)} if positions == "alibi" else {}
        one = torch.ones(1, 1, 1, 8)
        for size in sizes:
            keys = one.expand(1, 1, size, 8)
            plan = attnzoo.explain(
                one, keys, keys, variant.name, **options, **own_parameters(module)
            )
            if plan.reason is not None:
                return plan.reason
    except (ValueError, TypeError) as error:
        return str(error)
    return None
