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

The notes of the tables below explain the bounds. For the critical gain see `critical_gain`.
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
from evals.results.summary import Group, Series
from evals.theory.fits import GAPS, Fit, fit, log_law

MOST_HEADS = 8
UNKNOWN = VariantCall("unknown")  # stands for the variant of a plugin that is not loaded
SAME = 0.005, 0.05  # absolute and relative differences below which two errors count as equal


# ----------------------------------------------------------------------------------- bounds


def half_length(spread: float) -> float:
    """n = 2 e^δ for a score range δ. For larger n, softmax gives no key half of the weight."""
    return 2 * math.exp(spread) if spread < 700 else math.inf


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
        curves: (L,), the means over seeds of the measurements of all heads, by name.
        peaks: (L, S, H), the largest weights of S seeds; NaN where a seed has none.
        learned: parameters that differ between heads, (S, H), by name: learned ones, unless the
            variant is substituted at inference, and given values per head.
        fits: one per gap, with results (S, H); empty if there is none.
        why: the reason why there is no fit.
    """

    series: Series
    call: VariantCall
    names: list[str]
    indices: list[int]
    total: int
    keys: list[int]
    curves: list[dict[str, list[float]]]
    peaks: Tensor
    learned: dict[str, Tensor]
    fits: tuple[Fit, ...] = ()
    why: str = ""

    def mean_peaks(self, index: int) -> list[float]:
        """The largest weight of a head at each length, a mean over seeds."""
        return self.peaks[:, :, index].nanmean(-1).tolist()

    def errors(self, index: int) -> list[float]:
        """The RMS errors of log weight of one head, one per fit: means over the seeds with one."""
        return [law_fit.errors[:, index].nanmean().item() for law_fit in self.fits]

    def any_fits(self, index: int) -> list[bool]:
        """For each fit whether, in any seed, all κ or Δ fit equally well: the law does not depend
        on κ or Δ."""
        return [bool((x.below & x.above)[:, index].any()) for x in self.fits]

    def closer(self, index: int) -> Fit | None:
        """The fit with the smaller error; None if there is no fit, or if the weights do not depend
        on the fitted number."""
        candidates = [
            (error, number)
            for number, error in enumerate(self.errors(index))
            if math.isfinite(error) and not self.any_fits(index)[number]
        ]
        return self.fits[min(candidates)[1]] if candidates else None

    def curve(self, law_fit: Fit, index: int, keys: Sequence[int]) -> list[float]:
        """The largest weights (L,) that a head's fitted law predicts for L numbers of keys.

        Each one is the geometric mean over seeds.
        """
        has_fit = law_fit.sizes[:, index].isfinite()
        sizes = law_fit.sizes[has_fit, index][None]
        learned = {name: values[has_fit, index] for name, values in self.learned.items()}
        logs = (log_law(law_fit.gap.scores(n), self.call, sizes, learned) for n in keys)
        return [log.mean().exp().item() for log in logs]


def head_names(total: int, per_layer: int) -> list[str]:
    """The names of all heads: "1", "2" … in one layer, "layer.head" in several."""
    if per_layer >= total or total % per_layer:
        return [str(i + 1) for i in range(total)]
    return [f"{i // per_layer + 1}.{i % per_layer + 1}" for i in range(total)]


def heads_of(group: Group, series: Series) -> Heads | None:
    """The sharpest heads of a series with their fits; None if no heads were measured."""
    points = [point for point in group.of(series) if point.curves.get("head_peak")]
    if not points:
        return None
    last = points[-1].curves["head_peak"]
    indices = sorted(range(len(last)), key=lambda i: -last[i])[:MOST_HEADS]
    spec, why = Spec(UNKNOWN, UNKNOWN), ""
    try:
        named = parse_spec(series.variant, wrappers=True)
        attnzoo.get_variant(named.test.name)
        spec = named
    except ValueError as error:
        why = f"no law: {error}"
    shape = len(group.seeds), len(indices)
    peaks = torch.full((len(points), *shape), math.nan, dtype=torch.float64)
    learned: dict[str, Tensor] = {}
    for index, point in enumerate(points):
        for row in point.rows:
            if row["status"] != "ok" or "head_peak" not in row["curves"]:
                continue
            seed = group.seeds.index(row["seed"])
            peaks[index, seed] = torch.tensor(row["curves"]["head_peak"]).double()[indices]
            for name, values in ({} if spec.is_substitution else row["learned"]).items():
                if not name.startswith("output "):
                    of_heads = torch.tensor(values, dtype=torch.float64)[indices]
                    learned.setdefault(name, of_heads.repeat(shape[0], 1))[seed] = of_heads
    for name, value in spec.test.params.items():
        if isinstance(value, Tensor):  # one value per head of a layer
            all_heads = value.double().repeat(len(last) // len(value))
            learned[name] = all_heads[indices].expand(shape)
    names = head_names(len(last), len(last) // group.settings.get("depth", 1))
    keys = [group.task.tokens(point.x) for point in points]
    heads = Heads(series, spec.test, [names[i] for i in indices], indices, len(last), keys,
                  [point.curves for point in points], peaks, learned)  # fmt: skip
    if why or len(keys) < 2:
        return replace(heads, why=why or "one length: no fit")
    try:
        return replace(heads, fits=tuple(fit(gap, spec.test, keys, peaks, learned) for gap in GAPS))
    except (ValueError, TypeError, RuntimeError) as error:
        return replace(heads, why=f"no law: {str(error).splitlines()[0]}")


def fitted(group: Group) -> list[Heads]:
    """The `Heads` of each series with measured heads."""
    with lean_arithmetic():
        all_heads = [heads_of(group, series) for series in group.series]
    return [heads for heads in all_heads if heads is not None]


# ------------------------------------------------------------------------------------ tables


def _spread(values: Tensor) -> str:
    """The mean of ``values`` over seeds as text, with the range if there are several seeds."""
    mean = f"{values.mean().item():.3g}"
    return mean if len(values) == 1 else f"{mean} ({values.min():.3g} to {values.max():.3g})"


def _fit_cells(heads: Heads, index: int) -> list[str]:
    """The number of lengths fitted, κ or Δ and the error of each law, and the closer law."""
    cells = [str(int((heads.peaks[:, :, index] > 0).any(1).sum()))]
    for law_fit in heads.fits:
        has_fit = law_fit.sizes[:, index].isfinite()
        below, above, sizes, errors = (
            x[has_fit, index] for x in (law_fit.below, law_fit.above, law_fit.sizes, law_fit.errors)
        )
        if not has_fit.any():
            cells += ["—", "—"]
            continue
        sign = "≤ " * bool(below.any()) + "≥ " * bool(above.any())
        size = "any" if sign == "≤ ≥ " else sign + _spread(sizes)
        cells += [size, f"×{_spread(errors.exp())}"]
    return [*cells, *["—"] * 4 * (not heads.fits), _verdict(heads, index)]


def _verdict(heads: Heads, index: int) -> str:
    if heads.why:
        return heads.why
    if any(heads.any_fits(index)):
        return "weights do not depend on κ or Δ"
    if (best := heads.closer(index)) is None:
        return "fewer than two weights above 0: no fit"
    one, other = heads.errors(index)
    return "either" if math.isclose(one, other, rel_tol=SAME[1], abs_tol=SAME[0]) else best.gap.name


def _bound_cells(heads: Heads, index: int) -> list[str]:
    """The measurements that bound the weights of one head; empty if there are none."""
    i, last = heads.indices[index], heads.curves[-1]
    if "head_bound" not in last:
        return []
    names = ("peak", "range", "bound", "strength", "alignment")
    peak, spread, bound, strength, alignment = (last[f"head_{name}"][i] for name in names)
    numbers = peak, spread, bound, half_length(spread), strength, critical_gain(alignment)
    jacobian = "—"
    for curves, keys in zip(heads.curves, heads.keys, strict=True):
        if "head_jacobian" in curves:
            jacobian = f"{curves['head_jacobian'][i]:.3g} at {keys}"
    return [str(heads.keys[-1]), *(f"{x:.3g}" for x in numbers), jacobian]


def _sparsity_cells(heads: Heads, index: int) -> list[str]:
    """The measures of sparsity; empty if the results are older than these measures."""
    curves, names = heads.curves[-1], [f"head_{measure}" for measure in ("peak", *TITLES)]
    if any(name not in curves for name in names):
        return []
    return [str(heads.keys[-1]), *(f"{curves[name][heads.indices[index]]:.3g}" for name in names)]


FITS = (
    "Laws fitted to the largest weights of each head",
    ["lengths fitted", *(x for gap in GAPS for x in (gap.symbol, "error")), "closer law"],
    _fit_cells,
    "A law is the largest weight that the head's variant gives on ideal scores. "
    "Shrinking gap: scores κu with u uniform, so the next key comes closer as n grows. "
    "Fixed gap: one key at Δ, the others at 0. κ and Δ are fitted to the measured weights. "
    "Error: RMS error of log weight, as a factor. Closer law: the one with the smaller error.",
)
BOUNDS = (
    "Bounds on each head at the longest n",
    ["n", "largest weight", "δ", "softmax bound", "2e^δ", "β/log n", "γ_c", "‖∂w/∂z‖₂"],
    _bound_cells,
    "Means over rows of the score matrix. δ: largest minus smallest score of a row, before "
    "the gain. Softmax bound: min(1, e^δ/n), an upper bound on the weight that softmax gives "
    "to a key at this δ. 2e^δ: the n beyond which softmax gives no key half of the weight. "
    "β/log n: the strength of the query, to compare with the critical gain γ_c = 1/(1 − ρ), "
    "where ρ is the mean cosine between keys. ‖∂w/∂z‖₂: the Jacobian norm of the weights, at "
    "the longest n with a measurement. Here n is the number of keys.",
)
SPARSITY = (
    "Sparsity of each head's weights at the longest n",
    ["n", "largest weight", *TITLES.values()],
    _sparsity_cells,
    "Means over rows of the score matrix, with p = |w|/Σ|w|. H: Shannon entropy; H₂ = −log Σp² "
    "and H∞ = −log max p: Rényi entropies of order 2 and ∞. 1/Σp²: effective number of keys. "
    "For equal weights, entropies are 1, Hoyer and Gini 0. With all weight on one key, "
    "entropies are 0, Hoyer is 1 and Gini 1 − 1/n.",
)


def tables(group: Group, all_heads: Sequence[Heads] | None = None) -> list[Table]:
    """The tables of fits, bounds and sparsity; empty if no heads were measured.

    all_heads: the result of ``fitted(group)``, if it was computed before.
    """
    all_heads = fitted(group) if all_heads is None else all_heads
    total = max((heads.total for heads in all_heads), default=0)
    shown = f" Shown: the {MOST_HEADS} sharpest of {total} heads." if total > MOST_HEADS else ""
    seeds = " Numbers: mean (range) over seeds, each fitted separately."
    all_tables = []
    for title, header, cells_of, note in (FITS, BOUNDS, SPARSITY) if all_heads else ():
        rows = [
            [group.name(heads.series), name, *cells]
            for heads in all_heads
            for index, name in enumerate(heads.names)
            if (cells := cells_of(heads, index))
        ]
        note += seeds if cells_of is _fit_cells and len(group.seeds) > 1 else ""
        if rows or cells_of is not _sparsity_cells:
            all_tables.append(Table(title, ["variant", "head", *header], rows, note + shown))
    return all_tables
