"""The kernels of `decode` as PyTorch operators, without derivatives.

Triton is imported by the first call that runs a kernel or needs the size of the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from attnzoo.backends import flops
from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.triton.common.kernel_operands import Extras, Form, like, new_vector


def _launch(describe: Callable[..., Any], q: Tensor, *operands: Any) -> Any:
    from attnzoo.backends.triton.common import launch
    from attnzoo.backends.triton.common.prepared import launch as run

    device = q.device
    return run(describe, q, *operands, launch.architecture(device), launch.processors(device))


class Statistics(NamedTuple):
    """`attnzoo.Statistics` together with the products q kᵀ, for `decode_forward`."""

    products: Tensor
    lse: Tensor
    entropy: Tensor


@operator
def decode_statistics(*, q: Tensor, k: Tensor, layout: Layout) -> Statistics:
    from attnzoo.backends.triton.decode.launch import describe_statistics

    return Statistics(*_launch(describe_statistics, q, k, layout))


@decode_statistics.fake
def _(*, q: Tensor, k: Tensor, layout: Layout) -> Statistics:
    from attnzoo.backends.triton.decode.launch import new_products

    return Statistics(new_products(q, k, layout), new_vector(q), new_vector(q))


@decode_statistics.flops
def _(*, q: Tensor, k: Tensor, layout: Layout) -> int:
    return 2 * flops.pairs(q, k, layout) * q.shape[3]


class Attended(NamedTuple):
    out: Tensor
    lse: Tensor | None


@operator
def decode_forward(
    *, q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, vectors: Vectors, extras: Extras,
    layout: Layout, form: Form, alpha: float | None, want_lse: bool,
) -> Attended:  # fmt: skip
    """Compute out and lse, and before them the threshold of a form that has one.

    If ``products`` are given, q and k are not read.
    """
    from attnzoo.backends.triton.decode.launch import describe_decode

    operands = products, layout, form, alpha, vectors, extras, want_lse
    return Attended(*_launch(describe_decode, q, k, v, *operands))


@decode_forward.fake
def _(*, q: Tensor, v: Tensor, want_lse: bool) -> Attended:
    return Attended(like(q, v.shape[3]), new_vector(q) if want_lse else None)


@decode_forward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, layout: Layout) -> int:
    size = v.shape[3] + (q.shape[3] if products is None else 0)
    return 2 * flops.pairs(q, k, layout) * size
