"""One graph of torch.export or torch.compile serves all lengths, few and many scores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import attnzoo
from attnzoo import linear_topk, topk_probabilities, varlen_attention
from attnzoo.backends.selection import FEW_SCORES
from attnzoo.losses import linear_loss, loss, margin_loss, masked_loss, z_loss
from attnzoo.nn import MultiheadAttention, OutputLayer, Transformer
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
        exported(Attend("perturb_max", "tiled"), inputs(40), 2)


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


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: Any) -> Any:
        return self.function(*operands)


CLASSES = rand(40, 8).float()
LAYER = OutputLayer(8, 40, "entmax")
OF_TOKENS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear_loss": lambda h, y: linear_loss(h, CLASSES, y, "sparsemax", label_smoothing=0.1),
    "linear_loss of moments": lambda h, y: linear_loss(h, CLASSES, y, "taylor"),
    "loss": lambda h, y: loss(h, y % 8, "sigmoid"),
    "masked_loss": lambda h, y: masked_loss(h, CLASSES, y, torch.ones(40) > 0, value=-1.0),
    "margin_loss": lambda h, y: margin_loss(h, CLASSES, y),
    "z_loss": lambda h, y: z_loss(h, CLASSES, y, a=0.1, b=10.0),
    "linear_topk": lambda h, _: linear_topk(h, CLASSES, 3, "entmax"),
    "topk_probabilities": lambda h, _: topk_probabilities(h, 3, "taylor"),
    "log_prob": lambda h, _: LAYER.log_prob(h),
    "topk": lambda h, _: LAYER.topk(h, 3),
    "forward": LAYER,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TOKENS)
def test_output_layers_export_with_any_number_of_tokens(name: str) -> None:
    model = Function(OF_TOKENS[name]).requires_grad_(False)

    def example(n: int) -> tuple[Tensor, Tensor]:
        return rand(n, 8, seed=n).float(), torch.arange(n) % 40

    n = Dim("n", min=2, max=512)
    program = export(model, example(5), dynamic_shapes=(({0: n}, {0: n}),)).module()
    for tokens in (2, 7, 300):
        torch.testing.assert_close(program(*example(tokens)), model(*example(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("longest", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_packed_sequences_export_with_any_number_of_tokens(longest: Any) -> None:
    def attend(x: Tensor, ends: Tensor, most: Any) -> Tensor:
        return varlen_attention(x, x, x, ends, ends, most, most, "ssmax", is_causal=True)

    def example(*lengths: int) -> tuple[Tensor, Tensor]:
        return rand(sum(lengths), 2, 4).float(), torch.tensor([0, *accumulate(lengths)])

    shapes = (
        {0: Dim("tokens", min=4, max=512)},
        {0: Dim("ends", min=3, max=9)},
        Dim.DYNAMIC if isinstance(longest, int) else None,
    )
    program = export(Function(attend), (*example(3, 7), longest), dynamic_shapes=(shapes,)).module()
    for lengths in ((2, 7), (5, 4, 6), (1, 30)):
        most = longest * 0 + max(lengths)
        have = program(*example(*lengths), most)
        torch.testing.assert_close(have, attend(*example(*lengths), most))
