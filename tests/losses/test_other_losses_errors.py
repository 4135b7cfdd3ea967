"""Wrong arguments of losses other than `linear_loss` raise errors that name the argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnzoo import losses
from helpers.cases import rand
from helpers.other_loss_definitions import ENTRIES

H, MATRIX = rand(3, 4).float(), rand(6, 4, seed=1).float()
TARGET = torch.tensor([0, 5, 2])
TASK = torch.ones(6, dtype=torch.bool)
NEEDED: dict[str, dict[str, Any]] = {
    "noisy_loss": {"alpha": 0.1},
    "masked_loss": {"class_mask": TASK},
    "z_loss": {"a": 1.0, "b": 1.0},
}
FUNCTIONS = sorted({entry.function for entry in ENTRIES.values()})

# Arguments that all losses have.
SHARED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "input a list": (TypeError, "input", {"input": [[1.0]]}),
    "input of ints": (TypeError, "input", {"input": torch.ones(3, 4, dtype=torch.long)}),
    "weight None": (TypeError, "linear_weight", {"linear_weight": None}),
    "weight too wide": (ValueError, "linear_weight", {"linear_weight": rand(6, 5).float()}),
    "weight in fp64": (TypeError, "linear_weight", {"linear_weight": MATRIX.double()}),
    "target too large": (ValueError, "target", {"target": torch.tensor([0, 6, 2])}),
    "target of floats": (TypeError, "target", {"target": TARGET.float()}),
    "target too long": (ValueError, "target", {"target": torch.zeros(4, dtype=torch.long)}),
    "reduction unknown": (ValueError, "reduction", {"reduction": "avg"}),
    "ignore_index a float": (TypeError, "ignore_index", {"ignore_index": 0.5}),
}

OF_ONE_FUNCTION: dict[str, tuple[str, type[Exception], str, dict[str, Any]]] = {
    "kind unknown": ("margin_loss", ValueError, "kind must be one of am, cos, arc", {"kind": "a"}),
    "kind None": ("margin_loss", ValueError, "kind", {"kind": None}),
    "scale 0": ("margin_loss", ValueError, "scale must be a finite number > 0", {"scale": 0}),
    "scale a tensor": ("margin_loss", TypeError, "scale", {"scale": torch.ones(2)}),
    "margin negative": ("margin_loss", ValueError, "margin", {"margin": -0.1}),
    "margin above π": ("margin_loss", ValueError, "margin", {"kind": "arc", "margin": 3.2}),
    "margin NaN": ("margin_loss", ValueError, "margin", {"margin": math.nan}),
    "alpha negative": ("noisy_loss", ValueError, "alpha", {"alpha": -1.0}),
    "alpha a bool": ("noisy_loss", TypeError, "alpha", {"alpha": True}),
    "generator an int": ("noisy_loss", TypeError, "generator", {"generator": 0}),
    "training an int": ("noisy_loss", TypeError, "training", {"training": 1}),
    "mask of ints": ("masked_loss", TypeError, "class_mask", {"class_mask": TASK.int()}),
    "mask None": ("masked_loss", TypeError, "class_mask", {"class_mask": None}),
    "mask too short": ("masked_loss", ValueError, "class_mask", {"class_mask": TASK[:4]}),
    "target masked": (
        "masked_loss", ValueError, "class_mask is False for class 5",
        {"class_mask": torch.arange(6) < 5},
    ),
    "value +inf": ("masked_loss", ValueError, "value", {"value": math.inf}),
    "value NaN": ("masked_loss", ValueError, "value", {"value": math.nan}),
    "value a tensor": (
        "masked_loss", TypeError, "value must be a finite number or -inf", {"value": torch.ones(2)},
    ),
    "value a string": ("masked_loss", TypeError, "value", {"value": "-inf"}),
    "a 0": ("z_loss", ValueError, "a must be a finite number > 0", {"a": 0.0}),
    "b infinite": ("z_loss", ValueError, "b must be a finite number", {"b": math.inf}),
    "eps 0": ("spherical_loss", ValueError, "eps", {"eps": 0.0}),
    "std 0": ("exact_loss", ValueError, "std", {"std": 0.0}),
    "std a string": ("perturb_max_loss", TypeError, "std", {"std": "1"}),
}  # fmt: skip


def call(function: str, **changed: Any) -> torch.Tensor:
    arguments = {"input": H, "linear_weight": MATRIX, "target": TARGET}
    all_arguments = {**arguments, **NEEDED.get(function, {}), **changed}
    value: torch.Tensor = getattr(losses, function)(**all_arguments)
    return value


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_of_these_tests_are_valid(function: str) -> None:
    assert bool(call(function).isfinite())


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_shared_arguments(function: str, what: str) -> None:
    error, message, changed = SHARED[what]
    with pytest.raises(error, match=message):
        call(function, **changed)


@pytest.mark.parametrize("what", OF_ONE_FUNCTION)
def test_wrong_arguments_of_one_function(what: str) -> None:
    function, error, message, changed = OF_ONE_FUNCTION[what]
    with pytest.raises(error, match=message):
        call(function, **changed)


@pytest.mark.parametrize("function", sorted(set(FUNCTIONS) - {"margin_loss"}))
def test_a_wrong_bias(function: str) -> None:
    with pytest.raises(ValueError, match="linear_bias"):
        call(function, linear_bias=torch.zeros(5))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_torch_func_is_rejected(function: str) -> None:
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda h: call(function, input=h))(H)
