"""What a cell is: a variant's spec, a seed, a length and settings; its text, identity and checks.

A spec is ``a(x=1)`` (train and test with a) or ``a->b(x=1)`` (train with a, test with b).
A cell's key is a hash of everything that its figures depend on, so that a run which was killed
finds its rows again and a changed setting never finds those of another.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import attnzoo

Value = int | float | bool | str | None


class Refused(ValueError):
    """A setting that cannot be run; its text is the one line which the user reads."""


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
        """Name and parameters, the defaults included: a changed default is another cell."""
        defaults = {p.name: repr(p.default) for p in attnzoo.get_variant(self.name).params}
        given = {name: repr(value) for name, value in self.arguments}
        return {"name": self.name, "params": defaults | given, "given": sorted(given)}


@dataclass(frozen=True)
class Spec:
    """Train with one variant, test with the same or another."""

    train: VariantCall
    test: VariantCall

    @property
    def is_swap(self) -> bool:
        return self.train != self.test

    def __str__(self) -> str:
        return f"{self.train}->{self.test}" if self.is_swap else str(self.train)


@dataclass(frozen=True)
class Preset:
    """Variants, seeds, lengths and settings under one name."""

    variants: tuple[str, ...]
    seeds: int
    lengths: tuple[int, ...]
    settings: Any
    note: str


class Settings(Protocol):
    """What the identity of a cell needs of a task's settings."""

    def training_identity(self) -> dict[str, object]: ...

    def evaluation_identity(self, length: int) -> dict[str, object]: ...


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
        raise Refused(f"cannot read variant {whole!r}: expected name or name(x=1)") from None
    if isinstance(tree, ast.Name):
        return VariantCall(tree.id)
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        raise Refused(f"cannot read variant {whole!r}: expected name, name(x=1) or a->b(x=1)")
    arguments = []
    for keyword in tree.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            value = ...
        if keyword.arg is None or not isinstance(value, Value):
            raise Refused(
                f"cannot read variant {whole!r}: the value of {keyword.arg or '**'} must be a "
                "number, True, False, None or a quoted string"
            )
        if keyword.arg in dict(arguments):
            raise Refused(f"cannot read variant {whole!r}: {keyword.arg} is given twice")
        arguments.append((keyword.arg, value))
    return VariantCall(tree.func.id, tuple(sorted(arguments)))


def parse_spec(text: str) -> Spec:
    """The spec that a text names.

    >>> spec = parse_spec("softmax->log_n(train_length=16)")
    >>> spec.train.name, spec.test.params
    ('softmax', {'train_length': 16})
    """
    parts = text.split("->")
    if len(parts) > 2 or not all(part.strip() for part in parts):
        raise Refused(f"cannot read variant {text!r}: expected name, name(x=1) or a->b(x=1)")
    calls = [_parse_call(part, text) for part in parts]
    return Spec(calls[0], calls[-1])


def parse_specs(texts: list[str]) -> list[Spec]:
    """Specs in their order; the same one twice is refused."""
    specs = [parse_spec(text) for text in texts]
    for i, spec in enumerate(specs):
        if spec in specs[:i]:
            raise Refused(f"variant {spec} is listed twice")
    return specs


# -------------------------------------------------------------------------------------- checks


def check_spec(spec: Spec, lengths: list[int], head_dim: int, scale: float) -> None:
    """Refuse what attnzoo would refuse, by one small call per length before anything is trained."""
    for variant in dict.fromkeys((spec.train, spec.test)):
        try:
            module = attnzoo.nn.Attention(variant.name, 1, **variant.params)
            for length in lengths:
                q, k = torch.ones(1, 1, 1, head_dim), torch.ones(1, 1, length, head_dim)
                with torch.no_grad():
                    module(q, k, k, scale=scale)
        except (ValueError, TypeError, RuntimeError) as error:
            if is_out_of_memory(error):
                continue  # that is a row which says so, not a setting without a meaning
            raise Refused(f"variant {spec}: {error}") from error


# ------------------------------------------------------------------------------------ identity


def key_of(identity: Mapping[str, object]) -> str:
    """Twenty hex digits of the SHA-256 of an identity's canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Study:
    """One run's cells: specs, seeds, lengths and what all of them share.

    plugins maps the names of variants that a plugin registered to a hash of its file: another file
    is another variant.
    """

    task: str
    specs: tuple[Spec, ...]
    seeds: int
    lengths: tuple[int, ...]
    settings: Any
    device: str = "cpu"
    plugins: Mapping[str, str] | None = None

    def _variant(self, variant: VariantCall) -> dict[str, object]:
        identity = variant.identity()
        if self.plugins and variant.name in self.plugins:
            identity["plugin"] = self.plugins[variant.name]
        return identity

    def training_key(self, variant: VariantCall, seed: int) -> str:
        """The key of one training; all swaps of it share it."""
        shared = self.settings.training_identity() | {"device": self.device.split(":")[0]}
        return key_of(shared | {"train": self._variant(variant), "seed": seed})

    def row_key(self, spec: Spec, seed: int, length: int) -> str:
        """The key of one row."""
        return key_of(
            {
                "training": self.training_key(spec.train, seed),
                "test": self._variant(spec.test),
                **self.settings.evaluation_identity(length),
            }
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
