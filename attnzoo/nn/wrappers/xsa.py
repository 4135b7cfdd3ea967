"""XSA: the output of attention without its component along the token's own value."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import normalize

from attnzoo.core.call import score_dtype, widened
from attnzoo.core.checks import check_bool
from attnzoo.nn.wrappers.base import Wrapper


class XSA(Wrapper):
    """Exclusive self attention: the output without its component along the token's own value.

    With y = A(q, k)·v and v_i the value of the token of query i::

        o_i = y_i − (y_i·v_i / v_i·v_i)·v_i

    With grouped heads v_i is that of the query's key and value head. The queries are the last Nq of
    the Nk tokens, so attention to another sequence raises an error.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`.
        gated: whether to subtract tanh(α) times the component, with one learned α per head.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import XSA
        >>> attend = XSA("softmax", num_heads=4, embed_dim=32)
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        >>> out = attend(q, k, v, is_causal=True)
        >>> torch.allclose((out * v).sum(-1), torch.zeros(2, 4, 16), atol=1e-5)
        True

    References:
        Zhai 2026, arXiv:2603.09078. The gate is that of KellerJordan/modded-nanogpt#264.

    Notes:
        v_i / ‖v_i‖ is `torch.nn.functional.normalize`, which divides by at least 1e-12. A value of
        0 has no direction, so the output is y_i. α is 0 initially, so that a gated wrapper starts
        as the attention inside it. Without a gate, a token that sees only itself has output 0 up to
        rounding.
    """

    positional = True

    def __init__(
        self, variant: str, num_heads: int, embed_dim: int, *, gated: bool = False, **options: Any
    ) -> None:
        self.gated = check_bool("gated", gated)
        super().__init__(variant, num_heads, embed_dim, **options)

    def _configure(self, **kind: Any) -> None:
        self.alpha = nn.Parameter(torch.zeros(self.num_heads, **kind)) if self.gated else None

    def reset_parameters(self) -> None:
        """Resets all parameters to their initial values."""
        super().reset_parameters()
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        if q.shape[2] > k.shape[2]:
            raise ValueError(
                f"q must have at most as many tokens as k for {type(self).__name__}, because each "
                f"query has a value of its own, got {q.shape[2]} and {k.shape[2]}"
            )
        return q, k, v, options

    def _output(self, out: Tensor, gate: Tensor | None, v: Tensor) -> Tensor:
        y = rearrange(widened(out), "b (kv group) n d -> b kv group n d", kv=v.shape[1])
        of_queries = v[:, :, v.shape[2] - out.shape[2] :]  # not −Nq, because Nq may be 0
        direction = normalize(widened(of_queries), dim=-1)[:, :, None]
        removed = ((y * direction).sum(-1, keepdim=True) * direction).flatten(1, 2)
        if self.alpha is not None:
            removed = self.alpha.to(score_dtype(removed)).tanh().view(1, -1, 1, 1) * removed
        return out - removed

    def extra_repr(self) -> str:
        """The number of heads, and whether it is gated, for repr()."""
        return f"num_heads={self.num_heads}, gated={self.gated}"
