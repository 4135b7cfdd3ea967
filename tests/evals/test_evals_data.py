"""The tasks max-retrieval and needle: data, model, metrics, training and evaluation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from commandline.variants import VariantCall, parse_spec
from evals import run as training
from evals.measures.metrics import Tally, weight_metrics
from evals.run import NotFinite, Substitutes, evaluate, fit, one_cycle, train
from evals.task import BatchResult, Task
from evals.tasks import TASKS, max_retrieval, needle
from evals.tasks.draws import lengths
from evals.tasks.families.retrieval import (
    METRICS,
    RetrievalBatch,
    RetrievalModel,
    RetrievalSettings,
    RetrievalTask,
)
from helpers.random_numbers import choice, random_numbers, uniform

TINY = RetrievalSettings(steps=4, batch=8, width=8, test_sequences=40, test_least=20)
TASK = TASKS["max-retrieval"]
RETRIEVAL = [task for task in TASKS.values() if isinstance(task, RetrievalTask)]


def silent(*_: float) -> None:
    pass


def trained(variant: str, seed: int, settings: RetrievalSettings = TINY) -> RetrievalModel:
    model = train(TASK, VariantCall(variant), "none", seed, settings, "cpu", silent)
    assert isinstance(model, RetrievalModel)
    return model


def test_max_retrieval_data_by_hand() -> None:
    length, index = 6, 5
    raw = random_numbers(1, "test", length, index, 7)
    batch = max_retrieval.draw(1, "test", length, index, index + 1)
    assert batch.query.item() == uniform(raw[0])
    assert batch.features[0, :, 0].tolist() == [uniform(x) for x in raw[1:]]
    assert batch.classes[0].tolist() == [choice(x, 10) for x in raw[1:]]


def test_random_numbers_are_uniform() -> None:
    batch = max_retrieval.draw(0, "test", 64, 0, 2000)
    counts = batch.classes.flatten().bincount(minlength=10)
    expected = batch.classes.numel() / 10
    assert ((counts - expected).abs() < 5 * math.sqrt(expected)).all()
    assert batch.features.mean().item() == pytest.approx(0.5, abs=0.005)
    assert batch.features.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert 0 <= batch.features.min() < batch.features.max() < 1
    # The label, which is the class of the largest item, is uniform over 10 classes.
    assert batch.label.bincount(minlength=10).max() < 260
    drawn = lengths(0, 5, [16] * 6000)
    assert set(drawn) == set(range(5, 17))
    assert (np.bincount(drawn)[5:] > 400).all()
    assert set(lengths(0, 16, [64] * 200, 16)) == {16, 32, 48, 64}


def test_label_and_input_of_a_batch_by_hand() -> None:
    rho = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.5, 0.25]])
    classes = torch.tensor([[4, 7, 0], [2, 3, 9]])
    batch = RetrievalBatch(rho[..., None], classes, query=torch.zeros(2, 1), closeness=rho)
    assert batch.target.tolist() == [1, 0]  # of equal values, the first wins
    assert batch.label.tolist() == [7, 2]
    items = batch.items()
    assert items.shape == (2, 3, 11)
    assert items[0, 1].tolist() == pytest.approx([0.9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])


def test_needle_data_by_hand() -> None:
    """Only the needle has the query's key."""
    length, index = 3, 2
    raw = random_numbers(7, "test", length, index, 8)
    asked, at = choice(raw[0], 16), choice(raw[1], length)
    keys = [choice(x, 15) for x in raw[5:]]
    keys = [asked if i == at else k + (k >= asked) for i, k in enumerate(keys)]
    batch = needle.draw(7, "test", length, index, index + 1)
    assert batch.query[0].nonzero().item() == asked
    assert batch.features[0].argmax(-1).tolist() == keys
    assert (batch.features.sum(-1) == 1).all()
    assert batch.classes[0].tolist() == [choice(x, 10) for x in raw[2:5]]
    assert batch.target.item() == at


def test_weight_metrics_by_hand() -> None:
    weights = torch.tensor(
        [[0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.3, 0.0], [0.0] * 4, [0.25] * 4], dtype=torch.float64
    )
    classes = torch.tensor([[1, 2, 3, 4], [1, 2, 2, 4], [1, 2, 3, 4], [5, 5, 5, 5]])
    target, label = torch.tensor([0, 1, 0, 3]), torch.tensor([1, 2, 1, 5])
    metrics = weight_metrics(weights, target, classes, label, 10)
    assert metrics["hit_rate"].tolist() == [True, False, False, False]
    assert metrics["oracle_accuracy"].tolist() == [True, True, False, True]  # class 2: .3 + .3
    assert metrics["max_weight"].tolist() == [0.5, 0.3, 0.0, 0.25]
    assert metrics["weight_sum"].tolist() == pytest.approx([1, 1, 0, 1])
    assert metrics["n_eff"].tolist() == pytest.approx([1 / 0.38, 1 / 0.34, 0, 4])
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)) / math.log(4)
    assert metrics["entropy"][0].item() == pytest.approx(entropy)
    assert metrics["entropy"][2:].tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("task", RETRIEVAL, ids=lambda task: task.name)
def test_weights_on_the_target_score_one_and_random_weights_score_chance(task: Task) -> None:
    length = 500
    batch = task.batch(0, "test", length, 0, 3000, TINY)
    sharp = torch.nn.functional.one_hot(batch.target, length).double()
    blind = torch.rand(3000, length, dtype=torch.float64).pow(40)  # large for a few random keys
    for weights, hit_rate, accuracy in ((sharp, 1, 1), (blind, 1 / length, 0.1 + 0.9 / length)):
        metrics = weight_metrics(weights, batch.target, batch.classes, batch.label, 10)
        means = {name: values.double().mean().item() for name, values in metrics.items()}
        assert means["hit_rate"] == pytest.approx(hit_rate, abs=0.015)
        assert means["oracle_accuracy"] == pytest.approx(accuracy, abs=0.03)


@pytest.mark.parametrize("spec", ["softmax", "differential(softmax)"])
def test_qk_dim_is_the_width_of_queries_and_keys_only(spec: str) -> None:
    settings = replace(TINY, qk_dim=16)
    model = RetrievalModel((1, 1), parse_spec(spec, wrappers=True).train, settings)
    batch = max_retrieval.draw(0, "test", 9, 0, 4)
    q, k, v = model.project(batch.items(), batch.query)
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (16, 16, TINY.width)
    assert model.scale == 16**-0.5
    item = model.item(batch.items())  # `project` multiplies two matrices first
    torch.testing.assert_close(k[:, 0], model.to_k(item), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v[:, 0], model.to_v(item), rtol=1e-5, atol=1e-6)
    assert model(batch.items(), batch.query).shape == (4, 10)
    # Models without the setting keep their results.
    assert "qk_dim" in settings.identity()
    assert "qk_dim" not in TINY.identity()


def test_evaluation_does_not_depend_on_the_chunk_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trained("softmax", 0)
    log_n = parse_spec("softmax->log_n(train_length=16)").test
    tests = {"own": Substitutes(), "substitute": Substitutes(log_n)}
    one_chunk = evaluate(TASK, model, tests, 0, 16, TINY, "cpu", silent)
    monkeypatch.setattr(training, "CHUNK_ITEMS", 16 * 7)
    many_chunks = evaluate(TASK, model, tests, 0, 16, TINY, "cpu", silent)
    for name, once in one_chunk.items():
        parts = many_chunks[name]
        assert once.status == parts.status == "ok"
        assert {metric.name for metric in METRICS} <= set(once.metrics)
        assert once.metrics == pytest.approx(parts.metrics, abs=1e-7)
        for curve, values in once.curves.items():
            assert values == pytest.approx(parts.curves[curve], abs=1e-6), curve
        assert sum(once.curves["best_keys"]) == pytest.approx(1)  # at length 16, over all keys
    # At n = 16 the gain log n / log 16 is 1, so the substituted variant equals softmax.
    assert one_chunk["own"].metrics == pytest.approx(one_chunk["substitute"].metrics, abs=1e-6)


def test_training_is_reproducible_and_variants_share_initial_values() -> None:
    models = [trained("ssmax", 5) for _ in range(2)]
    for x, y in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(x, y)
    none = RetrievalSettings(steps=1, width=8, learning_rate=1e-30)  # too small to change a weight
    first, other = trained("softmax", 5, none), trained("ssmax", 5, none)
    for name, value in first.named_parameters():
        assert torch.equal(value, other.get_parameter(name))


def test_one_cycle_rises_to_the_peak_and_falls_to_zero() -> None:
    rates = [one_cycle(step, RetrievalSettings(steps=100)) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3 / 25)
    assert rates.index(max(rates)) == 30
    assert max(rates) == pytest.approx(1e-3)
    assert rates == sorted(rates[:31]) + sorted(rates[31:], reverse=True)
    assert rates[-1] < 1e-6


def test_a_nan_loss_ends_training() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(NotFinite, match=r"nan at step 4"):
        fit(model, lambda step: model.weight.sum() * math.nan, TINY, silent)


def test_a_tally_reports_nan_and_out_of_memory_and_raises_other_errors() -> None:
    def result(value: float) -> BatchResult:
        return BatchResult(
            {"weight_sum": torch.tensor([1.0, value])}, {"best_keys": torch.ones(2, 3)}
        )

    def fails() -> BatchResult:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    tally = Tally()
    tally.add(lambda: result(3.0))
    assert (tally.outcome().status, tally.outcome().metrics) == ("ok", {"weight_sum": 2.0})
    tally.add(lambda: result(math.nan))
    assert (tally.outcome().status, tally.outcome().message) == ("nan", "not finite: weight_sum")
    tally = Tally()
    tally.add(fails)
    tally.add(lambda: result(1.0))  # ignored after a failure
    assert tally.outcome().status == "oom"
    assert "can't allocate" in tally.outcome().message
    with pytest.raises(ZeroDivisionError):
        Tally().add(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="defect"):
        Tally().fail(RuntimeError("defect"))
