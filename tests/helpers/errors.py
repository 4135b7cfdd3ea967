"""Tests made from tables of calls that must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# (call, error, pattern of its message)
WrongCalls = list[tuple[Callable[[], Any], type[Exception], str]]


def raising(wrong: WrongCalls) -> Callable[..., None]:
    """A test with one case per call."""

    @pytest.mark.parametrize(("call", "error", "message"), wrong, ids=[x[2][:45] for x in wrong])
    def test(call: Callable[[], Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            call()

    return test
