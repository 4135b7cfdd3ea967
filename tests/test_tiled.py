"""tiled: how a call is cut into blocks changes nothing; lse; memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo
from agreement import disagreements, kept, make
from attnzoo.backends import blocks
from attnzoo.call import Call
from attnzoo.checks import check_call
from cases import CASES, VARIANTS, rand
from coverage_table import NO_LSE, NO_SCORE


@pytest.fixture(params=[(90, 3, 1), (300, 5, 2), (4000, 128, 8)], ids=str)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, rows, heads = request.param
    monkeypatch.setattr(blocks, "SCORES", scores)
    monkeypatch.setattr(blocks, "ROWS", rows)
    monkeypatch.setattr(blocks, "HEADS", heads)


def setting(variant: str, heads: str, span: str, dropout: bool = False) -> dict[str, Any]:
    return {
        "shape": (23, 31),
        "dtype": torch.float64,
        "mask": "keys" if variant in NO_SCORE else "float",
        "mask_gradient": True,
        "span": span,
        "heads": heads,
        "params": "learned" if CASES[variant].learned else "default",
        "values": "other",
        "alibi": variant not in NO_SCORE,
        "segments": span == "pair",
        "dropout": dropout,
        "lse": variant not in NO_LSE,
    }


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("heads", "span"), [("gqa", "causal"), ("mqa", "pair"), ("mha", "window")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_of_any_size_agree_with_the_definition(variant: str, heads: str, span: str) -> None:
    """Split over rows, heads and batches: outputs and all gradients."""
    inputs = make(variant, setting(variant, heads, span, dropout=heads == "gqa"))
    keep = kept(variant, "tiled", inputs)
    assert disagreements(variant, "tiled", inputs, keep=keep) == []


def facts(heads: int, kv_heads: int, **options: Any) -> Call:
    q, k = rand(2, heads, 23, 4), rand(2, kv_heads, 31, 4)
    return check_call(q, k, k, enable_gqa=True, **options)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 2)}], ids=str)
def test_blocks_cover_each_visible_score_once(kv_heads: int, options: dict[str, Any]) -> None:
    call = facts(4, kv_heads, **options)
    times = torch.zeros(2, 4, 23, 31, dtype=torch.long)
    for block in blocks.blocks(call):
        part = times[block.batches, block.heads, block.rows, block.keys]
        part += 1
        assert (block.call.batch, block.call.heads) == part.shape[:2]
        assert (block.call.queries, block.call.keys) == part.shape[2:]
        # A group is never torn apart, and the flat range of key heads is that of the block.
        assert block.call.heads % call.group == 0
        flat = torch.arange(2 * kv_heads).view(2, kv_heads)
        own = flat[block.batches, block.heads.start // call.group : block.heads.stop // call.group]
        assert torch.equal(flat.flatten()[block.kv], own.flatten())
        # The block sees of its keys what the call sees of them.
        seen = call.visible.expand(2, 4, 23, 31)
        seen = seen[block.batches, block.heads, block.rows, block.keys]
        assert torch.equal(block.call.visible.expand(seen.shape), seen)
    assert int(times.max()) == 1
    assert bool(times[call.visible.expand(2, 4, 23, 31)].all())


def expected_gain(variant: str, s: Tensor) -> Tensor:
    """Of the rows of a 5 × 5 causal call, written once more: (..., 5, 1)."""
    log_n = torch.arange(1, 6, dtype=torch.float64).log()[:, None]
    if variant == "ssmax":
        return 0.168 * log_n
    if variant == "log_n":
        return log_n / math.log(512)
    if variant == "adaptive_temperature":
        p = s.softmax(-1)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1, keepdim=True)
        beta = torch.from_numpy(np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], entropy.numpy()))
        assert bool((beta > 1).any())
        return torch.where(entropy > 0.5, beta.clamp(min=1), 1.0)
    # topk keeps five keys in the table of cases, which is all of them here.
    assert variant in ("softmax", "sink", "topk")
    return torch.ones_like(log_n)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in NO_LSE])
def test_lse_is_that_of_the_scores_without_the_sink(variant: str, backend: str) -> None:
    q, k, v = rand(2, 2, 7, 6, seed=1), rand(2, 2, 5, 6, seed=2), rand(2, 2, 5, 6, seed=3)
    params = CASES[variant].params
    out, lse = attnzoo.attention(
        q, k, v, variant, is_causal=True, return_lse=True, backend=backend, **params
    )
    assert lse.shape == (2, 2, 7)
    assert torch.equal(lse[..., :2], torch.full((2, 2, 2), float("-inf"), dtype=torch.float64))
    s = (q @ k.mT / 6**0.5)[:, :, 2:]
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    gained = expected_gain(variant, s.masked_fill(later, float("-inf"))) * s
    expected = gained.masked_fill(later, float("-inf")).logsumexp(-1)
    assert torch.allclose(lse[..., 2:], expected)
    plain = attnzoo.attention(q, k, v, variant, is_causal=True, backend=backend, **params)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_lse_of_empty_rows_sends_no_gradient(backend: str) -> None:
    q, k, v = (rand(1, 2, 4, 6, seed=i).requires_grad_() for i in range(3))
    mask = torch.tensor([True, True, False, True])[:, None].expand(4, 4)
    _, lse = attnzoo.attention(q, k, v, attn_mask=mask, return_lse=True, backend=backend)
    assert torch.equal(lse[:, :, 2], torch.full((1, 2), float("-inf"), dtype=torch.float64))
    gradients = torch.autograd.grad(lse, (q, k), torch.ones_like(lse))
    assert torch.equal(gradients[0][:, :, 2], torch.zeros(1, 2, 6, dtype=torch.float64))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_lse_is_fp32_for_low_precision_and_ignores_dropout() -> None:
    q, k, v = (rand(1, 2, 9, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    for backend in ("eager", "tiled"):
        out, lse = attnzoo.attention(q, k, v, return_lse=True, dropout_p=0.5, backend=backend)
        assert out.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        exact = (q.double() @ k.double().mT / 8**0.5).logsumexp(-1)
        assert torch.allclose(lse.double(), exact, atol=1e-5)


class Peak(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_linear(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of N² in forward or backward: none above what a block and the inputs hold."""
    n, rows = 512, 16
    monkeypatch.setattr(blocks, "SCORES", rows * n)
    monkeypatch.setattr(blocks, "ROWS", rows)
    params = {**CASES[variant].params}
    if variant == "cosformer":
        params["max_length"] = n
    q, k, v = (rand(1, 1, n, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    with Peak() as peak:
        out = attnzoo.attention(q, k, v, variant, backend="tiled", is_causal=True, **params)
        out.sum().backward()
    features = 45 if variant == "taylor" else 16
    assert 0 < peak.largest <= max(rows, features) * n
