"""Scales and gains <= 0, and NaN or infinite scores, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from helpers.cases import CASES, ONE_SIGN, mark_expensive, params_of, rand
from helpers.coverage_table import FORWARD_ONLY, PAIRS, precise
from helpers.crossed import crossed

N = 12
every_pair = pytest.mark.parametrize(("variant", "backend"), PAIRS)
# Parameters that make a learned gain negative or zero.
GAINS = {
    "ssmax": {"s": torch.tensor([-0.4, 0.0]), "b": torch.tensor([-0.5, 0.0])},
    "asentmax": {
        "beta": torch.tensor([-0.6, 0.0]),
        "gamma": torch.tensor([0.5, 0.0]),
        "delta": torch.tensor([-1.0, 0.0]),
    },
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(N, N, dtype=torch.bool).tril(2)},
}


def qkv(dtype: torch.dtype) -> list[Tensor]:
    return [rand(1, 2, N, 8, seed=seed).to(dtype) for seed in (1, 2, 3)]


def results(
    variant: str, backend: str, inputs: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """Return the output, and the gradients of q, k and v if the backend has a backward."""
    trains = backend not in FORWARD_ONLY
    leaves = [x.clone().requires_grad_(trains) for x in inputs]
    out = attnzoo.attention(*leaves, variant, backend=backend, **options)
    if not trains:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, rand(*out.shape).to(out.dtype))]


def agrees(variant: str, backend: str, options: dict[str, Any]) -> None:
    """Assert that output and gradients agree with those of `eager` in fp64."""
    inputs = qkv(precise(backend))
    actual = results(variant, backend, inputs, options)
    exact = results(variant, "eager", [x.double() for x in inputs], options)
    for have, want in zip(actual, exact):
        tolerance = 1e-10 if have.dtype == torch.float64 else 2e-5
        assert torch.allclose(have.double(), want, rtol=tolerance, atol=tolerance)


def supported(variant: str, backend: str, options: dict[str, Any]) -> bool:
    plan = attnzoo.explain(*qkv(precise(backend)), variant, backend=backend, **options)
    return plan.chosen is not None


@every_pair
def test_keys_at_the_lowest_float_give_finite_gradients(variant: str, backend: str) -> None:
    """Such masks are usual. Their keys are visible, and have no weight beside other keys."""
    dtype = precise(backend)
    mask = torch.zeros(N, N, dtype=dtype)
    mask[:, 2] = torch.finfo(dtype).min
    options = {"attn_mask": mask, "is_causal": True, **params_of(variant)}
    if supported(variant, backend, options):
        assert all(x.isfinite().all() for x in results(variant, backend, qkv(dtype), options))


# ---- scales and gains that are not positive ---------------------------------------------------


@pytest.mark.parametrize(("variant", "backend", "mask"), crossed(PAIRS, MASKS))
def test_scale_may_be_negative_or_zero(variant: str, backend: str, mask: str) -> None:
    for scale in (-0.7, 0.0):
        options = {**MASKS[mask], "scale": scale, **params_of(variant)}
        if variant in ONE_SIGN:
            with pytest.raises(ValueError, match="scale must be above 0"):
                attnzoo.attention(*qkv(torch.float32), variant, backend=backend, **options)
        elif supported(variant, backend, options):
            agrees(variant, backend, options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("variant", "backend"), [pair for pair in PAIRS if pair.values[0] in GAINS]
)
def test_gain_may_be_negative_or_zero(variant: str, backend: str, mask: str) -> None:
    agrees(variant, backend, {**MASKS[mask], "scale": -0.4, **GAINS[variant]})


ANY_SCALE = pytest.mark.parametrize(
    "variant", mark_expensive(x for x in CASES if x not in ONE_SIGN)
)


@ANY_SCALE
def test_negative_scale_equals_negated_queries(variant: str) -> None:
    """The call has more than `FEW_SCORES` scores, so it does not run on `eager` on a CPU."""
    q, k, v = (rand(1, 2, 300, 8, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    options = {"is_causal": True, **params_of(variant)}
    out = attnzoo.attention(q, k, v, variant, scale=-0.7, **options)
    assert torch.allclose(out, attnzoo.attention(-q, k, v, variant, scale=0.7, **options))


@ANY_SCALE
def test_scale_below_the_smallest_fp32_number_is_zero(variant: str) -> None:
    q, k, v = (rand(1, 2, 300, 8, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    options = {"is_causal": True, **params_of(variant)}
    zero = attnzoo.attention(q, k, v, variant, scale=0.0, **options)
    for scale in (1e-46, -1e-50):
        out = attnzoo.attention(q, k, v, variant, scale=scale, **options)
        assert torch.allclose(out, zero, atol=1e-6)


# ---- scores that are NaN or infinite ----------------------------------------------------------

SETTINGS = [
    pytest.param(*pair.values, params, marks=pair.marks, id=f"{pair.id}-{i}")
    for pair in PAIRS
    for i, params in enumerate([params_of(pair.values[0]), *CASES[pair.values[0]].settings])
    if i == 0 or pair.values[1] in ("eager", "tiled")
]
every_setting = pytest.mark.parametrize(("variant", "backend", "params"), SETTINGS)


def spoil(x: Tensor, head: int, token: int, value: float) -> Tensor:
    x = x.clone()
    x[:, head, token] = value
    return x


def only_these_are_nan(out: Tensor, clean: Tensor, rows: Tensor) -> bool:
    """Return True if rows (bool [B, H, Nq]) of out are NaN and other rows equal those of clean.

    Other rows may differ by rounding, because thresholds of all rows are solved together.
    """
    atol = 1e-12 if out.dtype == torch.float64 else 1e-6
    others = torch.allclose(out[~rows], clean[~rows], rtol=0, atol=atol)
    return bool(out[rows].isnan().all()) and others


@every_setting
def test_nan_in_gives_nan_out(variant: str, backend: str, params: dict[str, Any]) -> None:
    """A row is NaN if its query is NaN or if it sees a NaN key."""
    q, k, v = qkv(precise(backend))
    options = {"is_causal": True, "backend": backend, **params}
    clean = attnzoo.attention(q, k, v, variant, **options)
    rows = torch.zeros(1, 2, N, dtype=torch.bool)
    rows[:, 0, 4] = rows[:, 1, 5:] = True
    one = spoil(q, 0, 4, torch.nan), spoil(k, 1, 5, torch.nan), v
    assert only_these_are_nan(attnzoo.attention(*one, variant, **options), clean, rows)
    # Key 0 is the only key of the first row, and all rows see it.
    first = attnzoo.attention(q, spoil(k, 1, 0, torch.nan), v, variant, **options)
    assert only_these_are_nan(
        first, clean, torch.tensor([False, True]).view(1, 2, 1).expand(1, 2, N)
    )


@pytest.mark.parametrize("backend", ["sdpa", "eager", "tiled"])
@pytest.mark.parametrize("keys", [1, 3, 17])
def test_nan_in_gives_nan_out_at_any_length(keys: int, backend: str) -> None:
    """Torch's fused CPU kernel treats NaN differently in full SIMD vectors and in remainders."""
    mask = torch.ones(keys, keys, dtype=torch.bool).tril()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        q, k, v = (rand(1, 2, keys, 8, seed=seed).to(dtype) for seed in (1, 2, 3))
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            call = {"backend": backend, **options}
            clean = attnzoo.attention(q, k, v, **call)
            for token in {0, keys - 1}:
                rows = torch.zeros(1, 2, keys, dtype=torch.bool)
                rows[:, 0, token] = True
                spoiled = attnzoo.attention(spoil(q, 0, token, torch.nan), k, v, **call)
                assert only_these_are_nan(spoiled, clean, rows)
                spoiled = attnzoo.attention(spoil(q, 0, token, torch.inf), k, v, **call)
                assert only_these_are_nan(spoiled, clean, rows)
                rows = torch.zeros(1, 2, keys, dtype=torch.bool)
                rows[:, 1, (token if options else 0) :] = True
                spoiled = attnzoo.attention(q, spoil(k, 1, token, torch.nan), v, **call)
                assert only_these_are_nan(spoiled, clean, rows)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "tiled"])
def test_hidden_nan_key_changes_no_row(backend: str) -> None:
    q, k, v = qkv(torch.float32)
    for mask in (torch.arange(N).view(1, 1, 1, N) != 3, torch.arange(N).expand(1, 1, N, N) != 3):
        clean = attnzoo.attention(q, k, v, attn_mask=mask, backend=backend)
        for value in (torch.nan, torch.inf, -torch.inf):
            hidden = spoil(k, 0, 3, value)
            assert torch.equal(
                attnzoo.attention(q, hidden, v, attn_mask=mask, backend=backend), clean
            )
    # A row without visible keys is 0, even if its query is NaN.
    mask = torch.ones(1, 1, N, N, dtype=torch.bool)
    mask[:, :, 4] = False
    out = attnzoo.attention(spoil(q, 0, 4, torch.nan), k, v, attn_mask=mask, backend=backend)
    assert torch.equal(out[:, :, 4], torch.zeros(1, 2, 8))


@every_setting
def test_infinite_score_gives_nan_except_in_sigmoid(
    variant: str, backend: str, params: dict[str, Any]
) -> None:
    """Normalized weights are ∞/∞ = NaN, as in torch's softmax. Sigmoid gives σ(∞) = 1.

    Without a bound or a normalizer, a weight and the output are infinite.
    """
    q, k, v = (x.abs() + 0.5 for x in qkv(precise(backend)))
    options = {"is_causal": True, "backend": backend, **params}
    out = attnzoo.attention(q, spoil(k, 1, 5, torch.inf), v, variant, **options)
    clean = attnzoo.attention(q, k, v, variant, **options)
    rows = torch.zeros(1, 2, N, dtype=torch.bool)
    rows[:, 1, 5:] = True
    if variant == "sigmoid":
        assert bool(out.isfinite().all())
        assert torch.equal(out[~rows], clean[~rows])
    elif variant in ("relu", "screening", "silu"):
        assert not bool(out[rows].isfinite().any())
        assert torch.equal(out[~rows], clean[~rows])
    else:
        assert only_these_are_nan(out, clean, rows)


# ---- masks with the lowest fp32 number --------------------------------------------------------

LEAST = torch.finfo(torch.float32).min
lse_backends = pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "tiled",
        *(pytest.param(x, marks=pytest.mark.interpreter) for x in ("flash", "decode")),
    ],
)


@lse_backends
def test_lse_is_the_lowest_float_if_all_scores_of_the_row_are(backend: str) -> None:
    """LEAST plus a score is LEAST in fp32. Kernels must avoid LEAST · log2(e), which overflows."""
    q, k, v = qkv(torch.float32)
    mask = torch.zeros(1, 1, N, N)
    mask[:, :, 3] = LEAST
    mask[:, :, 5] = -torch.inf
    out, lse = attnzoo.attention(q, k, v, attn_mask=mask, backend=backend, return_lse=True)
    assert torch.equal(lse[:, :, 3], torch.full((1, 2), LEAST))
    assert torch.equal(lse[:, :, 5], torch.full((1, 2), -torch.inf))
    assert torch.allclose(out[:, :, 3], v.mean(2), atol=1e-6)
    others = [i for i in range(N) if i not in (3, 5)]
    assert torch.allclose(lse[:, :, others], (q @ k.mT * 8**-0.5).logsumexp(-1)[:, :, others])


@pytest.mark.interpreter
def test_gradients_of_lse_are_finite_with_a_row_at_the_lowest_float() -> None:
    mask = torch.zeros(1, 1, N, N)
    mask[:, :, 3] = LEAST
    gradients = []
    for backend in ("eager", "flash"):
        leaves = [x.requires_grad_() for x in qkv(torch.float32)]
        _, lse = attnzoo.attention(*leaves, attn_mask=mask, backend=backend, return_lse=True)
        others = torch.arange(N) != 3
        gradients.append(torch.autograd.grad(lse[:, :, others].sum(), leaves[:2]))
        (gradient,) = torch.autograd.grad(
            attnzoo.attention(*leaves, attn_mask=mask, backend=backend, return_lse=True)[1].sum(),
            leaves[:1],
        )
        assert bool(gradient.isfinite().all())
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_entropy_is_right_if_all_scores_of_a_row_are_the_lowest_float(
    backend: str, differentiable: bool
) -> None:
    """The 33 scores of a row are LEAST. In fp32 their logsumexp, LEAST + log 33, is LEAST."""
    q, k, v = (rand(1, 2, 33, 8, seed=i, dtype=torch.float32) for i in (1, 2, 3))
    mask = torch.zeros(1, 1, 33, 33)
    mask[:, :, 7] = LEAST
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"backend": backend, "differentiable": differentiable}
    out = attnzoo.attention(*leaves, "adaptive_temperature", attn_mask=mask, **options)
    assert torch.allclose(out[:, :, 7], v.mean(2), atol=1e-6)
    gradients = torch.autograd.grad(out.sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    bare = attnzoo.attention(*exact, "adaptive_temperature", **options)
    rows = torch.arange(33) != 7
    assert torch.allclose(out[:, :, rows].double(), bare[:, :, rows], atol=1e-5)
    assert all(bool(x.isfinite().all()) for x in gradients)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("variant", CASES)
def test_mask_without_queries_gives_an_empty_output(variant: str, backend: str) -> None:
    for keys in (0, 1, 5):
        for mask_keys in {1, keys}:
            q, k, v = (rand(2, 2, n, 8, seed=n).float().requires_grad_() for n in (0, keys, keys))
            mask = torch.ones(1, 1, 0, mask_keys, dtype=torch.bool)
            options = {"attn_mask": mask, "backend": backend, **params_of(variant)}
            out = attnzoo.attention(q, k, v, variant, **options)
            assert out.shape == (2, 2, 0, 8)
            out.sum().backward()


# ---- cancellation in sums of features ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_is_accurate_for_nearly_orthogonal_queries_and_keys(
    is_causal: bool, dtype: torch.dtype
) -> None:
    """|q||k| is 10³ to 10⁶ times |q·k|, so large products of features cancel in the sums."""
    turn = torch.linalg.qr(rand(16, 16, seed=4)).Q
    half = torch.arange(16) < 8
    q, k, v = (rand(1, 2, 1024, 16, seed=seed) for seed in (1, 2, 3))
    q, k = 1e4 * (q * half) @ turn, (k * ~half) @ turn + 1e-5 * rand(1, 2, 1024, 16, seed=5)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = attnzoo.attention(*leaves, "taylor", is_causal=is_causal, backend="linear")
    want = attnzoo.attention(*exact, "taylor", is_causal=is_causal, backend="eager")
    eps = torch.finfo(dtype).eps
    assert torch.allclose(out.double(), want, rtol=eps, atol=1e-6)
    actual, gradients = (
        torch.autograd.grad(x.square().sum(), y) for x, y in ((out, leaves), (want, exact))
    )
    for have, gradient in zip(actual, gradients, strict=True):
        scale = float(gradient.abs().max())
        assert float((have.double() - gradient).abs().max()) < 4 * eps * scale


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_the_largest_power_of_relu_is_finite(backend: str) -> None:
    """Scores are up to 200, and 1000 for keys that are not visible, whose power overflows."""
    q, v = torch.full((1, 1, 2, 4), 1.0), rand(1, 1, 2, 4).float()
    k = torch.tensor([200.0, 1000.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4).contiguous()
    power = torch.tensor(16.0, requires_grad=True)
    leaves = [x.requires_grad_() for x in (q, k, v)] + [power]
    mask = torch.tensor([True, False])
    out = attnzoo.attention(
        *leaves[:3], "relu", power=power, scale=0.25, attn_mask=mask, backend=backend
    )
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum() / 1e30, leaves))
    expected = 200.0**16 * v[:, :, :1].double().expand(1, 1, 2, 4)
    assert torch.allclose(out.double(), expected, rtol=1e-4)
    for wrong in (17.0, 0.0, torch.tensor([1.0, 17.0])):
        with pytest.raises(ValueError, match="relu's power must be above 0 and at most 16"):
            attnzoo.attention(*qkv(torch.float32), "relu", power=wrong)
