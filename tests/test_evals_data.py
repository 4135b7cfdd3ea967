"""Max retrieval: its data, its model, its metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attnzoo.nn import parameter_groups
from evals import max_retrieval as task
from evals.cells import VariantCall, parse_spec
from evals.metrics import METRICS, Tally, weight_metrics
from evals.training import NotFinite, fit, one_cycle

TINY = task.Settings(steps=4, batch=8, width=8, sequences_to_1024=40, sequences_above=20)


def joined(pieces: list[task.Batch]) -> list[torch.Tensor]:
    return [torch.cat([getattr(p, name) for p in pieces]) for name in ("rho", "classes", "query")]


def test_an_item_depends_on_seed_split_length_and_index_only() -> None:
    whole = joined([task.sequences(3, "test", 37, 0, 50)])
    pieces = [task.sequences(3, "test", 37, a, b) for a, b in ((41, 50), (0, 1), (1, 41))]
    for x, y in zip(whole, joined([pieces[1], pieces[2], pieces[0]]), strict=True):
        assert torch.equal(x, y)
    for other in ((4, "test", 37), (3, "train", 37), (3, "test", 38)):
        assert not torch.equal(task.sequences(*other, 0, 1).rho[:, :37], whole[0][:1])


def test_the_generator_is_pinned() -> None:
    """Worked from the raw words of numpy's Philox, one by one."""
    length, index = 6, 5  # 7 words: two counters of four words each
    key = np.array([1, (2 << 32) | length], dtype=np.uint64)
    words = np.random.Philox(counter=index * 2, key=key).random_raw(8).tolist()
    batch = task.sequences(1, "test", length, index, index + 1)
    assert batch.query.item() == (words[0] >> 40) / 2**24
    assert batch.rho[0].tolist() == [(word >> 40) / 2**24 for word in words[1:7]]
    assert batch.classes[0].tolist() == [((w & (2**32 - 1)) * 10) >> 32 for w in words[1:7]]


def test_the_data_are_uniform() -> None:
    batch = task.sequences(0, "test", 64, 0, 2000)
    counts = batch.classes.flatten().bincount(minlength=10)
    expected = batch.classes.numel() / 10
    assert ((counts - expected).abs() < 5 * math.sqrt(expected)).all()
    assert batch.rho.mean().item() == pytest.approx(0.5, abs=0.005)
    assert batch.rho.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert batch.rho.max() < 1
    assert batch.rho.min() >= 0
    # The place of the largest item says nothing about its class, nor about the query.
    assert batch.label.bincount(minlength=10).max() < 260
    lengths = task.training_lengths(0, task.Settings(steps=6000))
    assert set(lengths) == set(range(5, 17))
    assert (np.bincount(lengths)[5:] > 400).all()


def test_label_and_input_of_a_hand_worked_batch() -> None:
    batch = task.Batch(
        rho=torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.5, 0.25]]),
        classes=torch.tensor([[4, 7, 0], [2, 3, 9]]),
        query=torch.zeros(2),
    )
    assert batch.target.tolist() == [1, 0]  # of equals, the first
    assert batch.label.tolist() == [7, 2]
    items = batch.items()
    assert items.shape == (2, 3, 11)
    assert items[0, 1].tolist() == pytest.approx([0.9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])


def test_metrics_of_hand_worked_weights() -> None:
    weights = torch.tensor(
        [[0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.3, 0.0], [0.0] * 4, [0.25] * 4], dtype=torch.float64
    )
    classes = torch.tensor([[1, 2, 3, 4], [1, 2, 2, 4], [1, 2, 3, 4], [5, 5, 5, 5]])
    target, label = torch.tensor([0, 1, 0, 3]), torch.tensor([1, 2, 1, 5])
    found = weight_metrics(weights, target, classes, label, 10)
    assert found["hit_rate"].tolist() == [True, False, False, False]
    assert found["oracle_accuracy"].tolist() == [True, True, False, True]  # .3 + .3 beats .4
    assert found["max_weight"].tolist() == [0.5, 0.3, 0.0, 0.25]
    assert found["mass"].tolist() == pytest.approx([1, 1, 0, 1])
    assert found["n_eff"].tolist() == pytest.approx([1 / 0.38, 1 / 0.34, 0, 4])
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)) / math.log(4)
    assert found["entropy"][0].item() == pytest.approx(entropy)
    assert found["entropy"][2:].tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("length", [16, 500])
def test_an_oracle_is_always_right_and_a_blind_scorer_by_chance(length: int) -> None:
    batch = task.sequences(0, "test", length, 0, 3000)
    sharp = torch.nn.functional.one_hot(batch.target, length).double()
    blind = torch.rand(3000, length, dtype=torch.float64).pow(40)  # sharp, but anywhere
    rates = []
    for weights in (sharp, blind):
        found = weight_metrics(weights, batch.target, batch.classes, batch.label, 10)
        rates.append(
            [found[name].double().mean().item() for name in ("hit_rate", "oracle_accuracy")]
        )
    assert rates[0] == [1, 1]
    assert rates[1][0] == pytest.approx(1 / length, abs=0.015)
    assert rates[1][1] == pytest.approx(0.1 + 0.9 / length, abs=0.03)


def test_folding_the_projections_changes_nothing_but_rounding() -> None:
    model = task.Model(VariantCall("softmax"), TINY)
    batch = task.sequences(0, "test", 9, 0, 4)
    with torch.inference_mode():
        plain = model.project(batch.items(), batch.query)
        folded = model.folded()(batch.items(), batch.query)
    for x, y in zip(plain, folded, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_evaluation_does_not_depend_on_chunks_and_swaps_share_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = task.train(VariantCall("softmax"), 0, TINY, "cpu", lambda fraction: None)
    tests = {"own": None, "swap": parse_spec("softmax->log_n(train_length=16)").test}
    whole = task.evaluate(model, tests, 0, 16, TINY, "cpu", lambda fraction: None)
    monkeypatch.setattr(task, "CHUNK_ITEMS", 16 * 7)
    pieces = task.evaluate(model, tests, 0, 16, TINY, "cpu", lambda fraction: None)
    for name in tests:
        assert whole[name].status == pieces[name].status == "ok"
        assert set(METRICS) <= set(whole[name].metrics)
        assert whole[name].metrics == pytest.approx(pieces[name].metrics, abs=1e-7)
        assert whole[name].best_keys == pytest.approx(pieces[name].best_keys, abs=1e-7)
        assert sum(whole[name].best_keys) == pytest.approx(1)  # n = 16: all keys are the best 16
    # log n / log 16 is 1 at n = 16: the swap is softmax itself.
    assert whole["own"].metrics == pytest.approx(whole["swap"].metrics, abs=1e-6)


def test_training_is_reproducible_and_shared_between_variants_at_the_start() -> None:
    models = [task.train(VariantCall("ssmax"), 5, TINY, "cpu", lambda f: None) for _ in range(2)]
    for x, y in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(x, y)
    none = task.Settings(steps=0, width=8)
    first = task.train(VariantCall("softmax"), 5, none, "cpu", lambda f: None)
    other = task.train(VariantCall("ssmax"), 5, none, "cpu", lambda f: None)
    for name, value in first.named_parameters():
        assert torch.equal(value, other.get_parameter(name))


def test_a_variants_own_parameters_are_not_decayed() -> None:
    model = task.Model(VariantCall("ssmax"), TINY)
    network, own = parameter_groups(model, 0.5)
    assert (network["weight_decay"], own["weight_decay"]) == (0.5, 0.0)
    assert [p.shape for p in own["params"]] == [(1,)]
    assert len(network["params"]) + 1 == len(list(model.parameters()))


def test_one_cycle_rises_to_the_peak_and_falls_to_zero() -> None:
    rates = [one_cycle(step, task.Settings(steps=100)) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3 / 25)
    assert rates.index(max(rates)) == 30
    assert max(rates) == pytest.approx(1e-3)
    assert rates == sorted(rates[:31]) + sorted(rates[31:], reverse=True)
    assert rates[-1] < 1e-6


def test_a_loss_that_is_not_finite_ends_training() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(NotFinite, match=r"nan at step 4"):
        fit(model, lambda step: model.weight.sum() * math.nan, TINY, print)


def test_a_tally_reports_nan_and_want_of_memory_and_lets_defects_through() -> None:
    def found(value: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"mass": torch.tensor([1.0, value])}, torch.ones(2, 3)

    def out_of_memory() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    tally = Tally()
    tally.add(lambda: found(3.0))
    assert (tally.outcome().status, tally.outcome().metrics) == ("ok", {"mass": 2.0})
    tally.add(lambda: found(math.nan))
    assert (tally.outcome().status, tally.outcome().message) == ("nan", "not finite: mass")
    tally = Tally()
    tally.add(out_of_memory)
    tally.add(lambda: found(1.0))  # not counted any more
    assert tally.outcome().status == "oom"
    assert "can't allocate" in tally.outcome().message
    with pytest.raises(ZeroDivisionError):
        Tally().add(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="defect"):
        Tally().fail(RuntimeError("defect"))
