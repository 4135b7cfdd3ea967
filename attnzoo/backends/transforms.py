"""Rejects `torch.func` transforms and forward-mode derivatives, which operators do not support.

Without this check, an operator without a forward-mode rule would silently return zero tangents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def uses_transforms(*tensors: Tensor | None) -> bool:
    """Whether a torch.func transform is active or one of the tensors has a tangent."""
    dual = any(x is not None and unpack_dual(x).tangent is not None for x in tensors)
    return dual or torch._C._are_functorch_transforms_active()


def reject_transforms(backend: str, *tensors: Tensor | None) -> None:
    """Raise ValueError if a transform is active or one of the tensors has a tangent."""
    if uses_transforms(*tensors):
        raise ValueError(
            f"backend {backend!r} supports neither torch.func transforms (vmap, grad, jvp, ...) "
            "nor forward-mode derivatives: pass backend='eager'"
        )
