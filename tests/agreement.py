"""Does a backend agree with the definition in fp64? Inputs, references and the error budget.

The budget is no fixed tolerance. ``plain`` is what a PyTorch user would write: q @ kᵀ in the
inputs' dtype, the variant's definition of those scores in fp32, the weights rounded to the inputs'
dtype, times v; autograd for the rest. A backend may err, against fp64, at most twice as much as
that, plus one rounding of its output. (For fp32 inputs that is the definition in fp32.)

Where all terms of a sum cancel (the score gradients of a row with one key are w·(dP − dP) = 0)
plain code may hit 0 by luck; a sum is therefore also allowed a few fp32 roundings of its terms,
whose size `terms` estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.call import Call
from attnzoo.dispatch import prepare
from cases import CASES, learned, rand
from coverage_table import KERNELS

HEAD_DIM = 8
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "2 heads": (2, 2), "3 of 1": (3, 1)}
ROUNDINGS = 8  # of the terms of a sum in fp32
SDPA_ROUNDINGS = 20  # torch's fused CPU kernel takes an exp good to 20 units in the last place
SOLVED = ("sparsemax", "entmax", "asentmax")
FP64 = 1e-10  # of the terms of a sum, for fp64 inputs: the threshold's residual is 1e-13


@dataclass
class Inputs:
    """The leaves (all that takes a gradient, by name), the rest of the arguments, and dO.

    layout: of q, k and v in memory, where a backend gets them; the references do not care.
    """

    leaves: dict[str, Tensor]
    rest: dict[str, Any]
    do: Tensor
    dlse: Tensor
    layout: str = "contiguous"

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict]:
        """Fresh leaves, and the arguments made of them; in fp64 the same numbers, upcast."""
        leaves = {
            name: (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_()
            for name, x in self.leaves.items()
        }
        rest = dict(self.rest)
        if dtype is not None and "attn_mask" in rest and rest["attn_mask"].is_floating_point():
            rest["attn_mask"] = rest["attn_mask"].to(dtype)
        return leaves, {**rest, **leaves}


def make(variant: str, row: dict[str, Any], seed: int = 0) -> Inputs:
    """Inputs with the settings of a row of the covering array; see `FACTORS` in test_backends."""
    queries, keys = row["shape"]
    dtype, span = row["dtype"], row["span"]
    batch = row.get("batch") or (2 if max(queries, keys) < 100 else 1)
    heads, kv_heads = HEADS[row["heads"]]
    head_dim, value_dim = row.get("dims") or (HEAD_DIM, HEAD_DIM if row["values"] == "same" else 5)
    leaves = {
        "q": 1.5 * rand(batch, heads, queries, head_dim, seed=seed),
        "k": 1.5 * rand(batch, kv_heads, keys, head_dim, seed=seed + 1),
        "v": rand(batch, kv_heads, keys, value_dim, seed=seed + 2),
    }
    if CASES[variant].positions_enter:
        # cosFormer: with q·k nearly 0 for all keys the row is 0/0, and its gradient only noise.
        for name in ("q", "k"):
            leaves[name][..., 0] = leaves[name][..., 0].abs() + 0.5
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    rest: dict[str, Any] = {"enable_gqa": kv_heads != heads}
    if span != "full":
        rest["is_causal"] = span != "pair"
    if span in ("window", "pair"):
        rest["window"] = row.get("window") or (11 if span == "window" else (6, 3))
    if row["mask"] != "none":
        rows = 1 if "keys" in row["mask"] else queries
        per_head = heads if seed % 2 else 1
        mask = rand(batch, per_head, rows, keys, seed=seed + 3)
        if "float" in row["mask"]:
            where = leaves if row["mask_gradient"] else rest
            where["attn_mask"] = mask.masked_fill(mask < -0.5, float("-inf")).to(dtype)
        else:
            rest["attn_mask"] = mask > -0.5
    if row["alibi"]:
        leaves["alibi"] = torch.linspace(0.02, 0.3, heads)
    if row["segments"]:
        ids = rand(batch, queries + keys, seed=seed + 4).mul(1.5).round().long()
        rest["segment_ids"] = ids[:, :queries], ids[:, queries:]
    if row["dropout"]:
        rest["dropout_p"] = 0.3
    if row["lse"]:
        rest["return_lse"] = True
    rest.update(CASES[variant].params)
    if row["params"] == "learned":
        leaves.update(learned(variant, heads, seed))
    elif row["params"] == "per_head":  # and no gradient
        rest.update(learned(variant, heads, seed))
    elif row["params"] == "per_token":
        leaves.update(learned(variant, heads, seed, (batch, queries)))
    elif row["params"] != "default":
        rest.update(CASES[variant].settings[row["params"]])
    do = rand(batch, heads, queries, value_dim, seed=seed + 5).to(dtype)
    dlse = rand(batch, heads, queries, seed=seed + 6)
    return Inputs(leaves, rest, do, dlse, row.get("layout", "contiguous"))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same (B, H, N, D): its heads inside its rows, or cut out of something larger."""
    if layout == "bnhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return torch.nn.functional.pad(x, (1, 2, 3, 0, 0, 1))[:, :-1, 3:, 1:-2]
    assert layout == "contiguous"
    return x


def differentiate(result: Any, leaves: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """Output, lse and the gradients of all leaves, by name."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    found, loss = {"out": out.detach()}, (out * inputs.do.to(out.dtype)).sum(dtype=torch.float64)
    if lse is not None:
        seen = lse != float("-inf")
        loss = loss + torch.where(seen, lse * inputs.dlse.to(lse.dtype), 0.0).sum()
        found["lse"] = lse.detach()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient is None or gradient.dtype == leaf.dtype
        found["d" + name] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def by_backend(variant: str, backend: str, inputs: Inputs) -> dict[str, Tensor]:
    leaves, arguments = inputs.arguments()
    arguments.update({name: laid_out(arguments[name], inputs.layout) for name in "qkv"})
    torch.manual_seed(5)  # dropout
    result = attnzoo.attention(variant=variant, backend=backend, **arguments)
    return differentiate(result, leaves, inputs)


def outputs(variant: str, backend: str, inputs: Inputs) -> dict[str, Tensor]:
    """What a call without gradients gives: the output, and lse."""
    with torch.no_grad():
        _, arguments = inputs.arguments()
        arguments.update({name: laid_out(arguments[name], inputs.layout) for name in "qkv"})
        result = attnzoo.attention(variant=variant, backend=backend, **arguments)
    return dict(zip(("out", "lse"), result if isinstance(result, tuple) else (result,)))


def kept(variant: str, backend: str, inputs: Inputs) -> Tensor | float:
    """The mask that dropout draws: with v the identity, the output is the weights themselves."""
    if "dropout_p" not in inputs.rest:
        return 1.0
    with torch.no_grad():
        _, arguments = inputs.arguments()
        batch, kv_heads, keys, _ = arguments["k"].shape
        eye = torch.eye(keys, dtype=arguments["k"].dtype).expand(batch, kv_heads, keys, keys)
        arguments.update(v=eye, return_lse=False)
        torch.manual_seed(5)
        drawn = attnzoo.attention(variant=variant, backend=backend, **arguments)
    # A weight that is 0 anyway has slope 0 in every variant: whether it was dropped is the same.
    return (drawn != 0).double() / (1 - inputs.rest["dropout_p"])


class PlainCall(Call):
    """Scores multiplied in the inputs' own dtype; everything else as ever."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(self.group, dim=1)
        return ((q * self.scale) @ k.transpose(-1, -2)).to(self.dtype)


def plain(variant: str, inputs: Inputs, keep: Tensor | float) -> dict[str, Tensor]:
    leaves, arguments = inputs.arguments()
    return _dense(variant, leaves, arguments, inputs, keep, PlainCall)


def reference(variant: str, inputs: Inputs, keep: Tensor | float) -> dict[str, Tensor]:
    leaves, arguments = inputs.arguments(torch.float64)
    return _dense(variant, leaves, arguments, inputs, keep, Call)


def _dense(
    variant: str,
    leaves: dict[str, Tensor],
    arguments: dict[str, Any],
    inputs: Inputs,
    keep: Tensor | float,
    kind: type[Call],
) -> dict[str, Tensor]:
    q, k, v = (arguments.pop(name) for name in "qkv")
    arguments["dropout_p"] = 0.0
    ready = prepare(q, k, v, variant, arguments)
    assert ready.refusal is None, ready.refusal
    call = kind(**{f.name: getattr(ready.call, f.name) for f in fields(Call)})
    w = ready.variant.weights(q, k, call, **ready.params)
    w = w * (keep.to(w.dtype) if isinstance(keep, Tensor) else keep)
    out = w.to(v.dtype) @ v.repeat_interleave(call.group, dim=1)
    if not call.return_lse:
        return differentiate(out, leaves, inputs)
    assert ready.variant.scores is not None
    lse = call.logsumexp(ready.variant.scores(q, k, call, **ready.params))
    return differentiate((out, lse), leaves, inputs)


def of_this_output(
    variant: str, inputs: Inputs, found: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, Tensor]:
    """``exact`` with the gradients that follow from the output that was found.

    flash takes dS = φ'(dO·v − dO·o)/Z with o as it is stored. What 16 bits lose of it is the same
    for all keys of a row, and does not average out as the roundings of plain code do, which has
    each dO·v of its own. Here it is no matter of a budget, for its effect is known.
    """
    leaves, arguments = inputs.arguments(torch.float64)
    q, k, v = (arguments.pop(name) for name in "qkv")
    ready = prepare(q, k, v, variant, arguments)
    call = ready.call
    form = ready.variant.forms(call, **ready.params)[0]
    assert isinstance(form, attnzoo.Pairwise)
    if form.normalize != "sum":
        return exact
    phi, slope = form.activation.value, form.activation.slope
    scores, gain = call.scores(q, k), form.gain
    if isinstance(gain, attnzoo.FromStatistics):
        biased = (scores + call.bias).detach()
        p, lse = call.softmax(biased), call.logsumexp(biased)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        gain = gain.row(attnzoo.Statistics(lse, lse - (p * biased).sum(-1)))
    s = call.row(gain)[..., None] * scores + call.bias
    sink = None if form.sink is None else call.row(form.sink).expand(*s.shape[:-1])[..., None]
    with torch.no_grad():
        parts = [s] if sink is None else [s, sink]
        values = [phi(x.clone(), None) for x in parts]
        slopes = [slope(x, y, None) for x, y in zip(parts, values, strict=True)]
        values[0], slopes[0] = (x[0].masked_fill(~call.visible, 0.0) for x in (values, slopes))
        z = sum(x.sum(-1, keepdim=True) for x in values)
        lost = (inputs.do.double() * (found["out"].double() - exact["out"])).sum(-1, keepdim=True)
        ds = [-x * lost / z.masked_fill(z == 0, 1.0) for x in slopes]
    loss = sum((x * d).sum() for x, d in zip(parts, ds, strict=True))
    more = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    added = {"d" + name: x for name, x in zip(leaves, more, strict=True) if x is not None}
    return {name: x + added.get(name, 0.0) for name, x in exact.items()}


def terms(variant: str, backend: str, inputs: Inputs) -> dict[str, float]:
    """About the largest term of the sums behind each result: what cancels is rounded at this."""
    q, k, v = (inputs.leaves[name].double().abs() for name in "qkv")
    if min(q.numel(), k.numel(), v.numel()) == 0:
        return {}
    gain, condition = _amplification(variant, inputs)
    condition = condition if "linear" in backend else 1.0
    rows = (inputs.do.numel() / v.shape[-1]) ** 0.5  # terms of either sign
    ds = float(inputs.do.double().abs().amax() * v.amax()) * v.shape[-1] ** 0.5 * condition
    dz = ds * gain * q.shape[-1] ** -0.5
    score = float(q.amax() * k.amax()) * gain
    sizes = {
        "out": float(v.amax()) * condition,
        "lse": score,
        "dq": dz * float(k.amax()),
        "dk": dz * float(q.amax()) * rows,
        "dv": float(inputs.do.abs().amax()) * rows * condition,
        "dattn_mask": ds * rows,
        "dalibi": ds * max(q.shape[2], k.shape[2]) * rows,
    }
    parameters = {"d" + name: ds * max(score, 1.0) * rows for name in inputs.leaves}
    return {**parameters, **sizes}


def _amplification(variant: str, inputs: Inputs) -> tuple[float, float]:
    """The largest gain, and Σ|ψ(q)ψ(k)| / |Σ ψ(q)ψ(k)| of a linear form, at worst over rows."""
    _, arguments = inputs.arguments(torch.float64)
    q, k, v = (arguments.pop(name).detach() for name in "qkv")
    ready = prepare(q, k, v, variant, arguments)
    call, gain, condition = ready.call, 1.0, 1.0
    for form in ready.variant.forms(call, **ready.params):
        if isinstance(form, attnzoo.Pairwise):
            # 2.5 bounds adaptive temperature's.
            row = 2.5 if isinstance(form.gain, attnzoo.FromStatistics) else form.gain
            gain = max(gain, float(torch.as_tensor(row).detach().abs().max()))
        elif isinstance(form, attnzoo.Linear):
            psi_q = form.features(call.scale * q, call.query_positions)
            psi_k = form.features(k, call.key_positions).repeat_interleave(call.group, dim=1)
            pairs = (psi_q.abs(), psi_k.abs()), (psi_q, psi_k)
            terms = [a @ b.transpose(-1, -2) for a, b in pairs]
            most, total = (x.masked_fill(~call.visible, 0.0).sum(-1) for x in terms)
            condition = max(condition, float((most / total).nan_to_num(1.0, 1.0).max()))
    return gain, condition


def complaints(
    variant: str,
    backend: str,
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    naive: dict[str, Tensor],
    inputs: Inputs,
) -> list[str]:
    """What exceeds the budget, in words."""
    said = []
    sizes = terms(variant, backend, inputs)
    for name, want in exact.items():
        have = found[name]
        if have.numel() == 0:
            continue
        hidden = want == float("-inf")  # lse of rows without keys
        if not torch.equal(have == float("-inf"), hidden):
            said.append(f"{backend}: {name}: −inf in the wrong places")
            continue
        want = want.masked_fill(hidden, 0.0)
        error = worst(have.double().masked_fill(hidden, 0.0) - want)
        own = worst(naive[name].double().masked_fill(hidden, 0.0) - want)
        rounding = torch.finfo(have.dtype).eps * float(want.abs().max())
        if backend in KERNELS and have.dtype == torch.bfloat16:
            rounding *= 2  # Triton's interpreter cuts digits off instead, of weights and of results
        if inputs.do.dtype == torch.float64:
            allowed = FP64 * sizes[name] + rounding  # fp32 parameters have fp32 gradients
        else:
            roundings = SDPA_ROUNDINGS if backend == "sdpa" else ROUNDINGS
            allowed = 2 * own + rounding + roundings * torch.finfo(torch.float32).eps * sizes[name]
            if backend == "flash" and variant in SOLVED and name not in ("out", "lse", "dv"):
                # τ is as good as scores of their size are, and so is the Σφ divided by.
                score = sizes["lse"] * inputs.leaves["q"].shape[-1] ** -0.5
                allowed += 2 * torch.finfo(torch.float32).eps * score * float(want.abs().max())
            if backend == "sdpa" and want.dim() == 1:
                allowed += _rounded_queries(exact["dq"], inputs.leaves["q"])
        if not error <= allowed:
            figures = f"error {error:.2e}, allowed {allowed:.2e}, plain {own:.2e}"
            said.append(f"{backend}: {name}: {figures}")
    return said


def _rounded_queries(dq: Tensor, q: Tensor) -> float:
    """What a parameter of the gain loses on sdpa, where gain·q and its gradient are in q's dtype.

    ds = Σ dq·q / s, and s is 0.2 at least: as many independent roundings as there are numbers in q.
    """
    return torch.finfo(q.dtype).eps * 5 * float((dq * q.double()).square().sum().sqrt())


def worst(x: Tensor) -> float:
    # NaN must not pass as small.
    return float("inf") if bool(x.isnan().any()) else float(x.abs().max())
