"""Types of the public functions: user code passes pyright in strict mode."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from attnzoo.core import registry
from helpers.typecheck import pyright, wrong_lines

USER = """
from typing import assert_type

import torch
from torch import Tensor

import attnzoo

q, k, v = torch.randn(3, 1, 4, 16, 8).unbind()
flag = len(attnzoo.list_variants()) > 1
pair = tuple[Tensor, Tensor]
assert_type(attnzoo.attention(q, k, v, "ssmax", is_causal=True, s=0.2), Tensor)
assert_type(attnzoo.attention(q, k, v, return_lse=True, window=(2, 0)), pair)
assert_type(attnzoo.attention(q, k, v, return_lse=flag), Tensor | pair)
out, lse, largest = attnzoo.attention(q, k, v, return_lse=True, return_max_logits=True)
assert_type(largest, Tensor)
assert_type(attnzoo.attention_weights(q, k, v, "entmax", alpha=torch.tensor(1.7)), Tensor)
assert_type(attnzoo.attention_weights(q, k, v, "topk", top_k=3, return_lse=True), pair)
print(attnzoo.explain(q, k, v, "sigmoid", bias=None).chosen)
out, state = attnzoo.linear_attention(q, k, v, "taylor", order=2)
out, state = attnzoo.linear_attention(q, k, v, "taylor", state=state)
assert_type(out, Tensor)
print(state.length, attnzoo.get_variant("ssmax").formula)


def weights(q: Tensor, k: Tensor, call: attnzoo.Call, shift: Tensor | float) -> Tensor:
    scores = (call.scores(q, k) + call.bias + shift).relu()
    return call.zero_hidden(scores / call.counts.clamp(min=1)[..., None])


params = (attnzoo.Param("shift", 0.0),)
relu = attnzoo.Variant("typed_relu", "ReLU(z)/n", "-", weights, params, normalized=False)
assert_type(attnzoo.register_variant(relu), attnzoo.Variant)
assert_type(attnzoo.attention(q, k, v, relu.name, shift=torch.zeros(4)), Tensor)
"""

WRONG = """
import torch

import attnzoo

x = torch.randn(1, 4, 16, 8)
attnzoo.attention(x, x, x, return_lse=True).sum()
attnzoo.attention(x, x, x, is_causal="yes")
attnzoo.attention_weights(x, x, x, window=2.0)
attnzoo.attention_weights(x, x, x, return_lse=True).sum()
attnzoo.explain(x, x, x, dropout_p="0.1")
attnzoo.linear_attention(x, x, x, "taylor", scale="1")
attnzoo.attention(x, x, x, "ssmax", s="0.2")
"""


@pytest.mark.slow
def test_user_script_passes_pyright_strict(tmp_path: Path) -> None:
    assert pyright(tmp_path, USER) == []


@pytest.mark.slow
def test_pyright_rejects_each_wrong_line(tmp_path: Path) -> None:
    assert wrong_lines(tmp_path, WRONG) == {
        n for n, line in enumerate(WRONG.splitlines()) if re.match("attnzoo", line)
    }


def test_user_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    (tmp_path / "user.py").write_text(USER)
    user = runpy.run_path(str(tmp_path / "user.py"))
    assert user["state"].length == 2 * user["q"].shape[2]
