"""A validated call: sizes, visible keys, scale, dtypes and the bias added to the scores.

A block of queries is a `Call` too. It stores the positions of its first query and key. Its `counts`
are the numbers of visible keys in the whole call. Definitions therefore run on blocks without
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.core.relative_bias import bias_of
from attnzoo.core.visibility import Visibility, cut, visible_entries

# Those types of devices with tensors for which torch.amp.is_autocast_available is False. The
# compiler of torch 2.11 cannot trace that function.
WITHOUT_AUTOCAST = ("meta", "lazy", "vulkan")


def score_dtype(q: Tensor) -> torch.dtype:
    """The dtype of scores, statistics and sums: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """x in fp32, or unchanged in fp64."""
    return x.to(score_dtype(x))


def capped(logits: Tensor, softcap: float) -> Tensor:
    """softcap · tanh(logits / softcap)."""
    return softcap * torch.tanh(logits / softcap)


@contextmanager
def in_full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast, which would compute the fp32 scores in 16 bits."""
    if device.type in WITHOUT_AUTOCAST:
        yield
    else:
        with torch.autocast(device.type, enabled=False):
            yield


class Pages(NamedTuple):
    """Where the keys and values of a call are in a paged cache.

    The last ``used`` keys of a row are in the pages ``table`` of the row, in their order. The mask
    of the call hides the keys before them, which are nowhere.
    """

    k: Tensor  # [pages, Hkv, page size, D]
    v: Tensor  # [pages, Hkv, page size, Dv]
    table: Tensor  # int32 [B, blocks]
    used: Tensor  # int32 [B]


@dataclass(frozen=True, eq=False, kw_only=True)
class Call(Visibility):
    """One validated call, as the functions of a variant receive it.

    Most definitions need `scores`, `bias`, `log_n` or `counts`, and `softmax` or `zero_hidden`.

    Attributes:
        batch: B.
        heads: Query heads H.
        kv_heads: Key and value heads Hkv.
        queries: Nq.
        keys: Nk.
        head_dim: D of q and k.
        value_dim: Dv.
        scale: Factor of q·k.
        softcap: c of the softcap z = c·tanh(scale·q·k/c), or None.
        relative_bias: ALiBi's slopes or a table, see `attnzoo.core.relative_bias`.
        dtype: Dtype of scores, per-query vectors and sums: fp32, or fp64 for fp64 inputs.
        input_dtype: Dtype of q, k, v and the output.
        device: Device of all tensors.
        query_origin: Position of the first query.
        key_origin: Position of the first key.
        dropout_p: Dropout probability; backends apply it to the weights.
        return_lse: Whether lse is returned too.
        return_max_logits: Whether the largest logit of each head is returned too.
        needs_grad: Whether a gradient may be needed.
        longest: If the segments are the sequences of `varlen_attention`, a bound of their lengths:
            tokens are then sorted by segment. None for others.
        pages: Where keys and values are if they are (pages, Hkv, page size, D); else None.

    Example:
        >>> import torch, attnzoo
        >>> def weights(q: torch.Tensor, k: torch.Tensor, call: attnzoo.Call) -> torch.Tensor:
        ...     scores = call.scores(q, k) + call.bias
        ...     return call.zero_hidden(scores.relu() / call.counts.clamp(min=1)[..., None])
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    input_dtype: torch.dtype
    softcap: float | None = None
    relative_bias: Tensor | None = None  # [1, H, W] in `dtype`
    dropout_p: float = 0.0
    return_lse: bool = False
    return_max_logits: bool = False
    needs_grad: bool = False
    longest: int | None = None
    pages: Pages | None = None

    # ---- for variants ---------------------------------------------------------------------

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """The logits z, (B, H, Nq, Nk) in `dtype`; handles grouped heads (GQA).

        z = scale · q_i·k_j, or softcap · tanh(scale · q_i·k_j / softcap) with a softcap.
        """
        logits = self.scale * self.by_group(q.to(self.dtype), k.to(self.dtype).mT)
        return logits if self.softcap is None else capped(logits, self.softcap)

    @property
    def bias(self) -> Tensor | float:
        """What a variant adds to the scores after the gain: the float mask plus a relative bias.

        −∞ in the mask is replaced by 0. The bias is 0.0 if there is none.
        """
        bias: Tensor | float = 0.0
        if self.mask is not None and self.mask.dtype != torch.bool:
            bias = self.mask.masked_fill(~visible_entries(self.mask), 0.0).to(self.dtype)
        if self.relative_bias is not None:
            bias = bias + bias_of(self.relative_bias, self.distance)
        return bias

    @property
    def has_bias(self) -> bool:
        """Whether there is a float mask or a relative bias."""
        floats = self.mask is not None and self.mask.dtype != torch.bool
        return floats or self.relative_bias is not None

    def hide(self, scores: Tensor, fill: float = float("-inf")) -> Tensor:
        """Scores with ``fill`` at invisible keys; a row without visible keys stays unchanged.

        With −∞ in all of a row, softmax and its gradient would be NaN. Callers must set the
        weights of a row without visible keys to 0.
        """
        if self.sees_all:
            return scores
        visible = self.visible
        return scores.masked_fill(~visible & visible.any(-1, keepdim=True), fill)

    def zero_hidden(self, weights: Tensor) -> Tensor:
        """Weights with 0 at invisible keys."""
        return weights if self.sees_all else weights.masked_fill(~self.visible, 0.0)

    def normalized(self, weights: Tensor) -> Tensor:
        """Weights ≥ 0 at the visible keys, divided by their sum; rows whose sum is 0 stay 0."""
        weights = self.zero_hidden(weights)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0)

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the visible keys; a row without visible keys is 0, with gradient 0."""
        return self.zero_hidden(self.hide(scores).softmax(-1))

    def logsumexp(self, scores: Tensor) -> Tensor:
        """log Σ exp over the visible keys; a row without visible keys is −inf, with gradient 0."""
        if self.keys == 0:
            return scores.new_full(scores.shape[:-1], float("-inf"))
        hidden = self.hide(scores)
        # The gradient of torch's logsumexp is exp(x − lse). Without the maximum it would be wrong
        # where the sum m + log Σ has no digits left for the logarithm.
        m = hidden.detach().amax(-1, keepdim=True)
        m = m.masked_fill(~m.isfinite(), 0.0)
        lse = (hidden - m).logsumexp(-1) + m.squeeze(-1)
        return lse if self.sees_all else lse.masked_fill(~self.visible.any(-1), float("-inf"))

    @property
    def own_keys(self) -> Tensor:
        """Index of the key at each query's position, (Nq,); the nearest key if there is none."""
        return (self.query_positions - self.key_origin).clamp(0, max(self.keys - 1, 0))

    def per_key(self, value: Tensor | float) -> Tensor:
        """A per-key vector as a tensor (…, Nk); see `per_query`."""
        return self.per_query(value).expand(-1, -1, self.keys)

    def per_query(self, value: Tensor | float) -> Tensor:
        """A per-query vector as a tensor of three dimensions or more."""
        if isinstance(value, Tensor):
            return value[(None,) * (3 - value.dim())] if value.dim() < 3 else value
        return torch.full((1, 1, 1), value, dtype=self.dtype, device=self.device)

    def expanded(self, value: Tensor | float) -> Tensor:
        """A per-query vector as a contiguous tensor (B, H, Nq). Do not modify."""
        shape = self.batch, self.heads, self.queries
        if not isinstance(value, Tensor):

            def make() -> Tensor:
                return torch.full(shape, value, dtype=self.dtype, device=self.device)

            return make() if self.cache is None else self.cache.get(("full", value), make)

        def expand() -> Tensor:
            return value.expand(shape).contiguous()

        if self.cache is None or not self.cache.holds(value, "log_n"):
            return expand()
        return self.cache.get("expanded log_n", expand, source=value)

    # ---- for backends ---------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def by_group(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b for a (B, H, …, …) and b (B, Hkv, …, …); ``group`` heads of a use one head of b."""
        if self.heads == self.kv_heads:
            return a @ b
        a = a.unflatten(1, (self.kv_heads, -1))  # [B, Hkv, G, …, …]
        return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4]).flatten(1, 2)

    def with_repeated_keys(self, *tensors: Tensor) -> tuple[Call, tuple[Tensor, ...]]:
        """The call with as many heads of keys as of queries, and tensors (B, Hkv, …) repeated."""
        if self.group == 1:
            return self, tensors
        repeated = tuple(x.repeat_interleave(self.group, dim=1) for x in tensors)
        return replace(self, kv_heads=self.heads), repeated

    def block(self, batches: slice, heads: slice, rows: slice) -> tuple[Call, slice]:
        """The `Call` of a block of queries and the keys they may see, and the slice of the keys."""
        values = self.relative_bias
        part = self.rows(
            batches,
            heads,
            rows,
            kv_heads=(heads.stop - heads.start) // self.group,
            relative_bias=None if values is None else cut(values, slice(None), heads),
        )
        return part, self.key_range(rows)
