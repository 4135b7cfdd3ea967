"""Output and gradients of a pairwise form, computed block by block.

The backward, with w = φ/Z and dP_ij = dO_i·v_j:
    dV = wᵀ dO,  dS = (φ' dP − μ' δ)/Z.
δ_i depends on ``normalize``: 0 for "none", dO·o for "sum" and "select", Σφ'dP/Σφ' for "threshold".
μ' is φ', unless the activation has a normalizer. A factor of "none" multiplies dO. A gradient dlse
of lse is subtracted from δ, times Z / (Z without the sink), because lse does not include the sink.

If a query has a NaN among its scores, its whole output is NaN. Other queries are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.dropout import new_seed
from attnzoo.backends.shared_operands import Rule, Terms, Vectors, rule_of
from attnzoo.backends.tiled.blocks import (
    Block,
    Hidden,
    Scratch,
    blocks,
    flat_keys,
    keep_mask,
    product,
    reduce_vector,
)
from attnzoo.backends.tiled.scores import ScoreGradients, Scores, hide
from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.core.call import Call
from attnzoo.core.forms import Pairwise

NEG_INF = float("-inf")
MASS_UNIT = 2.0**52  # softmax weights are summed in units of 1 / MASS_UNIT


class PairwiseCall(NamedTuple):
    """A call with a pairwise form. ``seed`` is that of dropout; None without dropout."""

    call: Call
    rule: Rule
    vectors: Vectors
    terms: Terms
    seed: Tensor | None = None

    @staticmethod
    def of(call: Call, form: Pairwise) -> PairwiseCall:
        """Vectors broadcast to (B, H, Nq), or to (B, H, Nk). A gain from statistics is left out."""

        def tensor(x: object) -> Tensor | None:
            return call.per_query(x) if isinstance(x, (Tensor, float, int)) else None

        gain = None if not isinstance(form.gain, Tensor) and form.gain == 1.0 else form.gain
        vectors = Vectors(*map(tensor, (gain, form.offset, form.shape, form.sink)))
        terms = Terms(**{name: tensor(getattr(form, name)) for name in Terms._fields})
        seed = new_seed(call) if call.dropout_p else None
        return PairwiseCall(call, rule_of(form), vectors, terms, seed)

    def scores(self, k: Tensor) -> Scores:
        return Scores(
            self.call, k, gain=self.vectors.gain, offset=self.vectors.offset, terms=self.terms,
            distance=self.rule.distance, vanishes=self.rule.activation.vanishes,
        )  # fmt: skip


class Partial(NamedTuple):
    """Sums over some of the keys of each query, before the division by Z.

    out: Σ φ(s − τ) v, (B, H, Nq, Dv). z: Σ μ(s − τ), (B, H, Nq); 0 with normalize "none". tau: for
    a normalized exp the maximum of the scores, −inf without keys; for a shifted activation M; for
    a threshold τ relative to the peak; else 0. The sink and eps are not included.
    """

    out: Tensor
    z: Tensor
    tau: Tensor


class TiledSaved(NamedTuple):
    """What the backward needs of the forward: (B, H, Nq, Dv) for out and mean, else (B, H, Nq).

    peak and mean are given if the keys of the backward are only some of the keys of a threshold:
    the maximum of the scores, and Σ φ' v / Σ φ'.
    """

    out: Tensor
    lse: Tensor | None
    tau: Tensor
    z: Tensor
    peak: Tensor | None = None
    mean: Tensor | None = None


def outputs(formed: PairwiseCall, q: Tensor, k: Tensor, v: Tensor) -> TiledSaved:
    """Return out (B, H, Nq, Dv), lse (B, H, Nq) if requested, and the per-query vectors τ and Z.

    For a normalized exp, τ is the maximum of the query's scores, and Z does not include the sink.
    For a shifted activation, τ is M. τ and Z are saved separately: a mask may add −1e9 to all
    scores, and τ + log Z would lose all digits of log Z.
    """
    return divided(formed, partial(formed, q, k, v))


def partial(formed: PairwiseCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """The sums over the keys of the call. A threshold is solved for these keys alone."""
    call, rule, vectors, terms, seed = formed
    scores, values = formed.scores(k), flat_keys(v, call)
    full = (call.batch, call.heads, call.queries)
    out = torch.zeros(*full, v.shape[-1], dtype=call.dtype, device=q.device)
    z = out.new_zeros(full)
    tau = out.new_full(full, NEG_INF) if rule.online else out.new_zeros(full)
    for block in blocks(call):
        scored = scores.of(block, scores.queries(block, q))
        phi, block_tau, total = _weigh(rule, block, scored.s, scored.hidden, vectors.shape)
        if seed is not None:
            phi.mul_(keep_mask(block, call, seed))
        o = torch.bmm(block.flat(phi), values[block.kv, block.keys]).view(*block.shape, v.shape[-1])
        if terms.factor is not None:
            o *= block.of(terms.factor)[..., None]
        out[block.part] = o
        if total is not None:
            z[block.part] = total
        if block_tau is not None:
            tau[block.part] = block_tau
    return Partial(out, z, tau)


def divided(formed: PairwiseCall, sums: Partial) -> TiledSaved:
    """The outputs from the sums over all keys. The sums are overwritten."""
    out, z, tau = sums
    rule, sink, shape = formed.rule, formed.vectors.sink, formed.vectors.shape
    if rule.normalize == "none":
        return TiledSaved(out, None, tau, z.fill_(1.0))
    lse = None
    if rule.online:
        if formed.call.return_lse:
            lse = tau + z.log()
        if sink is not None:
            top = torch.maximum(tau, sink)
            top = top.masked_fill(top == NEG_INF, 0.0)  # no keys and no sink
            rescale = (tau - top).exp()
            total = z * rescale + (sink - top).exp()
            out.mul_((rescale / total.masked_fill(total == 0, 1.0))[..., None])
        empty = tau == NEG_INF
        tau, z = tau.masked_fill(empty, 0.0), z.masked_fill(empty, 1.0)
        return TiledSaved(out if sink is not None else out.div_(z[..., None]), lse, tau, z)
    if sink is not None:
        x = sink.expand(z.shape).clone()
        z = z + (rule.activation.normalizer or rule.activation.value)(x, shape)
    if rule.eps:
        z = z + (rule.eps * (-tau).exp() if rule.activation.shifted else rule.eps)
    z = z.masked_fill(z == 0, 1.0)
    return TiledSaved(out.div_(z[..., None]), lse, tau, z)


def gradients(
    formed: PairwiseCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: TiledSaved,
    do: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """Return the gradients of q, k, v and of the operands in ``wanted``, by operand name."""
    call, rule, vectors, terms, seed = formed
    out, lse, tau, z, peak, mean = saved
    shape, sink, factor = vectors.shape, vectors.sink, terms.factor
    scores, z_with_sink = formed.scores(k), weight_sum(formed, tau, z)
    grads = ScoreGradients(scores, q, wanted)
    values = flat_keys(v, call)
    dv = torch.zeros_like(values)
    others = {"offset": vectors.offset, "shape": shape, "sink": sink, "factor": factor}
    others = {name: x for name, x in others.items() if name in wanted and x is not None}
    made = {name: torch.zeros_like(tau) for name in others}
    second, only_values = Scratch(call), list(wanted) == ["v"]
    for block in blocks(call):
        queries = scores.queries(block, q)
        scored = scores.of(block, queries)
        s, hidden = scored.s, scored.hidden
        wide = None if shape is None else block.of(shape)[..., None]
        if rule.activation.shifted:
            wide = block.of(tau)[..., None]
        phi, slope, mu_slope = _recompute_weights(rule, s, hidden, block, tau, wide, peak)
        # Dividing dO by Z divides both dV and dP.
        do_z = do[block.part].to(call.dtype)
        if rule.normalize != "none":
            do_z = do_z / block.of(z_with_sink)[..., None]
        flat_do = block.flat(do_z)
        keep = None if seed is None else keep_mask(block, call, seed)
        flat_phi = block.flat(phi if keep is None else phi * keep)
        of_values = flat_do
        if factor is not None:
            of_values = block.flat(do_z * block.of(factor)[..., None])
        dv[block.kv, block.keys].baddbmm_(flat_phi.transpose(1, 2), of_values)
        if only_values:
            continue
        dp = product(flat_do, values[block.kv, block.keys], second).view(s.shape)
        if keep is not None:
            dp.mul_(keep)
        if factor is not None:
            if "factor" in made:
                made["factor"][block.part] = torch.linalg.vecdot(phi, dp)
            dp.mul_(block.of(factor)[..., None])
        mean_of = mean if rule.normalize == "threshold" else out
        delta = _mean_gradient(rule, block, do_z, mean_of, dp, slope)
        if "sink" in made:
            assert delta is not None
            assert sink is not None
            shapes = None if wide is None else wide[..., 0]
            made["sink"][block.part] = sink_gradient(
                rule, delta, block.of(sink), block.of(tau), shapes
            )
        if call.return_lse:
            assert delta is not None
            assert lse is not None
            assert dlse is not None
            # ∂lse/∂s = φ / (Z without the sink). Without keys lse is constant.
            delta = delta - block.of(dlse).masked_fill(block.of(lse) == NEG_INF, 0.0) / block.of(z)
        if delta is not None and mu_slope is None:
            dp.sub_(delta[..., None])
        if "shape" in made:
            assert rule.activation.shape_slope is not None
            shape_slope = rule.activation.shape_slope(s, phi, wide)
            hide(shape_slope, hidden, 0.0)
            made["shape"][block.part] = (shape_slope * dp).sum(-1)
        ds = dp.mul_(slope)
        if delta is not None and mu_slope is not None:
            ds -= mu_slope.mul_(delta[..., None])
        if "offset" in made:
            made["offset"][block.part] = -ds.sum(-1)
        grads.add(block, ds, queries, scored)
    by_name = {**grads.named(k), "v": dv.view(v.shape).to(v.dtype)}
    return by_name | {name: reduce_vector(made[name], x) for name, x in others.items()}


def weight_sum(formed: PairwiseCall, tau: Tensor, z: Tensor) -> Tensor:
    """Z with the sink, from the saved τ and Z. The saved Z of a softmax is without it."""
    sink = formed.vectors.sink
    return z + _relative(sink, tau).exp() if formed.rule.online and sink is not None else z


def _relative(sink: Tensor, tau: Tensor) -> Tensor:
    """sink − τ, at most 8 below the logarithm of the largest number: the weights are then 0."""
    return (sink - tau).clamp(max=math.log(torch.finfo(tau.dtype).max) - 8)


def selection_mask(s: Tensor, rule: Rule) -> Tensor:
    """Mask of the scores of each row that "select" keeps. Of equal scores the first ones."""
    if rule.mass is None:
        assert rule.keep is not None
        count, cut = _cut_of_number(s, rule.keep)
    else:
        count, cut = _cut_of_mass(s, rule.mass)
    above, tied = ~(s <= cut), s == cut  # written as "not <=" so that NaN counts as above
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _cut_of_number(s: Tensor, keep: int) -> tuple[int, Tensor]:
    """The number of keys that each row keeps, and the smallest score of these."""
    count = min(keep, s.shape[-1])
    return count, s.topk(count, dim=-1).values[..., -1:]


def _cut_of_mass(s: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The same for a mass; both are (…, 1).

    The weights are summed as integers, whose sums are exact. On a GPU, sums of floats could differ
    between forward and backward, which would then keep different keys.
    """
    ordered = s.sort(dim=-1, descending=True).values
    sums = ordered.softmax(-1).mul_(MASS_UNIT).long().cumsum_(-1)
    needs_next = sums[..., :-1] < math.ceil(mass * MASS_UNIT)
    count = needs_next.sum(-1, keepdim=True) + 1
    return count, ordered.gather(-1, count - 1)


def _peak(s: Tensor) -> Tensor:
    """The maximum of each row, 0 for a row without keys. Thresholds τ are relative to it.

    The rounding error of an absolute τ may exceed the differences between large scores.
    """
    m = s.amax(-1, keepdim=True)
    return m.masked_fill_(m == NEG_INF, 0.0)


def _weigh(
    rule: Rule,
    block: Block,
    s: Tensor,
    hidden: Hidden,
    shape: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return φ(s − τ), and the per-query vectors τ and Z; see `Partial`.

    s [b, h, rows, keys] are the scores minus the offset, and are overwritten. τ = 0 and an unused Z
    are returned as None.
    """
    value = rule.activation.value
    wide = None if shape is None else block.of(shape)[..., None]
    if rule.normalize == "select":
        s.masked_fill_(~selection_mask(s, rule), NEG_INF)
    if rule.normalize == "none":
        phi = value(s, wide)
        hide(phi, hidden, 0.0)
        return phi, None, None
    if rule.normalize == "threshold":
        s.sub_(_peak(s))
        tau = solve_threshold(s, None if wide is None else wide[..., 0], rule.activation)
        phi = value(s.sub_(tau[..., None]), wide)
        # Z is not exactly 1, because τ is rounded. With many equal scores the fp32 error adds up.
        return phi, tau, phi.sum(-1)
    if rule.online:
        m = s.amax(-1)
        phi = value(s.sub_(m.masked_fill(m == NEG_INF, 0.0)[..., None]), None)
        return phi, m, phi.sum(-1)
    tau = None
    if rule.activation.shifted:
        hide(s, hidden, NEG_INF)
        tau = s.amax(-1).clamp_(min=0)
        wide = tau[..., None]
    normalizer = rule.activation.normalizer
    mu = None if normalizer is None else normalizer(s, wide)
    phi = value(s, wide)
    hide(phi, hidden, 0.0)
    if mu is not None:
        hide(mu, hidden, 0.0)
    return phi, tau, (phi if mu is None else mu).sum(-1)


def _recompute_weights(
    rule: Rule,
    s: Tensor,
    hidden: Hidden,
    block: Block,
    tau: Tensor,
    wide: Tensor | None,
    peak: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return φ(x), φ'(x) and μ'(x) at x = s − τ for the saved τ, with 0 at hidden keys.

    s becomes x, or φ(x) for φ = exp. μ' is None if μ = φ.
    """
    if rule.normalize == "select":
        s.masked_fill_(~selection_mask(s, rule), NEG_INF)
    if rule.normalize == "threshold":
        s.sub_(_peak(s) if peak is None else block.of(peak)[..., None])
    if rule.normalize == "threshold" or rule.activation.exponential:
        s.sub_(block.of(tau)[..., None])
    rule.activation.check_slopes()
    mu_slope = None
    if rule.activation.normalizer is not None and rule.activation.normalizer_slope is not None:
        mu = rule.activation.normalizer(s, wide)
        mu_slope = rule.activation.normalizer_slope(s, mu, wide)
        hide(mu_slope, hidden, 0.0)
    phi = rule.activation.value(s, wide)
    hide(phi, hidden, 0.0)
    slope = rule.activation.slope(s, phi, wide)
    if slope is not phi:
        hide(slope, hidden, 0.0)
    return phi, slope, mu_slope


def _mean_gradient(
    rule: Rule, block: Block, do_z: Tensor, mean: Tensor | None, dp: Tensor, slope: Tensor
) -> Tensor | None:
    """Return δ/Z [b, h, rows] (see the module docstring), or None if δ = 0.

    ``mean``: r with δ = dO·r. None for a threshold whose keys are all here.
    """
    if rule.normalize == "none":
        return None
    if mean is None:
        slope_sum = slope.sum(-1)
        return torch.linalg.vecdot(slope, dp) / slope_sum.masked_fill_(slope_sum == 0, 1.0)
    return (do_z * mean[block.part]).sum(-1)


def sink_gradient(
    rule: Rule, delta: Tensor, sink: Tensor, tau: Tensor, shape: Tensor | None
) -> Tensor:
    """The gradient of the sink, −δ/Z · μ'(sink − τ). ``delta``: δ/Z, from `_mean_gradient`."""
    x = _relative(sink, tau) if rule.activation.exponential else sink
    phi = rule.activation
    if phi.normalizer is not None and phi.normalizer_slope is not None:
        return -delta * phi.normalizer_slope(x, phi.normalizer(x, shape), shape)
    return -delta * phi.slope(x, phi.value(x.clone(), shape), shape)
