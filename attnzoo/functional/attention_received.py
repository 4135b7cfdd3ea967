"""attention_received(): the attention that each key receives, without the matrix of weights.

Σ_i w_ij is the gradient of v_j for an output gradient of ones, so every backend with a backward
computes it. The heads of a group share values: each has a column of its own, with an output
gradient of 1 for this head and 0 for the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.selection import check_backend
from attnzoo.core.call import in_full_precision, widened
from attnzoo.core.checks import check_dense
from attnzoo.functional.prepare import ValidatedCall, prepare
from attnzoo.functional.run_on_backend import run_on_backend
from attnzoo.functional.use_backend import named_backend


def attention_received(
    q: Tensor,
    k: Tensor,
    variant: str = "softmax",
    *,
    backend: str | None = None,
    **arguments: Any,
) -> Tensor:
    """The attention that each key receives: Σ_i w_ij over the queries, for each query head.

    These are the column sums of `attention_weights`, in memory linear in N on every backend but
    ``eager``. For example, caches evict the keys with the smallest sums.

    Args:
        q: Queries (B, H, Nq, D). For the attention of the last queries only, pass only these, with
            ``is_causal`` and all keys.
        k: Keys (B, Hkv, Nk, D).
        variant: A name from `list_variants`.
        backend: As for `attention`. The backend must support gradients.
        **arguments: The other arguments of `attention` except ``return_lse`` and
            ``return_max_logits``, and parameters of the variant. With ``dropout_p`` the weights are
            those after dropout.

    Returns:
        The sums (B, H, Nk) in fp32 (fp64 for fp64 inputs), without a gradient; 0 for a key that no
        query sees. 16-bit inputs are converted to fp32.

    Raises:
        ValueError, TypeError: As for `attention`.

    Example:
        >>> import torch, attnzoo
        >>> q, k = torch.randn(2, 1, 4, 100, 16).unbind()
        >>> received = attnzoo.attention_received(q, k, is_causal=True)
        >>> received.shape
        torch.Size([1, 4, 100])
        >>> torch.allclose(received.sum(-1), torch.tensor(100.0))  # the weights of a query sum to 1
        True

    References:
        Zhang et al. 2023, arXiv:2306.14048 (H2O) evict keys by these sums.

    Notes:
        It costs a forward and a backward with one column of values per query head of a group.
        `torch.compile` breaks the graph at this call, and `torch.func.vmap` does not support it.
    """
    for name, x in (("q", q), ("k", k)):
        check_dense(name, x)
    backend = named_backend(backend)
    check_backend(backend)
    # A tensor of inference mode cannot be saved for a backward, but its copy can.
    with torch.inference_mode(False), torch.enable_grad():
        constants = {name: _constant(x) for name, x in arguments.items()}
        ready = prepare(_constant(q), _constant(k), _constant(k), variant, constants)
        call = ready.call
        for name in ("return_lse", "return_max_logits"):
            if getattr(call, name):
                raise ValueError(f"{name} must be False for attention_received, got True")
        values = torch.zeros(
            *ready.k.shape[:3], call.group, dtype=call.dtype, device=call.device, requires_grad=True
        )
        out, _ = run_on_backend(_in_score_dtype(ready, values), backend)
        of_heads = torch.eye(call.group, dtype=out.dtype, device=out.device)
        of_heads = of_heads.repeat(call.kv_heads, 1)[:, None]  # [H, 1, G]
        with in_full_precision(call.device):
            (sums,) = torch.autograd.grad(out, values, of_heads.expand_as(out))
    return sums.mT.flatten(1, 2)  # from [B, Hkv, Nk, G]


def _constant(x: Any) -> Any:
    """A tensor without gradient and not of inference mode; anything else unchanged."""
    if isinstance(x, (tuple, list)):
        return tuple(map(_constant, x))
    if not isinstance(x, Tensor):
        return x
    return x.clone() if x.is_inference() else x.detach()


def _in_score_dtype(ready: ValidatedCall, values: Tensor) -> ValidatedCall:
    """The call with q, k and a float mask in the dtype of scores, and with these values."""
    call, mask = ready.call, ready.call.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(call.dtype)
    call = replace(
        call, value_dim=values.shape[-1], input_dtype=call.dtype, mask=mask, needs_grad=True
    )
    return ready._replace(q=widened(ready.q), k=widened(ready.k), v=values, call=call)
