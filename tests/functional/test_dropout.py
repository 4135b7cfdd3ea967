"""Dropout on the weights: unbiased, drawn from torch's generator, and reused by the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import attnzoo
from attnzoo.backends.tiled import blocks
from helpers.cases import VARIANTS, learned, params_of, rand
from helpers.crossed import crossed

both = pytest.mark.parametrize("backend", ["eager", "tiled"])
every_pair = pytest.mark.parametrize(("variant", "backend"), crossed(VARIANTS, ["tiled", "eager"]))


def qkv(batch: int = 2, heads: int = 2, n: int = 6, d: int = 6) -> list[Tensor]:
    return [rand(batch, heads, n, d, seed=i) for i in range(3)]


def seeded(seed: int, *args: Any, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return attnzoo.attention(*args, **options)


@every_pair
def test_each_weight_is_dropped_or_scaled(variant: str, backend: str) -> None:
    """With v = identity the output holds the weights. Each is 0 or scaled by 1 / (1 − p)."""
    q, k, _ = qkv(n=40)
    eye = torch.eye(40, dtype=torch.float64).expand(2, 2, 40, 40)
    params = params_of(variant)
    w = attnzoo.attention(q, k, eye, variant, backend="eager", **params)
    out = seeded(0, q, k, eye, variant, backend=backend, dropout_p=0.25, **params)
    remaining = out != 0
    assert torch.allclose(out[remaining], w[remaining] / 0.75)
    share = float(remaining[w > 0].double().mean())
    n = int((w > 0).sum())
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / n) ** 0.5  # four standard errors


@both
def test_mean_over_seeds_is_the_output_without_dropout(backend: str) -> None:
    q, k, v = qkv(n=8)
    exact = attnzoo.attention(q, k, v, backend=backend)
    runs = torch.stack([seeded(i, q, k, v, backend=backend, dropout_p=0.5) for i in range(300)])
    error = (runs.mean(0) - exact) / (runs.std(0) / 300**0.5)
    assert float(error.abs().max()) < 5  # bounds the largest of 192 z-scores
    assert float(error.std()) == pytest.approx(1.0, abs=0.35)


@both
def test_seed_determines_the_dropout_mask(backend: str) -> None:
    q, k, v = qkv()
    options = dict(backend=backend, dropout_p=0.5)
    first = seeded(1, q, k, v, **options)
    assert torch.equal(first, seeded(1, q, k, v, **options))
    assert not torch.equal(first, seeded(2, q, k, v, **options))
    torch.manual_seed(1)
    attnzoo.attention(q, k, v, **options)
    assert not torch.equal(first, attnzoo.attention(q, k, v, **options))  # new generator state


@both
def test_dropout_p_zero_uses_no_random_numbers(backend: str) -> None:
    q, k, v = qkv()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    out = attnzoo.attention(q, k, v, backend=backend, dropout_p=0.0)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(out, attnzoo.attention(q, k, v, backend=backend))


@every_pair
def test_gradients_use_the_mask_of_the_forward(variant: str, backend: str) -> None:
    named = {name: x.double() for name, x in learned(variant, 2).items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned_params: Tensor) -> Tensor:
        params = {**params_of(variant), **dict(zip(named, learned_params, strict=True))}
        if variant == "adaptive_temperature":
            params["differentiable"] = True
        return seeded(4, q, k, v, variant, backend=backend, dropout_p=0.4, is_causal=True, **params)

    leaves = [x.requires_grad_() for x in (*qkv(n=5, d=4), *named.values())]
    assert gradcheck(attend, leaves, fast_mode=True)


def test_backward_uses_the_forward_mask_even_if_the_generator_was_used_in_between() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    do = rand(2, 2, 6, 6, seed=9)
    out = seeded(5, q, k, v, backend="tiled", dropout_p=0.5)
    undisturbed = torch.autograd.grad(out, (q, k, v), do)
    out = seeded(5, q, k, v, backend="tiled", dropout_p=0.5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for have, want in zip(torch.autograd.grad(out, (q, k, v), do), undisturbed, strict=True):
        assert torch.equal(have, want)
    assert torch.equal(state, torch.get_rng_state())  # backward does not change the generator


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "entmax", "topk"])
def test_mask_does_not_depend_on_block_sizes(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = rand(3, 4, 11, 6, seed=1), rand(3, 2, 13, 6, seed=2), rand(3, 2, 13, 6, seed=3)
    options = dict(enable_gqa=True, is_causal=True, dropout_p=0.5, backend="tiled")
    options.update(params_of(variant))
    expected = seeded(6, q, k, v, variant, **options)
    for scores, rows, heads in ((30, 2, 1), (100, 3, 2), (500, 5, 8)):
        monkeypatch.setattr(blocks, "SCORES", scores)
        monkeypatch.setattr(blocks, "ROWS", rows)
        monkeypatch.setattr(blocks, "HEADS", heads)
        assert torch.allclose(seeded(6, q, k, v, variant, **options), expected)


def drawn(heads: int = 4, n: int = 200) -> Tensor:
    """Return the dropout mask of `tiled`: bool (heads, n, n), True where a weight is kept."""
    zeros = torch.zeros(1, heads, n, 1)
    eye = torch.eye(n).expand(1, heads, n, n)
    return seeded(7, zeros, zeros, eye, backend="tiled", dropout_p=0.5)[0] != 0


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("variant", "p"),
    [("softmax", 0.1), ("sigmoid", 0.5), ("sparsemax", 0.7), ("softmax", 1 - 1e-9)],
)
def test_flash_and_tiled_drop_the_same_weights(variant: str, p: float) -> None:
    q, k, eye = (
        torch.zeros(2, 2, 20, 8),
        torch.zeros(2, 1, 70, 8),
        torch.eye(70).expand(2, 1, 70, 70),
    )
    options = dict(enable_gqa=True, dropout_p=p, **params_of(variant))
    outs, states = [], []
    for backend in ("tiled", "flash"):
        outs.append(seeded(8, q, k, eye, variant, backend=backend, **options))
        states.append(torch.get_rng_state())
    assert torch.equal(outs[0] != 0, outs[1] != 0)
    assert torch.allclose(outs[0], outs[1])
    assert torch.equal(*states)
    weights = outs[0].numel()
    share = float((outs[0] != 0).double().mean())
    assert abs(share - (1 - p)) < 4 * (p * (1 - p) / weights) ** 0.5  # four standard errors


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["tiled", "flash"])
def test_the_weights_are_divided_by_the_probability_with_which_they_are_kept(backend: str) -> None:
    """p has 24 bits, so with p = 1 − 10⁻⁹ a weight is kept with probability 2⁻²⁴.

    With this seed query 8 keeps key 377, and no other weight is kept.
    """
    q, k = torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, 512, 8)
    out = seeded(1328, q, k, torch.ones_like(k), backend=backend, dropout_p=1 - 1e-9)
    expected = torch.zeros_like(out)
    expected[..., 8, :] = 2**24 / 512
    assert torch.equal(out, expected)


@pytest.mark.interpreter
def test_dropout_of_flash_is_off_at_0_and_reused_by_the_backward() -> None:
    q, k, v = (x.float().requires_grad_() for x in qkv())
    exact = attnzoo.attention(q, k, v, backend="flash")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.equal(attnzoo.attention(q, k, v, backend="flash", dropout_p=0.0), exact)
    assert torch.equal(before, torch.get_rng_state())
    out = seeded(5, q, k, v, backend="flash", dropout_p=0.5)
    torch.manual_seed(99)
    # The output is linear in v: ⟨do, out⟩ = ⟨dv, v⟩ if both have the same mask.
    do = rand(2, 2, 6, 6, seed=9).float()
    (dv,) = torch.autograd.grad(out, v, do)
    expected = float((do * out.detach()).sum())
    assert float((dv * v.detach()).sum()) == pytest.approx(expected, rel=1e-4)


def test_mask_entries_of_rows_keys_and_heads_are_independent() -> None:
    """With p = 0.5, half of the weights are kept, and the mask entries are not correlated."""
    centered = drawn().double() - 0.5
    n = centered[0].numel()
    limit = 5 / n**0.5
    assert abs(float(centered.mean())) * 2 < 5 / centered.numel() ** 0.5
    for share in (centered.mean((0, 1)), centered.mean((0, 2))):
        assert float(share.abs().max()) * 2 < 5 / 800**0.5
    pairs = {
        "heads": centered[0] * centered[1],
        "rows": centered[0, 1:] * centered[0, :-1],
        "keys": centered[0, :, 1:] * centered[0, :, :-1],
        "diagonals": centered[0, 1:, 1:] * centered[0, :-1, :-1],
        "transposed": centered[0] * centered[0].T * (1 - torch.eye(200)),
        "rows far apart": centered[0, 64:] * centered[0, :-64],
    }
    for name, products in pairs.items():
        assert abs(float(products.mean())) * 4 < 1.5 * limit, name
    # If the mask were the XOR of a bit per row and a bit per key, this product would be constant.
    above, below = centered[0, :-1], centered[0, 1:]
    corners = below[:, 1:] * above[:, 1:] * below[:, :-1] * above[:, :-1]
    assert abs(float(corners.mean())) * 16 < 1.5 * limit
