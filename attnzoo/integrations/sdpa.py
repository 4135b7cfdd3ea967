"""replace_sdpa(): torch's scaled_dot_product_attention computes a variant in a block of code."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnzoo.core.checks import check_bool, check_dense
from attnzoo.core.parameters import check_names
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention
from attnzoo.nn.checks import check_cross_attention

P = ParamSpec("P")
T = TypeVar("T")

# What torch's layers call: the first one in eager mode, all of them in compiled code. The mode does
# not see the calls inside of them.
LAYERS = (
    multi_head_attention_forward,
    torch._native_multi_head_attention,  # pyright: ignore
    torch._transformer_encoder_layer_fwd,  # pyright: ignore
)


class Redirected:
    """What was redirected.

    Attributes:
        calls: The number of calls. Those of compiled graphs do not count.
        compiled: Whether a compiled graph with redirected calls has run.
    """

    def __init__(self) -> None:
        self.calls, self.compiled = 0, False


class RedirectionMode(TorchFunctionMode):
    """Redirects calls to a variant. Torch guards compiled code on the modes that are active."""

    def __init__(self, variant: str, params: dict[str, Any], redirected: Redirected) -> None:
        self.variant, self.params, self.redirected = variant, params, redirected
        self.in_autograd_function = in_autograd_function()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            if types:
                raise TypeError(
                    "replace_sdpa supports plain tensors only, got "
                    f"{', '.join(kind.__name__ for kind in types)}"
                )
            return self.redirect(*args, **kwargs)
        if func in LAYERS:
            raise ValueError(
                "replace_sdpa does not support torch.nn.MultiheadAttention, which may compute "
                "softmax without scaled_dot_product_attention: use attnzoo.nn.replace for it"
            )
        if func is Tensor.unflatten:  # torch's compiler cannot trace this method inside of a mode
            func = torch.unflatten
        return func(*args, **kwargs)

    def redirect(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            # A count would be read, and torch would compile again for each value.
            self.redirected.compiled = True
        else:
            self.redirected.calls += 1
            if in_autograd_function() != self.in_autograd_function:
                raise ValueError(
                    "replace_sdpa does not support checkpoint(..., use_reentrant=True) and other "
                    "functions of autograd inside, because their backward would compute softmax: "
                    "enter replace_sdpa inside of the function"
                )
        tensors = {"query": query, "key": key, "value": value}
        for name, x in tensors.items():
            check_dense(name, x)
            if x.dim() < 2:
                raise ValueError(f"{name} must have two dimensions or more, got {tuple(x.shape)}")
        if attn_mask is not None:
            check_dense("attn_mask", attn_mask)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            k, v, mask = self.aligned(q, k, v, mask, is_causal)
            return attention(
                q,
                k,
                v,
                self.variant,
                attn_mask=mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                **self.params,
            )

        gqa = check_bool("enable_gqa", enable_gqa)
        return in_four_dimensions(attend, query, key, value, attn_mask, gqa)

    def aligned(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask with which bottom-right causality is torch's top-left one."""
        queries, keys = query.shape[-2], key.shape[-2]
        if value.shape[-2] != keys:
            raise ValueError(f"value must have as many keys as key, {keys}, got {value.shape[-2]}")
        if queries == keys:
            return key, value, mask
        if not is_causal:
            check_cross_attention(
                get_variant(self.variant).needs_positions,
                f"a call with {queries} queries and {keys} keys",
                crossed=True,
                hint="; with a cache, calls of scaled_dot_product_attention do not contain them",
            )
            return key, value, mask
        if queries > keys:
            raise ValueError(
                "replace_sdpa does not support is_causal=True with more queries than keys, got "
                f"{queries} queries and {keys} keys"
            )
        # No query sees the other keys.
        if mask is not None and mask.shape[-1] != 1:
            mask = mask[..., :queries]
        return key[..., :queries, :], value[..., :queries, :], mask


def in_autograd_function() -> bool:
    """Whether the forward of a torch.autograd.Function runs: it disables forward gradients."""
    if torch.compiler.is_compiling():
        return False
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def in_four_dimensions(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    enable_gqa: bool,
) -> Tensor:
    """The result of ``attend`` for tensors (…, N, D) whose leading dimensions broadcast.

    Heads are dimension −3 of tensors with four dimensions or more, or with ``enable_gqa``. Tensors
    with fewer dimensions have one head.
    """
    tensors = query, key, value
    headless = all(x.dim() < 4 for x in tensors) and not (enable_gqa and query.dim() == 3)
    if headless:
        tensors = tuple([x.unsqueeze(-3) for x in tensors])
    shared = -3 if enable_gqa else -2  # the dimensions before it are common to all tensors
    leading = tensors[0].shape[:shared]
    is_direct = all(x.dim() == 4 and x.shape[:shared] == leading for x in tensors)
    if not is_direct:
        try:
            leading = torch.broadcast_shapes(*[x.shape[:shared] for x in tensors])
        except RuntimeError:
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise ValueError(
                "query, key and value must have leading dimensions that broadcast, got shapes "
                f"{shapes}"
            ) from None
    if mask is not None:
        scores = [*leading, *tensors[0].shape[shared:-1], tensors[1].shape[-2]]
        if headless:
            del scores[-3]
        fits = all(have in (1, want) for have, want in zip(reversed(mask.shape), reversed(scores)))
        if not (fits and 1 <= mask.dim() <= len(scores)):
            raise ValueError(
                f"attn_mask must broadcast to {tuple(scores)}, the shape of the scores, got "
                f"{tuple(mask.shape)}"
            )
        mask = mask.unsqueeze(-3) if headless and mask.dim() > 2 else mask
    if is_direct:
        out = attend(*tensors, mask)
    else:
        tensors = tuple([x.expand(*leading, *x.shape[shared:]) for x in tensors])
        batch = tensors[0].shape[:-3]

        def flat(x: Tensor) -> Tensor:
            return x.reshape(math.prod(batch), *x.shape[-3:])

        if mask is not None and mask.dim() > 3:
            mask = flat(mask.expand(*batch, *mask.shape[-3:]))
        out = attend(*map(flat, tensors), mask)
        out = out.reshape(*batch, *out.shape[-3:])
    return out.squeeze(-3) if headless else out


class Redirection:
    """What `replace_sdpa` returns. Each entry has its own mode and its own count."""

    def __init__(self, variant: str, params: dict[str, Any], stacklevel: int = 2) -> None:
        self.variant, self.params, self.stacklevel = variant, params, stacklevel
        self.modes: list[RedirectionMode] = []

    def __enter__(self) -> Redirected:
        mode = RedirectionMode(self.variant, self.params, Redirected())
        mode.__enter__()
        self.modes.append(mode)
        return mode.redirected

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        mode = self.modes.pop()
        mode.__exit__(kind, error, traceback)
        if kind is None and not (mode.redirected.calls or mode.redirected.compiled):
            warnings.warn(
                "replace_sdpa redirected no call: the block did not call "
                "torch.nn.functional.scaled_dot_product_attention",
                stacklevel=self.stacklevel,
            )

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            # A new object, because threads may run the function at the same time.
            with Redirection(self.variant, self.params, stacklevel=3):
                return function(*args, **kwargs)

        return decorated


def replace_sdpa(variant: str, **params: Any) -> Redirection:
    """Let `torch.nn.functional.scaled_dot_product_attention` compute a variant inside.

    For models that call this function, such as those of timm, diffusers, torchtune and litgpt, and
    that you do not want to change. Arguments keep torch's meaning: leading dimensions broadcast,
    ``is_causal`` is aligned top left, and heads are dimension −3 of tensors with four dimensions or
    more. Tensors with fewer dimensions have one head, unless ``enable_gqa`` is True.

    Like `torch.no_grad`, the choice is one of the thread, may be nested (the innermost one counts)
    and decorates functions. Compiled code is compiled once for inside and once for outside. Calls
    of attnzoo's functions and modules keep their variants.

    Args:
        variant: A name from `list_variants`.
        **params: Parameters of the variant, the same for all calls, as for `attention`: a number,
            or a tensor () or (H,), which gets gradients.

    Returns:
        A context manager, which may be entered again. Each entry yields an object whose ``calls``
        is the number of calls redirected so far; calls in compiled graphs do not count, but set
        ``compiled`` to True.

    Raises:
        ValueError: There is no such variant. Calls inside raise as `attention` does, and also if
            they have more queries than keys with ``is_causal``, or different numbers of queries and
            keys without it, if the variant depends on positions. `torch.nn.MultiheadAttention`
            raises, because it may compute softmax by itself; `attnzoo.nn.replace` replaces it.
        TypeError: The variant has no such parameter. Calls inside with nested tensors or subclasses
            of Tensor raise too.

    Warns:
        UserWarning: No call was redirected, at the end of the block.

    Example:
        >>> import torch, attnzoo
        >>> import torch.nn.functional as F
        >>> q, k, v = torch.randn(3, 2, 8, 100, 64).unbind()
        >>> with attnzoo.replace_sdpa("ssmax", s=0.2) as redirected:
        ...     out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> redirected.calls
        1
        >>> torch.equal(out, attnzoo.attention(q, k, v, "ssmax", is_causal=True, s=0.2))
        True

    Notes:
        Calls that do not reach the function are not redirected: FlexAttention, flash-attn, code
        that multiplies matrices itself, TorchScript, exported programs, custom operators and other
        threads (`torch.nn.DataParallel`). Compare ``calls`` with the number of attention layers.

        Gradient checkpointing runs a forward again in the backward, where torch hides the block.
        Enter it inside of the checkpointed function, for example as a decorator of ``forward``.
        Otherwise ``use_reentrant=True`` raises here, and False raises in the backward if torch
        notices that the recomputed tensors differ.

        Inside, each operation of torch in eager mode takes about 2 µs more on a CPU.
    """
    check_names(get_variant(variant), params)
    return Redirection(variant, params)
