"""The pairwise form written out densely, as an independent reference for the backends."""

from __future__ import annotations

import torch
from torch import Tensor

import attnzoo
from attnzoo.core.call import Call


def wide(x: Tensor | float | None, default: float = 0.0) -> Tensor | float:
    """A per-query vector (…, Nq) as (…, Nq, 1)."""
    if x is None:
        return default
    return x[..., None] if isinstance(x, Tensor) else x


def dense_scores(q: Tensor, k: Tensor, call: Call, form: attnzoo.Pairwise) -> Tensor:
    """s (B, H, Nq, Nk), with an arbitrary value at hidden keys."""
    k = k.repeat_interleave(call.group, 1)
    z = call.scale * q @ k.mT
    if call.softcap is not None:
        z = call.softcap * (z / call.softcap).tanh()
    s = z
    away = call.distance.abs().to(z.dtype)
    decay = wide(form.decay)
    if form.distance is not None:
        decay = torch.as_tensor(decay, dtype=z.dtype)
        if form.distance.gain is not None:
            s = s * form.distance.gain(away, decay)
        if form.distance.bias is not None:
            s = s + form.distance.bias(away, decay) / wide(form.gain)
    assert isinstance(form.gain, (Tensor, float, int))
    s = s * wide(form.gain)
    key_bias = form.key_bias
    if isinstance(key_bias, Tensor):
        key_bias = key_bias[..., None, :]
    return s + ((0.0 if key_bias is None else key_bias) - wide(form.offset)) + call.bias


def dense_output(q: Tensor, k: Tensor, v: Tensor, call: Call, form: attnzoo.Pairwise) -> Tensor:
    """The output of a "none" or "sum" form, differentiable, for fp64 inputs."""
    phi, s = form.activation, dense_scores(q, k, call, form)
    visible = call.visible.expand(s.shape)
    shape = wide(form.shape) if form.shape is not None else None
    if isinstance(shape, float):
        shape = torch.tensor(shape, dtype=s.dtype)
    down: Tensor | float = 1.0
    if phi.shifted or phi.exponential:
        most = s.detach().masked_fill(~visible, float("-inf")).amax(-1, keepdim=True).clamp(min=0)
        if phi.exponential and form.sink is not None:
            most = torch.maximum(most, torch.as_tensor(wide(form.sink), dtype=s.dtype).detach())
        down = (-most).exp()
        if phi.shifted:
            shape = most.expand(s.shape)
        else:
            s = s - most
    # The functions of an activation may write into their argument.
    s = torch.where(visible, s, 0.0)
    weights = torch.where(visible, _apply(phi, s, shape), 0.0)
    if form.normalize == "none":
        weights = weights * wide(form.factor, 1.0)
    else:
        assert form.normalize == "sum"
        mu = weights
        if phi.normalizer is not None:
            mu = torch.where(visible, _Normalizer.apply(s, phi, shape), 0.0)
        total = mu.sum(-1, keepdim=True) + form.eps * down
        if form.sink is not None:
            at = torch.as_tensor(wide(form.sink), dtype=s.dtype).expand(total.shape)
            if phi.exponential:
                total = total + at.exp() * down
            elif phi.normalizer is not None:
                total = total + _Normalizer.apply(at, phi, shape)
            else:
                total = total + _apply(phi, at, shape)
        weights = weights / total.masked_fill(total == 0, 1.0)
    return weights @ v.repeat_interleave(call.group, 1)


def _apply(phi: attnzoo.Activation, s: Tensor, shape: Tensor | None) -> Tensor:
    return _Value.apply(s, phi, shape)


class _Value(torch.autograd.Function):
    """φ with the derivatives that the activation states."""

    @staticmethod
    def forward(ctx, s, phi, shape):
        ctx.save_for_backward(s, shape)
        ctx.phi = phi
        return phi.value(s.clone(), shape)

    @staticmethod
    def backward(ctx, grad):
        s, shape = ctx.saved_tensors
        phi = ctx.phi
        value = phi.value(s.clone(), shape)
        dshape = None
        if phi.shape_slope is not None:
            dshape = (phi.shape_slope(s, value, shape) * grad).sum_to_size(shape.shape)
        return grad * phi.slope(s, value, shape), None, dshape


class _Normalizer(torch.autograd.Function):
    """μ with the derivative that the activation states."""

    @staticmethod
    def forward(ctx, s, phi, shape):
        ctx.save_for_backward(s, shape)
        ctx.phi = phi
        return phi.normalizer(s, shape)

    @staticmethod
    def backward(ctx, grad):
        s, shape = ctx.saved_tensors
        mu = ctx.phi.normalizer(s, shape)
        return grad * ctx.phi.normalizer_slope(s, mu, shape), None, None
