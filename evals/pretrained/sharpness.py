"""How sharp a pretrained model's attention stays as its input grows, with its own and with others.

For each variant, substituted without training, each length and each head of each layer, over the
rows of the first tokens of a text: the largest weight, the entropy over log n, and the number of
keys that carry the weight, 1/Σw²; n is the number of keys that the row sees. Beside it the cosine
similarity of the model's outputs to those with its own softmax.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import attnzoo
from commandline.arguments import add_plugin, numbers
from commandline.errors import UsageError
from commandline.files import write_whole
from commandline.variants import parse_spec, split_list
from evals.reporting.plots import png

NAME = "sharpness"
OWN = "softmax"
DEFAULT = "softmax,adaptive_temperature,log_n"
SHORTEST = 16
METRICS = ("max_weight", "entropy", "n_eff")


@dataclass(frozen=True)
class Row:
    """One head at one length: means over its rows that see two keys or more."""

    variant: str
    length: int
    layer: int
    head: int
    max_weight: float
    entropy: float
    n_eff: float


def add_parser(commands: Any) -> None:
    words = "measure the attention of a pretrained model as its input grows"
    parser = commands.add_parser(NAME, help=words, description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME",
        help="the model: a folder, or a name on the Hugging Face hub")  # fmt: skip
    add("--text", type=Path, required=True, metavar="FILE", help="the UTF-8 text that it reads")
    add("--variants", type=split_list, default=split_list(DEFAULT), metavar="a,b(x=1)",
        help=f"variants to put in without training (default: {DEFAULT})")  # fmt: skip
    add(
        "--lengths",
        type=numbers,
        metavar="N,N,…",
        help="lengths to test (default: 16 and its doubles, up to what the model takes)",
    )
    add("--samples", type=int, default=4, metavar="N",
        help="pieces of the text to read at each length (default: 4)")  # fmt: skip
    add("--out", type=Path, default=Path("results") / NAME, metavar="DIR",
        help="folder for the table (csv) and the picture (png)")  # fmt: skip
    add_plugin(parser)


def main(given: argparse.Namespace) -> int:
    try:
        from attnzoo.integrations.transformers import convert
    except ImportError as error:
        raise UsageError(str(error)) from error
    specs = [parse_spec(spec) for spec in given.variants]
    for spec in specs:
        if spec.is_substitution or spec.test.name not in attnzoo.list_variants():
            known = ", ".join(attnzoo.list_variants())
            raise UsageError(f"--variants must name variants, {known}; got {spec}")
    if given.samples < 1:
        raise UsageError(f"--samples must be at least 1, got {given.samples}")
    tokens, model = read(given.model, given.text)
    lengths = given.lengths or usual_lengths(longest(model.config, len(tokens)))
    allowed = longest(model.config, len(tokens))
    if not lengths or not 2 <= min(lengths) <= max(lengths) <= allowed:
        raise UsageError(
            f"--lengths must be from 2 to {allowed} for this model and text: {lengths}"
        )
    rows: list[Row] = []
    similar: dict[tuple[str, int], float] = {}
    own: dict[int, Tensor] = {}
    pieces = {n: cut(tokens, n, given.samples) for n in lengths}
    smallest = {"input_ids": pieces[min(lengths)]}
    try:
        convert(model, OWN, inputs=smallest)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--model {given.model}: {error}") from error
    for n in lengths:
        own[n] = states(model, pieces[n])[0]
    for spec in specs:
        try:
            convert(model, spec.test.name, inputs=smallest, **spec.test.params)
            seen = {n: states(model, pieces[n]) for n in lengths}
        except (TypeError, ValueError) as error:
            raise UsageError(f"{spec}: {error}") from error
        for n, (found, weights) in seen.items():
            rows += measured(str(spec), n, weights)
            similar[str(spec), n] = float(
                torch.nn.functional.cosine_similarity(found, own[n], dim=-1).mean()
            )
        for text in table(rows, similar, str(spec), lengths):
            print(text, flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    write_whole(given.out / f"{NAME}.csv", as_csv(rows, similar))
    write_whole(given.out / f"{NAME}.png", picture(rows, max(lengths)))
    print(f"wrote {given.out / NAME}.csv and .png")
    return 0


def read(name: str, file: Path) -> tuple[Tensor, Any]:
    """The text's tokens, and the model."""
    import transformers

    if not file.is_file():
        raise UsageError(f"--text: there is no file {file}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModel.from_pretrained(name).eval()
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {str(error).strip().splitlines()[0]}") from error
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {file}: {error}") from error
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids), model


def longest(config: Any, tokens: int) -> int:
    return min(tokens, getattr(config, "max_position_embeddings", tokens))


def usual_lengths(most: int) -> list[int]:
    return [n for n in (SHORTEST * 2**i for i in range(20)) if n <= most]


def cut(tokens: Tensor, length: int, samples: int) -> Tensor:
    """(samples, length) pieces of the text, apart from each other as far as it goes."""
    step = max(1, (len(tokens) - length) // max(1, samples - 1)) if samples > 1 else 1
    starts = range(0, len(tokens) - length + 1, step)[:samples]
    return torch.stack([tokens[s : s + length] for s in starts])


@torch.no_grad()
def states(model: Any, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Last hidden states, and each layer's weights (B, H, N, N)."""
    out = model(input_ids=ids, output_attentions=True)
    if not out.attentions:
        raise ValueError(f"{type(model).__name__} returns no attention weights")
    return out.last_hidden_state, list(out.attentions)


def measured(variant: str, length: int, weights: list[Tensor]) -> Iterator[Row]:
    causal = all(bool((w.triu(1) == 0).all()) for w in weights)
    seen = torch.arange(1, length + 1) if causal else torch.full((length,), length)
    rows = seen > 1
    for layer, w in enumerate(weights):
        p = w[:, :, rows].double()
        p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        entropy = -torch.special.xlogy(p, p).sum(-1) / seen[rows].log()
        n_eff = 1 / p.square().sum(-1)
        peak = w[:, :, rows].double().amax(-1)
        for head in range(w.shape[1]):
            means = (float(x[:, head].mean()) for x in (peak, entropy, n_eff))
            yield Row(variant, length, layer, head, *means)


# ---- what is said -----------------------------------------------------------------------------


def table(
    rows: list[Row], similar: dict[tuple[str, int], float], variant: str, lengths: list[int]
) -> Iterator[str]:
    """Means over all heads."""
    yield f"\n{variant}"
    yield f"{'N':>7}  {'max weight':>10}  {'H/log n':>8}  {'N_eff':>8}  {'cosine':>7}"
    for n in lengths:
        here = [row for row in rows if (row.variant, row.length) == (variant, n)]
        means = [sum(getattr(row, m) for row in here) / len(here) for m in METRICS]
        yield (
            f"{n:>7}  {means[0]:>10.3f}  {means[1]:>8.3f}  {means[2]:>8.1f}  "
            f"{similar[variant, n]:>7.4f}"
        )


def as_csv(rows: list[Row], similar: dict[tuple[str, int], float]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(field.name for field in fields(Row)), "cosine_of_outputs"])
    writer.writerows([*astuple(row), similar[row.variant, row.length]] for row in rows)
    return out.getvalue()


def picture(rows: list[Row], length: int) -> bytes:
    """The largest weight, layers by heads, a panel for each variant."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(3.2 * len(variants) + 0.8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(variants), squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        here = [row for row in rows if (row.variant, row.length) == (variant, length)]
        shape = 1 + max(row.layer for row in here), 1 + max(row.head for row in here)
        grid = torch.full(shape, torch.nan)  # layers may have different numbers of heads
        for row in here:
            grid[row.layer, row.head] = row.max_weight
        axes.imshow(grid.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(title=variant, xlabel="head", ylabel="layer")
    figure.colorbar(
        panels[-1].images[0], ax=list(panels), label=f"largest weight, mean of rows, N = {length}"
    )
    return png(figure)
