"""flash under torch.compile: each variant gives one graph and the results of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.nn import Attention
from helpers.cases import CASES, learned, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS

pytestmark = pytest.mark.interpreter


def results(function: Any, attend: Attention, n: int, **options: Any) -> list[Tensor]:
    leaves = [
        rand(1, heads, n, 8, seed=i).float().requires_grad_() for i, heads in enumerate((2, 1, 1))
    ]
    attend.zero_grad()
    out = function(*leaves, backend="flash", enable_gqa=True, is_causal=True, **options)
    out.square().sum().backward()
    gradients = [x.grad for x in (*leaves, *attend.parameters())]
    assert all(x is not None for x in gradients)
    return [x.detach().clone() for x in (out, *gradients)]


# While tracing, torch instantiates an autograd.Function and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "variant",
    [
        v if v == "sigmoid" else pytest.param(v, marks=pytest.mark.slow)
        for v, backends in VARIANT_BACKENDS.items()
        if backends["flash"] is RUNS
    ],
)
def test_compiles_without_graph_breaks_and_agrees_at_every_length(variant: str) -> None:
    torch.compiler.reset()
    names = () if variant in ("entmax", "adaptive_temperature") else tuple(CASES[variant].learned)
    params = params_of(variant, 40) | (learned(variant, 2) if names else {})
    attend = Attention(variant, 2, learn=names, **params)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in (9, 12, 40):
        pairs = zip(results(compiled, attend, n), results(attend, attend, n), strict=True)
        assert all(torch.equal(have, want) for have, want in pairs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dim", [16, pytest.param(20, marks=pytest.mark.slow)])
def test_exports_a_dense_mask_of_any_length(dim: int) -> None:
    """The copy of a mask depends on its length, and must not be a guard of the graph."""

    class Masked(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return attnzoo.attention(q, k, v, attn_mask=mask, backend="flash")

    def inputs(n: int) -> tuple[Tensor, ...]:
        qkv = (rand(1, 2, n, dim, seed=i).float() for i in range(3))
        return *qkv, rand(1, 1, n, n, seed=3) > -0.5

    n = torch.export.Dim("n", min=2, max=64)
    shapes = ({2: n}, {2: n}, {2: n}, {2: n, 3: n})
    program = torch.export.export(Masked(), inputs(17), dynamic_shapes=shapes).module()
    for length in (9, 16, 40):
        want = attnzoo.attention(*inputs(length)[:3], attn_mask=inputs(length)[3], backend="eager")
        assert torch.allclose(program(*inputs(length)), want, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 1])
def test_a_learned_mask_has_a_gradient_at_every_length(rows: int | None) -> None:
    torch.compiler.reset()

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        return attnzoo.attention(q, q, q, attn_mask=mask, is_causal=True, backend="flash")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in (9, 12, 40):
        q, mask = rand(1, 2, n, 8).float(), rand(2, rows or n, n, seed=1).float().requires_grad_()
        have, want = (
            torch.autograd.grad(function(q, mask).square().sum(), mask)[0]
            for function in (compiled, attend)
        )
        assert torch.equal(have, want)
