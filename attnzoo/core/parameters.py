"""Validation of a variant's parameters.

A "per_head" parameter becomes a Python float, or a tensor in the call's dtype that broadcasts to
(B, H, Nq), or (B, H, Nk) if it is per key. A "tensor" parameter becomes a tensor (H, …) in the
call's dtype. Other parameters stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.arguments import ARGUMENTS
from attnzoo.core.call import Call
from attnzoo.core.checks import (
    DTYPES,
    broadcasts,
    check_dense,
    did_you_mean,
    is_finite,
    is_int,
    is_number,
    is_readable,
    plain,
    shown,
)
from attnzoo.core.forms import Pairwise
from attnzoo.core.variant import Param, Required, Variant

# The vectors of a pairwise form, with their last dimension.
VECTORS = {
    "gain": "Nq", "offset": "Nq", "shape": "Nq", "sink": "Nq", "factor": "Nq", "key_bias": "Nk",
    "decay": "1",
}  # fmt: skip

# What users mean by arguments of torch.nn.MultiheadAttention that attention does not have.
MEANT = {
    "key_padding_mask": "; pass attn_mask=~key_padding_mask[:, None, None, :], True = attend",
    "need_weights": "; attention_weights returns the weights",
    "average_attn_weights": "; attention_weights returns the weights of each head",
}


def bind(variant: Variant, call: Call, params: dict[str, Any]) -> dict[str, Any]:
    """All parameters of the variant for this call, validated, with defaults filled in."""
    check_names(variant, params, ARGUMENTS)
    bound = {}
    for param in variant.params:
        value = params.get(param.name, param.default)
        # Not `value is REQUIRED`, in which the compiler of torch 2.11 accepts no symbolic number.
        if isinstance(value, Required):
            raise TypeError(missing(variant.name, param))
        bound[param.name] = _bind_one(f"{variant.name}'s {param.name}", param, value, call)
    return bound


def check_names(variant: Variant, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise TypeError if a name is not that of a parameter. ``others``: names that the caller of
    the function may have meant instead."""
    known = [param.name for param in variant.params]
    for name in names:
        if name not in known:
            allowed = ", ".join(known) if known else "none"
            nearest = MEANT.get(name) or did_you_mean(name, [*known, *others])
            raise TypeError(
                f"variant {variant.name!r} has no parameter {name!r}; it has: {allowed}{nearest}"
            )


def missing(variant: str, param: Param) -> str:
    """The error for a required parameter that was not given."""
    meaning = f": {param.doc}" if param.doc else ""
    return f"variant {variant!r} requires the parameter {param.name!r}{meaning}"


def check_value(what: str, param: Param, value: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Validate a value that is not a tensor; a number must be finite in the dtype."""
    value = plain(value)
    if param.kind == "tensor":
        raise TypeError(f"{what} must be a tensor, got {shown(value)}")
    if param.kind == "bool":
        if not isinstance(value, bool):
            raise TypeError(f"{what} must be a bool, got {shown(value)}")
        return value
    if param.kind == "str":
        if not isinstance(value, str):
            raise TypeError(f"{what} must be a str, got {shown(value)}")
        if param.check is not None and not param.check(value):
            raise ValueError(f"{what} must be {param.allowed}, got {shown(value)}")
        return value
    if not is_number(value) or (param.kind == "int" and not is_int(value)):
        noun = "an int" if param.kind == "int" else "a number"
        tensor = " or a tensor" if param.kind == "per_head" else ""
        raise TypeError(f"{what} must be {noun}{tensor}, got {shown(value)}")
    if value != value or (param.check is not None and not param.check(value)):
        raise ValueError(f"{what} must be {param.allowed}, got {shown(value)}")
    if param.kind == "int":
        if abs(value) >= 2**63:
            raise ValueError(f"{what} must fit in an int64 (below 2^63), got {shown(value)}")
        return value
    if not is_finite(value, dtype):
        raise ValueError(
            f"{what} must be {param.allowed}, got {shown(value)}; {dtype} holds numbers up to "
            f"{torch.finfo(dtype).max:.3g}"
        )
    return float(value)


def _bind_one(what: str, param: Param, value: Any, call: Call) -> Any:
    if value is None and param.default is None:
        return None
    if param.kind not in ("per_head", "tensor") or not isinstance(value, Tensor):
        return check_value(what, param, value, call.dtype)
    check_dense(what, value)
    if value.dtype not in DTYPES:
        raise TypeError(f"{what} must be fp16, bf16, fp32 or fp64, got {value.dtype}")
    if value.device != call.device:
        raise ValueError(f"{what} must be on q's device {call.device}, got {value.device}")
    shapes = _shapes(what, param, call)
    # `in` would fail: torch.compile does not find a symbolic size in a tuple.
    if not any(value.shape == shape for shape in shapes):
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{what} must have shape {allowed}, got {tuple(value.shape)}")
    return as_vector(what, param, value, call)


def _shapes(what: str, param: Param, call: Call) -> list[tuple[int, ...]]:
    """The shapes that a tensor may have."""
    batch, heads = call.batch, call.heads
    if param.kind == "tensor":
        return [(heads, *_size(what, param, call.head_dim))]
    shapes: list[tuple[int, ...]] = [(), (heads,)]
    if param.per_token:
        shapes.append((batch, heads, call.queries))
    if param.per_key:
        shapes.append((batch, heads, call.keys))
    return shapes


def _size(what: str, param: Param, head_dim: int) -> tuple[int, ...]:
    """The dimensions of a tensor (H, …) after the first, validated because users write variants."""
    assert param.size is not None  # checked at registration
    size = param.size(head_dim)
    if not isinstance(size, tuple):
        raise TypeError(f"{what}: size(D) must be a tuple of ints, got {shown(size)}")
    for n in size:
        if not (is_int(n) or isinstance(n, torch.SymInt)):
            raise TypeError(f"{what}: size(D) must be a tuple of ints, got {shown(size)}")
        if n < 1:
            raise ValueError(f"{what}: size(D) must have ints of at least 1, got {shown(size)}")
    return size


def as_vector(what: str, param: Param, value: Tensor, call: Call) -> Tensor:
    """Validate the values of a tensor, and reshape it so that it broadcasts to (B, H, N)."""
    value = value.to(call.dtype)
    check_entries(what, param, value)
    return value if param.kind == "tensor" or value.dim() == 3 else value.view(1, -1, 1)


def vectors_in(dtype: torch.dtype, form: Pairwise) -> Pairwise:
    """The form with its vectors in the dtype of the scores.

    Torch multiplies a 16-bit tensor by a number in 16 bits, and kernels read one dtype only.
    """
    cast = {
        name: x.to(dtype)
        for name in VECTORS
        if isinstance(x := getattr(form, name), Tensor) and x.dtype != dtype
    }
    return replace(form, **cast) if cast else form


def checked_vectors(what: str, form: Pairwise, call: Call) -> Pairwise:
    """The result of `vectors_in`. Raise unless all tensors of a form are vectors of the call."""
    for name, last in VECTORS.items():
        vector = getattr(form, name)
        if not isinstance(vector, Tensor):
            continue
        width = {"Nq": call.queries, "Nk": call.keys, "1": 1}[last]
        full = (call.batch, call.heads, width)
        fits = vector.dim() == 3 and broadcasts(vector, full)
        if not fits or not vector.is_floating_point():
            raise ValueError(
                f"{what}: {name} must be a float or a float tensor that broadcasts to "
                f"(B, H, {last}) = {full}, got {tuple(vector.shape)} {vector.dtype}"
            )
    return vectors_in(call.dtype, form)


def check_entries(what: str, param: Param, value: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise if an entry is out of range or not finite in the dtype (default: the tensor's own).

    Tensors that are not `is_readable` are not checked; `attnzoo.nn.Attention` keeps learned values
    in range.
    """
    if not is_readable(value):
        return
    value = value.detach()
    held = value if dtype is None else value.to(dtype)
    # Usually one sum is enough, because a finite sum implies finite entries. If the sum is not
    # finite, the entries may still be, so each one is checked below.
    if math.isfinite(held.sum().item()) and (param.check is None or bool(param.check(value).all())):
        return
    good = held.isfinite()
    if param.check is not None:
        good = good & param.check(value)
    if not bool(good.all()):
        first = (~good).nonzero()[0].tolist()
        place = f" at {first}" if first else ""
        place += "" if dtype is None else f"; values are stored in {dtype}"
        raise ValueError(
            f"{what} must be {param.allowed} throughout, got {value[~good][0].item():.9g}{place}"
        )
