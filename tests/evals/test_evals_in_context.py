"""The command ``in-context``: its problems, gradient step and layers, and what it writes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from commandline.table import read_tables
from commandline.variants import VariantCall
from evals.__main__ import main
from evals.measures.arithmetic import lean_arithmetic
from evals.reporting import in_context as command
from evals.theory import in_context
from evals.theory.in_context import LINEAR, ROWS, SCHEDULE, WIDTH, AttentionLayer

EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test on few problems and at two n."""
    monkeypatch.setattr(in_context, "PROBLEMS", 100)
    monkeypatch.setattr(command, "LENGTHS", (16, ROWS))


def problems(count: int = 20, n: int = 12) -> tuple[Tensor, Tensor]:
    return in_context.draw(count, n, seed=3, dtype=torch.float64)


def step(a: Tensor, b: Tensor) -> Tensor:
    """(1/n) Σ_j (n b_j − 1) a_j, which the gradient step multiplies by 2η/n."""
    n = a.shape[1]
    return ((n * b - 1)[..., None] * a).mean(1)


def layer(variant: VariantCall, heads: int, factor: float) -> AttentionLayer:
    """A layer in which head h has scores ±factor · (n b_j − 1), v_j = a_j and, for two heads, the
    output of the second is subtracted from that of the first."""
    model = AttentionLayer(variant, heads, width=WIDTH).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for h, sign in zip(range(heads), (1, -1)):
            model.query[h, 0, 0] = sign * factor * math.sqrt(WIDTH)  # the default scale is D^-½
            model.to_k.weight[h * WIDTH, WIDTH] = 1
            model.to_v.weight[h * WIDTH : (h + 1) * WIDTH, :WIDTH] = torch.eye(WIDTH)
            model.output.weight[:, h * WIDTH : (h + 1) * WIDTH] = sign * torch.eye(WIDTH)
    return model


def test_the_minimum_of_a_problem_is_zero_and_targets_are_distributions() -> None:
    a, b = problems(500)
    assert a.shape == (500, 12, WIDTH)
    assert torch.allclose(b.sum(-1), torch.ones(500).double())
    centred = a - a.mean(1, keepdim=True)
    logs = b.log() - b.log().mean(-1, keepdim=True)
    best = torch.linalg.lstsq(centred, logs[..., None]).solution[..., 0]
    assert torch.allclose(best.norm(dim=-1), torch.ones(500).double())
    assert in_context.losses(a, b, best).max() < 1e-25


def test_gradient_at_zero_equals_autograd_and_its_closed_form() -> None:
    a, b = problems()
    x = torch.zeros(len(a), WIDTH, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(in_context.losses(a, b, x).sum(), x)
    gradient = in_context.first_gradient(a, b)
    assert torch.allclose(gradient, expected, rtol=0, atol=100 * EPS)
    assert torch.allclose(gradient, -2 / a.shape[1] * step(a, b), rtol=0, atol=100 * EPS)


def test_the_best_step_size_has_the_smallest_loss_of_the_grid(few: None) -> None:
    size = in_context.best_step(ROWS)
    assert min(in_context.STEP_SIZES) * ROWS < size < max(in_context.STEP_SIZES) * ROWS
    a, b = in_context.draw(100, ROWS, in_context._seed("sizes", 0, ROWS))
    gradient = in_context.first_gradient(a, b)

    def loss(size: float) -> float:
        return in_context.losses(a, b, -size * gradient).mean().item()

    assert loss(size) < min(loss(0.8 * size), loss(1.25 * size), loss(0))
    assert in_context.step_losses(a, b).amin(0).mean() <= loss(size)


def test_attention_without_a_normalizer_can_compute_the_gradient_step_exactly() -> None:
    a, b = problems()
    with torch.no_grad():
        x = layer(LINEAR, 1, factor=1.0)(a, b)
    assert torch.allclose(x, step(a, b), rtol=0, atol=1000 * EPS)


def test_two_softmax_heads_approach_the_gradient_step_and_one_head_does_not() -> None:
    """Scores ±βt give (Σ e^{βt} a / Σ e^{βt} − Σ e^{−βt} a / Σ e^{−βt}) / 2β = Σ t a / n + O(β²),
    because the mean of t = n b − 1 is 0."""
    a, b = problems()
    softmax, expected = VariantCall("softmax"), step(a, b)
    errors = {}
    for beta in (1e-2, 1e-3):
        with torch.no_grad():
            scaled_output = layer(softmax, 2, beta)(a, b) / (2 * beta)
        errors[beta] = (scaled_output - expected).abs().max().item()
    assert errors[1e-2] < 0.05 * expected.abs().max()
    assert errors[1e-3] == pytest.approx(errors[1e-2] / 100, rel=0.2)
    with torch.no_grad():
        one = layer(softmax, 1, 1e-3)(a, b)
    assert torch.allclose(one, a.mean(1), atol=0.02)


def test_draws_for_tests_step_sizes_and_training_differ() -> None:
    seeds = [in_context._seed(split, seed, index) for split in ("test", "sizes", "train")
             for seed in range(5) for index in (0, 8, 999)]  # fmt: skip
    assert len(set(seeds)) == len(seeds)


@pytest.mark.usefixtures("few")
def test_training_is_repeatable_and_improves_on_x_equal_to_zero() -> None:
    base = in_context.baselines((ROWS,))
    line = base.loc[ROWS]
    assert line["each"] < line["step"] == line["scaled"] < line["zero"]
    trained = in_context.train(LINEAR, 1, 0, base, replace(SCHEDULE, steps=101, batch=32))
    assert trained.loss[ROWS] < 0.5 * line["zero"]
    assert list(trained.curve) == [100, 101]
    short = replace(SCHEDULE, steps=3, batch=8)
    first, second = (in_context.train(LINEAR, 1, 0, base, short) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_trained_attention_without_a_normalizer_is_the_gradient_step() -> None:
    with lean_arithmetic():
        base = in_context.baselines((ROWS,))
        trained = in_context.train(LINEAR, 1, 0, base)
    assert trained.loss[ROWS] == pytest.approx(base["step"][ROWS], rel=0.02)
    assert trained.cosine > 0.99


@pytest.mark.usefixtures("few")
def test_command_writes_tables_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["in-context", "--variants", "softmax", "--seeds", "2", "--steps", "3"]
    assert main([*line, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    comparison, by_rows = read_tables((tmp_path / "in-context.csv").read_text())
    layers = ["linear, 1 head", "linear, 2 heads", "softmax, 1 head", "softmax, 2 heads"]
    assert [row[0] for row in comparison.rows[3:]] == layers
    assert [row[0] for row in by_rows.rows[2:]] == layers
    assert by_rows.header == ["layer", "n = 16", "n = 32"]
    assert "(" in comparison.rows[3][1]  # the range over seeds
    assert "Mean (range) of 2 seeds" in comparison.note
    for row in comparison.rows:
        assert row[0] in text
    assert (tmp_path / "in-context.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds must be an int >= 1, got 0"),
        (["--steps", "-1"], "--steps must be an int >= 1, got -1"),
        (["--variants", "softmax->ssmax"], "--variants must be among adaptive_temperature, "),
        (["--variants", "linear"], "--variants must be among adaptive_temperature, "),
        (["--variants", "softmx"], "got softmx; did you mean 'softmax'?"),
    ],
)
def test_wrong_options_are_errors(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["in-context", *options]) == 2
    assert message in capsys.readouterr().err
