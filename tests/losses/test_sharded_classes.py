"""`linear_loss` with classes, tokens or parameters that are sharded over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from attnzoo.nn import MixtureOutput
from helpers.cases import rand
from helpers.covering import covering, each_setting
from helpers.loss_cases import FACTORS, allowed
from helpers.ranks import on_ranks
from helpers.sharded_losses import MISTAKES, differences, everything

CLASSES = ("classes", (3, 37, 1500))  # up to three ranks have classes
ROWS = covering(tuple(CLASSES if f[0] == "classes" else f for f in FACTORS), allowed)


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    rows = [(i, row) for i, row in enumerate(ROWS) if row in each_setting(ROWS, 1)]
    results = on_ranks(2, everything, rows)
    assert all(isinstance(result, dict) for result in results), results
    return results


def test_sharded_classes_agree_with_the_definition(by_rank: list[dict[str, Any]]) -> None:
    assert [of_rank["differences"] for of_rank in by_rank] == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_combinations_agree_with_the_definition(ranks: int) -> None:
    assert on_ranks(ranks, differences, list(enumerate(ROWS)), seconds=600) == [{}] * ranks


def test_statistics_output_layers_and_fsdp2(by_rank: list[dict[str, Any]]) -> None:
    for of_rank in by_rank:
        for name, (have, want) in of_rank["pairs"].items():
            assert have == pytest.approx(want, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(("function", "text"), MISTAKES.items())
def test_mistakes_raise_on_all_ranks(
    by_rank: list[dict[str, Any]], function: Callable[[int], str], text: str
) -> None:
    for of_rank in by_rank:
        assert re.search(text, of_rank["errors"][function.__name__])


# ---- mixtures ---------------------------------------------------------------------------------


def mixture(mix: str) -> MixtureOutput:
    torch.manual_seed(0)
    return MixtureOutput(4, 11, 3, "ssmax", mix=mix, learn=["s"]).double()


@pytest.mark.parametrize("mix", ["probabilities", "contexts"])
def test_losses_of_a_mixture_with_sharded_classes(mesh: Any, mix: str) -> None:
    target, results = torch.tensor([0, 4, 10, -100, 3, 6]), []
    for layer in (mixture(mix), mixture(mix).shard_classes(mesh)):
        x = rand(6, 4).requires_grad_()
        losses = [layer.loss(x, target, reduction) for reduction in ("mean", "sum", "none")]
        assert not any(isinstance(loss, DTensor) for loss in losses)
        gradients = torch.autograd.grad(losses[0] + losses[2][1], [x, *layer.parameters()])
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        results.append(torch.cat([part.flatten() for part in (*losses, *full)]).detach())
    assert torch.allclose(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mix", ["probabilities", "contexts"])
def test_a_mixture_with_sharded_classes_has_no_other_methods(mesh: Any, mix: str) -> None:
    layer, x, y = mixture(mix).shard_classes(mesh), rand(6, 4), torch.arange(6)
    for call in (lambda: layer(x, y), lambda: layer.logits(x)):
        with pytest.raises(TypeError, match="weight is a DTensor: only the method loss takes"):
            call()
    for call in (lambda: layer.log_prob(x), lambda: layer.topk(x, 2), lambda: layer.predict(x)):
        with pytest.raises(TypeError, match="linear_weight must be a plain tensor, got a DTensor"):
            call()
    with pytest.raises(TypeError, match="input must be a plain tensor, got a DTensor"):
        layer.loss(DTensor.from_local(x, mesh, [Replicate()]), y)
