"""Projections: parameters of a variant that modules make from the hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.call import widened
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Param
from attnzoo.nn.checks import check_like
from attnzoo.nn.parameters import Names
from attnzoo.nn.sharding import local

PROJECTED = "projected"  # the value of an option for a parameter that a layer makes


class HeadProjection(nn.Module):
    """x·Wᵀ + b with one output per head: (B, N, features) -> (B, H, N).

    ``start`` is the initial value of b; None is no b. W is 0 initially, so that each head starts
    with the same value for all tokens, and models with the same seed have the same other matrices
    for every variant. W still gets gradients.
    """

    def __init__(self, features: int, num_heads: int, start: float | None, **kind: Any) -> None:
        super().__init__()
        self.start, self.features, self.num_heads = start, features, num_heads
        self.weight = nn.Parameter(torch.empty(num_heads, features, **kind))
        self.bias = None if start is None else nn.Parameter(torch.empty(num_heads, **kind))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None and self.start is not None:
            nn.init.constant_(self.bias, self.start)

    def forward(self, x: Tensor) -> Tensor:
        check_like("hidden states", x, self.weight)
        # The bias is added in fp32, because bf16 would round a sum near 5 to multiples of 1/32.
        out = widened(F.linear(x, local(self.weight)))
        return (out if self.bias is None else out + local(self.bias)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"features={self.features}, num_heads={self.num_heads}"


class Projections(nn.ModuleDict):
    """The projections that make parameters of a variant, by name of the parameter."""

    def __init__(
        self, variant: str, names: Names, num_heads: int, query_dim: int, key_dim: int, **kind: Any
    ) -> None:
        super().__init__()
        self.variant = variant
        for name, spec in _projected(variant).items():
            if name in names:
                assert spec.projection is not None
                features = key_dim if spec.per_key else query_dim
                self[name] = HeadProjection(features, num_heads, spec.projection.bias, **kind)

    @property
    def per_key(self) -> tuple[str, ...]:
        """The names of the parameters with one value per key."""
        params = _projected(self.variant).items()
        return tuple(name for name, spec in params if spec.per_key and name in self)

    def reset_parameters(self) -> None:
        for projection in self.values():
            assert isinstance(projection, HeadProjection)
            projection.reset_parameters()

    def forward(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """The parameters (B, H, N), keyed by name, from hidden states (B, N, features).

        Parameters with one value per key are made from ``key``, others from ``query``.
        """
        params = {}
        for name, spec in _projected(self.variant).items():
            if name in self:
                assert spec.projection is not None
                params[name] = spec.projection.value(self[name](key if spec.per_key else query))
        return params


def split_projected(
    variant: str, options: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The parameters that a layer makes from the hidden states, and its other options.

    A parameter with a projection is made if its option is "projected". Without an option it is
    made, too, unless it has an initial value, or ``learn`` is given without its name.
    """
    learn, others, names = options.get("learn"), dict(options), []
    # `Attention` raises if learn is not a sequence, or has a name twice.
    once = learn if isinstance(learn, (tuple, list)) else ()
    for name, spec in _projected(variant).items():
        value = options.get(name)
        if isinstance(value, str) and value == PROJECTED:
            del others[name]
            names.append(name)
        elif name not in options and spec.init is None and (learn is None or once.count(name) == 1):
            names.append(name)
    if names and once:
        others["learn"] = [name for name in once if name not in names]
    return tuple(names), others


def _projected(variant: str) -> dict[str, Param]:
    params = get_variant(variant).params
    return {param.name: param for param in params if param.projection is not None}
