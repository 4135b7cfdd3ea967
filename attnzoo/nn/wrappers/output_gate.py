"""OutputGate: a sigmoid gate on the output of attention."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from attnzoo.core.checks import shown
from attnzoo.nn.wrappers.base import Wrapper


class OutputGate(Wrapper):
    """A gate on the output of attention: o·σ(g), per head or per element.

    The gate g = x·Wᵀ is one number per token and head, or one per token, head and feature.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`.
        per: "element" or "head".

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import OutputGate
        >>> attend = OutputGate("softmax", num_heads=4, embed_dim=32, per="head")
        >>> x, (q, k, v) = torch.randn(2, 16, 32), torch.randn(3, 2, 4, 16, 8)
        >>> attend(q, k, v, is_causal=True, **attend.projected(x, x)).shape
        torch.Size([2, 4, 16, 8])

    References:
        Qiu et al. 2025, arXiv:2505.06708, the gate after the attention (position G1).

    Notes:
        W is 0 initially, so that σ(g) = 1/2 for all tokens. The authors draw it at random.
    """

    def __init__(
        self,
        variant: str,
        num_heads: int,
        embed_dim: int,
        *,
        per: Literal["element", "head"] = "element",
        **options: Any,
    ) -> None:
        if per not in ("element", "head"):
            raise ValueError(f"per must be 'element' or 'head', got {shown(per)}")
        self.per = per
        super().__init__(variant, num_heads, embed_dim, **options)

    def _configure(self, **kind: Any) -> None:
        self.gates = self.v_dim if self.per == "element" else 1

    def _output(self, out: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return out * gate.sigmoid()

    def extra_repr(self) -> str:
        """The number of heads and the kind of gate, for repr()."""
        return f"num_heads={self.num_heads}, per={self.per!r}"
