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

from attnzoo.activations import EXP, IDENTITY
from attnzoo.backends import eager
from attnzoo.backends.blocks import (
    Block,
    Hidden,
    ScoreGradients,
    Scratch,
    block_scores,
    blocks,
    constant,
    flat_keys,
    hide,
    once,
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
ROWS = ("offset", "shape", "sink")


def unsupported(form: Form, call: Call) -> str | None:
    by_exp = isinstance(form, Definition) or getattr(form, "activation", None) is EXP
    return None if by_exp or not call.return_lse else "φ is not exp: lse by definition only"


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
    rows = [None if (x := getattr(form, name)) is None else call.row(x) for name in ROWS]
    seed = new_seed(call) if call.dropout_p else None
    # The rows go as tensors of their own; what stands for them in the form is never read.
    stand_in = {name: None if getattr(form, name) is None else 0.0 for name in ROWS}
    bare = replace(form, gain=1.0, **stand_in)
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
        part = block.part
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


def _kept(s: Tensor, top_k: int | None) -> Tensor:
    """The top_k largest of each row, ties to the lowest index."""
    assert top_k is not None
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
    form: Pairwise,
    block: Block,
    s: Tensor,
    hidden: Hidden,
    shape: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """φ(s − τ), the rows τ and Z from which a backward finds it again, and lse for φ = exp.

    Works in place on the scores s [b, h, rows, keys], from which an offset is off already. None
    stands for τ = 0, Z = 1 and no lse.
    """
    shape, sink = (None if x is None else block.of(x) for x in (shape, sink))
    value = form.activation.value
    wide = None if shape is None else shape[..., None]
    if form.normalize == "select":
        s.masked_fill_(~_kept(s, form.keep), NEG_INF)
    if form.normalize == "none":
        phi = value(s, wide)
        hide(phi, hidden, 0.0)
        return phi, None, None, None
    if form.normalize == "threshold":
        s.sub_(_peak(s))
        tau = solve_threshold(s, shape, form.activation.name)
        phi = value(s.sub_(tau[..., None]), wide)
        # Z is 1 up to the last place of τ; over many equal scores that is not 1 in fp32.
        return phi, tau, phi.sum(-1), None
    if form.activation.name == "exp":
        m = _peak(s)
        phi = value(s.sub_(m), None)
        mass, m = phi.sum(-1), m[..., 0]
        lse = m + mass.log()
        if sink is None:
            return phi, m, mass, lse
        top = torch.maximum(m, sink)
        down = (m - top).exp()
        return phi.mul_(down[..., None]), top, mass * down + (sink - top).exp(), lse
    phi = value(s, wide)
    hide(phi, hidden, 0.0)
    z = phi.sum(-1)
    if sink is not None:
        z = z + value(sink.clone(), shape)
    return phi, None, z, None


class _Pairwise(torch.autograd.Function):
    """The saved rows: τ, which for φ = exp is the row's maximum, and Z.

    Not their sum m + log Z: a mask may move all of a row by −1e9, beside which log Z has no digit.
    """

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
        if offset is not None:
            # −τ is one more feature of q, against 1 in every key: the product subtracts it.
            keys = torch.nn.functional.pad(keys, (0, 1), value=1.0)
        full = (call.batch, call.heads, call.queries)
        out = torch.zeros(*full, v.shape[-1], dtype=call.dtype, device=q.device)
        lse = out.new_full(full, NEG_INF)
        tau, z = out.new_zeros(full), out.new_ones(full)
        for block in blocks(call):
            scaled = scaled_queries(block, q, gain)
            if offset is not None:
                tau_column = block.of(offset).expand(block.shape)[..., None]
                scaled = torch.cat([scaled, -block.flat(tau_column)], dim=-1)
            s, hidden = block_scores(block, scaled, keys, scratch, form.activation.vanishes)
            phi, block_tau, total, block_lse = _weigh(form, block, s, hidden, shape, sink)
            if seed is not None:
                phi.mul_(keep_mask(block, call, seed))
            o = torch.bmm(block.flat(phi), values[block.kv, block.keys]).view(
                *block.shape, v.shape[-1]
            )
            if total is not None:
                total = total.masked_fill_(total == 0, 1.0)
                o /= total[..., None]
            out[block.part] = o
            if block_tau is not None:
                tau[block.part] = block_tau
            if block_lse is not None:
                lse[block.part] = block_lse
            if total is not None:
                z[block.part] = total
        ctx.save_for_backward(
            q, k, v, mask, alibi, gain, offset, shape, sink, seed, out, tau, z, lse
        )
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, alibi, gain, offset, shape, sink, *_ = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(ctx, do, dlse)
        inputs = (q, k, v, mask, alibi, gain, offset, shape, sink, do, dlse)
        return None, None, *once(grads, *inputs), None


def _gradients(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """Of q, k, v, mask, alibi, gain, offset, shape and sink."""
    form: Pairwise = ctx.form
    q, k, v, mask, alibi, gain, offset, shape, sink, seed, out, tau, z, lse = ctx.saved_tensors
    call = replace(ctx.call, mask=mask, alibi=alibi)
    grads = ScoreGradients(call, q, k, gain)
    values = flat_keys(v, call)
    dv = torch.zeros_like(values)
    rows = {"offset": offset, "shape": shape, "sink": sink}
    wanted = dict(zip(rows, ctx.needs_input_grad[8:11]))
    drow = {name: torch.zeros_like(tau) for name in rows if wanted[name]}
    scratch, second = Scratch(call), Scratch(call)
    for block in blocks(call):
        scaled = scaled_queries(block, q, gain)
        s, hidden = block_scores(block, scaled, grads.keys, scratch, form.activation.vanishes)
        wide = None if shape is None else block.of(shape)[..., None]
        x, phi, slope = _weigh_again(form, s, hidden, block, tau, offset, wide)
        # dO/Z in the place of dO puts the division into both products at once.
        do_z = do[block.part].to(call.dtype)
        if form.normalize != "none":
            do_z = do_z / block.of(z)[..., None]
        flat_do = block.flat(do_z)
        dp = product(flat_do, values[block.kv, block.keys], second).view(s.shape)
        kept = None if seed is None else keep_mask(block, call, seed)
        flat_phi = block.flat(phi if kept is None else phi * kept)
        dv[block.kv, block.keys].baddbmm_(flat_phi.transpose(1, 2), flat_do)
        if kept is not None:
            dp.mul_(kept)
        r = _mean_gradient(form, block, do_z, out, dp, slope)
        if "sink" in drow:
            assert r is not None
            assert sink is not None
            drow["sink"][block.part] = -r * _sink_slope(form, block, sink, tau, wide)
        if r is not None:
            dp.sub_(r[..., None])
        if "shape" in drow:
            assert form.activation.shape_slope is not None
            turn = form.activation.shape_slope(x, phi, wide)
            hide(turn, hidden, 0.0)
            drow["shape"][block.part] = (turn * dp).sum(-1)
        ds = dp.mul_(slope)
        if call.return_lse:
            # ∂lse/∂s = exp(s − lse), lse being that without the sink.
            own = block.of(lse)
            empty = own == NEG_INF
            own = (block.of(tau) - own).masked_fill(empty, 0.0)
            given = block.of(dlse).masked_fill(empty, 0.0)
            ds += (x + own[..., None]).exp_() * given[..., None]
        if "offset" in drow:
            drow["offset"][block.part] = -ds.sum(-1)
        grads.add(block, ds, scaled)
    dq, dk, dmask, dalibi, dgain = grads.tensors(k, mask, alibi)
    dv = dv.view(v.shape).to(v.dtype)
    others = [reduce_row(drow[n], row) if n in drow else None for n, row in rows.items()]
    return dq, dk, dv, dmask, dalibi, dgain, *others


def _weigh_again(
    form: Pairwise,
    s: Tensor,
    hidden: Hidden,
    block: Block,
    tau: Tensor,
    offset: Tensor | None,
    wide: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x = s − τ, φ(x) and φ'(x) from the saved rows, 0 at invisible keys."""
    if form.normalize == "select":
        s.masked_fill_(~_kept(s, form.keep), NEG_INF)
    if form.normalize == "threshold":
        s.sub_(_peak(s))
    if offset is not None:
        s.sub_(block.of(offset)[..., None])
    elif form.normalize == "threshold" or form.activation.name == "exp":
        s.sub_(block.of(tau)[..., None])
    # φ = exp overwrites s, and its gradient of lse wants x again.
    x = s.clone() if block.whole.return_lse else s
    phi = form.activation.value(s, wide)
    hide(phi, hidden, 0.0)
    slope = form.activation.slope(s, phi, wide)
    if slope is not phi:
        hide(slope, hidden, 0.0)
    return x, phi, slope


def _mean_gradient(
    form: Pairwise, block: Block, do_z: Tensor, out: Tensor, dp: Tensor, slope: Tensor
) -> Tensor | None:
    """dO·r / Z, what a row's scores have in common: [b, h, rows]."""
    if form.normalize == "none":
        return None
    if form.normalize == "threshold":
        mass = slope.sum(-1)
        return torch.linalg.vecdot(slope, dp) / mass.masked_fill_(mass == 0, 1.0)
    return (do_z * out[block.part]).sum(-1)


def _sink_slope(
    form: Pairwise, block: Block, sink: Tensor, tau: Tensor, wide: Tensor | None
) -> Tensor:
    at = block.of(sink)
    if form.activation.name == "exp":
        at = at - block.of(tau)
    shape = None if wide is None else wide[..., 0]
    return form.activation.slope(at, form.activation.value(at.clone(), shape), shape)
