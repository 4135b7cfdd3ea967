"""Losses other than `linear_loss` under torch.compile, autocast and second derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import losses
from helpers.cases import rand
from helpers.other_loss_definitions import ENTRIES, Entry

TARGET = torch.tensor([3, 0, -100, 8, 6, 3])


def function_of(entry: Entry) -> Any:
    options: dict[str, Any] = dict(entry.options)
    if entry.seed is not None:
        options["training"] = False
    return partial(getattr(losses, entry.function), **options)


def leaves() -> tuple[Tensor, Tensor]:
    return rand(6, 4).float().requires_grad_(), rand(11, 4, seed=1).float().requires_grad_()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ENTRIES)
def test_compiled_losses_are_the_same(name: str, dynamic: bool) -> None:
    torch.compiler.reset()
    function = function_of(ENTRIES[name])

    def loss(h: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
        value: Tensor = function(h, matrix, target)
        return value

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (6, 4):
        h, matrix = leaves()
        h = h[:tokens].detach().requires_grad_()
        actual, want = (f(h, matrix, TARGET[:tokens]) for f in (compiled, loss))
        torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6)
        gradients = (torch.autograd.grad(x, (h, matrix)) for x in (actual, want))
        for one, other in zip(*gradients):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ENTRIES)
def test_autocast_casts_the_inputs_only(name: str) -> None:
    function, (h, matrix) = function_of(ENTRIES[name]), leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = function(h, matrix, TARGET)
    want = function(h.bfloat16(), matrix.bfloat16(), TARGET)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, want)
    assert torch.autograd.grad(actual, h)[0].dtype == torch.float32


@pytest.mark.parametrize("name", ENTRIES)
def test_second_derivatives_of_the_matrix_raise(name: str) -> None:
    """The sizes are such that losses from moments use the moments."""
    function, (_, matrix) = function_of(ENTRIES[name]), leaves()
    h, target = rand(40, 4).float(), torch.full((40,), 3)
    (grad,) = torch.autograd.grad(function(h, matrix, target), matrix, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(grad.sum(), matrix)
