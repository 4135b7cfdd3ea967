"""Tensors that depend only on the layout of a call, cached for later calls with this layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from attnzoo.core.checks import runs_eagerly

MOST_BYTES = 2**25  # all cached tensors are dropped when they exceed this
OVERHEAD = 2**10  # bytes added per tensor, so that the number of small tensors is bounded too

# By `TensorCache`, name and stream: (cached tensor, the tensor from which it was made or None,
# their versions)
_tensors: dict[Hashable, tuple[Tensor, Tensor | None, int, int]] = {}
_bytes = 0


class TensorCache:
    """The cached tensors of one layout and device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def get(
        self, name: Hashable, make: Callable[[], Tensor], source: Tensor | None = None
    ) -> Tensor:
        """Return ``make()``, or the tensor that an earlier call returned under this name.

        ``source`` is the only tensor that ``make`` reads, if any.
        """
        stream = self._stream()
        if stream is None:
            return make()
        key = self, name, stream
        entry = _tensors.get(key)
        # A tensor's version changes when a caller writes into it, except through `.data` and numpy.
        # A changed tensor is replaced.
        if entry is not None and entry[1] is source:
            tensor, _, version, source_version = entry
            if tensor._version == version and _version(source) == source_version:
                return tensor
        # An inference tensor could not be used in a later call with gradients.
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        _store(key, made, source)
        return made

    def holds(self, tensor: Tensor, name: Hashable) -> bool:
        """Whether the tensor is the one that is cached under this name."""
        entry = _tensors.get((self, name, self._stream()))
        return entry is not None and entry[0] is tensor

    def _stream(self) -> int | None:
        """The stream on which kernels of this call run; None if nothing may be cached.

        A tensor is used only on the stream that wrote it, which needs no synchronization. A CUDA
        graph keeps the addresses of its tensors, so it must not use one that may be dropped.
        """
        # A mode that a variant opens may return tensors that are useless outside of it.
        if not runs_eagerly():
            return None
        if self.device.type == "cpu":
            return 0
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        current = torch.cuda.current_device()
        if self.device.index not in (None, current):  # its stream may be capturing
            return None
        # torch.cuda.current_stream() makes an object in each call. Only the number is needed.
        return torch._C._cuda_getCurrentRawStream(current)


def clear() -> None:
    """Drop all cached tensors."""
    global _bytes
    _tensors.clear()
    _bytes = 0


def _store(key: Hashable, made: Tensor, source: Tensor | None) -> None:
    global _bytes
    size = made.nbytes + OVERHEAD
    if size > MOST_BYTES // 4 or made.requires_grad or type(made) is not Tensor:
        return
    replaced = _tensors.pop(key, None)
    if replaced is not None:
        _bytes -= replaced[0].nbytes + OVERHEAD
    if _bytes + size > MOST_BYTES:
        clear()
    _bytes += size
    _tensors[key] = made, source, made._version, _version(source)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
