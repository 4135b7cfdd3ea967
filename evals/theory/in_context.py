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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import attnzoo
from commandline.table import Table
from commandline.variants import VariantCall
from evals.run import REPORT_EVERY, fit
from evals.task import Settings

if TYPE_CHECKING:
    import pandas as pd
    from pandas.core.groupby import DataFrameGroupBy

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


def step_losses(a: Tensor, b: Tensor) -> Tensor:
    """The losses (S, B) after one gradient step from x = 0 with η / n = `STEP_SIZES`."""
    gradient = first_gradient(a, b)
    return torch.stack([losses(a, b, -a.shape[1] * size * gradient) for size in STEP_SIZES])


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

    curve: the mean loss by training step. loss: the mean loss by n. cosine: the mean cosine
    between the layer's x and x₁ at the n of the training. distance: the mean of ‖f(x) − f(x₁)‖²
    there.
    """

    variant: str
    heads: int
    seed: int
    curve: dict[int, float]
    loss: dict[int, float]
    cosine: float
    distance: float

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.heads} head{'s' * (self.heads > 1)}"


def _seed(split: str, seed: int, index: int = 0) -> int:
    """The seed of a draw; draws of different splits, seeds and training steps differ."""
    return ((("test", "sizes", "train").index(split) * 1000 + seed) << 32) + index


def test_problems(n: int) -> tuple[Tensor, Tensor]:
    """The problems on which all layers, seeds and baselines are tested."""
    return draw(PROBLEMS, n, _seed("test", 0, n))


def best_step(n: int) -> float:
    """The η that has the smallest mean loss on problems that are not tested."""
    mean_losses = step_losses(*draw(PROBLEMS, n, _seed("sizes", 0, n))).mean(1)
    return n * STEP_SIZES[int(mean_losses.argmin())]


def baselines(lengths: Sequence[int]) -> pd.DataFrame:
    """The mean losses that need no training, by n.

    Columns: zero, of x = 0; and after one gradient step: step, with the best η for all problems of
    this n; scaled, with η/n as at n = `ROWS`; each, with the best η for each problem. size is the
    best η.
    """
    import pandas as pd

    scaled, lines = best_step(ROWS) / ROWS, {}
    for n in lengths:
        a, b = test_problems(n)
        gradient, size = first_gradient(a, b), best_step(n)
        etas = {"zero": 0.0, "step": size, "scaled": n * scaled}
        lines[n] = {name: losses(a, b, -x * gradient).mean().item() for name, x in etas.items()}
        lines[n] |= {"each": step_losses(a, b).amin(0).mean().item(), "size": size}
    return pd.DataFrame.from_dict(lines, orient="index")


def train(
    variant: VariantCall,
    heads: int,
    seed: int,
    base: pd.DataFrame,
    schedule: Settings = SCHEDULE,
) -> TrainedLayer:
    """Train one layer and test it at each n of the baselines.

    Raises:
        NotFinite: training gave a NaN or an infinity.
    """
    torch.manual_seed(seed)
    layer = AttentionLayer(variant, heads, schedule.width)
    curve: dict[int, float] = {}

    def loss(step: int) -> Tensor:
        a, b = draw(schedule.batch, ROWS, _seed("train", seed, step))
        # Without the factor n, the loss would be so small that Adam's ε is not negligible.
        return ROWS * losses(a, b, layer(a, b)).mean()

    @torch.no_grad()
    def test_loss(n: int) -> float:
        a, b = test_problems(n)
        return losses(a, b, layer(a, b)).mean().item()

    def report(step: int, value: float, part: float) -> None:
        if step % (4 * REPORT_EVERY) == 0 or part == 1:
            curve[step] = test_loss(ROWS)

    fit(layer, loss, schedule, report)
    a, b = test_problems(ROWS)
    step = -float(base["size"].loc[ROWS]) * first_gradient(a, b)
    with torch.no_grad():
        x = layer(a, b)
    return TrainedLayer(
        str(variant), heads, seed, curve, {n: test_loss(n) for n in base.index},
        cosine=torch.cosine_similarity(x, step).mean().item(),
        distance=losses(a, predicted(a, step), x).mean().item(),
    )  # fmt: skip


# ------------------------------------------------------------------------------------- tables


def _over_seeds(values: pd.Series) -> str:
    mean = f"{values.mean():.3f}"
    return mean if len(values) == 1 else f"{mean} ({values.min():.3f} to {values.max():.3f})"


def by_name(
    trained: Sequence[TrainedLayer], values: Callable[[TrainedLayer], Mapping[Any, float]]
) -> DataFrameGroupBy:
    """The values of each layer, with a line per seed, grouped by the layer's name."""
    import pandas as pd

    frame = pd.DataFrame([values(x) for x in trained], index=[x.name for x in trained])
    return frame.groupby(level=0, sort=False)


def tables(base: pd.DataFrame, trained: Sequence[TrainedLayer], steps: int) -> list[Table]:
    """The comparison with one gradient step at the trained n, and the losses at each n.

    steps: the number of training steps, for the note.
    """
    return [_comparison(base, trained, steps), _by_rows(base, trained)]


def _comparison(base: pd.DataFrame, trained: Sequence[TrainedLayer], steps: int) -> Table:
    zero, step, each, size = base.loc[ROWS, ["zero", "step", "each", "size"]]
    layers = by_name(
        trained,
        lambda x: {"zero": x.loss[ROWS] / zero, "step": x.loss[ROWS] / step, "cosine": x.cosine,
                   "distance": x.distance / zero},
    ).agg(_over_seeds)  # fmt: skip
    rows = [
        ["x = 0", "1.000", f"{zero / step:.3f}", "—", "—"],
        ["one gradient step", f"{step / zero:.3f}", "1.000", "1.000", "0.000"],
        ["one step, η per problem", f"{each / zero:.3f}", f"{each / step:.3f}", "1.000", "—"],
        *map(list, layers.itertuples()),
    ]
    seeds = len({layer.seed for layer in trained})
    note = (
        f"n = {ROWS} rows, d = {WIDTH}; {PROBLEMS} test problems; {steps} training steps.\n"
        f"Losses are means of ‖softmax(Ax) − b‖². Gradient step: from x = 0 with\n"
        f"η = {size:.3g}, the best for all problems. Cosine: between the layer's x and\n"
        "that of the gradient step. Distance: mean of ‖f(x) − f(x₁)‖² over the loss of x = 0."
    )
    if seeds > 1:
        note += f"\nMean (range) of {seeds} seeds."
    header = ["layer", "loss / loss of x = 0", "loss / loss of the step", "cosine", "distance"]
    return Table("One attention layer against one gradient step", header, rows, note)


def _by_rows(base: pd.DataFrame, trained: Sequence[TrainedLayer]) -> Table:
    steps = {"one step, best η for each n": "step", f"one step, η/n as at {ROWS}": "scaled"}
    lines = {name: base[column] for name, column in steps.items()}
    lines |= dict(by_name(trained, lambda layer: layer.loss).agg("mean").iterrows())
    rows = [[name, *(f"{x:.3f}" for x in line / base["zero"])] for name, line in lines.items()]
    note = f"Layers are trained at n = {ROWS}. A loss above 1 is worse than that of x = 0."
    header = ["layer", *(f"n = {n}" for n in base.index)]
    return Table("Loss / loss of x = 0, by the number of rows n", header, rows, note)
