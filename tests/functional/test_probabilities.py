"""probabilities(): each variant's weights from given scores, along any dimension."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import attnzoo
from attnzoo import probabilities
from helpers.cases import CASES, VARIANTS, has_rows, params_of, rand
from helpers.crossed import crossed
from helpers.kernel_paths import quick_variants

ROWS = [v for v in VARIANTS if has_rows(v)]
QUICK = quick_variants(ROWS)


def formula(variant: str, z: Tensor, params: dict[str, Any]) -> Tensor:
    """The weights of one row z (n,) of visible scores, in fp64."""
    row = CASES[variant].row
    assert row is not None, f"the case of {variant} needs a row"
    return row(
        z.double(), {name: x if isinstance(x, str) else float(x) for name, x in params.items()}
    )


def expected(variant: str, scores: Tensor, mask: Tensor | None, params: dict[str, Any]) -> Tensor:
    """`formula` for each row of scores (R, n); tensor params are (R,)."""
    rows = []
    for i, z in enumerate(scores):
        row_params = {name: x[i] if isinstance(x, Tensor) else x for name, x in params.items()}
        row, seen = torch.zeros_like(z, dtype=torch.float64), slice(None)
        if mask is not None:
            seen = mask[i]
        if z[seen].numel():
            row[seen] = formula(variant, z[seen], row_params)
        rows.append(row)
    return torch.stack(rows)


def settings(variant: str) -> list[dict[str, Any]]:
    return [params_of(variant), *({**params_of(variant), **s} for s in CASES[variant].settings)]


def per_row(variant: str, rows: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random parameters, one per row, in the ranges of `CASES`."""
    return {
        name: low + (high - low) * torch.rand(rows, dtype=dtype)
        for name, (low, high) in CASES[variant].learned.items()
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("variant", "params"), [(v, params) for v in ROWS for params in settings(v)]
)
def test_weights_follow_the_formula(variant: str, params: dict[str, Any], masked: bool) -> None:
    scores = 2 * rand(6, 9)
    mask = torch.rand(6, 9) < 0.6 if masked else None
    if mask is not None:
        mask[0] = False
    want = expected(variant, scores, mask, params)
    got = probabilities(scores, variant, mask=mask, **params)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    for dtype, eps in ((torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        low = probabilities(scores.to(dtype), variant, mask=mask, **params)
        assert low.dtype == dtype
        want = expected(variant, scores.to(dtype).double(), mask, params)
        torch.testing.assert_close(low.double(), want, rtol=eps, atol=2e-6)


@pytest.mark.parametrize("variant", [v for v in ROWS if CASES[v].learned])
def test_each_row_may_have_its_own_parameters(variant: str) -> None:
    scores, row_params = rand(6, 9), per_row(variant, 6)
    want = expected(variant, scores, None, {**params_of(variant), **row_params})
    got = probabilities(scores, variant, **{**params_of(variant), **row_params})
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    # dim 1 of (2, 9, 3), parameters of shape (2, 3), (2, 1, 3) and (1, 3)
    laid = scores.view(2, 3, 9).movedim(-1, 1)
    for shape in ((2, 3), (2, 1, 3)):
        shaped = {name: x.view(shape) for name, x in row_params.items()}
        got = probabilities(laid, variant, dim=1, **shaped)
        torch.testing.assert_close(got.movedim(1, -1).reshape(6, 9), want, rtol=1e-9, atol=1e-10)
    shared = {name: x[:3].view(1, 3) for name, x in row_params.items()}
    got = probabilities(laid, variant, dim=1, **shared).movedim(1, -1).reshape(6, 9)
    repeated = {name: x[:3].repeat(2) for name, x in row_params.items()}
    want = expected(variant, scores, None, repeated)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", QUICK)
def test_every_dimension(variant: str) -> None:
    scores, mask = rand(3, 4, 5), torch.rand(3, 4, 5) < 0.7
    params = params_of(variant)
    for dim in range(-3, 3):
        moved = probabilities(scores, variant, dim=dim, mask=mask, **params).movedim(dim, -1)
        seen, z = mask.movedim(dim, -1), scores.movedim(dim, -1)
        want = expected(variant, z.flatten(0, 1), seen.flatten(0, 1), params)
        torch.testing.assert_close(moved.flatten(0, 1), want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ROWS)
def test_empty_and_small_shapes(variant: str) -> None:
    params = params_of(variant)
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 3), (0, 0)):
        for dim in range(len(shape)):
            assert probabilities(torch.zeros(shape), variant, dim=dim, **params).shape == shape
    one = probabilities(torch.tensor([3.0]), variant, **params)
    want = formula(variant, torch.tensor([3.0]), params)
    torch.testing.assert_close(one.double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("variant", ROWS)
def test_a_mask_broadcasts(variant: str) -> None:
    scores, params = rand(2, 3, 6), params_of(variant)
    for shape in ((6,), (1, 1, 6), (3, 1), (2, 3, 6), (1, 3, 6), ()):
        mask = torch.rand(shape) < 0.6
        got = probabilities(scores, variant, mask=mask, **params)
        full = mask.expand(2, 3, 6)
        assert torch.equal(got, probabilities(scores, variant, mask=full, **params))
        assert not got[~full].any()


@pytest.mark.parametrize("variant", QUICK)
def test_gradients(variant: str) -> None:
    mask = torch.tensor([[True] * 5, [True, False] * 2 + [True], [False] * 5])
    scores = rand(3, 5, seed=3).requires_grad_()
    row_params = {name: x.requires_grad_() for name, x in per_row(variant, 3).items()}
    fixed = {name: x for name, x in params_of(variant).items() if name not in row_params}
    if variant == "adaptive_temperature":
        fixed["differentiable"] = True

    def weights(scores: Tensor, *learned: Tensor) -> Tensor:
        return probabilities(scores, variant, mask=mask, **fixed, **dict(zip(row_params, learned)))

    assert gradcheck(weights, (scores, *row_params.values()))
    assert gradgradcheck(weights, (scores, *row_params.values()))
    weights(scores, *row_params.values()).sum().backward()
    assert scores.grad is not None
    assert not scores.grad[2].any()


@pytest.fixture
def entmax() -> Any:
    return pytest.importorskip("entmax")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values_and_gradients_agree_with_torch_and_the_entmax_package(
    entmax: Any, dim: int
) -> None:
    scores, out = rand(7, 6, 5), rand(7, 6, 5, seed=1)
    alpha = 1.1 + 0.8 * torch.rand(7, 6, 5, dtype=torch.float64).narrow(dim, 0, 1)
    pairs = [
        (lambda x: x.softmax(dim), lambda x: probabilities(x, dim=dim)),
        (
            lambda x: entmax.sparsemax(x, dim=dim),
            lambda x: probabilities(x, "sparsemax", dim=dim),
        ),
        (lambda x: entmax.entmax15(x, dim=dim), lambda x: probabilities(x, "entmax", dim=dim)),
        (
            lambda x: entmax.entmax_bisect(x, alpha, dim=dim),
            lambda x: probabilities(x, "entmax", dim=dim, alpha=alpha),
        ),
    ]
    for theirs, ours in pairs:
        results = []
        for function in (theirs, ours):
            x = scores.clone().requires_grad_()
            y = function(x)
            results.append((y.detach(), torch.autograd.grad(y, x, out)[0]))
        for want, got in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_the_gradient_of_alpha_is_that_of_the_entmax_package(entmax: Any) -> None:
    scores, out = rand(4, 6), rand(4, 6, seed=1)
    alpha = torch.tensor([1.2, 1.4, 1.6, 1.9], dtype=torch.float64, requires_grad=True)
    theirs = entmax.entmax_bisect(scores, alpha[:, None])
    ours = probabilities(scores, "entmax", alpha=alpha)
    want, got = (torch.autograd.grad(p, alpha, out)[0] for p in (theirs, ours))
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("variant", ROWS)
def test_nan_stays_in_its_row_and_reaches_the_weights(variant: str) -> None:
    scores = rand(3, 6)
    scores[1, 2] = math.nan
    params = params_of(variant)
    got = probabilities(scores, variant, **params)
    assert not got[[0, 2]].isnan().any()
    if variant == "sigmoid":
        assert got[1].isnan().tolist() == [False, False, True, False, False, False]
    else:
        assert got[1].isnan().any()


@pytest.mark.parametrize(("variant", "value"), crossed(ROWS, [math.nan, math.inf, -math.inf]))
def test_a_value_that_takes_no_part_has_no_effect(variant: str, value: float) -> None:
    """Also if no entry of the line takes part."""
    scores, params = rand(3, 6), params_of(variant)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 2], mask[2] = False, False
    results = []
    for logits in (scores, scores.masked_fill(~mask, value)):
        logits.requires_grad_()
        w = probabilities(logits, variant, mask=mask, **params)
        results.append((w, *torch.autograd.grad((w * rand(3, 6, seed=1)).sum(), logits)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert not any(bool(x[2].any()) for x in results[1])


@pytest.mark.parametrize("variant", ROWS)
def test_vmap(variant: str) -> None:
    scores, params = rand(4, 3, 6), params_of(variant)
    want = probabilities(scores, variant, **params)
    got = torch.func.vmap(lambda x: probabilities(x, variant, **params))(scores)
    torch.testing.assert_close(got, want)
    mask = torch.rand(3, 6) < 0.7
    got = torch.func.vmap(lambda x: probabilities(x, variant, dim=0, mask=mask, **params))(scores)
    want = probabilities(scores, variant, dim=1, mask=mask, **params)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("variant", [v for v in ROWS if CASES[v].learned])
def test_vmap_over_parameters(variant: str) -> None:
    scores, row_params = rand(6, 9), per_row(variant, 6)
    want = probabilities(scores, variant, **{**params_of(variant), **row_params})

    def row(scores: Tensor, row_params: dict[str, Tensor]) -> Tensor:
        return probabilities(scores, variant, **{**params_of(variant), **row_params})

    torch.testing.assert_close(torch.func.vmap(row)(scores, row_params), want)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "ssmax", "sparsemax", "entmax", "topk"])
def test_compiles_into_one_graph(variant: str) -> None:
    params = params_of(variant)

    def function(scores: Tensor, mask: Tensor) -> Tensor:
        return probabilities(scores, variant, dim=0, mask=mask, **params)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for n in (5, 7):
        scores, mask = rand(n, 4).float().requires_grad_(), torch.rand(n, 4) < 0.7
        results = []
        for f in (function, compiled):
            y = f(scores, mask)
            results.append((y.detach(), torch.autograd.grad(y.square().sum(), scores)[0]))
        for want, got in zip(*results):
            torch.testing.assert_close(got, want)


def test_autocast_does_not_lower_the_precision() -> None:
    scores = rand(3, 50).float()
    want = probabilities(scores, "entmax", alpha=1.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(probabilities(scores, "entmax", alpha=1.3), want)


S = torch.zeros(2, 3)
ERRORS = {
    "scores must be a tensor": (TypeError, lambda: probabilities([1.0])),  # type: ignore
    "scores must be fp16, bf16, fp32 or fp64, got torch.int64": (
        TypeError,
        lambda: probabilities(torch.ones(3, dtype=torch.long)),
    ),
    "scores must have at least one dimension": (
        ValueError,
        lambda: probabilities(torch.tensor(1.0)),
    ),
    "dim must be from -2 to 1 for scores of shape (2, 3), got 2": (
        ValueError,
        lambda: probabilities(S, dim=2),
    ),
    "dim must be an int, got 1.0": (TypeError, lambda: probabilities(S, dim=1.0)),  # type: ignore
    "mask must be bool (True = takes part), got torch.float32": (
        TypeError,
        lambda: probabilities(S, mask=S),
    ),
    "mask must broadcast to the shape of scores (2, 3), got (2,)": (
        ValueError,
        lambda: probabilities(S, mask=torch.ones(2, dtype=torch.bool)),
    ),
    "unknown variant 'softmin'": (ValueError, lambda: probabilities(S, "softmin")),
    "has no parameter 'alpha'": (TypeError, lambda: probabilities(S, alpha=1.5)),
    "'msk'; it has: none; did you mean 'mask'?": (TypeError, lambda: probabilities(S, msk=None)),
    "a tensor of shape (2, 3); pass a mask or weights by name": (
        TypeError,
        lambda: probabilities(S, S > 0),  # type: ignore
    ),
    "requires the parameter 'top_k'": (TypeError, lambda: probabilities(S, "topk")),
    "entmax's alpha must be": (ValueError, lambda: probabilities(S, "entmax", alpha=3.0)),
    "throughout": (
        ValueError,
        lambda: probabilities(S, "entmax", alpha=torch.tensor([1.5, 3.0])),
    ),
    "entmax's alpha must be a number or a tensor of shape () or one that broadcasts to (2,) (one "
    "value per row), got (3,)": (
        ValueError,
        lambda: probabilities(S, "entmax", alpha=torch.full((3,), 1.5)),
    ),
    "variant of probabilities must not depend on positions, got 'cosformer'": (
        ValueError,
        lambda: probabilities(S, "cosformer", max_length=9),
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    kind, call = ERRORS[message]
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


@pytest.fixture
def own_variant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that registers a variant for this test."""
    from attnzoo.core import registry

    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))

    def register(weights: Any, **fields: Any) -> str:
        attnzoo.register_variant(attnzoo.Variant("own", "f(z)", "none", weights, **fields))
        return "own"

    return register


def test_a_user_defined_variant_needs_only_a_definition(own_variant: Any) -> None:
    def weights(q: Tensor, k: Tensor, call: attnzoo.Call) -> Tensor:
        s = (call.scores(q, k) + call.bias).relu() / call.counts.clamp(min=1)[..., None]
        return call.zero_hidden(s)

    name = own_variant(weights, normalized=False)
    mask = torch.tensor([True, True, True, False])
    got = probabilities(torch.tensor([3.0, -1.0, 0.6, 8.0]), name, mask=mask)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0, 0.2, 0.0]))


@pytest.mark.parametrize(
    "use",
    [lambda q, k: q @ k.mT, lambda q, k: torch.relu(q), lambda q, k: 2 * q, lambda q, k: k[0]],
)
def test_a_user_defined_variant_that_uses_q_and_k_raises(own_variant: Any, use: Any) -> None:
    name = own_variant(lambda q, k, call: call.softmax(call.scores(use(q, k), k)))
    with pytest.raises(ValueError, match="from call.scores"):
        probabilities(torch.zeros(3), name)


def test_unsupported_calls_raise_the_reason(own_variant: Any) -> None:
    name = own_variant(
        lambda q, k, call: call.softmax(call.scores(q, k)), unsupported=lambda call: "no meaning"
    )
    with pytest.raises(ValueError, match="no meaning"):
        probabilities(torch.zeros(3), name)
