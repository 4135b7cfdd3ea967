"""An output layer whose classes are shared out over ranks: its matrix is a sharded DTensor.

All ranks have the same tokens. Each computes the logits of its own classes. For a chunk of tokens
the ranks exchange one number per token and sum: the largest score, Σφ, the target's score, and for
a threshold Σφ and Σφ' once per solver step. The gradient of the hidden states is summed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attnzoo.backends.tiled.threshold import newton, newton_step, threshold_sums
from attnzoo.core.activations import Activation
from attnzoo.core.agree import agree, described, ranks_of
from attnzoo.core.collectives import joined, reduced
from attnzoo.functional.largest import Blocks, largest
from attnzoo.losses.arguments import LossArguments
from attnzoo.losses.classes import Classes

T = TypeVar("T")
NEG_INF = float("-inf")


@dataclass(frozen=True)
class ClassesOfRank(Classes):
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
        found = x.gather(1, place).where(here, torch.zeros_like(x[:, :1]))
        # Reductions have no bool.
        return self.sum(found.int() if x.dtype == torch.bool else found).to(x.dtype)

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

        def step(tau: Tensor) -> tuple[Tensor, Tensor]:
            z, slope = self.sum(torch.stack(threshold_sums(x, tau, shape, phi)))
            return newton_step(z, slope, shape, phi)

        def agreed(done: bool) -> bool:
            return not bool(self.max(torch.tensor(not done, device=x.device, dtype=torch.int)))

        return newton(step, x.new_zeros(len(x), 1), agreed)[:, 0]


@dataclass(frozen=True)
class Sharded:
    """The arguments of a loss on this rank, as plain tensors."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Any
    given: LossArguments
    params: dict[str, Any]
    classes: ClassesOfRank
    mesh: DeviceMesh
    text: str  # describes the call

    def agreed(self, check: Callable[[], T]) -> T:
        """The result of ``check``; raises on all ranks if it raises on one, or the calls differ."""
        found, error, text = None, None, ""
        try:
            found = check()
            # Ranks with different targets would wait for each other.
            text = f"{self.text}, sum of target {int(self.target.sum())}"
        except Exception as raised:
            error = raised
        agree("linear_loss", text, error, ranks_of(self.mesh))
        assert found is not None
        return found

    def wrapped(self, result: Any) -> Any:
        """The result with a DTensor, equal on all ranks, in place of each tensor."""
        if isinstance(result, Tensor):
            return DTensor.from_local(result, self.mesh, [Replicate()], run_check=False)
        if isinstance(result, tuple):
            parts = map(self.wrapped, result)
            return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
        return result


def unwrap(
    input: Any, weight: Any, bias: Any, target: Any, variant: Any, given: LossArguments,
    params: dict[str, Any],
) -> Sharded:  # fmt: skip
    """Validate placements. ``weight`` or another argument is a DTensor."""
    mesh = _check_weight(weight)
    _check_replicated(input, mesh)
    if bias is not None and not (
        isinstance(bias, DTensor) and bias.device_mesh == mesh and bias.placements == (Shard(0),)
    ):
        raise ValueError(
            f"linear_bias must be a DTensor sharded like linear_weight, got {_shown(bias)}"
        )
    ranks, count, here = ranks_of(mesh), len(weight), len(weight.to_local())
    most = -(-count // ranks.count)
    first = min(ranks.rank * most, count)
    if here != min(most, count - first):
        raise ValueError(
            f"linear_weight must be sharded as by distribute_tensor, {most} of {count} classes per "
            f"rank, got {here} on rank {ranks.rank}"
        )
    if most * (ranks.count - 1) >= count:
        raise ValueError(
            f"linear_weight must have classes on each of {ranks.count} ranks, got {count} classes, "
            f"{most} per rank"
        )
    classes = ClassesOfRank(ranks.group.group_name, first, here, count, most)
    whole = {"target": target, "class_mask": given.class_mask, "weight": given.weight, **params}
    text = described(
        {"input": input, "linear_weight": weight, "linear_bias": bias, "variant": variant}
        | given._asdict() | whole
    )  # fmt: skip
    whole = {name: _plain(name, x, mesh) for name, x in whole.items()}
    target, mask, factors = (whole.pop(name) for name in ("target", "class_mask", "weight"))
    given = given._replace(class_mask=mask, weight=factors)
    own_bias = None if bias is None else bias.to_local()
    return Sharded(
        input.to_local(), weight.to_local(), own_bias, target, given, whole, classes, mesh, text
    )


def _check_weight(weight: Any) -> DeviceMesh:
    """Validate the matrix, and return its mesh."""
    if weight is None:
        raise TypeError("logits must be a plain tensor, got a DTensor; linear_loss takes DTensors")
    if not isinstance(weight, DTensor):
        raise TypeError(
            "linear_weight must be a DTensor if another argument is one, got a plain tensor"
        )
    if weight.placements != (Shard(0),):
        raise ValueError(
            "linear_weight must be sharded over classes on a mesh with one dimension, placements "
            f"(Shard(dim=0),), got {tuple(weight.placements)}"
        )
    return weight.device_mesh


def _check_replicated(input: Any, mesh: DeviceMesh) -> None:
    if isinstance(input, DTensor) and input.device_mesh == mesh and _replicated(input):
        return
    raise ValueError(
        "input must be a DTensor with placements (Replicate(),) on the mesh of linear_weight, "
        f"which is sharded over classes, got {_shown(input)}. If linear_weight is sharded by "
        "FSDP2, call the loss in the forward of the module that owns it"
    )


def _replicated(x: DTensor) -> bool:
    return all(isinstance(placement, Replicate) for placement in x.placements)


def _plain(name: str, x: Any, mesh: DeviceMesh) -> Any:
    """x as a plain value: every rank has all of it."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh or not _replicated(x):
        raise ValueError(
            f"{name} must be whole on each rank: a plain tensor, or a DTensor with placements "
            f"(Replicate(),) on the mesh of linear_weight, got {_shown(x)}"
        )
    return x.to_local()


def _shown(x: Any) -> str:
    if isinstance(x, DTensor):
        return f"a DTensor with placements {tuple(x.placements)} on {x.device_mesh}"
    return "a plain tensor" if isinstance(x, Tensor) else type(x).__name__
