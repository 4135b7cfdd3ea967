"""reset_parameters of every module, after `to_empty` has left its tensors without values."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import attnzoo.nn
from attnzoo.nn.parameters import VariantParameters
from helpers.empty_modules import MODULES, emptied, tensors, wrong, wrong_on_ranks
from helpers.ranks import on_ranks

every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


@every_module
def test_reset_parameters_sets_every_tensor(make) -> None:
    module = emptied(make, lambda module: None)
    assert wrong(module, make()) == []


@every_module
def test_submodules_can_be_made_on_a_device_one_by_one(make) -> None:
    """As FSDP1 does: each module that has tensors needs a `reset_parameters` for them."""
    with torch.device("meta"):
        module = make()
    for part in module.modules():
        names = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        if names and not isinstance(part, nn.MultiheadAttention):
            part.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for _, x in names:
                    getattr(x, "data", x).copy_(torch.full_like(x, float("nan"), device="cpu"))
            part.reset_parameters()
    assert not any(x.is_meta for x in tensors(module).values())
    assert wrong(module, make()) == []


def test_the_list_has_all_modules() -> None:
    made = {type(part) for make in MODULES.values() for part in make().modules()}
    public = {
        kind for kind in vars(attnzoo.nn).values()
        if inspect.isclass(kind) and issubclass(kind, nn.Module)
    }  # fmt: skip
    assert public - made <= {attnzoo.nn.Wrapper, VariantParameters}


@pytest.mark.slow
def test_reset_parameters_sets_the_shards_of_two_ranks() -> None:
    """Also where the ranks hold different numbers of heads, or heads are sharded before."""
    assert on_ranks(2, wrong_on_ranks) == [{}, {}]
