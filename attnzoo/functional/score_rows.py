"""Converts scores that a user gives to rows. Each row is one head with one query of a `Call`.

A per-head parameter then has one value per row, and n_i counts the visible entries of a row. A
variant's definition and forms run on such a call without change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

import attnzoo.variants  # noqa: F401  (registers the shipped variants)
from attnzoo.backends import eager
from attnzoo.core.call import Call, score_dtype
from attnzoo.core.checks import DTYPES, broadcasts, check_dense, is_int, plain, shown
from attnzoo.core.forms import Pairwise
from attnzoo.core.parameters import bind, check_names, checked_vectors
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Variant, source_of
from attnzoo.core.visibility import cut
from attnzoo.functional.prepare import definition_of


@dataclass(frozen=True, eq=False, kw_only=True)
class RowCall(Call):
    """A call whose scores are given: ``row_scores`` is (1, R, 1, n)."""

    row_scores: Tensor

    def scores(self, q: Any, k: Any) -> Tensor:
        return self.row_scores


class _Absent:
    """Takes the place of q and k, which a definition may only pass to ``call.scores``."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(_ONLY_SCORES)

    def _raise(self, *others: Any) -> NoReturn:
        raise ValueError(_ONLY_SCORES)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _raise
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __getitem__ = _raise

    @classmethod
    def __torch_function__(cls, *arguments: Any) -> NoReturn:
        raise ValueError(_ONLY_SCORES)


_ONLY_SCORES = (
    "variant must compute its weights from call.scores(q, k) only; this one uses q or k themselves"
)
_ABSENT: Any = _Absent()


class BoundVariant(NamedTuple):
    """A variant with validated parameters for R rows: numbers, or tensors (1, R, 1), (1, 1, 1)."""

    variant: Variant
    params: dict[str, Any]

    def part(self, rows: slice) -> BoundVariant:
        """The variant and its parameters for ``rows``."""
        part = {
            name: cut(x, slice(None), rows) if isinstance(x, Tensor) else x
            for name, x in self.params.items()
        }
        return BoundVariant(self.variant, part)

    def weights(self, call: RowCall) -> Tensor:
        """The weights of the variant's definition, (R, n)."""
        name = self.variant.name
        definition = definition_of(self.variant, self.params)
        w = definition.weights(_ABSENT, _ABSENT, call, **definition.params)
        eager.check(w, call, f"{source_of(definition.weights)} of variant {name!r}")
        return w[0, :, 0]

    def pairwise(self, call: RowCall) -> Pairwise | None:
        """The variant's first pairwise form for this call, without `Pairwise.extras`."""
        for form in self.variant.forms(call, **self.params):
            if isinstance(form, Pairwise) and not form.extras:
                return checked_vectors(f"forms of variant {self.variant.name!r}", form, call)
        return None

    def extras(self, call: RowCall) -> list[str]:
        """The `Pairwise.extras` of the variant's forms for this call."""
        forms = self.variant.forms(call, **self.params)
        names = [name for form in forms if isinstance(form, Pairwise) for name in form.extras]
        return list(dict.fromkeys(names))


def row_call(scores: Tensor, mask: Tensor | None, input_dtype: torch.dtype) -> RowCall:
    """The call for scores (R, n) in fp32 or fp64, and a bool mask (R, n) or (1, n)."""
    count, size = scores.shape
    return RowCall(
        batch=1,
        heads=count,
        kv_heads=count,
        queries=1,
        keys=size,
        head_dim=1,
        value_dim=1,
        scale=1.0,
        dtype=scores.dtype,
        input_dtype=input_dtype,
        device=scores.device,
        query_origin=size - 1,
        mask=None if mask is None else mask[None, :, None],
        row_scores=scores[None, :, None],
    )


def bind_rows(
    function: str,
    variant: str,
    example: Tensor,
    params: dict[str, Any],
    lead: tuple[int, ...],
    output_layer: bool = False,
    keywords: Iterable[str] = (),
) -> BoundVariant:
    """Validate the variant and its parameters for rows of the shape ``lead``.

    Args:
        function: The name of the public function, for errors.
        example: A tensor of the dtype and on the device of the scores.
        params: Numbers, or tensors that broadcast to ``lead``.
        output_layer: Rows are the queries of one head: the variant's ``output_defaults`` apply, and
            only ``per_token`` parameters may have one value per row.
        keywords: The other keywords of the function, for errors.
    """
    chosen = get_variant(variant)
    check_has_rows(function, variant)
    check_names(chosen, params, keywords)
    known = {param.name: param for param in chosen.params if param.kind == "per_head"}
    if output_layer:
        params = {**(chosen.output_defaults or {}), **params}
    rows = {}
    for name, x in params.items():
        if name in known and isinstance(x, Tensor):
            shape = lead if known[name].per_token or not output_layer else ()
            x = _row_values(f"{chosen.name}'s {name}", x, shape, example)
        rows[name] = x
    count = prod(lead)
    # One entry per row is enough to validate parameters.
    call = row_call(example.new_zeros(count, 1, dtype=score_dtype(example)), None, example.dtype)
    bound = bind(chosen, call, rows)
    reason = chosen.unsupported(call, **bound)
    if reason is not None:
        raise ValueError(reason)
    return BoundVariant(chosen, bound)


def check_has_rows(function: str, variant: str) -> None:
    """Raise if the variant's weights are not a function of the scores of a row."""
    chosen = get_variant(variant)
    if chosen.by_position:
        raise ValueError(
            f"variant of {function} must not depend on positions, got {variant!r}, whose weights do"
        )
    if not chosen.has_logits:
        raise ValueError(
            f"variant of {function} must have weights that depend on q and k through q·k only, got "
            f"{variant!r}, whose weights do not"
        )


def _row_values(what: str, value: Tensor, lead: tuple[int, ...], example: Tensor) -> Tensor:
    """A parameter as a tensor () or (R,)."""
    check_dense(what, value)
    if value.device != example.device:
        raise ValueError(
            f"{what} must be on the scores' device {example.device}, got {value.device}"
        )
    if value.dim() == 0 or value.shape == (1,):
        return value.reshape(())
    if not broadcasts(value, lead):
        shapes = f"() or one that broadcasts to {lead} (one value per row)" if lead else "()"
        raise ValueError(
            f"{what} must be a number or a tensor of shape {shapes}, got {tuple(value.shape)}"
        )
    return value.expand(lead).reshape(-1)


class ScoreRows(NamedTuple):
    """Validated scores (R, n) with a mask (R, n), (1, n) or None, and their original shape."""

    bound: BoundVariant
    scores: Tensor
    mask: Tensor | None
    lead: tuple[int, ...]
    dim: int

    def restore(self, x: Tensor) -> Tensor:
        """x (R, m) in the original layout, with m in place of n."""
        return x.reshape(*self.lead, x.shape[-1]).movedim(-1, self.dim)


def as_rows(
    function: str, scores: Tensor, variant: str, dim: Any, mask: Any, params: dict[str, Any]
) -> ScoreRows:
    """Validate scores, which are a dense tensor, with their dimension, mask and parameters."""
    if scores.dtype not in DTYPES:
        raise TypeError(f"scores must be fp16, bf16, fp32 or fp64, got {scores.dtype}")
    shape = tuple(scores.shape)
    if not shape:
        raise ValueError("scores must have at least one dimension, got shape ()")
    dim = plain(dim)
    if not is_int(dim):
        raise TypeError(f"dim must be an int, got {shown(dim)}")
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"dim must be from {-len(shape)} to {len(shape) - 1} for scores of shape {shape}, got "
            f"{dim}"
        )
    dim %= len(shape)
    size, lead = shape[dim], shape[:dim] + shape[dim + 1 :]
    for name, x in params.items():  # a tensor of the scores' rank may have size 1 along dim
        if isinstance(x, Tensor) and x.dim() == len(shape) and x.shape[dim] == 1:
            params = params | {name: x.squeeze(dim)}
    bound = bind_rows(function, variant, scores, params, lead, keywords=("dim", "mask"))
    moved = scores.movedim(dim, -1)
    count = prod(lead)
    seen = None if mask is None else _row_mask(mask, scores, dim, (count, size))
    return ScoreRows(bound, moved.reshape(count, size), seen, lead, dim)


def _row_mask(mask: Any, scores: Tensor, dim: int, rows: tuple[int, int]) -> Tensor:
    check_dense("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool (True = takes part), got {mask.dtype}")
    if mask.device != scores.device:
        raise ValueError(f"mask must be on the scores' device {scores.device}, got {mask.device}")
    shape = tuple(scores.shape)
    if not broadcasts(mask, shape):
        raise ValueError(
            f"mask must broadcast to the shape of scores {shape}, got {tuple(mask.shape)}"
        )
    mask = mask[(None,) * (len(shape) - mask.dim())].movedim(dim, -1)
    if all(n == 1 for n in mask.shape[:-1]):  # one mask for all rows
        return mask.reshape(1, -1).expand(1, rows[1])
    return mask.expand(scores.movedim(dim, -1).shape).reshape(rows)
