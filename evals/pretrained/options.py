"""The options of the commands ``pretrained``, ``adapt`` and ``sharpness``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from evals.options import Lengths, Names, RunOptions, add_fields, no_repeats, split
from evals.pretrained.loading import DTYPES
from evals.pretrained.study import MEASURES
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


def _measures(names: Sequence[str]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in MEASURES]:
        raise ValueError(f"must be among {', '.join(MEASURES)}, got {unknown[0]!r}")
    return tuple(name for name in MEASURES if name in names)


def _rate(value: object) -> object:
    try:
        rate = float(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"must be a number, got {value!r}") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"must be finite and > 0, got {value}")
    return rate


Rate = Annotated[float, BeforeValidator(_rate)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31)]
MODEL: Any = Field(
    title="PATH_OR_NAME",
    description="Load this model: a folder, or a name on the Hugging Face hub",
)


def _out(name: str) -> Any:
    """The field of the results folder."""
    text = "Write results to DIR, or continue those in it"
    return Field(Path("results") / name, title="DIR", strict=False, description=text)


TEXT: Any = Field(title="FILE", description="Read this UTF-8 text", strict=False)


class _Shared(RunOptions):
    """The options of both ``pretrained`` and ``adapt``."""

    model: str = MODEL
    gguf: str | None = Field(
        None, title="FILE", description="Load the model and its tokenizer from this file in it"
    )
    text: Path = TEXT
    layers: Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)] = Field(
        None, title="N-N,N", description="Substitute only in these layers (default: all)"
    )
    measures: Annotated[Names, AfterValidator(_measures)] = Field(
        MEASURES, title="NAME,…", description=f"Measure these of {', '.join(MEASURES)}"
    )
    lengths: Lengths = Field(
        (512, 1024, 2048, 8192), title="N,N,…",
        description="Read contexts of these lengths in tokens",
    )  # fmt: skip
    samples: Annotated[Sequence[Positive] | None, BeforeValidator(split)] = Field(
        None, title="N,N,…",
        description="Read N contexts: one number, or one for each length (default: 20, and 5 at "
        "lengths above 2048)",
    )  # fmt: skip
    seed: Seed = Field(0, title="N", description="Draw contexts with seed N")
    dtype: Literal[tuple(DTYPES)] = Field(  # pyright: ignore[reportInvalidTypeForm]
        "float32", title="NAME",
        description=f"Load the parameters in this dtype: {', '.join(DTYPES)}",
    )  # fmt: skip


class PretrainedOptions(_Shared):
    """The options of ``pretrained``."""

    variants: Names | None = Field(
        None, title="a,b(x=1)",
        description="Substitute these variants at inference, also with start='identity' or "
        f"calibrate=N (default: {VARIANTS}, and those of --plugin). The model as loaded is always "
        "measured",
    )  # fmt: skip
    greedy: bool = Field(False, description="Also decode the answers greedily")
    batch: Positive = Field(1, title="N", description="Read N contexts at once")
    save: ClassVar[None] = None
    out: Path = _out(PRETRAINED)


class AdaptOptions(_Shared):
    """The options of ``adapt``."""

    text: Path = Field(title="FILE", description="Train on this UTF-8 text", strict=False)
    eval_text: Path | None = Field(
        None, title="FILE", strict=False,
        description="Measure on this text (default: the end of --text, which is not trained on)",
    )  # fmt: skip
    held_out: float | None = Field(
        None, title="X", description=f"Hold out this share of --text (default: {HELD_OUT})"
    )
    variants: Names = Field(
        ("ssmax",), title="a,b(x=1)",
        description="Train these variants, also with start='identity', calibrate=N or "
        "learn='x y', the parameters to train",
    )  # fmt: skip
    measures: Annotated[Names, AfterValidator(_measures)] = Field(
        ("loss", "retrieval"), title="NAME,…", description=f"Measure these of {', '.join(MEASURES)}"
    )
    lengths: Lengths = Field(
        (512, 1024, 2048, 4096, 8192), title="N,N,…",
        description="Read contexts of these lengths in tokens",
    )  # fmt: skip
    train_length: Annotated[int, Field(ge=2)] = Field(
        512, title="N", description="Train on sequences of N tokens"
    )
    steps: Positive = Field(100, title="N", description="Train for N steps")
    batch: Positive = Field(4, title="N", description="Sequences per step")
    learning_rate: Rate = Field(
        0.01, title="X", description="Peak learning rate of the variant's parameters"
    )
    lora: Annotated[int, Field(ge=0)] = Field(
        0, title="RANK",
        description="Also train LoRA of this rank in all linear layers, with peft",
    )  # fmt: skip
    lora_learning_rate: Rate | None = Field(
        None, title="X", description=f"Peak learning rate of LoRA (default: {LORA_RATE})"
    )
    seeds: Annotated[Sequence[Seed], AfterValidator(no_repeats), BeforeValidator(split)] = Field(
        (0,), title="N,N,…", description="Train once with each of these seeds"
    )
    save: Path | None = Field(
        None, title="DIR", strict=False,
        description="Save the trained model to DIR (only one model)",
    )  # fmt: skip
    out: Path = _out(ADAPT)


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
