"""Variants without a softmax, compared with the formulas and the code of their papers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from helpers.cases import rand
from helpers.scored import agree, grads, weights_of

BACKENDS = ["eager", "tiled"]

LENGTHS_OF_HISTORIES = (4, 0, 7, 1)


def hstu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lengths: Sequence[int]) -> Tensor:
    """HSTU's attention to jagged histories (T, H, D) as its authors compute it, one loop per pair.

    The bias of a query at i and a key at j is that of i − j ≥ 0. All weights are divided by the
    largest length, and hidden weights, not scores, are set to 0.
    """
    rows = []
    for history in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        queries, keys, values = history
        for i, query in enumerate(queries):
            out = torch.zeros_like(values.sum(0))
            for j in range(i + 1):
                score = 0.3 * (query * keys[j]).sum(-1) + bias[:, i - j]
                out = out + (score * torch.sigmoid(score) / max(lengths))[:, None] * values[j]
            rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_silu_on_jagged_histories_equals_hstu(backend: str) -> None:
    total, most = sum(LENGTHS_OF_HISTORIES), max(LENGTHS_OF_HISTORIES)
    q, k, v = (rand(total, 2, 6, seed=i) for i in range(3))
    bias = rand(2, most, seed=4)
    ends = torch.tensor([0, *LENGTHS_OF_HISTORIES]).cumsum(0)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        # A key at j has the entry most − 1 + j − i. Those with j > i are hidden.
        table = torch.cat([bias.flip(1), torch.zeros(2, most - 1, dtype=bias.dtype)], 1)
        return attnzoo.varlen_attention(
            q, k, v, ends, ends, most, most, "silu", is_causal=True, scale=0.3,
            relative_bias=table, length=most, backend=backend,
        )  # fmt: skip

    agree(
        grads(ours, q, k, v, bias),
        grads(lambda *inputs: hstu(*inputs, LENGTHS_OF_HISTORIES), q, k, v, bias),
    )


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lssa_equals_its_pseudocode(backend: str) -> None:
    """The causal weights of row i are softplus(log d · log i · cos), divided by their sum."""
    inputs = [rand(2, 3, 9, 6, seed=i) for i in range(3)]

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = torch.arange(1, 10, dtype=torch.float64)[:, None]
        scores = math.log(6) * counts.log() * torch.einsum("bhid,bhjd->bhij", unit(q), unit(k))
        w = (1 + scores.exp()).log() * torch.ones(9, 9, dtype=torch.float64).tril()
        return (w / w.sum(-1, keepdim=True)) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = dict(scale=math.log(6), is_causal=True, backend=backend)
        return attnzoo.attention(unit(q), unit(k), v, "lssa", **options)

    agree(grads(ours, *inputs), grads(theirs, *inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lssa_of_rows_far_below_zero_is_finite(backend: str) -> None:
    """In fp32 the softplus of −200 is 0. In fp64 the sum of the row, e⁻²⁰⁰, is far below eps."""
    for dtype in (torch.float32, torch.float64):
        w = weights_of(torch.full((2, 5), -200.0, dtype=dtype), "lssa", backend)
        assert torch.equal(w.float(), torch.zeros(2, 5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_screening_with_a_learned_acceptance_width(backend: str) -> None:
    """Both parameterizations of the paper: width σ(s), and r = e^s + 1 with s of opposite sign.

    The keys are rotated after they are normalized, as by the paper's position encoding.
    """
    inputs = [rand(2, 3, 9, 6, seed=i) for i in range(3)]
    logits = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    rotation = torch.linalg.qr(rand(6, 6, seed=5)).Q

    def theirs(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        cosine = F.cosine_similarity(q[:, :, :, None], (k @ rotation)[:, :, None], dim=-1)
        width = torch.sigmoid(s)[:, None, None]
        trimmed = (1 - (1 - cosine) / width).clamp(min=0)
        return (trimmed.square() * torch.ones(9, 9, dtype=torch.float64).tril()) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        return attnzoo.attention(
            unit(q), unit(k) @ rotation, v, "screening", r=(-s).exp() + 1, scale=1.0,
            is_causal=True, backend=backend,
        )  # fmt: skip

    agree(grads(ours, *inputs, logits), grads(theirs, *inputs, logits))
