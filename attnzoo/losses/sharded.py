"""An output layer whose classes are sharded over ranks: its matrix is a sharded DTensor.

All ranks have the same tokens. Each computes the logits of its own classes. For each chunk of
tokens the ranks exchange a few numbers per token: the largest score, Σφ and the target's score; for
a threshold also Σφ and Σφ' in each solver step. The gradient of the hidden states is summed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attnzoo.core.checks import is_dtensor
from attnzoo.core.rank_agreement import agreed, described, ranks_of
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.losses.arguments import LossCall, check_layer
from attnzoo.losses.rules import ClassShard

T = TypeVar("T")
REPLICATED = (Replicate(),)
BY_CLASSES = (Shard(0),)
MASK_STEP = 2**20  # entries of a class mask that a checksum makes int64 at a time
COMPARED = ("target", "class_mask", "weight")  # arguments whose values all ranks compare


def on_ranks(call: LossCall, check: Callable[[LossCall], T]) -> tuple[T, DeviceMesh]:
    """``check`` of this rank's call with plain tensors, and the mesh. ``call`` has a DTensor.

    Raises on all ranks if it raises on one, or if the ranks have different arguments. The values of
    the hidden states and of the variant's parameters are not compared.
    """
    named = {name: x for name, x in call._asdict().items() if name not in ("is_logits", "shard")}
    named |= named.pop("params")
    mesh = _check_weight(named)

    def checked() -> tuple[T, str]:
        local = _local(call, mesh)
        result, text = check(local), described(named)
        for name in COMPARED:
            if (x := getattr(local, name)) is not None:
                text += f", checksum of {name} {_checksum(x)}"
        return result, text

    return agreed("linear_loss", ranks_of(mesh), checked), mesh


def replicated(result: Any, mesh: DeviceMesh) -> Any:
    """A result that is equal on all ranks, with a DTensor in place of each tensor."""
    if isinstance(result, Tensor):
        return DTensor.from_local(result, mesh, REPLICATED, run_check=False)
    if isinstance(result, tuple):
        parts = [replicated(part, mesh) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def _check_weight(arguments: dict[str, Any]) -> DeviceMesh:
    """Validate the placement of the matrix, and return its mesh."""
    weight = arguments["linear_weight"]
    if not isinstance(weight, DTensor):
        named = next((name for name, x in arguments.items() if is_dtensor(x)), "linear_weight")
        if weight is None:
            named = "logits" if named == "input" else named
            raise TypeError(f"{named} must be a plain tensor, got a DTensor; see linear_loss")
        raise TypeError(f"linear_weight must be a DTensor, as {named} is one, got a plain tensor")
    if weight.device_mesh.ndim != 1 or weight.placements != BY_CLASSES:
        raise ValueError(
            "linear_weight must have placements (Shard(dim=0),) on a mesh with one dimension, such "
            f"as mesh['tp'], got {_shown(weight)}"
        )
    return weight.device_mesh


def _local(call: LossCall, mesh: DeviceMesh) -> LossCall:
    """The call of this rank, with plain tensors."""
    input: Any = call.input
    weight: Any = call.linear_weight
    bias: Any = call.linear_bias
    _check_input(input, mesh)
    if bias is not None and not (
        isinstance(bias, DTensor) and bias.device_mesh == mesh and bias.placements == BY_CLASSES
    ):
        raise ValueError(
            f"linear_bias must be a DTensor sharded like linear_weight, got {_shown(bias)}"
        )
    input, weight = cast_by_autocast(input, weight)
    if bias is not None:
        (bias,) = cast_by_autocast(bias)
    check_layer(input, weight, bias)
    ranks, classes, here = ranks_of(mesh), len(weight), len(weight.to_local())
    most = -(-classes // ranks.count)
    if most * (ranks.count - 1) >= classes:
        raise ValueError(
            f"linear_weight must have classes on each of {ranks.count} ranks, got {classes} "
            f"classes, {most} per rank"
        )
    first = ranks.rank * most
    if here != min(most, classes - first):
        raise ValueError(
            f"linear_weight must be sharded as by distribute_tensor, {most} of {classes} classes "
            f"per rank, got {here} on rank {ranks.rank}"
        )
    return call._replace(
        input=input.to_local(), linear_weight=weight.to_local(),
        linear_bias=None if bias is None else bias.to_local(),
        **{name: _plain(name, getattr(call, name), mesh) for name in COMPARED},
        params={name: _plain(name, x, mesh) for name, x in call.params.items()},
        shard=ClassShard(ranks.group.group_name, first, classes, most),
    )  # fmt: skip


def _check_input(input: Any, mesh: DeviceMesh) -> None:
    if not isinstance(input, DTensor):
        raise ValueError(
            "input must be a DTensor with placements (Replicate(),), got a plain tensor. Use "
            "DTensor.from_local(input, linear_weight.device_mesh, [Replicate()]) if all ranks have "
            "the same tokens. If linear_weight is sharded by FSDP2, call the loss in the forward "
            "of the module that owns it"
        )
    if input.device_mesh != mesh:
        raise ValueError(
            f"input must be on the mesh of linear_weight, {mesh}, got {input.device_mesh}"
        )
    if input.placements != REPLICATED:
        raise ValueError(
            f"input must have placements (Replicate(),), got {tuple(input.placements)}; use "
            "input.redistribute(placements=[Replicate()])"
        )


def _plain(name: str, x: Any, mesh: DeviceMesh) -> Any:
    """x as a plain value: every rank has all of it."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh or x.placements != REPLICATED:
        raise ValueError(
            f"{name} must be whole on each rank: a plain tensor, or a DTensor with placements "
            f"(Replicate(),) on the mesh of linear_weight, got {_shown(x)}"
        )
    return x.to_local()


def _shown(x: Any) -> str:
    if isinstance(x, DTensor):
        return f"placements {tuple(x.placements)} on {x.device_mesh}"
    return "a plain tensor" if isinstance(x, Tensor) else type(x).__name__


def _checksum(x: Tensor) -> int:
    """A number that differs for other values, or values in another order.

    Ranks with different targets would not only be wrong, but wait for each other.
    """
    x = x.detach()
    if x.dtype == torch.bool and x.dim() > 1:  # a mask (tokens, classes), large as int64
        rows = x.flatten(0, -2).split(max(MASK_STEP // x.shape[-1], 1))
        x = torch.cat([_mixed(part) for part in rows])
    return int(_mixed(x.flatten()).view(torch.int64))


def _mixed(x: Tensor) -> Tensor:
    """The sum along the last dimension, of numbers that each place multiplies by another factor."""
    numbers = x.double().nan_to_num() if x.is_floating_point() else x.long()
    order = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=numbers.dtype)
    return (numbers * (order * 0x9E3779B1 % 0x7FFFFFFF)).sum(-1)
