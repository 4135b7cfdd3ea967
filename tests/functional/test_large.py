"""A call with 2048 queries agrees with fp64 in its first 43, last 43 and 42 further rows.

The backend chosen for this size computes all rows. dO is zero except in these 128 rows, so that the
gradients of keys and values depend on no other row. Expensive variants would take minutes and are
tested at smaller sizes only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from helpers.agreement import Inputs, bounds_of, prepared, violations
from helpers.cases import CASES, VARIANTS, learned, params_of, rand
from helpers.coverage_table import FIRST

pytestmark = pytest.mark.slow

N, HEADS, DIM = 2048, 2, 16
RANGES = slice(0, 43), slice(1201, 1243), slice(N - 43, N)
ROWS = torch.cat([torch.arange(rows.start, rows.stop) for rows in RANGES])
assert len(ROWS) == 128
AFFORDABLE = [variant for variant in VARIANTS if not CASES[variant].expensive]


def results(out: Tensor, leaves: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, list(leaves.values()), do)
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), **named}


def expected(
    variant: str, backend: str, inputs: Inputs
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the output and gradients of `ROWS` densely in fp64, and their error bounds."""
    leaves, arguments = inputs.arguments(torch.float64)
    full = prepared(variant, backend, arguments, inputs, 1.0)
    call, form = full.call.with_full_rows(absolute=True), full.definition
    parts, out_bounds = [], []
    allowed = {"d" + name: torch.zeros_like(x, dtype=torch.float64) for name, x in leaves.items()}
    for rows in RANGES:
        part, keys = call.block(slice(0, 1), slice(0, HEADS), rows)
        q, k, v, do = full.q[:, :, rows], full.k[:, :, keys], full.v[:, :, keys], full.do
        parts.append(form.weights(q, k, part, **form.params) @ v)
        problem = replace(full, call=part, q=q, k=k, v=v, do=do[:, :, rows])
        bounds = bounds_of(problem, leaves)
        out_bounds.append(bounds.pop("out"))
        allowed["dq"][:, :, rows] += bounds.pop("dq")
        for name in ("dk", "dv"):
            allowed[name][:, :, keys] += bounds.pop(name)
        for name in allowed:
            allowed[name] += bounds.get(name, 0.0)
    exact = results(torch.cat(parts, dim=2), leaves, inputs.do[:, :, ROWS].double())
    return exact, {"out": torch.cat(out_bounds, dim=2), **allowed}


@pytest.mark.parametrize(
    ("variant", "window"),
    [*((v, None) for v in AFFORDABLE), *((v, 300) for v in AFFORDABLE if v in FIRST.values())],
)
def test_rows_of_a_large_call_agree_with_fp64(variant: str, window: int | None) -> None:
    options: dict[str, Any] = {"is_causal": True, "window": window, **params_of(variant, N)}
    leaves = {n: rand(1, HEADS, N, DIM, seed=i).float() for i, n in enumerate("qkv")}
    leaves.update(learned(variant, HEADS))
    if attnzoo.get_variant(variant).positional:  # positive products avoid 0/0
        for name in "qk":
            leaves[name][..., 0] = leaves[name][..., 0].abs() + 0.5
    do = torch.zeros(1, HEADS, N, DIM)
    do[:, :, ROWS] = rand(1, HEADS, 128, DIM, seed=5).float()
    inputs = Inputs(leaves, options, do, torch.zeros(()))
    fresh, arguments = inputs.arguments()
    backend = attnzoo.explain(variant=variant, **arguments).chosen
    assert backend in ("sdpa", "tiled", "linear")
    actual = results(attnzoo.attention(variant=variant, **arguments), fresh, do)
    actual["out"] = actual["out"][:, :, ROWS]
    exact, allowed = expected(variant, backend, inputs)
    assert violations(backend, actual, exact, allowed) == []
