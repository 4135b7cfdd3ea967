"""Learned parameters with an interval (`Param.between`)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import attnzoo
from attnzoo import Param
from attnzoo.nn import Attention
from attnzoo.nn.bounded import Bounded
from helpers.cases import params_of, rand

INF = math.inf
DISTANCES = [1e-11, 1e-6, 0.168, 1.0, 20.0, 1e4, 1e30]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_starts_of_any_size_are_kept(sign: int, dtype: torch.dtype) -> None:
    """The relative error is that of rounding ``original``, which is log v for small values v."""
    # A start is stored without the smallest distance, so that 1e-11 has a condition of 1.1.
    start = sign * torch.tensor(DISTANCES, dtype=torch.float64)
    ends = (0.0, INF) if sign > 0 else (-INF, 0.0)
    value = Bounded("x", *ends, start).to(dtype)().double()
    eps = max(torch.finfo(dtype).eps, torch.finfo(value.dtype).eps)
    eps = eps if dtype == torch.float64 else max(eps, torch.finfo(torch.float32).eps)
    bound = (start.abs().log().abs() + 4) * eps * start.abs()
    assert bool(((value - start).abs() <= bound).all())


@pytest.mark.parametrize("ends", [(0.0, INF), (1.0, INF), (-INF, 0.0), (-INF, -1000.3), (-1.0, 2)])
@pytest.mark.parametrize("raw", [-1e30, -1e4, -104.0, -20.0, 0.0, 20.0, 104.0, 1e4, 1e30])
def test_no_step_of_an_optimizer_leaves_the_interval(raw: float, ends: Any) -> None:
    middle = sum(x for x in ends if math.isfinite(x)) + (1 if ends[1] == INF else -1)
    bounded = Bounded("x", *ends, torch.tensor([middle if INF in map(abs, ends) else 0.5]))
    nn.init.constant_(bounded.original, raw)
    value = bounded()
    assert ends[0] < value.item() < ends[1]
    value.sum().backward()
    assert bool(bounded.original.grad.isfinite().all())  # type: ignore[union-attr]


def test_a_positive_parameter_is_trained_and_saved(own_registry: None) -> None:
    positive = Param("t", 1.0, init=1.0, check=lambda x: x > 0, allowed="above 0", between=(0, INF))

    def weights(q, k, call, t):
        return call.softmax(call.scores(q, k) / t + call.bias)

    attnzoo.register_variant(attnzoo.Variant("tempered", "", "", weights, (positive,)))
    attend = Attention("tempered", 2)
    assert attend.t.tolist() == pytest.approx([1.0, 1.0])
    optimizer = torch.optim.SGD(attend.parameters(), lr=1e4)
    for _ in range(4):  # larger steps would make a plain parameter negative
        q, k, v = (rand(1, 2, 6, 8, seed=i).float() for i in range(3))
        (-attend(q, k, v).square().sum()).backward()
        optimizer.step()
    assert bool((attend.t > 0).all())
    attend.t = torch.tensor([1e-9, 1e9])
    assert attend.t.tolist() == pytest.approx([1e-9, 1e9])
    other = Attention("tempered", 2)
    other.load_state_dict(attend.state_dict())
    assert torch.equal(other.t, attend.t)
    with pytest.raises(ValueError, match=r"t must start inside \(1e-12, inf\).*got \[9.99"):
        Attention("tempered", 2, t=nn.Parameter(torch.full((2,), 1e-20)))
    with pytest.raises(ValueError, match="tempered's t must be above 0, got -1"):
        Attention("tempered", 2, t=-1.0)


LEARNABLE = [
    (name, param.name) for name in attnzoo.list_variants()
    for param in attnzoo.get_variant(name).params
    if param.kind in ("per_head", "tensor") and param.check is not None
]  # fmt: skip


@pytest.mark.parametrize(("variant", "name"), LEARNABLE)
@pytest.mark.parametrize("raw", [-1e3, 1e3])
def test_training_cannot_move_a_parameter_of_a_variant_out_of_its_range(
    variant: str, name: str, raw: float
) -> None:
    start = {name: -0.1} if variant == "forgetting" else {}
    attend = Attention(variant, 2, learn=(name,), **{**params_of(variant), **start})
    for p in attend.parameters():
        nn.init.constant_(p, raw)
    q, k, v = (rand(1, 2, 6, 8, seed=i).float() for i in range(3))
    assert bool(attend(q, k, v, is_causal=True).isfinite().all())
