"""A layer of `Transformer`: causal attention and an MLP, each with a norm before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.nn.cache import Cache
from attnzoo.nn.rope import rotate
from attnzoo.nn.wrappers import Choice, host_attention


class Scale(nn.Module):
    """A learned factor per feature."""

    def __init__(self, features: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class DecoderLayer(nn.Module):
    """heads: query heads, and key and value heads. dims: features of each query and key head, and
    of each value head. number: that of the layer, from 0."""

    def __init__(
        self, embed_dim: int, heads: tuple[int, int], dims: tuple[int, int], mlp_dim: int,
        dropout: float, qk_norm: bool, layer_scale: float | None, variant: str,
        params: dict[str, Any], wrapper: Choice, number: int,
    ) -> None:  # fmt: skip
        super().__init__()
        (num_heads, kv_heads), (qk_dim, v_dim) = heads, dims
        self.attend = host_attention(
            wrapper, variant, num_heads, embed_dim, params, key_dim=embed_dim, qk_dim=qk_dim,
            v_dim=v_dim, layer=number,
        )  # fmt: skip
        queries = num_heads * self.attend.queries
        self.sizes = [queries * qk_dim, kv_heads * qk_dim, kv_heads * v_dim]
        self.gqa, self.dims, self.dropout = num_heads != kv_heads, (qk_dim, qk_dim, v_dim), dropout
        self.norm_q, self.norm_k = (
            nn.RMSNorm(qk_dim) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.scale_attention, self.scale_mlp = (
            nn.Identity() if layer_scale is None else Scale(embed_dim, layer_scale)
            for _ in range(2)
        )
        self.before_attention, self.before_mlp = nn.RMSNorm(embed_dim), nn.RMSNorm(embed_dim)
        self.qkv = nn.Linear(embed_dim, sum(self.sizes), bias=False)
        self.out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.up = nn.Linear(embed_dim, mlp_dim, bias=False)
        self.down = nn.Linear(mlp_dim, embed_dim, bias=False)

    def forward(
        self, x: Tensor, rotation: Tensor | None, cache: Cache | None, options: dict[str, Any]
    ) -> Tensor:
        hidden = self.before_attention(x)
        parts = self.qkv(hidden).split(self.sizes, dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, size)).transpose(1, 2) for part, size in zip(parts, self.dims)
        )
        q, k = self.norm_q(q), self.norm_k(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        options = {**options, "is_causal": True, "enable_gqa": self.gqa}
        options |= self.attend.projected(hidden, hidden)
        out = self.attend(q, k, v, cache=cache, **options)
        out = self.scale_attention(self.out(out.transpose(1, 2).flatten(2)))
        x = x + F.dropout(out, self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.before_mlp(x))))
        return x + F.dropout(self.scale_mlp(hidden), self.dropout, self.training)
