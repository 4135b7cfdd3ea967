"""replace(): puts MultiheadAttention into a torch model."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import nn

from attnzoo.nn.checks import check_module
from attnzoo.nn.multihead import MultiheadAttention

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@overload
def replace(model: nn.MultiheadAttention, variant: str, **options: Any) -> MultiheadAttention: ...
@overload
def replace(model: ModuleT, variant: str, **options: Any) -> ModuleT: ...
def replace(model: nn.Module, variant: str, **options: Any) -> nn.Module:
    """Replaces each `torch.nn.MultiheadAttention` of a model by a `MultiheadAttention`, in place.

    The new layers share the parameters of the old ones, so an existing optimizer stays valid. The
    parameters that the variant learns are new, under each layer's ``attend``. In a layer that is
    already a `MultiheadAttention`, they replace the learned parameters of the former variant.
    Attention to another sequence, as in a `torch.nn.TransformerDecoderLayer`, is replaced too.

    Args:
        model: the model to change.
        variant: a name from `attnzoo.list_variants`.
        **options: ``learn``, ``softcap``, ``wrapper`` and parameters of the variant, as for
            `MultiheadAttention`.

    Returns:
        The model; or the new layer if the model is itself a `torch.nn.MultiheadAttention`.

    Raises:
        ValueError, TypeError: an argument is wrong, or the model has no such layer. The model is
            left unchanged.

    Example:
        >>> import torch
        >>> from attnzoo.nn import replace
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> model = replace(torch.nn.TransformerEncoder(layer, 2), "ssmax")
        >>> model(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
        >>> model.layers[0].self_attn.attend
        Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)

    Notes:
        Layers are numbered in the order of ``model.modules()``, for wrappers that depend on the
        number.

        A variant that supports causal calls only raises a ValueError when a layer calls it without
        ``is_causal``, as attention to another sequence does. Replace the other layers one by one::

            for layer in decoder.layers:
                layer.self_attn = replace(layer.self_attn, variant)
    """
    check_module("model", model)
    theirs = [m for m in model.modules() if type(m) is nn.MultiheadAttention]
    ours = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
    if not theirs and not ours:
        raise ValueError(
            "model must be or contain a torch.nn.MultiheadAttention, got a "
            f"{type(model).__name__} without one"
        )
    attends = [layer.new_attend(variant, **options) for layer in ours]
    new: dict[Any, nn.Module] = {
        layer: MultiheadAttention.of(layer, variant, number=number, **options)
        for number, layer in enumerate(theirs)
    }
    for layer, attend in zip(ours, attends):
        layer.attend = attend
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children skips repeated modules
            if child in new:
                setattr(module, name, new[child])
        if isinstance(module, nn.TransformerEncoder):
            # Nested tensors need torch's fused path, which would bypass the new layers.
            module.enable_nested_tensor = module.use_nested_tensor = False
    return new.get(model, model)
