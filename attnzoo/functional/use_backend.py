"""use_backend(): one backend for all calls of a block of code."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from attnzoo.backends.selection import check_backend


class _Choice(threading.local):
    """The backend that `use_backend` names in this thread.

    Each thread has an attribute, because the compiler of torch 2.11 does not notice changes of a
    class attribute. It cannot read a `contextvars.ContextVar` at all.
    """

    def __init__(self) -> None:
        self.backend: str | None = None


_CHOICE = _Choice()


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Choose the backend of all calls inside, also of modules and converted models.

    An argument ``backend`` of a call comes first. A call that the backend cannot run raises, as
    with that argument. Like `torch.no_grad`, the choice is one of the thread. It may be nested,
    surround compiled code (which is compiled once for each choice) or be inside of it, and
    surround ``torch.export`` and ``torch.onnx.export``.

    Args:
        name: Name of the backend, as for ``backend`` of `attention`. None lets the library choose.

    Raises:
        ValueError: There is no such backend.

    Example:
        >>> import torch, attnzoo
        >>> layer = attnzoo.nn.MultiheadAttention(16, 2, variant="ssmax", batch_first=True)
        >>> x = torch.randn(1, 300, 16, requires_grad=True)
        >>> with attnzoo.use_backend("eager"):  # for the second derivatives of a penalty
        ...     out = layer(x, x, x, need_weights=False)[0]
        >>> (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        >>> slope.square().sum().backward()

    Notes:
        The choice is made in the forward. Gradient checkpointing runs a forward again in the
        backward, so the backward must be inside too. On a GPU autograd does this in a thread of
        its own, which does not see the choice. With ``use_reentrant=False`` torch then raises if
        the recomputed tensors differ; with True, the library chooses for the second forward.

        Losses, `probabilities` and `attention_weights` have no backends. State caches and
        `linear_attention` accept "linear" and "flash_linear" only.
    """
    check_backend(name)
    before, _CHOICE.backend = _CHOICE.backend, name
    try:
        yield
    finally:
        _CHOICE.backend = before


def named_backend(backend: str | None) -> str | None:
    """The backend named by an argument or else by `use_backend`; None: the library chooses."""
    return _CHOICE.backend if backend is None else backend
