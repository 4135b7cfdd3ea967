"""linear_attention(): causal attention that starts from a state and returns the next one."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends import BACKENDS, linear
from attnzoo.backends.base import Backend
from attnzoo.backends.linear import LinearState
from attnzoo.backends.selection import preference
from attnzoo.core.arguments import ARGUMENTS
from attnzoo.core.call import Call, in_full_precision
from attnzoo.core.checks import check_dense, is_int, is_known, shown
from attnzoo.core.forms import Linear, NoForm
from attnzoo.functional.prepare import check_supported, prepare
from attnzoo.functional.use_backend import named_backend

# Calls with fewer tokens run in PyTorch, because they would not fill one chunk of a kernel.
MIN_TOKENS = 64


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    *,
    state: LinearState | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **params: Tensor | float | None,
) -> tuple[Tensor, LinearState]:
    """Causal attention of a linear variant over the next tokens of a sequence.

    out_i = ψ(scale·q_i)·S_i / (ψ(scale·q_i)·z_i) with S_i = Σ_{j ≤ i} ψ(k_j) v_jᵀ and
    z_i = Σ_{j ≤ i} ψ(k_j), where j runs over the keys summed in ``state`` and those given here. A
    sequence may be cut anywhere: the outputs equal those of ``attention(..., is_causal=True)`` on
    the whole sequence. The cost per token does not depend on the length. Gradients also flow
    through the state.

    Args:
        q: Queries of the next N tokens (B, H, N, D).
        k: Keys of the same tokens (B, Hkv, N, D).
        v: Values of the same tokens (B, Hkv, N, Dv).
        variant: A variant with a linear form for these parameters.
        state: The state that the previous call returned; None starts a sequence.
        attn_mask: Bool key mask of these N tokens, (..., 1, N); True = attend.
        scale: As for `attention`, and the same in every call of a sequence.
        enable_gqa: As for `attention`.
        **params: Parameters of the variant, the same in every call of a sequence.

    Returns:
        A pair (out, state): the output (B, H, N, Dv) in q's dtype, and the `LinearState` after
        these tokens.

    Raises:
        ValueError: An argument has a wrong value or shape, or the variant has no linear form for
            these parameters.
        TypeError: An argument has a wrong type or dtype, or is not accepted.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> full = attnzoo.attention(q, k, v, "taylor", is_causal=True)
        >>> first, state = attnzoo.linear_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], "taylor")
        >>> last, state = attnzoo.linear_attention(
        ...     q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], "taylor", state=state)
        >>> torch.allclose(last, full[:, :, 9:], atol=1e-5), state.length
        (True, 10)

    References:
        Katharopoulos et al. 2020, arXiv:2006.16236 (linear attention as a recurrence).

    Notes:
        The state is kept in fp32 (fp64 for fp64 inputs). In fp32, a feature map with negative
        features (`Linear.cancels`) needs normalized q and k.
    """
    for name in {"backend", *ARGUMENTS}.intersection(params):
        raise TypeError(
            f"linear_attention does not accept {name}; it accepts state, attn_mask, scale, "
            "enable_gqa and parameters of the variant"
        )
    arguments: dict[str, Any] = dict(
        attn_mask=attn_mask, is_causal=True, scale=scale, enable_gqa=enable_gqa, **params
    )
    seen = 0 if state is None else check_state(state)
    ready = prepare(q, k, v, variant, arguments, positions=(seen, seen))
    check_supported(ready)
    call = ready.call
    if call.queries != call.keys:
        raise ValueError(f"q and k must have equal lengths, got {call.queries} and {call.keys}")
    form = _linear_form(ready.forms, variant)
    if (reason := linear.unsupported(form, call)) is not None:
        raise ValueError(f"linear_attention {reason}")
    sums = None if state is None else _sums(state, call, form)
    if sums is not None and torch.is_grad_enabled() and sums.requires_grad:
        call = replace(call, needs_grad=True)
    with in_full_precision(call.device):
        scan = scan_for(form, call, named_backend(None)).scan
        assert scan is not None
        out, sums = scan(ready.q, ready.k, ready.v, call, form, sums)
    return out.to(call.input_dtype), LinearState(sums, seen + call.keys)


def scan_for(form: Linear, call: Call, name: str | None = None) -> Backend:
    """The named backend, or the preferred one that can start from a state."""
    if name is not None:
        backend = BACKENDS[name]
        reason = "cannot start from a state" if backend.scan is None else None
        reason = reason or backend.unsupported(form, call)
        if reason is not None:
            raise ValueError(
                f"backend {name!r} of use_backend cannot run linear_attention and state caches: it "
                f"{reason}; use 'linear', or caches of keys (kind='keys')"
            )
        return backend
    if is_known(call.keys < MIN_TOKENS):
        return BACKENDS["linear"]
    able = (b for b, _ in preference((form,), call) if b.scan and not b.unsupported(form, call))
    return next(able)


def check_state(state: Any) -> int:
    """The number of keys in a state, after checking it."""
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a LinearState or None, got {type(state).__name__}")
    if not is_int(state.length):
        raise TypeError(f"state.length must be an int, got {shown(state.length)}")
    if not 0 <= state.length < 2**62:
        raise ValueError(f"state.length must be >= 0 and < 2^62, got {shown(state.length)}")
    check_dense("state.sums", state.sums)
    return state.length


def _sums(state: LinearState, call: Call, form: Linear) -> Tensor:
    sums, tail = state.sums, (form.size(call.head_dim), call.value_dim + 1)
    shapes = [(call.batch, heads, *tail) for heads in (call.kv_heads, call.heads)]
    if sums.shape not in shapes or sums.dtype != call.dtype or sums.device != call.device:
        raise ValueError(
            f"state.sums must be {shapes[0]} {call.dtype} on {call.device} for these inputs, got "
            f"{tuple(sums.shape)} {sums.dtype} on {sums.device}"
        )
    return sums


def _linear_form(forms: tuple[Any, ...], variant: str) -> Linear:
    for form in forms:
        if isinstance(form, Linear):
            return form
    reasons = [form.why for form in forms if isinstance(form, NoForm) and form.kind == "linear"]
    why = reasons[0] if reasons else "it has no linear form"
    raise ValueError(f"linear_attention does not support variant {variant!r} in this call: {why}")
