"""Bytes that a rank sends in context parallelism: counted, and by formula."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import FromStatistics
from benchmarks.harness.cases import Case

CHUNKS = {"zigzag": 2, "contiguous": 1}  # per rank


class Traffic(NamedTuple):
    """The bytes that one rank sends in the forward and in the backward."""

    forward: int
    backward: int


class SentBytes(TorchDispatchMode):
    """Counts the bytes that a rank sends, from the operators of torch.distributed.

    A gather sends the shard to every other rank, a reduce-scatter a part to every other rank, an
    all-to-all the parts of others. Exchanges of fewer than ``least`` bytes per rank, such as
    checks, are counted in ``small``. ``messages`` counts the tensors sent from rank to rank.
    """

    def __init__(self, rank: int, ranks: int, least: int = 64) -> None:
        super().__init__()
        self.rank, self.ranks, self.least = rank, ranks, least
        self.bytes = self.small = self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("_c10d_functional::") and isinstance(args[0], Tensor):
            x, others = args[0], self.ranks - 1
            size = x.numel() * x.element_size()
            if "all_gather" in name:
                self._add(size * others)
            elif "reduce_scatter" in name:
                self._add(size * others // self.ranks)
            elif "all_to_all" in name:
                sent = args[2]
                self._add((sum(sent) - sent[self.rank]) * x.element_size())
            elif "all_reduce" in name:
                self.small += size
        elif name == "c10d::send":
            self.messages += len(args[0])
            self._add(sum(x.numel() * x.element_size() for x in args[0]))
        return func(*args, **(kwargs or {}))

    def _add(self, size: int) -> None:
        if size < self.least * self.ranks:
            self.small += size
        else:
            self.bytes += size


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call on one rank. ``tokens``: per rank. ``itemsize``: bytes per number."""

    ranks: int
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    key_dim: int
    value_dim: int
    itemsize: int
    layout: str = "zigzag"
    device: str = "cpu"

    def bytes_of(self, heads: int, dim: int, itemsize: int | None = None) -> int:
        return self.batch * heads * self.tokens * dim * (itemsize or self.itemsize)

    def sum_bytes(self, itemsize: int | None = None) -> int:
        """The bytes of the own keys and values, K + V."""
        return self.bytes_of(self.kv_heads, self.key_dim + self.value_dim, itemsize)


def formula(method: str, case: Case, sizes: Sizes, rank: int, solver_steps: int = 0) -> Traffic:
    """The bytes by the formulas of docs/distributed.md; ``solver_steps``: of a threshold."""
    others = sizes.ranks - 1
    if method == "all_gather":
        return Traffic(others * sizes.sum_bytes(), others * sizes.sum_bytes())
    if method == "ulysses":
        return _ulysses(sizes, rank)
    if case.linear is not None:
        features = case.linear.size(sizes.key_dim)
        heads = sizes.heads if case.linear.per_query_head else sizes.kv_heads
        # A CPU sums features that cancel in fp64.
        in_fp64 = sizes.itemsize == 8 or (case.linear.cancels and sizes.device == "cpu")
        width = 8 if in_fp64 else 4
        state = sizes.batch * heads * features * (sizes.value_dim + 1) * width
        sent = others * CHUNKS[sizes.layout] * state
        return Traffic(sent, sent)
    keys = sizes.bytes_of(sizes.kv_heads, sizes.key_dim)
    wide = max(4, sizes.itemsize)
    forward = others * sizes.sum_bytes()
    backward = others * sizes.sum_bytes() + sizes.ranks * sizes.sum_bytes(wide)
    gain = None if case.pairwise is None else case.pairwise.gain
    if isinstance(gain, FromStatistics):
        forward += others * keys
        if gain.differentiable:
            key_gradients = sizes.bytes_of(sizes.kv_heads, sizes.key_dim, wide)
            backward += others * keys + sizes.ranks * key_gradients
    if case.has_threshold:
        forward += others * keys * (1 + solver_steps)
    return Traffic(forward, backward)


def _ulysses(sizes: Sizes, rank: int) -> Traffic:
    """Queries and outputs of the heads of others, and each key/value head to who needs it."""
    group = sizes.heads // sizes.kv_heads
    base, more = divmod(sizes.heads, sizes.ranks)
    starts = [r * base + min(r, more) for r in range(sizes.ranks + 1)]
    counts = [b - a for a, b in pairwise(starts)]
    needed = [-(-b // group) - a // group for a, b in pairwise(starts)]
    dims = sizes.key_dim + sizes.value_dim
    # Queries go to the heads of others, outputs of the own heads to the tokens of others.
    queries = sizes.bytes_of(sizes.heads - counts[rank], sizes.key_dim)
    outputs = sizes.bytes_of(counts[rank] * (sizes.ranks - 1), sizes.value_dim)
    keys = sizes.bytes_of(sum(needed) - needed[rank], dims)
    # In the backward the same parts go back.
    queries_back = sizes.bytes_of(counts[rank] * (sizes.ranks - 1), sizes.key_dim)
    outputs_back = sizes.bytes_of(sizes.heads - counts[rank], sizes.value_dim)
    keys_back = sizes.bytes_of(needed[rank] * (sizes.ranks - 1), dims)
    return Traffic(queries + outputs + keys, queries_back + outputs_back + keys_back)
