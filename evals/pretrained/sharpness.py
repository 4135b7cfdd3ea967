"""Measure how sharp the attention of a pretrained model stays as its input grows.

Each variant is substituted at inference, without training. For each length and head the command
measures the largest weight, the entropy divided by log n, the effective number of keys 1/Σp² with
p = |w|/Σ|w|, and the Gini index. The CSV file also has the Rényi entropies of order 2 and ∞, ℓ1/ℓ2
and the Hoyer index. These are means over queries; n is the number of keys that a query sees. For
each length it also measures how close the model's output with the variant is to the output of the
model as loaded: their cosine similarity. If attnzoo had already converted the model, the variant
that it was loaded with is measured too.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from torch import Tensor

import attnzoo
from commandline.arguments import add_plugin, numbers
from commandline.errors import UsageError
from commandline.files import check_folder, write_whole
from commandline.variants import parse_specs, split_list
from evals.measures.sparsity import sparsity
from evals.options import check_registered, check_unique
from evals.pretrained.loading import check_tokenizer, read_text
from evals.pretrained.substitution import Substitution, check_substitution, is_converted
from evals.reporting.plots import png

NAME = "sharpness"
ORIGINAL = "softmax"
LOADED = "as loaded"
DEFAULT = "softmax,adaptive_temperature,log_n"
SHORTEST = 16
_MASKS = ("attn_mask", "is_causal", "window", "segment_ids", "enable_gqa")
# The measures in the printed tables: (column name, format). A line with all measures would be wider
# than a terminal, so the others are only in the CSV file.
SHOWN = {
    "max_weight": ("largest weight", ".3f"),
    "entropy": ("entropy/log n", ".3f"),
    "n_eff": ("effective keys", ".1f"),
    "gini": (" Gini", ".3f"),
}


LayerWeights = tuple[Tensor, Tensor]  # weights (B, H, N, N), and the keys that each query sees (N,)


@dataclass(frozen=True)
class HeadRow:
    """Measurements of one head at one length, as means over queries that see at least two keys."""

    variant: str
    length: int
    layer: int
    head: int
    max_weight: float
    entropy: float
    renyi_2: float
    renyi_inf: float
    n_eff: float
    l1_l2: float
    hoyer: float
    gini: float


def add_parser(commands: Any) -> None:
    short = "Measure the attention of a pretrained model as its input grows"
    parser = commands.add_parser(NAME, help=short, description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME",
        help="Load this model: a folder, or a name on the Hugging Face hub")  # fmt: skip
    add("--text", type=Path, required=True, metavar="FILE", help="Read this UTF-8 text")
    add("--variants", type=split_list, default=split_list(DEFAULT), metavar="a,b(x=1)",
        help=f"Substitute these variants without training (default: {DEFAULT})")  # fmt: skip
    add("--lengths", type=numbers, metavar="N,N,…",
        help="Measure at these lengths in tokens (default: 16, 32, 64 … up to the limit of the "
        "model or the text)")  # fmt: skip
    add("--samples", type=int, default=4, metavar="N",
        help="Read N pieces of the text at each length (default: 4)")  # fmt: skip
    add("--out", type=Path, default=Path("results") / NAME, metavar="DIR",
        help=f"Write {NAME}.csv and {NAME}.png to DIR (default: results/{NAME})")  # fmt: skip
    add_plugin(parser)


def check(name: str, file: Path) -> None:
    """Raise UsageError unless `main` can load this model and measure it on the text in ``file``."""
    _convert()
    tokens, config = read(name, file)
    load(name)
    if (most := longest(config, len(tokens))) < SHORTEST:
        raise UsageError(
            f"--model {name} and --text {file} must both allow {SHORTEST} tokens or more, "
            f"got {most}"
        )


def _convert() -> Callable[..., Any]:
    """`attnzoo.integrations.transformers.convert`, if transformers is installed."""
    try:
        from attnzoo.integrations.transformers import convert
    except ImportError as error:
        raise UsageError(str(error)) from error
    return convert


def main(args: argparse.Namespace) -> int:
    convert = _convert()
    check_folder("--out", args.out)
    specs = parse_specs(args.variants)
    check_unique("--lengths", args.lengths or [])
    for spec in specs:
        check_registered("--variants", spec)
    if args.samples < 1:
        raise UsageError(f"--samples must be an int >= 1, got {args.samples}")
    tokens, config = read(args.model, args.text)
    allowed = longest(config, len(tokens))
    lengths = args.lengths or usual_lengths(allowed)
    if not lengths or not 2 <= min(lengths) <= max(lengths) <= allowed:
        raise UsageError(
            f"--lengths must be from 2 to {allowed} for this model and text, got {lengths}"
        )
    for spec in specs:
        check_substitution(Substitution(spec.test), config, tokens)
    model = load(args.model)
    rows: list[HeadRow] = []
    cosines: dict[tuple[str, int], float] = {}
    original: dict[int, Tensor] = {}
    pieces = {n: cut(tokens, n, args.samples) for n in lengths}
    smallest = {"input_ids": pieces[min(lengths)]}
    converted = is_converted(model)
    try:
        if not converted:
            convert(model, ORIGINAL, inputs=smallest)
        for n in lengths:
            original[n], layers = states(model, pieces[n])
            if converted:
                rows += measured(LOADED, n, layers)
                cosines[LOADED, n] = 1.0
    except (TypeError, ValueError) as error:
        raise UsageError(f"--model {args.model}: {error}") from error
    if converted:
        for text in table(rows, cosines, LOADED, lengths):
            print(text, flush=True)
    for spec in specs:
        try:
            convert(model, spec.test.name, inputs=smallest, warn=False, **spec.test.params)
            states_by_length = {n: states(model, pieces[n]) for n in lengths}
        except (TypeError, ValueError) as error:
            raise UsageError(f"--variants {spec}: {error}") from error
        for n, (hidden, layers) in states_by_length.items():
            rows += measured(str(spec), n, layers)
            cosines[str(spec), n] = float(
                torch.nn.functional.cosine_similarity(hidden, original[n], dim=-1).mean()
            )
        for text in table(rows, cosines, str(spec), lengths):
            print(text, flush=True)
    write_whole(args.out / f"{NAME}.csv", as_csv(rows, cosines))
    write_whole(args.out / f"{NAME}.png", picture(rows, max(lengths)))
    print(f"written: {args.out / NAME}.csv and .png")
    return 0


def read(name: str, file: Path) -> tuple[Tensor, Any]:
    """The tokens of the text in ``file``, and the config of the model."""
    import transformers

    text = read_text(file)
    check_tokenizer(Path(name))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {str(error).strip().splitlines()[0]}") from error
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids), config


def load(name: str) -> Any:
    import transformers

    try:
        return transformers.AutoModel.from_pretrained(name).eval()
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {str(error).strip().splitlines()[0]}") from error


def longest(config: Any, tokens: int) -> int:
    return min(tokens, getattr(config, "max_position_embeddings", tokens))


def usual_lengths(most: int) -> list[int]:
    return [n for n in (SHORTEST * 2**i for i in range(20)) if n <= most]


def cut(tokens: Tensor, length: int, samples: int) -> Tensor:
    """Evenly spaced pieces of the text, (samples, length); fewer samples if the text is short."""
    step = max(1, (len(tokens) - length) // max(1, samples - 1)) if samples > 1 else 1
    starts = range(0, len(tokens) - length + 1, step)[:samples]
    return torch.stack([tokens[s : s + length] for s in starts])


@torch.no_grad()
def states(model: Any, ids: Tensor) -> tuple[Tensor, list[LayerWeights]]:
    """The last hidden states, and each layer's weights and numbers of visible keys."""
    with _visible_keys() as keys:
        out = model(input_ids=ids, output_attentions=True)
    weights = list(out.attentions or ())
    if len(weights) != len(keys):
        raise ValueError(
            f"{type(model).__name__} must return the weights of all {len(keys)} attention layers, "
            f"got those of {len(weights)}"
        )
    return out.last_hidden_state, list(zip(weights, keys, strict=True))


@contextmanager
def _visible_keys() -> Iterator[list[Tensor]]:
    """Collect each layer's numbers of visible keys, (N,), while a model reads.

    A layer may have a window, so causality alone does not give them. A layer that is not converted
    makes its attention module during the call, so the class is changed, not modules.
    """
    counts: list[Tensor] = []
    original_forward = attnzoo.nn.Attention.forward

    def forward(self: attnzoo.nn.Attention, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        # With equal scores, the weights of softmax are 0 only at keys that a query does not see. No
        # piece of the text is padded, so all of them and all heads see the same keys.
        zero_q, zero_k = (torch.zeros_like(x[..., :1]) for x in (q, k))
        masks = {name: kwargs[name] for name in _MASKS if name in kwargs}
        visible = attnzoo.attention_weights(zero_q, zero_k, zero_k, **masks)
        counts.append((visible[0, 0] > 0).sum(-1))
        return original_forward(self, q, k, v, **kwargs)

    with mock.patch.object(attnzoo.nn.Attention, "forward", forward):
        yield counts


def measured(variant: str, length: int, layers: list[LayerWeights]) -> Iterator[HeadRow]:
    """Measure the weights of each layer; returns one `HeadRow` per head."""
    for layer, (w, keys) in enumerate(layers):
        rows = keys > 1
        exact = w[:, :, rows].double()
        measures = {"max_weight": exact.amax(-1), **sparsity(exact, keys[rows])}
        for head in range(w.shape[1]):
            means = {name: float(values[:, head].mean()) for name, values in measures.items()}
            yield HeadRow(variant, length, layer, head, **means)


# ---- output -----------------------------------------------------------------------------------


def table(
    rows: list[HeadRow], cosines: dict[tuple[str, int], float], variant: str, lengths: list[int]
) -> Iterator[str]:
    """The lines of a variant's table: one row per length, with means over all heads."""
    yield f"\n{variant}"
    shown = {measure: (name, len(name), style) for measure, (name, style) in SHOWN.items()}
    names = "  ".join(name for name, _, _ in shown.values())
    yield f"{'length':>7}  {names}  {'output cosine':>13}"
    for n in lengths:
        length_rows = [row for row in rows if (row.variant, row.length) == (variant, n)]
        means = {m: sum(getattr(row, m) for row in length_rows) / len(length_rows) for m in shown}
        cells = "  ".join(f"{means[m]:>{w}{style}}" for m, (_, w, style) in shown.items())
        yield f"{n:>7}  {cells}  {cosines[variant, n]:>13.4f}"


def as_csv(rows: list[HeadRow], cosines: dict[tuple[str, int], float]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(field.name for field in fields(HeadRow)), "cosine_of_outputs"])
    writer.writerows([*astuple(row), cosines[row.variant, row.length]] for row in rows)
    return out.getvalue()


def picture(rows: list[HeadRow], length: int) -> bytes:
    """A heat map of the largest weight by layer and head for each variant, as PNG."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(3.2 * len(variants) + 0.8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(variants), squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        variant_rows = [row for row in rows if (row.variant, row.length) == (variant, length)]
        shape = (
            1 + max(row.layer for row in variant_rows),
            1 + max(row.head for row in variant_rows),
        )
        grid = torch.full(shape, torch.nan)  # layers may have different numbers of heads
        for row in variant_rows:
            grid[row.layer, row.head] = row.max_weight
        axes.imshow(grid.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(title=variant, xlabel="head", ylabel="layer")
    figure.colorbar(
        panels[-1].images[0],
        ax=list(panels),
        label=f"largest weight, mean over queries, length {length}",
    )
    return png(figure)
