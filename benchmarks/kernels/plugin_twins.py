"""The activations of a plugin, for the commands that compile kernels: `compile` and `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import attnzoo
from benchmarks.harness.cases import Case
from commandline.errors import UsageError
from commandline.variants import load_plugin

# The kernels that an activation is part of.
KERNELS = ("forward", "dq", "dkdv", "decode")


class Twin(NamedTuple):
    """An activation's Triton function with what the kernels know of it, and a call that uses it."""

    function: str  # "module:name"
    normalize: str
    unit: float
    vanishes: bool
    variant: str
    params: dict[str, Any]


def twins(path: Path) -> dict[str, Twin]:
    """The plugin's own activations that name a Triton function, by their names.

    Raises:
        UsageError: there is none.
    """
    found: dict[str, Twin] = {}
    for name in load_plugin(path).variants:
        case = Case.parse(name, 1)
        for form in (candidate.form for candidate in case.plan().candidates):
            if not isinstance(form, attnzoo.Pairwise):
                continue
            own = form.activation.triton
            if own is not None and not own.startswith("attnzoo."):
                found[form.activation.name] = Twin(
                    own, form.normalize, form.activation.unit, form.activation.vanishes,
                    case.variant, case.params,
                )  # fmt: skip
    if not found:
        raise UsageError(f"--plugin {path} has no activation of its own with a Triton function")
    return found


_FUNCTIONS: dict[str, str] = {}  # of the twins that are enlisted


def enlist(path: Path, table: dict[str, tuple[str, float, bool]]) -> list[str]:
    """Add the plugin's twins to a table of (normalize, unit, vanishes); their names.

    Raises:
        UsageError: there is none, or a name is taken.
    """
    own = twins(path)
    for name, twin in own.items():
        if name in table and _FUNCTIONS.get(name) != twin.function:
            raise UsageError(f"--plugin {path}: the activation's name {name!r} is taken")
        table[name] = (twin.normalize, twin.unit, twin.vanishes)
        _FUNCTIONS[name] = twin.function
    return list(own)


def function(twin: str) -> str:
    """The Triton function of a twin, a plugin's or one of attnzoo's own, as "module:name"."""
    return _FUNCTIONS.get(twin, f"attnzoo.backends.triton.common.activations:{twin}")
