"""`tiled.walk` as PyTorch operators, with fake functions and first derivatives.

torch.compile traces into an autograd function but not into an operator. Without operators it would
unroll the loop over blocks and recompile for each length. Operators take no Python objects, so an
activation is passed by its key, a string.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.backends.tiled.blocks import call_of
from attnzoo.backends.tiled.walk import Normalizer, gradients, outputs
from attnzoo.core import activations
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.forms import Activation

_BY_KEY: WeakValueDictionary[str, Activation] = WeakValueDictionary()


def key_of(activation: Activation) -> str:
    """Return the activation's name, with a number if another activation has the same name."""
    # torch.compile passes a placeholder for an object that is created in the compiled function.
    if not hasattr(activation, "name"):
        raise TypeError(
            "under torch.compile an Activation must be created before the call, for example at the "
            "top of a module, not in the variant's forms()"
        )
    for number in count(1):
        key = activation.name if number == 1 else f"{activation.name}#{number}"
        if _BY_KEY.setdefault(key, activation) is activation:
            return key
    raise AssertionError("count() does not end")


# With this flag the compiler calls key_of while it traces, and treats the result as a constant.
# torch.compiler.assume_constant_result sets the same flag, but would import the compiler.
key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]

# The library's activations are registered first, so that their keys equal their names in every
# process. An exported program relies on that.
for _known in (*vars(activations).values(), *activations.TAYLOR.values()):
    if isinstance(_known, Activation):
        key_of(_known)


class Attended(NamedTuple):
    """Outputs of the forward. The backward recomputes the weights from τ and Z (B, H, Nq)."""

    out: Tensor
    lse: Tensor | None
    tau: Tensor
    z: Tensor


@operator
def tiled_forward(
    *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, origin: int, vectors: Vectors,
    seed: Tensor | None, dropout_p: float, want_lse: bool, activation: str, normalize: str,
    keep: int | None,
) -> Attended:  # fmt: skip
    call = call_of(q, k, layout, origin, v.shape[3], dropout_p, want_lse)
    how = Normalizer(_BY_KEY[activation], normalize, keep)
    with in_full_precision(q.device):
        return Attended(*outputs(call, how, q, k, v, vectors, seed))


@tiled_forward.fake
def _(*, q: Tensor, v: Tensor, want_lse: bool) -> Attended:
    dtype, shape = score_dtype(q), q.shape[:3]
    out, tau = q.new_empty((*shape, v.shape[3]), dtype=dtype), q.new_empty(shape, dtype=dtype)
    return Attended(out, torch.empty_like(tau) if want_lse else None, tau, torch.empty_like(tau))


@tiled_forward.backward(
    "q", "k", "v", "mask", "alibi", "gain", "offset", "shape", "sink",
    keep_alive=lambda operands: _BY_KEY[operands["activation"]],
)  # fmt: skip
def tiled_backward(
    *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, origin: int, vectors: Vectors,
    seed: Tensor | None, dropout_p: float, activation: str, normalize: str, keep: int | None,
    out: Tensor, lse: Tensor | None, tau: Tensor, z: Tensor, dout: Tensor, dlse: Tensor | None,
    wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    call = call_of(q, k, layout, origin, v.shape[3], dropout_p, dlse is not None)
    how = Normalizer(_BY_KEY[activation], normalize, keep)
    saved = out, lse, tau, z
    with in_full_precision(q.device):
        return gradients(call, how, q, k, v, vectors, seed, saved, dout, dlse, wanted)
