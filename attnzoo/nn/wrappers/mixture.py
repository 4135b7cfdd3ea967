"""MixtureAttention: a gated sum of several attentions."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor

from attnzoo.core.checks import check_sizes, plain
from attnzoo.nn.wrappers.base import Wrapper


class MixtureAttention(Wrapper):
    """A mixture of K attentions that share keys and values: Σ_k π_k·A(q_k, K)·V.

    Each head has K queries. The prior π = softmax(x·Wᵀ) has K entries per token and head. The log
    of a row of softmax weights is q·K/√D minus a number, so the logs of all rows have a rank of at
    most D + 1. The log of a mixture has no such bound. One attention with the query Σ_k π_k·q_k
    has it.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`. Parameters of the variant have K·H heads; those of a head are adjacent.
        components: K.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import MixtureAttention
        >>> attend = MixtureAttention("softmax", num_heads=4, embed_dim=32, components=3)
        >>> x, q = torch.randn(2, 16, 32), torch.randn(2, 12, 16, 8)
        >>> k, v = torch.randn(2, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True, **attend.projected(x, x)).shape
        torch.Size([2, 4, 16, 8])

    References:
        The mixture of softmaxes of an output layer: Yang et al. 2018, arXiv:1711.03953, Section
        2.4. This is the same for the weights of attention.

    Notes:
        W is 0 initially, so that π = 1/K for all tokens.
    """

    queries = maps = gates = 2

    def __init__(
        self, variant: str, num_heads: int, embed_dim: int, *, components: int = 2, **options: Any
    ) -> None:
        components = plain(components)
        check_sizes(components=components)
        self.queries = self.maps = self.gates = components
        super().__init__(variant, num_heads, embed_dim, **options)

    def _mixed(self, x: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        prior = rearrange(gate.softmax(-1), "b h n k -> b h k n 1")
        return (prior * rearrange(x, "b (h k) n d -> b h k n d", k=self.maps)).sum(2)

    def extra_repr(self) -> str:
        """The numbers of heads and of components, for repr()."""
        return f"num_heads={self.num_heads}, components={self.maps}"
