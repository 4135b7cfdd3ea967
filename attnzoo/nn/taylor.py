"""Taylor: the linear attention layer of Based."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.core.checks import check_bool, check_sizes
from attnzoo.nn.attention import Attention, check_heads
from attnzoo.nn.cache import Cache


class Taylor(nn.Module):
    """Linear attention of Based: learned projections to few features, and `taylor` on those.

    o = W_o · concat over heads of Σ_j T(q_i·k_j / √d') v_j / Σ_j T(q_i·k_j / √d'), T(z) = 1 + z +
    z²/2, q = W_q x, k = W_k x of ``feature_dim`` d' and v = W_v x. With d' = 16 a state is 153
    features wide, where a head dimension of 64 would make 2145.

    Args:
        embed_dim: E, of the tokens.
        num_heads: H, of the queries.
        feature_dim: d', of each head's queries and keys.
        head_dim: Dv, of each head's values; None is E // H.
        num_kv_heads: of keys and values; None is H.
        bias: of the four projections.

    Shapes:
        forward(x (B, N, E), cache=None, **keywords of `attnzoo.attention`) -> (B, N, E).

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Taylor
        >>> layer, x = Taylor(embed_dim=64, num_heads=4), torch.randn(2, 10, 64)
        >>> layer(x, is_causal=True).shape
        torch.Size([2, 10, 64])

    Source: Arora et al. 2024, arXiv:2402.18668, Section 4.1. Differs: no convolution and no window
    beside it, which are layers of their own there.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_dim: int = 16,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, feature_dim=feature_dim)
        check_sizes(optional=True, head_dim=head_dim, num_kv_heads=num_kv_heads)
        check_bool("bias", bias)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}: give head_dim"
            )
        kv_heads = check_heads(num_heads, num_kv_heads)
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        kind: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.attend = Attention("taylor", num_heads)
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.q_proj = nn.Linear(embed_dim, num_heads * feature_dim, **kind)
        self.k_proj = nn.Linear(embed_dim, kv_heads * feature_dim, **kind)
        self.v_proj = nn.Linear(embed_dim, kv_heads * head_dim, **kind)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, **kind)

    def forward(self, x: Tensor, *, cache: Cache | None = None, **keywords: Any) -> Tensor:
        """(B, N, E) to (B, N, E); with a cache x are the next tokens, causal over all so far."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        gqa = self.num_kv_heads != self.num_heads
        out = self.attend(q, k, v, cache=cache, enable_gqa=gqa, **keywords)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def new_cache(self, max_length: int, kind: str | None = None) -> Cache:
        """As `Attention.new_cache`."""
        return self.attend.new_cache(max_length, kind)
