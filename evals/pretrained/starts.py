"""Where the training of a variant starts, and the untrained variants that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.pretrained.substitution import Substitution, parse_substitution
from evals.pretrained.training import Adapted, Recipe


def parse_training(text: str, layers: tuple[int, ...] | None, recipe: Recipe) -> Adapted:
    """Read a variant to train. "learn" names the parameters; by default all with an initial value.

    Without start, calibrate or an initial value of a learned parameter, the training starts at the
    identity if the variant has one.
    """
    spec = parse_spec(text)
    arguments = dict(spec.test.arguments)
    names = arguments.pop("learn", None)
    if names is not None and not isinstance(names, str):
        raise UsageError(f"{spec.test.name}: learn must be names such as 'x y', got {names!r}")
    if not spec.is_substitution:
        text = str(replace(spec.test, arguments=tuple(arguments.items())))
    call = parse_substitution(text, layers).call
    variant = attnzoo.get_variant(call.name)
    learn = tuple(param.name for param in variant.params if param.init is not None)
    if names is not None:
        learn = tuple(names.replace(",", " ").split())
    if not learn and not recipe.lora:
        raise UsageError(
            f"--variants {text}: {call.name} learns no parameter by itself; name some with "
            f"{call.name}(learn='…'), or train LoRA with --lora"
        )
    if learn and not {"start", "calibrate", *learn} & arguments.keys() and _has_identity(variant):
        arguments["start"] = "identity"
        call = VariantCall(call.name, tuple(sorted(arguments.items())))
    return Adapted(call, layers, recipe=recipe, learn=learn)


def _has_identity(variant: attnzoo.Variant) -> bool:
    projected = {param.name for param in variant.params if param.projection}
    return variant.identity is not None and not projected & set(variant.identity)


def references(spec: Adapted) -> Iterator[Substitution]:
    """The variant without training: where it equals softmax, calibrated, and at the start."""
    variant = attnzoo.get_variant(spec.call.name)
    dropped = {"start", "calibrate", *spec.learn, *(variant.identity or ())}
    arguments = {name: x for name, x in spec.call.arguments if name not in dropped}
    references = [dict(spec.call.arguments)]
    if variant.calibrate is not None:
        references.insert(0, {**arguments, "calibrate": spec.recipe.length})
    if _has_identity(variant) and variant.identity:
        references.insert(0, {**arguments, "start": "identity"})
    for reference in references:
        yield Substitution(VariantCall(variant.name, tuple(sorted(reference.items()))), spec.layers)
