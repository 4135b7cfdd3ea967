"""The kernels of linear forms as PyTorch operators, with fake functions and first derivatives.

`linear_state` computes the state after the given keys. `linear_read` computes the output of queries
that all read one state. `linear_causal` computes the causal output and the final state. Shapes are
as in ``launch``.
A denominator Z of 0 is returned as 1. Triton is imported by the first call that runs a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.backends.triton.linear.state import layout, split


def _new_state(y: Tensor, v: Tensor) -> Tensor:
    shape = *y.shape[:2], y.shape[3], layout(v.shape[3]).WIDTH
    return y.new_empty(shape, dtype=torch.float32)


def _of_state(x: Tensor, value_dim: int) -> int:
    """Operations to add x (B, H, N, F) to a state, to read it with x, or to differentiate these."""
    return 2 * x.numel() * (value_dim + 1)


def _of_chunks(x: Tensor, size: int) -> int:
    """Operations of products with ``size`` operations per pair of tokens of a chunk."""
    from attnzoo.backends.triton.linear.launch import chunk_length

    batch, heads, length, _ = x.shape
    return 2 * batch * heads * length * min(chunk_length(x), length) * size


def _upstream(do: Tensor, out: Tensor, z: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return G = dO/Z in the dtype of the features, and δ = G·o.

    δ is computed from G after rounding, so that all gradients are those of the same dO.
    """
    g = (do / z[..., None]).to(features.dtype).contiguous()
    return g, (g.float() * out.float()).sum(-1)


@operator
def linear_state(*, y: Tensor, v: Tensor) -> Tensor:
    """Return the state Σ_j y_j [v_j, 1]ᵀ."""
    from attnzoo.backends.triton.linear import launch

    _, sums = launch.run(launch.describe_states, y, v, None, None, y.shape[1], False)
    return sums.sum(2)


@linear_state.fake
def _(*, y: Tensor, v: Tensor) -> Tensor:
    return _new_state(y, v)


@linear_state.flops
def _(*, y: Tensor, v: Tensor) -> int:
    return _of_state(y, v.shape[3])


@linear_state.backward("y", "v")
def linear_state_backward(*, y: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    from attnzoo.backends.triton.linear import launch

    states = split(dout.contiguous(), v.shape[3], y.dtype)[:, :, None]
    dy, dv = launch.run(launch.describe_dy_dv, y, v, None, None, None, states)
    return {"y": dy, "v": dv}


@linear_state_backward.flops
def _(*, y: Tensor, v: Tensor) -> int:
    return 2 * _of_state(y, v.shape[3])


class Read(NamedTuple):
    out: Tensor
    z: Tensor


@operator
def linear_read(*, x: Tensor, state: Tensor, value_dim: int, dtype: torch.dtype) -> Read:
    """Return o and Z of queries that all read one state."""
    from attnzoo.backends.triton.linear import launch

    states = split(state, value_dim, x.dtype)[:, :, None]
    return Read(*launch.run(launch.describe_output, x, None, None, states, value_dim, dtype))


@linear_read.fake
def _(*, x: Tensor, value_dim: int, dtype: torch.dtype) -> Read:
    out = x.new_empty(*x.shape[:3], value_dim, dtype=dtype)
    return Read(out, x.new_empty(x.shape[:3], dtype=torch.float32))


@linear_read.flops
def _(*, x: Tensor, value_dim: int) -> int:
    return _of_state(x, value_dim)


@linear_read.backward("x", "state")
def linear_read_backward(
    *, x: Tensor, state: Tensor, out: Tensor, z: Tensor, dout: Tensor
) -> dict[str, Tensor]:
    from attnzoo.backends.triton.linear import launch

    g, delta = _upstream(dout, out, z, x)
    states = split(state, out.shape[3], x.dtype)[:, :, None]
    dx = launch.run(launch.describe_dx, x, None, None, g, delta, states)
    _, dstate = launch.run(launch.describe_states, x, g, delta, None, state.shape[1], False)
    return {"x": dx, "state": dstate.sum(2)}


@linear_read_backward.flops
def _(*, x: Tensor, out: Tensor) -> int:
    return 2 * _of_state(x, out.shape[3])


class Scanned(NamedTuple):
    """o, Z, the state before each chunk, and the state after the last chunk."""

    out: Tensor
    z: Tensor
    kept: Tensor
    last: Tensor


@operator
def linear_causal(*, x: Tensor, y: Tensor, v: Tensor, first: Tensor | None) -> Scanned:
    """Attend causally: query i to the keys j ≤ i and to the keys in the state ``first``."""
    from attnzoo.backends.triton.linear import launch

    states, last = launch.run(launch.describe_states, y, v, None, first, y.shape[1], True)
    out, z = launch.run(launch.describe_output, x, y, v, states, v.shape[3], v.dtype)
    return Scanned(out, z, states, last.sum(2))


@linear_causal.fake
def _(*, x: Tensor, y: Tensor, v: Tensor) -> Scanned:
    from attnzoo.backends.triton.linear.launch import chunk_length

    chunk, width = chunk_length(y), layout(v.shape[3], y.dtype).WIDTH
    chunks = (y.shape[2] + chunk - 1) // chunk
    kept = y.new_empty(*y.shape[:2], chunks, y.shape[3], width)
    z = x.new_empty(x.shape[:3], dtype=torch.float32)
    return Scanned(v.new_empty(*x.shape[:3], v.shape[3]), z, kept, _new_state(y, v))


@linear_causal.flops
def _(*, x: Tensor, y: Tensor, v: Tensor) -> int:
    features, value_dim = x.shape[3], v.shape[3]
    states = _of_state(x, value_dim) + _of_state(y, value_dim)
    return states + _of_chunks(x, features + value_dim)


@linear_causal.backward("x", "y", "v", "first")
def linear_causal_backward(
    *, x: Tensor, y: Tensor, v: Tensor, first: Tensor | None, out: Tensor, z: Tensor, kept: Tensor,
    dout: Tensor, dlast: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    from attnzoo.backends.triton.linear import launch

    g, delta = _upstream(dout, out, z, x)
    dlast = None if dlast is None else dlast.contiguous()
    dx = launch.run(launch.describe_dx, x, y, v, g, delta, kept)
    after, dfirst = launch.run(launch.describe_states, x, g, delta, dlast, y.shape[1], True)
    dy, dv = launch.run(launch.describe_dy_dv, y, v, x, g, delta, after)
    return {"x": dx, "y": dy, "v": dv, "first": dfirst.sum(2)}


@linear_causal_backward.flops
def _(*, x: Tensor, y: Tensor, v: Tensor) -> int:
    # dx reads the states of the keys, dy and dv read a state of the gradients. In a chunk, each of
    # the three takes two products.
    features, value_dim = x.shape[3], v.shape[3]
    states = 2 * _of_state(x, value_dim) + 2 * _of_state(y, value_dim)
    return states + _of_chunks(x, 3 * (features + value_dim))
