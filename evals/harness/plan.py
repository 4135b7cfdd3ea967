"""What the studies of tasks and of experiments share: keys, settings, checks of options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import attnzoo
from commandline.checkout import commit
from commandline.errors import UsageError
from commandline.variants import Spec
from evals.harness.options import Options, no_setting


def key_of(identity: Mapping[str, object]) -> str:
    """A key for a dict: the first twenty hex digits of the SHA-256 of its JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def origin() -> dict[str, str]:
    """The versions and the CPU's arithmetic, which every result row names."""
    return {
        "arithmetic": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "attnzoo": attnzoo.__version__,
        "commit": commit() or "unknown",
    }


def chosen_settings(task: str, preset: Any, options: Options) -> Any:
    """The preset's settings with the values from the options, validated."""
    changes = dict(options.settings)
    for name in ("steps", "output"):
        if (value := getattr(options, name)) is not None and name in changes:
            raise UsageError(
                f"{name} must be given once, got --{name} {value} and --set {name}={changes[name]}"
            )
    if options.steps is not None:
        changes["steps"] = options.steps
    known = vars(preset)
    if options.output is not None:
        if "output" not in known:
            raise UsageError(
                f"--output must not be given for {task}: its output layer is always softmax"
            )
        changes["output"] = options.output
    for name, value in changes.items():
        if name not in known:
            raise UsageError(no_setting(task, name, known))
        expected_type = type(known[name])
        if isinstance(value, int) and not isinstance(value, bool) and expected_type is float:
            value = changes[name] = float(value)
        if type(value) is not expected_type:
            raise UsageError(
                f"setting {name} must be of type {expected_type.__name__}, got {value!r}"
            )
    try:
        return replace(preset, **changes)
    except ValueError as error:
        raise UsageError(f"setting {error}") from error


def check_device(device: str) -> None:
    """Raise UsageError unless the device exists."""
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}") from None
    if device != "cpu" and torch_device.type != "cuda":
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if torch_device.type == "cuda":
        index, count = torch_device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise UsageError(
                f"--device must be a device that exists, got {device!r}; torch finds {count} GPU(s)"
            )


def check_registered(name: str, spec: Spec) -> None:
    """Raise UsageError unless an entry of the option ``name`` is a registered variant, not a->b."""
    if spec.is_substitution or spec.test.name not in attnzoo.list_variants():
        known = ", ".join(attnzoo.list_variants())
        raise UsageError(f"{name} must be among {known}, got {spec}")


def check_unique(name: str, values: Sequence[object]) -> None:
    """Raise UsageError if the option ``name`` repeats a value."""
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise UsageError(f"{name} must not repeat an entry, got {twice[0]} twice")
