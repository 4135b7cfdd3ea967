"""Types of attnzoo.nn: a user script passes pyright in strict mode."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from helpers.typecheck import pyright, wrong_lines

USER = """
from typing import assert_type

import torch
from torch import Tensor, nn

import attnzoo
from attnzoo.nn import Attention, Cache, KVCache, MultiheadAttention, StateCache, Taylor
from attnzoo.nn import AdaptiveSoftmax, MixtureOutput, OutputLayer, TargetLoss, Transformer
from attnzoo.nn import attend, parameter_groups, replace

pair = tuple[Tensor, Tensor]
flag = len(attnzoo.list_variants()) > 1
q, k, v = torch.randn(3, 1, 4, 16, 8).unbind()
module = Attention("ssmax", num_heads=4, s=0.2)
assert_type(module(q, k, v, is_causal=True, window=4), Tensor)
assert_type(module(q, k, v, need_weights=True), pair)
assert_type(module(q, k, v, return_lse=True), pair)
assert_type(module(q, k, v, need_weights=flag), Tensor | pair)
host = Attention("sink", num_heads=4, given=("b",), softcap=30.0)
assert_type(host(q, k, v, is_causal=True, b=torch.zeros(4)), Tensor)

assert_type(module.new_cache(32), Cache)
cache = KVCache(max_length=32)
assert_type(module.new_cache(32, "keys"), KVCache)
assert_type(Attention("taylor", 4).new_cache(32, "state"), StateCache)
with torch.no_grad():
    assert_type(module(q, k, v, cache=cache), Tensor)
    assert_type(attend(cache, q, k, v, "ssmax", return_lse=True), pair)
    assert_type(attend(KVCache(16), q, k, v, "ssmax", return_max_logits=True), tuple[Tensor, ...])
assert_type(cache.keys, Tensor | None)

x = torch.randn(2, 10, 64)
layer = MultiheadAttention(64, 4, batch_first=True, variant="entmax")
assert_type(layer(x, x, x), pair)
assert_type(layer(x, x, x, need_weights=False), tuple[Tensor, None])
decoder = replace(nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4), 1), "ssmax")
assert_type(decoder, nn.TransformerDecoder)
assert_type(replace(nn.MultiheadAttention(64, 4), "ssmax"), MultiheadAttention)
assert_type(Taylor(64, 4)(x, is_causal=True), Tensor)

model = Transformer(100, embed_dim=64, num_heads=4, depth=2, variant="ssmax")
logits = model(torch.randint(100, (1, 12)))
assert_type(logits, Tensor)
states = model.states(torch.randint(100, (1, 12)))
assert_type(model.loss(states, torch.zeros(1, 12, dtype=torch.long)), Tensor)
head = OutputLayer(64, 100, "entmax", alpha=1.5)
result = head(states, torch.zeros(1, 12, dtype=torch.long))
assert_type(result, TargetLoss)
assert_type(result.output, Tensor)
assert_type(head.log_prob(states), Tensor)
values, classes = head.topk(states, 3)
assert_type(classes, Tensor)
mixture = MixtureOutput(64, 100, 4, mix="contexts")
adaptive = AdaptiveSoftmax(64, 100, [10, 30], ("softmax", {"softcap": 5.0}), "entmax")
for other in (mixture, adaptive):
    assert_type(other(states, torch.zeros(1, 12, dtype=torch.long)), TargetLoss)
    assert_type(Transformer(100, 64, 4, 2, output=other)(torch.tensor([[1, 2]])), Tensor)
assert_type(AdaptiveSoftmax.from_frequencies(64, [3, 2, 1]), AdaptiveSoftmax)
optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1))
"""

WRONG = """
import torch

from attnzoo.nn import Attention, Transformer

q = torch.randn(1, 4, 16, 8)
Attention("ssmax", 4)(q, q, q, need_weights=True).sum()
Attention("ssmax", 4)(q, q, q, causal=True)
Transformer(9, 8, 2, 1)(q, cache=None)
"""


def test_user_code_runs(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    user = runpy.run_path(str(tmp_path / "user.py"))
    assert user["cache"].length == 2 * user["q"].shape[2]  # two calls with it


@pytest.mark.slow
def test_user_code_passes_pyright_strict(tmp_path: Path) -> None:
    assert pyright(tmp_path, USER) == []


@pytest.mark.slow
def test_wrong_user_code_is_reported(tmp_path: Path) -> None:
    assert wrong_lines(tmp_path, WRONG) == {6, 7, 8}
