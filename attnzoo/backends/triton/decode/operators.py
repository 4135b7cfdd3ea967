"""The kernels of `decode` as PyTorch operators, without derivatives.

Triton is imported by the first call that runs a kernel or needs the size of the products.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from attnzoo.backends import flops
from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common.kernel_operands import Paged, aligned, like, new_vector


@cache
def _launches() -> Any:
    from attnzoo.backends.triton.decode import launch

    return launch


def _pairs(q: Tensor, k: Tensor, paged: Paged, layout: Layout) -> int:
    """As `flops.pairs`. Of pages all keys count that a row could have, because none is read."""
    if paged.longest is None:
        return flops.pairs(q, k, layout)
    return q.shape[0] * q.shape[1] * q.shape[2] * paged.longest


class ProductStatistics(NamedTuple):
    """`attnzoo.Statistics` together with the products q kᵀ, for `decode_forward`."""

    products: Tensor
    lse: Tensor
    entropy: Tensor


@operator
def decode_statistics(*, q: Tensor, k: Tensor, paged: Paged, layout: Layout) -> ProductStatistics:
    launches = _launches()
    operands = *aligned(q, k), paged, layout
    return ProductStatistics(*launches.run(launches.describe_statistics, *operands))


@decode_statistics.fake
def _(*, q: Tensor, k: Tensor, paged: Paged, layout: Layout) -> ProductStatistics:
    products = _launches().new_products(q, k, paged, layout)
    return ProductStatistics(products, new_vector(q), new_vector(q))


@decode_statistics.flops
def _(*, q: Tensor, k: Tensor, paged: Paged, layout: Layout) -> int:
    return 2 * _pairs(q, k, paged, layout) * q.shape[3]


class DecodeResult(NamedTuple):
    out: Tensor
    lse: Tensor | None


@operator
def decode_forward(
    *, q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, paged: Paged, vectors: Vectors,
    terms: Terms, layout: Layout, rule: Rule, want_lse: bool,
) -> DecodeResult:  # fmt: skip
    """Compute out and lse, and before them the threshold of a form that has one.

    ``products``: q kᵀ from `decode_statistics`, or None. They are read instead of q and k, except
    for a threshold, which is solved from new products.
    """
    launches = _launches()
    operands = products, paged, layout, rule, vectors, terms, want_lse
    return DecodeResult(*launches.run(launches.describe_decode, *aligned(q, k, v), *operands))


@decode_forward.fake
def _(*, q: Tensor, v: Tensor, want_lse: bool) -> DecodeResult:
    return DecodeResult(like(q, v.shape[3]), new_vector(q) if want_lse else None)


@decode_forward.flops
def _(
    *, q: Tensor, k: Tensor, v: Tensor, products: Tensor | None, paged: Paged, layout: Layout
) -> int:
    size = v.shape[3] + (q.shape[3] if products is None else 0)
    return 2 * _pairs(q, k, paged, layout) * size
