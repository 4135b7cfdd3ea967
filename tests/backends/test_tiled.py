"""The backend tiled: block sizes, lse, memory, function transforms and NaN."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

import attnzoo
from attnzoo.backends import BACKENDS
from attnzoo.backends.tiled import blocks
from attnzoo.core.activations import EXP
from attnzoo.core.arguments import check_call
from attnzoo.core.call import Call
from attnzoo.core.distance import LOGARITHMIC
from helpers.agreement import disagreements, dropout_factors, every_term, make
from helpers.cases import (
    CASES,
    MARKED,
    NO_LSE,
    NO_SCORE,
    VARIANTS,
    WITH_FORMS,
    mark_expensive,
    params_of,
    rand,
)
from helpers.kernel_paths import quick_variants

SIZES = (90, 3, 1), (300, 5, 2), (4000, 128, 8)


@pytest.fixture(params=SIZES, ids=str)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, rows, heads = request.param
    monkeypatch.setattr(blocks, "SCORES", scores)
    monkeypatch.setattr(blocks, "ROWS", rows)
    monkeypatch.setattr(blocks, "HEADS", heads)


OTHERS = mark_expensive(v for v in VARIANTS if v not in WITH_FORMS)
QUICK = [*quick_variants(WITH_FORMS, ("pairwise", "linear")), *OTHERS]


CALLS = ("gqa", "causal"), ("mqa", "pair"), ("mha", "window")


@pytest.mark.parametrize(
    ("small_blocks", "heads", "span"),
    [
        pytest.param(size, *call, marks=[] if i == j else [pytest.mark.slow])
        for i, size in enumerate(SIZES)
        for j, call in enumerate(CALLS)
    ],
    indirect=["small_blocks"],
)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("variant", QUICK)
def test_any_block_size_agrees_with_the_definition(variant: str, heads: str, span: str) -> None:
    """Outputs and all gradients agree if queries, heads and batch entries are split into blocks."""
    inputs = make(variant, every_term(variant, heads, span))
    keep = dropout_factors(variant, "tiled", inputs)
    assert disagreements(variant, "tiled", inputs, keep=keep) == []


def make_call(heads: int, kv_heads: int, **options: Any) -> Call:
    q, k = rand(2, heads, 23, 4), rand(2, kv_heads, 31, 4)
    return check_call(q, k, k, enable_gqa=True, **options)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 2)}], ids=str)
def test_blocks_cover_each_visible_score_once(kv_heads: int, options: dict[str, Any]) -> None:
    call = make_call(4, kv_heads, **options)
    times = torch.zeros(2, 4, 23, 31, dtype=torch.long)
    for block in blocks.blocks(call):
        part = times[block.batches, block.heads, block.rows, block.keys]
        part += 1
        assert (block.call.batch, block.call.heads) == part.shape[:2]
        assert (block.call.queries, block.call.keys) == part.shape[2:]
        # A block has whole GQA groups of query heads, and `kv` selects their key/value heads.
        assert block.call.heads % call.group == 0
        flat = torch.arange(2 * kv_heads).view(2, kv_heads)
        heads = flat[
            block.batches, block.heads.start // call.group : block.heads.stop // call.group
        ]
        assert torch.equal(flat.flatten()[block.kv], heads.flatten())
        # A block sees the same keys as the corresponding part of the whole call.
        seen = call.visible.expand(2, 4, 23, 31)
        seen = seen[block.batches, block.heads, block.rows, block.keys]
        assert torch.equal(block.call.visible.expand(seen.shape), seen)
    assert int(times.max()) == 1
    assert bool(times[call.visible.expand(2, 4, 23, 31)].all())


def expected_gain(variant: str, s: Tensor) -> Tensor:
    """Gain (..., 5, 1) of a causal call with logits ``s`` (..., 5, 5), from its formula."""
    log_n = torch.arange(1, 6, dtype=torch.float64).log()[:, None]
    if variant == "ssmax":
        return 0.168 * log_n
    if variant == "log_n":
        return log_n / math.log(512)
    if variant == "adaptive_temperature":
        p = s.softmax(-1)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1, keepdim=True)
        beta = torch.from_numpy(np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], entropy.numpy()))
        assert bool((beta > 1).any())
        return torch.where(entropy > 0.5, beta.clamp(min=1), 1.0)
    # topk has no gain, and with top_k=5 from `CASES` it keeps all five keys.
    assert variant in ("softmax", "sink", "topk", "top_p")
    return torch.ones_like(log_n)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v not in NO_LSE and not attnzoo.get_variant(v).by_position]
)
def test_lse_does_not_include_the_sink(variant: str, backend: str) -> None:
    q, k, v = rand(2, 2, 7, 6, seed=1), rand(2, 2, 5, 6, seed=2), rand(2, 2, 5, 6, seed=3)
    params = params_of(variant)
    out, lse = attnzoo.attention(
        q, k, v, variant, is_causal=True, return_lse=True, backend=backend, **params
    )
    assert lse.shape == (2, 2, 7)
    assert torch.equal(lse[..., :2], torch.full((2, 2, 2), float("-inf"), dtype=torch.float64))
    s = (q @ k.mT / 6**0.5)[:, :, 2:]
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    gained = expected_gain(variant, s.masked_fill(later, float("-inf"))) * s
    weights = attnzoo.attention_weights(q, k, v, variant, is_causal=True, **params)[:, :, 2:]
    expected = gained.masked_fill(weights == 0, float("-inf")).logsumexp(-1)
    assert torch.allclose(lse[..., 2:], expected)
    plain = attnzoo.attention(q, k, v, variant, is_causal=True, backend=backend, **params)
    assert torch.equal(out, plain)


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["tiled", "flash"])
@pytest.mark.parametrize("low", [-1e9, -3e38, 0.0])
def test_gradients_of_lse_beside_a_sink_far_above_the_scores(low: float, backend: str) -> None:
    leaves = [rand(1, 2, n, 16, seed=n).float().requires_grad_() for n in (5, 40)]
    b = torch.tensor([200.0, 0.0 if low else -200.0], requires_grad=True)
    mask, weights = torch.full((40,), low), rand(1, 2, 5, seed=3).float()
    gradients = []
    for name in (backend, "eager"):
        q, k = leaves
        out, lse = attnzoo.attention(
            q, k, k, "sink", b=b, attn_mask=mask, return_lse=True, backend=name
        )
        loss = (lse * weights).sum() + out.square().sum()
        gradients.append(torch.autograd.grad(loss, (*leaves, b)))
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_lse_of_queries_without_keys_has_no_gradient(backend: str) -> None:
    q, k, v = (rand(1, 2, 4, 6, seed=i).requires_grad_() for i in range(3))
    mask = torch.tensor([True, True, False, True])[:, None].expand(4, 4)
    _, lse = attnzoo.attention(q, k, v, attn_mask=mask, return_lse=True, backend=backend)
    assert torch.equal(lse[:, :, 2], torch.full((1, 2), float("-inf"), dtype=torch.float64))
    gradients = torch.autograd.grad(lse, (q, k), torch.ones_like(lse))
    assert torch.equal(gradients[0][:, :, 2], torch.zeros(1, 2, 6, dtype=torch.float64))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_lse_is_fp32_for_low_precision_and_ignores_dropout() -> None:
    q, k, v = (rand(1, 2, 9, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    for backend in ("eager", "tiled"):
        out, lse = attnzoo.attention(q, k, v, return_lse=True, dropout_p=0.5, backend=backend)
        assert out.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        exact = (q.double() @ k.double().mT / 8**0.5).logsumexp(-1)
        assert torch.allclose(lse.double(), exact, atol=1e-5)


@pytest.mark.parametrize("variant", QUICK)
def test_memory_is_linear(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation, forward or backward, allocates more than n × max(ROWS, features) numbers."""
    n, rows = (64 if CASES[variant].expensive else 128), 16
    monkeypatch.setattr(blocks, "SCORES", rows * n)
    monkeypatch.setattr(blocks, "ROWS", rows)
    params = params_of(variant, n)
    q, k, v = (rand(1, 1, n, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        out = attnzoo.attention(q, k, v, variant, backend="tiled", is_causal=True, **params)
        out.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in seen.events())  # bytes
    features = 45 if variant == "taylor" else 16
    # int64 has 8 bytes. A sort returns fp32 values too, with 4 bytes.
    size = 12 if variant == "top_p" else 8
    assert 0 < largest <= size * max(rows, features) * n


@pytest.mark.parametrize("p", [1e-46, 0.28925, 0.83125, 0.99])
def test_a_selection_by_weight_keeps_the_keys_of_the_definition(p: float) -> None:
    """With many ties, queries without keys and weights that underflow."""
    s = (2 * rand(1, 2, 60, 70, seed=1)).round()
    s[:, :, 3], s[:, :, 4] = float("-inf"), s[:, :, 4] * 1e4
    s[:, :, 5, 7:] = float("-inf")
    before = s.sort(-1, descending=True).values.softmax(-1).cumsum(-1)
    assert not bool(((before - p).abs() < 1e-9).any())
    q, k = torch.zeros(1, 2, 60, 4, dtype=torch.float64), torch.zeros(1, 2, 70, 4).double()
    inputs = s, torch.eye(70).double().expand(1, 2, 70, 70)
    results = []
    for backend in ("eager", "tiled"):
        mask, v = (x.detach().clone().requires_grad_() for x in inputs)
        out = attnzoo.attention(q, k, v, "top_p", attn_mask=mask, p=p, backend=backend)
        gradients = torch.autograd.grad(out, (mask, v), rand(1, 2, 60, 70, seed=2))
        results.append((out.detach(), *gradients))
    assert torch.equal(results[0][0] > 0, results[1][0] > 0)
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def test_blocks_whose_queries_see_no_key_are_zero() -> None:
    """With 1024 heads a block has few queries. Some blocks contain only queries without keys."""
    q = rand(1, 1024, 128, 2, seed=1)
    k, v = rand(1, 1, 100, 2, seed=2), rand(1, 1, 100, 2, seed=3)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    out = attnzoo.attention(q, k, v, backend="tiled", **options)
    assert torch.equal(out[:, :, :28], torch.zeros(1, 1024, 28, 2, dtype=torch.float64))
    expected = attnzoo.attention(q[:, :3], k, v, backend="eager", **options)
    assert torch.allclose(out[:, :3], expected)


@pytest.mark.parametrize("variant", MARKED)
def test_meta_and_fake_tensors_give_shapes(variant: str) -> None:
    params = params_of(variant, 400)
    for mode, device in ((nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode:
            q, k, v = (torch.empty(1, 1, 400, 8, device=device).requires_grad_() for _ in range(3))
            out = attnzoo.attention(q, k, v, variant, backend="tiled", **params)
            assert out.shape == (1, 1, 400, 8)
            assert out.device.type == device
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3


# For forward-mode derivatives torch imports code that uses its deprecated torch.jit.script.
ignore_torch_warning = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@ignore_torch_warning
@pytest.mark.parametrize("variant", ["softmax", "adaptive_temperature", "entmax", "cosformer"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_raise_and_name_eager(name: str, variant: str) -> None:
    q, k, v = (rand(1, 1, 4, 3, seed=i) for i in range(3))

    def attend(q: Tensor, backend: str) -> Tensor:
        return attnzoo.attention(q, k, v, variant, backend=backend, **params_of(variant))

    with pytest.raises(ValueError, match="'tiled' .*vmap.*backend='eager'"):
        TRANSFORMS[name](lambda q: attend(q, "tiled"), q)


def test_transforms_raise_if_selection_chooses_tiled() -> None:
    q, k, v = (rand(1, 1, 400, 2, seed=i) for i in range(3))
    assert attnzoo.explain(q, k, v, "entmax").chosen == "tiled"
    with pytest.raises(ValueError, match="'tiled' .*vmap.*backend='eager'"):
        torch.vmap(lambda q: attnzoo.attention(q, k, v, "entmax"))(q[None])


@ignore_torch_warning
def test_forward_mode_raises_and_names_eager() -> None:
    """Without the error, the tangent would silently be 0."""
    q, k, v = (rand(1, 1, 4, 3, seed=i) for i in range(3))
    slopes, mask = torch.tensor([0.5]).double(), rand(4, 4, seed=4)
    for name, x in (("q", q), ("alibi", slopes), ("attn_mask", mask), ("b", slopes)):
        with forward_ad.dual_level():
            arguments = {"q": q, "k": k, "v": v, name: forward_ad.make_dual(x, torch.ones_like(x))}
            with pytest.raises(ValueError, match="forward-mode.*backend='eager'"):
                attnzoo.attention(variant="sink", backend="tiled", **arguments)


# ---- NaN among the scores -------------------------------------------------------------------


def with_and_without(variant: str, change: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Outputs (2, 2, 12, 4) with and without ``change``, which modifies q, k and v in place."""
    inputs = [rand(2, 2, 12, 4, seed=i).float() for i in range(3)]
    options = {"backend": "tiled", **params_of(variant), **options}
    clean = attnzoo.attention(*inputs, variant, **options)
    change(*inputs)
    return attnzoo.attention(*inputs, variant, **options), clean


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_in_a_query_only_affects_its_own_output(variant: str) -> None:
    def change(q: Tensor, k: Tensor, v: Tensor) -> None:
        q[0, 1, 5, 2] = torch.nan

    out, clean = with_and_without(variant, change, is_causal=True)
    assert bool(out[0, 1, 5].isnan().all())
    out[0, 1, 5] = clean[0, 1, 5]
    assert torch.allclose(out, clean, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_in_a_key_affects_the_queries_that_see_it(variant: str) -> None:
    def change(q: Tensor, k: Tensor, v: Tensor) -> None:
        k[0, 1, 5, 2] = torch.nan

    out, clean = with_and_without(variant, change, is_causal=True)
    assert bool(out[0, 1, 5:].isnan().all())
    out[0, 1, 5:] = clean[0, 1, 5:]
    assert torch.allclose(out, clean, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_in_a_masked_key_changes_nothing(variant: str) -> None:
    def change(q: Tensor, k: Tensor, v: Tensor) -> None:
        k[:, :, 5] = torch.nan

    mask = torch.arange(12)[None] != 5
    out, clean = with_and_without(variant, change, attn_mask=mask)
    assert torch.equal(out, clean)


@pytest.mark.parametrize(
    ("variant", "value"),
    # sigmoid is not tested with an infinite score: the weight of such a score is 1, not NaN.
    [
        (v, x)
        for v in VARIANTS
        if v not in NO_SCORE
        for x in (math.nan, math.inf)
        if (v, x) != ("sigmoid", math.inf)
    ],
)
def test_nan_or_inf_in_a_score_only_affects_its_query(variant: str, value: float) -> None:
    q, k, v = (rand(2, 2, 12, 4, seed=i).float() for i in range(3))
    mask = torch.zeros(12, 12)
    options = {"backend": "tiled", **params_of(variant)}
    clean = attnzoo.attention(q, k, v, variant, attn_mask=mask, **options)
    mask[5, 3] = value
    out = attnzoo.attention(q, k, v, variant, attn_mask=mask, **options)
    assert not bool(out[:, :, 5].isfinite().any())
    out[:, :, 5] = clean[:, :, 5]
    assert torch.allclose(out, clean, atol=1e-6)


@pytest.mark.parametrize("field", ["decay", "gain", "sink"])
def test_vectors_may_lack_the_dimension_of_the_batch(field: str) -> None:
    q, k, v = (rand(2, 4, 12, 8, seed=i) for i in range(3))
    call, results = check_call(q, k, v), []
    for shape in ((4, 1), (1, 4, 1)):
        vector = (0.1 + rand(4, seed=3).abs()).view(shape).requires_grad_()
        away = LOGARITHMIC if field == "decay" else None
        form = attnzoo.Pairwise(EXP, "sum", distance=away, **{field: vector})
        out = BACKENDS["tiled"].run(q, k, v, call, form)[0]
        results.append((out, torch.autograd.grad(out.square().sum(), vector)[0].flatten()))
    for have, want in zip(*results, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("low", [-1e9, -3e38])
def test_gradients_of_statistics_agree_with_low_mask_entries(low: float) -> None:
    """At −1e9 an lse has no digits of log Z, so that weights must not be computed from it."""
    leaves = [rand(1, 2, 40, 8, seed=i).float().requires_grad_() for i in range(3)]
    mask = torch.zeros(1, 1, 40, 40)
    mask[:, :, :5] = low
    gradients = []
    for backend in ("tiled", "eager"):
        out = attnzoo.attention(
            *leaves, "adaptive_temperature", differentiable=True, attn_mask=mask, backend=backend
        )
        gradients.append(torch.autograd.grad(out[:, :, :5].square().sum(), leaves))
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, atol=1e-5)
