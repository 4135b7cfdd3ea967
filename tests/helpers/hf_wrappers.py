"""Converted transformers models with wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnzoo.integrations.transformers import convert
from attnzoo.nn import WRAPPERS, Wrapper
from helpers.cases import rand
from helpers.hf_models import llama
from helpers.wrappers import MADE

# The other wrappers are tested more often by `make test-slow`.
QUICK = ("differential", "mixture", "gate per head")
EACH = [pytest.param(w, marks=[] if w in QUICK else [pytest.mark.slow]) for w in MADE]
ONE_QUERY = [which for which, (name, _) in MADE.items() if WRAPPERS[name].queries == 1]


def wrapped(which: str, make: Any = llama, variant: str = "ssmax", **options: Any) -> Any:
    """A converted model with other parameters than initially."""
    torch.manual_seed(1)
    model = convert(make(), variant, wrapper=MADE[which], **options)
    with torch.no_grad():
        for child in children(model):
            for index, x in enumerate(child.parameters()):
                x.add_(0.3 * rand(*x.shape, seed=index).to(x))
    return model


def children(model: Any) -> list[Wrapper]:
    return [module.attnzoo for module in model.modules() if "attnzoo" in module._modules]
