"""Output and gradients of a pairwise form, computed block by block.

The backward, with w = φ/Z and dP_ij = dO_i·v_j:
    dV = wᵀ dO,  dS = φ' (dP − c)/Z.
c_i depends on ``normalize``: 0 for "none", dO·o for "sum" and "select", Σφ'dP/Σφ' for "threshold".

If a query has a NaN among its scores, its whole output is NaN. Other queries are not affected.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.backends.tiled.blocks import (
    Block,
    Hidden,
    ScoreGradients,
    Scratch,
    block_scores,
    blocks,
    flat_keys,
    hide,
    product,
    reduce_vector,
    scaled_queries,
)
from attnzoo.backends.tiled.dropout import keep_mask
from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.core.activations import Activation
from attnzoo.core.call import Call

NEG_INF = float("-inf")


class Normalizer(NamedTuple):
    """A pairwise form without its per-query vectors."""

    activation: Activation
    normalize: str
    keep: int | None


def outputs(
    call: Call,
    how: Normalizer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Vectors,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return out (B, H, Nq, Dv), lse (B, H, Nq) if requested, and the per-query vectors τ and Z.

    For a normalized exp, τ is the maximum of the query's scores and sink. τ and Z are saved
    separately: a mask may add −1e9 to all scores, and τ + log Z would lose all digits of log Z.
    """
    gain, offset, shape, sink = vectors
    keys, values, scratch = flat_keys(k, call), flat_keys(v, call), Scratch(call)
    if offset is not None:
        # −offset is appended to each query and 1 to each key, so that q·k subtracts the offset.
        keys = torch.nn.functional.pad(keys, (0, 1), value=1.0)
    full = (call.batch, call.heads, call.queries)
    out = torch.zeros(*full, v.shape[-1], dtype=call.dtype, device=q.device)
    lse = out.new_full(full, NEG_INF) if call.return_lse else None
    tau, z = out.new_zeros(full), out.new_ones(full)
    for block in blocks(call):
        scaled = scaled_queries(block, q, gain)
        if offset is not None:
            tau_column = block.of(offset).expand(block.shape)[..., None]
            scaled = torch.cat([scaled, -block.flat(tau_column)], dim=-1)
        s, hidden = block_scores(block, scaled, keys, scratch, how.activation.vanishes)
        phi, block_tau, total, block_lse = _weigh(how, block, s, hidden, shape, sink)
        if seed is not None:
            phi.mul_(keep_mask(block, call, seed))
        o = torch.bmm(block.flat(phi), values[block.kv, block.keys]).view(*block.shape, v.shape[-1])
        if total is not None:
            total = total.masked_fill_(total == 0, 1.0)
            o /= total[..., None]
            z[block.part] = total
        out[block.part] = o
        if block_tau is not None:
            tau[block.part] = block_tau
        if block_lse is not None and lse is not None:
            lse[block.part] = block_lse
    return out, lse, tau, z


def gradients(
    call: Call,
    how: Normalizer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Vectors,
    seed: Tensor | None,
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """Return the gradients of q, k, v and of the operands in ``wanted``, by operand name."""
    out, lse, tau, z = saved
    gain, offset, shape, sink = vectors
    grads = ScoreGradients(call, q, k, gain, wanted)
    values = flat_keys(v, call)
    dv = torch.zeros_like(values)
    others = {"offset": offset, "shape": shape, "sink": sink}
    others = {name: x for name, x in others.items() if name in wanted and x is not None}
    made = {name: torch.zeros_like(tau) for name in others}
    scratch, second = Scratch(call), Scratch(call)
    for block in blocks(call):
        scaled = scaled_queries(block, q, gain)
        s, hidden = block_scores(block, scaled, grads.keys, scratch, how.activation.vanishes)
        wide = None if shape is None else block.of(shape)[..., None]
        x, phi, slope = _recompute_weights(how, s, hidden, block, tau, offset, wide)
        # Dividing dO by Z divides both dV and dP.
        do_z = do[block.part].to(call.dtype)
        if how.normalize != "none":
            do_z = do_z / block.of(z)[..., None]
        flat_do = block.flat(do_z)
        dp = product(flat_do, values[block.kv, block.keys], second).view(s.shape)
        kept = None if seed is None else keep_mask(block, call, seed)
        flat_phi = block.flat(phi if kept is None else phi * kept)
        dv[block.kv, block.keys].baddbmm_(flat_phi.transpose(1, 2), flat_do)
        if kept is not None:
            dp.mul_(kept)
        c = _mean_gradient(how, block, do_z, out, dp, slope)
        if "sink" in made:
            assert c is not None
            assert sink is not None
            made["sink"][block.part] = -c * _sink_slope(how, block, sink, tau, wide)
        if c is not None:
            dp.sub_(c[..., None])
        if "shape" in made:
            assert how.activation.shape_slope is not None
            shape_slope = how.activation.shape_slope(x, phi, wide)
            hide(shape_slope, hidden, 0.0)
            made["shape"][block.part] = (shape_slope * dp).sum(-1)
        ds = dp.mul_(slope)
        if call.return_lse:
            assert lse is not None
            assert dlse is not None
            # ∂lse/∂s = exp(s − lse). lse does not include the sink.
            own = block.of(lse)
            empty = own == NEG_INF
            own = (block.of(tau) - own).masked_fill(empty, 0.0)
            given = block.of(dlse).masked_fill(empty, 0.0)
            ds += (x + own[..., None]).exp_() * given[..., None]
        if "offset" in made:
            made["offset"][block.part] = -ds.sum(-1)
        grads.add(block, ds, scaled)
    found = {**grads.named(k), "v": dv.view(v.shape).to(v.dtype)}
    return found | {name: reduce_vector(made[name], x) for name, x in others.items()}


def kept(s: Tensor, top_k: int | None) -> Tensor:
    """Mask of the top_k largest scores of each row. Of equal scores the first ones are kept."""
    assert top_k is not None
    top_k = min(top_k, s.shape[-1])
    kth = s.topk(top_k, dim=-1).values[..., -1:]
    above, tied = ~(s <= kth), s == kth  # written as "not <=" so that NaN counts as above
    room = top_k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _peak(s: Tensor) -> Tensor:
    """The maximum of each row, 0 for a row without keys. Thresholds τ are relative to it.

    The rounding error of an absolute τ may exceed the differences between large scores.
    """
    m = s.amax(-1, keepdim=True)
    return m.masked_fill_(m == NEG_INF, 0.0)


def _weigh(
    how: Normalizer,
    block: Block,
    s: Tensor,
    hidden: Hidden,
    shape: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return φ(s − τ), the per-query vectors τ and Z, and lse if φ = exp.

    s [b, h, rows, keys] are the scores minus the offset, and are overwritten. τ = 0, Z = 1 and a
    missing lse are returned as None.
    """
    shape, sink = (None if x is None else block.of(x) for x in (shape, sink))
    value = how.activation.value
    wide = None if shape is None else shape[..., None]
    if how.normalize == "select":
        s.masked_fill_(~kept(s, how.keep), NEG_INF)
    if how.normalize == "none":
        phi = value(s, wide)
        hide(phi, hidden, 0.0)
        return phi, None, None, None
    if how.normalize == "threshold":
        s.sub_(_peak(s))
        tau = solve_threshold(s, shape, how.activation)
        phi = value(s.sub_(tau[..., None]), wide)
        # Z is not exactly 1, because τ is rounded. With many equal scores the fp32 error adds up.
        return phi, tau, phi.sum(-1), None
    if how.activation.exponential:
        m = _peak(s)
        phi = value(s.sub_(m), None)
        weight_sum, m = phi.sum(-1), m[..., 0]
        lse = m + weight_sum.log()
        if sink is None:
            return phi, m, weight_sum, lse
        top = torch.maximum(m, sink)
        down = (m - top).exp()
        return phi.mul_(down[..., None]), top, weight_sum * down + (sink - top).exp(), lse
    phi = value(s, wide)
    hide(phi, hidden, 0.0)
    z = phi.sum(-1)
    if sink is not None:
        z = z + value(sink.clone(), shape)
    return phi, None, z, None


def _recompute_weights(
    how: Normalizer,
    s: Tensor,
    hidden: Hidden,
    block: Block,
    tau: Tensor,
    offset: Tensor | None,
    wide: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x = s − τ, φ(x) and φ'(x) for the saved τ. φ and φ' are 0 for hidden keys."""
    if how.normalize == "select":
        s.masked_fill_(~kept(s, how.keep), NEG_INF)
    if how.normalize == "threshold":
        s.sub_(_peak(s))
    if offset is not None:
        s.sub_(block.of(offset)[..., None])
    elif how.normalize == "threshold" or how.activation.exponential:
        s.sub_(block.of(tau)[..., None])
    # φ = exp overwrites s, but the gradient of lse needs x.
    x = s.clone() if block.whole.return_lse else s
    phi = how.activation.value(s, wide)
    hide(phi, hidden, 0.0)
    slope = how.activation.slope(s, phi, wide)
    if slope is not phi:
        hide(slope, hidden, 0.0)
    return x, phi, slope


def _mean_gradient(
    how: Normalizer, block: Block, do_z: Tensor, out: Tensor, dp: Tensor, slope: Tensor
) -> Tensor | None:
    """Return c/Z [b, h, rows] (c: see the module docstring), or None if c = 0."""
    if how.normalize == "none":
        return None
    if how.normalize == "threshold":
        slope_sum = slope.sum(-1)
        return torch.linalg.vecdot(slope, dp) / slope_sum.masked_fill_(slope_sum == 0, 1.0)
    return (do_z * out[block.part]).sum(-1)


def _sink_slope(
    how: Normalizer, block: Block, sink: Tensor, tau: Tensor, wide: Tensor | None
) -> Tensor:
    at = block.of(sink)
    if how.activation.exponential:
        at = at - block.of(tau)
    shape = None if wide is None else wide[..., 0]
    return how.activation.slope(at, how.activation.value(at.clone(), shape), shape)
