"""Checks that all ranks make the same call, so that a mistake on one rank stops all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnzoo.core.checks import shown
from attnzoo.core.collectives import Ranks, all_gather

T = TypeVar("T")
_FAILED = -1


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh.

    Raises:
        TypeError: mesh is not a DeviceMesh.
        ValueError: it does not have one dimension, or this rank is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        hint = f"; choose a dimension, such as mesh[{names[0]!r}]" if names else ""
        raise ValueError(f"mesh must have one dimension, got shape {tuple(mesh.shape)}{hint}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must contain this rank, {dist.get_rank()}, got {mesh}")
    return Ranks(mesh, mesh.get_local_rank(), mesh.size())


def described(values: Mapping[str, Any]) -> str:
    """The values as text: shapes and dtypes of tensors, everything else as it is."""
    return ", ".join(f"{name}={_text(value)}" for name, value in sorted(values.items()))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = " with gradient" if value.requires_grad and torch.is_grad_enabled() else ""
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{grad}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    return shown(value)


def agree(what: str, mine: str, error: Exception | None, ranks: Ranks) -> None:
    """Raise on every rank if the text ``mine`` differs between ranks or one has an error.

    The rank with the error raises it. Costs one small exchange.
    """
    if ranks.count > 1:
        digest = hashlib.sha256(mine.encode()).digest()[:7]  # 56 bits: never `_FAILED`
        code = _FAILED if error is not None else int.from_bytes(digest, "little")
        codes = all_gather(torch.tensor([code], device=ranks.mesh.device_type), 0, ranks).tolist()
        if _FAILED in codes or len(set(codes)) > 1:
            _explain(what, mine, error, ranks)
    if error is not None:
        raise error


def agreed(what: str, ranks: Ranks, check: Callable[[], tuple[T, str]]) -> T:
    """The result of ``check``, which also returns a text that must be equal on all ranks.

    If it raises on one rank, every rank raises, so that no rank waits for another.
    """
    result, error, text = None, None, ""
    try:
        result, text = check()
    except Exception as raised:
        error = raised
    agree(what, text, error, ranks)
    assert result is not None
    return result


def _explain(what: str, mine: str, error: Exception | None, ranks: Ranks) -> None:
    """Exchange the texts or errors, and raise."""
    text = mine if error is None else f"{type(error).__name__}: {error}"
    reports: list[tuple[bool, str]] = [(False, "")] * ranks.count
    dist.all_gather_object(reports, (error is not None, text), group=ranks.group)
    if error is not None:
        raise error
    failed = [f"rank {r}: {x}" for r, (raised, x) in enumerate(reports) if raised]
    if failed:
        raise ValueError(f"{what} raised on another rank; {'; '.join(failed)}")
    mistaken = [f"rank {r}: {x}" for r, (_, x) in enumerate(reports) if x != mine]
    raise ValueError(
        f"{what} must be called with equal arguments on all ranks; rank {ranks.rank}: {mine}; "
        f"{'; '.join(mistaken)}"
    )
