"""Sequence tasks: data computed by hand, scores of correct answers and of random guesses, the
model, its training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.measures.heads import learned, scaled_rope, substituted
from evals.run import Substitutes, evaluate, train
from evals.tasks import TASKS
from evals.tasks.families.answers import whole_answers
from evals.tasks.families.sequence import SequenceBatch, SequenceSettings, SequenceTask
from evals.tasks.language_model import DIGITS
from evals.tasks.texts import corpus
from helpers.random_numbers import choice, random_numbers, ranked, uniform

SEQUENCES = {name: task for name, task in TASKS.items() if isinstance(task, SequenceTask)}
SMOKE = {name: task.presets["smoke"].settings for name, task in SEQUENCES.items()}
TASK_SPLITS = [(name, x) for name, task in SEQUENCES.items() for x in task.splits.values()]

# ---- expected data

# A function that returns this many random numbers of the sequence.
Numbers = Callable[[int], list[int]]
Sequence = tuple[list[int], list[int]]  # tokens and answers


def mqar(numbers: Numbers, split: str, length: int, index: int) -> Sequence:
    keys, values, pairs = 128, 127, length // 4  # the numbers of keys, of values, and of pairs
    raw = numbers(keys + pairs + length - 2 * pairs)
    chosen = [1 + key for key in ranked(raw[:keys])[:pairs]]
    matching = [1 + keys + choice(x, values) for x in raw[keys : keys + pairs]]
    later = [2 * pairs + i for i in ranked(raw[keys + pairs :])[:pairs]]
    tokens = [token for pair in zip(chosen, matching) for token in pair] + [0] * length
    tokens, answers = tokens[:length], [-1] * length
    for position, key, value in zip(later, chosen, matching):
        tokens[position], answers[position] = key, value
    return tokens, answers


def flip_flop(numbers: Numbers, split: str, length: int, index: int) -> Sequence:
    steps, ignored = length // 2, {"sparse": 0.98, "dense": 0.1}.get(split, 0.8)
    raw, tokens, answers, stored = numbers(length), [], [], 0
    for step in range(steps):
        chance, bit = uniform(raw[step]), choice(raw[steps + step], 2)
        kind = "i" if chance < ignored else "w" if chance < ignored + (1 - ignored) / 2 else "r"
        kind = {0: "w", steps - 1: "r"}.get(step, kind)
        stored = bit if kind == "w" else stored
        tokens += [{"w": 2, "r": 3, "i": 4}[kind], stored if kind == "r" else bit]
        answers += [stored if kind == "r" else -1, -1]
    return tokens, answers


def transduced(
    transform: Callable[[list[int]], list[int]],
    numbers: Numbers, split: str, length: int, index: int,
) -> Sequence:  # fmt: skip
    symbols = [choice(x, 32) for x in numbers(length)]
    answer = transform(symbols)
    return [*symbols, 32, *answer], [*[-1] * length, *answer, -1]


def local_count(numbers: Numbers, split: str, length: int, index: int) -> Sequence:
    blocks = -(-length // 2)  # at most; each has a number for its length and one for its symbol
    raw = numbers(2 * blocks)
    tokens, answers, symbol = [0], [-1], choice(raw[blocks], 16)
    for block, number in enumerate(raw[:blocks]):
        if block:
            symbol = (symbol + 1 + choice(raw[blocks + block], 15)) % 16
        repeats = 2 + choice(number, 7)
        tokens += [1 + symbol] * repeats
        answers += range(17, 17 + repeats)
    return tokens[: length + 1], answers[: length + 1]


def two_back(numbers: Numbers, split: str, length: int, index: int) -> Sequence:
    symbols = [1 + choice(x, 15) for x in numbers(length)]
    return [0, *symbols], [0, 0, 0, *symbols][: length + 1]


def byte_sequence(numbers: Numbers, split: str, length: int, index: int) -> Sequence:
    raw, text = numbers(2 + DIGITS), corpus()[0]["train" if split == "train" else "test"]
    start = choice(raw[0], len(text) - length)
    piece = text[start : start + length + 1].tobytes()
    if split == "planted" or (split == "train" and index % 2):
        question = b"\n#key=" + "".join(str(choice(x, 10)) for x in raw[2:]).encode()
        depth = choice(raw[1], length - 2 * 11)
        piece = piece[:depth] + question + b"\n" + piece[depth + 11 : -10] + question
    tokens, answers = list(piece[:-1]), list(piece[1:])
    return tokens, [-1] * (length - DIGITS) + answers[-DIGITS:] if split == "planted" else answers


BY_HAND: dict[str, Callable[[Numbers, str, int, int], Sequence]] = {
    "mqar": mqar,
    "flip-flop": flip_flop,
    "copy": partial(transduced, lambda symbols: symbols),
    "reverse": partial(transduced, lambda symbols: symbols[::-1]),
    "sort": partial(transduced, sorted),
    "local-count": local_count,
    "2-back": two_back,
    "language-model": byte_sequence,
}


@pytest.mark.parametrize(("name", "split"), [*((name, "train") for name in BY_HAND), *TASK_SPLITS])
def test_data_by_hand(name: str, split: str) -> None:
    """Any part of the data equals what the task's function computes for each sequence."""
    task, settings = SEQUENCES[name], SMOKE[name]
    short = {"mqar": 8, "flip-flop": 4, "language-model": 44}.get(name, 5)
    for length in (short, settings.train_longest):
        batch = task.batch(5, split, length, 3, 10, settings)
        assert batch.tokens.shape == (7, task.tokens(length))
        for index in range(3, 10):
            numbers = partial(random_numbers, 5, split, length, index)
            tokens, answers = BY_HAND[name](numbers, split, length, index)
            assert batch.tokens[index - 3].tolist() == tokens
            assert batch.answers[index - 3].tolist() == answers


def test_train_and_test_text_hardly_overlap() -> None:
    texts, digest = corpus()
    assert len(digest) == 16
    assert min(map(len, texts.values())) > 2**18
    train, test = (texts[split].tobytes() for split in ("train", "test"))
    known = {train[i : i + 64] for i in range(0, len(train) - 64, 4)}
    pieces = [test[i + j : i + j + 64] for i in range(0, len(test) - 68, 256) for j in range(4)]
    # Pieces in `known` start at every 4th byte, so a repeated text matches at 1 of 4 offsets.
    shared = sum(piece in known for piece in pieces) / (len(pieces) / 4)
    assert 0 < shared < 0.03


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("mqar", 30, "multiple of density = 4"),
        ("mqar", 1024, "length / density <= vocabulary // 2 = 128"),
        ("flip-flop", 7, "an even int >= 4, got 7"),
        ("language-model", 20, ">= 44, got 20"),
    ],
)
def test_invalid_lengths_raise(name: str, length: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SEQUENCES[name].batch(0, "test", length, 0, 1, SMOKE[name])


def test_local_count_needs_two_repetitions() -> None:
    with pytest.raises(ValueError, match="repeats must be >= 2, got 1"):
        replace(SMOKE["local-count"], repeats=1)


# ---- scores of correct answers and random guesses

# The tokens of which each answer is one with equal probability.
GUESSES = {
    "mqar": range(129, 256), "flip-flop": range(2), "language-model": range(ord("0"), ord("9") + 1),
    "local-count": range(17, 25), "2-back": range(16),
}  # fmt: skip


def drawn(name: str, split: str, count: int) -> SequenceBatch:
    length = SMOKE[name].train_longest
    return SEQUENCES[name].batch(0, split, length, 0, count, SMOKE[name])


def means(name: str, answers: Tensor, batch: SequenceBatch) -> dict[str, float]:
    """The means of the metrics if the model is sure of these answers."""
    task = SEQUENCES[name]
    logits = torch.nn.functional.one_hot(answers, task.vocabulary_size(SMOKE[name])) * 30.0
    return {k: v.double().mean().item() for k, v in task.read(logits, batch).metrics.items()}


# The language model has no answers to score in the split "test".
@pytest.mark.parametrize(
    ("name", "split"), [case for case in TASK_SPLITS if case != ("language-model", "test")]
)
def test_scores_of_correct_answers_of_a_mistake_and_of_guesses(name: str, split: str) -> None:
    batch = drawn(name, split, 500)
    correct = batch.answers[batch.asked]
    scores = means(name, correct, batch)
    hits = [name for name in scores if name != "loss" and not name.startswith("depth")]
    assert [scores[metric] for metric in hits] == [1.0] * len(hits)

    mistake = correct.clone()
    mistake[-1] = correct[correct != correct[-1]][0]
    worse = means(name, mistake, batch)
    for metric in hits:
        total = len(batch.tokens) if metric in ("exact", "needle") else len(correct)
        assert worse[metric] == pytest.approx(1 - 1 / total)

    guesses = GUESSES.get(name, range(32))
    generator = torch.Generator().manual_seed(0)
    blind = torch.randint(guesses.start, guesses.stop, correct.shape, generator=generator)
    chance, task = 1 / len(guesses), SEQUENCES[name]
    score = means(name, blind, batch)["digits" if name == "language-model" else "accuracy"]
    assert abs(score - chance) < 5 * math.sqrt(chance / len(correct))
    if task.score.name == "accuracy":
        assert task.chance(SMOKE[name]) == pytest.approx(chance)


def test_uniform_logits_cost_eight_bits_per_byte() -> None:
    task, batch = SEQUENCES["language-model"], drawn("language-model", "test", 8)
    result = task.read(torch.zeros(int(batch.asked.sum()), 256), batch)
    assert result.metrics["bits"].mean().item() == pytest.approx(8)
    assert result.metrics["bits_last"].mean().item() == pytest.approx(8)
    assert result.curves["bits_by_position"].shape == (8, 16)
    assert task.chance(SMOKE["language-model"]) == 8


def test_exact_match_needs_every_symbol() -> None:
    task, batch = SEQUENCES["copy"], drawn("copy", "test", 3)
    logits = torch.nn.functional.one_hot(batch.answers[batch.asked], 33).double()
    logits[5] = 0  # a wrong symbol in the first sequence
    assert task.read(logits, batch).metrics["exact"].tolist() == [0, 1, 1]
    logits[-1] = math.nan
    assert task.read(logits, batch).metrics["exact"].isnan().any()
    assert task.chance(SMOKE["copy"]) == 32.0**-16


# ---- the model


TINY = SequenceSettings(
    steps=3, batch=4, width=16, train_shortest=4, train_longest=8, train_stride=2,
    test_sequences=6, test_least=6,
)  # fmt: skip
FLIP = SEQUENCES["flip-flop"]


def silent(*_: float) -> None:
    pass


def trained(variant: str, positions: str = "rope") -> Any:
    return train(FLIP, parse_spec(variant).train, positions, 0, TINY, "cpu", silent)


def test_training_is_reproducible_and_the_loss_uses_only_answers() -> None:
    one, two = (trained("ssmax").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = FLIP.build(VariantCall("softmax"), "none", TINY)
    batch = FLIP.batch(0, "train", 8, 0, 4, TINY)
    logits = model(batch.tokens)
    wanted = torch.nn.functional.cross_entropy(logits[batch.asked], batch.answers[batch.asked])
    torch.testing.assert_close(FLIP.loss(model, batch), wanted)


def test_batch_sizes_and_lengths_of_training_steps() -> None:
    settings = replace(TINY, steps=10, batch=8, train_longest=16, curriculum=0.5)
    assert [settings.batch_size(n) for n in (4, 8, 16)] == [32, 16, 8]
    assert replace(settings, fill=False).batch_size(4) == 8
    assert settings.longest_per_step() == [4, 6, 8, 10, 12, 16, 16, 16, 16, 16]
    assert replace(settings, curriculum=0.0).longest_per_step() == [16] * 10


@pytest.mark.parametrize("positions", ["none", "rope", "p-rope", "alibi", "nape", "t5"])
def test_all_splits_and_heads_are_measured(positions: str) -> None:
    model = trained("softmax", positions)
    tests = {"own": Substitutes(), "substitute": Substitutes(VariantCall("sparsemax"))}
    outcomes = evaluate(FLIP, model, tests, 0, 8, TINY, "cpu", silent)
    for outcome in outcomes.values():
        assert outcome.status == "ok", outcome.message
        assert {m.name for m in FLIP.metrics if not m.optional} <= set(outcome.metrics)
        assert len(outcome.curves["head_peak"]) == 4  # two layers with two heads each
        assert outcome.curves["head_weight_sum"] == pytest.approx([1] * 4)
    assert outcomes["own"].curves["head_peak"] != outcomes["substitute"].curves["head_peak"]


def test_substituted_restores_the_model() -> None:
    model = trained("ssmax")
    tokens = torch.randint(5, (2, 12))

    def run() -> Tensor:
        with torch.no_grad():
            return model(tokens)

    before = run()
    assert list(learned(model)) == ["s"]
    assert len(learned(model)["s"]) == 4
    with substituted(model, VariantCall("sigmoid")):
        assert not torch.allclose(run(), before)
        assert learned(model) == {}
    with substituted(model, None):
        assert torch.equal(run(), before)
    assert torch.equal(run(), before)


@pytest.mark.parametrize("positions", ["rope", "p-rope"])
def test_scaled_rope_is_substituted_at_inference(positions: str) -> None:
    """The results are those of a model with this scaling, also beside another variant."""
    model, sparsemax = trained("softmax", positions), VariantCall("sparsemax")
    scaling = {"rope_type": "ntk", "factor": 4.0}
    tests = {
        "own": Substitutes(),
        "factor 1": Substitutes(None, {**scaling, "factor": 1.0}),
        "scaled": Substitutes(None, scaling),
        "both": Substitutes(sparsemax, scaling),
    }
    together = evaluate(FLIP, model, tests, 0, 32, TINY, "cpu", silent)
    results = {name: (x.metrics, x.curves) for name, x in together.items()}
    assert results["factor 1"] == results["own"]
    assert len({str(x) for x in results.values()}) == 3
    with scaled_rope(model, scaling):
        others = {"scaled": Substitutes(), "both": Substitutes(sparsemax)}
        alone = evaluate(FLIP, model, others, 0, 32, TINY, "cpu", silent)
    assert {name: (x.metrics, x.curves) for name, x in alone.items()} == {
        name: results[name] for name in alone
    }
    assert model.rope_scaling is None
    message = "needs an attnzoo.nn.Transformer, got a model Linear"
    with pytest.raises(TypeError, match=message), scaled_rope(torch.nn.Linear(2, 2), scaling):
        pass


def test_exact_match_is_of_each_sequence_whatever_its_number_of_answers() -> None:
    batch = SequenceBatch(torch.zeros(2, 4).long(), torch.tensor([[1, 1, 1, -1], [1, -1, -1, -1]]))
    right, wrong = [0.0, 1.0], [1.0, 0.0]
    result = whole_answers(torch.tensor([right, wrong, wrong, right]), batch)
    assert result.metrics["exact"].tolist() == [0.0, 1.0]
    batch = replace(batch, answers=torch.tensor([[1, 1, -1, -1], [-1, -1, 1, -1]]))
    result = whole_answers(torch.tensor([right, right, [math.nan, 0.0]]), batch)
    assert result.metrics["exact"].tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
