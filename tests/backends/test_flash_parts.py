"""flash splits the work of few programs: the heads of a group in dK/dV, the keys in the forward.

The kernels run in Triton's interpreter. The fixture `parts` allows parts of any size and sets the
number of processors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_flash import factors

import attnzoo
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import launch as common
from attnzoo.backends.triton.common import prepared
from attnzoo.backends.triton.common.kernel_operands import Solved
from attnzoo.backends.triton.flash import launch as flash
from attnzoo.backends.triton.flash import parts as flash_parts
from attnzoo.backends.triton.flash.launch_backward import describe_backward
from attnzoo.core import activations
from helpers.agreement import by_backend, disagreements, make
from helpers.cases import CAUSAL_ONLY, NO_LSE, VARIANTS, rand
from helpers.coverage_table import FIRST, FLASH
from helpers.kernel_paths import code_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]
slow = pytest.mark.slow

SOFTMAX = Rule(activations.EXP, "sum")
Parts = Callable[[int], dict[str, int]]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A function that sets the number of processors.

    It returns a dictionary that will have the number of parts of each kernel that was split.
    """

    def set_processors(number: int) -> dict[str, int]:
        split: dict[str, int] = {}

        def record(launch: common.Launch) -> Any:
            number = launch.args.get("parts", launch.args.get("splits"))
            if number is not None:
                split[launch.kernel.__name__] = number
            return common.run(launch)

        monkeypatch.setattr(flash_parts, "LEAST_QUERIES", 1)
        monkeypatch.setattr(flash_parts, "LEAST_KEYS", 1)
        monkeypatch.setattr(common, "processors", lambda device: number)
        monkeypatch.setattr(prepared, "run", record)
        return split

    return set_processors


def setting(variant: str, **others: Any) -> dict[str, Any]:
    """A case with batch 1 and the first value of each other factor. ``others`` override these."""
    return {**{name: levels[0] for name, levels in factors(variant)}, "batch": 1, **others}


# ---- dK/dV --------------------------------------------------------------------------------------

# 70 keys are three tiles in fp32, two in 16 bits. Processors, heads and parts in fp32: a group of
# four heads in two parts; in four, where three would do; a group of three heads in three parts.
GROUPS = ((4, "mqa", 2), (5, "mqa", 4), (4, "3 of 1", 3))
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"mask": "bool", "span": "window"},
    {"segments": True, "mask": "keys"},
    {"mask": "keys", "layout": "bnhd", "dims": (16, 24)},
)


def case_of(variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """A case with the last of the variant's parameters, and with lse if the variant has it."""
    params = dict(factors(variant))["params"][-1]
    span = {"span": "causal"} if variant in CAUSAL_ONLY else {}
    made = setting(variant, lse=variant not in NO_LSE)
    return {**made, "params": params, **options, **span}


def grouped_cases() -> list[Any]:
    """A case per variant, quick once per normalization. Groups and extras take turns."""
    cases = []
    for n, variant in enumerate(v for v in FLASH if v in VARIANTS):
        processors, heads, expected = GROUPS[n % len(GROUPS)]
        case = case_of(variant, {"shape": (70, 70), "heads": heads, **EXTRAS[n % len(EXTRAS)]})
        marks = [] if variant in FIRST.values() else [pytest.mark.slow]
        cases.append(pytest.param(variant, case, processors, expected, marks=marks, id=variant))
    return cases


@pytest.mark.parametrize(
    ("variant", "case", "processors", "expected"),
    [
        *grouped_cases(),
        ("sigmoid", setting("sigmoid", shape=(33, 130), heads="mqa", dtype=torch.bfloat16), 4, 2),
        ("entmax", setting("entmax", shape=(70, 70), heads="mqa", dtype=torch.float16), 4, 4),
        ("ssmax", setting("ssmax", shape=(70, 70), heads="gqa", bias="alibi", mask="float"), 6, 2),
    ],
)  # fmt: skip
def test_gradients_of_split_groups_agree_with_the_definition(
    variant: str, case: dict[str, Any], processors: int, expected: int, parts: Parts
) -> None:
    split = parts(processors)
    assert disagreements(variant, "flash", make(variant, case, seed=7)) == []
    assert split["flash_dkdv"] == expected


@pytest.mark.parametrize("variant", ["sink", pytest.param("entmax", marks=pytest.mark.slow)])
def test_split_groups_are_deterministic(variant: str, parts: Parts) -> None:
    split = parts(5)
    inputs = make(variant, setting(variant, shape=(70, 70), heads="mqa", span="causal"))
    first, second = (by_backend(variant, "flash", inputs) for _ in range(2))
    assert split["flash_dkdv"] == 4
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_queries_without_keys_give_zero_gradients_in_split_groups(parts: Parts) -> None:
    """No query sees a key of the second tile, and queries 40 and later see no key."""
    split = parts(8)
    q, k, v = (rand(1, h, 70, 16, seed=h).float().requires_grad_() for h in (4, 1, 1))
    mask = torch.ones(70, 70, dtype=torch.bool)
    mask[40:], mask[:, 32:64] = False, False
    out = attnzoo.attention(q, k, v, attn_mask=mask, enable_gqa=True, backend="flash")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert split["flash_dkdv"] == 4
    assert bool((dq[:, :, 40:] == 0).all())
    for x in (dk, dv):
        assert bool((x[:, :, 32:64] == 0).all())
        assert bool((x[:, :, :32] != 0).all())


def test_gradients_of_split_groups_have_the_strides_and_dtype_of_the_inputs(parts: Parts) -> None:
    split = parts(8)
    q, k, v = (rand(1, 70, h, 16, seed=h).bfloat16().transpose(1, 2) for h in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attnzoo.attention(q, k, v, enable_gqa=True, backend="flash")
    for x, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert gradient.dtype == x.dtype
        assert gradient.stride() == x.stride()
    assert split["flash_dkdv"] == 2


def dkdv(batch: int, heads: tuple[int, int], queries: int, keys: int) -> common.Launch:
    """The launch of dK/dV of a causal softmax on an H100."""
    q = torch.empty(batch, heads[0], queries, 128, dtype=torch.bfloat16, device="meta")
    k = q.new_empty(batch, heads[1], keys, 128)
    stat = q.new_empty(q.shape[:3], dtype=torch.float32)
    layout = Layout(0.1, None, 0, None, None, None, None)
    launches, _ = describe_backward(
        q, None, q, k, k, q, stat, None, layout, SOFTMAX, Vectors(), Terms(), Solved(), None, "k",
        90, 132,
    )  # fmt: skip
    return launches[-1]


def test_few_key_heads_use_all_processors() -> None:
    for keys in (1024, 2048, 4096):
        launch = dkdv(1, (32, 1), keys, keys)
        assert launch.programs >= 132
        assert launch.args["dk"].dtype == torch.float32
        assert launch.args["group"] * launch.args["parts"] == 32
    launch = dkdv(1, (28, 4), 2048, 1024)  # a group of seven
    assert (launch.args["parts"], launch.args["group"]) == (7, 1)


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys"),
    [
        (8, (32, 8), 2048, 2048),
        (1, (32, 32), 512, 512),
        (1, (8, 1), 64, 512),
        (1, (7, 1), 293, 512),
    ],
    ids=["many programs", "no groups", "few queries", "few queries for seven parts"],
)
def test_groups_are_not_split(batch: int, heads: tuple[int, int], queries: int, keys: int) -> None:
    launch = dkdv(batch, heads, queries, keys)
    assert launch.args["parts"] is None
    assert launch.args["dk"].dtype == torch.bfloat16
    assert launch.args["group"] == heads[0] // heads[1]


# ---- forward ------------------------------------------------------------------------------------

# 70 queries are two tiles per head, 150 keys five blocks. Processors and splits: one block or two
# each, and more splits than blocks.
SPLITS = ((8, 4), (6, 3), (30, 15))
CHUNKS: tuple[dict[str, Any], ...] = (
    {},
    {"mask": "bool", "span": "causal"},
    {"segments": True, "mask": "keys"},
    {"span": "window", "layout": "bnhd", "dims": (16, 24)},
    {"span": "causal", "layout": "sliced"},
)
UNSOLVED = [v for v in FLASH if v in VARIANTS and "threshold" not in code_of(v)]


def chunk_cases() -> list[Any]:
    """A case per variant without a threshold, as `grouped_cases`. Dtypes alternate too."""
    cases = []
    for n, variant in enumerate(UNSOLVED):
        processors, expected = SPLITS[n % len(SPLITS)]
        dtype = (torch.float32, torch.float16, torch.bfloat16)[n // 2 % 3]
        chunk = {"shape": (70, 150), "heads": "2 heads", **CHUNKS[n % len(CHUNKS)]}
        case = case_of(variant, {**chunk, "dtype": dtype})
        marks = [] if variant in FIRST.values() else [pytest.mark.slow]
        cases.append(pytest.param(variant, case, processors, expected, marks=marks, id=variant))
    return cases


@pytest.mark.parametrize(
    ("variant", "case", "processors", "expected"),
    [
        *chunk_cases(),
        ("ssmax", setting("ssmax", shape=(65, 129), bias="alibi", mask="float", lse=True), 8, 4),
    ],
)
def test_chunks_of_queries_agree_with_the_definition(
    variant: str, case: dict[str, Any], processors: int, expected: int, parts: Parts
) -> None:
    """Gradients too: the backward reads the statistics that the merge writes."""
    split = parts(processors)
    assert disagreements(variant, "flash", make(variant, case, seed=11)) == []
    assert split["flash_forward"] == split["merge_splits"] == expected


@pytest.mark.parametrize("variant", ["sink", pytest.param("sigmoid", marks=pytest.mark.slow)])
def test_split_keys_are_deterministic(variant: str, parts: Parts) -> None:
    split = parts(8)
    inputs = make(variant, setting(variant, shape=(70, 150), span="causal"))
    first, second = (by_backend(variant, "flash", inputs) for _ in range(2))
    assert split["flash_forward"] == 4
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_queries_without_keys_give_zeros_with_split_keys(parts: Parts) -> None:
    """Queries 3 and 64 to 69 see no key. The first split has no key that a query sees."""
    split = parts(8)
    q, k, v = (rand(1, 2, n, 16, seed=n).float().requires_grad_() for n in (70, 150, 151))
    v = v[:, :, 1:]
    mask = torch.ones(70, 150, dtype=torch.bool)
    mask[3] = mask[64:] = False
    mask[:, :64] = False
    empty = [3, *range(64, 70)]
    results = []
    for backend in ("flash", "eager"):
        out, lse = attnzoo.attention(q, k, v, attn_mask=mask, backend=backend, return_lse=True)
        loss = out.square().sum() + lse.masked_fill(lse == float("-inf"), 0.0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    assert split["flash_forward"] == 4
    out, lse, *_ = results[0]
    assert bool((out[:, :, empty] == 0).all())
    assert bool((lse[:, :, empty] == float("-inf")).all())
    for have, want in zip(*results, strict=True):
        assert torch.allclose(have, want, atol=1e-5)


def test_thresholds_are_not_split(parts: Parts) -> None:
    split = parts(8)
    q, k, v = (rand(1, 2, n, 16, seed=n).float() for n in (70, 150, 150))
    out = attnzoo.attention(q, k, v, "entmax", backend="flash")
    assert torch.allclose(out, attnzoo.attention(q, k, v, "entmax", backend="eager"), atol=1e-5)
    assert not split


def forward(
    batch: int, heads: tuple[int, int], queries: int, keys: int, window: int | None = None
) -> list[common.Launch]:
    """The launches of the forward of a causal softmax on an H100."""
    q = torch.empty(batch, heads[0], queries, 128, dtype=torch.bfloat16, device="meta")
    k = q.new_empty(batch, heads[1], keys, 128)
    layout = Layout(0.1, window, 0, None, None, None, None)
    call = layout, SOFTMAX, Vectors(), Terms(), Solved()
    return flash.describe_forward(q, k, k, *call, True, 90, 132)[0]


def test_chunks_of_queries_use_all_processors() -> None:
    for queries in (65, 100, 128, 129, 256):
        walk, merge = forward(1, (32, 8), queries, 2**16)
        assert 132 <= walk.programs <= 264
        assert walk.args["partials"].o.dtype == torch.float32
        assert merge.programs == 32 * queries
        assert merge.args["o"].dtype == torch.bfloat16
    walk, _ = forward(1, (8, 8), 128, 4096)
    assert walk.args["splits"] == 4  # at least 1024 keys each


@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [(1000, 2**16, None), (384, 2**16, None), (128, 2000, None), (128, 2**16, 1000)],
    ids=["many programs", "two halves take as long", "few keys", "narrow window"],
)
def test_keys_are_not_split(queries: int, keys: int, window: int | None) -> None:
    (launch,) = forward(1, (32, 8), queries, keys, window)
    assert launch.args["splits"] is None
    assert launch.args["o"].dtype == torch.bfloat16
