"""Runs linear forms chunk by chunk in Triton kernels, as `linear` does in PyTorch.

Features are computed in torch, so that autograd differentiates them. They are bf16 for bf16 inputs
and fp32 for others, because products of fp16 features may exceed 65504. The features take F/D times
the memory of q and k, or twice that for fp16 inputs. Causal attention stores a state (F, Dv + 1)
for each chunk, in fp32, or for bf16 inputs as two bf16 parts, which take as much; `linear` stores
states only if gradients are needed.
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
from attnzoo.backends.packed_tokens import features_at, in_one_sequence
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
    if call.segments is not None:
        return _attend_segments(q, k, v, call, form), None
    return scan(q, k, v, call, form)[0], None


def scan(
    q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the final state, given the state ``sums``; see `linear.scan`.

    Without causality all keys precede all queries.
    """
    call, k, v, sums = linear.prepare(call, k, v, sums, form)
    causal = call.right == 0
    keyless, lead = linear.offsets(call) if causal else (0, call.keys)
    y = _unmasked(_features(form.features, 1.0, k, call.key_positions, call), call)
    positions = call.query_positions[keyless:]
    x = _features(form.of_queries, call.scale, q[:, :, keyless:], positions, call)
    v = _unmasked(v, call)
    reject_transforms("flash_linear", x, y, v, sums)  # features may have tangents of parameters
    y_before, y = y[:, :, :lead].contiguous(), y[:, :, lead:].contiguous()
    size, out, states = form.size(call.head_dim), [], []
    widest = LINEAR_WIDEST[8 * x.element_size()]
    for start, part in zip(range(0, call.value_dim + 1, widest), v.split(widest, dim=-1)):
        value_dim, first, before, inside = part.shape[-1], None, (None, None), (None, None)
        if sums is not None:
            columns = sums[..., start : start + value_dim]
            first = pack(columns, sums[..., -1:], y.shape[-1])
        if lead or not causal:
            before = y_before, part[:, :, :lead].contiguous()
        if causal:
            inside = y, part[:, :, lead:].contiguous()
        attended = ops.linear_forward(
            x=x, y=inside[0], v=inside[1], y_before=before[0], v_before=before[1], first=first,
            bounds=None, both_sides=False, value_dim=value_dim, dtype=v.dtype,
        )  # fmt: skip
        out.append(attended.out)
        states.append(unpack(attended.last[..., :size, :], value_dim))
    out, (values, normalizers) = torch.cat(out, dim=-1), zip(*states)
    if keyless:
        out = pad(out, (0, 0, keyless, 0))
    return out, torch.cat([*values, normalizers[0]], dim=-1)


def _attend_segments(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear) -> Tensor:
    """Attention within segments, causal or not: (B, H, Nq, Dv)."""
    q, k, v, call, tokens = in_one_sequence(q, k, v, call)
    call, k, v, _ = linear.prepare(call, k, v, None, form)
    x = _features(form.of_queries, call.scale, q, tokens.positions, call)
    y = _unmasked(_features(form.features, 1.0, k, tokens.positions, call), call)
    v = _unmasked(v, call)
    reject_transforms("flash_linear", x, y, v)  # features may have tangents of parameters
    x, y = tokens.sort(x).contiguous(), tokens.sort(y).contiguous()
    out = []
    for part in tokens.sort(v).split(LINEAR_WIDEST[8 * x.element_size()], dim=-1):
        attended = ops.linear_forward(
            x=x, y=y, v=part.contiguous(), y_before=None, v_before=None, first=None,
            bounds=tokens.bounds, both_sides=call.right is None, value_dim=part.shape[-1],
            dtype=v.dtype,
        )  # fmt: skip
        out.append(attended.out)
    return tokens.queries(torch.cat(out, dim=-1))


def _unmasked(x: Tensor, call: Call) -> Tensor:
    """Return features or values of keys with 0 for masked keys.

    Features of 0 add nothing to a sum, but NaN times 0 would be NaN.
    """
    return x if call.mask is None else x.masked_fill(~call.mask[:, :, 0, :, None], 0.0)


def _features(function: Features, scale: float, x: Tensor, at: Tensor, call: Call) -> Tensor:
    dtype = torch.bfloat16 if call.input_dtype == torch.bfloat16 else torch.float32

    def make(x: Tensor) -> Tensor:
        made = features_at(function, scale * x.to(call.dtype), at).to(dtype)
        # Features are padded with 0 so that each row begins at a multiple of 16 bytes.
        return pad(made, (0, -made.shape[-1] % 8)).contiguous()

    if not call.needs_grad:
        return make(x)
    # A checkpoint lets the backward recompute intermediate results from x. Features draw no random
    # numbers: those of queries and keys would not match.
    run: Any = checkpoint(make, x, use_reentrant=False, preserve_rng_state=False)
    return run


BACKEND = Backend("flash_linear", ("linear",), unsupported, run, scan, walks_segments=True)
