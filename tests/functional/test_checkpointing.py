"""torch.utils.checkpoint around a call does not change gradients, on backends with a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnzoo
from attnzoo.backends.tiled import blocks
from attnzoo.core import registry
from helpers.cases import CASES, learned, params_of, rand
from helpers.coverage_table import TRAINED, marked, precise

Function = Callable[..., Tensor]


def call(variant: str, backend: str, **options: Any) -> tuple[Function, list[Tensor]]:
    """Return a function that runs attention, and its inputs: q, k, v and learned parameters."""
    dtype = precise(backend)
    leaves = [rand(1, 2, 9, 8, seed=i, dtype=dtype) for i in range(3)]
    named = {n: x.to(dtype) for n, x in learned(variant, 2).items()}
    options = {"is_causal": True, "backend": backend, **params_of(variant), **options}

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned_params: Tensor) -> Tensor:
        params = dict(zip(named, learned_params, strict=True))
        return attnzoo.attention(q, k, v, variant, **options, **params)

    leaves = [x.requires_grad_() for x in (*leaves, *named.values())]
    plan = attnzoo.explain(
        *leaves[:3], variant, **options, **dict(zip(named, leaves[3:], strict=True))
    )
    assert plan.chosen == backend
    return attend, leaves


def once(run: Function, *inputs: Tensor, use_reentrant: bool = False) -> Tensor:
    return checkpoint(run, *inputs, use_reentrant=use_reentrant)


def nested(run: Function, *inputs: Tensor) -> Tensor:
    return once(lambda *x: once(run, *x).sin(), *inputs)


def gradients(function: Function, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    for x in leaves:
        x.grad = None
    out = function(*leaves)
    # A reentrant checkpoint does not support torch.autograd.grad.
    out.backward(rand(*out.shape, seed=9, dtype=out.dtype))
    return tuple(x.grad for x in leaves if x.grad is not None)


def agree(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for have, want in zip(actual, expected, strict=True):
        assert torch.allclose(have, want)


@pytest.mark.parametrize(("variant", "backend"), TRAINED)
def test_checkpoint_gives_the_same_gradients(variant: str, backend: str) -> None:
    run, leaves = call(variant, backend)
    agree(gradients(lambda *x: once(run, *x), leaves), gradients(run, leaves))


BACKENDS = [
    marked("ssmax", "eager"),
    marked("ssmax", "tiled"),
    marked("ssmax", "sdpa"),
    marked("ssmax", "flash"),
    marked("taylor", "linear"),
    marked("taylor", "flash_linear"),
]
every_backend = pytest.mark.parametrize(("variant", "backend"), BACKENDS)


@every_backend
def test_nested_checkpoint_gives_the_same_gradients(variant: str, backend: str) -> None:
    run, leaves = call(variant, backend)
    agree(
        gradients(lambda *x: nested(run, *x), leaves), gradients(lambda *x: run(*x).sin(), leaves)
    )


@every_backend
def test_reentrant_checkpoint_gives_the_same_gradients(variant: str, backend: str) -> None:
    run, leaves = call(variant, backend)
    checkpointed = gradients(lambda *x: once(run, *x, use_reentrant=True), leaves)
    agree(checkpointed, gradients(run, leaves))


@every_backend
def test_checkpoint_under_autocast_gives_the_same_gradients(variant: str, backend: str) -> None:
    """The backward runs without autocast but recomputes the forward with autocast."""
    run, leaves = call(variant, backend)
    leaves = [x.detach().float().requires_grad_() for x in leaves]

    def half(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*inputs)
        assert out.dtype == torch.bfloat16
        return out

    def checkpointed(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return once(run, *inputs)

    agree(gradients(checkpointed, leaves), gradients(half, leaves))


@pytest.mark.parametrize("variant", ["taylor", "adaptive_temperature"])
def test_autocast_does_not_affect_the_backward_of_tiled(variant: str) -> None:
    options = {"differentiable": True} if variant == "adaptive_temperature" else {}
    run, leaves = call(variant, "tiled", **options)
    leaves = [x.detach().float().requires_grad_() for x in leaves]
    expected = gradients(run, leaves)
    out = run(*leaves)
    do = rand(*out.shape, seed=9, dtype=out.dtype)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(out, leaves, do)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_nested_checkpoint_supports_a_gain_computed_from_score_statistics() -> None:
    run, leaves = call("adaptive_temperature", "tiled", differentiable=True)
    agree(
        gradients(lambda *x: nested(run, *x), leaves), gradients(lambda *x: run(*x).sin(), leaves)
    )


def test_nested_checkpoint_supports_variants_without_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `tiled` itself checkpoints each block of a variant without forms."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setitem(CASES, "halved", CASES["softmax"])
    attnzoo.register_variant(
        attnzoo.Variant("halved", "-", "-", lambda q, k, call: call.softmax(call.scores(q, k) / 2))
    )
    run, leaves = call("halved", "tiled")
    agree(
        gradients(lambda *x: nested(run, *x), leaves), gradients(lambda *x: run(*x).sin(), leaves)
    )


@pytest.mark.parametrize(
    ("variant", "backend"), [marked("softmax", "tiled"), marked("entmax", "flash")]
)
def test_recomputed_dropout_is_the_same(variant: str, backend: str) -> None:
    run, leaves = call(variant, backend, dropout_p=0.5)
    torch.manual_seed(1)
    expected = gradients(run, leaves)
    torch.manual_seed(1)
    agree(gradients(lambda *x: once(run, *x), leaves), expected)


@pytest.mark.parametrize(
    ("variant", "backend"), [marked("taylor", "linear"), marked("taylor", "flash_linear")]
)
def test_features_are_recomputed_without_a_random_state(
    variant: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, saving the state takes longer than a chunk."""

    def unexpected() -> Tensor:
        raise AssertionError("the random state was saved")

    run, leaves = call(variant, backend)
    monkeypatch.setattr(torch, "get_rng_state", unexpected)
    assert len(gradients(run, leaves)) == 3


def test_a_definition_that_draws_random_numbers_draws_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output of `noisy` is linear in v for the same noise, so ⟨out, do⟩ = ⟨v, dv⟩."""
    monkeypatch.setattr(blocks, "ROWS", 4)
    run, leaves = call("noisy", "tiled", std=1.0)
    out = run(*leaves)
    do = rand(*out.shape, seed=9)
    (dv,) = torch.autograd.grad(out, leaves[2], do)
    torch.testing.assert_close((out * do).sum(), (leaves[2] * dv).sum())


# torch 2.13 instantiates an autograd.Function to trace it, and warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("variant", "backend", "options"),
    [
        ("ssmax", "tiled", {}),
        pytest.param(
            "adaptive_temperature", "tiled", {"differentiable": True}, marks=pytest.mark.slow
        ),
        pytest.param("entmax", "tiled", {}, marks=pytest.mark.slow),
        pytest.param("ssmax", "eager", {}, marks=pytest.mark.slow),
        pytest.param("ssmax", "sdpa", {}, marks=pytest.mark.slow),
        pytest.param("taylor", "linear", {}, marks=pytest.mark.slow),
        pytest.param("ssmax", "flash", {}, marks=[pytest.mark.slow, pytest.mark.interpreter]),
    ],
)
def test_compiled_checkpoint_gives_the_same_gradients(
    variant: str, backend: str, options: dict[str, Any]
) -> None:
    run, leaves = call(variant, backend, **options)
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: once(run, *x), fullgraph=True, backend="aot_eager")
    agree(gradients(compiled, leaves), gradients(run, leaves))
