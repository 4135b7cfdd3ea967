"""Edge cases of flash: large scores, queries without keys, empty tensors, thresholds and NaN."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_flash import factors
from test_threshold import ALPHAS, SCORES, bisected
from torch import Tensor

import attnzoo
from attnzoo.backends.triton.flash import operators as flash_ops
from helpers.agreement import Inputs, by_backend, disagreements, make
from helpers.cases import NO_LSE, VARIANTS, params_of, rand
from helpers.coverage_table import FIRST, FLASH
from helpers.kernel_paths import quick_variants

slow = partial(pytest.param, marks=pytest.mark.slow)

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

every_variant = pytest.mark.parametrize(
    "variant", quick_variants([v for v in FLASH if v in VARIANTS])
)
once_per_normalization = pytest.mark.parametrize(
    "variant", [v if v in FIRST.values() else slow(v) for v in FLASH if v in VARIANTS]
)


def setting(variant: str, **others: Any) -> dict[str, Any]:
    """A case with batch 1 and the first value of each other factor. ``others`` override these."""
    return {**{name: levels[0] for name, levels in factors(variant)}, "batch": 1, **others}


# ---- large scores -----------------------------------------------------------------------------


def scores_around(inputs: Inputs, score: float) -> Inputs:
    """Set one coordinate of q and k so that all scores are near ``score``."""
    q, k = inputs.leaves["q"], inputs.leaves["k"]
    q[..., 0], k[..., 0] = q.shape[-1] ** 0.5, score
    for x in (inputs.leaves["v"], inputs.do):
        x /= 64  # fp16 can then hold results with weights such as (2·80 − 1)²
    return inputs


@pytest.mark.parametrize(
    ("score", "dtype"),
    [
        (-200.0, torch.float32),
        (80.0, torch.float16),
        slow(-200.0, torch.float16),
        slow(80.0, torch.float32),
    ],
)
@every_variant
def test_scores_far_from_zero_agree(variant: str, score: float, dtype: torch.dtype) -> None:
    case = setting(variant, shape=(17, 40), dtype=dtype, lse=variant not in NO_LSE)
    case.update(params="default", span="causal")
    assert disagreements(variant, "flash", scores_around(make(variant, case), score)) == []


@pytest.mark.parametrize("order", [2, 4])
def test_a_polynomial_of_large_scores_does_not_overflow_fp16(order: int) -> None:
    """At z = 400, 1 + z + z²/2 = 80401 exceeds fp16. The running maximum grows after 50 keys."""
    inputs = make("taylor", setting("taylor", shape=(17, 100), dtype=torch.float16), seed=3)
    scores_around(inputs, 400.0).leaves["k"][..., :50, 0] = 0.0
    inputs.options["order"] = order
    assert disagreements("taylor", "flash", inputs) == []


# ---- wide heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [slow((136, 200)), (256, 24)])
@once_per_normalization
def test_wide_heads_in_fp32_agree_with_the_definition(variant: str, dims: tuple[int, int]) -> None:
    case = setting(variant, shape=(17, 70), dims=dims, span="causal", lse=variant not in NO_LSE)
    assert disagreements(variant, "flash", make(variant, case)) == []


# ---- queries without keys ----------------------------------------------------------------------


@once_per_normalization
def test_queries_without_keys_give_zeros_and_zero_gradients(variant: str) -> None:
    """The mask hides all keys of queries 50 and 64 to 127. Causality hides those of 0 to 19."""
    q, k, v = (rand(1, 1, n, 16, seed=n).float().requires_grad_() for n in (140, 120, 121))
    v = v[:, :, 1:]
    mask = torch.ones(140, 120, dtype=torch.bool)
    mask[50] = mask[64:128] = False
    empty = [*range(20), 50, *range(64, 128)]
    lse: Any = variant not in NO_LSE
    out: Any = attnzoo.attention(
        q, k, v, variant, attn_mask=mask, is_causal=True, backend="flash", return_lse=lse,
        **params_of(variant),
    )  # fmt: skip
    if lse:
        out, lse = out
        assert bool((lse[:, :, empty] == float("-inf")).all())
        assert bool(lse[:, :, 51].isfinite().all())
        out = out + lse.masked_fill(lse == float("-inf"), 0.0)[..., None]
    assert bool((out[:, :, empty] == 0).all())
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert bool((dq[:, :, empty] == 0).all())
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    assert bool((dv[:, :, 0] != 0).all())


@every_variant
def test_empty_tensors_give_zeros(variant: str) -> None:
    for batch, queries, keys in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (rand(batch, 2, n, 16).float().requires_grad_() for n in (queries, keys, keys))
        out = attnzoo.attention(q, k, v, variant, backend="flash", **params_of(variant))
        assert out.shape == (batch, 2, queries, 16)
        assert bool((out == 0).all())
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert bool((gradient == 0).all())
    if variant not in NO_LSE:
        q, k = rand(2, 2, 5, 16).float(), rand(2, 2, 0, 16).float()
        options: Any = {"return_lse": True, **params_of(variant)}
        _, lse = attnzoo.attention(q, k, k, variant, backend="flash", **options)
        assert torch.equal(lse, torch.full((2, 2, 5), float("-inf")))


def test_strides_of_inputs_and_gradients_do_not_matter() -> None:
    """q is transposed, k and v are expanded over heads, and dO is an expanded scalar."""
    q = rand(1, 2, 8, 17, seed=1).float().mT
    k, v = (rand(1, 1, 17, 8, seed=i).float().expand(1, 2, 17, 8) for i in (2, 3))
    results = []
    for backend in ("flash", "eager"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attnzoo.attention(*leaves, "sink", backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    for have, want in zip(*results, strict=True):
        assert have.shape == want.shape
        assert torch.allclose(have, want, atol=1e-5)


@pytest.mark.parametrize("variant", ["sink", pytest.param("entmax", marks=pytest.mark.slow)])
def test_results_are_deterministic(variant: str) -> None:
    inputs = make(variant, setting(variant, shape=(70, 70), heads="gqa", span="causal"))
    first, second = (by_backend(variant, "flash", inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- thresholds -------------------------------------------------------------------------------


def weights(scores: Tensor, alpha: float | Tensor, backend: str) -> Tensor:
    """Entmax weights (R, n) of scores (R, n). q and v are identity matrices, k is scoresᵀ."""
    rows, n = scores.shape
    visible = scores != float("-inf")
    q, eye = torch.eye(rows)[None, None], torch.eye(n)[None, None]
    k = scores.masked_fill(~visible, 0.0).T[None, None].float()
    return attnzoo.attention(
        q, k, eye, "entmax", alpha=alpha, scale=1.0, attn_mask=visible, backend=backend
    )[0, 0].double()


# Most cases of `decode` are slow; test_threshold has the same scores for `tiled`.
@pytest.mark.parametrize(
    ("alpha", "n", "backend"),
    [
        pytest.param(
            alpha, n, backend,
            marks=[] if n == 5 and (backend == "flash" or alpha == 1.5) else [pytest.mark.slow],
        )
        for alpha in ALPHAS for n in (1, 5, 128) for backend in ("flash", "decode")
    ],
)  # fmt: skip
def test_threshold_weights_agree_with_bisection_in_fp64(alpha: float, n: int, backend: str) -> None:
    alpha = float(torch.tensor(alpha))
    kinds = {name: make(n).float().double() for name, make in SCORES.items()}
    by_kind = weights(torch.cat(list(kinds.values())), alpha, backend).split(3)
    for w, (name, scores) in zip(by_kind, kinds.items(), strict=True):
        seen = (scores != float("-inf")).any(-1, keepdim=True)
        assert float((w.sum(-1, keepdim=True) - 1.0 * seen).abs().max()) <= 1e-5, name
        # τ is as large as the scores, so its rounding error in fp32 grows with them.
        top = float(scores.masked_fill(scores == float("-inf"), 0.0).max())
        allowed = 1e-5 + torch.finfo(torch.float32).eps / 2 * abs(top)
        exact = bisected(scores, alpha).masked_fill(~seen, 0.0)
        assert float((w - exact).abs().max()) <= allowed, name


@pytest.mark.parametrize("backend", ["flash", "decode"])
@pytest.mark.parametrize("variant", quick_variants(["sparsemax", "entmax", "asentmax"]))
@pytest.mark.parametrize("score", [slow(1e5), -1e5, slow(3e6), 1e8, -1e9])
def test_large_equal_scores_share_the_weight(variant: str, score: float, backend: str) -> None:
    """At |s| ≥ 1e8 no fp32 number lies between s − 1/(α−1) and s, where the threshold is."""
    q, k = torch.ones(1, 1, 1, 1), torch.full((1, 1, 300, 1), score)
    v = rand(1, 1, 300, 8).float()
    out = attnzoo.attention(q, k, v, variant, scale=1.0, backend=backend)
    assert torch.allclose(out[0, 0, 0], v.mean(2)[0, 0], atol=1e-5)
    # A float mask with the value `score` gives the same result.
    mask = torch.full((1, 300), score)
    out = attnzoo.attention(q, k * 0, v, variant, attn_mask=mask, backend=backend)
    assert torch.allclose(out[0, 0, 0], v.mean(2)[0, 0], atol=1e-5)


BLOCK_SPARSE = [
    pytest.param("entmax", 16, {"is_causal": True}, id="entmax-causal"),
    slow("sparsemax", 16, {}, id="sparsemax"),
    slow("asentmax", 16, {"window": (150, 20)}, id="asentmax-window"),
    slow("entmax", 128, {"alpha": torch.tensor([1.3, 1.6])}, id="alphas-small-tiles"),
]


@pytest.mark.parametrize(("variant", "dim", "options"), BLOCK_SPARSE)
def test_blocks_without_weight_are_skipped(
    variant: str, dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query attends to one cluster of 110 keys. Blocks within other clusters are skipped."""
    n, maps = 330, []

    def spy(original: Any = flash_ops.flash_solve, **operands: Any) -> Any:
        solved = original(**operands)
        maps.append(solved.live)
        return solved

    monkeypatch.setattr(flash_ops, "flash_solve", spy)
    cluster = torch.arange(n) // 110
    # Queries of cluster c attend to cluster c if causal, and to cluster 2 − c otherwise.
    target = cluster if "is_causal" in options else 2 - cluster
    shapes = (1, 2, n, dim), (1, 1, n, dim), (1, 1, n, dim)
    q, k, v = (rand(*shape, seed=i).float() for i, shape in enumerate(shapes))
    q[..., :3] = torch.nn.functional.one_hot(target, 3) * 20
    k[..., :3] = torch.nn.functional.one_hot(cluster, 3) * 20
    arguments = {"scale": 0.25, "enable_gqa": True, **options}
    do = rand(*q.shape, seed=4).float()
    inputs = Inputs({"q": q, "k": k, "v": v}, arguments, do, do[..., 0])
    assert disagreements(variant, "flash", inputs) == []
    assert 0 < float(maps[0].float().mean()) < 0.7


# ---- masks, lse, NaN and strides -------------------------------------------------------------


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "entmax"])
def test_the_lowest_fp32_number_in_a_float_mask_is_visible(variant: str) -> None:
    """This number is a common fill value. Its product with log2 e must not overflow to −∞."""
    q, k, v = (rand(1, 2, 40, 16, seed=i).float() for i in range(3))
    mask = torch.zeros(1, 1, 40, 40)
    mask[..., 7, :] = mask[..., :, 5] = torch.finfo(torch.float32).min
    outs = [
        attnzoo.attention(q, k, v, variant, attn_mask=mask, backend=backend)
        for backend in ("flash", "eager")
    ]
    assert torch.allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("backend", ["flash", "tiled"])
def test_lse_gradient_of_queries_without_keys_is_ignored(backend: str) -> None:
    """Without keys, lse and the gradient of lse² are −∞. Gradients of q, k and v stay correct."""
    leaves = [rand(1, 2, n, 8, seed=n).float().requires_grad_() for n in (20, 10, 11)]
    q, k, v = leaves[0], leaves[1], leaves[2][:, :, 1:]
    gradients = []
    for name in (backend, "eager"):
        out, lse = attnzoo.attention(q, k, v, backend=name, is_causal=True, return_lse=True)
        assert bool((lse[:, :, :10] == float("-inf")).all())
        loss = (
            out.sum() + (lse**2).sum()
            if name == backend
            else out.sum() + (lse[:, :, 10:] ** 2).sum()
        )
        gradients.append(torch.autograd.grad(loss, leaves))
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, atol=1e-4)


@pytest.mark.parametrize("backend", ["flash", "tiled"])
@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("variant", ["softmax", "sink"])
def test_gradients_agree_with_low_mask_entries(variant: str, low: float, backend: str) -> None:
    """The maximum m and log Z must be stored separately: at m = −1e9 their fp32 sum is m."""
    if variant == "sink":
        low = -1e3  # lower entries would leave all weight to the sink
    q, k, v = (rand(1, 2, 70, 16, seed=i).float().requires_grad_() for i in range(3))
    mask = torch.zeros(1, 1, 70, 70)
    mask[:, :, :5] = low
    gradients = []
    for name in (backend, "eager"):
        params = {"b": -1e3} if variant == "sink" else {}
        out = attnzoo.attention(q, k, v, variant, attn_mask=mask, backend=name, **params)
        gradients.append(torch.autograd.grad(out[:, :, :5].sum(), (v, k)))
    assert torch.allclose(gradients[0][0], gradients[1][0], rtol=1e-3, atol=1e-6)
    assert torch.allclose(gradients[0][1], gradients[1][1], atol=1e-3)


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", ["flash", "tiled", "eager"])
def test_gradient_of_lse_with_low_mask_entries_sums_to_1(backend: str, low: float) -> None:
    """lse is rounded to m, but its gradient, the weights, still sums to 1 over the keys."""
    q, k, v = (rand(1, 2, 70, 16, seed=i).float() for i in range(3))
    q[..., 0], k[..., 0] = 1.0, 0.0
    k.requires_grad_()  # k[j, 0] is added to all scores of key j
    mask = torch.zeros(1, 1, 70, 70)
    mask[:, :, :5] = low
    options = {"attn_mask": mask, "scale": 1.0, "backend": backend, "return_lse": True}
    _, lse = attnzoo.attention(q, k, v, **options)
    gradient = torch.autograd.grad(lse[:, :, :5].sum(), k)[0][..., 0].sum(2)
    assert torch.allclose(gradient, torch.full((1, 2), 5.0), atol=1e-4)


# Triton's interpreter computes maxima with numpy, which warns if all values are NaN.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@every_variant
def test_nan_in_a_query_only_affects_its_own_output(variant: str) -> None:
    """The query's output must be NaN, although a maximum over its scores may ignore NaN."""
    q, k, v = (rand(1, 2, 70, 16, seed=i).float() for i in range(3))
    q[:, :, 3] = float("nan")
    out = attnzoo.attention(q, k, v, variant, backend="flash", **params_of(variant))
    assert bool(out[:, :, 3].isnan().all())
    assert bool(out[:, :, 4:].isfinite().all())


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize(
    ("backend", "variant"), [("flash", "softmax"), ("flash", "entmax"), ("decode", "softmax")]
)
def test_nan_in_a_mask_only_affects_its_row(backend: str, variant: str) -> None:
    q, k, v = (rand(1, 1, n, 16, seed=n).float() for n in (5, 70, 70))
    mask = rand(5, 70, seed=1).float()
    mask[2, 40] = mask[0, 69] = float("nan")  # causality hides the second from its query
    out = attnzoo.attention(q, k, v, variant, attn_mask=mask, is_causal=True, backend=backend)
    assert bool(out[:, :, 2].isnan().all())
    assert bool(out[:, :, [0, 1, 3, 4]].isfinite().all())


@pytest.mark.parametrize("b", [1e4, 1e6])
@pytest.mark.parametrize("computed", ["flash", "tiled"])
def test_gradient_of_lse_agrees_with_a_large_sink(computed: str, b: float) -> None:
    gradients = []
    for backend in (computed, "eager"):
        q, k, v = (rand(1, 2, 40, 16, seed=i).float().requires_grad_() for i in range(3))
        _, lse = attnzoo.attention(q, k, v, "sink", b=b, backend=backend, return_lse=True)
        gradients.append(torch.autograd.grad(lse.sum(), (q, k)))
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, atol=1e-5)


def test_unaligned_strides_do_not_matter() -> None:
    """The inputs are slices of rows of 37 numbers, so they are copied to aligned rows."""
    wide = [rand(1, 2, 70, 37, seed=i).float() for i in range(4)]
    for variant in ("entmax", "sink"):
        results = []
        for backend in ("flash", "eager"):
            leaves = [x.clone().requires_grad_() for x in wide[:3]]
            q, k, v = (x[..., :24] for x in leaves)
            out = attnzoo.attention(q, k, v, variant, is_causal=True, backend=backend)
            results.append([out, *torch.autograd.grad(out, leaves, wide[3][..., :24])])
        for have, want in zip(*results, strict=True):
            assert torch.allclose(have, want, atol=2e-5)
