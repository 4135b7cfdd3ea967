"""Softmax over rows compiled with numba."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernels import row_loops
from helpers.row_softmax import assert_softmax, exact, special_rows

SOFTMAX = ("three_pass", "three_pass_stored", "online", "two_pass")
LANES = row_loops.LANES
algorithms = pytest.mark.parametrize("name", SOFTMAX)
# Compiling a function takes up to two seconds.
pytestmark = pytest.mark.slow


def softmax(name: str, x: Tensor) -> Tensor:
    out = torch.full_like(x, 7.0)
    getattr(row_loops, name)(x.numpy(), out.numpy())
    return out


def fused(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = torch.full((len(x), k), 7.0), torch.full((len(x), k), -1)
    row_loops.online_top(x.numpy(), values.numpy(), columns.numpy())
    return values, columns


def separate(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, columns = torch.full((len(x), k), 7.0), torch.full((len(x), k), -1)
    row_loops.top(softmax("three_pass", x).numpy(), values.numpy(), columns.numpy())
    return values, columns


# ---- the loops ----------------------------------------------------------------------------------


@algorithms
def test_rows_of_any_length_agree_with_the_definition(name: str) -> None:
    for columns in (1, 3, LANES - 1, LANES, LANES + 1, 10 * LANES, 20 * LANES + 7):
        x = 5 * torch.randn(3, columns)
        assert_softmax(softmax(name, x), x, LANES)


@algorithms
def test_large_and_hidden_entries(name: str) -> None:
    for row in special_rows(3 * LANES + 5, torch.float32).values():
        assert_softmax(softmax(name, row[None]), row[None], LANES)


@algorithms
def test_a_maximum_that_rises_in_each_block(name: str) -> None:
    x = torch.arange(6.0 * LANES)[None]
    assert_softmax(softmax(name, x), x, LANES)
    assert_softmax(softmax(name, -x), -x, LANES)


@algorithms
def test_hidden_rows_are_zero_and_nan_stays_in_its_row(name: str) -> None:
    x = torch.randn(5, 2 * LANES + 1)
    x[0] = -torch.inf
    x[1, 3] = torch.nan
    x[2, -1] = torch.inf
    x[3, 0] = x[3, -1] = torch.inf
    weights = softmax(name, x)
    assert bool((weights[0] == 0).all())
    assert bool(weights[1:4].isnan().all())
    assert_softmax(weights[4:], x[4:], LANES)


def test_two_pass_at_the_ends_of_its_range() -> None:
    for end in (1e5, -0.99e5):
        x = end - torch.arange(100.0)[None]
        assert_softmax(softmax("two_pass", x), x, LANES)


@pytest.mark.parametrize("algorithm", [fused, separate])
def test_top_k_agrees_with_the_definition(algorithm: Callable[..., tuple[Tensor, Tensor]]) -> None:
    for columns, k in ((5, 5), (LANES, 3), (7 * LANES + 3, 5), (LANES + 1, 1)):
        x = 5 * torch.randn(4, columns)
        values, indices = algorithm(x, k)
        expected = exact(x).topk(k, 1)
        assert torch.equal(indices, expected.indices)
        torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("algorithm", [fused, separate])
def test_top_k_of_equal_entries_takes_the_first(
    algorithm: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    x = torch.zeros(1, 3 * LANES)
    x[0, 2 * LANES + 5] = 2.0
    x[0, [9, LANES, LANES + 4]] = 1.0
    _, indices = algorithm(x, 5)
    assert indices.tolist() == [[2 * LANES + 5, 9, LANES, LANES + 4, 0]]


def test_fused_top_k_of_hidden_rows_and_nan() -> None:
    x = torch.randn(2, LANES)
    x[0] = -torch.inf
    x[1, -1] = torch.nan
    values, columns = fused(x, 3)
    assert values[0].tolist() == [0.0, 0.0, 0.0]
    assert columns[0].tolist() == [0, 1, 2]
    assert bool(values[1].isnan().all())


@pytest.mark.parametrize("name", [*SOFTMAX, "online_top"])
def test_exponentials_are_vectorized(name: str) -> None:
    """A scalar fma occurs only in the remainder of a loop."""
    x = torch.randn(2, 3)
    _ = fused(x, 1) if name == "online_top" else softmax(name, x)
    (code,) = getattr(row_loops, name).inspect_llvm().values()
    assert len(re.findall(r"call <\d+ x float> @llvm\.fma\.v\d+f32", code)) >= 7


def test_powers_of_two_are_exact() -> None:
    n = np.arange(-130, 1).astype(np.float32)
    powers = np.array([row_loops.power_of_two(x) for x in n], np.float32)
    assert np.array_equal(powers, np.where(n > -127, np.ldexp(1.0, n.astype(int)), 0.0))
