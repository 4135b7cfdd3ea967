"""Rejects `torch.func` transforms and forward-mode derivatives, which operators do not support.

Without this check, an operator without a forward-mode rule would silently return zero tangents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def uses_transforms(*tensors: Tensor | None) -> bool:
    """Whether a torch.func transform is active or one of the tensors has a tangent."""
    # There is no public name for either question.
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:  # no tensor has a tangent
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def reject_transforms(backend: str, *tensors: Tensor | None) -> None:
    """Raise ValueError if a transform is active or one of the tensors has a tangent."""
    if uses_transforms(*tensors):
        raise ValueError(
            f"backend {backend!r} supports neither torch.func transforms (vmap, grad, jvp, ...) "
            "nor forward-mode derivatives: pass backend='eager', or call modules in "
            "`with attnzoo.use_backend('eager'):`"
        )
