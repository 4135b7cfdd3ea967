"""Strings that stand for functions of a form, because operators of torch take no Python objects."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

ACTIVATIONS: WeakValueDictionary[str, Any] = WeakValueDictionary()
DISTANCES: WeakValueDictionary[str, Any] = WeakValueDictionary()


def key_of(activation: Any) -> str:
    """Return a string for the activation: its key in `ACTIVATIONS`.

    The key is the activation's name. If another activation has the same name, a number is added.
    """
    return _key_of(activation, ACTIVATIONS, "an Activation")


def key_of_distance(distance: Any) -> str:
    """Return a string for the distance function: its key in `DISTANCES`."""
    return _key_of(distance, DISTANCES, "a Distance")


def _key_of(thing: Any, known: WeakValueDictionary[str, Any], kind: str) -> str:
    # torch.compile passes a placeholder for an object that is created in the compiled function.
    if not hasattr(thing, "name"):
        raise TypeError(
            f"under torch.compile {kind} must be created before the call, for example at the top "
            "of a module, not in the variant's forms()"
        )
    for number in count(1):
        key = thing.name if number == 1 else f"{thing.name}#{number}"
        if known.setdefault(key, thing) is thing:
            return key
    raise AssertionError("count() does not end")


# With this flag the compiler calls the function while it traces, and treats the result as a
# constant. torch.compiler.assume_constant_result sets the same flag, but would import the compiler.
key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
key_of_distance._dynamo_marked_constant = True  # type: ignore[attr-defined]
