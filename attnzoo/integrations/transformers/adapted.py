"""Attention modules that compute scores and softmax themselves, made to call `interface.attend`.

AttentionInterface does not reach such a module. In a converted model, its class becomes a subclass
with another forward. So does the class of the stack of layers that makes the bias of the scores: it
makes a row, as in `position_bias`. A forward of the module alone would refer to this module, and
its replicas on other devices (`torch.nn.DataParallel`) would use the weights of the first.

A module is recognized by its attributes and by the arguments of the method that is replaced. These
are MPNet's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.integrations.transformers.interface import attend
from attnzoo.integrations.transformers.masks import Mask

CODE = ("transformers", "torch", "attnzoo")  # packages whose modules are known to pass the bias on


class Replacement:
    """A method that takes the place of one of transformers, as a base of a subclass."""

    METHOD: str
    FIELDS: tuple[str, ...]  # attributes of the modules that have the method

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the bases, because no name leads to the subclass."""
        return _new, type(self).__bases__, vars(self)


class SelfAttention(Replacement):
    """Attention with a bias of the scores that all layers share."""

    METHOD = "forward"
    FIELDS = ("q", "k", "v", "o", "dropout", "attention_head_size")
    relative_attention_max_distance = 128  # the bias is constant beyond it

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Mask | Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        size, dropout = self.attention_head_size, self.dropout
        q, k, v = (
            layer(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out, weights = attend(
            self, q, k, v, attention_mask, dropout.p if dropout.training else 0.0, size**-0.5,
            is_causal=False, position_bias=position_bias, output_attentions=output_attentions,
            **kwargs,
        )  # fmt: skip
        out = self.o(out.flatten(2))
        return (out,) if weights is None else (out, weights)


class BiasOfStack(Replacement):
    """A bias by relative position, (1, H, 1, 2N - 1) instead of (B, H, N, N)."""

    METHOD = "compute_position_bias"
    FIELDS = ("relative_attention_bias", "relative_position_bucket")

    def compute_position_bias(
        self: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> Tensor:
        if position_ids is not None:
            return super().compute_position_bias(x, position_ids, num_buckets)  # pyright: ignore
        difference = torch.arange(1 - x.shape[1], x.shape[1], device=x.device)
        buckets = self.relative_position_bucket(difference, num_buckets=num_buckets)
        return self.relative_attention_bias(buckets).T[None, :, None]


def calls_interface(model: Any) -> bool:
    """Whether the attention of a model calls `interface.attend`, if need be after `adapt`."""
    return model._can_set_attn_implementation() or any(
        isinstance(x, SelfAttention) or _replacement(x) is SelfAttention for x in model.modules()
    )


def adapt(model: nn.Module, used: bool) -> Callable[[], None]:
    """Replaces the methods of the modules that are recognized, or not. Returns an undo function."""
    before: list[tuple[nn.Module, type]] = []
    for module in model.modules():
        kind, bases = type(module), type(module).__bases__
        replacement = _replacement(module)
        if used and replacement is not None:
            before.append((module, kind))
            module.__class__ = _subclass(replacement, kind)
        elif not used and bases[0] in (SelfAttention, BiasOfStack):
            before.append((module, kind))
            module.__class__ = bases[1]

    def undo() -> None:
        for module, kind in before:
            module.__class__ = kind

    return undo


def _replacement(module: Any) -> type[Replacement] | None:
    """What can replace a method of the module, or None."""
    for one in (SelfAttention, BiasOfStack):
        if isinstance(module, one) or not all(
            hasattr(module, name) for name in (one.METHOD, *one.FIELDS)
        ):
            continue
        arguments, new = (
            list(inspect.signature(getattr(kind, one.METHOD)).parameters)
            for kind in (type(module), one)
        )
        passing = module.modules() if one is BiasOfStack else [module]
        if arguments == new and all(type(x).__module__.split(".")[0] in CODE for x in passing):
            return one
    return None


@cache
def _subclass(replacement: type[Replacement], kind: type) -> type:
    return type(kind.__name__, (replacement, kind), {})


def _new(replacement: type[Replacement], kind: type) -> Any:
    subclass: Any = _subclass(replacement, kind)
    return subclass.__new__(subclass)
