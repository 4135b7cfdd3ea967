"""Schedules of a variant's settings during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from attnzoo.core.checks import check_callable, check_type, did_you_mean, is_int, shown
from attnzoo.core.parameters import check_value
from attnzoo.nn.checks import check_module
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
        ValueError: no layer has this setting, or a value is not allowed. No layer changes.
        TypeError: ``model`` is not a module, ``name`` not a str, ``value`` not a function, or it
            returns no number.

    Notes:
        ``save_pretrained`` of a converted Hugging Face model stores the values given to `convert`,
        not those of the schedule. After loading, set them again with ``load_state_dict``.

    Example:
        >>> import attnzoo
        >>> layer = attnzoo.nn.Attention("noisy", num_heads=2, std=1.0)
        >>> schedule = attnzoo.nn.ParameterSchedule(layer, "std", lambda step: 0.99**step)
        >>> schedule.step()  # after each step of the optimizer
        >>> layer.std
        0.99
    """

    def __init__(self, model: nn.Module, name: str, value: Callable[[int], float]) -> None:
        check_module("model", model)
        check_type("name", name, str)
        check_callable("value", value)
        self.name, self.value = name, value
        owners = [x for x in model.modules() if isinstance(x, VariantParameters)]
        self.layers = [x for x in owners if name in [spec.name for spec in x.settings()]]
        if not self.layers:
            known = sorted({spec.name for x in owners for spec in x.settings()})
            raise ValueError(
                f"name must be a setting of a layer, one of: {', '.join(known) or 'none'}; got "
                f"{shown(name)}{did_you_mean(name, known)}"
            )
        self._set(0)

    def step(self) -> None:
        """Sets the value of the next step."""
        self._set(self.last_step + 1)

    def state_dict(self) -> dict[str, Any]:
        """The step, for a checkpoint. Settings are not part of a model's state dict."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`, and sets the value of its step."""
        step = state.get("last_step") if isinstance(state, dict) else None
        if step is None or not is_int(step) or step < 0:
            raise ValueError(
                f"state must be {{'last_step': an int of at least 0}}, got {shown(state)}"
            )
        self._set(step)

    def _set(self, step: int) -> None:
        value = self.value(step)
        what = f"value({step}) of {self.name}"
        specs = [{spec.name: spec for spec in layer.settings()} for layer in self.layers]
        checked = [check_value(what, by_name[self.name], value) for by_name in specs]
        for layer, number in zip(self.layers, checked, strict=True):
            setattr(layer, self.name, number)
        self.last_step = step
