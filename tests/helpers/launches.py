"""Counts what a call launches on a GPU and how often the host waits for it, without a GPU.

The tensors are on the device "meta": nothing is computed, and the library treats the device as a
GPU, since it is not a CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that only allocate memory.
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}


class Launches(TorchDispatchMode):
    """Counts operations by name: each that is not a view is a launch.

    The host waits for a number, for the indices of nonzero entries, and for copies to the CPU. A
    number is answered with 0 and `nonzero` with the indices of all entries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    @property
    def launched(self) -> int:
        return self.launches.total()

    @property
    def waited(self) -> int:
        return self.waits.total()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name in ("item", "_local_scalar_dense"):
            self.waits[name] += 1
            return 0 if args[0].dtype != torch.bool else False
        if name == "nonzero":
            self.waits[name] += 1
            self.launches[name] += 1
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        results = function(*args, **(kwargs or {}))
        outputs = [x.device for x in tree_leaves(results) if isinstance(x, Tensor)]
        inputs = [x.device for x in tree_leaves(args) if isinstance(x, Tensor)]
        if torch.device("cpu") in outputs and torch.device("meta") in inputs:
            self.waits[name] += 1
        elif torch.device("meta") in outputs and not function.is_view and name not in EMPTY:
            self.launches[name] += 1
        return results
