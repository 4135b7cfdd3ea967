"""The activations that kernels are compiled with, from the forms of all registered variants."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, complete, load_plugin

# Number of keys for which example parameters are computed
LENGTH = 1024


class VariantForm(NamedTuple):
    """A pairwise form with a Triton activation, and the variant and parameters it comes from."""

    variant: str
    params: dict[str, Any]
    form: attnzoo.Pairwise

    @property
    def name(self) -> str:
        """The name of the activation. exp with a selection has other kernels, and another name."""
        name, selects = self.form.activation.name, self.form.normalize == "select"
        return f"{name}-{self.kind}" if selects else name

    @property
    def kind(self) -> str:
        """The kernels' name for the normalization, or a name for a kind of φ that has it.

        "family": a threshold with per-query α. "factor", "factor-family": no normalization, but a
        factor per query; "factor-masked": φ(−∞) is not 0 then, so that φ is masked. "shifted": φ is
        relative to the maximum. "vanishing-sum": φ(−∞) = 0, so that φ is not masked. "mass": a
        selection by weight.
        """
        normalize = "online" if self.form.softmax else self.form.normalize
        family = self.form.shape is not None
        if self.form.factor is not None:
            masked = not self.form.activation.vanishes
            return "factor-family" if family else "factor-masked" if masked else "factor"
        if self.form.activation.shifted:
            return "shifted"
        if self.form.mass is not None:
            return "mass"
        if normalize == "sum" and self.form.activation.vanishes:
            return "vanishing-sum"
        return "family" if family else normalize

    @property
    def plain(self) -> bool:
        """Whether the form has a per-query gain and no sink, as most compiled calls do."""
        return isinstance(self.form.gain, torch.Tensor) and self.form.sink is None


def variant_forms(variants: Iterable[str]) -> list[VariantForm]:
    """The variants' forms with a Triton activation: once for numbers, once for tensor parameters.

    In the form, a tensor parameter becomes a per-query vector, such as ``gain`` or ``shape``.
    """
    forms = []
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
                raise UsageError(f"cannot compile a form of {name}: {error}") from error
            for form in (candidate.form for candidate in plan.candidates):
                if isinstance(form, attnzoo.Pairwise) and form.activation.triton is not None:
                    forms.append(VariantForm(name, params, form))
    return forms


@cache
def _by_name(variants: tuple[str, ...]) -> dict[str, VariantForm]:
    by_name: dict[str, VariantForm] = {}
    for source in variant_forms(variants):
        first = by_name.setdefault(source.name, source)
        if source.plain and not first.plain and source.kind == first.kind:
            by_name[source.name] = source
        if first.form.activation.triton != source.form.activation.triton:
            raise UsageError(
                f"activation names must be unique, but {first.variant} and {source.variant} have "
                f"different activations named {source.name!r}"
            )
    return by_name


def activations() -> dict[str, VariantForm]:
    """One form per activation of the registered variants, by activation name.

    If several forms of a kind share an activation, one that is `plain` is preferred.
    """
    return _by_name(tuple(attnzoo.list_variants()))


def kinds() -> dict[str, str]:
    """A dict from each `VariantForm.kind` to the name of one activation of that kind."""
    names: dict[str, str] = {}
    for name, source in activations().items():
        names.setdefault(source.kind, name)
    return names


@cache
def distance() -> attnzoo.Distance:
    """The first `Distance` with Triton functions among the forms of the registered variants."""
    forms = (source.form for source in variant_forms(attnzoo.list_variants()))
    distances = (form.distance for form in forms if form.distance is not None)
    return next(x for x in distances if x.triton is not None and x.triton_slope is not None)


def plugin_activations(path: Path) -> list[str]:
    """The names of the activations that only variants of the plugin use.

    Raises:
        UsageError: no variant of the plugin has such an activation with a Triton function.
    """
    variants = load_plugin(path).variants
    others = variant_forms(name for name in attnzoo.list_variants() if name not in variants)
    shipped = {source.form.activation.triton for source in others}
    new = [x.name for x in variant_forms(variants) if x.form.activation.triton not in shipped]
    if not new:
        raise UsageError(
            f"--plugin {path} must register a variant with an activation of its own that has a "
            "Triton function"
        )
    return list(dict.fromkeys(new))
