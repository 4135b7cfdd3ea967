"""OutputGate: a gate on the output of attention."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, softplus

from attnzoo.core.call import widened
from attnzoo.core.checks import check_bool, shown
from attnzoo.nn.wrappers.base import Wrapper, check_per


class OutputGate(Wrapper):
    """A gate on the output of attention: o·σ(g), per head or per element.

    The gate g = x·Wᵀ is one number per token and head, or one per token, head and feature. Options
    give the gates of other models: o·softplus(g), RMSNorm(o)·σ(g) and g = x·Wᵀ + b.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`.
        per: "element" or "head".
        activation: "sigmoid" or "softplus".
        norm: whether o is divided by its root mean square over the features of each head. The norm
            has no factors, and its eps is 1e-5.
        bias: whether to add b, one learned number per head, to g. The parameter ``bias`` of the
            variant sigmoid is set by ``gate.attention = Attention("sigmoid", num_heads, bias=…)``.

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
        Qiu et al. 2025, arXiv:2505.06708, the gate after the attention (position G1). In
        transformers 5.23: softplus in Laguna, per head or element; the norm in Muse Spark and the
        bias in Beam, both with a sigmoid per element.

    Notes:
        W and b are 0 initially, so that σ(g) = 1/2 for all tokens, and softplus(g) = log 2. The
        authors draw W at random.
    """

    def __init__(
        self,
        variant: str,
        num_heads: int,
        embed_dim: int,
        *,
        per: Literal["element", "head"] = "element",
        activation: Literal["sigmoid", "softplus"] = "sigmoid",
        norm: bool = False,
        bias: bool = False,
        **options: Any,
    ) -> None:
        check_per(per)
        if activation not in ("sigmoid", "softplus"):
            raise ValueError(f"activation must be 'sigmoid' or 'softplus', got {shown(activation)}")
        self.per, self.activation = per, activation
        self.norm, self.bias = check_bool("norm", norm), check_bool("bias", bias)
        super().__init__(variant, num_heads, embed_dim, **options)

    def _configure(self, **kind: Any) -> None:
        self.gates = self.v_dim if self.per == "element" else 1
        self.gate_bias = nn.Parameter(torch.zeros(self.num_heads, **kind)) if self.bias else None

    def reset_parameters(self) -> None:
        """Resets all parameters to their initial values."""
        super().reset_parameters()
        if self.gate_bias is not None:
            nn.init.zeros_(self.gate_bias)

    def projected(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """As `Wrapper.projected`; the gate includes the bias."""
        made = super().projected(query, key)
        if self.gate_bias is not None:  # added in fp32, the dtype of the projection's output
            made["gate"] = made["gate"] + self.gate_bias.view(-1, 1, 1)
        return made

    def _output(self, out: Tensor, gate: Tensor | None, v: Tensor) -> Tensor:
        assert gate is not None
        if self.norm:
            out = rms_norm(widened(out), out.shape[-1:], eps=1e-5)
        return out * (gate.sigmoid() if self.activation == "sigmoid" else softplus(gate))

    def extra_repr(self) -> str:
        """The number of heads and the kind of gate, for repr()."""
        others = {"activation": self.activation, "norm": self.norm, "bias": self.bias}
        shown_others = [
            f"{name}={value!r}" for name, value in others.items() if value not in ("sigmoid", False)
        ]
        return ", ".join([f"num_heads={self.num_heads}", f"per={self.per!r}", *shown_others])
