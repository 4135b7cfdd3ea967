"""Packed batches, sliding windows and chunks of converted models, without dense masks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorWithFlattening, ModernBertConfig, ModernBertModel
from transformers.masking_utils import create_chunked_causal_mask

import attnzoo
from attnzoo.integrations.transformers import convert, packed
from helpers.cases import params_of
from helpers.hf_checks import (
    assert_equal_gradients,
    assert_generates_as_eager,
    every_way_to_generate,
)
from helpers.hf_models import (
    eager,
    gemma2,
    gpt_oss,
    ids,
    large_llama,
    left_padding,
    llama4,
    mistral,
    quiet,
)

pytestmark = quiet

PACKED = {"llama": (large_llama, "softmax"), "gemma2": (gemma2, "softmax"),
          "gpt_oss": (gpt_oss, "sink")}  # fmt: skip
LAYOUTS = {"mistral": (mistral, "softmax"), "llama4": (llama4, "softmax")}
LENGTHS = (7, 4, 1, 8)
every_packed = pytest.mark.parametrize(("make", "variant"), PACKED.values(), ids=PACKED)
every_layout = pytest.mark.parametrize(("make", "variant"), LAYOUTS.values(), ids=LAYOUTS)


def documents() -> list[Tensor]:
    return list(ids(sum(LENGTHS))[:1].split(LENGTHS, dim=1))


def batch(**options: Any) -> dict[str, Any]:
    """The documents in one row, as transformers' collator makes it."""
    collate = DataCollatorWithFlattening(**options)
    made = collate([{"input_ids": one[0].tolist()} for one in documents()])
    made.pop("labels")
    return made


class Seen:
    """The calls of `attnzoo.attention` by converted layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        real = attnzoo.attention

        def spy(q: Tensor, k: Tensor, v: Tensor, variant: str, **options: Any) -> Any:
            self.calls.append({"queries": q.shape[2], "keys": k.shape[2], **options})
            return real(q, k, v, variant, **options)

        monkeypatch.setattr("attnzoo.nn.attention.attention", spy)

    def is_dense(self) -> bool:
        masks = [call["attn_mask"] for call in self.calls]
        return any(mask is not None and mask.shape[-2] > 1 for mask in masks)


# ---- packed batches ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
@every_packed
def test_packed_batch_equals_its_documents_one_by_one(
    make: Any, variant: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, and gradients of all weights. The documents are also longer than the window."""
    single = eager(make())
    expected = torch.cat([single(one, use_cache=False).logits for one in documents()], dim=1)
    expected.square().mean().backward()
    model, seen = convert(make(), variant), Seen(monkeypatch)
    inputs = batch(
        return_position_ids=how != "cu_seq_lens", return_flash_attn_kwargs=how != "position_ids"
    )
    actual = model(**inputs, use_cache=False).logits
    actual.square().mean().backward()
    # Without position ids, the rotations of a later document are of larger angles.
    assert torch.allclose(actual, expected, atol=1e-5 if how != "cu_seq_lens" else 3e-5)
    assert_equal_gradients(model, single, 3e-5)
    assert not seen.is_dense()
    assert all(call["segment_ids"] is not None for call in seen.calls)


@pytest.mark.parametrize("variant", ["ssmax", "entmax", "sigmoid", "cosformer", "forgetting"])
def test_packed_batch_with_other_variants_equals_its_documents(variant: str) -> None:
    """n is counted in each document."""
    model = convert(large_llama(), variant, **params_of(variant))
    expected = torch.cat([model(one).logits for one in documents()], dim=1)
    assert torch.allclose(model(**batch()).logits, expected, atol=1e-4)


@every_packed
def test_packed_batch_is_recognized_with_a_cache_too(make: Any, variant: str) -> None:
    """Transformers' masks do not show it then, and never in gpt-oss; its flash attention does."""
    model = convert(make(), variant)
    expected = model(**batch(), use_cache=False).logits
    assert torch.allclose(model(**batch(), use_cache=True).logits, expected, atol=1e-5)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
def test_chunks_start_anew_with_each_document(how: str) -> None:
    """With a cache, layers of Llama 4 get the sequence lengths and no position ids."""
    model = convert(llama4(), "ssmax")
    expected = torch.cat([model(one).logits for one in documents()], dim=1)
    inputs = batch(
        return_position_ids=how != "cu_seq_lens", return_flash_attn_kwargs=how != "position_ids"
    )
    for cached in (False,) if how == "position_ids" else (False, True):
        actual = model(**inputs, use_cache=cached).logits
        assert torch.allclose(actual, expected, atol=3e-5)
    if how != "position_ids":
        padding = torch.ones(1, sum(LENGTHS), dtype=torch.long)
        for length in (sum(LENGTHS), sum(LENGTHS) - 2):
            padding[:, length:] = 0
            actual = model(**inputs, attention_mask=padding).logits
            assert torch.allclose(actual[:, :length], expected[:, :length], atol=3e-5)


def test_rows_of_a_batch_may_be_packed_differently() -> None:
    model, tokens = convert(large_llama(), "softmax"), ids()
    rows = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [*range(12)]])
    for options in ({}, {"use_cache": False}):
        together = model(tokens, position_ids=rows, **options).logits
        for row in range(2):
            one = slice(row, row + 1)
            alone = model(tokens[one], position_ids=rows[one], **options).logits
            assert torch.allclose(together[one], alone, atol=1e-5)
    lengths = torch.tensor([0, 5, 9, 12, 24], dtype=torch.int32)
    actual = model(tokens, position_ids=rows, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths).logits
    assert torch.allclose(actual, together, atol=1e-5)


def test_first_document_of_a_row_may_be_the_end_of_one() -> None:
    """With a cache, where transformers' masks take no notice of positions."""
    model, tokens = convert(large_llama(), "softmax"), ids()[:1]
    positions = torch.tensor([[*range(7, 12), *range(4), *range(3)]])
    parts = zip(tokens.split((5, 4, 3), 1), positions.split((5, 4, 3), 1), strict=True)
    expected = torch.cat([model(one, position_ids=at).logits for one, at in parts], dim=1)
    assert torch.allclose(model(tokens, position_ids=positions).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([0, 5, 12], TypeError, "cu_seq_lens_q must be a tensor, got list"),
        (torch.tensor([0.0, 12.0]), TypeError, "cu_seq_lens_q must be int32 or int64, got"),
        (torch.tensor([[0, 5, 12]]), ValueError, r"cu_seq_lens_q must have shape \(S \+ 1,\)"),
        (torch.tensor([0, 5, 24]), ValueError, "number of tokens of the queries, 12, got 24"),
        (torch.tensor([0, 7, 5, 12]), ValueError, "cu_seq_lens_q must not decrease, got 7 and"),
    ],
)
def test_wrong_lengths_raise(lengths: Any, error: type[Exception], message: str) -> None:
    model, tokens = convert(large_llama(), "softmax"), ids()[:1]
    with pytest.raises(error, match=message):
        model(tokens, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


@pytest.mark.parametrize(
    "positions", [[0, 0, 1, 1, 2, 2], [3, 4, 5, 6, 7, 8], [0, 1, 2, 9, 10, 11]]
)
def test_positions_that_do_not_restart_are_not_packed(positions: list[int]) -> None:
    """With a cache, where transformers' masks take no notice of positions."""
    position_ids = torch.tensor([positions])
    model, tokens = convert(large_llama(), "softmax"), ids(6)[:1]
    expected = eager(large_llama())(tokens, position_ids=position_ids).logits
    assert torch.allclose(model(tokens, position_ids=position_ids).logits, expected, atol=1e-5)


def test_documents_are_recognized_while_a_mode_watches_operations() -> None:
    model = convert(large_llama(), "softmax")
    inputs = batch(return_position_ids=True)
    expected = model(inputs["input_ids"], position_ids=inputs["position_ids"]).logits
    with FlopCounterMode(display=False):
        actual = model(inputs["input_ids"], position_ids=inputs["position_ids"]).logits
    assert torch.allclose(actual, expected, atol=1e-5)


def test_position_ids_are_read_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode they are read in each layer, because they may change unnoticed."""
    model, inputs = convert(gpt_oss(), "sink"), batch()
    layers, reads, real = 2, [], packed._from_positions
    monkeypatch.setattr(packed, "_from_positions", lambda *args: reads.append(1) or real(*args))
    expected = model(**inputs).logits
    assert len(reads) == 1
    unbroken = torch.arange(sum(LENGTHS))[None]
    with torch.inference_mode():
        positions = unbroken.clone()
        model(inputs["input_ids"], position_ids=positions)
        positions.copy_(inputs["position_ids"])
        actual = model(inputs["input_ids"], position_ids=positions).logits
    assert len(reads) == 1 + 2 * layers
    assert torch.allclose(actual, expected, atol=1e-5)
    assert not torch.allclose(model(inputs["input_ids"]).logits, expected, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_position_ids_changed_in_place_are_read_again_by_another_model(mode: Any) -> None:
    first, second, inputs = (
        convert(large_llama(), "softmax"),
        convert(large_llama(), "softmax"),
        batch(),
    )
    expected = second(**inputs).logits
    with mode():
        positions = torch.arange(sum(LENGTHS))[None].clone()
        first(inputs["input_ids"], position_ids=positions)
        positions.copy_(inputs["position_ids"])
        actual = second(inputs["input_ids"], position_ids=positions).logits
    assert torch.allclose(actual, expected, atol=1e-5)


def test_lengths_of_keys_alone_raise() -> None:
    model = convert(large_llama(), "softmax")
    with pytest.raises(ValueError, match="cu_seq_lens_q must be given with cu_seq_lens_k"):
        model(ids()[:1], cu_seq_lens_k=torch.tensor([0, 12]))


def test_gradient_checkpointing_keeps_packed_gradients() -> None:
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = convert(gemma2(), "ssmax").train()
        if options is not None:
            model.gradient_checkpointing_enable(options)
        model(**batch(), use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        assert all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients[0], other, strict=True)
        )


# ---- windows and chunks -----------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@every_layout
def test_windows_and_chunks_equal_those_of_eager(
    make: Any, variant: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = {"none": None, "left": left_padding(), "right": left_padding().flip(1)}[padding]
    expected = eager(make())(ids(), attention_mask=mask).logits
    model, seen = convert(make(), variant), Seen(monkeypatch)
    actual = model(ids(), attention_mask=mask).logits
    visible = torch.ones_like(ids(), dtype=torch.bool) if mask is None else mask.bool()
    assert torch.allclose(actual[visible], expected[visible], atol=1e-5)
    assert not seen.is_dense()
    limited = seen.calls[0]["window"] is not None or seen.calls[0]["segment_ids"] is not None
    assert limited


@pytest.mark.slow
@every_way_to_generate
@every_layout
def test_generated_tokens_equal_those_of_eager(make: Any, variant: str, options: dict) -> None:
    taken = inspect.signature(create_chunked_causal_mask).parameters
    if make is llama4 and "cache_implementation" in options and "block_sequence_ids" not in taken:
        pytest.skip("before 5.20, transformers itself fails with a static cache of chunks")
    assert_generates_as_eager(make, variant, options)


@pytest.mark.parametrize("make", [gemma2, llama4])
def test_parts_of_a_prompt_continue_a_cache(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a layer with a window holds only its last keys."""
    model, seen = convert(make(), "ssmax"), Seen(monkeypatch)
    tokens = ids(20)
    logits = model(tokens, use_cache=False).logits
    cache, parts = None, []
    for part in tokens.split([7, 6, 1, 1, 5], dim=1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert torch.allclose(torch.cat(parts, 1), logits, atol=1e-5)
    assert not seen.is_dense()
    assert all(call["attn_mask"] is None for call in seen.calls if make is gemma2)


def test_decoding_of_a_window_reads_only_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a cache that keeps all keys."""
    model, tokens = convert(mistral(), "softmax"), ids(20)
    logits = model(tokens, use_cache=False).logits
    from transformers import DynamicCache

    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        model(tokens[:, :-1], past_key_values=cache)
        seen = Seen(monkeypatch)
        last = model(tokens[:, -1:], past_key_values=cache).logits
        assert torch.allclose(last, logits[:, -1:], atol=1e-5)
        assert [(call["keys"], call["attn_mask"]) for call in seen.calls] == [(5, None)] * 2


def test_window_to_both_sides_equals_that_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, local_attention=6, global_attn_every_n_layers=2,
        initializer_range=0.3,
    )  # fmt: skip
    model = ModernBertModel(config).eval()
    padding = left_padding().flip(1)
    expected = eager(model)(ids(), attention_mask=padding)[0]
    model = convert(model, "softmax")
    seen = Seen(monkeypatch)
    actual = model(ids(), attention_mask=padding)[0]
    assert torch.allclose(actual[padding.bool()], expected[padding.bool()], atol=1e-5)
    assert not seen.is_dense()
    assert sorted(call["window"] or (0, 0) for call in seen.calls) == [(0, 0), (3, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "variant"), [(gemma2, "softmax"), (gpt_oss, "sink"), (mistral, "ssmax")]
)
def test_windows_compile_as_one_graph(make: Any, variant: str) -> None:
    model = convert(make(), variant)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for inputs in ({"attention_mask": left_padding()}, {}):
            expected = model(ids(), use_cache=False, **inputs).logits
            actual = compiled(ids(), use_cache=False, **inputs).logits
            visible = inputs.get("attention_mask", torch.ones_like(ids())).bool()
            assert torch.allclose(actual[visible], expected[visible], atol=1e-5)
    torch.compiler.reset()


def test_a_variant_of_positions_raises_in_layers_with_a_sliding_window() -> None:
    with pytest.raises(ValueError, match="position_temperature .*sliding window, .*Attention"):
        convert(mistral(), "position_temperature", train_length=4)
