"""On a GPU, tiled takes few launches, does not wait for the GPU, and agrees with the definition.

There is no GPU here: launches are counted on the device "meta", and results are computed on a CPU
with the blocks and solver steps of a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attnzoo
from attnzoo.backends.operator import Operator
from attnzoo.backends.tiled import blocks
from attnzoo.core import device
from attnzoo.core.arguments import check_call
from helpers.agreement import disagreements, dropout_factors, every_term, make
from helpers.cases import WITH_FORMS
from helpers.kernel_paths import quick_variants
from helpers.launches import Launches

CASES_OF_A_BLOCK: dict[str, tuple[str, dict[str, Any], int]] = {
    "softmax": ("softmax", {}, 60),
    "sigmoid": ("sigmoid", {}, 60),
    "topk": ("topk", {"top_k": 5}, 70),
    "top_p": ("top_p", {"p": 0.9}, 90),
    "entmax 1.5": ("entmax", {"alpha": 1.5}, 260),
    "entmax 1.3": ("entmax", {"alpha": 1.3}, 450),
    "sparsemax": ("sparsemax", {}, 370),
    "adaptive temperature": ("adaptive_temperature", {}, 90),
}


@pytest.fixture
def visible_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are not hidden from the counter."""
    monkeypatch.setattr(Operator, "_is_plain", lambda self, values: True)


def launches(batch: int, heads: int, n: int, variant: str, **options: Any) -> Launches:
    q, k, v = (
        torch.empty(batch, heads, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    with Launches() as seen:
        attnzoo.attention(q, k, v, variant, backend="tiled", **options).sum().backward()
    return seen


@pytest.mark.usefixtures("visible_operations")
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES_OF_A_BLOCK)
def test_a_block_takes_few_launches(case: str, causal: bool) -> None:
    """The call has 2^27 scores, which fill 8 blocks of 2^24. The host never waits."""
    variant, params, most = CASES_OF_A_BLOCK[case]
    seen = launches(1, 8, 4096, variant, is_causal=causal, **params)
    assert 0 < seen.launched <= 8 * most, seen.launches
    assert seen.waited == 0, seen.waits


def blocks_of(batch: int, heads: int, n: int, causal: bool) -> list[blocks.Block]:
    q = torch.empty(batch, heads, n, 64, device="meta")
    return list(blocks.blocks(check_call(q, q, q, is_causal=causal)))


@pytest.mark.parametrize(("causal", "most"), [(False, 2**11), (True, 1400)])
def test_a_long_call_with_many_heads_has_few_blocks(causal: bool, most: int) -> None:
    """It has 2^35 scores."""
    assert len(blocks_of(8, 16, 16384, causal)) <= most


@pytest.mark.parametrize("shape", [(1, 1, 16384), (2, 64, 2048), (1, 8, 8192)], ids=str)
def test_blocks_hold_few_scores_that_causality_hides(shape: tuple[int, int, int]) -> None:
    sizes = [math.prod(b.shape) * (b.keys.stop - b.keys.start) for b in blocks_of(*shape, True)]
    assert max(sizes) <= blocks.LARGE_SCORES
    batch, heads, n = shape
    assert sum(sizes) <= 1.1 * batch * heads * n * (n + 1) / 2


@pytest.fixture(params=[1000, 4000], ids=str)
def as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CPU", ())
    monkeypatch.setattr(blocks, "LARGE_SCORES", request.param)
    monkeypatch.setattr(blocks, "ROWS", 2)
    monkeypatch.setattr(blocks, "MOST_ROWS", 8)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("heads", "span"),
    [("gqa", "causal"), *(pytest.param(*x, marks=pytest.mark.slow) for x in
     (("mqa", "pair"), ("mha", "window")))],
)  # fmt: skip
@pytest.mark.parametrize("variant", quick_variants(WITH_FORMS, ("pairwise", "linear")))
def test_blocks_of_a_gpu_agree_with_the_definition(variant: str, heads: str, span: str) -> None:
    inputs = make(variant, every_term(variant, heads, span))
    keep = dropout_factors(variant, "tiled", inputs)
    assert disagreements(variant, "tiled", inputs, keep=keep) == []
