"""Compares a backend with the definition in fp64.

The reference is the variant's definition in fp64, differentiated by torch's autograd. The allowed
error of each element is not a fixed tolerance: `error_budget` computes it by forward error
analysis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.core.parameters import VECTORS
from attnzoo.functional.prepare import prepare
from helpers.approx import Approx
from helpers.cases import CASES, NO_LSE, NO_SCORE, learned, params_of, rand
from helpers.error_budget import Problem, budget

HEAD_DIM = 8
# Numbers of (query heads, key/value heads) by name
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "2 heads": (2, 2), "3 of 1": (3, 1)}


@dataclass
class Inputs:
    """The arguments of a call, and the gradients of the loss with respect to its results.

    leaves: tensors that require a gradient, by argument name. options: the other arguments.
    do, dlse: gradients of the output and of lse. layout: memory layout of q, k and v for the
    backend; the reference ignores it.
    """

    leaves: dict[str, Tensor]
    options: dict[str, Any]
    do: Tensor
    dlse: Tensor
    layout: str = "contiguous"

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict]:
        """Returns copied leaves, and all arguments. Casts leaves and a float mask to ``dtype``."""
        leaves = {
            name: (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_()
            for name, x in self.leaves.items()
        }
        options = dict(self.options)
        mask = options.get("attn_mask")
        if dtype is not None and mask is not None and mask.is_floating_point():
            options["attn_mask"] = mask.to(dtype)
        return leaves, {**options, **leaves}


def make(variant: str, row: dict[str, Any], seed: int = 0) -> Inputs:
    """Inputs with the settings in ``row``, a row of a covering array; see `test_backends.FACTORS`.

    row["segments"] is True (ids of queries and of keys), False, or "sorted" (the same for both).
    row["params"] is "default", "learned", "per_head", "per_token", or an index into the `settings`
    of the variant's case.
    """
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
    if attnzoo.get_variant(variant).positional:
        # If all scores of a cosFormer query are near 0, the weights are 0/0. The gradient of such
        # a query is only noise.
        for name in ("q", "k"):
            leaves[name][..., 0] = leaves[name][..., 0].abs() + 0.5
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    options: dict[str, Any] = {"enable_gqa": kv_heads != heads}
    if span != "full":
        options["is_causal"] = span != "pair"
    if "softcap" in row and row["softcap"] is not None:
        options["softcap"] = row["softcap"]
    if span in ("window", "pair"):
        options["window"] = row.get("window") or (11 if span == "window" else (6, 3))
    if row["mask"] != "none":
        rows = 1 if "keys" in row["mask"] else queries
        per_head = heads if seed % 2 else 1
        mask = rand(batch, per_head, rows, keys, seed=seed + 3)
        if "float" in row["mask"]:
            where = leaves if row["mask_gradient"] else options
            where["attn_mask"] = mask.masked_fill(mask < -0.5, float("-inf")).to(dtype)
        else:
            options["attn_mask"] = mask > -0.5
    if row["bias"] == "alibi":
        leaves["alibi"] = torch.linspace(0.02, 0.3, heads)
    elif row["bias"] == "table":
        leaves["relative_bias"] = rand(heads, 7, seed=seed + 7)
    if row["segments"]:
        ids = rand(batch, queries + keys, seed=seed + 4).mul(1.5).round().long()
        options["segment_ids"] = ids[:, :queries], ids[:, queries:]
        if row["segments"] == "sorted":
            options["segment_ids"] = ids[:, :queries].sort(-1).values
    if row["dropout"]:
        options["dropout_p"] = 0.3125  # a multiple of 2⁻²⁴, which no backend rounds
    if row["lse"]:
        options["return_lse"] = True
    options.update(params_of(variant, max(256, queries, keys)))
    if row["params"] == "learned":
        leaves.update(learned(variant, heads, seed))
    elif row["params"] == "per_head":  # without a gradient
        options.update(learned(variant, heads, seed))
    elif row["params"] == "per_token":
        leaves.update(learned(variant, heads, seed, (batch, queries)))
    elif row["params"] != "default":
        options.update(CASES[variant].settings[row["params"]])
    do = rand(batch, heads, queries, value_dim, seed=seed + 5).to(dtype)
    dlse = rand(batch, heads, queries, seed=seed + 6)
    return Inputs(leaves, options, do, dlse, row.get("layout", "contiguous"))


def with_layout(x: Tensor, layout: str) -> Tensor:
    """x stored as "contiguous" (B, H, N, D), "bnhd" (B, N, H, D) or "sliced" (a larger tensor)."""
    if layout == "bnhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return torch.nn.functional.pad(x, (1, 2, 3, 0, 0, 1))[:, :-1, 3:, 1:-2]
    assert layout == "contiguous"
    return x


def differentiate(result: Any, leaves: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """The output, lse and the gradients of all leaves, by name: "out", "lse", "dq", …"""
    out, lse = result if isinstance(result, tuple) else (result, None)
    results, loss = {"out": out.detach()}, (out * inputs.do.to(out.dtype)).sum(dtype=torch.float64)
    if lse is not None:
        seen = lse != float("-inf")
        loss = loss + torch.where(seen, lse * inputs.dlse.to(lse.dtype), 0.0).sum()
        results["lse"] = lse.detach()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient is None or gradient.dtype == leaf.dtype
        results["d" + name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def by_backend(variant: str, backend: str, inputs: Inputs) -> dict[str, Tensor]:
    leaves, arguments = inputs.arguments()
    arguments.update({name: with_layout(arguments[name], inputs.layout) for name in "qkv"})
    torch.manual_seed(5)  # dropout
    result = attnzoo.attention(variant=variant, backend=backend, **arguments)
    return differentiate(result, leaves, inputs)


def outputs(variant: str, backend: str, inputs: Inputs) -> dict[str, Tensor]:
    """The output and lse of a call under `torch.no_grad`, by name."""
    with torch.no_grad():
        _, arguments = inputs.arguments()
        arguments.update({name: with_layout(arguments[name], inputs.layout) for name in "qkv"})
        result = attnzoo.attention(variant=variant, backend=backend, **arguments)
    return dict(zip(("out", "lse"), result if isinstance(result, tuple) else (result,)))


def dropout_factors(variant: str, backend: str, inputs: Inputs) -> Tensor | float:
    """The dropout factor of each weight, 0 or 1 / (1 − p), as (B, H, Nq, Nk).

    With the identity as v, the output shows which weights are 0 after dropout. The call is at least
    in fp32, because small weights would be 0 in 16 bits. The dtype does not change the mask.
    """
    if "dropout_p" not in inputs.options:
        return 1.0
    dtype = torch.promote_types(inputs.do.dtype, torch.float32)
    with torch.no_grad():
        _, arguments = inputs.arguments(dtype)
        batch, kv_heads, keys, _ = arguments["k"].shape
        eye = torch.eye(keys, dtype=dtype).expand(batch, kv_heads, keys, keys)
        arguments.update(v=eye, return_lse=False)
        torch.manual_seed(5)
        drawn = attnzoo.attention(variant=variant, backend=backend, **arguments)
    # The factor of a weight of 0 is unknown but has no effect, because φ' is 0 there too.
    return (drawn != 0).double() / (1 - inputs.options["dropout_p"])


def reference(variant: str, inputs: Inputs, keep: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Output, lse and gradients of the variant's definition in fp64, by name."""
    leaves, arguments = inputs.arguments(torch.float64)
    problem = prepared(variant, "eager", arguments, inputs, keep)
    call, form, q, k, v = problem.call, problem.definition, problem.q, problem.k, problem.v
    w = form.weights(q, k, call, **form.params) * keep
    out = w @ problem.of_queries(v)
    if not call.return_lse:
        return differentiate(out, leaves, inputs)
    assert form.scores is not None
    lse = call.logsumexp(form.scores(q, k, call, **form.params))
    return differentiate((out, lse), leaves, inputs)


def prepared(
    variant: str, backend: str, arguments: dict[str, Any], inputs: Inputs, keep: Tensor | float
) -> Problem:
    """The call as a `Problem` in fp64. The library first validates and plans the call."""
    arguments = {**arguments, "dropout_p": 0.0}
    q, k, v = (arguments.pop(name) for name in "qkv")
    ready = prepare(q, k, v, variant, arguments)
    assert ready.unsupported is None, ready.unsupported
    return Problem(
        variant=ready.variant,
        definition=ready.definition,
        backend=backend,
        call=ready.call,
        params=ready.params,
        q=q,
        k=k,
        v=v,
        do=inputs.do.double(),
        dlse=inputs.dlse.double(),
        dtype=inputs.do.dtype,
        keep=keep,
    )


def bounds(
    variant: str, backend: str, inputs: Inputs, keep: Tensor | float = 1.0
) -> dict[str, Tensor]:
    """The allowed error of each element of the output, lse and all gradients, by name."""
    with torch.no_grad():
        _, arguments = inputs.arguments(torch.float64)
        return bounds_of(prepared(variant, backend, arguments, inputs, keep), inputs.leaves)


@torch.no_grad()
def bounds_of(problem: Problem, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    budgets = budget(problem)
    call, score = problem.call, budgets["dscore"]
    for name, leaf in leaves.items():
        if name == "attn_mask":
            # Autograd adds the gradients through the scores and through the statistics, each in
            # the dtype of the mask.
            score = budgets.get("dscore parts", score)
            dims = [d for d in range(4) if leaf.shape[d] == 1 < score.shape[d]]
            budgets["dattn_mask"] = score.sum(*dims, keepdim=True) if dims else score
        elif name == "alibi":
            distance = problem.exact(call.distance.abs().double())
            budgets["dalibi"] = of_heads((score * distance).sum(3), leaf)
        elif name == "relative_bias":
            radius = leaf.shape[1] // 2
            entry = (-call.distance).clamp(-radius, radius) + radius
            entries = [of_heads(score.where(entry == n).sum(3), leaf)
                       for n in range(leaf.shape[1])]  # fmt: skip
            value, error = (torch.stack(x, 1) for x in zip(*((e.value, e.error) for e in entries)))
            budgets["drelative_bias"] = replace(score, value=value, error=error)
        elif name not in "qkv":
            budgets["d" + name] = of_parameter(problem, budgets, name, leaf)
    for name, leaf in leaves.items():
        budgets["d" + name] = budgets["d" + name].stored(leaf.dtype)
    return {name: x.error for name, x in budgets.items()}


def of_heads(rows: Approx, leaf: Tensor) -> Approx:
    """``rows``, (B, H, Nq), summed to (H,) and rounded to the dtype of the parameter ``leaf``."""
    units = torch.finfo(leaf.dtype).eps / rows.eps
    return rows.sum(0, 2).rounded(units, rows.value.abs().sum((0, 2)))


def of_parameter(problem: Problem, budgets: dict[str, Approx], name: str, leaf: Tensor) -> Approx:
    """The gradient of the parameter ``name``.

    It is computed from the gradients of the form's per-query vectors.
    """
    value, total = problem.params[name].detach(), None
    step = 1e-6
    moved = [problem.form({**problem.params, name: value + sign * step}) for sign in (1, -1)]
    for vector in VECTORS:
        at = getattr(moved[0], vector)
        if "d" + vector not in budgets or at is None or isinstance(at, float):
            continue
        ends = [problem.vector(getattr(form, vector), vector).value for form in moved]
        slope = problem.exact((ends[0] - ends[1]) / (2 * step))
        share = (slope.rounded(8, slope.value) * budgets["d" + vector])[..., 0]
        share = share if leaf.dim() == 3 else of_heads(share, leaf)
        total = share if total is None else total + share
    assert total is not None, f"no vector depends on {name}"
    return total


def disagreements(
    variant: str,
    backend: str,
    inputs: Inputs,
    exact: dict[str, Tensor] | None = None,
    keep: Tensor | float = 1.0,
    gradients: bool = True,
) -> list[str]:
    """Runs the backend and returns one message for each result with an error above its bound."""
    actual = (by_backend if gradients else outputs)(variant, backend, inputs)
    exact = reference(variant, inputs, keep) if exact is None else exact
    exact = {name: exact[name] for name in actual}
    return violations(backend, actual, exact, bounds(variant, backend, inputs, keep))


def violations(
    backend: str,
    actual: dict[str, Tensor],
    exact: dict[str, Tensor],
    allowed: dict[str, Tensor],
) -> list[str]:
    """Returns one message for each result whose error exceeds ``allowed``."""
    messages = []
    for name, want in exact.items():
        have, most = actual[name].double(), allowed[name].expand(want.shape)
        if have.numel() == 0:
            continue
        hidden = want == float("-inf")  # lse of rows without visible keys
        if not torch.equal(have == float("-inf"), hidden):
            messages.append(f"{backend}: {name}: −inf in the wrong places")
            continue
        error = (have - want).masked_fill(hidden, 0.0).abs()
        # The comparison is "not <=", so that NaN counts as a violation.
        outside = ~(error <= most.masked_fill(hidden, 0.0))
        if bool(outside.any()):
            ratio = (error / most).where(outside, 0.0).nan_to_num(float("inf"), float("inf"))
            worst = int(ratio.argmax())
            figures = f"error {error.flatten()[worst]:.2e}, allowed {most.flatten()[worst]:.2e}"
            messages.append(f"{backend}: {name}: {int(outside.sum())} outside, worst: {figures}")
    return messages


def every_term(variant: str, heads: str, span: str) -> dict[str, Any]:
    """A case in fp64 with all terms of the scores that the variant supports."""
    return {
        "shape": (23, 31),
        "dtype": torch.float64,
        "mask": "keys" if variant in NO_SCORE else "float",
        "mask_gradient": True,
        "span": span,
        "heads": heads,
        "params": "learned" if CASES[variant].learned else "default",
        "values": "other",
        "bias": None if variant in NO_SCORE else "table" if heads == "gqa" else "alibi",
        "segments": span == "pair",
        "dropout": heads == "gqa",
        "lse": variant not in NO_LSE,
    }
