"""Checks of single arguments, and helpers for the text of errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor

_KEYS = torch._C._TorchDispatchModeKey
RECORDING = (_KEYS.PROXY, _KEYS.FUNCTIONAL, _KEYS.FAKE)  # modes that trace
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def plain(x: Any) -> Any:
    """Convert a NumPy scalar to the equal Python value; return anything else unchanged."""
    return x.item() if isinstance(x, np.generic) else x


def is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)  # SymInt: in an export


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_finite(x: float, dtype: torch.dtype = torch.float64) -> bool:
    """Whether a number is finite in the dtype; accepts ints that are too large for a float."""
    return abs(x) <= torch.finfo(dtype).max


def is_readable(x: Tensor) -> bool:
    """Whether the values can be read without stalling a GPU or breaking a graph or transform."""
    return x.is_cpu and has_values(x)


# Torch exports no public names for what the following functions ask: whether torch.jit traces, a
# torch.func transform is active, or a mode intercepts operations.


def has_values(x: Tensor) -> bool:
    """Whether x has values that Python may branch on: not on meta, in a graph or in a transform."""
    return not (
        x.is_meta
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or isinstance(x, FakeTensor)
        or is_functorch_wrapped_tensor(x)
    )


def is_traced() -> bool:
    """Whether operations are recorded: for a compiler, by a trace or for a torch.func transform."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds: in a graph with symbolic sizes, for all of them.

    Unlike ``bool(condition)``, this does not restrict the graph to the sizes of one answer.
    """
    if torch.compiler.is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return condition


def is_symbolic(*sizes: int) -> bool:
    """Whether a size stands for several sizes, in the graph of a compiler or an export."""
    if not torch.compiler.is_compiling() and not any(isinstance(x, torch.SymInt) for x in sizes):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not all(has_static_value(x) for x in sizes)


def is_recorded() -> bool:
    """Whether operations may run again on other values, so that Python must not read values.

    Modes that only watch operations, such as a counter or selective checkpointing, do not matter.
    """
    return is_traced() or any(torch._C._get_dispatch_mode(key) for key in RECORDING)


def runs_eagerly() -> bool:
    """Whether operations run at once on the given tensors: no tracing, mode or transform."""
    return not (is_traced() or torch._C._len_torch_dispatch_stack())


def check_dense(what: str, x: Any) -> None:
    """Raise unless x is a tensor that is neither nested nor sparse."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{what} must be a dense tensor, got a {kind} one")


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor. Does not import DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def broadcasts(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether x broadcasts to the shape."""
    # `in` would fail: torch.compile does not find a symbolic size in a tuple.
    return x.dim() <= len(shape) and all(
        have == 1 or have == want for have, want in zip(reversed(x.shape), reversed(shape))
    )


def check_bool(what: str, x: Any) -> bool:
    x = plain(x)
    if not isinstance(x, bool):
        raise TypeError(f"{what} must be a bool, got {shown(x)}")
    return x


def check_type(what: str, x: Any, kind: type) -> None:
    if not isinstance(x, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, got {shown(x)}")


def check_callable(what: str, x: Any, optional: bool = False) -> None:
    """Raise unless x is callable, or None if ``optional``."""
    if not callable(x) and not (optional and x is None):
        allowed = "a function or None" if optional else "a function"
        raise TypeError(f"{what} must be {allowed}, got {shown(x)}")


def check_device_and_dtype(device: Any, dtype: Any) -> None:
    """Raise unless parameters can be made with this device and dtype; both may be None."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be fp16, bf16, fp32 or fp64, got {shown(dtype)}")
    if device is None:
        return
    if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
        raise TypeError(f"device must be a torch.device, a str or an int, got {shown(device)}")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device must be the name of a device, such as 'cpu' or 'cuda:0', got {shown(device)}"
        ) from None


def check_probability(what: str, x: Any) -> float:
    # A probability of 1 is excluded, because dropout would remove all weights.
    x = plain(x)
    if not is_number(x):
        raise TypeError(f"{what} must be a number in [0, 1), got {shown(x)}")
    if not 0 <= x < 1:
        raise ValueError(f"{what} must be a number in [0, 1), got {shown(x)}")
    return float(x)


def check_sizes(optional: bool = False, **sizes: Any) -> None:
    """Raise unless all sizes are ints from 1 to 2^63 − 1, or None if ``optional``."""
    for name, size in sizes.items():
        if size is None and optional:
            continue
        if size is None or not is_int(size) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {shown(size)}")
        if size >= 2**63:
            raise ValueError(f"{name} must fit in an int64 (below 2^63), got {shown(size)}")


def shown(x: Any) -> str:
    """A short text for any value, for error messages."""
    if isinstance(x, Tensor):
        return "a nested tensor" if x.is_nested else f"a tensor of shape {tuple(x.shape)}"
    try:
        text = repr(x)
    except ValueError:  # an int with more digits than Python prints
        return f"{type(x).__name__} with too many digits to print"
    return text if len(text) <= 60 else f"{text[:59]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, if any."""
    names = {one.lower(): one for one in known}
    similar = get_close_matches(name.lower(), names, n=1)
    contained = [x for x in names if min(len(x), len(name)) > 2 and (x in name or name in x)]
    matches = similar or contained
    return f"; did you mean {names[matches[0]]!r}?" if matches else ""
