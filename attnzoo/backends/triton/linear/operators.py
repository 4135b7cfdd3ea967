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
from attnzoo.backends.triton.linear.state import split, width


def _new_state(y: Tensor, v: Tensor) -> Tensor:
    shape = (*y.shape[:2], y.shape[3], width(v.shape[3]))
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
    """Return G = dO/Z and δ = G·o, see `launch.Upstream`.

    δ is computed from G after rounding, so that all gradients are those of the same dO.
    """
    g = (do / z[..., None]).to(features.dtype).contiguous()
    return g, (g.float() * out.float()).sum(-1)


@operator
def linear_state(*, y: Tensor, v: Tensor, first: Tensor | None) -> Tensor:
    """Return the state ``first`` + Σ_j y_j [v_j, 1]ᵀ."""
    from attnzoo.backends.triton.common.launch import architecture, run
    from attnzoo.backends.triton.linear import launch

    work, _, last = launch.describe_states(
        y, v, first, None, y.shape[1], False, architecture(y.device)
    )
    run(work)
    return last.sum(2)


@linear_state.fake
def _(*, y: Tensor, v: Tensor) -> Tensor:
    return _new_state(y, v)


@linear_state.flops
def _(*, y: Tensor, v: Tensor) -> int:
    return _of_state(y, v.shape[3])


@linear_state.backward("y", "v", "first")
def linear_state_backward(
    *, y: Tensor, v: Tensor, first: Tensor | None, dout: Tensor
) -> dict[str, Tensor]:
    from attnzoo.backends.triton.common.launch import architecture, run
    from attnzoo.backends.triton.linear import launch

    dout = dout.contiguous()
    state = split(dout, v.shape[3], y.dtype)[:, :, None]
    launches, dy, dv = launch.describe_dy_dv(None, y, v, None, state, architecture(y.device))
    for work in launches:
        run(work)
    return {"y": dy, "v": dv, "first": dout.clone()}


@linear_state_backward.flops
def _(*, y: Tensor, v: Tensor) -> int:
    return 2 * _of_state(y, v.shape[3])


class Read(NamedTuple):
    out: Tensor
    z: Tensor


@operator
def linear_read(*, x: Tensor, state: Tensor, value_dim: int, dtype: torch.dtype) -> Read:
    """Return o and Z of queries that all read one state."""
    from attnzoo.backends.triton.common.launch import architecture, run
    from attnzoo.backends.triton.linear import launch

    kept = split(state, value_dim, x.dtype)[:, :, None]
    work, out, z = launch.describe_output(
        x, None, None, kept, value_dim, dtype, architecture(x.device)
    )
    run(work)
    return Read(out, z)


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
    from attnzoo.backends.triton.common.launch import architecture, run
    from attnzoo.backends.triton.linear import launch

    arch, upstream = architecture(x.device), launch.Upstream(*_upstream(dout, out, z, x))
    kept = split(state, out.shape[3], x.dtype)[:, :, None]
    of_x, dx = launch.describe_dx(x, None, None, upstream, kept, arch)
    of_state, _, dstate = launch.describe_states(
        x, upstream.g, None, upstream.delta, state.shape[1], False, arch
    )
    run(of_x)
    run(of_state)
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
    from attnzoo.backends.triton.common.launch import architecture, run
    from attnzoo.backends.triton.linear import launch

    arch = architecture(x.device)
    work, kept, last = launch.describe_states(y, v, first, None, y.shape[1], True, arch)
    run(work)
    work, out, z = launch.describe_output(x, y, v, kept, v.shape[3], v.dtype, arch)
    run(work)
    return Scanned(out, z, kept, last.sum(2))


@linear_causal.fake
def _(*, x: Tensor, y: Tensor, v: Tensor) -> Scanned:
    from attnzoo.backends.triton.linear.launch import chunk_length

    chunk = chunk_length(y)
    chunks = (y.shape[2] + chunk - 1) // chunk
    kept = y.new_empty(*y.shape[:2], chunks, y.shape[3], width(v.shape[3], y.dtype))
    out = v.new_empty(*x.shape[:3], v.shape[3])
    return Scanned(out, x.new_empty(x.shape[:3], dtype=torch.float32), kept, _new_state(y, v))


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
    from attnzoo.backends.triton.common.launch import architecture, run
    from attnzoo.backends.triton.linear import launch

    dlast = None if dlast is None else dlast.contiguous()
    arch, upstream = architecture(x.device), launch.Upstream(*_upstream(dout, out, z, x))
    of_x, dx = launch.describe_dx(x, y, v, upstream, kept, arch)
    back, after, dfirst = launch.describe_states(
        x, upstream.g, dlast, upstream.delta, y.shape[1], True, arch
    )
    others, dy, dv = launch.describe_dy_dv(x, y, v, upstream, after, arch)
    for work in (of_x, back, *others):
        run(work)
    return {"x": dx, "y": dy, "v": dv, "first": dfirst.sum(2)}


@linear_causal_backward.flops
def _(*, x: Tensor, y: Tensor, v: Tensor) -> int:
    # dx reads the states of the keys, dy and dv read a state of the gradients. In a chunk, each of
    # the three takes two products.
    features, value_dim = x.shape[3], v.shape[3]
    states = 2 * _of_state(x, value_dim) + 2 * _of_state(y, value_dim)
    return states + _of_chunks(x, 3 * (features + value_dim))
