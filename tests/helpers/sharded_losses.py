"""Losses with classes sharded over the ranks of a test, and mistakes in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attnzoo.distributed import shard_batch
from attnzoo.losses import arguments, linear_loss, loss, margin_loss
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
    """As `by_library`, with the classes sharded over a mesh."""
    leaves, arguments = inputs.arguments()
    for name in SHARDED:
        if name in leaves:
            arguments[name] = distribute_tensor(leaves[name].detach(), mesh, [Shard(0)])
            leaves[name] = arguments[name].requires_grad_()
    arguments["input"] = replicated(leaves["input"], mesh)
    value = linear_loss(variant=inputs.variant, **arguments)
    assert isinstance(value, DTensor)
    assert value.placements == (Replicate(),)
    none = inputs.options["reduction"] == "none"
    upstream = replicated(inputs.do.to(value.dtype), mesh) if none else None
    gradients = torch.autograd.grad(value, list(leaves.values()), upstream)
    result = {"loss": value.to_local().detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient.shape == leaf.shape
        result["d" + name] = gradient.full_tensor() if name in SHARDED else gradient
    return result


def differences(rank: int, rows: list[tuple[int, Row]]) -> dict[str, str]:
    """What differs from the definition, by row."""
    mesh, wrong = mesh_of_all(), {}
    for seed, row in rows:
        inputs = make(row, seed)
        actual, exact = by_ranks(inputs, mesh), by_definition(inputs)
        for name, want in exact.items():
            size = max(1.0, float(want.abs().max())) if want.numel() else 1.0
            near = torch.allclose(actual[name], want, rtol=0, atol=1e-10 * size, equal_nan=True)
            if not near:
                wrong[f"{label(row)}, {name}"] = str((actual[name] - want).abs().max())
    return wrong


STATISTICS = {"softmax": {}, "entmax": {"alpha": 1.3}, "sigmoid": {}, "topk": {"top_k": 7}}
Pair = tuple[list[float], list[float]]  # by ranks, and by one process


def statistics(variant: str, mesh: DeviceMesh) -> Pair:
    params: dict[str, Any] = STATISTICS[variant]
    x, e, y = rand(6, 4), rand(11, 4, seed=1), torch.tensor([0, 4, 10, -100, 3, 6])
    sharded = distribute_tensor(e, mesh, [Shard(0)])
    results = []
    for stats in (
        linear_loss(replicated(x, mesh), sharded, y, variant, return_stats=True, **params)[1],
        linear_loss(x, e, y, variant, return_stats=True, **params)[1],
    ):
        plain = [x.to_local() if isinstance(x, DTensor) else x for x in stats if x is not None]
        results.append(torch.stack([x.double() for x in plain]).nan_to_num(-1).flatten().tolist())
    return results[0], results[1]


def output_layer(mesh: DeviceMesh) -> Pair:
    """Loss and gradients of an `OutputLayer`."""
    results = []
    for shards in (True, False):
        torch.manual_seed(0)
        layer = OutputLayer(4, 11, "ssmax", learn=["s"]).double()
        if shards:
            layer.shard_classes(mesh)
        value = layer.loss(rand(6, 4), torch.arange(6))
        value.backward()
        parts = [value, *(p.grad for p in layer.parameters())]
        full = [x.full_tensor() if isinstance(x, DTensor) else x for x in parts]
        results.append(torch.cat([x.detach().flatten() for x in full]).tolist())
    return results[0], results[1]


def logits_that_are_not_finite(mesh: DeviceMesh) -> dict[str, Pair]:
    """Loss, statistics and gradient with a logit that is inf or NaN, on each rank."""
    pairs = {}
    for variant, value, place in itertools.product(
        ("softmax", "entmax"), (float("inf"), float("nan")), (0, 10)
    ):
        pair = []
        for shards in (True, False):
            x, e, y = rand(6, 4).abs(), rand(11, 4, seed=1), torch.tensor([1, 2, 3, 4, 5, 6])
            e[place, 0] = value
            e = distribute_tensor(e, mesh, [Shard(0)]) if shards else e
            x = replicated(x, mesh) if shards else x
            loss, stats = linear_loss(x, e.requires_grad_(), y, variant, return_stats=True)
            (de,) = torch.autograd.grad(loss, e)
            parts = [loss, de, *(x for x in stats[:2] if x is not None)]
            plain = [x.full_tensor() if isinstance(x, DTensor) else x for x in parts]
            pair.append(torch.cat([x.isnan().double().flatten() for x in plain]).tolist())
        pairs[f"NaN of {variant} with {value} in class {place}"] = (pair[0], pair[1])
    return pairs


class Model(nn.Module):
    """An output layer and the loss of shards of sequences. FSDP2 gathers its parameters for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = OutputLayer(8, 13, "entmax", bias=False).double()

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return linear_loss(hidden, self.head.weight, target, "entmax", reduction="sum")


def fsdp(mesh: DeviceMesh) -> Pair:
    """Loss and gradient with sharded tokens and parameters."""
    reference, model = Model(), Model()
    tokens = torch.arange(2 * 11).reshape(2, 11) * 5 % 13
    embedding = rand(13, 8)
    batch = shard_batch(tokens, mesh)
    fully_shard(model, mesh=mesh)
    part = model(embedding[batch.tokens], batch.labels) / batch.count
    (part * mesh.size()).backward()  # FSDP2 averages gradients
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    exact = reference(embedding[tokens], labels) / int((labels >= 0).sum())
    exact.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    gradient, expected = model.head.weight.grad.full_tensor(), reference.head.weight.grad
    return (
        [float(total), *gradient.flatten().tolist()],
        [float(exact.detach()), *expected.flatten().tolist()],
    )


# ---- mistakes ---


def _text(call: Callable[[], object]) -> str:
    """The error of a call as text."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _error(**changes: Any) -> str:
    mesh = mesh_of_all()
    x, e = rand(6, 4), rand(11, 4, seed=1)
    arguments = {
        "input": replicated(x, mesh),
        "linear_weight": distribute_tensor(e, mesh, [Shard(0)]),
        "target": torch.arange(6),
    }
    return _text(lambda: linear_loss(**{**arguments, **changes}))


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


def targets_in_another_order(rank: int) -> str:
    y = torch.arange(6)
    return _error(target=y.flip(0) if rank else y)


def other_ignored_tokens(rank: int) -> str:
    y = torch.tensor([[-1, 2, 2, 2, 2, 2], [1, 2, 2, 2, 1, 1]][rank])
    return _error(target=y, ignore_index=-1)


def other_class_weights_on_one_rank(rank: int) -> str:
    return _error(weight=torch.ones(11, dtype=torch.float64) + rank)


def another_mask_on_one_rank(rank: int) -> str:
    mask = torch.ones(6, 11, dtype=torch.bool)
    mask[3, 7 + rank] = False
    return _error(class_mask=mask[3], target=torch.zeros(6, dtype=torch.long))


def other_classes_in_a_row(rank: int) -> str:
    """Each row of the two masks has equally many classes."""
    mask = torch.ones(6, 11, dtype=torch.bool)
    mask[3, 7 + rank] = False
    return _error(class_mask=mask, target=torch.zeros(6, dtype=torch.long))


def a_plain_bias_on_one_rank(rank: int) -> str:
    sharded = distribute_tensor(rand(11), mesh_of_all(), [Shard(0)])
    return _error(linear_bias=rand(11) if rank else sharded)


def another_number_of_biases(rank: int) -> str:
    return _error(linear_bias=distribute_tensor(rand(12), mesh_of_all(), [Shard(0)]))


def two_dimensional_mesh(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    weight = distribute_tensor(rand(11, 4), mesh, [Replicate(), Shard(0)])
    return _error(linear_weight=weight)


def a_class_that_does_not_exist(rank: int) -> str:
    """On a GPU, targets are not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "is_readable", lambda x: False)
        mesh = mesh_of_all()
        e = distribute_tensor(rand(11, 4, seed=1), mesh, [Shard(0)])
        y = torch.tensor([0, 1, 11, 3, 4, 5])
        losses = linear_loss(replicated(rand(6, 4), mesh), e, y, reduction="none").to_local()
    return f"NaN at {losses.isnan().nonzero().flatten().tolist()}"


def probabilities_of_sharded_classes(rank: int) -> str:
    layer = OutputLayer(4, 11).shard_classes(mesh_of_all())
    x, y = torch.zeros(3, 4), torch.arange(3)
    calls = (lambda: layer(x, y), lambda: layer.predict(x), lambda: layer.log_prob(x))
    return " | ".join(map(_text, calls))


def wrong_calls_of_shard_classes(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    layer = OutputLayer(4, 11).shard_classes(mesh["tp"])
    calls = (
        lambda: OutputLayer(4, 11).shard_classes("cpu"),
        lambda: OutputLayer(4, 11).shard_classes(mesh),
        lambda: layer.shard_classes(mesh["tp"]),
    )
    return " | ".join(map(_text, calls))


def other_losses(rank: int) -> str:
    e = distribute_tensor(rand(11, 4, seed=1), mesh_of_all(), [Shard(0)])
    return _text(lambda: margin_loss(rand(6, 4), e, torch.arange(6)))


def another_variant_on_one_rank(rank: int) -> str:
    return _error(variant=["softmax", "entmax"][rank])


def sharded_logits(rank: int) -> str:
    z = distribute_tensor(rand(6, 4), mesh_of_all(), [Shard(1)])
    return _text(lambda: loss(z, torch.zeros(6, dtype=torch.long)))


def a_sharded_target_of_logits(rank: int) -> str:
    y = distribute_tensor(torch.zeros(6, dtype=torch.long), mesh_of_all(), [Shard(0)])
    return _text(lambda: loss(rand(6, 4), y))


EQUAL = "linear_loss must be called with equal arguments on all ranks.*"
MISTAKES: dict[Callable[[int], str], str] = {
    a_plain_input: "input must be a DTensor .*got a plain tensor. Use DTensor.from_local.*FSDP2",
    a_sharded_input: r"input must have placements .*got \(Shard.*use input.redistribute",
    a_plain_weight: "linear_weight must be a DTensor, as input is one, got a plain tensor",
    a_replicated_weight: r"linear_weight must have placements \(Shard.*got .*Replicate",
    features_sharded: r"linear_weight must have placements \(Shard.*got .*dim=1",
    two_dimensional_mesh: "on a mesh with one dimension, such as mesh..tp..",
    a_plain_bias: "linear_bias must be a DTensor sharded like linear_weight, got a plain tensor",
    a_plain_bias_on_one_rank: "got a plain tensor|raised on another rank; rank 1: ValueError",
    another_number_of_biases: r"linear_bias must have shape \(11,\).*got \(12,\)",
    a_sharded_class_weight: "weight must be whole on each rank",
    too_few_classes: "linear_weight must have classes on each of 2 ranks, got 1 classes",
    a_wrong_target_on_one_rank: "target must be from 0 to 10|raised on another rank; rank 1",
    targets_in_another_order: f"{EQUAL}checksum of target",
    other_ignored_tokens: f"{EQUAL}checksum of target",
    other_class_weights_on_one_rank: f"{EQUAL}checksum of weight",
    another_mask_on_one_rank: f"{EQUAL}checksum of class_mask",
    other_classes_in_a_row: f"{EQUAL}checksum of class_mask",
    another_variant_on_one_rank: f"{EQUAL}variant='softmax'",
    a_class_that_does_not_exist: r"NaN at \[2\]",
    probabilities_of_sharded_classes: "only the methods loss .*got a DTensor.*got a DTensor",
    wrong_calls_of_shard_classes: "mesh must be a DeviceMesh.*one dimension.*must be called once",
    other_losses: "linear_weight must be a plain tensor, got a DTensor; only linear_loss",
    sharded_logits: "logits must be a plain tensor, got a DTensor; see linear_loss",
    a_sharded_target_of_logits: "target must be a plain tensor, got a DTensor",
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
            **logits_that_are_not_finite(mesh),
        },
        "errors": {function.__name__: function(rank) for function in MISTAKES},
    }
