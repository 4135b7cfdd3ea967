"""The options of the commands ``pretrained``, ``adapt`` and ``sharpness``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from evals.options import (
    File,
    Length,
    Lengths,
    Names,
    RunOptions,
    add_fields,
    no_repeats,
    option,
    split,
)
from evals.pretrained.loading import DTYPES
from evals.pretrained.study import MEASURES
from evals.pretrained.substitution import ROUNDED
from evals.results.rows import PRETRAINED

ADAPT = "adapt"
NAMES = (PRETRAINED, ADAPT)
VARIANTS = (
    "softmax,log_n(train_length=2048),adaptive_temperature,entmax,topk(top_k=64),"
    "ssmax(calibrate=512)"
)
LORA_RATE = 3e-4
HELD_OUT = 0.2


def parse_layers(value: object) -> tuple[int, ...] | None:
    """Read numbers and ranges of layers; "all" is None.

    >>> parse_layers("0-2,5")
    (0, 1, 2, 5)

    Raises:
        ValueError: the text is of another form.
    """
    text = str(value)
    if value is None or text.strip() == "all":
        return None
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if first > last:
            raise ValueError(f"must be all, or numbers such as 0-9,20, got {text!r}")
        layers += range(first, last + 1)
    if len(set(layers)) < len(layers):
        raise ValueError(f"must name each layer once, got {text!r}")
    return tuple(sorted(layers))


def _among(allowed: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The names in the order of the allowed ones."""
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"must be among {', '.join(allowed)}, got {unknown[0]!r}")
    return tuple(name for name in allowed if name in names)


def _rate(value: object) -> object:
    try:
        rate = float(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"must be a number, got {value!r}") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"must be finite and > 0, got {value}")
    return rate


Layers = Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)]
Rate = Annotated[float, BeforeValidator(_rate)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31)]
MODEL = option(..., "PATH_OR_NAME", "Load this model: a folder, or a name on the Hugging Face hub")
TEXT = option(..., "FILE", "Read this UTF-8 text")
LAYERS = option(None, "N-N,N", "Substitute only in these layers (default: all)")
_LENGTHS = "Read contexts of these lengths in tokens"
_MEASURES = f"Measure these of {', '.join(MEASURES)}"
_OUT = "Write results to DIR, or continue those in it"
Measures = Annotated[Names, AfterValidator(partial(_among, MEASURES))]


class ModelOptions(RunOptions):
    """The options of both ``pretrained`` and ``adapt``."""

    model: str = MODEL
    gguf: str | None = option(None, "FILE", "Load the model and its tokenizer from this file in it")
    text: File = TEXT
    layers: Layers = LAYERS
    measures: Measures = option(MEASURES, "NAME,…", _MEASURES)
    lengths: Lengths = option((512, 1024, 2048, 8192), "N,N,…", _LENGTHS)
    samples: Annotated[Sequence[Positive], BeforeValidator(split)] | None = option(
        None, "N,N,…",
        "Read N contexts: one number, or one for each length (default: 20, and 5 at lengths above "
        "2048)",
    )  # fmt: skip
    seed: Seed = option(0, "N", "Draw contexts with seed N")
    dtype: Literal[tuple(DTYPES)] = option(  # pyright: ignore[reportInvalidTypeForm]
        "float32", "NAME", f"Load the parameters in this dtype: {', '.join(DTYPES)}"
    )


class PretrainedOptions(ModelOptions):
    """The options of ``pretrained``."""

    variants: Names | None = option(
        None, "a,b(x=1)",
        "Substitute these variants at inference, also with start='identity' or calibrate=N "
        f"(default: {VARIANTS}, and those of --plugin). The model as loaded is always measured",
    )  # fmt: skip
    bfloat16: Annotated[Names, AfterValidator(partial(_among, ROUNDED))] = option(
        (), "NAME,…",
        "Measure the variants also in bfloat16: products (rounded operands of matrix products, "
        "fp32 sums), model (parameters and activations, as with --dtype bfloat16)",
    )  # fmt: skip
    greedy: bool = option(False, "", "Also decode the answers greedily")
    batch: Positive = option(1, "N", "Read N contexts at once")
    save: ClassVar[None] = None
    out: File = option(Path("results") / PRETRAINED, "DIR", _OUT)


class AdaptOptions(ModelOptions):
    """The options of ``adapt``."""

    text: File = option(..., "FILE", "Train on this UTF-8 text")
    eval_text: File | None = option(
        None, "FILE", "Measure on this text (default: the end of --text, which is not trained on)"
    )
    held_out: float | None = option(
        None, "X", f"Hold out this share of --text (default: {HELD_OUT})"
    )
    variants: Names = option(
        ("ssmax",), "a,b(x=1)",
        "Train these variants, also with start='identity', calibrate=N or learn='x y', the "
        "parameters to train",
    )  # fmt: skip
    measures: Measures = option(("loss", "retrieval"), "NAME,…", _MEASURES)
    lengths: Lengths = option((512, 1024, 2048, 4096, 8192), "N,N,…", _LENGTHS)
    train_length: Length = option(512, "N", "Train on sequences of N tokens")
    steps: Positive = option(100, "N", "Train for N steps")
    batch: Positive = option(4, "N", "Sequences per step")
    learning_rate: Rate = option(0.01, "X", "Peak learning rate of the variant's parameters")
    lora: Annotated[int, Field(ge=0)] = option(
        0, "RANK", "Also train LoRA of this rank in all linear layers, with peft"
    )
    lora_learning_rate: Rate | None = option(
        None, "X", f"Peak learning rate of LoRA (default: {LORA_RATE})"
    )
    seeds: Annotated[Sequence[Seed], AfterValidator(no_repeats), BeforeValidator(split)] = option(
        (0,), "N,N,…", "Train once with each of these seeds"
    )
    save: File | None = option(None, "DIR", "Save the trained model to DIR (only one model)")
    out: File = option(Path("results") / ADAPT, "DIR", _OUT)


OPTIONS = {PRETRAINED: PretrainedOptions, ADAPT: AdaptOptions}


def add_parsers(commands: Any) -> None:
    """Add both commands."""
    parser = commands.add_parser(
        PRETRAINED,
        help="Measure a pretrained language model with other attention variants, without training",
        description="Measure a pretrained causal language model with its attention replaced at "
        "inference: the loss at each position, retrieval of facts planted in a text, the sharpness "
        "of each head, and the weight that each head puts on a needle. Nothing is trained.",
    )
    add_fields(parser, PretrainedOptions)
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
    add_fields(parser, AdaptOptions, ("shard",))
