"""What each attention head does: how sharply it attends, and what the laws of sharpness rest on.

Of the last rows of a call, each of which sees n keys, with z = scale · q·k + bias (no gain) and the
weights w in fp64; p = |w| / Σ|w|. Each is a mean over rows and sequences:

    peak        the largest weight
    entropy     H(p) / log n
    n_eff       1 / Σ p²
    weight_sum        Σ w
    range       δ = max z − min z
    bound       min(1, e^δ / n): softmax of these scores gives no key more
    alignment   ρ, the mean cosine between the keys of two tokens
    strength    β / log n, β = scale · |q| · mean |k|: what the critical gain is compared with
    jacobian    2-norm of ∂w/∂z in the last row of a few sequences, where n is at most 256 and the
                weights are a function of z alone
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
from commandline.variants import VariantCall
from evals.task import HeadSample

ROWS = 4  # rows of each sequence that are looked at
MOST_KEYS = 4096  # that the cosine between keys is taken over
JACOBIAN_KEYS = 256
_PASSED = ("is_causal", "alibi", "scale")


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
    """A variant substituted at inference: nothing of it was learned."""
    device = next(like.parameters()).device
    return attnzoo.nn.Attention(call.name, num_heads, learn=(), **call.params).to(device)


@contextmanager
def substituted(model: nn.Module, call: VariantCall | None) -> Iterator[None]:
    """The model with another variant in every layer; None leaves it as it was trained."""
    children = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if call is not None and isinstance(child, attnzoo.nn.Attention)
    ]
    for parent, name, child in children:
        assert call is not None
        setattr(parent, name, fixed(call, child.num_heads, model))
    try:
        yield
    finally:
        for parent, name, child in children:
            setattr(parent, name, child)


class Watch:
    """Measures the heads of all attention that a model computes meanwhile, layer after layer."""

    def __init__(self, model: nn.Module, look: HeadSample) -> None:
        self.model, self.look = model, look
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
        other = {n for n, x in kwargs.items() if n not in _PASSED and x not in (None, False)}
        assert not other, f"heads are measured without {other}"
        options = {name: kwargs[name] for name in _PASSED if name in kwargs}
        self.layers.append(measure(module, q, k, v, options, self.look))

    def curves(self) -> dict[str, Tensor]:
        """BatchResult (rows, layers · heads) by name, as "head_peak"."""
        names = self.layers[0] if self.layers else {}
        return {
            f"head_{name}": torch.cat([layer[name] for layer in self.layers], -1) for name in names
        }


def scores(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """z (B, H, R, N) of the last R rows, and which keys each of them sees: (R, N)."""
    z = (options.get("scale") or q.shape[-1] ** -0.5) * q @ k.transpose(-1, -2)
    rows, keys = z.shape[-2:]
    back = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)  # from row i to key j
    if options.get("alibi") is not None:
        z = z - options["alibi"].to(z)[:, None, None] * back.abs().to(z)
    seen = back >= 0 if options.get("is_causal") else torch.ones_like(back, dtype=torch.bool)
    return z, seen.to(z.device)


@torch.no_grad()
def measure(
    attention: attnzoo.nn.Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    look: HeadSample,
) -> dict[str, Tensor]:
    """BatchResult (rows, H) of one call."""
    q, k, v = (x[: look.sequences].double() for x in (q[:, :, -ROWS:], k, v[..., :1]))
    own = own_parameters(attention)
    w = attnzoo.attention_weights(q, k, v, attention.variant, **options, **own)
    z, seen = scores(q, k, options)
    n = seen.sum(-1).clamp(min=2)
    total = w.abs().sum(-1)
    any_weight = total > 0
    p = w.abs() / total.masked_fill(~any_weight, 1.0)[..., None]
    keys = F.normalize(k[:, :, -MOST_KEYS:], dim=-1)
    count = keys.shape[2]
    cosine = (keys.sum(2).square().sum(-1) - keys.square().sum((2, 3))) / (count * (count - 1))
    lengths = q.norm(dim=-1) * k.norm(dim=-1).mean(-1, keepdim=True)
    spread = z.masked_fill(~seen, -math.inf).amax(-1) - z.masked_fill(~seen, math.inf).amin(-1)
    found = {
        "peak": w.amax(-1),
        "entropy": -torch.special.xlogy(p, p).sum(-1) / n.log(),
        "n_eff": any_weight / p.square().sum(-1).masked_fill(~any_weight, 1.0),
        "weight_sum": w.sum(-1),
        "range": spread,
        "bound": (spread - n.log()).exp().clamp(max=1),
        "alignment": cosine[..., None].expand_as(lengths),
        "strength": (options.get("scale") or q.shape[-1] ** -0.5) * lengths / n.log(),
    }
    figures = {name: value.transpose(1, 2).flatten(0, 1) for name, value in found.items()}
    if look.jacobians and k.shape[2] <= JACOBIAN_KEYS:
        last = (slice(look.jacobians), slice(None), -1, seen[-1])
        norms = _jacobians(z[last], w[last], attention.variant, own)
        if norms is not None:
            figures["jacobian"] = norms
    return figures


def _jacobians(z: Tensor, w: Tensor, variant: str, own: dict[str, Any]) -> Tensor | None:
    """Norms (B, H) at scores z (B, H, n); None where z alone does not give the weights w."""
    params = [head(own, index) for index in range(z.shape[1])]
    for index, mine in enumerate(params):
        if not torch.allclose(weights_at(z[:, index], variant, mine), w[:, index], atol=1e-6):
            return None
    norms = [
        [jacobian_norm(row, variant, mine) for row, mine in zip(rows, params, strict=True)]
        for rows in z
    ]
    return torch.tensor(norms, dtype=torch.float64)


def head(own: dict[str, Any], index: int) -> dict[str, Any]:
    """One head's part of a variant's parameters."""
    return {
        name: value.detach()[index : index + 1] if isinstance(value, Tensor) else value
        for name, value in own.items()
    }


def weights_at(z: Tensor, variant: str, params: dict[str, Any]) -> Tensor:
    """The weights (B, n) that a variant gives to scores (B, n): of q = 1 and k = z."""
    k = z[:, None, :, None]
    one = z.new_ones(len(z), 1, 1, 1)
    return attnzoo.attention_weights(one, k, k, variant, scale=1.0, **params)[:, 0, 0]


def jacobian_norm(scores: Tensor, variant: str, params: dict[str, Any]) -> float:
    """‖∂w/∂z‖₂ of a variant's weights at scores (n,), from one backward pass over n copies."""
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        n = len(scores)
        z = scores.double().expand(n, n).clone().requires_grad_()
        (jacobian,) = torch.autograd.grad(weights_at(z, variant, params), z, torch.eye(n).to(z))
    if not jacobian.isfinite().all():  # of which the norm cannot be taken
        return math.nan
    return torch.linalg.matrix_norm(jacobian, 2).item()
