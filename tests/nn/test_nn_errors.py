"""Errors of modules and caches name the wrong argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo.nn import (
    Attention,
    KVCache,
    MultiheadAttention,
    StateCache,
    Taylor,
    Transformer,
    attend,
    parameter_groups,
    replace,
)

X = torch.ones(2, 4, 3, 8)
TOKENS = torch.ones(2, 3, dtype=torch.long)
SPARSE = X.to_sparse()


def nested(*shapes: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():  # torch warns that nested tensors are a prototype
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor([torch.ones(shape) for shape in shapes])


NESTED = nested((4, 3, 8), (4, 2, 8))
NT_1D = nested((2,), (2,))


def ssmax(**options: Any) -> Attention:
    return Attention("ssmax", **{"num_heads": 4, **options})


def forward(q: Any = X, **options: Any) -> Any:
    return ssmax()(q, X, X, **options)


def decode(cache: KVCache | StateCache, q: Any = X, k: Any = X, v: Any = X, **options: Any) -> Any:
    return attend(cache, q, k, v, "taylor", **options)


def filled(cache: KVCache | StateCache) -> Any:
    decode(cache)
    return cache


def multihead(**options: Any) -> MultiheadAttention:
    return MultiheadAttention(8, 2, **options)


def project(query: Any, **options: Any) -> Any:
    return multihead()(query, X[0], X[0], **options)


def transformer(variant: Any = "softmax", **options: Any) -> Transformer:
    return Transformer(9, embed_dim=8, num_heads=2, depth=1, variant=variant, **options)


Case = tuple[Callable[[], Any], type[Exception], str]

MODULES: list[Case] = [
    (lambda: ssmax(s=1e39), ValueError, r"ssmax's s must be .*got 1e\+39; .*torch.float32"),
    (lambda: ssmax(s=10**400), ValueError, r"ssmax's s must be .*got 1000.*torch.float32"),
    (
        lambda: ssmax(s=torch.tensor([1, 1, 1e300, 1], dtype=torch.float64)),
        ValueError,
        r"ssmax's s must be .*got 1e\+300 at \[2\].*torch.float32",
    ),
    (lambda: ssmax(s=NT_1D), TypeError, "ssmax's s must be a dense tensor, got a nested one"),
    (lambda: ssmax(b=NT_1D), TypeError, "ssmax's b must be a dense tensor, got a nested one"),
    (lambda: ssmax(s=SPARSE), TypeError, "ssmax's s must be a dense .*got a torch.sparse_coo one"),
    (lambda: ssmax(b=SPARSE), TypeError, "ssmax's b must be a dense .*got a torch.sparse_coo one"),
    (
        lambda: ssmax(b=torch.ones(4).to(torch.float8_e4m3fn)),
        TypeError,
        "ssmax's b must be fp16, bf16, fp32 or fp64, got torch.float8",
    ),
    (lambda: ssmax(b=None), TypeError, "ssmax's b must be a number or a tensor, got None"),
    (lambda: ssmax(num_heads=10**30), ValueError, r"num_heads must fit in an int64.*got 1000"),
    (lambda: ssmax(num_heads=10**5000), ValueError, "num_heads must fit .*got int with too many"),
    (lambda: ssmax(lern=()), TypeError, "no parameter 'lern'; it has: s, b; did you mean 'learn'"),
    (lambda: Attention("entmax", 4, alfa=1.5), TypeError, "has no .* did you mean 'alpha'"),
    (lambda: forward(NESTED), TypeError, "q must be a dense tensor, got a nested one"),
    (lambda: forward(SPARSE), TypeError, "q must be a dense tensor, got a torch.sparse_coo one"),
    (lambda: forward(need_weights="no"), TypeError, "need_weights must be a bool, got 'no'"),
    (lambda: forward(need_weights=1), TypeError, "need_weights must be a bool, got 1"),
    (lambda: forward(variant="softmax"), TypeError, "variant must not be passed to forward"),
    (lambda: ssmax().new_cache(10**400), ValueError, "max_length must fit in an int64.*got 1000"),
    (lambda: Taylor(8, 2, bias="x"), TypeError, "bias must be a bool, got 'x'"),  # type: ignore
    (lambda: multihead(bias="x"), TypeError, "bias must be a bool, got 'x'"),
    (lambda: multihead(add_bias_kv=2), TypeError, "add_bias_kv must be a bool, got 2"),
    (lambda: multihead(add_zero_attn=2), TypeError, "add_zero_attn must be a bool, got 2"),
    (lambda: multihead(batch_first=None), TypeError, "batch_first must be a bool, got None"),
    (lambda: multihead(dropout="x"), TypeError, r"dropout must be .*\[0, 1\), got 'x'"),
    (lambda: project(nested((3, 8), (2, 8))), TypeError, "query must be a dense .*got a nested"),
    (lambda: project(X[0].long()), TypeError, "query must be fp16, .*got torch.int64"),
    (lambda: project(X[0], need_weights=1), TypeError, "need_weights must be a bool, got 1"),
    (lambda: project(X[0], is_causal="x"), TypeError, "is_causal must be a bool, got 'x'"),
    (lambda: project(X[0], average_attn_weights=0), TypeError, "average_attn_weights must be a b"),
    (lambda: project(X[0], attn_mask=NT_1D), TypeError, "attn_mask must be a dense tensor, got"),
    (
        lambda: transformer(None),
        TypeError,
        r"variant must be a name .* a list of 1 entries, got None",
    ),
    (lambda: transformer([3]), ValueError, r"variant must hold names or pairs .*got 3"),
    (lambda: transformer(rope_base="x"), TypeError, r"rope_base must be a number from 1.*got 'x'"),
    (lambda: transformer(rope_share="x"), TypeError, r"rope_share must be a number .*got 'x'"),
    (lambda: transformer(dropout="x"), TypeError, r"dropout must be .*\[0, 1\), got 'x'"),
    (
        lambda: transformer()(TOKENS.to("meta")),
        ValueError,
        "tokens must be on cpu like the model, got a meta",
    ),
    (
        lambda: transformer()(nested((3,), (2,)).long()),
        TypeError,
        "tokens must be a dense tensor, got a nested one",
    ),
    (lambda: replace(None, "ssmax"), TypeError, "model must be a .*Module, got None"),  # type: ignore
    (
        lambda: parameter_groups(None, 0.1),  # type: ignore[arg-type]
        TypeError,
        "model must be a torch.nn.Module, got None",
    ),
    *(
        (
            lambda name=name, x=x: parameter_groups(nn.Linear(2, 2), **{name: x}),  # type: ignore
            error,
            f"{name} must be a finite number >= 0 or None, got {words}",
        )
        for name in ("weight_decay", "lr", "attention_lr")
        for x, error, words in (
            ("x", TypeError, "'x'"),
            (-1, ValueError, "-1"),
            (float("nan"), ValueError, "nan"),
            (10**400, ValueError, "1000"),
            (True, TypeError, "True"),
        )
    ),
    (
        lambda: parameter_groups(nn.Linear(2, 2), attention_lr=0.1),
        ValueError,
        "attention_lr must be None, because model has no learned parameters.*got 0.1",
    ),
]

CACHES: list[Case] = [
    (lambda: KVCache(10**400), ValueError, "max_length must fit in an int64 .*got 1000"),
    *(
        (
            lambda make=make, name=name, x=x: decode(make(), **{name: x}),
            TypeError,
            f"{name} must be a dense tensor, got a {kind} one",
        )
        for make in (lambda: KVCache(8), StateCache)
        for name in ("q", "k", "v", "attn_mask")
        for kind, x in (("nested", NESTED), ("torch.sparse_coo", SPARSE))
    ),
    (lambda: decode(StateCache(), k=X[0]), ValueError, r"k must have shape .*got \(4, 3, 8\)"),
    *(
        (
            lambda make=make, index=index: make().reorder(index),
            ValueError,
            words,
        )
        for make in (lambda: filled(KVCache(8)), lambda: filled(StateCache()))
        for index, words in (
            (
                torch.zeros(2, dtype=torch.long, device="meta"),
                "index must be on the cache's device cpu, got meta",
            ),
            (torch.zeros(0, dtype=torch.long), "index must name at least one sequence, got none"),
        )
    ),
    (
        lambda: decode(StateCache(), dropout_p=torch.ones(2)),
        ValueError,
        r"dropout_p must be 0.0 with a StateCache, got a tensor of shape \(2,\)",
    ),
    (
        lambda: decode(filled(StateCache()), causal=True),
        TypeError,
        "'taylor' has no parameter 'causal'; it has: order; did you mean 'is_causal'",
    ),
]


@pytest.mark.parametrize("case", MODULES + CACHES, ids=lambda case: case[2][:40])
def test_wrong_argument_raises(case: Case) -> None:
    call, error, words = case
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("value", [10**400, -1, 1, "x", None], ids=["huge", "-1", "1", "x", "None"])
def test_dropout_p_is_checked_with_and_without_weights(value: Any) -> None:
    for need_weights in (True, False):
        with pytest.raises((TypeError, ValueError), match=r"dropout_p must be a number in \[0, 1"):
            forward(need_weights=need_weights, dropout_p=value)


def test_dropout_applies_to_output_and_returned_weights() -> None:
    out, weights = forward(need_weights=True, dropout_p=0.5)
    assert torch.allclose(out, weights @ X)
    kept = weights[weights > 0]
    assert 0 < len(kept) < weights.numel()
    assert torch.allclose(kept, torch.tensor(2 / 3))


def test_truthy_flags_of_torchs_layer_become_bools() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=1)  # type: ignore[arg-type]
    assert MultiheadAttention.of(layer, "ssmax").batch_first is True
