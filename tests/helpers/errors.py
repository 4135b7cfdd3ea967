"""Tests made from tables of calls that must raise, and the names that parameters may not have."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
from torch import nn

# (call, error, pattern of its message)
WrongCalls = list[tuple[Callable[[], Any], type[Exception], str]]


def raising(wrong: WrongCalls) -> Callable[..., None]:
    """A test with one case per call."""

    @pytest.mark.parametrize(("call", "error", "message"), wrong, ids=[x[2][:45] for x in wrong])
    def test(call: Callable[[], Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            call()

    return test


def names_beside_parameters(package: ModuleType) -> set[str]:
    """Arguments of functions, constructors and forwards that also accept parameters of a variant.

    Keywords of that name would not reach the variant. ``**kwargs`` are those of other libraries.
    """
    public = [x for name in package.__all__ if callable(x := getattr(package, name))]
    modules = [x for x in public if isinstance(x, type) and issubclass(x, nn.Module)]
    names: set[str] = set()
    for function in (*public, *(module.forward for module in modules)):
        parameters = signature(function).parameters.values()
        named = {x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
        if {x.name for x in parameters if x.kind is x.VAR_KEYWORD} - {"kwargs"}:
            names |= named
    return names
