"""Theory compared with measurements: bounds, tables of heads, and ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import attnzoo
from commandline.table import read_tables
from commandline.variants import VariantCall
from evals.measures.sparsity import TITLES
from evals.results.summary import Group, groups
from evals.theory import ranks
from evals.theory import trained_heads as theory
from helpers import evals_rows

SOFTMAX = VariantCall("softmax")
SIZES = (3, 40, 60)  # of mixtures: hidden units, vocabulary, contexts
FIGURES = ("peak", "range", "bound", "alignment", "strength", *TITLES)


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


# ---------------------------------------------------------------------------------- bounds


def test_half_length_and_critical_gain() -> None:
    assert theory.half_length(math.log(20)) == pytest.approx(40)
    assert theory.half_length(1e4) == math.inf
    assert theory.critical_gain(0.75) == 4
    assert theory.critical_gain(-1) == 0.5
    assert theory.critical_gain(1.0) == math.inf


# ---------------------------------------------------------------------------------- tables


def test_table_of_bounds() -> None:
    numbers = {"range": math.log(20), "bound": 20 / 1024, "alignment": 0.75, "strength": 2.5}
    curves = {f"head_{name}": [x] for name, x in numbers.items()}
    short = {**curves, "head_jacobian": [0.256]}
    rows = [row("softmax", 256, **short), row("softmax", 1024, **curves)]
    failed = row("softmax", 1024, 1, status="nan", message="NaN", metrics={}) | {"curves": {}}
    bounds, _ = theory.tables(group_of([*rows, failed]))
    (line,) = bounds.rows
    shown = dict(zip(bounds.header, line, strict=True))
    assert {
        "n": "1024", "softmax bound": f"{20 / 1024:.3g}", "2e^δ": "40", "β/log n": "2.5",
        "γ_c": "4", "‖∂w/∂z‖₂": "0.256 at 256",
    }.items() <= shown.items()  # fmt: skip


def test_only_the_sharpest_eight_heads_are_shown() -> None:
    many = {f"head_{name}": [0.5] * 10 for name in FIGURES}
    peaks = [[0.01 * (h + 1) for h in range(10)], [0.001 * (h + 1) for h in range(10)]]
    settings = evals_rows.SETTINGS | {"depth": 2}
    rows = [
        row("softmax", n, settings=settings, **(many | {"head_peak": peak}))
        for n, peak in zip((16, 64), peaks, strict=True)
    ]
    bounds, sparsity = theory.tables(group_of(rows))
    names = ["2.5", "2.4", "2.3", "2.2", "2.1", "1.5", "1.4", "1.3"]
    for table in (bounds, sparsity):
        assert [line[1] for line in table.rows] == names
        assert table.note.endswith("Shown: the 8 sharpest of 10 heads.")


def test_no_tables_without_measured_heads() -> None:
    group = group_of([row("softmax", 16, curves={}) | {"curves": {}}])
    assert theory.tables(group) == []


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
    assert ranks.print_ranks(tmp_path, tokens=24, sizes=SIZES) == 0
    text = capsys.readouterr().out
    assert "depend on dtype, initialization and tolerance" in text
    for name in attnzoo.list_variants():
        assert name in text
    attention, _, mixtures = read_tables((tmp_path / "ranks.csv").read_text())
    shown = {line[0]: line[1:] for line in [*attention.rows, *mixtures.rows]}
    assert shown["softmax"][:2] == ["17", "17"]
    assert shown["softmaxes, fp64, normal"][0] == "5"
