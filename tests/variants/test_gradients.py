"""Gradients agree with finite differences.

Further tests check second derivatives, and calls in which only one input requires a gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import attnzoo
from helpers.cases import (
    CASES,
    MARKED,
    NO_LSE,
    NO_SCORE,
    VARIANTS,
    WITH_FORMS,
    learned,
    params_of,
    rand,
)
from helpers.coverage_table import RUNS, TRAINED, VARIANT_BACKENDS, precise

every_variant = pytest.mark.parametrize("variant", MARKED)


def qkv(queries: int = 7, keys: int = 7) -> list[Tensor]:
    return [rand(2, 2, n, 6, seed=i) for i, n in enumerate((queries, keys, keys))]


def differentiable(variant: str, per_token: bool = False) -> tuple[list[Tensor], Any]:
    """Return leaves and a function of them: a causal GQA call whose first row is empty.

    The leaves include a float mask and ALiBi slopes if the variant supports them.
    """
    q, k, v = rand(2, 4, 5, 3, seed=1), rand(2, 2, 4, 3, seed=2), rand(2, 2, 4, 3, seed=3)
    named = learned(variant, 4, token_shape=(2, 5) if per_token else None)
    if variant not in NO_SCORE:
        named.update(attn_mask=rand(1, 4, 5, 4, seed=4), alibi=torch.linspace(0.1, 0.7, 4))
    leaves = [q, k, v, *(x.double() for x in named.values())]
    fixed = dict(params_of(variant), is_causal=True, enable_gqa=True)
    if variant == "adaptive_temperature":
        fixed["differentiable"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor, *values: Tensor, **more: Any) -> Any:
        tensors = dict(zip(named, values, strict=True))
        return attnzoo.attention(q, k, v, variant, **fixed, **tensors, **more)

    return [x.requires_grad_() for x in leaves], attend


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("lse", [False, True])
@every_variant
def test_gradients_match_finite_differences(variant: str, backend: str, lse: bool) -> None:
    leaves, run = differentiable(variant)

    def function(*inputs: Tensor) -> Any:
        result = run(*inputs, backend=backend, return_lse=lse)
        # The lse of the empty first row is −inf, which has no finite difference.
        return (result[0], result[1][:, :, 1:]) if lse else result

    if lse and variant in NO_LSE:
        with pytest.raises(ValueError, match="return_lse"):
            function(*leaves)
        return
    assert gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("variant", [name for name, case in CASES.items() if case.per_token])
def test_gradients_per_token_match_finite_differences(variant: str, backend: str) -> None:
    leaves, run = differentiable(variant, per_token=True)
    assert gradcheck(lambda *x: run(*x, backend=backend), leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [(v, b) for v in VARIANTS for b in ("sdpa", "linear") if VARIANT_BACKENDS[v][b] is RUNS],
)
def test_gradients_on_sdpa_and_linear_match_finite_differences(variant: str, backend: str) -> None:
    q, k, v = qkv(queries=4, keys=4)
    named = {name: x.double() for name, x in learned(variant, 2).items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        params = {**params_of(variant), **dict(zip(named, values, strict=True))}
        return attnzoo.attention(q, k, v, variant, is_causal=True, backend=backend, **params)

    leaves = [x.requires_grad_() for x in (q, k, v, *named.values())]
    if variant == "adaptive_temperature":  # no gradient through β by default
        leaves = [q.detach(), k.detach(), v]
    assert gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", ["eager", "tiled", "sdpa"])
def test_adaptive_temperature_has_no_gradient_through_beta_by_default(backend: str) -> None:
    """The gradient equals that of softmax(β z) with a constant β."""
    q, k, v = (x.requires_grad_() for x in qkv(queries=1, keys=30))
    do = rand(2, 2, 1, 6, seed=8)
    out = attnzoo.attention(q, k, v, "adaptive_temperature", backend=backend)
    actual = torch.autograd.grad(out, (q, k, v), do)
    from attnzoo.variants.adaptive_temperature import beta

    z = q @ k.transpose(-1, -2) / 6**0.5
    p = z.softmax(-1)
    temperature = beta(-(p * p.log()).sum(-1, keepdim=True)).detach()
    assert bool((temperature > 1.2).all())  # with 30 keys, β is above 1
    frozen = torch.autograd.grad((temperature * z).softmax(-1) @ v, (q, k, v), do)
    for have, want in zip(actual, frozen, strict=True):
        assert torch.allclose(have, want)
    moving = attnzoo.attention(
        q, k, v, "adaptive_temperature", backend="tiled", differentiable=True
    )
    assert not torch.allclose(torch.autograd.grad(moving, q, do)[0], frozen[0])


@every_variant
def test_second_derivatives_on_eager(variant: str) -> None:
    leaves, run = differentiable(variant)
    assert gradgradcheck(lambda *x: run(*x, backend="eager"), leaves, fast_mode=True)


# Autograd can differentiate the definition of the other variants twice.
@pytest.mark.parametrize("variant", WITH_FORMS)
def test_second_derivatives_on_tiled_raise_and_name_eager(variant: str) -> None:
    """A missing second derivative must raise, not count as zero."""
    leaves, run = differentiable(variant)

    def twice() -> None:
        loss = run(*leaves, backend="tiled").square().sum()
        first = torch.autograd.grad(loss, leaves[0], create_graph=True)
        # With allow_unused, a gradient missing from the graph would count as zero.
        torch.autograd.grad(first[0].square().sum(), leaves[1], allow_unused=True)

    with pytest.raises(RuntimeError, match=r"use_backend\('eager'\)"):
        twice()


# ---- one input with a gradient, repeated backward, parameter shapes ----------------------------


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@every_variant
def test_the_gradient_of_an_input_is_the_same_if_only_this_input_requires_one(
    variant: str, backend: str
) -> None:
    leaves, run = differentiable(variant)
    do = rand(2, 4, 5, 3, seed=9)
    together = torch.autograd.grad(run(*leaves, backend=backend), leaves, do)
    for at, expected in enumerate(together):
        alone = [x.detach() for x in leaves]
        alone[at].requires_grad_()
        gradient = torch.autograd.grad(run(*alone, backend=backend), alone[at], do)[0]
        assert torch.allclose(gradient, expected)


@pytest.mark.parametrize(("variant", "backend"), TRAINED)
def test_second_backward_gives_the_same_gradients(variant: str, backend: str) -> None:
    """The backward does not modify saved tensors."""
    leaves = [x.to(precise(backend)).requires_grad_() for x in qkv()]
    out = attnzoo.attention(*leaves, variant, is_causal=True, backend=backend, **params_of(variant))
    do = rand(*out.shape, seed=9, dtype=out.dtype)
    first = torch.autograd.grad(out, leaves, do, retain_graph=True)
    second = torch.autograd.grad(out, leaves, do)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("variant", [name for name, case in CASES.items() if case.learned])
def test_zero_dim_parameter_equals_the_same_number_per_head(variant: str, backend: str) -> None:
    """The gradient of the zero-dim parameter is the sum of the per-head gradients."""
    q, k, v = qkv()
    one = {name: x[0].double().requires_grad_() for name, x in learned(variant, 2).items()}
    per_head = {name: x.detach().repeat(2).requires_grad_() for name, x in one.items()}
    outs = [
        attnzoo.attention(q, k, v, variant, is_causal=True, backend=backend, **params)
        for params in (one, per_head)
    ]
    assert torch.allclose(*outs)
    do = rand(*outs[0].shape, seed=9)
    actual = torch.autograd.grad(outs[0], list(one.values()), do)
    expected = torch.autograd.grad(outs[1], list(per_head.values()), do)
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == ()
        assert torch.allclose(have, want.sum())


@every_variant
def test_gradients_of_attention_weights_equal_those_of_attention(variant: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    w = attnzoo.attention_weights(q, k, v, variant, is_causal=True, **params_of(variant))
    out = attnzoo.attention(q, k, v, variant, is_causal=True, **params_of(variant))
    do = rand(*out.shape, seed=9)
    actual = torch.autograd.grad(w, (q, k), do @ v.detach().mT)
    expected = torch.autograd.grad(out, (q, k), do)
    assert all(torch.allclose(a, b) for a, b in zip(actual, expected, strict=True))
