"""Any variant, a block of query rows at a time: memory linear in N, on any device.

By form where there is one, with the one backward of all pairwise forms: weights φ(s − τ)/Z are
computed again from the saved rows τ and Z. By definition otherwise, its blocks checkpointed. It
refuses nothing.

The backward, with w = φ/Z, dP_ij = dO_i·v_j and r_i as below:
    dV = wᵀ dO,  dS = φ' (dP − dO·r)/Z,
    dO·r = 0 ("none") · dO·o ("sum", "select") · Σφ'dP/Σφ' ("threshold").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.activations import IDENTITY
from attnzoo.backends import eager
from attnzoo.backends.blocks import (
    Block,
    ScoreGradients,
    Scratch,
    block_scores,
    blocks,
    constant,
    flat_keys,
    hide,
    product,
    reduce_row,
    scaled_queries,
)
from attnzoo.backends.dropout import keep_mask, new_seed
from attnzoo.backends.statistics import with_rows
from attnzoo.backends.threshold import solve_threshold
from attnzoo.call import Call
from attnzoo.forms import Definition, Form, FromStatistics, Linear, Pairwise

NEG_INF = float("-inf")


def unsupported(form: Form, call: Call) -> str | None:
    return None


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    if isinstance(form, Definition):
        return _by_definition(q, k, v, call, form)
    if isinstance(form, Linear):
        # A linear form is a pairwise one on its features: φ is the identity.
        q = form.features(call.scale * q.to(call.dtype), call.query_positions)
        k = form.features(k.to(call.dtype), call.key_positions)
        call, form = replace(call, scale=1.0), Pairwise(IDENTITY, "sum")
    assert isinstance(form, Pairwise)
    form = with_rows(form, q, k, call)
    assert not isinstance(form.gain, FromStatistics)
    gain = None if not isinstance(form.gain, Tensor) and form.gain == 1.0 else call.row(form.gain)
    rows = [None if x is None else call.row(x) for x in (form.offset, form.shape, form.sink)]
    seed = new_seed(call) if call.dropout_p else None
    bare = replace(form, gain=1.0, offset=None, shape=None, sink=None)
    out, lse = _Pairwise.apply(
        bare, constant(call), q, k, v, call.mask, call.alibi, gain, *rows, seed
    )
    return out, lse if call.return_lse else None


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, call: Call, form: Definition
) -> tuple[Tensor, Tensor | None]:
    # Known before the blocks are cut: n_i is that of the whole row.
    call = replace(call, whole_counts=call.counts)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=call.dtype, device=q.device)
    lse = torch.full(q.shape[:3], NEG_INF, dtype=call.dtype, device=q.device)
    for block in blocks(call):
        heads = slice(block.heads.start // call.group, block.heads.stop // call.group)
        keys = (block.batches, heads, block.keys)
        part = (block.batches, block.heads, block.rows)
        params = {
            name: block.of(x) if isinstance(x, Tensor) else x for name, x in form.params.items()
        }

        def step(
            q: Tensor, k: Tensor, v: Tensor, block: Block = block, params: dict = params
        ) -> tuple[Tensor, Tensor | None]:
            return eager.run(q, k, v, block.call, replace(form, params=params))

        inputs = (q[part], k[keys], v[keys])
        if call.needs_grad:
            done, block_lse = checkpoint(step, *inputs, use_reentrant=False)
        else:
            done, block_lse = step(*inputs)
        out[part] = done
        if block_lse is not None:
            lse[part] = block_lse
    return out, lse if call.return_lse else None


def _kept(s: Tensor, top_k: int) -> Tensor:
    """The top_k largest of each row, ties to the lowest index."""
    top_k = min(top_k, s.shape[-1])
    kth = s.topk(top_k, dim=-1).values[..., -1:]
    above, tied = s > kth, s == kth
    room = top_k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _peak(s: Tensor) -> Tensor:
    """The row's maximum, 0 for a row without keys: τ of a threshold counts from here.

    Counted from 0, τ of large scores would be rounded more coarsely than its keys differ.
    """
    m = s.amax(-1, keepdim=True)
    return m.masked_fill_(m == NEG_INF, 0.0)


def _weigh(
    form: Pairwise, block: Block, s: Tensor, hidden: list, rows: list[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """φ(s − τ), the rows τ and Z from which a backward finds it again, and lse for φ = exp.

    Works in place on the scores s [b, h, rows, keys].
    """
    offset, shape, sink = (None if x is None else block.of(x) for x in rows)
    value = form.activation.value
    wide = None if shape is None else shape[..., None]
    one = torch.ones((), dtype=s.dtype, device=s.device)
    if form.normalize == "select":
        assert form.keep is not None
        s.masked_fill_(~_kept(s, form.keep), NEG_INF)
    if form.normalize == "none":
        assert offset is not None
        tau, z, lse = offset, one, None
        phi = value(s.sub_(tau[..., None]), wide)
        hide(phi, hidden, 0.0)
    elif form.normalize == "threshold":
        s.sub_(_peak(s))
        tau, z, lse = solve_threshold(s, shape, form.activation.name), one, None
        phi = value(s.sub_(tau[..., None]), wide)
    elif form.activation.name == "exp":
        m = _peak(s)[..., 0]
        m = m if sink is None else torch.maximum(m, sink)
        phi = value(s.sub_(m[..., None]), None)
        mass = phi.sum(-1)
        total = mass if sink is None else mass + (sink - m).exp()
        # Z is folded into τ for the backward; what is left of Z here is this block's own.
        tau, z, lse = m + total.log(), total, m + mass.log()
    else:
        phi = value(s, wide)
        hide(phi, hidden, 0.0)
        z = phi.sum(-1)
        if sink is not None:
            z = z + value(sink.clone(), shape)
        tau, lse = torch.zeros_like(one), None
    return phi, tau, z, lse


class _Pairwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: Pairwise,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        alibi: Tensor | None,
        gain: Tensor | None,
        offset: Tensor | None,
        shape: Tensor | None,
        sink: Tensor | None,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.form, ctx.call = form, call
        call = replace(call, mask=mask, alibi=alibi)
        keys, values, scratch = flat_keys(k, call), flat_keys(v, call), Scratch(call)
        full = (call.batch, call.heads, call.queries)
        out = torch.zeros(*full, v.shape[-1], dtype=call.dtype, device=q.device)
        tau, z = torch.zeros(2, *full, dtype=call.dtype, device=q.device)
        z += 1.0
        lse = torch.full_like(tau, NEG_INF)
        is_exp = form.activation.name == "exp"
        for block in blocks(call):
            scaled = scaled_queries(block, q, gain)
            s, hidden = block_scores(block, scaled, keys, scratch, form.activation.vanishes)
            phi, block_tau, total, block_lse = _weigh(
                form, block, s, hidden, [offset, shape, sink]
            )
            if seed is not None:
                phi.mul_(keep_mask(block, call, seed))
            o = torch.bmm(phi.view(scaled.shape[0], scaled.shape[1], -1), values[block.kv, block.keys])
            part = (block.batches, block.heads, block.rows)
            total = total.masked_fill(total == 0, 1.0)
            out[part] = o.view(*block.shape(), -1) / total[..., None]
            # A row without keys has τ = log 0: 0 instead, so that exp(−∞ − τ) is 0.
            tau[part] = block_tau.masked_fill(block_tau == NEG_INF, 0.0)
            if not is_exp:
                z[part] = total
            if block_lse is not None:
                lse[part] = block_lse
        ctx.save_for_backward(
            q, k, v, mask, alibi, gain, offset, shape, sink, seed, out, tau, z, lse
        )
        if not is_exp:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        form: Pairwise = ctx.form
        q, k, v, mask, alibi, gain, offset, shape, sink, seed, out, tau, z, lse = ctx.saved_tensors
        call = replace(ctx.call, mask=mask, alibi=alibi)
        grads = ScoreGradients(call, q, k, gain)
        values = flat_keys(v, call)
        dv = torch.zeros_like(values)
        rows = {"offset": offset, "shape": shape, "sink": sink}
        drow = {name: torch.zeros_like(tau) for name, row in rows.items() if row is not None}
        scratch, second = Scratch(call), Scratch(call)
        for block in blocks(call):
            scaled = scaled_queries(block, q, gain)
            s, hidden = block_scores(
                block, scaled, grads.keys, scratch, form.activation.vanishes
            )
            part = (block.batches, block.heads, block.rows)
            if form.normalize == "select":
                assert form.keep is not None
                s.masked_fill_(~_kept(s, form.keep), NEG_INF)
            wide = None if shape is None else block.of(shape)[..., None]
            if form.normalize == "threshold":
                s.sub_(_peak(s))
            x = s.sub_(block.of(tau)[..., None])
            phi = form.activation.value(x, wide)
            hide(phi, hidden, 0.0)
            slope = form.activation.slope(x, phi, wide)
            if slope is not phi:
                hide(slope, hidden, 0.0)
            # dO/Z in the place of dO puts the division into both products at once.
            do_z = do[part].to(call.dtype) / block.of(z)[..., None]  # [b, h, rows, Dv]
            flat_do = do_z.reshape(scaled.shape[0], scaled.shape[1], -1)
            dp = product(flat_do, values[block.kv, block.keys], second).view(s.shape)
            dropped = phi
            if seed is not None:
                kept = keep_mask(block, call, seed)
                dp.mul_(kept)
                dropped = phi * kept
            flat_phi = dropped.view(scaled.shape[0], scaled.shape[1], -1)
            dv[block.kv, block.keys].baddbmm_(flat_phi.transpose(1, 2), flat_do)
            if form.normalize == "none":
                r = torch.zeros_like(do_z[..., 0])
            elif form.normalize == "threshold":
                mass = slope.sum(-1)
                r = (slope * dp).sum(-1) / mass.masked_fill(mass == 0, 1.0)
            else:
                r = (do_z * out[part]).sum(-1)  # dO·o / Z
            if sink is not None:
                at = block.of(sink) - block.of(tau)
                edge = form.activation.value(at.clone(), None if wide is None else wide[..., 0])
                edge = form.activation.slope(at, edge, None if wide is None else wide[..., 0])
                drow["sink"][part] = -edge * r
            if form.activation.name == "exp" and call.return_lse:
                # lse is that without the sink: exp(s − lse) = φ · exp(τ − lse).
                own = block.of(lse)
                ratio = (block.of(tau) - own).masked_fill(own == NEG_INF, 0.0).exp()
                r = r - block.of(dlse) * ratio
            dp.sub_(r[..., None])
            if "shape" in drow:
                assert form.activation.shape_slope is not None
                turn = form.activation.shape_slope(x, phi, wide)
                hide(turn, hidden, 0.0)
                drow["shape"][part] = (turn * dp).sum(-1)
            ds = dp.mul_(slope)
            if "offset" in drow:
                drow["offset"][part] = -ds.sum(-1)
            grads.add(block, ds, scaled)
        dq, dk, dmask, dalibi, dgain = grads.tensors(k, mask, alibi)
        dv = dv.view(v.shape).to(v.dtype)
        others = [reduce_row(drow[n], row) if n in drow else None for n, row in rows.items()]
        return None, None, dq, dk, dv, dmask, dalibi, dgain, *others, None
