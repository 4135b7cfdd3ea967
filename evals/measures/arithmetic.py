"""Handling of slow denormal numbers and of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
