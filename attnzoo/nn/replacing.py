"""replace(): puts MultiheadAttention into a torch model."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import nn

from attnzoo.nn.checks import (
    check_cross_attention,
    check_module,
    check_not_of_layers,
    check_plain_layer,
)
from attnzoo.nn.multihead import MultiheadAttention

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Torch's wrappers that keep the layers or parameters that a module had when it was wrapped.
WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "ScriptModule": "torch.jit.script",
}


@overload
def replace(model: nn.MultiheadAttention, variant: str, **options: Any) -> MultiheadAttention: ...
@overload
def replace(model: ModuleT, variant: str, **options: Any) -> ModuleT: ...
def replace(model: nn.Module, variant: str, **options: Any) -> nn.Module:
    """Replaces each `torch.nn.MultiheadAttention` of a model by a `MultiheadAttention`, in place.

    The new layers share the parameters of the old ones, so an existing optimizer stays valid. The
    parameters that the variant learns are new, under each layer's ``attend``. In a layer that is
    already a `MultiheadAttention`, they replace the learned parameters of the former variant.
    Attention to another sequence, as in a `torch.nn.TransformerDecoderLayer`, is replaced too,
    except by variants whose weights depend on positions.

    Args:
        model: the model to change.
        variant: a name from `attnzoo.list_variants`.
        **options: ``learn``, ``softcap``, ``wrapper`` and parameters of the variant, as for
            `MultiheadAttention`. The parameter ``bias`` of the variant sigmoid is set in each new
            layer by ``layer.attend = Attention("sigmoid", num_heads, bias=…)``.

    Returns:
        The model; or the new layer if the model is itself a `torch.nn.MultiheadAttention`.

    Raises:
        ValueError, TypeError: an argument is wrong, the model has no such layer, or one of its
            layers cannot be replaced: a subclass, or one that is pruned, parametrized, sharded or
            compiled, or has an adapter, hooks or another forward. The model is left unchanged.

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

        If you replace single layers of a `torch.nn.TransformerEncoder`, set its
        ``use_nested_tensor`` to False.

        A variant whose weights depend on positions, such as all that support causal calls only,
        cannot attend to another sequence. Replace the other layers of a decoder one by one::

            for layer in decoder.layers:
                layer.self_attn = replace(layer.self_attn, variant)
    """
    check_module("model", model)
    _check_no_adapter(model)
    torch_layers = {m: n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    layers = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
    both = {*torch_layers, *layers}
    _check_wrappers(model)
    if not both:
        raise ValueError(
            "model must be or contain a torch.nn.MultiheadAttention, got a "
            f"{type(model).__name__} without one"
        )
    if "layer" in options:
        raise TypeError("layer must not be given: replace numbers the attention modules itself")
    check_not_of_layers(options)
    for layer, name in torch_layers.items():
        check_plain_layer(f"model's {name}" if name else "model", layer)
    numbers = {m: number for number, m in enumerate(m for m in model.modules() if m in both)}
    attends = [layer.new_attend(variant, layer=numbers[layer], **options) for layer in layers]
    new: dict[Any, MultiheadAttention] = {
        layer: MultiheadAttention.of(layer, variant, layer=numbers[layer], **options)
        for layer in torch_layers
    }
    positional = [*attends, *(layer.attend for layer in new.values())][0].needs_positions
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerDecoderLayer):
            where = ".".join(filter(None, (name, "multihead_attn")))
            check_cross_attention(positional, where, module.multihead_attn in both)
    for layer, attend in zip(layers, attends):
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


def _check_wrappers(model: nn.Module) -> None:
    """Raises if a wrapper of torch would not see the new layers."""
    for name, module in model.named_modules():
        where = f"model's {name}" if name else "model"
        # A compiled module sees new children, but calls the module that it was made from.
        if isinstance(getattr(module, "_orig_mod", None), nn.MultiheadAttention):
            raise ValueError(f"{where} must not be compiled: call replace before torch.compile")
        classes = {c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")}
        for wrapper in classes & WRAPPERS.keys():
            if any(map(_is_attention, module.modules())):
                raise ValueError(
                    f"{where} must not be wrapped, got a {wrapper}: call replace before "
                    f"{WRAPPERS[wrapper]}"
                )


def _is_attention(module: nn.Module) -> bool:
    scripted = getattr(module, "original_name", None) == nn.MultiheadAttention.__name__
    return scripted or isinstance(module, (nn.MultiheadAttention, MultiheadAttention))
