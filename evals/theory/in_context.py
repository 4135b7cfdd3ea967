"""One trained attention layer against one gradient step, on softmax regression in context.

A problem is a matrix A (n, d) and a vector b (n,). Its loss is

    L(x) = ‖f(x) − b‖²,  f(x) = softmax(Ax) = exp(Ax) / ⟨exp(Ax), 1⟩.

Entries of A are N(0, 1) and b = softmax(Ax*) with x* uniform on the unit sphere, so that the scores
Ax* are N(0, 1) and the minimum is 0. The tokens of a problem are its rows (a_j, n b_j − 1), and a
learned query attends to them. The output of the layer, through one linear map, is x. The layer is
trained to minimize L(x) on new problems in each step. There is no residual connection, no MLP and
no second layer.

One gradient step from x = 0, where f = 1/n, is

    x₁ = −η ∇L(0) = (2η/n²) Σ_j (n b_j − 1) a_j.

η is one number for all problems: the one with the smallest mean loss on problems that are not
tested. Attention without a normalizer, o = Σ_j (q·k_j) v_j / n, can compute x₁ exactly. Softmax
attention cannot, because its weights are positive: one head with weights ∝ e^{βt_j} for
t_j = n b_j − 1 gives the mean of all a_j and, to first order, β Σ_j t_j a_j / n. The difference of
two heads with β and −β does not have this mean, and approaches a multiple of x₁ as β → 0.

References:
    Li, Song, Xia, Yu, Zhou 2023, "The closeness of in-context learning and weight shifting for
    softmax regression", arXiv:2304.13276, for the problem and the claim that both are similar.
    von Oswald et al. 2023, "Transformers learn in-context by gradient descent", arXiv:2212.07677,
    for the comparison with one gradient step. The set-up is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import attnzoo
from commandline.table import Table
from commandline.variants import VariantCall
from evals.run import REPORT_EVERY, fit
from evals.task import Settings

NAME = "in-context"
ABOUT = (
    "One trained attention layer against one gradient step, on softmax regression in context: "
    "the loss ‖softmax(Ax) − b‖² of the x that a layer computes from the rows of A and b "
    "(problem: arXiv:2304.13276; the set-up is ours)."
)
ROWS, WIDTH = 32, 8  # n and d of the problems that a layer is trained on
LENGTHS = (8, 16, 32, 64, 128, 256, 512)  # numbers of rows n that are tested
PROBLEMS = 2000  # tested at each n
STEP_SIZES = torch.logspace(-2, 1.5, 71).tolist()  # η / n
LINEAR = VariantCall("linear")  # attention without a normalizer; not a registered variant
VARIANTS = "softmax,sigmoid,entmax"
HEADS = (1, 2)
SCHEDULE = Settings(
    steps=1000, batch=128, learning_rate=5e-3, weight_decay=0.0, width=16,
    train_shortest=ROWS, train_longest=ROWS, test_sequences=PROBLEMS, test_least=PROBLEMS,
)  # fmt: skip


# ---------------------------------------------------------------------------------- problems


def draw(
    count: int, n: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Problems: A (count, n, d) and b (count, n)."""
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(count, n, WIDTH, generator=random, dtype=dtype)
    x = torch.randn(count, WIDTH, generator=random, dtype=dtype)
    return a, predicted(a, F.normalize(x, dim=-1))


def predicted(a: Tensor, x: Tensor) -> Tensor:
    """f(x) = softmax(Ax), (B, n), for A (B, n, d) and x (B, d)."""
    return torch.einsum("bnd, bd -> bn", a, x).softmax(-1)


def losses(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """L(x) = ‖softmax(Ax) − b‖² of each problem, (B,)."""
    return (predicted(a, x) - b).square().sum(-1)


def first_gradient(a: Tensor, b: Tensor) -> Tensor:
    """∇L(0) of each problem, (B, d)."""
    n = a.shape[1]
    centred = a - a.mean(1, keepdim=True)
    return -2 / n * torch.einsum("bnd, bn -> bd", centred, b)


def best_step(a: Tensor, b: Tensor) -> float:
    """The η from a grid that has the smallest mean loss after one gradient step from x = 0."""
    gradient = first_gradient(a, b)
    sizes = [a.shape[1] * size for size in STEP_SIZES]
    return min(sizes, key=lambda size: losses(a, b, -size * gradient).mean().item())


def best_steps(a: Tensor, b: Tensor) -> Tensor:
    """The loss (B,) after one gradient step with the η of the grid that is best for the problem."""
    gradient = first_gradient(a, b)
    step_losses = [losses(a, b, -a.shape[1] * size * gradient) for size in STEP_SIZES]
    return torch.stack(step_losses).amin(0)


# ------------------------------------------------------------------------------------- layers


class AttentionLayer(nn.Module):
    """Multi-head attention of one learned query to the rows of a problem: (A, b) -> x (B, d)."""

    def __init__(self, variant: VariantCall, heads: int, width: int = SCHEDULE.width) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(heads, 1, width))
        self.to_k = nn.Linear(WIDTH + 1, heads * width)
        self.to_v = nn.Linear(WIDTH + 1, heads * width)
        self.output = nn.Linear(heads * width, WIDTH)
        self.attention = (
            None
            if variant == LINEAR
            else attnzoo.nn.Attention(variant.name, heads, head_dim=width, **variant.params)
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        n, heads = a.shape[1], len(self.query)
        tokens = torch.cat((a, n * b[..., None] - 1), -1)
        k, v = (
            rearrange(to(tokens), "b n (h d) -> b h n d", h=heads) for to in (self.to_k, self.to_v)
        )
        q = self.query.expand(len(a), -1, -1, -1)
        if self.attention is None:
            attended = (q @ k.mT) @ v / (n * math.sqrt(q.shape[-1]))
        else:
            attended = self.attention(q, k, v)
        return self.output(rearrange(attended, "b h 1 d -> b (h d)"))


@dataclass(frozen=True)
class TrainedLayer:
    """The results of one layer and seed.

    curve: (training step, mean loss) pairs. loss: the mean loss by n. cosine: the mean cosine
    between the layer's x and x₁ at the n of the training. distance: the mean of ‖f(x) − f(x₁)‖²
    there.
    """

    variant: str
    heads: int
    seed: int
    curve: list[tuple[int, float]] = field(default_factory=list)
    loss: dict[int, float] = field(default_factory=dict)
    cosine: float = math.nan
    distance: float = math.nan

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.heads} head{'s' * (self.heads > 1)}"


@dataclass(frozen=True)
class Baselines:
    """Mean losses by n: of x = 0, and after one gradient step with the best η for all problems of
    this n, with η/n as at n = `ROWS`, and with the best η for each problem. size: the best η."""

    zero: dict[int, float] = field(default_factory=dict)
    step: dict[int, float] = field(default_factory=dict)
    scaled: dict[int, float] = field(default_factory=dict)
    each: dict[int, float] = field(default_factory=dict)
    size: dict[int, float] = field(default_factory=dict)


def _seed(split: str, seed: int, index: int = 0) -> int:
    """The seed of a draw; draws of different splits, seeds and training steps differ."""
    return ((("test", "sizes", "train").index(split) * 1000 + seed) << 32) + index


def test_problems(n: int) -> tuple[Tensor, Tensor]:
    """The problems on which all layers, seeds and baselines are tested."""
    return draw(PROBLEMS, n, _seed("test", 0, n))


def baselines(lengths: Sequence[int]) -> Baselines:
    """The losses at these n that need no training."""
    base = Baselines()
    for n in {ROWS, *lengths}:
        base.size[n] = best_step(*draw(PROBLEMS, n, _seed("sizes", 0, n)))
    for n in lengths:
        a, b = test_problems(n)
        gradient = first_gradient(a, b)
        base.zero[n] = losses(a, b, torch.zeros_like(gradient)).mean().item()
        base.step[n] = losses(a, b, -base.size[n] * gradient).mean().item()
        scaled = n / ROWS * base.size[ROWS]
        base.scaled[n] = losses(a, b, -scaled * gradient).mean().item()
        base.each[n] = best_steps(a, b).mean().item()
    return base


def train(
    variant: VariantCall,
    heads: int,
    seed: int,
    base: Baselines,
    schedule: Settings = SCHEDULE,
) -> TrainedLayer:
    """Train one layer and test it at each n of the baselines.

    Raises:
        NotFinite: training gave a NaN or an infinity.
    """
    torch.manual_seed(seed)
    layer = AttentionLayer(variant, heads, schedule.width)
    results = TrainedLayer(str(variant), heads, seed)
    test_a, test_b = test_problems(ROWS)

    def loss(step: int) -> Tensor:
        a, b = draw(schedule.batch, ROWS, _seed("train", seed, step))
        # Without the factor n, the loss would be so small that Adam's ε is not negligible.
        return ROWS * losses(a, b, layer(a, b)).mean()

    def report(step: int, value: float, part: float) -> None:
        if step % (4 * REPORT_EVERY) == 0 or part == 1:
            with torch.no_grad():
                value = losses(test_a, test_b, layer(test_a, test_b)).mean().item()
            results.curve.append((step, value))

    fit(layer, loss, schedule, report)
    with torch.no_grad():
        for n in base.zero:
            a, b = test_problems(n)
            results.loss[n] = losses(a, b, layer(a, b)).mean().item()
        x = layer(test_a, test_b)
    step = -base.size[ROWS] * first_gradient(test_a, test_b)
    distance = losses(test_a, predicted(test_a, step), x).mean().item()
    cosine = torch.cosine_similarity(x, step).mean().item()
    return TrainedLayer(results.variant, heads, seed, results.curve, results.loss, cosine, distance)


# ------------------------------------------------------------------------------------- tables


def _over_seeds(values: Sequence[float]) -> str:
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def by_name(trained: Sequence[TrainedLayer]) -> dict[str, list[TrainedLayer]]:
    """The results of each layer, one per seed."""
    layers: dict[str, list[TrainedLayer]] = {}
    for layer in trained:
        layers.setdefault(layer.name, []).append(layer)
    return layers


def tables(base: Baselines, trained: Sequence[TrainedLayer], steps: int) -> list[Table]:
    """The comparison with one gradient step at the trained n, and the losses at each n.

    steps: the number of training steps, for the note.
    """
    return [_comparison(base, trained, steps), _by_rows(base, trained)]


def _comparison(base: Baselines, trained: Sequence[TrainedLayer], steps: int) -> Table:
    zero, step = base.zero[ROWS], base.step[ROWS]
    each = base.each[ROWS]
    rows = [
        ["x = 0", "1.000", f"{zero / step:.3f}", "—", "—"],
        ["one gradient step", f"{step / zero:.3f}", "1.000", "1.000", "0.000"],
        ["one step, η per problem", f"{each / zero:.3f}", f"{each / step:.3f}", "1.000", "—"],
    ]
    for name, results in by_name(trained).items():
        columns = (
            [layer.loss[ROWS] / zero for layer in results],
            [layer.loss[ROWS] / step for layer in results],
            [layer.cosine for layer in results],
            [layer.distance / zero for layer in results],
        )
        rows.append([name, *(_over_seeds(values) for values in columns)])
    seeds = len({layer.seed for layer in trained})
    note = (
        f"n = {ROWS} rows, d = {WIDTH}; {PROBLEMS} test problems; {steps} training steps.\n"
        f"Losses are means of ‖softmax(Ax) − b‖². Gradient step: from x = 0 with\n"
        f"η = {base.size[ROWS]:.3g}, the best for all problems. Cosine: between the layer's x and\n"
        "that of the gradient step. Distance: mean of ‖f(x) − f(x₁)‖² over the loss of x = 0."
    )
    if seeds > 1:
        note += f"\nMean (range) of {seeds} seeds."
    header = ["layer", "loss / loss of x = 0", "loss / loss of the step", "cosine", "distance"]
    return Table("One attention layer against one gradient step", header, rows, note)


def _by_rows(base: Baselines, trained: Sequence[TrainedLayer]) -> Table:
    steps = {"one step, best η for each n": base.step, f"one step, η/n as at {ROWS}": base.scaled}
    rows = [
        [name, *(f"{loss[n] / base.zero[n]:.3f}" for n in base.zero)]
        for name, loss in steps.items()
    ]
    for name, results in by_name(trained).items():
        means = [
            sum(layer.loss[n] for layer in results) / len(results) / base.zero[n] for n in base.zero
        ]
        rows.append([name, *(f"{mean:.3f}" for mean in means)])
    note = f"Layers are trained at n = {ROWS}. A loss above 1 is worse than that of x = 0."
    header = ["layer", *(f"n = {n}" for n in base.zero)]
    return Table("Loss / loss of x = 0, by the number of rows n", header, rows, note)
