"""Keys of a cache in which the sequences of `varlen_attention` do not lie one after the other."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

WRONG_PAGES = (-1, 2**31 - 1)  # in entries of a table that hold no keys


class Cache(NamedTuple):
    """Where the keys of all sequences, packed in their order, are in a cache.

    Attributes:
        indices: For each key its index in the leading axes of the cache.
        shape: The leading axes of the cache.
        arguments: cu_seq_k, seqused_k and block_table of `varlen_attention`.
    """

    indices: tuple[Tensor, ...]
    shape: tuple[int, ...]
    arguments: dict[str, Any]

    def put(self, x: Tensor) -> Tensor:
        """Packed tokens x (T, …) in the cache. All other entries are NaN."""
        entries = x.new_full((*self.shape, *x.shape[1:]), float("nan"))
        return entries.index_put(self.indices, x)


def cache_of(lengths: tuple[int, ...], page_size: int | None) -> Cache:
    """A cache of sequences with so many keys.

    Pages have a random order, with some that no sequence has. ``page_size`` None: the sequences lie
    one after the other, and have 1, 2, … further entries each.
    """
    used = torch.tensor(lengths, dtype=torch.int32)
    at = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0).long()
    row = torch.arange(len(lengths)).repeat_interleave(used)
    if page_size is None:
        ends = [0, *accumulate(n + i for i, n in enumerate(lengths, 1))]
        starts = torch.tensor(ends[:-1]).long()
        arguments = {"cu_seq_k": torch.tensor(ends), "seqused_k": used, "block_table": None}
        return Cache((starts[row] + at,), (ends[-1],), arguments)
    numbers = [-(-n // page_size) for n in lengths]
    pages = sum(numbers) + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))
    table = torch.tensor(WRONG_PAGES).repeat(len(lengths), max(numbers, default=0) // 2 + 1)
    for entries, number, first in zip(table, numbers, accumulate([0, *numbers])):
        entries[:number] = order[first : first + number]
    index = table[row, at // page_size], at % page_size
    arguments = {"cu_seq_k": None, "seqused_k": used, "block_table": table.int()}
    return Cache(index, (pages, page_size), arguments)
