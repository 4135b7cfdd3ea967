"""Torch's fused softmax, for softmax and whatever is a row gain on it.

The gain enters as gain·q, computed in fp32 and rounded once to q's dtype. Only what torch's fused
kernels compute exactly is handed over; a mask and ``is_causal`` never go together, and rows without
keys are zeroed here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnzoo.backends.base import Backend
from attnzoo.backends.tiled.statistics import with_gain
from attnzoo.core.call import Call
from attnzoo.core.checks import is_readable
from attnzoo.core.forms import Form, FromStatistics, NoForm, Pairwise
from attnzoo.core.visibility import visible_entries

# Keys. A vector of AVX-512 holds 16 numbers of fp32.
WIDER_THAN_A_VECTOR = 64


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, NoForm):
        return form.why
    if not isinstance(form, Pairwise) or not form.softmax:
        return "carries softmax and row gains on it only"
    if form.sink is not None:
        return "has no sink"
    if isinstance(form.gain, FromStatistics) and form.gain.differentiable and call.needs_grad:
        return "takes the gain as a constant: its gradient through the statistics is in tiled"
    return _unsupported_call(call)


def _unsupported_call(call: Call) -> str | None:
    wide = call.input_dtype == torch.float32
    if call.return_lse:
        return "does not return lse"
    if call.alibi is not None or call.segments is not None:
        return "would need a dense mask for alibi or segments"
    if call.left is not None or call.right not in (None, 0):
        return "would need a dense mask for a window"
    if call.right == 0:
        if call.mask is not None:
            return "takes a mask or causality, not both"
        if call.queries not in (1, call.keys):
            return "is top-left causal: the same as ours for Nq = Nk and Nq = 1 only"
    if call.needs_grad and call.mask is not None and call.mask.requires_grad:
        return "gives no gradient for a float mask; tiled does"
    if call.dropout_p and call.device.type == "cpu":
        return "has no fused dropout on a CPU"
    if call.value_dim != call.head_dim:
        return "torch's fused kernels take Dv = D only"
    if call.device.type == "cuda" and call.input_dtype == torch.float64:
        return "torch has no fused kernel for fp64 on a GPU"
    if call.device.type == "cuda" and call.group > 1 and (call.mask is not None or wide):
        return "torch's fused kernels take no heads in groups beside a mask or in fp32"
    if not (call.batch and call.heads and call.queries and call.keys):
        return "does not take empty tensors"
    return None


def _mask(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The mask with rows that see nothing opened up, and those rows: torch never meets them."""
    if call.mask is None:
        return None, None
    empty = ~visible_entries(call.mask).any(-1, keepdim=True)  # [B|1, H|1, Nq|1, 1]
    if call.mask.dtype == torch.bool:
        return call.mask | empty, empty
    return call.mask.masked_fill(empty, 0.0), empty


def _positive_scale(q: Tensor, call: Call) -> tuple[Tensor, float]:
    """The same products with a scale above 0, for which q takes the sign: an exact change.

    Torch's fused CPU kernel hides a causal key by −∞ before it scales. A negative scale would make
    that +∞, and 0 would make it NaN; so would a scale that is 0 in the kernel's precision.
    """
    scale = abs(call.scale)
    if scale < torch.finfo(call.dtype).tiny:
        return (call.scale * q.to(call.dtype)).to(call.input_dtype), 1.0
    return (-q if call.scale < 0 else q), scale


def _take_out_nan(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k without NaN, and the rows [B, H, Nq, 1] that had it among their visible scores.

    Torch's fused CPU kernel takes a row of NaN for one without keys if it has fewer keys than a
    vector, and it hides a key by adding −∞, after which NaN is still NaN. A sum over q and k is the
    cheapest sign that there may be NaN.
    """
    if call.device.type != "cpu" or (call.mask is None and call.keys >= WIDER_THAN_A_VECTOR):
        return q, k, None
    if is_readable(q) and is_readable(k) and bool((q.sum() + k.sum()).isfinite()):
        return q, k, None
    queries = (q * 0).isnan().any(-1, keepdim=True)  # no score of an infinite query is finite
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
    """k with 0 for the keys that the mask hides from all rows: infinite ones would spoil them."""
    if call.mask is None:
        return k
    seen = visible_entries(call.mask).any(2)  # [B|1, H|1, Nk]
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.kv_heads, call.group)).any(2)
    return k.masked_fill(~seen[..., None], 0.0)


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    gain = with_gain(form, q, k, call, "sdpa").gain
    assert not isinstance(gain, FromStatistics)
    if isinstance(gain, Tensor) or gain != 1.0:
        q = (call.per_query(gain).unsqueeze(-1) * q.to(call.dtype)).to(call.input_dtype)
    q, scale = _positive_scale(q, call)
    q, k, spoiled = _take_out_nan(q, k, call)
    # Torch's fused CPU kernel falls back to dense math on a strided last dimension.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask, empty = _mask(call)
    # One query sees all keys. Branches, because torch takes no symbolic bool under compile.
    is_causal = grouped = False
    if call.group > 1:
        grouped = True
    if call.right == 0 and call.queries > 1:
        is_causal = True
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
        dropout_p=call.dropout_p,
    )
    if spoiled is not None:
        out = out.masked_fill(spoiled, torch.nan)
    return (out if empty is None else out.masked_fill(empty, 0.0)), None


BACKEND = Backend("sdpa", ("pairwise",), unsupported, run)
