"""The kernels of linear forms as PyTorch operators, with fake functions and first derivatives.

`linear_state` computes the state after keys. `linear_read` computes the output of queries that read
a state and, causally, the keys up to their own position. Shapes are as in ``launch``. A denominator
Z of 0 is returned as 1.

Triton is imported by the first call that runs, counts or traces an operator.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.backends.triton.linear.state import layout, split


@cache
def _launch() -> Any:
    from attnzoo.backends.triton.linear import launch

    return launch


def _new_state(y: Tensor, v: Tensor) -> Tensor:
    shape = *y.shape[:2], y.shape[3], layout(v.shape[3], 32).WIDTH
    return y.new_empty(shape, dtype=torch.float32)


def _operations(x: Tensor, value_dim: int, states: int, products: int = 0) -> int:
    """Operations of x (B, H, N, F) with states, and with the values and features of its chunk.

    ``states`` is how often x is added to a state, reads one, or its gradient does. ``products`` is
    how often x is multiplied by a chunk.
    """
    *_, length, features = x.shape
    chunk = min(_launch().chunk_length(x), length) if products else 0
    with_chunks = products * chunk * (features + value_dim)
    return 2 * x.numel() * states * (value_dim + 1) + 2 * x[..., 0].numel() * with_chunks


@operator
def linear_state(*, y: Tensor, v: Tensor) -> Tensor:
    """Return the state Σ_j y_j [v_j, 1]ᵀ."""
    launch = _launch()
    _, sums = launch.run(launch.describe_states, y, v, None, None, y.shape[1], False)
    return sums.sum(2)


@linear_state.fake
def _(*, y: Tensor, v: Tensor) -> Tensor:
    return _new_state(y, v)


@linear_state.flops
def _(*, y: Tensor, v: Tensor) -> int:
    return _operations(y, v.shape[3], 1)


@linear_state.backward("y", "v")
def linear_state_backward(*, y: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    launch = _launch()
    states = split(dout.contiguous(), v.shape[3], y.dtype)[:, :, None]
    dy, dv = launch.run(launch.describe_dy_dv, y, v, None, None, None, states)
    return {"y": dy, "v": dv}


@linear_state_backward.flops
def _(*, y: Tensor, v: Tensor) -> int:
    return _operations(y, v.shape[3], 2)


class Read(NamedTuple):
    """o, Z and, causally, the state before each chunk and the state after the last chunk."""

    out: Tensor
    z: Tensor
    states: Tensor | None
    last: Tensor | None


@operator
def linear_read(
    *, x: Tensor, y: Tensor | None, v: Tensor | None, first: Tensor | None, value_dim: int,
    dtype: torch.dtype,
) -> Read:  # fmt: skip
    """Attend to the keys in the state ``first`` and, query i, to the keys j ≤ i of y and v.

    Without causality y and v are None.
    """
    launch, states, last = _launch(), None, None
    if y is None:
        assert first is not None
        read = split(first, value_dim, x.dtype)[:, :, None]
    else:
        states, sums = launch.run(launch.describe_states, y, v, None, first, y.shape[1], True)
        read, last = states, sums.sum(2)
    out, z = launch.run(launch.describe_output, x, y, v, read, value_dim, dtype)
    return Read(out, z, states, last)


@linear_read.fake
def _(*, x: Tensor, y: Tensor | None, v: Tensor | None, value_dim: int, dtype: torch.dtype) -> Read:
    out = x.new_empty(*x.shape[:3], value_dim, dtype=dtype)
    z = x.new_empty(x.shape[:3], dtype=torch.float32)
    if y is None or v is None:
        return Read(out, z, None, None)
    chunk, width = _launch().chunk_length(y), layout(value_dim, 8 * y.element_size()).WIDTH
    chunks = (y.shape[2] + chunk - 1) // chunk
    states = y.new_empty(*y.shape[:2], chunks, y.shape[3], width)
    return Read(out, z, states, _new_state(y, v))


@linear_read.flops
def _(*, x: Tensor, y: Tensor | None, value_dim: int) -> int:
    if y is None:
        return _operations(x, value_dim, 1)
    return _operations(x, value_dim, 1, 1) + _operations(y, value_dim, 1)


@linear_read.backward("x", "y", "v", "first")
def linear_read_backward(
    *, x: Tensor, y: Tensor | None, v: Tensor | None, first: Tensor | None, out: Tensor, z: Tensor,
    states: Tensor | None, dout: Tensor, dlast: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    launch, value_dim = _launch(), out.shape[3]
    if states is None:
        assert first is not None
        states = split(first, value_dim, x.dtype)[:, :, None]
    # δ is computed from G after rounding, so that all gradients are those of the same dO.
    g = (dout / z[..., None]).to(x.dtype).contiguous()
    delta = (g.float() * out.float()).sum(-1)
    dlast = None if dlast is None else dlast.contiguous()
    dx = launch.run(launch.describe_dx, x, y, v, g, delta, states)
    operands = x, g, delta, dlast, states.shape[1], y is not None
    after, dfirst = launch.run(launch.describe_states, *operands)
    grads = {"x": dx, "first": dfirst.sum(2)}
    if y is None:
        return grads
    dy, dv = launch.run(launch.describe_dy_dv, y, v, x, g, delta, after)
    return {**grads, "y": dy, "v": dv}


@linear_read_backward.flops
def _(*, x: Tensor, y: Tensor | None, out: Tensor) -> int:
    # dx reads the states of the keys, dy and dv read a state of the gradients. In a chunk, each of
    # the three takes two products.
    if y is None:
        return _operations(x, out.shape[3], 2)
    return _operations(x, out.shape[3], 2, 3) + _operations(y, out.shape[3], 2)
