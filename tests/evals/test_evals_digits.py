"""Experiments on digits: data, output layers, strategies, masking, and small studies."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from commandline.variants import VariantCall, parse_spec
from evals.__main__ import main
from evals.tasks import EVALS, EXPERIMENTS
from evals.tasks.digits import data, layers
from evals.tasks.digits.active import (
    CONDITIONS,
    ActiveSettings,
    bounded,
    chosen,
    entropy,
    least_confidence,
    margin,
    next_images,
)
from evals.tasks.digits.continual import (
    ContinualSettings,
    classes_of_tasks,
    forgetting,
    of_classes,
    one_hot,
    replayed,
    step_loss,
)
from evals.tasks.digits.experiment import Classifier

CALLS = [parse_spec(text).train for text in layers.every_layer()]
VARIANTS = [call for call in CALLS if call.name not in layers.FUNCTIONS]


def rows_of(images: data.Images) -> list[tuple[float, ...]]:
    return [tuple(row) for row in images.pixels.tolist()]


# ---- data -------------------------------------------------------------------------------------


def test_training_and_test_images_are_disjoint_and_complete() -> None:
    """No two digits have the same pixels, so images can be told apart by them."""
    training, test = data.split(3)
    assert (len(training.labels), len(test.labels)) == (data.TRAIN, data.TEST)
    every = rows_of(training) + rows_of(test)
    assert sorted(every) == sorted(rows_of(data.digits()[0]))
    assert len(set(every)) == data.TRAIN + data.TEST


def test_a_permutation_has_expected_values() -> None:
    """The order equals one computed from the numbers of numpy's Philox generator."""
    import numpy as np

    raw = np.random.Philox(key=np.array([7, 101], dtype=np.uint64)).random_raw(5).tolist()
    assert data.order(7, "split", 5).tolist() == sorted(range(5), key=raw.__getitem__)


def test_label_noise_redraws_a_share_of_the_labels_uniformly() -> None:
    clean, _ = data.split(0)
    changed = torch.zeros(10)
    for seed in range(20):
        noisy = data.noisy(clean, seed, 0.2)
        assert torch.equal(noisy.pixels, clean.pixels)
        differs = noisy.labels != clean.labels
        assert differs.sum() <= 0.2 * data.TRAIN
        changed += noisy.labels[differs].bincount(minlength=10)
    # Of 20 · 240 drawn labels, a tenth is the true one by chance; the others are uniform.
    drawn = 20 * 0.2 * data.TRAIN
    assert abs(changed.sum() - 0.9 * drawn) < 5 * math.sqrt(drawn * 0.09)
    assert ((changed - 0.09 * drawn).abs() < 5 * math.sqrt(0.09 * drawn)).all()
    assert torch.equal(data.noisy(clean, 0, 0.0).labels, clean.labels)


def test_long_tail_has_exponentially_falling_counts() -> None:
    clean, _ = data.split(0)
    tailed = data.long_tailed(clean, 0, 20.0)
    counts = sorted(tailed.labels.bincount(minlength=10).tolist(), reverse=True)
    most = int(clean.labels.bincount().min())
    assert counts == [round(most * 20 ** (-rank / 9)) for rank in range(10)]
    assert set(rows_of(tailed)) <= set(rows_of(clean))
    orders = {tuple(data.long_tailed(clean, s, 20.0).labels.bincount().tolist()) for s in range(5)}
    assert len(orders) == 5  # which classes are rare depends on the seed
    even = data.long_tailed(clean, 0, 1.0).labels.bincount()
    assert even.tolist() == [most] * 10


# ---- active learning ----------------------------------------------------------------------------

P = torch.tensor(
    [[0.98, 0.01, 0.01], [0.40, 0.35, 0.25], [0.50, 0.50, 0.00], [0.46, 0.27, 0.27]],
    dtype=torch.float64,
)


def test_each_measure_ranks_by_its_definition() -> None:
    """The least confident image is 1, the smallest margin has 2, the largest entropy has 1."""
    assert least_confidence(P).tolist() == pytest.approx([0.02, 0.6, 0.5, 0.54])
    assert margin(P).tolist() == pytest.approx([-0.97, -0.05, 0.0, -0.19])
    expected = [-sum(p * math.log(p) for p in row if p) for row in P.tolist()]
    assert entropy(P).tolist() == pytest.approx(expected)
    assert chosen(least_confidence(P), 2, 0.0).tolist() == [1, 3]
    assert chosen(margin(P), 2, 0.0).tolist() == [2, 1]
    assert chosen(entropy(P), 2, 0.0).tolist() == [1, 3]


def test_trimming_leaves_out_the_most_uncertain_images() -> None:
    uncertainty = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3])
    assert chosen(uncertainty, 2, 0.0).tolist() == [1, 3]
    assert chosen(uncertainty, 2, 0.2).tolist() == [3, 2]
    assert chosen(uncertainty, 2, 0.4).tolist() == [2, 4]
    assert chosen(torch.zeros(4), 2, 0.25).tolist() == [1, 2]  # ties: by index


def test_probability_that_no_class_has_adds_to_the_uncertainty() -> None:
    """The second image has a sink of probability 0.5, the third is certain to be in no class."""
    p = torch.tensor([[0.9, 0.1], [0.4, 0.1], [0.0, 0.0]], dtype=torch.float64)
    assert least_confidence(p).tolist() == pytest.approx([0.1, 0.6, 1.0])
    expected = [-sum(x * math.log(x) for x in row) for row in ((0.9, 0.1), (0.4, 0.1, 0.5))]
    assert entropy(p).tolist() == pytest.approx([*expected, 0.0])
    assert bounded(torch.tensor([[0.9, 0.6], [0.2, 0.1]])).tolist() == [
        pytest.approx([0.6, 0.4]),
        pytest.approx([0.2, 0.1]),
    ]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_next_images_are_different_images_of_the_pool(condition: str) -> None:
    settings = ActiveSettings(width=8, passes=2)
    torch.manual_seed(0)
    model = Classifier(VariantCall("softmax"), settings).eval()
    pool, _ = data.split(0)
    drawn = data.order(0, "pool", data.TRAIN)
    chosen = next_images(model, pool, condition, drawn, settings)
    assert len(set(chosen.tolist())) == settings.add
    assert not model.training
    if condition == "random":
        assert chosen.tolist() == drawn.argsort()[: settings.add].tolist()
    elif condition == "least-confidence":
        lowest = model.probabilities(pool.pixels).amax(dim=-1).sort().values[: settings.add]
        confidence = model.probabilities(pool.pixels[chosen]).amax(dim=-1)
        assert confidence.tolist() == pytest.approx(lowest.tolist(), abs=1e-12)


def test_dropout_makes_the_passes_of_mc_dropout_differ() -> None:
    torch.manual_seed(0)
    model = Classifier(VariantCall("softmax"), ActiveSettings(width=16)).train()
    pixels = data.split(0)[1].pixels[:4]
    assert not torch.equal(model.probabilities(pixels), model.probabilities(pixels))
    model.eval()
    assert torch.equal(model.probabilities(pixels), model.probabilities(pixels))


# ---- continual learning -------------------------------------------------------------------------


def test_the_tasks_have_disjoint_classes() -> None:
    groups = classes_of_tasks(4)
    assert sorted(groups.flatten().tolist()) == list(range(10))
    training, _ = data.split(4)
    parts = [of_classes(training, classes) for classes in groups]
    assert sum(len(part.labels) for part in parts) == data.TRAIN
    assert set(parts[1].labels.tolist()) == set(groups[1].tolist())


@pytest.mark.parametrize("call", VARIANTS, ids=str)
def test_masking_gives_no_gradient_outside_the_task(call: VariantCall) -> None:
    torch.manual_seed(0)
    model = Classifier(call, ContinualSettings(width=16))
    layer = model.output
    assert isinstance(layer, layers.VariantLayer)
    training, _ = data.split(0)
    classes = classes_of_tasks(0)[1]
    current = of_classes(training, classes)
    task, outside = one_hot(classes), ~one_hot(classes)
    index = torch.arange(32)[None]
    step_loss(model, current, None, task, task, -math.inf, index, 0).backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad[outside] == 0).all()
    assert (layer.weight.grad[task] != 0).any()
    layer.weight.grad = None
    step_loss(model, current, None, task, task, None, index, 0).backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad[outside] != 0).any()


def test_a_finite_logit_outside_the_task_gives_no_gradient_there() -> None:
    torch.manual_seed(0)
    model = Classifier(VariantCall("softmax"), ContinualSettings(width=16))
    assert isinstance(model.output, layers.VariantLayer)
    training, _ = data.split(0)
    task = one_hot(classes_of_tasks(0)[1])
    images = of_classes(training, classes_of_tasks(0)[1]).at(torch.arange(32))
    loss = model.masked_loss(images, task, 0.5)
    loss.backward()
    assert model.output.weight.grad is not None
    assert (model.output.weight.grad[~task] == 0).all()
    assert model.output.bias is not None
    z = model.body(images.pixels) @ model.output.weight.T + model.output.bias
    z = z.masked_fill(~task, 0.5)
    expected = torch.nn.functional.cross_entropy(z, images.labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_replayed_images_are_trained_with_all_classes_seen_so_far() -> None:
    torch.manual_seed(0)
    model = Classifier(VariantCall("softmax"), ContinualSettings(width=16))
    training, _ = data.split(0)
    groups = classes_of_tasks(0)
    parts = [of_classes(training, classes) for classes in groups[:2]]
    old = replayed(parts, 0, 20)
    assert [int(torch.isin(old.labels, classes).sum()) for classes in groups[:2]] == [10, 10]
    task, seen = one_hot(groups[1]), one_hot(groups[:2].flatten())
    loss = step_loss(model, parts[1], old, task, seen, -math.inf, torch.arange(32)[None], 0)
    images = parts[1].at(torch.arange(32))
    z, z_old = (model.output.log_prob(model.body(x.pixels)) for x in (images, old))
    losses = [
        -(z.masked_fill(~task, -math.inf).log_softmax(-1).gather(1, images.labels[:, None])),
        -(z_old.masked_fill(~seen, -math.inf).log_softmax(-1).gather(1, old.labels[:, None])),
    ]
    assert loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_forgetting_by_hand() -> None:
    reached = torch.tensor([[0.9, 0.0, 0.0], [0.95, 0.8, 0.0], [0.5, 0.9, 0.7]])
    assert forgetting(reached).tolist() == pytest.approx([0.45, -0.1])


# ---- settings and commands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classification", "--set", "noise=2"], "noise must be in [0, 1], got 2.0"),
        (["classification", "--set", "tail=0.5"], "tail must be finite and >= 1, got 0.5"),
        (["classification", "--set", "dropout=1.0"], "dropout must be in [0, 1), got 1.0"),
        (["active-learning", "--set", "trim=0.6"], "trim must be in [0, 0.5], got 0.6"),
        (["active-learning", "--set", "rounds=99"], "start + rounds · add must be <= 600"),
        (["continual", "--set", "buffer=4"], "buffer must be from 5 to 400, got 4"),
        (["continual", "--conditions", "mask"], "--conditions of continual must be plain, "),
        (["classification", "--preset", "paper"], "classification has no preset 'paper'"),
        (["classification", "--variants", "softmax->entmax"], "must be output layers, got"),
        (["classification", "--variants", "cosformer"], "must not depend on positions"),
        (["classification", "--variants", "softmx"], "output layer must be one of"),
    ],
)
def test_wrong_options_give_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_without_scikit_learn_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["classification", "--preset", "smoke"]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


def lines(out: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (out / task / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("task", EXPERIMENTS)
def test_the_smoke_preset_runs_end_to_end(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [task, "--preset", "smoke", "--workers", "0", "--out", str(tmp_path)]
    assert main(run) == 0
    rows = lines(tmp_path, task)
    assert {row["status"] for row in rows} == {"ok"}
    assert EXPERIMENTS[task].score.title in capsys.readouterr().out
    assert EXPERIMENTS[task].about in (tmp_path / task / "report.html").read_text()
    summary = (tmp_path / task / "summary.csv").read_text()
    assert len(summary.splitlines()) == 1 + len(rows)
    assert main(run) == 0  # nothing is left to do
    assert len(lines(tmp_path, task)) == len(rows)
    assert (tmp_path / task / "summary.csv").read_text() == summary


@pytest.mark.slow
def test_workers_give_the_same_summary(tmp_path: Path) -> None:
    run = ["active-learning", "--preset", "smoke", "--seeds", "2"]
    for workers in ("0", "2"):
        assert main([*run, "--workers", workers, "--out", str(tmp_path / workers)]) == 0
    name = "active-learning/summary.csv"
    assert (tmp_path / "0" / name).read_text() == (tmp_path / "2" / name).read_text()


SMALL = ["classification", "--preset", "smoke", "--steps", "2", "--workers", "0"]


def test_a_study_is_deterministic_and_resumes(tmp_path: Path) -> None:
    once, in_parts = tmp_path / "whole", tmp_path / "parts"
    some = [*SMALL, "--variants", "softmax,sink"]
    assert main([*some, "--out", str(once)]) == 0
    assert main([*some, "--conditions", "clean", "--out", str(in_parts)]) == 0
    assert len(lines(in_parts, "classification")) == 2
    assert main([*some, "--out", str(in_parts)]) == 0
    name = "classification/summary.csv"
    assert (once / name).read_text() == (in_parts / name).read_text()
    keys = [row["key"] for row in lines(in_parts, "classification")]
    assert len(keys) == len(set(keys)) == 6


def test_a_diverging_layer_gives_rows_with_status_nan(tmp_path: Path) -> None:
    run = [*SMALL, "--variants", "softmax", "--set", "learning_rate=1e38", "--steps", "30"]
    assert main([*run, "--out", str(tmp_path)]) == 1
    rows = lines(tmp_path, "classification")
    assert [row["status"] for row in rows] == ["nan"] * 3
    assert all("finite" in row["message"] or "nan" in row["message"] for row in rows)


@pytest.mark.usefixtures("no_pictures")
def test_command_all_runs_tasks_and_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an experiment does not have applies to the tasks only, with a line that says so."""
    names = ("copy", "continual")
    monkeypatch.setattr("evals.__main__.EVALS", {name: EVALS[name] for name in names})
    line = ["all", "--preset", "smoke", "--steps", "1", "--lengths", "16", "--workers", "0"]
    line += ["--variants", "softmax,softmax->log_n,forgetting", "--out", str(tmp_path)]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "--lengths applies to the tasks only" in printed
    assert "left out: softmax->log_n under every condition: --variants of continual" in printed
    assert "left out: forgetting under every condition: output layer forgetting" in printed
    stored = {name: (tmp_path / name / "rows.jsonl").read_text() for name in names}
    assert stored["copy"].count('"variant": "softmax->log_n') == 1
    variants = {json.loads(text)["variant"] for text in stored["continual"].splitlines()}
    assert variants == {"softmax"}
    assert (tmp_path / "report.html").exists()
