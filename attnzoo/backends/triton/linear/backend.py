"""Runs linear forms chunk by chunk in Triton kernels, as `linear` does in PyTorch.

Features are computed in torch, so that autograd differentiates them. They are bf16 for bf16 inputs
and fp32 for others, because products of fp16 features may exceed 65504. The features take F/D times
the memory of q and k, or twice that for fp16 inputs. Causal attention stores a state (F, Dv + 1) in
fp32 for each chunk; `linear` does so only if gradients are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnzoo.backends import linear
from attnzoo.backends.base import Backend
from attnzoo.backends.transforms import reject_transforms
from attnzoo.backends.triton.common.tiles import LINEAR_WIDEST
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.backends.triton.linear import operators as ops
from attnzoo.backends.triton.linear.state import pack, unpack
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear

Features = Callable[[Tensor, Tensor], Tensor]


def unsupported(form: Form, call: Call) -> str | None:
    if (reason := linear.unsupported(form, call)) is not None:
        return reason
    if call.input_dtype not in flash.DTYPES:
        return f"does not support {call.input_dtype} (linear does)"
    return flash.unsupported_here(call, "linear")


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, None]:
    assert isinstance(form, Linear)
    reject_transforms("flash_linear", q, k, v)
    if call.right == 0:
        return scan(q, k, v, call, form)[0], None
    call, k, v, _ = linear.prepare(call, k, v, None, form)
    v = _values(v, call)
    y, out = _keys(k, call, form), []
    x = _features(form.of_queries, call.scale, q, call.query_positions, call)
    for part in v.split(_widest(call), dim=-1):
        state = ops.linear_state(y=y, v=part.contiguous(), first=None)
        read = ops.linear_read(x=x, state=state, value_dim=part.shape[-1], dtype=call.input_dtype)
        out.append(read.out)
    return torch.cat(out, dim=-1), None


def scan(
    q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the causal output and the final state, given the state ``sums``; see `linear.scan`."""
    call, k, v, sums = linear.prepare(call, k, v, sums, form)
    v = _values(v, call)
    keyless, lead = linear.offsets(call)
    y = _keys(k, call, form)
    positions = call.query_positions[keyless:]
    before, y = y[:, :, :lead].contiguous(), y[:, :, lead:].contiguous()
    x = _features(form.of_queries, call.scale, q[:, :, keyless:], positions, call)
    size, out, states, normalizer = form.size(call.head_dim), [], [], None
    widest = _widest(call)
    for start, part in zip(range(0, call.value_dim + 1, widest), v.split(widest, dim=-1)):
        state = None
        if sums is not None:
            columns = sums[..., start : start + part.shape[-1]]
            state = torch.cat([columns, sums[..., -1:]], dim=-1)
            state = pad(pack(state, part.shape[-1]), (0, 0, 0, y.shape[-1] - size))
        if lead:
            state = ops.linear_state(y=before, v=part[:, :, :lead].contiguous(), first=state)
        scanned = ops.linear_causal(x=x, y=y, v=part[:, :, lead:].contiguous(), first=state)
        out.append(scanned.out)
        last = unpack(scanned.last[..., :size, :], part.shape[-1])
        states.append(last[..., :-1])
        normalizer = last[..., -1:]
    assert normalizer is not None
    out = pad(torch.cat(out, dim=-1), (0, 0, keyless, 0))
    return out, torch.cat([*states, normalizer], dim=-1)


def _feature_dtype(call: Call) -> torch.dtype:
    return torch.bfloat16 if call.input_dtype == torch.bfloat16 else torch.float32


def _widest(call: Call) -> int:
    return LINEAR_WIDEST[8 * _feature_dtype(call).itemsize]


def _values(v: Tensor, call: Call) -> Tensor:
    """Return v with 0 for masked keys, because NaN times a feature of 0 would be NaN."""
    return v if call.mask is None else v.masked_fill(~call.mask[:, :, 0, :, None], 0.0)


def _keys(k: Tensor, call: Call, form: Linear) -> Tensor:
    """Return ψ(k). The features of masked keys are 0, so that these keys add 0 to every sum."""
    y = _features(form.features, 1.0, k, call.key_positions, call)
    if call.mask is None:
        return y
    return y.masked_fill(~call.mask[:, :, 0, :, None], 0.0)


def _features(function: Features, scale: float, x: Tensor, at: Tensor, call: Call) -> Tensor:
    dtype = _feature_dtype(call)

    def make(x: Tensor) -> Tensor:
        made = function(scale * x.to(call.dtype), at).to(dtype)
        # Features are padded with 0 so that each row begins at a multiple of 16 bytes.
        return pad(made, (0, -made.shape[-1] % 8)).contiguous()

    if not call.needs_grad:
        return make(x)
    # A checkpoint lets the backward recompute intermediate results from x. Features draw no random
    # numbers: those of queries and keys would not match.
    run: Any = checkpoint(make, x, use_reentrant=False, preserve_rng_state=False)
    return run


BACKEND = Backend("flash_linear", ("linear",), unsupported, run, scan)
