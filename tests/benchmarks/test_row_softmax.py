"""The Triton kernels of softmax over rows, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnzoo.backends.triton.common.launch import run
from benchmarks.kernels.row_softmax import KERNELS, describe
from helpers.row_softmax import assert_softmax, exact, special_rows

pytestmark = pytest.mark.interpreter
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 64
algorithms = pytest.mark.parametrize("algorithm", KERNELS)


def softmax(algorithm: str, x: Tensor) -> Tensor:
    out = torch.full_like(x, 7.0)
    run(describe(algorithm, x, out, BLOCK))
    return out


@algorithms
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_length_agree_with_the_definition(algorithm: str, dtype: torch.dtype) -> None:
    """Lengths around one block, and several blocks."""
    for columns in (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 7):
        x = (5 * torch.randn(3, columns)).to(dtype)
        assert_softmax(softmax(algorithm, x), x, BLOCK)


@algorithms
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_hidden_entries(algorithm: str, dtype: torch.dtype) -> None:
    for row in special_rows(3 * BLOCK + 5, dtype).values():
        x = row[None]
        assert_softmax(softmax(algorithm, x), x, BLOCK)


@algorithms
def test_a_maximum_that_rises_in_each_block(algorithm: str) -> None:
    x = torch.arange(6.0 * BLOCK)[None]
    assert_softmax(softmax(algorithm, x), x, BLOCK)
    assert_softmax(softmax(algorithm, -x), -x, BLOCK)


@algorithms
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_rows_are_zero_and_nan_stays_in_its_row(algorithm: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * BLOCK + 1).to(dtype)
    x[0] = -torch.inf
    x[1, 3] = torch.nan
    x[2, -1] = torch.inf
    x[3, 0] = x[3, -1] = torch.inf
    weights = softmax(algorithm, x)
    assert bool((weights[0] == 0).all())
    assert bool(weights[1:4].isnan().all())
    assert_softmax(weights[4:], x[4:], BLOCK)


@algorithms
def test_rows_may_start_anywhere(algorithm: str) -> None:
    for first, width in ((0, BLOCK + 8), (1, BLOCK + 8), (4, BLOCK + 9)):
        x = torch.randn(4 * width + first)[first:].view(4, width)
        storage = torch.full((4 * width + 8,), 7.0)
        out = storage[4 : 4 + 4 * width].view(4, width)
        run(describe(algorithm, x, out, BLOCK))
        assert_softmax(out, x, BLOCK)
        assert bool((storage[:4] == 7).all())
        assert bool((storage[4 + 4 * width :] == 7).all())


@pytest.mark.parametrize("largest", [1e6, 1e7, 1e8, 7e8, 1e9, 3e9, 1e20, -1e7, -1e9, -1e20])
def test_two_pass_of_huge_logits(largest: float) -> None:
    """Neighbouring numbers, where fp32 cannot hold every integer exponent."""
    x = torch.full((8 * BLOCK,), largest)
    down = torch.tensor(-torch.inf)
    for j in range(1, 7):
        x[j::8] = torch.nextafter(x[j - 1 :: 8], down)
    x[7::8] = torch.finfo(torch.float32).min
    # The mantissa is up to 2^32 where it is exact, so its logarithm is rounded to 32 eps.
    torch.testing.assert_close(
        softmax("two-pass", x[None]).double(), exact(x[None]), rtol=64 * 2**-23, atol=2**-50
    )


def test_two_pass_of_more_than_2e38() -> None:
    x = torch.tensor([[3e38, 2e38, 1e38, 0.0], [-3e38, -2e38, -torch.inf, -2.5e38]])
    expected = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1 / 3, 1 / 3, 0.0, 1 / 3]])
    torch.testing.assert_close(softmax("two-pass", x), expected)


def test_the_budget_finds_small_errors() -> None:
    """A weight that is missing from the sum, and a weight that is slightly wrong."""
    x = torch.randn(1, 4 * BLOCK)
    weights = softmax("online", x)
    for wrong in (
        weights / (1 - weights[0, 0]),
        weights + 1e-4 * weights * (weights == weights.max()),
    ):
        with pytest.raises(AssertionError, match="times the error budget"):
            assert_softmax(wrong, x, BLOCK)


def test_no_rows_need_no_launch() -> None:
    assert softmax("online", torch.zeros(0, 5)).shape == (0, 5)
