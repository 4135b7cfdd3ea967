"""Sums the gradients of parameters over the ranks that share a sequence.

One callback at the end of a backward sums all gradients in a fixed order, so that a parameter that
one rank did not use, such as that of a cluster without targets, does not shift the others.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from attnzoo.core.collectives import Ranks, all_reduce

# The reducer of each parameter, and its hooks. A second reducer takes the place of the first. Only
# the module keeps its reducer alive, by its forward hooks.
_Owner = tuple["weakref.ref[Reducer]", list[RemovableHandle]]
_owners: MutableMapping[Tensor, _Owner] = WeakTensorKeyDictionary()


class Reducer:
    """Sums the gradients of a module's parameters, except those that FSDP2 shards.

    `torch.autograd.grad` leaves ``.grad`` alone, and so does the reducer: it works on gradients
    that a backward has added to ``.grad``.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.module, self.ranks = module, ranks
        # By id: the gradient of the present backward, and whether it is the first one.
        self.computed: dict[int, tuple[Tensor, bool]] = {}
        self.fresh: dict[int, tuple[Tensor, bool]] = {}  # those that ``.grad`` contains
        self.queued = False
        for parameter in self._parameters():
            self._take(parameter)
        # Parameters may be replaced, or need a gradient only later.
        for part in module.modules():
            part.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, part: nn.Module, inputs: Any) -> None:
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad and parameter not in _owners:
                self._take(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        for handle in _owners[parameter][1] if parameter in _owners else ():
            handle.remove()
        owner: weakref.ref[Reducer] = weakref.ref(self)

        def note(gradient: Tensor) -> None:
            if (reducer := owner()) is not None:
                reducer.computed[id(parameter)] = gradient, parameter.grad is None

        def confirm(parameter: Tensor) -> None:
            if (reducer := owner()) is not None:
                reducer._confirm(id(parameter))

        hooks = [
            parameter.register_hook(note),
            parameter.register_post_accumulate_grad_hook(confirm),
        ]
        _owners[parameter] = owner, hooks

    def _confirm(self, key: int) -> None:
        self.fresh[key] = self.computed.pop(key)
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that need a gradient, in the same order on all ranks."""
        fsdp = {
            id(parameter)
            for part in self.module.modules()
            if isinstance(part, FSDPModule)
            for parameter in part.parameters()
        }
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in fsdp]

    @torch.no_grad()
    def _reduce(self) -> None:
        fresh, self.fresh, self.queued = self.fresh, {}, False
        self.computed.clear()
        for parameter in self._parameters():
            if parameter not in _owners or _owners[parameter][0]() is not self:
                continue
            local_sum, first = fresh.get(id(parameter), (None, parameter.grad is None))
            contribution = _local(torch.zeros_like(parameter) if local_sum is None else local_sum)
            total = all_reduce(contribution.clone(), "sum", self.ranks)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                _local(parameter.grad).copy_(total)
            elif first and local_sum is not None:
                _local(parameter.grad).copy_(total)
            else:  # the gradient of an earlier backward stays
                _local(parameter.grad).add_(total - contribution)


def _local(x: Tensor) -> Tensor:
    """The tensor of this rank, if x is sharded over another dimension, such as heads."""
    return x.to_local() if isinstance(x, DTensor) else x
