"""Variants without a form, compared with loops and with limits in which they are softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnzoo
import attnzoo.losses
from attnzoo.backends.tiled import blocks
from attnzoo.variants import perturb_max
from helpers.cases import rand

BACKENDS = ["eager", "tiled"]


def qkv(n: int = 12) -> tuple[Tensor, ...]:
    return tuple(rand(2, 3, n, 5, seed=i) for i in range(3))


def broken_off(logits: list[float]) -> list[float]:
    """The weights of one query whose past keys have these logits, walked from the last key back."""
    left, weights = 1.0, []
    for z in reversed(logits):
        share = 1 / (1 + torch.tensor(-z, dtype=torch.float64).exp().item())
        weights.append(share * left)
        left *= 1 - share
    return weights[::-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stick_breaking_equals_a_walk_from_the_last_key_back(backend: str) -> None:
    q, k, v = qkv()
    mask = rand(12, 12, seed=9) > -0.5
    out = attnzoo.attention(
        q, k, v, "stick_breaking", is_causal=True, attn_mask=mask, backend=backend
    )
    z = q @ k.mT / 5**0.5
    expected = torch.zeros_like(out)
    for batch, head, i in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 12))).tolist():
        seen = [j for j in range(i) if mask[i, j]]
        weights = broken_off([z[batch, head, i, j].item() for j in seen])
        for j, w in zip(seen, weights, strict=True):
            expected[batch, head, i] += w * v[batch, head, j]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)


def test_stick_breaking_with_equal_logits_falls_geometrically_at_any_length() -> None:
    q, k, v = torch.zeros(3, 1, 1, 4000, 4, dtype=torch.float64).unbind()
    w = attnzoo.attention_weights(q[:, :, -1:], k, v, "stick_breaking", is_causal=True)[0, 0, 0]
    assert w[-1] == 0  # the query's own key
    assert torch.allclose(w[-11:-1], 0.5 ** torch.arange(10, 0, -1, dtype=torch.float64))
    assert abs(w.sum() - 1) < 1e-12


def test_stick_breaking_keeps_weights_of_extreme_logits() -> None:
    """A key with logit 1000 takes all that is left; with −1000, nothing."""
    k = torch.tensor([0.0, 1000.0, -1000.0, 0.0, 0.0])[None, None, :, None]
    q = torch.ones(1, 1, 5, 1)
    w = attnzoo.attention_weights(q, k, k, "stick_breaking", is_causal=True, scale=1.0)
    assert w[0, 0, 4].tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 2)}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_top_p_with_p_1_is_softmax_exactly(backend: str, options: dict) -> None:
    q, k, v = (x.float() for x in qkv())
    out = attnzoo.attention(q, k, v, "top_p", p=1.0, backend="eager", **options)
    assert torch.equal(out, attnzoo.attention(q, k, v, backend="eager", **options))
    out = attnzoo.attention(q, k, v, "top_p", p=1.0, backend=backend, **options)
    torch.testing.assert_close(out, attnzoo.attention(q, k, v, backend=backend, **options))
    assert attnzoo.explain(q, k, v, "top_p", p=1.0).chosen == "sdpa"


def test_top_p_keeps_the_lowest_indices_of_equal_scores() -> None:
    scores = torch.zeros(10)
    w = attnzoo.probabilities(scores, "top_p", p=0.25)
    assert w.tolist() == pytest.approx([1 / 3] * 3 + [0] * 7)


def test_top_p_gives_dropped_keys_no_gradient() -> None:
    scores = torch.tensor([3.0, 0.0, 2.0, -1.0], requires_grad=True)
    w = attnzoo.probabilities(scores, "top_p", p=0.9)
    w[0].backward()
    assert scores.grad is not None
    assert w[1] == w[3] == 0
    assert scores.grad[1] == scores.grad[3] == 0
    assert scores.grad[0] > 0
    assert scores.grad[0] == pytest.approx(-scores.grad[2])


@pytest.mark.parametrize("p", [0.0, -0.1, 1.5, float("nan")])
def test_p_outside_of_0_to_1_raises(p: float) -> None:
    with pytest.raises(ValueError, match="p must be above 0 and at most 1"):
        attnzoo.attention(*qkv(), "top_p", p=p)


def test_stick_breaking_rejects_calls_that_are_not_causal() -> None:
    with pytest.raises(ValueError, match="is_causal must be True"):
        attnzoo.attention(*qkv(), "stick_breaking")


@pytest.mark.parametrize("noise", ["normal", "gumbel"])
def test_perturb_max_gives_the_frequencies_of_draws(noise: str) -> None:
    scores = torch.tensor([1.0, 0.3, 0.0, -0.5, -2.0], dtype=torch.float64)
    draws, generator = 400_000, torch.Generator().manual_seed(0)
    uniform = torch.rand(draws, 5, generator=generator, dtype=torch.float64)
    drawn = -(-uniform.log()).log() if noise == "gumbel" else torch.special.ndtri(uniform)
    first = (scores + 0.6 * drawn).argmax(-1)
    frequencies = first.bincount(minlength=5) / draws
    w = attnzoo.probabilities(scores, "perturb_max", noise=noise, std=0.6)
    deviation = (w * (1 - w) / draws).sqrt()
    assert bool(((frequencies - w).abs() < 5 * deviation).all())


@pytest.mark.parametrize("keys", [1, 2, 40, 1000, 100_000])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-9), (torch.float64, 1e-10)])
def test_perturb_max_of_equal_scores_has_enough_points(
    keys: int, dtype: torch.dtype, error: float
) -> None:
    """Π Φ rises in a shorter interval for more keys. The points of a dtype are used in fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(perturb_max.POINTS, torch.float64, perturb_max.POINTS[dtype])
        w = attnzoo.probabilities(torch.zeros(keys, dtype=torch.float64), "perturb_max")
    assert abs(float(w[0]) - 1 / keys) < error / keys**0.5
    assert float(w.sum()) == pytest.approx(1.0, abs=1e-6 if dtype == torch.float32 else 1e-9)


def test_perturb_max_agrees_with_the_loss_of_each_class() -> None:
    """The loss has other points for its quadrature, and one class at a time."""
    scores = 3 * rand(40, seed=2)
    w = attnzoo.probabilities(scores, "perturb_max", std=0.8)
    each = attnzoo.losses.perturb_max_loss(
        scores.expand(40, 40), torch.eye(40).double(), torch.arange(40), std=0.8, reduction="none"
    )
    torch.testing.assert_close(w, (-each).exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa"])
def test_perturb_max_with_gumbel_noise_is_softmax_of_scores_over_std(backend: str) -> None:
    q, k, v = qkv()
    out = attnzoo.attention(
        q, k, v, "perturb_max", noise="gumbel", std=0.5, is_causal=True, backend=backend
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=2 / 5**0.5
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("n", [1, 2, 10, 1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_weights_of_perturb_max_sum_to_1(n: int) -> None:
    ahead = [lead * torch.nn.functional.one_hot(torch.tensor(0), n) for lead in (3, 4, 5, 6, 7)]
    for scores in (torch.zeros(n), torch.linspace(-3, 3, n), 50 * rand(n, seed=1), *ahead):
        w = attnzoo.probabilities(scores.double(), "perturb_max")
        assert abs(w.sum() - 1) < 1e-10
        assert bool((w >= 0).all())


def test_perturb_max_at_extreme_scores_is_one_hot() -> None:
    scores = torch.tensor([0.0, 1e30, -1e30], requires_grad=True)
    w = attnzoo.probabilities(scores, "perturb_max")
    assert w.tolist() == pytest.approx([0.0, 1.0, 0.0])
    (gradient,) = torch.autograd.grad(w[1], scores)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("large", [1e4, 1e5, 1e10, 1e30])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hidden_keys_with_large_scores_give_perturb_max_no_gradient(
    dtype: torch.dtype, backend: str, large: float
) -> None:
    q = torch.ones(1, 1, 2, 1, dtype=dtype, requires_grad=True)
    k = torch.tensor([0.0, large], dtype=dtype).view(1, 1, 2, 1).requires_grad_()
    v = torch.ones_like(q)
    options = {"is_causal": True, "scale": 1.0, "backend": backend}
    out = attnzoo.attention(q, k, v, "perturb_max", **options)
    dq, dk = torch.autograd.grad(out[..., 0, :].sum(), [q, k])
    assert bool(dq.isfinite().all())
    assert bool(dk.isfinite().all())
    assert dk[0, 0, 1] == 0


def test_top_p_keeps_one_key_if_p_is_0_in_the_dtype() -> None:
    assert attnzoo.probabilities(torch.tensor([1.0, 3.0]), "top_p", p=1e-46).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"noise": "cauchy"}, ValueError, "noise must be 'normal' or 'gumbel', got 'cauchy'"),
        ({"noise": 1}, TypeError, "noise must be a str, got 1"),
        ({"std": 0.0}, ValueError, "std must be at least 1e-6, got 0.0"),
    ],
)
def test_wrong_parameters_of_perturb_max_raise(
    params: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attnzoo.attention(*qkv(), "perturb_max", **params)


def test_noisy_is_softmax_of_logits_plus_normal_noise() -> None:
    q, k, v = qkv()
    torch.manual_seed(3)
    out = attnzoo.attention(q, k, v, "noisy", std=0.7, is_causal=True, backend="eager")
    torch.manual_seed(3)
    z = q @ k.mT / 5**0.5
    s = z + 0.7 * torch.randn_like(z)
    s = s.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(out, s.softmax(-1) @ v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_the_same_forward_and_backward(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SCORES", 40)  # several blocks

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attnzoo.attention(q, k, v, "noisy", std=1.0, is_causal=True, backend=backend)

    leaves = [x[:1, :2, :6].requires_grad_() for x in qkv()]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_has_the_given_deviation(backend: str) -> None:
    """With two equal keys, the log ratio of the weights is normal with deviation √2 · std."""
    q = torch.zeros(1, 1, 20_000, 1, dtype=torch.float64)
    k, v = torch.zeros(1, 1, 2, 1).double(), torch.tensor([0.0, 1.0]).double().view(1, 1, 2, 1)
    torch.manual_seed(0)
    w = attnzoo.attention(q, k, v, "noisy", std=0.3, backend=backend)
    ratios = w.logit()
    assert abs(ratios.mean()) < 5 * 0.43 / 20_000**0.5
    assert abs(ratios.std() - 0.3 * 2**0.5) < 0.01


@pytest.mark.parametrize("std", [-0.1, float("nan")])
def test_a_negative_std_of_noisy_raises(std: float) -> None:
    with pytest.raises(ValueError, match="std must be from 0 to 1e30"):
        attnzoo.attention(*qkv(), "noisy", std=std)
