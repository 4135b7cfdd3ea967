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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn.functional import cosine_similarity

import attnzoo
from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.files import check_folder, write_whole
from commandline.table import Table
from commandline.variants import VariantCall, parse_specs
from evals.options import File, Lengths, Names, add_fields, check_registered, option, read_options
from evals.pretrained import heads
from evals.pretrained.loading import Source, from_source, outline, read_text
from evals.pretrained.options import MODEL, TEXT, Positive
from evals.pretrained.substitution import (
    AS_LOADED,
    Substitution,
    check_substitution,
    is_converted,
    substituted,
)

if TYPE_CHECKING:
    import pandas as pd

NAME = "sharpness"
ORIGINAL = "softmax"
SHORTEST = 16
COSINE = "cosine_of_outputs"
_MASKS = ("attn_mask", "is_causal", "window", "segment_ids")
# The measures in the printed tables: (column name, format). A line with all measures would be wider
# than a terminal, so the others are only in the CSV file.
SHOWN = {
    "max_weight": ("largest weight", ".3f"),
    "entropy": ("entropy/log n", ".3f"),
    "n_eff": ("effective keys", ".1f"),
    "gini": ("Gini", ".3f"),
    COSINE: ("output cosine", ".4f"),
}


class SharpnessOptions(BaseModel):
    """The options of the command."""

    model: str = MODEL
    text: File = TEXT
    variants: Names = option(
        ("softmax", "adaptive_temperature", "log_n"), "a,b(x=1)",
        "Substitute these variants without training",
    )  # fmt: skip
    lengths: Lengths | None = option(
        None, "N,N,…",
        "Measure at these lengths in tokens (default: 16, 32, 64 … up to the limit of the model or "
        "the text)",
    )  # fmt: skip
    samples: Positive = option(4, "N", "Read N pieces of the text at each length")
    out: File = option(Path("results") / NAME, "DIR", f"Write {NAME}.csv and {NAME}.png to DIR")


def add_parser(commands: Any) -> None:
    short = "Measure the attention of a pretrained model as its input grows"
    parser = commands.add_parser(NAME, help=short, description=__doc__)
    add_fields(parser, SharpnessOptions)
    add_plugin(parser)


def main(line: argparse.Namespace) -> int:
    args = read_options(SharpnessOptions, line)
    check_folder("--out", args.out)
    specs = parse_specs(list(args.variants))
    for spec in specs:
        check_registered("--variants", spec)
    tokens, config, most = read(args.model, args.text)
    lengths = args.lengths or usual_lengths(most)
    if not lengths or not 2 <= min(lengths) <= max(lengths) <= most:
        raise UsageError(
            f"--lengths must be from 2 to {most} for this model and text, got {lengths}"
        )
    substitutions = [Substitution(spec.test) for spec in specs]
    for substitution in substitutions:
        check_substitution(substitution, config, tokens)
    import pandas as pd

    model = from_source(Source(args.model), "AutoModel").eval()
    original = AS_LOADED if is_converted(model) else Substitution(VariantCall(ORIGINAL))
    outputs: dict[int, Tensor] = {}
    frames: list[pd.DataFrame] = []
    for substitution in (original, *substitutions):
        lines = []
        with substituted(model, substitution, tokens) as changed:
            for n in lengths:
                hidden, layers = states(changed, cut(tokens, n, args.samples))
                first = outputs.setdefault(n, hidden)
                cosine = float(cosine_similarity(hidden, first, dim=-1).mean())
                cosine = 1.0 if hidden is first else cosine
                lines.append(measured(str(substitution), n, layers, cosine))
        if substitution is not original or substitution == AS_LOADED:
            frames += lines
            print(f"\n{table(pd.concat(lines)).text()}", flush=True)
    frame = pd.concat(frames)
    write_whole(args.out / f"{NAME}.csv", frame.to_csv(index=False, lineterminator="\n"))
    write_whole(args.out / f"{NAME}.png", picture(frame))
    print(f"written: {args.out / NAME}.csv and .png")
    return 0


def read(name: str, file: Path) -> tuple[Tensor, Any, int]:
    """The tokens of the text in ``file``, the config of the model, and the largest length that both
    allow."""
    model = outline(Source(name), "AutoModel")
    tokens = model.tokens(read_text(file))
    return tokens, model.model.config, min(len(tokens), model.limit or len(tokens))


def usual_lengths(most: int) -> list[int]:
    return [n for n in (SHORTEST * 2**i for i in range(20)) if n <= most]


def cut(tokens: Tensor, length: int, samples: int) -> Tensor:
    """Evenly spaced pieces of the text, (samples, length); fewer samples if the text is short."""
    step = max(1, (len(tokens) - length) // max(1, samples - 1)) if samples > 1 else 1
    starts = range(0, len(tokens) - length + 1, step)[:samples]
    return torch.stack([tokens[s : s + length] for s in starts])


@torch.no_grad()
def states(model: Any, ids: Tensor) -> tuple[Tensor, list[heads.LayerWeights]]:
    """The last hidden states, and the weights of each layer.

    A layer that is not converted makes its attention module during the call, so the class is
    changed, not modules.
    """
    layers: list[heads.LayerWeights] = []
    original_forward = attnzoo.nn.Attention.forward

    def forward(self: attnzoo.nn.Attention, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        result = original_forward(self, q, k, v, **kwargs)
        masks = {name: kwargs[name] for name in _MASKS if name in kwargs}
        layers.append((result[1], heads.visible_keys(q, k, masks)))
        return result

    with mock.patch.object(attnzoo.nn.Attention, "forward", forward):
        hidden = model(input_ids=ids, output_attentions=True).last_hidden_state
    return hidden, layers


def measured(
    variant: str, length: int, layers: Sequence[heads.LayerWeights], cosine: float
) -> pd.DataFrame:
    """Means over the queries that see at least two keys, a row for each head of each layer."""
    import pandas as pd

    rows = [(w[:, :, keys > 1].double(), keys[keys > 1]) for w, keys in layers]
    measures = heads.sharpness(rows).items()
    at = [(layer, head) for layer, (w, _) in enumerate(rows) for head in range(w.shape[1])]
    return pd.DataFrame({
        "variant": variant, "length": length,
        "layer": [layer for layer, _ in at], "head": [head for _, head in at],
        **{name: values.mean(0).numpy() for name, values in measures}, COSINE: cosine,
    })  # fmt: skip


# ---- output -----------------------------------------------------------------------------------


def table(frame: pd.DataFrame) -> Table:
    """The table of a variant: one row per length, with means over all heads."""
    rows = [
        [str(n), *(f"{part[name].mean():{style}}" for name, (_, style) in SHOWN.items())]
        for n, part in frame.groupby("length", sort=False)
    ]
    return Table(frame["variant"].iloc[0], ["length", *(name for name, _ in SHOWN.values())], rows)


def picture(frame: pd.DataFrame) -> bytes:
    """A heat map of the largest weight by layer and head for each variant at the longest length, as
    PNG."""
    from matplotlib.figure import Figure

    from evals.reporting.plots import png

    length, variants = frame["length"].max(), frame["variant"].unique()
    figure = Figure(figsize=(3.2 * len(variants) + 0.8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(variants), squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        rows = frame[(frame["variant"] == variant) & (frame["length"] == length)]
        # Layers may have different numbers of heads.
        grid = rows.pivot(index="layer", columns="head", values="max_weight")
        axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(title=variant, xlabel="head", ylabel="layer")
    label = f"largest weight, mean over queries, length {length}"
    figure.colorbar(panels[-1].images[0], ax=list(panels), label=label)
    return png(figure)
