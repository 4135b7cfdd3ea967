"""What each attention head does: how sharply it attends, and what the laws of sharpness rest on.

Of the last rows of a call, each of which sees n keys, with z = scale · q·k + bias (no gain) and the
weights w in fp64; p = |w| / Σ|w|:

    peak        the largest weight
    entropy     H(p) / log n
    n_eff       1 / Σ p²
    mass        Σ w
    range       δ = max z − min z: softmax of these scores gives no key more than e^δ / n
    alignment   ρ, the mean cosine between the keys of two tokens
    strength    β / log n, β = scale · |q| · mean |k|: what the critical gain is compared with
    jacobian    2-norm of ∂w/∂z, where n is at most 256
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnzoo
from evals.cells import VariantCall

ROWS = 4  # rows of each sequence that are looked at
SEQUENCES = 8  # of the first batch
MOST_KEYS = 4096  # that the cosine between keys is taken over
JACOBIAN_KEYS = 256
FIGURES = ("peak", "entropy", "n_eff", "mass", "range", "alignment", "strength", "jacobian")

_PASSED = ("is_causal", "alibi", "window", "scale", "enable_gqa")


def own_parameters(attention: attnzoo.nn.Attention) -> dict[str, Any]:
    """What a module hands to its variant: numbers, and learned tensors (H,)."""
    names = [param.name for param in attnzoo.get_variant(attention.variant).params]
    return {name: getattr(attention, name) for name in names}


def learned(model: nn.Module) -> dict[str, list[float]]:
    """What the model's variants have learned: values by name, all layers and heads in order."""
    found: dict[str, list[float]] = {}
    for module in model.modules():
        if isinstance(module, attnzoo.nn.Attention):
            for name in module.learned:
                found.setdefault(name, []).extend(getattr(module, name).detach().tolist())
    return found


def fixed(call: VariantCall, num_heads: int, like: nn.Module) -> attnzoo.nn.Attention:
    """A variant swapped in at inference: nothing of it was learned."""
    device = next(like.parameters()).device
    return attnzoo.nn.Attention(call.name, num_heads, learn=(), **call.params).to(device)


@contextmanager
def swapped(model: nn.Module, call: VariantCall | None) -> Iterator[None]:
    """The model with another variant in every layer; None leaves it as it was trained."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if call is not None and isinstance(child, attnzoo.nn.Attention)
    ]
    for parent, name, child in places:
        assert call is not None
        setattr(parent, name, fixed(call, child.num_heads, model))
    try:
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)


class Watch:
    """Measures the heads of all attention that a model computes meanwhile, layer after layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: list[dict[str, Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        for module in self.model.modules():
            if isinstance(module, attnzoo.nn.Attention):
                hook = module.register_forward_pre_hook(self._look, with_kwargs=True)
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, attnzoo.nn.Attention)
        q, k, v = args
        options = {name: kwargs[name] for name in _PASSED if name in kwargs}
        self.layers.append(measure(module, q[:SEQUENCES], k[:SEQUENCES], v[:SEQUENCES], options))

    def curves(self) -> dict[str, Tensor]:
        """Figures (rows, layers · heads) by name, as "head_peak"."""
        names = self.layers[0] if self.layers else {}
        return {
            f"head_{name}": torch.cat([layer[name] for layer in self.layers], -1) for name in names
        }


@torch.no_grad()
def measure(
    attention: attnzoo.nn.Attention, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Figures (rows, H) of one call."""
    q, k = q[:, :, -ROWS:].double(), k.double()
    v = v[..., :1].double()
    own = own_parameters(attention)
    w = attnzoo.attention_weights(q, k, v, attention.variant, **options, **own)
    # A weight of softmax is exp(z − lse), whatever positions add to z: what cannot be seen is −∞.
    soft, lse = (
        attnzoo.attention_weights(q, k, v, "softmax", **options),
        attnzoo.attention(q, k, v, "softmax", return_lse=True, **options)[1],
    )
    z = soft.log() + lse[..., None]
    seen = soft > 0
    n = seen.sum(-1).clamp(min=2)
    total = w.abs().sum(-1)
    any_weight = total > 0
    p = w.abs() / total.masked_fill(~any_weight, 1.0)[..., None]
    keys = F.normalize(k[:, :, -MOST_KEYS:], dim=-1)
    count = keys.shape[2]
    cosine = (keys.sum(2).square().sum(-1) - keys.square().sum((2, 3))) / (count * (count - 1))
    lengths = q.norm(dim=-1) * k.norm(dim=-1).mean(-1, keepdim=True)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    found = {
        "peak": w.amax(-1),
        "entropy": -torch.special.xlogy(p, p).sum(-1) / n.log(),
        "n_eff": any_weight / p.square().sum(-1).masked_fill(~any_weight, 1.0),
        "mass": w.sum(-1),
        "range": z.masked_fill(~seen, -math.inf).amax(-1) - z.masked_fill(~seen, math.inf).amin(-1),
        "alignment": cosine[..., None].expand_as(lengths),
        "strength": scale * lengths / n.log(),
    }
    figures = {name: value.transpose(1, 2).flatten(0, 1) for name, value in found.items()}
    if k.shape[2] <= JACOBIAN_KEYS:
        last = z[0, :, -1].masked_fill(~seen[0, :, -1], z.min())
        norms = [jacobian_norm(row, attention.variant, head(own, h)) for h, row in enumerate(last)]
        figures["jacobian"] = torch.stack(norms)[None]
    return figures


def head(own: dict[str, Any], index: int) -> dict[str, Any]:
    """One head's part of a variant's parameters."""
    return {
        name: value.detach()[index : index + 1] if isinstance(value, Tensor) else value
        for name, value in own.items()
    }


def jacobian_norm(scores: Tensor, variant: str, params: dict[str, Any]) -> Tensor:
    """‖∂w/∂z‖₂ of a variant's weights at scores (n,), from one backward pass over n copies."""
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        n = len(scores)
        z = scores.double().expand(n, n).clone().requires_grad_()
        one = z.new_ones(n, 1, 1, 1)
        k = z[:, None, :, None]
        w = attnzoo.attention_weights(one, k, k, variant, scale=1.0, **params)
        (jacobian,) = torch.autograd.grad(w[:, 0, 0], z, torch.eye(n).to(z))
    return torch.linalg.matrix_norm(jacobian, 2)
