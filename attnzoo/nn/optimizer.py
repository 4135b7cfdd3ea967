"""parameter_groups(): excludes the learned parameters of variants from weight decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnzoo.core.checks import is_finite, is_number, plain, shown
from attnzoo.nn.checks import check_module
from attnzoo.nn.parameters import VariantParameters
from attnzoo.nn.projections import HeadProjection


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, without weight decay for learned variant parameters.

    Args:
        model: a module that contains `Attention` or `OutputLayer` modules.
        weight_decay: the weight decay of all other parameters, biases and norms included.

    Returns:
        Up to two groups, ``{"params": [...], "weight_decay": ...}``: the other parameters with
        ``weight_decay``, the learned parameters of the variants with 0. A projection that makes a
        parameter has its matrix in the first group and its bias in the second. Empty groups are
        left out.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Transformer, parameter_groups
        >>> model = Transformer(99, embed_dim=32, num_heads=4, depth=2, variant="ssmax")
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
        >>> [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups]
        [(14, 0.1), (2, 0.0)]

    Notes:
        Zero is not a neutral value for a scale or a sink, so decay towards zero is a wrong prior.
        The Trainer of transformers follows the same rule with
        `attnzoo.integrations.transformers.TrainerMixin`.
    """
    check_module("model", model)
    weight_decay = plain(weight_decay)
    if not is_number(weight_decay):
        raise TypeError(f"weight_decay must be a finite number >= 0, got {shown(weight_decay)}")
    if not (weight_decay >= 0 and is_finite(weight_decay)):
        raise ValueError(f"weight_decay must be a finite number >= 0, got {shown(weight_decay)}")
    constant = without_decay(model)
    ids = {id(p) for p in constant}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = ((others, weight_decay), (constant, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def without_decay(model: nn.Module) -> list[Tensor]:
    """The parameters of a model that must not decay.

    These are the parameters that variants learn, and the biases of the projections that make
    parameters. The matrices of projections may decay: with zeros, all tokens have the same value.
    """
    owners = [module for module in model.modules() if isinstance(module, VariantParameters)]
    found = [m.parameter_tensors()[name] for m in owners for name in m.learned]
    projections = (m for m in model.modules() if isinstance(m, HeadProjection))
    found += [m.bias for m in projections if m.bias is not None]
    return list(dict.fromkeys(found))
