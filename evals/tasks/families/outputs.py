"""Output layers of sequence tasks: a variant, a mixture of softmaxes or an adaptive softmax.

The setting ``output`` is a variant with keywords of `OutputLayer`, such as
"softmax(softcap=30.0)", or one of these names with keywords of the module:

    mixture     `attnzoo.nn.MixtureOutput`, such as "mixture(components=4, mix='contexts')"
    adaptive    `attnzoo.nn.AdaptiveSoftmax`, such as "adaptive(clusters=2)", with cutoffs from the
                frequencies of the tokens. Head and clusters have the same variant.

Except for "adaptive", the layer's matrix is the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from attnzoo import get_variant
from attnzoo.nn import AdaptiveSoftmax, MixtureOutput, Transformer
from commandline.variants import VariantCall, parse_spec

MIXTURE, ADAPTIVE = "mixture", "adaptive"
COMPONENTS = 4  # of a mixture, unless they are given
# Initial scale of a mixture's matrix. tanh bounds the hidden states, so that with the scale of an
# embedding, 0.02, all logits start near 0, and a few hundred steps are spent on larger ones.
MIXTURE_STD = 0.2
# Keywords of the modules that the task sets, or that would change the task itself.
FIXED = {"in_features", "num_classes", "counts", "cutoffs", "device", "dtype", "ignore_index"}


def parse_output(text: str) -> VariantCall:
    """The output layer that a text describes; raises ValueError if it is not one call."""
    spec = parse_spec(text)
    if spec.is_substitution:
        raise ValueError(f"output must be one variant, got {text!r}")
    call = spec.train
    if fixed := FIXED & call.params.keys():
        raise ValueError(f"output must not set {', '.join(sorted(fixed))}, got {text!r}")
    if call.name == ADAPTIVE and "tail_variant" in call.params:
        raise ValueError("output must not have tail_variant: the clusters have the head's variant")
    if call.name == MIXTURE and "components" not in call.params:
        params = call.params | {"components": COMPONENTS}
        call = VariantCall(MIXTURE, tuple(sorted(params.items())))
    return call


def normalizer(call: VariantCall) -> VariantCall | None:
    """The variant of an output layer; None for a plain softmax."""
    if call.name in (MIXTURE, ADAPTIVE):
        return VariantCall(str(call.params.get("variant", "softmax")))
    return None if call == VariantCall("softmax") else call


def build_with(
    call: VariantCall,
    make: Callable[..., Transformer],
    width: int,
    vocabulary: int,
    counts: Sequence[float] | None,
    tokens: int,
) -> Transformer:
    """A model with an output layer.

    make: makes the model from the keywords ``output`` and ``output_params``. counts: the
    frequencies of the tokens in descending order, if they are known. tokens: the number of tokens
    in a training step.
    """
    if call.name == MIXTURE:
        mixed = get_variant(str(call.params.get("variant", "softmax")))
        bias = mixed.output_bias is not None
        layer = MixtureOutput(width, vocabulary, **{"bias": bias, **call.params})
        model = make(output=layer)
        layer.weight = model.embed.weight  # type: ignore[assignment]
        nn.init.normal_(layer.weight, std=MIXTURE_STD)
        return model
    if call.name == ADAPTIVE:
        if counts is None:
            raise ValueError("output must not be adaptive: the task gives no token frequencies")
        options = {"tokens": tokens, **call.params}
        return make(output=AdaptiveSoftmax.from_frequencies(width, counts, **options))
    return make(output=call.name, output_params=call.params)
