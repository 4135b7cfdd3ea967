"""Errors for wrong arguments name the argument, what is allowed and what was passed."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import attnzoo
import attnzoo.distributed
import attnzoo.losses
from attnzoo.backends.linear import LinearState
from attnzoo.core.registry import RESERVED
from helpers.cases import rand
from helpers.errors import names_beside_parameters

Q = rand(2, 4, 5, 8, seed=1).float()
K = rand(2, 4, 6, 8, seed=2).float()
V = rand(2, 4, 6, 8, seed=3).float()
IDS = torch.zeros(2, 5, dtype=torch.long)
NAN, FP8 = float("nan"), torch.float8_e4m3fn


# (wrong arguments, error, a pattern of its message)
WRONG_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [[1.0]]}, TypeError, "q must be a tensor, got list"),
    ({"k": None}, TypeError, "k must be a tensor, got NoneType"),
    ({"v": 3.0}, TypeError, "v must be a tensor, got float"),
    ({"q": Q[0]}, ValueError, r"q must have shape \(B, H, N, D\), got \(4, 5, 8\)"),
    ({"v": V[..., None]}, ValueError, r"v must have shape .*got \(2, 4, 6, 8, 1\)"),
    ({"q": Q.long()}, TypeError, "q must be fp16, bf16, fp32 or fp64, got torch.int64"),
    ({"k": K.to(torch.complex64)}, TypeError, "k must be .*fp64, got torch.complex64"),
    ({"k": K.double()}, TypeError, "k must have q's dtype torch.float32, got torch.float64"),
    ({"v": V.half()}, TypeError, "v must have q's dtype torch.float32, got torch.float16"),
    ({"k": K.to("meta")}, ValueError, "k must be on q's device cpu, got meta"),
    ({"v": V.to("meta")}, ValueError, "v must be on q's device cpu, got meta"),
    ({"k": K[:1], "v": V[:1]}, ValueError, r"k must be .*B=2 and D=8, got \(1, 4, 6, 8\)"),
    ({"k": K[..., :7]}, ValueError, r"k must be .*D=8, got \(2, 4, 6, 7\)"),
    ({"v": V[:, :, :5]}, ValueError, r"v must be .*= \(2, 4, 6\) as in k, got \(2, 4, 5, 8\)"),
    ({"v": V[:, :2]}, ValueError, r"v must be .*= \(2, 4, 6\) as in k, got \(2, 2, 6, 8\)"),
    ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "q must have a head dimension"),
    ({"k": K[:, :2], "v": V[:, :2]}, ValueError, "heads, got 4 and 2; enable_gqa=True"),
    ({"k": K[:, :3], "v": V[:, :3], "enable_gqa": True}, ValueError, "multiple.*got 4 and 3"),
    ({"k": K[:, :0], "v": V[:, :0], "enable_gqa": True}, ValueError, "multiple.*got 4 and 0"),
    ({"enable_gqa": 1}, TypeError, "enable_gqa must be a bool, got 1"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
    ({"is_causal": None}, TypeError, "is_causal must be a bool, got None"),
    ({"return_lse": "yes"}, TypeError, "return_lse must be a bool, got 'yes'"),
    ({"variant": "softmaks"}, ValueError, "'softmaks'; did you mean 'softmax'"),
    ({"variant": "Softmax"}, ValueError, "unknown variant 'Softmax'.*; did you mean 'softmax'"),
    ({"variant": "scalable_softmax"}, ValueError, "did you mean 'ssmax'"),
    ({"variant": "Forgetting Transformer"}, ValueError, "did you mean 'forgetting'"),
    ({"variant": "sigmoid-attention"}, ValueError, "did you mean 'sigmoid'"),
    ({"variant": "qqq"}, ValueError, r"known: .*; attnzoo.load_plugin\(file\) registers"),
    ({"variant": "ssmax(s=0.4)"}, ValueError, "did you mean 'ssmax'.*; parameters are separate"),
    ({"variant": torch.softmax}, TypeError, "variant must be a name from .*got <built-in"),
    ({"variant": None}, TypeError, r"variant must be a name from list_variants\(\), got None"),
    ({"variant": torch.ones(5, 6)}, TypeError, r"got a tensor of shape \(5, 6\); .* attn_mask="),
    ({"backend": "flash9"}, ValueError, "backend must be None or one of .*tiled.*got 'flash9'"),
    ({"backend": 3}, ValueError, "backend must be None or one of .*tiled.*got 3"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite number or None, got nan"),
    ({"scale": float("inf")}, ValueError, "scale must be a finite number or None, got inf"),
    ({"scale": 10**400}, ValueError, "scale must be a finite number .*got 1000.*torch.float32"),
    ({"scale": -(10**5000)}, ValueError, "scale must be a finite number .*got int with too many"),
    (
        {"scale": 1e308},
        ValueError,
        r"scale must be .*got 1e\+308; torch.float32 holds .*3.4e\+38",
    ),
    ({"scale": "1"}, TypeError, "scale must be a finite number or None, got '1'"),
    ({"scale": 1j}, TypeError, "scale must be a finite number or None, got 1j"),
    ({"scale": True}, TypeError, "scale must be .*got True"),
    ({"scale": torch.tensor(0.5)}, TypeError, r"scale must be .*got a tensor of shape \(\)"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must be .*\[0, 1\), got -0.1"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be .*\[0, 1\), got 1.0"),
    ({"dropout_p": float("nan")}, ValueError, r"dropout_p must be .*\[0, 1\), got nan"),
    ({"dropout_p": 10**400}, ValueError, r"dropout_p must be .*\[0, 1\), got 1000"),
    ({"dropout_p": None}, TypeError, "dropout_p must be .*got None"),
    (
        {"dropout_p": torch.tensor(0.1)},
        TypeError,
        r"dropout_p must be .*got a tensor of shape \(\)",
    ),
    ({"window": 3}, ValueError, "window must be a pair .*without is_causal, got 3"),
    ({"window": 0, "is_causal": True}, ValueError, "window must be at least 1.*got 0"),
    ({"window": -2, "is_causal": True}, ValueError, "window must be at least 1.*got -2"),
    ({"window": (1, 1), "is_causal": True}, ValueError, r"window must be an int .*got \(1, 1\)"),
    ({"window": (1, -1)}, ValueError, r"window must have left >= 0 .*, got \(1, -1\)"),
    ({"window": (1, 2, 3)}, TypeError, r"window must be an int or a pair.*got \(1, 2, 3\)"),
    ({"window": 2.0, "is_causal": True}, TypeError, "window must be an int or a pair.*got 2.0"),
    ({"window": True, "is_causal": True}, TypeError, "window must be an int or a pair.*got True"),
    ({"window": (1.0, 2)}, TypeError, r"window must be an int or a pair.*got \(1.0, 2\)"),
    ({"window": b"ab"}, TypeError, "window must be an int or a pair.*got b'ab'"),
    ({"window": range(2)}, TypeError, r"window must be an int or a pair.*got range\(0, 2\)"),
    ({"window": (-(10**5000), 1)}, ValueError, "window must have left >= 0 .*tuple with too many"),
    ({"window": "ab"}, TypeError, "window must be an int or a pair.*got 'ab'"),
    ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a tensor, got list"),
    ({"attn_mask": torch.ones(5, 6).long()}, TypeError, "attn_mask must be bool.*got torch.int64"),
    ({"attn_mask": torch.ones(5, 6).half()}, TypeError, "attn_mask must be bool.*torch.float16"),
    ({"attn_mask": torch.ones(5, 6).double()}, TypeError, "attn_mask must be bool.*torch.float64"),
    ({"attn_mask": torch.ones(5, 6, device="meta")}, ValueError, "attn_mask must be on q's device"),
    ({"attn_mask": torch.ones(6, 5)}, ValueError, r"attn_mask .*\(2, 4, 5, 6\), got \(6, 5\)"),
    ({"attn_mask": torch.ones(5)}, ValueError, r"attn_mask must broadcast .*got \(5,\)"),
    ({"attn_mask": torch.ones(2, 5, 6)}, ValueError, r"attn_mask must broadcast .*got \(2, 5, 6\)"),
    ({"attn_mask": torch.ones(1, 1, 1, 5, 6)}, ValueError, "attn_mask must broadcast"),
    ({"attn_mask": torch.tensor(True)}, ValueError, r"attn_mask must broadcast .*got \(\)"),
    ({"alibi": [0.1] * 4}, TypeError, "alibi must be a tensor, got list"),
    ({"alibi": 0.5}, TypeError, "alibi must be a tensor, got float"),
    ({"alibi": torch.ones(4).long()}, TypeError, "alibi must be fp16, .*fp64, got torch.int64"),
    ({"alibi": torch.ones(4).to(FP8)}, TypeError, "alibi must be fp16, .*fp64, got torch.float8"),
    (
        {"alibi": torch.ones(4) * NAN},
        ValueError,
        r"alibi must be finite in torch.float32, got \[nan",
    ),
    (
        {"alibi": torch.ones(4).double() * 1e300},
        ValueError,
        r"alibi must be finite .*got \[1e\+300",
    ),
    ({"alibi": torch.ones(3)}, ValueError, r"alibi must have .*shape \(4,\), got \(3,\)"),
    ({"alibi": torch.ones(4, 1)}, ValueError, r"alibi must have .*shape \(4,\), got \(4, 1\)"),
    ({"alibi": torch.tensor(1.0)}, ValueError, r"alibi must have .*shape \(4,\), got \(\)"),
    ({"alibi": torch.ones(4, device="meta")}, ValueError, "alibi must be on q's device cpu"),
    ({"segment_ids": IDS}, ValueError, r"segment_ids of the keys .*\(2, 6\), got \(2, 5\).*a pair"),
    ({"segment_ids": (IDS, IDS)}, ValueError, r"segment_ids of the keys .*\(2, 6\), got \(2, 5\)"),
    ({"segment_ids": (IDS[:1], IDS)}, ValueError, r"segment_ids of the queries .*got \(1, 5\)"),
    ({"segment_ids": (IDS,)}, TypeError, "segment_ids must be .*a pair"),
    ({"segment_ids": [[0, 0]]}, TypeError, "segment_ids must be an int tensor"),
    ({"segment_ids": 7}, TypeError, "segment_ids must be an int tensor"),
    ({"segment_ids": IDS.float()}, TypeError, "segment_ids must be uint8, .*torch.float32"),
    ({"segment_ids": IDS.bool()}, TypeError, "segment_ids must be uint8, .*torch.bool"),
    ({"segment_ids": (IDS, None)}, TypeError, "segment_ids of the keys must be a tensor, got None"),
    ({"segment_ids": (IDS.to("meta"),) * 2}, ValueError, "segment_ids must be on q's device"),
]


@pytest.mark.parametrize("case", WRONG_CALLS, ids=lambda case: "-".join(case[0]))
def test_invalid_argument_raises(case: tuple[dict[str, Any], type[Exception], str]) -> None:
    wrong, error, words = case
    arguments = {"q": Q, "k": K, "v": V, **wrong}
    with pytest.raises(error, match=words):
        attnzoo.attention(**arguments)
    with pytest.raises(error, match=words):
        attnzoo.explain(**arguments)
    with pytest.raises(error, match=words if "backend" not in wrong else "backend"):
        attnzoo.attention_weights(**arguments)


WRONG_PARAMETERS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("softmax", {"s": 1.0}, TypeError, "'softmax' has no parameter 's'; it has: none"),
    ("ssmax", {"S": 1.0}, TypeError, "'ssmax' has no parameter 'S'; it has: s, b"),
    ("cosformer", {}, TypeError, "'cosformer' requires the parameter 'max_length'"),
    ("topk", {}, TypeError, "'topk' requires the parameter 'top_k'"),
    ("ssmax", {"s": "1"}, TypeError, "ssmax's s must be a number or a tensor, got '1'"),
    ("ssmax", {"s": True}, TypeError, "ssmax's s must be a number or a tensor, got True"),
    ("ssmax", {"s": None}, TypeError, "ssmax's s must be a number or a tensor, got None"),
    ("ssmax", {"s": [0.1] * 4}, TypeError, "ssmax's s must be a number or a tensor"),
    ("ssmax", {"s": float("inf")}, ValueError, "ssmax's s must be finite, got inf"),
    ("ssmax", {"b": float("nan")}, ValueError, "ssmax's b must be finite, got nan"),
    ("ssmax", {"s": torch.ones(4).long()}, TypeError, "ssmax's s must be fp16.*got torch.int64"),
    ("ssmax", {"s": torch.ones(4).to(FP8)}, TypeError, "ssmax's s must be fp16.*torch.float8"),
    ("ssmax", {"s": 10**400}, ValueError, "ssmax's s must be finite, got 1000.*torch.float32"),
    ("ssmax", {"s": -1e39}, ValueError, r"ssmax's s must be finite, got -1e\+39; .*torch.float32"),
    ("sink", {"b": 1e308}, ValueError, r"sink's b must be finite, got 1e\+308; .*torch.float32"),
    ("ssmax", {"s": torch.ones(4).double() * 1e300}, ValueError, "s must be finite .*got inf at"),
    (
        "ssmax",
        {"s": torch.tensor([1, NAN, 1, 1])},
        ValueError,
        r"finite throughout, got nan at \[1\]",
    ),
    ("sigmoid", {"bias": torch.ones(3)}, ValueError, r"bias .*\(\) or \(4,\), got \(3,\)"),
    ("sigmoid", {"bias": torch.ones(1)}, ValueError, r"bias .*\(\) or \(4,\), got \(1,\)"),
    ("sigmoid", {"bias": torch.ones(4, 1)}, ValueError, r"bias .*\(4,\), got \(4, 1\)"),
    ("sigmoid", {"bias": torch.ones(2, 4, 5)}, ValueError, r"bias .*\(4,\), got \(2, 4, 5\)"),
    ("sink", {"b": torch.ones(2, 4, 6)}, ValueError, r"\(2, 4, 5\), got \(2, 4, 6\)"),
    ("ssmax", {"s": torch.ones(4, device="meta")}, ValueError, "ssmax's s must be on q's device"),
    ("asentmax", {"beta": torch.ones(2, 4, 6)}, ValueError, r"\(2, 4, 5\), got \(2, 4, 6\)"),
    ("asentmax", {"gamma": torch.ones(1, 4, 5)}, ValueError, r"\(2, 4, 5\), got \(1, 4, 5\)"),
    ("entmax", {"alpha": 1.0}, ValueError, r"entmax's alpha must be in \(1, 2\].*, got 1.0"),
    ("entmax", {"alpha": 2.1}, ValueError, r"entmax's alpha must be in \(1, 2\].*, got 2.1"),
    ("entmax", {"alpha": torch.tensor([1.5, 1.2, 1.0, 1.5])}, ValueError, r"alpha .*\(1, 2\]"),
    ("entmax", {"alpha": torch.tensor(float("nan"))}, ValueError, r"alpha must be in \(1, 2\]"),
    ("entmax", {"alpha": 10**400}, ValueError, r"entmax's alpha must be in \(1, 2\].*, got 1000"),
    ("log_n", {"train_length": 10**400}, ValueError, "train_length must be .* 1, got 1000"),
    ("log_n", {"train_length": 1}, ValueError, "train_length must be a number above 1, got 1"),
    ("log_n", {"train_length": "512"}, TypeError, "train_length must be a number, got '512'"),
    ("log_n", {"train_length": torch.tensor(9.0)}, TypeError, "train_length must be a number"),
    ("adaptive_temperature", {"differentiable": 1}, TypeError, "must be a bool, got 1"),
    ("taylor", {"order": 3}, ValueError, "taylor's order must be an even int.*, got 3"),
    ("taylor", {"order": 0}, ValueError, "taylor's order must be an even int from 2 to 170, got 0"),
    ("taylor", {"order": 2.0}, TypeError, "taylor's order must be an int, got 2.0"),
    ("topk", {"top_k": 0}, ValueError, "topk's top_k must be an int of at least 1, got 0"),
    ("topk", {"top_k": True}, TypeError, "topk's top_k must be an int, got True"),
    ("topk", {"top_k": torch.tensor(3)}, TypeError, "topk's top_k must be an int, got a tensor"),
    ("topk", {"top_k": 10**400}, ValueError, "topk's top_k must fit in an int64 .*got 1000"),
    ("cosformer", {"max_length": 2**63}, ValueError, "must fit in an int64 .*got 922337"),
    ("cosformer", {"max_length": 0}, ValueError, "max_length must be an int of at least 1, got 0"),
    ("cosformer", {"max_length": 5}, ValueError, "max_length=5 is below the length 6"),
    ("cosformer", {"max_length": 9, "scale": 0.0}, ValueError, "scale must be above 0, got 0.0"),
    ("cosformer", {"max_length": 9, "scale": -1.0}, ValueError, "scale must be above 0, got -1.0"),
    ("softmax", {"state": 1}, TypeError, "'softmax' has no parameter 'state'; it has: none"),
    ("ssmax", {"causal": True}, TypeError, "no parameter 'causal'; .*did you mean 'is_causal'"),
    ("ssmax", {"attention_mask": None}, TypeError, "it has: s, b; did you mean 'attn_mask'"),
    ("ssmax", {"dropout": 0.1}, TypeError, "it has: s, b; did you mean 'dropout_p'"),
    ("ssmax", {"gqa": True}, TypeError, "it has: s, b; did you mean 'enable_gqa'"),
    ("taylor", {"Order": 2}, TypeError, "it has: order; did you mean 'order'"),
    ("ssmax", {"call": 1}, TypeError, "'ssmax' has no parameter 'call'; it has: s, b"),
]


def case_name(case: tuple[str, dict[str, Any], type[Exception], str]) -> str:
    return f"{case[0]}-{'-'.join(case[1])}"


@pytest.mark.parametrize("case", WRONG_PARAMETERS, ids=case_name)
def test_invalid_variant_parameter_raises(
    case: tuple[str, dict[str, Any], type[Exception], str],
) -> None:
    variant, params, error, words = case
    with pytest.raises(error, match=words):
        attnzoo.attention(Q, K, V, variant, **params)
    with pytest.raises(error, match=words):
        attnzoo.attention_weights(Q, K, V, variant, **params)


def nested(layout: torch.layout) -> torch.Tensor:
    parts = [torch.ones(n, 4) for n in (2, 3)]
    # torch warns that nested tensors are a prototype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor(parts, layout=layout)


def sparse(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return getattr(torch.ones(5, 6), kind)()


UNUSUAL = {
    "nested": (lambda: nested(torch.strided), "must be a dense tensor, got a nested one"),
    "jagged": (lambda: nested(torch.jagged), "must be a dense tensor, got a nested one"),
    "coo": (lambda: sparse("to_sparse"), "must be a dense tensor, got a torch.sparse_coo one"),
    "csr": (lambda: sparse("to_sparse_csr"), "must be a dense tensor, got a torch.sparse_csr one"),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask", "alibi", "segment_ids", "s"])
def test_nested_and_sparse_tensors_raise(name: str, kind: str) -> None:
    make, words = UNUSUAL[kind]
    arguments = {"q": Q, "k": K, "v": V, "variant": "ssmax", name: make()}
    with pytest.raises(TypeError, match=f"{name}.* {words}"):
        attnzoo.attention(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", np.True_),
        ("scale", np.float32(0.25)),
        ("scale", np.int64(2)),
        ("window", np.int64(3)),
        ("s", np.float32(0.25)),
    ],
)
def test_numpy_scalars_are_accepted(name: str, value: np.generic) -> None:
    options = {"variant": "ssmax", "is_causal": True}
    out = attnzoo.attention(Q, K, V, **{**options, name: value})
    assert torch.equal(out, attnzoo.attention(Q, K, V, **{**options, name: value.item()}))


@pytest.mark.parametrize("scale", [0.0, -3.0, 3e38, 1e-46])
def test_scale_may_be_any_number_that_the_score_dtype_holds(scale: float) -> None:
    q, k = Q.sign() / 64, K.sign() / 64
    assert bool(attnzoo.attention(q, k, V, scale=scale).isfinite().all())
    assert bool(attnzoo.attention(q.double(), k.double(), V.double(), scale=1e300).isfinite().all())


@pytest.mark.parametrize("name", ["s", "alibi"])
def test_values_are_not_read_under_vmap(name: str) -> None:
    many = torch.rand(3, 4)

    def attend(one: torch.Tensor) -> torch.Tensor:
        return attnzoo.attention(Q, K, V, "ssmax", backend="eager", **{name: one})

    expected = torch.stack([attend(one) for one in many])
    assert torch.allclose(torch.func.vmap(attend)(many), expected, atol=1e-6)


def test_error_lists_each_mask_dtype_once() -> None:
    mask = torch.zeros(5, 6, dtype=torch.int64)
    for dtype, floats in {
        torch.float32: "torch.float32",
        torch.float64: "torch.float64",
        torch.float16: "torch.float16 or torch.float32",
    }.items():
        with pytest.raises(TypeError, match=rf"\(True = attend\) or {floats}, got torch.int64"):
            attnzoo.attention(Q.to(dtype), K.to(dtype), V.to(dtype), attn_mask=mask)


X = rand(3, 2, 4, 6, 8).float().unbind()
SUMS = attnzoo.linear_attention(*X, "taylor")[1].sums

WRONG_STATES: list[tuple[Any, type[Exception], str]] = [
    (1, TypeError, "state must be a LinearState or None, got int"),
    ((SUMS, 6), TypeError, "state must be a LinearState or None, got tuple"),
    (LinearState(SUMS, "6"), TypeError, "state.length must be an int, got '6'"),  # type: ignore
    (LinearState(SUMS, True), TypeError, "state.length must be an int, got True"),
    (LinearState(SUMS, 6.0), TypeError, "state.length must be an int, got 6.0"),  # type: ignore
    (LinearState(SUMS, -1), ValueError, "state.length must be >= 0 .*got -1"),
    (LinearState(SUMS, 10**30), ValueError, "state.length must be >= 0 .*got 1000"),
    (LinearState(None, 6), TypeError, "state.sums must be a tensor, got NoneType"),  # type: ignore
    (LinearState([1.0], 6), TypeError, "state.sums must be a tensor, got list"),  # type: ignore
    (LinearState(SUMS[:1], 6), ValueError, r"state.sums must be \(2, 4, 45, 9\).*got \(1, 4"),
    (LinearState(SUMS.double(), 6), ValueError, "state.sums must be .*got .*torch.float64"),
    (LinearState(SUMS.to("meta"), 6), ValueError, "state.sums must be .*on cpu.*got .*on meta"),
]


@pytest.mark.parametrize("case", WRONG_STATES, ids=lambda case: case[2][:30])
def test_invalid_linear_state_raises(case: tuple[Any, type[Exception], str]) -> None:
    state, error, words = case
    with pytest.raises(error, match=words):
        attnzoo.linear_attention(*X, "taylor", state=state)


@pytest.mark.parametrize("name", ["window", "is_causal", "backend", "return_lse"])
def test_linear_attention_rejects_arguments_that_limit_keys(name: str) -> None:
    with pytest.raises(TypeError, match=f"linear_attention does not accept {name}; it accepts"):
        attnzoo.linear_attention(*X, "taylor", **{name: None})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_masks_must_have_the_dtype_of_inputs_or_scores(dtype: torch.dtype) -> None:
    q, k, v = Q.to(dtype), K.to(dtype), V.to(dtype)
    for mask_dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mask = torch.zeros(5, 6, dtype=mask_dtype)
        if mask_dtype in (dtype, torch.float64 if dtype == torch.float64 else torch.float32):
            assert attnzoo.attention(q, k, v, attn_mask=mask).dtype == dtype
            continue
        with pytest.raises(TypeError, match=f"attn_mask must be bool.*got {mask_dtype}"):
            attnzoo.attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize(
    ("variant", "backend", "options", "words"),
    [
        ("sigmoid", "sdpa", {}, "backend 'sdpa' cannot run 'sigmoid' here.*softmax"),
        ("softmax", "sdpa", {"is_causal": True}, "backend 'sdpa' cannot run.*top-left"),
        ("softmax", "sdpa", {"window": (1, 1)}, "backend 'sdpa' cannot run.*window"),
        ("softmax", "linear", {}, "backend 'linear' cannot run 'softmax' here.*no linear form"),
        ("taylor", "linear", {"order": 4}, "backend 'linear' cannot run.*only order 2"),
        ("taylor", "linear", {"window": (1, 1)}, "backend 'linear' cannot run.*window"),
    ],
)
def test_named_backend_that_cannot_run_raises_with_its_reason(
    variant: str, backend: str, options: dict[str, Any], words: str
) -> None:
    """A call that names a backend never runs on another one."""
    with pytest.raises(ValueError, match=words):
        attnzoo.attention(Q, K, V, variant, backend=backend, **options)


def test_attention_weights_accepts_backend_eager_only() -> None:
    assert attnzoo.attention_weights(Q, K, V, backend="eager").shape == (2, 4, 5, 6)
    with pytest.raises(ValueError, match="backend of attention_weights.*'eager', got 'tiled'"):
        attnzoo.attention_weights(Q, K, V, backend="tiled")


def weights(q: torch.Tensor, k: torch.Tensor, call: Any, **params: Any) -> torch.Tensor:
    return call.softmax(call.scores(q, k))


@pytest.mark.parametrize("package", [attnzoo, attnzoo.nn, attnzoo.losses, attnzoo.distributed])
def test_arguments_beside_parameters_are_reserved(package: Any) -> None:
    # `bias` is a parameter of sigmoid; `x` belongs to `Taylor`, whose forward has keywords only.
    assert names_beside_parameters(package) - RESERVED <= {"bias", "x"}


@pytest.mark.parametrize("owner", [attnzoo.nn.Attention, attnzoo.nn.OutputLayer])
def test_attributes_of_modules_with_parameters_are_reserved(owner: type) -> None:
    names = {name for name in dir(owner) if not name.startswith("_")}
    # `topk` is also the name of a variant, which general code does not contain.
    assert names - set(dir(torch.nn.Module)) <= RESERVED | {"topk"}


@pytest.mark.parametrize("reserved", ["q", "call", "state", "is_causal", "num_splits", "dropout"])
def test_parameter_named_like_an_argument_raises(reserved: str) -> None:
    variant = attnzoo.Variant("taken", "-", "-", weights, params=(attnzoo.Param(reserved, 1.0),))
    with pytest.raises(ValueError, match=f"'{reserved}' must not have a reserved name"):
        attnzoo.register_variant(variant)
    assert "taken" not in attnzoo.list_variants()


def test_invalid_registration_raises() -> None:
    with pytest.raises(TypeError, match="variant must be an attnzoo.Variant, got function"):
        attnzoo.register_variant(weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'softmax' is taken"):
        attnzoo.register_variant(attnzoo.Variant("softmax", "-", "-", weights))
    with pytest.raises(ValueError, match="identifier, got 'my variant'"):
        attnzoo.register_variant(attnzoo.Variant("my variant", "-", "-", weights))
    with pytest.raises(TypeError, match="variant must be a name .*got 3"):
        attnzoo.get_variant(3)  # type: ignore[arg-type]
