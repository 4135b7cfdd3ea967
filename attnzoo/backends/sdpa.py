"""Runs softmax, with an optional gain per query, through torch's fused attention kernels.

q is multiplied by the gain. In 16 bits the product would be rounded, which adds an error to each
score that grows with the score. With a gain, 16-bit inputs are therefore converted to fp32: on a
CPU, torch's kernel computes fp32 about as fast. A gain that is a number is a factor of the scale
instead. A call is supported only if torch's fused kernels compute it exactly. Torch never gets a
mask together with ``is_causal``. This module sets outputs of queries without visible keys to 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import has_torch_function

from attnzoo.backends.base import Backend, unsupported_extras
from attnzoo.backends.operator import NO_DOUBLE
from attnzoo.backends.tiled.statistics import with_gain
from attnzoo.core.call import Call
from attnzoo.core.checks import is_known, is_readable, runs_eagerly
from attnzoo.core.forms import Form, FromStatistics, NoForm, Pairwise
from attnzoo.core.visibility import visible_entries

# The same function, but `replace_sdpa` does not redirect it. A call takes 3 µs more.
OVERLOAD = torch.ops.aten.scaled_dot_product_attention.default
# A row of this many scores is wider than any AVX-512 vector; see `_remove_nan`.
WIDER_THAN_A_VECTOR = 64
# Rows of a float mask are shifted if their maximum is at most −FAR. In every dtype the difference
# is exact for entries down to twice the maximum. It is rounded for lower ones, whose weight is 0
# unless their scores are higher by FAR.
FAR = 4096.0
OLD = "below compute capability 8.0"


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, NoForm):
        return form.why
    if not isinstance(form, Pairwise) or not form.softmax:
        return "supports only softmax with an optional gain per query"
    if (reason := unsupported_extras(form, call)) is not None:
        return reason
    if form.sink is not None:
        return "does not support a sink (tiled does)"
    if isinstance(form.gain, FromStatistics) and form.gain.differentiable and call.needs_grad:
        return "does not support a gradient through the statistics of the logits (tiled does)"
    if call.device.type == "cuda" and (reason := _unsupported_on_gpu(form, call)) is not None:
        return reason
    return _unsupported_call(call)


def _unsupported_call(call: Call) -> str | None:
    if call.return_lse:
        return "does not support return_lse (tiled does)"
    if call.relative_bias is not None or call.segments is not None:
        return "does not support alibi, relative_bias or segment_ids (tiled does)"
    if call.left is not None or call.right not in (None, 0):
        return "does not support window (tiled does)"
    if call.right == 0:
        if call.mask is not None:
            return "does not support attn_mask together with is_causal (tiled does)"
        if call.queries not in (1, call.keys):
            return "does not support is_causal unless Nq = Nk or Nq = 1: torch aligns top-left"
    if call.needs_grad and call.mask is not None and call.mask.requires_grad:
        return "does not support a gradient for a float mask (tiled and flash do)"
    if call.dropout_p and call.device.type == "cpu":
        return "does not support dropout on a CPU (tiled does)"
    if call.value_dim != call.head_dim:
        return "does not support a value dimension other than D (tiled does)"
    if not (call.batch and call.heads and call.queries and call.keys):
        return "does not support empty tensors (tiled does)"
    return None


def _unsupported_on_gpu(form: Pairwise, call: Call) -> str | None:
    """Return why torch's fused kernels do not run the call on a GPU, or None.

    Torch would compute a gain in 16 bits inexactly or, in fp32, slowly. It would raise an error for
    a mask in another dtype, and store all scores for the others.
    """
    wide, mask = call.input_dtype == torch.float32, call.mask
    old, half = _is_before_ampere(call.device), call.input_dtype.itemsize == 2
    if half and isinstance(form.gain, (Tensor, FromStatistics)):
        return "does not support a gain per query in 16 bits on a GPU (flash does)"
    if call.input_dtype == torch.float64:
        return "does not support fp64 on a GPU (tiled does)"
    if old and call.input_dtype == torch.bfloat16:
        return f"does not support bf16 on a GPU {OLD} (tiled does)"
    # Torch's flash attention supports none of these, its efficient attention neither GQA nor rows
    # at other addresses.
    efficient = mask is not None or wide or call.head_dim > 256 or old
    if call.group > 1 and efficient:
        return (
            "does not support enable_gqa with a mask, in fp32, with D above 256 or on a GPU "
            f"{OLD} (tiled does)"
        )
    if mask is not None and mask.dtype not in (torch.bool, call.input_dtype):
        return "does not support a mask in another dtype than q on a GPU (tiled does)"
    unit = 4 if wide else 8
    if call.head_dim % unit and efficient:
        return (
            f"does not support a mask, fp32, D above 256 or a GPU {OLD} unless D is a multiple of "
            f"{unit}, got {call.head_dim} (tiled does)"
        )
    return None


def _is_before_ampere(device: torch.device) -> bool:
    # Fake tensors may be on a device that this machine does not have.
    return torch.cuda.is_available() and torch.cuda.get_device_properties(device).major < 8


def _mask(call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask for torch, and a mask of the queries without visible keys.

    Torch never gets a query without keys: in the first mask such queries see all keys. Both masks
    are None if the call has no mask. A key mask stays [B|1, H|1, 1, Nk]: torch converts it to
    floats in this shape, and expands it over the queries without a copy.

    Torch saves m + log Z of each query for the backward. If all entries of a row are about −1e9,
    this sum has no digits of log Z: their maximum is subtracted.
    """
    if call.mask is None:
        return None, None
    empty = ~visible_entries(call.mask).any(-1, keepdim=True)  # [B|1, H|1, Nq|1, 1]
    if call.mask.dtype == torch.bool:
        return call.mask | empty, empty
    # Torch accepts a float mask in fp32 or in the ``dtype`` of q.
    mask = call.mask.to(torch.promote_types(call.mask.dtype, dtype)).masked_fill(empty, 0.0)
    peak = mask.amax(-1, keepdim=True)
    return mask - peak.masked_fill(peak > -FAR, 0.0), empty


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a changed q and a positive scale that give the same scores as q and ``scale``.

    Torch's fused CPU kernel adds −∞ to the scores of causally hidden keys before it scales. A
    negative scale would turn −∞ into +∞. A scale that is 0 or underflows to 0 would give NaN.
    """
    if scale == 0:
        return q * 0.0, 1.0
    if abs(scale) < torch.finfo(torch.float32).tiny:
        scale, exponent = math.frexp(scale)
        q = q * 2.0**exponent  # exact, unless q is so small that the scores are 0
    return (-q if scale < 0 else q), abs(scale)


def _remove_nan(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q and k without NaN, and a mask [B, H, Nq, 1] of queries with a visible NaN score.

    With fewer keys than a vector register holds, torch's fused CPU kernel treats a query whose
    scores are all NaN like a query without keys. The kernel also hides keys by adding −∞, which
    does not remove NaN. The sum over q and k is the cheapest test for NaN. If nothing is removed,
    the mask is None.
    """
    if call.device.type != "cpu" or (
        call.mask is None and is_known(call.keys >= WIDER_THAN_A_VECTOR)
    ):
        return q, k, None
    if is_readable(q) and is_readable(k) and bool((q.sum() + k.sum()).isfinite()):
        return q, k, None
    queries = (q * 0).isnan().any(-1, keepdim=True)  # also true for ±∞ in q
    k = _without_unseen(k, call)
    keys = k.isnan().any(-1, keepdim=True)
    q, k = q.masked_fill(queries, 0.0), k.masked_fill(keys, 0.0)
    keys = keys.repeat_interleave(call.group, dim=1)  # [B, H, Nk, 1]
    if call.mask is not None:
        seen = (visible_entries(call.mask) & keys.mT).any(-1, keepdim=True)
    elif call.right == 0 and call.queries > 1:
        seen = keys.cumsum(2) > 0
    else:
        seen = keys.any(2, keepdim=True)
    return q, k, queries | seen


def _without_unseen(k: Tensor, call: Call) -> Tensor:
    """Replace keys that are masked for all queries by 0. Infinite keys would give NaN."""
    if call.mask is None:
        return k
    seen = visible_entries(call.mask).any(2)  # [B|1, H|1, Nk]
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.kv_heads, call.group)).any(2)
    return k.masked_fill(~seen[..., None], 0.0)


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    gain, scale = with_gain(form, q, k, call, "sdpa").gain, call.scale
    assert not isinstance(gain, FromStatistics)
    if isinstance(gain, Tensor):
        q, k, v = (x.to(call.dtype) for x in (q, k, v))
        q = q * gain.unsqueeze(-1)
    else:
        scale *= gain
    q, scale = _positive_scale(q, scale)
    q, k, spoiled = _remove_nan(q, k, call)
    # Torch's fused CPU kernel falls back to dense math if the last dimension is strided.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask, empty = _mask(call, q.dtype)
    # A single query sees all keys. is_causal is set in branches, because under torch.compile a
    # comparison may be a symbolic bool, which torch does not accept here.
    is_causal = grouped = False
    if call.group > 1:
        grouped = True
    if call.right == 0 and call.queries > 1:
        is_causal = True
    # A graph runs inside of the modes that were active when it was compiled.
    hidden = torch.compiler.is_compiling() or has_torch_function((q,))
    attend = OVERLOAD if hidden else scaled_dot_product_attention
    out = attend(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
        dropout_p=call.dropout_p,
    )
    # Torch's math, which runs where no fused kernel does, has second derivatives. A compiled call
    # has no grad_fn to read.
    node = out.grad_fn if runs_eagerly() else None
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_name_eager)
    if spoiled is not None:
        out = out.masked_fill(spoiled, torch.nan)
    return (out if empty is None else out.masked_fill(empty, 0.0)), None


class _FirstOnly(torch.autograd.Function):
    """A gradient that cannot be differentiated. Torch's error would not name a way out."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(NO_DOUBLE)


def _name_eager(
    grads: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...] | None:
    """A hook on torch's attention: with ``create_graph``, its gradients become `_FirstOnly`."""
    if not torch.is_grad_enabled():
        return None
    return tuple(None if x is None else _FirstOnly.apply(x) for x in grads)


BACKEND = Backend("sdpa", ("pairwise",), unsupported, run)
