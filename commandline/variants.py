"""Variants on the command line, and plugins that register more.

A spec is ``a(x=1)`` (train and evaluate with a) or ``a->b(x=1)`` (train with a, evaluate with b).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnzoo
from commandline.errors import UsageError

Value = int | float | bool | str | None


@dataclass(frozen=True)
class VariantCall:
    """A variant with its parameters, as in ``log_n(train_length=16)``."""

    name: str
    arguments: tuple[tuple[str, Value], ...] = ()

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.arguments)

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.name}({inside})" if inside else self.name

    def identity(self) -> dict[str, object]:
        """The name and the parameters as a dict, for the keys under which results are stored.

        Default values are included, because a later version may change them.
        """
        defaults = {p.name: repr(p.default) for p in attnzoo.get_variant(self.name).params}
        given = {name: repr(value) for name, value in self.arguments}
        return {"name": self.name, "params": defaults | given, "given": sorted(given)}


@dataclass(frozen=True)
class Spec:
    """The variant to train with, and the variant to evaluate with."""

    train: VariantCall
    test: VariantCall

    @property
    def is_substitution(self) -> bool:
        return self.train != self.test

    def __str__(self) -> str:
        return f"{self.train}->{self.test}" if self.is_substitution else str(self.train)


# ------------------------------------------------------------------------------------- parsing


def split_list(text: str) -> list[str]:
    """Split at the commas outside parentheses.

    >>> split_list("softmax, ssmax(s=0.4, b=1)")
    ['softmax', 'ssmax(s=0.4, b=1)']
    """
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def _parse_call(text: str, whole: str) -> VariantCall:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise UsageError(f"cannot read variant {whole!r}: expected name or name(x=1)") from None
    if isinstance(tree, ast.Name):
        return VariantCall(tree.id)
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        raise UsageError(f"cannot read variant {whole!r}: expected name, name(x=1) or a->b(x=1)")
    arguments = []
    for keyword in tree.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            value = ...
        if keyword.arg is None or not isinstance(value, Value):
            raise UsageError(
                f"cannot read variant {whole!r}: the value of {keyword.arg or '**'} must be a "
                "number, True, False, None or a quoted string"
            )
        if keyword.arg in dict(arguments):
            raise UsageError(f"cannot read variant {whole!r}: {keyword.arg} is given twice")
        arguments.append((keyword.arg, value))
    return VariantCall(tree.func.id, tuple(sorted(arguments)))


def parse_spec(text: str) -> Spec:
    """Read one spec.

    >>> spec = parse_spec("softmax->log_n(train_length=16)")
    >>> spec.train.name, spec.test.params
    ('softmax', {'train_length': 16})
    """
    parts = text.split("->")
    if len(parts) > 2 or not all(part.strip() for part in parts):
        raise UsageError(f"cannot read variant {text!r}: expected name, name(x=1) or a->b(x=1)")
    calls = [_parse_call(part, text) for part in parts]
    return Spec(calls[0], calls[-1])


def parse_specs(texts: list[str]) -> list[Spec]:
    """Read several specs. A repeated spec is an error."""
    specs = [parse_spec(text) for text in texts]
    for i, spec in enumerate(specs):
        if spec in specs[:i]:
            raise UsageError(f"variant {spec} is listed twice")
    return specs


# ---------------------------------------------------------------------------------- defaults


def complete(variant: VariantCall, longest: int) -> VariantCall:
    """The variant with example values for required parameters that were not given.

    longest: the number of keys from which the example values are computed. It must not depend on
    the eval lengths of a run, so that runs with different eval lengths share one trained model.
    """
    if variant.name not in attnzoo.list_variants():
        return variant  # `plan_study` raises the error for an unknown name
    found = attnzoo.get_variant(variant.name)
    example = {} if found.example is None else found.example(longest)
    missing = {
        param.name: example[param.name]
        for param in found.params
        if param.default is attnzoo.REQUIRED
        and param.name in example
        and param.name not in variant.params
    }
    return VariantCall(variant.name, tuple(sorted((variant.params | missing).items())))


def names() -> list[str]:
    """The registered variants: softmax, then the others in alphabetical order."""
    return sorted(attnzoo.list_variants(), key=lambda name: (name != "softmax", name))


def every_variant(train_length: int) -> list[str]:
    """A spec of each registered variant: trained, or substituted into a model trained with softmax
    if it is meant for inference only."""
    return [_default_spec(name, train_length) for name in names()]


def _default_spec(name: str, train_length: int) -> str:
    found = attnzoo.get_variant(name)
    if not found.inference_only:
        return name
    example = {} if found.example is None else found.example(train_length)
    return f"softmax->{VariantCall(name, tuple(sorted(example.items())))}"


# ------------------------------------------------------------------------------------- plugins


def load_plugin(path: Path, need_variant: bool = True) -> attnzoo.Plugin:
    """Load the file given as ``--plugin FILE.py``.

    Raises:
        UsageError: the file cannot be loaded, or ``need_variant`` is true and the file registers no
            variant.
    """
    try:
        plugin = attnzoo.load_plugin(path)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if need_variant and not plugin.variants:
        raise UsageError(f"--plugin {path} registered no variant")
    return plugin
