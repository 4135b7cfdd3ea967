"""Measures of sparsity: their definitions, the axioms of Hurley and Rickard, and where they are
shown."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attnzoo
from evals.measures.heads import ROWS, measured_heads
from evals.measures.sparsity import TITLES, sparsity
from evals.results.summary import groups
from evals.task import HeadSample
from evals.tasks import TASKS
from evals.theory import trained_heads as theory
from helpers import evals_rows

# Measures that rise as weights become sparser. The others fall.
RISING = {"gini", "hoyer"}
# Each measure is a sum of n terms, each with a few roundings, so its error is a few n units of the
# rounding error; n is at most 200 here. A difference of a quotient near 1 (hoyer) adds a factor 10.
TOLERANCE = 10 * 10 * 200 * torch.finfo(torch.float64).eps


def drawn(rows: int, n: int, seed: int = 0) -> Tensor:
    """Positive weights (rows, n) whose logarithms are normal, so that some rows are sharp."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 4, rows, dtype=torch.float64)[:, None]
    return (spread * torch.randn(rows, n, dtype=torch.float64, generator=draw)).exp()


def definitions(row: list[float]) -> dict[str, float]:
    """The measures of one row, written out as in the papers, from the weights of its n keys."""
    n, size = len(row), [abs(x) for x in row]
    one, two = math.fsum(size), math.sqrt(math.fsum(x * x for x in size))
    p = [x / one for x in size]
    ascending = sorted(size)
    shares = [c / one * (n - k + 0.5) / n for k, c in enumerate(ascending, 1)]
    return {
        "entropy": -math.fsum(x * math.log(x) for x in p if x > 0) / math.log(n),
        "renyi_2": -math.log(math.fsum(x * x for x in p)) / math.log(n),
        "renyi_inf": -math.log(max(p)) / math.log(n),
        "n_eff": 1 / math.fsum(x * x for x in p),
        "l1_l2": one / two,
        "hoyer": (math.sqrt(n) - one / two) / (math.sqrt(n) - 1),
        "gini": 1 - 2 * math.fsum(shares),
    }


def sparser(after: dict[str, Tensor], before: dict[str, Tensor], measure: str) -> bool:
    """Whether all rows are sparser in ``after``, by more than the rounding error."""
    sign = 1 if measure in RISING else -1
    return bool((sign * (after[measure] - before[measure]) > TOLERANCE).all())


@pytest.mark.parametrize("n", [2, 3, 17, 200])
def test_measures_equal_their_definitions(n: int) -> None:
    weights = drawn(12, n)
    weights[::3, 0] *= -1  # negative weights count with their absolute values
    weights[1::3, 1] = 0
    measures = sparsity(weights, n)
    assert list(measures) == list(TITLES)
    expected = [definitions(row) for row in weights.tolist()]
    for name, values in measures.items():
        by_definition = torch.tensor([row[name] for row in expected], dtype=torch.float64)
        assert torch.allclose(values, by_definition, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("weights", "visible", "values"),
    [  # entropy, renyi_2, renyi_inf, n_eff, l1_l2, hoyer, gini
        ([0.3] * 9, 9, [1, 1, 1, 9, 3, 0, 0]),
        ([1.0, *[0.0] * 8], 9, [0, 0, 0, 1, 1, 1, 1 - 1 / 9]),
        ([0.7, 0.0], 1, [0, 0, 0, 1, 1, 0, 0]),
        ([0.0, 0.0], 0, [0] * 7),
        ([0.0, 0.0], 2, [0] * 7),
        ([math.nan, 0.5], 2, [math.nan] * 7),
    ],
)
def test_measures_by_hand(weights: list[float], visible: int, values: list[float]) -> None:
    measures = sparsity(torch.tensor([weights]).double(), visible)
    assert [measures[name].item() for name in TITLES] == pytest.approx(
        values, abs=TOLERANCE, nan_ok=True
    )


def test_only_visible_keys_count() -> None:
    """A causal row equals a row that has only its visible keys."""
    square = drawn(8, 8).tril()
    measures = sparsity(square, torch.arange(1, 9))
    for n in range(2, 9):
        alone = sparsity(square[n - 1 : n, :n], n)
        for name in TITLES:
            assert measures[name][n - 1].item() == pytest.approx(alone[name].item(), abs=TOLERANCE)


@pytest.mark.parametrize("factor", [1e-300, 0.03, 70.0, 1e300])
def test_scaling_changes_no_measure(factor: float) -> None:
    weights = drawn(20, 30).clamp(max=1e5)
    measures, scaled = sparsity(weights, 30), sparsity(factor * weights, 30)
    for name in TITLES:
        assert torch.allclose(measures[name], scaled[name], rtol=TOLERANCE, atol=TOLERANCE)


def robin_hood(weights: Tensor) -> Tensor:
    """A share below half of the difference goes from the largest weight to the smallest."""
    taken = 0.2 * (weights[:, :1] - weights[:, -1:])
    return torch.cat((weights[:, :1] - taken, weights[:, 1:-1], weights[:, -1:] + taken), 1)


@pytest.mark.parametrize("measure", TITLES)
def test_axioms_of_hurley_and_rickard(measure: str) -> None:
    weights = drawn(40, 12).sort(-1, descending=True).values
    weights[:, 0] *= 2  # so that renyi_inf, which sees the largest weight alone, sees the transfer
    before = sparsity(weights, 12)
    assert sparser(before, sparsity(robin_hood(weights), 12), measure)
    risen = weights + 0.1 * weights.amax(-1, keepdim=True)
    assert sparser(before, sparsity(risen, 12), measure)  # a rising tide
    cloned = sparsity(weights.repeat(1, 3), 36)[measure]
    assert torch.allclose(before[measure], cloned, rtol=0, atol=TOLERANCE) == (measure == "gini")
    padded = sparsity(torch.nn.functional.pad(weights, (0, 5)), 17)  # keys of weight zero
    if measure in ("n_eff", "l1_l2"):
        assert torch.allclose(before[measure], padded[measure], rtol=TOLERANCE, atol=0)
    else:
        assert sparser(padded, before, measure)


# ------------------------------------------------------------------------- where they are shown


def test_heads_are_measured_on_the_keys_that_each_row_sees() -> None:
    """Equal scores: row i of a causal call sees i keys, with equal weights."""
    attention = attnzoo.nn.Attention("softmax", 1)
    q = torch.zeros(1, 1, 6, 2)
    with measured_heads(attention, HeadSample(1, 0)) as curves:
        attention(q, q, q, is_causal=True)
    for row in range(ROWS):
        n = 6 - ROWS + row + 1
        values = [curves[f"head_{name}"][row, 0].item() for name in TITLES]
        assert values == pytest.approx([1, 1, 1, n, math.sqrt(n), 0, 0], abs=TOLERANCE)


def test_table_of_heads_has_every_measure() -> None:
    bounds = ("range", "bound", "alignment", "strength")
    curves = {f"head_{name}": [0.25, 0.75] for name in ("peak", *bounds, *TITLES)}
    rows = [
        evals_rows.row("softmax", 1.0, task="needle", length=n, curves=curves) for n in (16, 64)
    ]
    (group,) = groups(rows)
    table = theory.tables(group)[-1]
    assert table.header[3:] == ["largest weight", *TITLES.values()]
    assert table.rows[0] == ["softmax", "2", "64", *["0.75"] * (1 + len(TITLES))]
    assert table.rows[1][3:] == ["0.25"] * (1 + len(TITLES))


def test_retrieval_tasks_report_every_measure_that_a_result_has() -> None:
    names = {metric.name for metric in TASKS["needle"].metrics}
    assert set(TITLES) <= names
    (old,) = groups([evals_rows.row("softmax", 1.0, task="needle")])
    assert "gini" not in {metric.name for metric in old.metrics}
    one = evals_rows.row("softmax", 1.0, task="needle")
    one["metrics"]["gini"] = 0.5
    (new,) = groups([one])
    assert "gini" in {metric.name for metric in new.metrics}
