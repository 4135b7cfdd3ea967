"""Compiled decoding has two graphs, one for the prompt and one for all later tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnzoo.nn import Attention, Transformer
from helpers.cases import params_of, rand

PROMPT, LENGTH = 6, 14
STEPS = [slice(0, PROMPT), *(slice(n, n + 1) for n in range(PROMPT, LENGTH))]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "kind", "options"),
    [
        ("ssmax", None, {}),
        ("elu", None, {}),
        ("elu", "keys", {}),
        ("forgetting", None, {}),
        ("entmax", None, {"positions": "nape"}),
        ("softmax", None, {"window": 4}),
        ("softmax", None, {"wrapper": "differential"}),
    ],
)
@torch.no_grad()
def test_transformer_compiles_two_graphs(variant: str, kind: Any, options: dict[str, Any]) -> None:
    model = Transformer(20, 16, 2, 2, variant, **options).eval()
    tokens = torch.arange(LENGTH)[None] * 7 % 20
    caches = model.new_caches(LENGTH, kind)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    logits = [compiled(tokens[:, step], caches=caches) for step in STEPS]
    assert torch.allclose(torch.cat(logits, dim=1), model(tokens), atol=1e-5)
    assert graphs.frame_count == 2
    assert {cache.length for cache in caches} == {LENGTH}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attn_mask", "segment_ids"])
@torch.no_grad()
def test_masks_and_segments_of_all_tokens_compile_two_graphs(name: str) -> None:
    model = Transformer(20, 16, 2, 1, "sink").eval()
    tokens = torch.arange(LENGTH)[None] * 7 % 20
    mask = (torch.arange(LENGTH) > 1)[None, None, None]
    entries = {"attn_mask": mask, "segment_ids": torch.arange(LENGTH)[None] // 5}[name]
    caches = model.new_caches(LENGTH, "keys")
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for step in STEPS:
        out = compiled(tokens[:, step], caches=caches, **{name: entries[..., : step.stop]})
    assert torch.allclose(out[:, -1], model(tokens, **{name: entries})[:, -1], atol=1e-5)
    assert graphs.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["sink", pytest.param("taylor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_attention_compiles_two_graphs(variant: str) -> None:
    attend = Attention(variant, 2, **params_of(variant))
    q, k, v = (rand(1, 2, LENGTH, 8, seed=i).float() for i in range(3))
    cache = attend.new_cache(LENGTH)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=graphs)
    out = [compiled(*(x[:, :, step] for x in (q, k, v)), cache=cache) for step in STEPS]
    assert torch.allclose(torch.cat(out, dim=2), attend(q, k, v, is_causal=True), atol=1e-5)
    assert graphs.frame_count == 2
