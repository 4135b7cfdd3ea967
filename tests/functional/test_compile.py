"""torch.compile(fullgraph=True) works without a graph break and gives the results of eager mode.

Compilations are slow, so each (variant, backend) is compiled with one set of options. Consecutive
variants get different options, so that each option is compiled with some variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import attnzoo
from attnzoo import Activation, Pairwise
from attnzoo.nn import Attention
from helpers.cases import CASES, NO_LSE, NO_SCORE, VARIANTS, WITH_FORMS, learned, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS, marked

IDS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
KEYS = rand(2, 1, 1, 9, seed=5) > -0.8
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": rand(2, 1, 9, 9, seed=6) > -0.8},
    "key mask and segments": {"attn_mask": KEYS, "segment_ids": IDS, "is_causal": True},
    "window": {"window": 3, "is_causal": True},
    "float mask": {"attn_mask": rand(9, 9, seed=6)},
    "window pair and alibi": {"window": (3, 2), "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "lse": {"return_lse": True, "is_causal": True},
}
# The options that variants without an additive score support.
NO_SCORE_OPTIONS = ("causal", "bool mask", "key mask and segments", "window")
BACKEND_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sdpa": [{"is_causal": True}, OPTIONS["bool mask"], OPTIONS["float mask"]],
    "linear": [{"is_causal": True}, {"attn_mask": KEYS}],
}


# A variant with a linear form, one with a threshold and one with a learned sink, each on a backend
# with a short compilation. Most other combinations are marked slow.
QUICK = (
    ("cosformer", "linear"),
    ("entmax", "tiled"),
    ("sink", "tiled"),
    ("sink", "eager"),
    ("softmax", "sdpa"),
)


def cases() -> Iterator[Any]:
    special = {name: cycle(options) for name, options in BACKEND_OPTIONS.items()}
    names = {"eager": cycle(OPTIONS), "tiled": cycle(reversed(OPTIONS))}
    remaining = {backend: set(OPTIONS) for backend in names}
    for variant in VARIANTS:
        for backend, cycled in names.items():
            name = next(cycled)
            while (variant in NO_SCORE and name not in NO_SCORE_OPTIONS) or (
                variant in NO_LSE and name == "lse"
            ):
                name = next(cycled)
            remaining[backend].discard(name)
            marks = [] if (variant, backend) in QUICK else [pytest.mark.slow]
            case = f"{variant}-{backend}-{name}"
            yield pytest.param(variant, backend, OPTIONS[name], id=case, marks=marks)
        for backend, options in special.items():
            if VARIANT_BACKENDS[variant][backend] is RUNS:
                marks = [] if (variant, backend) in QUICK else [pytest.mark.slow]
                case = f"{variant}-{backend}"
                yield pytest.param(variant, backend, next(options), id=case, marks=marks)
    for backend, unused in remaining.items():
        for name in sorted(unused):
            case, marks = f"softmax-{backend}-{name}", [pytest.mark.slow]
            yield pytest.param("softmax", backend, OPTIONS[name], id=case, marks=marks)


COMBINATIONS = list(cases())

# torch 2.13 instantiates an autograd.Function to trace it, and warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def results(function: Any, attend: Attention, options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs and the gradients of q, k, v and the learned parameters.

    In fp64, because the compiled graph may round otherwise, and a weight sum near 0 enlarges that.
    """
    leaves = [rand(2, 4, 9, 8, seed=i).requires_grad_() for i in range(3)]
    attend.zero_grad()
    out = function(*leaves, **options)
    outs = list(out) if isinstance(out, tuple) else [out]
    sum(x.square().sum() for x in outs).backward()
    gradients = [x.grad for x in (*leaves, *attend.parameters())]
    assert all(x is not None for x in gradients)
    return [x.detach().clone() for x in (*outs, *gradients)]


@pytest.mark.parametrize(("variant", "backend", "options"), COMBINATIONS)
def test_compiles_without_graph_break_and_agrees(
    variant: str, backend: str, options: dict[str, Any]
) -> None:
    params = params_of(variant)
    names = tuple(CASES[variant].learned)
    if (variant, backend) == ("entmax", "eager"):
        names = ()  # compiling the bisection for a learned α takes 17 s
    attend = Attention(variant, 4, learn=names, **params, **(learned(variant, 4) if names else {}))
    options = {**options, "backend": backend}
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for have, want in zip(
        results(compiled, attend, options), results(attend, attend, options), strict=True
    ):
        assert torch.allclose(have, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_every_option_is_compiled_with_some_variant(backend: str) -> None:
    compiled = {case.id.split("-", 2)[2] for case in COMBINATIONS if case.values[1] == backend}
    assert compiled == set(OPTIONS)


# test_sdpa_compiles_with_symbolic_sizes is the quick test of a second length for sdpa.
@pytest.mark.parametrize("backend", ["tiled", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_second_length_and_scale_compile(backend: str) -> None:
    """torch.compile makes a number symbolic when its value changes."""
    attend = Attention("softmax", 4, learn=())
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n, scale in ((9, 0.5), (12, 0.25)):
        q, k, v = (rand(2, 4, n, 8, seed=i).float() for i in range(3))
        options = {"is_causal": True, "scale": scale, "backend": backend}
        assert torch.allclose(compiled(q, k, v, **options), attend(q, k, v, **options), atol=1e-6)


# Each length gives two to four blocks of 128 queries.
LENGTHS = (140, 150, 200, 257, 300, 129, 380, 385, 131, 333)


def graphs_over(
    lengths: tuple[int, ...], backend: str, variant: str, dynamic: bool | None = None, **params: Any
) -> int:
    """Count the graphs that are compiled for forward and backward at all of these lengths."""
    names = tuple(CASES[variant].learned)
    attend = Attention(
        variant,
        2,
        learn=names,
        **{**params_of(variant, max(lengths)), **params, **learned(variant, 2)},
    )
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    options: dict[str, Any] = {"is_causal": True, "backend": backend}
    for n in lengths:
        leaves = [rand(1, 2, n, 4, seed=i).float().requires_grad_() for i in range(3)]
        out = compiled(*leaves, **options)
        out.sum().backward()
        assert torch.allclose(out, attend(*leaves, **options), atol=1e-5)
    return counter.frame_count


# Only sink is not marked slow. It has a learned parameter, and compiles faster than a threshold.
FEW_GRAPHS = [v if v == "sink" else pytest.param(v, marks=pytest.mark.slow) for v in WITH_FORMS]


@pytest.mark.slow
@pytest.mark.parametrize("variant", FEW_GRAPHS)
def test_tiled_compiles_few_graphs_for_all_lengths(variant: str) -> None:
    """Three graphs suffice: for the first length, for few scores and for many scores."""
    assert graphs_over(LENGTHS, "tiled", variant) <= 3


@pytest.mark.slow
def test_differentiable_statistics_compile_few_graphs_for_all_lengths() -> None:
    assert graphs_over(LENGTHS, "tiled", "adaptive_temperature", differentiable=True) <= 3


@pytest.mark.slow
def test_definition_with_learned_alpha_compiles_two_graphs_for_all_lengths() -> None:
    assert graphs_over((9, 12, 14, 20, 11, 31, 25, 13, 17), "eager", "entmax") == 2


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("softmax", "ssmax", "log_n")),
        pytest.param("adaptive_temperature", marks=pytest.mark.slow),
    ],
)
def test_sdpa_compiles_with_symbolic_sizes(variant: str) -> None:
    assert graphs_over((20, 31, 40), "sdpa", variant, dynamic=True) <= 2


@pytest.mark.slow
def test_blocks_are_not_unrolled_into_the_graph() -> None:
    """The graph of a call with many blocks has as many operations as one with a single block."""

    def nodes(n: int) -> int:
        counter = CompileCounterWithBackend("eager")
        q = rand(1, 2, n, 4).float()
        torch.compile(attnzoo.attention, fullgraph=True, backend=counter, dynamic=False)(
            q, q, q, "entmax", alpha=1.3, is_causal=True, backend="tiled"
        )
        return counter.op_count

    assert nodes(900) == nodes(10)


@pytest.mark.slow
def test_linear_variant_compiles_at_a_second_length() -> None:
    """At the second length the sizes are symbolic, and the backend is chosen by size."""
    attend = Attention("cosformer", 1, max_length=4096)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in (1100, 1200):
        q, k, v = (rand(1, 1, n, 64, seed=i).float() for i in range(3))
        assert torch.allclose(compiled(q, k, v), attend(q, k, v), atol=1e-5)


@pytest.mark.slow
def test_each_order_of_taylor_compiles() -> None:
    q, k, v = (rand(2, 4, 9, 8, seed=i).float() for i in range(3))
    compiled = torch.compile(attnzoo.attention, fullgraph=True, backend="aot_eager")
    for order in (2, 4, 6):
        options: dict[str, Any] = {"order": order, "backend": "tiled"}
        out = compiled(q, k, v, "taylor", **options)
        assert torch.allclose(out, attnzoo.attention(q, k, v, "taylor", **options), atol=1e-6)


def fresh(name: str, factor: float) -> Activation:
    return Activation(name, lambda s, shape: (factor * s).exp(), lambda s, phi, shape: factor * phi)


TWO, THREE = fresh("same name", 2.0), fresh("same name", 3.0)


def register(name: str, forms: Any) -> None:
    attnzoo.register_variant(
        attnzoo.Variant(
            name, "-", "-", lambda q, k, call: call.softmax(call.scores(q, k)), forms=forms
        )
    )


@pytest.mark.slow
@pytest.mark.usefixtures("own_registry")
def test_activations_with_the_same_name_are_distinguished() -> None:
    q, k, v = (rand(1, 2, 9, 4, seed=i).requires_grad_() for i in range(3))
    register("two", lambda call: (Pairwise(TWO, "sum"),))
    register("three", lambda call: (Pairwise(THREE, "sum"),))
    compiled = torch.compile(attnzoo.attention, fullgraph=True, backend="aot_eager")
    for attend in (attnzoo.attention, compiled):
        outs = [attend(q, k, v, name, backend="tiled") for name in ("two", "three")]
        for out, factor in zip(outs, (2.0, 3.0), strict=True):
            expected = (factor * q @ k.mT / 2).softmax(-1) @ v
            assert torch.allclose(out, expected)
            have = torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0]
            want = torch.autograd.grad(expected.square().sum(), q)[0]
            assert torch.allclose(have, want)


@pytest.mark.slow
@pytest.mark.usefixtures("own_registry")
def test_activation_created_in_a_compiled_call_raises_where_it_is_needed() -> None:
    q, k, v = (rand(1, 2, 9, 4, seed=i).float() for i in range(3))
    register("made", lambda call: (Pairwise(fresh("made", 2.0), "sum"),))
    expected = (2 * q @ k.mT / 2).softmax(-1) @ v
    out = attnzoo.attention(q, k, v, "made", backend="tiled")
    assert torch.allclose(out, expected, atol=1e-6)
    for fullgraph in (True, False):
        compiled = torch.compile(attnzoo.attention, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(Exception, match="Activation 'made' must be created before the call"):
            compiled(q, k, v, "made", backend="tiled")
    compiled = torch.compile(attnzoo.attention, fullgraph=True, backend="aot_eager")
    compiled(q, k, v, "made", backend="eager")  # the definition needs no Activation


@pytest.mark.slow
def test_second_value_of_alpha_compiles() -> None:
    """The layers of a model may have the same variant with different parameters."""
    q, k, v = (rand(2, 4, 9, 8, seed=i).float() for i in range(3))
    for alpha in (1.3, 2.0):
        attend = Attention("entmax", 4, alpha=alpha)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out = compiled(q, k, v, backend="tiled")
        assert torch.allclose(out, attend(q, k, v, backend="tiled"), atol=1e-6)


@pytest.mark.parametrize("backend", [marked("tiled"), marked("flash")])
def test_dropout_compiles(backend: str) -> None:
    attend = Attention("softmax", 4)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k = (rand(2, 4, 9, 8, seed=i).float().requires_grad_() for i in range(2))
    eye = torch.eye(9).expand(2, 4, 9, 9)  # v = identity: the output is the weights
    out = compiled(q, k, eye, dropout_p=0.5, backend=backend)
    out.sum().backward()
    assert bool(q.grad.isfinite().all())
    assert 0.4 < float((out != 0).float().mean()) < 0.6
    assert not torch.equal(out, compiled(q, k, eye, dropout_p=0.5, backend=backend))


@pytest.mark.slow
def test_gradients_of_linear_attention_compile_with_dynamic_shapes() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnzoo.linear_attention(q, k, v, "hedgehog")[0]

    q, k, v = (torch.randn(1, 2, 10, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    gradients = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, attend))
    for have, want in zip(*gradients, strict=True):
        torch.testing.assert_close(have, want)
