"""Wrappers of attention for tests, and their definition in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnzoo
from attnzoo.nn import (
    WRAPPERS,
    XSA,
    Differential,
    DifferentialV2,
    Laser,
    MixtureAttention,
    OutputGate,
    QASSMax,
    Wrapper,
)
from attnzoo.nn.wrappers.qassmax import LAYOUT
from helpers.cases import rand, unprojected

B, H, KV, N, D, E = 2, 4, 2, 7, 8, 32
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "differential": ("differential", {}),
    "differential_v2": ("differential_v2", {}),
    "laser": ("laser", {"clamp": 3.0}),
    "mixture": ("mixture", {"components": 3}),
    "gate per element": ("output_gate", {"per": "element"}),
    "gate per head": ("output_gate", {"per": "head"}),
    "gate with options": (
        "output_gate",
        {"per": "head", "activation": "softplus", "norm": True, "bias": True},
    ),
    "qassmax": ("qassmax", {"hidden": 5}),
    "xsa": ("xsa", {"gated": True}),
}


def make(which: str, variant: str = "softmax", **options: Any) -> Wrapper:
    """A wrapper in fp64 whose parameters are not their initial values."""
    name, arguments = MADE[which]
    torch.manual_seed(0)
    module = WRAPPERS[name](variant, H, E, **arguments, **unprojected(variant), **options).double()
    with torch.no_grad():
        for index, x in enumerate(p for n, p in module.named_parameters() if "attention." not in n):
            x.add_(0.3 * rand(*x.shape, seed=index))
    return module


def inputs(module: Wrapper, heads: int = KV) -> list[Tensor]:
    """q, k, v and the hidden states."""
    q, k = rand(B, module.queries * H, N, D, seed=1), rand(B, heads, N, D, seed=2)
    return [1.5 * q, 1.5 * k, rand(B, heads, N, D, seed=3), rand(B, N, E, seed=4)]


# ------------------------------------------------------------------------- definitions


def weights_of(
    module: Wrapper, q: Tensor, k: Tensor, index: int, options: dict[str, Any]
) -> Tensor:
    """Weights (B, Nq, Nk) of one map, from its queries and keys (B, N, ·)."""
    params = {
        name: x[index : index + 1] if isinstance(x, Tensor) else x
        for name, x in module.attention._params().items()
    }
    q, k = q[:, None], k[:, None]
    return attnzoo.attention_weights(q, k, k, module.variant, **options, **params)[:, 0]


def head_of(options: dict[str, Any], head: int) -> dict[str, Any]:
    """The keywords of one head."""
    head_options = dict(options)
    if "b" in head_options:  # scores of sinks, (H,) or (B, H, N)
        dim = head_options["b"].dim() // 2
        head_options["b"] = head_options["b"].narrow(dim, head, 1)
    if "alibi" in head_options:
        head_options["alibi"] = head_options["alibi"][head : head + 1]
    if "attn_mask" in head_options and head_options["attn_mask"].shape[1] == H:
        head_options["attn_mask"] = head_options["attn_mask"][:, head : head + 1]
    return head_options


def qassmax_scales(
    module: QASSMax, queries: Tensor, keys: Tensor, head: int, options: dict[str, Any]
) -> Tensor:
    """The factors of the queries (B, 1, Nq, D) of a head; n is counted in a row of weights."""
    options = {name: x for name, x in options.items() if name in LAYOUT}
    zeros = torch.zeros_like(queries), torch.zeros_like(keys[:, None])
    n = (attnzoo.attention_weights(*zeros, zeros[1], **options) > 0).sum(-1, keepdim=True)
    log_n = n.clamp(min=1).to(queries.dtype).log()
    base = module.base_mlp(log_n).unflatten(-1, (H, -1))[..., head, :]
    return base * (1 + torch.tanh(module.query_mlp(queries)))


def definition(
    module: Wrapper, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output and the weights, head by head, in the order of the formulas."""
    outs, weights = [], []
    maps, group = module.maps, H // k.shape[1]
    gate = None if module.gate is None else F.linear(hidden, module.gate.weight)
    for head in range(H):
        keywords, keys, values = head_of(options, head), k[:, head // group], v[:, head // group]
        queries = q.unflatten(1, (H, -1))[:, head]  # [B, Q, Nq, D]
        mine = None if gate is None else gate.unflatten(-1, (H, -1))[:, :, head]  # [B, Nq, G]
        if isinstance(module, Differential):
            blocks = torch.arange(D).view(-1, 2)
            rows, scale = [], (D / 2) ** -0.5 * keywords.get("scale", D**-0.5) * D**0.5
            for half in range(2):
                which = blocks[half::2].flatten()
                rows.append(weights_of(
                    module, queries[:, 0, :, which], keys[..., which], half * H + head,
                    {**keywords, "scale": scale},
                ))  # fmt: skip
            x = module.vectors
            factor = (x[0] @ x[1]).exp() - (x[2] @ x[3]).exp() + 0.2  # layer 0
            w = rows[0] - factor * rows[1]
            out = w @ values
            norm = (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            out = 0.8 * module.norm.weight * out / norm
        elif isinstance(module, (DifferentialV2, MixtureAttention)):
            assert mine is not None
            rows = [weights_of(module, queries[:, m], keys, head * maps + m, keywords)
                    for m in range(maps)]  # fmt: skip
            if isinstance(module, DifferentialV2):
                w = rows[0] - torch.sigmoid(mine) * rows[1]
            else:
                prior = mine.softmax(-1)
                w = sum((prior[..., m : m + 1] * rows[m] for m in range(maps)), torch.zeros(()))
            out = w @ values
        else:
            if isinstance(module, QASSMax):
                queries = qassmax_scales(module, queries, keys, head, keywords) * queries
            w = weights_of(module, queries[:, 0], keys, head, keywords)
            if isinstance(module, Laser):
                c = module.clamp
                total = w @ (c * torch.tanh(values / c)).exp()
                out = torch.where(total == 0, 1.0, total).log()  # 0 if all weights are 0
            elif isinstance(module, XSA):
                out, last = w @ values, values[:, -q.shape[2] :]
                share = 1.0 if module.alpha is None else module.alpha[head].tanh()
                dot, square = (out * last).sum(-1), last.square().sum(-1)
                out = out - share * (dot / square)[..., None] * last
            elif isinstance(module, QASSMax):
                out = w @ values
            else:
                assert mine is not None
                assert isinstance(module, OutputGate)
                out = w @ values
                if module.norm:
                    out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
                if module.gate_bias is not None:
                    mine = mine + module.gate_bias[head]
                softplus = module.activation == "softplus"
                out = out * (mine.exp().log1p() if softplus else torch.sigmoid(mine))
        outs.append(out)
        weights.append(w)
    return torch.stack(outs, 1), torch.stack(weights, 1)


def gradients(out: Tensor, leaves: list[Tensor], seed: int = 9) -> list[Tensor]:
    return list(torch.autograd.grad(out, leaves, rand(*out.shape, seed=seed).to(out)))


def assert_near(got: list[Tensor], expected: list[Tensor], eps: float) -> None:
    """Entries are sums of fewer than a thousand products of numbers of size 1 or so, so their
    error is below 1000 ε; a wrong formula differs by far more than 1000 fp32 roundings."""
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).abs().max() <= 1000 * eps * (1 + b.abs().max())


def trained(model: nn.Module) -> nn.Module:
    """The model with other parameters than initially, in fp64."""
    with torch.no_grad():
        for index, x in enumerate(model.double().parameters()):
            x.add_(0.1 * rand(*x.shape, seed=index))
    return model
