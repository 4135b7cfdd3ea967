"""Variants on the command line, and plugins that register more.

A spec is ``a(x=1)`` (train and evaluate with a) or ``a->b(x=1)`` (train with a, evaluate with b).
A variant may have a wrapper of `attnzoo.nn`, as in ``mixture(a(x=1), components=3)``. A value may
be a tuple with one number per head, as in ``a(x=(1, 0))``. ``a=>b`` trains with a, and with b in
the last part of the training.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

import attnzoo
from attnzoo.nn import WRAPPERS
from commandline.errors import UsageError

EXPECTED = "expected name, name(x=1), a->b(x=1) or a=>b(x=1)"
Value = int | float | bool | str | None | tuple[float, ...]
Arguments = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class VariantCall:
    """A variant with its parameters, as in ``log_n(train_length=16)``.

    wrapper: the name of a wrapper of `attnzoo.nn` and its arguments, or None. before: the variant
    with which the training starts, if it is another one.
    """

    name: str
    arguments: Arguments = ()
    wrapper: tuple[str, Arguments] | None = None
    before: VariantCall | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The parameters; values per head are tensors.

        A variant that replaces another one in training starts where it equals softmax, if there are
        such parameters and none of them is given.
        """
        start = {} if self.before is None else identity_of(attnzoo.get_variant(self.name)) or {}
        if start.keys() & dict(self.arguments).keys():
            start = {}
        return start | {
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
        text = _written(self.name, self.arguments)
        text = text if self.wrapper is None else _written(*self.wrapper, text)
        return text if self.before is None else f"{self.before}=>{text}"

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


def identity_of(variant: attnzoo.Variant) -> dict[str, Any] | None:
    """The parameters with which a variant equals softmax and can be trained; None if there are
    none. A parameter that layers project from the tokens has no such value.
    """
    projected = {param.name for param in variant.params if param.projection}
    return None if projected & set(variant.identity or ()) else variant.identity


def _written(name: str, arguments: Arguments, *first: str) -> str:
    inside = ", ".join([*first, *(f"{key}={value!r}" for key, value in arguments)])
    return f"{name}({inside})" if inside else name


@dataclass(frozen=True)
class Spec:
    """The variant to train with, and the variant to evaluate with."""

    train: VariantCall
    test: VariantCall

    @property
    def is_substitution(self) -> bool:
        return self.train != self.test

    @property
    def calls(self) -> list[VariantCall]:
        """The different variants of the spec."""
        calls = [self.train.before, self.train, self.test]
        return list(dict.fromkeys(call for call in calls if call is not None))

    def __str__(self) -> str:
        return f"{self.train}->{self.test}" if self.is_substitution else str(self.train)


def split_list(text: str) -> list[str]:
    """Split at the commas outside parentheses.

    >>> split_list("softmax, ssmax(s=0.4, b=1)")
    ['softmax', 'ssmax(s=0.4, b=1)']
    """
    parts: list[str] = []
    depth = 0
    for piece in text.split(","):
        if depth == 0:
            parts.append(piece)
        else:
            parts[-1] += f",{piece}"
        depth += piece.count("(") - piece.count(")")
    return [part.strip() for part in parts]


def parse_spec(text: str, wrappers: bool = False) -> Spec:
    """Read one spec. With ``wrappers`` a variant may have a wrapper, and a=>b is allowed.

    >>> spec = parse_spec("softmax->log_n(train_length=16)")
    >>> spec.train.name, spec.test.params
    ('softmax', {'train_length': 16})
    >>> print(parse_spec("mixture(ssmax(s=0.4), components=3)", wrappers=True))
    mixture(ssmax(s=0.4), components=3)
    """
    try:
        parts = text.split("->", 2)
        stages = parts[0].split("=>", 2)
        if len(parts) > 2 or len(stages) > 2:
            raise ValueError(EXPECTED)
        if len(stages) == 2 and not wrappers:
            raise ValueError("this command does not support a=>b")
        texts = [*stages, *parts[1:]]
        calls = [_call(ast.parse(part.strip(), mode="eval").body, wrappers) for part in texts]
        for call, arrow in zip(calls[1:], ["=>"] * (len(stages) - 1) + ["->"]):
            if call.wrapper != calls[0].wrapper:
                raise ValueError(f"a and b of a{arrow}b must have the same wrapper")
        trained = calls[len(stages) - 1]
        if len(stages) == 2:
            trained = replace(trained, before=calls[0])
    except SyntaxError:
        raise UsageError(f"cannot read variant {text!r}: {EXPECTED}") from None
    except ValueError as error:
        raise UsageError(f"cannot read variant {text!r}: {error}") from None
    return Spec(trained, calls[-1] if len(parts) == 2 else trained)


def parse_specs(texts: list[str], wrappers: bool = False) -> list[Spec]:
    """Read several specs, as by `parse_spec`. A repeated spec is an error."""
    specs = [parse_spec(text, wrappers) for text in texts]
    for i, spec in enumerate(specs):
        if spec in specs[:i]:
            raise UsageError(f"variant {spec} is listed twice")
    return specs


def _call(tree: ast.expr, wrappers: bool) -> VariantCall:
    """The variant of an expression; raises ValueError if it is none."""
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(EXPECTED)
    name, arguments = call.func.id, _arguments(call.keywords)
    if not wrappers or name not in WRAPPERS:
        if call.args:
            hint = f"wrappers are {', '.join(WRAPPERS)}"
            raise ValueError(
                f"parameters of {name} must have names, as in {name}(x=1); "
                f"{hint if wrappers else 'this command does not support wrappers'}"
            )
        return VariantCall(name, arguments)
    if len(call.args) != 1:
        raise ValueError(f"{name} is a wrapper and needs one variant, as in {name}(softmax)")
    inner = _call(call.args[0], wrappers)
    if inner.wrapper is not None:
        raise ValueError("a wrapper cannot have a wrapper")
    possible = WRAPPERS[name].own_arguments()
    for argument, _ in arguments:
        if argument not in possible:
            known = ", ".join(possible) or "none"
            raise ValueError(f"{name} has no argument {argument}; it has: {known}")
    return replace(inner, wrapper=(name, arguments))


def _arguments(keywords: list[ast.keyword]) -> Arguments:
    arguments: dict[str, Value] = {}
    for keyword in keywords:
        value: Any
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            value = ...
        if keyword.arg is None or not _is_value(value):
            raise ValueError(
                f"the value of {keyword.arg or '**'} must be a number, True, False, None, "
                "a quoted string, or a tuple of numbers"
            )
        if keyword.arg in arguments:
            raise ValueError(f"{keyword.arg} is given twice")
        arguments[keyword.arg] = value
    return tuple(sorted(arguments.items()))


def _is_value(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) > 0 and all(type(x) in (int, float) for x in value)
    return value is None or isinstance(value, (int, float, str))


def complete(variant: VariantCall, longest: int) -> VariantCall:
    """The variant with example values for required parameters that were not given.

    longest: the number of keys from which the example values are computed. It must not depend on
    the eval lengths of a run, so that runs with different eval lengths share one trained model.
    """
    if variant.before is not None:
        variant = replace(variant, before=complete(variant.before, longest))
    if variant.name not in attnzoo.list_variants():
        return variant  # `plan_study` raises the error for an unknown name
    example = _example(variant.name, longest)
    params = attnzoo.get_variant(variant.name).params
    required = {param.name for param in params if param.default is attnzoo.REQUIRED}
    values = {name: value for name, value in example.items() if name in required}
    return replace(variant, arguments=tuple(sorted((values | dict(variant.arguments)).items())))


def _example(name: str, keys: int) -> dict[str, Any]:
    example = attnzoo.get_variant(name).example
    return {} if example is None else example(keys)


def names() -> list[str]:
    """The registered variants: softmax, then the others in alphabetical order."""
    return sorted(attnzoo.list_variants(), key=lambda name: (name != "softmax", name))


def unknown(name: str) -> str | None:
    """The reason why a name on the command line is no registered variant, or None.

    It suggests the closest name, also by the names that a variant has in papers.
    """
    by_word = {alias: one for one in names() for alias in attnzoo.get_variant(one).aliases}
    by_word |= {one: one for one in names()}
    if by_word.get(name) == name:
        return None
    plugin = "--plugin FILE.py loads your own variant"
    if close := get_close_matches(name, by_word, 1):
        return f"unknown variant {name!r}; did you mean {by_word[close[0]]!r}? {plugin}"
    return f"unknown variant {name!r}; known: {', '.join(names())}; {plugin}"


def every_variant(train_length: int) -> list[str]:
    """A spec of each registered variant: trained, or substituted into a model trained with softmax
    if it is meant for inference only."""
    specs = {name: name for name in names()}
    for name in specs:
        if attnzoo.get_variant(name).inference_only:
            example = VariantCall(name, tuple(sorted(_example(name, train_length).items())))
            specs[name] = f"softmax->{example}"
    return list(specs.values())


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
