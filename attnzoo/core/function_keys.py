"""Strings that stand for functions of a form, because operators of torch take no Python objects."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain, count
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from attnzoo.core.checks import check_callable, check_type, shown

ACTIVATIONS: WeakValueDictionary[str, Any] = WeakValueDictionary()
DISTANCES: WeakValueDictionary[str, Any] = WeakValueDictionary()
LOCK = Lock()  # two threads must not choose the same key


class Keyed:
    """Base of the dataclasses of activations and distances."""

    name: str
    of_kernels: Any
    _key: str | None = None

    @property
    def key(self) -> str:
        """The string: the name, with a number if another object has the same name."""
        if self._key is None:
            raise TypeError(
                f"under torch.compile and torch.export {type(self).__name__} {self.name!r} must be "
                "created before the call, for example at the top of a module, not in the "
                "variant's forms()"
            )
        return self._key

    def _check_fields(
        self, *, required: tuple[str, ...] = (), optional: tuple[str, ...], triton: tuple[str, ...]
    ) -> None:
        """Raise unless the fields are functions, those in ``triton`` names of functions."""
        kind = type(self).__name__
        check_type(f"name of {kind}", self.name, str)
        for field in (*required, *optional):
            what = f"{kind.lower()} {self.name!r}: {field}"
            check_callable(what, getattr(self, field), field in optional)
        for field in triton:
            path = getattr(self, field)
            if path is not None and not isinstance(path, str):
                raise TypeError(
                    f"{kind.lower()} {self.name!r}: {field} must be 'module:name' or None, got "
                    f"{shown(path)}"
                )

    def _register(self, known: WeakValueDictionary[str, Any]) -> None:
        """Choose the key and add the object to ``known`` under it.

        An object that is created while the compiler traces exists in the graph only, and cannot be
        registered.
        """
        if torch.compiler.is_compiling():
            return
        numbered = (f"{self.name}#{number}" for number in count(2))
        with LOCK:
            key = next(key for key in chain([self.name], numbered) if key not in known)
            known[key] = self
        object.__setattr__(self, "_key", key)  # the dataclasses are frozen

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is created by its class, so that it gets another key.
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return type(self), tuple(values)
