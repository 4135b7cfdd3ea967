"""Plans the study of a task: checks the options, and finds out which variants are supported."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from evals.harness.options import Options
from evals.harness.plan import check_device, check_unique, chosen_settings
from evals.harness.study import Study
from evals.harness.sweeps import SWEEP_SEEDS, plan_sweep
from evals.measures.heads import own_parameters
from evals.task import EVERY_VARIANT, VALIDATION, Preset, Settings, Task

_DRAWN = 8  # sequences of a length that are drawn to check a task's data


def plan_study(task: Task, options: Options, plugins: Mapping[str, str]) -> Study:
    """Check the options and make the study.

    Raises:
        UsageError: an option is invalid, or a variant supports none of the encodings.
    """
    if options.preset not in task.presets:
        known = ", ".join(task.presets)
        raise UsageError(
            f"{task.name} has no preset {options.preset!r}; choose one with --preset: {known}"
        )
    if options.conditions is not None:
        raise UsageError(f"--conditions must not be given for {task.name}: it has lengths instead")
    preset = task.presets[options.preset]
    check_device(options.device)
    seeds = preset.seeds if options.seeds is None else options.seeds
    settings = chosen_settings(task.name, preset.settings, options)
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
    if sweep.grid and seeds > SWEEP_SEEDS[0]:
        raise UsageError(
            f"--seeds must be at most {SWEEP_SEEDS[0]} with a sweep, which uses the seeds "
            f"{' and '.join(map(str, SWEEP_SEEDS))}, got {seeds}"
        )
    chance = task.chance(settings)
    if not isinstance(chance, (int, float)) or not math.isfinite(chance):
        raise UsageError(f"the chance score of {task.name} must be a finite number, got {chance!r}")
    draws = [("train", settings.train_shortest), *itertools.product(task.splits.values(), lengths)]
    if sweep.grid:
        draws.append((VALIDATION, settings.train_longest))
    for split, length in draws:
        _check_data(task, split, length, settings, options.verbose)
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
        for spec in parse_specs(texts, wrappers=True)
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
    study = Study(
        task, specs, positions, seeds, lengths, settings, options.device, plugins, left_out, sweep,
        _variant_settings(preset, options),
    )  # fmt: skip
    for values in sweep.candidates:
        try:
            replace(settings, **values)
        except (ValueError, TypeError) as error:
            raise UsageError(f"--sweep: {error}") from error
    return study


def _variant_settings(preset: Preset, options: Options) -> dict[str, Mapping[str, Any]]:
    """The settings that the preset gives to some variants, unless an option gives them to all."""
    option_names = {*options.settings}
    option_names |= {name for name in ("steps", "output") if getattr(options, name) is not None}
    settings_left = {
        name: {key: value for key, value in settings.items() if key not in option_names}
        for name, settings in preset.variant_settings.items()
    }
    return {name: settings for name, settings in settings_left.items() if settings}


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
