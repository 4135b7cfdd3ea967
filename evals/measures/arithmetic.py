"""Denormal numbers, autocast, matrix products with rounded operands, out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo

# The positions of the two factors among the arguments of each operation that multiplies matrices.
_FACTORS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.mv.default: (0, 1),
    torch.ops.aten.dot.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.addmv.default: (1, 2),
    torch.ops.aten.baddbmm.default: (1, 2),
}


def rounded(x: Tensor, dtype: str) -> Tensor:
    """x with its fp32 values rounded to ``dtype``; still fp32. Other dtypes are returned as is."""
    return x.to(getattr(torch, dtype)).float() if x.dtype == torch.float32 else x


class _RoundedFactors(TorchDispatchMode):
    """Rounds the fp32 factors of every matrix product, in forward and backward passes."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = dtype
        self.exact = False

    def exactly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a function whose products are not rounded."""
        self.exact = True
        try:
            return function(*args, **kwargs)
        finally:
            self.exact = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.exact:
            return func(*args, **kwargs)
        if func in _FACTORS:
            first, second = _FACTORS[func]
            args = [
                rounded(x, self.dtype) if i in (first, second) else x for i, x in enumerate(args)
            ]
            return func(*args, **kwargs)
        # Without autograd, products arrive as a whole, such as aten.linear.
        with self:
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


@contextmanager
def rounded_products(dtype: str, exact: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Round the fp32 operands of every matrix product to ``dtype``, and add in fp32.

    This is what units with 16-bit inputs and fp32 accumulators compute, apart from the order of the
    sums. Attention runs by its definition, ``backend="eager"``, because a fused kernel multiplies
    inside. Products in fp64 are not rounded, nor are those in the forward passes of the modules
    ``exact``.
    """
    if dtype == "float32":
        yield
        return
    mode = _RoundedFactors(dtype)
    forwards = [(module, module.forward, "forward" in vars(module)) for module in exact]
    for module, forward, _ in forwards:
        module.forward = partial(mode.exactly, forward)
    try:
        with attnzoo.use_backend("eager"), mode:
            yield
    finally:
        for module, forward, replaced in forwards:
            if replaced:
                module.forward = forward
            else:
                del module.forward


def autocast(dtype: str, device: str) -> AbstractContextManager[Any]:
    """The context of `torch.autocast` with this dtype; "float32" is no autocast."""
    kind = torch.device(device).type
    on = dtype != "float32"
    return torch.autocast(kind, getattr(torch, dtype), enabled=True) if on else nullcontext()


@contextmanager
def lean_arithmetic() -> Iterator[None]:
    """Use one thread in this context, and flush denormal numbers to 0.

    Gradients and AdamW's moments become denormal on their way to 0. Without flushing, a
    training step on a CPU takes three times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device or the host is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
