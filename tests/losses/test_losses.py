"""`linear_loss` and `loss` agree with fp64 definitions: values and all gradients.

A pairwise covering array combines the variants with sizes and options. fp64 results agree to 1e-10,
fp32 and bf16 results within the error bounds of `helpers.loss_budget`.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.losses import linear_loss, loss
from helpers.agreement import violations
from helpers.cases import rand
from helpers.covering import Row, covering, each_setting
from helpers.crossed import crossed
from helpers.loss_budget import bounds
from helpers.loss_cases import (
    FACTORS,
    SETTINGS,
    WITH_LSE,
    Inputs,
    allowed,
    by_definition,
    by_library,
    label,
    make,
)
from helpers.loss_definitions import dense_linear

ROWS = covering(FACTORS, allowed)
LOW = covering((*FACTORS, ("dtype", (torch.float32, torch.bfloat16))), allowed, seed=1)


def every_row(rows: tuple[Row, ...]) -> Any:
    """In the quick tests each setting occurs twice, and in all tests each pair of settings."""
    quick = each_setting(rows, 2)
    return pytest.mark.parametrize(
        ("row", "seed"),
        [
            pytest.param(row, i, id=label(row), marks=[] if row in quick else [pytest.mark.slow])
            for i, row in enumerate(rows)
        ],
    )


TIGHT = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}


def agree(actual: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Errors are relative to the largest element, or to 1 if it is smaller."""
    assert actual.keys() == want.keys()
    for name, exact in want.items():
        assert actual[name].shape == exact.shape, name
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        atol = tolerance * max(1.0, largest) if largest == largest else 0.0
        torch.testing.assert_close(
            actual[name].double(), exact, rtol=0, atol=atol, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


@every_row(ROWS)
def test_values_and_gradients_agree_in_fp64(row: dict[str, Any], seed: int) -> None:
    inputs = make(row, seed)
    agree(by_library(inputs), by_definition(inputs))


@every_row(LOW)
def test_values_and_gradients_are_within_error_bounds(row: dict[str, Any], seed: int) -> None:
    inputs = make(row, seed)
    results, exact = by_library(inputs), by_definition(inputs)
    assert results["loss"].dtype == torch.float32
    if exact["loss"].isnan().any():  # the mean of no tokens
        assert results["loss"].isnan().all()
        del exact["loss"]
    assert violations("losses", results, exact, bounds(inputs)) == []


def simple(setting: str, tokens: int, classes: int, features: int = 5, **options: Any) -> Inputs:
    row = {name: levels[0] for name, levels in FACTORS}
    row.update(setting=setting, tokens=(tokens,), classes=classes, features=features)
    return make({**row, **options}, seed=3)


@pytest.mark.parametrize(
    ("setting", "reduction", "grad"), crossed(SETTINGS, ["none", "mean"], [True, False])
)
def test_loss_of_logits_equals_linear_loss_of_their_factors(
    setting: str, reduction: str, grad: bool
) -> None:
    """`loss` of x · Eᵀ + b equals `linear_loss` of x, E and b. The logits here are strided."""
    inputs = simple(setting, 23, 37, reduction=reduction, bias=True, mask="tokens")
    _, arguments = inputs.arguments()
    bias = arguments.pop("linear_bias").detach()
    z = (arguments.pop("input") @ arguments.pop("linear_weight").mT + bias).detach()
    z = z.mT.contiguous().mT.requires_grad_(grad)
    actual = loss(z, variant=inputs.variant, **arguments)
    _, again = inputs.arguments()
    want = linear_loss(variant=inputs.variant, **again)
    torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12)
    if grad:
        (dz,) = torch.autograd.grad(actual.sum(), z)
        dbias, dinput = torch.autograd.grad(want.sum(), [again["linear_bias"], again["input"]])
        torch.testing.assert_close(dz.sum(0), dbias, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(dz @ again["linear_weight"], dinput, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "reduction"), list(zip(SETTINGS, cycle(("mean", "none")))))
def test_many_tokens_agree(setting: str, reduction: str) -> None:
    inputs = simple(setting, 3000, 1100, reduction=reduction, bias=True, ignored="some")
    agree(by_library(inputs), by_definition(inputs))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_huge_logits(setting: str, dtype: torch.dtype) -> None:
    """Logits of order 1e4 give finite losses and gradients of the right size."""
    inputs = simple(setting, 12, 37, dtype=dtype, reduction="sum", bias=True)
    inputs.leaves["input"].mul_(1e4)
    if inputs.variant == "topk":
        inputs = Inputs(inputs.variant, inputs.leaves, inputs.options, inputs.do)
    results, exact = by_library(inputs), by_definition(inputs)
    assert all(bool(x.isfinite().all()) for x in results.values())
    if dtype == torch.float64:
        # Scores of 1e4 have rounding errors of about 1e-12 per summed term.
        agree(results, exact, 1e-9)
    else:
        assert violations("losses", results, exact, bounds(inputs)) == []


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("offset", [1e4, 1e8])
@pytest.mark.parametrize("variant", ["softmax", "sparsemax", "entmax", "topk"])
def test_a_common_offset_of_the_logits_loses_no_digits(
    variant: str, offset: float, options: dict[str, Any]
) -> None:
    """Logits of a row differ by at most 12, so that errors are those of numbers below 12."""
    params = {"top_k": 5} if variant == "topk" else options
    z = (rand(40, 50).clamp(-2, 2) * 3 + offset).float()
    y = torch.arange(40)
    actual, exact = (loss(x, y, variant, reduction="none", **params) for x in (z, z.double()))
    # Rounding of sums of 50 numbers below 12.
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=50 * 12 * 2**-24)


@pytest.mark.parametrize(("setting", "classes"), crossed(SETTINGS, [100, 1, 2, 5000]))
def test_equal_logits(setting: str, classes: int) -> None:
    """All classes have the same score. A solver that starts with few classes must add the rest."""
    inputs = simple(setting, 3, classes, reduction="none")
    inputs.leaves["linear_weight"].copy_(inputs.leaves["linear_weight"][:1].clone())
    agree(by_library(inputs), by_definition(inputs))


@pytest.mark.parametrize("setting", [name for name, x in SETTINGS.items() if "max" in x.variant])
def test_nearly_equal_logits_of_many_classes(setting: str) -> None:
    """Thousands of classes are in the support, some are not, and rows differ."""
    inputs = simple(setting, 5, 6000, reduction="none", dtype=torch.float64)
    inputs.leaves["input"].mul_(torch.tensor([1e-4, 1e-3, 1e-2, 0.1, 1.0])[:, None])
    agree(by_library(inputs), by_definition(inputs))


@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
@pytest.mark.parametrize("classes", [50, 20000])
def test_taylor_is_accurate_if_all_classes_share_an_offset(classes: int, offset: float) -> None:
    """Each row of x sums to 0, so the offset of all classes cancels in x · e_j.

    Moments of classes that are not centred would lose accuracy. |φ'/φ| <= 1, so a loss moves by
    at most twice the largest error of a score.
    """
    h = rand(64, 8)
    x, e = (h - h.mean(-1, keepdim=True)).float(), (rand(classes, 8, seed=1) + offset).float()
    y = torch.arange(64) % classes
    actual = linear_loss(x, e, y, "taylor", reduction="none")
    exact = dense_linear(x, e, y, "taylor", reduction="none").loss
    eps = torch.finfo(torch.float32).eps
    score_error = (8 / 2 + 2) * eps * (x.double().abs() @ e.double().abs().mT).amax(-1)
    allowed = 2 * score_error + 8 * eps * exact
    assert bool(((actual - exact).abs() <= allowed).all())


# ---- statistics -----------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_statistics_agree(setting: str, reduction: str) -> None:
    options: dict[str, Any] = {"softcap": 4.0, "mask": "tokens", "bias": True}
    inputs = simple(setting, 23, 37, ignored="some", reduction=reduction, **options)
    leaves, arguments = inputs.arguments()
    target = inputs.options["target"]
    if inputs.variant == "topk":
        # Whether the target counts as kept is not part of this test.
        with torch.no_grad():
            scores = dense_linear(variant="topk", **arguments)
        hidden = scores.rows.scores.masked_fill(~scores.visible, float("-inf"))
        target = torch.where(target == -100, -100, hidden.argmax(-1))
        arguments["target"] = target
    value, stats = linear_loss(variant=inputs.variant, return_stats=True, **arguments)
    exact = dense_linear(variant=inputs.variant, **arguments)
    torch.testing.assert_close(value, exact.loss, **TIGHT)
    counted, rows = exact.counted, exact.rows
    for name in ("lse", "threshold", "power_sum"):
        have, want = getattr(stats, name), getattr(rows, name)
        if want is None:
            assert have is None, name
            continue
        want = torch.where(counted, want.detach(), torch.nan)
        torch.testing.assert_close(have, want, **TIGHT)
        assert not have.requires_grad
    score = rows.scores.gather(1, target.clamp(min=0)[:, None])[:, 0].detach()
    torch.testing.assert_close(stats.target_score, torch.where(counted, score, torch.nan), **TIGHT)
    support = torch.where(counted, (rows.weights > 0).sum(-1), 0)
    assert torch.equal(stats.support.long(), support)
    assert not stats.target_score.requires_grad
    plain = linear_loss(variant=inputs.variant, **arguments)
    assert torch.equal(plain, value)
    gradients = torch.autograd.grad(value.sum(), list(leaves.values()))
    expected = torch.autograd.grad(plain.sum(), list(leaves.values()))
    for actual, want in zip(gradients, expected, strict=True):
        assert torch.equal(actual, want)


@pytest.mark.parametrize("variant", ["softmax", "entmax", "sigmoid", "taylor"])
@pytest.mark.parametrize("tokens", [(), (1,), (2, 3), (0,)])
def test_statistics_have_the_shape_of_target(variant: str, tokens: tuple[int, ...]) -> None:
    target = torch.zeros(tokens, dtype=torch.long)
    x = torch.ones(*tokens, 4, dtype=torch.bfloat16)
    _, stats = linear_loss(x, torch.ones(6, 4).bfloat16(), target, variant, return_stats=True)
    for name in ("lse", "threshold", "power_sum", "target_score"):
        value = getattr(stats, name)
        assert value is None or (value.shape == tokens and value.dtype == torch.float32), name
    assert stats.support.shape == tokens
    assert bool((stats.support == 6).all())


@pytest.mark.parametrize("setting", ["sigmoid", "entmax", "softmax", "taylor"])
def test_masking_classes_equals_removing_them(setting: str) -> None:
    """A masked class has no effect on the loss and gets no gradient."""
    inputs = simple(setting, 9, 12, reduction="sum", bias=True)
    leaves, arguments = inputs.arguments()
    arguments["target"] = arguments["target"] % 7
    few = {**arguments, "linear_weight": leaves["linear_weight"][:7]}
    few["linear_bias"] = leaves["linear_bias"][:7]
    want = differences(linear_loss(variant=inputs.variant, **few), leaves)
    mask = torch.arange(12) < 7
    actual = linear_loss(variant=inputs.variant, class_mask=mask, **arguments)
    agree(differences(actual, leaves), want)


def differences(value: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return {"loss": value.detach(), **dict(zip(leaves, gradients, strict=True))}


def test_output_defaults_differ_from_those_of_attention() -> None:
    """The bias of sigmoid is 0 at an output layer; None gives −log n."""
    x, e, y = rand(3, 4), rand(9, 4, seed=1), torch.tensor([0, 4, 8])
    assert torch.equal(linear_loss(x, e, y, "sigmoid"), linear_loss(x, e, y, "sigmoid", bias=0.0))
    log_n = torch.tensor(9.0).double().log()
    torch.testing.assert_close(
        linear_loss(x, e, y, "sigmoid", bias=None), linear_loss(x, e, y, "sigmoid", bias=-log_n)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("variant", WITH_LSE)
def test_lse_penalty_is_added_without_the_class_weight(variant: str, reduction: str) -> None:
    params = {"topk": {"top_k": 3}, "log_n": {"train_length": 20}}.get(variant, {})
    x, e = rand(8, 4), rand(9, 4, seed=1)
    y = torch.tensor([0, 4, 8, -100, 1, 1, 2, -100])
    weight = rand(9, seed=2).abs()
    options: dict[str, Any] = {"weight": weight, "reduction": reduction, **params}
    plain, stats = linear_loss(x, e, y, variant, return_stats=True, **options)
    penalty = torch.where(y >= 0, 0.3 * stats.lse**2, 0.0)
    if reduction != "none":
        penalty = penalty.sum()
    if reduction == "mean":
        penalty = penalty / weight[y[y >= 0]].sum()
    actual = linear_loss(x, e, y, variant, lse_penalty=0.3, **options)
    torch.testing.assert_close(actual, plain + penalty, rtol=1e-12, atol=1e-12)
