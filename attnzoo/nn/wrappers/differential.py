"""Differential and DifferentialV2: the difference of two attentions."""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from attnzoo.core.arguments import check_scale
from attnzoo.core.call import score_dtype
from attnzoo.nn.wrappers.base import Wrapper


class Differential(Wrapper):
    """The difference of two attentions of half the head dimension: A₁v − λ·A₂v, with a norm.

    Each head's queries and keys are split into halves, q = [q₁, q₂] and k = [k₁, k₂]::

        o = (1 − λ₀)·RMSNorm(A(q₁, k₁)·v − λ·A(q₂, k₂)·v)
        λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ₀,     λ₀ = 0.8 − 0.6·exp(−0.3·layer)

    A are the variant's weights, with the scale of D/2 features. The four vectors λ_q1, λ_k1, λ_q2
    and λ_k2 have D/2 features. They and the norm's factors (Dv,) are learned and shared by all
    heads.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`. D must be a multiple of 8. Parameters of the variant have 2·H heads, the
            H heads of A₁ first.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Differential
        >>> attend = Differential("softmax", num_heads=4, embed_dim=32)
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    References:
        Ye et al. 2024, arXiv:2410.05258, Equations 1 to 3.

    Notes:
        The halves are not the first and the last D/2 features, but every second block of two
        features. A rotary encoding of the whole head then rotates pairs within a half, whether it
        rotates features p and p + D/2 or 2p and 2p + 1. If it rotates only the first features of a
        head, their number must be a multiple of 8. The authors rotate each half by itself.

        A cache holds k₁, k₂ and v twice, which takes D + 2·Dv numbers per head and token.
    """

    maps = 2

    def _configure(self, **kind: Any) -> None:
        if self.qk_dim % 8:
            raise ValueError(
                f"qk_dim must be a multiple of 8 for {type(self).__name__}, got {self.qk_dim}"
            )
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        # λ_q1, λ_k1, λ_q2, λ_k2
        self.vectors = nn.Parameter(torch.empty(4, self.qk_dim // 2, **kind))
        self.norm = nn.RMSNorm(self.v_dim, eps=1e-5, **kind)
        self._draw()

    @property
    def map_dim(self) -> int:
        """D / 2."""
        return self.qk_dim // 2

    def _draw(self) -> None:
        nn.init.normal_(self.vectors, std=0.1)

    def reset_parameters(self) -> None:
        """Resets all parameters to their initial values; draws the vectors of λ again."""
        super().reset_parameters()
        self._draw()
        self.norm.reset_parameters()

    def factor(self) -> Tensor:
        """λ, in fp32 or fp64."""
        return self._factor(score_dtype(self.vectors))

    def _factor(self, dtype: torch.dtype) -> Tensor:
        x = self.vectors.to(dtype)
        return (x[0] * x[1]).sum().exp() - (x[2] * x[3]).sum().exp() + self.initial

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        if (scale := options.get("scale")) is not None:
            scale = check_scale(scale, self.qk_dim, score_dtype(q))
            options = {**options, "scale": scale * math.sqrt(2)}
        return _halves(q), _halves(k), torch.cat([v, v], dim=1), options

    def _spread(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x, x], dim=dim)

    def _mixed(self, x: Tensor, gate: Tensor | None) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return first - self._factor(score_dtype(x)).view(1, 1, 1, 1) * second

    def _output(self, out: Tensor, gate: Tensor | None, v: Tensor) -> Tensor:
        dtype = score_dtype(out)
        weight = self.norm.weight.to(dtype)
        normed = rms_norm(out.to(dtype), (self.v_dim,), weight, self.norm.eps)
        return (1 - self.initial) * normed.to(out.dtype)


class DifferentialV2(Wrapper):
    """The difference of two attentions that share keys and values: A₁v − σ(g)·A₂v.

    Each head has two queries of D features, and the gate g = x·Wᵀ is one number per token and
    head. There is no norm.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`. Parameters of the variant have 2·H heads; those of a head are adjacent.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import DifferentialV2
        >>> attend = DifferentialV2("softmax", num_heads=4, embed_dim=32)
        >>> x, q = torch.randn(2, 16, 32), torch.randn(2, 8, 16, 8)
        >>> k, v = torch.randn(2, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True, **attend.projected(x, x)).shape
        torch.Size([2, 4, 16, 8])

    References:
        "Differential Transformer V2", Microsoft, January 2026.

    Notes:
        W is 0 initially, so that σ(g) = 1/2 for all tokens. The authors draw it at random.
    """

    queries = maps = 2
    gates = 1

    def _mixed(self, x: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        first, second = rearrange(x, "b (h map) n d -> map b h n d", map=2)
        return first - gate.sigmoid() * second


def _halves(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, 2·H, N, D/2): every second block of two features."""
    return rearrange(x, "b h n (d half two) -> b (half h) n (d two)", half=2, two=2)
