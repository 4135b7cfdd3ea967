"""Errors of modules and caches name the wrong argument."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnzoo import attention
from attnzoo.nn import (
    WRAPPERS,
    AdaptiveSoftmax,
    Attention,
    KVCache,
    MixtureOutput,
    MultiheadAttention,
    OutputLayer,
    StateCache,
    Taylor,
    Transformer,
    attend,
    host_attention,
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


def mixture(**options: Any) -> Any:
    return WRAPPERS["mixture"]("softmax", 4, 32, **options)


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
    *(
        (
            lambda call=call, mask=mask: call(mask),
            TypeError,
            f"only {names} by position, got {came}",
        )
        for mask, came in ((X[0, 0], "a tensor of shape"), (None, "None besides"))
        for call, names in (
            (lambda mask: ssmax()(X, X, X, mask), "q, k and v"),
            (lambda mask: WRAPPERS["laser"]("softmax", 4, 32)(X, X, X, mask), "q, k and v"),
            (lambda mask: transformer()(TOKENS, mask), "tokens"),
            (lambda mask: Taylor(8, 2)(X[0], mask), "x"),
        )
    ),
    *(
        (
            lambda make=make, name=name: make(**{name: 0.1}),
            TypeError,
            f"constructor of {layer} has no argument '{name}'{hint}",
        )
        for make, layer, name, hint in (
            (ssmax, "Attention", "dropout_p", ": dropout_p is an argument of forward"),
            (ssmax, "Attention", "scale", ": scale is an argument of forward"),
            (ssmax, "Attention", "need_weights", ": need_weights is an argument of forward"),
            (ssmax, "Attention", "dropout", "; did you mean 'dropout_p'"),
            (multihead, "MultiheadAttention", "dropout_p", "; did you mean 'dropout'"),
            (multihead, "MultiheadAttention", "is_causal", ": is_causal is an argument of forward"),
            (multihead, "MultiheadAttention", "enable_gqa", ""),
            (transformer, "Transformer", "dropout_p", "; did you mean 'dropout'"),
            (mixture, "MixtureAttention", "dropout_p", ": dropout_p is an argument of forward"),
        )
    ),
    *(
        (
            lambda make=make, name=name: make(**{name: 1}),
            TypeError,
            f"has no parameter '{name}'.*; did you mean '{meant}'",
        )
        for make, name, meant in (
            (ssmax, "lern", "learn"),
            (multihead, "batchfirst", "batch_first"),
            (transformer, "droput", "dropout"),
            (transformer, "n_heads", "num_heads"),
            (mixture, "lerned", "learn"),
            (functools.partial(OutputLayer, 4, 6), "labelsmoothing", "label_smoothing"),
        )
    ),
    *(
        (
            lambda name=name: replace(nn.MultiheadAttention(8, 2), "ssmax", **{name: 1}),
            TypeError,
            f"{name} must not be given: it is that of the layer",
        )
        for name in ("dropout", "num_kv_heads", "batch_first", "embed_dim")
    ),
    (lambda: forward(key_padding_mask=X), TypeError, "; pass attn_mask=~key_padding_mask"),
    (lambda: attention(X, X, X, need_weights=True), TypeError, "; attention_weights returns the w"),
    *(
        (
            lambda make=make, options=options: make(**options),
            error,
            words,
        )
        for make in (
            multihead,
            mixture,
            functools.partial(
                host_attention, None, "ssmax", 4, 32, {}, key_dim=32, qk_dim=8, v_dim=8
            ),
            functools.partial(Taylor, 8, 2),
            functools.partial(OutputLayer, 8, 9),
            functools.partial(MixtureOutput, 8, 9, 2),
            functools.partial(AdaptiveSoftmax, 8, 9, [4]),
        )
        for options, error, words in (
            ({"device": "nowhere"}, ValueError, "^device must be the name .*, got 'nowhere'$"),
            ({"device": "cuda:x"}, ValueError, "^device must be the name .*, got 'cuda:x'$"),
            ({"device": 1.5}, TypeError, "^device must be a torch.device, .*, got 1.5$"),
            ({"dtype": "float32"}, TypeError, "^dtype must be fp16, .*, got 'float32'$"),
            ({"dtype": torch.int64}, TypeError, "^dtype must be fp16, .*, got torch.int64$"),
        )
    ),
    *(
        (
            lambda call=call: call(X[0].half()),
            TypeError,
            f"^{name} must have the dtype of the layer",
        )
        for call, name in (
            (lambda x: multihead()(x, X[0], X[0]), "query"),
            (lambda x: multihead()(X[0], x, X[0]), "key"),
            (lambda x: multihead()(X[0], X[0], x), "value"),
            (lambda x: multihead(kdim=8, vdim=8)(x, x, x), "query"),
            (lambda x: Taylor(8, 2)(x), "x"),
            (lambda x: WRAPPERS["output_gate"]("softmax", 2, 8).projected(x, x), "hidden states"),
            (lambda x: multihead().double()(x, x, x), "query"),
        )
    ),
    (
        lambda: project(X[0].to("meta")),
        ValueError,
        "query must be on the layer's device cpu, got m",
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
    positive = weights[weights > 0]
    assert 0 < len(positive) < weights.numel()
    assert torch.allclose(positive, torch.tensor(2 / 3))


def test_truthy_flags_of_torchs_layer_become_bools() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=1)  # type: ignore[arg-type]
    assert MultiheadAttention.of(layer, "ssmax").batch_first is True


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """A mesh of two ranks, of which this process is the first; nothing is sent to the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield dist.init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("variant", ["softmax", "ssmax"])
def test_wrong_sharding_of_heads_raises_and_shards_nothing(variant: str, two_ranks: Any) -> None:
    attend = Attention(variant, 8).shard_heads(two_ranks)
    with pytest.raises(ValueError, match="shard_heads must be called once"):
        attend.shard_heads(two_ranks)
    assert attend.num_heads == 4
    attend = Attention(variant, 5)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        attend.shard_heads("x")
    with pytest.raises(ValueError, match="num_heads=5 is not a multiple of 2 ranks"):
        attend.shard_heads(two_ranks)
    assert attend.num_heads == 5
