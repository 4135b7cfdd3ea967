"""The kernels as PyTorch operators: real, fake and differentiated once.

Operators return tensors only: where a result is not wanted, or a form has none, it has no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

NO_DOUBLE = (
    "attnzoo: this backend has first derivatives only; for double backward pass backend='eager'"
)


def _launch() -> Any:
    # Triton is imported by the first call that runs a kernel.
    from attnzoo.backends.triton.flash import launch

    return launch


@custom_op("attnzoo::flash_statistics", mutates_args=())
def flash_statistics(
    q: Tensor, k: Tensor, scale: float,
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows lse and entropy of the un-gained scores."""
    kernels = _launch()
    facts = kernels.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    launch, rows = kernels.describe_stats(q, k, facts, kernels.architecture(q.device))
    kernels.run(launch)
    return rows


@flash_statistics.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    new_row = _launch().new_row
    return new_row(q), new_row(q)


@custom_op("attnzoo::flash_threshold", mutates_args=())
def flash_threshold(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, shape: Tensor | None, scale: float,
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None, twin: str, alpha: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The row τ, and which tiles hold weight: blocks, counts, live of `kernels.threshold`.

    v only says how large the forward's tiles are.
    """
    kernels = _launch()
    facts = kernels.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    form, rows = kernels.Form(twin, 1.0, True, "threshold"), {"gain": gain, "shape": shape}
    launch, found = kernels.describe_threshold(
        q, k, v, facts, form, rows, alpha, kernels.architecture(q.device)
    )
    kernels.run(launch)
    return found


@flash_threshold.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gain: Any, shape: Any, scale: float, *others: Any) -> Any:
    kernels = _launch()
    *tensors, left, right, _, _ = others
    facts = kernels.Facts(scale, left, right, *tensors)
    return kernels.new_row(q), *kernels.empty_maps(q, k, v, facts)


@custom_op("attnzoo::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor,
    gain: Tensor | None, tau: Tensor | None, shape: Tensor | None, sink: Tensor | None,
    blocks: Tensor | None, counts: Tensor | None, live: Tensor | None, scale: float,
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None,
    twin: str, unit: float, vanishes: bool, normalize: str, want_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out; the statistic from which the backward finds the weights again; lse."""
    kernels = _launch()
    facts = kernels.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    form = kernels.Form(twin, unit, vanishes, normalize)
    rows = {"gain": gain, "tau": tau, "shape": shape, "sink": sink}
    kept = None if blocks is None else (blocks, counts)
    launch, found = kernels.describe_forward(
        q, k, v, facts, form, rows, kept, want_lse, kernels.architecture(q.device)
    )
    kernels.run(launch)
    return found


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    normalize, want_lse = others[-2:]
    kernels = _launch()
    apart = kernels.stands_apart(normalize, others[8])
    rows = kernels.new_row(q, normalize != "none", apart), kernels.new_row(q, want_lse)
    return kernels.like(q, v.shape[3]), *rows


@custom_op("attnzoo::flash_backward", mutates_args=())
def flash_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, stat: Tensor, lse: Tensor,
    gain: Tensor | None, tau: Tensor | None, shape: Tensor | None, sink: Tensor | None,
    blocks: Tensor | None, counts: Tensor | None, live: Tensor | None, scale: float,
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None,
    twin: str, unit: float, vanishes: bool, normalize: str,
    wants_gain: bool, wants_tau: bool, wants_sink: bool, wants_alibi: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and of the rows gain, tau, sink and alibi."""
    kernels = _launch()
    facts = kernels.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    form = kernels.Form(twin, unit, vanishes, normalize)
    rows = {"gain": gain, "tau": tau, "shape": shape, "sink": sink}
    maps = None if blocks is None else (blocks, counts, live)
    wanted = dict(dgain=wants_gain, dtau=wants_tau, dsink=wants_sink, dalibi=wants_alibi)
    launches, found = kernels.describe_backward(
        do, dlse, q, k, v, out, stat, lse, facts, form, rows, maps, wanted,
        kernels.architecture(q.device),
    )  # fmt: skip
    for launch in launches:
        kernels.run(launch)
    return found


@flash_backward.register_fake
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    kernels = _launch()
    inputs = (kernels.like(x, x.shape[3]) for x in (q, k, v))
    return *inputs, *(kernels.new_row(q, wanted) for wanted in others[-4:])


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, gain, tau, shape, sink, blocks, counts, live, scale, *facts = inputs
    mask, q_segments, k_segments, alibi, left, right, *form, want_lse = facts
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        q, k, v, *output, gain, tau, shape, sink, blocks, counts, live,
        mask, q_segments, k_segments, alibi,
    )  # fmt: skip
    ctx.scale, ctx.bounds, ctx.form, ctx.want_lse = scale, (left, right), form, want_lse


def _backward(ctx: Any, do: Tensor | None, dstat: None, dlse: Tensor | None) -> tuple:
    *tensors, mask, q_segments, k_segments, alibi = ctx.saved_tensors
    out = tensors[3]
    if do is None:
        do = torch.zeros_like(out)
    # A gradient that was expanded has no contiguous last dimension, or strides of its own.
    do = do if _launch().readable(do, out) else do.contiguous()
    # Where there is no lse, its gradient has no elements to read.
    if dlse is not None and ctx.want_lse:
        lse = tensors[5]
        # A row without keys has lse −∞ whatever its scores: 0 · −∞ would be NaN for all its keys.
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0).contiguous()
    else:
        dlse = None
    needs = ctx.needs_input_grad
    dq, dk, dv, dgain, dtau, dsink, dalibi = flash_backward(
        do, dlse, *tensors, ctx.scale,
        mask, q_segments, k_segments, alibi, *ctx.bounds, *ctx.form,
        needs[3], needs[4], needs[6], needs[14],
    )  # fmt: skip
    rows = (x if wanted else None for x, wanted in zip((dgain, dtau), needs[3:5]))
    dsink, dalibi = dsink if needs[6] else None, dalibi if needs[14] else None
    nothing = (None,) * 7
    return dq, dk, dv, *rows, None, dsink, *nothing, dalibi, *nothing


torch.library.register_autograd("attnzoo::flash_forward", _backward, setup_context=_save)


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(NO_DOUBLE)


torch.library.register_autograd("attnzoo::flash_backward", _refuse)
