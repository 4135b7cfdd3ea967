"""Losses with classes that are shared out over the ranks of a test, and mistakes in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attnzoo.distributed import shard_batch
from attnzoo.losses import linear_loss, loss
from attnzoo.nn import OutputLayer
from helpers.cases import rand
from helpers.covering import Row
from helpers.loss_cases import Inputs, by_definition, label, make

SHARDED = ("linear_weight", "linear_bias")


def mesh_of_all() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()])


def by_ranks(inputs: Inputs, mesh: DeviceMesh) -> dict[str, Tensor]:
    """As `by_library`, with the classes shared out over a mesh."""
    leaves, arguments = inputs.arguments()
    for name in SHARDED:
        if name in leaves:
            arguments[name] = distribute_tensor(leaves[name].detach(), mesh, [Shard(0)])
            leaves[name] = arguments[name].requires_grad_()
    arguments["input"] = replicated(leaves["input"], mesh)
    found = linear_loss(variant=inputs.variant, **arguments)
    assert isinstance(found, DTensor)
    assert found.placements == (Replicate(),)
    none = inputs.rest["reduction"] == "none"
    given = replicated(inputs.do.to(found.dtype), mesh) if none else None
    gradients = torch.autograd.grad(found, list(leaves.values()), given)
    result = {"loss": found.to_local().detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient.shape == leaf.shape
        result["d" + name] = gradient.full_tensor() if name in SHARDED else gradient
    return result


def differences(rank: int, rows: list[tuple[int, Row]]) -> dict[str, str]:
    """What differs from the definition, by row."""
    mesh, wrong = mesh_of_all(), {}
    for seed, row in rows:
        inputs = make(row, seed)
        found, exact = by_ranks(inputs, mesh), by_definition(inputs)
        for name, want in exact.items():
            size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
            near = torch.allclose(found[name], want, rtol=0, atol=1e-10 * size, equal_nan=True)
            if not near:
                wrong[f"{label(row)}, {name}"] = str((found[name] - want).abs().max())
    return wrong


STATISTICS = {"softmax": {}, "entmax": {"alpha": 1.3}, "sigmoid": {}, "topk": {"top_k": 7}}
Pair = tuple[list[float], list[float]]  # by ranks, and by one process


def statistics(variant: str, mesh: DeviceMesh) -> Pair:
    params: dict[str, Any] = STATISTICS[variant]
    x, e, y = rand(6, 4), rand(11, 4, seed=1), torch.tensor([0, 4, 10, -100, 3, 6])
    sharded = distribute_tensor(e, mesh, [Shard(0)])
    found = []
    for stats in (
        linear_loss(replicated(x, mesh), sharded, y, variant, return_stats=True, **params)[1],
        linear_loss(x, e, y, variant, return_stats=True, **params)[1],
    ):
        plain = [x.to_local() if isinstance(x, DTensor) else x for x in stats if x is not None]
        found.append(torch.stack([x.double() for x in plain]).nan_to_num(-1).flatten().tolist())
    return found[0], found[1]


def output_layer(mesh: DeviceMesh) -> Pair:
    """Loss and gradients of an `OutputLayer`."""
    found = []
    for shards in (True, False):
        torch.manual_seed(0)
        layer = OutputLayer(4, 11, "ssmax", learn=["s"]).double()
        x, y = rand(6, 4), torch.arange(6)
        if shards:
            for name in ("weight", "bias"):
                whole = getattr(layer, name).detach()
                setattr(layer, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
            value = layer.loss(replicated(x, mesh), y)
        else:
            value = layer.loss(x, y)
        value.backward()
        parts = [value, *(p.grad for p in layer.parameters())]
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in parts]
        found.append(torch.cat([x.detach().flatten() for x in whole]).tolist())
    return found[0], found[1]


class Model(nn.Module):
    """An output layer and the loss of shards of sequences. FSDP2 gathers its parameters for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = OutputLayer(8, 13, "entmax", bias=False).double()

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return linear_loss(hidden, self.head.weight, target, "entmax", reduction="sum")


def fsdp(mesh: DeviceMesh) -> Pair:
    """Loss and gradient with tokens and parameters shared out."""
    whole, model = Model(), Model()
    tokens = torch.arange(2 * 11).reshape(2, 11) * 5 % 13
    embedding = rand(13, 8)
    batch = shard_batch(tokens, mesh)
    fully_shard(model, mesh=mesh)
    part = model(embedding[batch.tokens], batch.labels) / batch.count
    (part * mesh.size()).backward()  # FSDP2 averages gradients
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    exact = whole(embedding[tokens], labels) / int((labels >= 0).sum())
    exact.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    found, want = model.head.weight.grad.full_tensor(), whole.head.weight.grad
    return (
        [float(total), *found.flatten().tolist()],
        [float(exact.detach()), *want.flatten().tolist()],
    )


# ---- mistakes ---


def _error(**changes: Any) -> str:
    """The error of a call as text."""
    mesh = mesh_of_all()
    x, e = rand(6, 4), rand(11, 4, seed=1)
    arguments = {
        "input": replicated(x, mesh),
        "linear_weight": distribute_tensor(e, mesh, [Shard(0)]),
        "target": torch.arange(6),
    }
    try:
        linear_loss(**{**arguments, **changes})
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def a_plain_input(rank: int) -> str:
    return _error(input=rand(6, 4))


def a_sharded_input(rank: int) -> str:
    return _error(input=distribute_tensor(rand(6, 4), mesh_of_all(), [Shard(0)]))


def a_plain_weight(rank: int) -> str:
    return _error(linear_weight=rand(11, 4))


def a_replicated_weight(rank: int) -> str:
    return _error(linear_weight=replicated(rand(11, 4), mesh_of_all()))


def features_sharded(rank: int) -> str:
    return _error(linear_weight=distribute_tensor(rand(11, 4), mesh_of_all(), [Shard(1)]))


def a_plain_bias(rank: int) -> str:
    return _error(linear_bias=rand(11))


def a_sharded_class_weight(rank: int) -> str:
    return _error(weight=distribute_tensor(rand(11).abs(), mesh_of_all(), [Shard(0)]))


def too_few_classes(rank: int) -> str:
    return _error(linear_weight=distribute_tensor(rand(1, 4), mesh_of_all(), [Shard(0)]))


def a_wrong_target_on_one_rank(rank: int) -> str:
    return _error(target=torch.arange(6) + 10 * rank)


def other_targets_on_one_rank(rank: int) -> str:
    return _error(target=torch.arange(6) + rank)


def another_variant_on_one_rank(rank: int) -> str:
    return _error(variant=["softmax", "entmax"][rank])


def sharded_logits(rank: int) -> str:
    z = distribute_tensor(rand(6, 4), mesh_of_all(), [Shard(1)])
    try:
        loss(z, torch.zeros(6, dtype=torch.long))
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


MISTAKES = {
    a_plain_input: "input must be a DTensor with placements .* got a plain tensor. If .* FSDP2",
    a_sharded_input: "input must be a DTensor with placements .* got a DTensor with placements",
    a_plain_weight: "linear_weight must be a DTensor if another argument is one",
    a_replicated_weight: "linear_weight must be sharded over classes .* got .*Replicate",
    features_sharded: "linear_weight must be sharded over classes .* got .*dim=1",
    a_plain_bias: "linear_bias must be a DTensor sharded like linear_weight, got a plain tensor",
    a_sharded_class_weight: "weight must be whole on each rank",
    too_few_classes: "linear_weight must have classes on each of 2 ranks, got 1 classes",
    a_wrong_target_on_one_rank: "target must be from 0 to 10|equal arguments on all ranks.*target",
    other_targets_on_one_rank: "must be called with equal arguments .*sum of target 15",
    another_variant_on_one_rank: "must be called with equal arguments .*variant='softmax'",
    sharded_logits: "logits must be a plain tensor, got a DTensor",
}


def everything(rank: int, rows: list[tuple[int, Row]]) -> dict[str, Any]:
    """All of the above, because starting ranks takes seconds."""
    mesh = mesh_of_all()
    return {
        "differences": differences(rank, rows),
        "pairs": {
            **{f"statistics of {variant}": statistics(variant, mesh) for variant in STATISTICS},
            "output layer": output_layer(mesh),
            "fsdp": fsdp(mesh),
        },
        "errors": {function.__name__: function(rank) for function in MISTAKES},
    }
