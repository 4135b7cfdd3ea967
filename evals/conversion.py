"""The training of a=>b: it starts with the variant a, and continues with b."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

import attnzoo
from commandline.variants import VariantCall

_LEAST_GRADIENT = 1e-11  # a thousandth of AdamW's eps: smaller gradients move nothing


def moves(name: str, layers: Iterable[nn.Module]) -> bool:
    """Whether a parameter of attention layers has a gradient that can move it, in any of them."""
    # A bounded parameter is stored under a longer name.
    gradients = [x.grad for layer in layers for key, x in layer.named_parameters()
                 if name in key.split(".")]  # fmt: skip
    largest = max((float(x.abs().max()) for x in gradients if x is not None), default=0.0)
    return largest >= _LEAST_GRADIENT


def convert(model: nn.Module, other: nn.Module) -> None:
    """Replace the attention in a model by that of another model with the same other parameters.

    Parameters of the attention that both have keep their values.
    """
    for path, attention in list(model.named_modules()):
        if isinstance(attention, attnzoo.nn.Attention):
            new = other.get_submodule(path)
            shapes = {name: value.shape for name, value in new.state_dict().items()}
            shared = {
                name: value
                for name, value in attention.state_dict().items()
                if shapes.get(name) == value.shape
            }
            new.load_state_dict(shared, strict=False)
            model.set_submodule(path, new)


def check_switch(task: Any, variant: VariantCall, positions: str, settings: Any) -> None:
    """Check that a variant can replace the one before it.

    Raises:
        ValueError: one of the two has no steps, the models differ in more than the attention, or
            the training could not move a parameter of the variant from its initial value.
    """
    if not 0 < settings.switch_step < settings.steps:
        raise ValueError(
            "switch must leave steps for both variants of a=>b, got "
            f"{settings.switch:g} of {settings.steps} steps"
        )
    model, other = (task.build(x, positions, settings) for x in (variant.before, variant))
    convert(model, other)
    sizes = [{name: x.shape for name, x in m.named_parameters()} for m in (model, other)]
    if sizes[0] != sizes[1]:
        names = ", ".join(sorted(name for name, _ in sizes[0].items() ^ sizes[1].items()))
        raise ValueError(f"the models of a=>b must differ in the attention only, not in {names}")
    batch = task.batch(0, "train", settings.train_shortest, 0, 1, settings)
    task.loss(model, batch).backward()
    for module in model.modules():
        for name in module.learned if isinstance(module, attnzoo.nn.Attention) else ():
            if not moves(name, [module]):
                raise ValueError(
                    f"{name} has no gradient at its initial value, so training cannot move it; "
                    f"give another one, such as {variant.name}({name}=…)"
                )
