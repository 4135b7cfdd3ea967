"""Each variant is compared with its paper, with its authors' code, or with a hand calculation."""

from __future__ import annotations

import math

import entmax as package
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from helpers.cases import ALL_VARIANTS, CASES, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS, precise
from helpers.scored import agree, grads, weights_of

BACKENDS = ["eager", "tiled"]


@pytest.mark.interpreter
@pytest.mark.parametrize("variant", [v for v in ALL_VARIANTS if CASES[v].paper.weights])
def test_weights_of_the_paper_example(variant: str) -> None:
    """The test calls all supporting backends. With D = 1 and q = 1, the keys are the scores."""
    paper = CASES[variant].paper
    k = torch.tensor(paper.scores, dtype=torch.float64)[None, None, :, None]
    v = torch.eye(len(paper.scores), dtype=torch.float64)[None, None]
    expected = torch.tensor(paper.weights, dtype=torch.float64)
    for backend in attnzoo.backends.BACKENDS:
        q = torch.ones(1, 1, 1, 1, dtype=precise(backend))
        call = (q, k.to(q.dtype), v.to(q.dtype), variant)
        options = dict(scale=1.0, backend=backend, **paper.params)
        if attnzoo.explain(*call, **options).chosen is None:
            assert VARIANT_BACKENDS[variant].get(backend) is not RUNS or backend == "sdpa"
            continue
        weights = attnzoo.attention(*call, **options)[0, 0, 0].double()
        assert torch.allclose(weights, expected, rtol=0, atol=paper.accuracy), backend


def test_softmax_equals_scaled_dot_product_attention() -> None:
    q, k, v = (rand(2, 4, 9, 8, seed=i).requires_grad_() for i in range(3))
    do = rand(2, 4, 9, 8, seed=3)
    for options in ({}, {"is_causal": True}, {"scale": 0.2}, {"attn_mask": rand(9, 9, seed=4)}):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        expected = (out, *torch.autograd.grad(out, (q, k, v), do))
        for backend in BACKENDS:
            out = attnzoo.attention(q, k, v, backend=backend, **options)
            actual = (out, *torch.autograd.grad(out, (q, k, v), do))
            assert all(torch.allclose(a, b) for a, b in zip(actual, expected, strict=True))


# ---- thresholds, against the authors' package -------------------------------------------------


SCORES = {
    "gaussian": lambda: rand(6, 50),
    "flat": lambda: 0.1 * rand(6, 50),
    "sharp": lambda: 100 * rand(6, 50),
    "one key": lambda: rand(3, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SCORES)
def test_sparsemax_against_the_package(kind: str, backend: str) -> None:
    scores = SCORES[kind]()
    expected = grads(lambda s: package.sparsemax(s, dim=-1), scores)
    agree(grads(lambda s: weights_of(s, "sparsemax", backend), scores), expected)
    agree(grads(lambda s: weights_of(s, "entmax", backend, alpha=2.0), scores), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SCORES)
def test_entmax15_against_the_package(kind: str, backend: str) -> None:
    scores = SCORES[kind]()
    expected = grads(lambda s: package.entmax15(s, dim=-1), scores)
    agree(grads(lambda s: weights_of(s, "entmax", backend), scores), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.5, 1.7, 1.95])
@pytest.mark.parametrize("kind", SCORES)
def test_entmax_and_its_gradient_by_alpha_equal_the_entmax_package(
    kind: str, alpha: float, backend: str
) -> None:
    """The entmax package solves for τ by bisection.

    Its gradient with respect to α has a closed form.
    """
    scores = SCORES[kind]()

    def theirs(s: Tensor, a: Tensor) -> Tensor:
        return package.entmax_bisect(s, alpha=a, dim=-1, n_iter=80)

    def ours(s: Tensor, a: Tensor) -> Tensor:
        return weights_of(s, "entmax", backend, alpha=a)

    point = torch.tensor(alpha, dtype=torch.float64)
    agree(grads(ours, scores, point), grads(theirs, scores, point), atol=1e-6)
    agree(grads(lambda s: weights_of(s, "entmax", backend, alpha=alpha), scores),
          grads(lambda s: theirs(s, point), scores), atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_entmax_with_alpha_per_head(backend: str) -> None:
    q, k, v = (rand(2, 3, 9, 6, seed=i) for i in range(3))
    alpha = torch.tensor([1.2, 1.5, 2.0], dtype=torch.float64)

    def theirs(q: Tensor, a: Tensor) -> Tensor:
        scores = q @ k.mT / 6**0.5
        return package.entmax_bisect(scores, alpha=a[:, None, None], dim=-1, n_iter=80) @ v

    def ours(q: Tensor, a: Tensor) -> Tensor:
        return attnzoo.attention(q, k, v, "entmax", alpha=a, backend=backend)

    agree(grads(ours, q, alpha), grads(theirs, q, alpha), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entmax_tends_to_softmax(backend: str) -> None:
    scores = rand(4, 30, dtype=torch.float32)
    w = weights_of(scores, "entmax", backend, alpha=1.0001)
    assert torch.allclose(w, scores.softmax(-1), rtol=0, atol=5e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_asentmax_against_the_package(per_token: bool, backend: str) -> None:
    """Weights are entmax-1.5 of (δ + β (log n_i)^γ) z, n_i = 1 … 9. At n = 1 the gain is δ."""
    q, k, v = (rand(2, 3, 9, 6, seed=i) for i in range(3))
    shape = (2, 3, 9) if per_token else (3,)
    values = [rand(*shape, seed=4).abs(), rand(*shape, seed=5), 1 + 0.1 * rand(*shape, seed=6)]

    def gained(beta: Tensor, gamma: Tensor, delta: Tensor) -> Tensor:
        log_n = torch.arange(1, 10, dtype=torch.float64).log()
        beta, gamma, delta = (
            (x if per_token else x[None, :, None]).expand(2, 3, 9) for x in (beta, gamma, delta)
        )
        power = torch.zeros_like(beta)
        power[..., 1:] = log_n[1:] ** gamma[..., 1:]
        return delta + beta * power

    def theirs(q: Tensor, *params: Tensor) -> Tensor:
        scores = gained(*params)[..., None] * (q @ k.mT / 6**0.5)
        later = torch.ones(9, 9, dtype=torch.bool).triu(1)
        return package.entmax15(scores.masked_fill(later, -1e6), dim=-1) @ v

    def ours(q: Tensor, *params: Tensor) -> Tensor:
        named = dict(zip(("beta", "gamma", "delta"), params, strict=True))
        return attnzoo.attention(q, k, v, "asentmax", is_causal=True, backend=backend, **named)

    agree(grads(ours, q, *values), grads(theirs, q, *values))


@pytest.mark.parametrize("backend", BACKENDS)
def test_asentmax_as_its_authors_released_it(backend: str) -> None:
    """Heads 0 and 1 have the gain 1 + β (log(i + 2))^γ at position i = 0, 1, …; 2 and 3, ALiBi.

    The authors' heads with ALiBi come first; the order of heads changes nothing. β and γ are drawn,
    as with their option "learn".
    """
    q, k, v = (rand(2, 4, 9, 6, seed=i) for i in range(3))
    generator = torch.Generator().manual_seed(7)
    beta = 0.1 + 0.9 * torch.rand(4, generator=generator).double()
    gamma = 0.1 * torch.randn(4, generator=generator).double()
    slopes = torch.tensor([0.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    scaled = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def theirs(q: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        position = torch.arange(9, dtype=torch.float64)
        grown = 1 + beta[:2, None] * (position + 2).log() ** gamma[:2, None]
        gain = torch.cat([grown, torch.ones(2, 9, dtype=torch.float64)])
        away = (position[:, None] - position).abs()
        scores = gain[..., None] * (q @ k.mT / 6**0.5) - slopes[:, None, None] * away
        later = torch.ones(9, 9, dtype=torch.bool).triu(1)
        return package.entmax15(scores.masked_fill(later, -1e6), dim=-1) @ v

    def ours(q: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        return attnzoo.attention(
            q, k, v, "asentmax", is_causal=True, alibi=slopes, backend=backend,
            beta=beta, gamma=gamma, extra=1, scaled=scaled,
        )  # fmt: skip

    agree(grads(ours, q, beta, gamma), grads(theirs, q, beta, gamma))


# ---- other variants ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoid_by_hand(backend: str) -> None:
    scores = rand(3, 20)
    bias = torch.tensor([0.7], dtype=torch.float64)

    def ours(s: Tensor, b: Tensor) -> Tensor:
        return weights_of(s, "sigmoid", backend, bias=b)

    agree(grads(ours, scores, bias), grads(lambda s, b: 1 / (1 + (-s - b).exp()), scores, bias))
    counted = weights_of(scores, "sigmoid", backend)
    assert torch.allclose(counted, 1 / (1 + 20 * (-scores).exp()))
    # The authors use a constant bias of −log n.
    constant = weights_of(scores, "sigmoid", backend, bias=-math.log(20))
    assert torch.allclose(counted, constant)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_equals_softmax_times_sigmoid_of_lse_minus_b(backend: str) -> None:
    q, k, v = (rand(2, 3, 9, 6, seed=i) for i in range(3))
    b = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)

    def gated(q: Tensor, b: Tensor) -> Tensor:
        out, lse = attnzoo.attention(q, k, v, return_lse=True, is_causal=True, backend="eager")
        return out * (lse - b[:, None]).sigmoid()[..., None]

    def ours(q: Tensor, b: Tensor) -> Tensor:
        return attnzoo.attention(q, k, v, "sink", b=b, is_causal=True, backend=backend)

    agree(grads(ours, q, b), grads(gated, q, b))


def cosformer_by_hand(q: Tensor, k: Tensor, v: Tensor, length: int, causal: bool) -> Tensor:
    """Compute equation 10 of the cosFormer paper, from features, by a loop over pairs of query and
    key."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for i in range(q.shape[2]):
        total = torch.zeros(q.shape[:2], dtype=q.dtype)
        for j in range(i + 1 if causal else k.shape[2]):
            w = (q[:, :, i] * k[:, :, j]).sum(-1)
            w = w * math.cos(math.pi / 2 * (i - j) / length)
            out[:, :, i] += w[..., None] * v[:, :, j]
            total = total + w
        out[:, :, i] /= total.masked_fill(total == 0, 1.0)[..., None]
    return out


@pytest.mark.parametrize("backend", [*BACKENDS, "linear"])
@pytest.mark.parametrize("causal", [False, True])
def test_cosformer_equals_its_pairwise_definition(causal: bool, backend: str) -> None:
    q, k, v = (rand(1, 2, 6, 4, seed=i) for i in range(3))
    options = dict(max_length=9, is_causal=causal, backend=backend)
    out = attnzoo.attention(q, k, v, "cosformer", **options)
    assert torch.allclose(out, cosformer_by_hand(q.relu(), k.relu(), v, 9, causal))
    out = attnzoo.attention(q, k, v, "cosformer", features="elu", scale=-0.7, **options)
    features = F.elu(-0.7 * q) + 1, F.elu(k) + 1
    assert torch.allclose(out, cosformer_by_hand(*features, v, 9, causal))


def test_cosformer_with_elu_features_has_gradients_where_relu_has_none() -> None:
    q, k, v = (-rand(1, 1, 6, 4, seed=i).abs() for i in range(3))
    q.requires_grad_()
    for features, dead in (("relu", True), ("elu", False)):
        out = attnzoo.attention(q, k, v, "cosformer", max_length=9, features=features)
        (grad,) = torch.autograd.grad((out * v).sum(), q)
        assert bool((grad == 0).all()) == dead


@pytest.mark.parametrize("backend", [*BACKENDS, "linear"])
def test_cosformer_is_invariant_to_scales(backend: str) -> None:
    """The output is unchanged if a query, all keys or all scores are scaled by a factor."""
    q, k, v = (rand(1, 2, 6, 4, seed=i) for i in range(3))
    sizes = torch.tensor([1e-6, 1e-3, 1.0, 10.0, 1e3, 1e6], dtype=torch.float64)[:, None]
    options = dict(max_length=16, backend=backend, is_causal=True)
    plain = attnzoo.attention(q, k, v, "cosformer", **options)
    for scaled in (
        attnzoo.attention(sizes * q, k, v, "cosformer", **options),
        attnzoo.attention(q, 1e-9 * k, v, "cosformer", **options),
        attnzoo.attention(q, k, v, "cosformer", scale=17.0, **options),
    ):
        assert torch.allclose(scaled, plain)


def test_cosformer_rows_of_zeros_are_zero_on_every_backend() -> None:
    q, k, v = (rand(1, 1, 3, 4, seed=i) for i in range(3))
    q[:, :, 1] = -1.0
    for backend in (*BACKENDS, "linear"):
        out = attnzoo.attention(q, k, v, "cosformer", max_length=4, backend=backend)
        assert torch.equal(out[:, :, 1], torch.zeros(1, 1, 4, dtype=torch.float64))


@pytest.mark.parametrize("backend", [*BACKENDS, "linear"])
@pytest.mark.parametrize("causal", [False, True])
def test_taylor_equals_its_pairwise_definition(causal: bool, backend: str) -> None:
    scores = 2 * rand(8, 8)
    w = 1 + scores + scores**2 / 2
    assert bool((w >= 0.5).all())
    w = w.tril() if causal else w
    actual = weights_of(scores, "taylor", backend, is_causal=causal)
    assert torch.allclose(actual, w / w.sum(-1, keepdim=True))


def test_taylor_of_higher_order_approaches_softmax() -> None:
    scores = rand(8, 20)
    errors = [
        float((weights_of(scores, "taylor", "tiled", order=p) - scores.softmax(-1)).abs().max())
        for p in (2, 4, 8, 12)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


def test_taylor_features_hold_each_product_once() -> None:
    """There are 153 features at D = 16, 2145 at D = 64, and ψ(q)·ψ(k) = 1 + q·k + (q·k)²/2."""
    q, k = rand(5, 16, seed=1), rand(5, 16, seed=2)
    forms = attnzoo.get_variant("taylor").forms(None, order=2)
    form = next(form for form in forms if isinstance(form, attnzoo.Linear))
    psi_q, psi_k = form.features(q, torch.arange(5)), form.features(k, torch.arange(5))
    assert psi_q.shape == (5, form.size(16)) == (5, 153)
    assert form.size(64) == 2145
    z = q @ k.T
    assert torch.allclose(psi_q @ psi_k.T, 1 + z + z**2 / 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_keeps_the_lowest_index_of_equal_scores(backend: str) -> None:
    scores = torch.tensor([[1.0, 2, 1, 1, 0], [0, 0, 0, 0, 0], [-1, -2, -3, -4, -5]]).double()
    e = math.e
    expected = torch.tensor(
        [[1 / (e + 2), e / (e + 2), 1 / (e + 2), 0, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0], [0.0] * 5]
    ).double()
    expected[2, :3] = torch.tensor([-1.0, -2, -3]).double().softmax(-1)
    assert torch.allclose(weights_of(scores, "topk", backend, top_k=3), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_selects_among_visible_keys_and_keeps_all_if_fewer(backend: str) -> None:
    scores = torch.tensor([[9.0, 1, 2, 3, 4]]).double()
    mask = torch.tensor([[False, True, True, False, True]])
    actual = weights_of(scores, "topk", backend, top_k=2, attn_mask=mask)
    expected = torch.tensor([[0, 0, 2.0, 0, 4]]).double()
    expected[0, [2, 4]] = expected[0, [2, 4]].softmax(-1)
    assert torch.allclose(actual, expected)
    everything = weights_of(scores, "topk", backend, top_k=7, attn_mask=mask)
    assert torch.allclose(everything, weights_of(scores, "softmax", attn_mask=mask))


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_dropped_keys_get_no_gradient(backend: str) -> None:
    scores = rand(5, 12)
    dropped = torch.ones_like(scores).scatter(-1, scores.topk(4).indices, 0.0) == 1
    out, gradient = grads(lambda s: weights_of(s, "topk", backend, top_k=4), scores)
    assert torch.equal(out == 0, dropped)
    assert torch.equal(gradient == 0, dropped)
