"""Whether Python code may look at the values of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def is_readable(x: Tensor) -> bool:
    """Whether a look at the values is free: it would stall a GPU and break a graph or transform."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(x, torch._subclasses.FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
