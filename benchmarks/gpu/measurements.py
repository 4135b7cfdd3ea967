"""Questions about speed that only a GPU answers. Each returns figures; none of them can fail."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import attnzoo

Figures = dict[str, float]
HALF = torch.bfloat16


def milliseconds(call: Callable[[], object]) -> float:
    """The median time of five calls, after one that is not timed, with the host's part."""
    call()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def drawn(
    device: str, batch: int, heads: int, queries: int, keys: int, kv_heads: int
) -> list[Tensor]:
    shapes = (batch, heads, queries, 128), *[(batch, kv_heads, keys, 128)] * 2
    return [torch.randn(shape, device=device, dtype=HALF) for shape in shapes]


def host(device: str) -> tuple[bool, Figures]:
    """Host time of a repeated call with few tokens, in microseconds."""
    figures = {}
    q, k, v = drawn(device, 2, 4, 128, 128, 2)
    for variant, backend in (("softmax", "flash"), ("softmax", "sdpa"), ("entmax", "flash"),
                             ("softmax", "decode")):  # fmt: skip
        rows = q[:, :, -1:] if backend == "decode" else q
        attend = partial(
            attnzoo.attention, rows, k, v, variant, backend=backend, is_causal=True, enable_gqa=True
        )
        with torch.no_grad():
            for _ in range(5):
                attend()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                attend()
            figures[f"{variant} {backend} us"] = (time.perf_counter() - start) / 200 * 1e6
            torch.cuda.synchronize()
    return True, figures


def new_lengths(device: str) -> tuple[bool, Figures]:
    """A decoding step with a new number of keys. cuDNN builds a plan for each."""
    figures = {}
    for backend in ("sdpa", "decode", "flash"):
        times = []
        for keys in range(1001, 1013):
            q, k, v = drawn(device, 1, 8, 1, keys, 2)
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                attnzoo.attention(q, k, v, backend=backend, is_causal=True, enable_gqa=True)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        figures[f"{backend} ms"] = statistics.median(times[2:])
    return True, figures


def key_masks(device: str) -> tuple[bool, Figures]:
    """Time and memory of padding masks (B, 1, 1, N), on torch's kernels and on ours."""
    q, k, v = drawn(device, 2, 16, 8192, 8192, 16)
    mask = torch.rand(2, 1, 1, 8192, device=device) > 0.1
    figures = {}
    for backend in ("sdpa", "flash"):
        attend = partial(attnzoo.attention, q, k, v, backend=backend, attn_mask=mask)
        with torch.no_grad():
            figures[f"{backend} ms"] = milliseconds(attend)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attend()
            torch.cuda.synchronize()
            figures[f"{backend} MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return True, figures


def few_programs(device: str) -> tuple[bool, Figures]:
    """Calls with few programs: one KV head in the backward, and chunks of a prompt.

    Each is compared with a call that has the same number of scores in many programs.
    """
    figures = {}
    for name, heads, kv_heads in (("one KV head", 32, 1), ("32 KV heads", 32, 32)):
        q, k, v = (x.requires_grad_() for x in drawn(device, 1, heads, 2048, 2048, kv_heads))
        out = attnzoo.attention(q, k, v, backend="flash", is_causal=True, enable_gqa=True)
        do = out.detach()
        backward = partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
        figures[f"backward, {name}, ms"] = milliseconds(backward)
    for queries, batch in ((65, 1), (256, 1), (1000, 1), (256, 8)):
        q, k, v = drawn(device, batch, 8, queries, 32_768 // batch, 8)
        for backend in ("flash", "sdpa"):
            attend = partial(attnzoo.attention, q, k, v, backend=backend)
            with torch.no_grad():
                name = f"{queries} queries, B = {batch}, {backend}, ms"
                figures[name] = milliseconds(attend)
    return True, figures


def thresholds_in_decoding(device: str) -> tuple[bool, Figures]:
    """Decoding one token against 65 536 keys with a threshold, beside softmax."""
    q, k, v = drawn(device, 1, 32, 1, 65_536, 8)
    figures = {}
    for variant in ("softmax", "sparsemax", "entmax"):
        attend = partial(attnzoo.attention, q, k, v, variant, backend="decode", enable_gqa=True)
        with torch.no_grad():
            figures[f"{variant} ms"] = milliseconds(attend)
    return True, figures


MEASUREMENTS = {
    "host": host,
    "new-lengths": new_lengths,
    "key-masks": key_masks,
    "few-programs": few_programs,
    "thresholds-in-decoding": thresholds_in_decoding,
}
