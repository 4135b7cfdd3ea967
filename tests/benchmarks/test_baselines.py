"""The baselines of the benchmarks.

flex_sigmoid agrees with the definition of sigmoid. Each variant has the baselines that compute it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attnzoo
from benchmarks.harness import baselines
from benchmarks.harness.baselines import NAMES
from benchmarks.harness.cases import Case, Inputs, Setting

SMALL = Setting(length=150, batch=3, heads=3, head_dim=16, causal=False)


# ---- baselines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, -1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_of_log_sigmoid_times_sum_of_sigmoids_equals_sigmoid(
    causal: bool, bias: float | None
) -> None:
    """Checks output and gradients of the formula in `flex_sigmoid`, computed in plain PyTorch."""
    setting = Setting(length=40, heads=2, head_dim=16, causal=causal, dtype="float64",
        input_scale=4.0)  # fmt: skip
    i = Inputs.make(setting, gradients=True)
    rows, keys = torch.arange(40)[:, None], torch.arange(40)
    modify = baselines.log_sigmoid(setting, bias)
    s = modify(i.q @ i.k.mT * 16**-0.5, rows * 0, rows * 0, rows, keys)
    s = s.masked_fill(rows < keys, -torch.inf) if causal else s
    lse = s.logsumexp(-1)
    trick = (s.softmax(-1) @ i.v) * lse.exp()[..., None]
    exact = attnzoo.attention(i.q, i.k, i.v, "sigmoid", is_causal=causal, bias=bias)
    torch.testing.assert_close(trick, exact, rtol=1e-6, atol=1e-7)
    leaves = (i.q, i.k, i.v)
    for actual, expected in zip(
        torch.autograd.grad(trick, leaves, i.do), torch.autograd.grad(exact, leaves, i.do)
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_sigmoid_agrees_with_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "compiled", lambda attend: attend)
    setting = Setting(length=48, heads=2, head_dim=16)
    i = Inputs.make(setting)
    with torch.no_grad():
        out = baselines.flex_sigmoid(setting, None)(i.q, i.k, i.v)
    exact = attnzoo.attention(i.q, i.k, i.v, "sigmoid", is_causal=True)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)


def test_log_sigmoid_does_not_overflow() -> None:
    modify = baselines.log_sigmoid(SMALL, 0.0)
    x = torch.tensor([-1e4, -5.0, 0.0, 5.0, 1e4])
    torch.testing.assert_close(modify(x, x, x, x, x), F.logsigmoid(x))


def test_each_variant_has_the_baselines_that_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "installed", lambda package: True)
    assert list(baselines.of_softmax(SMALL, NAMES)) == ["sdpa", "sdpa flash", "sdpa cudnn", "flex"]
    assert list(baselines.of_softmax(SMALL, ["cudnn"])) == ["sdpa cudnn"]

    def of(spec: str) -> list[str]:
        case, setting = Case.parse(spec, 64), replace(SMALL, causal=True)
        return list(baselines.of_variant(case, setting, NAMES))

    assert of("softmax") == []
    assert of("sigmoid") == ["flex: sigmoid"]
    assert of("sigmoid(bias=-2.0)") == [
        "flex: sigmoid(bias=-2.0)", "flash-sigmoid: sigmoid(bias=-2.0)",
    ]  # fmt: skip
    versions = ["adasplash", "adasplash-v1", "adasplash-dense", "bisection"]
    assert of("entmax") == [f"{name}: entmax" for name in (*versions, "package entmax")]
    assert of("entmax(alpha=1.4)") == [f"{name}: entmax(alpha=1.4)" for name in versions]
    assert of("sparsemax") == ["package entmax: sparsemax"]
    assert of("cosformer") == ["fla chunk_linear_attn: cosformer"]
