"""The activations that kernels are compiled with: those of the registered variants' forms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, complete, load_plugin

# For a variant whose parameters depend on the length of its sequences.
LENGTH = 1024


class Use(NamedTuple):
    """A pairwise form that kernels compute, and the call of a variant that has it."""

    variant: str
    params: dict[str, Any]
    form: attnzoo.Pairwise

    @property
    def name(self) -> str:
        return self.form.activation.name

    @property
    def kind(self) -> str:
        """How it normalizes, as the kernels have it; "family": a threshold, α for each query."""
        from attnzoo.backends.triton.flash.backend import normalize

        return "family" if self.form.shape is not None else normalize(self.form)

    @property
    def plain(self) -> bool:
        """It has a gain for each query, as the cells have, and nothing that they have not."""
        return isinstance(self.form.gain, torch.Tensor) and self.form.sink is None


def uses(variants: Iterable[str]) -> list[Use]:
    """With their defaults, and with a tensor for each parameter that may be one: that is how a
    variant comes to a form with a shape for each query."""
    found = []
    x = torch.empty(1, 1, 1, 1)
    for name in variants:
        numbers = complete(VariantCall(name), LENGTH).params
        tensors = {
            p.name: torch.tensor(float(p.default))
            for p in attnzoo.get_variant(name).params
            if p.kind not in ("int", "float", "bool") and isinstance(p.default, (int, float))
        }
        for params in (numbers, {**numbers, **tensors}):
            try:
                plan = attnzoo.explain(x, x, x, name, is_causal=True, **params)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{name} has no form to compile: {error}") from error
            for form in (candidate.form for candidate in plan.candidates):
                if not isinstance(form, attnzoo.Pairwise) or form.normalize == "select":
                    continue
                if form.activation.triton is not None:
                    found.append(Use(name, params, form))
    return found


@cache
def _of_all(variants: tuple[str, ...]) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for use in sorted(uses(variants), key=lambda use: not use.plain):
        first = found.setdefault(use.name, use)
        if first.form.activation.triton != use.form.activation.triton:
            raise UsageError(
                f"{first.variant} and {use.variant} have different activations of the name "
                f"{use.name!r}"
            )
    return found


def activations() -> dict[str, Use]:
    """Of all registered variants by name; of several uses one that is plain."""
    return _of_all(tuple(attnzoo.list_variants()))


def kinds() -> dict[str, str]:
    """One activation's name for each way to normalize."""
    found: dict[str, str] = {}
    for name, use in activations().items():
        found.setdefault(use.kind, name)
    return found


def of_plugin(path: Path) -> list[str]:
    """The names of the plugin's own activations.

    Raises:
        UsageError: it has none with a Triton function.
    """
    found = uses(load_plugin(path).variants)
    own = [use.name for use in found if not str(use.form.activation.triton).startswith("attnzoo.")]
    if not own:
        raise UsageError(f"--plugin {path} has no activation of its own with a Triton function")
    return list(dict.fromkeys(own))
