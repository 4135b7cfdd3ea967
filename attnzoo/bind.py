"""The parameters of a variant, checked and turned into what definitions and forms take.

A "row" parameter becomes a Python float, or a tensor in the call's dtype that broadcasts to
(B, H, Nq); a setting stays what it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnzoo.call import Call
from attnzoo.checks import is_number
from attnzoo.forms import REQUIRED, Param, Variant


def bind(variant: Variant, call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """All parameters of the variant for this call."""
    known = [param.name for param in variant.params]
    for name in given:
        if name not in known:
            allowed = ", ".join(known) if known else "none"
            raise TypeError(
                f"variant {variant.name!r} has no parameter {name!r}; it has: {allowed}"
            )
    bound = {}
    for param in variant.params:
        value = given.get(param.name, param.default)
        if value is REQUIRED:
            raise TypeError(
                f"variant {variant.name!r} requires the parameter {param.name!r}: {param.doc}"
            )
        bound[param.name] = _bind_one(f"{variant.name}'s {param.name}", param, value, call)
    return bound


def check_value(what: str, param: Param, value: Any) -> Any:
    """A number or bool for the parameter, or an error."""
    if param.kind == "bool":
        if not isinstance(value, bool):
            raise TypeError(f"{what} must be a bool, got {value!r}")
        return value
    if not is_number(value) or (param.kind == "int" and not isinstance(value, int)):
        noun = "an int" if param.kind == "int" else "a number"
        tensor = " or a tensor" if param.kind == "row" else ""
        raise TypeError(f"{what} must be {noun}{tensor}, got {value!r}")
    if not abs(value) < math.inf or (param.check is not None and not param.check(value)):
        raise ValueError(f"{what} must be {param.allowed}, got {value!r}")
    return value if param.kind == "int" else float(value)


def _bind_one(what: str, param: Param, value: Any, call: Call) -> Any:
    if value is None and param.default is None:
        return None
    if param.kind != "row" or not isinstance(value, Tensor):
        return check_value(what, param, value)
    if not value.is_floating_point():
        raise TypeError(f"{what} must be a float tensor, got {value.dtype}")
    if value.device != call.device:
        raise ValueError(f"{what} must be on q's device {call.device}, got {value.device}")
    full = (call.batch, call.heads, call.queries)
    if value.dim() == 0:
        row = value.view(1, 1, 1)
    elif value.shape == full[1:2]:
        row = value.view(1, -1, 1)
    elif param.per_token and value.shape == full:
        row = value
    else:
        shapes = [(), full[1:2]] + ([full] if param.per_token else [])
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{what} must have shape {allowed}, got {tuple(value.shape)}")
    check_entries(what, param, value)
    return row.to(call.dtype)


def check_entries(what: str, param: Param, value: Tensor) -> None:
    """Refuse a tensor with an entry out of range, where looking is free."""
    # A look at values would stall a GPU and break a graph: there, a value out of range is the
    # caller's to avoid (nn.Attention keeps learned ones inside).
    if value.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if isinstance(value, torch._subclasses.FakeTensor):
        return
    value = value.detach()
    good = value.isfinite() if param.check is None else value.isfinite() & param.check(value)
    if not bool(good.all()):
        raise ValueError(f"{what} must be {param.allowed} throughout, got {value.tolist()!r}")
