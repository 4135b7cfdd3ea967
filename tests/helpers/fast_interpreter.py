"""Makes Triton's interpreter faster without a change of its results.

The interpreter spends most time on Python objects for types and shapes, not on numbers. Each
function here makes a replacement for a private function of Triton. The replacement handles common
cases faster. Two mend it: with `index_by_item` Triton 3.6 supports numpy 2.4 and newer, and
`convert_bf16` is right below the smallest normal number, where Triton's conversion is not. A
private function that the installed version of Triton lacks is not replaced.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from benchmarks.kernels.interpreter import index_by_item


@cache
def speed_up_interpreter() -> None:
    """Replace the functions below in this process."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    for owner, name, faster in (
        (interpreter, "_patch_lang", patch_once),
        (interpreter, "_patch_lang_tensor", index_by_item),
        (interpreter, "_get_np_dtype", remember_dtypes),
        (interpreter, "_convert_float", convert_bf16),
        (semantic.TritonSemantic, "broadcast_impl_value", skip_equal_shapes),
        (semantic.TritonSemantic, "binary_op_type_checking_impl", skip_equal_types),
        (semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", skip_unused_checks),
        (core, "_unwrap_if_constexpr", pass_plain_values),
        (core.block_type, "__init__", remember_blocks),
        (core.tensor, "__init__", remember_shapes),
    ):
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, faster(original))


def convert_bf16(original: Any) -> Any:
    """Convert between fp32 and bf16 by a shift. As in Triton, fp32 is truncated."""
    from triton.language import bfloat16, float32

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding is None and (source, target) == (float32, bfloat16):
            return (x.view(np.uint32) >> 16).astype(np.uint16)
        if rounding is None and (source, target) == (bfloat16, float32):
            return x.view(np.uint16).astype(np.uint32) << 16
        return original(x, source, target, rounding)

    return convert


def patch_once(original: Any) -> Any:
    """Patch Triton's language once per launch, not in each function call."""
    from triton import language
    from triton.runtime import interpreter

    empty = getattr(interpreter, "_LangPatchScope", None)
    if empty is None:
        return original

    known: dict[int, Any] = {}  # for each module, its names for Triton's language

    def patch(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in known:
            languages = [x for x in names.values() if x is language or x is language.core]
            # The names too, so that no other module gets their id.
            known[id(names)] = names, languages
        languages = known[id(names)][1]
        patched = languages and not any(language.core.is_builtin(x.load) for x in languages)
        return empty() if patched else original(fn)

    return patch


def remember_dtypes(original: Any) -> Any:
    """The numpy dtype of a type follows from its scalar type."""
    known: dict[str, Any] = {}

    def dtype_of(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = original(of)
        return known[name]

    return dtype_of


def pass_plain_values(original: Any) -> Any:
    """Numbers, strings, None, scalar types and tensors are returned unchanged."""
    from triton.language import core

    plain = {int, float, bool, str, type(None), core.dtype, core.tensor}
    return lambda x: x if type(x) in plain else original(x)


def skip_equal_shapes(original: Any) -> Any:
    """Two blocks of the same shape, or two scalars, need no broadcast."""

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if values_of(left.type) == values_of(right.type):
            return left, right
        return original(self, left, right)

    return broadcast


def skip_equal_types(original: Any) -> Any:
    """Two tensors of the same common type need no cast."""
    from triton.language import core

    common = {"fp32", "int32", "int64"}

    def convert(self: Any, left: Any, right: Any, *others: Any, **options: Any) -> Any:
        if (
            type(left) is core.tensor
            and type(right) is core.tensor
            and left.dtype.name in common
            and left.dtype.name == right.dtype.name
        ):
            return self.broadcast_impl_value(left, right)
        return original(self, left, right, *others, **options)

    return convert


def skip_unused_checks(original: Any) -> Any:
    """The check for integer overflow is skipped unless the option debug is on.

    Without this option the check raises no error.
    """

    def check(self: Any, left: Any, right: Any, operation: Any) -> None:
        if self.builder.options.debug:
            original(self, left, right, operation)

    return check


def values_of(of: Any) -> list[int]:
    return of.shape.values if of.is_block() else []


def remember_blocks(original: Any) -> Any:
    """Block types with the same sizes and scalar type share their other attributes."""
    known: dict[Any, Any] = {}

    def start(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return start


def remember_shapes(original: Any) -> Any:
    """Tensors of the same shape share the objects ``shape`` and ``numel``."""
    known: dict[tuple[int, ...], Any] = {}

    def start(self: Any, handle: Any, type: Any) -> None:
        key = tuple(values_of(type))
        if key not in known:
            original(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return start
