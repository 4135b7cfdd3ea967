"""varlen_attention gives the results of `attention` on each sequence, with all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnzoo
from attnzoo.functional import varlen
from helpers.cases import ALL_VARIANTS, CASES, NO_LOGITS, learned, params_of, rand
from helpers.coverage_table import levels_of
from helpers.covering import covering
from helpers.paged import cache_of

# Numbers of queries, and of keys, of the sequences.
LAYOUTS = {
    "equal": ((5, 5, 5), (5, 5, 5)),
    "ragged": ((4, 1, 7), (4, 1, 7)),
    "empty": ((0, 4, 0, 0, 3, 0), (0, 4, 0, 0, 3, 0)),
    "cross": ((2, 5, 3, 0, 4), (6, 3, 0, 4, 4)),
    "decode": ((1, 1, 1), (3, 6, 3)),
    "one": ((6,), (8,)),
}
FACTORS: dict[str, tuple] = {
    "layout": tuple(LAYOUTS),
    "span": ("full", "causal", "window", "pair"),
    "heads": (1, 2),
    "params": ("default",),
    "bias": (None, "alibi", "table"),
    "lse": (False, True),
    "softcap": (None, 2.0),
    "path": ("split", "padded"),
    "cache": ("none", "gaps", 1, 4, 256),  # the last ones are sizes of pages
}
SPANS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 3},
    "pair": {"window": (2, 1)},
}
HEADS = 4


def factors(variant: str) -> tuple[tuple[str, tuple], ...]:
    levels = levels_of(variant, {**FACTORS, "mask": ()})
    del levels["mask"]
    if variant in NO_LOGITS:
        levels["softcap"] = (None,)
    return tuple(levels.items())


def leaves_of(variant: str, row: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors that need a gradient: query, key, value, a bias and parameters."""
    queries, keys = map(sum, LAYOUTS[row["layout"]])
    kv_heads = HEADS // row["heads"]
    leaves = {
        "query": 1.5 * rand(queries, HEADS, 8, seed=1),
        "key": 1.5 * rand(keys, kv_heads, 8, seed=2),
        "value": rand(keys, kv_heads, 6, seed=3),
    }
    if attnzoo.get_variant(variant).positional:
        # If all scores of a cosFormer query are near 0, the weights are 0/0.
        for name in ("query", "key"):
            leaves[name][..., 0] = leaves[name][..., 0].abs() + 0.5
    if row["bias"] == "alibi":
        leaves["alibi"] = torch.linspace(0.02, 0.3, HEADS).double()
    elif row["bias"] == "table":
        leaves["relative_bias"] = rand(HEADS, 7, seed=4)
    if row["params"] == "learned":
        leaves |= {name: x.double() for name, x in learned(variant, HEADS).items()}
    elif row["params"] == "per_token":
        drawn = learned(variant, HEADS, token_shape=(1, queries))
        leaves |= {name: x[0].double() for name, x in drawn.items()}
    return {name: x.requires_grad_() for name, x in leaves.items()}


def options_of(variant: str, row: dict[str, Any]) -> dict[str, Any]:
    settings = CASES[variant].settings[row["params"]] if isinstance(row["params"], int) else {}
    return {
        **SPANS[row["span"]], **params_of(variant), **settings, "enable_gqa": row["heads"] > 1,
        "softcap": row["softcap"], "return_lse": row["lse"],
    }  # fmt: skip


def ends_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def packed(
    leaves: dict[str, Tensor], variant: str, layout: str, cache: str | int = "none", **options: Any
) -> list[Tensor]:
    """Output and lse of one call."""
    queries, keys = LAYOUTS[layout]
    inputs: dict[str, Any] = {**leaves, "cu_seq_k": ends_of(keys)}
    if cache != "none":
        where = cache_of(keys, cache if isinstance(cache, int) else None)
        inputs |= {name: where.put(leaves[name]) for name in ("key", "value")} | where.arguments
        if "log_gates" in leaves and leaves["log_gates"].dim() == 2:
            gates = where.put(leaves["log_gates"].T)
            inputs["log_gates"] = gates.T if cache == "gaps" else gates
    result = attnzoo.varlen_attention(
        **inputs, cu_seq_q=ends_of(queries), max_q=max(queries), max_k=max(keys), variant=variant,
        **options,
    )  # fmt: skip
    return list(result) if options.get("return_lse") else [result]


def one_by_one(
    leaves: dict[str, Tensor], variant: str, layout: str, **options: Any
) -> list[Tensor]:
    """Output and lse of one call of the definition per sequence."""
    outs, lses = [], []
    queries, keys = (list(pairwise([0, *accumulate(x)])) for x in LAYOUTS[layout])
    for query_span, key_span in zip(queries, keys, strict=True):
        spans = {"query": query_span, "key": key_span, "value": key_span}
        q, k, v = (leaves[n][slice(*span)].transpose(0, 1)[None] for n, span in spans.items())
        params = {}
        for name in leaves.keys() - spans:
            x = leaves[name]
            span = key_span if name == "log_gates" else query_span
            is_shared = x.dim() < 2 or name == "relative_bias"
            params[name] = x if is_shared else x[None, :, slice(*span)]
        result = attnzoo.attention(q, k, v, variant, backend="eager", **options, **params)
        out, lse = result if options.get("return_lse") else (result, None)
        outs.append(out[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0])
    return [torch.cat(outs), torch.cat(lses, dim=1)] if lses else [torch.cat(outs)]


def assert_equal_with_gradients(
    have: list[Tensor], want: list[Tensor], leaves: dict[str, Tensor]
) -> None:
    for one, other in zip(have, want, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9)
    loss = [sum((x.masked_fill(x.isinf(), 0.0).square().sum()) for x in xs) for xs in (have, want)]
    grads = [torch.autograd.grad(x, list(leaves.values()), materialize_grads=True) for x in loss]
    for name, one, other in zip(leaves, *grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9), name


def cases() -> Iterator[Any]:
    for variant in ALL_VARIANTS:
        for i, row in enumerate(covering(factors(variant), lambda case: True)):
            words = [f"{key}={x}" for key, x in row.items() if x not in (None, False, "default")]
            marks = [pytest.mark.slow] if i > 1 else []
            yield pytest.param(variant, row, id=f"{variant}-{'-'.join(words)}", marks=marks)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("variant", "row"), list(cases()))
def test_agrees_with_calls_of_single_sequences(
    variant: str, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = leaves_of(variant, row)
    options = {n: x for n, x in options_of(variant, row).items() if n not in leaves}
    want = one_by_one(leaves, variant, row["layout"], **options)
    if row["path"] == "padded":
        # As where the lengths cannot be read
        monkeypatch.setattr(varlen, "is_recorded", lambda: True)
    have = packed(leaves, variant, row["layout"], row["cache"], **options)
    assert_equal_with_gradients(have, want, leaves)


@pytest.mark.parametrize("cache", ["none", "gaps", 4])
@pytest.mark.parametrize("path", ["split", "padded"])
def test_gates_per_key(path: str, cache: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"layout": "ragged", "heads": 2, "bias": "alibi", "params": "default"}
    leaves = leaves_of("forgetting", row)
    leaves["log_gates"] = (-rand(HEADS, 12, seed=5).abs()).requires_grad_()
    options = {"is_causal": True, "enable_gqa": True, "return_lse": True}
    want = one_by_one(leaves, "forgetting", "ragged", **options)
    if path == "padded":
        monkeypatch.setattr(varlen, "is_recorded", lambda: True)
    have = packed(leaves, "forgetting", "ragged", cache, **options)
    assert_equal_with_gradients(have, want, leaves)


def test_sequences_as_segments_of_a_backend_that_walks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Used where lengths cannot be read and cu_seq_q and cu_seq_k are the same tensor."""
    row = {"layout": "ragged", "heads": 2, "bias": "alibi", "params": "learned"}
    leaves, ends = leaves_of("ssmax", row), ends_of((4, 1, 7))
    options = {"is_causal": True, "enable_gqa": True, "return_lse": True}
    tiled, calls = varlen.BACKENDS["tiled"], []

    def record(q: Tensor, *others: Any) -> Any:
        calls.append(q.shape)
        return tiled.run(q, *others)

    walks = type(tiled)(**{**vars(tiled), "walks_segments": True, "run": record})
    monkeypatch.setitem(varlen.BACKENDS, "tiled", walks)
    monkeypatch.setattr(varlen, "is_recorded", lambda: True)
    for backend in (None, "tiled"):
        want = one_by_one(leaves, "ssmax", "ragged", **options)
        have = attnzoo.varlen_attention(
            **leaves, cu_seq_q=ends, cu_seq_k=ends, max_q=7, max_k=7, variant="ssmax",
            backend=backend, **options,
        )  # fmt: skip
        assert_equal_with_gradients(list(have), want, leaves)
    assert set(calls) <= {(1, HEADS, 12, 8), (3, HEADS, 7, 8)}
    assert (1, HEADS, 12, 8) in calls


@pytest.mark.parametrize("layout", [((0, 0), (0, 0)), ((3, 2), (0, 0)), ((0, 0), (3, 2)), ((), ())])
@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "cosformer", "forgetting"])
def test_no_query_has_a_key(variant: str, layout: tuple) -> None:
    queries, keys = map(ends_of, layout)
    q = rand(int(queries[-1]), 2, 8).requires_grad_()
    k, v = (rand(int(keys[-1]), 2, 8, seed=i).requires_grad_() for i in (1, 2))
    params = params_of(variant)
    if variant == "forgetting":
        params["log_gates"] = (-rand(2, len(k)).abs()).requires_grad_()
    out = attnzoo.varlen_attention(q, k, v, queries, keys, 3, 3, variant, is_causal=True, **params)
    assert torch.equal(out, torch.zeros_like(q))
    grads = torch.autograd.grad(out.sum(), (q, k, v), materialize_grads=True)
    assert all(not g.any() for g in grads)


def test_length_of_the_longest_sequence_counts_for_max_length() -> None:
    """cosformer limits the length of a sequence, not the number of packed tokens."""
    q = rand(12, 2, 8)
    ends = ends_of((6, 6))
    out = attnzoo.varlen_attention(q, q, q, ends, ends, 6, 6, "cosformer", max_length=6)
    assert out.shape == q.shape
    with pytest.raises(ValueError, match="max_length=5 is below the length 6"):
        attnzoo.varlen_attention(q, q, q, ends, ends, 6, 6, "cosformer", max_length=5)
    no_keys, ends_of_keys = q[:0], torch.zeros_like(ends)
    out = attnzoo.varlen_attention(
        q, no_keys, no_keys, ends, ends_of_keys, 6, 0, "cosformer", max_length=6
    )
    assert torch.equal(out, torch.zeros_like(q))


def test_parameters_per_token_without_keys() -> None:
    """One value per query, or one per key, of which there is none."""
    q, ends = rand(6, 2, 8), ends_of((2, 4))
    arguments = (q, q[:0], q[:0], ends, torch.zeros_like(ends), 4, 0)
    beta, log_gates = torch.ones(2, 6).double(), torch.zeros(2, 0).double()
    out = attnzoo.varlen_attention(*arguments, "asentmax", beta=beta, gamma=1.0)
    assert torch.equal(out, torch.zeros_like(q))
    out, lse, largest = attnzoo.varlen_attention(
        *arguments, "forgetting", is_causal=True, log_gates=log_gates, return_lse=True,
        return_max_logits=True,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 6), float("-inf")))
    assert torch.equal(largest, torch.full((2,), float("-inf")))


@pytest.mark.parametrize(
    "variant",
    ["cosformer", *(pytest.param(x, marks=pytest.mark.slow) for x in ("softmax", "entmax"))],
)
def test_compiled_and_fake_calls(variant: str) -> None:
    queries, keys = ends_of((2, 4)), ends_of((5, 3))
    q, k, v = rand(6, 4, 8).float(), rand(8, 2, 8, seed=1).float(), rand(8, 2, 8, seed=2).float()
    options = dict(is_causal=True, enable_gqa=True, **params_of(variant))
    want = attnzoo.varlen_attention(q, k, v, queries, keys, 4, 5, variant, **options)
    compiled = torch.compile(attnzoo.varlen_attention, fullgraph=True, backend="eager")
    have = compiled(q, k, v, queries, keys, 4, 5, variant, **options)
    assert torch.allclose(have, want, atol=1e-6)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, queries, keys)]
        assert attnzoo.varlen_attention(*fake, 4, 5, variant, **options).shape == want.shape


def test_dtype_and_memory_layout_of_the_results() -> None:
    q, k, v = (rand(9, 2, 8, seed=i).bfloat16() for i in range(3))
    for lengths in ((3, 3, 3), (4, 5)):
        ends = ends_of(lengths, torch.int64)
        out, lse = attnzoo.varlen_attention(q, k, v, ends, ends, 5, 5, return_lse=True)
        assert (out.dtype, out.shape) == (torch.bfloat16, (9, 2, 8))
        assert out.is_contiguous()
        assert (lse.dtype, lse.shape) == (torch.float32, (2, 9))


def test_dropout_is_unbiased() -> None:
    q, k, v = (rand(7, 2, 8, seed=i) for i in range(3))
    ends = ends_of((4, 3))

    def attend(**options: Any) -> Tensor:
        return attnzoo.varlen_attention(q, k, v, ends, ends, 4, 4, **options)

    exact = attend()
    torch.manual_seed(0)
    runs = torch.stack([attend(dropout_p=0.5) for _ in range(200)])
    error = (runs.mean(0) - exact) / (runs.std(0) / math.sqrt(200))
    assert float(error.abs().max()) < 5  # bounds the largest of 112 z-scores
    assert float(error.std()) == pytest.approx(1.0, abs=0.35)


X = torch.zeros(6, 2, 4)
ENDS = torch.tensor([0, 2, 6])
GOOD = {
    "query": X, "key": X, "value": X, "cu_seq_q": ENDS, "cu_seq_k": ENDS, "max_q": 4, "max_k": 4,
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": X[0]}, ValueError, r"query must have shape \(T, H, D\), got \(2, 4\)"),
    ({"key": [1]}, TypeError, "key must be a tensor, got list"),
    ({"query": X.int()}, TypeError, "query must be fp16.*int32"),
    ({"value": X.double()}, TypeError, "value must have query's dtype torch.float32, got"),
    ({"key": X.to("meta")}, ValueError, "key must be on query's device cpu, got meta"),
    ({"query": X[..., :0]}, ValueError, "query must have a head dimension of at least 1, got"),
    ({"key": torch.zeros(6, 2, 5)}, ValueError, r"key must have query's head dimension 4, got"),
    ({"value": X[:5]}, ValueError, r"value must have as many tokens and heads as key, \(6, 2\)"),
    ({"key": X[:, :1], "value": X[:, :1]}, ValueError, "heads, got 2 and 1; enable_gqa=True"),
    (
        {"query": torch.zeros(6, 3, 4), "enable_gqa": True},
        ValueError,
        "query's heads must be a multiple",
    ),
    ({"cu_seq_q": [0, 6]}, TypeError, "cu_seq_q must be a tensor, got list"),
    ({"cu_seq_k": ENDS.float()}, TypeError, "cu_seq_k must be int32 or int64, got torch.float32"),
    ({"cu_seq_q": ENDS[None]}, ValueError, r"cu_seq_q must have shape \(S \+ 1,\).*\(1, 3\)"),
    ({"cu_seq_q": ENDS[:0]}, ValueError, r"cu_seq_q must have shape \(S \+ 1,\).*\(0,\)"),
    ({"cu_seq_k": ENDS.to("meta")}, ValueError, "cu_seq_k must be on key's device cpu, got meta"),
    ({"cu_seq_q": ENDS + 1}, ValueError, "cu_seq_q must start with 0, got 1"),
    ({"cu_seq_k": torch.tensor([0, 4, 2, 6])}, ValueError, "must not decrease, got 4 and then 2"),
    ({"cu_seq_k": torch.tensor([0, 2, 5])}, ValueError, "number of tokens of key, 6, got 5"),
    (
        {"cu_seq_q": ENDS[[0, 2]], "cu_seq_k": ENDS[[0, 2]]},
        ValueError,
        "max_q must be .* longest sequence, 6, got 4",
    ),
    ({"cu_seq_k": torch.tensor([0, 2, 4, 6])}, ValueError, "cu_seq_k must have as many .* 4 and 3"),
    ({"max_q": 3}, ValueError, "max_q must be at least the length of the longest sequence, 4, got"),
    ({"max_k": -1}, ValueError, "max_k must be at least 0, got -1"),
    ({"max_k": 4.0}, TypeError, "max_k must be an int or a tensor .*, got 4.0"),
    ({"max_q": True}, TypeError, "max_q must be an int or a tensor .*, got True"),
    ({"variant": "nothing"}, ValueError, "unknown variant 'nothing'"),
    ({"variant": "sigmoid", "bias": X[0]}, ValueError, r"bias must have shape \(\) or \(2,\), got"),
    ({"variant": "asentmax", "beta": torch.zeros(1, 2, 6)}, ValueError, r"or \(2, 6\), got \(1, 2"),
    ({"variant": "asentmax", "beta": torch.zeros(2, 5)}, ValueError, r"or \(2, 6\), got \(2, 5\)"),
    ({"variant": "forgetting", "log_gates": -0.1}, ValueError, "is_causal must be True"),
    (
        {"variant": "sigmoid", "return_lse": True},
        ValueError,
        "return_lse must be False for sigmoid",
    ),
    ({"window": 3}, ValueError, "window must be a pair"),
    ({"alibi": torch.zeros(3)}, ValueError, r"alibi must have one slope per query head"),
    ({"backend": "fast"}, ValueError, "backend must be None or one of"),
    ({"backend": "linear"}, ValueError, "backend 'linear' cannot run 'softmax'"),
    (
        {"max_q": torch.tensor(3)},
        ValueError,
        "max_q must be at least .* longest sequence, 4, got 3",
    ),
    (
        {"max_k": torch.tensor([4])},
        TypeError,
        r"max_k must be an int or a tensor \(\) of ints, got",
    ),
    ({"window_size": (-2, 0)}, ValueError, r"window_size must be a pair .*, got \(-2, 0\)"),
    ({"window_size": 3}, ValueError, "window_size must be a pair .*, got 3"),
    ({"window_size": (1, 0), "window": 2}, ValueError, r"window must be None with window_size="),
    ({"num_splits": 1}, TypeError, "num_splits must be None"),
    (
        {"return_aux": True},
        TypeError,
        "return_aux must be an AuxRequest of torch or None, got True",
    ),
    ({"return_lse": True, "return_aux": "x"}, TypeError, "return_aux must be .*, got 'x'"),
    ({"return_lse": 0}, TypeError, "return_lse must be a bool, got 0"),
    ({"return_lse": None}, TypeError, "return_lse must be a bool, got None"),
    ({"attn_mask": None}, TypeError, "attn_mask"),
    ({"segment_ids": None}, TypeError, "segment_ids"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[x[2][:50] for x in WRONG])
def test_wrong_arguments_raise(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    attnzoo.varlen_attention(**GOOD)
    with pytest.raises(error, match=message):
        attnzoo.varlen_attention(**{**GOOD, **changes})


def test_too_small_longest_raises_where_lengths_cannot_be_read() -> None:
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in GOOD.items()}
    assert attnzoo.varlen_attention(**meta).is_meta
    with pytest.raises(ValueError, match="max_k must be .*; 2 is too small for 6 tokens in 2"):
        attnzoo.varlen_attention(**{**meta, "max_k": 2})


def test_padding_does_not_add_to_the_sum_of_gates() -> None:
    """In a graph, sequences are padded. Copies of a large gate would be summed over the padding."""
    longest = 1000
    ends = torch.tensor([0, 5, 10, 10 + longest])
    q, k, v = torch.randn(3, 10 + longest, 1, 4, generator=torch.manual_seed(0)).unbind()
    gates = torch.full((1, 10 + longest), -0.01)
    gates[:, ends[:-1]] = -1000.0  # where sequences start

    def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return attnzoo.varlen_attention(
            q, k, v, ends, ends, longest, longest, "forgetting", is_causal=True, log_gates=gates
        )

    expected = attend(q.double(), k.double(), v.double(), gates.double())
    compiled = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v, gates)
    # A cumulative sum that starts at 1000 has an error of 1000 · 2^-24 per gate.
    assert (compiled[:10] - expected[:10]).abs().max() < 10 * 1000 * 2**-24
