"""Scores of a block with all their terms, and the gradients of those terms, for `tiled`.

z̃ = scale · q·k,  z = softcap · tanh(z̃ / softcap)
s = gain · a(t) · z + bias + m(t) + (key_bias − offset)

Without softcap and a(t), the gain is multiplied into q before the product, which is cheaper.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Terms
from attnzoo.backends.tiled.blocks import (
    Block,
    Hidden,
    Scratch,
    flat_keys,
    product,
    reduce_vector,
)
from attnzoo.core.call import Call
from attnzoo.core.distance import Distance
from attnzoo.core.relative_bias import add_gradient
from attnzoo.core.visibility import cut


class Scored(NamedTuple):
    """The scores of a block, [b, h, rows, keys], and what their gradients need."""

    s: Tensor
    hidden: Hidden  # the hidden keys whose scores are not −∞
    z: Tensor | None = None  # None if the queries contain the gain
    away: Tensor | None = None  # t, [rows, keys], if there is a distance function


class Scores:
    """Computes the scores of a call, block by block.

    ``gain`` and ``offset`` are per-query vectors. With ``vanishes`` (φ(−∞) = 0) the scores of
    hidden keys are −∞. Otherwise the caller must mask φ.
    """

    def __init__(
        self,
        call: Call,
        k: Tensor,
        *,
        gain: Tensor | None = None,
        offset: Tensor | None = None,
        terms: Terms | None = None,
        distance: Distance | None = None,
        vanishes: bool = True,
    ) -> None:
        self.call, self.gain, self.offset, self.distance = call, gain, offset, distance
        self.terms, self.vanishes = terms or Terms(), vanishes
        self.folded = call.softcap is None and (distance is None or distance.gain is None)
        # −offset is appended to each query and 1 to each key, so that q·k subtracts the offset.
        # A key bias must meet the offset first.
        self.appended = offset is not None and self.terms.key_bias is None and self.folded
        self.keys = flat_keys(k, call)
        self.wide = torch.nn.functional.pad(self.keys, (0, 1), value=1.0) if self.appended else None
        self.scratch = Scratch(call)

    def queries(self, block: Block, q: Tensor) -> Tensor:
        """scale · q of the block, times the gain if it is `folded`: [kv, G·rows, D]."""
        part, scale = q[block.part].to(self.call.dtype), self.call.scale
        gain = self.gain if self.folded else None
        factor = scale if gain is None else (block.of(gain) * scale)[..., None]
        return block.flat(part * factor)

    def of(self, block: Block, queries: Tensor) -> Scored:
        """The scores of a block for the result of `queries`."""
        keys = self.keys
        if self.appended:
            assert self.offset is not None
            assert self.wide is not None
            column = block.of(self.offset).expand(block.shape)[..., None]
            queries, keys = torch.cat([queries, -block.flat(column)], dim=-1), self.wide
        flat = product(queries, keys[block.kv, block.keys], self.scratch)
        s = flat.view(*block.shape, flat.shape[-1])
        away = None
        if self.distance is not None:
            away = block.call.distance.abs().to(s.dtype)
        z = None
        if not self.folded:
            z = s
            if self.call.softcap is not None:
                z.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
            s = self._with_gains(block, z, away)
        self._add_terms(block, s, away)
        hidden = block.edges
        if hidden is None or self.call.has_bias:
            part = block.call
            hidden = part.hidden() if hidden is None else hidden
            if isinstance(bias := part.bias, Tensor):
                s.add_(bias)
        if not self.vanishes:
            return Scored(s, hidden, z, away)
        hide(s, hidden, float("-inf"))
        return Scored(s, [], z, away)

    def _with_gains(self, block: Block, z: Tensor, away: Tensor | None) -> Tensor:
        """gain · a(t) · z in a new tensor, because the gradients need z."""
        factor = self.distance_gain(block, away)
        if self.gain is not None:
            gain = block.of(self.gain)[..., None]
            factor = gain if factor is None else factor * gain
        return z.clone() if factor is None else z * factor

    def distance_gain(self, block: Block, away: Tensor | None) -> Tensor | None:
        """a(t), which broadcasts to [b, h, rows, keys]; None if a = 1."""
        if away is None or self.distance is None or self.distance.gain is None:
            return None
        return self.distance.gain(away, self.decay(block))

    def decay(self, block: Block) -> Tensor:
        """The decay of the block's heads, [b|1, h|1, 1, 1]."""
        assert self.terms.decay is not None
        return cut(self.terms.decay, block.batches, block.heads)[..., None]

    def _add_terms(self, block: Block, s: Tensor, away: Tensor | None) -> None:
        if away is not None and self.distance is not None and self.distance.bias is not None:
            s.add_(self.distance.bias(away, self.decay(block)))
        offset = None
        if self.offset is not None and not self.appended:
            offset = block.of(self.offset)[..., None]
        if self.terms.key_bias is not None:
            bias = cut(self.terms.key_bias, block.batches, block.heads, block.keys)[..., None, :]
            s.add_(bias if offset is None else bias - offset)
        elif offset is not None:
            s.sub_(offset)


def hide(s: Tensor, hidden: Hidden, value: float) -> None:
    for columns, where in hidden:
        s[..., columns].masked_fill_(where, value)


class ScoreGradients:
    """Accumulates the gradients of all terms of the scores from dS, block by block."""

    def __init__(self, scores: Scores, q: Tensor, wanted: Collection[str]) -> None:
        self.scores, self.q, self.call = scores, q, scores.call
        call, terms = scores.call, scores.terms
        self.dq = torch.zeros(q.shape, dtype=call.dtype, device=call.device)
        self.dk = torch.zeros_like(scores.keys)
        rows = (call.batch, call.heads, call.queries)
        self.dgain = None if scores.gain is None else self.dq.new_zeros(rows)
        self.inputs = {
            "mask": call.mask, "relative_bias": call.relative_bias,
            "key_bias": terms.key_bias, "decay": terms.decay,
        }  # fmt: skip
        self.made = {
            name: self.dq.new_zeros(x.shape)
            for name, x in self.inputs.items()
            if name in wanted and x is not None
        }

    def add(self, block: Block, ds: Tensor, queries: Tensor, scored: Scored) -> None:
        """Add a block. ``ds``: [b, h, rows, keys]. ``queries``: the result of `Scores.queries`."""
        if self.made:
            self._add_terms(block, ds, scored)
        scores, scale = self.scores, self.call.scale
        if scored.z is not None:
            ds = self._of_logits(block, ds, scored, scored.z)
        flat = block.flat(ds)
        self.dk[block.kv, block.keys].baddbmm_(flat.transpose(1, 2), queries)
        dq = torch.bmm(flat, scores.keys[block.kv, block.keys]).view(
            *block.shape, queries.shape[-1]
        )
        dq *= scale
        if self.dgain is None or scores.gain is None or not scores.folded:
            self.dq[block.part] = dq
        else:
            # dgain is computed before dq is multiplied by the gain: dividing later would fail
            # where the gain is 0, for example log 1.
            self.dgain[block.part] = (dq * self.q[block.part].to(dq.dtype)).sum(-1)
            self.dq[block.part] = dq * block.of(scores.gain)[..., None]

    def _of_logits(self, block: Block, ds: Tensor, scored: Scored, z: Tensor) -> Tensor:
        """The gradient of z̃ from that of s. Adds the gradient of the gain."""
        factor = self.scores.distance_gain(block, scored.away)
        ds = ds if factor is None else ds * factor
        if self.dgain is not None and self.scores.gain is not None:
            self.dgain[block.part] = torch.linalg.vecdot(ds, z)
            ds = ds * block.of(self.scores.gain)[..., None]
        if self.call.softcap is None:
            return ds
        # 1 − (z/c)², as (1 − z/c)(1 + z/c), which is exact near |z| = c.
        tanh = z / self.call.softcap
        return ds * (1 - tanh) * (1 + tanh)

    def _add_terms(self, block: Block, ds: Tensor, scored: Scored) -> None:
        made = self.made
        if "mask" in made:
            target = cut(made["mask"], *block.part, block.keys)
            target += ds.sum_to_size(target.shape)
        if "relative_bias" in made:
            target = cut(made["relative_bias"], slice(None), block.heads)
            add_gradient(target, ds, block.call.key_origin - block.call.query_origin)
        if "key_bias" in made:
            target = cut(made["key_bias"], block.batches, block.heads, block.keys)
            target += ds.sum(-2).sum_to_size(target.shape)
        if "decay" in made:
            target = cut(made["decay"], block.batches, block.heads)
            target += self._decay_slope(block, ds, scored).sum_to_size(*target.shape, 1)[..., 0]

    def _decay_slope(self, block: Block, ds: Tensor, scored: Scored) -> Tensor:
        """∂s/∂decay times ds, [b, h, rows, keys]."""
        distance, away, decay = self.scores.distance, scored.away, self.scores.decay(block)
        assert distance is not None
        assert away is not None
        total = torch.zeros_like(ds)
        if distance.gain_slope is not None:
            assert scored.z is not None
            slope = distance.gain_slope(away, decay) * scored.z
            if self.scores.gain is not None:
                slope = slope * block.of(self.scores.gain)[..., None]
            total += slope * ds
        if distance.bias_slope is not None:
            total += distance.bias_slope(away, decay) * ds
        return total

    def named(self, k: Tensor) -> dict[str, Tensor]:
        """The gradients by name, in the dtypes and shapes of their inputs."""
        by_name = {"q": self.dq.to(self.q.dtype), "k": self.dk.view(k.shape).to(k.dtype)}
        for name, gradient in self.made.items():
            like = self.inputs[name]
            assert like is not None
            by_name[name] = gradient.to(like.dtype)
        if self.dgain is not None and self.scores.gain is not None:
            by_name["gain"] = reduce_vector(self.dgain, self.scores.gain)
        return by_name
