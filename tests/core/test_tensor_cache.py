"""Counts and log n that are cached for repeated calls equal those of a first call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.core import tensor_cache
from attnzoo.core.tensor_cache import TensorCache
from attnzoo.functional import call_cache
from helpers.cases import rand

SIZES = {"queries": 40, "keys": 50}  # more scores than `visibility.SMALL_SCORES`


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    call_cache._CACHE.clear()
    tensor_cache.clear()


def attend(variant: str, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    q = rand(2, 3, SIZES["queries"], 8, seed=1).to(dtype)
    k, v = (rand(2, 3, SIZES["keys"], 8, seed=n).to(dtype) for n in (2, 3))
    return attnzoo.attention(q, k, v, variant, backend="tiled", **options)


CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "window": 5},
    {"window": (4, 3)},
    {"is_causal": True, "dtype": torch.float64},
    {"is_causal": True, "attn_mask": torch.arange(50) % 3 != 1},
    {"segment_ids": (torch.arange(40).expand(2, 40) // 9, torch.arange(50).expand(2, 50) // 9)},
)


@pytest.mark.parametrize("variant", ["log_n", "ssmax", "sigmoid", "asentmax"])
def test_calls_of_other_layouts_and_dtypes_do_not_disturb_each_other(variant: str) -> None:
    expected = []
    for options in CALLS:
        forget()
        expected.append(attend(variant, **options))
    forget()
    for _ in range(3):
        for options, want in zip(CALLS, expected, strict=True):
            assert torch.equal(attend(variant, **options), want), options


def test_repeated_call_computes_log_n_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnzoo.core import visibility

    made: list[object] = []
    count = visibility._count_visible

    def counting(call: visibility.Visibility) -> Tensor:
        made.append(call)
        return count(call)

    monkeypatch.setattr(visibility, "_count_visible", counting)
    for _ in range(5):
        attend("ssmax", is_causal=True)
    assert len(made) == 2  # the first call is not cached yet


def test_tensors_of_inference_mode_are_not_used_with_gradients() -> None:
    s = torch.full((3,), 0.3, requires_grad=True)
    want = torch.autograd.grad(attend("ssmax", s=s, is_causal=True).square().sum(), s)[0]
    forget()
    for _ in range(2):
        with torch.inference_mode():
            attend("ssmax", s=s, is_causal=True)
    for _ in range(3):
        out = attend("ssmax", s=s, is_causal=True)
        assert torch.equal(torch.autograd.grad(out.square().sum(), s)[0], want)


def counted(values: list[float]) -> Any:
    """A function that returns a new tensor in each call, with the next of the values."""
    left = iter(values)
    return lambda: torch.tensor([next(left)])


def test_tensor_is_made_again_after_a_change_of_it_or_of_its_source() -> None:
    layout, source = TensorCache(torch.device("cpu")), torch.zeros(1)
    make = counted([1.0, 2.0, 3.0])
    first = layout.get("x", make, source)
    assert layout.get("x", make, source) is first
    first.add_(1)
    assert layout.get("x", make, source).item() == 2.0
    source.add_(1)
    assert layout.get("x", make, source).item() == 3.0
    assert layout.get("x", make, source).item() == 3.0


def test_layouts_do_not_share_tensors() -> None:
    make = counted([1.0, 2.0])
    first, second = TensorCache(torch.device("cpu")), TensorCache(torch.device("cpu"))
    assert [x.get("x", make).item() for x in (first, second, first)] == [1.0, 2.0, 1.0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "MOST_BYTES", 20_000)
    layout = TensorCache(torch.device("cpu"))
    for n in range(100):
        layout.get(n, lambda: torch.zeros(500))
        assert sum(entry[0].nbytes for entry in tensor_cache._tensors.values()) <= 20_000
    assert tensor_cache._tensors
    tensor_cache.clear()
    layout.get("large", lambda: torch.zeros(5000))  # more than a quarter
    assert not tensor_cache._tensors


def test_tensor_with_a_gradient_is_not_cached() -> None:
    layout = TensorCache(torch.device("cpu"))
    layout.get("x", lambda: torch.zeros(1, requires_grad=True))
    assert not tensor_cache._tensors


def test_gpu_tensors_belong_to_a_stream_and_not_to_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, capturing, device = {0: 7, 1: 7}, False, 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.get, raising=False)
    make = counted([1.0, 2.0, 3.0, 4.0])
    layout = TensorCache(torch.device("cuda", 1))
    first = layout.get("x", make)
    assert layout.get("x", make) is first
    assert layout.holds(first, "x")
    streams[0] = 8  # of another device
    assert layout.get("x", make) is first
    streams[1] = 8
    assert layout.get("x", make).item() == 2.0
    assert not layout.holds(first, "x")
    capturing = True
    assert layout.get("x", make).item() == 3.0
    assert not layout.holds(first, "x")
    capturing = False
    assert layout.get("x", make).item() == 2.0
    streams[1] = 7
    assert layout.get("x", make) is first
    device = 0  # whether a graph captures the stream of another device is not known
    assert layout.get("x", make).item() == 4.0


def test_a_device_without_streams_keeps_nothing() -> None:
    layout = TensorCache(torch.device("meta"))
    layout.get("x", lambda: torch.zeros(1))
    assert not tensor_cache._tensors


def test_nothing_is_cached_under_a_mode_or_transform() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layout = TensorCache(torch.device("cpu"))
    with FakeTensorMode():
        layout.get("x", lambda: torch.zeros(1))
    torch.func.grad(lambda x: (x * layout.get("x", lambda: torch.zeros(1))).sum())(torch.ones(1))
    assert not tensor_cache._tensors


def test_replaced_tensors_do_not_count() -> None:
    layout = TensorCache(torch.device("cpu"))
    for _ in range(3):
        layout.get("x", lambda: torch.zeros(100)).add_(1)
    assert tensor_cache._bytes == 400 + tensor_cache.OVERHEAD
