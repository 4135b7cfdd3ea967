"""Variants on the command line, and plugins that register more.

A spec is ``a(x=1)`` (train and evaluate with a) or ``a->b(x=1)`` (train with a, evaluate with b).
A variant may have a wrapper of `attnzoo.nn`, as in ``mixture(a(x=1), components=3)``. A value may
be a tuple with one number per head, as in ``a(x=(1, 0))``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import attnzoo
from attnzoo.nn import WRAPPERS
from commandline.errors import UsageError

Value = int | float | bool | str | None | tuple[float, ...]
Arguments = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class VariantCall:
    """A variant with its parameters, as in ``log_n(train_length=16)``.

    wrapper: the name of a wrapper of `attnzoo.nn` and its arguments, or None.
    """

    name: str
    arguments: Arguments = ()
    wrapper: tuple[str, Arguments] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters; values per head are tensors."""
        return {
            name: torch.tensor(value, dtype=torch.float32) if isinstance(value, tuple) else value
            for name, value in self.arguments
        }

    @property
    def heads(self) -> int | None:
        """The number of heads for which there are values; None if all are single values."""
        sizes = [len(value) for _, value in self.arguments if isinstance(value, tuple)]
        return max(sizes, default=None)

    @property
    def wrapper_choice(self) -> tuple[str, dict[str, Any]] | None:
        """The wrapper in the form that the layers of `attnzoo.nn` accept."""
        return None if self.wrapper is None else (self.wrapper[0], dict(self.wrapper[1]))

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        text = f"{self.name}({inside})" if inside else self.name
        if self.wrapper is None:
            return text
        name, arguments = self.wrapper
        return f"{name}({', '.join([text, *(f'{key}={x!r}' for key, x in arguments)])})"

    def identity(self) -> dict[str, object]:
        """The name and the parameters as a dict, for the keys under which results are stored.

        Default values are included, because a later version may change them.
        """
        defaults = {p.name: repr(p.default) for p in attnzoo.get_variant(self.name).params}
        passed = {name: repr(value) for name, value in self.arguments}
        call = {"name": self.name, "params": defaults | passed, "given": sorted(passed)}
        if self.wrapper is None:
            return call
        name, arguments = self.wrapper
        values = {**WRAPPERS[name].own_arguments(), **dict(arguments)}
        return {**call, "wrapper": name, "wrapper_params": {n: repr(x) for n, x in values.items()}}


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


def _parse_call(text: str, spec: str, wrappers: bool) -> VariantCall:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise UsageError(f"cannot read variant {spec!r}: expected name or name(x=1)") from None
    return _read_call(tree, spec, wrappers)


def _read_call(tree: ast.expr, spec: str, wrappers: bool) -> VariantCall:
    if isinstance(tree, ast.Name):
        if wrappers and tree.id in WRAPPERS:
            raise UsageError(
                f"cannot read variant {spec!r}: {tree.id} is a wrapper and needs a variant, as in "
                f"{tree.id}(softmax)"
            )
        return VariantCall(tree.id)
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise UsageError(f"cannot read variant {spec!r}: expected name, name(x=1) or a->b(x=1)")
    name, arguments = tree.func.id, _read_arguments(tree, spec)
    if not wrappers or name not in WRAPPERS:
        if tree.args:
            hint = f"wrappers are {', '.join(WRAPPERS)}"
            raise UsageError(
                f"cannot read variant {spec!r}: parameters of {name} must have names, as in "
                f"{name}(x=1); {hint if wrappers else 'this command does not support wrappers'}"
            )
        return VariantCall(name, arguments)
    if len(tree.args) != 1 or isinstance(tree.args[0], ast.Constant):
        raise UsageError(
            f"cannot read variant {spec!r}: {name} needs one variant, as in {name}(softmax)"
        )
    inner = _read_call(tree.args[0], spec, wrappers)
    if inner.wrapper is not None:
        raise UsageError(f"cannot read variant {spec!r}: a wrapper cannot have a wrapper")
    possible = WRAPPERS[name].own_arguments()
    for argument, _ in arguments:
        if argument not in possible:
            known = ", ".join(possible) or "none"
            raise UsageError(
                f"cannot read variant {spec!r}: {name} has no argument {argument}; it has: {known}"
            )
    return replace(inner, wrapper=(name, arguments))


def _read_arguments(tree: ast.Call, spec: str) -> Arguments:
    arguments: list[tuple[str, Value]] = []
    for keyword in tree.keywords:
        value: Any
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            value = ...
        if keyword.arg is None or not _is_value(value):
            raise UsageError(
                f"cannot read variant {spec!r}: the value of {keyword.arg or '**'} must be a "
                "number, True, False, None, a quoted string, or a tuple of numbers"
            )
        if keyword.arg in dict(arguments):
            raise UsageError(f"cannot read variant {spec!r}: {keyword.arg} is given twice")
        arguments.append((keyword.arg, value))
    return tuple(sorted(arguments))


def _is_value(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) > 0 and all(type(x) in (int, float) for x in value)
    return value is None or isinstance(value, (int, float, bool, str))


def parse_spec(text: str, wrappers: bool = False) -> Spec:
    """Read one spec. With ``wrappers`` a variant may have a wrapper.

    >>> spec = parse_spec("softmax->log_n(train_length=16)")
    >>> spec.train.name, spec.test.params
    ('softmax', {'train_length': 16})
    >>> print(parse_spec("mixture(ssmax(s=0.4), components=3)", wrappers=True))
    mixture(ssmax(s=0.4), components=3)
    """
    parts = text.split("->")
    if len(parts) > 2 or not all(part.strip() for part in parts):
        raise UsageError(f"cannot read variant {text!r}: expected name, name(x=1) or a->b(x=1)")
    calls = [_parse_call(part, text, wrappers) for part in parts]
    spec = Spec(calls[0], calls[-1])
    if spec.train.wrapper != spec.test.wrapper:
        raise UsageError(f"variant {text!r}: a and b of a->b must have the same wrapper")
    return spec


def parse_specs(texts: list[str], wrappers: bool = False) -> list[Spec]:
    """Read several specs, as by `parse_spec`. A repeated spec is an error."""
    specs = [parse_spec(text, wrappers) for text in texts]
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
    definition = attnzoo.get_variant(variant.name)
    example = {} if definition.example is None else definition.example(longest)
    missing = {
        param.name: example[param.name]
        for param in definition.params
        if param.default is attnzoo.REQUIRED
        and param.name in example
        and param.name not in dict(variant.arguments)
    }
    arguments = tuple(sorted((dict(variant.arguments) | missing).items()))
    return replace(variant, arguments=arguments)


def names() -> list[str]:
    """The registered variants: softmax, then the others in alphabetical order."""
    return sorted(attnzoo.list_variants(), key=lambda name: (name != "softmax", name))


def every_variant(train_length: int) -> list[str]:
    """A spec of each registered variant: trained, or substituted into a model trained with softmax
    if it is meant for inference only."""
    return [_default_spec(name, train_length) for name in names()]


def _default_spec(name: str, train_length: int) -> str:
    definition = attnzoo.get_variant(name)
    if not definition.inference_only:
        return name
    example = {} if definition.example is None else definition.example(train_length)
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
