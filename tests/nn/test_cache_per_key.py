"""Caches keep the values per key that later tokens need, such as the gates of past keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.nn import Attention, KVCache, StateCache, Transformer, attend
from helpers.cases import rand
from helpers.errors import WrongCalls, raising

LENGTH = 13
PIECES = [5, 1, 3, 1, 1, 2]  # tokens per decoding call


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return q, k, v and the gates of three sequences."""
    shapes = (3, 4, LENGTH, 8), (3, 2, LENGTH, 8), (3, 2, LENGTH, 6)
    gates = -rand(3, 4, LENGTH, seed=5).abs()
    return [*(rand(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)), gates]


def forget(cache: KVCache | StateCache, tensors: list[Tensor], **options: Any) -> Tensor:
    q, k, v, gates = tensors
    options = {"log_gates": gates, **options}
    return attend(cache, q, k, v, "forgetting", enable_gqa=True, **options)


def in_one_call(tensors: list[Tensor], **options: Any) -> Tensor:
    q, k, v, gates = tensors
    options = {"is_causal": True, "enable_gqa": True, **options}
    return attnzoo.attention(q, k, v, "forgetting", log_gates=gates, **options)


def cut(tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[:, :, start:stop] for x in tensors]


def decoded(cache: KVCache, tensors: list[Tensor], **options: Any) -> Tensor:
    parts, start = [], 0
    for count in PIECES:
        parts.append(forget(cache, cut(tensors, start, start + count), **options))
        start += count
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}, {"scale": 0.1}], ids=str)
def test_decoding_equals_one_call(options: dict[str, Any]) -> None:
    inputs, cache = tensors(), KVCache(LENGTH + 2)
    assert cache.per_key == {}
    assert torch.allclose(decoded(cache, inputs, **options), in_one_call(inputs, **options))
    assert list(cache.per_key) == ["log_gates"]
    assert torch.equal(cache.per_key["log_gates"], inputs[3])


def test_module_takes_the_gates_of_the_next_tokens() -> None:
    module, inputs = Attention("forgetting", 4, given=("log_gates",)), tensors()
    cache, parts = module.new_cache(LENGTH), []
    for start, stop in ((0, 9), (9, 10), (10, LENGTH)):
        q, k, v, gates = cut(inputs, start, stop)
        parts.append(module(q, k, v, cache=cache, enable_gqa=True, log_gates=gates))
    assert torch.allclose(torch.cat(parts, dim=2), in_one_call(inputs))


def test_crop_and_reorder_apply_to_values_per_key() -> None:
    """Five beams continue the first nine tokens of three sequences."""
    inputs, cache = tensors(), KVCache(LENGTH)
    decoded(cache, inputs)
    cache.crop(9)
    assert torch.equal(cache.per_key["log_gates"], inputs[3][:, :, :9])
    index = torch.tensor([2, 0, 0, 1, 2])
    cache.reorder(index)
    token = [rand(5, x.shape[1], 1, *x.shape[3:], seed=i) for i, x in enumerate(inputs)]
    token[3] = -token[3].abs()
    longer = [torch.cat([x[index, :, :9], t], dim=2) for x, t in zip(inputs, token, strict=True)]
    assert torch.allclose(forget(cache, token), in_one_call(longer)[:, :, 9:])


def test_an_empty_cache_accepts_other_values_per_key() -> None:
    inputs, cache = tensors(), KVCache(LENGTH)
    decoded(cache, inputs)
    cache.crop(0)
    q, k, v, gates = inputs
    attend(cache, q, k, v, "forgetting", enable_gqa=True, log_gates=-0.1)
    assert cache.per_key == {}
    cache.crop(0)
    forget(cache, [q, k, v, gates.float()])
    assert cache.per_key["log_gates"].dtype == torch.float32
    cache.crop(0)
    attend(cache, q, k, v, "softmax", enable_gqa=True)
    assert cache.per_key == {}


def test_a_failed_call_appends_no_value_per_key() -> None:
    inputs, cache = tensors(), KVCache(LENGTH)
    forget(cache, cut(inputs, 0, 9))
    wrong = cut(inputs, 9, LENGTH)
    wrong[3] = -wrong[3]
    with pytest.raises(ValueError, match="log_gates must be between -1e4 and 0"):
        forget(cache, wrong)
    assert cache.length == 9
    assert torch.allclose(forget(cache, cut(inputs, 9, LENGTH)), in_one_call(inputs)[:, :, 9:])


@pytest.mark.parametrize("positions", ["rope", "none"])
def test_transformer_decodes_with_projected_gates(positions: str) -> None:
    torch.manual_seed(0)
    layers = ["forgetting", ("forgetting", {"log_gates": -0.2}), "softmax"]
    model = Transformer(20, 32, 4, 3, layers, positions, num_kv_heads=2, softcap=5.0)
    model = model.double().eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() > 1:
                x.copy_(0.3 * rand(*x.shape, seed=len(name)))
        tokens = torch.randint(20, (2, 14))
        caches = model.new_caches(16)
        parts = [model(tokens[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 14))]
        assert torch.allclose(torch.cat(parts, dim=1), model(tokens))
        assert [list(cache.per_key) for cache in caches] == [["log_gates"], [], []]
        index = torch.tensor([1, 1, 0])
        for cache in caches:
            cache.reorder(index)
        last = torch.randint(20, (3, 1))
        expected = model(torch.cat([tokens[index], last], dim=1))[:, 14:]
        assert torch.allclose(model(last, caches=caches), expected)


# ---- errors -----------------------------------------------------------------------------------


def after_five(**changed: Any) -> Any:
    """Decode five tokens, then one with other arguments."""
    cache, inputs = KVCache(LENGTH), tensors()
    forget(cache, cut(inputs, 0, 5))
    return forget(cache, cut(inputs, 5, 6), **changed)


def number_then_gates() -> Any:
    cache, inputs = KVCache(LENGTH), tensors()
    forget(cache, cut(inputs, 0, 5), log_gates=-0.1)
    return forget(cache, cut(inputs, 5, 6))


def update(**per_key: Any) -> Any:
    _, k, v, _ = tensors()
    return KVCache(LENGTH).update(k, v, **per_key)


WRONG: WrongCalls = [
    (
        lambda: after_five(log_gates=-0.1),
        ValueError,
        r"log_gates must have one value per key \(B, H, N\), as in the first call",
    ),
    (
        lambda: after_five(log_gates=torch.zeros(4)),
        ValueError,
        r"log_gates must have one value per key \(B, H, N\), as in the first call",
    ),
    (
        number_then_gates,
        ValueError,
        r"log_gates must have no value per key, as in the first call .*got \(3, 4, 1\)",
    ),
    (
        lambda: after_five(log_gates=torch.zeros(3, 4, 6).double()),
        ValueError,
        r"log_gates must have .* \(B, H, N\) with B=3 and N=1 as in k, got \(3, 4, 6\)",
    ),
    (
        lambda: after_five(log_gates=torch.zeros(3, 4, 1)),
        ValueError,
        r"log_gates must be \(3, 4, 1\) torch.float64 on cpu to match the cache, got .*float32",
    ),
    (
        lambda: after_five(log_gates=torch.zeros(3, 4, 1).double().requires_grad_()),
        ValueError,
        "log_gates requires a gradient, which a KVCache does not support",
    ),
    (lambda: update(log_gates=[0.1]), TypeError, "log_gates must be a tensor, got list"),
    (lambda: update(log_gates=torch.ones(4)), ValueError, r"log_gates must .*got \(4,\)"),
    (
        lambda: forget(StateCache(), tensors()),
        ValueError,
        r"forgetting's log_gates must be a number or .* \(H,\) with a StateCache, got "
        r"\(3, 4, 13\): use a KVCache",
    ),
    (
        lambda: attend(StateCache(), *tensors()[:3], "asentmax", beta=torch.ones(3, 4, LENGTH)),
        ValueError,
        "asentmax's beta must be a number or .* use a KVCache",
    ),
]


test_wrong_arguments_raise = raising(WRONG)
