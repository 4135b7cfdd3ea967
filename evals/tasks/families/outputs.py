"""Output layers of sequence tasks: a variant, a mixture of softmaxes or an adaptive softmax.

The setting ``output`` is a variant with keywords of `OutputLayer`, such as
"softmax(softcap=30.0)", or one of these names with keywords of the module:

    mixture     `attnzoo.nn.MixtureOutput`, such as "mixture(components=4, mix='contexts')"
    adaptive    `attnzoo.nn.AdaptiveSoftmax`, such as "adaptive(clusters=2)", with cutoffs from the
                frequencies of the tokens. Head and clusters have the same variant.

Except for "adaptive", the layer's matrix is the embedding. Training minimizes the loss that belongs
to the layer. Metrics are computed from its probabilities p, divided by their sum. One answer with
probability 0 would make the mean of −log p infinite. For normalizers that can give probability 0,
the metrics therefore use log((p + ε)/(1 + Vε)) in place of log p (ε-perplexity, Martins et al.
2020, arXiv:2004.02644). Layers other than a softmax without softcap also have `METRICS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo import get_variant
from attnzoo.nn import AdaptiveSoftmax, MixtureOutput, Transformer
from commandline.variants import VariantCall, parse_spec
from evals.task import Metric

MIXTURE, ADAPTIVE = "mixture", "adaptive"
COMPONENTS = 4  # of a mixture, unless they are given
# Initial scale of a mixture's matrix. tanh bounds the hidden states, so that with the scale of an
# embedding, 0.02, all logits start near 0, and a few hundred steps are spent on larger ones.
MIXTURE_STD = 0.2
# Keywords of the modules that the task sets, or that would change the task itself.
FIXED = {"in_features", "num_classes", "counts", "cutoffs", "device", "dtype", "ignore_index"}
EPSILON = 1e-6
METRICS = (
    Metric("support", "Number of tokens with probability above 0", digits=1, optional=True),
    Metric("missed", "Answers with probability 0, %", 100, 2, lower_is_better=True, optional=True),
    Metric("own_loss", "Loss of the output layer", lower_is_better=True, optional=True),
)


def parse(text: str) -> VariantCall:
    """The output layer that a text describes; raises ValueError if it is not one call."""
    spec = parse_spec(text)
    if spec.is_substitution:
        raise ValueError(f"output must be one variant, got {text!r}")
    call = spec.train
    if fixed := FIXED & call.params.keys():
        raise ValueError(f"output must not set {', '.join(sorted(fixed))}, got {text!r}")
    if call.name == ADAPTIVE and "tail_variant" in call.params:
        raise ValueError("output must not have tail_variant: the clusters have the head's variant")
    if call.name == MIXTURE:
        params = {"components": COMPONENTS} | call.params
        call = VariantCall(MIXTURE, tuple(sorted(params.items())))
    return call


def variant_of(call: VariantCall) -> VariantCall | None:
    """The variant of an output layer; None for a plain softmax."""
    if call.name in (MIXTURE, ADAPTIVE):
        return VariantCall(str(call.params.get("variant", "softmax")))
    return None if call == VariantCall("softmax") else call


def arguments(
    call: VariantCall, width: int, vocabulary: int, counts: Sequence[float] | None, tokens: int
) -> dict[str, Any]:
    """The arguments of `Transformer` for an output layer.

    counts: the frequencies of the tokens in descending order, if they are known. tokens: the number
    of tokens in a training step.
    """
    if call.name == MIXTURE:
        bias = get_variant(str(call.params.get("variant", "softmax"))).output_bias is not None
        layer = MixtureOutput(width, vocabulary, **{"bias": bias, **call.params})
        return {"output": layer}
    if call.name == ADAPTIVE:
        if counts is None:
            raise ValueError("output must not be adaptive: the task gives no token frequencies")
        params = {"tokens": tokens, **call.params}
        return {"output": AdaptiveSoftmax.from_frequencies(width, counts, **params)}
    return {"output": call.name, "output_params": call.params}


def tie_mixture(model: Transformer) -> None:
    """Make the matrix of a mixture the embedding, and draw it again."""
    if isinstance(model.output, MixtureOutput):
        model.output.weight = model.embed.weight  # type: ignore[assignment]
        nn.init.normal_(model.embed.weight, std=MIXTURE_STD)


def read(model: Transformer, states: Tensor, answer: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits (S, V) of a plain softmax; for other layers, log-probabilities and `METRICS`."""
    layer = model.output
    other = isinstance(layer, (MixtureOutput, AdaptiveSoftmax))
    if not other and layer.variant == "softmax" and layer.softcap is None:
        return model.logits(states), {}
    log_probs = layer.log_prob(states).double()
    log_p = log_probs.log_softmax(dim=-1)
    if layer.has_zeros:
        log_p = torch.log((log_p.exp() + EPSILON) / (1 + EPSILON * log_p.shape[-1]))
    return log_p, {
        "support": (log_probs > -math.inf).double().sum(dim=-1),
        "missed": (log_probs.gather(-1, answer[:, None])[:, 0] == -math.inf).double(),
        "own_loss": layer.loss(states, answer, reduction="none"),
    }
