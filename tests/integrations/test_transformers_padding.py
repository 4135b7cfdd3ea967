"""Packed batches of converted models with attention masks, padding and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, StaticCache

from attnzoo.integrations.transformers import convert
from helpers.hf_models import (
    eager,
    gemma2,
    gpt2,
    gpt_oss,
    ids,
    large_llama,
    llama4,
    mistral,
    quiet,
)

pytestmark = quiet
LENGTHS = (7, 4, 1, 8)


def large_gpt2() -> Any:
    return gpt2(initializer_range=0.3)


def documents() -> list[Tensor]:
    return list(ids(sum(LENGTHS))[:1].split(LENGTHS, dim=1))


def batch(**options: Any) -> dict[str, Any]:
    """The documents in one row, as transformers' collator makes it."""
    made = DataCollatorWithFlattening(**options)(
        [{"input_ids": one[0].tolist()} for one in documents()]
    )
    made.pop("labels")
    return made


def with_padding(at: int, fill: int) -> dict[str, Tensor]:
    """The packed row with three hidden tokens in front of token ``at``, at position ``fill``."""
    inputs = batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    values = {"input_ids": 5, "position_ids": fill, "attention_mask": 0}
    return {
        name: torch.cat([x[:, :at], torch.full((1, 3), values[name]), x[:, at:]], dim=1)
        for name, x in inputs.items()
    }


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    ("make", "variant"),
    [
        (large_llama, "softmax"),
        (gemma2, "softmax"),
        (gpt_oss, "sink"),
        (mistral, "entmax"),
        (llama4, "ssmax"),
        (large_gpt2, "ssmax"),
    ],
    ids=["llama", "gemma2", "gpt_oss", "mistral", "llama4", "gpt2"],
)
def test_padding_masks_do_not_join_documents(make: Any, variant: str, cached: bool) -> None:
    """Masks of ones and padding on all sides, whose positions are 0 or 1 in transformers."""
    model = convert(make(), variant)
    expected = torch.cat([model(one, use_cache=False).logits for one in documents()], dim=1)
    for dtype in (torch.long, torch.int32, torch.bool, torch.float32):
        ones = torch.ones(1, sum(LENGTHS), dtype=dtype)
        actual = model(**batch(), attention_mask=ones, use_cache=cached).logits
        assert torch.allclose(actual, expected, atol=3e-5)
    windows = model.config.get_text_config().to_dict().get  # hidden tokens count in them
    limited = windows("sliding_window") or windows("attention_chunk_size")
    for at in (0, LENGTHS[0], sum(LENGTHS), *(() if limited else (3,))):
        for fill in (0, 1):
            inputs = with_padding(at, fill)
            actual = model(**inputs, use_cache=cached).logits[inputs["attention_mask"].bool()]
            assert torch.allclose(actual, expected[0], atol=3e-5)


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(("make", "variant"), [(large_llama, "softmax"), (gpt_oss, "sink")])
def test_rows_with_padding_may_be_packed_differently(make: Any, variant: str, cached: bool) -> None:
    """Positions of padding repeat, and those of visible tokens may count hidden ones."""
    model, tokens = convert(make(), variant), ids()[:1]
    rows = torch.tensor(
        [
            [1, 1, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7],  # left padding in generate
            [0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 1, 1],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],  # a hidden token
            [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],  # with a hidden first token of a document
            [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
        ]
    )
    hidden = [(0, 1, 2, 3), (8, 9, 10, 11), (5,), (5,), (11,)]
    plain = eager(make())
    seen = torch.ones_like(rows)
    for row, columns in zip(seen, hidden, strict=True):
        row[list(columns)] = 0
    inputs = {"input_ids": tokens.expand(5, -1), "position_ids": rows, "attention_mask": seen}
    actual = model(**inputs, use_cache=cached).logits
    expected = plain(**inputs, use_cache=cached).logits
    for row in (0, 1, 2, 4):
        assert torch.allclose(actual[row][seen[row] > 0], expected[row][seen[row] > 0], atol=2e-5)
    for first, end in ((0, 5), (5, 9), (9, 12)):
        alone = {name: x[3:4, first:end] for name, x in inputs.items()}
        expected = plain(**alone, use_cache=False).logits[0]
        visible = seen[3, first:end] > 0
        assert torch.allclose(actual[3, first:end][visible], expected[visible], atol=2e-5)


@pytest.mark.parametrize("make", [large_llama, llama4, mistral])
def test_packed_batch_fills_a_static_cache(make: Any) -> None:
    """The cache may be longer than the row. A row that continues a cache must not be packed."""
    model = convert(make(), "ssmax")
    expected = model(**batch(), use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=sum(LENGTHS) + 5)
    with torch.no_grad():
        actual = model(**batch(), past_key_values=cache).logits
        assert torch.allclose(actual, expected, atol=3e-5)
        with pytest.raises(ValueError, match="position_ids must not restart .* holds 20 tokens"):
            model(ids(4)[:1], position_ids=torch.tensor([[8, 9, 0, 1]]), past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "variant", "how"),
    [
        (llama4, "ssmax", "position_ids"),
        (llama4, "ssmax", "cu_seq_lens"),
        (large_llama, "entmax", "cu_seq_lens"),
    ],
)
def test_compiled_packed_batches_equal_their_documents(make: Any, variant: str, how: str) -> None:
    """With masks and caches too, and chunks that start anew with each document."""
    model = convert(make(), variant)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    expected = torch.cat([model(one, use_cache=False).logits for one in documents()], dim=1)
    packed = batch(
        return_position_ids=how == "position_ids", return_flash_attn_kwargs=how == "cu_seq_lens"
    )
    padded = with_padding(0, 1)
    batches = [packed, {**packed, "attention_mask": torch.ones_like(packed["input_ids"])}]
    with torch.no_grad():
        for one in [*batches, padded] if how == "position_ids" else batches:
            for cached in (False, True):
                actual = compiled(**one, use_cache=cached).logits[:, -sum(LENGTHS) :]
                assert torch.allclose(actual, expected, atol=5e-5)
    torch.compiler.reset()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("parts", ["model", "layers"])
def test_a_packed_batch_is_seen_in_a_graph_whose_mask_does_not_show_it(parts: str) -> None:
    """The mask of gpt-oss is made without position ids."""
    model = convert(gpt_oss(), "sink")
    expected = torch.cat([model(one, use_cache=False).logits for one in documents()], dim=1)
    for part in [model] if parts == "model" else model.model.layers:
        part.compile(backend="eager")
    for inputs in (batch(), with_padding(0, 1), with_padding(7, 1)):
        actual = model(**inputs, use_cache=False).logits
        if "attention_mask" in inputs:
            actual = actual[inputs["attention_mask"] > 0][None]
        assert torch.allclose(actual, expected, atol=5e-5)
    torch.compiler.reset()
