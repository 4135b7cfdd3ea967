"""varlen_attention with `seqused_k` and `block_table`: keys in a cache, of which some take part.

`test_varlen` has the same calls with all gradients, for each variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_varlen import ends_of
from torch import Tensor

import attnzoo
from helpers.cases import ALL_VARIANTS, params_of, rand
from helpers.crossed import crossed
from helpers.paged import WRONG_PAGES, cache_of

QUERIES, KEYS = (1, 3, 4, 2), (17, 3, 40, 0)  # a decode step, drafts, a chunk, no keys
LONGEST = 40


def packed_inputs(variant: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Query, key and value, and gates if the variant has them, of all sequences."""
    inputs = {
        "query": rand(sum(QUERIES), 4, 8).to(dtype),
        "key": rand(sum(KEYS), 2, 8, seed=1).to(dtype),
        "value": rand(sum(KEYS), 2, 6, seed=2).to(dtype),
    }
    if variant == "forgetting":
        inputs["log_gates"] = -rand(sum(KEYS), 4, seed=3).abs().float()
    return inputs


def attend(
    variant: str, inputs: dict[str, Tensor], page_size: int,
    function: Callable[..., Tensor] = attnzoo.varlen_attention, **options: Any,
) -> Tensor:  # fmt: skip
    """A call on a paged cache."""
    cache = cache_of(KEYS, page_size)
    paged = {n: x if n == "query" else cache.put(x) for n, x in inputs.items()}
    arguments = {**options, **paged, **cache.arguments, "cu_seq_q": ends_of(QUERIES)}
    return function(**arguments, max_q=4, max_k=LONGEST, variant=variant, enable_gqa=True)


def each_alone(variant: str, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """A call of `attention` for each sequence."""
    outs = []
    parts = zip(
        *(x.split(QUERIES if n == "query" else KEYS) for n, x in inputs.items()), strict=True
    )
    for q, k, v, *gates in parts:
        params = {"log_gates": gates[0].T[None]} if gates else {}
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = attnzoo.attention(q, k, v, variant, enable_gqa=True, **params, **options)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    "span",
    [{"is_causal": True}, {"is_causal": True, "window": 20}, {"window": (20, 1)}, {}],
    ids=["causal", "window", "pair", "full"],
)
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_agrees_with_attention_on_the_keys_of_each_sequence(
    page_size: int, span: dict[str, Any]
) -> None:
    for variant in ("softmax", "ssmax", "entmax"):
        inputs = packed_inputs(variant)
        want = each_alone(variant, inputs, **span, **params_of(variant))
        have = attend(variant, inputs, page_size, **span, **params_of(variant))
        assert torch.allclose(have, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("variant", "dtype"), crossed(ALL_VARIANTS, [torch.bfloat16, torch.float16, torch.float32])
)
def test_is_the_same_as_with_packed_keys(variant: str, dtype: torch.dtype) -> None:
    inputs = packed_inputs(variant, dtype)
    options = {"is_causal": True, **params_of(variant)}
    options |= {"log_gates": inputs["log_gates"].T} if "log_gates" in inputs else {}
    tokens = [inputs[name] for name in ("query", "key", "value")]
    torch.manual_seed(0)  # of variants with noise
    want = attnzoo.varlen_attention(
        *tokens, ends_of(QUERIES), ends_of(KEYS), 4, LONGEST, variant, enable_gqa=True, **options
    )
    torch.manual_seed(0)
    assert torch.equal(attend(variant, inputs, 16, **options), want)


def test_pages_may_be_a_slice_of_a_cache_and_shared_by_sequences() -> None:
    """As in engines that store keys and values side by side, and prompts once."""
    cache = rand(5, 2, 4, 2, 8).float()  # [pages, keys or values, page size, heads, D]
    table = torch.tensor([[3, 1, 9], [3, 4, 9]], dtype=torch.int32)
    used = torch.tensor([7, 5], dtype=torch.int32)
    q, ends = rand(2, 2, 8, seed=1).float(), ends_of((1, 1))
    out = attnzoo.varlen_attention(
        q, cache[:, 0], cache[:, 1], ends, None, 1, 7, "ssmax", seqused_k=used, block_table=table
    )
    for s, number in enumerate((7, 5)):
        k, v = cache[table[s, :2].long()].transpose(0, 1).flatten(1, 2)[:, :number].unbind()
        one = (x.transpose(0, 1)[None] for x in (q[s : s + 1], k, v))
        want = attnzoo.attention(*one, "ssmax")[0, :, 0]
        assert torch.allclose(out[s], want, atol=1e-6)


@pytest.mark.parametrize("pages", [0, 3])
@pytest.mark.parametrize("blocks", [0, 2])
def test_no_key_takes_part(pages: int, blocks: int) -> None:
    q, pool = rand(3, 2, 8).requires_grad_(), torch.full((pages, 4, 2, 8), float("nan"))
    pool = pool.double().requires_grad_()
    arguments: dict[str, Any] = {
        "seqused_k": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.full((2, blocks), -1, dtype=torch.int32),
    }
    out, lse = attnzoo.varlen_attention(
        q, pool, pool, ends_of((2, 1)), None, 2, 8, return_lse=True, **arguments
    )
    assert torch.equal(out, torch.zeros_like(q))
    assert bool((lse == float("-inf")).all())
    grads = torch.autograd.grad(out.sum(), (q, pool), materialize_grads=True)
    assert not any(x.any() for x in grads)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ssmax", "forgetting"])
def test_a_graph_gathers_the_pages(variant: str) -> None:
    inputs = packed_inputs(variant, torch.float32)
    options = {"is_causal": True, **params_of(variant)}
    run = torch.compile(attnzoo.varlen_attention, fullgraph=True, backend="eager")
    have = attend(variant, inputs, 16, run, **options)
    assert torch.allclose(have, attend(variant, inputs, 16, **options), atol=1e-5)


def test_explain_shows_the_calls_on_gathered_keys() -> None:
    arguments = {n: x for n, x in cache_of((17, 3, 17), 4).arguments.items() if n != "cu_seq_k"}
    q, pages = torch.zeros(3, 4, 1, 8), torch.zeros(20, 4, 2, 8)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, **arguments}
    plan = attnzoo.explain(q, pages, pages, "ssmax", **options)
    assert (plan.chosen, plan.parts, plan.gathers) == ("sdpa", 2, True)
    assert str(plan).startswith("ssmax: sdpa, with keys gathered from their pages, split by")
    unknown = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in options.items()}
    on_meta = q.to("meta"), pages.to("meta"), pages.to("meta")
    plan = attnzoo.explain(*on_meta, "entmax", **unknown)
    assert (plan.chosen, plan.parts, plan.gathers) == ("eager", None, True)
    assert attnzoo.explain(q, pages, pages, "cosformer", max_length=9, **options).chosen is None
    nothing = {**options, "seqused_k": torch.zeros(3, dtype=torch.int32)}
    for some in (pages, pages[:0]):
        assert attnzoo.explain(q, some, some, "sparsemax", **nothing).chosen == "eager"
    for changes, message in (
        ({"block_table": None}, "seqused_k must be None without block_table, got a tensor"),
        ({"attn_mask": q}, "attn_mask must be None with block_table, got a tensor"),
        ({"seqused_k": None}, "seqused_k must be a tensor with block_table"),
        ({"block_table": [1]}, "block_table must be a tensor, got list"),
    ):
        with pytest.raises(TypeError, match=message):
            attnzoo.explain(q, pages, pages, "softmax", **{**options, **changes})
    with pytest.raises(TypeError, match="k must be a tensor, got list"):
        attnzoo.explain(q, pages.tolist(), pages, **options)  # pyright: ignore[reportArgumentType]
    for tensors, message in (
        ((q, pages[0], pages), r"^k must have shape \(num_pages, .*, got \(4, 2, 8\)"),
        ((q, pages, pages[0]), r"^v must have shape \(num_pages, "),
        ((q, pages, pages[:, :3]), "^v must have as many pages, tokens and heads as k, "),
        ((q, pages[..., :4], pages), "^k must have q's head dimension 8, got "),
    ):
        with pytest.raises(ValueError, match=message):
            attnzoo.explain(*tensors, **options)


PAGES = torch.zeros(3, 4, 2, 8)
USED = torch.tensor([5, 1], dtype=torch.int32)
TABLE = torch.tensor([[2, 0], [1, WRONG_PAGES[0]]], dtype=torch.int32)
GOOD: dict[str, Any] = {
    "query": torch.zeros(3, 2, 8), "key": PAGES, "value": PAGES, "cu_seq_q": ends_of((2, 1)),
    "cu_seq_k": None, "max_q": 2, "max_k": 8, "seqused_k": USED, "block_table": TABLE,
}  # fmt: skip
TOKENS: dict[str, Any] = {
    **GOOD, "key": PAGES[0], "value": PAGES[0], "cu_seq_k": ends_of((3, 1)), "max_k": 3,
    "seqused_k": USED.clamp(max=3), "block_table": None,
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seqused_k": None}, TypeError, "seqused_k must be a tensor with block_table, got None"),
    ({"seqused_k": [5, 1]}, TypeError, "seqused_k must be a tensor, got list"),
    ({"seqused_k": USED.long()}, TypeError, "seqused_k must be int32, got torch.int64"),
    ({"seqused_k": USED[:1]}, ValueError, r"seqused_k must have shape \(2,\), got \(1,\)"),
    ({"seqused_k": USED.to("meta")}, ValueError, "must be on the keys' device cpu, got meta"),
    ({"seqused_k": USED + 4}, ValueError, "seqused_k must be .*, 8 for sequence 0, got 9"),
    ({"seqused_k": USED - 2}, ValueError, "seqused_k must be .*, 8 for sequence 1, got -1"),
    ({"max_k": 4}, ValueError, "max_k must be at least the length of the longest sequence, 5, got"),
    ({"block_table": TABLE.long()}, TypeError, "block_table must be int32, got torch.int64"),
    ({"block_table": TABLE[:1]}, ValueError, r"block_table must have shape \(2, max_blocks\), got"),
    ({"block_table": TABLE[0]}, ValueError, r"block_table must have shape \(2, max_blocks\), got"),
    ({"block_table": TABLE + 1}, ValueError, "block_table must have pages from 0 to 2.*, got 3"),
    ({"block_table": TABLE - 2}, ValueError, "must have pages .* got -2 for sequence 0"),
    ({"key": PAGES[:0], "value": PAGES[:0]}, ValueError, "no entries, as there is no page, .*"),
    ({"cu_seq_k": ends_of((5, 1))}, TypeError, "cu_seq_k must be None with block_table"),
    ({"key": PAGES[0]}, ValueError, r"key must have shape \(num_pages, page_size, Hkv, D\) with"),
    ({"key": PAGES[:, :0]}, ValueError, r"key must have shape .* got \(3, 0, 2, 8\)"),
    ({"key": PAGES[..., :7]}, ValueError, r"key must have query's head dimension 8, got \(3, 4"),
    ({"value": PAGES[:2]}, ValueError, r"as many pages, tokens and heads as key, \(3, 4, 2\), got"),
    ({"value": PAGES.double()}, TypeError, "value must have query's dtype torch.float32"),
    ({"key": PAGES[:, :, :1], "value": PAGES[:, :, :1]}, ValueError, "got 2 and 1; enable_gqa"),
    (
        {"variant": "forgetting", "log_gates": torch.zeros(2, 12), "is_causal": True},
        ValueError,
        r"log_gates must have shape .* or \(3, 4, 2\), got \(2, 12\)",
    ),
    ({**TOKENS, "cu_seq_k": None}, TypeError, "cu_seq_k must be a tensor without block_table"),
    ({**TOKENS, "seqused_k": USED}, ValueError, "seqused_k must be .*, 3 for sequence 0, got 5"),
    ({**TOKENS, "key": PAGES}, ValueError, r"key must have shape \(T, H, D\), got \(3, 4, 2, 8\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[x[2][:50] for x in WRONG])
def test_wrong_arguments_raise(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    attnzoo.varlen_attention(**GOOD)
    attnzoo.varlen_attention(**TOKENS)
    with pytest.raises(error, match=message):
        attnzoo.varlen_attention(**{**GOOD, **changes})


def test_values_are_not_read_where_this_would_wait() -> None:
    meta: dict[str, Any] = {
        n: x.to("meta") if isinstance(x, Tensor) else x for n, x in GOOD.items()
    }
    assert attnzoo.varlen_attention(**meta).is_meta
