"""The state of converted models, and comparisons with transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from attnzoo.integrations.transformers import convert
from helpers.hf_models import eager, generate

every_way_to_generate = pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}],
    ids=["dynamic", "beams", "no cache", "static"],
)


def assert_generates_as_eager(make: Any, variant: str, options: dict[str, Any]) -> None:
    """The prompts are longer than the window."""
    options = {**options, "disable_compile": True}
    expected = generate(eager(make()), **options)
    assert torch.equal(generate(convert(make(), variant), **options), expected)


def assert_equal_gradients(model: Any, expected: Any, tolerance: float) -> None:
    """Assert that two models have the same parameters with the same gradients."""
    wanted = dict(expected.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        have, want = found[name].grad, parameter.grad
        if want is None:
            assert have is None, name
            continue
        bound = tolerance * max(float(want.abs().max()), 1.0)
        assert float((have - want).abs().max()) <= bound, name


def configs(model: Any) -> list[Any]:
    """All configs of a model and of its parts."""
    known: list[Any] = []
    queue = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while queue:
        config = queue.pop()
        if not any(config is other for other in known):
            known.append(config)
            queue += [getattr(config, name) for name in config.sub_configs]
    return known


def state(model: Any) -> tuple[Any, ...]:
    modules = [
        (name, id(module), module.training, list(module._forward_pre_hooks.values()))
        for name, module in model.named_modules()
    ]
    tensors = [(name, id(x), tuple(x.shape)) for name, x in model.named_parameters()]
    return modules, tensors, [dict(vars(config)) for config in configs(model)]
