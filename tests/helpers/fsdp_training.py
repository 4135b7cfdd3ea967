"""A converted Llama on two ranks: trained in bf16 under FSDP, and with tensor parallelism."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from attnzoo.integrations.transformers import convert, from_config
from attnzoo.nn import Attention, parameter_groups
from helpers.hf_models import ids, llama

STEPS = 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ssmax": ("ssmax", {}),
    "entmax": ("entmax", {"learn": ["alpha"], "alpha": 1.4}),
    "hedgehog": ("hedgehog", {}),
    "differential": ("ssmax", {"wrapper": "differential"}),
    "gate": ("ssmax", {"wrapper": "output_gate"}),
    "forgetting": ("forgetting", {"wrapper": "qassmax"}),
}


def save_start(case: str, folder: Path) -> None:
    variant, options = CASES[case]
    convert(llama().bfloat16(), variant, **options).save_pretrained(folder)


def trained(model: Any) -> list[float]:
    """The losses of three steps."""
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, lr=3e-3, attention_lr=3e-2))
    losses = []
    for _ in range(STEPS):
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of one process."""
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    return trained(model), model.state_dict()


def on_meta(folder: str) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return from_config(AutoModelForCausalLM, config).train()


def fsdp2(folder: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = on_meta(folder)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights()  # sets tensors that are not in the state dict too
    return model


def fsdp1(folder: str) -> Any:
    model = FullyShardedDataParallel(
        on_meta(folder), device_id=torch.device("cpu"), use_orig_params=True,
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )  # fmt: skip
    with FullyShardedDataParallel.summon_full_params(model):
        model.module.init_weights()
    return model


def load(model: Any, folder: str) -> None:
    """Gives all ranks the weights that rank 0 reads."""
    state = {}
    if dist.get_rank() == 0:
        state = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def trained_on_ranks(rank: int, folder: str) -> dict[str, list[float]]:
    """The losses of all cases under FSDP2 and FSDP1, on two ranks with the same tokens.

    Saves the trained models with `save_pretrained`.
    """
    warnings.simplefilter("ignore")
    losses = {}
    for case in CASES:
        for kind, make in (("fsdp2", fsdp2), ("fsdp1", fsdp1)):
            start, name = f"{folder}/{case}", f"{case}-{kind}"
            model = make(start)
            load(model, start)
            if rank == 0:
                repr(model)  # must not wait for other ranks
            losses[name] = trained(model)
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            if rank == 0:
                unwrapped: Any = getattr(model, "module", model)
                unwrapped.save_pretrained(f"{folder}/{name}", state_dict=state)
            dist.barrier()
    return losses


def tensor_parallel(rank: int, folder: str) -> tuple[str, Tensor, float]:
    """The error without shard_heads, then the logits and the loss after a backward.

    Saves the model into ``folder``/saved.
    """
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    try:
        model(ids())
        message = "none"
    except ValueError as error:
        message = str(error)
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        if isinstance(module, Attention):
            module.shard_heads(mesh)
    out = model(ids(), labels=ids())
    out.loss.backward()
    model.save_pretrained(f"{folder}/saved")
    return message, out.logits.detach(), out.loss.item()
