"""The variant of each layer of a `Transformer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from attnzoo.core.checks import shown
from attnzoo.core.registry import get_variant
from attnzoo.nn.checks import check_options_of


def per_layer(
    layer: nn.Module, variant: str | Sequence[str | tuple[str, dict[str, Any]]], depth: int,
    params: dict[str, Any], softcap: float | None,
) -> list[tuple[str, dict[str, Any]]]:  # fmt: skip
    """The variant and its parameters in each layer of a `Transformer`, from its arguments."""
    if isinstance(variant, str):
        return [(variant, {"softcap": softcap, **params})] * depth
    if not isinstance(variant, Sequence):
        raise TypeError(
            f"variant must be a name from list_variants() or a list of {depth} entries, got "
            f"{shown(variant)}"
        )
    if len(variant) != depth:
        raise ValueError(
            f"variant must be one name or a list of {depth} entries, one per layer, got "
            f"{len(variant)}"
        )
    pairs = [(entry, {}) if isinstance(entry, str) else entry for entry in variant]
    for pair in pairs:
        if (
            not isinstance(pair, (tuple, list))
            or len(pair) != 2
            or not isinstance(pair[0], str)
            or not isinstance(pair[1], dict)
        ):
            raise ValueError(
                f"variant must hold names or pairs (name, parameters), got {shown(pair)}"
            )
    if params:
        owned = {param.name for name, _ in pairs for param in get_variant(name).params}
        example = next((name for name, _ in pairs if get_variant(name).params), pairs[0][0])
        check_options_of(layer, example, [name for name in params if name not in owned])
        names = ", ".join(params)
        raise TypeError(
            f"{names} must be given in pairs (name, parameters) when variant is a list of layers"
        )
    return [(name, {"softcap": softcap, **values}) for name, values in pairs]
