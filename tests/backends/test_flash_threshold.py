"""The threshold kernel on full blocks and edge blocks: gains of any sign, and its block lists."""

from __future__ import annotations

import pytest
import torch
from test_threshold import bisected
from torch import Tensor

import attnzoo
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common.kernel_operands import Solved
from attnzoo.backends.triton.flash import operators as flash_ops
from attnzoo.core import activations
from helpers.cases import rand

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

ACTIVATIONS = {"sparsemax": activations.SPARSEMAX, "entmax15": activations.ENTMAX15}
ALPHA = {"sparsemax": 2.0, "entmax15": 1.5}
TILE = 64, 32  # queries and keys per tile of the block map: fp32, D = 16


def solve(
    q: Tensor, k: Tensor, gain: Tensor | None, right: int | None, name: str, scale: float = 0.5
) -> Solved:
    layout = Layout(scale, None, right, None, None, None, None)
    return flash_ops.flash_solve(
        q=q, k=k, v=k, vectors=Vectors(gain=gain), terms=Terms(), layout=layout,
        rule=Rule(ACTIVATIONS[name], "threshold"),
    )  # fmt: skip


def exact_scores(q: Tensor, k: Tensor, gain: Tensor, right: int | None) -> Tensor:
    """Scores (B, H, Nq, Nk) in fp64, −∞ for hidden keys."""
    s = 0.5 * gain.double()[..., None] * (q.double() @ k.double().transpose(-1, -2))
    if right is None:
        return s
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    return s.masked_fill(distance > k.shape[2] - q.shape[2] + right, float("-inf"))


@pytest.mark.parametrize("name", [pytest.param("sparsemax", marks=pytest.mark.slow), "entmax15"])
@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("lengths", [(130, 130), (70, 150), (150, 70)])
def test_weights_sum_to_one_for_gains_of_any_sign(
    lengths: tuple[int, int], right: int | None, name: str
) -> None:
    queries, keys = lengths
    q, k = rand(1, 2, queries, 16).float(), rand(1, 2, keys, 16, seed=1).float()
    gain = rand(1, 2, queries, seed=2).float()
    gain[..., 5::7] = 0.0  # equal scores
    solved, alpha = solve(q, k, gain, right, name), ALPHA[name]
    scores = exact_scores(q, k, gain, right)
    seen = (scores > float("-inf")).any(-1)
    # Nothing is added to the products here, so the peak is a product.
    largest = 0.5 * gain.double() * solved.peak.double()
    x = (alpha - 1) * (scores - largest[..., None] - solved.tau.double()[..., None])
    weights = (1 + x).relu() ** (1 / (alpha - 1))
    exact = bisected(scores[seen], alpha)
    # The same bound as for `weights` in test_flash_edges: τ is rounded to fp32.
    allowed = 1e-5 + torch.finfo(torch.float32).eps / 2 * float(scores[seen].amax())
    assert float((weights[seen] - exact).abs().max()) <= allowed
    # A tile is live if one of its weights is not 0. The list of a row of tiles is ascending, so
    # that tiles that all queries see come first.
    tiles = torch.nn.functional.pad(weights * seen[..., None], (0, -keys % TILE[1]))
    tiles = tiles.unflatten(3, (-1, TILE[1])).amax(-1)
    for row, (live, blocks, count) in enumerate(
        zip(solved.live.flatten(0, 1), solved.blocks.flatten(0, 1), solved.counts.flatten())
    ):
        per_head = solved.counts.shape[1]
        start = row % per_head * TILE[0]
        needed = tiles[0, row // per_head, start : start + TILE[0]].amax(0) > 1e-6
        assert bool((live.bool() | ~needed).all())
        assert blocks[: int(count)].tolist() == live.nonzero()[:, 0].tolist()


def test_rows_beyond_the_last_query_keep_no_block() -> None:
    """Query 0 of 1 selects the keys of block 2 of 4. The other rows of the tile are padding."""
    q, k = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 128, 16)
    k[..., 64:96, :] = 1.0
    assert solve(q, k, None, None, "entmax15").live.flatten().tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("gain", [1.0, -1.0])
@pytest.mark.parametrize("score", [3e6, 1e8, 1e30])
def test_large_equal_scores_of_full_and_edge_blocks_are_kept(
    score: float, gain: float, right: int | None
) -> None:
    q, k = torch.zeros(1, 1, 150, 16), torch.zeros(1, 1, 150, 16)
    q[..., 0], k[..., 0] = 1.0, gain * score
    solved = solve(q, k, torch.full((1, 1, 150), gain), right, "entmax15")
    # The forward computes scores relative to the peak, which is a product, like this.
    relative = (gain * score - solved.peak) * (0.5 * gain)
    assert bool((1 + 0.5 * (relative - solved.tau) > 0).all())
    counts = [5, 5, 5] if right is None else [2, 4, 5]
    assert solved.counts.tolist() == [counts]


@pytest.mark.parametrize("place", [3, 100, 149])
def test_nan_in_a_key_reaches_the_queries_that_see_it(place: int) -> None:
    q, k = rand(1, 1, 150, 16).float(), rand(1, 1, 150, 16, seed=1).float()
    k[:, :, place] = float("nan")
    tau = solve(q, k, None, 0, "entmax15").tau[0, 0]
    assert torch.equal(tau.isnan(), torch.arange(150) >= place)


def test_a_negative_scale_without_gain_selects_the_smallest_products() -> None:
    q, k = rand(1, 1, 40, 16).float(), rand(1, 1, 70, 16, seed=1).float()
    solved = solve(q, k, None, None, "entmax15", scale=-0.5)
    same = solve(q, -k, None, None, "entmax15")
    assert torch.equal(solved.tau, same.tau)
    assert torch.equal(solved.live, same.live)


@pytest.mark.parametrize("odd", [0, 1])
def test_saved_tensors_may_return_with_other_strides(odd: int) -> None:
    """The size of the block map's tiles depends on strides, but only when the map is made."""
    leaf = rand(1, 1, 150, 96 + odd).float().requires_grad_()

    def attend() -> Tensor:
        q, k, v = leaf[..., :96].split(32, -1)
        return attnzoo.attention(q, k, v, "entmax", is_causal=True, backend="flash", alpha=1.5)

    (want,) = torch.autograd.grad(attend().square().sum(), leaf)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
        out = attend()
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    torch.testing.assert_close(gradient, want, atol=1e-4, rtol=1e-4)
