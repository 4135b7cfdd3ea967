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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.options import check_registered
from evals.results.pretrained import BASELINE

_KEYWORDS = ("start", "calibrate")
# What can be rounded to bfloat16: the operands of the matrix products, or the whole model.
ROUNDED = ("products", "model")


@dataclass(frozen=True)
class Substitution:
    """A variant in some layers of a model.

    call: the variant, with the keywords above. layers: numbers of the layers; None is all. The
    other layers keep the attention that the model has. bfloat16: what is rounded to bfloat16, of
    `ROUNDED`; "" is nothing.
    """

    call: VariantCall
    layers: tuple[int, ...] | None = None
    bfloat16: str = ""

    def __str__(self) -> str:
        return str(self.call)

    @property
    def in_place(self) -> bool:
        """Whether `attnzoo.integrations.transformers.revert` undoes it."""
        return True

    @property
    def untrained(self) -> Substitution:
        """What is substituted before any training, under the same name."""
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of `attnzoo.integrations.transformers.convert`."""
        return {}

    def onto(self, model: Any, tokens: Tensor) -> Any:
        """Substitute the variant in the model, which is changed.

        Args:
            model: a model of transformers.
            tokens: tokens (N,) of a text, to calibrate on.

        Raises:
            UsageError: the model or a layer does not support the variant, or there are too few
                tokens. The model is unchanged.
        """
        from attnzoo.integrations.transformers import convert

        params = self.call.params
        if (count := params.get("calibrate")) is not None:
            if len(tokens) < count:
                raise UsageError(
                    f"{self}: calibrate must be at most {len(tokens)}, the tokens of the text, got "
                    f"{count}"
                )
            params["calibrate"] = tokens[:count][None].to(model.device)
        layers: Sequence[int] | None = self.layers
        try:
            return convert(model, self.call.name, layers, warn=False, **params, **self.options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--variants {self}: {error}") from error

    def identity(self) -> dict[str, object] | None:
        """What the results depend on, for the keys under which they are stored."""
        if self == AS_LOADED:
            return None
        arguments = tuple((name, x) for name, x in self.call.arguments if name not in _KEYWORDS)
        keywords = {name: repr(self.call.params.get(name)) for name in _KEYWORDS}
        layers = None if self.layers is None else list(self.layers)
        rounding = {"bfloat16": self.bfloat16} if self.bfloat16 else {}
        variant = VariantCall(self.call.name, arguments).identity()
        return {**variant, **keywords, "layers": layers, **rounding}


AS_LOADED = Substitution(VariantCall(BASELINE))  # the model without a substitution


def parse_substitution(text: str, layers: tuple[int, ...] | None = None) -> Substitution:
    """Read a substitution.

    >>> parse_substitution("log_n(train_length=16)").call.params
    {'train_length': 16}

    Raises:
        UsageError: the text is no variant, or a keyword has another value than allowed.
    """
    spec = parse_spec(text)
    check_registered("--variants", spec)
    tokens = spec.test.params.get("calibrate")
    if tokens is not None and (type(tokens) is not int or tokens < 2):
        raise UsageError(f"{spec.test.name}: calibrate must be an int >= 2, got {tokens!r}")
    return Substitution(spec.test, layers)


def is_converted(model: nn.Module) -> bool:
    """Whether attnzoo has already converted the model."""
    return any(isinstance(module, attnzoo.nn.Attention) for module in model.modules())


def check_substitution(substitution: Substitution, config: Any, tokens: Tensor) -> None:
    """Check what does not depend on the weights of the model with this config.

    Raises:
        UsageError: the model has no such layer, an argument has a wrong name or value, or there are
            too few tokens to calibrate on.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config, layers = config.get_text_config(), substitution.layers
    count = getattr(config, "num_hidden_layers", None)
    if layers and isinstance(count, int) and layers[-1] >= count:
        raise UsageError(f"--layers must be from 0 to {count - 1} for this model, got {layers[-1]}")
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):  # a list of different numbers in some models
        return
    sizes: dict[str, Any] = {"hidden_size": 4 * heads, "intermediate_size": 4}
    small = LlamaConfig(vocab_size=2, num_hidden_layers=1, num_attention_heads=heads,
                        pad_token_id=None, eos_token_id=None, **sizes)  # fmt: skip
    with torch.random.fork_rng(devices=()):
        replace(substitution, layers=None).onto(LlamaForCausalLM(small), tokens % 2)


@contextmanager
def substituted(model: Any, substitution: Substitution, tokens: Tensor) -> Iterator[Any]:
    """Yield the model with the variant, and restore it.

    A model that attnzoo has already converted is copied, because undoing a second conversion would
    lose its own learned parameters. It is also copied if the substitution changes other weights.
    """
    if substitution == AS_LOADED:
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
