"""The options of the commands ``pretrained`` and ``adapt``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from commandline.arguments import add_plugin, integer, numbers, seed
from commandline.errors import UsageError
from commandline.variants import split_list
from evals.harness.options import Options
from evals.pretrained.loading import DTYPES
from evals.pretrained.study import MEASURES
from evals.results.rows import PRETRAINED, first_error
from evals.results.store import UNSHARDED, Shard

ADAPT = "adapt"
NAMES = (PRETRAINED, ADAPT)
VARIANTS = (
    "softmax,log_n(train_length=2048),adaptive_temperature,entmax,topk(top_k=64),"
    "ssmax(calibrate=512)"
)
TRAINED = "ssmax"
LORA_RATE = 3e-4
HELD_OUT = 0.2


def add_parsers(commands: Any) -> None:
    """Add both commands."""
    parser = commands.add_parser(
        PRETRAINED,
        help="Measure a pretrained language model with other attention variants, without training",
        description="Measure a pretrained causal language model with its attention replaced at "
        "inference: the loss at each position, retrieval of facts planted in a text, the sharpness "
        "of each head, and the weight that each head puts on a needle. Nothing is trained.",
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="Read this UTF-8 text")
    add("--variants", type=split_list, metavar="a,b(x=1)",
        help="Substitute these variants at inference, also with start='identity' or calibrate=N "
        f"(default: {VARIANTS}, and those of --plugin). The model as loaded is always measured"
        )  # fmt: skip
    add("--greedy", action="store_true", help="Also decode the answers greedily")
    add("--batch", type=integer(1), default=1, metavar="N",
        help="Read N contexts at once (default: 1)")  # fmt: skip
    add("--shard", type=_shard, default=UNSHARDED, metavar="I/N",
        help="Run part I of N (I from 0)")  # fmt: skip
    parser.set_defaults(save=None)
    _add_shared(parser, PRETRAINED, "512,1024,2048,8192", ",".join(MEASURES))

    parser = commands.add_parser(
        ADAPT,
        help="Train only what a variant learns in a pretrained model, and measure it at long "
        "lengths",
        description="Train only what a variant learns in a pretrained causal language model, on "
        "short sequences of a text, and measure it on long contexts of a text that it was not "
        "trained on. Also measured: the model as loaded, the variant where it equals softmax, the "
        "variant calibrated without training, and the variant at the start of the training. "
        "Trained parameters are float32.",
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="Train on this UTF-8 text")
    add("--eval-text", type=Path, metavar="FILE",
        help="Measure on this text (default: the end of --text, which is not trained on)"
        )  # fmt: skip
    add("--held-out", type=float, metavar="X",
        help=f"Hold out this share of --text (default: {HELD_OUT:g})")  # fmt: skip
    add("--variants", type=split_list, default=TRAINED, metavar="a,b(x=1)",
        help="Train these variants, also with start='identity', calibrate=N or learn='x y', the "
        f"parameters to train (default: {TRAINED})")  # fmt: skip
    add("--train-length", type=integer(2), default=512, metavar="N",
        help="Train on sequences of N tokens (default: 512)")  # fmt: skip
    add("--steps", type=integer(1), default=100, metavar="N",
        help="Train for N steps (default: 100)")  # fmt: skip
    add("--batch", type=integer(1), default=4, metavar="N",
        help="Sequences per step (default: 4)")  # fmt: skip
    add("--learning-rate", type=_rate, default=0.01, metavar="X",
        help="Peak learning rate of the variant's parameters (default: 0.01)")  # fmt: skip
    add("--lora", type=integer(0), default=0, metavar="RANK",
        help="Also train LoRA of this rank in all linear layers, with peft")  # fmt: skip
    add("--lora-learning-rate", type=_rate, metavar="X",
        help=f"Peak learning rate of LoRA (default: {LORA_RATE:g})")  # fmt: skip
    add("--seeds", type=unique(lambda text: [seed(part) for part in text.split(",")]),
        default="0", metavar="N,N,…",
        help="Train once with each of these seeds (default: 0)")  # fmt: skip
    add("--save", type=Path, metavar="DIR", help="Save the trained model to DIR (only one model)")
    parser.set_defaults(shard=UNSHARDED)
    _add_shared(parser, ADAPT, "512,1024,2048,4096,8192", "loss,retrieval")


def _add_shared(parser: argparse.ArgumentParser, name: str, lengths: str, measures: str) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME",
        help="Load this model: a folder, or a name on the Hugging Face hub")  # fmt: skip
    add("--gguf", metavar="FILE", help="Load the model and its tokenizer from this file in it")
    add("--layers", type=parse_layers, default="all", metavar="N-N,N",
        help="Substitute only in these layers")  # fmt: skip
    add("--measures", type=_measures, default=measures, metavar="NAME,…",
        help=f"Measure these of {', '.join(MEASURES)} (default: {measures})")  # fmt: skip
    add("--lengths", type=unique(numbers), default=lengths, metavar="N,N,…",
        help=f"Read contexts of these lengths in tokens (default: {lengths})")  # fmt: skip
    add("--samples", type=numbers, metavar="N,N,…",
        help="Read N contexts: one number, or one for each length (default: 20, and 5 at lengths "
        "above 2048)")  # fmt: skip
    add("--seed", type=seed, default=0, metavar="N", help="Draw contexts with seed N (default: 0)")
    add("--dtype", choices=tuple(DTYPES), default="float32",
        help="Load the parameters in this dtype (default: float32)")  # fmt: skip
    add("--device", default="cpu", metavar="NAME", help="Run on cpu, cuda or cuda:N (default: cpu)")
    add("--workers", type=integer(0), metavar="N",
        help="Measure with N worker processes (default: one per core or GPU); 0: none"
        )  # fmt: skip
    add("--out", type=Path, default=Path("results") / name, metavar="DIR",
        help=f"Write results to DIR, or continue those in it (default: results/{name})"
        )  # fmt: skip
    add("--retry-failed", action="store_true",
        help="Repeat contexts that ended in NaN or out of memory")  # fmt: skip
    add("--verbose", action="store_true", help="Also print all tables, tracebacks and status lines")
    add("--dry-run", action="store_true", help="Estimate the time of the runs, and run nothing")
    add_plugin(parser)


# ---- argument types ---------------------------------------------------------------------------


def unique(parse: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """An argument type whose values must differ."""

    def read(text: str) -> list[int]:
        values = parse(text)
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must not repeat an entry, got {text!r}")
        return values

    return read


def _measures(text: str) -> tuple[str, ...]:
    names = split_list(text)
    if unknown := [name for name in names if name not in MEASURES]:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(MEASURES)}, got {unknown[0]!r}")
    return tuple(name for name in MEASURES if name in names)


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and > 0, got {text}")
    return value


def _shard(text: str) -> Shard:
    """Read I/N, or env, as for the tasks."""
    try:
        return Options.model_validate({"shard": text}).shard
    except ValidationError as error:
        message = first_error(error).removeprefix("shard ")
        raise argparse.ArgumentTypeError(message) from error


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Read numbers and ranges of layers; "all" is None.

    >>> parse_layers("0-2,5")
    (0, 1, 2, 5)

    Raises:
        argparse.ArgumentTypeError: the text is of another form.
    """
    if text.strip() == "all":
        return None
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if first > last:
            raise argparse.ArgumentTypeError(
                f"must be all, or numbers such as 0-9,20, got {text!r}"
            )
        layers += range(first, last + 1)
    if len(set(layers)) < len(layers):
        raise argparse.ArgumentTypeError(f"must name each layer once, got {text!r}")
    return tuple(sorted(layers))


def samples_of(lengths: Sequence[int], samples: Sequence[int] | None) -> dict[int, int]:
    """The number of samples of each length."""
    if samples is None:
        samples = [20 if length <= 2048 else 5 for length in lengths]
    if len(samples) not in (1, len(lengths)):
        raise UsageError(
            f"--samples must be one number or {len(lengths)}, one for each length, got "
            f"{len(samples)}"
        )
    counts = list(samples) * (1 if len(samples) == len(lengths) else len(lengths))
    return dict(zip(lengths, counts, strict=True))
