"""Counts of floating-point operations, for `torch.utils.flop_counter.FlopCounterMode`.

They follow torch's own formulas. Only products of matrices count, with 2 operations for a
multiplication and its addition. Masks, causality and windows do not lower the counts. Products that
a backward or a further pass over the keys repeats count again. Of packed sequences, as in torch's
formulas, only products within a sequence count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout
from attnzoo.core.checks import has_values

COUNTER = "torch.utils.flop_counter"
FORMULAS: dict[Any, Callable[..., int]] = {}  # by operator of attnzoo


def add_formula(name: str, formula: Callable[..., int]) -> None:
    """Register the formula of an operator ``attnzoo::name``.

    The formula gets the arguments of the operator, and the outputs as ``out_val``.
    """
    packet = getattr(torch.ops.attnzoo, name)
    FORMULAS[packet] = formula
    if COUNTER in sys.modules:
        sys.modules[COUNTER].register_flop_formula(packet, get_raw=True)(formula)


def pairs(q: Tensor, k: Tensor, layout: Layout | None = None) -> int:
    """The number of pairs of a query and a key, over batch and heads.

    With segments these are pairs within a segment, where the ids can be read.
    """
    batch, heads, queries = q.shape[:3]
    if layout is not None and layout.q_segments is not None and layout.k_segments is not None:
        of_queries, of_keys = layout.q_segments, layout.k_segments.sort(-1).values
        if type(of_queries) is Tensor and has_values(of_queries):
            ends, starts = (
                torch.searchsorted(of_keys, of_queries, right=right) for right in (True, False)
            )
            return heads * int((ends - starts).sum()) * batch // len(of_queries)
    return batch * heads * queries * k.shape[2]


def one_pass(q: Tensor, k: Tensor, layout: Layout) -> int:
    """The products q kᵀ. A solver's number of passes over the keys is not known, but at least 1."""
    return 2 * pairs(q, k, layout) * q.shape[3]


def attended(q: Tensor, k: Tensor, v: Tensor, layout: Layout | None = None) -> int:
    """The products of a forward: q kᵀ, and weights times values."""
    return 2 * pairs(q, k, layout) * (q.shape[3] + v.shape[3])


def gradients(q: Tensor, k: Tensor, v: Tensor, layout: Layout | None, wanted: list[str]) -> int:
    """The products of a backward: q kᵀ, dO vᵀ unless only dv is wanted, and dq, dk and dv."""
    scores = 1 + ("q" in wanted) + ("k" in wanted)
    values = any(name != "v" for name in wanted) + ("v" in wanted)
    return 2 * pairs(q, k, layout) * (scores * q.shape[3] + values * v.shape[3])


def _fused(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> int:
    return attended(q, k, v)


def _fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any
) -> int:
    return gradients(q, k, v, None, ["q", "k", "v"])


def _register_all(counter: Any) -> None:
    for packet, formula in FORMULAS.items():
        counter.register_flop_formula(packet, get_raw=True)(formula)
    # torch counts its fused attention on a GPU only.
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for packet, formula in ((forward, _fused), (backward, _fused_backward)):
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


class _AfterImport:
    """Registers the formulas as soon as torch's counter is imported.

    Importing the counter here would import Triton with attnzoo.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run: Callable[[Any], None] = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            _register_all(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if COUNTER in sys.modules:
    _register_all(sys.modules[COUNTER])
else:
    sys.meta_path.insert(0, _AfterImport)
