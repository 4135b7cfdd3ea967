"""Measurements on each attention head: its sharpness, and quantities that `evals.theory` uses.

The last rows of the score matrix of an attention call are measured. Each row sees n keys. The
scores before the gain are z = scale · q·k + bias, and w are the weights in fp64. Each measurement
is a mean over rows and sequences:

    peak        the largest weight
    weight_sum  Σ w
    range       δ = max z − min z
    bound       min(1, e^δ / n), an upper bound on the weights of softmax at this δ
    alignment   ρ, the mean cosine between keys of different tokens
    strength    β / log n with β = scale · |q| · mean |k|, to compare with `critical_gain`
    jacobian    2-norm of ∂w/∂z in the last row of a few sequences; only if n is at most 256 and
                the weights are a function of z alone

and the measures of `evals.measures.sparsity`, such as entropy and n_eff.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnzoo
from commandline.variants import VariantCall
from evals.measures.sparsity import sparsity
from evals.task import HeadSample

ROWS = 4  # number of rows of the score matrix measured per sequence: the last ones
MOST_KEYS = 4096  # the cosine between keys uses at most the last 4096 keys
JACOBIAN_KEYS = 256
_PASSED = ("is_causal", "alibi", "relative_bias", "scale", "enable_gqa")


def own_parameters(attention: attnzoo.nn.Attention) -> dict[str, Any]:
    """The variant's parameters that a module in evaluation mode owns, by name: numbers and learned
    tensors (H, …)."""
    variant = attnzoo.get_variant(attention.variant)
    names = [param.name for param in variant.params if param.name not in attention.given]
    return {name: getattr(attention, name) for name in names} | variant.in_eval


def learned(model: nn.Module) -> dict[str, list[float]]:
    """The learned parameters (H,) of the model's variants by name: one value per head, all layers
    in order. Those of an output layer have names such as ``output alpha``."""
    values_by_name: dict[str, list[float]] = {}
    for module in model.modules():
        if isinstance(module, attnzoo.nn.Attention | attnzoo.nn.OutputLayer):
            prefix = "output " if isinstance(module, attnzoo.nn.OutputLayer) else ""
            for name in module.learned:
                values = getattr(module, name).detach()
                if prefix or values.ndim == 1:  # others are matrices (H, …)
                    values_by_name.setdefault(prefix + name, []).extend(values.tolist())
    return values_by_name


@contextmanager
def substituted(model: nn.Module, call: VariantCall | None) -> Iterator[None]:
    """Put another variant, without learned parameters, into every layer of the model.

    call: the other variant; None keeps the trained one.
    """
    if call is None:
        yield
        return
    children = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, attnzoo.nn.Attention)
    ]
    for parent, name, child in children:
        other = attnzoo.nn.Attention(call.name, child.num_heads, learn=(), **call.params)
        setattr(parent, name, other.to(next(model.parameters()).device).eval())
    try:
        yield
    finally:
        for parent, name, child in children:
            setattr(parent, name, child)


@contextmanager
def scaled_rope(model: nn.Module, scaling: Mapping[str, Any] | None) -> Iterator[None]:
    """Scale RoPE in a model that was trained without a scaling; None changes nothing.

    Raises:
        TypeError, ValueError: the model has no `attnzoo.nn.Transformer`, or one that does not
            support the scaling.
    """
    if scaling is None:
        yield
        return
    hosts = [x for x in model.modules() if isinstance(x, attnzoo.nn.Transformer)]
    if not hosts:
        raise TypeError(
            f"rope_scaling needs an attnzoo.nn.Transformer, got a model {type(model).__name__}"
        )
    try:
        for host in hosts:
            host.rope_scaling = scaling
        yield
    finally:
        for host in hosts:
            host.rope_scaling = None


@contextmanager
def attention_calls(model: nn.Module, record: Callable[..., None]) -> Iterator[None]:
    """Call record(module, args, kwargs) before each call of an `attnzoo.nn.Attention` in the model,
    or of the model if it is one."""
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True)
             for module in model.modules() if isinstance(module, attnzoo.nn.Attention)]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def measured_heads(model: nn.Module, sample: HeadSample) -> Iterator[dict[str, Tensor]]:
    """Measure the heads of every attention layer while the model runs once in this context.

    The dict is filled at the end. It has the measurements by name, such as "head_peak":
    (measured rows, layers · heads). It stays empty if the sample has no sequences.
    """
    layers: list[dict[str, Tensor]] = []
    curves: dict[str, Tensor] = {}

    def record(module: Any, qkv: tuple[Tensor, Tensor, Tensor], kwargs: dict[str, Any]) -> None:
        harmless = {*_PASSED, *module.given, "need_weights"}
        other = {n for n, x in kwargs.items() if n not in harmless and x not in (None, False)}
        assert not other, f"cannot measure heads with {other}"
        options = {name: kwargs[name] for name in _PASSED if name in kwargs}
        params = {name: kwargs[name] for name in module.given}
        layers.append(measure(module, *qkv, options, sample, params))

    if sample.sequences == 0:
        yield curves
        return
    with attention_calls(model, record):
        yield curves
    for name in layers[0] if layers else ():
        curves[f"head_{name}"] = torch.cat([layer[name] for layer in layers], -1)


def scores(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The scores before the gain (B, H, R, N) of the last R rows, and the mask of the keys that
    each row sees (R, N)."""
    z = (options.get("scale") or q.shape[-1] ** -0.5) * q @ k.transpose(-1, -2)
    rows, keys = z.shape[-2:]
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    if options.get("alibi") is not None:
        z = z - options["alibi"].to(z)[:, None, None] * distance.abs().to(z)
    if options.get("relative_bias") is not None:
        table = options["relative_bias"].to(z)
        radius = table.shape[-1] // 2
        z = z + table[:, radius - distance.clamp(-radius, radius).to(z.device)]
    causal = options.get("is_causal")
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return z, visible.to(z.device)


@torch.no_grad()
def measure(
    attention: attnzoo.nn.Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    sample: HeadSample,
    params: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The measurements of one call by name: (measured rows, H); for "jacobian" (sequences, H).

    ``params`` are the parameters per token that the call got, (B, H, Nq) or (B, H, Nk).
    """
    per_key = {x.name for x in attnzoo.get_variant(attention.variant).params if x.per_key}
    params = {
        name: (x if name in per_key else x[..., -ROWS:])[: sample.sequences].double()
        for name, x in params.items()
    }
    queries_per_key_head = q.shape[1] // k.shape[1]  # query heads that share keys
    q, k, v = (x[: sample.sequences].double() for x in (q[:, :, -ROWS:], k, v[..., :1]))
    k, v = (x.repeat_interleave(queries_per_key_head, dim=1) for x in (k, v))
    all_params: dict[str, Any] = own_parameters(attention) | params
    w = attnzoo.attention_weights(q, k, v, attention.variant, **options, **all_params)
    z, visible = scores(q, k, options)
    n = visible.sum(-1).clamp(min=2)
    keys = F.normalize(k[:, :, -MOST_KEYS:], dim=-1)
    count = keys.shape[2]
    cosine = (keys.sum(2).square().sum(-1) - keys.square().sum((2, 3))) / (count * (count - 1))
    lengths = q.norm(dim=-1) * k.norm(dim=-1).mean(-1, keepdim=True)
    largest = z.masked_fill(~visible, -math.inf).amax(-1)
    spread = largest - z.masked_fill(~visible, math.inf).amin(-1)
    per_row = {
        "peak": w.amax(-1),
        "weight_sum": w.sum(-1),
        **sparsity(w, visible.sum(-1)),
        "range": spread,
        "bound": (spread - n.log()).exp().clamp(max=1),
        "alignment": cosine[..., None].expand_as(lengths),
        "strength": (options.get("scale") or q.shape[-1] ** -0.5) * lengths / n.log(),
    }
    measured = {name: value.transpose(1, 2).flatten(0, 1) for name, value in per_row.items()}
    # Weights that depend on tokens, or on matrices (H, …), are not a function of z alone.
    has_matrices = any(x.size is not None for x in attnzoo.get_variant(attention.variant).params)
    if sample.jacobians and k.shape[2] <= JACOBIAN_KEYS and not (params or has_matrices):
        last = (slice(sample.jacobians), slice(None), -1, visible[-1])
        if torch.allclose(weights_at(z[last], attention.variant, all_params), w[last], atol=1e-6):
            measured["jacobian"] = jacobian_norms(z[last], attention.variant, all_params)
    return measured


def weights_at(z: Tensor, variant: str, params: Mapping[str, Any]) -> Tensor:
    """The weights (B, H, n) of a variant at scores (B, H, n), in fp64, with q = 1 and k = z.

    A parameter is a number or a tensor (H,). Noise that belongs to training is left out.
    """
    params = {**params, **attnzoo.get_variant(variant).in_eval}
    k = z.double()[..., None]
    q = torch.ones_like(k[:, :, :1])
    return attnzoo.attention_weights(q, k, k, variant, scale=1.0, **params)[:, :, 0]


def jacobian_norms(z: Tensor, variant: str, params: Mapping[str, Any]) -> Tensor:
    """‖∂w/∂z‖₂ (B, H) at scores z (B, H, n), from one backward pass over n copies."""
    params = {name: x.detach() if isinstance(x, Tensor) else x for name, x in params.items()}
    with torch.inference_mode(False), torch.enable_grad():  # callers may use inference mode
        copies = z.double().expand(z.shape[-1], *z.shape).clone().requires_grad_()
        w = weights_at(copies.flatten(0, 1), variant, params).view_as(copies)
        row = torch.eye(z.shape[-1]).to(w)[:, None, None].expand_as(w)  # copy i gets ∂w_i/∂z
        (jacobian,) = torch.autograd.grad(w, copies, row)
    jacobian = jacobian.movedim(0, -2)
    finite = jacobian.isfinite().all(-1).all(-1)  # matrix_norm raises on NaN
    norms = torch.linalg.matrix_norm(jacobian.where(finite[..., None, None], 0.0), 2)
    return norms.where(finite, math.nan)
