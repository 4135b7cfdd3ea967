"""attention(): check → name → bind → choose → run, or look up what was checked before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnzoo.backends import eager
from attnzoo.backends.selection import check_backend, choose
from attnzoo.core.arguments import Segments, Window
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import shown
from attnzoo.functional.known_calls import find, key_of, remember
from attnzoo.functional.prepare import check_supported, prepare


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window = None,
    alibi: Tensor | None = None,
    segment_ids: Segments = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
    **params: Any,
) -> Any:
    """Attention with any normalizer: o_i = Σ_j w_ij v_j, w as the variant says.

    Args:
        q: queries, (B, H, Nq, D); fp16, bf16, fp32 or fp64.
        k: keys, (B, Hkv, Nk, D), same dtype and device.
        v: values, (B, Hkv, Nk, Dv).
        variant: a name from `list_variants`.
        attn_mask: broadcasts to (B, H, Nq, Nk). Bool: True = attend. Float: added to the scores
            after the gain; −inf is invisible, every finite entry is visible. With query dimension
            1 it is a mask of keys.
        is_causal: query i, at position Nk − Nq + i, sees the keys up to its own position (bottom
            right, unlike torch for Nq ≠ Nk). With ``attn_mask`` both hold.
        scale: of q·k; None is D^-½.
        enable_gqa: let H be a multiple of Hkv.
        window: W keys i − W + 1 … i when causal; (left, right) when not.
        alibi: slopes (H,); −slope·|i − j| is added after the gain.
        segment_ids: int (B, N), or a pair for queries and keys: only keys of the row's own segment
            are visible.
        dropout_p: on the weights after normalization, scaled by 1/(1 − p). Draws differ between
            backends.
        backend: None chooses (see `explain`); a name is used or refused, never replaced.
        return_lse: also return log Σ_j exp(s_ij), sink excluded, for variants with φ = exp.
        **params: of the variant: a float, a tensor () or (H,) with H the query heads, or
            (B, H, Nq) where the variant says so.

    Returns:
        (B, H, Nq, Dv) in q's dtype; with ``return_lse`` also lse, (B, H, Nq), fp32 (fp64 for fp64
        inputs). A row without visible keys is 0, its lse −inf, its gradient 0.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 2, 8, 100, 64).unbind()
        >>> attnzoo.attention(q, k, v, "ssmax", is_causal=True, s=0.2).shape
        torch.Size([2, 8, 100, 64])

    Differs from ``scaled_dot_product_attention``: bottom-right causality, mask and causality
    together, rows without keys. Under autocast q, k and v are cast to its dtype, as there.
    """
    arguments: dict[str, Any] = dict(
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        alibi=alibi,
        segment_ids=segment_ids,
        dropout_p=dropout_p,
        return_lse=return_lse,
    )
    key = key_of(q, k, v, variant, backend, arguments, params)
    known = find(key, variant, arguments, params)
    if known is not None:
        ran, call, form = known
        out, lse = ran.run(q, k, v, call, form)
    else:
        ready = prepare(q, k, v, variant, arguments | params)
        q, k, v, call = ready.q, ready.k, ready.v, ready.call
        check_backend(backend)
        check_supported(ready)
        with in_full_precision(call.device):
            forms = ready.forms
            ran, form = choose(variant, (*forms, ready.definition), call, backend)
            remember(key, ready, forms, ran, form, params)
            out, lse = ran.run(q, k, v, call, form)
    out = out.to(call.input_dtype)
    return (out, lse) if return_lse else out


def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    backend: str | None = None,
    **arguments: Any,
) -> Any:
    """The weights w that `attention` would put on the values: (B, H, Nq, Nk) in q's dtype.

    Takes the arguments of `attention` and materializes the weights from the variant's definition,
    so ``backend`` may only be None or "eager". With ``return_lse`` returns (weights, lse).

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> w = attnzoo.attention_weights(q, k, v, "sparsemax", is_causal=True)
        >>> bool((w.sum(-1) - 1).abs().max() < 1e-5)
        True
    """
    if backend not in (None, "eager"):
        raise ValueError(
            f"backend of attention_weights must be None or 'eager', got {shown(backend)}"
        )
    ready = prepare(q, k, v, variant, arguments)
    check_supported(ready)
    with in_full_precision(ready.call.device):
        w, lse = eager.weights(ready.q, ready.k, ready.call, ready.definition)
    w = w.to(ready.call.input_dtype)
    return (w, lse) if ready.call.return_lse else w
