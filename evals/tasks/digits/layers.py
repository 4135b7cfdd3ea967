"""The output layers of the experiments: each has a loss, and probabilities for predictions.

A layer is written as a call, such as ``entmax(alpha=1.5)``. Its name is a variant or an entry of
`FUNCTIONS`. A variant is trained with its own loss (`attnzoo.losses.linear_loss`); its
probabilities are its weights, which for sigmoid and sink need not sum to 1. An entry of `FUNCTIONS`
is a function of `attnzoo.losses` and the log-probabilities of its model.

To add a loss, add a line to `FUNCTIONS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from attnzoo.nn import OutputLayer
from commandline.variants import VariantCall, complete
from evals.tasks.digits.data import CLASSES

# (hidden (N, d), weight (V, d), bias (V,), parameters) → log-probabilities (N, V).
LogProbabilities = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Function:
    """A loss, and the log-probabilities of its model.

    loss: a function (hidden, weight, target, *, linear_bias, **parameters). presets: the parameters
    with which the presets run it.
    """

    loss: Callable[..., Tensor]
    log_probabilities: LogProbabilities
    presets: tuple[Mapping[str, Any], ...] = ({},)


FUNCTIONS: dict[str, Function] = {}


class VariantLayer(OutputLayer):
    """The output layer of a variant. Parameters with an initial value are learned."""

    def __init__(self, width: int, call: VariantCall) -> None:
        super().__init__(width, CLASSES, call.name, **call.params)

    def masked_loss(self, hidden: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """The mean loss in which only the classes of ``mask`` (V,) or (N, V) take part."""
        names = [param.name for param in attnzoo.get_variant(self.variant).params]
        own = {name: getattr(self, name) for name in names if name not in ("weight", "bias")}
        return attnzoo.losses.linear_loss(
            hidden, self.weight, target, self.variant, linear_bias=self.bias, class_mask=mask, **own
        )


class FunctionLayer(nn.Module):
    """The output layer of an entry of `FUNCTIONS`, initialized like `attnzoo.nn.OutputLayer`."""

    has_zeros = False

    def __init__(self, width: int, call: VariantCall) -> None:
        super().__init__()
        self.function, self.params = FUNCTIONS[call.name], call.params
        self.linear = nn.Linear(width, CLASSES)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The mean loss."""
        weight, bias = self.linear.weight, self.linear.bias
        return self.function.loss(hidden, weight, target, linear_bias=bias, **self.params)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities of all classes, (N, V)."""
        weight, bias = self.linear.weight, self.linear.bias
        return self.function.log_probabilities(hidden, weight, bias, self.params)


def layer(width: int, call: VariantCall) -> VariantLayer | FunctionLayer:
    """The untrained layer."""
    return (FunctionLayer if call.name in FUNCTIONS else VariantLayer)(width, call)


def completed(call: VariantCall) -> VariantCall:
    """The call, with example values for the parameters that its variant requires."""
    return call if call.name in FUNCTIONS else complete(call, CLASSES)


def unsupported(call: VariantCall) -> str | None:
    """The reason why there is no such layer, or None."""
    if call.name not in FUNCTIONS and call.name not in attnzoo.list_variants():
        known = ", ".join((*attnzoo.list_variants(), *FUNCTIONS))
        return f"output layer must be one of {known}, got {call.name!r}"
    hidden, target = torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)
    try:
        layer(4, call).loss(hidden, target)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def identity(call: VariantCall) -> dict[str, object]:
    """The name and the parameters, also those with default values, for keys of results."""
    if call.name not in FUNCTIONS:
        return call.identity()
    found = inspect.signature(FUNCTIONS[call.name].loss).parameters.values()
    defaults = {p.name: repr(p.default) for p in found if p.default is not p.empty}
    given = {name: repr(value) for name, value in call.arguments}
    return {"name": call.name, "params": defaults | given, "given": sorted(given)}


def every_layer() -> tuple[str, ...]:
    """All variants that have a loss, and all functions with the parameters of their presets."""
    calls = [completed(VariantCall(name)) for name in attnzoo.list_variants()]
    found = [str(call) for call in calls if unsupported(call) is None]
    for name, function in FUNCTIONS.items():
        found += [str(VariantCall(name, tuple(sorted(p.items())))) for p in function.presets]
    return tuple(sorted(found, key=lambda text: text != "softmax"))
