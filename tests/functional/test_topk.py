"""topk_probabilities() and linear_topk() return the k largest entries of `probabilities`."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnzoo import linear_topk, probabilities, topk_probabilities
from attnzoo.functional import topk as module
from helpers.cases import CASES, VARIANTS, WITH_FORMS, has_rows, params_of, rand
from helpers.coverage_table import FIRST
from helpers.crossed import crossed
from helpers.kernel_paths import quick_variants
from helpers.largest import agrees

ROWS = [v for v in VARIANTS if has_rows(v)]
SETTINGS = [
    (v, params)
    for v in ROWS
    for params in [params_of(v), *({**params_of(v), **s} for s in CASES[v].settings)]
]
# Also: a gain that reverses the order, and a gain of 0.
SETTINGS += [("ssmax", {"s": -0.4}), ("ssmax", {"s": 0.0}), ("entmax", {"alpha": 1.1})]
QUICK = [x.values[0] for x in quick_variants(ROWS) if not x.marks]
MARKED = [
    pytest.param(v, params, marks=[] if v in QUICK else [pytest.mark.slow], id=f"{v}-{number}")
    for number, (v, params) in enumerate(SETTINGS)
]


@pytest.mark.usefixtures("sizes_of")
@pytest.mark.parametrize(("variant", "params", "masked"), crossed(MARKED, [True, False]))
def test_the_largest_probabilities(variant: str, params: dict[str, Any], masked: bool) -> None:
    factors = cycle((0.1, 1.0, 30.0))
    for n in (1, 2, 63, 64, 65, 700, 2500):  # without blocks, and with blocks and a remainder
        for k in (1, 3, 20):
            if k > n:
                continue
            scores = next(factors) * torch.randn(5, n, dtype=torch.float64)
            mask = torch.rand(5, n) < 0.5 if masked else None
            if mask is not None:
                mask[0] = False
                mask[1, n // 2 :] = False
            weights = probabilities(scores, variant, mask=mask, **params)
            got = topk_probabilities(scores, k, variant, mask=mask, **params)
            agrees(got, weights, k)


@pytest.mark.parametrize(
    ("variant", "params", "dtype"),
    crossed(MARKED, [torch.float32, torch.bfloat16, torch.float16]),
)
def test_dtypes(variant: str, params: dict[str, Any], dtype: torch.dtype) -> None:
    scores = (2 * torch.randn(4, 3000)).to(dtype)
    weights = probabilities(scores, variant, **params)
    exact = probabilities(scores.double(), variant, **params)
    got = topk_probabilities(scores, 9, variant, **params)
    eps = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    agrees(got, weights, 9, tolerance=eps)
    torch.testing.assert_close(
        got.values.double(), exact.topk(9).values, rtol=eps, atol=1e-7 if eps > 1e-5 else eps
    )


@pytest.mark.parametrize("variant", [v for v in ROWS if CASES[v].learned])
def test_each_row_may_have_its_own_parameters(variant: str) -> None:
    scores = torch.randn(6, 800, dtype=torch.float64)
    row_params: dict[str, Any] = {
        name: low + (high - low) * torch.rand(6, dtype=torch.float64)
        for name, (low, high) in CASES[variant].learned.items()
    }
    params = {**params_of(variant), **row_params}
    weights = probabilities(scores, variant, **params)
    agrees(topk_probabilities(scores, 4, variant, **params), weights, 4)


@pytest.mark.parametrize("variant", ROWS)
def test_processing_few_rows_at_a_time_gives_the_same_result(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, mask = torch.randn(7, 900), torch.rand(7, 900) < 0.8
    row_params = {
        name: low + (high - low) * torch.rand(7)
        for name, (low, high) in CASES[variant].learned.items()
    }
    params = {**params_of(variant), **row_params}
    want = topk_probabilities(scores, 5, variant, mask=mask, **params)
    for name in ("UNCOPIED", "COPIED"):
        monkeypatch.setattr(module, name, 2000)
    monkeypatch.setattr("attnzoo.functional.top_weights.EXACT", 900)
    monkeypatch.setattr("attnzoo.functional.top_weights.SUMMED", 900)
    monkeypatch.setattr("attnzoo.functional.largest.TIED", 900)
    got = topk_probabilities(scores, 5, variant, mask=mask, **params)
    torch.testing.assert_close(got.values, want.values)
    assert torch.equal(got.indices, want.indices)


@pytest.mark.parametrize("dim", range(-3, 3))
def test_every_dimension(dim: int) -> None:
    scores, mask = torch.randn(3, 4, 5), torch.rand(3, 4, 5) < 0.7
    weights = probabilities(scores, "entmax", dim=dim, mask=mask)
    got = topk_probabilities(scores, 2, "entmax", dim=dim, mask=mask)
    moved = got.values.movedim(dim, -1), got.indices.movedim(dim, -1)
    agrees(moved, weights.movedim(dim, -1), 2, 1e-6)


def in_order(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest entries of each row, by (value descending, index ascending)."""
    rows = [sorted(range(x.shape[-1]), key=lambda j: (-row[j], j))[:k] for row in x.tolist()]
    return torch.tensor(rows)


@pytest.mark.usefixtures("sizes_of")
@pytest.mark.parametrize("variant", ["softmax", "topk", "sigmoid", "sparsemax", "taylor"])
@pytest.mark.parametrize("n", [10, 64 * 40 + 7])
def test_equal_scores_are_returned_in_the_order_of_their_indices(variant: str, n: int) -> None:
    for levels in (1, 2, 5, 100):
        scores = torch.randint(levels, (6, n)).double() / levels
        for k in (1, 2, 7):
            got = topk_probabilities(scores, k, variant, **params_of(variant))
            agrees(got, probabilities(scores, variant, **params_of(variant)), k)
            if variant != "topk" or k <= params_of(variant)["top_k"]:
                assert torch.equal(got.indices, in_order(scores, k)), (levels, k)


@pytest.mark.usefixtures("sizes_of")
def test_many_equal_scores_in_16_bits() -> None:
    scores = torch.randn(8, 20_000).bfloat16()
    got = topk_probabilities(scores, 50)
    assert torch.equal(got.indices, in_order(scores.float(), 50))


def test_fewer_visible_entries_than_k() -> None:
    mask = torch.zeros(2, 500, dtype=torch.bool)
    mask[0, [7, 300]] = True
    for variant in ROWS:
        params = params_of(variant)
        got = topk_probabilities(torch.ones(2, 500), 4, variant, mask=mask, **params)
        assert got.indices[0, :2].tolist() == [7, 300]
        assert bool((got.values[0, :2] > 0).all())
        assert not got.values[0, 2:].any()
        assert not got.values[1].any()


@pytest.mark.usefixtures("sizes_of")
@pytest.mark.parametrize("n", [6, 3000])
def test_nan_counts_as_the_largest_score(n: int) -> None:
    scores = torch.randn(3, n)
    scores[1, 5] = math.nan
    for variant in ROWS:
        params = params_of(variant)
        values, indices = topk_probabilities(scores, 2, variant, **params)
        assert not values[[0, 2]].isnan().any()
        if variant in ("sigmoid", "relu", "screening", "silu"):
            assert values[1].isnan().tolist() == [True, False]
            assert indices[1, 0] == 5
        else:
            assert bool(values[1].isnan().all()), variant
        mask = ~scores.isnan()
        assert not topk_probabilities(scores, 2, variant, mask=mask, **params)[0].isnan().any()


def test_infinite_scores() -> None:
    scores = torch.randn(2, 3000)
    scores[:, ::3] = -math.inf
    for variant in ("softmax", "sink", "topk", "sigmoid", "sparsemax", "entmax"):
        params = params_of(variant)
        weights = probabilities(scores, variant, **params)
        agrees(topk_probabilities(scores, 6, variant, **params), weights, 6, 2e-6)


def test_huge_and_flat_scores() -> None:
    for scores in (1e4 * torch.randn(3, 5000), 1e-6 * torch.randn(3, 5000) + 1000):
        for variant in ("softmax", "sink", "ssmax", "topk", "sparsemax", "entmax"):
            params = params_of(variant)
            weights = probabilities(scores.double(), variant, **params)
            got = topk_probabilities(scores.double(), 5, variant, **params)
            agrees(got, weights, 5, 1e-9)


@pytest.mark.usefixtures("sizes_of")
@pytest.mark.parametrize("n", [200, 5000])
@pytest.mark.parametrize("alpha", [1.02, 1.3, 1.5, 2.0])
def test_a_support_far_larger_than_k(alpha: float, n: int) -> None:
    scores = 1e-4 * torch.randn(3, n, dtype=torch.float64)
    scores[1] *= 1e4  # for most alpha, this row has far fewer nonzero weights
    weights = probabilities(scores, "entmax", alpha=alpha)
    assert int((weights[0] > 0).sum()) > n // 4
    agrees(topk_probabilities(scores, 2, "entmax", alpha=alpha), weights, 2)


def test_empty_rows() -> None:
    got = topk_probabilities(torch.zeros(0, 5), 2)
    assert got.values.shape == got.indices.shape == (0, 2)
    got = linear_topk(torch.zeros(0, 3, 4), torch.zeros(9, 4), 2)
    assert got.values.shape == got.indices.shape == (0, 3, 2)


def test_no_gradients() -> None:
    scores = torch.randn(3, 5, requires_grad=True)
    assert not topk_probabilities(scores, 2).values.requires_grad
    assert not linear_topk(scores, torch.randn(4, 5, requires_grad=True), 2).values.requires_grad


@pytest.mark.parametrize("variant", ["softmax", "entmax", "log_n", "topk", "sigmoid", "relu2"])
def test_scores_without_values(variant: str) -> None:
    """On meta, in a mode that only computes shapes, and in a transform."""
    scores, weight, params = torch.randn(3, 5, 200), torch.randn(200, 8), params_of(variant)
    expected = topk_probabilities(scores, 4, variant, **params)
    by_rows = torch.func.vmap(lambda x: topk_probabilities(x, 4, variant, **params))
    values, indices = by_rows(scores)
    assert torch.allclose(values, expected.values, atol=1e-6)
    assert torch.equal(indices, expected.indices)
    meta = topk_probabilities(scores.to("meta"), 4, variant, **params)
    assert meta.indices.is_meta
    assert meta.values.shape == expected.values.shape
    with FakeTensorMode() as mode:
        fake, fake_weight = mode.from_tensor(scores), mode.from_tensor(weight)
        assert topk_probabilities(fake, 4, variant, **params).values.shape == (3, 5, 4)
        assert linear_topk(fake[..., :8], fake_weight, 4, variant, **params)[0].shape == (3, 5, 4)


@pytest.mark.parametrize("name", ["mask", "s", "alpha"])
def test_an_argument_without_values_beside_scores_with_values(name: str) -> None:
    scores, arguments = torch.randn(5, 200), 1.2 + torch.rand(3, 1) / 2
    variant = {"mask": "softmax", "s": "ssmax", "alpha": "entmax"}[name]
    values = torch.rand(3, 5, 200) < 0.8 if name == "mask" else arguments

    def one(x: Tensor) -> Tensor:
        return topk_probabilities(scores, 4, variant, **{name: x}).values

    by_vmap = torch.func.vmap(one)(values)
    assert torch.allclose(by_vmap, torch.stack([one(x) for x in values]), atol=1e-6)


def test_inputs_are_not_written() -> None:
    scores, mask = torch.randn(3, 900), torch.rand(3, 900) < 0.5
    before = scores.clone()
    for variant, params in SETTINGS:
        topk_probabilities(scores, 4, variant, mask=mask, **params)
        topk_probabilities(scores, 4, variant, **params)
    assert torch.equal(scores, before)


# ---- linear_topk ----------------------------------------------------------------------------


@pytest.mark.usefixtures("sizes_of")
@pytest.mark.parametrize(("variant", "params", "classes"), crossed(MARKED, [1000, 5]))
def test_linear_topk(variant: str, params: dict[str, Any], classes: int) -> None:
    input, weight, bias = rand(2, 20, 8), rand(classes, 8, seed=1), rand(classes, seed=2)
    if variant == "sigmoid":
        params = {"bias": 0.0, **params}  # the default of output layers
    for mask in (None, torch.rand(classes) < 0.7, torch.rand(2, 20, classes) < 0.7):
        logits = 3 * torch.tanh((input @ weight.mT + bias) / 3)
        other_params = {name: x for name, x in params.items() if (name, x) != ("bias", 0.0)}
        got = linear_topk(
            input, weight, 4, variant, linear_bias=bias, class_mask=mask, softcap=3, **other_params
        )
        agrees(got, probabilities(logits, variant, mask=mask, **params), 4, 1e-9)
    agrees(linear_topk(input, weight, 4, variant, **other_params),
           probabilities(input @ weight.mT, variant, **params), 4, 1e-9)  # fmt: skip


def test_parameters_of_linear_topk() -> None:
    input, weight = rand(2, 20, 8), rand(50, 8, seed=1)
    beta = torch.rand(2, 20, dtype=torch.float64)
    got = linear_topk(input, weight, 4, "asentmax", beta=beta, delta=torch.ones(1))
    agrees(got, probabilities(input @ weight.mT, "asentmax", beta=beta), 4, 1e-9)
    got = linear_topk(input, weight, 4, "sink", b=beta)
    agrees(got, probabilities(input @ weight.mT, "sink", b=beta), 4, 1e-9)
    with pytest.raises(
        ValueError, match=r"sigmoid's bias must be a number or a tensor of shape \(\), got"
    ):
        linear_topk(input, weight, 4, "sigmoid", bias=beta)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(dtype: torch.dtype) -> None:
    input, weight = torch.randn(30, 16).to(dtype), torch.randn(9000, 16).to(dtype)
    bias = torch.randn(9000).to(dtype)
    got = linear_topk(input, weight, 5, linear_bias=bias)
    exact = (input.double() @ weight.double().mT + bias.double()).softmax(-1).topk(5)
    assert got.values.dtype == dtype
    assert torch.equal(got.indices, exact.indices)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.values.double(), exact.values, rtol=eps, atol=1e-7)


def test_autocast_casts_input_and_weight() -> None:
    input, weight = torch.randn(30, 16), torch.randn(300, 16)
    want = linear_topk(input.bfloat16().float(), weight.bfloat16().float(), 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_topk(input, weight, 5)
        mixed = linear_topk(input.bfloat16(), weight, 5)
    for values, indices in (got, mixed):
        assert torch.equal(indices, want.indices)
        torch.testing.assert_close(values.float(), want.values, rtol=2**-7, atol=1e-6)
    assert got.values.dtype == torch.float32


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=[] if v in FIRST.values() else [pytest.mark.slow])
        for v in ROWS
        if v in WITH_FORMS
    ],
)
def test_linear_topk_never_holds_all_logits(variant: str) -> None:
    """All tensors alive at once, counted by a dispatch mode, stay below an 8th of N × V."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakTensorKeyDictionary

    tokens, classes = 2048, 8000

    class Peak(TorchDispatchMode):
        alive: Any = WeakTensorKeyDictionary()
        peak = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, Tensor):
                    self.alive[x] = x.untyped_storage()
            held = {s.data_ptr(): s.nbytes() for s in self.alive.values()}
            self.peak = max(self.peak, sum(held.values()))
            return out

    input, weight = torch.randn(tokens, 16), torch.randn(classes, 16)
    with Peak() as counted:
        linear_topk(input, weight, 10, variant, **params_of(variant))
    inputs = 4 * (input.numel() + weight.numel())
    assert counted.peak - inputs <= tokens * classes * 4 / 8


# ---- errors ---------------------------------------------------------------------------------

X, W = torch.zeros(2, 3), torch.zeros(7, 3)
ERRORS = {
    "k must be an int of at least 1, got 0": (ValueError, lambda: topk_probabilities(X, 0)),
    "k must be an int of at least 1, got 1.5": (
        ValueError,
        lambda: topk_probabilities(X, 1.5),  # type: ignore
    ),
    "k must be at most the size of scores along dim, 3, got 4": (
        ValueError,
        lambda: topk_probabilities(X, 4),
    ),
    "k must be at most the size of scores along dim, 2, got 3": (
        ValueError,
        lambda: topk_probabilities(X, 3, dim=0),
    ),
    "dim must be from -2 to 1": (ValueError, lambda: topk_probabilities(X, 1, dim=-3)),
    "variant of topk_probabilities must not depend on positions": (
        ValueError,
        lambda: topk_probabilities(X, 1, "cosformer", max_length=9),
    ),
    "k must be at most the number of classes, 7, got 8": (ValueError, lambda: linear_topk(X, W, 8)),
    "input must have shape (*, d) with d >= 1, got (2, 0)": (
        ValueError,
        lambda: linear_topk(torch.zeros(2, 0), torch.zeros(7, 0), 1),
    ),
    "linear_weight must have shape (V, d) with d = 3 as in input, got (3, 7)": (
        ValueError,
        lambda: linear_topk(X, W.mT, 1),
    ),
    "linear_weight must have the dtype of input, torch.float32, got torch.float64": (
        TypeError,
        lambda: linear_topk(X, W.double(), 1),
    ),
    "linear_bias must have shape (7,), one number per class, got (3,)": (
        ValueError,
        lambda: linear_topk(X, W, 1, linear_bias=torch.zeros(3)),
    ),
    "class_mask must have shape (7,) or (2, 7), got (2,)": (
        ValueError,
        lambda: linear_topk(X, W, 1, class_mask=torch.ones(2, dtype=torch.bool)),
    ),
    "class_mask must be bool": (
        TypeError,
        lambda: linear_topk(X, W, 1, class_mask=torch.ones(7)),
    ),
    "softcap must be a finite number > 0 or None, got 0": (
        ValueError,
        lambda: linear_topk(X, W, 1, softcap=0),
    ),
    "softcap must be a finite number > 0 or None, got 'a'": (
        TypeError,
        lambda: linear_topk(X, W, 1, softcap="a"),  # type: ignore
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    kind, call = ERRORS[message]
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("variant", ["entmax", "adaptive_temperature"])
def test_compiles_without_graph_breaks(variant: str, dynamic: bool) -> None:
    """The second has no form whose largest weights follow from a few scores. Scores have ties."""
    z, h = rand(5, 70).float().round(decimals=1), rand(5, 4).float()
    weight = rand(70, 4).float()

    def topk_of_layers(z: Tensor, h: Tensor, weight: Tensor) -> list[Tensor]:
        first = topk_probabilities(z, 2, variant)
        return [*first, *linear_topk(h, weight, 2, variant)]

    compiled = torch.compile(topk_of_layers, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for have, want in zip(compiled(z, h, weight), topk_of_layers(z, h, weight), strict=True):
        torch.testing.assert_close(have, want)
