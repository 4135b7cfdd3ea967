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
from commandline.variants import Spec, VariantCall, complete, every_variant, parse_specs, unknown
from evals.conversion import check_switch
from evals.measures.heads import own_parameters, scaled_rope
from evals.options import Options, check_device, check_unique, flag, no_setting
from evals.study import Study
from evals.sweeps import SWEEP_SEEDS, plan_sweep
from evals.task import EVERY_VARIANT, VALIDATION, Preset, Settings, Task, trained_encoding
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
    changes = _changes(task.name, preset.settings, options)
    try:
        settings = replace(preset.settings, **changes)
    except ValueError as error:
        raise UsageError(f"setting {error}") from error
    texts = list(options.variants or preset.variants)
    if tuple(texts) == EVERY_VARIANT:
        texts = (
            list(layers.every_layer())
            if isinstance(task, Experiment)
            else every_variant(task.tokens(settings.train_longest))
        )
    if options.variants is None:
        texts += [n for n in plugins if n not in texts and not n.startswith("task ")]
    of_variants = {
        name: {key: value for key, value in values.items() if key not in changes}
        for name, values in preset.variant_settings.items()
    }
    study = Study(
        task, (), ("none",), preset.seeds if options.seeds is None else options.seeds, (),
        settings, options.device, plugins,
        variant_settings={name: values for name, values in of_variants.items() if values},
    )  # fmt: skip
    if isinstance(task, Experiment):
        study = _with_conditions(study, texts, options.conditions or preset.conditions, several)
    else:
        study = _with_lengths(study, texts, preset, options)
    check_unique("--variants", list(map(str, study.specs)))
    return study


def _changes(task: str, settings: Any, options: Options) -> dict[str, Any]:
    """The settings that the options change."""
    changes, known = dict(options.settings), vars(settings)
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
    return changes


def _with_conditions(
    study: Study, texts: Sequence[str], conditions: Sequence[str], several: bool
) -> Study:
    """The study of an experiment, with its conditions and output layers.

    Raises:
        UsageError: a condition is unknown, or a text is of no output layer that is supported under
            a condition.
    """
    task: Experiment = study.task
    conditions = tuple(conditions or task.conditions)
    for name in conditions:
        if name not in task.conditions:
            hint = did_you_mean(name, task.conditions)
            known = either(tuple(task.conditions))
            raise UsageError(f"--conditions of {task.name} must be {known}, got {name!r}{hint}")
    left_out: dict[tuple[Any, str], str] = {}
    specs: list[Spec] = []
    for text in texts:
        try:
            (spec,) = parse_specs([text])
            if spec.is_substitution:
                raise UsageError(f"--variants of {task.name} must be output layers, got {text!r}")
            layer = layers.completed(spec.train)
            reasons = {name: task.unsupported(layer, name) for name in conditions}
            if None not in reasons.values():
                raise UsageError(f"output layer {layer}: {reasons[conditions[0]]}")
        except UsageError as error:
            if not several:
                raise
            left_out[text, "every condition"] = str(error)
            continue
        specs.append(spec := Spec(layer, layer))
        left_out |= {(spec, name): why for name, why in reasons.items() if why is not None}
    return replace(study, specs=tuple(specs), xs=conditions, left_out=left_out)


def _with_lengths(study: Study, texts: Sequence[str], preset: Preset, options: Options) -> Study:
    """The study of a task, with its lengths, variants, position encodings and sweep."""
    task, settings = study.task, study.settings
    # Results always include the train length.
    eval_lengths = preset.lengths if options.lengths is None else options.lengths
    lengths = tuple(sorted({settings.train_longest, *eval_lengths}))
    positions = tuple(preset.positions if options.positions is None else options.positions)
    if options.positions is not None and not set(positions) <= set(task.encodings):
        raise UsageError(
            f"--positions of {task.name} must be {either(task.encodings)}, "
            f"got {', '.join(positions)}"
        )
    sweep = plan_sweep(task.name, preset, options, settings, lengths)
    if sweep.grid and study.seeds > SWEEP_SEEDS[0]:
        raise UsageError(
            f"--seeds must be at most {SWEEP_SEEDS[0]} with a sweep, which uses the seeds "
            f"{' and '.join(map(str, SWEEP_SEEDS))}, got {study.seeds}"
        )
    study = replace(study, positions=positions, xs=lengths, sweep=sweep)
    _check_task(study, options.verbose)
    longest = max(task.tokens(max(p.lengths)) for p in task.presets.values())
    specs = tuple(
        Spec(complete(spec.train, longest), complete(spec.test, longest))
        for spec in parse_specs(list(texts), wrappers=True)
    )
    for call in dict.fromkeys(call for spec in specs for call in spec.calls):
        encoding = trained_encoding(positions[0])
        try:
            if call.heads is not None:
                task.build(call, encoding, settings)
            if call.before is not None:
                check_switch(task, call, encoding, settings)
        except (ValueError, TypeError) as error:
            raise UsageError(f"variant {call}: {error}") from error
    try:
        for values in sweep.candidates:
            replace(settings, **values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--sweep: {error}") from error
    evaluated = {settings.train_shortest, *lengths, *sweep.lengths}
    sizes = sorted({task.tokens(n) for n in evaluated})
    return replace(study, specs=specs, left_out=_left_out(specs, positions, sizes))


def _check_task(study: Study, verbose: bool) -> None:
    """Raise UsageError if the task's chance score, data or model are wrong."""
    task, settings = study.task, study.settings
    chance = task.chance(settings)
    if not isinstance(chance, (int, float)) or not math.isfinite(chance):
        raise UsageError(f"the chance score of {task.name} must be a finite number, got {chance!r}")
    draws = [("train", settings.train_shortest), *itertools.product(task.splits.values(), study.xs)]
    if study.sweep.grid:
        draws += [(VALIDATION, length) for length in study.sweep.lengths]
    for split, length in draws:
        _check_data(task, split, length, settings, verbose)
    for encoding in study.positions:
        try:
            model = task.build(VariantCall("softmax"), trained_encoding(encoding), settings)
            with scaled_rope(model, study.rope_scaling(encoding, max(study.xs))):
                pass
        except (ValueError, TypeError) as error:
            raise UsageError(f"settings: {error}") from error


def _check_data(task: Task, split: str, length: int, settings: Settings, verbose: bool) -> None:
    """Draw sequences twice: some of the lengths trained on, one of each longer length.

    Raises:
        UsageError: the task does not support this split or length, or the draws differ.
    """
    count = _DRAWN if length <= settings.train_longest else 1
    try:
        drawn = [vars(task.batch(0, split, length, 0, count, settings)) for _ in range(2)]
        pairs = zip(*(batch.values() for batch in drawn), strict=True)
        if not all(torch.equal(x, y) for x, y in pairs if isinstance(x, torch.Tensor)):
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


def _left_out(
    specs: Sequence[Spec], positions: Sequence[str], sizes: Sequence[int]
) -> dict[tuple[Spec, str], str]:
    """The reason for each unsupported pair of a variant and a position encoding.

    Raises:
        UsageError: a variant supports none of the position encodings.
    """
    left_out: dict[tuple[Spec, str], str] = {}
    for spec in specs:
        for call in spec.calls:
            if (reason := unknown(call.name)) is not None:
                raise UsageError(f"variant {spec}: {reason}")
        reasons: dict[str, str] = {}
        for encoding, variant in itertools.product(positions, spec.calls):
            if (reason := unsupported(variant, sizes, encoding)) is not None:
                reasons[encoding] = reason
        if len(reasons) == len(positions):
            raise UsageError(f"variant {spec}: {reasons[positions[0]]}")
        left_out |= {(spec, encoding): reason for encoding, reason in reasons.items()}
    return left_out


def unsupported(variant: VariantCall, sizes: Sequence[int], positions: str) -> str | None:
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
