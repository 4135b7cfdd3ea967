"""`varlen_attention` takes the arguments of torch's `varlen_attn`."""

from __future__ import annotations

from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import attnzoo
from helpers.cases import rand

X, ENDS = rand(6, 2, 4).float(), torch.tensor([0, 2, 6])
CALL: dict[str, Any] = {
    "query": X, "key": X, "value": X, "cu_seq_q": ENDS, "cu_seq_k": ENDS, "max_q": 4, "max_k": 4,
}  # fmt: skip


def ends_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def test_first_names_are_those_of_torch() -> None:
    names = list(signature(varlen_attn).parameters)[:7]
    assert list(signature(attnzoo.varlen_attention).parameters)[:7] == names


@pytest.mark.parametrize(
    "size", [(-1, -1), (-1, 0), (2, 0), (0, 0), (1, 2), (-1, 2), (2, -1)], ids=str
)
def test_window_size_is_that_of_torch(size: tuple[int, int]) -> None:
    """Sequences with more and with fewer keys than queries."""
    queries, keys = ends_of((2, 4, 5)), ends_of((5, 4, 3))
    q, k, v = (rand(n, 2, 8, seed=n).requires_grad_() for n in (11, 12, 12))
    longest = torch.tensor(5)
    have = attnzoo.varlen_attention(q, k, v, queries, keys, longest, longest, window_size=size)
    parts = []
    for (a, b), (c, d) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        ahead = torch.arange(d - c) - torch.arange(d - c - (b - a), d - c)[:, None]
        mask = torch.ones_like(ahead, dtype=torch.bool)
        mask &= (ahead >= -size[0]) | (size[0] == -1)
        mask &= (ahead <= size[1]) | (size[1] == -1)
        one = [x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
        out = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask)
        parts.append(out.nan_to_num(0.0).transpose(0, 1))
    want = torch.cat(parts)
    torch.testing.assert_close(have, want)
    pairs = zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (have, want)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs.nan_to_num(0.0))


def test_further_arguments_of_torch() -> None:
    plain = attnzoo.varlen_attention(**CALL, is_causal=True, return_lse=True)
    nothing = {"seqused_k": None, "block_table": None, "num_splits": None}
    options: dict[str, Any] = {"window_size": (-1, 0), "return_aux": AuxRequest(lse=True)}
    for have, want in zip(attnzoo.varlen_attention(**CALL, **options, **nothing), plain):
        assert torch.equal(have, want)
    out = attnzoo.varlen_attention(**CALL, is_causal=True, return_aux=AuxRequest())
    torch.testing.assert_close(out, plain[0])
    both = attnzoo.varlen_attention(**CALL, is_causal=True, window_size=(1, 3))
    assert torch.equal(both, attnzoo.varlen_attention(**CALL, is_causal=True, window=2))


@pytest.mark.slow
@pytest.mark.parametrize("same_ends", [False, True])
def test_a_graph_pads_to_all_tokens_if_the_longest_lengths_are_tensors(same_ends: bool) -> None:
    ends, q = ends_of((2, 4)), rand(6, 2, 8).float()
    longest, keys = torch.tensor(4), ends if same_ends else ends.clone()
    run = torch.compile(attnzoo.varlen_attention, fullgraph=True, backend="aot_eager")
    have = run(q, q, q, ends, keys, longest, longest, window_size=(-1, 0))
    torch.testing.assert_close(
        have, attnzoo.varlen_attention(q, q, q, ends, ends, 4, 4, is_causal=True)
    )
