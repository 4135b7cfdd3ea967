"""What the mask functions of transformers become: a `Mask`, and dense masks otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BigBirdPegasusConfig, BigBirdPegasusModel, CompileConfig, ViTModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    chunked_overlay,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

import attnzoo
from attnzoo.integrations.transformers import convert, masks
from attnzoo.integrations.transformers.masks import Mask, make_mask, read_mask, with_documents
from helpers.hf_models import (
    eager,
    gemma2,
    generate,
    gpt2,
    ids,
    left_padding,
    llama,
    outputs,
    quiet,
    vit,
)

pytestmark = quiet


def test_masks_that_say_nothing_about_single_keys_hold_no_values() -> None:
    window = sliding_window_causal_mask_function(4)
    assert make_mask(2, 12, 12, mask_function=bidirectional_mask_function) is None
    for mask, (queries, keys), expected in (
        (make_mask(2, 12, 12), (12, 12), (True, None, 0, 12)),
        (make_mask(2, 4, 4, mask_function=window), (4, 4), (True, None, 0, 4)),
        (make_mask(2, 1, 20, q_offset=torch.tensor(7)), (1, 20), (False, None, 0, 8)),
        (make_mask(2, 12, 20), (12, 20), (True, None, 0, 12)),
        (make_mask(2, 3, 10, q_offset=7), (3, 10), (True, None, 0, 10)),
        (make_mask(2, 12, 12, mask_function=window), (12, 12), (True, 4, 0, 12)),
        (make_mask(2, 1, 12, 11, mask_function=window), (1, 12), (False, None, 8, 12)),
        (make_mask(2, 2, 12, 10, mask_function=window), (2, 12), (True, 4, 7, 12)),
    ):
        assert isinstance(mask, Mask)
        assert read_mask(mask, False, queries, keys) is mask
        assert (mask.arguments["is_causal"], mask.window, mask.start, mask.stop) == expected
        assert (mask.attn_mask, mask.segment_ids) == (None, None)


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]]).expand(2, -1)
DOCUMENTS = torch.tensor([[0] * 7 + [7] * 5]).expand(2, -1)  # the index of their first tokens


def in_each_document(function: Any) -> Any:
    """Each document as if it were alone."""

    def alone(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return function(batch, head, POSITIONS[batch, query], POSITIONS[batch, key])

    return and_masks(packed_sequence_mask_function(DOCUMENTS), alone)


def functions() -> dict[str, tuple[Any, Any]]:
    """By name, mask functions that transformers makes, and functions of the keys to be seen."""
    none, left = torch.tensor([0, 0]), torch.tensor([0, 4])
    bases = {
        "causal": causal_mask_function,
        "window": sliding_window_causal_mask_function(3),
        "both sides": sliding_window_bidirectional_mask_function(3),
        "all": bidirectional_mask_function,
        "chunk": chunked_causal_mask_function(3, none),
    }
    in_packs = {f"packed {name}": (f, in_each_document(f)) for name, f in bases.items()}
    after = chunked_causal_mask_function(3, left)
    return {n: (f, f) for n, f in {**bases, "chunk after padding": after}.items()} | in_packs


@pytest.mark.parametrize("name", functions())
def test_every_recognized_mask_shows_the_same_keys_as_the_dense_one(name: str) -> None:
    function, expected = functions()[name]
    for padding in (None, left_padding().bool(), left_padding().flip(1).bool()):
        dense = masks._dense(2, 12, 12, 0, 0, expected, padding)
        shown = with_documents(DOCUMENTS, padding) if "packed" in name else padding
        made = make_mask(2, 12, 12, mask_function=function, attention_mask=shown)
        if made is None:
            assert (name, padding) == ("all", None)
        else:
            assert isinstance(made, Mask)
        mask = read_mask(made, False, 12, 12)
        q = torch.zeros(2, 1, 12, 4)
        weights = attnzoo.attention_weights(q, q, q, **mask.arguments)
        rows = torch.ones(2, 12, dtype=torch.bool) if padding is None else padding
        assert torch.equal((weights > 0).squeeze(1)[rows], dense.squeeze(1)[rows])


def test_other_mask_functions_become_dense_masks() -> None:
    def other(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key != 3

    two = and_masks(sliding_window_causal_mask_function(3), sliding_window_causal_mask_function(5))
    both = and_masks(causal_mask_function, sliding_window_bidirectional_mask_function(3))
    for function in (
        or_masks(causal_mask_function, other),
        and_masks(causal_mask_function, other),
        two,
        both,
        sliding_window_overlay(3),
        chunked_overlay(3, torch.tensor([0, 0])),
    ):
        made = make_mask(2, 12, 12, mask_function=function)
        assert isinstance(made, Tensor)
        assert (made.dtype, made.shape) == (torch.bool, (2, 1, 12, 12))


def test_models_that_change_their_masks_get_dense_ones() -> None:
    """A static cache that may be compiled gets a `Mask` for its single query instead."""
    window = sliding_window_causal_mask_function(3)
    for function in (causal_mask_function, window):
        options: dict[str, Any] = {"mask_function": function, "allow_is_causal_skip": False}
        made = make_mask(2, 12, 12, **options)
        assert isinstance(made, Tensor)
        assert (made.dtype, made.shape) == (torch.bool, (2, 1, 12, 12))
        first = 0 if function is causal_mask_function else 5
        made = make_mask(2, 1, 8, 7, **options)
        assert isinstance(made, Tensor)
        assert made.tolist() == [[[[False] * first + [True] * (8 - first)]]] * 2
        made = make_mask(2, 1, 20, 7, **options)
        assert isinstance(made, Mask)
        assert (made.start, made.stop, made.attn_mask) == (first, 8, None)
    made = make_mask(
        2, 12, 12, mask_function=bidirectional_mask_function, allow_is_bidirectional_skip=False
    )
    assert isinstance(made, Tensor)
    assert made.dtype == torch.bool


def test_mask_of_another_call_raises() -> None:
    """As of a model that adds keys after it has made its masks."""
    made = make_mask(2, 12, 12)
    with pytest.raises(ValueError, match="for 12 queries and 14 keys, .* got one for 12 .* and 12"):
        read_mask(made, True, 12, 14)


def test_mask_of_one_query_without_causality_holds_for_all_queries() -> None:
    """As in BridgeTower, where eager attention broadcasts it."""
    padding = left_padding().bool()
    both = {"mask_function": bidirectional_mask_function, "attention_mask": padding}
    one, every = make_mask(2, 1, 12, **both), make_mask(2, 12, 12, **both)
    assert isinstance(one, Mask)
    assert isinstance(every, Mask)
    broadcast, expected = (read_mask(mask, False, 12, 12) for mask in (one, every))
    assert broadcast.shape == expected.shape
    q, k, v = torch.randn(3, 2, 4, 12, 8)
    shown = [attnzoo.attention(q, k, v, **mask.arguments) for mask in (broadcast, expected)]
    assert torch.equal(*shown)
    causal = make_mask(2, 1, 12, q_offset=11, attention_mask=padding)
    with pytest.raises(ValueError, match="for 12 queries and 12 keys, .* got one for 1 queries"):
        read_mask(causal, False, 12, 12)


@pytest.mark.parametrize("name", functions())
def test_mask_added_to_scores_hides_the_same_keys_as_the_dense_one(name: str) -> None:
    function, expected = functions()[name]
    padding = left_padding().bool()
    dense = masks._dense(2, 12, 12, 0, 0, expected, padding)
    shown = with_documents(DOCUMENTS, padding) if "packed" in name else padding
    scores = torch.zeros(2, 3, 12, 12) + make_mask(2, 12, 12, 0, 0, function, shown)
    assert torch.equal((scores == 0)[:, 0][padding], dense[:, 0][padding])


@pytest.mark.parametrize("padding", [left_padding(), left_padding().flip(1)], ids=["left", "right"])
def test_module_that_adds_its_mask_itself_gets_it_too(padding: Tensor) -> None:
    """The encoder computes softmax itself for a short input, and shares the decoder's config."""
    sizes: dict[str, Any] = {f"{who}_{what}": n for who in ("encoder", "decoder")
             for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = BigBirdPegasusConfig(vocab_size=99, d_model=32, max_position_embeddings=64, **sizes)
    model = BigBirdPegasusModel(config).eval()
    for parameter in model.parameters():  # weights large enough that the mask changes the outputs
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(7)}
    expected = eager(model)(**inputs, attention_mask=padding).last_hidden_state
    assert not torch.allclose(model(**inputs).last_hidden_state, expected, atol=1e-2)
    actual = convert(model, "softmax")(**inputs, attention_mask=padding).last_hidden_state
    assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "variant"), [(llama, "softmax"), (gpt2, "ssmax"), (gemma2, "softmax")]
)
def test_masks_made_by_generate_pass_into_its_compiled_graph(make: Any, variant: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    model = convert(make(), variant)
    compilation: Any = CompileConfig(backend=backend, fullgraph=True, mode=None)
    compilation._compile_all_devices = True
    static = {"cache_implementation": "static"}
    expected = generate(model, disable_compile=True, **static)
    assert torch.equal(generate(model, compile_config=compilation, **static), expected)
    assert graphs
    torch.compiler.reset()


def test_causal_call_without_a_mask_whose_keys_are_unclear_raises() -> None:
    with pytest.raises(ValueError, match="attention_mask must be given for a causal call with 1"):
        read_mask(None, True, 1, 7)
    assert read_mask(None, False, 1, 7).stop == 7


def test_flag_of_a_module_does_not_count_in_a_model_that_supports_only_eager_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in BridgeTower, whose layers for images say that they are causal."""
    for kind in ("sdpa", "flash_attn", "flex_attn"):
        monkeypatch.setattr(ViTModel, f"_supports_{kind}", False)
    model = eager(vit())
    flagged = [module for module in model.modules() if hasattr(module, "is_causal")]
    assert len(flagged) == 2
    for module in flagged:
        monkeypatch.setattr(module, "is_causal", True)
    expected = outputs(model)
    assert torch.allclose(outputs(convert(model, "softmax")), expected, atol=1e-6)
