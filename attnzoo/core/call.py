"""One call's checked facts: shapes, mask, positions, scale and the visible-key counts n_i.

Everything that a variant or a backend needs to know about a call stands here once. A block of rows
of a call is again a `Call`, with explicit origins and the counts of the whole row, so a definition
cannot tell a block from a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.core.counts import count_visible, visible_entries


def cut(tensor: Tensor, *slices: slice) -> Tensor:
    """Slice the leading dimensions; a dimension of size 1 broadcasts and is left alone."""
    return tensor[tuple(s if n > 1 else slice(None) for s, n in zip(slices, tensor.shape))]


def score_dtype(q: Tensor) -> torch.dtype:
    """Of scores, statistics and sums: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@contextmanager
def in_full_precision(device: torch.device) -> Iterator[None]:
    """Without autocast, which would take the fp32 scores down to 16 bits."""
    if torch.amp.is_autocast_available(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


@dataclass(frozen=True, eq=False)
class Call:
    """The facts of one call, after every check has passed.

    Query i stands at position ``query_origin + i`` and key j at ``key_origin + j``. As far as
    positions go, a query at p sees the keys p − left … p + right (None: no bound).
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    scale: float
    dtype: torch.dtype  # of scores, rows and sums: fp32, or fp64 for fp64 inputs
    input_dtype: torch.dtype
    device: torch.device
    query_origin: int
    key_origin: int = 0
    left: int | None = None
    right: int | None = None
    mask: Tensor | None = None  # [B|1, H|1, Nq|1, Nk], bool or float
    alibi: Tensor | None = None  # [1, H, 1]
    segments: tuple[Tensor, Tensor] | None = None  # int64 [B, Nq], [B, Nk]
    dropout_p: float = 0.0
    return_lse: bool = False
    needs_grad: bool = False
    whole_counts: Tensor | None = None  # given to blocks: the counts of the whole row

    # ---- what a variant reads -------------------------------------------------------------

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """scale · q_i·k_j in fp32, heads of k shared by groups of q: (B, H, Nq, Nk)."""
        q = q.to(self.dtype).unflatten(1, (self.kv_heads, -1))
        s = torch.einsum("bhgid,bhjd->bhgij", q, k.to(self.dtype))
        return self.scale * s.flatten(1, 2)

    @property
    def counts(self) -> Tensor:
        """n_i, the number of keys that row i may see, broadcastable to (B, H, Nq).

        Against scores (B, H, Nq, Nk) write ``call.counts[..., None]``.
        """
        return count_visible(self) if self.whole_counts is None else self.whole_counts

    @property
    def log_n(self) -> Tensor:
        """log max(n_i, 1), in the shape of ``counts``."""
        return self.counts.clamp(min=1).log()

    @property
    def visible(self) -> Tensor:
        """The keys each row may see: bool, broadcastable to (B, H, Nq, Nk)."""
        distance = self.distance
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (distance <= self.left)
        if self.right is not None:
            seen = seen & (distance >= -self.right)
        seen = seen[None, None]
        if self.mask is not None:
            seen = seen & visible_entries(self.mask)
        if self.segments is not None:
            queries, keys = self.segments
            seen = seen & (queries[:, None, :, None] == keys[:, None, None, :])
        return seen

    @property
    def bias(self) -> Tensor | float:
        """What is added to the scores after the gain: float mask (−∞ as 0) and ALiBi, or 0.0."""
        bias: Tensor | float = 0.0
        if self.mask is not None and self.mask.dtype != torch.bool:
            bias = self.mask.masked_fill(~visible_entries(self.mask), 0.0).to(self.dtype)
        if self.alibi is not None:
            bias = bias - self.alibi[..., None].to(self.dtype) * self.distance.abs()
        return bias

    @property
    def has_bias(self) -> bool:
        return self.alibi is not None or (self.mask is not None and self.mask.dtype != torch.bool)

    @property
    def query_positions(self) -> Tensor:
        return torch.arange(self.queries, device=self.device) + self.query_origin

    @property
    def key_positions(self) -> Tensor:
        return torch.arange(self.keys, device=self.device) + self.key_origin

    @property
    def distance(self) -> Tensor:
        """i − j in positions: how far back the key stands, (Nq, Nk)."""
        return self.query_positions[:, None] - self.key_positions

    def hide(self, scores: Tensor, fill: float = float("-inf")) -> Tensor:
        """Scores with ``fill`` at invisible keys; a row without visible keys is left as it is.

        Left, so that neither such a row nor its gradient meets inf − inf: zero its weights after.
        """
        visible = self.visible
        return scores.masked_fill(~visible & visible.any(-1, keepdim=True), fill)

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the visible keys; a row without any is 0, with gradient 0."""
        return self.hide(scores).softmax(-1).masked_fill(~self.visible, 0.0)

    def logsumexp(self, scores: Tensor) -> Tensor:
        """log Σ exp over the visible keys, −inf (with gradient 0) for a row without any."""
        if self.keys == 0:
            return scores.new_full(scores.shape[:-1], float("-inf"))
        lse = self.hide(scores).logsumexp(-1)
        return lse.masked_fill(~self.visible.any(-1), float("-inf"))

    def row(self, value: Tensor | float) -> Tensor:
        """A row as a tensor that broadcasts to (B, H, Nq)."""
        if isinstance(value, Tensor):
            return value
        return torch.full((1, 1, 1), value, dtype=self.dtype, device=self.device)

    # ---- what a backend reads -------------------------------------------------------------

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def key_mask(self) -> bool:
        """The mask is one of keys: recognized by its shape, never by its values."""
        return self.mask is not None and self.mask.shape[2] == 1

    def key_range(self, rows: slice) -> slice:
        """The keys that the rows can see, as far as causality and window go."""
        first = self.query_origin - self.key_origin + rows.start
        last = first + rows.stop - rows.start - 1
        start = 0 if self.left is None else max(0, min(self.keys, first - self.left))
        stop = self.keys if self.right is None else max(0, min(self.keys, last + self.right + 1))
        return slice(start, max(start, stop))

    def block(self, batches: slice, heads: slice, rows: slice) -> tuple[Call, slice]:
        """The call that these rows make, over the keys they can see; and that range of keys."""
        keys = self.key_range(rows)
        mask, segments = self.mask, self.segments
        if mask is not None:
            mask = cut(mask, batches, heads, rows, keys)
        if segments is not None:
            segments = segments[0][batches, rows], segments[1][batches, keys]
        counts = self.whole_counts
        part = replace(
            self,
            batch=batches.stop - batches.start,
            heads=heads.stop - heads.start,
            kv_heads=(heads.stop - heads.start) // self.group,
            queries=rows.stop - rows.start,
            keys=keys.stop - keys.start,
            query_origin=self.query_origin + rows.start,
            key_origin=self.key_origin + keys.start,
            mask=mask,
            alibi=None if self.alibi is None else cut(self.alibi, slice(None), heads),
            segments=segments,
            whole_counts=None if counts is None else cut(counts, batches, heads, rows),
        )
        return part, keys

    def hidden(self) -> list[tuple[slice, Tensor]]:
        """Where keys are invisible: (columns, bool (.., Nq, columns)) pairs that cover it all.

        Without masks and segments only the diagonal and the far edge of a window are listed.
        """
        if self.mask is not None or self.segments is not None:
            return [(slice(0, self.keys), ~self.visible)]
        offset = self.query_origin - self.key_origin
        found = []
        if self.right is not None and (start := max(0, offset + self.right + 1)) < self.keys:
            columns = slice(start, self.keys)
            found.append((columns, self.distance[:, columns] < -self.right))
        if self.left is not None:
            stop = min(self.keys, offset + self.queries - 1 - self.left)
            if stop > 0:
                columns = slice(0, stop)
                found.append((columns, self.distance[:, columns] > self.left))
        return found
