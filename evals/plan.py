"""Plans a study: checks the options, and finds out which variants are supported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import attnzoo
from commandline.arguments import did_you_mean, either
from commandline.errors import UsageError
from commandline.variants import Spec, VariantCall, complete, every_variant, parse_specs
from evals.measures.heads import own_parameters
from evals.options import Options, check_device, check_unique, flag, no_setting
from evals.study import Study
from evals.sweeps import SWEEP_SEEDS, Sweep, plan_sweep
from evals.task import EVERY_VARIANT, VALIDATION, Preset, Settings, Task
from evals.tasks.digits import layers
from evals.tasks.digits.experiment import Experiment

_DRAWN = 8  # sequences of a length that are drawn to check a task's data


def plan_study(
    task: Task | Experiment, options: Options, plugins: Mapping[str, str], several: bool = False
) -> Study:
    """Check the options and make the study.

    several: whether the options are those of several evals. Variants that are no output layers are
    then left out of an experiment.

    Raises:
        UsageError: an option is invalid, or a variant is unsupported everywhere.
    """
    if options.preset not in task.presets:
        known = ", ".join(task.presets)
        raise UsageError(
            f"{task.name} has no preset {options.preset!r}; choose one with --preset: {known}"
        )
    for name, why in task.refused.items():
        if getattr(options, name) not in (None, False):
            raise UsageError(f"{flag(name)} must not be given for {task.name}: {why}")
    check_device(options.device)
    preset = task.presets[options.preset]
    settings = _settings(task.name, preset.settings, options)
    texts = options.variants or preset.variants
    if tuple(texts) == EVERY_VARIANT:
        texts = (
            layers.every_layer()
            if isinstance(task, Experiment)
            else every_variant(task.tokens(settings.train_longest))
        )
    if options.variants is None:
        texts = [*texts, *(n for n in plugins if n not in texts and not n.startswith("task "))]
    study = Study(
        task, (), ("none",), preset.seeds if options.seeds is None else options.seeds, (),
        settings, options.device, plugins,
    )  # fmt: skip
    if isinstance(task, Experiment):
        return _with_conditions(study, task, texts, options, preset, several)
    return _with_lengths(study, task, texts, options, preset)


def _settings(task: str, preset: Any, options: Options) -> Any:
    """The preset's settings with the values from the options, validated."""
    changes, known = dict(options.settings), vars(preset)
    for name in ("steps", "output"):
        if (value := getattr(options, name)) is None:
            continue
        if name in changes:
            raise UsageError(
                f"{name} must be given once, got --{name} {value} and --set {name}={changes[name]}"
            )
        if name not in known:
            raise UsageError(
                f"--output must not be given for {task}: its output layer is always softmax"
            )
        changes[name] = value
    for name, value in changes.items():
        if name not in known:
            raise UsageError(no_setting(task, name, known))
        expected_type = type(known[name])
        if type(value) is int and expected_type is float:
            value = changes[name] = float(value)
        if type(value) is not expected_type:
            raise UsageError(
                f"setting {name} must be of type {expected_type.__name__}, got {value!r}"
            )
    try:
        return replace(preset, **changes)
    except ValueError as error:
        raise UsageError(f"setting {error}") from error


# ------------------------------------------------------------------------------ an experiment


def _with_conditions(
    study: Study,
    task: Experiment,
    texts: Sequence[str],
    options: Options,
    preset: Preset,
    several: bool,
) -> Study:
    conditions = tuple(options.conditions or preset.conditions or task.conditions)
    for name in conditions:
        if name not in task.conditions:
            hint = did_you_mean(name, task.conditions)
            known = either(tuple(task.conditions))
            raise UsageError(f"--conditions of {task.name} must be {known}, got {name!r}{hint}")
    check_unique("--conditions", conditions)
    left_out: dict[tuple[Any, str], str] = {}
    specs: list[Spec] = []
    for text in texts:
        try:
            layer, reasons = _output_layer(task, text, conditions)
        except UsageError as error:
            if not several:
                raise
            left_out[text, "every condition"] = str(error)
            continue
        specs.append(Spec(layer, layer))
        left_out |= {(specs[-1], name): reason for name, reason in reasons.items()}
    check_unique("--variants", list(map(str, specs)))
    return replace(study, specs=tuple(specs), xs=conditions, left_out=left_out)


def _output_layer(
    task: Experiment, text: str, conditions: Sequence[str]
) -> tuple[VariantCall, dict[str, str]]:
    """An output layer, and the conditions under which it is not supported, with the reasons.

    Raises:
        UsageError: the text is of no output layer that is supported under a condition.
    """
    (spec,) = parse_specs([text])
    if spec.is_substitution:
        raise UsageError(f"--variants of {task.name} must be output layers, got {str(spec)!r}")
    layer = layers.completed(spec.train)
    reasons = {name: task.unsupported(layer, name) for name in conditions}
    unsupported = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(unsupported) == len(conditions):
        raise UsageError(f"output layer {layer}: {unsupported[conditions[0]]}")
    return layer, unsupported


# ------------------------------------------------------------------------------------- a task


def _with_lengths(
    study: Study, task: Task, texts: Sequence[str], options: Options, preset: Preset
) -> Study:
    settings = study.settings
    eval_lengths = list(preset.lengths if options.lengths is None else options.lengths)
    check_unique("--lengths", eval_lengths)
    # Results always include the train length.
    lengths = tuple(sorted({settings.train_longest, *eval_lengths}))
    positions = preset.positions if options.positions is None else tuple(options.positions)
    if options.positions is not None and not set(positions) <= set(task.positions):
        raise UsageError(
            f"--positions of {task.name} must be {either(task.positions)}, "
            f"got {', '.join(positions)}"
        )
    check_unique("--positions", positions)
    sweep = plan_sweep(task.name, preset, options)
    if sweep.grid and study.seeds > SWEEP_SEEDS[0]:
        raise UsageError(
            f"--seeds must be at most {SWEEP_SEEDS[0]} with a sweep, which uses the seeds "
            f"{' and '.join(map(str, SWEEP_SEEDS))}, got {study.seeds}"
        )
    _check_task(task, lengths, positions, settings, sweep, options.verbose)
    longest = max(task.tokens(max(p.lengths)) for p in task.presets.values())
    specs = tuple(
        Spec(complete(spec.train, longest), complete(spec.test, longest))
        for spec in parse_specs(list(texts), wrappers=True)
    )
    check_unique("--variants", list(map(str, specs)))
    sizes = sorted({task.tokens(n) for n in (settings.train_shortest, *lengths)})
    for call in dict.fromkeys(call for spec in specs for call in (spec.train, spec.test)):
        if call.heads is not None:
            try:
                task.build(call, positions[0], settings)
            except (ValueError, TypeError) as error:
                raise UsageError(f"variant {call}: {error}") from error
    left_out = _left_out(specs, positions, sizes)
    try:
        for values in sweep.candidates:
            replace(settings, **values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--sweep: {error}") from error
    return replace(
        study, specs=specs, positions=positions, xs=lengths, left_out=left_out, sweep=sweep,
        variant_settings=_variant_settings(preset, options),
    )  # fmt: skip


def _variant_settings(preset: Preset, options: Options) -> dict[str, Mapping[str, Any]]:
    """The settings that the preset gives to some variants, unless an option gives them to all."""
    option_names = {*options.settings}
    option_names |= {name for name in ("steps", "output") if getattr(options, name) is not None}
    settings_left = {
        name: {key: value for key, value in settings.items() if key not in option_names}
        for name, settings in preset.variant_settings.items()
    }
    return {name: settings for name, settings in settings_left.items() if settings}


def _check_task(
    task: Task,
    lengths: Sequence[int],
    positions: Sequence[str],
    settings: Settings,
    sweep: Sweep,
    verbose: bool,
) -> None:
    """Raise UsageError if the task's chance score, data or model are wrong."""
    chance = task.chance(settings)
    if not isinstance(chance, (int, float)) or not math.isfinite(chance):
        raise UsageError(f"the chance score of {task.name} must be a finite number, got {chance!r}")
    draws = [("train", settings.train_shortest), *itertools.product(task.splits.values(), lengths)]
    if sweep.grid:
        draws.append((VALIDATION, settings.train_longest))
    for split, length in draws:
        _check_data(task, split, length, settings, verbose)
    for encoding in positions:
        try:
            task.build(VariantCall("softmax"), encoding, settings)
        except (ValueError, TypeError) as error:
            raise UsageError(f"settings: {error}") from error


def _check_data(task: Task, split: str, length: int, settings: Settings, verbose: bool) -> None:
    """Draw sequences twice: some of the lengths trained on, one of each longer length.

    Raises:
        UsageError: the task does not support this split or length, or the draws differ.
    """
    count = _DRAWN if length <= settings.train_longest else 1
    try:
        drawn = (task.batch(0, split, length, 0, count, settings) for _ in range(2))
        first, second = (_tensors(batch) for batch in drawn)
        if not all(map(torch.equal, first, second)):
            raise ValueError("two draws with the same arguments must be equal: use evals.draws")
    except UsageError:
        raise
    except Exception as error:
        if verbose:
            raise
        raise UsageError(
            f"{task.name}: draw of split {split!r} failed at length {length}: "
            f"{type(error).__name__}: {error}\n"
            "Repeat the command with --verbose for the traceback."
        ) from error


def _tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors among the attributes of a batch."""
    return [x for x in getattr(batch, "__dict__", {}).values() if isinstance(x, torch.Tensor)]


def _left_out(
    specs: tuple[Spec, ...], positions: tuple[str, ...], sizes: list[int]
) -> dict[tuple[Spec, str], str]:
    """The reason for each unsupported pair of a variant and a position encoding.

    Raises:
        UsageError: a variant supports none of the position encodings.
    """
    reasons: dict[tuple[Spec, str], str] = {}
    for spec in specs:
        for encoding in positions:
            for variant in dict.fromkeys((spec.train, spec.test)):
                if (reason := unsupported(variant, sizes, encoding)) is not None:
                    reasons[spec, encoding] = reason
        spec_reasons = [reason for (other, _), reason in reasons.items() if other == spec]
        if len(spec_reasons) == len(positions):
            known = {spec.train.name, spec.test.name} <= {*attnzoo.list_variants()}
            hint = "" if known else "; --plugin FILE.py loads your own variant"
            raise UsageError(f"variant {spec}: {spec_reasons[0]}{hint}")
    return reasons


def unsupported(variant: VariantCall, sizes: list[int], positions: str) -> str | None:
    """The reason why a variant does not support these numbers of keys or this encoding, or None."""
    try:
        attention = attnzoo.nn.host_attention(
            variant.wrapper_choice, variant.name, variant.heads or 1, 64, variant.params,
            key_dim=64, qk_dim=8, v_dim=8,
        )  # fmt: skip
        module = attention.attention if isinstance(attention, attnzoo.nn.Wrapper) else attention
        heads = module.num_heads
        biased = positions in attnzoo.nn.Transformer.BIASED
        options = {"alibi": torch.ones(heads)} if biased else {}
        one = torch.ones(1, heads, 1, 8)
        for size in sizes:
            keys = one.expand(1, heads, size, 8)
            hidden = torch.zeros(1, size, 64)
            projected = module.projected(hidden[:, :1], hidden)
            params: dict[str, Any] = own_parameters(module) | projected
            plan = attnzoo.explain(one, keys, keys, variant.name, **options, **params)
            if plan.reason is not None:
                return plan.reason
    except (ValueError, TypeError) as error:
        return str(error)
    return None
