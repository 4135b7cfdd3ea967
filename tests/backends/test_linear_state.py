"""linear_attention() processes a sequence in parts, with a state of constant size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import attnzoo
from attnzoo import LinearState, linear_attention
from attnzoo.backends import linear
from helpers.cases import VARIANTS, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS


def has_state(variant: str) -> bool:
    definition = attnzoo.get_variant(variant)
    defaults = {param.name: param.default for param in definition.params}
    return definition.has_state(**{**defaults, **params_of(variant)})


PARAMS: dict[str, dict[str, Any]] = {v: params_of(v, 64) for v in VARIANTS if has_state(v)}
every_variant = pytest.mark.parametrize("variant", PARAMS)


def qkv(n: int, heads: int = 2, kv_heads: int = 2, dtype: Any = torch.float64) -> list[Tensor]:
    q = rand(2, heads, n, 6, seed=1, dtype=dtype)
    k, v = (rand(2, kv_heads, n, d, seed=d, dtype=dtype) for d in (6, 5))
    return [q, k, v]


def in_parts(
    variant: str, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], **options: Any
) -> tuple[Tensor, LinearState | None]:
    """Run a sequence in parts, split at ``cuts``. Return outputs (B, H, N, Dv), last state."""
    mask = options.pop("attn_mask", None)
    state, out = None, []
    for start, stop in zip([0, *cuts], [*cuts, q.shape[2]], strict=True):
        part = None if mask is None else mask[..., start:stop]
        parts = (x[:, :, start:stop] for x in (q, k, v))
        done, state = linear_attention(
            *parts, variant, state=state, attn_mask=part, **PARAMS[variant], **options
        )
        out.append(done)
    return torch.cat(out, dim=2), state


def test_variants_with_a_state_are_those_in_the_coverage_table() -> None:
    table = {v for v in VARIANTS if VARIANT_BACKENDS[v]["linear"] is RUNS}
    assert set(PARAMS) == table


@pytest.mark.parametrize(
    "cuts", [[], [1], [16], [3, 4], [1, 2, 15], [0, 5], list(range(1, 17))], ids=str
)
@every_variant
def test_parts_agree_with_the_whole_sequence(variant: str, cuts: list[int]) -> None:
    """The cuts include single tokens and an empty part."""
    q, k, v = qkv(17)
    expected = attnzoo.attention(
        q, k, v, variant, is_causal=True, backend="eager", **PARAMS[variant]
    )
    out, state = in_parts(variant, q, k, v, cuts)
    assert torch.allclose(out, expected)
    assert state is not None
    assert state.length == 17


@every_variant
def test_parts_longer_and_shorter_than_a_chunk_agree(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "CHUNK", 4)
    q, k, v = qkv(23, heads=4)
    options = dict(enable_gqa=True)
    expected = attnzoo.attention(
        q, k, v, variant, is_causal=True, backend="eager", **options, **PARAMS[variant]
    )
    for cuts in ([4], [3, 12], [8, 16], [9, 10, 11]):
        assert torch.allclose(in_parts(variant, q, k, v, cuts, **options)[0], expected)
    full = attnzoo.attention(q, k, v, variant, backend="linear", **options, **PARAMS[variant])
    other = attnzoo.attention(q, k, v, variant, backend="eager", **options, **PARAMS[variant])
    assert torch.allclose(full, other)


@pytest.mark.parametrize("per_head", [False, True])
@every_variant
def test_parts_agree_with_key_masks_and_gqa(variant: str, per_head: bool) -> None:
    """A mask per query head gives each head of a group its own state."""
    q, k, v = qkv(17, heads=4)
    mask = rand(2, 4 if per_head else 1, 1, 17, seed=9) > -0.4
    options = dict(enable_gqa=True, attn_mask=mask)
    expected = attnzoo.attention(
        q, k, v, variant, is_causal=True, backend="eager", **options, **PARAMS[variant]
    )
    assert torch.allclose(in_parts(variant, q, k, v, [1, 5, 12], **options)[0], expected)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *((variant, "linear") for variant in PARAMS),
        *(
            pytest.param(
                variant,
                "flash_linear",
                marks=[pytest.mark.interpreter, *[pytest.mark.slow] * (variant != "elu")],
            )
            for variant in PARAMS
        ),
    ],
)
def test_values_of_masked_keys_do_not_matter(variant: str, backend: str) -> None:
    """NaN in the padding of a batch must not change outputs or gradients."""
    q, k, v = (x[:1].float() for x in qkv(17))
    mask = torch.arange(17).expand(1, 1, 1, 17) >= 5
    results = []
    for fill in (0.0, float("nan")):
        leaves = [q, *(x.masked_fill(~mask[:, :, 0, :, None], fill) for x in (k, v))]
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = attnzoo.attention(
            *leaves, variant, attn_mask=mask, is_causal=True, backend=backend, **PARAMS[variant]
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("variant", "features"), [("taylor", 1 + 6 + 21), ("cosformer", 12)])
def test_the_size_of_the_state_does_not_depend_on_the_length(variant: str, features: int) -> None:
    q, k, v = qkv(40)
    sizes = set()
    state = None
    for start, stop in ((0, 1), (1, 2), (2, 30), (30, 40)):
        parts = (x[:, :, start:stop] for x in (q, k, v))
        _, state = linear_attention(*parts, variant, state=state, **PARAMS[variant])
        sizes.add(tuple(state.sums.shape))
    assert sizes == {(2, 2, features, 5 + 1)}


@every_variant
def test_a_state_is_not_modified(variant: str) -> None:
    """A beam search may continue from one state twice."""
    q, k, v = qkv(8)
    parts = [x[:, :, :5] for x in (q, k, v)], [x[:, :, 5:] for x in (q, k, v)]
    _, state = linear_attention(*parts[0], variant, **PARAMS[variant])
    before = state.sums.clone()
    one, _ = linear_attention(*parts[1], variant, state=state, **PARAMS[variant])
    two, _ = linear_attention(*parts[1], variant, state=state, **PARAMS[variant])
    assert torch.equal(state.sums, before)
    assert torch.equal(one, two)


@every_variant
def test_gradients_flow_through_the_state(variant: str) -> None:
    """The last part's output depends on the first part's keys and values."""
    q, k, v = (x.requires_grad_() for x in qkv(9))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return in_parts(variant, q, k, v, [2, 5])[0]

    assert gradcheck(attend, (q, k, v), fast_mode=True)
    do = rand(2, 2, 4, 5, seed=7)
    gradients = torch.autograd.grad(attend(q, k, v)[:, :, 5:], (k, v), do)
    out = attnzoo.attention(q, k, v, variant, is_causal=True, **PARAMS[variant])
    expected = torch.autograd.grad(out[:, :, 5:], (k, v), do)
    for have, want in zip(gradients, expected, strict=True):
        assert bool((want[:, :, :2] != 0).any())
        assert torch.allclose(have, want)


@every_variant
def test_state_gets_a_gradient_if_no_input_requires_one(variant: str) -> None:
    """A model may learn the initial state."""
    q, k, v = qkv(6)
    _, state = linear_attention(*(x[:, :, :3] for x in (q, k, v)), variant, **PARAMS[variant])

    def attend(sums: Tensor) -> Tensor:
        parts = (x[:, :, 3:] for x in (q, k, v))
        return linear_attention(*parts, variant, state=LinearState(sums, 3), **PARAMS[variant])[0]

    assert gradcheck(attend, state.sums.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_variant
def test_states_are_fp32_for_low_precision(variant: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(12, dtype=dtype)
    out, state = in_parts(variant, q, k, v, [5])
    assert out.dtype == dtype
    assert state is not None
    assert state.sums.dtype == torch.float32
    exact = attnzoo.attention(
        q.double(), k.double(), v.double(), variant, is_causal=True, **PARAMS[variant]
    )
    assert torch.allclose(out.double(), exact, atol=8 * torch.finfo(dtype).eps, rtol=0.01)


def test_invalid_arguments_raise() -> None:
    q, k, v = qkv(4)
    _, state = linear_attention(q, k, v, "taylor")
    with pytest.raises(TypeError, match="state must be a LinearState or None, got dict"):
        linear_attention(q, k, v, "taylor", state={})  # type: ignore[arg-type]
    wrong = r"state.sums must be \(2, 2, 12, 6\).*got \(2, 2, 28, 6\)"
    with pytest.raises(ValueError, match=wrong):
        linear_attention(q, k, v, "cosformer", max_length=64, state=state)
    with pytest.raises(ValueError, match=r"state.sums must be \(1, 2, 28, 6\)"):
        linear_attention(q[:1], k[:1], v[:1], "taylor", state=state)
    with pytest.raises(ValueError, match=r"state.sums must be .*float32.*got .*float64"):
        linear_attention(q.float(), k.float(), v.float(), "taylor", state=state)
    with pytest.raises(ValueError, match="q and k must have equal lengths, got 1 and 4"):
        linear_attention(q[:, :, :1], k, v, "taylor")
    with pytest.raises(ValueError, match="does not support variant 'softmax'"):
        linear_attention(q, k, v, "softmax")
    with pytest.raises(ValueError, match="variant 'taylor' in this call: only order 2"):
        linear_attention(q, k, v, "taylor", order=4)
    with pytest.raises(ValueError, match="max_length=6 is below the length 8"):
        _, state = linear_attention(q, k, v, "cosformer", max_length=6)
        linear_attention(q, k, v, "cosformer", max_length=6, state=state)
    with pytest.raises(ValueError, match="linear_attention does not support a dense mask"):
        linear_attention(q, k, v, "taylor", attn_mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool"):
        linear_attention(q, k, v, "taylor", attn_mask=torch.zeros(1, 4).double())
    with pytest.raises(TypeError, match="'taylor' has no parameter 'max_length'; it has: order"):
        linear_attention(q, k, v, "taylor", max_length=5)
    with pytest.raises(ValueError, match="unknown variant 'linear'"):
        linear_attention(q, k, v, "linear")
