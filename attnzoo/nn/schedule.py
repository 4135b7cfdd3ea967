"""Schedules of a variant's settings during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from attnzoo.core.checks import is_int, shown
from attnzoo.core.parameters import check_value
from attnzoo.nn.parameters import VariantParameters


class ParameterSchedule:
    """Sets a setting of all attention layers of a model to ``value(step)``.

    It is used like torch's learning rate schedulers: the constructor sets ``value(0)``, and each
    call of `step` sets the next value.

    Args:
        model: A module that contains `Attention` layers, such as `Transformer` or a converted
            Hugging Face model.
        name: The name of a parameter of their variant that is a number and not learned.
        value: A function that returns the setting for a step, counted from 0.

    Raises:
        ValueError: no layer has this setting, or a value is not allowed.
        TypeError: ``value`` is not a function.

    Example:
        >>> import attnzoo
        >>> layer = attnzoo.nn.Attention("noisy", num_heads=2, std=1.0)
        >>> schedule = attnzoo.nn.ParameterSchedule(layer, "std", lambda step: 0.99**step)
        >>> schedule.step()  # after each step of the optimizer
        >>> layer.std
        0.99
    """

    def __init__(self, model: nn.Module, name: str, value: Callable[[int], float]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
        if not callable(value):
            raise TypeError(f"value must be a function of the step, got {shown(value)}")
        self.name, self.value, self.last_step = name, value, 0
        self.layers = [
            (layer, spec)
            for layer in model.modules()
            if isinstance(layer, VariantParameters)
            for spec in layer.settings()
            if spec.name == name
        ]
        if not self.layers:
            raise ValueError(f"name must be a setting of a layer of the model, got {shown(name)}")
        self._set()

    def step(self) -> None:
        """Sets the value of the next step."""
        self.last_step += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """The step, for a checkpoint. Settings are not part of a model's state dict."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`, and sets the value of its step."""
        step = state["last_step"]
        if not is_int(step) or step < 0:
            raise ValueError(f"last_step must be an int of at least 0, got {shown(step)}")
        self.last_step = step
        self._set()

    def _set(self) -> None:
        found = self.value(self.last_step)
        what = f"value({self.last_step}) of {self.name}"
        checked = [(layer, check_value(what, spec, found)) for layer, spec in self.layers]
        for layer, number in checked:
            setattr(layer, self.name, number)
