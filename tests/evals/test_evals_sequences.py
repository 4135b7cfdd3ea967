"""Sequence tasks: data computed by hand, scores of correct answers and of random guesses, the
model, its training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.measures.heads import learned, substituted
from evals.run import evaluate, train
from evals.tasks import TASKS, flip_flop, language_model, mqar
from evals.tasks.families.sequence import SequenceBatch, SequenceSettings, SequenceTask
from evals.tasks.language_model import DIGITS, corpus

SEQUENCES = {name: task for name, task in TASKS.items() if isinstance(task, SequenceTask)}
SMOKE = {name: task.presets["smoke"].settings for name, task in SEQUENCES.items()}


def random_numbers(seed: int, split: int, length: int, index: int, count: int) -> list[int]:
    """``count`` random uint64 values of a sequence, from numpy's Philox (4 per counter value)."""
    key = np.array([seed, (split << 32) | length], dtype=np.uint64)
    blocks = -(-count // 4)
    return np.random.Philox(counter=index * blocks, key=key).random_raw(4 * blocks).tolist()[:count]


def choice(number: int, choices: int) -> int:
    return ((number & (2**32 - 1)) * choices) >> 32


def ranked(numbers: list[int]) -> list[int]:
    """The indices that sort ``numbers`` in ascending order."""
    return sorted(range(len(numbers)), key=numbers.__getitem__)


# ---- expected data


def test_mqar_has_all_pairs_and_then_each_key_once() -> None:
    settings = mqar.MqarSettings(steps=1, batch=1, train_shortest=8, train_longest=8, vocabulary=16)
    raw = random_numbers(5, 2, 8, 3, 8 + 2 + 4)  # for 8 keys, 2 values and 4 query positions
    keys = [1 + k for k in ranked(raw[:8])[:2]]
    values = [9 + choice(x, 7) for x in raw[8:10]]
    later = [4 + index for index in ranked(raw[10:14])[:2]]
    tokens, answers = [keys[0], values[0], keys[1], values[1], 0, 0, 0, 0], [-1] * 8
    for index, key, value in zip(later, keys, values, strict=True):
        tokens[index], answers[index] = key, value
    batch = mqar.draw(5, "test", 8, 3, 4, settings)
    assert batch.tokens[0].tolist() == tokens
    assert batch.answers[0].tolist() == answers


def test_flip_flop_answers_are_the_last_written_bits() -> None:
    steps, index = 8, 1
    raw = random_numbers(2, 2, 2 * steps, index, 2 * steps)
    tokens, answers, stored = [], [], 0
    for step in range(steps):
        chance, bit = (raw[step] >> 40) / 2**24, choice(raw[steps + step], 2)
        kind = "i" if chance < 0.8 else "w" if chance < 0.8 + 0.2 / 2 else "r"
        kind = {0: "w", steps - 1: "r"}.get(step, kind)
        if kind == "w":
            stored = bit
        bit = stored if kind == "r" else bit
        tokens += [{"w": 2, "r": 3, "i": 4}[kind], bit]
        answers += [bit if kind == "r" else -1, -1]
    batch = flip_flop.draw(2, "test", 2 * steps, index, index + 1, None)
    assert batch.tokens[0].tolist() == tokens
    assert batch.answers[0].tolist() == answers


@pytest.mark.parametrize(
    ("split", "ignored"), [("train", 0.8), ("test", 0.8), ("sparse", 0.98), ("dense", 0.1)]
)
def test_flip_flop_splits_have_their_share_of_ignored_bits(split: str, ignored: float) -> None:
    kinds = flip_flop.draw(0, split, 256, 0, 400, None).tokens[:, 2:-2:2]
    shares = [(kinds == kind).double().mean().item() for kind in (4, 2, 3)]
    assert shares == pytest.approx([ignored, (1 - ignored) / 2, (1 - ignored) / 2], abs=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("copy", lambda s: s), ("reverse", lambda s: s[::-1]), ("sort", sorted)],
)
def test_copy_reverse_and_sort_by_hand(
    name: str, expected: Callable[[list[int]], list[int]]
) -> None:
    symbols = [choice(x, 32) for x in random_numbers(1, 2, 5, 0, 5)]
    batch = SEQUENCES[name].batch(1, "test", 5, 0, 1, SMOKE[name])
    assert batch.tokens[0].tolist() == [*symbols, 32, *expected(symbols)]
    assert batch.answers[0].tolist() == [*[-1] * 5, *expected(symbols), -1]
    assert SEQUENCES[name].tokens(5) == 11


def test_language_model_sequence_of_the_planted_split_by_hand() -> None:
    length, index = 96, 3
    raw = random_numbers(4, 6, length, index, 2 + DIGITS)
    text = corpus()[0]["test"]
    start = choice(raw[0], len(text) - length)
    piece = text[start : start + length].tobytes()
    digits = "".join(str(choice(x, 10)) for x in raw[2:]).encode()
    depth = choice(raw[1], length - 2 * 11)
    line, end = b"\n#key=" + digits + b"\n", b"\n#key=" + digits[:-1]
    planted = piece[:depth] + line + piece[depth + len(line) : length - len(end)] + end
    batch = language_model.draw(4, "planted", length, index, index + 1, None)
    assert bytes(batch.tokens[0].tolist()) == planted
    assert batch.answers[0].tolist() == [-1] * (length - DIGITS) + list(digits)
    plain = language_model.draw(4, "test", length, 0, 3, None)
    assert (plain.answers[:, :-1] == plain.tokens[:, 1:]).all()


def test_train_and_test_text_hardly_overlap_and_every_second_sequence_has_a_needle() -> None:
    texts, digest = corpus()
    assert len(digest) == 16
    assert min(map(len, texts.values())) > 2**18
    train, test = (texts[split].tobytes() for split in ("train", "test"))
    known = {train[i : i + 64] for i in range(0, len(train) - 64, 4)}
    pieces = [test[i + j : i + j + 64] for i in range(0, len(test) - 68, 256) for j in range(4)]
    # Pieces in `known` start at every 4th byte, so a repeated text matches at 1 of 4 offsets.
    shared = sum(piece in known for piece in pieces) / (len(pieces) / 4)
    assert 0 < shared < 0.03
    batch = language_model.draw(0, "train", 128, 0, 40, None)
    needle_counts = [bytes(row.tolist()).count(b"\n#key=") for row in batch.tokens]
    assert needle_counts == [0, 2] * 20
    assert (batch.answers[:, :-1] == batch.tokens[:, 1:]).all()  # each answer is the next byte
    assert batch.asked.all()


def test_a_sequence_depends_on_seed_split_length_and_index_only() -> None:
    for name, task in SEQUENCES.items():
        length, settings = SMOKE[name].train_longest, SMOKE[name]
        once = task.batch(3, "test", length, 0, 12, settings)
        pieces = [task.batch(3, "test", length, a, b, settings) for a, b in ((0, 5), (5, 12))]
        for field in ("tokens", "answers"):
            joined = torch.cat([getattr(piece, field) for piece in pieces])
            assert torch.equal(getattr(once, field), joined), name
        assert not torch.equal(task.batch(4, "test", length, 0, 12, settings).tokens, once.tokens)
        assert not torch.equal(task.batch(3, "train", length, 0, 12, settings).tokens, once.tokens)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("mqar", 30, "multiple of density = 4"),
        ("mqar", 1024, "length / density <= vocabulary // 2 = 128"),
        ("flip-flop", 7, "an even int >= 4, got 7"),
        ("language-model", 20, ">= 44, got 20"),
        ("mqmtar", 7, ">= 8, .* got 7"),
        ("mqmtar", 488, "<= letters\\*\\*2 / 4 = 64, got 488"),
    ],
)
def test_invalid_lengths_raise(name: str, length: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SEQUENCES[name].batch(0, "test", length, 0, 1, SMOKE[name])


# ---- scores of correct answers and random guesses


def mqmtar_answers(tokens: list[int]) -> Iterator[int]:
    """Two letters for each of the four queries, found by a search for the query's key."""
    *_, end = (index for index, token in enumerate(tokens) if token == 3)
    pairs, queries = tokens[: end - 12], tokens[end - 12 : end]
    marks = [index for index, token in enumerate(pairs) if token == 1]
    for query in range(0, 12, 3):
        assert queries[query] == 2
        key = queries[query + 1 : query + 3]
        (mark,) = [index for index in marks if pairs[index - 2 : index] == key]
        yield from pairs[mark + 1 : mark + 3]


def solve(name: str, tokens: list[int]) -> Iterator[int]:
    """The correct answers of a sequence, in order, computed from its tokens."""
    if name == "mqar":
        pairs = len(tokens) // 4
        value = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        yield from (value[key] for key in tokens[2 * pairs :] if key)
    elif name == "flip-flop":
        stored = -1
        for kind, bit in zip(tokens[::2], tokens[1::2], strict=True):
            stored = bit if kind == 2 else stored
            if kind == 3:
                yield stored
    elif name == "language-model":
        text = bytes(tokens)
        at = text.index(b"\n#key=") + 6
        yield from text[at : at + DIGITS]
    elif name == "mqmtar":
        yield from mqmtar_answers(tokens)
    elif name == "local-count":
        for index, symbol in enumerate(tokens[1:], start=1):
            count = next(c for c in range(index) if tokens[index - c - 1] != symbol)
            yield 17 + count
    elif name == "2-back":
        yield from [0, 0, *tokens[:-2]]
    else:
        symbols = tokens[: tokens.index(32)]
        yield from {"copy": symbols, "reverse": symbols[::-1], "sort": sorted(symbols)}[name]


def drawn(name: str, split: str, count: int) -> SequenceBatch:
    length = SMOKE[name].train_longest
    return SEQUENCES[name].batch(0, split, length, 0, count, SMOKE[name])


SPLITS = [
    (name, split)
    for name, task in SEQUENCES.items()
    for split in task.splits.values()
    if (name, split) != ("language-model", "test")  # no correct answers known
]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_correct_answers_score_one_and_a_mistake_lowers_the_score(name: str, split: str) -> None:
    task, batch = SEQUENCES[name], drawn(name, split, 20)
    solved = [answer for row in batch.tokens.tolist() for answer in solve(name, row)]
    size = task.vocabulary_size(SMOKE[name])
    logits = torch.nn.functional.one_hot(torch.tensor(solved), size) * 30.0

    means = {k: v.double().mean().item() for k, v in task.read(logits, batch).metrics.items()}
    hits = {k: v for k, v in means.items() if k != "loss"}
    assert set(hits.values()) == {1.0}
    logits[-1] = 0
    logits[-1, (solved[-1] + 1) % logits.shape[1]] = 1
    worse = {k: v.double().mean().item() for k, v in task.read(logits, batch).metrics.items()}
    for metric in hits:
        total = len(batch.tokens) if metric in ("exact", "needle") else len(solved)
        assert worse[metric] == pytest.approx(1 - 1 / total)


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_random_guesses_score_chance(name: str, split: str) -> None:
    task, settings = SEQUENCES[name], SMOKE[name]
    batch = drawn(name, split, 1500)
    asked = int(batch.asked.sum())
    guesses = {
        "mqar": (1 + settings.vocabulary // 2, settings.vocabulary) if name == "mqar" else (),
        "flip-flop": (0, 2),
        "language-model": (ord("0"), ord("9") + 1),
        "mqmtar": (4, 4 + 16),
        "local-count": (17, 17 + 8),
        "2-back": (0, 16),
    }.get(name, (0, 32))
    blind = torch.randint(*guesses, (asked,), generator=torch.Generator().manual_seed(0))
    logits = torch.nn.functional.one_hot(blind, task.vocabulary_size(settings)).double()
    metrics = {k: v.double() for k, v in task.read(logits, batch).metrics.items()}
    score = metrics["digits" if name == "language-model" else "accuracy"]
    chance = 1 / (guesses[1] - guesses[0])
    assert abs(score.mean().item() - chance) < 5 * math.sqrt(chance / len(score))
    if name in ("mqar", "flip-flop", "local-count", "2-back"):
        assert task.chance(settings) == pytest.approx(chance)


def test_uniform_logits_cost_eight_bits_per_byte() -> None:
    task, batch = SEQUENCES["language-model"], drawn("language-model", "test", 8)
    result = task.read(torch.zeros(int(batch.asked.sum()), 256), batch)
    assert result.metrics["bits"].mean().item() == pytest.approx(8)
    assert result.metrics["bits_last"].mean().item() == pytest.approx(8)
    assert result.curves["bits_by_position"].shape == (8, 16)
    assert task.chance(SMOKE["language-model"]) == 8


def test_exact_match_needs_every_symbol() -> None:
    batch = drawn("copy", "test", 3)
    logits = torch.nn.functional.one_hot(batch.answers[batch.asked], 33).double()
    logits[5] = 0  # a wrong symbol in the first sequence
    result = SEQUENCES["copy"].read(logits, batch)
    assert result.metrics["exact"].tolist() == [0, 1, 1]
    logits[-1] = math.nan
    assert SEQUENCES["copy"].read(logits, batch).metrics["exact"].isnan().any()


# ---- the model


TINY = SequenceSettings(
    steps=3, batch=4, width=16, train_shortest=4, train_longest=8, train_stride=2,
    test_sequences=6, test_least=6,
)  # fmt: skip
FLIP = SEQUENCES["flip-flop"]


def silent(*_: float) -> None:
    pass


def model_of(
    variant: str, positions: str = "rope", settings: SequenceSettings = TINY
) -> torch.nn.Module:
    call = parse_spec(variant).train
    return train(FLIP, call, positions, 0, settings, "cpu", silent)


def test_training_is_reproducible_and_the_loss_uses_only_answers() -> None:
    one, two = (model_of("ssmax").state_dict() for _ in range(2))
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
    model = model_of("softmax", positions)
    tests = {"own": None, "substitute": VariantCall("sparsemax")}
    outcomes = evaluate(FLIP, model, tests, 0, 8, TINY, "cpu", silent)
    for outcome in outcomes.values():
        assert outcome.status == "ok", outcome.message
        assert {m.name for m in FLIP.metrics if not m.optional} <= set(outcome.metrics)
        assert len(outcome.curves["head_peak"]) == 4  # two layers with two heads each
        assert outcome.curves["head_weight_sum"] == pytest.approx([1] * 4)
    assert outcomes["own"].curves["head_peak"] != outcomes["substitute"].curves["head_peak"]


def test_substituted_restores_the_model() -> None:
    model = model_of("ssmax")
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
