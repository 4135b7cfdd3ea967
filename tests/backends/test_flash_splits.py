"""The kernels of flash split their loops: full blocks need no mask, edge blocks do.

A block is full if its keys and queries exist and, but for a mask, all queries see all keys. Each
case below puts a boundary (the last key, the last query, the diagonal, an end of a window) before,
at or after the border of a block. Results are compared with a definition in fp64, written here from
the formulas.

Blocks of queries x keys in the interpreter, in fp32: forward 64 x 32, statistics 64 x 64, dq
32 x 64, dK/dV 64 x 32; with a threshold 64 x 32, in dq 32 x 32. In fp16 dK/dV has 32 x 64 and tiles
are loaded by TMA; with a threshold the tiles are 128 x 64.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import attnzoo
from attnzoo.backends.shared_operands import Layout
from attnzoo.backends.triton.common.groups import Size
from attnzoo.backends.triton.common.tile import key_blocks, query_blocks
from attnzoo.backends.triton.flash import operators as flash_ops
from attnzoo.backends.triton.flash.query_lists import full_blocks
from helpers.cases import rand

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]
slow = pytest.mark.slow


class Case(NamedTuple):
    """Numbers of queries, keys, query heads and key/value heads; and what a query at p sees.

    Query i is at p = keys − queries + i and sees the keys p − left … p + right. None: no bound.
    """

    why: str
    queries: int
    keys: int
    left: int | None = None
    right: int | None = None
    heads: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float32
    quick: bool = False
    mask: str = ""  # see `mask_of`

    @property
    def visible(self) -> Tensor:
        return visible_keys(self.queries, self.keys, self.left, self.right)


GQA, FP16 = (4, 2), torch.float16
CASES = (
    # All queries see all keys: the end of the keys and of the queries.
    Case("fewer keys than a block", 33, 31),
    Case("a block of keys, one query more than two blocks", 65, 32),
    Case("one key more than a block, one query less", 63, 33, quick=True),
    Case("two blocks of keys and a block of queries", 64, 64),
    Case("one more of both", 65, 65, heads=GQA),
    Case("one less than four blocks of keys", 1, 127),
    Case("one more than four blocks of keys", 1, 129),
    Case("tiles of fp16: one key and one query more", 129, 65, dtype=FP16),
    # Causal: the diagonal.
    Case("causal, a block of queries", 64, 64, None, 0),
    Case("causal, one less", 63, 63, None, 0, GQA),
    Case("causal, one more", 65, 65, None, 0),
    Case("causal, several blocks, GQA", 130, 130, None, 0, GQA, quick=True),
    Case("causal, the last query", 1, 65, None, 0),
    Case("causal, the first query sees a block less a key", 66, 96, None, 0, GQA),
    Case("causal, the first query sees two blocks less a key", 66, 128, None, 0, GQA),
    Case("causal, the first query sees a block", 66, 97, None, 0),
    Case("causal, the first query sees two blocks and a key", 40, 104, None, 0),
    Case("causal, the second block of queries sees a block less a key", 130, 96, None, 0, GQA),
    Case("causal, a block of queries without keys", 100, 36, None, 0),
    Case("causal, one row without keys less, and one more", 99, 36, None, 0, GQA, quick=True),
    Case("causal, fp16", 200, 193, None, 0, GQA, FP16),
    # Windows
    Case("a left window as wide as a block of keys", 100, 100, 32, 0, quick=True),
    Case("a left window of one key more, GQA", 100, 100, 33, 0, GQA),
    Case("both sides, each beyond a block of keys", 97, 130, 34, 33),
    Case("no bound on the left, a block on the right", 97, 130, 10**6, 32, quick=True),
    Case("no bound on the left, rows without keys", 130, 60, 10**6, 3, GQA),
    Case("wider than the sequence on both sides", 70, 90, 10**6, 10**6),
    Case("no bound on the left, fp16", 131, 140, 10**6, 52, GQA, FP16),
    # Masks. Full blocks load them without bounds, so the last key and query are edges.
    Case("a mask, one more of both", 65, 97, mask="bool", quick=True),
    Case("a mask, one less of both", 63, 63, mask="float"),
    Case("a mask, whole blocks", 64, 64, heads=GQA, mask="bool"),
    Case("a mask and the diagonal, GQA", 130, 131, None, 0, GQA, mask="float", quick=True),
    Case("a mask in rows of an odd length", 65, 97, None, 0, mask="bool, odd", quick=True),
    Case("a transposed mask", 65, 97, None, 0, GQA, mask="float, transposed"),
    Case("a mask of keys", 65, 97, None, 0, GQA, mask="keys"),
    Case("a mask and a window", 97, 130, 34, 0, mask="bool"),
    Case("a mask, fp16", 129, 193, None, 0, (2, 1), FP16, mask="float", quick=True),
)  # fmt: skip
FORMS = ("softmax", "sigmoid", "entmax")
HEAD_DIM, BIAS, PAD = 16, -1.5, 128


def visible_keys(queries: int, keys: int, left: int | None, right: int | None) -> Tensor:
    p = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        seen &= j >= p - left
    if right is not None:
        seen &= j <= p + right
    return seen


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and dO. NaN stands before and after them in memory, so wrong reads are found."""
    (heads, kv_heads), tensors = case.heads, []
    rows = ((heads, case.queries), (kv_heads, case.keys), (kv_heads, case.keys))
    for seed, (n, count) in enumerate((*rows, rows[0])):
        stored = torch.full((1, n, count + 2 * PAD, HEAD_DIM), float("nan"), dtype=case.dtype)
        x = stored[:, :, PAD : PAD + count]
        x.copy_(rand(*x.shape, seed=seed))
        tensors.append(x)
    return tensors


def mask_of(case: Case) -> Tensor | None:
    """A mask (1, H, Nq, Nk) or (1, 1, 1, Nk), by its kind:

    - "float" or "bool"; or "keys": bool, equal for all queries;
    - ", odd": unaligned rows, which are copied; ", transposed": contiguous columns.

    True or NaN stands around the mask in memory. Every seventh query sees no key.
    """
    if not case.mask:
        return None
    heads, count = (1, 1) if case.mask == "keys" else (case.heads[0], case.queries)
    width = 2 * PAD + -(-case.keys // 16) * 16 + ("odd" in case.mask)
    added = case.mask.startswith("float")
    stored = torch.full((1, heads, count + 2 * PAD, width), float("nan") if added else 1.0)
    stored = stored if added else stored.bool()
    if "transposed" in case.mask:
        stored = stored.mT.contiguous().mT
    mask = stored[:, :, PAD : PAD + count, PAD : PAD + case.keys]
    noise = rand(*mask.shape, seed=9)
    mask.copy_(noise.masked_fill(noise < -0.5, float("-inf")) if added else noise > -0.5)
    if case.mask != "keys":
        mask[:, :, 3::7] = float("-inf") if added else False
    return mask


# ---- the definition ---------------------------------------------------------------------------


def softmax(s: Tensor, bias: Tensor) -> Tensor:
    """p_j = e^s_j / Σ e^s, without keys 0."""
    top = s.amax(-1, keepdim=True).detach()
    e = (s - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def sigmoid(s: Tensor, bias: Tensor) -> Tensor:
    """p_j = 1 / (1 + e^−(s_j + b))"""
    return (s + bias[:, None, None]).sigmoid()


def entmax(s: Tensor, bias: Tensor) -> Tensor:
    """p_j = [s_j / 2 − τ]₊² with Σ p = 1, without keys 0."""
    half = s / 2
    top = half.amax(-1, keepdim=True).detach()
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    low, high = top - 1, top  # Σ p ≥ 1 at low, and 0 at high
    for _ in range(60):
        tau = (low + high) / 2
        more = (half.detach() - tau).clamp_min(0).square().sum(-1, keepdim=True) > 1
        low, high = torch.where(more, tau, low), torch.where(more, high, tau)
    # A Newton step changes τ by a rounding error. Its derivative is that of the solution τ(s).
    root = (half - low).clamp_min(0)
    slope = 2 * root.sum(-1, keepdim=True).detach()
    tau = low + (root.square().sum(-1, keepdim=True) - 1) / slope.masked_fill(empty, 1.0)
    return (half - tau).clamp_min(0).square()


def differentiated(out: Tensor, leaves: list[Tensor], do: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, leaves, do.to(out.dtype), allow_unused=True)
    named = zip(("dq", "dk", "dv", "dbias"), gradients)
    return {"out": out.detach(), **{name: x for name, x in named if x is not None}}


def scores(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """q kᵀ / √D plus the float mask, −∞ for hidden keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s, mask = (q @ k.mT / HEAD_DIM**0.5).masked_fill(~case.visible, float("-inf")), mask_of(case)
    if mask is None:
        return s
    return s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask


def definition(form: str, case: Case) -> dict[str, Tensor]:
    q, k, v, do = (x.double().requires_grad_() for x in inputs(case))
    bias = torch.full((case.heads[0],), BIAS, dtype=torch.float64, requires_grad=True)
    p = {"softmax": softmax, "sigmoid": sigmoid, "entmax": entmax}[form](scores(q, k, case), bias)
    out = p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return differentiated(out, [q, k, v, bias], do)


# ---- results ----------------------------------------------------------------------------------


def by_flash(form: str, case: Case) -> dict[str, Tensor]:
    *qkv, do = inputs(case)
    leaves = [x.detach().requires_grad_() for x in qkv]
    options: dict[str, Any] = {}
    if form == "sigmoid":
        options["bias"] = torch.full((case.heads[0],), BIAS, requires_grad=True)
        leaves.append(options["bias"])
    if case.right == 0:
        window = None if case.left is None else case.left + 1
        options |= {"is_causal": True, "window": window}
    elif case.right is not None:
        options["window"] = case.left, case.right
    if case.mask:
        options["attn_mask"] = mask_of(case)
    out = attnzoo.attention(*leaves[:3], form, backend="flash", enable_gqa=True, **options)
    return differentiated(out, leaves, do)


def ids(case: Case) -> str:
    return f"{case.why}: {case.queries} x {case.keys}"


def rows() -> list[Any]:
    """Each quick case with one form, the others with all forms."""
    cases, quick = [], cycle(FORMS)
    for case in CASES:
        chosen = next(quick) if case.quick else ""
        for form in FORMS:
            marks = [] if form == chosen else [slow]
            cases.append(pytest.param(form, case, marks=marks, id=f"{form}, {ids(case)}"))
    return cases


@pytest.mark.parametrize(("form", "case"), rows())
def test_results_agree_with_the_definition(form: str, case: Case) -> None:
    results, wanted = by_flash(form, case), definition(form, case)
    assert set(results) == set(wanted)
    tolerance = 2e-5 if case.dtype == torch.float32 else 4e-3
    for name, want in wanted.items():
        error = (results[name].double() - want).abs().max()
        # NaN must fail too. Gradients of keys are sums over all queries.
        assert error <= tolerance * (1 + want.abs().max()), f"{name}: {error}"


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.quick else [slow], id=ids(c)) for c in CASES]
)
def test_statistics_agree_with_the_definition(case: Case) -> None:
    """lse = log Σ e^s, the entropy of the softmax, and the largest score of each head."""
    q, k = inputs(case)[:2]
    mask = mask_of(case)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    layout = Layout(HEAD_DIM**-0.5, case.left, case.right, mask, None, None, None)
    statistics = flash_ops.flash_statistics(q=q, k=k, layout=layout)
    s = scores(q.double(), k.double(), case)
    p = softmax(s, torch.empty(0))
    assert torch.allclose(statistics.lse.double(), s.logsumexp(-1), atol=1e-5)
    seen = (s > float("-inf")).any(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    assert torch.allclose(statistics.entropy.double()[..., seen], entropy[..., seen], atol=1e-5)
    largest = flash_ops.flash_max_logits(q=q, k=k, layout=layout)
    assert torch.allclose(largest.double(), s.amax((0, 2, 3)), rtol=1e-6, atol=1e-5)


# ---- entries of a mask ------------------------------------------------------------------------


class Reads:
    """Stands for the interpreter's access to memory, and records the addresses that it reads."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.addresses = memory, set[int]()

    def load(self, pointers: Any, mask: Any, *options: Any) -> Any:
        self.addresses |= set(pointers[mask].tolist())
        return self.memory.load(pointers, mask, *options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


@pytest.mark.parametrize("form", ["softmax", pytest.param("entmax", marks=slow)])
@pytest.mark.parametrize("kind", ["bool", "keys"])
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
def test_no_entry_outside_of_a_mask_is_read(
    form: str, kind: str, right: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks load masks without bounds. A wrong read would not change the results."""
    case = Case("", 65, 97, None, right, (2, 1), mask=kind)
    mask = mask_of(case)
    assert mask is not None
    monkeypatch.setitem(globals(), "mask_of", lambda _: mask)
    reads = Reads(interpreter._interpreter)
    monkeypatch.setattr(interpreter, "_interpreter", reads)
    by_flash(form, case)
    stored = mask.untyped_storage()
    near = {x - stored.data_ptr() for x in reads.addresses} & set(range(stored.nbytes()))
    offsets = torch.arange(stored.nbytes()).as_strided(
        mask.shape, mask.stride(), mask.storage_offset()
    )
    assert near
    assert near <= set(offsets.flatten().tolist())


# ---- ranges of blocks -------------------------------------------------------------------------


@triton.jit
def ranges(out, sizes, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Per size (queries, keys, first query or key): the ranges of blocks of both loops."""
    at = tl.program_id(0)
    queries, keys = tl.load(sizes + 3 * at), tl.load(sizes + 3 * at + 1)
    start = tl.load(sizes + 3 * at + 2)
    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    tl.store(out + 7 * at, low)
    tl.store(out + 7 * at + 1, full)
    tl.store(out + 7 * at + 2, high)
    low, high = query_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    size = Size(queries, keys, left, right)
    first, last = full_blocks(start, low, high, size, BLOCK_M, BLOCK_N, False)
    tl.store(out + 7 * at + 3, low)
    tl.store(out + 7 * at + 4, first)
    tl.store(out + 7 * at + 5, last)
    tl.store(out + 7 * at + 6, high)


def touched(seen: Tensor, block: int) -> list[int]:
    """The blocks of columns with a visible entry. ``seen``: the rows of one tile."""
    columns = torch.arange(seen.shape[1])[seen.any(0)]
    return sorted(set((columns // block).tolist()))


def fully_visible(seen: Tensor, block: int) -> list[int]:
    """The blocks whose columns all exist and are all visible to all rows."""
    number = seen.shape[1] // block
    return [n for n in range(number) if bool(seen[:, n * block : (n + 1) * block].all())]


# Blocks of 4 queries and 2 keys, or 2 and 4: few enough to try all lengths around them.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9)
WINDOWS = [(None, None), (None, 0), (4, 3)]
MORE = [(None, 3), (None, 4), (None, 5), (1, 0), (3, 0), (4, 0), (5, 0), (2, 1), (3, 4)]
WINDOWS += [pytest.param(window, marks=slow) for window in MORE]


@pytest.mark.parametrize("blocks", [(4, 2), (2, 4)], ids="{0[0]} x {0[1]}".format)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_ranges_of_blocks_are_exact(
    window: tuple[int | None, int | None], blocks: tuple[int, int]
) -> None:
    """The loops visit no block without visible entries, and treat each full block as full."""
    (left, right), (block_m, block_n) = window, blocks
    sizes = [(m, n, start) for m in LENGTHS for n in LENGTHS for start in range(0, max(m, n), 2)
             if start % block_m == 0 or start % block_n == 0]  # fmt: skip
    bounds = torch.zeros(len(sizes), 7, dtype=torch.int32)
    ranges[(len(sizes),)](
        bounds,
        torch.tensor(sizes, dtype=torch.int32),
        left,
        right,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    for (queries, keys, start), row in zip(sizes, bounds.tolist(), strict=True):
        seen, where = visible_keys(queries, keys, left, right), f"{queries} x {keys} at {start}"
        if start % block_m == 0 and start < queries:
            check_keys(seen[start : start + block_m], block_n, row[:3], left is None, where)
        if start % block_n == 0 and start < keys:
            check_queries(seen[:, start : start + block_n].T, block_m, row[3:], where)


def check_keys(seen: Tensor, block: int, bounds: list[int], splits: bool, where: str) -> None:
    low, full, high = bounds
    assert list(range(low, high)) == touched(seen, block), where
    if splits:  # a loop with a window on the left has edges only
        assert list(range(low, full)) == fully_visible(seen, block), where


def check_queries(seen: Tensor, block: int, bounds: list[int], where: str) -> None:
    low, first, last, high = bounds
    assert list(range(low, high)) == touched(seen, block), where
    assert low <= first <= last <= high, where
    assert list(range(first, last)) == fully_visible(seen, block), where
