"""Factors that hosts already multiply their queries with, by position, before they call attention.

A factor on the queries is a gain on the scores, as in several variants. Each host has its own names
for it, so they are listed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from attnzoo.core.variant import Variant
from attnzoo.nn import WRAPPERS


class HostGain(NamedTuple):
    """A factor of the queries.

    Attributes:
        formula: the factor, in the host's own names.
        present: ``present(module, config)`` -> whether an attention module uses it.
        without: how to make the host without it; "" if it cannot be turned off.
    """

    formula: str
    present: Callable[[Any, Any], Any]
    without: str


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters


HOST_GAINS = (
    HostGain(  # Scalable-Softmax with learned scale and bias: Mistral Large 4
        "scale·log(position + 1) + bias",
        lambda module, config: isinstance(getattr(module, "softmax_scaling", None), nn.Module),
        "",
    ),
    HostGain(  # Llama 4, in layers without rotary encoding
        "1 + attn_scale·log(1 + ⌊(position + 1) / floor_scale⌋)",
        lambda module, config: (
            getattr(module, "attn_temperature_tuning", False)
            and not getattr(module, "use_rope", False)
        ),
        "attn_temperature_tuning=False in its config",
    ),
    HostGain(  # Ministral 3, Mistral 4
        "1 + llama_4_scaling_beta·log(1 + ⌊position / original_max_position_embeddings⌋)",
        lambda module, config: _rope(config).get("llama_4_scaling_beta"),
        "llama_4_scaling_beta=0 in rope_parameters of its config",
    ),
    HostGain(  # Inkling, in layers without a window
        "1 + log_scaling_alpha·log(max(1, (position + 1) / log_scaling_n_floor))",
        lambda module, config: (
            getattr(config, "log_scaling_n_floor", None) is not None
            and config.log_scaling_alpha
            and not getattr(module, "is_sliding", False)
        ),
        "log_scaling_alpha=0 in its config",
    ),
    HostGain(  # Beam, in layers without a window
        "(1 + (position + 1) / 2048)^0.1",
        lambda module, config: (
            _takes(module, "attention_scaling") and getattr(module, "sliding_window", None) is None
        ),
        "",
    ),
)


def check_gain(variant: Variant, wrapper: str | None, module: nn.Module) -> None:
    """Raises if the variant or wrapper has a gain by length and the host has one already."""
    config = getattr(module, "config", None)
    gain = next((gain for gain in HOST_GAINS if gain.present(module, config)), None)
    has_gain = {
        "variant": variant.name if variant.length_gain else None,
        "wrapper": wrapper if wrapper and WRAPPERS[wrapper].length_gain else None,
    }
    for argument, name in has_gain.items():
        if gain is None or name is None:
            continue
        off = f", or make the model with {gain.without}" if gain.without else ""
        raise ValueError(
            f"{argument} must have no gain that grows with the length, because "
            f"{type(module).__name__} already multiplies its queries by {gain.formula}, got "
            f"{name!r}; softmax and variants without such a gain keep this factor: use one, choose "
            f"other layers{off}"
        )
