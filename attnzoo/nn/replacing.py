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
        Wrappers that depend on the number of the layer get the number of the attention module in
        the order of ``model.modules()``. A model that is a single layer has the number 0. For
        another number use `MultiheadAttention.of`.

        Subclasses of torch's layer are not replaced. If you replace single layers of a
        `torch.nn.TransformerEncoder`, set its ``use_nested_tensor`` to False.

        A variant that supports causal calls only raises a ValueError when a layer calls it without
        ``is_causal``, as attention to another sequence does. Replace the other layers one by one::

            for layer in decoder.layers:
                layer.self_attn = replace(layer.self_attn, variant)
    """
    check_module("model", model)
    _check_no_adapter(model)
    theirs = [m for m in model.modules() if type(m) is nn.MultiheadAttention]
    ours = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
    both = {*theirs, *ours}
    if not both:
        raise ValueError(
            "model must be or contain a torch.nn.MultiheadAttention, got a "
            f"{type(model).__name__} without one"
        )
    if "layer" in options:
        raise TypeError("layer must not be given: replace numbers the attention modules itself")
    numbers = {m: number for number, m in enumerate(m for m in model.modules() if m in both)}
    attends = [layer.new_attend(variant, layer=numbers[layer], **options) for layer in ours]
    new: dict[Any, nn.Module] = {
        layer: MultiheadAttention.of(layer, variant, layer=numbers[layer], **options)
        for layer in theirs
    }
    for layer, attend in zip(ours, attends):
        layer.attend, layer.layer = attend, numbers[layer]
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children skips repeated modules
            if child in new:
                setattr(module, name, new[child])
        if isinstance(module, nn.TransformerEncoder):
            # Nested tensors need torch's fused path, which would bypass the new layers.
            module.enable_nested_tensor = module.use_nested_tensor = False
    return new.get(model, model)


def _check_no_adapter(model: nn.Module) -> None:
    """Raises if PEFT has wrapped a layer: it reads the matrices of torch's layer."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.MultiheadAttention):
            raise ValueError(
                f"merge the adapter of {name} before replace(), with model.merge_and_unload(), got "
                f"a layer that {type(module).__module__} has wrapped"
            )
