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
    arguments = tuple((key, x) for key, x in call.arguments if key != "learn")
    call_without_learn = VariantCall(call.name, arguments)
    if not parse_spec(text).is_substitution:
        text = str(call_without_learn)
    start = parse_substitution(text, layers)
    variant = attnzoo.get_variant(call.name)
    learn = tuple(p.name for p in variant.params if p.init is not None)
    if names is not None:
        learn = tuple(names.replace(",", " ").split())
    if not learn and not rank:
        raise UsageError(
            f"--variants {text}: {call.name} learns no parameter by itself; name some with "
            f"{call.name}(learn='…'), or train LoRA with --lora"
        )
    chosen_start = {"start", "calibrate", *learn} & call_without_learn.params.keys()
    if learn and not chosen_start and has_identity(variant):
        arguments = tuple(sorted({**call_without_learn.params, "start": "identity"}.items()))
        start = Substitution(VariantCall(call.name, arguments), layers)
    return start, learn


def has_identity(variant: attnzoo.Variant) -> bool:
    projected = {param.name for param in variant.params if param.projection}
    return variant.identity is not None and not projected & set(variant.identity)


def references(start: Substitution, learn: Sequence[str], length: int) -> list[Substitution]:
    """The variant without training: where it equals softmax, calibrated, and at the start."""
    variant = attnzoo.get_variant(start.call.name)
    dropped = {"start", "calibrate", *learn, *(variant.identity or ())}
    other = [(key, x) for key, x in start.call.arguments if key not in dropped]
    argument_lists = []
    if has_identity(variant) and variant.identity:
        argument_lists.append([*other, ("start", "identity")])
    if variant.calibrate is not None:
        argument_lists.append([*other, ("calibrate", length)])
    calls = [VariantCall(variant.name, tuple(sorted(arguments))) for arguments in argument_lists]
    return [Substitution(call, start.layers) for call in dict.fromkeys([*calls, start.call])]
