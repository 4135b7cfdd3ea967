"""QASSMax: attention of queries that are scaled by the number of keys and by themselves."""

from __future__ import annotations

from typing import Any, Literal

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.arguments import check_call
from attnzoo.core.call import in_full_precision, widened
from attnzoo.core.checks import check_sizes, plain
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.nn.cache import KVCache, StateCache
from attnzoo.nn.wrappers.base import Wrapper, check_per

LAYOUT = ("attn_mask", "is_causal", "window", "segment_ids")  # what the number of keys depends on


class QASSMax(Wrapper):
    """Query-aware scalable softmax: queries q_i·base(log n_i)·(1 + tanh(modulation(q_i))).

    n_i is the number of keys that query i may see. ``base`` and ``modulation`` are MLPs with one
    hidden layer and GELU. ``base`` has one output per head, or one per head and feature.
    ``modulation`` has one output, or one per feature, and is the same for all heads.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`. The paper's variant is softmax.
        per: "element" or "head".
        hidden: number of hidden units of each MLP.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import QASSMax
        >>> attend = QASSMax("softmax", num_heads=4, embed_dim=32, per="head")
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    References:
        Qu et al. 2026 (TabICLv2), arXiv:2602.11139; github.com/soda-inria/tabicl, whose modules
        "qassmax-mlp" and "qassmax-mlp-elementwise" have state dicts of the same names.

    Notes:
        The last layers start such that ``base`` is 1 and ``modulation`` 0, so that the wrapper
        starts as the attention inside it. The authors draw that of ``base`` at random.

        The MLPs and the product are computed in fp32. The scaled queries are rounded to the dtype
        of q, which gains of a variant such as ssmax are not.
    """

    length_gain = True
    nonlinear_queries = True

    def __init__(
        self,
        variant: str,
        num_heads: int,
        embed_dim: int,
        *,
        per: Literal["element", "head"] = "element",
        hidden: int = 64,
        **options: Any,
    ) -> None:
        check_per(per)
        hidden = plain(hidden)
        check_sizes(hidden=hidden)
        self.per, self.hidden = per, hidden
        super().__init__(variant, num_heads, embed_dim, **options)

    def _configure(self, **kind: Any) -> None:
        scales = self.qk_dim if self.per == "element" else 1
        self.base_mlp = _mlp(1, self.hidden, self.num_heads * scales, 1.0, kind)
        self.query_mlp = _mlp(self.qk_dim, self.hidden, scales, 0.0, kind)

    def reset_parameters(self) -> None:
        """Resets all parameters to their initial values; draws the first layers again."""
        super().reset_parameters()
        for layer in (*self.base_mlp, *self.query_mlp):
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        (like,) = cast_by_autocast(q)  # the mask has the dtype that q has in the attention
        with in_full_precision(q.device):
            log_n = self._log_n(like, k, options)  # [B or 1, H or 1, Nq]
            last: Any = self.base_mlp[2]
            weight, bias = (
                rearrange(x.to(log_n.dtype), "(h f) ... -> h ... f", h=self.num_heads)
                for x in (last.weight, last.bias)
            )
            units = _hidden(self.base_mlp, log_n[..., None])
            base = units @ weight + bias[:, None]  # [B or 1, H, Nq, D or 1]
            wide = widened(q)
            modulation = _linear(self.query_mlp[2], _hidden(self.query_mlp, wide))
            scaled = wide * base * (1 + modulation.tanh())
        return scaled.to(q.dtype), k, v, options

    def _log_n(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
        """log n_i, where the keys of a cache count too."""
        if self.attention.sharding is not None:
            raise ValueError(
                f"the sequence must not be sharded for {type(self).__name__}, which needs the "
                "number of keys of the whole sequence"
            )
        layout = {name: options[name] for name in LAYOUT if name in options}
        keys, cache = k.shape[2], options.get("cache")
        if isinstance(cache, (KVCache, StateCache)):  # the attention raises for others
            keys, layout["is_causal"] = cache.length + keys, True
        # The count depends on the shape of the keys only.
        k = q.new_zeros(()).expand(*k.shape[:2], keys, k.shape[3])
        return check_call(q, k, k, enable_gqa=True, **layout).log_n

    def extra_repr(self) -> str:
        """The number of heads and the kind of scale, for repr()."""
        return f"num_heads={self.num_heads}, per={self.per!r}, hidden={self.hidden}"


class LastLayer(nn.Linear):
    """A linear layer that gives the same number for all inputs initially."""

    def __init__(self, inputs: int, outputs: int, start: float, **kind: Any) -> None:
        self.start = start  # torch's constructor calls reset_parameters
        super().__init__(inputs, outputs, **kind)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.start)


def _mlp(
    inputs: int, hidden: int, outputs: int, start: float, kind: dict[str, Any]
) -> nn.Sequential:
    first, last = nn.Linear(inputs, hidden, **kind), LastLayer(hidden, outputs, start, **kind)
    return nn.Sequential(first, nn.GELU(), last)


def _linear(layer: Any, x: Tensor) -> Tensor:
    """The layer in the dtype of x."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def _hidden(mlp: nn.Sequential, x: Tensor) -> Tensor:
    return F.gelu(_linear(mlp[0], x))
