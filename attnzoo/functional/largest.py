"""The k largest entries of each row, without sorting the row.

A row is split into blocks of 64 entries. Its k largest entries lie in the k blocks with the largest
maxima, because each of these blocks has an entry at least as large as any entry of another block.
Only the entries of these blocks are compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.core.checks import is_readable

BLOCK = 64
# Blocks are used if at most this share of them is needed. Otherwise rows are compared whole.
SHARE = 0.25
TIED = 2**20  # largest number of entries per search for entries equal to the k-th largest


class Blocks:
    """Rows (R, n) with the maximum of each block.

    The last n mod 64 entries belong to no block and are always candidates.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.count = x.shape[-1] // BLOCK
        self.size = self.count * BLOCK
        self.blocks = x[:, : self.size].unflatten(-1, (self.count, BLOCK))
        self._maxima: Tensor | None = None
        self._last: tuple[int, Candidates] | None = None

    @property
    def maxima(self) -> Tensor:
        if self._maxima is None:
            self._maxima = self.blocks.amax(-1)
        return self._maxima

    def peaks(self, part: slice) -> Tensor:
        """The maximum of each row of ``part``, (rows of ``part``, 1).

        The method also stores the block maxima of these rows. Once it is called, its calls must
        cover all rows before `maxima` or `candidates` is used. If ``part`` is small, the caller can
        read its scores again while they are in the processor's cache.
        """
        if not self.count:
            return self.x[part].amax(-1, keepdim=True)
        if self._maxima is None:
            self._maxima = self.x.new_empty(len(self.x), self.count)
        maxima = torch.amax(self.blocks[part], dim=-1, out=self._maxima[part])
        peak = maxima.amax(-1, keepdim=True)
        if self.size == self.x.shape[-1]:
            return peak
        return torch.maximum(peak, self.x[part, self.size :].amax(-1, keepdim=True))

    def candidates(self, blocks: int) -> Candidates:
        """The entries of the blocks with the largest maxima.

        Args:
            blocks: The number of blocks. If it is more than `SHARE` of all blocks, all entries are
                candidates.
        """
        if self._last is None or self._last[0] != blocks:
            self._last = blocks, self._candidates(blocks)
        return self._last[1]

    def _candidates(self, blocks: int) -> Candidates:
        if blocks > SHARE * self.count:
            return Candidates(self.x, None, self.size, None)
        top, indices = _top(self.maxima, blocks + 1)
        # In ascending order, so that candidates keep the order of the row.
        chosen = indices[:, :blocks].sort(dim=-1).values
        row = torch.arange(len(self.x), device=self.x.device)[:, None]
        values = self.blocks[row, chosen].flatten(1)
        if self.size < self.x.shape[-1]:
            values = torch.cat([values, self.x[:, self.size :]], dim=-1)
        return Candidates(values, chosen, self.size, top[:, blocks:])


class Candidates:
    """Some entries of each row, in the order of the row.

    Attributes:
        values: (R, c).
        excluded: The largest entry that is not a candidate, (R, 1); None if all entries are.
    """

    def __init__(self, values: Tensor, chosen: Tensor | None, size: int, excluded: Tensor | None):
        self.values, self.excluded = values, excluded
        self._chosen, self._size = chosen, size

    def index(self, place: Tensor) -> Tensor:
        """Convert ``place`` (R, m), indices into `values`, to indices into the row, (R, m)."""
        if self._chosen is None:
            return place
        inside = self._chosen.shape[-1] * BLOCK
        block = self._chosen.gather(-1, (place // BLOCK).clamp(max=self._chosen.shape[-1] - 1))
        return torch.where(
            place < inside, block * BLOCK + place % BLOCK, place - inside + self._size
        )


def largest(rows: Blocks, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the k largest entries, by (value descending, index ascending).

    NaN counts as the largest value, as in `torch.topk`; the order among NaN is not defined.
    """
    x = rows.x
    # Entry k + 1 shows whether entries that are left out are equal to entry k.
    wanted = min(k + 1, x.shape[-1])
    entries = rows.candidates(wanted)
    top, order = _top(entries.values, wanted)
    values, indices = top[:, :k], entries.index(order[:, :k])
    if not is_readable(x):
        return values, indices
    # `torch.topk` does not specify which of equal entries it takes, nor in which order.
    if wanted > k and bool((tied := top[:, k] == values[:, k - 1]).any()):
        for chosen in tied.nonzero()[:, 0].split(max(1, TIED // x.shape[-1])):
            indices[chosen] = _first_of_equals(x[chosen], values[chosen], indices[chosen])
    if bool((values[:, 1:] == values[:, :-1]).any()):
        indices = indices.sort(dim=-1).values
        values, order = torch.sort(x.gather(-1, indices), dim=-1, descending=True, stable=True)
        indices = indices.gather(-1, order)
    return values, indices


def _top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the k largest entries, in the order of `largest` if x is not readable.

    If the blocks are in this order, the first k contain the k largest entries of the row in this
    order. So the host need not know whether entries are equal.
    """
    if is_readable(x):
        return x.topk(k, dim=-1)
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def _first_of_equals(x: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Indices of the k largest entries. Ties with the k-th largest are resolved by lowest index."""
    last = values[:, -1:]
    others = (values != last).sum(-1)  # larger than the k-th; values are sorted
    row, column = (x == last).nonzero().unbind(-1)  # by row, then by column
    counts = torch.bincount(row, minlength=len(x))
    first = counts.cumsum(0) - counts
    place = others[row] + torch.arange(len(row), device=x.device) - first[row]
    fits = place < values.shape[-1]
    indices = indices.clone()
    indices[row[fits], place[fits]] = column[fits]
    return indices
