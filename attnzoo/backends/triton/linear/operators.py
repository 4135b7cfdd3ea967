"""The kernels of linear forms as a PyTorch operator, with fake function and first derivative.

Shapes are as in ``launch``. Triton is imported by the first call that runs, counts or traces the
operator.
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


def _operations(x: Tensor, value_dim: int, states: int, products: int = 0) -> int:
    """Operations of x (B, H, N, F): products with a state, and with features and values of a chunk.

    ``states`` and ``products`` are how often these are computed.
    """
    *_, length, features = x.shape
    chunk = min(_launch().chunk_length(x), length) if products else 0
    with_chunks = products * chunk * (features + value_dim)
    return 2 * x.numel() * states * (value_dim + 1) + 2 * x[..., 0].numel() * with_chunks


def _sum(
    x: Tensor, values: Tensor, delta: Tensor | None, first: Tensor | None, kv_heads: int
) -> Tensor:
    """Return the state (B, Hkv, F, WIDTH) after all tokens."""
    launch, backwards = _launch(), delta is not None
    operands = x, values, delta, None, None, backwards, kv_heads, False
    _, sums = launch.run(launch.describe_states, *operands)
    return sums.sum(2) if first is None else sums.sum(2) + first


def _states(*operands: Any) -> tuple[Tensor, Tensor]:
    """Return the state at each chunk, and the sums of `describe_states`."""
    launch = _launch()
    return launch.run(launch.describe_states, *operands, True)


class LinearResult(NamedTuple):
    out: Tensor  # (B, H, N, Dv)
    z: Tensor  # the denominators, 1 where they are 0
    states: Tensor | None  # before each chunk; None if all queries read one state
    others: Tensor | None  # after each chunk; None unless `both_sides`
    last: Tensor  # the state after all keys


@operator
def linear_forward(
    *, x: Tensor, y: Tensor | None, v: Tensor | None, y_before: Tensor | None,
    v_before: Tensor | None, first: Tensor | None, bounds: Tensor | None, both_sides: bool,
    value_dim: int, dtype: torch.dtype,
) -> LinearResult:  # fmt: skip
    """All queries attend to the keys in the state ``first`` and to those of y_before and v_before.

    Causally, query i attends also to the keys j ≤ i of y and v. Without causality these are None,
    and y_before and v_before are not.

    With ``bounds`` (see `packed_tokens`) it attends only to those of its segment, and, with
    ``both_sides``, to those at j > i too. y_before, v_before and ``first`` must then be None, and
    ``last`` has no meaning.
    """
    launch, state = _launch(), first
    if y_before is not None and v_before is not None:
        state = _sum(y_before, v_before, None, first, y_before.shape[1])
    if y is None:
        assert state is not None
        states, last, read = None, state, split(state, value_dim, x.dtype)[:, :, None]
        others = None
    else:
        states, sums = _states(y, v, None, state, bounds, False, y.shape[1])
        last, read = sums.sum(2), states
        others = _states(y, v, None, None, bounds, True, y.shape[1])[0] if both_sides else None
    out, z = launch.run(launch.describe_output, x, y, v, read, others, bounds, value_dim, dtype)
    return LinearResult(out, z, states, others, last)


@linear_forward.fake
def _(
    *, x: Tensor, y: Tensor | None, y_before: Tensor | None, both_sides: bool, value_dim: int,
    dtype: torch.dtype,
) -> LinearResult:  # fmt: skip
    keys = y if y_before is None else y_before
    assert keys is not None
    shape = *keys.shape[:2], keys.shape[3]
    last = keys.new_empty(*shape, layout(value_dim, 32).WIDTH, dtype=torch.float32)
    states = others = None
    if y is not None:
        chunk, width = _launch().chunk_length(y), layout(value_dim, 8 * y.element_size()).WIDTH
        chunks = (y.shape[2] + chunk - 1) // chunk
        states = y.new_empty(*y.shape[:2], chunks, y.shape[3], width)
        others = torch.empty_like(states) if both_sides else None
    out = x.new_empty(*x.shape[:3], value_dim, dtype=dtype)
    z = x.new_empty(x.shape[:3], dtype=torch.float32)
    return LinearResult(out, z, states, others, last)


@linear_forward.flops
def _(
    *, x: Tensor, y: Tensor | None, y_before: Tensor | None, both_sides: bool, value_dim: int
) -> int:
    in_chunks, states = _operations(x, value_dim, 0, 0 if y is None else 1), 1 + both_sides
    with_states = (_operations(t, value_dim, states) for t in (x, y, y_before) if t is not None)
    return in_chunks + sum(with_states)


@linear_forward.backward("x", "y", "v", "y_before", "v_before", "first")
def linear_backward(
    *, x: Tensor, y: Tensor | None, v: Tensor | None, y_before: Tensor | None,
    v_before: Tensor | None, first: Tensor | None, bounds: Tensor | None, out: Tensor, z: Tensor,
    states: Tensor | None, others: Tensor | None, last: Tensor, dout: Tensor,
    dlast: Tensor | None, wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    launch, kv_heads = _launch(), last.shape[1]
    if states is None:
        states = split(last, out.shape[3], x.dtype)[:, :, None]
    # δ is computed from G after rounding, so that all gradients are those of the same dO.
    g = (dout / z[..., None]).to(x.dtype).contiguous()
    delta = (g.float() * out.float()).sum(-1)
    grads = {"x": launch.run(launch.describe_dx, x, y, v, g, delta, states, others, bounds)}
    if wanted == ["x"]:
        return grads
    if y is None:
        dfirst = _sum(x, g, delta, dlast, kv_heads)
    else:
        dlast = None if dlast is None else dlast.contiguous()
        after, sums = _states(x, g, delta, dlast, bounds, True, kv_heads)
        dfirst, before = sums.sum(2), None
        if others is not None:
            before = _states(x, g, delta, None, bounds, False, kv_heads)[0]
        operands = y, v, x, g, delta, after, before, bounds
        dy_dv = launch.run(launch.describe_dy_dv, *operands)
        grads |= zip(("y", "v"), dy_dv)
    if {"y_before", "v_before"} & {*wanted}:
        after = split(dfirst, out.shape[3], x.dtype)[:, :, None]
        operands = y_before, v_before, None, None, None, after, None, None
        grads |= zip(("y_before", "v_before"), launch.run(launch.describe_dy_dv, *operands))
    return {**grads, "first": dfirst}


@linear_backward.flops
def _(
    *, x: Tensor, y: Tensor | None, y_before: Tensor | None, others: Tensor | None, out: Tensor,
    wanted: list[str],
) -> int:  # fmt: skip
    # dx reads the states of the keys, dy and dv read a state of the gradients. In a chunk, each of
    # the three takes two products.
    value_dim, states = out.shape[3], 1 if others is None else 2
    if wanted == ["x"]:
        return _operations(x, value_dim, states, 0 if y is None else 1)
    in_chunks = _operations(x, value_dim, 0, 0 if y is None else 3)
    tokens = (t for t in (x, y, y_before) if t is not None)
    return in_chunks + sum(_operations(t, value_dim, 2 * states) for t in tokens)
