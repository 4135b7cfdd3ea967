"""An injected bug makes the results of each backend exceed the error budget.

The agreement tests show that results of correct backends are within the error budget. For gains in
16 bits, tests in this file show it also for large logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnzoo
from attnzoo.backends import BACKENDS, sdpa
from attnzoo.core.forms import Pairwise
from helpers import agreement
from helpers.agreement import Inputs, bounds, by_backend, disagreements, make, outputs, reference
from helpers.approx import Approx
from helpers.cases import CAUSAL_ONLY, rand
from helpers.coverage_table import FORWARD_ONLY, KERNELS, RUNS, VARIANT_BACKENDS, marked


def cases() -> Iterator[Any]:
    for name in BACKENDS:
        for dtype in (torch.float32, torch.bfloat16):
            marks = [pytest.mark.interpreter] if name in KERNELS else []
            # The interpreter computes bf16 in fp32, so one dtype is enough for the quick tests.
            # flash_linear has the bounds of linear.
            slow = name in KERNELS and (dtype == torch.bfloat16 or "linear" in name)
            marks += [pytest.mark.slow] if slow else []
            yield pytest.param(name, dtype, marks=marks, id=f"{name}-{dtype}")


every_case = pytest.mark.parametrize(("backend", "dtype"), list(cases()))
CASE: dict[str, Any] = {
    "span": "full", "mask": "keys", "mask_gradient": False, "heads": "2 heads",
    "params": "default", "dims": (16, 16), "bias": None, "segments": False, "dropout": False,
    "lse": False, "batch": 1,
}  # fmt: skip
Change = Callable[[Any, Any], tuple[Any, Any]]


def example(backend: str, dtype: torch.dtype) -> tuple[str, Inputs]:
    """A variant that the backend supports, and its inputs. The mask hides keys 50 to 99 of 100."""
    shape = (9, 100) if backend == "decode" else (40, 100)
    names = {"linear": "taylor", "flash_linear": "taylor", "flash_shares": "stick_breaking"}
    variant = names.get(backend, "ssmax")
    span = "causal" if variant in CAUSAL_ONLY else "full"
    inputs = make(variant, {**CASE, "shape": shape, "dtype": dtype, "span": span})
    inputs.options["attn_mask"] = (torch.arange(100) < 50)[None, None, None]
    return variant, inputs


def exceeded(backend: str, dtype: torch.dtype) -> list[str]:
    variant, inputs = example(backend, dtype)
    return disagreements(variant, backend, inputs, gradients=backend not in FORWARD_ONLY)


@every_case
def test_without_a_bug_results_are_within_the_budget(backend: str, dtype: torch.dtype) -> None:
    assert exceeded(backend, dtype) == []


def inject(monkeypatch: pytest.MonkeyPatch, backend: str, change: Change) -> None:
    """Patch the backend so that ``change(call, form)`` replaces the call and form of each run."""
    real = BACKENDS[backend]

    def run_changed(q: Tensor, k: Tensor, v: Tensor, call: Any, form: Any) -> Any:
        return real.run(q, k, v, *change(call, form))

    monkeypatch.setitem(BACKENDS, backend, replace(real, run=run_changed))


@every_case
def test_a_dropped_factor_is_caught(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug sets the gain of pairwise forms, or the scale of other forms, to 1."""

    def drop(call: Any, form: Any) -> tuple[Any, Any]:
        if isinstance(form, Pairwise):
            return call, replace(form, gain=1.0)
        return replace(call, scale=1.0), form

    inject(monkeypatch, backend, drop)
    assert exceeded(backend, dtype) != []


@pytest.mark.parametrize("off", [-1, 1])
@every_case
def test_a_mask_that_is_off_by_one_is_caught(
    backend: str, off: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug makes 49 or 51 keys visible instead of 50. The gain still uses a count of 50 keys."""

    def move(call: Any, form: Any) -> tuple[Any, Any]:
        mask = (torch.arange(100) < 50 + off)[None, None, None]
        return replace(call.with_full_rows(absolute=True), mask=mask), form

    inject(monkeypatch, backend, move)
    assert exceeded(backend, dtype) != []


HALVES = (torch.float16, torch.bfloat16)
GAINS = ("ssmax", "log_n", "position_temperature", "adaptive_temperature", "asentmax")


def cases_with_gains() -> Iterator[Any]:
    for name, variant in itertools.product(BACKENDS, GAINS):
        if "linear" in name or VARIANT_BACKENDS[variant].get(name, RUNS) is not RUNS:
            continue
        for dtype, std in itertools.product(HALVES, (1, 4, 10)):
            marks = [pytest.mark.interpreter] if name in KERNELS else []
            slow = name in KERNELS and (variant, std) != (GAINS[0], 10)
            marks += [pytest.mark.slow] if slow else []
            label = f"{name}-{variant}-{dtype}-{std}"
            yield pytest.param(name, variant, dtype, std, marks=marks, id=label)


@pytest.mark.parametrize(("backend", "variant", "dtype", "std"), list(cases_with_gains()))
def test_gains_in_16_bits_are_within_the_budget(
    backend: str, variant: str, dtype: torch.dtype, std: float
) -> None:
    """The budget has no rounding of q · gain to 16 bits. Its error would grow with the logits."""
    shape = (9, 100) if backend == "decode" else (40, 100)
    inputs = make(variant, {**CASE, "shape": shape, "dtype": dtype})
    inputs.leaves["q"] = (inputs.leaves["q"] * (std / 1.5**2)).to(dtype)  # q and k have std 1.5
    assert disagreements(variant, backend, inputs, gradients=backend not in FORWARD_ONLY) == []


@pytest.mark.parametrize("std", [1, 4, 10])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_gain_on_sdpa_is_as_exact_as_a_scale_in_torch(dtype: torch.dtype, std: float) -> None:
    """Mean errors of output and gradients, which differ by noise if both compute in fp32."""
    q, k, v, do = (rand(1, 4, 256, 64, seed=i).to(dtype) for i in range(4))
    gain = std * 1.3

    def results(scale: float | None, *tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        if scale is None:
            b = torch.full((4,), gain)
            out = attnzoo.attention(*leaves, "ssmax", s=0.0, b=b, is_causal=True, backend="sdpa")
        else:
            out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
        return [out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype))]

    exact = results(gain / 8, q.double(), k.double(), v.double())
    with_gain, with_scale = results(None, q, k, v), results(gain / 8, q, k, v)
    for have, torchs, want in zip(with_gain, with_scale, exact, strict=True):
        assert (have - want).abs().mean() <= 1.05 * (torchs - want).abs().mean()


class HalfProducts(TorchDispatchMode):
    """Dispatch mode that rounds the results of torch's matrix products to fp16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        product = func.overloadpacket.__name__.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm")
        return out.copy_(out.half()) if product else out


@contextmanager
def half_accumulators(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch, ExitStack() as stack:
        if backend == "sdpa":
            fused = sdpa.scaled_dot_product_attention
            patch.setattr(
                sdpa,
                "scaled_dot_product_attention",
                lambda *args, **options: fused(*args, **options).half().float(),
            )
        elif backend in KERNELS:
            from triton.runtime.interpreter import InterpreterBuilder

            dot = InterpreterBuilder.create_dot

            def half_dot(*args: Any) -> Any:
                out = dot(*args)
                out.data = out.data.astype("float16").astype(out.data.dtype)
                return out

            patch.setattr(InterpreterBuilder, "create_dot", half_dot)
        elif backend == "tiled":  # HalfProducts cannot change products inside custom operators
            bmm = torch.bmm

            def half_bmm(*args: Any, **options: Any) -> Tensor:
                out = bmm(*args, **options)
                return out.copy_(out.half())

            patch.setattr(torch, "bmm", half_bmm)
        else:
            stack.enter_context(HalfProducts())
        yield


@pytest.mark.parametrize("backend", [marked(name) for name in BACKENDS])
def test_a_half_precision_accumulator_is_caught(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, inputs = example(backend, torch.float32)
    compute = outputs if backend in FORWARD_ONLY else by_backend
    # The reference is computed outside this context, so its products are not rounded to fp16.
    with half_accumulators(backend, monkeypatch):
        results = compute(variant, backend, inputs)
    exact, allowed = reference(variant, inputs), bounds(variant, backend, inputs)
    assert agreement.violations(backend, results, {n: exact[n] for n in results}, allowed) != []


def test_bounds_hold_for_sums_in_any_order() -> None:
    """Each bound is at most n · 2⁻²⁴ · Σ|x|, the worst case of n fp32 additions."""
    terms = rand(20, 300).float()
    exact = Approx(terms.double(), torch.zeros(20, 300, dtype=torch.float64), 2**-23)
    total = exact.sum(-1)
    for seed in range(20):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        running = torch.zeros(20)
        for j in order.tolist():
            running = running + terms[:, j]
        assert bool(((running.double() - total.value).abs() <= total.error).all())
    assert bool((total.error <= 300 * 2**-24 * terms.double().abs().sum(-1)).all())


def test_bounds_hold_for_arithmetic_and_functions() -> None:
    """Each operand is shifted by plus or minus its error, in all combinations of signs."""
    eps = 0.0
    a = Approx(rand(50), 1e-3 * rand(50, seed=1).abs(), eps)
    b = Approx(2 + rand(50, seed=2).abs(), 1e-3 * rand(50, seed=3).abs(), eps)
    for sign_a in (-1, 1):
        for sign_b in (-1, 1):
            x, y = a.value + sign_a * a.error, b.value + sign_b * b.error
            for bounded, want in (
                (a + b, x + y),
                (a - b, x - y),
                (a * b, x * y),
                (a / b, x / y),
                (a.map(torch.sigmoid, 0, a.value), x.sigmoid()),
            ):
                assert bool(((want - bounded.value).abs() <= bounded.error * (1 + 1e-9)).all())
