"""Scores and weights at the ends of the range of numbers: large biases, tiny and huge weights."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from test_flash import factors
from torch import Tensor

import attnzoo
from attnzoo.backends import BACKENDS
from attnzoo.core.activations import (
    ENTMAX15,
    EXP,
    Q_EXP,
    RELU2,
    RELU_POWER,
    SIGMOID,
    SPARSEMAX,
)
from attnzoo.core.arguments import check_call
from helpers.agreement import Inputs, disagreements, make
from helpers.cases import NO_LSE, NO_SCORE, rand
from helpers.crossed import crossed

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs_of(variant: str, dtype: torch.dtype, shape: tuple[int, int], **others: Any) -> Inputs:
    case = {**{name: levels[0] for name, levels in factors(variant)}, "batch": 1, "dtype": dtype}
    case.update(shape=shape, params="default", lse=variant not in NO_LSE, **others)
    return make(variant, case)


def results(
    backend: str, form: attnzoo.Pairwise, do: Tensor, *tensors: Tensor, **options: Any
) -> list[Tensor]:
    """The output, and the gradients of q, k and v if the backend has them."""
    leaves = [x.detach().clone().requires_grad_(backend != "decode") for x in tensors]
    out = BACKENDS[backend].run(*leaves, check_call(*leaves, **options), form)[0]
    if backend == "decode":
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def assert_close(results: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """``tolerance`` is relative to the largest entry of each tensor."""
    for have, exact in zip(results, want, strict=False):
        assert bool(exact.isfinite().all())
        most = tolerance * float(exact.double().abs().max())
        assert float((have.double() - exact.double()).abs().max()) <= most


# ---- rows that do not exist --------------------------------------------------------------------

MASKS = {"keys": (), "batch": (1, 1, 1), "heads": (1, 2, 1), "queries": (1, 1, None)}
VARIANTS = (
    "softmax",
    "sink",
    "sigmoid",
    "relu",
    "relu2",
    "silu",
    "softpick",
    "entmax",
    "scale_invariant",
)


@pytest.mark.parametrize(
    ("variant", "kind", "dtype"),
    [
        pytest.param(variant, kind, dtype, id=f"{variant}-{kind}-{str(dtype)[6:]}")
        for (variant, kind), dtype in zip(
            [(v, m) for v in VARIANTS for m in MASKS], cycle(DTYPES), strict=False
        )
    ],
)
@pytest.mark.parametrize("shape", [(5, 8), pytest.param((37, 45), marks=pytest.mark.slow)])
def test_large_mask_entries_with_a_partly_filled_block(
    variant: str, kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """e^100 of a row beyond the last query would be ∞, and ∞ times its dO of 0 NaN."""
    assert variant not in NO_SCORE
    inputs = inputs_of(variant, dtype, shape)
    mask = torch.full((shape[1],), 100.0, dtype=dtype)
    mask[1] = 97.0
    sizes = [shape[0] if n is None else n for n in MASKS[kind]]
    inputs.options["attn_mask"] = mask.expand(*sizes, shape[1])
    assert disagreements(variant, "flash", inputs) == []


@pytest.mark.parametrize("normalize", ["sum", "threshold"])
def test_a_large_key_bias_with_a_partly_filled_block(normalize: Any) -> None:
    tensors = [rand(1, 2, n, 16, seed=n).float() for n in (5, 8, 9)]
    tensors[2] = tensors[2][:, :, 1:]
    do, bias = rand(1, 2, 5, 16).float(), 100.0 + rand(1, 2, 8, seed=1).float()
    form = attnzoo.Pairwise(EXP if normalize == "sum" else ENTMAX15, normalize, key_bias=bias)
    assert_close(results("flash", form, do, *tensors), results("tiled", form, do, *tensors), 1e-4)


# ---- a bias that all scores of a query share ---------------------------------------------------

BIASED: dict[str, tuple[attnzoo.Activation, Any, dict[str, Any]]] = {
    "softmax": (EXP, "sum", {}),
    "sparsemax": (SPARSEMAX, "threshold", {}),
    "entmax 1.5": (ENTMAX15, "threshold", {}),
    "entmax 1.3": (Q_EXP, "threshold", {"shape": 1.3}),
}


def biased(name: str, carrier: str, low: float) -> tuple[attnzoo.Pairwise, dict[str, Any]]:
    """A form and options of a call of 40 queries and keys, all of whose scores contain ``low``."""
    activation, normalize, fields = BIASED[name]
    options: dict[str, Any] = {}
    if carrier == "mask":
        options["attn_mask"] = torch.full((1, 1, 40, 40), low)
    elif carrier == "key bias":
        fields = {**fields, "key_bias": torch.full((1, 2, 40), low)}
    elif carrier == "offset":
        fields = {**fields, "offset": torch.full((1, 2, 40), -low)}
    elif carrier == "alibi":
        away = (torch.arange(40)[:, None] - torch.arange(40)).abs()
        options["attn_mask"] = ((away == 8) | (away == 9))[None, None]
        options["alibi"] = torch.full((2,), -low / 8)
    elif carrier == "table":
        options["relative_bias"] = torch.full((2, 5), low)
    return attnzoo.Pairwise(activation, normalize, **fields), options


CARRIERS = [
    ("mask", -1e9), ("mask", -3e38), ("key bias", -1e9), ("offset", -1e9), ("alibi", -1e9),
    ("table", -1e9), ("table", -3e38),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "carrier", "low"), crossed(BIASED, [pytest.param(*pair) for pair in CARRIERS])
)
def test_a_bias_that_all_scores_share(name: str, carrier: str, low: float) -> None:
    """τ and lse are stored relative to the largest score: at −1e9 their fp32 sum is −1e9."""
    tensors, do = [rand(1, 2, 40, 16, seed=i).float() for i in range(3)], rand(1, 2, 40, 16).float()
    form, options = biased(name, carrier, low)
    want = results("tiled", form, do, *tensors, **options)
    assert_close(results("flash", form, do, *tensors, **options), want, 1e-5)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", BIASED)
def test_a_small_shared_bias_in_decode(
    name: str, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At −6e4, τ rounded to fp32 would have an error of 2e-3."""
    if splits:
        monkeypatch.setattr("attnzoo.backends.triton.decode.launch.LEAST_KEYS", 32)
    q, k, v = (rand(1, 2, n, 16, seed=i).float() for i, n in enumerate((3, 140, 140)))
    form, options = biased(name, "", -6e4)
    options["attn_mask"] = torch.full((1, 1, 3, 140), -65536.0)  # q·k is rounded alike everywhere
    want = results("tiled", form, rand(1, 2, 3, 16).float(), q, k, v, **options)
    tolerance = 1e-2 if name == "softmax" else 1e-5  # the softmax converts scores to base 2
    assert_close(results("decode", form, q, q, k, v, **options), want, tolerance)


# ---- tiny and huge weights in 16 bits ----------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "dtype", "size"),
    crossed(
        ["softpick", "relu2", "taylor", "sigmoid", "entmax"],
        [torch.float16, torch.bfloat16],
        [0.001, 0.02, 2.0],
    ),
)
def test_the_size_of_16_bit_logits_does_not_matter(
    variant: str, dtype: torch.dtype, size: float
) -> None:
    """φ is from 1e-12 to 1e4 here. fp16 numbers have 11 bits from 6e-5 to 65504 only."""
    inputs = inputs_of(variant, dtype, (37, 70), dims=(64, 64))
    for name in ("q", "k"):
        inputs.leaves[name] = (size / 1.5 * inputs.leaves[name].float()).to(dtype)
    assert disagreements(variant, "flash", inputs) == []
    inputs.leaves["q"], inputs.do = inputs.leaves["q"][:, :, :8], inputs.do[:, :, :8]
    assert disagreements(variant, "decode", inputs, gradients=False) == []


TINY: dict[str, attnzoo.Pairwise] = {
    "sigmoid": attnzoo.Pairwise(SIGMOID, "none", offset=14.0),
    "relu2": attnzoo.Pairwise(RELU2, "none", offset=0.0, factor=1e-3),
    "power": attnzoo.Pairwise(RELU_POWER, "none", offset=0.0, shape=1.7, factor=1e-3),
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_weights_without_a_normalizer_in_fp16(name: str) -> None:
    """Weights near 1e-6 with large values and dO: 16-bit results keep their digits."""
    q, k = (0.3 * rand(1, 2, n, 16, seed=n) for n in (37, 70))
    v, do = 3e3 * rand(1, 2, 70, 16, seed=3), 3e3 * rand(1, 2, 37, 16, seed=4)
    tensors, do = [x.half() for x in (q, k, v)], do.half()
    want = results("tiled", TINY[name], do, *tensors)
    assert_close(results("flash", TINY[name], do, *tensors), want, 2e-3)
    tensors[0] = tensors[0][:, :, :8]
    assert_close(results("decode", TINY[name], do, *tensors), [want[0][:, :, :8]], 2e-3)


def test_equal_weights_of_many_keys_in_fp16() -> None:
    """1/3000 has 11 bits only above 6e-5 / 2, and dO times it is smaller still."""
    form = attnzoo.Pairwise(SPARSEMAX, "threshold")
    q, k = torch.zeros(1, 1, 17, 16).half(), rand(1, 1, 3000, 16).half()
    v, do = rand(1, 1, 3000, 16, seed=1).half(), rand(1, 1, 17, 16, seed=2).half()
    want = results("tiled", form, do, q, k, v)
    assert_close(results("flash", form, do, q, k, v), want, 2e-3)
