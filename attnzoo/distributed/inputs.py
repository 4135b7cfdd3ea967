"""The arguments of a call whose tokens are sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends import linear
from attnzoo.core.call import Call
from attnzoo.core.collectives import Ranks, all_gather
from attnzoo.core.forms import Form
from attnzoo.core.registry import get_variant
from attnzoo.distributed.layout import Shards
from attnzoo.functional.prepare import ValidatedCall, prepare


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments on one rank.

    Attributes:
        q, k, v: the rank's shards.
        arguments: the other arguments of `attention`, except ``backend``.
        params: the parameters of the variant.
        shards: which tokens each rank has.
        ranks: the ranks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    variant: str
    arguments: dict[str, Any]
    params: dict[str, Any]
    shards: Shards
    ranks: Ranks

    @property
    def is_causal(self) -> bool:
        return bool(self.arguments.get("is_causal"))

    def has_key_mask(self) -> bool:
        """Whether the mask is one of keys, whose last dimension is that of the shard."""
        mask = self.arguments.get("attn_mask")
        if not isinstance(mask, Tensor) or mask.dim() == 0:
            return False
        return (mask.dim() < 2 or mask.shape[-2] == 1) and mask.shape[-1] in (1, self.k.shape[2])

    def sums_states(self, form: Form, call: Call) -> bool:
        """Whether the form can run from states. A state serves all queries, so a dense mask cannot,
        and segments cannot either.

        With one query per chunk, a dense mask has the shape of a key mask, so the mask of the whole
        call decides.
        """
        dense = self.arguments.get("attn_mask") is not None and not self.has_key_mask()
        return not dense and call.segments is None and linear.unsupported(form, call) is None

    def with_all_key_data(self) -> Inputs:
        """The key mask, the key segments and the parameters per key of the whole sequence.

        They are small next to keys and values: one number per key and head, or per key.
        """
        arguments, params = dict(self.arguments), dict(self.params)
        mask, segments = arguments.get("attn_mask"), arguments.get("segment_ids")
        if self.has_key_mask():
            assert mask is not None
            wide = mask.expand(*mask.shape[:-1], self.k.shape[2])
            arguments["attn_mask"] = self._of_all_ranks(wide[(None,) * (2 - mask.dim())], -1)
        if segments is not None:
            pair = (segments, segments) if isinstance(segments, Tensor) else segments
            arguments["segment_ids"] = (pair[0], self._of_all_ranks(pair[1].long(), -1))
        for param in get_variant(self.variant).params:
            value = params.get(param.name)
            if param.per_key and isinstance(value, Tensor) and value.dim() == 3:
                params[param.name] = self._of_all_ranks(value, -1)
        return replace(self, arguments=arguments, params=params)

    def _of_all_ranks(self, x: Tensor, dim: int) -> Tensor:
        return self.shards.to_sequence(all_gather(x, dim, self.ranks), dim)

    def of_chunk(self, part: slice, start: int, keys: int, k: Tensor, v: Tensor) -> ValidatedCall:
        """The call of one chunk of queries and the first ``keys`` keys of the sequence.

        Args:
            part: the positions of the queries in the shard.
            start: the position of the first query in the sequence.
            k, v: the keys and values.
        """
        arguments = dict(self.arguments)
        if (mask := arguments.get("attn_mask")) is not None:
            if mask.dim() > 1 and mask.shape[-2] > 1:
                mask = mask[..., part, :]
            arguments["attn_mask"] = mask[..., :keys] if mask.shape[-1] > 1 else mask
        if (segments := arguments.get("segment_ids")) is not None:
            arguments["segment_ids"] = (segments[0][:, part], segments[1][:, :keys])
        params = dict(self.params)
        for param in get_variant(self.variant).params:
            value = params.get(param.name)
            if isinstance(value, Tensor) and value.dim() == 3 and param.kind != "tensor":
                params[param.name] = value[..., :keys] if param.per_key else value[..., part]
        q = self.q[:, :, part]
        return prepare(q, k, v, self.variant, arguments | params, positions=(start, 0))


def placeholder(x: Tensor, length: int) -> Tensor:
    """A tensor in the shape of x with another length. It has one number of memory."""
    shape = (*x.shape[:2], length, x.shape[3])
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(shape)
