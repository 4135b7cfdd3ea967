"""What the kernels are compared with: torch's fused softmaxes, FlexAttention, AdaSplash, fla.

Each is a factory of a function (q, k, v) -> out: making one may compile or import, and whatever it
raises becomes a note in its row. `YARDSTICKS` compute softmax, whatever the variant; `rivals` the
same function as one variant.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Case, Inputs, Setting

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Factories = dict[str, Callable[[], Attend]]

NAMES = ("flash", "cudnn", "flex", "adasplash")


def yardsticks(setting: Setting, names: tuple[str, ...] = NAMES) -> Factories:
    made: Factories = {
        "sdpa flash": partial(sdpa, "FLASH_ATTENTION", setting),
        "sdpa cudnn": partial(sdpa, "CUDNN_ATTENTION", setting),
        "flex": partial(flex, setting),
    }
    return {name: factory for name, factory in made.items() if name.split()[-1] in names}


def rivals(case: Case, setting: Setting, names: tuple[str, ...] = NAMES) -> Factories:
    made: Factories = {}
    bias, alpha = case.params.get("bias"), case.params.get("alpha", 1.5)
    if case.variant == "sigmoid" and "flex" in names:
        made[f"flex {case.spec}"] = partial(flex_sigmoid, setting, bias)
    # Not listed where it is not installed: it is no dependency.
    if case.variant == "entmax" and "adasplash" in names and importlib.util.find_spec("adasplash"):
        made[f"adasplash {case.spec}"] = partial(adasplash, setting, alpha)
    return made


def sdpa(backend: str, setting: Setting) -> Attend:
    """One backend of torch's scaled_dot_product_attention, and no other."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, is_causal=setting.causal)

    return attend


def flex(setting: Setting) -> Attend:
    """FlexAttention's plain softmax, compiled for this shape."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = block_mask(setting)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = flex_attention(q, k, v, block_mask=mask)
        return out

    return compiled(attend)


def flex_sigmoid(setting: Setting, bias: float | None) -> Attend:
    """Sigmoid attention through a softmax: Σ_j σ(x_j) v_j = softmax(log σ(x))·v · exp(lse).

    x_j = s_j + b. The softmax of log σ(x_j) is σ(x_j) / Σ_i σ(x_i), and its lse is the logarithm of
    that sum: the product is exact, whatever x. (Adding a constant to log σ instead, as large as
    makes the normalization vanish, is not: it loses the digits which the constant takes.)
    b is −log n_i unless given, with n_i = i + 1 under causality and N without.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    mask, modify = block_mask(setting), log_sigmoid(setting, bias)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Any = flex_attention(
            q, k, v, score_mod=modify, block_mask=mask, return_aux=AuxRequest(lse=True)
        )
        out, aux = found
        return rescaled(out, aux.lse)

    return compiled(attend)


def log_sigmoid(setting: Setting, bias: float | None) -> Callable[..., Tensor]:
    """The score_mod (s, b, h, i, j) -> log σ(s + b_i), written so that no exponential overflows."""
    constant = -math.log(setting.length) if bias is None else float(bias)
    per_row = bias is None and setting.causal

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = score - torch.log((i + 1).to(torch.float32)) if per_row else score + constant
        return torch.clamp(x, max=0.0) - torch.log1p(torch.exp(-torch.abs(x)))

    return modify


def rescaled(out: Tensor, lse: Tensor) -> Tensor:
    """out · exp(lse), in fp32."""
    return (out.float() * lse.float().exp()[..., None]).to(out.dtype)


def block_mask(setting: Setting) -> Any:
    if not setting.causal:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    n = setting.length
    return create_block_mask(causal, None, None, n, n, device=setting.device)


def compiled(attend: Attend) -> Attend:
    """For the shapes of the first call alone; a later graph break or fallback raises."""
    import torch._functorch.config as functorch

    # A backward that is timed alone is run again and again on one graph, which donated buffers
    # do not survive.
    functorch.donated_buffer = False
    return torch.compile(attend, dynamic=False, fullgraph=True)


def forget_shapes() -> None:
    """Before a new shape: those compiled so far count towards the limit of recompilations."""
    torch.compiler.reset()


def adasplash(setting: Setting, alpha: float) -> Attend:
    """AdaSplash 2 where it serves the call (causal, α = 1.5), else AdaSplash 1."""
    package = importlib.import_module("adasplash")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return package.adasplash(q, k, v, alpha=alpha, is_causal=setting.causal)

    return attend


def linear_rivals(case: Case, inputs: Inputs) -> Factories:
    """Kernels of flash-linear-attention that compute a linear variant, causally."""
    if case.variant == "taylor":
        return {
            f"fla {name}": partial(fla, "based", name)
            for name in ("fused_chunk_based", "parallel_based")
        }
    return {"fla chunk_linear_attn": partial(fla_features, case, inputs)}


def fla(module: str, name: str, **options: Any) -> Attend:
    """One of its functions, which have heads inside of rows: (B, N, H, D)."""
    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def fla_features(case: Case, inputs: Inputs) -> Attend:
    """Its plain linear attention on the variant's own features, which are part of the time."""
    plan = attnzoo.explain(
        inputs.q, inputs.k, inputs.v, case.variant, is_causal=True, **case.params
    )
    form = next(c.form for c in plan.candidates if isinstance(c.form, attnzoo.Linear))
    positions = torch.arange(inputs.q.shape[2], device=inputs.q.device)
    run = fla("linear_attn", "chunk_linear_attn", scale=1.0, normalize=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        psi_q, psi_k = (form.features(x.float(), positions).to(v.dtype) for x in (q, k))
        return run(psi_q, psi_k, v)

    return attend
