"""On a GPU, the kernels agree with the fp64 definition of every variant.

Each variant runs in a few cases with different dtypes, head dimensions, spans and masks, because
every case compiles its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from helpers.agreement import Inputs, by_backend, disagreements, make, outputs
from helpers.cases import CASES, NO_LSE, NO_SCORE, params_of
from helpers.coverage_table import FLASH, RUNS, VARIANT_BACKENDS
from helpers.packed import CALLS, PackedCall

pytestmark = pytest.mark.gpu

PLAIN = {
    "shape": (1000, 1000), "dtype": torch.bfloat16, "span": "causal", "mask": "none",
    "mask_gradient": False, "heads": "gqa", "params": "default", "dims": (128, 128),
    "alibi": False, "segments": False, "dropout": False, "lse": False, "batch": 2,
}  # fmt: skip
SETTINGS = {
    "causal, bf16, 128": {},
    "full, fp16, 64, keys masked": {
        "shape": (200, 333), "dtype": torch.float16, "span": "full", "mask": "keys",
        "dims": (64, 64), "heads": "3 of 1",
    },
    "window, fp32, 40": {
        "shape": (333, 333), "dtype": torch.float32, "span": "window", "dims": (40, 24),
        "alibi": True, "segments": True,
    },
    "causal, bf16, 256": {"shape": (300, 300), "dims": (256, 256)},
    "masked, bf16, 128": {"shape": (300, 384), "mask": "bool"},
    "masked, bf16, 256": {
        "shape": (130, 257), "mask": "float", "dims": (256, 256), "heads": "2 heads", "lse": True,
    },
}  # fmt: skip


def on_gpu(inputs: Inputs) -> Inputs:
    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return x.cuda() if isinstance(x, Tensor) else x

    leaves = {name: move(x) for name, x in inputs.leaves.items()}
    rest = {name: move(x) for name, x in inputs.rest.items()}
    return replace(inputs, leaves=leaves, rest=rest, do=move(inputs.do), dlse=move(inputs.dlse))


def check(variant: str, backend: str, inputs: Inputs) -> None:
    """Check that results are within the error budget, and that two runs are bit-equal."""
    assert disagreements(variant, backend, inputs) == []
    first, second = (by_backend(variant, backend, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def cases() -> Iterator[Any]:
    for variant in FLASH:
        for seed, (name, changes) in enumerate(SETTINGS.items()):
            case = {**PLAIN, **changes}
            if CASES[variant].learned:
                case["params"] = "learned"
            if variant in NO_SCORE:
                case.update(alibi=False, mask=case["mask"].replace("float", "bool"))
            case["lse"] = case["lse"] and variant not in NO_LSE
            yield pytest.param(variant, case, seed, id=f"{variant}: {name}")


@pytest.mark.parametrize(("variant", "case", "seed"), list(cases()))
def test_agrees_with_the_definition(variant: str, case: dict[str, Any], seed: int) -> None:
    inputs = on_gpu(make(variant, case, seed=10 * seed))
    check(variant, "flash", inputs)


LINEAR = [v for v, reasons in VARIANT_BACKENDS.items() if reasons["flash_linear"] is RUNS]
LINEAR_SETTINGS = ("causal, bf16, 128", "full, fp16, 64, keys masked")


@pytest.mark.parametrize("dims", [(64, 64), (16, 128)])
@pytest.mark.parametrize("case", LINEAR_SETTINGS)
@pytest.mark.parametrize("variant", LINEAR)
def test_linear_forms_agree_with_the_definition(
    variant: str, case: str, dims: tuple[int, int]
) -> None:
    inputs = on_gpu(make(variant, {**PLAIN, **SETTINGS[case], "dims": dims}, seed=1))
    check(variant, "flash_linear", inputs)


TOKENS = {
    "one query, bf16, 128": {"shape": (1, 5000), "span": "causal"},
    "four queries, mqa, fp16, 64": {
        "shape": (4, 3000), "dtype": torch.float16, "dims": (64, 64), "mask": "keys",
        "heads": "mqa",
    },
    "two queries, window, fp32, 40": {
        "shape": (2, 3000), "dtype": torch.float32, "span": "window", "window": 1500,
        "dims": (40, 24), "alibi": True, "segments": True,
    },
    "nine queries, masked, bf16, 256": {
        "shape": (9, 1111), "mask": "float", "dims": (256, 256), "heads": "3 of 1", "lse": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("variant", FLASH)
def test_decode_agrees_with_the_definition(variant: str, name: str) -> None:
    case = {**PLAIN, **TOKENS[name]}
    if variant in NO_SCORE:
        case.update(alibi=False, mask=case["mask"].replace("float", "bool"))
    case["lse"] = case["lse"] and variant not in NO_LSE
    inputs = on_gpu(make(variant, case, seed=3))
    runs = [outputs(variant, "decode", inputs) for _ in range(2)]
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
    assert disagreements(variant, "decode", inputs, gradients=False) == []


@pytest.mark.parametrize("variant", LINEAR)
def test_decoding_with_a_state_agrees_with_the_whole_sequence(variant: str) -> None:
    q, k, v = torch.randn(3, 1, 4, 300, 16, device="cuda", dtype=torch.bfloat16).unbind()
    params = params_of(variant, 300)
    whole = attnzoo.attention(q, k, v, variant, is_causal=True, **params)
    cache, outs = attnzoo.nn.StateCache(), []
    for start, stop in ((0, 200), (200, 298), (298, 299), (299, 300)):
        outs.append(
            attnzoo.nn.attend(cache, *(x[:, :, start:stop] for x in (q, k, v)), variant, **params)
        )
    assert torch.allclose(torch.cat(outs, dim=2), whole, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("variant", FLASH)
def test_compiles_without_graph_breaks(variant: str) -> None:
    torch.compiler.reset()  # all variants share one function, which may be compiled eight times
    q, k, v = torch.randn(3, 1, 4, 256, 64, device="cuda", dtype=torch.bfloat16).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnzoo.attention(
            q, k, v, variant, is_causal=True, backend="flash", **params_of(variant)
        )

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for have, want in zip(*results, strict=True):
        assert torch.allclose(have, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["flash", "decode"])
def test_a_new_length_does_not_recompile(backend: str) -> None:
    from attnzoo.backends.triton.decode.kernels import decode
    from attnzoo.backends.triton.flash.forward import flash_forward

    def compiled() -> int:
        kernel = flash_forward if backend == "flash" else decode
        return sum(len(cache[0]) for cache in kernel.device_caches.values())

    for n in (128, 1, 77, 1024, 4097):
        q, k, v = torch.randn(3, 1, 2, n, 64, device="cuda", dtype=torch.bfloat16).unbind()
        q = q[:, :, -1:] if backend == "decode" else q
        attnzoo.attention(q, k, v, "sigmoid", is_causal=True, backend=backend)
        if n == 128:
            once = compiled()
    assert compiled() == once


# ---- devices, addresses and graphs ------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("variant", "backend"), CALLS)
def test_a_device_that_is_not_the_current_one_gives_the_same_results(
    variant: str, backend: str
) -> None:
    with torch.cuda.device(0):
        first, second = (PackedCall(variant, backend, device=f"cuda:{n}").run() for n in (0, 1))
        for want, have in zip(first, second, strict=True):
            assert have.device == torch.device("cuda:1")
            assert torch.allclose(have.cpu().float(), want.cpu().float(), rtol=2e-2, atol=2e-2)
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("start", [4, 3])
@pytest.mark.parametrize(("variant", "backend"), CALLS)
def test_unaligned_addresses_give_the_same_results(variant: str, backend: str, start: int) -> None:
    """q, k and v start 8 or 6 bytes after a multiple of 16."""
    call = PackedCall(variant, backend, start, "cuda")
    assert call.slices()[0].data_ptr() % 16 == 2 * start
    aligned = PackedCall(variant, backend, device="cuda").run()
    for have, want in zip(call.run(), aligned, strict=True):
        assert torch.allclose(have.float(), want.float(), rtol=2e-2, atol=2e-2)


def captured(work: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of ``work`` and the tensors it writes, after three runs on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


@pytest.mark.parametrize(("variant", "backend"), CALLS)
def test_a_captured_graph_equals_eager_calls_for_new_values(variant: str, backend: str) -> None:
    """Forward and backward are captured once, and replayed for other values of q, k and v."""
    call = PackedCall(variant, backend, device="cuda")
    graph, results = captured(call.run)
    for seed in (1, 2):
        call.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, call.run(), strict=True))
