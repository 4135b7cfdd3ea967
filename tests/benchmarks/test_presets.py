"""Presets of `benchmarks attention`: their settings, errors, and the table of published figures."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.__main__ import main
from benchmarks.harness import baselines
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting
from benchmarks.harness.presets import PRESETS
from benchmarks.harness.report import Report, Row
from benchmarks.harness.sparsity import empty_blocks
from benchmarks.harness.timing import Spread
from benchmarks.suites import attention

# ---- settings -----------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that prepares the command as on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def prepare(*words: str) -> tuple[argparse.Namespace, list[Case], list[Setting]]:
        parser = argparse.ArgumentParser()
        attention.add_parser(parser.add_subparsers())
        args = parser.parse_args(["attention", "--threads", "1", *words])
        cases = attention.prepare(args)
        return args, cases, [setting for setting, _ in attention.groups(args, cases, {})]

    return prepare


@pytest.mark.parametrize(
    ("name", "specs", "directions", "lengths", "masks", "inputs", "heads"),
    [
        ("flash-sigmoid", ["softmax", "sigmoid", "sigmoid(bias=0)"], ["forward", "backward"],
         (64, 65536), {True, False}, {"iid"}, 12),
        ("adasplash", ["softmax", "entmax"], ["both"],
         (1024, 65536), {True, False}, {"iid", "block-sparse"}, 16),
        ("adasplash-2", ["softmax", "entmax"], ["both"],
         (4096, 131072), {True}, {"iid", "block-sparse"}, 16),
    ],
)  # fmt: skip
def test_presets_have_the_settings_of_the_papers(
    prepared: Any, name: str, specs: list[str], directions: list[str], lengths: tuple[int, int],
    masks: set[bool], inputs: set[str], heads: int,
) -> None:  # fmt: skip
    args, cases, settings = prepared("--preset", name)
    assert [case.spec for case in cases] == specs
    assert args.direction == directions
    assert args.device == "cuda"
    assert args.backend == "flash"
    assert args.baselines[0] == "flash"
    shortest, longest = lengths
    wanted = [2**i for i in range(shortest.bit_length() - 1, longest.bit_length())]
    assert sorted({s.length for s in settings}) == wanted
    assert len(settings) == len(wanted) * len(masks) * len(inputs)
    assert {s.causal for s in settings} == masks
    assert {s.inputs for s in settings} == inputs
    assert {(s.batch, s.heads, s.head_dim, s.dtype) for s in settings} == {
        (8, heads, 64, "bfloat16")
    }


def test_scores_of_adasplash_vary_as_with_queries_of_variance_6() -> None:
    setting = Setting(1024, heads=1, input_scale=PRESETS["adasplash"].options["input_scale"])
    i = Inputs.make(setting)
    scores = i.q @ i.k.mT * setting.head_dim**-0.5
    assert scores.var().item() == pytest.approx(6.0, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_figures_belong_to_measured_settings(prepared: Any, name: str) -> None:
    args, _, settings = prepared("--preset", name)
    rows = [
        Row("attention", "x", SOFTMAX, "variant", direction, setting)
        for direction in args.direction
        for setting in settings
    ]
    for figure in PRESETS[name].figures:
        assert any(figure.matches(row) for row in rows)
        assert 0 < figure.ratio < 3


def test_options_change_a_preset(prepared: Any) -> None:
    words = ("--lengths", "512", "--batch", "2", "--variants", "sigmoid", "--mask", "full")
    args, cases, settings = prepared("--preset", "flash-sigmoid", *words, "--dtype", "float16")
    assert [case.spec for case in cases] == ["sigmoid"]
    assert settings == [
        Setting(512, batch=2, heads=12, dtype="float16", causal=False, device="cuda")
    ]
    assert args.direction == ["forward", "backward"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adasplash"], "--preset adasplash requires a CUDA device, but torch sees none"),
        (["adasplash", "--device", "cuda"], "--preset adasplash requires a CUDA device"),
        (["adasplash", "--device", "cpu"], "--preset adasplash requires --device cuda, got cpu"),
    ],
)
def test_preset_without_a_gpu_is_a_one_line_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["attention", "--preset", *words]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


# ---- the table of published figures -------------------------------------------------------------


def row(name: str, direction: str, setting: Setting, ratio: float | None, **figures: float) -> Row:
    """A fake row, ``ratio`` times as slow as FlashAttention-2."""
    fake = Row("attention", name, Case.parse(name.split(": ")[-1], 64), "variant", direction,
               setting, figures=figures)  # fmt: skip
    if ratio is not None:
        fake.ratios = {"sdpa flash": Spread(ratio, ratio, ratio, 10)}
    return fake


def test_table_compares_published_means_with_means_over_lengths() -> None:
    full = Setting(1024, causal=False)
    rows = [
        row("sigmoid", "forward", full, 0.9),
        row("sigmoid", "forward", replace(full, length=2048), 0.8),
        row("sigmoid", "backward", full, None),
        row("sigmoid", "forward", replace(full, causal=True), 1.25),
    ]
    table = PRESETS["flash-sigmoid"].table(rows, "Some GPU")
    assert table.header == [
        "direction", "mask", "inputs", "N", "published, H100", "sigmoid, here",
    ]  # fmt: skip
    assert table.rows == [
        ["forward", "full", "iid", "mean", "0.826", "0.85 (mean of 2 lengths)"],
        ["forward", "causal", "iid", "mean", "0.812", "1.25 (mean of 1 length)"],
        ["backward", "full", "iid", "mean", "0.973", "not measured"],
        ["backward", "causal", "iid", "mean", "0.938", "not measured"],
    ]
    assert "Published: kernel times against FlashAttention-2 2.5.6" in table.note
    assert "Could not be verified: batch" in table.note
    assert table.note.endswith("Here: Some GPU, time / sdpa flash.")


def test_table_states_block_sparsity_and_the_packages_ratio() -> None:
    iid = Setting(4096, dtype="bfloat16")
    sparse = replace(iid, block_sparse=True)
    rows = [
        row("entmax", "both", iid, 1.1, empty_blocks=0.02),
        row("adasplash: entmax", "both", iid, 1.3, empty_blocks=0.02),
        row("entmax", "both", sparse, 0.4, empty_blocks=0.91),
        row("entmax", "both", replace(iid, causal=False), 9.0),
    ]
    table = PRESETS["adasplash-2"].table(rows, "Some GPU")
    assert table.header[4:] == [
        "published, GPU not verified", "entmax, here", "adasplash: entmax, here",
        "empty blocks, published", "empty blocks, here",
    ]  # fmt: skip
    assert table.rows[:3] == [
        ["both", "causal", "iid", "4096", "1.07", "1.1", "1.3", "51%", "2%"],
        ["both", "causal", "block-sparse", "4096", "1.07", "0.4", "not measured", "51%", "91%"],
        ["both", "causal", "not given", "8192", "1", "not measured", "not measured", "58%", ""],
    ]


def test_figures_on_random_inputs_are_not_compared_with_block_sparse_ones() -> None:
    setting = Setting(1024, causal=False, block_sparse=True)
    table = PRESETS["adasplash"].table([row("entmax", "both", setting, 0.5)], None)
    assert table.rows[0] == ["both", "not given", "iid", "1024", "2.6", "not measured"]


def test_command_shows_published_figures_after_its_rows(
    prepared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs a preset on a CPU with small inputs."""
    files = [tmp_path / "out.json", tmp_path / "out.md"]
    args, cases, _ = prepared(
        "--preset", "adasplash", "--lengths", "1024", "--batch", "1", "--heads", "1", "--mask",
        "full", "--baselines", "flash", "--dtype", "float32", "--direction", "both", "--repeats",
        "2", "--min-seconds", "0.001", "--no-memory", "--json", str(files[0]), "--markdown",
        str(files[1]),
    )  # fmt: skip
    args.device, args.backend = "cpu", "tiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        report = Report.of(args)
    attention.measure(args, cases, report)
    assert report.finish() == 0
    document = json.loads(files[0].read_text())
    (table,) = document["tables"]
    line = dict(zip(table["header"], table["rows"][0], strict=True))
    assert (line["published, H100 80GB"], line["mask"], line["inputs"]) == ("2.6", "full", "iid")
    assert float(line["entmax, here"]) > 0
    shares = [r["figures"]["empty_blocks"] for r in document["rows"] if r["name"] == "entmax"]
    assert shares[1] > 0.8 > 0.5 > shares[0]  # block-sparse, iid
    assert line["empty blocks, here"] == f"{shares[0]:.0%}"
    for shown in (capsys.readouterr().out, files[1].read_text()):
        assert "AdaSplash (arXiv:2502.12082): time / FlashAttention-2" in shown
        assert "Here: no GPU, time / sdpa flash." in shown
        assert "| empty blocks |" in shown or "  empty blocks  " in shown


# ---- block sparsity and baselines ---------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [40, 1000])
def test_empty_blocks_are_those_of_the_weight_matrix(causal: bool, length: int) -> None:
    setting = Setting(length, heads=2, batch=2, causal=causal, block_sparse=True)
    i = Inputs.make(setting, gradients=True)
    w = attnzoo.attention_weights(i.q, i.k, i.v, "entmax", is_causal=causal)[0, :1]
    rows = max(1, length // 64)
    nonzero = F.max_pool2d(w, 64, ceil_mode=True)[0, :rows] > 0
    visible = torch.ones_like(nonzero).tril() if causal else torch.ones_like(nonzero)
    wanted = (visible & ~nonzero).sum() / visible.sum()
    assert empty_blocks(Case("entmax", "entmax"), i) == pytest.approx(wanted.item(), abs=1e-6)


def test_flash_sigmoid_gets_its_layout_and_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sigmoid_bias: float
    ) -> Tensor:
        views = (x.transpose(1, 2) for x in (q, k, v))
        out = attnzoo.attention(*views, "sigmoid", is_causal=causal, bias=sigmoid_bias)
        return out.transpose(1, 2)

    package = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_sigmoid", package)
    setting = Setting(40, heads=2, head_dim=8)
    i = Inputs.make(setting)
    out = baselines.flash_sigmoid(setting, -2)(i.q, i.k, i.v)
    exact = attnzoo.attention(i.q, i.k, i.v, "sigmoid", is_causal=True, bias=-2.0)
    torch.testing.assert_close(out, exact)


def test_versions_of_adasplash_get_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ("adasplash", "adasplash_v1", "adasplash_no_block_mask")
    package = {name: lambda *_, name=name, **options: (name, options) for name in functions}
    monkeypatch.setitem(sys.modules, "adasplash", SimpleNamespace(**package))
    monkeypatch.setattr(baselines, "installed", lambda name: name == "adasplash")
    makers = baselines.of_variant(Case("entmax", "entmax"), Setting(64), baselines.NAMES)
    called = {name: make()(None, None, None) for name, make in makers.items()}
    options = {"alpha": 1.5, "is_causal": True}
    assert called == {
        "adasplash: entmax": ("adasplash", options),
        "adasplash-v1: entmax": ("adasplash_v1", options | {"niter": 3}),
        "adasplash-dense: entmax": ("adasplash_no_block_mask", options | {"niter": 3}),
    }


@pytest.mark.parametrize("causal", [True, False])
def test_bisection_computes_entmax(causal: bool) -> None:
    setting = Setting(40, heads=2, head_dim=8, causal=causal)
    i = Inputs.make(setting)
    makers = baselines.of_variant(Case("entmax", "entmax"), setting, ["bisection"])
    assert list(makers) == ["bisection: entmax"]
    out = makers["bisection: entmax"]()(i.q, i.k, i.v)
    exact = attnzoo.attention(i.q, i.k, i.v, "entmax", is_causal=causal)
    torch.testing.assert_close(out, exact, rtol=1e-2, atol=1e-2)
    long = replace(setting, length=8192)
    assert baselines.of_variant(Case("entmax", "entmax"), long, ["bisection"]) == {}
