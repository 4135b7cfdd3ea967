"""The command ``ranks``: ranks of attention matrices and of mixtures of softmaxes.

For A = softmax(QKᵀ/√d), log A = QKᵀ/√d − lse, where lse is constant along each row. The rank of
log A is therefore at most d + 1 for any number of tokens. If a weight is 0, log A does not exist,
and only the rank of A is shown.

The last layer of a language model is softmax(Wh + b) of H hidden units. With one row per context,

    log P = [h, 1, lse] [W, b, −1]ᵀ

is a product of matrices with H + 2 columns, so its rank is at most H + 2; without b at most H + 1.
A mixture of K contexts, softmax(W Σ_k π_k h_k + b), is one softmax of the hidden units Σ_k π_k h_k,
and has the same bound. A mixture of K softmaxes, Σ_k π_k softmax(W h_k + b), has no such bound.

The same holds within attention: a mixture of K attentions, Σ_k π_k softmax(Q_k Kᵀ/√d), has no bound
of d + 1, and one attention with the mixed queries Σ_k π_k Q_k has it.

The rank is numerical: the number of singular values above σ_max · max(rows, columns) · ε of the
dtype.

References:
    Yang et al. 2018, "Breaking the softmax bottleneck", arXiv:1711.03953, for the bound and for
    both mixtures. The published ranks at H = 32 are quoted second-hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnzoo
from commandline import arguments
from commandline.files import check_writable
from commandline.table import Table
from commandline.variants import VariantCall, complete, names
from evals.measures.arithmetic import lean_arithmetic
from evals.measures.ranks import log_rank, rank
from evals.results.statistics import estimate
from evals.theory.output import show

NAME = "ranks"
Sizes = tuple[int, int, int]
Scales = tuple[float, float, float]
TOKENS, WIDTH = 192, 16  # sizes of the attention matrices: N, d
SIZES = (32, 1000, 2048)  # of the mixtures: hidden units H, vocabulary, contexts
MIXED = (1, 2, 3, 4, 5)  # numbers K of softmaxes or contexts
# What is mixed, with the published ranks for these K.
PUBLISHED = {"softmaxes": (34, 629, 979, 995, 997), "contexts": (34, 34, 34, 34, 34)}
KINDS = ("attentions", "queries")  # what is mixed within attention
# Standard deviations of the entries of W_k, V and W in `latent_mixture`, times √H.
LINEAR, UNIT = 3**-0.5, SIZES[0] ** 0.5  # as of nn.Linear, and of N(0, 1)
SCALES = (
    (LINEAR, LINEAR, LINEAR),
    *product((LINEAR, 1.0), (1.0, UNIT, float(SIZES[0])), (UNIT,)),
)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = "σ_max · max(rows, columns) · ε"
INITIALIZATIONS = {
    "normal": "W ~ N(0, 1/H), b ~ N(0, 1)",
    "nn.Linear": "W, b ~ U(−1/√H, 1/√H)",
}
ABOUT = (
    "Ranks of attention matrices, and of log P of an output layer with one softmax, a mixture of "
    "softmaxes and a mixture of contexts. They depend on dtype, initialization and tolerance. The "
    "published ranks are quoted second-hand, and theirs are not known."
)
NOTE = (
    "These ranks depend on dtype, initialization and tolerance. Those of the published ranks are\n"
    "not known, so the numbers are not directly comparable. In every case one softmax and a\n"
    "mixture of contexts stay at or below H + 2, and a mixture of softmaxes exceeds it."
)


def normals(seed: int) -> tuple[torch.Generator, Callable[..., Tensor]]:
    """A generator, and a function of a shape that draws N(0, 1) from it in fp64."""
    draw = torch.Generator().manual_seed(seed)
    return draw, lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)


def _texts(ranks: Iterable[int | None]) -> list[str]:
    return ["—" if rank is None else str(rank) for rank in ranks]


def _mixture_table(title: str, rows: Mapping[str, Iterable[int | None]], note: str) -> Table:
    """A table of ranks, by row and number K of `MIXED`."""
    header = ["mixture of K", *(f"K={k}" for k in MIXED)]
    return Table(title, header, [[name, *_texts(ranks)] for name, ranks in rows.items()], note)


# --------------------------------------------------------------------------------- attention


def attention_matrix(
    variant: VariantCall, tokens: int, width: int, dtype: torch.dtype, seed: int
) -> Tensor:
    """Weights A (tokens, tokens) of non-causal attention with Gaussian Q and K (tokens, width)."""
    q, k = normals(seed)[1](2, 1, 1, tokens, width).to(dtype)
    params = variant.params | attnzoo.get_variant(variant.name).in_eval
    return attnzoo.attention_weights(q, k, k, variant.name, **params)[0, 0]


def attention_table(
    variants: Sequence[VariantCall], tokens: int = TOKENS, width: int = WIDTH, seed: int = 0
) -> Table:
    """One row per variant: the ranks of A and of log A, in fp32 and fp64."""
    rows, unsupported = [], []
    for variant in variants:
        try:
            matrices = [attention_matrix(variant, tokens, width, x, seed) for x in DTYPES.values()]
        except (ValueError, TypeError) as error:
            rows.append([str(variant), *["—"] * 2 * len(DTYPES)])
            unsupported.append(f"\n{variant}: {error}.")
        else:
            ranks = [of(matrix) for of in (log_rank, rank) for matrix in matrices]
            rows.append([str(variant), *_texts(ranks)])
    note = (
        f"A is {tokens} × {tokens}, from Gaussian Q and K with d = {width}, not causal.\n"
        f"For softmax the rank of log A is at most d + 1 = {width + 1}. —: a weight is 0, or the\n"
        f"variant does not support such a call. Tolerance: {TOLERANCE}.{''.join(unsupported)}"
    )
    header = ["variant", *(f"{what}, {dtype}" for what in ("log A", "A") for dtype in DTYPES)]
    return Table("Ranks of the attention matrix A and of log A", header, rows, note)


def attention_mixture(
    mixed: int, kind: str, dtype: torch.dtype, tokens: int, width: int, seed: int
) -> Tensor:
    """Weights (tokens, tokens) of a mixture of K attentions, or of one with mixed queries.

    Q_k and K are N(0, 1), and π is the softmax of N(0, 1), for each token.
    """
    _, normal = normals(seed)
    q, k, prior = normal(1, mixed, tokens, width), normal(tokens, width), normal(mixed, tokens)
    q, k, prior = q.to(dtype), k.to(dtype), prior.softmax(0).to(dtype)[..., None]
    if kind == "queries":
        q, prior = (prior * q).sum(1, keepdim=True), torch.ones_like(prior[:1])
    k = k.expand(1, q.shape[1], -1, -1)
    return (prior * attnzoo.attention_weights(q, k, k)[0]).sum(0)


def attention_mixture_table(tokens: int = TOKENS, width: int = WIDTH, seed: int = 0) -> Table:
    """Ranks of log A by the number K of attentions or queries; K = 1 is one attention."""
    rows = {
        f"{kind}, {name}": [
            log_rank(attention_mixture(k, kind, dtype, tokens, width, seed)) for k in MIXED
        ]
        for kind in KINDS
        for name, dtype in DTYPES.items()
    }
    note = (
        f"A is {tokens} × {tokens}, from Gaussian Q_k and K with d = {width}, not causal; the\n"
        f"logits of π ~ N(0, 1). With mixed queries the rank is at most d + 1 = {width + 1}.\n"
        f"Tolerance: {TOLERANCE}. nn.MixtureAttention mixes attentions."
    )
    title = "Rank of log A for a mixture of K attentions or of K queries"
    return _mixture_table(title, rows, note)


# ---------------------------------------------------------------------------------- mixtures


def mixture(
    mixed: int,
    initialization: str,
    dtype: torch.dtype,
    seed: int = 0,
    sizes: Sizes = SIZES,
    kind: str = "softmaxes",
) -> Tensor:
    """P (contexts, vocabulary) with h_k ~ N(0, 1) and π = softmax of N(0, 1).

    The kind "softmaxes" is P = Σ_k π_k softmax(W h_k + b); "contexts" is
    P = softmax(W Σ_k π_k h_k + b). h, π, W and b are drawn in fp64 and then rounded to ``dtype``.
    """
    hidden, vocabulary, contexts = sizes
    draw, normal = normals(seed)
    h, prior = normal(mixed, contexts, hidden), normal(mixed, contexts).softmax(0)
    if initialization == "nn.Linear":
        weights = 2 * torch.rand(vocabulary, hidden + 1, dtype=torch.float64, generator=draw) - 1
        weights *= hidden**-0.5
    else:
        weights = normal(vocabulary, hidden + 1)
        weights[:, :hidden] *= hidden**-0.5
    h, prior, weights = h.to(dtype), prior.to(dtype)[..., None], weights.to(dtype)
    if kind == "contexts":
        h, prior = (prior * h).sum(0, keepdim=True), torch.ones_like(prior[:1])
    logits = h @ weights[:, :hidden].T + weights[:, hidden]
    return (prior * logits.softmax(-1)).sum(0)


def mixture_table(sizes: Sizes = SIZES, seed: int = 0) -> Table:
    """Ranks of log P by the number K of softmaxes or contexts; K = 1 is one softmax.

    With the default ``sizes``, rows show the published ranks.
    """
    rows: dict[str, Iterable[int | None]] = {}
    for kind, published in PUBLISHED.items():
        for start, (name, dtype) in product(INITIALIZATIONS, DTYPES.items()):
            ranks = [log_rank(mixture(k, start, dtype, seed, sizes, kind)) for k in MIXED]
            rows[f"{kind}, {name}, {start}"] = ranks
        if sizes == SIZES:
            rows[f"{kind}, published"] = published
    hidden, vocabulary, contexts = sizes
    normal, linear = (f"{name}: {formula}" for name, formula in INITIALIZATIONS.items())
    note = (
        f"H = {hidden} hidden units, {vocabulary} words, {contexts} contexts; h and the logits\n"
        f"of π ~ N(0, 1). {normal}. {linear}.\n"
        f"For one softmax (K = 1) and for a mixture of contexts the rank is at most\n"
        f"H + 2 = {hidden + 2}. Tolerance: {TOLERANCE}."
    )
    title = "Rank of log P for a mixture of K softmaxes or contexts"
    return _mixture_table(title, rows, note)


def latent_mixture(
    mixed: int,
    scales: Scales,
    seed: int = 0,
    sizes: Sizes = SIZES,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """P (contexts, vocabulary) = Σ_k π_k softmax(W tanh(W_k h) + b) with π = softmax(V h).

    This is the mixture of the paper on random hidden units h ~ N(0, 1), with b ~ N(0, 1).
    ``scales`` are the standard deviations of the entries of W_k, V and W, times √H.
    """
    hidden, vocabulary, contexts = sizes
    of_latent, of_prior, of_output = (scale * hidden**-0.5 for scale in scales)
    _, normal = normals(seed)
    h, w, b = normal(contexts, hidden), of_output * normal(vocabulary, hidden), normal(vocabulary)
    latent = (h @ (of_latent * normal(mixed, hidden, hidden))).tanh()
    prior = (h @ (of_prior * normal(hidden, mixed))).softmax(-1).T[..., None]
    logits = latent.to(dtype) @ w.T.to(dtype) + b.to(dtype)
    return (prior.to(dtype) * logits.softmax(-1)).sum(0)


def scales_table(seeds: Sequence[int], sizes: Sizes = SIZES) -> Table:
    """Ranks of log P in fp32 of `latent_mixture` by scales and K, means over seeds."""
    rows = []
    for scales in SCALES:
        ranks = [
            [log_rank(latent_mixture(k, scales, seed, sizes)) for seed in seeds] for k in MIXED
        ]
        rows.append([", ".join(f"{scale:.3g}" for scale in scales), *map(_mean, ranks)])
    if sizes == SIZES:
        rows.append(["published", *map(str, PUBLISHED["softmaxes"])])
    note = (
        "log P in fp32 of Σ_k π_k softmax(W tanh(W_k h) + b), π = softmax(V h), all normal. The\n"
        "first column has the standard deviations of the entries of W_k, V and W, times √H:\n"
        f"{LINEAR:.3g} is that of nn.Linear, {UNIT:.3g} that of N(0, 1). Means over {len(seeds)}\n"
        "seeds ± half of the 95 % t interval."
    )
    title = "Rank of log P for a mixture of K softmaxes, by initialization"
    return Table(title, ["W_k, V, W", *(f"K={k}" for k in MIXED)], rows, note)


def _mean(ranks: Sequence[int | None]) -> str:
    """The mean rank; "—" if a probability of some seed is 0."""
    if None in ranks:
        return "—"
    mean = estimate([float(rank) for rank in ranks if rank is not None])
    assert mean is not None
    if mean.interval is None:
        return f"{mean.mean:.0f}"
    return f"{mean.mean:.0f} ±{mean.interval[1] - mean.mean:.0f}"


# ----------------------------------------------------------------------------------- command


def add_parser(commands: Any) -> None:
    text = (
        "Print ranks of attention matrices, and of mixtures of attentions, softmaxes and contexts"
    )
    parser = commands.add_parser(NAME, help=text, description=f"{text}.")
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="Write ranks.csv to DIR")
    text = "Draw the matrices with seed N (default: 0)"
    add("--seed", type=arguments.seed, default=0, metavar="N", help=text)
    text = "Also compare initializations of mixtures of softmaxes, over N seeds from --seed on"
    add("--initializations", type=arguments.integer(0), default=0, metavar="N", help=text)
    arguments.add_plugin(parser)


def main(args: argparse.Namespace) -> int:
    return print_ranks(args.out, args.seed, initializations=args.initializations)


def print_ranks(
    out: Path | None = None,
    seed: int = 0,
    tokens: int = TOKENS,
    sizes: Sizes = SIZES,
    initializations: int = 0,
) -> int:
    """Print the tables; with ``out``, write ranks.csv. Returns 0.

    initializations: the number of seeds of `scales_table`, from ``seed``; 0 leaves the table out.
    """
    if out is not None:
        check_writable("--out", out)
    variants = [complete(VariantCall(name), tokens) for name in names()]
    with lean_arithmetic():
        tables = [
            attention_table(variants, tokens, seed=seed),
            attention_mixture_table(tokens, seed=seed),
            mixture_table(sizes, seed),
        ]
        if initializations:
            tables.append(scales_table(range(seed, seed + initializations), sizes))
    show(NAME, tables, out, note=NOTE)
    return 0
