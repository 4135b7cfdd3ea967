"""The options of the commands ``pretrained`` and ``adapt``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from commandline.arguments import add_plugin, integer, number, numbers, seed
from commandline.errors import UsageError
from commandline.variants import split_list
from evals.options import Options
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
MODEL = "Load this model: a folder, or a name on the Hugging Face hub"  # help of --model
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
    parser.set_defaults(save=None)
    add = adder(parser)
    add("--text", "FILE", "Read this UTF-8 text", Path, required=True)
    text = "Substitute these variants at inference, also with start='identity' or calibrate=N "
    text += f"(default: {VARIANTS}, and those of --plugin). The model as loaded is always measured"
    add("--variants", "a,b(x=1)", text, split_list)
    parser.add_argument("--greedy", action="store_true", help="Also decode the answers greedily")
    add("--batch", "N", "Read N contexts at once", integer(1), 1)
    text = "Run part I of N (I from 0)"
    parser.add_argument("--shard", type=_shard, default=UNSHARDED, metavar="I/N", help=text)
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
    parser.set_defaults(shard=UNSHARDED)
    add = adder(parser)
    add("--text", "FILE", "Train on this UTF-8 text", Path, required=True)
    text = "Measure on this text (default: the end of --text, which is not trained on)"
    add("--eval-text", "FILE", text, Path)
    add("--held-out", "X", f"Hold out this share of --text (default: {HELD_OUT})", float)
    text = "Train these variants, also with start='identity', calibrate=N or learn='x y', the "
    add("--variants", "a,b(x=1)", f"{text}parameters to train", split_list, "ssmax")
    add("--train-length", "N", "Train on sequences of N tokens", integer(2), 512)
    add("--steps", "N", "Train for N steps", integer(1), 100)
    add("--batch", "N", "Sequences per step", integer(1), 4)
    add("--learning-rate", "X", "Peak learning rate of the variant's parameters", _rate, 0.01)
    add("--lora", "RANK", "Also train LoRA of this rank in all linear layers, with peft",
        integer(0), 0)  # fmt: skip
    text = f"Peak learning rate of LoRA (default: {LORA_RATE})"
    add("--lora-learning-rate", "X", text, _rate)
    seeds = unique(lambda text: [seed(part) for part in text.split(",")])
    add("--seeds", "N,N,…", "Train once with each of these seeds", seeds, "0")
    add("--save", "DIR", "Save the trained model to DIR (only one model)", Path)
    _add_shared(parser, ADAPT, "512,1024,2048,4096,8192", "loss,retrieval")


def adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """A function that adds an option with a value: its name, placeholder, help text, type and
    default. The default is added to the help text."""

    def add(
        name: str, metavar: str | None, text: str, kind: Any = str, default: Any = None, **more: Any
    ) -> None:
        text += "" if default is None else f" (default: {default})"
        parser.add_argument(name, metavar=metavar, help=text, type=kind, default=default, **more)

    return add


def _add_shared(parser: argparse.ArgumentParser, name: str, lengths: str, measures: str) -> None:
    add, flag = adder(parser), partial(parser.add_argument, action="store_true")
    add("--model", "PATH_OR_NAME", MODEL, required=True)
    add("--gguf", "FILE", "Load the model and its tokenizer from this file in it")
    add("--layers", "N-N,N", "Substitute only in these layers", parse_layers, "all")
    add("--measures", "NAME,…", f"Measure these of {', '.join(MEASURES)}", _measures, measures)
    add("--lengths", "N,N,…", "Read contexts of these lengths in tokens", unique(numbers), lengths)
    text = "Read N contexts: one number, or one for each length (default: 20, and 5 at lengths "
    add("--samples", "N,N,…", f"{text}above 2048)", numbers)
    add("--seed", "N", "Draw contexts with seed N", seed, 0)
    add("--dtype", None, "Load the parameters in this dtype", str, "float32", choices=[*DTYPES])
    add("--device", "NAME", "Run on cpu, cuda or cuda:N", str, "cpu")
    text = "Measure with N worker processes (default: one per core or GPU); 0: none"
    add("--workers", "N", text, integer(0))
    text = "Write results to DIR, or continue those in it"
    add("--out", "DIR", text, Path, Path("results") / name)
    flag("--retry-failed", help="Repeat contexts that ended in NaN or out of memory")
    flag("--verbose", help="Also print all tables, tracebacks and status lines")
    flag("--dry-run", help="Estimate the time of the runs, and run nothing")
    add_plugin(parser)


# ---- argument types ---------------------------------------------------------------------------


def unique(parse: Callable[[str], list[Any]]) -> Callable[[str], list[Any]]:
    """An argument type whose values must differ."""

    def read(text: str) -> list[Any]:
        values = parse(text)
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must not repeat an entry, got {text!r}")
        return values

    return read


def _measures(text: str) -> tuple[str, ...]:
    names = unique(split_list)(text)
    if unknown := [name for name in names if name not in MEASURES]:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(MEASURES)}, got {unknown[0]!r}")
    return tuple(name for name in MEASURES if name in names)


def _rate(text: str) -> float:
    value = number(text)
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
