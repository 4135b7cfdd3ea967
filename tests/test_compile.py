"""torch.compile(fullgraph=True): no graph break, and the results of eager mode.

One compilation per (variant, backend), because they are slow: the options change from one variant
to the next so that all of them are compiled somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.nn import Attention
from cases import CASES, VARIANTS, learned, rand
from coverage_table import NO_LSE, NO_SCORE, RUNS, VARIANT_BACKENDS

IDS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
KEYS = rand(2, 1, 1, 9, seed=5) > -0.8
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": rand(2, 1, 9, 9, seed=6) > -0.8},
    "key mask and segments": {"attn_mask": KEYS, "segment_ids": IDS, "is_causal": True},
    "window": {"window": 3, "is_causal": True},
    "float mask": {"attn_mask": rand(9, 9, seed=6).float()},
    "window pair and alibi": {"window": (3, 2), "alibi": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "lse": {"return_lse": True, "is_causal": True},
}
# What variants without an additive score take.
NO_SCORE_OPTIONS = ("causal", "bool mask", "key mask and segments", "window")
SPECIAL: dict[str, list[dict[str, Any]]] = {
    "sdpa": [{"is_causal": True}, OPTIONS["bool mask"], OPTIONS["float mask"]],
    "linear": [{"is_causal": True}, {"attn_mask": KEYS}],
}


# A linear form, a threshold and a sum with a learned sink; the others are slow.
QUICK = ("cosformer", "entmax", "sink")


def cells() -> Iterator[Any]:
    special = {name: cycle(options) for name, options in SPECIAL.items()}
    names = {"eager": cycle(OPTIONS), "tiled": cycle(reversed(OPTIONS))}
    for variant in VARIANTS:
        for backend, cycled in names.items():
            name = next(cycled)
            while (variant in NO_SCORE and name not in NO_SCORE_OPTIONS) or (
                variant in NO_LSE and name == "lse"
            ):
                name = next(cycled)
            marks = [] if variant in QUICK else [pytest.mark.slow]
            case = f"{variant}-{backend}-{name}"
            yield pytest.param(variant, backend, OPTIONS[name], id=case, marks=marks)
        for backend, options in special.items():
            if VARIANT_BACKENDS[variant][backend] is RUNS:
                quick = variant in (*QUICK, "softmax")
                marks = [] if quick else [pytest.mark.slow]
                case = f"{variant}-{backend}"
                yield pytest.param(variant, backend, next(options), id=case, marks=marks)


CELLS = list(cells())

# torch 2.13 traces an autograd.Function by making one, which torch itself warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def results(function: Any, attend: Attention, options: dict[str, Any]) -> list[Tensor]:
    """Outputs and gradients of q, k, v and what is learned."""
    leaves = [rand(2, 4, 9, 8, seed=i).float().requires_grad_() for i in range(3)]
    attend.zero_grad()
    out = function(*leaves, **options)
    outs = list(out) if isinstance(out, tuple) else [out]
    sum(x.square().sum() for x in outs).backward()
    gradients = [x.grad for x in (*leaves, *attend.parameters())]
    assert all(x is not None for x in gradients)
    return [x.detach().clone() for x in (*outs, *gradients)]


@pytest.mark.parametrize(("variant", "backend", "options"), CELLS)
def test_compiles_whole_and_agrees(variant: str, backend: str, options: dict[str, Any]) -> None:
    params = CASES[variant].params
    names = tuple(CASES[variant].learned)
    if (variant, backend) == ("entmax", "eager"):
        names = ()  # a definition that bisects α unrolls into 17 s of compilation
    attend = Attention(variant, 4, learn=names, **params, **(learned(variant, 4) if names else {}))
    options = {**options, "backend": backend}
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for have, want in zip(
        results(compiled, attend, options), results(attend, attend, options), strict=True
    ):
        assert torch.allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_every_option_is_compiled(backend: str) -> None:
    compiled = {cell.id.split("-", 2)[2] for cell in CELLS if cell.values[1] == backend}
    assert compiled == set(OPTIONS)


@pytest.mark.parametrize("backend", ["tiled", "sdpa"])
def test_other_lengths_and_scales_are_compiled_too(backend: str) -> None:
    """At the second value torch makes a symbol of a number: nothing may mind."""
    attend = Attention("softmax", 4, learn=())
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n, scale in ((9, 0.5), (12, 0.25)):
        q, k, v = (rand(2, 4, n, 8, seed=i).float() for i in range(3))
        options = {"is_causal": True, "scale": scale, "backend": backend}
        assert torch.allclose(compiled(q, k, v, **options), attend(q, k, v, **options), atol=1e-6)


def test_other_parameters_are_compiled_too() -> None:
    """A model has the same variant with another number in another layer."""
    q, k, v = (rand(2, 4, 9, 8, seed=i).float() for i in range(3))
    for alpha in (1.3, 2.0):
        attend = Attention("entmax", 4, alpha=alpha)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out = compiled(q, k, v, backend="tiled")
        assert torch.allclose(out, attend(q, k, v, backend="tiled"), atol=1e-6)


def test_dropout_compiles() -> None:
    attend = Attention("softmax", 4)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k = (rand(2, 4, 9, 8, seed=i).float().requires_grad_() for i in range(2))
    eye = torch.eye(9).expand(2, 4, 9, 9)  # the output is the weights
    out = compiled(q, k, eye, dropout_p=0.5, backend="tiled")
    out.sum().backward()
    assert bool(q.grad.isfinite().all())
    assert 0.4 < float((out != 0).float().mean()) < 0.6
    assert not torch.equal(out, compiled(q, k, eye, dropout_p=0.5, backend="tiled"))
