"""How an operator is registered that also runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator ``attnzoo::name`` of all devices.

    As torch.library.custom_op does, whose first call imports the compiler, and Triton with it.
    """

    def register(function: Callable[..., Any]) -> Any:
        qualified = f"attnzoo::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", function)
        return getattr(torch.ops.attnzoo, name).default

    return register
