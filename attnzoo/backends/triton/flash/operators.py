"""The kernels of `flash` as PyTorch operators, with fake functions and first derivatives.

Triton is imported by the first call that runs a kernel or needs the size of a block map.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends import flops
from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Dropout, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import kernel_operands
from attnzoo.backends.triton.common.kernel_operands import (
    Solved,
    aligned,
    aligned_layout,
    like,
    new_vector,
)
from attnzoo.core.forms import Statistics


@cache
def _modules() -> tuple[Any, ...]:
    """The modules that launch kernels. Importing them once is faster than in every call."""
    from attnzoo.backends.triton.common import launch, prepared
    from attnzoo.backends.triton.flash import launch as flash_launch
    from attnzoo.backends.triton.flash import launch_backward

    return launch, prepared, flash_launch, launch_backward


@operator
def flash_statistics(*, q: Tensor, k: Tensor, layout: Layout) -> Statistics:
    launch, prepared, flash_launch, _ = _modules()
    operands = *aligned(q, k), aligned_layout(layout), False, launch.architecture(q.device)
    return prepared.launch(flash_launch.describe_stats, *operands)


@operator
def flash_max_logits(*, q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """The largest score of each head, (H,)."""
    if 0 in q.shape or 0 in k.shape:
        return q.new_full(q.shape[1:2], float("-inf"), dtype=torch.float32)
    launch, prepared, flash_launch, _ = _modules()
    operands = *aligned(q, k), aligned_layout(layout), True, launch.architecture(q.device)
    return prepared.launch(flash_launch.describe_stats, *operands).amax((0, 2))


@flash_max_logits.fake
def _(*, q: Tensor) -> Tensor:
    return q.new_empty(q.shape[1:2], dtype=torch.float32)


flash_max_logits.flops(flops.one_pass)


@flash_statistics.fake
def _(*, q: Tensor) -> Statistics:
    return Statistics(new_vector(q), new_vector(q))


flash_statistics.flops(flops.one_pass)


@operator
def flash_solve(
    *, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, terms: Terms, layout: Layout, rule: Rule
) -> Solved:
    """Solve for the threshold τ and make the block map, or find what the selected scores reach.

    The sizes of tiles and of the map depend on v's head dimension.
    """
    launch, prepared, flash_launch, _ = _modules()
    solvers = {
        "threshold": flash_launch.describe_threshold, "select": flash_launch.describe_selection
    }  # fmt: skip
    call = aligned_layout(layout), rule, vectors, terms
    operands = *aligned(q, k), v, *call, launch.architecture(q.device)
    return prepared.launch(solvers[rule.normalize], *operands)


@flash_solve.fake
def _(*, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Solved:
    _, _, flash_launch, _ = _modules()
    if rule.normalize == "select":
        return flash_launch.new_selection(q)
    return flash_launch.new_solved(q, k, v)


flash_solve.flops(flops.one_pass)


class FlashResult(NamedTuple):
    """The outputs of the forward.

    The backward recomputes the weights from ``stat`` and ``weight_sum``; see `groups.Saved`.
    """

    out: Tensor
    stat: Tensor | None
    weight_sum: Tensor | None
    lse: Tensor | None


@operator
def flash_forward(
    *, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, terms: Terms, solved: Solved,
    layout: Layout, rule: Rule, dropout: Dropout, want_lse: bool,
) -> FlashResult:  # fmt: skip
    launch, prepared, flash_launch, _ = _modules()
    machine = launch.architecture(q.device), launch.processors(q.device)
    call = aligned_layout(layout), rule, vectors, terms, solved
    operands = *aligned(q, k, v), *call, want_lse, *machine, dropout
    return FlashResult(*prepared.launch(flash_launch.describe_forward, *operands))


@flash_forward.fake
def _(
    *, q: Tensor, v: Tensor, vectors: Vectors, terms: Terms, layout: Layout, rule: Rule,
    want_lse: bool,
) -> FlashResult:  # fmt: skip
    two = kernel_operands.saves_weight_sum(rule, layout, vectors, terms, want_lse)
    saved = rule.normalize != "none", two, want_lse
    return FlashResult(like(q, v.shape[3]), *(new_vector(q) if each else None for each in saved))


@flash_forward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> int:
    return flops.attended(q, k, v, layout)


@flash_forward.backward(
    "q", "k", "v", "mask", "gain", "offset", "shape", "sink", "relative_bias", "key_bias", "factor",
    "decay", like=lambda x: like(x, x.shape[3]) if x.dim() == 4 else x.new_empty(x.shape),
)  # fmt: skip
def flash_backward(
    *, q: Tensor, k: Tensor, v: Tensor, vectors: Vectors, terms: Terms, solved: Solved,
    layout: Layout, rule: Rule, dropout: Dropout, out: Tensor, stat: Tensor | None,
    weight_sum: Tensor | None, lse: Tensor | None, dout: Tensor, dlse: Tensor | None,
    wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    launch, prepared, _, launch_backward = _modules()
    dout, q, k, v, out = aligned(dout, q, k, v, out)
    if dlse is not None and lse is not None:
        # For a query without keys lse is the constant −∞, so its dlse has no effect. The kernels
        # multiply this dlse by 0, which would give NaN in dk if dlse is ±∞ or NaN.
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0).contiguous()
    mask = layout.mask if "mask" in wanted else None
    # The kernels treat a mask with one row for all queries as a key bias.
    of_keys = mask is not None and mask.shape[2] == 1
    computed = [n for n in wanted if n != "mask" or not of_keys]
    if of_keys and "key_bias" not in wanted:
        computed.append("key_bias")
    grads = prepared.launch(
        launch_backward.describe_backward, dout, dlse, q, k, v, out, stat, weight_sum,
        aligned_layout(layout), rule, vectors, terms, solved, None if of_keys else mask, computed,
        launch.architecture(q.device), launch.processors(q.device), dropout,
    )  # fmt: skip
    grads |= {name: _joined(grads[name], x) for name, x in (("k", k), ("v", v))}
    if "key_bias" in computed:
        grads["key_bias"] = grads["key_bias"].sum(0)
    if mask is not None and of_keys:
        total = grads["key_bias"][:, :, None].sum_to_size(mask.shape)
        grads["mask"] = like(mask, mask.shape[3]).copy_(total)
    if "relative_bias" in wanted and grads["relative_bias"].dim() == 4:
        grads["relative_bias"] = grads["relative_bias"].sum((0, 2))  # of a table, [H, W]
    if "decay" in wanted:
        grads["decay"] = grads["decay"].sum(-1)
    return grads


@flash_backward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout, wanted: list[str]) -> int:
    return flops.gradients(q, k, v, layout, wanted)


def _joined(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, from the gradients (B, Hkv · parts, N, D) of parts of the groups."""
    if gradient.shape[1] == x.shape[1]:
        return gradient
    total = gradient.unflatten(1, (x.shape[1], -1)).sum(2)
    return like(x, x.shape[3]).copy_(total)
