"""Each wrong argument of a loss raises an error that names the argument.

NaN in one token does not affect the losses and gradients of other tokens.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.losses import linear_loss, loss
from helpers.cases import params_of, rand
from helpers.loss_cases import LOSSES

INPUT, WEIGHT = rand(4, 3).float(), rand(6, 3, seed=1).float()
TARGET = torch.tensor([0, 5, 2, 2])
HIDES_TWO = torch.arange(6) != 2
EMPTY = torch.zeros(0, dtype=torch.long)

BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "input a list": (TypeError, "input", {"input": [[1.0, 2.0, 3.0]] * 4}),
    "input of ints": (TypeError, "input", {"input": torch.ones(4, 3, dtype=torch.long)}),
    "input complex": (TypeError, "input", {"input": INPUT.to(torch.complex64)}),
    "input a scalar": (ValueError, "input", {"input": torch.tensor(1.0)}),
    "input too wide": (ValueError, "linear_weight|input", {"input": rand(4, 5).float()}),
    "weight matrix None": (TypeError, "linear_weight", {"linear_weight": None}),
    "weight matrix a vector": (ValueError, "linear_weight", {"linear_weight": WEIGHT[0]}),
    "weight matrix 3d": (ValueError, "linear_weight", {"linear_weight": WEIGHT[None]}),
    "weight matrix in fp64": (
        (TypeError, ValueError),
        "linear_weight",
        {"linear_weight": WEIGHT.double()},
    ),
    "weight matrix without classes": (ValueError, "linear_weight", {"linear_weight": WEIGHT[:0]}),
    "target of fp32": (TypeError, "target", {"target": TARGET.float()}),
    "target of int32": (TypeError, "target", {"target": TARGET.int()}),
    "target of bools": (TypeError, "target", {"target": TARGET > 1}),
    "target too short": (ValueError, "target", {"target": TARGET[:3]}),
    "target with an axis more": (ValueError, "target", {"target": TARGET[:, None]}),
    "target of probabilities": (
        (TypeError, ValueError),
        "target",
        {"target": torch.full((4, 6), 1 / 6)},
    ),
    "target a list": (TypeError, "target", {"target": [0, 5, 2, 2]}),
    "target too large": (ValueError, "target", {"target": torch.tensor([0, 6, 2, 2])}),
    "target negative": (ValueError, "target", {"target": torch.tensor([0, -1, 2, 2])}),
    "default of ignore_index replaced": (
        ValueError,
        "target",
        {"target": torch.tensor([0, -100, 2, 2]), "ignore_index": 3},
    ),
    "bias too short": (ValueError, "linear_bias", {"linear_bias": torch.zeros(5)}),
    "bias a matrix": (ValueError, "linear_bias", {"linear_bias": torch.zeros(1, 6)}),
    "bias in fp64": (
        (TypeError, ValueError),
        "linear_bias",
        {"linear_bias": torch.zeros(6).double()},
    ),
    "bias a number": (TypeError, "linear_bias", {"linear_bias": 1.0}),
    "mask of floats": (TypeError, "class_mask", {"class_mask": torch.ones(6)}),
    "mask too short": (ValueError, "class_mask", {"class_mask": torch.ones(5).bool()}),
    "mask of other tokens": (ValueError, "class_mask", {"class_mask": torch.ones(3, 6).bool()}),
    "mask hides a target": (ValueError, "class_mask|target", {"class_mask": HIDES_TWO}),
    "mask hides all": (ValueError, "class_mask|target", {"class_mask": HIDES_TWO & False}),
    "mask of a token hides its target": (
        ValueError,
        "class_mask|target",
        {"class_mask": torch.arange(6) != TARGET[:, None]},
    ),
    "softcap 0": (ValueError, "softcap", {"softcap": 0.0}),
    "softcap negative": (ValueError, "softcap", {"softcap": -1.0}),
    "softcap infinite": (ValueError, "softcap", {"softcap": float("inf")}),
    "softcap NaN": (ValueError, "softcap", {"softcap": float("nan")}),
    "softcap text": ((TypeError, ValueError), "softcap", {"softcap": "30"}),
    "weight negative": (ValueError, "weight", {"weight": torch.tensor([1.0] * 5 + [-1.0])}),
    "weight NaN": (ValueError, "weight", {"weight": torch.full((6,), torch.nan)}),
    "weight too long": (ValueError, "weight", {"weight": torch.ones(7)}),
    "weight of ints": (TypeError, "weight", {"weight": torch.ones(6, dtype=torch.long)}),
    "weight a list": (TypeError, "weight", {"weight": [1.0] * 6}),
    "smoothing above 1": (ValueError, "label_smoothing", {"label_smoothing": 1.1}),
    "smoothing negative": (ValueError, "label_smoothing", {"label_smoothing": -0.1}),
    "smoothing NaN": (ValueError, "label_smoothing", {"label_smoothing": float("nan")}),
    "smoothing a tensor": (
        (TypeError, ValueError),
        "label_smoothing",
        {"label_smoothing": torch.tensor([0.1, 0.2])},
    ),
    "penalty negative": (ValueError, "lse_penalty", {"lse_penalty": -1.0}),
    "penalty NaN": (ValueError, "lse_penalty", {"lse_penalty": float("nan")}),
    "penalty text": ((TypeError, ValueError), "lse_penalty", {"lse_penalty": "1e-4"}),
    "ignore_index a float": ((TypeError, ValueError), "ignore_index", {"ignore_index": 1.5}),
    "ignore_index None": ((TypeError, ValueError), "ignore_index", {"ignore_index": None}),
    "reduction unknown": (ValueError, "reduction", {"reduction": "elementwise_mean"}),
    "reduction a bool": ((TypeError, ValueError), "reduction", {"reduction": True}),
    "return_stats a string": ((TypeError, ValueError), "return_stats", {"return_stats": "yes"}),
    "variant unknown": (ValueError, "variant|sofmax", {"variant": "sofmax"}),
    "variant a number": ((TypeError, ValueError), "variant", {"variant": 3}),
    "parameter unknown": (TypeError, "alpha", {"alpha": 1.5}),
    "parameter of no finite value": (ValueError, "b", {"variant": "sink", "b": float("nan")}),
    "alpha too large": (ValueError, "alpha", {"variant": "entmax", "alpha": 2.5}),
    "alpha per token": (ValueError, "alpha", {"variant": "entmax", "alpha": torch.full((4,), 1.5)}),
    "beta of other tokens": (ValueError, "beta", {"variant": "asentmax", "beta": torch.ones(3)}),
    "beta per class": (ValueError, "beta", {"variant": "asentmax", "beta": torch.ones(4, 6)}),
    "top_k missing": ((TypeError, ValueError), "top_k", {"variant": "topk"}),
    "top_k 0": (ValueError, "top_k", {"variant": "topk", "top_k": 0}),
    "topk with smoothing": (
        ValueError,
        "label_smoothing",
        {"variant": "topk", "top_k": 2, "label_smoothing": 0.1},
    ),
    "positional": (ValueError, "cosformer", {"variant": "cosformer", "max_length": 100}),
    "gain of statistics": (
        ValueError,
        "adaptive_temperature",
        {"variant": "adaptive_temperature"},
    ),
    **{
        f"penalty of {name}": (ValueError, "lse_penalty", {"variant": name, "lse_penalty": 1e-4})
        for name in ("entmax", "sparsemax", "asentmax", "sigmoid", "taylor")
    },
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_raise(name: str) -> None:
    kind, match, wrong = BAD[name]
    arguments = {"input": INPUT, "linear_weight": WEIGHT, "target": TARGET, **wrong}
    with pytest.raises(kind, match=match) as error:
        linear_loss(**arguments)
    assert len(str(error.value)) < 300
    changed = {"input", "linear_weight", "linear_bias"} & set(wrong)
    if not changed:
        arguments.pop("input")
        arguments.pop("linear_weight")
        with pytest.raises(kind, match=match):
            loss(rand(4, 6).float(), **arguments)


@pytest.mark.parametrize(
    ("kind", "logits"),
    [
        (TypeError, [[1.0, 2.0]]),
        (TypeError, torch.ones(4, 6, dtype=torch.long)),
        (ValueError, torch.tensor(1.0)),
        (ValueError, torch.ones(4, 0)),
        (TypeError, None),
    ],
    ids=["list", "ints", "scalar", "no classes", "None"],
)
def test_wrong_logits_raise(kind: type[Exception], logits: Any) -> None:
    with pytest.raises(kind, match="logits"):
        loss(logits, TARGET)


@pytest.mark.parametrize("number", ["softcap", "label_smoothing", "lse_penalty"])
def test_numbers_may_not_be_bools(number: str) -> None:
    with pytest.raises((TypeError, ValueError), match=number):
        linear_loss(INPUT, WEIGHT, TARGET, **{number: True})


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        linear_loss(INPUT, WEIGHT, TARGET, "softmax", torch.zeros(6))  # type: ignore[misc]


def test_a_masked_class_and_an_ignored_token_without_classes_get_no_gradient() -> None:
    y = torch.tensor([0, -100, 5, 1])
    mask = (torch.arange(6) != 2).expand(4, 6).clone()
    mask[1] = False  # an ignored token may have no class at all
    for variant in ("softmax", "entmax", "sigmoid", "taylor"):
        x, e = INPUT.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        losses = linear_loss(x, e, y, variant, class_mask=mask, reduction="none")
        assert float(losses.detach()[1]) == 0.0
        gradients = torch.autograd.grad(losses.sum(), (x, e))
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert not bool(gradients[0][1].any())
        assert not bool(gradients[1][2].any())


def test_errors_do_not_depend_on_reduction_or_gradients() -> None:
    y = torch.tensor([0, 6, 2, 2])
    for reduction in ("mean", "sum", "none"):
        for x in (INPUT, INPUT.clone().requires_grad_()):
            with pytest.raises(ValueError, match="target"):
                linear_loss(x, WEIGHT, y, reduction=reduction)


# ---- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("variant", LOSSES)
def test_nan_in_a_token_only_affects_its_own_loss_and_gradient(variant: str, number: float) -> None:
    def losses_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        e, y = rand(300, 5, seed=1).float(), torch.arange(200)
        losses = linear_loss(x, e, y, variant, reduction="none", **params_of(variant))
        return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]

    x = rand(200, 5).float()
    clean, clean_gradient = losses_and_gradient(x)
    assert bool(clean.isfinite().all())
    x[131, 2] = number
    losses, gradient = losses_and_gradient(x)
    assert not bool(losses[131].isfinite())
    if number != number:
        assert bool(losses[131].isnan())
        assert bool(gradient[131].isnan().any())
    others = torch.arange(200) != 131
    torch.testing.assert_close(losses[others], clean[others])
    torch.testing.assert_close(gradient[others], clean_gradient[others])


@pytest.mark.parametrize(
    ("name", "meant"), [("reducton", "reduction"), ("bias", "linear_bias"), ("mask", "class_mask")]
)
def test_unknown_keywords_give_the_nearest_of_the_function(name: str, meant: str) -> None:
    for call in (
        lambda **keyword: linear_loss(INPUT, WEIGHT, TARGET, **keyword),
        lambda **keyword: loss(INPUT @ WEIGHT.T, TARGET, **keyword),
    ):
        with pytest.raises(TypeError, match=f"parameter '{name}'.*; did you mean '{meant}'"):
            call(**{name: None})


@pytest.mark.parametrize("variant", LOSSES)
def test_nan_in_an_ignored_token_has_no_effect(variant: str) -> None:
    x, e = rand(20, 5).float(), rand(30, 5, seed=1).float().requires_grad_()
    y = torch.arange(20)
    y[7] = -100
    for reduction in ("mean", "none"):
        results = []
        for number in (0.0, torch.nan):
            x[7] = number
            leaf = x.clone().requires_grad_()
            value = linear_loss(leaf, e, y, variant, reduction=reduction, **params_of(variant))
            gradients = torch.autograd.grad(value.sum(), (leaf, e))
            results.append((value.detach(), *gradients))
        for clean, dirty in zip(*results, strict=True):
            torch.testing.assert_close(dirty, clean)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("variant", LOSSES)
def test_nan_in_a_token_gives_a_reduced_loss_of_nan(variant: str, reduction: str) -> None:
    x = rand(20, 5).float()
    x[3, 1] = torch.nan
    x.requires_grad_()
    e = rand(30, 5, seed=1).float()
    value = linear_loss(x, e, torch.arange(20), variant, reduction=reduction, **params_of(variant))
    assert bool(value.isnan())
    (gradient,) = torch.autograd.grad(value, x)
    others = torch.arange(20) != 3
    assert bool(gradient[others].isfinite().all())


@pytest.mark.parametrize("variant", LOSSES)
def test_nothing_warns(variant: str) -> None:
    x, e = rand(9, 5).requires_grad_(), rand(30, 5, seed=1).requires_grad_()
    y = torch.arange(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reduction in ("mean", "none"):
            for target in (y, torch.full_like(y, -100), EMPTY):
                value = linear_loss(
                    x[: len(target)], e, target, variant, reduction=reduction, **params_of(variant)
                )
                value.sum().backward()
