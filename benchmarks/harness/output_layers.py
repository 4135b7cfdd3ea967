"""Output layers in the shape of attention: hidden states are queries, classes are keys.

`output_inputs` returns the hidden states (N, d) as q, the matrix of classes (V, d) as k and the
targets (N,) as v, so that `bench` times a loss as it times attention. `check_loss` compares a loss
and its gradients with a formula in fp64. The formula computes all scores at once, so the check uses
a small layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Attend, Case, Inputs, Setting
from benchmarks.harness.correctness import RESIDUAL, Check, deviation
from commandline.errors import UsageError

# The layer on which results are checked. It has enough classes that the threshold solver
# can leave out groups of classes.
SMALL = {"length": 48, "classes": 3000, "head_dim": 16}
FUSED = ("linear_cross_entropy", "linear_cross_entropy, chunked")


@dataclass(frozen=True)
class OutputSetting(Setting):
    """An output layer for ``length`` tokens of ``head_dim`` numbers. Scores have std input_scale.

    packages: whether to compare with other packages, which hold several N × V matrices. moments:
    whether to compare losses that need only moments of the classes. top: if not 0, the inputs are
    scores, and this many of the largest probabilities are computed.
    """

    classes: int = 32000
    packages: bool = False
    moments: bool = False
    top: int = 0

    @property
    def title(self) -> str:
        scale = "" if self.input_scale == 1 else f", scores × {self.input_scale:g}"
        if self.top:
            return f"top {self.top} of V={self.classes} {self.dtype}{scale}"
        return f"V={self.classes} d={self.head_dim} {self.dtype}{scale}"

    @property
    def small(self) -> OutputSetting:
        return replace(self, **SMALL)

    @property
    def score_bytes(self) -> int:
        """Number of bytes that all scores take in fp32."""
        return 4 * self.length * self.classes

    @property
    def gradient_bytes(self) -> int:
        size = getattr(torch, self.dtype).itemsize
        return size * self.head_dim * (self.length + self.classes)


def output_inputs(setting: OutputSetting, gradients: bool = True) -> Inputs:
    """Random hidden states, classes and targets from the setting's seed."""
    s, dtype = setting, getattr(torch, setting.dtype)
    generator = torch.Generator(s.device).manual_seed(s.seed * 1_000_003 + s.length)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=s.device)

    hidden = drawn(s.length, s.head_dim).mul_(s.input_scale).to(dtype)
    matrix = drawn(s.classes, s.head_dim).mul_(s.head_dim**-0.5).to(dtype)
    target = torch.randint(s.classes, (s.length,), generator=generator, device=s.device)
    one = torch.ones((), device=s.device)
    for x in (hidden, matrix):
        x.requires_grad_(gradients)
    return Inputs(hidden, matrix, target, one, {}, causal=False)


def loss_of(case: Case) -> Attend:
    """(hidden states, matrix, targets) -> mean loss, by `attnzoo.losses.linear_loss`."""
    return partial(attnzoo.losses.linear_loss, variant=case.variant, **case.params)


# Losses that need only the mean and the Gram matrix of the classes, with arguments.
MOMENT_LOSSES: dict[str, Attend] = {
    "z_loss": partial(attnzoo.losses.z_loss, a=0.1, b=10.0),
    "spherical_loss": attnzoo.losses.spherical_loss,
}


def losses_of_torch() -> dict[str, Callable[[], Attend]]:
    """Torch's `linear_cross_entropy` without and with chunks, and its `cross_entropy` of logits."""
    return {
        FUSED[0]: lambda: F.linear_cross_entropy,
        FUSED[1]: _chunked,
        "linear, cross_entropy": lambda: lambda h, e, y: F.cross_entropy(F.linear(h, e), y),
    }


def _chunked() -> Attend:
    options = torch.nn.LinearCrossEntropyOptions()
    return partial(F.linear_cross_entropy, options=options)


# ---- the check ----------------------------------------------------------------------------------


# Computes the losses of tokens (N, 1) from all logits (N, V) and targets (N, 1).
Formula = Callable[[Tensor, Tensor], Tensor]


def by_formula(formula: Formula, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The mean loss and its gradients, from all scores."""
    hidden, matrix = (x.detach().to(dtype).requires_grad_() for x in (inputs.q, inputs.k))
    loss = formula(hidden @ matrix.T, inputs.v[:, None]).mean()
    gradients = torch.autograd.grad(loss, (hidden, matrix))
    return {"loss": loss.detach(), "dinput": gradients[0], "dweight": gradients[1]}


def _dense(case: Case, logits: Tensor, column: Tensor) -> Tensor:
    """The loss of each token, (N, 1)."""
    form, params = _form(case, logits)
    weights = attnzoo.probabilities(logits, case.variant, **params)
    scores = logits * _column(form.gain)
    if form.normalize == "none":  # one-vs-rest
        one_hot = torch.zeros_like(weights).scatter_(1, column, 1.0)
        return F.binary_cross_entropy(weights, one_hot, reduction="none").sum(-1, keepdim=True)
    if form.normalize == "select":  # cross entropy over the kept classes and the target
        outside = (weights == 0).scatter_(1, column, False)
        scores = scores.masked_fill(outside, float("-inf"))
        return scores.logsumexp(-1, keepdim=True) - scores.gather(1, column)
    if form.normalize == "sum":
        return -weights.gather(1, column).log()
    # Fenchel-Young: Σ p s − Ω(p) − s_y with Ω(p) = (Σ p^α − 1)/(α(α − 1)). Its gradient is p − e_y,
    # therefore p needs no derivative.
    alpha, p = form.activation.alpha, weights.detach()
    alpha = _column(form.shape) if alpha == "shape" else alpha
    assert alpha is not None
    omega = (p.pow(alpha).sum(-1, keepdim=True) - 1) / (alpha * (alpha - 1))
    return (p * scores).sum(-1, keepdim=True) - omega - scores.gather(1, column)


def _z_loss(logits: Tensor, column: Tensor) -> Tensor:
    score = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, correction=0, keepdim=True)
    return torch.log1p(torch.exp(0.1 * (10.0 - score.gather(1, column)))) / 0.1


def _spherical_loss(logits: Tensor, column: Tensor) -> Tensor:
    squares = logits.square() + 1e-3
    return -(squares.gather(1, column) / squares.sum(-1, keepdim=True)).log()


FORMULAS: dict[str, Formula] = {"z_loss": _z_loss, "spherical_loss": _spherical_loss}


def formula_of(name: str, case: Case) -> Formula:
    """The formula of a row of the benchmark."""
    return FORMULAS.get(name, partial(_dense, case))


def _column(vector: Any) -> Tensor | float:
    """Converts a per-query vector of a form, such as the gain, to a float or a tensor (n, 1)."""
    return vector.reshape(-1, 1) if isinstance(vector, Tensor) else float(vector)


def _form(case: Case, logits: Tensor) -> tuple[attnzoo.Pairwise, dict[str, Any]]:
    """The case's pairwise form for logits (N, V), and its parameters with output-layer defaults."""
    defaults = attnzoo.get_variant(case.variant).output_defaults or {}
    params = {**defaults, **case.params}
    q, k = logits.detach()[None, None, :1, :1], logits.detach()[None, None, :1].mT
    plan = attnzoo.explain(q, k, k, case.variant, scale=1.0, **params)
    forms = (c.form for c in plan.candidates)
    form = next((form for form in forms if isinstance(form, attnzoo.Pairwise)), None)
    if form is None:
        raise UsageError(f"{case.spec} has no output layer: it has no pairwise form")
    return form, params


def check_loss(attend: Attend, name: str, case: Case, setting: OutputSetting) -> Check:
    """Compares a loss of attnzoo and its gradients on a small layer with fp64."""
    inputs, formula = output_inputs(setting.small), formula_of(name, case)
    exact = by_formula(formula, inputs, torch.float64)
    plain = by_formula(formula, inputs, inputs.q.dtype)
    loss = attend(inputs.q, inputs.k, inputs.v)
    gradients = torch.autograd.grad(loss, (inputs.q, inputs.k))
    results = dict(zip(exact, (loss.detach(), *gradients), strict=True))
    slack = torch.finfo(inputs.q.dtype).eps + (RESIDUAL if case.has_threshold else 0.0)
    deviations = {n: deviation(x, plain[n], exact[n], slack) for n, x in results.items()}
    return Check(len(inputs.q), 1, deviations)


def error_of_loss(attend: Attend, case: Case, setting: OutputSetting) -> float:
    """The relative error of a baseline's loss on a small layer."""
    inputs = output_inputs(setting.small, gradients=False)
    exact = by_formula(partial(_dense, case), inputs, torch.float64)["loss"]
    with warnings.catch_warnings():  # on small layers torch falls back to the path without chunks
        warnings.simplefilter("ignore")
        loss = attend(inputs.q, inputs.k, inputs.v)
    return ((loss - exact) / exact).abs().item()


# ---- the k most probable classes ----------------------------------------------------------------


def top_inputs(setting: OutputSetting) -> Inputs:
    """Random scores (N, V)."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    shape = (setting.length, setting.classes)
    scores = torch.randn(shape, generator=generator, device=setting.device)
    scores = scores.mul_(setting.input_scale).to(getattr(torch, setting.dtype))
    one = torch.ones((), device=setting.device)
    return Inputs(scores, one, one, one, {}, causal=False)


def top_probabilities(k: int) -> Attend:
    return lambda scores, *_: attnzoo.topk_probabilities(scores, k).values


def softmax_then_topk(k: int) -> Attend:
    return lambda scores, *_: scores.softmax(-1).topk(k, dim=-1).values


def check_top(attend: Attend, setting: OutputSetting) -> Check:
    """Compares the probabilities of all rows with fp64."""
    scores, reference = top_inputs(setting).q, softmax_then_topk(setting.top)
    exact, plain = (reference(x, x, x) for x in (scores.double(), scores))
    slack, actual = torch.finfo(scores.dtype).eps, attend(scores, scores, scores)
    return Check(len(scores), 1, {"out": deviation(actual, plain, exact, slack)})
