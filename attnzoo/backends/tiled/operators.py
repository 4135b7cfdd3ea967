"""The walks of `tiled_walk` as PyTorch operators: real, fake and differentiated once.

Operators, because torch.compile looks into an autograd function but not into an operator: a walk
over blocks would be unrolled into the graph, and compiled again for each length. An operator also
has a fake for tensors without values, and an activation reaches it by its key, a string.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.backends.tiled.blocks import call_of, fake_gradient, numbers_of, solid
from attnzoo.backends.tiled.walk import Normalizer, Rows, gradients, outputs
from attnzoo.backends.transforms import refuse_transforms
from attnzoo.backends.triton.flash.operators import NO_DOUBLE
from attnzoo.core import activations
from attnzoo.core.call import Call, in_full_precision, score_dtype
from attnzoo.core.forms import Activation

# The tensors with a gradient, in the order of the operators; others follow them.
DIFFERENTIABLE = ("q", "k", "v", "mask", "alibi", "gain", "offset", "shape", "sink")

_BY_KEY: WeakValueDictionary[str, Activation] = WeakValueDictionary()


def key_of(activation: Activation) -> str:
    """The activation's name, with a number behind it where another one has the name already."""
    if not hasattr(activation, "name"):  # what a compiler knows of an object of its own making
        raise TypeError(
            "under torch.compile an Activation must be made before the call: at the top of a "
            "module, not in the variant's forms()"
        )
    for number in count(1):
        key = activation.name if number == 1 else f"{activation.name}#{number}"
        if _BY_KEY.setdefault(key, activation) is activation:
            return key
    raise AssertionError("count() does not end")


# A compiler calls it and takes the string for a constant. This is all that
# torch.compiler.assume_constant_result does, which would import the compiler with attnzoo.
key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]

# Their keys are their names in every process, for a program that is exported in one and run in
# another.
for _known in (*vars(activations).values(), *activations.TAYLOR.values()):
    if isinstance(_known, Activation):
        key_of(_known)


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, how: Normalizer, rows: Rows, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and lse, the latter without elements unless the call asks for it."""
    refuse_transforms("tiled", q, k, v, call.mask, call.alibi, *rows)
    out, lse, _, _ = tiled_forward(
        q, k, v, call.mask, call.alibi, *rows, *(call.segments or (None, None)), seed,
        **numbers_of(call), dropout_p=call.dropout_p, want_lse=call.return_lse,
        activation=key_of(how.activation), normalize=how.normalize, keep=how.keep,
    )  # fmt: skip
    return out, lse


@operator("tiled_forward")
def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, alibi: Tensor | None,
    gain: Tensor | None, offset: Tensor | None, shape: Tensor | None, sink: Tensor | None,
    q_segments: Tensor | None, k_segments: Tensor | None, seed: Tensor | None,
    *, scale: float, left: int | None, right: int | None, query_origin: int, key_origin: int,
    dropout_p: float, want_lse: bool, activation: str, normalize: str, keep: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out; lse; the rows τ and Z from which the backward finds the weights again."""
    call = call_of(
        q, k, mask, alibi, q_segments, k_segments, value_dim=v.shape[3], scale=scale, left=left,
        right=right, query_origin=query_origin, key_origin=key_origin, dropout_p=dropout_p,
        return_lse=want_lse,
    )  # fmt: skip
    how = Normalizer(_BY_KEY[activation], normalize, keep)
    with in_full_precision(q.device):
        return outputs(call, how, q, k, v, Rows(gain, offset, shape, sink), seed)


@torch.library.register_fake("attnzoo::tiled_forward")
def _(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, want_lse: bool, **options: Any
) -> tuple[Tensor, ...]:
    dtype, row = score_dtype(q), q.shape[:3]
    lse = row if want_lse else (0,)
    shapes = ((*row, v.shape[3]), lse, row, row)
    return tuple(q.new_empty(shape, dtype=dtype) for shape in shapes)


@operator("tiled_backward")
def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, alibi: Tensor | None,
    gain: Tensor | None, offset: Tensor | None, shape: Tensor | None, sink: Tensor | None,
    q_segments: Tensor | None, k_segments: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, tau: Tensor, z: Tensor, do: Tensor, dlse: Tensor | None,
    *, scale: float, left: int | None, right: int | None, query_origin: int, key_origin: int,
    dropout_p: float, want_lse: bool, activation: str, normalize: str, keep: int | None,
    wants: list[bool],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Gradients of the `DIFFERENTIABLE`, without elements where ``wants`` is false."""
    call = call_of(
        q, k, mask, alibi, q_segments, k_segments, value_dim=v.shape[3], scale=scale, left=left,
        right=right, query_origin=query_origin, key_origin=key_origin, dropout_p=dropout_p,
        return_lse=want_lse and dlse is not None,
    )  # fmt: skip
    how, rows = Normalizer(_BY_KEY[activation], normalize, keep), Rows(gain, offset, shape, sink)
    saved = {"out": out, "lse": lse, "tau": tau, "z": z}
    with in_full_precision(q.device):
        found = gradients(
            call, how, q, k, v, rows, seed, saved, do, dlse, dict(zip(DIFFERENTIABLE, wants))
        )
    return solid(q, *(found[name] for name in DIFFERENTIABLE))  # type: ignore[return-value]


@torch.library.register_fake("attnzoo::tiled_backward")
def _(*tensors: Any, wants: list[bool], **options: Any) -> tuple[Tensor, ...]:
    return tuple(fake_gradient(tensors[0], x, wanted) for x, wanted in zip(tensors, wants))


def _save(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs
    ctx.activation = _BY_KEY[keyword_only_inputs["activation"]]  # lives as long as the graph


def _backward(
    ctx: Any, do: Tensor | None, dlse: Tensor | None, *of_saved_rows: None
) -> tuple[Tensor | None, ...]:
    # Read once: what a checkpoint recomputed is given out for one reading only.
    tensors = ctx.saved_tensors
    out = tensors[-4]
    wants = [bool(needed) for needed in ctx.needs_input_grad[: len(DIFFERENTIABLE)]]
    grads = tiled_backward(
        *tensors, torch.zeros_like(out) if do is None else do, dlse, **ctx.options, wants=wants
    )
    others = (None,) * (len(tensors) - 4 - len(wants))
    return *(x if wanted else None for x, wanted in zip(grads, wants)), *others


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(NO_DOUBLE)


torch.library.register_autograd("attnzoo::tiled_forward", _backward, setup_context=_save)
torch.library.register_autograd("attnzoo::tiled_backward", _refuse)
