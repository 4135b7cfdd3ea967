"""Theory beside measurement: which law each trained head follows, and the bounds it lives under.

Laws. A head's largest weight at each n (the mean over rows) is compared with what its own
normalizer, with its own learned parameters, gives to ideal scores with one free number:

    shrinking gap   z_j = κ u_j, u_j uniform   the next key comes closer as n grows: a largest value
    fixed gap       z = Δ, 0 … 0               one key stands out by the same Δ at any n: a needle

The number is found by least squares of log weight; an error ×1.08 means that the law misses the
weights by 8 %, root mean square. The law is computed, never assumed: any variant has one. Of u the
mean weight over sixteen draws is taken: u_j on the grid (j + ½)/n, of which `laws` has closed
forms, is some 10 % off the mean over draws. Positions that are added to scores (ALiBi) are part of
what is measured, and of no law. Softmax falls as 1/n under both once n ≫ κ, e^Δ: there its lengths
tell the two apart no more.

Bounds. Softmax of scores in a range δ = max z − min z gives no key more than e^δ/n, hence none a
half beyond n = 2e^δ. The bound is taken row by row, so that its mean bounds the mean weight.

Gain. See `critical_gain`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import attnzoo
from commandline.table import Table
from commandline.variants import Spec, VariantCall, parse_spec
from evals.measures.arithmetic import lean_arithmetic
from evals.results.summary import Group, Point, Series
from evals.theory.fits import GAPS, Fit, fit, log_law

MOST_HEADS = 8
UNKNOWN = VariantCall("unknown")  # of rows whose plugin is not loaded
SAME = 0.005, 0.05  # errors of log weight nearer than this, or this part, do not tell laws apart


# ----------------------------------------------------------------------------------- bounds


def half_length(spread: float) -> float:
    """2 e^δ: beyond this n softmax of scores in a range δ gives no key a half."""
    return 2 * _exp(spread)


def critical_gain(alignment: float) -> float:
    """γ_c = 1 / (1 − ρ), infinite from ρ = 1 on.

    Chen, Lin, Polyanskiy, Rigollet 2025, "Critical attention scaling in long-context transformers",
    arXiv:2510.05554: softmax of a_ij = β_n ⟨y_i, y_j⟩, y the normalized tokens, β_n = γ log n. For
    tokens that all have about the same inner product ρ with one another (nearly a simplex), as
    n → ∞ and in high dimension: γ < γ_c draws all tokens together, γ > γ_c leaves each by itself,
    and between them, near γ_c, attention is sparse. In words: a token's own score stands out from n
    others iff β_n (1 − ρ) > log n.

    What is measured here is an analogue, no instance: q and k are projections and not the same
    vector; ρ is the mean cosine of different tokens' keys, whose cosines need not be alike; β =
    scale · |q| · mean |k| is what the query would score on a key in its own direction, before any
    gain of the variant; and the claim is about softmax.
    """
    return math.inf if alignment >= 1 else 1 / (1 - alignment)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


# ------------------------------------------------------------------------- heads of a group


@dataclass(frozen=True)
class Heads:
    """The heads of one series that are shown, sharpest first, with what was fitted to them.

    names (H); keys: n by length; peaks (L, S, H), NaN where a seed has none; learned (S, H) by
    name, empty for a substitution at inference. ``fits`` is empty where there is none, and ``why``
    says why. indices: of the shown heads among all.
    """

    series: Series
    call: VariantCall
    names: list[str]
    indices: list[int]
    total: int
    keys: list[int]
    peaks: Tensor
    learned: dict[str, Tensor]
    fits: tuple[Fit, ...] = ()
    why: str = ""

    def mean_peaks(self, index: int) -> list[float]:
        """The largest weight of a shown head by length, over the seeds."""
        return self.peaks[:, :, index].nanmean(-1).tolist()

    def closer(self, index: int) -> Fit | None:
        """The gap whose law is nearer to a shown head, over the seeds.

        None where nothing was fitted, or the weights do not depend on the number.
        """
        found = [
            (self.error(one, index), one) for one in self.fits if not self.any_fits(one, index)
        ]
        found = [pair for pair in found if math.isfinite(pair[0])]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def entries(self, index: int) -> Tensor:
        """Of a shown head in a fit of all: one per seed."""
        seeds, heads = self.peaks.shape[1:]
        return torch.arange(seeds) * heads + index

    def error(self, found: Fit, index: int) -> float:
        """The RMS error of log weight of a shown head, its mean over the seeds that have one."""
        return found.errors[self.entries(index)].nanmean().item()

    def any_fits(self, found: Fit, index: int) -> bool:
        """Whether the law does not depend on the number that was fitted."""
        mine = self.entries(index)
        return bool((found.below[mine] & found.above[mine]).any())

    def curve(self, found: Fit, index: int, keys: Sequence[int]) -> list[float]:
        """The fitted law of a shown head at other n: the geometric mean over the seeds."""
        mine = self.entries(index)
        mine = mine[found.sizes[mine].isfinite()]
        learned = {name: values.flatten()[mine] for name, values in self.learned.items()}
        return [
            log_law(found.gap.scores(n), self.call, found.sizes[mine][None], learned)
            .mean()
            .exp()
            .item()
            for n in keys
        ]


def head_names(total: int, per_layer: int) -> list[str]:
    """1 … H, or layer.head."""
    if per_layer >= total or total % per_layer:
        return [str(i + 1) for i in range(total)]
    return [f"{i // per_layer + 1}.{i % per_layer + 1}" for i in range(total)]


def _looked(group: Group, series: Series) -> list[Point]:
    """The points with figures of the heads, by length."""
    return [point for point in group.of(series) if point.curves.get("head_peak")]


def heads_of(group: Group, series: Series) -> Heads | None:
    """The sharpest heads of a series, fitted; None where there are no figures of them."""
    points = _looked(group, series)
    if not points:
        return None
    last = points[-1].curves["head_peak"]
    indices = sorted(range(len(last)), key=lambda i: -last[i])[:MOST_HEADS]
    seeds = {seed: i for i, seed in enumerate(group.seeds)}
    peaks = torch.full((len(points), len(seeds), len(indices)), math.nan, dtype=torch.float64)
    try:
        spec = parse_spec(series.variant)
        attnzoo.get_variant(spec.test.name)
    except ValueError as error:
        spec, why = Spec(UNKNOWN, UNKNOWN), f"no law: {error}"
    else:
        why = ""
    learned: dict[str, Tensor] = {}
    for at, point in enumerate(points):
        for row in point.rows:
            if row["status"] != "ok" or "head_peak" not in row["curves"]:
                continue
            seed = seeds[row["seed"]]
            peaks[at, seed] = torch.tensor(row["curves"]["head_peak"]).double()[indices]
            for name, values in ({} if spec.is_substitution else row["learned"]).items():
                every = torch.tensor(values, dtype=torch.float64)
                blank = every[indices].expand(len(seeds), -1).clone()
                learned.setdefault(name, blank)[seed] = every[indices]
    names = head_names(len(last), group.settings.get("heads", len(last)))
    keys = [group.task.tokens(point.length) for point in points]
    found = Heads(series, spec.test, [names[i] for i in indices], indices, len(last), keys, peaks,
                  learned)  # fmt: skip
    if why or len(keys) < 2:
        return replace(found, why=why or "one length: no fit")
    flat = {name: values.flatten() for name, values in learned.items()}
    try:
        fits = tuple(fit(gap, spec.test, keys, peaks.flatten(1), flat) for gap in GAPS)
    except (ValueError, TypeError, RuntimeError) as error:
        return replace(found, why=f"no law: {str(error).splitlines()[0]}")
    return replace(found, fits=fits)


def fitted(group: Group) -> list[Heads]:
    """All series of a group that have figures of their heads."""
    with lean_arithmetic():
        every = [heads_of(group, series) for series in group.series]
    return [found for found in every if found is not None]


# ------------------------------------------------------------------------------------ tables


def _spread(values: Tensor) -> str:
    """The mean over seeds, and their range where there are several."""
    low, high = values.min().item(), values.max().item()
    mean = f"{values.mean().item():.3g}"
    return mean if len(values) == 1 else f"{mean} ({low:.3g} to {high:.3g})"


def _fit_cells(found: Fit, mine: Tensor) -> list[str]:
    """Size and error of one head: mine are its entries, one per seed."""
    mine = mine[found.sizes[mine].isfinite()]
    if not len(mine):
        return ["—", "—"]
    below, above = bool(found.below[mine].any()), bool(found.above[mine].any())
    size = ("≤ " * below or "≥ " * above) + _spread(found.sizes[mine])
    return ["any" if below and above else size, f"×{_spread(found.errors[mine].exp())}"]


def _verdict(heads: Heads, index: int) -> str:
    if heads.why:
        return heads.why
    if any(heads.any_fits(found, index) for found in heads.fits):
        return "weights free of κ, Δ"
    if (best := heads.closer(index)) is None:
        return "fewer than two weights above 0: no fit"
    one, other = (heads.error(found, index) for found in heads.fits)
    near = max(SAME[0], SAME[1] * max(one, other))
    return "either" if abs(one - other) < near else best.gap.name


def _fit_table(group: Group, found: Sequence[Heads]) -> Table:
    header = ["", "head", "lengths", *(text for gap in GAPS for text in (gap.symbol, "error"))]
    rows = []
    for heads in found:
        for index, name in enumerate(heads.names):
            mine = heads.entries(index)
            cells = [cell for one in heads.fits for cell in _fit_cells(one, mine)]
            usable = int((heads.peaks[:, :, index] > 0).any(1).sum())
            start = [group.name(heads.series), name, str(usable)]
            rows.append([*start, *(cells or ["—"] * 4), _verdict(heads, index)])
    note = (
        "One free number: a shrinking gap, scores κu with u uniform, or a fixed gap, one key at Δ; "
        "error: RMS of log weight, as a factor"
    )
    if len(group.seeds) > 1:
        note += "; mean (range) over seeds, each fitted by itself"
    title = "Largest weight against the law of the head's own normalizer"
    return Table(title, [*header, "closer"], rows, note + _shown(found))


def _bound_table(group: Group, found: Sequence[Heads]) -> Table:
    header = ["", "head", "n", "largest weight", "δ", "bound", "2e^δ", "β/log n", "γ_c",
              "‖∂w/∂z‖₂"]  # fmt: skip
    rows = []
    for heads in found:
        points = _looked(group, heads.series)
        curves, n = points[-1].curves, heads.keys[-1]
        jacobians = [
            (point.curves["head_jacobian"], keys)
            for point, keys in zip(points, heads.keys, strict=True)
            if "head_jacobian" in point.curves
        ]
        for name, i in zip(heads.names, heads.indices, strict=True):
            if "head_bound" not in curves:
                continue
            spread, bound = curves["head_range"][i], curves["head_bound"][i]
            cells = [f"{bound:.3g}", f"{half_length(spread):.3g}"]
            cells += [f"{curves['head_strength'][i]:.3g}"]
            cells += [f"{critical_gain(curves['head_alignment'][i]):.3g}"]
            cells += [f"{jacobians[-1][0][i]:.3g} at {jacobians[-1][1]}" if jacobians else "—"]
            peak = f"{curves['head_peak'][i]:.3g}"
            start = [group.name(heads.series), name, str(n), peak, f"{spread:.3g}"]
            rows.append([*start, *cells])
    note = (
        "Means over rows. min(1, e^δ/n) is the most that softmax could give a key with a row's "
        "scores, 2e^δ at the mean δ the n from which it gives no key a half; β/log n, the query's "
        "strength, stands beside the critical gain γ_c = 1/(1 − ρ); the Jacobian is at its longest "
        "n, where the weights are a function of the scores alone"
    )
    title = "Bounds at the longest n"
    return Table(title, header, rows, note + _shown(found))


def _shown(found: Sequence[Heads]) -> str:
    total = max(heads.total for heads in found)
    return f"; the {MOST_HEADS} sharpest of {total} heads" if total > MOST_HEADS else ""


def tables(group: Group, found: Sequence[Heads] | None = None) -> list[Table]:
    """The fits, and the bounds; none where no head was looked at. found: `fitted` of the group."""
    found = fitted(group) if found is None else found
    return [_fit_table(group, found), _bound_table(group, found)] if found else []
