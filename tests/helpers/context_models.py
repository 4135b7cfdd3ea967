"""Trains models whose sequences are sharded over ranks, for comparison with one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from attnzoo.distributed import Batch, shard, shard_batch, shard_sequence
from attnzoo.nn import AdaptiveSoftmax, Transformer

TOKENS, BATCH, LENGTH, STEPS = 99, 2, 27, 3  # neither 2 nor 4 divides the length


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(
        TOKENS, 32, 4, 2, [("ssmax", {}), ("entmax", {"learn": ["alpha"], "alpha": 1.4})],
        num_kv_heads=2, qk_norm=True,
    )  # fmt: skip
    return model.double()


def converted() -> nn.Module:
    from attnzoo.integrations.transformers import convert
    from helpers.hf_models import llama

    return convert(llama(), "ssmax").double().train()


MODELS: dict[str, Callable[[], nn.Module]] = {"transformer": transformer, "llama": converted}


def data() -> Tensor:
    return torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(name: str, model: nn.Module, batch: Batch, count: int) -> Tensor:
    """The rank's part of the mean loss over ``count`` labels."""
    if name == "llama":
        return model(**{**batch.transformers, "num_items_in_batch": count}).loss
    logits = model(batch.tokens, attn_mask=batch.key_mask)
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / count


def trained(model: nn.Module, loss: Callable[[], Tensor], total: Callable[[Tensor], Any]) -> list:
    """The losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(float(total(value.detach())))
    return losses


def alone(name: str) -> list[float]:
    """The losses of one process with the whole batch."""
    model, tokens = MODELS[name](), data()
    count = BATCH * (LENGTH - 1)

    def loss() -> Tensor:
        if name == "llama":
            return model(tokens, labels=tokens, use_cache=False).loss
        logits = model(tokens)[:, :-1]
        return (
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / count
        )

    return trained(model, loss, lambda x: x)


def summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def on_two_ranks(rank: int, name: str, method: str, layout: Any) -> list[float]:
    mesh = dist.init_device_mesh("cpu", (2,))
    model = shard_sequence(MODELS[name](), mesh, method, layout=layout)  # type: ignore[arg-type]
    batch = shard_batch(data(), mesh, layout=layout)
    return trained(model, lambda: loss_of(name, model, batch, batch.count), summed)


def packed(rank: int) -> list[list[float]]:
    """The output of a transformer for packed documents, and that of one process; both shards."""
    mesh = dist.init_device_mesh("cpu", (2,))
    tokens = data()[:, :24]
    ids = torch.zeros_like(tokens)
    ids[:, 5:], ids[:, 13:] = 1, 2  # boundaries inside of chunks; one segment spans two ranks
    with torch.no_grad():
        expected = shard(transformer()(tokens, segment_ids=ids), mesh)
        model = shard_sequence(transformer(), mesh, "ring")
        out = model(shard(tokens, mesh), segment_ids=shard(ids, mesh))
    return [out.flatten().tolist(), expected.flatten().tolist()]


def left_padded(rank: int) -> list[list[float]]:
    """The output of a transformer for padded tokens, and that of one process; both shards."""
    mesh = dist.init_device_mesh("cpu", (2,))
    tokens = data()[:, :24]
    mask = torch.arange(24) >= torch.tensor([[0], [9]])
    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12}
    model = Transformer(TOKENS, 32, 4, 2, "elu", rope_scaling=yarn).double()
    with torch.no_grad():
        expected = shard(model(tokens, attn_mask=mask[:, None, None]), mesh)
        model = shard_sequence(model, mesh, "ring")
        out = model(shard(tokens, mesh), attn_mask=shard(mask, mesh)[:, None, None])
    return [out.flatten().tolist(), expected.flatten().tolist()]


def gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    states = model.states(batch.tokens, attn_mask=batch.key_mask)  # type: ignore[operator]
    (model.loss(states, batch.labels) * 0.5).backward()  # type: ignore[operator]
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def reduced_gradients(rank: int) -> list[str]:
    """The names of parameters whose gradient is not the sum over the ranks, and other mistakes.

    The output layer has a cluster with targets on one rank only. The model is sharded twice, and a
    parameter is frozen at first.
    """
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    output = AdaptiveSoftmax(32, 60, [20, 40])
    model = Transformer(60, 32, 4, 2, "ssmax", output=output).double()
    model.norm.weight.requires_grad_(False)
    tokens = torch.cat([torch.arange(8) % 20, torch.arange(8) + 50])[None]
    batch = shard_batch(tokens, mesh, layout="contiguous")
    shard_sequence(model, mesh, layout="contiguous", reduce_gradients=False)
    model.norm.weight.requires_grad_(True)
    expected = {n: summed(g) for n, g in sorted(_all(model, gradients(model, batch)).items())}
    model.norm.weight.requires_grad_(False)
    shard_sequence(model, mesh, layout="contiguous")
    shard_sequence(model, mesh, "all_gather", layout="contiguous")
    model.norm.weight.requires_grad_(True)
    actual = gradients(model, batch)
    wrong = [n for n, g in expected.items() if not torch.allclose(actual[n], g, rtol=1e-9)]
    # A second backward adds to the gradients.
    states = model.states(batch.tokens, attn_mask=batch.key_mask)
    (model.loss(states, batch.labels) * 0.5).backward()
    again = {n: p.grad for n, p in model.named_parameters()}
    wrong += [
        f"{n}, accumulated" for n, g in expected.items()
        if again[n] is None or not torch.allclose(again[n], 2 * g, rtol=1e-9)  # type: ignore
    ]  # fmt: skip
    model.zero_grad()
    states = model.states(batch.tokens, attn_mask=batch.key_mask)
    torch.autograd.grad(model.loss(states, batch.labels), [model.embed.weight])
    wrong += [f"{n}, set by grad" for n, p in model.named_parameters() if p.grad is not None]
    reference = weakref.ref(model)
    del model, states, actual, again, output
    gc.collect()
    return wrong + ["the model, which is still alive"] * (reference() is not None)


def _all(model: nn.Module, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """With zeros for parameters without a gradient."""
    return {n: by_name.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}


def window_of_a_host(rank: int, window: int, layout: Any) -> list[list[float]]:
    """The logits of a converted model with a sliding window, and those of one process."""
    from attnzoo.integrations.transformers import convert
    from helpers.hf_models import mistral

    mesh = dist.init_device_mesh("cpu", (2,))
    tokens = data()[:, :16]
    with torch.no_grad():
        host = convert(mistral(sliding_window=window), "ssmax").double()
        expected = shard(host(tokens, use_cache=False).logits, mesh, layout=layout)
        model = shard_sequence(host, mesh, layout=layout)
        logits = model(**shard_batch(tokens, mesh, layout=layout).transformers).logits
    return [logits.flatten().tolist(), expected.flatten().tolist()]


def mistakes_with_hosts(rank: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (2,))
    model = shard_sequence(MODELS["llama"](), mesh)
    tokens = data()[:, :8]
    messages = []
    for options in ({}, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}):
        try:
            model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def beside_fsdp(rank: int, name: str) -> list[float]:
    """Two ranks share a sequence; the parameters are sharded over two others, with other rows."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))
    model = MODELS[name]()
    layers = model.model.layers if name == "llama" else model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shard_sequence(model, mesh["context"], "ulysses")
    row = mesh["data"].get_local_rank()
    batch = shard_batch(data()[row : row + 1], mesh["context"])
    # FSDP2 takes the mean of the gradients over all ranks, and the loss is a sum of parts.
    count = BATCH * (LENGTH - 1) / dist.get_world_size()
    losses = trained(model, lambda: loss_of(name, model, batch, count), summed)  # type: ignore[arg-type]
    return [loss / dist.get_world_size() for loss in losses]


def beside_tensor_parallelism(rank: int) -> list[float]:
    """Two ranks share a sequence, two others the heads."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    model = MODELS["llama"]()
    plan = {f"{n}_proj": ColwiseParallel() for n in "qkv"} | {"o_proj": RowwiseParallel()}
    layers: Any = model.model.layers
    for layer in layers:
        parallelize_module(layer.self_attn, mesh["heads"], plan)
        layer.self_attn.attnzoo.shard_heads(mesh["heads"])
    shard_sequence(model, mesh["context"], "ring")
    batch = shard_batch(data(), mesh["context"])
    losses = trained(model, lambda: loss_of("llama", model, batch, batch.count), summed)
    return [loss / 2 for loss in losses]  # both ranks of the heads have it
