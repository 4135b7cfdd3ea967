"""attention() and attention_weights(): check a call, choose a backend and run it."""

from collections.abc import Callable
from inspect import signature
from typing import Any, Literal, TypeVar, overload

from torch import Tensor

from attnzoo.backends import eager
from attnzoo.backends.selection import check_backend
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import shown
from attnzoo.functional import packed
from attnzoo.functional.call_cache import find, key_of
from attnzoo.functional.max_logits import max_logits, max_logits_of
from attnzoo.functional.prepare import check_supported, prepare
from attnzoo.functional.results import Results
from attnzoo.functional.run_on_backend import run_on_backend
from attnzoo.functional.use_backend import named_backend

F = TypeVar("F", bound=Callable[..., Any])


@overload
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
    window: int | tuple[int, int] | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **params: Tensor | float | None,
) -> Tensor: ...
@overload
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
    window: int | tuple[int, int] | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **params: Tensor | float | None,
) -> tuple[Tensor, Tensor]: ...
@overload
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
    window: int | tuple[int, int] | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: bool,
    return_max_logits: Literal[False] = False,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
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
    window: int | tuple[int, int] | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logits: Literal[True],
    **params: Tensor | float | None,
) -> tuple[Tensor, ...]: ...
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
    window: int | tuple[int, int] | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **params: Tensor | float | None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention with the normalizer of a variant: out_i = Σ_j w_ij v_j.

    The variant turns the logits z_ij = scale · q_i·k_j into the weights w_ij. The layout and
    ``attn_mask``, ``dropout_p``, ``is_causal``, ``scale`` and ``enable_gqa`` are those of
    `torch.nn.functional.scaled_dot_product_attention`. The variant's own parameters follow.

    Args:
        q: Queries (B, H, Nq, D) in fp16, bf16, fp32 or fp64.
        k: Keys (B, Hkv, Nk, D), of the same dtype and on the same device.
        v: Values (B, Hkv, Nk, Dv), likewise.
        variant: A name from `list_variants`.
        attn_mask: Broadcasts to (B, H, Nq, Nk). A bool mask is True where a query may attend. A
            float mask is added to the scores (after any gain): −inf hides a key, every finite entry
            leaves it visible. A mask with query dimension 1 is a key mask, such as for padding.
        is_causal: A query sees the keys up to its own position: query i is at p = Nk − Nq + i, key
            j at j. If ``attn_mask`` is given too, both apply.
        scale: Factor of q·k. None is D^-½.
        enable_gqa: Allow H to be a multiple of Hkv, as in grouped-query attention.
        window: With ``is_causal`` an int W: a query sees only the last W keys up to its own
            position. Otherwise a pair (left, right): a query sees the keys p − left … p + right.
        alibi: Slopes (H,); −slope·|p − j| is added to the scores (after any gain).
        relative_bias: A table r (H, 2R + 1), instead of slopes: r[h, R + clamp(j − p, −R, R)] is
            added to the scores (after any gain). All keys R or more positions before a query share
            the first entry, all R or more after it the last. `attnzoo.nn.RelativeBias` is T5's.
        segment_ids: Int (B, N), or a pair (B, Nq), (B, Nk). A query sees only the keys of its own
            segment.
        softcap: c > 0; the logits become c·tanh(scale·q·k/c), before any gain. None: no softcap.
        dropout_p: Probability with which a weight is dropped after normalization; the others are
            divided by 1 − p. The backends `tiled` and `flash` drop the same weights for the same
            seed of torch, unless `tiled` runs sorted segments one by one. Others draw other random
            numbers.
        backend: Name of the backend to use; an error is raised if it cannot run the call. None
            is the one of `use_backend`, or lets the library choose (see `explain`).
        return_lse: Also return lse_i = log Σ_j exp(s_ij) of the scores s_ij after gain and bias.
            Supported by variants that are a softmax of scores. The sum does not include a sink.
        return_max_logits: Also return the largest logit of each head, max scale · q_i·k_j over the
            batch and all visible keys, before softcap, gain and bias. It costs one more pass over
            the keys and has no gradient. `attnzoo.nn.QKClip` bounds it. Supported by variants with
            logits.
        **params: Parameters of the variant: a number, or a tensor () or (H,) with one value per
            query head; (B, H, Nq) or (B, H, Nk) where the variant accepts one value per query or
            per key; (H, …) where it has a feature map.

    Returns:
        The output (B, H, Nq, Dv) in q's dtype. With ``return_lse`` a pair (output, lse), lse of
        shape (B, H, Nq) in fp32 (fp64 for fp64 inputs). A query without visible keys has output 0,
        lse −inf and gradient 0. With ``return_max_logits`` the last element of the tuple is the
        maximum, (H,) in lse's dtype; −inf if no query of the head has a visible key,
        and NaN if the logit of a visible key is NaN.

    Raises:
        ValueError: An argument has a wrong value or shape, or the call is unsupported by the
            variant or by the named backend.
        TypeError: An argument has a wrong type or dtype, or a parameter is unknown or missing.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 2, 8, 100, 64).unbind()
        >>> attnzoo.attention(q, k, v, "ssmax", is_causal=True, s=0.2).shape
        torch.Size([2, 8, 100, 64])
        >>> out, lse = attnzoo.attention(q, k, v, return_lse=True)
        >>> lse.shape
        torch.Size([2, 8, 100])

    References:
        `get_variant` returns a variant with its formula and its paper.

    Notes:
        Differences from ``scaled_dot_product_attention``: causality is aligned bottom right if
        Nq ≠ Nk, ``attn_mask`` and ``is_causal`` may be combined, and queries without visible keys
        give 0. In both functions autocast casts q, k and v to its dtype.
    """
    arguments: dict[str, Any] = dict(
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        alibi=alibi,
        relative_bias=relative_bias,
        segment_ids=segment_ids,
        softcap=softcap,
        dropout_p=dropout_p,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    backend = named_backend(backend)
    # The number of calls depends on the ids of segments that are split, so nothing is cached.
    split = segment_ids is not None and packed.splits(q, backend)
    key = None if split else key_of(q, k, v, variant, backend, arguments, params)
    cached, largest = find(key, variant, arguments, params), None
    if cached is not None:
        chosen, call, form = cached
        out, lse = chosen.run(q, k, v, call, form)
        if call.return_max_logits:
            largest = max_logits(q, k, call, chosen)
    else:
        ready = prepare(q, k, v, variant, arguments | params)
        call = ready.call
        check_backend(backend)
        out, lse = run_on_backend(ready, backend, key, params)
        if call.return_max_logits:
            largest = max_logits_of(ready, backend)
    if out.dtype != call.input_dtype:
        out = out.to(call.input_dtype)
    if lse is None and largest is None:
        return out
    return Results(out, lse, largest).returned


def with_signature_of(source: F) -> Callable[[Callable[..., Any]], F]:
    """Give a function the signature of ``source``, for type checkers, `help` and `inspect`."""

    def decorate(function: Any) -> F:
        function.__signature__ = signature(source)
        return function

    return decorate


@with_signature_of(attention)
def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    backend: str | None = None,
    **arguments: Any,
) -> Any:
    """The weights w_ij that `attention` would put on the values, as a dense matrix.

    The weights are computed from the variant's definition, in memory proportional to Nq · Nk.

    Args:
        backend: None or "eager".
        q, k, v and all others: As for `attention`.

    Returns:
        The weights (B, H, Nq, Nk) in q's dtype, after dropout. With ``return_lse`` and
        ``return_max_logits`` a tuple that begins with the weights, as in `attention`.

    Raises:
        ValueError: As for `attention`.
        TypeError: As for `attention`.

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
    largest = max_logits_of(ready, "eager") if ready.call.return_max_logits else None
    return Results(w.to(ready.call.input_dtype), lse, largest).returned
