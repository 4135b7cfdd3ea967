"""The kernels as PyTorch operators, without derivatives."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import custom_op


def _kernels() -> tuple[Any, Any]:
    # Triton is imported by the first call that runs a kernel.
    from attnzoo.backends.triton.decode import launch as launch_decode
    from attnzoo.backends.triton.flash import launch

    return launch, launch_decode


def _machine(q: Tensor) -> tuple[int, int]:
    launch, decode = _kernels()
    return launch.architecture(q.device), decode.processors(q.device)


@custom_op("attnzoo::decode_statistics", mutates_args=())
def decode_statistics(
    q: Tensor, k: Tensor, scale: float,
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Products q kᵀ for `decode_forward`, and rows lse and entropy of the un-gained scores."""
    launch, decode = _kernels()
    facts = launch.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    jobs, found = decode.describe_statistics(q, k, facts, *_machine(q))
    for job in jobs:
        launch.run(job)
    return found


@decode_statistics.register_fake
def _(q: Tensor, k: Tensor, scale: float, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    launch, decode = _kernels()
    products = decode.new_products(q, k, _facts(scale, others))
    return products, launch.new_row(q), launch.new_row(q)


@custom_op("attnzoo::decode_threshold", mutates_args=())
def decode_threshold(
    q: Tensor, k: Tensor, gain: Tensor | None, shape: Tensor | None, scale: float,
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None, twin: str, alpha: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Products q kᵀ for `decode_forward`, and the row τ."""
    launch, decode = _kernels()
    facts = launch.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    form, rows = launch.Form(twin, 1.0, True, "threshold"), {"gain": gain, "shape": shape}
    jobs, found = decode.describe_threshold(q, k, facts, form, rows, alpha, *_machine(q))
    for job in jobs:
        launch.run(job)
    return found


@decode_threshold.register_fake
def _(q: Tensor, k: Tensor, gain: Any, shape: Any, scale: float, *others: Any) -> Any:
    launch, decode = _kernels()
    return decode.new_products(q, k, _facts(scale, others)), launch.new_row(q)


@custom_op("attnzoo::decode_forward", mutates_args=())
def decode_forward(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor | None,
    gain: Tensor | None, tau: Tensor | None, shape: Tensor | None, sink: Tensor | None,
    scale: float, mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    alibi: Tensor | None, left: int | None, right: int | None,
    twin: str, unit: float, vanishes: bool, normalize: str, want_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, the latter without elements unless wanted. k is not read beside products."""
    launch, decode = _kernels()
    facts = launch.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
    form = launch.Form(twin, unit, vanishes, normalize)
    rows = {"gain": gain, "tau": tau, "shape": shape, "sink": sink}
    jobs, found = decode.describe_decode(
        q, k, v, products, facts, form, rows, want_lse, *_machine(q)
    )
    for job in jobs:
        launch.run(job)
    return found


@decode_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    launch, _ = _kernels()
    return launch.like(q, v.shape[3]), launch.new_row(q, others[-1])


def _facts(scale: float, others: tuple) -> Any:
    mask, q_segments, k_segments, alibi, left, right, *_ = others
    launch, _ = _kernels()
    return launch.Facts(scale, left, right, mask, q_segments, k_segments, alibi)
