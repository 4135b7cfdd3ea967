"""A study: the runs of one task, from its variants, position encodings, seeds and settings.

The key of a row is a hash of everything that its scores depend on. An interrupted study therefore
finds its rows again, and rows of other settings are never reused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
from evals.harness.options import Options, no_setting
from evals.harness.runs import Run
from evals.measures.heads import own_parameters
from evals.results.store import WHOLE, Row, Shard
from evals.task import EVERY_VARIANT, Settings, Task

EVALUATION = 2  # version of the evaluation code: part of every row's key


def key_of(identity: Mapping[str, object]) -> str:
    """A key for a dict: the first twenty hex digits of the SHA-256 of its JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


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
            Run(self.task.name, variant, positions, seed, self.settings,
                self.training_key(variant, positions, seed), missing)
            for (seed, positions, variant), missing in mine
            if missing
        ]  # fmt: skip


def plan_study(task: Task, options: Options, plugins: Mapping[str, str]) -> Study:
    """Check the options and make the study.

    Raises:
        UsageError: an option is invalid, or a variant supports none of the encodings.
    """
    if options.preset not in task.presets:
        known = ", ".join(task.presets)
        raise UsageError(f"{task.name} has no preset {options.preset!r}; it has: {known}")
    preset = task.presets[options.preset]
    _check_device(options.device)
    seeds = preset.seeds if options.seeds is None else options.seeds
    settings = _settings(task, preset.settings, options)
    asked = list(preset.lengths if options.lengths is None else options.lengths)
    _check_unique("--lengths", asked)
    # Results always include the train length.
    lengths = tuple(sorted({settings.train_longest, *asked}))
    positions = preset.positions if options.positions is None else tuple(options.positions)
    if options.positions is not None and not set(positions) <= set(task.positions):
        raise UsageError(
            f"--positions of {task.name} must be {either(task.positions)}, "
            f"got {', '.join(positions)}"
        )
    _check_unique("--positions", positions)
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
    _check_unique("--variants", list(map(str, specs)))
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


def _settings(task: Task, preset: Settings, options: Options) -> Settings:
    """The preset's settings with the values from the options, validated."""
    given = dict(options.settings)
    if options.steps is not None:
        given["steps"] = options.steps
    known = vars(preset)
    if options.output is not None:
        if "output" not in known:
            raise UsageError(
                f"--output must not be given for {task.name}: its output layer is always softmax"
            )
        given["output"] = options.output
    for name, value in given.items():
        if name not in known:
            raise UsageError(no_setting(task.name, name, known))
        kind = type(known[name])
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            value = given[name] = float(value)
        if type(value) is not kind:
            raise UsageError(f"setting {name} must be of type {kind.__name__}, got {value!r}")
    try:
        return replace(preset, **given)
    except ValueError as error:
        raise UsageError(f"setting {error}") from error


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda":
        index, count = torch.device(device).index or 0, torch.cuda.device_count()
        if index >= count:
            raise UsageError(
                f"--device must be a device that exists, got {device!r}; torch finds {count} GPU(s)"
            )


def _check_unique(name: str, values: Sequence[object]) -> None:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise UsageError(f"{name} must not repeat an entry, got {twice[0]} twice")
