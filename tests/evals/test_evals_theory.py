"""Theory compared with measurements: fits of synthetic heads, bounds, tables and ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from commandline.table import Table, read_tables
from commandline.variants import VariantCall, parse_spec
from evals.reporting.figures import theory_plot
from evals.results.summary import Group, groups
from evals.theory import ranks
from evals.theory import trained_heads as theory
from evals.theory.closed_forms import entmax15_fixed, softmax_fixed
from evals.theory.fits import FIXED, SHRINKING, Gap, fit, log_law
from helpers import evals_rows

KEYS = (16, 64, 256, 1024)
SOFTMAX = VariantCall("softmax")
SIZES = (3, 40, 60)  # of mixtures: hidden units, vocabulary, contexts
FIGURES = ("peak", "range", "bound", "alignment", "strength")


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def row(variant: str, length: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A result row in the format of the evals. Arguments named head_… become its curves."""
    curves = {f"head_{name}": [0.5] for name in FIGURES} | {
        name: values for name, values in more.items() if name.startswith("head_")
    }
    more = {"curves": curves, **{n: x for n, x in more.items() if n not in curves}}
    return evals_rows.row(variant, 1.0, task="needle", seed=seed, length=length, **more)


def group_of(rows: list[dict[str, Any]]) -> Group:
    (group,) = groups(rows)
    return group


# ------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize(
    ("variant", "learned", "law", "gap"),
    [
        ("softmax", {}, softmax_fixed, 3.0),
        ("ssmax", {"s": 0.3}, lambda n, gap: 1 / (1 + (n - 1) * n ** (-0.3 * gap)), 2.5),
        ("sink", {"b": 1.5}, lambda n, gap: 1 / (1 + (n - 1 + math.e**1.5) * math.exp(-gap)), 4.0),
        ("entmax", {}, entmax15_fixed, 1.2),
    ],
)
def test_fit_recovers_a_fixed_gap(variant: str, learned: dict[str, float], law, gap: float):
    peaks = column(*(law(n, gap) for n in KEYS))
    params = {name: torch.tensor([value]).double() for name, value in learned.items()}
    law_fit = fit(FIXED, VariantCall(variant), KEYS, peaks, params)
    assert law_fit.sizes.item() == pytest.approx(gap, rel=1e-3)
    assert law_fit.errors.item() < 1e-3
    assert not law_fit.below.item()
    assert not law_fit.above.item()
    assert fit(SHRINKING, VariantCall(variant), KEYS, peaks, params).errors.item() > 0.02


@pytest.mark.parametrize("variant", ["softmax", "sparsemax", "ssmax(s=0.4)", "topk(top_k=8)"])
def test_fit_recovers_a_shrinking_gap_from_random_scores(variant: str) -> None:
    call = parse_spec(variant).test
    draw = torch.Generator().manual_seed(3)
    peaks = []
    for n in KEYS:
        k = 30 * torch.rand(500, 1, n, 1, generator=draw, dtype=torch.float64)
        q = torch.ones(500, 1, 1, 1, dtype=torch.float64)
        w = attnzoo.attention_weights(q, k, k, call.name, scale=1.0, **call.params)
        peaks.append(w.amax(-1).mean().item())
    law_fit = fit(SHRINKING, call, KEYS, column(*peaks))
    assert law_fit.sizes.item() == pytest.approx(30, rel=0.05)
    assert law_fit.errors.item() < 0.03
    assert fit(FIXED, call, KEYS, column(*peaks)).errors.item() > 1.5 * law_fit.errors.item()


def test_each_head_is_fitted_with_its_learned_parameters() -> None:
    learned = {"s": torch.tensor([0.2, 0.6]).double()}
    sizes = torch.tensor([[12.0, 40.0]]).double()
    call = VariantCall("ssmax")
    peaks = torch.cat([log_law(SHRINKING.scores(n), call, sizes, learned).exp() for n in KEYS])
    law_fit = fit(SHRINKING, call, KEYS, peaks, learned)
    assert law_fit.sizes.tolist() == pytest.approx([12, 40], rel=1e-3)
    exchanged = fit(SHRINKING, call, KEYS, peaks, {"s": learned["s"].flip(0)})
    assert exchanged.sizes.tolist() != pytest.approx([12, 40], rel=0.5)


def test_fit_of_weights_rising_with_n_has_a_large_error() -> None:
    for gap in (FIXED, SHRINKING):
        error = fit(gap, SOFTMAX, KEYS, column(0.01, 0.1, 0.5, 0.9)).errors.item()
        assert error > math.log(3)


def test_fits_leave_out_nan_and_weights_of_zero_or_below() -> None:
    peaks = column(*(softmax_fixed(n, 3.0) for n in KEYS)).expand(-1, 3).clone()
    peaks[1, 0], peaks[0, 1] = 0.0, math.nan
    peaks[1:, 2] = -1.0
    law_fit = fit(FIXED, SOFTMAX, KEYS, peaks.view(len(KEYS), 1, 3))  # one seed, three heads
    assert law_fit.sizes[0].tolist() == pytest.approx([3, 3, math.nan], rel=1e-3, nan_ok=True)
    assert law_fit.errors[0].isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("gap", "call", "weight", "below", "above"),
    [
        (FIXED, VariantCall("sparsemax"), lambda n: 1, False, True),
        (SHRINKING, SOFTMAX, lambda n: 1 / n, True, False),
        (FIXED, VariantCall("cosformer", (("max_length", 1024),)), lambda n: 1, True, True),
    ],
)
def test_fitted_values_at_the_ends_of_the_range_are_marked(
    gap: Gap, call: VariantCall, weight, below: bool, above: bool
) -> None:
    law_fit = fit(gap, call, KEYS, column(*map(weight, KEYS)))
    assert (law_fit.below.item(), law_fit.above.item()) == (below, above)
    if call.name == "sparsemax":
        assert law_fit.sizes.item() == pytest.approx(1.0, rel=0.02)


def test_scores_with_a_shrinking_gap_are_sorted_and_uniform() -> None:
    for n in (1, 5, 4096):
        u = SHRINKING.scores(n)
        assert u.shape == (16, n)
        assert ((u > 0) & (u < 1)).all()
        assert (u.diff(dim=1) < 0).all()
        top = n / (n + 1)  # mean of the maximum of n uniform numbers
        assert 1 - u[:, 0].mean().item() == pytest.approx(1 - top, rel=0.15)


# ---------------------------------------------------------------------------------- bounds


def test_half_length_and_critical_gain() -> None:
    assert theory.half_length(math.log(20)) == pytest.approx(40)
    assert theory.half_length(1e4) == math.inf
    assert theory.critical_gain(0.75) == 4
    assert theory.critical_gain(-1) == 0.5
    assert theory.critical_gain(1.0) == math.inf


# ---------------------------------------------------------------------------------- tables


def rows_of(variant: str, law, seeds: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        row(variant, n, seed, head_peak=[law(n)], head_range=[math.log(20)],
            head_bound=[min(1, 20 / n)],
            head_alignment=[0.75], head_strength=[2.5], **more)
        for n in KEYS for seed in range(seeds)
    ]  # fmt: skip


def cells(table: Table) -> dict[str, dict[str, str]]:
    """The cells by variant (without the mark of untrained ones) and column."""
    return {
        line[0].split(" †")[0]: dict(zip(table.header, line, strict=True)) for line in table.rows
    }


def test_tables_show_fits_and_bounds() -> None:
    # The parameter s of an inference-time substitution is not trained and has its default.
    weights = {
        "softmax": (2, lambda n: softmax_fixed(n, 3.0)),
        "ssmax": (2, lambda n: 1 / (1 + (n - 1) * n ** (-0.3 * 4))),
        "ssmax->ssmax(b=0)": (1, lambda n: 1 / (1 + (n - 1) * n ** (-0.168 * 9))),
    }
    rows = [
        row
        for variant, (seeds, law) in weights.items()
        for row in rows_of(variant, law, seeds, learned={"s": [0.3]} if "s" in variant[1:3] else {})
    ]
    for one in rows:
        if one["length"] <= 256:
            one["curves"]["head_jacobian"] = [one["length"] / 1000]
    fits, bounds = theory.tables(group_of(rows))
    assert "each fitted separately" in fits.note
    shown = {name: (line["Δ"], line["closer law"]) for name, line in cells(fits).items()}
    assert shown == {
        "softmax": ("3 (3 to 3)", "fixed"),
        "ssmax": ("4 (4 to 4)", "fixed"),
        "ssmax->ssmax(b=0)": ("9", "fixed"),
    }
    assert [line[-2] for line in fits.rows] == ["×1 (1 to 1)", "×1 (1 to 1)", "×1"]
    assert {
        "n": "1024", "softmax bound": f"{20 / 1024:.3g}", "2e^δ": "40", "β/log n": "2.5",
        "γ_c": "4", "‖∂w/∂z‖₂": "0.256 at 256",
    }.items() <= cells(bounds)["softmax"].items()  # fmt: skip


def test_only_the_sharpest_eight_heads_are_shown() -> None:
    many = {f"head_{name}": [0.5] * 10 for name in FIGURES}
    peaks = [[0.01 * (h + 1) for h in range(10)], [0.001 * (h + 1) for h in range(10)]]
    settings = evals_rows.SETTINGS | {"depth": 2}
    rows = [
        row("softmax", n, settings=settings, **(many | {"head_peak": peak}))
        for n, peak in zip((16, 64), peaks, strict=True)
    ]
    fits, bounds = theory.tables(group_of(rows))
    assert [line[1] for line in fits.rows] == ["2.5", "2.4", "2.3", "2.2", "2.1", "1.5", "1.4",
                                               "1.3"]  # fmt: skip
    assert len(bounds.rows) == 8
    assert fits.note.endswith("Shown: the 8 sharpest of 10 heads.")


@pytest.mark.parametrize(
    ("variant", "weights", "verdict"),
    [
        ("softmax", {16: 0.5}, "one length: no fit"),
        ("softmax", {16: 0.0, 64: 0.0}, "fewer than two weights above 0: no fit"),
        ("cosformer(max_length=32)", {16: 0.5, 64: 0.5}, "no law: cosformer: max_length=32"),
        ("cosformer(max_length=64)", {16: 0.5, 64: 0.5}, "weights do not depend on κ or Δ"),
        ("softmax", {n: 6 / n for n in (1024, 2048, 4096)}, "either"),  # 1/n under both laws
    ],
)
def test_closer_law_or_the_reason_for_none(
    variant: str, weights: dict[int, float], verdict: str
) -> None:
    group = group_of([row(variant, n, head_peak=[w]) for n, w in weights.items()])
    fits, bounds = theory.tables(group)
    assert fits.rows[0][-1].startswith(verdict)
    assert len(bounds.rows) == 1
    assert (theory_plot(group) is None) == (max(weights.values()) == 0)


def test_no_tables_or_figure_without_measured_heads() -> None:
    group = group_of([row("softmax", 16, curves={}) | {"curves": {}}])
    assert theory.tables(group) == []
    assert theory_plot(group) is None


def test_failed_seeds_are_left_out() -> None:
    rows = rows_of("softmax", lambda n: softmax_fixed(n, 3.0))
    rows += [
        row("softmax", n, 1, status="nan", message="NaN", metrics={}) | {"curves": {}} for n in KEYS
    ]
    fits, _ = theory.tables(group_of(rows))
    assert cells(fits)["softmax"]["Δ"] == "3"


def test_figure_shows_measurements_the_fitted_law_and_the_bound() -> None:
    rows = rows_of("softmax", lambda n: softmax_fixed(n, 3.0)) + rows_of("entmax", lambda n: 0.3)
    figure = theory_plot(group_of(rows))
    assert figure is not None
    marks, law, bound, *others = figure.axes[0].lines
    assert list(marks.get_ydata()) == pytest.approx([softmax_fixed(n, 3.0) for n in KEYS])
    x = [int(n) for n in law.get_xdata()]
    assert set(KEYS) < set(x)
    assert list(law.get_ydata()) == pytest.approx([softmax_fixed(n, 3.0) for n in x], rel=1e-3)
    assert list(bound.get_ydata()) == pytest.approx([1, 20 / 64, 20 / 256, 20 / 1024])
    assert len(others) == 2


# ----------------------------------------------------------------------------------- ranks


def test_ranks_of_known_matrices() -> None:
    assert ranks.rank(torch.diag(torch.tensor([3.0, 2.0, 0.0]))) == 2
    assert ranks.rank(torch.ones(4, 5, dtype=torch.float64)) == 1
    tiny = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))
    assert ranks.rank(tiny) == 2
    assert ranks.rank(tiny.float()) == 1  # fp32 tolerance is > 1e-9
    row, line = torch.rand(2, 6, dtype=torch.float64) + 0.1
    assert ranks.log_rank(row[:, None] * line) == 2  # the log of entry (i, j) is log a_i + log b_j
    assert ranks.log_rank(torch.eye(2)) is None


def test_log_weights_of_softmax_have_rank_d_plus_one() -> None:
    table = ranks.attention_table([SOFTMAX, VariantCall("sparsemax")], tokens=24, width=3)
    assert table.rows[0][1:3] == ["4", "4"]
    assert int(table.rows[0][4]) > 10
    assert table.rows[1][1:3] == ["—", "—"]


def test_rank_table_has_a_line_for_an_unsupported_variant_and_the_reason_in_its_note() -> None:
    call = VariantCall("cosformer", (("max_length", 8),))
    table = ranks.attention_table([call], tokens=24, width=3)
    assert table.rows == [["cosformer(max_length=8)", "—", "—", "—", "—"]]
    reason = table.note.splitlines()[-1]
    assert reason == "cosformer(max_length=8): cosformer: max_length=8 is below the length 24."


def test_log_of_a_softmax_has_rank_h_plus_two_and_without_bias_h_plus_one() -> None:
    """log P = [h, 1, lse] [W, b, −1]ᵀ is a product of matrices with H + 2 columns."""
    h, w, b = (ranks.normals(0)[1](*shape) for shape in ((60, 3), (40, 3), (40,)))
    assert ranks.log_rank((h @ w.T + b).softmax(-1)) == 5
    assert ranks.log_rank((h @ w.T).softmax(-1)) == 4


def test_only_the_rank_of_a_mixture_of_softmaxes_exceeds_the_bound_of_one_softmax() -> None:
    table = ranks.mixture_table(SIZES)
    assert "H + 2 = 5" in table.note
    assert "σ_max · max(rows, columns) · ε" in table.note
    assert len(table.rows) == 8  # without the published ranks, which are for other sizes
    for name, one, *others in table.rows:
        assert int(one) <= 5
        for rank in others:
            assert (int(rank) > 5) == name.startswith("softmaxes")


@pytest.mark.parametrize("kind", ["softmaxes", "contexts"])
def test_rows_of_a_mixture_sum_to_one_and_a_mixture_of_one_is_a_softmax(kind: str) -> None:
    p, of_one, softmax = (
        ranks.mixture(k, "normal", torch.float64, sizes=SIZES, kind=x)
        for k, x in ((4, kind), (1, kind), (1, "softmaxes"))
    )
    assert torch.allclose(p.sum(-1), torch.ones(60, dtype=torch.float64))
    assert torch.equal(of_one, softmax)


def test_only_a_mixture_of_attentions_exceeds_the_bound_of_one_attention() -> None:
    rows = {row[0]: row[1:] for row in ranks.attention_mixture_table(24, 3).rows}
    assert rows["queries, fp64"] == ["4"] * 5
    assert rows["attentions, fp64"][0] == "4"
    assert all(int(rank) > 6 for rank in rows["attentions, fp64"][1:])
    mixed = ranks.attention_mixture(3, "attentions", torch.float64, 24, 3, 0)
    assert torch.allclose(mixed.sum(-1), torch.ones(24).double())


def test_ranks_by_initialization_are_means_over_seeds() -> None:
    scales, seeds, sizes = (1.0, 1.0, 3**0.5), range(2), (3, 20, 30)
    p = ranks.latent_mixture(2, scales, 1, sizes, torch.float64)
    assert torch.allclose(p.sum(-1), torch.ones(30, dtype=torch.float64))
    assert not torch.equal(p, ranks.latent_mixture(2, scales, 0, sizes, torch.float64))
    rows = [row[1:] for row in ranks.scales_table(seeds, sizes).rows]
    assert len(rows) == len(ranks.SCALES)  # without the published ranks
    for scales, (one, *others) in zip(ranks.SCALES, rows, strict=True):
        assert float(one.split()[0]) <= 5
        expected = [ranks.log_rank(ranks.latent_mixture(2, scales, s, sizes)) for s in seeds]
        assert others[0].split()[0] == f"{sum(map(float, expected)) / 2:.0f}"
    (single,) = {row[2] for row in ranks.scales_table([0], sizes).rows[-1:]}
    assert single.isdigit()  # one seed has no interval


def test_published_ranks_are_shown_for_the_published_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "log_rank", lambda matrix: 7)
    monkeypatch.setattr(ranks, "mixture", lambda *args: None)
    shown = {line[0]: line[1:] for line in ranks.mixture_table().rows}
    assert shown["softmaxes, published"] == ["34", "629", "979", "995", "997"]
    assert shown["contexts, published"] == ["34"] * 5


def test_ranks_prints_its_tables_and_writes_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks.main(tmp_path, tokens=24, sizes=SIZES) == 0
    text = capsys.readouterr().out
    assert "depend on dtype, initialization and tolerance" in text
    for name in attnzoo.list_variants():
        assert name in text
    attention, _, mixtures = read_tables((tmp_path / "ranks.csv").read_text())
    shown = {line[0]: line[1:] for line in [*attention.rows, *mixtures.rows]}
    assert shown["softmax"][:2] == ["17", "17"]
    assert shown["softmaxes, fp64, normal"][0] == "5"
