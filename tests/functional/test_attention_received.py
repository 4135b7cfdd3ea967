"""attention_received: the column sums of the dense weights, on every backend with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from helpers.cases import CASES, CAUSAL_ONLY, params_of, rand
from helpers.coverage_table import FEATURE_BACKENDS, KERNELS, OUTSIDE, RUNS
from helpers.features import feature

QUICK = ("causal", "bool mask, causal", "segments", "GQA")  # for the kernels


def columns(q: Tensor, k: Tensor, variant: str = "softmax", **arguments: Any) -> Tensor:
    """The column sums of the definition's weights in fp64."""
    q, k = q.double(), k.double()
    if (mask := arguments.get("attn_mask")) is not None and mask.is_floating_point():
        arguments["attn_mask"] = mask.double()
    return attnzoo.attention_weights(q, k, k, variant, **arguments).sum(2)


def agree(have: Tensor, want: Tensor) -> bool:
    """The error of a sum of Nq weights of at most about 1 in fp32."""
    return torch.allclose(have.double(), want, rtol=1e-5, atol=1e-5)


def pairs() -> list[Any]:
    """Those of `OUTSIDE` without sdpa, which needs values as wide as queries."""
    rows = []
    for pair in OUTSIDE:
        variant, backend = pair.values
        if backend != "sdpa":
            marks = [*pair.marks, pytest.mark.slow] if CASES[variant].expensive else pair.marks
            rows.append(pytest.param(variant, backend, marks=marks, id=pair.id))
    return rows


@pytest.mark.parametrize(("variant", "backend"), pairs())
def test_every_variant(variant: str, backend: str) -> None:
    """Odd lengths, and keys that only some or no queries see."""
    q, k = rand(2, 4, 23, 8, seed=1).float(), rand(2, 2, 29, 8, seed=2).float()
    mask = torch.ones(2, 1, 1, 29, dtype=torch.bool)
    mask[0, ..., 3:9] = mask[1, ..., :11] = False
    options = {"enable_gqa": True, "is_causal": True, "attn_mask": mask, **params_of(variant, 32)}
    have = attnzoo.attention_received(q, k, variant, backend=backend, **options)
    assert have.dtype == torch.float32
    assert not have.requires_grad
    assert agree(have, columns(q, k, variant, **options))
    assert not have.masked_select(~mask[:, :, 0]).any()


def features() -> list[Any]:
    rows = []
    for name, table in FEATURE_BACKENDS.items():
        for backend in ("tiled", "flash"):
            if table.get(backend, RUNS) is not RUNS or name in ("dropout", "lse"):
                continue
            kernel = backend in KERNELS
            marks = [pytest.mark.interpreter] if kernel else []
            marks += [pytest.mark.slow] if kernel and name not in QUICK else []
            rows.append(pytest.param(backend, name, marks=marks, id=f"{backend}-{name}"))
    return rows


@pytest.mark.parametrize(("backend", "name"), features())
def test_every_feature(backend: str, name: str) -> None:
    arguments = feature(name, gradient=False)
    q, k, _ = (arguments.pop(x) for x in "qkv")
    have = attnzoo.attention_received(q, k, backend=backend, **arguments)
    assert have.dtype == (torch.float64 if name == "fp64" else torch.float32)
    assert have.shape == (q.shape[0], q.shape[1], k.shape[2])
    assert agree(have, columns(q, k, **arguments))


@pytest.mark.parametrize("variant", ["softmax", "entmax", "topk", "sigmoid", "elu"])
def test_queries_without_keys_add_nothing(variant: str) -> None:
    q = rand(1, 2, 6, 8)
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[2, :3] = True
    options = {"attn_mask": mask, **params_of(variant, 6)}
    have = attnzoo.attention_received(q, q, variant, **options)
    assert torch.allclose(have, columns(q, q, variant, **options))
    assert not have[..., 3:].any()


def test_a_large_call_runs_in_blocks() -> None:
    q, k = rand(1, 4, 400, 8).float(), rand(1, 2, 400, 8, seed=1).float()
    options = {"enable_gqa": True, "is_causal": True, "window": 50}
    assert attnzoo.explain(q, k, k, **options).chosen == "tiled"
    assert agree(attnzoo.attention_received(q, k, **options), columns(q, k, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_have_sums_in_fp32(dtype: torch.dtype) -> None:
    """A sum of 70000 weights of 1 exceeds the range of fp16."""
    q = torch.ones(1, 1, 70000, 2, dtype=dtype)
    mask = torch.tensor([True, False])
    received = attnzoo.attention_received(q, q[:, :, :2], attn_mask=mask, backend="eager")
    assert received.tolist() == [[[70000, 0]]]
    q, k = (rand(1, 2, 40, 8, seed=i).to(dtype) for i in range(2))
    bias = rand(1, 1, 40, 40).to(dtype)
    assert agree(attnzoo.attention_received(q, k, attn_mask=bias), columns(q, k, attn_mask=bias))


def test_the_last_queries_only() -> None:
    q, k = rand(1, 2, 20, 8), rand(1, 2, 20, 8, seed=1)
    weights = attnzoo.attention_weights(q, k, k, is_causal=True)
    have = attnzoo.attention_received(q[:, :, 15:], k, is_causal=True)
    assert torch.allclose(have, weights[:, :, 15:].sum(2))


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_dropped_weights_are_not_counted(backend: str) -> None:
    q = rand(1, 2, 12, 12)
    eye = torch.eye(12, dtype=torch.float64).expand(1, 2, 12, 12)
    options = {"dropout_p": 0.5, "backend": backend}
    torch.manual_seed(0)
    weights = attnzoo.attention(q, q, eye, **options)
    torch.manual_seed(0)
    assert torch.allclose(attnzoo.attention_received(q, q, **options), weights.sum(2))


@pytest.mark.parametrize("variant", ["softmax", "ssmax"])
def test_modes_and_inputs_that_require_gradients(variant: str) -> None:
    q, k = rand(1, 2, 9, 8).requires_grad_(), rand(1, 2, 9, 8, seed=1)
    want = columns(q, k, variant).detach()
    params = {"s": torch.full((2,), 0.168, requires_grad=True)} if variant == "ssmax" else {}
    assert torch.allclose(attnzoo.attention_received(q, k, variant, **params), want, rtol=1e-3)
    assert q.grad is None
    with torch.no_grad():
        assert torch.allclose(attnzoo.attention_received(q, k, variant), want)
    with torch.inference_mode():
        received = attnzoo.attention_received(q * 1, k * 1, variant, attn_mask=torch.ones(9) > 0)
        assert torch.allclose(received, want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        received = attnzoo.attention_received(q.float(), k.float(), variant)
        assert received.dtype == torch.float32
        rounded = columns(q.bfloat16(), k.bfloat16(), variant)
        assert agree(received, rounded.detach())


def test_causal_only_variants_need_causality() -> None:
    q = rand(1, 2, 9, 8)
    for variant in CAUSAL_ONLY:
        with pytest.raises(ValueError, match="is_causal"):
            attnzoo.attention_received(q, q, variant, **params_of(variant))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_lse": True}, ValueError, "return_lse must be False for attention_received"),
        ({"return_max_logits": True}, ValueError, "return_max_logits must be False"),
        ({"backend": "nope"}, ValueError, "backend must be None or one of"),
        ({"backend": "decode"}, ValueError, "does not support gradients"),
        ({"backend": "sdpa"}, ValueError, "does not support a value dimension other than D"),
        ({"k": None}, TypeError, "k must be a tensor"),
        ({"k": torch.zeros(1, 2, 9, 4)}, ValueError, "k must be"),
        ({"attn_mask": torch.ones(9)}, TypeError, "attn_mask must be bool"),
        ({"temperature": 2.0}, TypeError, "temperature"),
    ],
)
@pytest.mark.interpreter
def test_wrong_arguments_raise(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q = rand(1, 2, 9, 8).float()
    arguments = {"q": q, "k": q, **options}
    if "attn_mask" in options:
        arguments["attn_mask"] = options["attn_mask"].long()
    with pytest.raises(error, match=message):
        attnzoo.attention_received(**arguments)


@pytest.mark.slow
def test_compiled_code_may_call_it() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        return 2 * attnzoo.attention_received(q, k, is_causal=True)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager")
    for n in (9, 12):
        q, k = rand(1, 2, n, 8), rand(1, 2, n, 8, seed=1)
        assert torch.allclose(compiled(q, k), function(q, k))
