"""The operators of tiled: torch's checks of schema, fake function, autograd and compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.tiled import operators as tiled_ops
from attnzoo.backends.tiled import statistics
from attnzoo.core import activations
from attnzoo.core.distance import LOGARITHMIC
from helpers.cases import rand
from helpers.operators import opcheck

# rule, names of the per-query vectors, further operands
FORMS: dict[str, tuple[Rule, tuple[str, ...], dict[str, Any]]] = {
    "none": (Rule(activations.SIGMOID, "none"), ("gain", "offset", "factor"), {}),
    "sum": (
        Rule(activations.EXP, "sum", distance=LOGARITHMIC), ("gain", "sink", "decay"),
        {"want_lse": True},
    ),
    "threshold": (Rule(activations.Q_EXP, "threshold"), ("shape",), {"dropout_p": 0.5}),
    "select": (Rule(activations.EXP, "select", keep=2), (), {"want_lse": True}),
    "mass": (Rule(activations.EXP, "select", mass=0.7), (), {"want_lse": True}),
}  # fmt: skip


def operands(gradient: bool) -> tuple[list[Tensor], Layout]:
    """[q, k, v], which require gradients, and a layout, whose mask and slopes may require them."""
    leaves = [rand(2, 4, 5, 4, seed=1), rand(2, 2, 7, 4, seed=2), rand(2, 2, 7, 3, seed=3)]
    mask, slopes = rand(1, 4, 5, 7, seed=4), torch.linspace(0.1, 0.4, 4).double().view(1, 4, 1)
    segments = torch.zeros(2, 5, dtype=torch.int64), torch.arange(7).repeat(2, 1) // 5
    mask, slopes = (x.requires_grad_(gradient) for x in (mask, slopes))
    return [x.requires_grad_() for x in leaves], Layout(0.5, 3, 0, mask, *segments, slopes)


@pytest.mark.parametrize(
    "gradient",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["qkv", "mask and slopes too"],
)
@pytest.mark.parametrize("normalize", FORMS)
def test_opcheck_forward_and_backward(normalize: str, gradient: bool) -> None:
    rule, names, options = FORMS[normalize]
    (q, k, v), layout = operands(gradient)
    layout = layout._replace(softcap=2.0 if normalize == "threshold" else None)
    vectors = {
        name: (1.5 + 0.1 * rand(1, 4, 1, seed=i)).requires_grad_()
        for i, name in enumerate(Vectors._fields)
        if name in names
    }
    seed = torch.tensor(7) if "dropout_p" in options else None
    terms = {
        name: (1.5 + 0.1 * rand(1, 4, 1, seed=i)).requires_grad_()
        for i, name in enumerate(Terms._fields)
        if name in (*names, "key_bias")
    }
    opcheck(
        tiled_ops.tiled_forward, q=q, k=k, v=v, layout=layout, origin=2, seed=seed,
        vectors=Vectors(**vectors), terms=Terms(**terms), rule=rule,
        **{"dropout_p": 0.0, "want_lse": False, **options},
    )  # fmt: skip


@pytest.mark.parametrize("gradient", [False, True], ids=["q and k", "mask and slopes too"])
def test_opcheck_statistics(gradient: bool) -> None:
    (q, k, _), layout = operands(gradient)
    opcheck(statistics.tiled_statistics, q=q, k=k, layout=layout, origin=2)


def test_opcheck_max_logits() -> None:
    (q, k, _), layout = operands(gradient=False)
    opcheck(statistics.tiled_max_logits, q=q.detach(), k=k.detach(), layout=layout, origin=2)


def test_key_of_a_builtin_activation_is_its_name() -> None:
    """An exported program contains these keys.

    When it runs in another process, it looks up its activations by them.
    """
    for activation in (activations.EXP, activations.Q_EXP, activations.TAYLOR[4]):
        assert activation.key == activation.name
