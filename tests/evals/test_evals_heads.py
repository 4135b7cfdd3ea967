"""Metrics of single heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attnzoo
from commandline.variants import VariantCall
from evals.measures.heads import measured_heads, substituted
from evals.task import HeadSample


def test_head_metrics_by_hand() -> None:
    """The example has one head and one query. Its three keys have scores 0, 1 and 3."""
    attention = attnzoo.nn.Attention("softmax", 1)
    q, scores = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0, 3.0])
    with measured_heads(attention, HeadSample(1, 1)) as curves:
        attention(q, scores[None, None, :, None], torch.zeros(1, 1, 3, 1), scale=1.0)
    metrics = {name: rows.item() for name, rows in curves.items()}
    p = torch.softmax(scores.double(), 0)
    assert metrics["head_peak"] == pytest.approx(p[2].item())
    assert metrics["head_n_eff"] == pytest.approx(1 / p.square().sum().item())
    assert metrics["head_entropy"] == pytest.approx(-(p * p.log()).sum().item() / math.log(3))
    assert metrics["head_range"] == pytest.approx(3)
    assert metrics["head_bound"] == 1  # = min(1, e³ / 3)
    assert metrics["head_strength"] == pytest.approx((4 / 3) / math.log(3))
    jacobian = torch.diag(p) - torch.outer(p, p)
    assert metrics["head_jacobian"] == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item())
    # The pairwise cosines of the keys are 0, 0 and 1.
    assert metrics["head_alignment"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("positions", ["none", "alibi"])
def test_largest_weight_of_softmax_stays_below_its_bound(positions: str) -> None:
    q, k = torch.randn(2, 3, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    slopes = {"alibi": torch.tensor([4.0, 0.5])} if positions == "alibi" else {}
    attention = attnzoo.nn.Attention("softmax", 2)
    with measured_heads(attention, HeadSample(2, 1)) as curves:
        attention(q, k, k, is_causal=True, scale=0.3, **slopes)
    assert (curves["head_peak"] <= curves["head_bound"]).all()
    assert curves["head_peak"].shape == (2 * 4, 2)  # 4 queries per sequence × 2 sequences, 2 heads
    assert (curves["head_bound"] < 1).any() == (positions == "none")
    if positions == "alibi":  # head_range includes keys whose weight is 0 in fp64
        assert (curves["head_range"][:, 0] > 4 * 290).all()
    assert "head_jacobian" not in curves  # Jacobians need n <= 256


def test_jacobians_are_measured_if_weights_depend_on_scores_alone() -> None:
    q = torch.rand(1, 1, 1, 4)
    for variant, params in (("ssmax", {}), ("cosformer", {"max_length": 9}), ("hedgehog", {})):
        attention = attnzoo.nn.Attention(variant, 1, head_dim=4, **params)
        with measured_heads(attention, HeadSample(1, 1)) as curves:
            attention(q, torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4))
        assert ("head_jacobian" in curves) == (variant == "ssmax")


@pytest.mark.parametrize(
    ("variant", "params"),
    [
        ("asentmax", {"beta": "projected", "gamma": "projected"}),
        ("forgetting", {"log_gates": "projected"}),
    ],
)
def test_parameters_from_hidden_states_are_measured(variant: str, params: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = attnzoo.nn.Transformer(11, 16, 2, 1, [(variant, params)], positions="none")
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "projections" in name:
                x.copy_(torch.randn_like(x))
    (attend,) = (m for m in model.modules() if isinstance(m, attnzoo.nn.Attention))
    weights: list[torch.Tensor] = []

    def keep(module: attnzoo.nn.Attention, args: tuple, kwargs: dict[str, Any], _: object) -> None:
        weights.append(module.forward(*args, **{**kwargs, "need_weights": True})[1])

    attend.register_forward_hook(keep, with_kwargs=True)
    with measured_heads(model, HeadSample(2, 1)) as curves, torch.no_grad():
        model(torch.randint(11, (2, 9)))
    peaks = weights[0][:, :, -4:].amax(-1).transpose(1, 2).flatten(0, 1)  # the last four queries
    assert torch.allclose(curves["head_peak"], peaks.double(), atol=1e-5)
    assert "head_jacobian" not in curves


def test_a_query_whose_weights_are_all_zero_has_no_effective_keys() -> None:
    attention = attnzoo.nn.Attention("cosformer", 1, max_length=4)
    k = -torch.ones(1, 1, 3, 2)  # relu features of negative keys are 0
    with measured_heads(attention, HeadSample(1, 1)) as curves:
        attention(torch.ones(1, 1, 1, 2), k, k)
    assert curves["head_weight_sum"].item() == curves["head_n_eff"].item() == 0


def test_a_substituted_variant_is_in_evaluation_mode() -> None:
    model = attnzoo.nn.Transformer(8, 16, 2, 2).eval()
    tokens = torch.arange(7)[None]
    plain = model(tokens)
    with substituted(model, VariantCall("noisy", (("std", 1.0),))):
        assert torch.equal(model(tokens), plain)
