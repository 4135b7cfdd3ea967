"""LoRA (Hu et al. 2021, arXiv:2106.09685) in all linear layers of a model, through peft."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commandline.errors import UsageError

MARK = "lora_"  # in the names of the parameters that peft adds


def check() -> None:
    """Raise if peft is missing."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UsageError("--lora needs peft: pip install -e '.[lora]'") from error


def added(model: nn.Module, rank: int, seed: int) -> Any:
    """Add LoRA layers with fp32 parameters to the linear layers below the output layer, in place.

    The scale is that of peft with alpha = rank, which is 1. At the start the outputs of the model
    do not change. ``merged`` of the result is the model with the changed weights. The matrices A
    are drawn at random with ``seed``.
    """
    from peft import LoraConfig, LoraModel

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", lora_dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuner: Any = LoraModel(model, config, "default")  # type: ignore[arg-type]
    for name, value in tuner.model.named_parameters():
        if MARK in name:
            value.data = value.data.float()
    return tuner


def merged(tuner: Any) -> Any:
    """The model with the LoRA products added to its weights, without LoRA layers."""
    return tuner.merge_and_unload()
