"""One graph of torch.export or torch.compile serves all lengths, few and many scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import attnzoo
from attnzoo.backends.selection import FEW_SCORES
from attnzoo.nn import MultiheadAttention, Transformer
from helpers.cases import ALL_VARIANTS, WITH_FORMS, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


LENGTHS = (2, 40, 65, 128, 129, 256, 257, 300)
assert FEW_SCORES == 2 * 256**2


def inputs(n: int) -> tuple[Tensor, ...]:
    return tuple(rand(1, 2, n, 4, seed=i).float() for i in range(3))


class Attend(nn.Module):
    def __init__(self, variant: str, backend: str | None = None, is_causal: bool = True) -> None:
        super().__init__()
        self.variant, self.params = variant, params_of(variant, 512)
        self.options: dict[str, Any] = {"backend": backend, "is_causal": is_causal}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attnzoo.attention(q, k, v, self.variant, **self.options, **self.params)


def exported(model: nn.Module, example: tuple[Tensor, ...], dim: int, most: int = 512) -> Any:
    n = Dim("n", min=2, max=most)
    return export(model, example, dynamic_shapes=({dim: n},) * len(example))


def cases() -> list[tuple[str, str | None]]:
    pairs = [(v, b) for v in ALL_VARIANTS for b in (None, "eager", "tiled", "linear", "sdpa")]
    return [
        (v, b)
        for v, b in pairs
        if b in (None, "eager")
        or (b == "tiled" and v in WITH_FORMS)
        or (b in ("linear", "sdpa") and VARIANT_BACKENDS[v][b] is RUNS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "backend"), cases())
def test_exports_with_a_dynamic_length(variant: str, backend: str | None) -> None:
    model = Attend(variant, backend)
    program = exported(model, inputs(40), 2).module()
    for n in LENGTHS:
        assert torch.allclose(program(*inputs(n)), model(*inputs(n)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["sink", "elu"])
def test_lengths_that_all_have_few_scores_keep_the_choice_of_few(variant: str) -> None:
    few, many = (exported(Attend(variant), inputs(40), 2, n) for n in (256, 300))
    assert "attnzoo.tiled" not in str(few.graph_module)
    assert ("attnzoo.tiled" in str(many)) == (variant == "sink")


def test_blocks_of_a_definition_cannot_be_exported_for_all_lengths() -> None:
    with pytest.raises(Exception, match=r"without a form for lengths that vary \(eager does\)"):
        exported(Attend("top_p", "tiled"), inputs(40), 2)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        ("sink", None),
        *(pytest.param(v, None, marks=pytest.mark.slow) for v in ("softmax", "ssmax", "entmax")),
        pytest.param("elu", None, marks=pytest.mark.slow),
        pytest.param("taylor", "linear", marks=pytest.mark.slow),
    ],
)
def test_compiles_one_graph_for_all_lengths(variant: str, backend: str | None) -> None:
    model = Attend(variant, backend)
    graphs, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(model.forward, fullgraph=True, backend=graphs, dynamic=True)
    for n in LENGTHS[1:]:
        args = [x.requires_grad_() for x in inputs(n)]
        have, want = compiled(*args), model(*args)
        assert torch.allclose(have, want, atol=1e-5)
        gradients = (torch.autograd.grad(out.square().sum(), args) for out in (have, want))
        for a, b in zip(*gradients, strict=True):
            assert torch.allclose(a, b, atol=1e-4)
        counts.append(graphs.frame_count)  # torch may trace the first length twice
    assert len(set(counts)) == 1


@pytest.mark.slow
@torch.no_grad()
def test_states_masks_and_grouped_heads_in_one_graph() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sums: Tensor) -> tuple[Any, Any]:
        out, state = attnzoo.linear_attention(
            q, k, v, "elu", state=attnzoo.LinearState(sums, 5), attn_mask=mask, enable_gqa=True
        )
        return out, state.sums

    graphs, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(attend, fullgraph=True, backend=graphs, dynamic=True)
    for n in (40, 128, 300):
        q, k, v = (rand(2, h, n, 4, seed=h).float() for h in (4, 2, 2))
        args = q, k, v, rand(2, 1, 1, n, seed=1) > -1, rand(2, 2, 4, 5).float().exp()
        for have, want in zip(compiled(*args), attend(*args), strict=True):
            assert torch.allclose(have, want, rtol=1e-4, atol=1e-5)
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = MultiheadAttention(8, 2, variant="ssmax", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", ["multihead", "transformer"])
def test_modules_export_with_a_dynamic_length(name: str) -> None:
    make = {
        "multihead": lambda: (SelfAttention(), lambda n: rand(1, n, 8).float()),
        "transformer": lambda: (
            Transformer(20, 8, 2, 1, "entmax"),
            lambda n: torch.arange(n)[None] % 20,
        ),
    }
    model, example = make[name]()
    program = exported(model, (example(40),), 1).module()
    for n in LENGTHS:
        assert torch.allclose(program(example(n)), model(example(n)), atol=1e-5)
