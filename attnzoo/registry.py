"""The names of the zoo: every variant, shipped or a third party's, is found here."""

from __future__ import annotations

import torch

from attnzoo.forms import Variant

# The facts of a call, as `checks.check_call` takes them.
ARGUMENTS = frozenset(
    "attn_mask is_causal scale enable_gqa window alibi segment_ids dropout_p return_lse".split()
)
# What a parameter of a variant may not be called: arguments, and attributes of its module.
RESERVED = ARGUMENTS | frozenset(
    "self q k v call variant state cache backend num_heads learn learned training".split()
)

_VARIANTS: dict[str, Variant] = {}


def register_variant(variant: Variant) -> Variant:
    """Make a variant known under its name; the whole library then takes it.

    Args:
        variant: a `Variant`. Its parameters must not be named like an argument of `attention`.
    Returns:
        the variant itself.
    Raises:
        TypeError: not a `Variant`. ValueError: the name is taken, or a parameter's name reserved.

    Example:
        >>> import attnzoo
        >>> def weights(q, k, call):  # ReLU attention, Wortsman et al. 2023, arXiv:2309.08586
        ...     s = (call.scores(q, k) + call.bias).relu() / call.counts.clamp(min=1)[..., None]
        ...     return s.masked_fill(~call.visible, 0.0)
        >>> relu = attnzoo.Variant("relu_n", "ReLU(z)/n", "arXiv:2309.08586", weights,
        ...                        normalized=False)
        >>> attnzoo.register_variant(relu).name
        'relu_n'
    """
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be an attnzoo.Variant, got {type(variant).__name__}")
    if variant.name in _VARIANTS:
        raise ValueError(f"variant name {variant.name!r} is taken")
    if not variant.name.isidentifier():
        raise ValueError(f"variant name must be an identifier, got {variant.name!r}")
    names = [param.name for param in variant.params]
    if len(set(names)) < len(names):
        raise ValueError(f"variant {variant.name!r} names a parameter twice: {', '.join(names)}")
    for param in variant.params:
        if param.name in RESERVED or hasattr(torch.nn.Module, param.name):
            raise ValueError(
                f"variant {variant.name!r}: parameter {param.name!r} is named like an argument of "
                f"attention ({', '.join(sorted(RESERVED))}) or an attribute of torch.nn.Module"
            )
    _VARIANTS[variant.name] = variant
    return variant


def get_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        ValueError: no such variant; the message lists those there are.

    Example:
        >>> import attnzoo
        >>> attnzoo.get_variant("ssmax").paper
        'Nakanishi 2025, arXiv:2501.19399'
    """
    if not isinstance(name, str):
        raise TypeError(f"variant must be a name, got {type(name).__name__}")
    if name not in _VARIANTS:
        raise ValueError(f"unknown variant {name!r}; known: {', '.join(list_variants())}")
    return _VARIANTS[name]


def list_variants() -> list[str]:
    """The names of all registered variants, sorted.

    Example:
        >>> import attnzoo
        >>> "softmax" in attnzoo.list_variants()
        True
    """
    return sorted(_VARIANTS)
