"""parameter_groups(): weight decay and learning rate of the learned parameters of variants."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnzoo.core.checks import is_finite, is_number, plain, shown
from attnzoo.nn.checks import check_module
from attnzoo.nn.parameters import VariantParameters
from attnzoo.nn.projections import HeadProjection


def parameter_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    lr: float | None = None,
    attention_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, without weight decay for learned variant parameters.

    Args:
        model: a module that contains `Attention` or `OutputLayer` modules.
        weight_decay: the weight decay of all other parameters, biases and norms included. None is
            that of the optimizer.
        lr: the learning rate of all other parameters; None is that of the optimizer.
        attention_lr: the learning rate of the learned parameters of the variants; None is ``lr``.

    Returns:
        Up to two groups, ``{"params": [...], "weight_decay": ..., "lr": ...}``: the other
        parameters with ``weight_decay``, the learned parameters of the variants with 0. A
        projection that makes a parameter has its matrix in the first group and its bias in the
        second. Empty groups, and entries that are None, are left out.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Transformer, parameter_groups
        >>> model = Transformer(99, embed_dim=32, num_heads=4, depth=2, variant="ssmax")
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
        >>> [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups]
        [(14, 0.1), (2, 0.0)]
        >>> groups = parameter_groups(model, 0.1, lr=3e-4, attention_lr=1e-2)
        >>> [g["lr"] for g in torch.optim.AdamW(groups).param_groups]
        [0.0003, 0.01]

    Notes:
        Zero is not a neutral value for a scale or a sink, so decay towards zero is a wrong prior.
        The Trainer of transformers follows the same rule with
        `attnzoo.integrations.transformers.TrainerMixin`.
    """
    check_module("model", model)
    weight_decay = check_rate("weight_decay", weight_decay)
    lr, attention_lr = check_rate("lr", lr), check_rate("attention_lr", attention_lr)
    constant = without_decay(model)
    if any(p.grad_fn is not None or not isinstance(p, nn.Parameter) for p in constant):
        raise ValueError(
            "model must own the learned parameters of its variants, but they are parts of a flat "
            "parameter: give FSDP use_orig_params=True"
        )
    if attention_lr is not None and not constant:
        raise ValueError(
            f"attention_lr must be None, because model has no learned parameters of a variant, got "
            f"{attention_lr}"
        )
    ids = {id(p) for p in constant}
    others = [p for p in model.parameters() if id(p) not in ids]
    attention_lr = lr if attention_lr is None else attention_lr
    groups = (
        {"params": others, "weight_decay": weight_decay, "lr": lr},
        {"params": constant, "weight_decay": 0.0, "lr": attention_lr},
    )
    return [
        {name: x for name, x in group.items() if x is not None}
        for group in groups
        if group["params"]
    ]


def check_rate(name: str, value: float | None) -> float | None:
    """The value; raises unless it is None or a finite number of at least 0."""
    value = plain(value)
    if value is None:
        return None
    if not is_number(value):
        raise TypeError(f"{name} must be a finite number >= 0 or None, got {shown(value)}")
    if not (value >= 0 and is_finite(value)):
        raise ValueError(f"{name} must be a finite number >= 0 or None, got {shown(value)}")
    return value


def without_decay(model: nn.Module) -> list[Tensor]:
    """The parameters of a model that must not decay.

    These are the parameters that variants learn, and the biases of the projections that make
    parameters. The matrices of projections may decay: with zeros, all tokens have the same value.
    """
    owners = [module for module in model.modules() if isinstance(module, VariantParameters)]
    tensors = [m.parameter_tensors()[name] for m in owners for name in m.learned]
    projections = (m for m in model.modules() if isinstance(m, HeadProjection))
    tensors += [m.bias for m in projections if m.bias is not None]
    return list(dict.fromkeys(tensors))
