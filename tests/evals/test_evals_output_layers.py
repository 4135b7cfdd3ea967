"""Evals with other output layers than softmax: keys of runs, metrics by hand, tables, errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnzoo
from commandline.variants import VariantCall
from evals.__main__ import main
from evals.measures.heads import learned
from evals.options import Options
from evals.plan import plan_study
from evals.reporting.shown import ShownGroup
from evals.reporting.tables import notes
from evals.results.store import read_rows
from evals.results.summary import groups
from evals.results.summary_csv import csv_text, summary_of
from evals.task import HeadSample
from evals.tasks import TASKS
from evals.tasks.families.outputs import EPSILON
from evals.tasks.families.sequence import SequenceTask
from evals.tasks.language_model import frequencies
from helpers.evals_rows import SETTINGS, row

TASK = TASKS["language-model"]
assert isinstance(TASK, SequenceTask)
SMOKE = TASK.presets["smoke"].settings


def keys(**options: Any) -> list[str]:
    study = plan_study(TASK, Options(preset="smoke", variants=["softmax"], **options), {})
    return [key for run in study.runs({}) for key in run.keys]


def small(output: str) -> Any:
    """An untrained model of width 16 with this output layer."""
    torch.manual_seed(0)
    settings = replace(SMOKE, output=output, width=16, heads=2)
    return TASK.build(VariantCall("softmax"), "rope", settings)


def test_keys_contain_the_setting_output_only_if_it_is_not_softmax() -> None:
    assert keys() == keys(output="softmax")
    assert "output" not in SMOKE.identity()
    spellings = keys(output="entmax(alpha=1.5)"), keys(settings={"output": "entmax( alpha = 1.5 )"})
    assert spellings[0] == spellings[1]
    outputs = ("softmax", "entmax(alpha=1.5)", "sparsemax", "mixture", "mixture(mix='contexts')",
               "mixture(variant='ssmax')", "adaptive")  # fmt: skip
    assert len({keys(output=text)[0] for text in outputs}) == len(outputs)
    assert keys(output="mixture") == keys(output="mixture(components=4)")
    assert replace(SMOKE, output="sparsemax").identity()["output"] == "sparsemax"


@pytest.mark.parametrize(
    "output",
    [
        "softmax(softcap=3.0)",
        "entmax",
        "sigmoid",
        "taylor",
        "mixture(components=3)",
        "mixture(mix='contexts', variant='entmax')",
        "adaptive",
    ],
)
def test_metrics_are_those_of_the_layers_probabilities(output: str) -> None:
    model, name = small(output), output.split("(")[0]
    assert (getattr(model.output, "weight", None) is model.embed.weight) == (output != "adaptive")
    with torch.no_grad():
        model.embed.weight.mul_(30)
        batch = TASK.batch(0, "test", 64, 0, 2, replace(SMOKE, output=output))
        states = model.states(batch.tokens)
        metrics = TASK.measure(model, batch, HeadSample(0, 0))(None).metrics
        if name in ("mixture", "adaptive"):
            w = model.output.log_prob(states).exp()
        else:
            z = model.logits(states)
            z = 3 * torch.tanh(z / 3) if "softcap" in output else z
            w = attnzoo.probabilities(z, name, **({"bias": 0.0} if name == "sigmoid" else {}))
        p = w.double() / w.double().sum(-1, keepdim=True)
        answers = batch.answers[..., None]
        missed = (w.gather(-1, answers) == 0).double().flatten()
        if "entmax" in output:
            if name == "entmax":  # an answer with probability 0 costs 19.93 bits
                assert metrics["bits"].max().item() == pytest.approx(19.93, abs=0.01)
            p = (p + EPSILON) / (1 + 256 * EPSILON)
        bits = -torch.log2(p.gather(-1, answers)).flatten()
        assert torch.allclose(metrics["bits"], bits, rtol=1e-3)
        assert torch.equal(metrics["support"], (w > 0).sum(-1).double().flatten())
        assert torch.equal(metrics["missed"], missed)
        assert torch.allclose(metrics["own_loss"].mean(), model.loss(states, batch.answers))
        assert all(bool(values.isfinite().all()) for values in metrics.values())


def test_an_adaptive_output_layer_numbers_bytes_by_frequency() -> None:
    plain, adaptive = (
        TASK.batch(3, "planted", 64, 0, 4, replace(SMOKE, output=output))
        for output in ("softmax", "adaptive")
    )
    counts = frequencies(SMOKE)
    order = sorted(range(256), key=lambda byte: (-int(counts[byte]), byte))
    assert order[0] == ord(" ")
    ranks = {byte: rank for rank, byte in enumerate(order)} | {-1: -1}
    for one, other in ((plain.tokens, adaptive.tokens), (plain.answers, adaptive.answers)):
        assert [[ranks[int(x)] for x in row] for row in one] == other.tolist()


@pytest.mark.parametrize(
    ("output", "least", "most"),
    [
        ("softmax", 17, 17),
        ("mixture(components=3, mix='contexts')", 17, 17),
        ("mixture(components=3)", 18, 256),
        ("adaptive(clusters=2)", 2, 256),
    ],
)
def test_rank_of_log_p(output: str, least: int, most: int) -> None:
    """With 16 features, log P of one softmax has a rank of at most 17."""
    model, settings = small(output), replace(SMOKE, output=output)
    batch = TASK.batch(0, "test", 64, 0, 16, settings)
    with torch.inference_mode():
        metrics = TASK.measure(model, batch, HeadSample(1, 1))(None).metrics
        assert least <= metrics["log_rank"].item() <= most
        few = TASK.batch(0, "test", 64, 0, 8, settings)
        assert "log_rank" not in TASK.measure(model, few, HeadSample(1, 1))(None).metrics
        assert "log_rank" not in TASK.measure(model, batch, HeadSample(0, 0))(None).metrics
    assert model.embed.weight.dtype == torch.float32


def test_learned_parameters_of_an_adaptive_output_layer_are_listed_in_order() -> None:
    model = small("adaptive(clusters=2, variant='ssmax')")
    assert learned(model) == {"output s": pytest.approx([0.168] * 3)}


def test_results_with_and_without_an_output_layer_are_separate_groups() -> None:
    other = {**SETTINGS, "output": "sparsemax"}
    metrics = {"bits": 3.0, "support": 12.0, "missed": 0.01, "own_loss": 0.5}
    rows = [row("softmax", 2.5, task="language-model"),
            row("softmax", None, task="language-model", settings=other, status="ok",
                metrics=metrics, key="other")]  # fmt: skip
    by_output = {group.settings.get("output"): group for group in groups(rows)}
    plain, sparse = by_output[None], by_output["sparsemax"]
    assert (plain.distinction, sparse.distinction) == ("output default", "output sparsemax")
    titles = [table.title for table in ShownGroup(sparse).tables]
    assert "Number of tokens with probability above 0" in titles
    assert not {table.title for table in ShownGroup(plain).tables} & set(titles[-4:-1])
    assert "support" not in csv_text([plain]).splitlines()[0]
    assert "missed" in csv_text([plain, sparse]).splitlines()[0]
    (remark,) = notes(summary_of(sparse))
    assert remark.startswith("output layer: sparsemax; ")
    assert notes(summary_of(sparse), TASK.score)[0] == remark
    assert notes(summary_of(plain)) == []


@pytest.mark.parametrize(
    ("task", "output", "message"),
    [
        ("max-retrieval", "entmax", "--output must not be given for max-retrieval"),
        ("language-model", "topk", "'topk' requires the parameter 'top_k'"),
        ("language-model", "softmax->entmax", "output must be one variant, got 'softmax->entmax'"),
        ("language-model", "mixture(device='meta')", "output must not set device"),
        ("language-model", "adaptive(ignore_index=5)", "output must not set ignore_index"),
        ("language-model", "nosuch", "unknown variant 'nosuch'"),
        ("language-model", "entmax(", "cannot read variant 'entmax('"),
        ("language-model", "adaptive_temperature", "has no loss"),
        ("language-model", "mixture(variant='entmax')", "'entmax' has another loss"),
        ("language-model", "mixture(components=0)", "components must be an int of at least 1"),
        ("language-model", "adaptive(tail_variant='entmax')", "must not have tail_variant"),
        ("mqar", "adaptive", "the task gives no token frequencies"),
    ],
)
def test_an_invalid_output_is_a_one_line_error(
    task: str, output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [task, "--preset", "smoke", "--output", output, "--out", str(tmp_path / "no")]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("output", ["ssmax", "sparsemax", "mixture(components=2)", "adaptive"])
def test_a_run_with_an_output_layer(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["language-model", "--preset", "smoke", "--variants", "softmax", "--steps", "3",
            "--workers", "0", "--output", output, "--out", str(tmp_path), "--lengths"]  # fmt: skip
    assert main([*line, "64,128"]) == 0
    assert f"output layer: {output}; if it gives some tokens" in capsys.readouterr().out
    rows = read_rows([tmp_path])
    assert [r["settings"]["output"] for r in rows] == [output] * 2
    assert list(rows[0].get("learned", ())) == ["output s"] * (output == "ssmax")
    assert all(0 < r["metrics"]["bits"] < 21 and r["metrics"]["support"] <= 256 for r in rows)
    assert all(r["metrics"]["log_rank"] > 1 for r in rows if output != "sparsemax")
    assert main([*line, "64,128,192"]) == 0  # loads the model
    assert "cannot read the model" not in capsys.readouterr().err
    assert len(read_rows([tmp_path])) == 3
