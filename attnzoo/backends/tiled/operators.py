"""`tiled.walk` as PyTorch operators, with fake functions and first derivatives.

torch.compile traces into an autograd function but not into an operator. Without operators it would
unroll the loop over blocks and recompile for each length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends import flops
from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.backends.tiled.blocks import call_of
from attnzoo.backends.tiled.walk import PairwiseCall, TiledSaved, gradients, outputs
from attnzoo.core.call import in_full_precision, score_dtype


class TiledResult(NamedTuple):
    """Outputs of the forward. The backward recomputes the weights from τ and Z (B, H, Nq)."""

    out: Tensor
    lse: Tensor | None
    tau: Tensor
    z: Tensor


@operator
def tiled_forward(
    *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, origin: int, vectors: Vectors,
    terms: Terms, rule: Rule, seed: Tensor | None, dropout_p: float, want_lse: bool,
) -> TiledResult:  # fmt: skip
    call = call_of(q, k, layout, origin, v.shape[3], dropout_p, want_lse)
    with in_full_precision(q.device):
        saved = outputs(PairwiseCall(call, rule, vectors, terms, seed), q, k, v)
    return TiledResult(saved.out, saved.lse, saved.tau, saved.z)


@tiled_forward.fake
def _(*, q: Tensor, v: Tensor, want_lse: bool) -> TiledResult:
    dtype, shape = score_dtype(q), q.shape[:3]
    out, tau = q.new_empty((*shape, v.shape[3]), dtype=dtype), q.new_empty(shape, dtype=dtype)
    return TiledResult(out, torch.empty_like(tau) if want_lse else None, tau, torch.empty_like(tau))


@tiled_forward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> int:
    return flops.attended(q, k, v, layout)


@tiled_forward.backward(
    "q", "k", "v", "mask", "relative_bias", "gain", "offset", "shape", "sink", "key_bias", "decay",
    "factor",
)  # fmt: skip
def tiled_backward(
    *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, origin: int, vectors: Vectors,
    terms: Terms, rule: Rule, seed: Tensor | None, dropout_p: float, out: Tensor,
    lse: Tensor | None, tau: Tensor, z: Tensor, dout: Tensor, dlse: Tensor | None,
    wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    call = call_of(q, k, layout, origin, v.shape[3], dropout_p, dlse is not None)
    saved = TiledSaved(out, lse, tau, z)
    with in_full_precision(q.device):
        formed = PairwiseCall(call, rule, vectors, terms, seed)
        return gradients(formed, q, k, v, saved, dout, dlse, wanted)


@tiled_backward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout, wanted: list[str]) -> int:
    return flops.gradients(q, k, v, layout, wanted)
