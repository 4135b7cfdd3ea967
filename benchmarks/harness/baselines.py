"""Baselines: torch's fused softmax kernels, FlexAttention, and other packages.

Each baseline has a factory that returns a function (q, k, v) -> out. The factory may compile or
import, and any error it raises becomes a note in the table. `of_variant` lists which packages
implement which variant. The table omits packages that are not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.cases import Attend, Case, Setting

Makers = dict[str, Callable[[], Attend]]

NAMES = (
    "sdpa", "flash", "cudnn", "flex", "flash-sigmoid", "adasplash", "adasplash-v1",
    "adasplash-dense", "entmax", "bisection", "fla",
)  # fmt: skip
# Largest N for the package entmax, which allocates several N × N matrices
ENTMAX_LONGEST = 2048
# Iterations, and for bisection the largest N, of the paper of AdaSplash (arXiv:2502.12082)
ADASPLASH_STEPS, BISECTION_STEPS, BISECTION_LONGEST = 3, 10, 4096


def of_softmax(setting: Setting, names: Sequence[str]) -> Makers:
    """The baselines that compute softmax attention. Every variant is compared with them."""
    if "flex" in names:  # shapes compiled earlier count towards torch's limit of recompilations
        torch.compiler.reset()
    makers: Makers = {
        "sdpa": partial(sdpa, None, setting),
        "sdpa flash": partial(sdpa, "FLASH_ATTENTION", setting),
        "sdpa cudnn": partial(sdpa, "CUDNN_ATTENTION", setting),
        "flex": partial(flex, setting),
    }
    return {name: make for name, make in makers.items() if name.split()[-1] in names}


def of_variant(case: Case, setting: Setting, names: Sequence[str]) -> Makers:
    """Baselines that compute the same function as the case."""
    makers: Makers = {}
    bias, alpha = case.params.get("bias"), case.params.get("alpha", 1.5)
    if case.variant == "sigmoid" and "flex" in names:
        makers["flex"] = partial(flex_sigmoid, setting, bias)
    if case.variant == "sigmoid" and bias is not None and installed("flash_sigmoid"):
        makers["flash-sigmoid"] = partial(flash_sigmoid, setting, bias)
    if case.variant == "entmax" and installed("adasplash"):
        makers["adasplash"] = partial(adasplash, setting, alpha)
        for name, function in (
            ("adasplash-v1", "adasplash_v1"),
            ("adasplash-dense", "adasplash_no_block_mask"),
        ):
            makers[name] = partial(adasplash, setting, alpha, function, niter=ADASPLASH_STEPS)
    if case.variant == "entmax" and setting.length <= BISECTION_LONGEST and installed("entmax"):
        steps = {"alpha": alpha, "n_iter": BISECTION_STEPS}
        makers["bisection"] = partial(entmax, "entmax_bisect", setting, **steps)
    makers = {name: make for name, make in makers.items() if name in names}
    normalizer = {("sparsemax", 1.5): "sparsemax", ("entmax", 1.5): "entmax15",
                  ("entmax", 2.0): "sparsemax"}.get((case.variant, alpha))  # fmt: skip
    short = setting.causal and setting.length <= ENTMAX_LONGEST
    if normalizer and short and "entmax" in names and installed("entmax"):
        makers["package entmax"] = partial(entmax, normalizer, setting)
    if case.linear is not None and "fla" in names and installed("fla"):
        based = {
            f"fla {name}": partial(fla, "based", name)
            for name in ("fused_chunk_based", "parallel_based")
        }
        features = {"fla chunk_linear_attn": partial(fla_features, case.linear)}
        makers |= based if case.variant == "taylor" else features
    return {f"{name}: {case.spec}": make for name, make in makers.items()}


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def sdpa(backend: str | None, setting: Setting) -> Attend:
    """torch's scaled_dot_product_attention on ``backend``. For None, torch selects the backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    gqa = setting.kv_heads not in (None, setting.heads)
    attend = partial(F.scaled_dot_product_attention, is_causal=setting.causal, enable_gqa=gqa)
    if backend is None:
        return attend

    def through(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return attend(q, k, v)

    return through


def flex(setting: Setting) -> Attend:
    """Softmax attention with FlexAttention, compiled for the shape in ``setting``."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = block_mask(setting)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = flex_attention(q, k, v, block_mask=mask)
        return out

    return compiled(attend)


def flex_sigmoid(setting: Setting, bias: float | None) -> Attend:
    """Sigmoid attention with FlexAttention: Σ_j σ(x_j) v_j = (softmax(log σ(x)) · v) exp(lse).

    x_j = s_j + b. The softmax of log σ(x_j) is σ(x_j) / Σ_i σ(x_i), and lse is the logarithm of
    that sum, so the product is exact for every x. b defaults to −log n_i, with n_i = i + 1 for
    causal calls and N otherwise.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    mask, modify = block_mask(setting), log_sigmoid(setting, bias)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Any = flex_attention(
            q, k, v, score_mod=modify, block_mask=mask, return_aux=AuxRequest(lse=True)
        )
        out, aux = result
        return (out.float() * aux.lse.float().exp()[..., None]).to(out.dtype)

    return compiled(attend)


def log_sigmoid(setting: Setting, bias: float | None) -> Callable[..., Tensor]:
    """The score_mod (s, b, h, i, j) -> log σ(s + bias_i), in a form that cannot overflow."""
    constant = -math.log(setting.length) if bias is None else float(bias)
    per_query = bias is None and setting.causal

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = score - torch.log((i + 1).to(torch.float32)) if per_query else score + constant
        return torch.clamp(x, max=0.0) - torch.log1p(torch.exp(-torch.abs(x)))

    return modify


def block_mask(setting: Setting) -> Any:
    if not setting.causal:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    n = setting.length
    return create_block_mask(causal, None, None, n, n, device=setting.device)


def compiled(attend: Attend) -> Attend:
    """``attend`` compiled for the shapes of its first call. A graph break raises an error."""
    import torch._functorch.config as functorch

    # The timer runs the backward pass several times on one graph. Donated buffers do not allow it.
    functorch.donated_buffer = False
    return torch.compile(attend, dynamic=False, fullgraph=True)


def flash_sigmoid(setting: Setting, bias: float) -> Attend:
    """FlashSigmoid, which takes inputs (B, N, H, D) and one bias for all scores."""
    function = importlib.import_module("flash_sigmoid").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        views = (x.transpose(1, 2) for x in (q, k, v))
        return function(*views, causal=setting.causal, sigmoid_bias=float(bias)).transpose(1, 2)

    return attend


def adasplash(
    setting: Setting, alpha: float, function: str = "adasplash", **options: Any
) -> Attend:
    """A function of the package adasplash.

    ``adasplash`` is AdaSplash 2 if it supports the call (causal, α = 1.5), otherwise AdaSplash 1;
    ``adasplash_v1`` is always AdaSplash 1, and ``adasplash_no_block_mask`` skips no blocks.
    """
    attend = getattr(importlib.import_module("adasplash"), function)
    return partial(attend, alpha=alpha, is_causal=setting.causal, **options)


def entmax(normalizer: str, setting: Setting, **options: Any) -> Attend:
    """Attention in plain PyTorch, normalized with the package entmax."""
    normalize = partial(getattr(importlib.import_module("entmax"), normalizer), dim=-1, **options)
    n = setting.length
    hidden = torch.ones(n, n, dtype=torch.bool, device=setting.device).triu(1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.shape[-1] ** -0.5 * q @ k.mT
        if setting.causal:
            scores = scores.masked_fill(hidden, -torch.inf)
        return normalize(scores) @ v

    return attend


def fla(module: str, name: str, **options: Any) -> Attend:
    """A causal attention function of flash-linear-attention, with inputs (B, N, H, D)."""
    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def fla_features(form: Any) -> Attend:
    """fla's linear attention on the variant's features; the time includes the feature map."""
    attend_features = fla("linear_attn", "chunk_linear_attn", scale=1.0, normalize=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        psi_q = form.of_queries(q.float(), positions).to(v.dtype)
        psi_k = form.features(k.float(), positions).to(v.dtype)
        return attend_features(psi_q, psi_k, v)

    return attend


def entmax_loss(case: Case) -> Makers:
    """(hidden states, matrix, targets) -> mean loss, by the package entmax.

    Returns {} if the package has no such loss or is not installed.
    """
    alpha = case.params.get("alpha", 1.5)
    name = {("sparsemax", 1.5): "sparsemax_loss", ("entmax", 1.5): "entmax15_loss",
            ("entmax", 2.0): "sparsemax_loss"}.get((case.variant, alpha))  # fmt: skip
    if name is None or not installed("entmax"):
        return {}
    loss = getattr(importlib.import_module("entmax"), name)
    return {f"linear, package entmax: {case.spec}": lambda: lambda h, e, y: loss(h @ e.T, y).mean()}
