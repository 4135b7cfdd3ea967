"""Initial values of a converted model: start="identity" and calibrate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import attnzoo
from attnzoo.integrations.transformers import convert, from_pretrained
from helpers.cases import VARIANTS, params_of
from helpers.hf_models import LlamaForCausalLM, bert, ids, left_padding, llama, outputs, quiet

pytestmark = quiet
SOFTMAX = [name for name in VARIANTS if attnzoo.get_variant(name).identity is not None]
OTHERS = [name for name in VARIANTS if name not in SOFTMAX]


def scale(model: LlamaForCausalLM) -> torch.Tensor:
    return model.model.layers[0].self_attn.attnzoo.s


# ---- start="identity" -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("variant", SOFTMAX)
def test_identity_start_keeps_the_outputs_with_padding(variant: str, make: Any) -> None:
    model = convert(make(), variant, start="identity")
    assert torch.allclose(outputs(model), outputs(make()), atol=1e-6)


def test_training_changes_a_sink_that_starts_at_minus_ten_but_not_with_start_identity() -> None:
    tokens = ids()
    for params, moves in (({"b": -10.0}, True), ({"start": "identity"}, False)):
        model = convert(llama(), "sink", **params)
        sinks = [p for name, p in model.named_parameters() if name.endswith("attnzoo.b")]
        before = torch.stack(sinks).detach().clone()
        optimizer = torch.optim.AdamW(sinks, lr=1e-2, weight_decay=0.0)
        for _ in range(5):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        assert (not torch.equal(torch.stack(sinks), before)) is moves


def test_identity_start_makes_all_parameters_that_it_sets_learned() -> None:
    """The parameter b of ssmax is fixed by default, but start="identity" makes it learned."""
    model = convert(llama(), "ssmax", start="identity")
    attend = model.model.layers[0].self_attn.attnzoo
    assert {name for name, _ in attend.named_parameters()} == {"s", "b"}
    assert (attend.s.tolist(), attend.b.tolist()) == ([0.0] * 4, [1.0] * 4)
    outputs(model).square().sum().backward()
    assert all(bool((p.grad != 0).all()) for p in attend.parameters())
    fixed = convert(llama(), "ssmax", start="identity", learn=("s",))
    assert {n for n, _ in fixed.model.layers[0].self_attn.attnzoo.named_parameters()} == {"s"}
    assert torch.allclose(outputs(fixed), outputs(llama()), atol=1e-6)


def test_identity_start_is_saved_and_loaded(tmp_path: Any) -> None:
    model = convert(llama(), "ssmax", start="identity")
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(LlamaForCausalLM, tmp_path)
    assert {name for name, _ in loaded.named_parameters() if name.endswith(".b")} != set()
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("variant", OTHERS)
def test_identity_start_of_other_variants_raises(variant: str) -> None:
    model = llama()
    with pytest.raises(
        ValueError, match=f"start must be None: no parameters make '{variant}' equal"
    ):
        convert(model, variant, start="identity", **params_of(variant))
    assert not hasattr(model.config, "attnzoo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "zero"}, "start must be 'identity' or None, got 'zero'"),
        (
            {"start": "identity", "s": 0.1},
            "s must not be given with start='identity', which sets s",
        ),
        ({"start": "identity", "calibrate": ids()}, "start must be None when calibrate is given"),
        ({"inputs": ids(), "calibrate": ids()}, "inputs must be None when calibrate is given"),
    ],
)
def test_contradictory_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(llama(), "ssmax", **options)


# ---- calibrate --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        ids(40),
        ids(40)[0],
        {"input_ids": ids(40)},
        BatchEncoding({"input_ids": ids(40)}),
        [ids(40), ids(40)],
        [{"input_ids": ids(40)}, ids(40)[0]],
    ],
    ids=["tensor", "one sequence", "dict", "encoding", "list", "list of both"],
)
@pytest.mark.parametrize("name", ["calibrate", "inputs"])
def test_calibrate_and_inputs_accept_each_type_of_batch(name: str, batch: Any) -> None:
    model = convert(llama(), "ssmax", **{name: batch})
    log_n = torch.arange(1, 41).float().log().mean()
    expected = 1 / log_n if name == "calibrate" else torch.tensor(0.168)
    assert torch.allclose(scale(model), expected.expand(4))


def test_inputs_may_be_results_of_the_model() -> None:
    """They need not be leaves of the graph."""
    model = llama()
    convert(model, "ssmax", inputs={"inputs_embeds": model.get_input_embeddings()(ids())})
    assert outputs(model).isfinite().all()


def test_calibrate_averages_over_the_rows_of_all_batches() -> None:
    batches = [{"input_ids": ids(12), "attention_mask": left_padding()}, ids(30)]
    actual = scale(convert(llama(), "ssmax", calibrate=batches))
    log_n = torch.cat([torch.arange(1, n + 1).float().log() for n in (12, 8, 30, 30)])
    assert torch.allclose(actual, 1 / log_n.mean().expand(4))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            "text",
            TypeError,
            "must be a tensor of input_ids, a mapping .*, or a list of these, got str",
        ),
        ([[1, 2], [3, 4]], TypeError, "got list of list"),
        (
            {"input_ids": [[1, 2]]},
            TypeError,
            "input_ids must be a tensor, got list; call the tokenizer",
        ),
        ([], ValueError, "must hold at least one batch, got none"),
        (ids(1), ValueError, "must hold sequences of more than one token"),
    ],
)
def test_wrong_inputs_raise(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"calibrate.*{message}"):
        convert(llama(), "ssmax", calibrate=batch)


def test_noise_follows_the_mode_of_the_model() -> None:
    tokens = torch.arange(9)[None]
    model = llama().eval()
    plain = model(tokens).logits
    convert(model, "noisy", std=1.0)
    torch.testing.assert_close(model(tokens).logits, plain)
    model.train()
    assert not torch.allclose(model(tokens).logits, plain, atol=1e-4)


# ---- the warning for trained models -----------------------------------------------------------


@pytest.fixture
def loaded(tmp_path: Any) -> Any:
    llama(initializer_range=0.3).save_pretrained(tmp_path)
    return LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_that_are_no_softmax_of_scores_warn_for_a_loaded_model(
    variant: str, loaded: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """A model that computes softmax after the conversion does not warn."""
    before = outputs(loaded)
    convert(loaded, variant, **params_of(variant))
    messages = [str(one.message) for one in recwarn]
    if messages:
        (message,) = messages
        assert message.startswith(f"train the converted model before you use it: {variant!r} does")
        assert "start='identity' keeps it for " in message
        assert "ssmax" in message
        assert recwarn[0].filename == __file__
    expected = attnzoo.get_variant(variant).scores is None
    expected &= not torch.allclose(outputs(loaded), before, atol=1e-5)
    assert bool(messages) is expected


def test_a_wrapper_warns_for_a_loaded_model(loaded: Any) -> None:
    with pytest.warns(UserWarning, match="^train the converted .* the wrapper 'laser' does not"):
        convert(loaded, "softmax", wrapper="laser")


def test_models_that_are_new_or_start_at_softmax_do_not_warn(loaded: Any) -> None:
    convert(llama(), "sigmoid")
    convert(loaded, "ssmax", start="identity")
    convert(loaded, "sigmoid", warn=False)
    with pytest.raises(TypeError, match="warn must be"):
        convert(loaded, "sigmoid", warn="no")


def test_a_warning_that_is_an_error_leaves_the_model_unchanged(loaded: Any) -> None:
    before = outputs(loaded)
    with pytest.raises(UserWarning, match="train the converted model"):
        convert(loaded, "sigmoid")
    assert not hasattr(loaded.config, "attnzoo")
    assert torch.equal(outputs(loaded), before)
