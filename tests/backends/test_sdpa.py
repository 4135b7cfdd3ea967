"""The backend sdpa multiplies q by a gain in fp32, or the scale by a gain that is a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo
from attnzoo.backends import sdpa
from attnzoo.core.forms import Pairwise
from helpers.cases import rand

HALVES = (torch.float16, torch.bfloat16)
# An operation with tensors of several dtypes converts them itself, in its own kernel on a GPU.
ELEMENTWISE = ("aten.mul", "aten._to_copy", "aten.neg", "aten.copy_", "aten.clone")


class Operations(TorchDispatchMode):
    """Records the elementwise operations whose result has a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.names = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == self.shape:
            name = str(func).rpartition(".")[0]
            self.names += [name] if name in ELEMENTWISE else []
        return out


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """q, k and v (B, H, N, D), in memory as (B, N, H, D)."""
    return [rand(2, 9, 4, 8, seed=i).to(dtype).transpose(1, 2) for i in range(3)]


def gain_of(s: Tensor) -> Tensor:
    """The gain s · log n of a full call with 9 keys, in fp32."""
    return (s.view(1, 4, 1) * torch.full((1, 1, 1), 9.0).log()).unsqueeze(-1)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_gain_is_multiplied_into_fp32_queries(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(dtype)
    s = torch.tensor([0.3, -1.1, 0.7, 2.9])
    passed: list[Tensor] = []
    fused = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa,
        "scaled_dot_product_attention",
        lambda *args, **options: passed.extend(args[:3]) or fused(*args, **options),
    )
    out = attnzoo.attention(q, k, v, "ssmax", s=s, backend="sdpa")
    assert out.dtype == dtype
    for x, want in zip(passed, (gain_of(s) * q.float(), k.float(), v.float()), strict=True):
        assert torch.equal(x, want)
        assert x.stride() == q.stride()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wanted", ["q", "s", "qs", "qkvs"])
def test_gradients_with_a_gain_are_rounded_once(dtype: torch.dtype, wanted: str) -> None:
    """Results equal those of fp32 inputs, rounded."""
    q, k, v = tensors(dtype)
    s, do = torch.tensor([0.3, -1.1, 0.7, 2.9]), rand(*q.shape, seed=3).to(dtype)
    results = []
    for kind in (dtype, torch.float32):
        leaves = {"q": q, "k": k, "v": v, "s": s}
        leaves = {n: x.to(s.dtype if n == "s" else kind).detach() for n, x in leaves.items()}
        inputs = [leaves[name].requires_grad_() for name in wanted]
        args = [leaves[name] for name in "qkv"]
        out = attnzoo.attention(*args, "ssmax", s=leaves["s"], backend="sdpa")
        results.append([out, *torch.autograd.grad(out, inputs, do.to(kind))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("kind", ["bool", "same", "fp32"])
@pytest.mark.parametrize("dtype", HALVES)
def test_masks_with_a_gain(dtype: torch.dtype, kind: str) -> None:
    q, k, v = tensors(dtype)
    mask = rand(2, 1, 9, 9, seed=4)
    mask = mask > 0 if kind == "bool" else mask.to(dtype if kind == "same" else torch.float32)
    have = attnzoo.attention(q, k, v, "ssmax", attn_mask=mask, backend="sdpa")
    want = attnzoo.attention(q, k, v, "ssmax", attn_mask=mask, backend="tiled")
    torch.testing.assert_close(have, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("scale", [-3e-41, -1e-39, 0.0, 1e-39, 3e-41])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiny_scale_does_not_round_queries(dtype: torch.dtype, scale: float) -> None:
    q, k, v = (1e19 * x.float() for x in tensors(torch.bfloat16))
    q, k, v = (10 * q).to(dtype), (100 * k).to(dtype), (v / 1e19).to(dtype)
    have = attnzoo.attention(q, k, v, scale=scale, is_causal=True, backend="sdpa")
    want = attnzoo.attention(
        q.double(), k.double(), v.double(), scale=scale, is_causal=True, backend="eager"
    )
    torch.testing.assert_close(have.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


def test_gain_in_transforms_and_batched_gradients() -> None:
    q, k, v = tensors(torch.bfloat16)
    s = torch.tensor([0.3, -1.1, 0.7, 2.9])

    def attend(q: Tensor, s: Tensor) -> Tensor:
        return attnzoo.attention(q, k, v, "ssmax", s=s, backend="sdpa")

    dos = rand(3, *q.shape, seed=3).bfloat16()
    leaves = q.detach().requires_grad_(), s.clone().requires_grad_()
    out = attend(*leaves)
    single = [torch.autograd.grad(out, leaves, do, retain_graph=True) for do in dos]
    want = [torch.stack(grads) for grads in zip(*single)]
    batched = torch.autograd.grad(out, leaves, dos, retain_graph=True, is_grads_batched=True)
    transformed = torch.func.vjp(attend, q, s)[1](dos[0])
    for grads, expected in ((batched, want), (transformed, single[0])):
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_gain_that_is_a_number_takes_no_operation() -> None:
    q, k, v = tensors(torch.bfloat16)
    call = attnzoo.core.arguments.check_call(q, k, v)
    form = Pairwise(attnzoo.core.activations.EXP, "sum", gain=-0.7)
    with Operations(q.shape) as operations:
        out, _ = sdpa.run(q, k, v, call, form)
    assert operations.names == ["aten.neg"]  # torch gets a positive scale
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=-0.7 * 8**-0.5)
    torch.testing.assert_close(out, expected)


def test_16_bit_gain_does_not_round_fp32_queries_in_a_transform() -> None:
    q, k, v = tensors(torch.float32)
    form = Pairwise(attnzoo.core.activations.EXP, "sum", gain=torch.full((1, 1, 1), 1.1).bfloat16())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa.run(q, k, v, attnzoo.core.arguments.check_call(q, k, v), form)[0]

    transformed, _ = torch.func.vjp(attend, q, k, v)
    torch.testing.assert_close(transformed, attend(q, k, v), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", ["softmax", "ssmax", "adaptive_temperature"])
def test_second_derivatives_raise_and_name_eager(variant: str) -> None:
    """Torch's error would not say what to do."""
    q, k, v = (rand(1, 2, 6, 8, seed=seed).requires_grad_() for seed in range(3))
    out = attnzoo.attention(q, k, v, variant, is_causal=True, backend="sdpa")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    plain = torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0]
    assert torch.equal(dq, plain)
    with pytest.raises(RuntimeError, match=r"use_backend\('eager'\)"):
        torch.autograd.grad(dq.square().sum(), k)
