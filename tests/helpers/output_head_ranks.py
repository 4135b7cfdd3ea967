"""The loss of a variant in the output layer of a small Llama on two ranks."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attnzoo.integrations.transformers.output_head import HeadLoss
from helpers.hf_models import ids, llama

CASES = ("ddp", "fsdp2", "fsdp2, tied weights", "fsdp2, output layer by itself")


def model_of(case: str) -> Any:
    return llama(tie_word_embeddings="tied" in case).double()


def losses_and_gradients(rank: int) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """The loss of a rank's row, and the gradients of the mean over the ranks."""
    warnings.simplefilter("ignore")
    mesh, results = init_device_mesh("cpu", (2,)), {}
    for case in CASES:
        model = model_of(case)
        called: Any = model
        if case == "ddp":
            called = DistributedDataParallel(model)
        else:
            if "by itself" in case:
                fully_shard(model.lm_head, mesh=mesh)
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
        head, row = HeadLoss(model, "entmax", None), ids()[rank : rank + 1]
        inputs = head.with_shift_labels(called, {"input_ids": row, "labels": row})
        targets = inputs["shift_labels"]
        with head.computing(targets, None, logits=False):
            loss = head.result(called(input_ids=inputs["input_ids"]))
        loss.backward()
        gradients = {name: x.grad for name, x in model.named_parameters()}
        results[case] = (
            loss.item(),
            {
                name: x.full_tensor() if isinstance(x, DTensor) else x
                for name, x in gradients.items()
            },
        )
    return results
