"""The queries of a rank, which meet the keys of all ranks one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Terms, Vectors
from attnzoo.backends.tiled import partials
from attnzoo.backends.tiled.walk import PairwiseCall
from attnzoo.core.collectives import Exchange, Ranks, circulate
from attnzoo.core.visibility import cut
from attnzoo.distributed.layout import Shards

# The tensors of one chunk, besides q
NAMES = ("mask", "relative_bias", *Vectors._fields, *Terms._fields)
_PER_KEY = ("mask", "key_bias")


class Ring(NamedTuple):
    """The shards of a sequence and the ranks that hold them."""

    shards: Shards
    ranks: Ranks


class QueryChunk(NamedTuple):
    """The queries of one chunk of this rank.

    Attributes:
        part: their positions in the shard.
        formed: the call of these queries and all keys of the sequence, and its form. Vectors per
            key are of all keys.
    """

    part: slice
    formed: PairwiseCall

    def tensors(self) -> list[Tensor | None]:
        """The tensors in the order of `NAMES`."""
        call, _, vectors, terms, _ = self.formed
        return [call.mask, call.relative_bias, *vectors, *terms]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> QueryChunk:
        call, size = self.formed.call, 2 + len(Vectors._fields)
        mask, relative_bias = tensors[:2]
        if mask is not None and mask.is_floating_point():
            mask = mask.to(call.dtype)  # its gradient is summed in this dtype
        formed = self.formed._replace(
            call=replace(call, mask=mask, relative_bias=relative_bias),
            vectors=Vectors(*tensors[2:size]),
            terms=Terms(*tensors[size:]),
        )
        return self._replace(formed=formed)

    def among(self, keys: slice, index: int) -> QueryChunk:
        """The same queries with some of the keys, those of chunk ``index`` of the sequence.

        The sink is left out: it joins when all keys have been seen.
        """
        formed = partials.among(self.formed, keys)
        seed = formed.seed
        if seed is not None:  # other random numbers for each chunk of keys
            seed = (seed + 0x9E3779B1 * index) & 0xFFFFFFFF
        vectors = formed.vectors._replace(sink=None)
        return self._replace(formed=formed._replace(vectors=vectors, seed=seed))

    @property
    def sees_keys(self) -> bool:
        """Whether causality and window allow a key."""
        call = self.formed.call
        keys = call.key_range(slice(0, call.queries))
        return keys.stop > keys.start


class Meeting(NamedTuple):
    """The queries of a chunk and the keys of another one."""

    number: int  # of the queries' chunk in the shard
    chunk: QueryChunk
    keys: slice  # positions in the shard that is visiting
    at: slice  # positions in the sequence


def meetings(ring: Ring, chunks: Sequence[QueryChunk], source: int) -> Iterator[Meeting]:
    """The chunks of queries that see keys of a rank, and these keys."""
    shards = ring.shards
    for keys, at, index in zip(shards.in_shard(), shards.in_sequence(source), shards.owned(source)):
        for number, chunk in enumerate(chunks):
            met = chunk.among(at, index)
            if met.sees_keys:
                yield Meeting(number, met, keys, at)


def with_tensors(chunks: Sequence[QueryChunk], flat: Sequence[Tensor | None]) -> list[QueryChunk]:
    size = len(NAMES)
    return [chunk.with_tensors(flat[i * size : (i + 1) * size]) for i, chunk in enumerate(chunks)]


def wanted_names(needs: Sequence[bool], count: int) -> list[list[str]]:
    """For each chunk, the names of the tensors that need a gradient."""
    size = len(NAMES)
    return [
        [name for name, need in zip(NAMES, needs[i * size : (i + 1) * size], strict=True) if need]
        for i in range(count)
    ]


def flat_gradients(
    others: Sequence[dict[str, Tensor]], flat: Sequence[Tensor | None]
) -> list[Tensor | None]:
    gradients = [made.get(name) for made in others for name in NAMES]
    return [
        None if x is None or like is None else x.to(like.dtype)
        for x, like in zip(gradients, flat, strict=True)
    ]


Gradients = Callable[[Meeting, Sequence[Tensor]], dict[str, Tensor]]


def go_round_back(
    ring: Ring, chunks: Sequence[QueryChunk], q: Tensor, tensors: Sequence[Tensor], names: str,
    wanted: Sequence[Sequence[str]], gradients: Gradients,
) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:  # fmt: skip
    """The gradients of q, of the tensors that go round, and of the other tensors of each chunk.

    ``names`` are those of the tensors that go round, such as "kv".
    """
    dtype = chunks[0].formed.call.dtype
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    travelling = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in tensors]
    others = [
        {
            name: torch.zeros_like(x, dtype=dtype)
            for name, x in zip(NAMES, chunk.tensors(), strict=True)
            if x is not None and name in names_of and name != "sink"
        }
        for chunk, names_of in zip(chunks, wanted, strict=True)
    ]
    coming = None
    for source, held in circulate(tensors, ring.ranks):
        local = [torch.zeros_like(x) for x in travelling]
        for meeting in meetings(ring, chunks, source):
            made = gradients(meeting, [x[:, :, meeting.keys] for x in held])
            dq[:, :, meeting.chunk.part] += made.pop("q")
            for total, name in zip(local, names, strict=True):
                total[:, :, meeting.keys] += made.pop(name)
            for name, into in others[meeting.number].items():
                _part(into, name, meeting.at).add_(made[name])
        if coming is not None:
            travelling = coming.wait()
        travelling = [x + new for x, new in zip(travelling, local, strict=True)]
        coming = Exchange(travelling, ring.ranks) if ring.ranks.count > 1 else None
    home = travelling if coming is None else coming.wait()
    results = [x.to(like.dtype) for x, like in zip(home, tensors, strict=True)]
    return dq.to(q.dtype), results, others


def _part(x: Tensor, name: str, keys: slice) -> Tensor:
    """The part of a gradient that belongs to some keys."""
    if name not in _PER_KEY:
        return x
    if name == "mask":
        return x[..., keys]
    return cut(x, slice(None), slice(None), keys)
