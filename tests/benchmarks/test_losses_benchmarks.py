"""The command python -m benchmarks losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnzoo
from benchmarks.__main__ import main
from benchmarks.harness import baselines, output_layers
from benchmarks.harness.cases import SOFTMAX, Case
from benchmarks.harness.output_layers import (
    MOMENT_LOSSES,
    OutputSetting,
    by_formula,
    check_loss,
    formula_of,
    loss_of,
    output_inputs,
)
from benchmarks.harness.report import Row
from benchmarks.harness.timing import Spread
from benchmarks.suites import losses
from helpers.commands import error_of

TINY = ["losses", "--device", "cpu", "--quick", "--tokens", "32", "--dims", "4", "--classes", "100",
        "--many-classes", "200", "--repeats", "2", "--threads", "1"]  # fmt: skip
SETTING = OutputSetting(32, head_dim=4, classes=100, causal=False)


# ---- the check ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", losses.VARIANTS.split(","))
def test_losses_pass_the_check(spec: str) -> None:
    case = Case.parse(spec, 100)
    check = check_loss(loss_of(case), case.spec, case, SETTING)
    assert check.ok, check.worst
    assert list(check.deviations) == ["loss", "dinput", "dweight"]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_losses_of_16_bit_inputs_pass_the_check(dtype: str) -> None:
    for spec in losses.VARIANTS.split(","):
        case = Case.parse(spec, 100)
        check = check_loss(loss_of(case), case.spec, case, replace(SETTING, dtype=dtype))
        assert check.ok, (spec, check.worst)


@pytest.mark.parametrize("name", MOMENT_LOSSES)
def test_losses_from_moments_pass_the_check(name: str) -> None:
    check = check_loss(MOMENT_LOSSES[name], name, SOFTMAX, SETTING)
    assert check.ok, check.worst


def test_formula_of_softmax_is_cross_entropy() -> None:
    inputs = output_inputs(SETTING)
    results = by_formula(formula_of("softmax", SOFTMAX), inputs, torch.float64)
    logits = inputs.q.detach().double() @ inputs.k.detach().double().T
    expected = torch.nn.functional.cross_entropy(logits, inputs.v)
    torch.testing.assert_close(results["loss"], expected)


@pytest.mark.parametrize("spec", ["sparsemax", "entmax"])
def test_formula_of_sparsemax_and_entmax_agrees_with_the_package_entmax(spec: str) -> None:
    inputs, case = output_inputs(SETTING), Case.parse(spec, 100)
    (make,) = baselines.entmax_loss(case).values()
    package_loss = make()(inputs.q.double(), inputs.k.double(), inputs.v)
    gradients = torch.autograd.grad(package_loss, (inputs.q, inputs.k))
    results = by_formula(formula_of(case.spec, case), inputs, torch.float64)
    for x, expected in zip(results.values(), (package_loss.detach(), *gradients), strict=True):
        torch.testing.assert_close(x.float(), expected.float(), rtol=1e-5, atol=1e-6)


def test_wrong_loss_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = attnzoo.losses.linear_loss

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        return exact(*args, **options) * (1.001 if options["variant"] == "entmax" else 1.0)

    monkeypatch.setattr(attnzoo.losses, "linear_loss", wrong)
    assert main([*TINY, "--variants", "softmax,entmax", "--no-memory"]) == 1
    output = capsys.readouterr()
    assert "WRONG, not timed" in output.out
    assert "therefore not timed: entmax at 32" in output.err


# ---- the command --------------------------------------------------------------------------------


def test_losses_command_measures_all_tables(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    variants = "softmax,entmax,taylor"
    assert main([*TINY, "--variants", variants, "--no-memory", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = document["rows"]
    assert not document["left_out"]
    assert all(row["seconds"]["median"] > 0 and not row["note"] for row in rows)
    tables: dict[tuple[int, int, bool], list[str]] = {}
    for row in rows:
        tables.setdefault((row["classes"], row["length"], row["packages"]), []).append(row["name"])
    torch_rows = list(output_layers.losses_of_torch())
    assert tables == {
        (100, 32, False): [*torch_rows, "softmax", "entmax"],
        (200, 32, False): ["softmax", "taylor", *MOMENT_LOSSES],
        (100, 32, True): ["softmax", "entmax", "linear, package entmax: entmax"],
        (100, 64, False): ["softmax, topk", "topk_probabilities"],
    }
    notes = "\n".join(document["notes"])
    for text in (
        "softmax: ",
        "entmax: ",
        "taylor: ",
        "z_loss: ",
        "spherical_loss: ",
        "topk_probabilities: ",
        "the package entmax",
    ):
        assert text in notes


@pytest.mark.slow
def test_losses_command_measures_memory_in_new_processes(tmp_path: Path) -> None:
    """Losses of torch store all scores at once. Losses of attnzoo store a part of the scores."""
    file = tmp_path / "out.json"
    command = ["losses", "--device", "cpu", "--quick", "--tokens", "2048", "--dims", "16",
        "--classes", "8000", "--repeats", "1", "--variants", "entmax", "--json"]  # fmt: skip
    assert main([*command, str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    shares = {row["name"]: row["figures"].get("of_scores") for row in rows if not row["packages"]}
    assert shares["linear, cross_entropy"] > 1
    assert 0 < shares["entmax"] < 0.25
    assert all(row["peak_bytes"] is not None for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tokens", "32,64", "--dims", "4"), "--dims must list one dimension for each of the 2"),
        (("--variants", "nothing"), "unknown variant 'nothing'"),
        (("--classes", "0"), "--classes: must be an int from 1 to 2147483647, got '0'"),
    ],
)
def test_invalid_options_exit_with_status_2(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "losses", "--device", "cpu", *args)


def test_conclude_compares_with_the_faster_function_of_torch() -> None:
    row = Row("losses", "softmax", SOFTMAX, "variant", "both", SETTING)
    for name, share in zip(output_layers.FUSED, (0.9, 0.4), strict=True):
        row.ratios[name] = Spread(share, share, share, 3)
    (sentence,) = losses.conclude([row], [])
    assert sentence.startswith("softmax: 0.90 × the time of the faster linear_cross_entropy")
