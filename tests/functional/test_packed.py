"""Segments that are split into calls of equal lengths give the results of the definition.

The reference is the variant's definition in fp64 on the whole call, under a dense mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnzoo
from attnzoo.functional import packed
from helpers.agreement import Inputs, differentiate, make, reference
from helpers.cases import ALL_VARIANTS, CAUSAL_ONLY, NO_LOGITS, params_of, rand
from helpers.coverage_table import levels_of
from helpers.covering import covering, label

Lengths = list[list[tuple[int, int, int]]]  # (id, queries, keys) of the segments of each row

# Rows with positions in common: each segment has as many queries as keys.
LAYOUTS: dict[str, Lengths] = {
    "even": [[(0, 4, 4), (1, 4, 4), (2, 4, 4)]] * 2,
    "ragged": [[(0, 7, 7), (1, 1, 1), (5, 4, 4)]] * 2,
    "rows": [[(0, 3, 3), (1, 3, 3), (2, 6, 6)], [(-4, 8, 8), (0, 1, 1), (9, 3, 3)]],
    "one": [[(3, 12, 12)], [(0, 12, 12)]],
    "descending": [[(9, 5, 5), (2, 7, 7)], [(8, 5, 5), (1, 7, 7)]],
    # Segments with other numbers of queries and keys, with queries only, and with keys only.
    "cross": [[(0, 2, 5), (1, 4, 3), (2, 3, 0), (3, 0, 4), (4, 3, 4)]] * 2,
    "cross even": [[(0, 2, 5), (1, 2, 5), (2, 2, 5)]] * 2,
    "one query": [[(0, 0, 6), (1, 0, 4), (2, 1, 3)], [(0, 0, 12), (1, 1, 1), (2, 0, 0)]],
}
FACTORS: dict[str, tuple] = {
    "layout": tuple(LAYOUTS),
    "mask": ("none", "bool", "keys", "float", "float keys"),
    "span": ("full", "causal", "window", "pair"),
    "heads": ("mha", "gqa", "mqa"),
    "params": ("default",),
    "values": ("same", "other"),
    "bias": (None, "alibi", "table"),
    "lse": (False, True),
    "softcap": (None, 2.0),
}

# A row without its layout, for calls that are not drawn
CAUSAL: dict[str, Any] = {
    "mask": "none", "span": "causal", "heads": "gqa", "params": "default", "values": "same",
    "bias": None, "lse": False,
}  # fmt: skip


def ids_of(layout: Lengths) -> tuple[Tensor, Tensor]:
    """Segment ids of the queries and of the keys, (B, N)."""
    ids = []
    for side in (1, 2):
        rows = [[x[0] for x in row for _ in range(x[side])] for row in layout]
        ids.append(torch.tensor(rows, dtype=torch.int64).view(len(layout), -1))
    return ids[0], ids[1]


def factors(variant: str) -> tuple[tuple[str, tuple], ...]:
    levels = levels_of(variant, FACTORS)
    if variant in NO_LOGITS:
        levels["softcap"] = (None,)
    return tuple(levels.items())


def inputs_of(variant: str, row: dict[str, Any], seed: int) -> Inputs:
    queries, keys = ids_of(LAYOUTS[row["layout"]])
    shape = queries.shape[1], keys.shape[1]
    inputs = make(
        variant,
        {**row, "shape": shape, "dtype": torch.float64, "mask_gradient": True, "batch": 2,
         "segments": False, "dropout": False, "window": 3 if row["span"] == "window" else (4, 2)},
        seed,
    )  # fmt: skip
    inputs.options["segment_ids"] = (queries, keys)
    return inputs


def found_by(
    variant: str, inputs: Inputs, backend: str | None = None
) -> tuple[dict[str, Tensor], attnzoo.Plan]:
    """Output, lse and gradients of `attention`, and the plan."""
    leaves, arguments = inputs.arguments(torch.float64)
    result = attnzoo.attention(variant=variant, backend=backend, **arguments)
    plan = attnzoo.explain(variant=variant, backend=backend, **arguments)
    return differentiate(result, leaves, inputs), plan


def assert_close(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, exact in want.items():
        assert torch.allclose(have[name], exact, rtol=1e-7, atol=1e-9), name


def cases() -> Iterator[Any]:
    for variant in ALL_VARIANTS:
        for seed, row in enumerate(covering(factors(variant), lambda case: True)):
            named = {**row, "shape": "xx", "dtype": torch.float64, "segments": False,
                     "dropout": False}  # fmt: skip
            name = f"{variant}-{row['layout']}-{label(named)[4:]}"
            name += "-softcap" if row["softcap"] else ""
            marks = [pytest.mark.slow] if seed > 1 else []
            yield pytest.param(variant, row, seed, id=name.replace(" ", "_"), marks=marks)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("variant", "row", "seed"), list(cases()))
def test_split_segments_agree_with_the_definition(
    variant: str, row: dict[str, Any], seed: int
) -> None:
    inputs = inputs_of(variant, row, 10 * seed)
    have, plan = found_by(variant, inputs)
    assert_close(have, reference(variant, inputs))
    outside = row["layout"].startswith(("cross", "one query")) and variant in CAUSAL_ONLY
    assert plan.parts is not None or outside


@pytest.mark.parametrize("backend", ["eager", "tiled", "linear"])
@pytest.mark.parametrize("layout", ["even", "rows", "cross"])
def test_named_backends_split(layout: str, backend: str) -> None:
    row = {**CAUSAL, "layout": layout, "mask": "keys", "values": "other"}
    inputs = inputs_of("cosformer", row, 1)
    if backend == "linear" and layout == "cross":
        with pytest.raises(ValueError, match="last query at another position"):
            found_by("cosformer", inputs, backend)
        return
    have, plan = found_by("cosformer", inputs, backend)
    assert_close(have, reference("cosformer", inputs))
    assert plan.chosen == backend
    assert plan.parts == {"even": 1, "rows": 4, "cross": 3}[layout]


def test_parameters_per_query_and_per_key_are_split() -> None:
    row = {**CAUSAL, "layout": "rows", "bias": "alibi"}
    inputs = inputs_of("asentmax", {**row, "params": "per_token"}, 2)
    assert_close(found_by("asentmax", inputs)[0], reference("asentmax", inputs))
    inputs = inputs_of("forgetting", {**row, "lse": True}, 2)
    inputs.leaves["log_gates"] = -rand(2, 4, 12, seed=9).abs()
    inputs.options.pop("log_gates", None)
    have, plan = found_by("forgetting", inputs)
    assert plan.parts == 4
    assert_close(have, reference("forgetting", inputs))


def test_gates_of_queries_outside_of_their_segment_are_not_split() -> None:
    """Then lse depends on the gates of other segments."""
    inputs = inputs_of("forgetting", {**CAUSAL, "layout": "cross", "lse": True}, 3)
    have, plan = found_by("forgetting", inputs)
    assert plan.parts is None
    assert_close(have, reference("forgetting", inputs))


def qkv(tokens: int = 12, **options: Any) -> list[Tensor]:
    return [rand(2, 4, tokens, 8, seed=i, **options) for i in range(3)]


@pytest.mark.parametrize("variant", ["softmax", "sigmoid"])
def test_ids_that_are_not_contiguous_run_as_one_call(variant: str) -> None:
    """In the first row, the first tokens of segment 0 come before segment 1 and others after."""
    ids = torch.tensor([[0] * 4 + [1] * 4 + [0] * 4, [0] * 12])
    q, k, v = qkv()
    plan = attnzoo.explain(q, k, v, variant, segment_ids=ids, is_causal=True)
    assert plan.parts is None
    have = attnzoo.attention(q, k, v, variant, segment_ids=ids, is_causal=True)
    order = ids.argsort(dim=1, stable=True)[:, None, :, None]
    moved = [x.take_along_dim(order, 2) for x in (q, k, v)]
    ids = ids.sort(1).values
    assert attnzoo.explain(*moved, variant, segment_ids=ids, is_causal=True).parts == 3
    want = attnzoo.attention(*moved, variant, segment_ids=ids, is_causal=True)
    assert torch.allclose(have.take_along_dim(order, 2), want, atol=1e-12)


def test_queries_and_keys_without_a_common_segment() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    ids = torch.zeros(2, 12).long(), torch.ones(2, 12).long()
    out, lse = attnzoo.attention(q, k, v, segment_ids=ids, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == float("-inf")).all())
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_ids_of_a_repeated_call_may_change() -> None:
    q, k, v = qkv()
    for layout in ("even", "ragged", "rows", "one", "descending"):
        ids, _ = ids_of(LAYOUTS[layout])
        mask = (ids[:, None, :, None] == ids[:, None, None, :]).expand(2, 4, 12, 12)
        want = attnzoo.attention(q, k, v, "ssmax", attn_mask=mask)
        have = attnzoo.attention(q, k, v, "ssmax", segment_ids=ids)
        assert torch.allclose(have, want, atol=1e-12), layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_layout_of_the_results(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    for layout in ("even", "rows"):
        ids, _ = ids_of(LAYOUTS[layout])
        out, lse = attnzoo.attention(q, k, v, segment_ids=ids, return_lse=True)
        assert (out.dtype, out.shape) == (dtype, (2, 4, 12, 8))
        assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, 12))
        want = attnzoo.attention(*(x.float() for x in (q, k, v)), segment_ids=ids)
        assert torch.allclose(out.float(), want, atol=30 * torch.finfo(dtype).eps)


def test_autocast_applies_to_split_calls() -> None:
    ids, _ = ids_of(LAYOUTS["rows"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attnzoo.attention(*qkv(dtype=torch.float32), "ssmax", segment_ids=ids)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["even", "rows"])
@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_dropout_drops_or_scales_the_weights_of_each_segment(backend: str, layout: str) -> None:
    ids, _ = ids_of(LAYOUTS[layout])
    ids = ids.repeat_interleave(10, dim=1)
    q, k, _ = qkv(120)
    eye = torch.eye(120, dtype=torch.float64).expand(2, 4, 120, 120)
    exact = attnzoo.attention(q, k, eye, segment_ids=ids)
    torch.manual_seed(0)
    out = attnzoo.attention(q, k, eye, segment_ids=ids, dropout_p=0.25, backend=backend)
    remaining, possible = out != 0, int((exact > 0).sum())
    assert possible == 4 * sum(
        int((ids[b] == x).sum()) ** 2 for b in (0, 1) for x in set(ids[b].tolist())
    )
    assert torch.allclose(out[remaining], exact[remaining] / 0.75)
    share = float(remaining.sum()) / possible
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / possible) ** 0.5  # four standard errors


def test_explain_shows_how_segments_are_split() -> None:
    q, k, v = qkv()

    def plan(layout: str, **options: Any) -> attnzoo.Plan:
        ids = ids_of(LAYOUTS[layout])[0]
        return attnzoo.explain(q, k, v, "softmax", segment_ids=ids, **options)

    assert plan("even").parts == 1
    assert "split by segments into one batch" in str(plan("even"))
    # (queries, keys, origin): 3, 6, 8, 1
    assert plan("rows", is_causal=True).parts == 4
    assert "split by segments into 4 calls" in str(plan("rows"))
    assert plan("rows").chosen == "sdpa"
    assert plan("rows", dropout_p=0.1, backend="sdpa").chosen is None
    assert attnzoo.explain(q, k, v).parts is None
    assert "split" not in str(attnzoo.explain(q, k, v))


def test_positions_matter_only_where_a_variant_or_argument_uses_them() -> None:
    """Segments of equal lengths at different distances from their keys share a call or do not."""
    ids = ids_of(LAYOUTS["cross even"])
    q, k, v = rand(2, 4, 6, 8), *qkv(15)[1:]
    for variant, options, parts in (
        ("softmax", {}, 1),
        ("softmax", {"is_causal": True}, 3),
        ("softmax", {"window": (3, 3)}, 3),
        ("softmax", {"alibi": torch.ones(4)}, 3),
        ("scale_invariant", {}, 3),
    ):
        plan = attnzoo.explain(q, k, v, variant, segment_ids=ids, **options)
        assert plan.parts == parts, (variant, options)


def test_fake_tensors_and_backends_that_walk_segments_are_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("the ids were read")

    q, k, v = qkv(dtype=torch.float32)
    ids, _ = ids_of(LAYOUTS["rows"])
    expected = attnzoo.attention(q, k, v, "entmax", segment_ids=ids)
    monkeypatch.setattr(packed, "_runs", fail)
    with pytest.raises(AssertionError, match="were read"):
        attnzoo.attention(q, k, v, "entmax", segment_ids=ids)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        out = attnzoo.attention(*fake, "entmax", segment_ids=mode.from_tensor(ids))
        assert out.shape == q.shape
    compiled = torch.compile(attnzoo.attention, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(q, k, v, "entmax", segment_ids=ids), expected, atol=1e-6)
    meta = [x.to("meta") for x in (q, k, v, ids)]
    assert attnzoo.attention(*meta[:3], "entmax", segment_ids=meta[3]).is_meta
    tiled = packed.BACKENDS["tiled"]
    walks = type(tiled)(**{**vars(tiled), "walks_segments": True})
    monkeypatch.setitem(packed.BACKENDS, "tiled", walks)
    out = attnzoo.attention(q, k, v, "entmax", segment_ids=ids, backend="tiled")
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("variant", ["softmax", "entmax"])
def test_long_rows_take_memory_linear_in_the_row(variant: str) -> None:
    """A dense mask of 2^16 tokens would take 4 GiB, and minutes."""
    tokens = 2**16
    ids = (torch.arange(tokens) // 64)[None]
    q, k, v = (torch.randn(1, 1, tokens, 4) for _ in range(3))
    out = attnzoo.attention(q, k, v, variant, segment_ids=ids, is_causal=True, **params_of(variant))
    last = [x[:, :, -64:] for x in (q, k, v)]
    want = attnzoo.attention(*last, variant, is_causal=True, **params_of(variant))
    assert torch.allclose(out[:, :, -64:], want, atol=1e-5)
