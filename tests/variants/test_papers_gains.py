"""Variants with a gain are compared with their papers, or with a hand calculation."""

from __future__ import annotations

import math

import pytest
import torch

import attnzoo
from attnzoo.variants.adaptive_temperature import beta
from helpers.cases import CASES, rand
from helpers.scored import weights_of

BACKENDS = ["eager", "tiled"]


@pytest.mark.parametrize(
    ("n", "ssmax", "softmax"), [(10, 0.9401, 0.9428), (100, 0.9951, 0.5999), (1000, 0.9996, 0.1293)]
)
def test_ssmax_and_softmax_weights_of_figure_1(n: int, ssmax: float, softmax: float) -> None:
    """The weight of the last key, whose score is 3; the other scores are −2, and s = 0.43."""
    scores = torch.full((1, n), -2.0, dtype=torch.float64)
    scores[0, -1] = 3.0
    for backend in BACKENDS:
        assert float(weights_of(scores, "ssmax", backend, s=0.43)[0, -1]) == pytest.approx(
            ssmax, abs=5e-5
        )
        assert float(weights_of(scores, "softmax", backend)[0, -1]) == pytest.approx(
            softmax, abs=5e-5
        )


def test_log_n_equals_softmax_at_the_train_length() -> None:
    scores = rand(3, 512)
    assert torch.allclose(weights_of(scores, "log_n"), scores.softmax(-1))
    # The gain is log n / log train_length: 2 for train_length = √n, log n for train_length = e.
    assert torch.allclose(
        weights_of(scores, "log_n", train_length=512**0.5), (2 * scores).softmax(-1)
    )
    gained = (math.log(512) * scores).softmax(-1)
    assert torch.allclose(weights_of(scores, "log_n", train_length=math.e), gained)


def test_clipped_log_n_is_softmax_up_to_the_train_length() -> None:
    q, k, v = (rand(1, 1, 8, 4, seed=seed) for seed in range(3))
    options = {"is_causal": True}
    clipped = attnzoo.attention(q, k, v, "log_n", train_length=4, clip=True, **options)
    softmax = attnzoo.attention(q, k, v, **options)
    plain = attnzoo.attention(q, k, v, "log_n", train_length=4, **options)
    assert torch.equal(clipped[:, :, :4], softmax[:, :, :4])
    assert torch.equal(clipped[:, :, 4:], plain[:, :, 4:])


@pytest.mark.parametrize(
    ("one_based", "gains"),
    [  # Llama 4: 1 + 0.1 log(1 + ⌊(p + 1)/3⌋). Ministral 3: 1 + 0.1 log(1 + ⌊p/3⌋).
        (True, (0, 0, 1, 1, 1, 2, 2, 2)),
        (False, (0, 0, 0, 1, 1, 1, 2, 2)),
    ],
)
def test_position_temperature_sharpens_in_steps(one_based: bool, gains: tuple[int, ...]) -> None:
    q, k, v = (rand(1, 1, 8, 4, seed=seed) for seed in range(3))
    out = attnzoo.attention(
        q, k, v, "position_temperature", train_length=3, one_based=one_based, is_causal=True
    )
    gain = 1 + 0.1 * torch.tensor(gains, dtype=torch.float64).add(1).log()
    assert torch.allclose(out, attnzoo.attention(gain[:, None] * q, k, v, is_causal=True))


def test_adaptive_temperature_by_hand() -> None:
    """Softmax gives one of 100 keys half of the weight: H = log 2 + ½ log 99 = 2.99071 nats.

    Horner: −0.037·H = −0.110656; (… + 0.481)·H = 1.107577; (… − 2.3)·H = −3.566205;
    (… + 4.917)·H = 4.039694; … − 1.791 = 2.248694 = β.
    """
    scores = torch.tensor(CASES["adaptive_temperature"].paper.scores, dtype=torch.float64)[None]
    top = 1 / (1 + 99 ** (1 - 2.248694))
    for backend in BACKENDS:
        w = weights_of(scores, "adaptive_temperature", backend)
        assert float(w[0, -1]) == pytest.approx(top, abs=1e-4)
        assert torch.allclose(w[0, :99], (1 - w[0, -1]) / 99)


def test_adaptive_temperature_beta_exceeds_one_between_0_85_and_5_95_nats() -> None:
    """The maximum of β is 2.421, at entropy H = 4.41 nats."""
    entropy = torch.arange(0, 9, 0.01, dtype=torch.float64)
    above = entropy[beta(entropy) > 1]
    assert float(above.min()) == pytest.approx(0.85, abs=0.01)
    assert float(above.max()) == pytest.approx(5.95, abs=0.015)
    assert bool((beta(entropy) >= 1).all())
    assert float(beta(entropy).max()) == pytest.approx(2.421, abs=5e-4)
    assert float(entropy[beta(entropy).argmax()]) == pytest.approx(4.41, abs=0.01)
    # With more than e^5.945 = 382 equally likely keys, β = 1 and the weights are softmax.
    flat = 1e-3 * rand(1, 500)
    assert torch.equal(weights_of(flat, "adaptive_temperature"), weights_of(flat, "softmax"))


def test_adaptive_temperature_multiplies_scores_by_beta() -> None:
    scores = torch.cat([rand(4, 80, seed=1), 3 * rand(4, 80, seed=2), 0.1 * rand(4, 80, seed=3)])
    p = scores.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    polynomial = (
        -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    )
    expected = (polynomial.clamp(min=1)[:, None] * scores).softmax(-1)
    for backend in BACKENDS:
        assert torch.allclose(weights_of(scores, "adaptive_temperature", backend), expected)
