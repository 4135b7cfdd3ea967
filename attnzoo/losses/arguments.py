"""Validates the arguments of losses: an output layer, and tokens with their targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.transforms import uses_transforms
from attnzoo.core.call import score_dtype
from attnzoo.core.checks import (
    DTYPES,
    check_bool,
    check_dense,
    is_dtensor,
    is_int,
    is_number,
    is_readable,
    plain,
    shown,
)
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.losses.rules import ALL_CLASSES, ClassShard

REDUCTIONS = ("none", "mean", "sum")


class LossCall(NamedTuple):
    """The arguments of `linear_loss`, or of `loss` with ``linear_weight`` None."""

    input: Any  # the logits of `loss`
    linear_weight: Any
    linear_bias: Any
    target: Any
    variant: str
    class_mask: Any
    softcap: float | None
    weight: Any
    label_smoothing: float
    lse_penalty: float
    ignore_index: int
    reduction: str
    return_stats: bool
    params: dict[str, Any]
    is_logits: bool = False
    shard: ClassShard = ALL_CLASSES


def check_plain(**tensors: Any) -> None:
    """Raise if an argument is a DTensor."""
    for name, x in tensors.items():
        if is_dtensor(x):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor; only linear_loss takes DTensors"
            )


def check_layer(input: Any, weight: Any, bias: Any) -> int:
    """Validate input, matrix and bias, or logits; return the number of classes.

    Only shapes, dtypes and devices are read, so that DTensors can be checked too.
    """
    name = "logits" if weight is None else "input"
    check_dense(name, input)
    if input.dtype not in DTYPES:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {input.dtype}")
    if input.dim() == 0 or input.shape[-1] == 0:
        size = "V" if weight is None else "d"
        raise ValueError(
            f"{name} must have shape (*, {size}) with {size} >= 1, got {tuple(input.shape)}"
        )
    classes = input.shape[-1]
    if weight is not None:
        check_dense("linear_weight", weight)
        if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
            raise ValueError(
                f"linear_weight must have shape (V, d) with d = {input.shape[-1]} as in input, "
                f"got {tuple(weight.shape)}"
            )
        _check_like("linear_weight", weight, input)
        classes = weight.shape[0]
        if classes == 0:
            raise ValueError("linear_weight must have at least one class, got none")
    if bias is not None:
        check_dense("linear_bias", bias)
        if bias.shape != (classes,):
            raise ValueError(
                f"linear_bias must have shape ({classes},), one number per class, got "
                f"{tuple(bias.shape)}"
            )
        _check_like("linear_bias", bias, input)
    return classes


def _check_like(name: str, x: Tensor, input: Tensor) -> None:
    if x.dtype != input.dtype:
        raise TypeError(f"{name} must have the dtype of input, {input.dtype}, got {x.dtype}")
    if x.device != input.device:
        raise ValueError(f"{name} must be on the device of input, {input.device}, got {x.device}")


def check_class_mask(mask: Any, lead: torch.Size, classes: int, device: torch.device) -> Tensor:
    """Validate a class mask; return it as (1, V) or (N, V)."""
    check_dense("class_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"class_mask must be bool (True = takes part), got {mask.dtype}")
    if mask.shape not in ((classes,), (*lead, classes)):
        allowed = " or ".join(map(str, dict.fromkeys(((classes,), (*lead, classes)))))
        raise ValueError(f"class_mask must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(
            f"class_mask must be on the device of the tokens, {device}, got {mask.device}"
        )
    return mask.reshape(-1, classes)


def check_target(
    target: Any, lead: torch.Size, classes: int, mask: Tensor | None, ignore_index: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Validate targets; return them as (N,)."""
    check_dense("target", target)
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64 class indices, got {target.dtype}")
    if target.shape != lead:
        raise ValueError(f"target must have shape {tuple(lead)}, got {tuple(target.shape)}")
    if target.device != device:
        raise ValueError(
            f"target must be on the device of the tokens, {device}, got {target.device}"
        )
    flat = target.reshape(-1)
    if not is_readable(flat):
        return flat
    counted = flat != ignore_index
    wrong = counted & ((flat < 0) | (flat >= classes))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"target must be from 0 to {classes - 1}, or ignore_index = {ignore_index}, got "
            f"{int(flat[at])} at {_place(at, lead)}"
        )
    if mask is not None and is_readable(mask):
        row = torch.zeros_like(flat) if len(mask) == 1 else torch.arange(len(flat))
        masked = counted & ~mask[row, flat.clamp(0, classes - 1)]
        if bool(masked.any()):
            at = int(masked.nonzero()[0])
            raise ValueError(
                f"target must be a class that takes part, but class_mask is False for class "
                f"{int(flat[at])} at {_place(at, lead)}"
            )
    return flat


def _place(index: int, shape: torch.Size) -> list[int]:
    return [int(x) for x in torch.unravel_index(torch.tensor(index), shape)]


def check_class_weight(weight: Any, classes: int, like: Tensor) -> Tensor:
    check_dense("weight", weight)
    if weight.shape != (classes,):
        raise ValueError(f"weight must have shape ({classes},), got {tuple(weight.shape)}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"weight must be fp16, bf16, fp32 or fp64, got {weight.dtype}")
    if weight.device != like.device:
        raise ValueError(
            f"weight must be on the device of the tokens, {like.device}, got {weight.device}"
        )
    if weight.requires_grad:
        raise ValueError("weight must not require a gradient; pass weight.detach()")
    if is_readable(weight):
        right = weight.isfinite() & (weight >= 0)
        if not bool(right.all()):
            wrong = float(weight[~right][0])
            raise ValueError(f"weight must be finite and >= 0 throughout, got {wrong:.6g}")
    return weight.to(score_dtype(like))


def check_options(
    reduction: Any, label_smoothing: Any, lse_penalty: Any, softcap: Any, ignore_index: Any,
    return_stats: Any,
) -> None:  # fmt: skip
    check_reduction(reduction, ignore_index)
    check_number("label_smoothing", label_smoothing, most=1.0)
    check_number("lse_penalty", lse_penalty)
    check_softcap(softcap)
    check_bool("return_stats", return_stats)


def check_reduction(reduction: Any, ignore_index: Any) -> None:
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction must be one of {', '.join(REDUCTIONS)}, got {shown(reduction)}"
        )
    if not is_int(index := plain(ignore_index)):
        raise TypeError(f"ignore_index must be an int, got {shown(ignore_index)}")
    if not -(2**63) <= index < 2**63:
        raise ValueError(f"ignore_index must be an int of 64 bits, got {index}")


def check_number(
    name: str, x: Any, least: float | None = 0.0, most: float | None = None, above: bool = False,
    other: str = "",
) -> float:  # fmt: skip
    """Validate a finite number from ``least`` to ``most``; ``above`` excludes ``least``.

    ``other`` is added to the text of the error, for a value that the caller accepts too.
    """
    x, largest = plain(x), torch.finfo(torch.float32).max
    if not is_number(x):
        raise TypeError(f"{name} must be {_allowed(least, most, above)}{other}, got {shown(x)}")
    low = -largest if least is None else least
    if not low <= x <= (largest if most is None else most) or (above and x == least):
        raise ValueError(f"{name} must be {_allowed(least, most, above)}{other}, got {shown(x)}")
    return float(x)


# A function, because torch.compile cannot trace formatted numbers, and errors are rarely raised.
def _allowed(least: float | None, most: float | None, above: bool) -> str:
    if most is not None:
        return f"a number from {least:g} to {most:g}"
    return "a finite number" + ("" if least is None else f" {'>' if above else '>='} {least:g}")


def check_softcap(softcap: Any) -> float | None:
    if plain(softcap) is None:
        return None
    return check_number("softcap", softcap, above=True, other=" or None")


class TokenBatch(NamedTuple):
    """Validated operands, with one row per token."""

    input: Tensor  # [N, d]; without weight, the logits [N, V]
    weight: Tensor | None  # [V, d]
    bias: Tensor | None  # [V]
    class_mask: Tensor | None  # bool [1|N, V]
    target: Tensor  # [N]
    ignore_index: int
    reduction: str
    lead: torch.Size  # the shape of the tokens
    shard: ClassShard  # the classes of weight and bias
    class_weight: Tensor | None = None  # [V]

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

    def factor(self) -> Tensor:
        """The factor of each token in the reduced loss, (N,); 0 for ignored tokens."""
        counted, dtype = self.counted, score_dtype(self.input)
        share = counted.to(dtype)
        if self.reduction != "mean":
            return share
        if self.class_weight is not None:
            share = share * self.class_weight[self.classes_of_tokens]
        total = share.sum()
        return counted / total.where(total != 0, float("nan"))

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
    shard: ClassShard = ALL_CLASSES,
) -> TokenBatch:  # fmt: skip
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
    return TokenBatch(rows, weight, bias, mask, target, ignore_index, reduction, lead, shard)
