"""flash splits the work of few programs: the heads of a group in dK/dV.

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
from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common import launch as common
from attnzoo.backends.triton.common import prepared
from attnzoo.backends.triton.common.kernel_operands import Extras, Form, Maps
from attnzoo.backends.triton.flash import launch as flash
from attnzoo.backends.triton.flash import parts as flash_parts
from helpers.agreement import by_backend, disagreements, make
from helpers.cases import CAUSAL_ONLY, NO_LSE, VARIANTS, rand
from helpers.coverage_table import FLASH
from helpers.kernel_paths import quick_variants

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]
slow = pytest.mark.slow

Parts = Callable[[int], dict[str, int]]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A function that sets the number of processors.

    It returns a dictionary that will have the number of parts of each kernel that was split.
    """

    def set_processors(number: int) -> dict[str, int]:
        split: dict[str, int] = {}

        def run(launch: common.Launch) -> Any:
            if launch.args.get("parts") is not None:
                split[launch.kernel.__name__] = launch.args["parts"]
            return common.run(launch)

        monkeypatch.setattr(flash_parts, "LEAST_QUERIES", 1)
        monkeypatch.setattr(common, "processors", lambda device: number)
        monkeypatch.setattr(prepared, "run", run)
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


def grouped_cases() -> list[Any]:
    """A case per variant, quick once per activation. Groups and extras take turns."""
    cases = []
    for n, param in enumerate(quick_variants(v for v in FLASH if v in VARIANTS)):
        variant = str(param.values[0])
        processors, heads, expected = GROUPS[n % len(GROUPS)]
        case = setting(variant, shape=(70, 70), heads=heads, lse=variant not in NO_LSE)
        case |= {"params": dict(factors(variant))["params"][-1], **EXTRAS[n % len(EXTRAS)]}
        if variant in CAUSAL_ONLY:
            case["span"] = "causal"
        cases.append(
            pytest.param(variant, case, processors, expected, marks=param.marks, id=variant)
        )
    return cases


@pytest.mark.parametrize(
    ("variant", "case", "processors", "expected"),
    [
        *grouped_cases(),
        ("sigmoid", setting("sigmoid", shape=(33, 130), heads="mqa", dtype=torch.bfloat16), 4, 2),
        ("entmax", setting("entmax", shape=(70, 70), heads="mqa", dtype=torch.float16), 4, 4),
        ("ssmax", setting("ssmax", shape=(70, 70), heads="gqa", alibi=True, mask="float"), 6, 2),
    ],
)  # fmt: skip
def test_gradients_of_split_groups_agree_with_the_definition(
    variant: str, case: dict[str, Any], processors: int, expected: int, parts: Parts
) -> None:
    split = parts(processors)
    assert disagreements(variant, "flash", make(variant, case, seed=7)) == []
    assert split["flash_dkdv"] == expected


@pytest.mark.parametrize("variant", ["sink", "entmax"])
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
    form = Form(
        "attnzoo.backends.triton.common.activations:exp", 1.4426950408889634, True, "online"
    )
    layout = Layout(0.1, None, 0, None, None, None, None)
    launches, _ = flash.describe_backward(
        q, None, q, k, k, q, stat, None, None, layout, form, Vectors(), Extras(), Maps(), [], 90,
        132,
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
    [(8, (32, 8), 2048, 2048), (1, (32, 32), 512, 512), (1, (8, 1), 64, 512)],
    ids=["many programs", "no groups", "few queries"],
)
def test_groups_are_not_split(batch: int, heads: tuple[int, int], queries: int, keys: int) -> None:
    launch = dkdv(batch, heads, queries, keys)
    assert launch.args["parts"] is None
    assert launch.args["dk"].dtype == torch.bfloat16
    assert launch.args["group"] == heads[0] // heads[1]
