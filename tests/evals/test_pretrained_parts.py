"""The parts of ``pretrained``: contexts, answers, losses by position, weights, substitution."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnzoo
from commandline.errors import UsageError
from evals.pretrained import heads, positions, retrieval
from evals.pretrained.contexts import RESERVED, Contexts, check_no_facts
from evals.pretrained.loading import Loaded, Source, load
from evals.pretrained.reading import Reader, only
from evals.pretrained.substitution import (
    AS_LOADED,
    is_converted,
    parse_substitution,
    substituted,
)
from evals.results.pretrained import RETRIEVAL
from helpers.hf_models import gemma2, gpt2, ids, large_llama, llama, mistral, quiet, qwen
from helpers.small_lm import LENGTH, TEXT, byte_tokenizer, save_small_lm, word_tokenizer

pytestmark = quiet
LICENSE = TEXT.read_text()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(Source(str(save_small_lm(tmp_path_factory.mktemp("model"), start=True))))


@pytest.fixture(scope="module")
def contexts(loaded: Loaded) -> Contexts:
    return Contexts(loaded, LICENSE, planted=True, seed=0)


# ---- contexts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", range(4))
def test_facts_answer_the_questions(contexts: Contexts, loaded: Loaded, sample: int) -> None:
    """The answers are computed again from the decoded text, by other means."""
    context = contexts.draw(LENGTH, sample)
    text = loaded.tokenizer.decode(context.tokens[1:])
    decode = loaded.tokenizer.decode
    asked = {q.task: (decode(q.prompt), decode(q.answer)) for q in context.questions}
    assert list(asked) == list(RETRIEVAL)
    numbers = dict(re.findall(r"^The number of (\w+) is (\d+)\.$", text, re.MULTILINE))
    assert len(numbers) == 4

    (secret,) = re.findall(r"^The secret number is (\d+)\.$", text, re.MULTILINE)
    assert asked["one_needle"] == ("\nThe secret number is", f" {secret}")
    assert decode(context.tokens[context.needle]).strip() == secret

    key = re.findall(r"number of (\w+) is", asked["several_keys"][0])[0]
    assert asked["several_keys"][1] == f" {numbers[key]}"
    a, b = re.findall(r"numbers of (\w+) and (\w+) are", asked["several_queries"][0])[0]
    assert asked["several_queries"][1] == f" {numbers[a]} and {numbers[b]}"

    prices = re.findall(r"^One price of (\w+) is (\d+)\.$", text, re.MULTILINE)
    assert len({word for word, _ in prices}) == 1
    assert asked["several_values"][1] == f" {prices[0][1]} and {prices[1][1]}"

    values: dict[str, str] = {}
    for name, value in re.findall(r"^Let (\w+) = (\w+)\.$", text, re.MULTILINE):
        values[name] = values.get(value, value)  # a later line may use an earlier one
    assert len(values) == 3
    last = re.findall(r"value of (\w+) is", asked["variable_tracking"][0])[0]
    assert last == list(values)[-1]
    assert asked["variable_tracking"][1] == f" {values[last]}"

    lists = [line.split(", ") for line in re.findall(r"^Words: (.*)\.$", text, re.MULTILINE)]
    every = [word for words in lists for word in words]
    assert len(lists) == 4
    assert asked["common_word"][1] == f" {max(every, key=every.count)}"
    assert sorted(map(every.count, set(every)))[-2:] == [1, 4]
    assert not set(every) & set(re.findall(r"\w+", LICENSE.lower()))
    assert secret not in LICENSE


def test_a_context_is_a_slice_of_the_text_with_lines_in_it(contexts: Contexts) -> None:
    context = contexts.draw(LENGTH, 0)
    assert len(context.tokens) == LENGTH - RESERVED
    assert int(context.tokens[0]) == 0  # the special token that begins every text
    assert not context.is_text[0]
    text = bytes(contexts.tokens.tolist())
    assert bytes(context.tokens[context.is_text].tolist()) in text
    assert not set(context.needle.tolist()) & set(context.is_text.nonzero()[:, 0].tolist())


def test_a_context_is_a_pure_function_of_seed_length_and_sample(
    contexts: Contexts, loaded: Loaded
) -> None:
    again, other = (Contexts(loaded, LICENSE, planted=True, seed=seed) for seed in (0, 1))
    tokens = contexts.draw(LENGTH, 3).tokens
    assert torch.equal(tokens, again.draw(LENGTH, 3).tokens)
    assert not torch.equal(tokens, again.draw(LENGTH, 4).tokens)
    assert not torch.equal(tokens, other.draw(LENGTH, 3).tokens)


def test_without_facts_a_context_is_plain_text_of_the_full_length(loaded: Loaded) -> None:
    context = Contexts(loaded, LICENSE, planted=False, seed=0).draw(100, 0)
    assert len(context.tokens) == 100
    assert context.is_text.tolist() == [False] + [True] * 99
    assert loaded.tokenizer.decode(context.tokens[1:]) in LICENSE
    assert len(context.questions) == 0
    assert len(context.needle) == 0


def test_a_text_with_a_sentence_of_a_planted_form_is_an_error(
    contexts: Contexts, loaded: Loaded
) -> None:
    context = contexts.draw(LENGTH, 0)
    planted = loaded.tokenizer.decode(context.tokens[~context.is_text][1:])
    lines = [line for line in planted.split("\n") if line]
    assert len(lines) == 14
    for line in lines:
        with pytest.raises(UsageError, match="--text must not have .* in line 2;"):
            check_no_facts(f"\n{line}")
    with pytest.raises(UsageError, match="--text must not have"):
        Contexts(loaded, planted, planted=True, seed=0)
    Contexts(loaded, planted, planted=False, seed=0)


@pytest.mark.parametrize("words", [False, True])
def test_contexts_begin_at_sentences_and_lines(words: bool) -> None:
    """Points inside numbers end no sentence. SentencePiece decodes "▁C" as "C" at the start of a
    text and as " C" inside."""
    text = "A is 0.5 of B. C is not. D?\nE" + " and more words." * 20
    loaded = Loaded(None, word_tokenizer(text) if words else byte_tokenizer())
    contexts = Contexts(loaded, text, planted=False, seed=0)
    starts = [loaded.text_inside(int(contexts.tokens[i])) for i in contexts.breaks[:5]]
    assert starts == ([" A", " C", " D", "\nE", " and"] if words else ["A", " ", " ", "\n", "E"])


def test_start_is_what_the_tokenizer_puts_before_a_text() -> None:
    assert Loaded(None, byte_tokenizer()).start().tolist() == []
    assert Loaded(None, byte_tokenizer(start=True)).start().tolist() == [0]


# ---- reading and answers ----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("make", [large_llama, gpt2, gemma2, mistral, qwen])
def test_losses_are_those_of_the_whole_model(
    make: Callable[[], Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 has a softcap of its logits, which the head must keep."""
    monkeypatch.setattr("evals.pretrained.reading.CHUNK", chunk)
    model, tokens = make(), ids(40)
    reader = Reader(model)
    with torch.inference_mode():
        hidden, _ = reader.read(tokens)
        losses = reader.losses(hidden[:, :-1], tokens[:, 1:])
        logits = model(tokens).logits[:, :-1].double().transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)


def test_losses_of_a_large_vocabulary_keep_their_digits() -> None:
    model, tokens = llama(initializer_range=0.3, vocab_size=50_000), ids(20)
    reader = Reader(model)
    with torch.inference_mode():
        hidden, _ = reader.read(tokens)
        losses = reader.losses(hidden[:, :-1], tokens[:, 1:]).double()
        exact = reader.logits(hidden[:, :-1]).double().log_softmax(-1)
    expected = -exact.gather(2, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(losses, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("variant", [None, "ssmax(s=0.4)"])
def test_answers_are_scored_as_by_one_pass_over_everything(
    contexts: Contexts, loaded: Loaded, variant: str | None
) -> None:
    """Scores from the cache of the context against one pass without a cache; and one cache serves
    several questions."""
    context = contexts.draw(LENGTH, 0)
    substitution = AS_LOADED if variant is None else parse_substitution(variant)
    with substituted(loaded.model, substitution, contexts.tokens) as model, torch.inference_mode():
        reader = Reader(model)
        _, cache = reader.read(torch.stack([context.tokens.flip(0), context.tokens]))
        cache = only(cache, 1)
        for question in (*context.questions, context.questions[0]):
            scored = retrieval.ask(reader, cache, question)
            tokens = torch.cat([context.tokens, question.prompt, question.answer])
            first = len(tokens) - len(question.answer) - 1
            logits = model(tokens[None]).logits[0, first:-1].float()
            right = logits.log_softmax(-1).gather(1, question.answer[:, None])
            assert scored["logprob"] == pytest.approx(float(right.mean()), abs=1e-4)
            assert scored["exact"] == float(torch.equal(logits.argmax(-1), question.answer))


class Recites:
    """Stands in for a reader: after a prompt it writes these tokens, whatever it is asked."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def read(self, tokens: torch.Tensor, cache: int) -> tuple[torch.Tensor, int]:
        at = cache + torch.arange(tokens.shape[1])
        return at[None, :, None], cache + tokens.shape[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        known = torch.tensor([*self.tokens, *[0] * 50])
        return torch.nn.functional.one_hot(known[hidden[..., 0]], 300).float()


def test_exact_and_greedy_answers(contexts: Contexts, loaded: Loaded) -> None:
    question = contexts.draw(LENGTH, 0).questions[2]  # two numbers
    encode = byte_tokenizer().encode

    def scores(written: str) -> tuple[float, float]:
        # The token after prompt token i is at index i.
        reader: Any = Recites([0] * (len(question.prompt) - 1) + encode(written))
        exact = retrieval.ask(reader, 0, question)["exact"]
        return exact, retrieval.greedy(reader, 0, question, loaded.tokenizer)

    one, two = question.values
    assert scores(f" {one} and {two}") == (1.0, 1.0)
    assert scores(f" {two} and {one}") == (0.0, 1.0)
    assert scores(f" {one} and {one}") == (0.0, 0.5)
    assert scores(f" {one}7 and {two}") == (0.0, 0.5)  # a longer number is another number
    assert scores(" none at all") == (0.0, 0.0)


# ---- losses by position -----------------------------------------------------------------------


def test_bins_hold_the_losses_of_text_tokens() -> None:
    is_text = torch.ones(50, dtype=torch.bool)
    is_text[10:13] = False
    losses = torch.arange(1, 50, dtype=torch.float32)  # the loss of token i is i
    metrics, curves = positions.by_position(losses, is_text)
    assert curves["loss_edges"] == [1, 32, 48, 50]
    assert curves["loss_count"] == [31 - 3, 16, 2]
    assert curves["loss_sum"] == [sum(range(1, 32)) - 33, sum(range(32, 48)), 48 + 49]
    assert metrics["loss"] == pytest.approx((sum(range(1, 50)) - 33) / 46)
    assert metrics["loss_end"] == pytest.approx(sum(range(38, 50)) / 12)


# ---- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [large_llama, qwen, gemma2, mistral])
def test_weights_are_those_of_a_full_pass(make: Callable[[], Any]) -> None:
    """The last rows, also with a cache and a window, against the model's own weights."""
    model, tokens = make(), ids(24)[:1]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(tokens, output_attentions=True).attentions
        parse_substitution("softmax").onto(model, tokens[0])
        reader = Reader(model)
        with heads.recorded_weights(model, 3) as once:
            reader.read(tokens)
        _, cache = reader.read(tokens[:, :20])
        with heads.recorded_weights(model, 3) as continued:
            reader.read(tokens[:, 20:], cache)
    for recorded in (once, continued):
        for (w, keys), full in zip(recorded, expected, strict=True):
            # With a window the cache may hold only the last keys.
            assert torch.allclose(w, full[:, :, -3:, -w.shape[-1] :], atol=1e-5)
            assert keys.tolist() == (full[0, 0, -3:] > 0).sum(-1).tolist()


def test_equal_scores_give_even_weights() -> None:
    model, needle = parse_substitution("softmax").onto(llama(), ids()[0]), torch.tensor([3, 4, 10])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
        with heads.recorded_weights(model, 1) as weights:
            model(ids(20)[:1])
    dispersion = heads.dispersion(weights, needle, 20)
    assert dispersion["needle_weight"].tolist() == [pytest.approx([3 / 20] * 8)]
    assert dispersion["needle_entropy"].tolist() == [pytest.approx([1.0] * 8)]
    assert heads.sharpness(weights)["n_eff"].tolist() == [pytest.approx([20.0] * 8, rel=1e-5)]
    # A layer that keeps only its last keys puts no weight on a needle before them.
    shifted = heads.dispersion(weights, needle, 25)
    assert shifted["needle_weight"].tolist() == [pytest.approx([1 / 20] * 8)]


# ---- substitution and fingerprints -------------------------------------------------------------


def test_a_model_is_restored(loaded: Loaded, contexts: Contexts) -> None:
    tokens = contexts.tokens[None, :50]
    with torch.inference_mode():
        expected = loaded.model(tokens).logits
        with substituted(loaded.model, parse_substitution("ssmax(s=0.9)"), tokens[0]) as model:
            assert not torch.allclose(model(tokens).logits, expected, atol=1e-3)
        assert not is_converted(loaded.model)
        assert torch.equal(loaded.model(tokens).logits, expected)


def test_a_converted_model_keeps_what_it_learned(tmp_path: Path) -> None:
    model, tokens = large_llama(), ids()[0]
    parse_substitution("ssmax(s=0.7)").onto(model, tokens)
    with torch.inference_mode():
        expected = model(tokens[None]).logits
        with substituted(model, parse_substitution("softmax"), tokens) as other:
            assert other is not model
            assert not torch.allclose(other(tokens[None]).logits, expected, atol=1e-3)
        assert torch.equal(model(tokens[None]).logits, expected)
    # Such a model is measured as loaded, with its own weights.
    save_small_lm(tmp_path, parse_substitution("ssmax(s=0.7)").onto(large_llama(), tokens))
    again = load(Source(str(tmp_path)))
    assert is_converted(again.model)


def test_calibration_sets_the_mean_gain_to_one(loaded: Loaded, contexts: Contexts) -> None:
    substitution = parse_substitution("ssmax(calibrate=100)")
    with substituted(loaded.model, substitution, contexts.tokens) as model:
        modules = [m for m in model.modules() if isinstance(m, attnzoo.nn.Attention)]
        s = float(modules[0].s.detach()[0]) if modules[0].s.dim() else float(modules[0].s)
    log_n = torch.arange(1, 101).double().log().mean()
    assert s == pytest.approx(float(1 / log_n), rel=1e-5)


def test_fingerprints_tell_models_apart(loaded: Loaded, tmp_path: Path) -> None:
    """By weights, dtype, tokenizer and parameters of a converted model."""
    assert loaded.fingerprint() == Loaded(loaded.model, byte_tokenizer(start=True)).fingerprint()
    models: list[Loaded] = [loaded, Loaded(loaded.model, byte_tokenizer())]
    for name, dtype, variant in (
        ("plain", "float32", None), ("half", "bfloat16", None),
        ("16", "float32", "log_n(train_length=16)"), ("64", "float32", "log_n(train_length=64)"),
    ):  # fmt: skip
        model = large_llama()
        if variant is not None:
            parse_substitution(variant).onto(model, ids()[0])
        folder = save_small_lm(tmp_path / name, model, start=True)
        models.append(load(Source(str(folder), dtype=dtype)))
    assert len({model.fingerprint() for model in models}) == len(models)


@pytest.mark.parametrize("change", [{"rope_theta": 500_000.0}, {"max_position_embeddings": 99}])
def test_fingerprints_depend_on_the_config_but_not_on_the_folder(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    for name in ("one", "moved", "changed"):
        save_small_lm(tmp_path / name)
    file = tmp_path / "changed" / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("rope_parameters") or {}):
        part |= {name: value for name, value in change.items() if name in part}
    assert config != json.loads(file.read_text())
    file.write_text(json.dumps(config))
    one, moved, changed = (
        load(Source(str(tmp_path / name))).fingerprint() for name in ("one", "moved", "changed")
    )
    assert one == moved
    assert one != changed
