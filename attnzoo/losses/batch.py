"""The operands that all losses share: an output layer, and tokens with their targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.transforms import uses_transforms
from attnzoo.core.call import score_dtype
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.losses.arguments import (
    check_class_mask,
    check_layer,
    check_plain,
    check_reduction,
    check_target,
)
from attnzoo.losses.classes import WHOLE, ClassShard


class Batch(NamedTuple):
    """Validated operands, with one row per token."""

    input: Tensor  # [N, d]; without weight, the logits [N, V]
    weight: Tensor | None  # [V, d]
    bias: Tensor | None  # [V]
    class_mask: Tensor | None  # bool [1|N, V]
    target: Tensor  # [N]
    ignore_index: int
    reduction: str
    lead: torch.Size  # the shape of the tokens
    shard: ClassShard = WHOLE  # the classes of weight and bias

    @property
    def classes(self) -> int:
        """The number of all classes."""
        here = self.input.shape[1] if self.weight is None else self.weight.shape[0]
        return self.shard.total(here)

    @property
    def counted(self) -> Tensor:
        """False for ignored tokens, (N,)."""
        return self.target != self.ignore_index

    @property
    def classes_of_tokens(self) -> Tensor:
        """Targets (N,), with class 0 for ignored tokens."""
        return self.target.where(self.counted, 0)

    def factor(self, class_weight: Tensor | None = None) -> Tensor:
        """The factor of each token in the reduced loss, (N,); 0 for ignored tokens."""
        counted, dtype = self.counted, score_dtype(self.input)
        share = counted.to(dtype)
        if self.reduction != "mean":
            return share
        if class_weight is not None:
            share = share * class_weight[self.classes_of_tokens]
        return counted / share.sum()

    def shaped(self, loss: Tensor) -> Tensor:
        """A loss that is reduced already, or with reduction "none" the losses (N,), as returned."""
        if self.reduction == "none":
            return loss.reshape(self.lead)
        if self.reduction == "mean" and self.target.shape[0] == 0:
            return loss + float("nan")  # 0/0, as in torch
        return loss

    def reduced(self, losses: Tensor) -> Tensor:
        """The losses (N,) of all tokens, as returned. Those of ignored tokens may be anything."""
        losses = losses.where(self.counted, 0.0)
        if self.reduction == "none":
            return self.shaped(losses)
        return self.shaped(torch.dot(losses, self.factor()))


def bind_batch(
    input: Any, weight: Any, bias: Any, target: Any, ignore_index: Any, reduction: Any,
    class_mask: Any = None, params: tuple[Any, ...] = (), logits: bool = False,
    shard: ClassShard = WHOLE,
) -> Batch:  # fmt: skip
    """Validate the operands of a loss. ``logits``: ``input`` holds logits, and ``weight`` is None.

    ``params`` are other arguments of the loss. They may not be used in torch.func transforms.
    ``shard``: the classes of ``weight`` and ``bias``. The class mask is that of all classes.
    """
    if weight is None and not logits:
        raise TypeError("linear_weight must be a tensor (V, d), got None")
    check_reduction(reduction, ignore_index)
    check_plain(
        input=input, linear_weight=weight, linear_bias=bias, target=target, class_mask=class_mask
    )
    if weight is not None:
        input, weight = cast_by_autocast(input, weight)
        if bias is not None:
            (bias,) = cast_by_autocast(bias)
    classes = shard.total(check_layer(input, weight, bias))
    lead, mask = input.shape[:-1], None
    if class_mask is not None:
        mask = check_class_mask(class_mask, lead, classes, input.device)
    target = check_target(target, lead, classes, mask, ignore_index, input.device)
    tensors = [x for x in (input, weight, bias, *params) if isinstance(x, Tensor)]
    if uses_transforms(*tensors):
        raise ValueError(
            "attnzoo.losses supports neither torch.func transforms (vmap, grad, jvp, ...) nor "
            "forward-mode derivatives"
        )
    rows = input.reshape(-1, input.shape[-1])
    return Batch(rows, weight, bias, mask, target, ignore_index, reduction, lead, shard)
