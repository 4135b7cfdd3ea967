"""Where the training of a variant starts, and the untrained variants that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.pretrained.substitution import Substitution, parse_substitution


def parse_start(
    text: str, layers: tuple[int, ...] | None, rank: int
) -> tuple[Substitution, tuple[str, ...]]:
    """The start of a training, and the names of the parameters to train.

    Without start, calibrate or an initial value of a learned parameter, it is the identity start
    if the variant has one.
    """
    call = parse_spec(text).test
    names = call.params.get("learn")
    if names is not None and not isinstance(names, str):
        raise UsageError(f"{call.name}: learn must be names such as 'x y', got {names!r}")
    kept = VariantCall(call.name, tuple(one for one in call.arguments if one[0] != "learn"))
    if not parse_spec(text).is_substitution:
        text = str(kept)
    found = parse_substitution(text, layers)
    variant = attnzoo.get_variant(call.name)
    learn = tuple(p.name for p in variant.params if p.init is not None)
    if names is not None:
        learn = tuple(names.replace(",", " ").split())
    if not learn and not rank:
        raise UsageError(
            f"--variants {text}: {call.name} learns no parameter by itself; name some with "
            f"{call.name}(learn='…'), or train LoRA with --lora"
        )
    chosen = {"start", "calibrate", *learn} & kept.params.keys()
    if learn and not chosen and has_identity(variant):
        arguments = tuple(sorted({**kept.params, "start": "identity"}.items()))
        found = Substitution(VariantCall(call.name, arguments), layers)
    return found, learn


def has_identity(variant: attnzoo.Variant) -> bool:
    projected = {param.name for param in variant.params if param.projection}
    return variant.identity is not None and not projected & set(variant.identity)


def references(start: Substitution, learn: Sequence[str], length: int) -> list[Substitution]:
    """The variant without training: where it equals softmax, calibrated, and at the start."""
    variant = attnzoo.get_variant(start.call.name)
    dropped = {"start", "calibrate", *learn, *(variant.identity or ())}
    kept = [one for one in start.call.arguments if one[0] not in dropped]
    found = []
    if has_identity(variant) and variant.identity:
        found.append([*kept, ("start", "identity")])
    if variant.calibrate is not None:
        found.append([*kept, ("calibrate", length)])
    calls = [VariantCall(variant.name, tuple(sorted(one))) for one in found]
    return [Substitution(call, start.layers) for call in dict.fromkeys([*calls, start.call])]
