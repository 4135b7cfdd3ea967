"""The threshold solver of tiled gives Σ w = 1 and the weights of a bisection in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.tiled.threshold import enough_steps, solve_threshold, tolerance
from attnzoo.core.activation import Activation
from attnzoo.core.activations import ENTMAX15, Q_EXP, SPARSEMAX
from helpers.cases import rand

pytestmark = pytest.mark.usefixtures("sizes_of")

ALPHAS = (1.01, 1.1, 1.25, 1.5, 1.75, 2.0)
SCORES = {
    "gaussian": lambda n: rand(3, n, seed=n),
    "flat": lambda n: 0.1 * rand(3, n, seed=n),
    "sharp": lambda n: 100 * rand(3, n, seed=n),
    "constant": lambda n: torch.full((3, n), 3.7, dtype=torch.float64),
    "far from zero": lambda n: 1000 + rand(3, n, seed=n),
    "two plateaus": lambda n: (torch.arange(n) % 2 * 0.5 - 0.25).double().expand(3, n),
    "one far larger": lambda n: torch.nn.functional.pad(rand(3, n - 1, seed=n), (0, 1), value=50.0),
    "half masked": lambda n: rand(3, n, seed=n).masked_fill(rand(3, n, seed=1) > 0, -torch.inf),
}


def bisected(x: Tensor, alpha: float) -> Tensor:
    """Entmax weights (R, n) of scores (R, n), by the bisection of Peters et al. in fp64."""
    x = (alpha - 1) * (x - x.amax(-1, keepdim=True))
    low, high = torch.full_like(x[:, :1], -1.0), torch.zeros_like(x[:, :1])
    for _ in range(100):
        tau = (low + high) / 2
        above = (x - tau).relu().pow(1 / (alpha - 1)).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, tau, low), torch.where(above, high, tau)
    return (x - low).relu().pow(1 / (alpha - 1))


def solved(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """Entmax weights (R, n) of scores (R, n) by tiled. D = 1 and q = 1, so k holds the scores."""
    rows, n = scores.shape
    visible = scores != float("-inf")
    k = scores.masked_fill(~visible, 0.0).view(1, rows, n, 1)
    q = torch.ones(1, rows, 1, 1, dtype=scores.dtype)
    v = torch.eye(n, dtype=scores.dtype).expand(1, rows, n, n) if n <= 64 else None
    mask = visible.view(1, rows, 1, n)
    if v is not None:
        return attnzoo.attention(
            q, k, v, "entmax", alpha=alpha, scale=1.0, attn_mask=mask, backend="tiled"
        )[0, :, 0]
    # For large n, v = identity would be too large. The gradient of v gives the weights instead.
    v = torch.zeros(1, rows, n, 1, dtype=scores.dtype, requires_grad=True)
    out = attnzoo.attention(
        q, k, v, "entmax", alpha=alpha, scale=1.0, attn_mask=mask, backend="tiled"
    )
    return torch.autograd.grad(out.sum(), v)[0][0, :, :, 0]


@pytest.mark.parametrize(
    "n", [1, 5, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 1000, 16384))]
)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_threshold_weights_agree_with_bisection_in_fp64(alpha: float, n: int) -> None:
    # The bisection gets α rounded to fp32, as tiled uses it. The rounding matters at α = 1.01.
    alpha = float(torch.tensor(alpha))
    for kind, make in SCORES.items():
        scores = make(n).float()
        if bool((scores == float("-inf")).all(-1).any()):
            continue  # "half masked" scores with n = 1 have no visible key
        w = solved(scores, alpha)
        assert float((w.double().sum(-1) - 1).abs().max()) <= 1e-5, kind
        exact = bisected(scores.double(), alpha)
        assert float((w.double() - exact).abs().max()) <= 1e-5, kind


@pytest.mark.parametrize("n", [5, 1000])
def test_alpha_per_head_agrees_with_a_scalar_alpha(n: int) -> None:
    alphas = torch.tensor(ALPHAS)
    scores = rand(len(ALPHAS), n).float()
    together = solved(scores, alphas)
    for row, alpha in enumerate(alphas.tolist()):
        alone = solved(scores[row : row + 1], alpha)
        assert torch.allclose(together[row], alone[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_fp64_inputs_are_solved_in_fp64(alpha: float) -> None:
    for make in SCORES.values():
        scores = make(50)
        assert float((solved(scores, alpha) - bisected(scores, alpha)).abs().max()) <= 1e-11


ACTIVATIONS = {
    "1.5": (ENTMAX15, 1.5), "2": (SPARSEMAX, 2.0),
    **{f"tensor {alpha}": (Q_EXP, alpha) for alpha in (1 + 1e-6, 1.05, 1.5, 2.0)},
}  # fmt: skip
SLOW = {  # scores for which Newton's method takes many steps
    "halves": lambda n: -(2.0 ** -(torch.arange(n) / 7)),
    "quarters": lambda n: -(torch.arange(n).double() + 1).log() / math.log(4) / 9,
    "lines": lambda n: -1e-4 * torch.arange(n),
    "flat": lambda n: 0.05 * rand(n),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("kind", SLOW)
def test_the_weights_sum_to_1_for_many_keys(kind: str, name: str) -> None:
    phi, alpha = ACTIVATIONS[name]
    n = 2**15
    x = SLOW[kind](n).double()[None]
    x = x - x.amax()
    shape = torch.tensor([alpha]).double() if phi is Q_EXP else None
    tau = solve_threshold(x, shape, phi)
    z = phi.value(x - tau, None if shape is None else shape[:, None]).sum()
    # Each weight changes with the rounding of τ, and with that of 1 + (α−1)(x − τ).
    rounding = torch.finfo(x.dtype).eps * (2 * n + 8 / (alpha - 1))
    assert abs(float(z) - 1) <= tolerance(x.dtype) + rounding


@pytest.mark.parametrize("phi", [ENTMAX15, SPARSEMAX, Q_EXP], ids=lambda phi: phi.name)
def test_the_number_of_steps_of_a_gpu_depends_on_the_keys_only(phi: Activation) -> None:
    x = torch.empty(1, 1, device="meta")
    few, many = (enough_steps(x, keys, phi) for keys in (2, 2**17))
    assert few is not None
    assert many is not None
    assert few <= many <= 28
