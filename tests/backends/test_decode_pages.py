"""The kernels of `decode` read keys and values through a block table.

What no sequence uses is NaN in the cache, and no page in the table; see `helpers.paged`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import prepared
from attnzoo.backends.triton.common.kernel_operands import Paged
from attnzoo.backends.triton.decode import launch as launch_decode
from attnzoo.backends.triton.decode import operators as decode_ops
from attnzoo.core import activations
from attnzoo.functional import padded
from helpers.cases import NO_LSE, VARIANTS, params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS
from helpers.operators import opcheck
from helpers.paged import Cache, cache_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

DECODE = [v for v in VARIANTS if VARIANT_BACKENDS[v]["decode"] is RUNS]
QUERIES, KEYS = (1, 3, 2, 2), (33, 3, 70, 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that run."""
    names, run = [], prepared.run

    def record(launch: Any) -> Any:
        names.append(launch.kernel.__name__)
        return run(launch)

    monkeypatch.setattr(prepared, "run", record)
    return names


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`attend` with keys that are first gathered from the pages."""

    def run(*inputs: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(padded, "_read_pages", lambda *args: None)
            return attend(*inputs, **options)

    return run


def inputs_of(keys: tuple[int, ...], queries: tuple[int, ...], dim: int = 16) -> list[Tensor]:
    shapes = (sum(queries), 4, dim), (sum(keys), 2, dim), (sum(keys), 2, dim)
    return [rand(*shape, seed=i).float() for i, shape in enumerate(shapes)]


def attend(
    variant: str, tensors: list[Tensor], cache: Cache, queries: tuple[int, ...],
    adjacent: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """``adjacent``: the axis of the cache whose entries are adjacent in memory."""
    q, k, v = tensors
    ends = torch.tensor([0, *torch.tensor(queries).cumsum(0)])
    options = {"backend": "decode", "is_causal": True, **params_of(variant), **options}
    if variant == "forgetting":
        options["log_gates"] = cache.put(-rand(len(k), 4, seed=3).abs().float())
    pages = (cache.put(x).movedim(adjacent, 3).contiguous().movedim(3, adjacent) for x in (k, v))
    return attnzoo.varlen_attention(
        q, *pages, cu_seq_q=ends, max_q=max(queries), max_k=72, variant=variant, enable_gqa=True,
        **cache.arguments, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "dtype", "span"),
    [
        (16, torch.float32, {}),
        pytest.param(1, torch.bfloat16, {"window": 20}, marks=pytest.mark.slow),
        pytest.param(5, torch.float16, {}, marks=pytest.mark.slow),
        pytest.param(256, torch.float32, {"window": 20}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", DECODE)
def test_is_the_same_as_with_gathered_keys(
    variant: str, page_size: int, dtype: torch.dtype, span: dict[str, int], launched: list[str],
    gathered: Callable[..., Any],
) -> None:  # fmt: skip
    cache, tensors = cache_of(KEYS, page_size), [x.to(dtype) for x in inputs_of(KEYS, QUERIES)]
    options = {**span, "return_lse": variant not in NO_LSE}
    have = attend(variant, tensors, cache, QUERIES, **options)
    assert launched[-1] == "decode"
    want = gathered(variant, tensors, cache, QUERIES, **options)
    for one, other in zip(have, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", ["alibi", "relative_bias"])
def test_terms_by_position_are_those_of_gathered_keys(
    bias: str, launched: list[str], gathered: Callable[..., Any]
) -> None:
    cache, tensors = cache_of(KEYS, 5), inputs_of(KEYS, QUERIES)
    value = torch.linspace(0.1, 0.4, 4) if bias == "alibi" else rand(4, 7, seed=4).float()
    options = {bias: value, "softcap": 2.0, "return_lse": True}
    have = attend("ssmax", tensors, cache, QUERIES, **options)
    assert launched == ["decode"]
    for one, other in zip(have, gathered("ssmax", tensors, cache, QUERIES, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "entmax", "adaptive_temperature"])
def test_splits_share_the_keys_that_take_part(
    variant: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for 2000 keys, each of the splits has some of 170."""
    monkeypatch.setattr(launch_decode, "LEAST_KEYS", 32)
    cache, tensors = cache_of((170,), 16), inputs_of((170,), (2,))
    q, k, v = tensors
    table = torch.nn.functional.pad(cache.arguments["block_table"], (0, 120), value=-1)
    ends = torch.tensor([0, 2])
    options = {"is_causal": True, "enable_gqa": True, **params_of(variant)}
    out = attnzoo.varlen_attention(
        q, cache.put(k), cache.put(v), ends, None, 2, 2000, variant, block_table=table,
        seqused_k=cache.arguments["seqused_k"], backend="decode", **options,
    )  # fmt: skip
    assert launched[-1] == "merge_splits"
    one = (x.double().transpose(0, 1)[None] for x in tensors)
    want = attnzoo.attention(*one, variant, **options)[0].transpose(0, 1)
    assert torch.allclose(out.double(), want, atol=2e-6 * max(1.0, float(want.abs().max())))


def test_what_the_kernels_do_not_read_is_gathered(launched: list[str]) -> None:
    """Rows of 12 numbers in 16 bits are no multiple of 16 bytes."""
    for dim, dtype, gradient, adjacent, reads in (
        (12, torch.float32, False, 3, True),
        (12, torch.bfloat16, False, 3, False),
        (16, torch.bfloat16, False, 1, False),  # the kernels would need a copy of the cache
        (16, torch.float32, True, 3, False),
    ):
        tensors = [x.to(dtype) for x in inputs_of(KEYS, QUERIES, dim)]
        cache, pools = cache_of(KEYS, 16), []
        q, k, v = tensors
        k.requires_grad_(gradient)
        run, backend = decode_ops.decode_forward, None if gradient else "decode"

        def record(run: Any = run, pools: list[bool] = pools, **operands: Any) -> Any:
            pools.append(operands["paged"].table is not None)
            return run(**operands)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_ops, "decode_forward", record)
            out = attend(
                "softmax", [q, k, v], cache, QUERIES, backend=backend, adjacent=adjacent
            )  # fmt: skip
        assert pools == ([] if gradient else [reads])
        assert bool(out.isfinite().all())


def test_operators_with_pages() -> None:
    q, k = rand(2, 4, 3, 16).float(), rand(5, 2, 8, 16).float()
    table = torch.tensor([[1, 2, 9], [4, 0, 3]], dtype=torch.int32)
    paged = Paged(table, torch.tensor([9, 24], dtype=torch.int32), 30)
    mask = (torch.arange(30) >= 30 - paged.used[:, None])[:, None, None].to(torch.uint8)
    layout = Layout(0.25, None, 0, mask, None, None, None)
    opcheck(decode_ops.decode_statistics, q=q, k=k, paged=paged, layout=layout)
    opcheck(
        decode_ops.decode_forward, q=q, k=k, v=k, products=None, paged=paged, vectors=Vectors(),
        terms=Terms(), layout=layout, rule=Rule(activations.EXP, "sum"), want_lse=True,
    )  # fmt: skip


def test_explain_shows_whether_pages_are_read() -> None:
    arguments = {n: x for n, x in cache_of(KEYS, 16).arguments.items() if n != "cu_seq_k"}
    options: dict[str, Any] = {"enable_gqa": True, "backend": "decode", **arguments}
    for dim, dtype, gathers in ((16, torch.bfloat16, False), (12, torch.bfloat16, True)):
        q, pages = torch.zeros(4, 4, 1, dim, dtype=dtype), torch.zeros(12, 16, 2, dim, dtype=dtype)
        plan = attnzoo.explain(q, pages, pages, "sigmoid", **options)
        assert (plan.chosen, plan.gathers) == ("decode", gathers)
    reasons = {c.backend: c.reason for c in plan.candidates}
    assert reasons["decode"] is None
    q, pages = q.new_zeros(4, 4, 1, 8), pages.new_zeros(12, 16, 2, 8)
    plan = attnzoo.explain(q, pages, pages, "sigmoid", **options)
    reasons = {c.backend: c.reason for c in plan.candidates}
    assert reasons["flash"] == reasons["tiled"] == "does not read pages"


@pytest.mark.slow
def test_a_graph_reads_pages(launched: list[str]) -> None:
    tensors, cache = inputs_of(KEYS, QUERIES), cache_of(KEYS, 16)
    with pytest.MonkeyPatch.context() as patch:
        compiled = torch.compile(attnzoo.varlen_attention, fullgraph=True, backend="aot_eager")
        want = attend("ssmax", tensors, cache, QUERIES)
        patch.setattr(attnzoo, "varlen_attention", compiled)
        launched.clear()
        assert torch.equal(attend("ssmax", tensors, cache, QUERIES), want)
    assert launched[-1] == "decode"


@pytest.mark.slow
def test_an_exported_step_reads_caches_of_any_size(launched: list[str]) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, pages: Tensor, used: Tensor, table: Tensor) -> Tensor:
            return attnzoo.varlen_attention(
                q, pages, pages, torch.arange(3), None, 1, 12, seqused_k=used, block_table=table,
                backend="decode",
            )  # fmt: skip

    cache = cache_of((9, 3), 4).arguments
    q, where = rand(2, 2, 16).float(), (cache["seqused_k"], cache["block_table"])
    few, many = (rand(pages, 4, 2, 16, seed=1).float() for pages in (6, 9))
    dynamic = None, {0: torch.export.Dim("pages", min=2)}, None, None
    program = torch.export.export(Step(), (q, few, *where), dynamic_shapes=dynamic).module()
    launched.clear()
    assert torch.equal(program(q, many, *where), Step()(q, many, *where))
    assert launched == ["decode", "decode"]
