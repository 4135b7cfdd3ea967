"""The output layers of the experiments: each has a loss, and probabilities for predictions.

A layer is written as a call, such as ``entmax(alpha=1.5)``. Its name is a variant or an entry of
`FUNCTIONS`. A variant is trained with its own loss (`attnzoo.losses.linear_loss`); its
probabilities are its weights, which for sigmoid and sink need not sum to 1. An entry of `FUNCTIONS`
is a function of `attnzoo.losses`, and the −log p of its model:

    margin_loss                    softmax of the scaled cosines, without the margin
    noisy_loss, emo_loss           softmax
    z_loss                         σ(a(z̃ − b)), for each class by itself: the loss is −log p / a.
                                   The paper only ranks classes
    spherical_loss                 (z² + ε)/Σ(z² + ε)
    perturb_max_loss, exact_loss   P(the class has the largest score after normal noise)

To add a loss, add a line to `FUNCTIONS`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from attnzoo import losses
from attnzoo.nn import OutputLayer
from commandline.variants import VariantCall, complete
from evals.tasks.digits.data import CLASSES

# A function (hidden (N, d), weight (V, d), target (N,), *, linear_bias, **parameters), where
# ``linear_bias`` is missing in functions of normalized rows.
Loss = Callable[..., Tensor]


def _softmax(hidden: Tensor, weight: Tensor, target: Tensor, *, linear_bias: Tensor, **_) -> Tensor:
    return losses.linear_loss(hidden, weight, target, linear_bias=linear_bias, reduction="none")


def _cosines(hidden: Tensor, weight: Tensor, target: Tensor, **params: Any) -> Tensor:
    params = {**params, "margin": 0.0}
    return losses.margin_loss(hidden, weight, target, reduction="none", **params)


def _logistic(hidden: Tensor, weight: Tensor, target: Tensor, **params: Any) -> Tensor:
    return params["a"] * losses.z_loss(hidden, weight, target, reduction="none", **params)


@dataclass(frozen=True)
class Function:
    """A loss, and the probabilities of its model.

    loss: the mean loss. surprise: −log p of the target, one number per image. presets: the
    parameters with which the presets run the loss.
    """

    loss: Loss
    surprise: Loss
    presets: tuple[Mapping[str, Any], ...] = ({},)

    @property
    def has_bias(self) -> bool:
        return "linear_bias" in inspect.signature(self.loss).parameters


_MARGINS = tuple({"kind": kind} for kind in ("am", "cos", "arc"))
_SPHERICAL = partial(losses.spherical_loss, reduction="none")
_PERTURBED = partial(losses.perturb_max_loss, reduction="none")

FUNCTIONS: dict[str, Function] = {
    "margin_loss": Function(losses.margin_loss, _cosines, _MARGINS),
    "noisy_loss": Function(losses.noisy_loss, _softmax, ({"alpha": 0.1},)),
    "emo_loss": Function(losses.emo_loss, _softmax),
    "z_loss": Function(losses.z_loss, _logistic, ({"a": 2.0, "b": 2.0},)),
    "spherical_loss": Function(losses.spherical_loss, _SPHERICAL),
    "perturb_max_loss": Function(losses.perturb_max_loss, _PERTURBED),
    "exact_loss": Function(losses.exact_loss, _PERTURBED),
}


class VariantLayer(OutputLayer):
    """The output layer of a variant. Parameters with an initial value are learned."""

    def __init__(self, width: int, call: VariantCall) -> None:
        super().__init__(width, CLASSES, call.name, **call.params)

    def masked_loss(
        self, hidden: Tensor, target: Tensor, mask: Tensor, value: float = -math.inf
    ) -> Tensor:
        """The mean loss in which only the classes of ``mask`` (V,) or (N, V) take part.

        value: the logit of the others; a finite one is for softmax.
        """
        if value != -math.inf:
            assert self.variant == "softmax"
            return losses.masked_loss(
                hidden, self.weight, target, mask, value=value, linear_bias=self.bias
            )
        return losses.linear_loss(hidden, target=target, class_mask=mask, **self._arguments())


class FunctionLayer(nn.Module):
    """The output layer of an entry of `FUNCTIONS`, initialized like `attnzoo.nn.OutputLayer`."""

    has_zeros = False

    def __init__(self, width: int, call: VariantCall) -> None:
        super().__init__()
        self.function, self.params = FUNCTIONS[call.name], call.params
        self.linear = nn.Linear(width, CLASSES, bias=self.function.has_bias)

    def _call(self, function: Loss, hidden: Tensor, target: Tensor) -> Tensor:
        bias = {"linear_bias": self.linear.bias} if self.function.has_bias else {}
        return function(hidden, self.linear.weight, target, **bias, **self.params)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The mean loss."""
        return self._call(self.function.loss, hidden, target)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """The log-probabilities of all classes, (N, V)."""
        classes = torch.arange(CLASSES, device=hidden.device)
        surprises = [
            self._call(self.function.surprise, hidden, label.expand(len(hidden)))
            for label in classes
        ]
        return -torch.stack(surprises, dim=-1)


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
    fixed = [name for name in ("reduction", "ignore_index") if name in call.params]
    if fixed and call.name in FUNCTIONS:
        return f"{fixed[0]} cannot be set here: the loss is the mean over all images"
    hidden, target = torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)
    try:
        with torch.random.fork_rng(devices=()):  # a check must not change later random numbers
            layer(4, call).loss(hidden, target)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def identity(call: VariantCall) -> dict[str, object]:
    """The name and the parameters, also those with default values, for keys of results."""
    if call.name not in FUNCTIONS:
        return call.identity()
    parameters = inspect.signature(FUNCTIONS[call.name].loss).parameters.values()
    defaults = {p.name: repr(p.default) for p in parameters if p.default is not p.empty}
    arguments = {name: repr(value) for name, value in call.arguments}
    return {"name": call.name, "params": defaults | arguments, "given": sorted(arguments)}


def every_layer() -> tuple[str, ...]:
    """All variants that have a loss, and all functions with the parameters of their presets."""
    calls = [completed(VariantCall(name)) for name in attnzoo.list_variants()]
    layers = [str(call) for call in calls if unsupported(call) is None]
    for name, function in FUNCTIONS.items():
        layers += [str(VariantCall(name, tuple(sorted(p.items())))) for p in function.presets]
    return tuple(sorted(layers, key=lambda text: text != "softmax"))
