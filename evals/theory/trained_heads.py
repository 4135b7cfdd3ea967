"""Compares trained heads with theory: with laws and bounds for attention weights.

Laws. The largest weight of a head at each n is a mean over rows and sequences. It is compared with
the largest weight of the same variant, with the head's learned parameters, on ideal scores with one
free factor, κ or Δ:

    shrinking gap   z_j = κ u_j, u_j uniform   the next key comes closer as n grows, as in a search
                                               for the largest of n values
    fixed gap       z = Δ, 0 … 0               one key stands out by the same Δ at any n, as in a
                                               search for one marked key

The factor is fitted by least squares of log weight. An error of ×1.08 means that the law misses the
weights by 8 %, root mean square. The law is computed from the variant, without a closed form.
For a shrinking gap it is the mean over sixteen draws of u. The grid (j + ½)/n of `closed_forms`
would change the weight by about 10 %. ALiBi changes the measured weights, but the laws do not
include it. For n ≫ κ and n ≫ e^Δ softmax falls as 1/n under both laws, so such lengths cannot tell
them apart.

Bounds. With a score range δ = max z − min z, softmax gives no key more than e^δ/n. Beyond
n = 2e^δ no key gets half of the weight. The bound is computed for each row, so that its mean bounds
the mean weight.

Critical gain. See `critical_gain`.
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
from evals.measures.sparsity import TITLES
from evals.results.summary import Group, Point, Series
from evals.theory.fits import GAPS, Fit, fit, log_law

MOST_HEADS = 8
UNKNOWN = VariantCall("unknown")  # stands for the variant of a plugin that is not loaded
SAME = 0.005, 0.05  # absolute and relative differences below which two errors count as equal


# ----------------------------------------------------------------------------------- bounds


def half_length(spread: float) -> float:
    """n = 2 e^δ for a score range δ. For larger n, softmax gives no key half of the weight."""
    return 2 * _exp(spread)


def critical_gain(alignment: float) -> float:
    """γ_c = 1 / (1 − ρ); infinite for ρ ≥ 1.

    The theory is about softmax of a_ij = β_n ⟨y_i, y_j⟩ with normalized tokens y and
    β_n = γ log n. It assumes that all pairs of tokens have about the same inner product ρ (nearly a
    simplex), that n → ∞, and that the dimension is high. Then γ < γ_c pulls all tokens together,
    γ > γ_c leaves each token unchanged, and near γ_c attention is sparse. The reason: a token's own
    score stands out from n others if and only if β_n (1 − ρ) > log n.

    The measurement here is only analogous. q and k are different projections. ρ is the mean cosine
    between the keys of different tokens, and these cosines may vary. β = scale · |q| · mean |k| is
    the score of a key in the direction of the query, before the gain of the variant.

    References:
        Chen, Lin, Polyanskiy, Rigollet 2025, "Critical attention scaling in long-context
        transformers", arXiv:2510.05554.
    """
    return math.inf if alignment >= 1 else 1 / (1 - alignment)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


# ------------------------------------------------------------------------- heads of a group


@dataclass(frozen=True)
class Heads:
    """The sharpest heads of one series, the sharpest first, with the laws fitted to them.

    Attributes:
        series: the variant with its position encoding.
        call: the variant at inference.
        names: (H,), such as "1.2" for layer 1, head 2.
        indices: (H,), the indices of these heads among all heads, counted layer by layer.
        total: the number of all heads.
        keys: (L,), the number of keys n at each length.
        peaks: (L, S, H), the largest weights of S seeds; NaN where a seed has none.
        learned: parameters that differ between heads, (S, H), by name: learned ones, unless the
            variant is substituted at inference, and given values per head.
        fits: one per gap; empty if there is none.
        why: the reason why there is no fit.
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
        """The largest weight of a head at each length, a mean over seeds."""
        return self.peaks[:, :, index].nanmean(-1).tolist()

    def closer(self, index: int) -> Fit | None:
        """The fit with the smaller error; None if there is no fit, or if the weights do not depend
        on the fitted number."""
        errors = [
            (self.error(law_fit, index), law_fit)
            for law_fit in self.fits
            if not self.any_fits(law_fit, index)
        ]
        errors = [pair for pair in errors if math.isfinite(pair[0])]
        return min(errors, key=lambda pair: pair[0])[1] if errors else None

    def entries(self, index: int) -> Tensor:
        """The indices (S,) of one head, one per seed, among the S · H entries of a `Fit`."""
        seeds, heads = self.peaks.shape[1:]
        return torch.arange(seeds) * heads + index

    def error(self, law_fit: Fit, index: int) -> float:
        """The RMS error of log weight of one head, a mean over the seeds with a fit."""
        return law_fit.errors[self.entries(index)].nanmean().item()

    def any_fits(self, law_fit: Fit, index: int) -> bool:
        """True if, in any seed, all κ or Δ fit equally well: the law does not depend on κ or Δ."""
        entries = self.entries(index)
        return bool((law_fit.below[entries] & law_fit.above[entries]).any())

    def curve(self, law_fit: Fit, index: int, keys: Sequence[int]) -> list[float]:
        """The largest weights (L,) that a head's fitted law predicts for L numbers of keys.

        Each one is the geometric mean over seeds.
        """
        entries = self.entries(index)
        entries = entries[law_fit.sizes[entries].isfinite()]
        learned = {name: values.flatten()[entries] for name, values in self.learned.items()}
        return [
            log_law(law_fit.gap.scores(n), self.call, law_fit.sizes[entries][None], learned)
            .mean()
            .exp()
            .item()
            for n in keys
        ]


def head_names(total: int, per_layer: int) -> list[str]:
    """The names of all heads: "1", "2" … in one layer, "layer.head" in several."""
    if per_layer >= total or total % per_layer:
        return [str(i + 1) for i in range(total)]
    return [f"{i // per_layer + 1}.{i % per_layer + 1}" for i in range(total)]


def _measured(group: Group, series: Series) -> list[Point]:
    """The points of a series that have measurements of heads, by length."""
    return [point for point in group.of(series) if point.curves.get("head_peak")]


def heads_of(group: Group, series: Series) -> Heads | None:
    """The sharpest heads of a series with their fits; None if no heads were measured."""
    points = _measured(group, series)
    if not points:
        return None
    last = points[-1].curves["head_peak"]
    indices = sorted(range(len(last)), key=lambda i: -last[i])[:MOST_HEADS]
    seeds = {seed: i for i, seed in enumerate(group.seeds)}
    peaks = torch.full((len(points), len(seeds), len(indices)), math.nan, dtype=torch.float64)
    try:
        spec = parse_spec(series.variant, wrappers=True)
        attnzoo.get_variant(spec.test.name)
    except ValueError as error:
        spec, why = Spec(UNKNOWN, UNKNOWN), f"no law: {error}"
    else:
        why = ""
    learned: dict[str, Tensor] = {}
    for index, point in enumerate(points):
        for row in point.rows:
            if row["status"] != "ok" or "head_peak" not in row["curves"]:
                continue
            seed = seeds[row["seed"]]
            peaks[index, seed] = torch.tensor(row["curves"]["head_peak"]).double()[indices]
            of_heads = {n: x for n, x in row["learned"].items() if not n.startswith("output ")}
            for name, values in ({} if spec.is_substitution else of_heads).items():
                all_values = torch.tensor(values, dtype=torch.float64)
                initial = all_values[indices].expand(len(seeds), -1).clone()
                learned.setdefault(name, initial)[seed] = all_values[indices]
    for name, value in spec.test.params.items():
        if isinstance(value, Tensor):  # one value per head of a layer
            all_heads = value.double().repeat(len(last) // len(value))
            learned[name] = all_heads[indices].expand(len(seeds), -1).clone()
    names = head_names(len(last), len(last) // group.settings.get("depth", 1))
    keys = [group.task.tokens(point.x) for point in points]
    heads = Heads(series, spec.test, [names[i] for i in indices], indices, len(last), keys, peaks,
                  learned)  # fmt: skip
    if why or len(keys) < 2:
        return replace(heads, why=why or "one length: no fit")
    flat = {name: values.flatten() for name, values in learned.items()}
    try:
        fits = tuple(fit(gap, spec.test, keys, peaks.flatten(1), flat) for gap in GAPS)
    except (ValueError, TypeError, RuntimeError) as error:
        return replace(heads, why=f"no law: {str(error).splitlines()[0]}")
    return replace(heads, fits=fits)


def fitted(group: Group) -> list[Heads]:
    """The `Heads` of each series with measured heads."""
    with lean_arithmetic():
        all_heads = [heads_of(group, series) for series in group.series]
    return [heads for heads in all_heads if heads is not None]


# ------------------------------------------------------------------------------------ tables


def _spread(values: Tensor) -> str:
    """The mean of ``values`` over seeds as text, with the range if there are several seeds."""
    low, high = values.min().item(), values.max().item()
    mean = f"{values.mean().item():.3g}"
    return mean if len(values) == 1 else f"{mean} ({low:.3g} to {high:.3g})"


def _fit_cells(law_fit: Fit, entries: Tensor) -> list[str]:
    """The two table cells of one head's fit: κ or Δ, and the error.

    entries: the indices of this head in ``law_fit``, one per seed.
    """
    entries = entries[law_fit.sizes[entries].isfinite()]
    if not len(entries):
        return ["—", "—"]
    below, above = bool(law_fit.below[entries].any()), bool(law_fit.above[entries].any())
    size = ("≤ " * below or "≥ " * above) + _spread(law_fit.sizes[entries])
    return ["any" if below and above else size, f"×{_spread(law_fit.errors[entries].exp())}"]


def _verdict(heads: Heads, index: int) -> str:
    if heads.why:
        return heads.why
    if any(heads.any_fits(law_fit, index) for law_fit in heads.fits):
        return "weights do not depend on κ or Δ"
    if (best := heads.closer(index)) is None:
        return "fewer than two weights above 0: no fit"
    one, other = (heads.error(law_fit, index) for law_fit in heads.fits)
    tolerance = max(SAME[0], SAME[1] * max(one, other))
    return "either" if abs(one - other) < tolerance else best.gap.name


def _fit_table(group: Group, all_heads: Sequence[Heads]) -> Table:
    header = ["variant", "head", "lengths fitted"]
    header += [text for gap in GAPS for text in (gap.symbol, "error")]
    rows = []
    for heads in all_heads:
        for index, name in enumerate(heads.names):
            entries = heads.entries(index)
            cells = [cell for law_fit in heads.fits for cell in _fit_cells(law_fit, entries)]
            usable = int((heads.peaks[:, :, index] > 0).any(1).sum())
            start = [group.name(heads.series), name, str(usable)]
            rows.append([*start, *(cells or ["—"] * 4), _verdict(heads, index)])
    note = (
        "A law is the largest weight that the head's variant gives on ideal scores. "
        "Shrinking gap: scores κu with u uniform, so the next key comes closer as n grows. "
        "Fixed gap: one key at Δ, the others at 0. κ and Δ are fitted to the measured weights. "
        "Error: RMS error of log weight, as a factor. Closer law: the one with the smaller error."
    )
    if len(group.seeds) > 1:
        note += " Numbers: mean (range) over seeds, each fitted separately."
    title = "Laws fitted to the largest weights of each head"
    return Table(title, [*header, "closer law"], rows, note + _shown(all_heads))


def _bound_table(group: Group, all_heads: Sequence[Heads]) -> Table:
    header = ["variant", "head", "n", "largest weight", "δ", "softmax bound", "2e^δ", "β/log n",
              "γ_c", "‖∂w/∂z‖₂"]  # fmt: skip
    rows = []
    for heads in all_heads:
        points = _measured(group, heads.series)
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
        "Means over rows of the score matrix. δ: largest minus smallest score of a row, before "
        "the gain. Softmax bound: min(1, e^δ/n), an upper bound on the weight that softmax gives "
        "to a key at this δ. 2e^δ: the n beyond which softmax gives no key half of the weight. "
        "β/log n: the strength of the query, to compare with the critical gain γ_c = 1/(1 − ρ), "
        "where ρ is the mean cosine between keys. ‖∂w/∂z‖₂: the Jacobian norm of the weights, at "
        "the longest n with a measurement. Here n is the number of keys."
    )
    title = "Bounds on each head at the longest n"
    return Table(title, header, rows, note + _shown(all_heads))


def _sparsity_table(group: Group, all_heads: Sequence[Heads]) -> Table | None:
    """The measures of sparsity; None if the results are older than these measures."""
    rows = []
    for heads in all_heads:
        curves, n = _measured(group, heads.series)[-1].curves, heads.keys[-1]
        if any(f"head_{measure}" not in curves for measure in TITLES):
            continue
        for name, i in zip(heads.names, heads.indices, strict=True):
            values = [curves[f"head_{measure}"][i] for measure in ("peak", *TITLES)]
            start = [group.name(heads.series), name, str(n)]
            rows.append([*start, *(f"{value:.3g}" for value in values)])
    note = (
        "Means over rows of the score matrix, with p = |w|/Σ|w|. H: Shannon entropy; H₂ = −log Σp² "
        "and H∞ = −log max p: Rényi entropies of order 2 and ∞. 1/Σp²: effective number of keys. "
        "For equal weights, entropies are 1, Hoyer and Gini 0. With all weight on one key, "
        "entropies are 0, Hoyer is 1 and Gini 1 − 1/n."
    )
    header = ["variant", "head", "n", "largest weight", *TITLES.values()]
    title = "Sparsity of each head's weights at the longest n"
    return Table(title, header, rows, note + _shown(all_heads)) if rows else None


def _shown(all_heads: Sequence[Heads]) -> str:
    total = max(heads.total for heads in all_heads)
    return f" Shown: the {MOST_HEADS} sharpest of {total} heads." if total > MOST_HEADS else ""


def tables(group: Group, all_heads: Sequence[Heads] | None = None) -> list[Table]:
    """The tables of fits, bounds and sparsity; empty if no heads were measured.

    all_heads: the result of ``fitted(group)``, if it was computed before.
    """
    all_heads = fitted(group) if all_heads is None else all_heads
    if not all_heads:
        return []
    sparse = _sparsity_table(group, all_heads)
    return [
        _fit_table(group, all_heads),
        _bound_table(group, all_heads),
        *([sparse] if sparse else []),
    ]
