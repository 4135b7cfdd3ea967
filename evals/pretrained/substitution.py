"""Inference-time substitution of attention variants in a pretrained model.

A substitution is written as a variant, such as ``log_n(train_length=2048)``. Two keywords are not
parameters of the variant:

    start="identity"   start at the parameters that make the variant equal to softmax
    calibrate=512      choose the parameters such that the gain is 1 on average over the queries of
                       512 tokens

as for `attnzoo.integrations.transformers.convert`, which does the work.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.options import check_registered

_KEYWORDS = ("start", "calibrate")


@dataclass(frozen=True)
class Substitution:
    """A variant in some layers of a model.

    call: the variant, with the keywords above. layers: numbers of the layers; None is all. The
    other layers keep the attention that the model has.
    """

    call: VariantCall
    layers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return str(self.call)

    @property
    def in_place(self) -> bool:
        """Whether `attnzoo.integrations.transformers.revert` undoes it."""
        return True

    def onto(self, model: Any, tokens: Tensor) -> Any:
        """Substitute it in the model, which is changed; tokens are those to calibrate on."""
        return apply(model, self, tokens)

    @property
    def variant(self) -> VariantCall:
        """The variant without the keywords."""
        params = tuple((name, x) for name, x in self.call.arguments if name not in _KEYWORDS)
        return VariantCall(self.call.name, params)

    def identity(self) -> dict[str, object]:
        """What the results depend on, for the keys under which they are stored."""
        keywords = {name: repr(self.call.params.get(name)) for name in _KEYWORDS}
        layers = None if self.layers is None else list(self.layers)
        return {**self.variant.identity(), **keywords, "layers": layers}


def parse_substitution(text: str, layers: tuple[int, ...] | None = None) -> Substitution:
    """Read a substitution.

    >>> parse_substitution("log_n(train_length=16)").variant.params
    {'train_length': 16}

    Raises:
        UsageError: the text is no variant, or a keyword has another value than allowed.
    """
    spec = parse_spec(text)
    call = spec.test
    check_registered("--variants", spec)
    tokens = call.params.get("calibrate")
    if tokens is not None and (type(tokens) is not int or tokens < 2):
        raise UsageError(f"{call.name}: calibrate must be an int >= 2, got {tokens!r}")
    return Substitution(call, layers)


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Read numbers and ranges of layers; "all" is None.

    >>> parse_layers("0-2,5")
    (0, 1, 2, 5)

    Raises:
        UsageError: the text is of another form.
    """
    if text.strip() == "all":
        return None
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdecimal() for end in ends) or int(ends[0]) > int(
            ends[1]
        ):
            raise UsageError(f"--layers must be all, or numbers such as 0-9,20, got {text!r}")
        layers += range(int(ends[0]), int(ends[1]) + 1)
    if len(set(layers)) < len(layers):
        raise UsageError(f"--layers must name each layer once, got {text!r}")
    return tuple(sorted(layers))


def is_converted(model: nn.Module) -> bool:
    """Whether attnzoo has already converted the model."""
    return any(isinstance(module, attnzoo.nn.Attention) for module in model.modules())


def check_substitution(
    substitution: Substitution, config: Any, tokens: Tensor, **options: Any
) -> None:
    """Check what does not depend on the weights of the model with this config.

    Raises:
        UsageError: the model has no such layer, an argument has a wrong name or value, or there are
            too few tokens to calibrate on.
    """
    _check_calibration(substitution, tokens)
    config, layers = config.get_text_config(), substitution.layers
    count = getattr(config, "num_hidden_layers", None)
    if layers and isinstance(count, int) and layers[-1] >= count:
        raise UsageError(f"--layers must be from 0 to {count - 1} for this model, got {layers[-1]}")
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):  # a list of different numbers in some models
        apply(_small_model(heads), Substitution(substitution.call), tokens % 2, **options)


def _small_model(heads: int) -> Any:
    """A model with weights in which `convert` checks the arguments of a substitution."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 4 * heads,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(vocab_size=2, num_attention_heads=heads, pad_token_id=None, **sizes)
    with torch.random.fork_rng(devices=()):
        return LlamaForCausalLM(config)


def _check_calibration(substitution: Substitution, tokens: Tensor) -> None:
    count = substitution.call.params.get("calibrate")
    if count is not None and len(tokens) < count:
        raise UsageError(
            f"{substitution}: calibrate must be at most {len(tokens)}, the tokens of the text, got "
            f"{count}"
        )


def apply(model: Any, substitution: Substitution, tokens: Tensor, **options: Any) -> Any:
    """Substitute the variant in place; returns the model.

    Args:
        model: a model of transformers.
        substitution: the variant and its layers.
        tokens: tokens (N,) of a text, to calibrate on.
        **options: passed to `attnzoo.integrations.transformers.convert`, such as ``learn``.

    Raises:
        UsageError: the model or a layer does not support the variant, or there are too few tokens.
            The model is unchanged.
    """
    from attnzoo.integrations.transformers import convert

    _check_calibration(substitution, tokens)
    params = substitution.call.params
    if (count := params.get("calibrate")) is not None:
        params["calibrate"] = tokens[:count][None].to(model.device)
    layers: Sequence[int] | None = substitution.layers
    try:
        return convert(model, substitution.call.name, layers, warn=False, **params, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--variants {substitution}: {error}") from error


@contextmanager
def substituted(model: Any, substitution: Substitution | None, tokens: Tensor) -> Iterator[Any]:
    """Yield the model with the variant, and restore it. None yields the model as loaded.

    A model that attnzoo has already converted is copied, because undoing a second conversion would
    lose its own learned parameters. It is also copied if the substitution changes other weights.
    """
    if substitution is None:
        yield model
    elif is_converted(model) or not substitution.in_place:
        yield substitution.onto(copy.deepcopy(model), tokens)
    else:
        from attnzoo.integrations.transformers import revert

        try:
            yield substitution.onto(model, tokens)
        finally:
            if is_converted(model):  # not if the conversion failed
                revert(model)
