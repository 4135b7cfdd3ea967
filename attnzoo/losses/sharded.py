"""An output layer whose classes are sharded over ranks: its matrix is a sharded DTensor.

All ranks have the same tokens. Each computes the logits of its own classes. For each chunk of
tokens the ranks exchange a few numbers per token: the largest score, Σφ and the target's score; for
a threshold also Σφ and Σφ' in each solver step. The gradient of the hidden states is summed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attnzoo.backends.tiled.threshold import (
    enough_steps,
    newton,
    newton_step,
    threshold_sums,
)
from attnzoo.core.activations import Activation
from attnzoo.core.checks import is_dtensor
from attnzoo.core.collectives import joined, reduced
from attnzoo.core.rank_agreement import agreed, described, ranks_of
from attnzoo.functional.largest import Blocks, largest
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.losses.arguments import LossArguments, check_layer
from attnzoo.losses.classes import ClassShard
from attnzoo.losses.potentials import NEG_INF

T = TypeVar("T")
REPLICATED = (Replicate(),)
BY_CLASSES = (Shard(0),)


@dataclass(frozen=True)
class ShardOfRank(ClassShard):
    """The classes ``first`` to ``first + here − 1`` of ``classes``.

    group: The name of the process group whose ranks hold the others.
    largest_shard: The largest number of classes of a rank.
    """

    group: str
    first: int
    here: int
    classes: int
    largest_shard: int
    whole = False

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def total(self, here: int) -> int:
        return self.classes

    def most(self, here: int) -> int:
        return self.largest_shard

    def own(self, x: Tensor) -> Tensor:
        return x.narrow(-1, self.first, self.here)

    def sum(self, x: Tensor) -> Tensor:
        return reduced(x, "sum", self.group)

    def max(self, x: Tensor) -> Tensor:
        return reduced(x, "max", self.group)

    def at(self, x: Tensor, classes: Tensor) -> Tensor:
        place, here = self._place(classes)
        found = x.gather(1, place)
        found = found.float() if x.dtype == torch.bool else found  # reductions have no bool
        value, ranks = self.sum(torch.stack([found.where(here, 0.0), here.to(found.dtype)]))
        # Targets are not checked on a GPU. A class that no rank has must not count as score 0.
        return value.where(ranks > 0, float("nan")).to(x.dtype)

    def add_at(self, x: Tensor, classes: Tensor, values: Tensor) -> Tensor:
        place, here = self._place(classes)
        return x.scatter_add_(1, place, values.where(here, 0.0))

    def _place(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the classes, and whether they are those of this rank. Others have column 0."""
        place = classes - self.first
        here = (place >= 0) & (place < self.here)
        return place.where(here, 0), here

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, places = largest(Blocks(x), min(k, self.here))
        missing = min(k, self.largest_shard) - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=NEG_INF)
        places = torch.nn.functional.pad(places + self.first, (0, missing))
        # Candidates are in the order of ranks, so that a tie goes to the lowest class.
        candidates = torch.cat(joined(values[None], self.group).unbind(), 1)
        classes = torch.cat(joined(places[None], self.group).unbind(), 1)
        values, chosen = largest(Blocks(candidates), min(k, self.classes))
        return values, classes.gather(1, chosen)

    def threshold(self, x: Tensor, shape: Tensor | None, phi: Activation) -> Tensor:
        shape = None if shape is None else shape[:, None]
        steps = enough_steps(x, self.classes, phi)
        # Ranks whose parameters differ by rounding must take equally many steps. The sums of a step
        # carry whether a rank was waiting after the step before.
        waiting, all_done = True, False

        def step(tau: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal all_done
            flag = torch.full_like(tau, float(waiting))
            z, slope, flags = self.sum(torch.stack([*threshold_sums(x, tau, shape, phi), flag]))
            all_done = steps is None and not bool(flags.any())
            return newton_step(z, slope, shape, phi)

        def agreed(done: bool) -> bool:
            nonlocal waiting
            waiting = not done
            return all_done

        return newton(step, x.new_zeros(len(x), 1), steps, agreed)[:, 0]


@dataclass(frozen=True)
class Sharded:
    """The arguments of a loss on this rank, as plain tensors."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Any
    given: LossArguments
    params: dict[str, Any]
    shard: ShardOfRank


def on_ranks(
    input: Any, weight: Any, bias: Any, target: Any, variant: Any, given: LossArguments,
    params: dict[str, Any], check: Callable[[Sharded], T],
) -> tuple[T, DeviceMesh]:  # fmt: skip
    """``check`` of the arguments of this rank, and the mesh. At least one argument is a DTensor.

    Raises on all ranks if it raises on one, or if the ranks have different arguments. The values of
    the hidden states and of the variant's parameters are not compared.
    """
    whole = {"target": target, "class_mask": given.class_mask, "weight": given.weight, **params}
    mesh = _check_weight(weight, {"input": input, "linear_bias": bias, **whole})

    def checked() -> tuple[T, str]:
        own = _unwrap(input, weight, bias, given, whole, mesh)
        found = check(own)
        text = described(
            {"input": input, "linear_weight": weight, "linear_bias": bias, "variant": variant}
            | given._asdict() | whole
        )  # fmt: skip
        for name in ("target", "class_mask", "weight"):
            if (x := own.target if name == "target" else getattr(own.given, name)) is not None:
                text += f", checksum of {name} {_checksum(x)}"
        return found, text

    return agreed("linear_loss", ranks_of(mesh), checked), mesh


def replicated(result: Any, mesh: DeviceMesh) -> Any:
    """A result that is equal on all ranks, with a DTensor in place of each tensor."""
    if isinstance(result, Tensor):
        return DTensor.from_local(result, mesh, REPLICATED, run_check=False)
    if isinstance(result, tuple):
        parts = [replicated(part, mesh) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def _check_weight(weight: Any, others: dict[str, Any]) -> DeviceMesh:
    """Validate the placement of the matrix, and return its mesh."""
    if not isinstance(weight, DTensor):
        named = next((name for name, x in others.items() if is_dtensor(x)), "linear_weight")
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


def _unwrap(
    input: Any, weight: Any, bias: Any, given: LossArguments, whole: dict[str, Any],
    mesh: DeviceMesh,
) -> Sharded:  # fmt: skip
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
    shard = ShardOfRank(ranks.group.group_name, first, here, classes, most)
    plain = {name: _plain(name, x, mesh) for name, x in whole.items()}
    target = plain.pop("target")
    given = given._replace(class_mask=plain.pop("class_mask"), weight=plain.pop("weight"))
    own_bias = None if bias is None else bias.to_local()
    return Sharded(input.to_local(), weight.to_local(), own_bias, target, given, plain, shard)


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
    if x.dtype == torch.bool and x.dim() > 1:
        x = x.sum(-1)  # a mask (tokens, classes) is large
    numbers = x.flatten().double().nan_to_num() if x.is_floating_point() else x.flatten().long()
    places = torch.arange(1, len(numbers) + 1, device=x.device, dtype=numbers.dtype)
    mixed = (numbers * (places * 0x9E3779B1 % 0x7FFFFFFF)).sum()
    return int(mixed.view(torch.int64))
