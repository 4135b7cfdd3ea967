"""Validates the arguments of a loss, and finds the form of its variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.core.variant import Variant
from attnzoo.functional.rows import BoundVariant, RowCall, bind_rows, row_call

REDUCTIONS = ("none", "mean", "sum")


class LossArguments(NamedTuple):
    """The keywords that `linear_loss` and `loss` share."""

    class_mask: Tensor | None
    softcap: float | None
    weight: Tensor | None
    label_smoothing: float
    lse_penalty: float
    ignore_index: int
    reduction: str
    return_stats: bool


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
    softcap = plain(softcap)
    if softcap is None:
        return None
    if not is_number(softcap):
        raise TypeError(f"softcap must be a finite number > 0 or None, got {shown(softcap)}")
    if not 0 < softcap <= torch.finfo(torch.float32).max:
        raise ValueError(f"softcap must be a finite number > 0 or None, got {shown(softcap)}")
    return float(softcap)


class BoundForm(NamedTuple):
    """A variant with its parameters, and its form for the tokens of an output layer."""

    bound: BoundVariant
    call: RowCall
    form: Pairwise

    def vector(self, value: Tensor | float | None) -> Tensor | None:
        """A per-query vector of the form with one entry per token, (N,)."""
        if value is None:
            return None
        return self.call.per_query(value).expand(1, self.call.heads, 1)[0, :, 0]


def bind_form(
    function: str,
    variant: str,
    input: Tensor,
    classes: int,
    class_mask: Tensor | None,
    params: dict[str, Any],
    lead: torch.Size,
    keywords: Iterable[str] = (),
) -> BoundForm:
    """Validate the variant and its parameters for tokens ``input`` (N, d) of the shape ``lead``.

    ``keywords``: the other keywords of the function, for errors.
    """
    bound = bind_rows(
        function, variant, input, params, tuple(lead), output_layer=True, keywords=keywords
    )
    # A form depends on the number of scores, not on their values. One expanded number stands for
    # all scores, so that they take no memory.
    scores = input.new_empty((), dtype=score_dtype(input)).expand(input.shape[0], classes)
    call = row_call(scores, class_mask, input.dtype)
    form = bound.pairwise(call)
    if form is None:
        extras = ", ".join(bound.extras(call))
        why = "it has no pairwise form"
        if extras:
            why = f"its form has {extras}, which losses do not support"
        raise ValueError(f"variant {variant!r} has no loss: {why}")
    return BoundForm(bound, call, form)


def check_loss(
    variant: Variant, form: Pairwise, label_smoothing: float, lse_penalty: float
) -> None:
    """Raise unless the form has a loss with these options."""
    phi, how = form.activation, form.normalize
    reason = None
    if isinstance(form.gain, FromStatistics):
        reason = "its gain depends on statistics of all scores"
    elif how == "sum" and not (phi.exponential or phi.positive):
        reason = f"the weight of the target can be 0 (activation {phi.name} is not positive)"
    elif how == "select" and not phi.exponential:
        reason = f"normalize='select' has a loss only with φ = exp, got {phi.name}"
    elif phi.integral is None and (how == "none" or (how == "threshold" and phi.alpha is None)):
        reason = f"activation {phi.name} has no integral"
    elif (
        how in ("none", "threshold")
        and phi.alpha is None
        and isinstance(form.shape, Tensor)
        and form.shape.requires_grad
    ):
        reason = f"the loss has no gradient for the parameter of activation {phi.name}"
    if reason is not None:
        raise ValueError(f"variant {variant.name!r} has no loss: {reason}")
    if label_smoothing and (how == "select" or (how == "threshold" and phi.alpha is None)):
        raise ValueError(
            f"label_smoothing must be 0 for variant {variant.name!r}, got {label_smoothing}"
            + ("; classes that are not kept have no score" if how == "select" else "")
        )
    if lse_penalty and not form.has_lse:
        raise ValueError(
            f"lse_penalty must be 0 for variant {variant.name!r}, which has no log-sum-exp, got "
            f"{lse_penalty}"
        )
