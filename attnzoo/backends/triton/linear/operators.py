"""The kernels of linear forms as PyTorch operators: real, fake and differentiated once.

Three of them: the state that keys leave, what queries read off a state, and both at once under
causality. Shapes as in ``launch``; Z is 1 where a row's denominator is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from attnzoo.backends.triton.flash.operators import NO_DOUBLE


def _kernels() -> tuple[Any, Any]:
    from attnzoo.backends.triton.flash import launch
    from attnzoo.backends.triton.linear import launch as launch_linear

    return launch, launch_linear


def pack(sums: Tensor, value_dim: int) -> Tensor:
    return _kernels()[1].pack(sums, value_dim)


def unpack(state: Tensor, value_dim: int) -> Tensor:
    return _kernels()[1].unpack(state, value_dim)


def _width(v: Tensor) -> int:
    return _kernels()[1].width(v.shape[3])


@custom_op("attnzoo::linear_state", mutates_args=())
def linear_state(y: Tensor, v: Tensor, first: Tensor | None) -> Tensor:
    """Σ_j y_j [v_j, 1]ᵀ, after what was there before."""
    launch, linear = _kernels()
    job, _, last = linear.describe_states(
        y, v, first, None, y.shape[1], False, launch.architecture(y.device)
    )
    launch.run(job)
    return last.sum(2)


@linear_state.register_fake
def _(y: Tensor, v: Tensor, first: Tensor | None) -> Tensor:
    return y.new_empty(*y.shape[:2], y.shape[3], _width(v), dtype=torch.float32)


@custom_op("attnzoo::linear_state_backward", mutates_args=())
def linear_state_backward(dlast: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    launch, linear = _kernels()
    jobs, dy, dv = linear.describe_dy_dv(
        None, y, v, None, dlast[:, :, None], None, launch.architecture(y.device)
    )
    for job in jobs:
        launch.run(job)
    return dy, dv


@linear_state_backward.register_fake
def _(dlast: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(v)


@custom_op("attnzoo::linear_read", mutates_args=())
def linear_read(
    x: Tensor, state: Tensor, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """o and Z of rows that all read one state."""
    launch, linear = _kernels()
    job, out, z = linear.describe_output(
        x, None, None, state[:, :, None], value_dim, dtype, launch.architecture(x.device)
    )
    launch.run(job)
    return out, z


@linear_read.register_fake
def _(x: Tensor, state: Tensor, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = x.new_empty(*x.shape[:3], value_dim, dtype=dtype)
    return out, x.new_empty(x.shape[:3], dtype=torch.float32)


@custom_op("attnzoo::linear_read_backward", mutates_args=())
def linear_read_backward(
    do: Tensor, x: Tensor, state: Tensor, out: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    launch, linear = _kernels()
    arch, rows = launch.architecture(x.device), (z, _delta(do, out))
    of_x, dx = linear.describe_dx(x, None, None, do, state[:, :, None], rows, arch)
    of_state, _, dstate = linear.describe_states(x, do, None, rows, state.shape[1], False, arch)
    launch.run(of_x)
    launch.run(of_state)
    return dx, dstate.sum(2)


@linear_read_backward.register_fake
def _(do: Tensor, x: Tensor, state: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@custom_op("attnzoo::linear_causal", mutates_args=())
def linear_causal(
    x: Tensor, y: Tensor, v: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, Z, the states before each chunk and the one after all: row i reads the keys j ≤ i."""
    launch, linear = _kernels()
    arch = launch.architecture(x.device)
    job, kept, last = linear.describe_states(y, v, first, None, y.shape[1], True, arch)
    launch.run(job)
    job, out, z = linear.describe_output(x, y, v, kept, v.shape[3], v.dtype, arch)
    launch.run(job)
    return out, z, kept, last.sum(2)


@linear_causal.register_fake
def _(x: Tensor, y: Tensor, v: Tensor, first: Tensor | None) -> tuple[Tensor, ...]:
    state = (y.shape[3], _width(v))
    chunk = _kernels()[1].chunk_length(y)
    chunks = (y.shape[2] + chunk - 1) // chunk
    kept = y.new_empty(*y.shape[:2], chunks, *state, dtype=torch.float32)
    out = v.new_empty(*x.shape[:3], v.shape[3])
    z = x.new_empty(x.shape[:3], dtype=torch.float32)
    return out, z, kept, y.new_empty(*y.shape[:2], *state, dtype=torch.float32)


@custom_op("attnzoo::linear_causal_backward", mutates_args=())
def linear_causal_backward(
    do: Tensor, dlast: Tensor | None, x: Tensor, y: Tensor, v: Tensor,
    out: Tensor, z: Tensor, kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, y, v and of the first state."""
    launch, linear = _kernels()
    arch, rows = launch.architecture(x.device), (z, _delta(do, out))
    of_x, dx = linear.describe_dx(x, y, v, do, kept, rows, arch)
    back, after, dfirst = linear.describe_states(x, do, dlast, rows, y.shape[1], True, arch)
    others, dy, dv = linear.describe_dy_dv(x, y, v, do, after, rows, arch)
    for job in (of_x, back, *others):
        launch.run(job)
    return dx, dy, dv, dfirst.sum(2)


@linear_causal_backward.register_fake
def _(do: Tensor, dlast: Any, x: Tensor, y: Tensor, v: Tensor, *others: Any) -> Any:
    dfirst = y.new_empty(*y.shape[:2], y.shape[3], _width(v), dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(y), torch.empty_like(v), dfirst


def _delta(do: Tensor, out: Tensor) -> Tensor:
    return (do.float() * out.float()).sum(-1)


# ---- autograd ---------------------------------------------------------------------------------


def _save_state(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _state_backward(ctx: Any, dlast: Tensor) -> tuple:
    dlast = dlast.contiguous()
    dy, dv = linear_state_backward(dlast, *ctx.saved_tensors)
    return dy, dv, dlast if ctx.needs_input_grad[2] else None


def _save_read(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2], *output)


def _read_backward(ctx: Any, do: Tensor | None, dz: None) -> tuple:
    if do is None:
        return None, None, None, None
    return *linear_read_backward(do.contiguous(), *ctx.saved_tensors), None, None


def _save_causal(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[:3])


def _causal_backward(
    ctx: Any, do: Tensor | None, dz: None, dkept: None, dlast: Tensor | None
) -> tuple:
    # Read once: what a checkpoint recomputed is given out for one reading only.
    x, y, v, out, *others = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do.contiguous()
    dlast = None if dlast is None else dlast.contiguous()
    *grads, dfirst = linear_causal_backward(do, dlast, x, y, v, out, *others)
    return *grads, dfirst if ctx.needs_input_grad[3] else None


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(NO_DOUBLE)


for name, save, backward in (
    ("state", _save_state, _state_backward),
    ("read", _save_read, _read_backward),
    ("causal", _save_causal, _causal_backward),
):
    torch.library.register_autograd(f"attnzoo::linear_{name}", backward, setup_context=save)
    torch.library.register_autograd(f"attnzoo::linear_{name}_backward", _refuse)
