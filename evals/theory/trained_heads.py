"""Tables of trained heads: bounds on their largest weights, and the sparsity of their weights.

The notes of the tables explain the bounds. For the critical gain see `critical_gain`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commandline.table import Table
from evals.measures.sparsity import TITLES
from evals.results.summary import Group, Series

MOST_HEADS = 8


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
    """The sharpest heads of one series, the sharpest first.

    Attributes:
        series: the variant with its position encoding.
        names: (H,), such as "1.2" for layer 1, head 2.
        indices: (H,), the indices of these heads among all heads, counted layer by layer.
        total: the number of all heads.
        keys: (L,), the number of keys n at each length.
        curves: (L,), the means over seeds of the measurements of all heads, by name.
    """

    series: Series
    names: list[str]
    indices: list[int]
    total: int
    keys: list[int]
    curves: list[dict[str, list[float]]]


def head_names(total: int, per_layer: int) -> list[str]:
    """The names of all heads: "1", "2" … in one layer, "layer.head" in several."""
    if per_layer >= total or total % per_layer:
        return [str(i + 1) for i in range(total)]
    return [f"{i // per_layer + 1}.{i % per_layer + 1}" for i in range(total)]


def heads_of(group: Group, series: Series) -> Heads | None:
    """The sharpest heads of a series at the longest length; None if no heads were measured."""
    points = [point for point in group.of(series) if point.curves.get("head_peak")]
    if not points:
        return None
    peaks = points[-1].curves["head_peak"]
    indices = sorted(range(len(peaks)), key=lambda i: -peaks[i])[:MOST_HEADS]
    names = head_names(len(peaks), len(peaks) // group.settings.get("depth", 1))
    keys = [group.task.tokens(point.x) for point in points]
    curves = [point.curves for point in points]
    return Heads(series, [names[i] for i in indices], indices, len(peaks), keys, curves)


# ------------------------------------------------------------------------------------ tables


def _bound_cells(heads: Heads, index: int) -> list[str]:
    """The measurements that bound the weights of one head."""
    i, last = heads.indices[index], heads.curves[-1]
    names = ("peak", "range", "bound", "strength", "alignment")
    peak, spread, bound, strength, alignment = (last[f"head_{name}"][i] for name in names)
    numbers = peak, spread, bound, half_length(spread), strength, critical_gain(alignment)
    jacobian = "—"
    for curves, keys in zip(heads.curves, heads.keys, strict=True):
        if "head_jacobian" in curves:
            jacobian = f"{curves['head_jacobian'][i]:.3g} at {keys}"
    return [str(heads.keys[-1]), *(f"{x:.3g}" for x in numbers), jacobian]


def _sparsity_cells(heads: Heads, index: int) -> list[str]:
    """The measures of sparsity of one head."""
    curves, names = heads.curves[-1], [f"head_{measure}" for measure in ("peak", *TITLES)]
    return [str(heads.keys[-1]), *(f"{curves[name][heads.indices[index]]:.3g}" for name in names)]


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


def tables(group: Group) -> list[Table]:
    """The tables of bounds and sparsity; empty if no heads were measured."""
    every = [heads for series in group.series if (heads := heads_of(group, series)) is not None]
    total = max((heads.total for heads in every), default=0)
    shown = f" Shown: the {MOST_HEADS} sharpest of {total} heads." if total > MOST_HEADS else ""
    all_tables = []
    for title, header, cells_of, note in (BOUNDS, SPARSITY) if every else ():
        rows = [
            [group.name(heads.series), name, *cells_of(heads, index)]
            for heads in every
            for index, name in enumerate(heads.names)
        ]
        all_tables.append(Table(title, ["variant", "head", *header], rows, note + shown))
    return all_tables
