"""Lets Triton 3.6's interpreter run with numpy 2.4 and newer."""

from __future__ import annotations

from typing import Any


def index_by_item(original: Any) -> Any:
    """A replacement for ``_patch_lang_tensor``, with which a loaded number may be a bound of range.

    Triton 3.6 converts its array, which has one dimension, with int(). numpy warns, and from 2.4 on
    raises.
    """

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def support_numpy() -> None:
    """Make the replacement, until the process ends."""
    from triton.runtime import interpreter

    interpreter._patch_lang_tensor = index_by_item(interpreter._patch_lang_tensor)
