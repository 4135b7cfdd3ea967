"""Taylor: the linear attention layer of Based."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from attnzoo.core.checks import check_bool, check_dense, check_device_and_dtype, check_sizes
from attnzoo.nn.attention import Attention
from attnzoo.nn.cache import Cache
from attnzoo.nn.checks import check_heads, check_like, check_positional
from attnzoo.nn.decoding import AttentionKeywords


class Taylor(nn.Module):
    """The linear attention layer of Based: `taylor` on queries and keys with few features.

    o = W_o · concat over heads of Σ_j T(q_i·k_j / √d') v_j / Σ_j T(q_i·k_j / √d'), with
    T(z) = 1 + z + z²/2, q = W_q x, k = W_k x (d' features per head) and v = W_v x.

    Args:
        embed_dim: number of input and output features, E.
        num_heads: number of query heads, H.
        feature_dim: number of features of each query and key head, d'.
        head_dim: number of features of each value head, Dv; None is E // H.
        num_kv_heads: number of key and value heads, a divisor of H; None is H.
        bias: whether the four projections have a bias.
        device: device of the parameters.
        dtype: dtype of the projections.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Taylor
        >>> layer, x = Taylor(embed_dim=64, num_heads=4), torch.randn(2, 10, 64)
        >>> layer(x, is_causal=True).shape
        torch.Size([2, 10, 64])

    References:
        Arora et al. 2024, arXiv:2402.18668, Section 4.1. The paper's convolution and sliding-window
        layers are not part of this layer.

    Notes:
        With d' = 16 the state has 153 features per head. A head dimension of 64 would give 2145.
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
        check_device_and_dtype(device, dtype)
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

    def forward(
        self,
        x: Tensor,
        *others: Any,
        cache: Cache | None = None,
        **keywords: Unpack[AttentionKeywords],
    ) -> Tensor:
        """Attention of the tokens to each other.

        Args:
            x: tokens, (B, N, E).
            cache: a cache from `new_cache`. x then holds the next tokens of the sequences; they
                attend causally to all tokens so far.
            **keywords: keywords of `attnzoo.attention`; enable_gqa is set by the layer.

        Returns:
            (B, N, E).
        """
        check_positional("x", others)
        check_dense("x", x)
        check_like("x", x, self.q_proj.weight)
        options: dict[str, Any] = dict(keywords)
        if "need_weights" in options:
            raise TypeError("Taylor does not accept need_weights")
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        gqa = self.num_kv_heads != self.num_heads
        out = self.attend(q, k, v, cache=cache, enable_gqa=gqa, **options)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    if TYPE_CHECKING:

        def __call__(
            self, x: Tensor, *, cache: Cache | None = None, **keywords: Unpack[AttentionKeywords]
        ) -> Tensor: ...

    def new_cache(self, max_length: int, kind: str | None = None) -> Cache:
        """An empty cache; see `Attention.new_cache`."""
        return self.attend.new_cache(max_length, kind)
