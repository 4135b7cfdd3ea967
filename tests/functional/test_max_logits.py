"""return_max_logits: the largest visible scale · q·k of each head, on every backend."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.core.call import Call
from attnzoo.functional.prepare import prepare
from attnzoo.nn import Attention, KVCache, Laser, StateCache, attend
from helpers.cases import CASES, NO_SCORE, params_of, rand
from helpers.coverage_table import FEATURE_BACKENDS, RUNS
from helpers.features import feature

BACKENDS = ("eager", "tiled", "sdpa", "flash", "decode")
# Features of which one kernel path each is tested quickly.
QUICK = ("causal", "bool mask, causal", "float mask", "segments", "GQA", "no keys, causal")


def definition(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """max z over the visible pairs and the batch, in fp64."""
    z = call.scale * (q.double() @ k.double().repeat_interleave(call.group, 1).mT)
    visible = call.visible.expand(z.shape)
    largest = [zs[seen] for zs, seen in zip(z.unbind(1), visible.unbind(1), strict=True)]
    return torch.stack([x.max() if len(x) else x.new_tensor(-torch.inf) for x in largest])


def call_of(arguments: dict[str, Any], variant: str = "softmax") -> Call:
    options = dict(arguments)
    return prepare(options.pop("q"), options.pop("k"), options.pop("v"), variant, options).call


def cases() -> list[Any]:
    rows = []
    for name, table in FEATURE_BACKENDS.items():
        for backend in BACKENDS:
            if table.get(backend, RUNS) is not RUNS:
                continue
            if backend not in ("tiled", "flash") and name not in QUICK:
                continue  # sdpa and decode use the functions of these two
            kernel = backend in ("flash", "decode")
            marks = [pytest.mark.interpreter] if kernel else []
            if kernel and not (name in QUICK and backend == "flash"):
                marks.append(pytest.mark.slow)
            rows.append(pytest.param(backend, name, marks=marks, id=f"{backend}-{name}"))
    return rows


@pytest.mark.parametrize(("backend", "name"), cases())
def test_maxima_agree_with_the_definition(backend: str, name: str) -> None:
    arguments = feature(name, gradient=False)
    want = definition(arguments["q"], arguments["k"], call_of(arguments))
    result = attnzoo.attention(**arguments, backend=backend, return_max_logits=True)
    largest = result[-1]
    assert len(result) == 2 + arguments.get("return_lse", False)
    assert largest.dtype == (torch.float64 if name == "fp64" else torch.float32)
    assert largest.shape == want.shape
    assert torch.allclose(largest.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", [name for name in CASES if name not in NO_SCORE])
def test_every_variant_with_logits(variant: str) -> None:
    """The maximum is before gain, bias and softcap, whatever the variant does with the logits."""
    arguments = {**feature("GQA", gradient=False), "is_causal": True, **params_of(variant)}
    if variant in CASES and attnzoo.get_variant(variant).has_logits:
        arguments["softcap"] = 0.5
    plain = {name: x for name, x in arguments.items() if name in ("q", "k", "v", "is_causal")}
    want = definition(plain["q"], plain["k"], call_of({**plain, "enable_gqa": True}))
    *_, largest = attnzoo.attention(**arguments, variant=variant, return_max_logits=True)
    assert torch.allclose(largest.double(), want, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in CASES if not attnzoo.get_variant(name).has_logits]
)
def test_variants_without_logits_raise(name: str) -> None:
    q = rand(1, 2, 4, 8)
    options = {"return_max_logits": True, "is_causal": True, **params_of(name)}
    message = f"{name} has no logits: return_max_logits must be False"
    with pytest.raises(ValueError, match=message):
        attnzoo.attention(q, q, q, name, **options)
    plan = attnzoo.explain(q, q, q, name, **options)
    assert plan.chosen is None
    assert message in str(plan)


@pytest.mark.parametrize("backend", ["eager", "tiled", None])
def test_gradients_and_outputs_are_those_without_the_maxima(backend: str | None) -> None:
    q, k, v = (rand(2, 3, 7, 4, seed=i).requires_grad_() for i in range(3))
    for _ in range(2):  # the second call is cached
        out, lse, largest = attnzoo.attention(
            q, k, v, return_lse=True, return_max_logits=True, backend=backend
        )
        alone, lse_alone = attnzoo.attention(q, k, v, return_lse=True, backend=backend)
        assert torch.equal(out, alone)
        assert torch.equal(lse, lse_alone)
        assert not largest.requires_grad
        pairs = (torch.autograd.grad(x.sum() + y.sum(), (q, k, v)) for x, y in
                 ((out, lse), (alone, lse_alone)))  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(*pairs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", pytest.param("flash", marks=pytest.mark.interpreter)])
def test_16_bit_inputs_have_maxima_in_fp32(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (rand(1, 2, 20, 8, seed=i).to(dtype) for i in range(3))
    *_, largest = attnzoo.attention(q, k, v, backend=backend, return_max_logits=True, scale=-2.0)
    want = -2.0 * (q.double() @ k.double().mT)
    assert largest.dtype == torch.float32
    assert torch.allclose(largest.double(), want.amax((0, 2, 3)), rtol=1e-6)


def test_a_head_without_visible_keys_has_maximum_minus_infinity() -> None:
    q = rand(2, 3, 5, 4)
    mask = torch.ones(1, 3, 1, 5, dtype=torch.bool)
    mask[:, 1] = False
    for backend in ("eager", "tiled"):
        largest = attnzoo.attention(
            q, q, q, attn_mask=mask, backend=backend, return_max_logits=True
        )[1]
        assert largest.isinf().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "tiled",
        *(pytest.param(x, marks=pytest.mark.interpreter) for x in ("flash", "decode")),
    ],
)
def test_a_visible_nan_gives_nan_and_a_hidden_one_does_not(backend: str) -> None:
    q, k = rand(1, 3, 2, 8).float(), rand(1, 3, 40, 8, seed=1).float()
    k[:, 1, 3], k[:, 2, 5] = torch.nan, torch.nan
    mask = torch.ones(1, 1, 1, 40, dtype=torch.bool)
    mask[..., 5] = False
    largest = attnzoo.attention(q, k, k, attn_mask=mask, backend=backend, return_max_logits=True)[1]
    assert largest.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("lengths", [[3, 0, 5], [4, 4], [0, 0]])
@pytest.mark.parametrize("backend", [None, "eager", "tiled"])
def test_varlen(lengths: list[int], backend: str | None) -> None:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (rand(sum(lengths), 2, 4, seed=i) for i in range(3))
    out, lse, largest = attnzoo.varlen_attention(
        q, k, v, ends, ends, 5, 5, is_causal=True, return_lse=True, return_max_logits=True,
        backend=backend,
    )  # fmt: skip
    assert out.shape == q.shape
    assert lse.shape == q.shape[1::-1]
    want = torch.full((2,), -torch.inf, dtype=torch.float64)
    for start, stop in pairwise(ends.tolist()):
        z = torch.einsum("ihd,jhd->hij", q[start:stop], k[start:stop]) / 2
        n = stop - start
        seen = z[:, torch.ones(n, n).tril().bool()]
        want = torch.maximum(want, seen.amax(-1)) if n else want
    assert torch.allclose(largest, want)


def test_attention_weights_and_modules_return_it() -> None:
    q, k, v = (rand(1, 2, 6, 4, seed=i) for i in range(3))
    want = attnzoo.attention(q, k, v, return_max_logits=True)[1]
    weights, lse, largest = attnzoo.attention_weights(
        q, k, v, return_lse=True, return_max_logits=True
    )
    assert weights.shape == (1, 2, 6, 6)
    assert lse.shape == (1, 2, 6)
    assert torch.equal(largest, want)
    assert torch.equal(Attention("softmax", 2)(q, k, v, return_max_logits=True)[1], want)
    out, weights, largest = Attention("softmax", 2)(
        q, k, v, return_max_logits=True, need_weights=True
    )
    assert torch.allclose(out, weights @ v)
    assert torch.equal(largest, want)
    with pytest.raises(ValueError, match="return_max_logits must be False for Laser"):
        Laser("softmax", 2, 8)(q, k, v, return_max_logits=True)


def test_caches() -> None:
    q, k, v = (rand(1, 2, 6, 4, seed=i) for i in range(3))
    want = attnzoo.attention(q[:, :, 5:], k, v, return_max_logits=True)[1]
    cache = KVCache(8)
    parts = (slice(0, 5), slice(5, 6))
    for part in parts:
        tensors = (x[:, :, part] for x in (q, k, v))
        _, largest = attend(cache, *tensors, "softmax", return_max_logits=True)
    assert torch.equal(largest, want)
    with pytest.raises(ValueError, match="return_max_logits must be False with a StateCache"):
        attend(StateCache(), q, k, v, "taylor", return_max_logits=True)


def test_a_number_is_not_a_flag() -> None:
    q = rand(1, 2, 6, 4)
    with pytest.raises(TypeError, match="return_max_logits must be a bool, got 1"):
        attnzoo.attention(q, q, q, return_max_logits=1)  # type: ignore[call-overload]


@pytest.mark.slow
def test_compiles_without_graph_break() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attnzoo.attention(q, k, v, return_max_logits=True, is_causal=True, backend="tiled")

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n in (9, 12):
        q, k, v = (rand(2, 4, n, 8, seed=i).requires_grad_() for i in range(3))
        for have, want in zip(compiled(q, k, v), function(q, k, v), strict=True):
            assert torch.allclose(have, want, atol=1e-12)


@pytest.mark.slow
def test_padding_of_compiled_varlen_calls_does_not_count() -> None:
    """With a window, a query would see earlier keys in the place of the padding before it."""
    q, k, v = rand(3, 2, 4), rand(9, 2, 4, seed=1), rand(9, 2, 4, seed=2)
    k[1] = k[6] = 50 * q[0]  # the key before the first one that query 0 sees, and a later sequence
    of_q, of_k = torch.tensor([0, 2, 3]), torch.tensor([0, 5, 9])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attnzoo.varlen_attention(
            q, k, v, of_q, of_k, 4, 6, is_causal=True, window=2, return_lse=True,
            return_max_logits=True,
        )  # fmt: skip

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for have, want in zip(compiled(q, k, v), function(q, k, v), strict=True):
        assert torch.allclose(have, want)
