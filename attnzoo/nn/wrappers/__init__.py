"""Wrappers: modules that combine the outputs of several attentions, or change one output."""

from __future__ import annotations

from typing import Any

import torch

from attnzoo.core.checks import check_sizes, did_you_mean, shown
from attnzoo.core.registry import list_variants
from attnzoo.nn.attention import Attention, projecting_attention
from attnzoo.nn.parameters import Names
from attnzoo.nn.wrappers.base import Wrapper, check_layer
from attnzoo.nn.wrappers.differential import Differential, DifferentialV2
from attnzoo.nn.wrappers.laser import Laser
from attnzoo.nn.wrappers.mixture import MixtureAttention
from attnzoo.nn.wrappers.output_gate import OutputGate
from attnzoo.nn.wrappers.qassmax import QASSMax
from attnzoo.nn.wrappers.xsa import XSA

#: The wrappers by name.
WRAPPERS: dict[str, type[Wrapper]] = {
    "differential": Differential,
    "differential_v2": DifferentialV2,
    "laser": Laser,
    "mixture": MixtureAttention,
    "output_gate": OutputGate,
    "qassmax": QASSMax,
    "xsa": XSA,
}
# How a host is told which wrapper to use: a name, or a name and arguments.
Choice = str | tuple[str, dict[str, Any]] | None


def host_attention(
    wrapper: Choice,
    variant: str,
    num_heads: int,
    embed_dim: int,
    options: dict[str, Any],
    *,
    key_dim: int,
    qk_dim: int,
    v_dim: int,
    layer: int = 0,
    passed: Names = (),
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> Attention | Wrapper:
    """The attention of a layer that sees the hidden states.

    Args:
        wrapper: a name from `WRAPPERS`, a pair (name, arguments of the wrapper), or None.
        variant: a name from `attnzoo.list_variants`.
        num_heads: number of heads of the output.
        embed_dim: number of features of the hidden states of the queries.
        options: ``learn``, ``softcap`` and parameters of the variant, as for `Attention`.
        key_dim: number of features of the hidden states of the keys.
        qk_dim: number of features of each query and key head.
        v_dim: number of features of each value head.
        layer: number of the layer in its model, from 0.
        passed: names of parameters that each call passes: ``given`` of `Attention`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Returns:
        An `Attention`, or the wrapper. Both have ``queries``, the number of queries per head,
        ``projected`` and ``new_cache``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> from attnzoo.nn import host_attention
        >>> attend = host_attention("mixture", "ssmax", 4, 32, {}, key_dim=32, qk_dim=8, v_dim=8)
        >>> type(attend).__name__, attend.queries
        ('MixtureAttention', 2)
    """
    check_sizes(
        num_heads=num_heads, embed_dim=embed_dim, key_dim=key_dim, qk_dim=qk_dim, v_dim=v_dim
    )
    check_layer(layer)
    if not isinstance(options, dict):
        raise TypeError(f"options must be a dict, got {shown(options)}")
    check_no_wrapper(variant)
    if "given" in options:
        raise TypeError(
            "given is an argument of Attention only: the forward of this layer takes no parameters "
            "of the variant"
        )
    kind = {"device": device, "dtype": dtype}
    if wrapper is None:
        sizes = embed_dim, key_dim, qk_dim
        return projecting_attention(variant, num_heads, *sizes, options, passed, **kind)
    name, arguments = named_wrapper(wrapper)
    fixed = {"key_dim": key_dim, "qk_dim": qk_dim, "v_dim": v_dim, "layer": layer, **kind}
    if twice := [key for key in (*fixed, *arguments) if key in options]:
        raise TypeError(f"options must not have {', '.join(twice)}: arguments of the wrapper")
    options = {**options, "given": passed}
    return WRAPPERS[name](variant, num_heads, embed_dim, **fixed, **arguments, **options)


def check_no_wrapper(variant: Any) -> None:
    """Raise if ``variant`` is the name of a wrapper and of no variant."""
    if isinstance(variant, str) and variant in WRAPPERS and variant not in list_variants():
        raise ValueError(
            f"variant must be a name from list_variants(), got {variant!r}, the name of a wrapper; "
            f"pass wrapper={variant!r}"
        )


def named_wrapper(wrapper: Any) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a wrapper, checked."""
    pair = (wrapper, {}) if isinstance(wrapper, str) else wrapper
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not isinstance(pair[0], str)
        or not isinstance(pair[1], dict)
    ):
        raise TypeError(f"wrapper must be a name, a pair (name, arguments) or None, got "
                        f"{shown(wrapper)}")  # fmt: skip
    name, arguments = pair
    if name not in WRAPPERS:
        known = ", ".join(WRAPPERS)
        raise ValueError(
            f"wrapper must be one of {known}, got {name!r}{did_you_mean(name, list(WRAPPERS))}"
        )
    possible = WRAPPERS[name].own_arguments()
    for argument in arguments:
        if argument not in possible:
            known = ", ".join(possible) or "none"
            raise TypeError(f"wrapper {name!r} has no argument {argument!r}; it has: {known}")
    return name, arguments


__all__ = [
    "WRAPPERS",
    "XSA",
    "Choice",
    "Differential",
    "DifferentialV2",
    "Laser",
    "MixtureAttention",
    "OutputGate",
    "QASSMax",
    "Wrapper",
    "check_no_wrapper",
    "host_attention",
    "named_wrapper",
]
