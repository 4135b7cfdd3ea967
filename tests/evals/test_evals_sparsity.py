"""Measures of sparsity: their definitions, the axioms of Hurley and Rickard, and where they are
shown."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attnzoo
from evals.measures.heads import ROWS, Watch
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
    for index, row in enumerate(weights.tolist()):
        for name, value in definitions(row).items():
            assert measures[name][index].item() == pytest.approx(
                value, abs=TOLERANCE, rel=TOLERANCE
            )


def test_equal_weights_and_a_single_nonzero_weight() -> None:
    equal, one = torch.full((1, 9), 0.3).double(), torch.eye(9).double()[:1]
    names = ["entropy", "renyi_2", "renyi_inf", "n_eff", "l1_l2", "hoyer", "gini"]
    values = [sparsity(equal, 9)[name].item() for name in names]
    assert values == pytest.approx([1, 1, 1, 9, 3, 0, 0], abs=TOLERANCE)
    values = [sparsity(one, 9)[name].item() for name in names]
    assert values == pytest.approx([0, 0, 0, 1, 1, 1, 1 - 1 / 9], abs=TOLERANCE)


def test_only_visible_keys_count() -> None:
    """A causal row equals a row that has only its visible keys."""
    square = drawn(8, 8).tril()
    measures = sparsity(square, torch.arange(1, 9))
    for n in range(2, 9):
        alone = sparsity(square[n - 1 : n, :n], n)
        for name in TITLES:
            assert measures[name][n - 1].item() == pytest.approx(alone[name].item(), abs=TOLERANCE)


def test_rows_with_one_key_with_no_key_and_with_nan() -> None:
    weights = torch.tensor([[0.7, 0.0], [0.0, 0.0], [0.0, 0.0], [math.nan, 0.5]]).double()
    measures = sparsity(weights, torch.tensor([1, 0, 2, 2]))
    for name, values in measures.items():
        assert values[0].item() == (name in ("n_eff", "l1_l2"))
        assert values[1:3].tolist() == [0, 0]
        assert values[3].isnan()


@pytest.mark.parametrize("factor", [1e-300, 0.03, 70.0, 1e300])
def test_scaling_changes_no_measure(factor: float) -> None:
    weights = drawn(20, 30).clamp(max=1e5)
    measures, scaled = sparsity(weights, 30), sparsity(factor * weights, 30)
    for name in TITLES:
        assert torch.allclose(measures[name], scaled[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("measure", TITLES)
def test_robin_hood_transfers_make_weights_less_sparse(measure: str) -> None:
    """The transfer takes a share below half of the difference from a larger weight, and gives it to
    the smallest. renyi_inf sees only the largest weight, so the transfer takes from that one; the
    second largest is below it by more than the transfer."""
    weights = drawn(40, 12).sort(-1, descending=True).values
    weights[:, 0] *= 2
    taken = 0.2 * (weights[:, 0] - weights[:, -1])
    after = weights.clone()
    after[:, 0] -= taken
    after[:, -1] += taken
    assert sparser(sparsity(weights, 12), sparsity(after, 12), measure)


def test_robin_hood_transfers_between_any_two_keys() -> None:
    weights = drawn(40, 12).sort(-1, descending=True).values
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        rich, poor = sorted(torch.randperm(12, generator=draw)[:2].tolist())
        taken = 0.3 * (weights[:, rich] - weights[:, poor])
        after = weights.clone()
        after[:, rich] -= taken
        after[:, poor] += taken
        measures_before, measures_after = sparsity(weights, 12), sparsity(after, 12)
        assert (measures_after["gini"] < measures_before["gini"]).all()
        assert (measures_after["hoyer"] <= measures_before["hoyer"] + TOLERANCE).all()
        assert (measures_after["entropy"] >= measures_before["entropy"] - TOLERANCE).all()


@pytest.mark.parametrize("measure", TITLES)
def test_rising_tide_makes_weights_less_sparse(measure: str) -> None:
    weights = drawn(40, 12)
    risen = weights + 0.1 * weights.amax(-1, keepdim=True)
    assert sparser(sparsity(weights, 12), sparsity(risen, 12), measure)


@pytest.mark.parametrize("measure", TITLES)
def test_only_gini_is_unchanged_by_cloning(measure: str) -> None:
    weights = drawn(20, 15)
    before, after = sparsity(weights, 15), sparsity(weights.repeat(1, 3), 45)
    same = torch.allclose(before[measure], after[measure], rtol=0, atol=TOLERANCE)
    assert same == (measure == "gini")


@pytest.mark.parametrize("measure", TITLES)
def test_keys_of_weight_zero_make_weights_sparser(measure: str) -> None:
    weights = drawn(20, 15)
    before = sparsity(weights, 15)
    after = sparsity(torch.nn.functional.pad(weights, (0, 5)), 20)
    if measure in ("n_eff", "l1_l2"):
        assert torch.allclose(before[measure], after[measure], rtol=TOLERANCE, atol=0)
    else:
        assert sparser(after, before, measure)


def test_measures_of_order_two_are_one_family() -> None:
    measures = sparsity(drawn(20, 25), 25)
    assert torch.allclose(measures["n_eff"], measures["l1_l2"].square(), rtol=TOLERANCE)
    assert torch.allclose(
        measures["n_eff"].log() / math.log(25), measures["renyi_2"], rtol=TOLERANCE
    )
    assert (measures["renyi_inf"] <= measures["renyi_2"] + TOLERANCE).all()
    assert (measures["renyi_2"] <= measures["entropy"] + TOLERANCE).all()


# ------------------------------------------------------------------------- where they are shown


def test_heads_are_measured_on_the_keys_that_each_row_sees() -> None:
    """Equal scores: row i of a causal call sees i keys, with equal weights."""
    attention = attnzoo.nn.Attention("softmax", 1)
    q = torch.zeros(1, 1, 6, 2)
    with Watch(attention, HeadSample(1, 0)) as watch:
        attention(q, q, q, is_causal=True)
    curves = {name: values[:, 0].tolist() for name, values in watch.curves().items()}
    visible = [6 - ROWS + row + 1 for row in range(ROWS)]
    assert curves["head_n_eff"] == pytest.approx(visible)
    assert curves["head_l1_l2"] == pytest.approx([math.sqrt(n) for n in visible])
    for name in ("head_renyi_2", "head_renyi_inf", "head_entropy"):
        assert curves[name] == pytest.approx([1] * ROWS)
    for name in ("head_gini", "head_hoyer"):
        assert curves[name] == pytest.approx([0] * ROWS, abs=TOLERANCE)


def test_table_of_heads_has_every_measure() -> None:
    curves = {f"head_{name}": [0.25, 0.75] for name in ("peak", *TITLES)}
    rows = [
        evals_rows.row("softmax", 1.0, task="needle", length=n, curves=curves) for n in (16, 64)
    ]
    (group,) = groups(rows)
    table = theory.tables(group)[-1]
    assert table.header[3:] == ["largest weight", *TITLES.values()]
    assert table.rows[0] == ["softmax", "2", "64", *["0.75"] * (1 + len(TITLES))]
    assert table.rows[1][3:] == ["0.25"] * (1 + len(TITLES))
    old = [evals_rows.row("softmax", 1.0, task="needle", curves={"head_peak": [0.5]})]
    assert all("Sparsity" not in table.title for table in theory.tables(groups(old)[0]))


def test_retrieval_tasks_report_every_measure_and_old_results_lack_the_new_ones() -> None:
    names = {metric.name for metric in TASKS["needle"].metrics}
    assert set(TITLES) <= names
    (old,) = groups([evals_rows.row("softmax", 1.0, task="needle")])
    assert "gini" not in {metric.name for metric in old.metrics}
    one = evals_rows.row("softmax", 1.0, task="needle")
    one["metrics"]["gini"] = 0.5
    (new,) = groups([one])
    assert "gini" in {metric.name for metric in new.metrics}
