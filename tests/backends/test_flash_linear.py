"""flash_linear agrees with the fp64 definition.

For sequences that are processed in parts, flash_linear agrees with the backend ``linear``. The
kernels run in Triton's interpreter with chunks of 32 tokens and blocks of 16 features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import attnzoo
from attnzoo.backends import linear
from attnzoo.backends.triton.linear import backend as flash_linear
from attnzoo.backends.triton.linear import operators as linear_ops
from attnzoo.backends.triton.linear.state import layout, pack, split, unpack
from attnzoo.functional.prepare import prepare
from helpers.agreement import by_backend, disagreements, make
from helpers.cases import params_of, rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS
from helpers.covering import covering, label
from helpers.kernel_paths import Level, quick_rows, quick_variants
from helpers.operators import opcheck

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

KINDS = ("linear",)
LINEAR = [v for v, reasons in VARIANT_BACKENDS.items() if reasons["flash_linear"] is RUNS]
PARAMS: dict[str, dict[str, Any]] = {name: params_of(name) for name in LINEAR}
every_variant = pytest.mark.parametrize("variant", quick_variants(LINEAR, KINDS))

FACTORS = {
    "shape": ((1, 1), (63, 63), (100, 100), (17, 63), (100, 17), (1, 70), (33, 32)),
    "batch": (1, 2),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ("none", "keys"),
    "mask_gradient": (False,),
    "span": ("full", "causal"),
    "heads": ("2 heads", "gqa", "3 of 1"),
    "params": ("default",),
    "values": ("same",),
    "dims": ((8, 8), (16, 16), (16, 72), (12, 5)),
    "bias": (None,),
    "segments": (False, True, "sorted"),
    "dropout": (False,),
    "lse": (False,),
    "layout": ("contiguous", "bnhd", "sliced"),
}

# If several pairs (variant, parameters) take the same path through the kernel, one of them is
# tested over all FACTORS, and the others run only these cases.
THIN = [
    {name: values[0] for name, values in FACTORS.items()}
    | {"shape": (63, 63), "span": span, "mask": "keys", "heads": "gqa", "dtype": dtype}
    for span in ("causal", "full")
    for dtype in FACTORS["dtype"]
]
THIN += [{**case, "segments": "sorted"} for case in THIN]


def allowed(case: dict[str, Any]) -> bool:
    """The same segments for queries and keys need as many queries as keys."""
    queries, keys = case.get("shape", (1, 1))
    return case.get("segments") != "sorted" or queries == keys


def cases() -> Iterator[Any]:
    """Yield the quick cases of `quick_rows` and, marked slow, a covering array for one variant."""
    levels = [Level(variant, "default") for variant in LINEAR]
    for seed, (variant, case) in enumerate(quick_rows(FACTORS, levels, allowed, THIN, KINDS)):
        yield pytest.param(variant, case, seed, id=f"quick-{variant}-{label(case)}")
    for seed, case in enumerate(covering(tuple(FACTORS.items()), allowed)):
        # taylor has the most features, and they may be negative.
        name = f"taylor-{label(case)}"
        yield pytest.param("taylor", case, seed, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("variant", "case", "seed"), list(cases()))
def test_agrees_with_the_definition(variant: str, case: dict[str, Any], seed: int) -> None:
    assert disagreements(variant, "flash_linear", make(variant, case, seed=10 * seed)) == []


def qkv(n: int, kv_heads: int = 2, gradient: bool = False) -> list[Tensor]:
    shapes = (2, 4, n, 6), (2, kv_heads, n, 6), (2, kv_heads, n, 5)
    return [rand(*s, seed=i).float().requires_grad_(gradient) for i, s in enumerate(shapes)]


def in_parts(backend: Any, variant: str, tensors: list[Tensor], cuts: list[int]) -> list[Tensor]:
    """Run a sequence in parts, split at ``cuts``. Return [outputs (B, H, N, Dv), last state]."""
    sums, out = None, []
    for start, stop in zip([0, *cuts], [*cuts, tensors[0].shape[2]], strict=True):
        q, k, v = (x[:, :, start:stop] for x in tensors)
        arguments = {"is_causal": True, "enable_gqa": True, **PARAMS[variant]}
        ready = prepare(q, k, v, variant, arguments, positions=(start, start))
        forms = ready.variant.forms(ready.call, **ready.params)
        form = next(f for f in forms if isinstance(f, attnzoo.Linear))
        done, sums = backend.scan(q, k, v, ready.call, form, sums)
        out.append(done)
    assert sums is not None
    return [torch.cat(out, dim=2), sums]


@pytest.mark.parametrize(
    "cuts",
    [[1], [40, 41], *(pytest.param(x, marks=pytest.mark.slow) for x in ([], [32], [0, 33, 64]))],
    ids=str,
)
@every_variant
def test_parts_agree_with_linear(variant: str, cuts: list[int]) -> None:
    """flash_linear and linear give the same outputs, states and gradients."""
    results = []
    for backend in (flash_linear, linear):
        leaves = qkv(70, gradient=True)
        out, sums = in_parts(backend, variant, leaves, cuts)
        do, dsums = rand(*out.shape, seed=5).float(), rand(*sums.shape, seed=6).float()
        grads = torch.autograd.grad((out * do).sum() + (sums * dsums).sum(), leaves)
        results.append([out.detach(), sums.detach(), *grads])
    for have, want in zip(*results, strict=True):
        assert float((have - want).abs().max()) <= 2e-5 * float(want.abs().max())


@every_variant
def test_gradient_of_the_initial_state_agrees_with_linear(variant: str) -> None:
    """Only the state requires a gradient, not q, k and v."""
    tensors, gradients = qkv(40), []
    for backend in (flash_linear, linear):
        arguments = {"is_causal": True, "enable_gqa": True, **PARAMS[variant]}
        ready = prepare(*tensors, variant, arguments, positions=(3, 3))
        forms = ready.variant.forms(ready.call, **ready.params)
        form = next(f for f in forms if isinstance(f, attnzoo.Linear))
        size = form.size(tensors[0].shape[-1])
        first = rand(2, 2, size, 6, seed=7).float().abs().requires_grad_()
        out, last = backend.scan(*tensors, ready.call, form, first)
        gradients.append(torch.autograd.grad(out.square().sum() + last.sum(), first)[0])
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


@every_variant
def test_empty_tensors_and_queries_without_keys_give_zeros(variant: str) -> None:
    for batch, queries, keys, causal in ((0, 5, 5, True), (2, 0, 5, False), (2, 5, 0, False),
                                         (2, 0, 5, True), (2, 9, 4, True)):  # fmt: skip
        q, k, v = (rand(batch, 2, n, 8).float().requires_grad_() for n in (queries, keys, keys))
        out = attnzoo.attention(
            q, k, v, variant, is_causal=causal, backend="flash_linear", **PARAMS[variant]
        )
        assert out.shape == (batch, 2, queries, 8)
        assert bool((out[:, :, : max(0, queries - keys)] == 0).all())
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_features_of_fp16_do_not_overflow() -> None:
    """For most pairs here, (q·k)²/2 exceeds 65504, the largest fp16 number."""
    q, k, v = (60 * x.half() for x in qkv(40))
    out = attnzoo.attention(q, k, v, "taylor", is_causal=True, enable_gqa=True, scale=1.0,
                            backend="flash_linear")  # fmt: skip
    exact = attnzoo.attention(
        *(x.double() for x in (q, k, v)), "taylor", is_causal=True, enable_gqa=True, scale=1.0
    )
    assert float((out.double() - exact).abs().max()) <= 4e-3 * float(exact.abs().max())


def test_results_are_deterministic() -> None:
    case = {name: levels[0] for name, levels in FACTORS.items()}
    inputs = make("taylor", {**case, "shape": (40, 40), "heads": "gqa", "span": "causal"})
    first, second = (by_backend("taylor", "flash_linear", inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- operators, compilation ----------------------------------------------------------------------


def features(gradient: bool) -> tuple[Tensor, ...]:
    """Features of q (1, 4, 40, 24), features of k (1, 2, 40, 24), v and an initial state."""
    x, y = rand(1, 4, 40, 24, seed=1).float().abs(), rand(1, 2, 40, 24, seed=2).float().abs()
    v, first = rand(1, 2, 40, 5, seed=3).float(), rand(1, 2, 24, 12, seed=4).float().abs()
    return tuple(t.requires_grad_(gradient) for t in (x, y, v, first))


@pytest.mark.slow
def test_opcheck() -> None:
    x, y, v, first = features(True)
    for operands in attended(x, y, v, first):
        opcheck(linear_ops.linear_forward, **operands)


@pytest.mark.slow
def test_opcheck_backward() -> None:
    for operands in attended(*features(False)):
        saved = linear_ops.linear_forward(**operands)._asdict()
        tensors = {n: x for n, x in operands.items() if n not in ("value_dim", "dtype")}
        tensors.pop("both_sides")
        wanted = [n for n, x in tensors.items() if x is not None and n != "bounds"]
        for dlast in (None, saved["last"]):
            opcheck(
                linear_ops.linear_backward, **tensors, **saved,
                dout=torch.ones_like(saved["out"]), dlast=dlast, wanted=wanted,
            )  # fmt: skip


def attended(x: Tensor, y: Tensor, v: Tensor, first: Tensor) -> list[dict[str, Any]]:
    """Operands of `linear_forward`: without causality, with it, and with two segments."""
    names = "y", "v", "y_before", "v_before", "first", "bounds", "both_sides"
    halves = torch.tensor([[[0] * 20 + [20] * 20, [20] * 20 + [40] * 20]], dtype=torch.int32)
    cases = [
        (None, None, y, v, first, None, False), (y, v, None, None, first, None, False),
        (y, v, y, v, None, None, False), (y, v, None, None, None, halves, False),
        (y, v, None, None, None, halves, True),
    ]  # fmt: skip
    shared = {"x": x, "value_dim": v.shape[3], "dtype": v.dtype}
    return [{**shared, **dict(zip(names, case))} for case in cases]


# While tracing, torch instantiates an autograd.Function and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@every_variant
def test_compiles_without_graph_breaks_and_agrees(variant: str, causal: bool) -> None:
    def attend(*tensors: Tensor) -> Tensor:
        return attnzoo.attention(
            *tensors, variant=variant, is_causal=causal, enable_gqa=True, backend="flash_linear",
            **PARAMS[variant],
        )  # fmt: skip

    torch.compiler.reset()
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = qkv(40, gradient=True)
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for have, want in zip(*results, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_double_backward_raises(causal: bool) -> None:
    q, k, v = qkv(9, gradient=True)
    out = attnzoo.attention(
        q, k, v, "taylor", enable_gqa=True, is_causal=causal, backend="flash_linear"
    )
    (dv,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    assert dv.requires_grad
    with pytest.raises(RuntimeError, match="eager"):
        torch.autograd.grad(dv.square().sum(), k)


@pytest.mark.parametrize("value_dim", [5, 16])
def test_states_of_bf16_features_keep_16_bits(value_dim: int) -> None:
    """A state is stored as two bf16 numbers per value, and three per normalizer."""
    n, size, chunk = 100, 16, 32
    x, y = (rand(1, 1, n, size, seed=i).bfloat16() for i in range(2))
    v = rand(1, 1, n, value_dim, seed=2).bfloat16()
    states = linear_ops.linear_forward(
        x=x,
        y=y,
        v=v,
        y_before=None,
        v_before=None,
        first=None,
        bounds=None,
        both_sides=False,
        value_dim=value_dim,
        dtype=v.dtype,
    ).states
    assert states is not None
    states = states[0, 0].double()
    values = (value_dim + 7) // 8 * 8
    sums = states[..., :value_dim] + states[..., values : values + value_dim]
    for c in range(states.shape[0]):
        before = y[0, 0, : c * chunk].double()
        exact = before.T @ v[0, 0, : c * chunk].double()
        assert bool(((sums[c] - exact).abs() <= 2**-15 * exact.abs() + 1e-5).all())
        normalizer = states[c, :, 2 * values :].sum(-1)
        assert torch.allclose(normalizer, before.sum(0), rtol=0, atol=1e-5)


def test_a_split_state_adds_up_to_the_state() -> None:
    state = pack(rand(2, 3, 8, 5), rand(2, 3, 8, 1, seed=1), 8).float()
    parts = split(state, 5, torch.bfloat16).double()
    assert parts.shape[-1] == layout(5, 16).WIDTH
    total = torch.cat([parts[..., :5] + parts[..., 8:13], parts[..., 16:].sum(-1, True)], dim=-1)
    assert torch.allclose(total, torch.cat(unpack(state, 5), -1).double(), rtol=2**-16, atol=0)
    assert split(state, 5, torch.float32) is state


# For forward-mode derivatives torch imports code that uses its deprecated torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tangents_of_parameters_are_refused() -> None:
    """Without the error, the tangent would silently be 0."""
    q, k, v = (rand(1, 2, 9, 8, seed=seed).float() for seed in range(3))
    key_map = torch.eye(8).expand(2, 8, 8).contiguous()
    with forward_ad.dual_level(), torch.no_grad():
        learned = forward_ad.make_dual(key_map, torch.ones_like(key_map))
        with pytest.raises(ValueError, match="forward-mode.*backend='eager'"):
            attnzoo.attention(q, k, v, variant="hedgehog", backend="flash_linear", key_map=learned)
