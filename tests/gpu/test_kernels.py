"""On a GPU, the kernels agree with the fp64 definition of every variant.

Each variant runs in a few cases with different dtypes, head dimensions, spans and masks, because
every case compiles its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from helpers.agreement import (
    Inputs,
    bounds,
    by_backend,
    differentiate,
    make,
    outputs,
    reference,
    violations,
)
from helpers.cases import CASES, CAUSAL_ONLY, NO_LSE, NO_SCORE, params_of
from helpers.coverage_table import FLASH, RUNS, VARIANT_BACKENDS
from helpers.packed import CALLS, PackedCall

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

PLAIN = {
    "shape": (600, 600), "dtype": torch.bfloat16, "span": "causal", "mask": "none",
    "mask_gradient": True, "heads": "gqa", "params": "default", "dims": (128, 128),
    "bias": None, "segments": False, "dropout": False, "lse": False, "batch": 2,
}  # fmt: skip
SETTINGS = {
    "causal, bf16, 128": {},
    "full, fp16, 64, keys masked": {
        "shape": (200, 333), "dtype": torch.float16, "span": "full", "mask": "keys",
        "dims": (64, 64), "heads": "3 of 1",
    },
    "window, fp32, 40": {
        "shape": (333, 333), "dtype": torch.float32, "span": "window", "dims": (40, 24),
        "bias": "alibi", "segments": True,
    },
    "causal, bf16, 256": {"shape": (300, 300), "dims": (256, 256), "bias": "table"},
    "masked, bf16, 128": {"shape": (300, 384), "mask": "bool"},
    "masked, bf16, 256": {
        "shape": (130, 257), "mask": "float", "dims": (256, 256), "heads": "2 heads", "lse": True,
    },
}  # fmt: skip


TOKENS = {
    "one query, bf16, 128": {"shape": (1, 5000), "span": "causal", "bias": "table"},
    "four queries, mqa, fp16, 64": {
        "shape": (4, 3000), "dtype": torch.float16, "dims": (64, 64), "mask": "keys",
        "heads": "mqa",
    },
    "two queries, window, fp32, 40": {
        "shape": (2, 3000), "dtype": torch.float32, "span": "window", "window": 1500,
        "dims": (40, 24), "bias": "alibi", "segments": True,
    },
    "nine queries, masked, bf16, 256": {
        "shape": (9, 1111), "mask": "float", "dims": (256, 256), "heads": "3 of 1", "lse": True,
    },
}  # fmt: skip
DECODE = [v for v, reasons in VARIANT_BACKENDS.items() if reasons["decode"] is RUNS]
SHARES = [v for v, reasons in VARIANT_BACKENDS.items() if reasons["flash_shares"] is RUNS]
LINEAR = [v for v, reasons in VARIANT_BACKENDS.items() if reasons["flash_linear"] is RUNS]
# Short sequences, because the fp64 reference of a Taylor form has D² / 2 features per token.
LINEAR_SETTINGS = {
    "causal, bf16": {"shape": (300, 300)},
    "full, fp16, keys masked": SETTINGS["full, fp16, 64, keys masked"],
}


def supported(variant: str, setting: dict[str, Any]) -> dict[str, Any]:
    """A row for `agreement.make`: ``PLAIN`` with the setting, as far as the variant supports it."""
    row = {**PLAIN, **setting}
    if variant in NO_SCORE:
        row.update(bias=None, mask=row["mask"].replace("float", "bool"))
    if variant in NO_LSE:
        row["lse"] = False
    if variant in CAUSAL_ONLY and row["span"] == "full":
        row["span"] = "causal"
    return row


def on_device(inputs: Inputs, device: str) -> Inputs:
    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return x.to(device) if isinstance(x, Tensor) else x

    leaves = {name: move(x) for name, x in inputs.leaves.items()}
    others = {name: move(x) for name, x in inputs.options.items()}
    return replace(
        inputs, leaves=leaves, options=others, do=move(inputs.do), dlse=move(inputs.dlse)
    )


def check(variant: str, backend: str, inputs: Inputs, gradients: bool = True) -> None:
    """Check that results are within the error budget, and that later runs are bit-equal.

    The first launch of a kernel is described, the second recorded, and the third prepared.
    """
    results = by_backend if gradients else outputs
    first, *later = (results(variant, backend, inputs) for _ in range(3))
    exact = reference(variant, inputs)
    exact = {name: exact[name] for name in first}
    messages = violations(backend, first, exact, bounds(variant, backend, inputs))
    assert messages == []
    assert all(torch.equal(run[name], first[name]) for run in later for name in first)


def trained(variant: str, setting: str, device: str) -> Inputs:
    row = supported(variant, SETTINGS[setting])
    if CASES[variant].learned:
        row["params"] = "learned"
    return on_device(make(variant, row, seed=10 * [*SETTINGS].index(setting)), device)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", FLASH)
def test_agrees_with_the_definition(variant: str, setting: str, device: str) -> None:
    check(variant, "flash", trained(variant, setting, device))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", SHARES)
def test_shares_agree_with_the_definition(variant: str, setting: str, device: str) -> None:
    row = supported(variant, {**SETTINGS[setting], "mask_gradient": False})
    check(variant, "flash_shares", on_device(make(variant, row, seed=2), device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("variant", ["topk", "top_p"])
def test_forward_and_backward_select_the_same_keys(
    variant: str, n: int, dtype: torch.dtype, device: str
) -> None:
    """Each key occurs four times. With values and dO of 1 and 0, out and dV are the weights."""
    q, k = torch.randn(2, 1, 2, n, 64, device=device).to(dtype).unbind()
    k = k[:, :, : n // 4].repeat(1, 1, 4, 1)
    unit = torch.eye(n, device=device, dtype=dtype).expand(1, 2, n, n).contiguous()
    v = unit.clone().requires_grad_()
    params = {"top_k": 23} if variant == "topk" else {"p": 0.8}
    out = attnzoo.attention(q, k, v, variant, scale=0.25, backend="flash", **params)
    (dv,) = torch.autograd.grad(out, v, unit)
    assert torch.equal(out > 0, dv.mT > 0)
    if variant == "topk":
        assert bool(((out > 0).sum(-1) == 23).all())
    else:  # the softmax weights of the keys reach p, and without the smallest they do not
        w = (0.25 * q.double() @ k.double().mT).softmax(-1).where(out > 0, 0.0)
        smallest = w.masked_fill(out <= 0, 1.0).amin(-1)
        assert bool((w.sum(-1) > 0.8 - 1e-3).all())
        assert bool((w.sum(-1) - smallest < 0.8 + 1e-3).all())


@pytest.mark.parametrize("dims", [(32, 64), (16, 128)])
@pytest.mark.parametrize("setting", LINEAR_SETTINGS)
@pytest.mark.parametrize("variant", LINEAR)
def test_linear_forms_agree_with_the_definition(
    variant: str, setting: str, dims: tuple[int, int], device: str
) -> None:
    row = supported(variant, {**LINEAR_SETTINGS[setting], "dims": dims})
    check(variant, "flash_linear", on_device(make(variant, row, seed=1), device))


@pytest.mark.parametrize("setting", TOKENS)
@pytest.mark.parametrize("variant", DECODE)
def test_decode_agrees_with_the_definition(variant: str, setting: str, device: str) -> None:
    row = supported(variant, TOKENS[setting])
    check(variant, "decode", on_device(make(variant, row, seed=3), device), gradients=False)


@pytest.mark.parametrize("variant", LINEAR)
def test_decoding_with_a_state_agrees_with_the_whole_sequence(variant: str, device: str) -> None:
    q, k, v = torch.randn(3, 1, 4, 300, 16, device=device, dtype=torch.bfloat16).unbind()
    params = params_of(variant, 300)
    expected = attnzoo.attention(q, k, v, variant, is_causal=True, **params)
    cache, outs = attnzoo.nn.StateCache(), []
    for start, stop in ((0, 200), (200, 298), (298, 299), (299, 300)):
        outs.append(
            attnzoo.nn.attend(cache, *(x[:, :, start:stop] for x in (q, k, v)), variant, **params)
        )
    assert torch.allclose(torch.cat(outs, dim=2), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("variant", FLASH)
def test_compiles_without_graph_breaks(variant: str, device: str) -> None:
    torch.compiler.reset()  # all variants share one function, which may be compiled eight times
    inputs = trained(variant, "causal, bf16, 128", device)

    def attend(**arguments: Any) -> Tensor:
        return attnzoo.attention(variant=variant, backend="flash", **arguments)

    eager, compiled = (
        differentiate(function(**arguments), leaves, inputs)
        for function in (attend, torch.compile(attend, fullgraph=True))
        for leaves, arguments in [inputs.arguments()]
    )
    for name, x in eager.items():
        assert torch.allclose(compiled[name], x, rtol=2e-2, atol=2e-2), name


@pytest.mark.parametrize("backend", ["flash", "decode"])
def test_a_new_length_does_not_recompile(backend: str, device: str) -> None:
    from attnzoo.backends.triton.decode.kernels import decode
    from attnzoo.backends.triton.flash.forward import flash_forward

    def compiled() -> int:
        kernel = flash_forward if backend == "flash" else decode
        return sum(len(cache[0]) for cache in kernel.device_caches.values())

    counts = []
    for n in (128, 1, 77, 1024, 4097):
        q, k, v = torch.randn(3, 1, 2, n, 64, device=device, dtype=torch.bfloat16).unbind()
        q = q[:, :, -1:] if backend == "decode" else q
        attnzoo.attention(q, k, v, "sigmoid", is_causal=True, backend=backend)
        counts.append(compiled())
    assert counts == [counts[0]] * 5


# ---- devices, addresses and graphs ------------------------------------------------------------


def close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.cpu().float(), y.cpu().float(), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices")
@pytest.mark.parametrize(("variant", "backend"), CALLS)
def test_a_device_that_is_not_the_current_one_gives_the_same_results(
    variant: str, backend: str
) -> None:
    with torch.cuda.device(0):
        first, second = (
            PackedCall(variant, backend, device=f"cuda:{n}").outputs_and_gradients() for n in (0, 1)
        )
        assert all(x.device == torch.device("cuda:1") for x in second)
        assert all(map(close, second, first))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("start", [4, 3])
@pytest.mark.parametrize(("variant", "backend"), CALLS)
def test_unaligned_addresses_give_the_same_results(
    variant: str, backend: str, start: int, device: str
) -> None:
    """q, k and v start 8 or 6 bytes after a multiple of 16."""
    call = PackedCall(variant, backend, start, device)
    assert call.slices()[0].data_ptr() % 16 == 2 * start
    aligned = PackedCall(variant, backend, device=device).outputs_and_gradients()
    assert all(map(close, call.outputs_and_gradients(), aligned))


def captured(work: Callable[[], list[Tensor]], cuda: Any) -> tuple[Any, list[Tensor]]:
    """A graph of ``work`` and the tensors it writes, after three runs on another stream."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(3):
            work()
    cuda.current_stream().wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        results = work()
    return graph, results


@pytest.mark.parametrize(("variant", "backend"), CALLS)
def test_a_captured_graph_equals_eager_calls_for_new_values(
    variant: str, backend: str, device: str, cuda: Any
) -> None:
    """Forward and backward are captured once, and replayed for other values of q, k and v."""
    call = PackedCall(variant, backend, device=device)
    graph, results = captured(call.outputs_and_gradients, cuda)
    for seed in (1, 2):
        call.fill(seed)
        graph.replay()
        cuda.synchronize()
        assert all(map(torch.equal, results, call.outputs_and_gradients()))
