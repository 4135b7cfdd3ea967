"""Attention after gathering: all keys on every rank, or all tokens of some heads.

Bytes sent per rank in the forward, with Q, K, V, O the sizes of its shards; the backward sends
as many for the gradients:

    all_gather   (R − 1) · (K + V)
    ulysses      (R − 1)/R · (Q + O) + (K + V) · (ranks besides this one that need a head, per head)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.collectives import all_gather, all_to_all
from attnzoo.core.rank_agreement import agree
from attnzoo.core.registry import get_variant
from attnzoo.distributed.inputs import Inputs
from attnzoo.functional.prepare import choose_backend, prepare
from attnzoo.functional.run_on_backend import run_on_backend

Result = tuple[Tensor, Tensor | None]


def all_gather_attention(inputs: Inputs, full_inputs: Inputs, backend: str | None) -> Result:
    """Gather keys and values, and compute the rows of this rank.

    ``full_inputs``: the inputs with the masks and parameters of all keys.
    """
    shards, ranks = inputs.shards, inputs.ranks
    k, v = (shards.to_sequence(all_gather(x, 2, ranks), 2) for x in (inputs.k, inputs.v))
    readies, error = [], None
    for part, at in zip(shards.in_shard(), shards.in_sequence(ranks.rank), strict=True):
        # Later keys are left out, so that the last query stands at the last key, as most backends
        # require.
        keys = at.stop if inputs.is_causal else shards.total
        ready = full_inputs.of_chunk(part, at.start, keys, k[:, :, :keys], v[:, :, :keys])
        readies.append(ready)
        if backend is not None and error is None:  # it may support the chunks of some ranks only
            try:
                choose_backend(ready, backend)
            except ValueError as raised:
                error = raised
    if backend is not None:
        agree("context_parallel_attention", "", error, ranks)
    results = [run_on_backend(ready, backend) for ready in readies]
    out = torch.cat([out for out, _ in results], dim=2)
    lses = [lse for _, lse in results if lse is not None]
    return out, torch.cat(lses, dim=2) if lses else None


@dataclass(frozen=True)
class Heads:
    """Which query and key/value heads each rank computes.

    Rank r has the query heads ``queries[r]``, and all key/value heads that these need.
    """

    total: int
    group: int
    ranks: int

    def queries(self, rank: int) -> slice:
        """The heads are sharded as evenly as possible."""
        base, more = divmod(self.total, self.ranks)
        start = rank * base + min(rank, more)
        return slice(start, start + base + (rank < more))

    def keys(self, rank: int) -> slice:
        heads = self.queries(rank)
        return slice(heads.start // self.group, -(-heads.stop // self.group))

    def key_of_query(self, rank: int) -> list[int]:
        """For each query head of a rank, its key/value head among those of the rank."""
        heads, first = self.queries(rank), self.keys(rank).start
        return [head // self.group - first for head in range(heads.start, heads.stop)]


def ulysses_attention(inputs: Inputs, full_inputs: Inputs, backend: str | None) -> Result:
    """Exchange tokens for heads, compute all tokens of some heads, and exchange back."""
    ranks = inputs.ranks
    heads = Heads(inputs.q.shape[1], inputs.q.shape[1] // inputs.k.shape[1], ranks.count)
    if heads.total < ranks.count:
        raise ValueError(
            f"method 'ulysses' needs at least as many query heads as ranks, got {heads.total} "
            f"heads and {ranks.count} ranks; 'all_gather' and 'ring' do not"
        )
    q = _to_heads(inputs.q, [heads.queries(r) for r in range(ranks.count)], inputs)
    of_keys = [heads.keys(r) for r in range(ranks.count)]
    k, v = (_to_heads(x, of_keys, inputs) for x in (inputs.k, inputs.v))
    wanted = heads.key_of_query(ranks.rank)
    if wanted != [i // (len(wanted) // k.shape[1] or 1) for i in range(len(wanted))]:
        # The rank has only some query heads of a group.
        index = torch.tensor(wanted, device=k.device)
        k, v = (x.index_select(1, index) for x in (k, v))
    arguments, params = _of_heads(inputs, full_inputs, heads.queries(ranks.rank))
    ready = prepare(q, k, v, inputs.variant, arguments | params)
    out, lse = run_on_backend(ready, backend)
    out = _to_tokens(out, heads, inputs)
    if lse is not None:
        lse = _to_tokens(lse[..., None], heads, inputs)[..., 0]
    return out, lse


def _to_heads(x: Tensor, heads: list[slice], inputs: Inputs) -> Tensor:
    """From all heads of a shard to some heads of the sequence: (B, h, N, D)."""
    ranks, local_heads = inputs.ranks, heads[inputs.ranks.rank]
    shape = (x.shape[0], local_heads.stop - local_heads.start, *x.shape[2:])
    pieces = [x[:, at] for at in heads]
    received = all_to_all(pieces, [shape] * ranks.count, ranks)
    return inputs.shards.to_sequence(torch.cat(received, dim=2), 2)


def _to_tokens(x: Tensor, heads: Heads, inputs: Inputs) -> Tensor:
    """The inverse of `_to_heads` for the heads of queries."""
    ranks = inputs.ranks
    pieces = inputs.shards.to_ranks(x, 2).chunk(ranks.count, dim=2)
    counts = [heads.queries(r) for r in range(ranks.count)]
    shapes = [(x.shape[0], c.stop - c.start, inputs.q.shape[2], x.shape[3]) for c in counts]
    return torch.cat(all_to_all(pieces, shapes, ranks), dim=1)


def _of_heads(
    inputs: Inputs, full_inputs: Inputs, heads: slice
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The other arguments for all tokens of some heads."""
    ranks, shards = inputs.ranks, inputs.shards
    arguments, params = dict(full_inputs.arguments), dict(full_inputs.params)
    if (mask := arguments.get("attn_mask")) is not None:
        if mask.dim() > 1 and not inputs.has_key_mask() and mask.shape[-2] == inputs.q.shape[2]:
            mask = shards.to_sequence(all_gather(mask, -2, ranks), -2)
        if mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask[..., heads, :, :]
        arguments["attn_mask"] = mask
    if (segments := arguments.get("segment_ids")) is not None:
        queries = segments[1]
        if not isinstance(inputs.arguments["segment_ids"], Tensor):
            queries = shards.to_sequence(all_gather(segments[0].long(), -1, ranks), -1)
        arguments["segment_ids"] = (queries, segments[1])
    for name in ("alibi", "relative_bias"):
        if (values := arguments.get(name)) is not None:
            arguments[name] = values[heads]
    for param in get_variant(inputs.variant).params:
        value = params.get(param.name)
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if value.dim() == 3 and param.kind != "tensor":
            if not param.per_key:
                value = shards.to_sequence(all_gather(value, -1, ranks), -1)
            params[param.name] = value[:, heads]
        else:
            params[param.name] = value[heads]
    return arguments, params
