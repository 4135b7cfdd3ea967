"""How a converted model begins: at the model's own attention, or with calibrated values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import attnzoo
from attnzoo.integrations.transformers import convert, from_pretrained
from helpers.cases import CASES, params_of
from helpers.hf_models import LlamaForCausalLM, bert, ids, left_padding, llama, outputs, quiet

pytestmark = quiet
SOFTMAX = [name for name in CASES if attnzoo.get_variant(name).identity is not None]
OTHERS = [name for name in CASES if name not in SOFTMAX]


def scale(model: LlamaForCausalLM) -> torch.Tensor:
    return model.model.layers[0].self_attn.attnzoo.s


# ---- start="identity" -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("variant", SOFTMAX)
def test_it_starts_as_what_the_model_was(variant: str, make: Any) -> None:
    """Left-padded."""
    model = convert(make(), variant, start="identity")
    assert torch.allclose(outputs(model), outputs(make()), atol=1e-6)


def test_the_variants_that_can() -> None:
    assert set(SOFTMAX) == {"softmax", "ssmax", "sink"}


def test_all_that_makes_it_softmax_is_learned() -> None:
    """ssmax's b too, which is fixed by default: without it, s alone would have to leave 0."""
    model = convert(llama(), "ssmax", start="identity")
    attend = model.model.layers[0].self_attn.attnzoo
    assert {name for name, _ in attend.named_parameters()} == {"s", "b"}
    assert (attend.s.tolist(), attend.b.tolist()) == ([0.0] * 4, [1.0] * 4)
    outputs(model).square().sum().backward()
    assert all(bool((p.grad != 0).all()) for p in attend.parameters())
    fixed = convert(llama(), "ssmax", start="identity", learn=("s",))
    assert {n for n, _ in fixed.model.layers[0].self_attn.attnzoo.named_parameters()} == {"s"}
    assert torch.allclose(outputs(fixed), outputs(llama()), atol=1e-6)


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    model = convert(llama(), "ssmax", start="identity")
    model.save_pretrained(tmp_path)
    again = from_pretrained(LlamaForCausalLM, tmp_path)
    assert {name for name, _ in again.named_parameters() if name.endswith(".b")} != set()
    assert torch.equal(outputs(again), outputs(model))


@pytest.mark.parametrize("variant", OTHERS)
def test_variants_that_cannot_be_softmax_say_so(variant: str) -> None:
    model = llama()
    with pytest.raises(ValueError, match=f"'{variant}' softmax, so it cannot start at the model's"):
        convert(model, variant, start="identity", **params_of(variant))
    assert not hasattr(model.config, "attnzoo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "zero"}, "start must be 'identity' or None, got 'zero'"),
        ({"start": "identity", "s": 0.1}, "start='identity' sets s: leave it out"),
        ({"start": "identity", "calibrate": ids()}, "give calibrate or start, not both"),
        ({"inputs": ids(), "calibrate": ids()}, "give calibrate or inputs, not both"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
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
def test_inputs_in_all_their_forms(name: str, batch: Any) -> None:
    model = convert(llama(), "ssmax", **{name: batch})
    log_n = torch.arange(1, 41).float().log().mean()
    expected = 1 / log_n if name == "calibrate" else torch.tensor(0.168)
    assert torch.allclose(scale(model), expected.expand(4))


def test_the_mean_is_over_the_rows_of_all_batches() -> None:
    batches = [{"input_ids": ids(12), "attention_mask": left_padding()}, ids(30)]
    found = scale(convert(llama(), "ssmax", calibrate=batches))
    log_n = torch.cat([torch.arange(1, n + 1).float().log() for n in (12, 8, 30, 30)])
    assert torch.allclose(found, 1 / log_n.mean().expand(4))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            "text",
            TypeError,
            "must be a tensor of input_ids, a mapping .*, or a list of these; got str",
        ),
        ([[1, 2], [3, 4]], TypeError, "got list of list"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be a tensor, got list; a tokenizer"),
        ([], ValueError, "must hold at least one batch, got none"),
        (ids(1), ValueError, "give sequences of more than one token"),
    ],
)
def test_inputs_that_are_none(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"calibrate.*{message}"):
        convert(llama(), "ssmax", calibrate=batch)
