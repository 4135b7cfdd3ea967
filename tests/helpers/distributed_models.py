"""Compares a converted model under FSDP2 and tensor parallelism with the same model on one rank.

Each of two ranks runs: python tests/helpers/distributed_models.py RANK PORT
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from attnzoo.integrations.transformers import convert  # noqa: E402
from helpers.hf_models import ids, llama  # noqa: E402

VARIANTS = {"ssmax": {}, "entmax": {"learn": ["alpha"], "alpha": 1.4}, "sink": {}}


def model(variant: str):
    made = convert(llama(), variant, **VARIANTS[variant])
    with torch.no_grad():  # a different value for each head
        for p in (p for n, p in made.named_parameters() if ".attnzoo." in n):
            p += torch.linspace(-0.1, 0.1, 4)
    return made


def learned(made) -> dict[str, torch.Tensor]:
    return {n: p for n, p in made.named_parameters() if ".attnzoo." in n}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) <= 1e-6 + 1e-4 * float(b.abs().max())


def main(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for variant in VARIANTS:
        alone = model(variant)
        want = alone(ids(), labels=ids())
        want.loss.backward()

        sharded = model(variant)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        out = sharded(ids(), labels=ids())
        out.loss.backward()
        assert close(out.logits, want.logits), variant
        for name, p in learned(sharded).items():
            assert close(p.grad.full_tensor(), learned(alone)[name].grad), name

        split = model(variant)
        plan = {f"{n}_proj": ColwiseParallel() for n in "qkv"} | {"o_proj": RowwiseParallel()}
        for layer in split.model.layers:
            parallelize_module(layer.self_attn, mesh, plan)
            layer.self_attn.attnzoo.shard_heads(mesh)
        out = split(ids(), labels=ids())
        out.loss.backward()
        assert close(out.logits, want.logits), variant
        for name, p in learned(split).items():
            assert close(p.grad.full_tensor(), learned(alone)[name].grad), name
    dist.barrier()
    dist.destroy_process_group()
    print("agreed", flush=True)
    # Threads of gloo and DTensor may still run, and Python's shutdown then sometimes aborts
    # (pytorch/pytorch#190489).
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
