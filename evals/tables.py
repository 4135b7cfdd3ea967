"""The tables that both the console and the report show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evals.summary import BASELINE, Cost, Point, Summary


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right-aligned."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """The table as aligned lines."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        out = [self.title]
        for line in lines:
            first = line[0].ljust(widths[0])
            rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            out.append("  ".join([first, *rest]).rstrip())
        return "\n".join(out)


@dataclass(frozen=True)
class Published:
    """A published table to print beside ours: accuracy in % by variant and length."""

    title: str
    lengths: tuple[int, ...]
    second_hand: tuple[int, ...]
    rows: Mapping[str, Sequence[float]]


def _by_length(
    summary: Summary, title: str, cell: Callable[[Point], str], skip: tuple[str, ...] = ()
) -> Table:
    header = ["n", *(str(length) for length in summary.study.lengths)]
    rows = [
        [variant, *(cell(point) for point in summary.of(variant))]
        for variant in summary.variants
        if variant not in skip
    ]
    return Table(title, header, rows)


def _metric(name: str, factor: float, digits: int) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        failed = "+".join(point.failures)
        if name not in point.metrics:
            return failed or "—"
        return point.metrics[name].text(factor, digits) + ("*" if failed else "")

    return cell


def _difference(point: Point) -> str:
    versus = point.versus_baseline
    return "—" if versus is None else versus.text(100, 1, sign=True)


def accuracy_tables(summary: Summary, chance: float, published: Published | None) -> list[Table]:
    """Accuracy, the published figures beside it, and paired differences to softmax."""
    over = "mean ± standard error over seeds" if summary.study.seeds > 1 else "one seed"
    tables = [
        _by_length(
            summary,
            f"Accuracy, % ({over}; chance {chance:.0%})",
            _metric("accuracy", 100, 1),
        )
    ]
    if published is not None and (beside := _published_table(summary, published)) is not None:
        tables.append(beside)
    if BASELINE in summary.variants and len(summary.variants) > 1:
        title = "Accuracy minus softmax, points (paired by seed)"
        tables.append(_by_length(summary, title, _difference, skip=(BASELINE,)))
    return tables


def cause_tables(summary: Summary) -> list[Table]:
    """The metrics that say why: the scorer, the weights, the decoder."""
    return [
        _by_length(
            summary,
            "Hit rate, %: the largest weight is on the true key (what the scorer allows)",
            _metric("hit_rate", 100, 1),
        ),
        _by_length(
            summary,
            "Oracle accuracy, %: the class with the largest summed weight (what the weights allow)",
            _metric("oracle_accuracy", 100, 1),
        ),
        _by_length(summary, "Weight on the true key", _metric("max_weight", 1, 3)),
    ]


def more_tables(summary: Summary) -> list[Table]:
    """The metrics of sharpness that the report shows below the plots."""
    return [
        _by_length(summary, "Entropy of the weights, H / log n", _metric("entropy", 1, 3)),
        _by_length(summary, "Effective number of keys, 1 / Σ p²", _metric("n_eff", 1, 1)),
        _by_length(summary, "Mass, Σ w", _metric("mass", 1, 3)),
    ]


def _spread(values: list[float]) -> str:
    if not values:
        return "—"
    mean = sum(values) / len(values)
    return (
        f"{mean:.1f} ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else f"{mean:.1f}"
    )


def cost_table(costs: list[Cost]) -> Table:
    """CPU seconds per cell; a swap rests on the training of its first variant."""
    rows = [
        [cost.variant, "shared" if cost.is_swap else _spread(cost.training), _spread(cost.testing)]
        for cost in costs
    ]
    return Table("CPU seconds per cell, mean (range) over seeds", ["", "training", "tests"], rows)


def _published_table(summary: Summary, published: Published) -> Table | None:
    """Ours beside the published figures, where variants and lengths are the same."""
    lengths = [n for n in summary.study.lengths if n in published.lengths]
    rows = []
    for variant, figures in published.rows.items():
        points = {point.length: point for point in summary.of(variant)}
        if points:
            ours = [_metric("accuracy", 100, 1)(points[n]) for n in lengths]
            theirs = [
                f"{figures[published.lengths.index(n)]:.1f}{'?' * (n in published.second_hand)}"
                for n in lengths
            ]
            rows += [[f"{variant}, here", *ours], [f"{variant}, paper", *theirs]]
    if not rows or not lengths:
        return None
    return Table(published.title, ["n", *map(str, lengths)], rows)
