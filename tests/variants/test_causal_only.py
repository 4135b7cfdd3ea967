"""Variants that support causal calls only: the contract, gradients and parameters per key.

The backends' covering arrays contain these variants too. Most other tests use calls that are not
causal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import attnzoo
from attnzoo.backends.tiled import blocks
from attnzoo.core import registry
from helpers.cases import CASES, CAUSAL_ONLY, NO_LSE, learned, params_of, rand

BACKENDS = ["eager", "tiled"]
B, H, N, D = 2, 4, 9, 6
per_key = [
    (v, p.name)
    for v in CAUSAL_ONLY
    for p in attnzoo.get_variant(v).params
    if p.per_key
]  # fmt: skip


def qkv(n: int = N, m: int = N, kv_heads: int = 2) -> list[Tensor]:
    return [
        rand(B, H, n, D, seed=1),
        rand(B, kv_heads, m, D, seed=2),
        rand(B, kv_heads, m, 3, seed=3),
    ]


def values_per_key(variant: str, name: str, m: int = N) -> Tensor:
    low, high = CASES[variant].learned[name]
    return (
        low
        + (high - low) * torch.rand(B, H, m, generator=torch.Generator().manual_seed(1)).double()
    )


def test_there_is_such_a_variant() -> None:
    assert "forgetting" in CAUSAL_ONLY


@pytest.mark.parametrize("variant", CAUSAL_ONLY)
def test_other_calls_raise_with_the_reason(variant: str) -> None:
    q, k, v = qkv()
    for window in (None, (3, 2)):
        with pytest.raises(ValueError, match=f"{variant} .*is_causal must be True"):
            attnzoo.attention(
                q, k, v, variant, enable_gqa=True, window=window, **params_of(variant)
            )
    # One query stands behind all keys.
    last = attnzoo.attention(q[:, :, -1:], k, v, variant, enable_gqa=True, **params_of(variant))
    full = attnzoo.attention(
        q, k, v, variant, is_causal=True, enable_gqa=True, **params_of(variant)
    )
    torch.testing.assert_close(last, full[:, :, -1:])
    empty = k[:, :, :0], v[:, :, :0]
    nothing = attnzoo.attention(q, *empty, variant, enable_gqa=True, **params_of(variant))
    assert bool((nothing == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", CAUSAL_ONLY)
def test_outputs_of_a_prefix_do_not_depend_on_later_tokens(variant: str, backend: str) -> None:
    options = {"is_causal": True, "enable_gqa": True, "backend": backend, **params_of(variant)}
    q, k, v = qkv()
    full = attnzoo.attention(q, k, v, variant, **options)
    part = attnzoo.attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], variant, **options)
    torch.testing.assert_close(part, full[:, :, :5])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", CAUSAL_ONLY)
def test_queries_without_keys_give_zero(variant: str, backend: str) -> None:
    q, k, v = qkv(n=7, m=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, **params_of(variant)}
    out = attnzoo.attention(*leaves, variant, backend=backend, **options)
    assert not out[:, :, :3].any()
    if variant not in NO_LSE:
        _, lse = attnzoo.attention(*leaves, variant, return_lse=True, backend=backend, **options)
        assert bool((lse[:, :, :3] == float("-inf")).all())
    (dq,) = torch.autograd.grad(out.sum(), [q])
    assert bool(dq.isfinite().all())
    assert not dq[:, :, :3].any()
    none = attnzoo.attention(q, k[:, :, :0], v[:, :, :0], variant, backend=backend, **options)
    assert not none.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("variant", "name"), per_key)
def test_gradients_of_values_per_key_match_finite_differences(
    variant: str, name: str, backend: str
) -> None:
    q, k, v = (x[:1, :, :5].requires_grad_() for x in qkv())
    values = values_per_key(variant, name)[:1, :, :5].requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        return attnzoo.attention(
            q, k, v, variant, is_causal=True, enable_gqa=True, backend=backend, **{name: values}
        )

    assert gradcheck(attend, (q, k, v, values))


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 1.5}, {"dropout_p": 0.0}])
@pytest.mark.parametrize(("variant", "name"), per_key)
def test_blocks_agree_with_the_definition(
    variant: str, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of three queries, with the form and with the definition alone."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    attnzoo.register_variant(
        replace(attnzoo.get_variant(variant), name="no_forms", forms=lambda call, **_: ())
    )
    monkeypatch.setattr(blocks, "ROWS", 3)
    values = values_per_key(variant, name)
    results = []
    for called, backend in ((variant, "eager"), (variant, "tiled"), ("no_forms", "tiled")):
        leaves = [x.clone().requires_grad_() for x in (*qkv(), values)]
        out = attnzoo.attention(
            *leaves[:3], called, is_causal=True, enable_gqa=True, backend=backend,
            **options, **{name: leaves[3]},
        )  # fmt: skip
        results.append([out, *torch.autograd.grad(out, leaves, rand(*out.shape, seed=4))])
    for result in results[1:]:
        for have, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("variant", "name"), per_key)
def test_repeated_calls_use_new_values(variant: str, name: str) -> None:
    """The cache of calls holds no tensors."""
    q, k, v = qkv()
    first, second = values_per_key(variant, name), 0.5 * values_per_key(variant, name)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    for values in (first, second, first):
        out = attnzoo.attention(q, k, v, variant, **options, **{name: values})
        want = attnzoo.attention(q, k, v, variant, backend="eager", **options, **{name: values})
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize(("variant", "name"), per_key)
def test_wrong_values_per_key_raise(variant: str, name: str) -> None:
    q, k, v = qkv(n=4, m=N)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    for shape in ((B, H, 4), (B, 2, N), (H, N), (B, H, N, 1)):
        with pytest.raises(ValueError, match=rf"{name} must have shape .*\({B}, {H}, {N}\), got"):
            attnzoo.attention(q, k, v, variant, **options, **{name: torch.zeros(shape)})
    with pytest.raises(ValueError, match=f"{name} must be between -1e4 and 0 throughout"):
        attnzoo.attention(q, k, v, variant, **options, **{name: torch.ones(B, H, N)})
    with pytest.raises(TypeError, match=f"requires the parameter '{name}'"):
        attnzoo.attention(q, k, v, variant, **options)


@pytest.mark.parametrize("variant", CAUSAL_ONLY)
def test_a_value_per_head_equals_the_same_value_for_each_key(variant: str) -> None:
    q, k, v = qkv()
    per_head = {name: x.double() for name, x in learned(variant, H).items()}
    wide = {name: x.view(1, H, 1).expand(B, H, N) for name, x in per_head.items()}
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    for backend in BACKENDS:
        torch.testing.assert_close(
            attnzoo.attention(q, k, v, variant, backend=backend, **options, **per_head),
            attnzoo.attention(q, k, v, variant, backend=backend, **options, **wide),
        )


def test_equal_forget_gates_are_alibi() -> None:
    q, k, v = qkv()
    slopes = torch.linspace(0.1, 0.5, H).double()
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    out = attnzoo.attention(q, k, v, "forgetting", log_gates=-slopes, **options)
    torch.testing.assert_close(out, attnzoo.attention(q, k, v, alibi=slopes, **options))


def test_forgetting_in_fp32_after_many_tokens() -> None:
    """c reaches −2000. c_i − c_j has an error of about 2000 · 6e-8 · √n."""
    n = 2000
    q, k, v = (rand(1, 1, n, 4, seed=i) for i in range(3))
    gates = -2 * torch.rand(1, 1, n, generator=torch.Generator().manual_seed(3)).double()
    exact = attnzoo.attention(q, k, v, "forgetting", is_causal=True, log_gates=gates)
    out = attnzoo.attention(
        q.float(), k.float(), v.float(), "forgetting", is_causal=True, log_gates=gates.float()
    )
    # Each of the n additions rounds a number of up to 2000: n · 2000 · 2⁻²⁴ bounds all of them.
    bound = n * 2000 * 2**-24 * 2 * v.abs().max()
    error = (out.double() - exact).abs().max()
    assert error < bound
    assert error < 2e-2
