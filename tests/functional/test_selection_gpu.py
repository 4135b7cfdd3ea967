"""The backend chosen on a GPU, tested without a GPU; a CPU gets no GPU kernel.

Fake tensors have a CUDA device and no memory. A torch build without CUDA cannot run a backend on
them, so tests that run a backend use the device "meta".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import attnzoo
from attnzoo.backends.selection import candidates, choose
from attnzoo.functional.linear_attention import scan_for
from attnzoo.functional.prepare import prepare
from helpers.cases import ALL_VARIANTS, CASES, NO_LSE, VARIANTS, params_of, rand
from helpers.coverage_table import FLASH
from helpers.processes import output_of

ROOT = Path(__file__).parents[2]
PAIRWISE = ("sigmoid", "sink", "sparsemax", "entmax", "asentmax", "taylor")
FUSED = ("softmax", "ssmax", "log_n")


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def qkv(
    n: int = 2048,
    d: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = 8,
    queries: int | None = None,
    gradient: bool = True,
) -> list[Tensor]:
    kind: dict[str, Any] = {"dtype": dtype, "device": "cuda", "requires_grad": gradient}
    shapes = (8, queries or n, d), (kv_heads, n, d), (kv_heads, n, value_dim or d)
    return [torch.empty(2, *shape, **kind) for shape in shapes]


def plan(variant: str, tensors: list[Tensor] | None = None, **options: Any) -> attnzoo.Plan:
    q, k, v = tensors or qkv()
    options = {**params_of(variant, q.shape[2]), **options}
    return attnzoo.explain(q, k, v, variant, **options)


def chosen(variant: str, tensors: list[Tensor] | None = None, **options: Any) -> str | None:
    return plan(variant, tensors, **options).chosen


@pytest.mark.usefixtures("fake")
class TestChoice:
    def test_softmax_runs_on_sdpa_and_a_gain_in_16_bits_on_flash(self) -> None:
        for variant in FUSED:
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                fused = variant == "softmax" or dtype == torch.float32
                for is_causal in (False, True):
                    backend = chosen(variant, qkv(dtype=dtype), is_causal=is_causal)
                    assert backend == ("sdpa" if fused else "flash")
        reason = "does not support a gain per query in 16 bits on a GPU (flash does)"
        for variant in ("ssmax", "adaptive_temperature"):
            assert reason in str(plan(variant))
        assert chosen("ssmax", dropout_p=0.1) == "flash"

    def test_options_that_sdpa_does_not_support_run_on_flash(self) -> None:
        for options in (
            {"window": 100, "is_causal": True},
            {"window": (5, 5)},
            {"alibi": torch.empty(8, device="cuda")},
            {"return_lse": True},
        ):
            for variant in FUSED:
                assert chosen(variant, **options) == "flash", options
        for variant in FUSED:
            assert chosen(variant, qkv(value_dim=128)) == "flash"

    def test_calls_that_torch_does_not_fuse_do_not_run_on_sdpa(self) -> None:
        """Torch's fused kernels support neither fp64 nor GQA in fp32."""
        for dtype, backend in ((torch.float32, "flash"), (torch.bfloat16, "sdpa")):
            assert chosen("softmax", qkv(kv_heads=2, dtype=dtype), enable_gqa=True) == backend
        assert chosen("softmax", qkv(dtype=torch.float64)) == "tiled"

    def test_other_pairwise_variants_run_on_flash(self) -> None:
        for variant in PAIRWISE:
            assert chosen(variant) == chosen(variant, is_causal=True, window=64) == "flash"

    def test_short_calls_run_on_flash(self) -> None:
        """A CPU runs short calls on `eager` or `sdpa` instead."""
        for variant in (*PAIRWISE, "adaptive_temperature"):
            assert chosen(variant, qkv(n=16)) == "flash"

    def test_a_selection_of_the_largest_scores_runs_on_flash(self) -> None:
        for variant in ("topk", "top_p"):
            assert chosen(variant, is_causal=True) == "flash"

    def test_variant_with_a_gain_computed_from_score_statistics_runs_on_flash(self) -> None:
        assert chosen("adaptive_temperature") == "flash"
        exact = plan("adaptive_temperature", differentiable=True)
        assert exact.chosen == "tiled"
        assert "does not support a gradient through the statistics" in str(exact)

    def test_calls_that_flash_does_not_support_run_on_tiled(self) -> None:
        for variant, tensors, options, reason in (
            ("sink", qkv(dtype=torch.float64), {}, "does not support torch.float64"),
            ("sink", qkv(d=264), {}, "does not support head dimensions above 256"),
            ("taylor", None, {"order": 6}, "taylor6, which has no Triton implementation"),
        ):
            actual = plan(variant, tensors, **options)
            assert actual.chosen == "tiled"
            assert reason in str(actual)

    def test_form_shares_runs_on_flash_shares(self) -> None:
        for tensors in (qkv(), qkv(n=16), qkv(queries=1), qkv(gradient=False)):
            assert chosen("stick_breaking", tensors, is_causal=True) == "flash_shares"
        assert chosen("stick_breaking", is_causal=True, dropout_p=0.1) == "tiled"

    def test_linear_form_runs_if_it_is_less_work(self) -> None:
        assert chosen("cosformer") == "flash_linear"
        assert chosen("taylor") == "flash"
        assert chosen("taylor", qkv(d=16)) == "flash_linear"
        assert chosen("cosformer", qkv(dtype=torch.float64)) == "linear"
        assert chosen("taylor", qkv(n=2**17)) == "linear"  # flash_linear would store 2145 features

    @pytest.mark.parametrize("keys", [1, 100, 2048, 2**17])
    def test_few_queries_run_on_decode(self, keys: int) -> None:
        """For any number of keys, because each step of a decoding has one more."""

        def step(queries: int, **kind: Any) -> list[Tensor]:
            return qkv(n=keys, queries=queries, **{"gradient": False, **kind})

        for variant in (*FUSED, *PAIRWISE, "adaptive_temperature"):
            for queries in (1, 16):
                tensors = step(queries, kv_heads=2)
                options = {"is_causal": queries <= keys, "enable_gqa": True}
                assert chosen(variant, tensors, **options) == "decode"
        assert chosen("sink", step(1), is_causal=True, window=64) == "decode"

    def test_queries_that_decode_does_not_support_run_on_sdpa_or_flash(self) -> None:
        def step(queries: int, **kind: Any) -> list[Tensor]:
            return qkv(n=4096, queries=queries, **{"gradient": False, **kind})

        # decode supports at most 64 queries × heads per KV head (fp32: 32), and 17 × 4 is more.
        grouped = {"enable_gqa": True}
        for variant, backend in (("softmax", "sdpa"), ("sink", "flash")):
            assert chosen(variant, step(17, kv_heads=2), **grouped) == backend
            assert chosen(variant, step(1, gradient=True)) == backend
            assert chosen(variant, step(9, kv_heads=2, dtype=torch.float32), **grouped) == "flash"

    def test_a_selection_by_few_queries_without_gradients_runs_on_tiled(self) -> None:
        def step(queries: int, gradient: bool = False) -> list[Tensor]:
            return qkv(n=4096, queries=queries, kv_heads=2, gradient=gradient)

        queries = ((16, False, "tiled"), (17, False, "flash"), (1, True, "flash"))
        for count, gradient, backend in queries:
            for variant in ("topk", "top_p"):
                assert chosen(variant, step(count, gradient), enable_gqa=True) == backend

    def test_few_queries_in_a_transform_run_on_sdpa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torch's operator supports vmap, the operators of kernels do not. vmap needs a device."""
        monkeypatch.setattr(torch._C, "_are_functorch_transforms_active", lambda: True)
        assert chosen("softmax", qkv(queries=1, gradient=False), is_causal=True) == "sdpa"

    @pytest.mark.parametrize("variant", ["cosformer", "taylor"])
    def test_linear_attention_uses_kernels_except_for_single_tokens(self, variant: str) -> None:
        for n, d, dtype, name in (
            (2048, 16, torch.bfloat16, "flash_linear"),
            (1, 16, torch.bfloat16, "linear"),
            (2048, 16, torch.float64, "linear"),
            (2048, 64, torch.bfloat16, "linear" if variant == "taylor" else "flash_linear"),
        ):
            params = params_of(variant, 4096)
            ready = prepare(
                *qkv(n=n, d=d, dtype=dtype),
                variant,
                {"is_causal": True, **params},
                positions=(7, 7),
            )
            form = ready.variant.forms(ready.call, **ready.params)
            assert scan_for(next(f for f in form if f.kind == "linear"), ready.call).name == name


def first_able(
    variant: str,
    kv_heads: int = 8,
    d: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 256,
    **options: Any,
) -> str:
    """Return the first backend that supports a call on a GPU.

    A torch build without CUDA raises an error for fake masks on the device "cuda". The tensors are
    therefore on the device "meta".
    """
    shape, kind = (2, 8, tokens, d), {"dtype": dtype, "device": "meta"}
    q, k, v = (torch.empty(shape, **kind)[:, :n] for n in (8, kv_heads, kv_heads))
    ready = prepare(q, k, v, variant, options)
    ready = ready._replace(call=replace(ready.call, device=torch.device("cuda")))
    considered = candidates(variant, (*ready.forms, ready.definition), ready.call)
    return next(c.backend for c in considered if c.reason is None)


def test_masks_and_segments_run_on_sdpa_or_flash_and_learned_masks_on_flash() -> None:
    ids = torch.zeros(2, 256, dtype=torch.long, device="meta")
    keys = torch.ones(2, 1, 1, 256, dtype=torch.bool, device="meta")
    learned = torch.zeros(256, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert first_able("softmax", attn_mask=keys) == "sdpa"
    assert first_able("softmax", attn_mask=keys, is_causal=True) == "flash"
    assert first_able("softmax", kv_heads=2, enable_gqa=True, attn_mask=keys) == "flash"
    assert first_able("softmax", segment_ids=ids) == "flash"
    assert first_able("sparsemax", attn_mask=keys) == "flash"
    assert first_able("softmax", attn_mask=learned) == "flash"


@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_forms_with_segments_run_on_flash_linear(is_causal: bool) -> None:
    """`flash` runs those with a pairwise form, whose segments may be short."""
    ids = torch.zeros(2, 8192, dtype=torch.long, device="meta")
    for variant, backend in (("cosformer", "flash_linear"), ("taylor", "flash")):
        options = params_of(variant, 8192) | {"segment_ids": ids, "is_causal": is_causal}
        assert first_able(variant, tokens=8192, d=16, **options) == backend


def test_calls_for_which_torch_stores_all_scores_or_raises_run_on_flash() -> None:
    """Torch's fused kernels need aligned rows for a mask and for fp32, and a mask in q's dtype."""
    keys = torch.ones(2, 1, 1, 256, dtype=torch.bool, device="meta")
    for d, dtype, mask, backend in (
        (64, torch.bfloat16, keys.bfloat16(), "sdpa"),
        (64, torch.bfloat16, keys.float(), "flash"),
        (36, torch.bfloat16, keys, "flash"),
        (36, torch.bfloat16, None, "sdpa"),
        (36, torch.float32, keys, "sdpa"),
        (34, torch.float32, keys, "flash"),
        (34, torch.float32, None, "flash"),
        (264, torch.bfloat16, keys, "sdpa"),
        (260, torch.bfloat16, None, "tiled"),
    ):
        assert first_able("softmax", d=d, dtype=dtype, attn_mask=mask) == backend, (d, dtype)


def test_grouped_queries_with_wide_heads_do_not_run_on_sdpa() -> None:
    """Torch's flash attention has no head dimension above 256, its efficient one no groups."""
    for d, backend in ((256, "sdpa"), (264, "tiled")):
        assert first_able("softmax", d=d, kv_heads=2, enable_gqa=True) == backend


def test_sdpa_on_gpus_that_lack_torch_s_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.hip", None)
    for major in (7, 8):
        properties = SimpleNamespace(major=major, minor=5)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, p=properties: p)
        fused = {
            "fp16": first_able("softmax", dtype=torch.float16),
            "fp32": first_able("softmax", dtype=torch.float32),
            "bf16": first_able("softmax"),
            "groups": first_able("softmax", dtype=torch.float16, kv_heads=2, enable_gqa=True),
            "D = 36": first_able("softmax", dtype=torch.float16, d=36),
        }
        others = [name for name, backend in fused.items() if backend != "sdpa"]
        assert others == (["bf16", "groups", "D = 36"] if major < 8 else [])


@pytest.mark.parametrize("gradient", [True, False])
def test_alpha_runs_on_flash_constant_or_learned(gradient: bool) -> None:
    alpha = torch.full((8,), 1.5, device="meta", requires_grad=gradient)
    assert first_able("entmax", alpha=alpha) == "flash"


@pytest.mark.interpreter
@pytest.mark.parametrize("variant", FLASH)
def test_shapes_dtypes_and_strides_on_meta(variant: str) -> None:
    """Outputs and gradients have the memory layout of the inputs, also for (B, N, H, D)."""
    shapes = (2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 48)
    kind = {"dtype": torch.float16, "device": "meta", "requires_grad": True}
    leaves = [torch.empty(shape, **kind) for shape in shapes]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    options: dict[str, Any] = {"return_lse": True} if variant not in NO_LSE else {}
    required = params_of(variant)
    out = attnzoo.attention(
        q, k, v, variant, enable_gqa=True, is_causal=True, backend="flash", **options, **required
    )
    if options:
        out, lse = out
        assert (lse.shape, lse.dtype) == ((2, 4, 64), torch.float32)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 64, 48), torch.float16, "meta")
    assert out.transpose(1, 2).is_contiguous()
    for x, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, torch.float16)
        assert gradient.is_contiguous()


# ---- on a CPU ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 1024])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_are_not_chosen_on_a_cpu(variant: str, n: int) -> None:
    q, k, v = (torch.zeros(1).expand(1, 8, n, 64) for _ in range(3))
    params = params_of(variant, n)
    for options in ({}, {"is_causal": True, "window": 7}):
        assert attnzoo.explain(q, k, v, variant, **options, **params).chosen not in (
            "flash", "flash_linear", "flash_shares", "decode",
        )  # fmt: skip


def test_calls_on_a_cpu_do_not_import_the_kernels_and_flash_raises() -> None:
    """A new process runs each variant with few and with many scores, forward and backward.

    Triton itself may be loaded: torch.utils.checkpoint imports it.
    """
    many = [v for v in ALL_VARIANTS if not CASES[v].expensive]
    text = output_of(
        "import sys, torch, attnzoo\n"
        f"for n, names in ((8, attnzoo.list_variants()), (256, {many})):\n"
        "    for name in names:\n"
        "        q = torch.randn(1, 3, n, 8, requires_grad=True)\n"
        "        variant = attnzoo.get_variant(name)\n"
        "        options = variant.example(256) if variant.example else {}\n"
        "        attnzoo.attention(q, q, q, name, is_causal=True, **options).sum().backward()\n"
        "print([name for name, module in sys.modules.items()\n"
        "       if name.startswith('attnzoo') and 'tl' in vars(module)])\n"
        "try: attnzoo.attention(q, q, q, 'sink', backend='flash')\n"
        "except ValueError as error: print(error)"
    )
    assert text.startswith("[]\n")
    assert "backend 'flash' cannot run 'sink' here" in text
    assert "needs a CUDA device or Triton's interpreter, got tensors on cpu" in text


def test_flash_without_triton_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnzoo.backends.triton.flash.backend.HAS_TRITON", False)
    q, k, v = rand(3, 1, 2, 8, 8, dtype=torch.float32).unbind()
    with pytest.raises(ValueError, match=r"needs Triton: run pip install -e '\.\[gpu\]'"):
        attnzoo.attention(q, k, v, "sink", backend="flash")


def test_choice_does_not_compare_symbolic_lengths() -> None:
    shapes = ShapeEnv()
    symbol = shapes.create_symbol(40, ConstantSource("n"), DimDynamic.DYNAMIC)
    n: Any = shapes.create_symintnode(symbol, hint=40)
    with FakeTensorMode(shape_env=shapes):
        for variant, backend in (("softmax", "sdpa"), ("sink", "flash"), ("elu", "flash_linear")):
            ready = prepare(*qkv(n, gradient=False), variant, {"is_causal": True})
            forms = (*ready.forms, ready.definition)
            assert choose(variant, forms, ready.call, None)[0].name == backend
    assert not [guard for guard in shapes.guards if symbol in guard.expr.free_symbols]
