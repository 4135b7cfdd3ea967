"""`flash` and `decode` with each term of a pairwise form, against the form written out in fp64.

The terms are the softcap, the key bias, the offset, the gain and the bias by distance, the factor,
and a float mask, which has a gradient too. The allowed error of each element is that of
`error_budget`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends import BACKENDS
from attnzoo.core.activations import (
    ENTMAX15,
    EXP,
    RELU,
    RELU2,
    RELU_POWER,
    SIGMOID,
    SILU,
    SOFTPICK,
    SPARSEMAX,
    TAYLOR,
)
from attnzoo.core.arguments import check_call
from attnzoo.core.call import Call
from attnzoo.core.distance import LOGARITHMIC
from helpers.agreement import disagreements as variant_disagreements
from helpers.agreement import make, violations
from helpers.cases import rand
from helpers.error_budget import Problem, analyse
from helpers.pairwise import dense_output

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

HEADS, KV_HEADS, DIM = 4, 2, 16
QUERIES, KEYS = 37, 45

PLUGIN = "helpers.own_kernels:"  # functions of a plugin
NEAR = attnzoo.Distance(
    "near",
    gain=lambda t, decay: 1 / (1 + decay * t),
    gain_slope=lambda t, decay: -t / (1 + decay * t) ** 2,
    triton=PLUGIN + "near",
    triton_slope=PLUGIN + "near_slope",
)
ROOT = attnzoo.Distance(
    "root",
    bias=lambda t, decay: -decay * t.sqrt(),
    bias_slope=lambda t, decay: -t.sqrt(),
    triton=PLUGIN + "root",
    triton_slope=PLUGIN + "root_slope",
)

# Name -> the activation, the normalization, and the fields of a form. A pair is the mean and the
# deviation of a vector.
FORMS: dict[str, tuple[attnzoo.Activation, Any, dict[str, Any]]] = {
    "plain": (EXP, "sum", {}),
    "gain": (EXP, "sum", {"gain": (0.5, 1.0)}),
    "key bias": (EXP, "sum", {"key_bias": (0.0, 0.7)}),
    "key bias, offset, gain": (
        EXP, "sum", {"key_bias": (30.0, 0.7), "offset": (30.0, 0.5), "gain": (1.0, 0.3)},
    ),
    "offset, sink": (EXP, "sum", {"offset": (0.5, 0.3), "sink": (0.0, 0.5)}),
    "key bias, sink": (EXP, "sum", {"key_bias": (0.0, 0.5), "sink": (0.0, 0.5)}),
    "sigmoid, key bias, gain": (
        SIGMOID, "none", {"key_bias": (0.0, 0.7), "offset": (2.0, 0.5), "gain": (1.0, 0.3)},
    ),
    "factor": (SIGMOID, "none", {"offset": (1.0, 0.3), "factor": (0.5, 0.3)}),
    "relu, factor": (RELU, "none", {"offset": (0.0, 0.3), "factor": (0.1, 0.05)}),
    "relu2, factor, gain": (
        RELU2, "none", {"offset": (0.0, 0.3), "factor": (0.1, 0.05), "gain": (1.0, 0.3)},
    ),
    "silu, factor, gain": (
        SILU, "none", {"offset": (0.0, 0.3), "factor": (0.1, 0.05), "gain": (1.0, 0.3)},
    ),
    "relu to a power": (
        RELU_POWER, "none", {"offset": (0.0, 0.3), "shape": (1.7, 0.1), "factor": (0.1, 0.05)},
    ),
    "relu2, key bias": (RELU2, "sum", {"key_bias": (0.3, 0.7), "offset": (0.2, 0.3)}),
    "taylor, key bias": (TAYLOR[2], "sum", {"key_bias": (0.0, 0.7), "sink": (0.0, 0.3)}),
    "eps": (RELU2, "sum", {"gain": (1.0, 0.3), "eps": 0.3}),
    "shifted": (SOFTPICK, "sum", {"gain": (2.0, 0.5), "eps": 1e-8}),
    "shifted, key bias": (
        SOFTPICK, "sum", {"key_bias": (3.0, 2.0), "offset": (2.0, 0.5), "eps": 0.1},
    ),
    "threshold, key bias": (
        ENTMAX15, "threshold", {"key_bias": (10.0, 0.7), "offset": (10.0, 0.5), "gain": (1.0, 0.3)},
    ),
    "distance": (EXP, "sum", {"distance": LOGARITHMIC, "decay": (6.0, 1.0)}),
    "distance, gain, sink, offset": (
        EXP, "sum",
        {"distance": LOGARITHMIC, "decay": (2.0, 0.3), "gain": (1.0, 0.3), "sink": (0.0, 0.5),
         "offset": (0.5, 0.3)},
    ),
    "gain by distance, key bias": (
        EXP, "sum", {"distance": NEAR, "decay": (0.2, 0.03), "key_bias": (0.0, 0.7)},
    ),
    "sigmoid, bias by distance, gain": (
        SIGMOID, "none",
        {"distance": ROOT, "decay": (0.5, 0.1), "offset": (2.0, 0.5), "gain": (1.0, 0.3)},
    ),
    "relu2, distance": (RELU2, "sum", {"distance": LOGARITHMIC, "decay": (40.0, 5.0)}),
    "threshold, distance": (
        ENTMAX15, "threshold", {"distance": LOGARITHMIC, "decay": (9.0, 1.0), "gain": (1.0, 0.3)},
    ),
    "threshold, offset": (SPARSEMAX, "threshold", {"offset": (2.0, 0.5)}),
}  # fmt: skip

CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window, key mask": {"is_causal": True, "window": 9,
                         "attn_mask": rand(1, 1, 1, KEYS, seed=9) > -0.5},
    "mask": {"attn_mask": rand(1, 1, QUERIES, KEYS, seed=9) > 1.5},
    "softcap": {"is_causal": True, "softcap": 1.5},
    "softcap, mask, alibi": {"softcap": 30.0, "attn_mask": rand(1, 1, QUERIES, KEYS, seed=9) > 0,
                             "alibi": torch.linspace(0.1, 0.5, HEADS)},
    "segments": {"is_causal": True, "segment_ids": (torch.arange(QUERIES)[None] // 9,
                                                    torch.arange(KEYS)[None] // 11)},
    "float mask, alibi": {"attn_mask": rand(1, HEADS, QUERIES, KEYS, seed=8).float(),
                          "alibi": torch.linspace(0.1, 0.5, HEADS)},
    "float mask, causal, softcap": {"attn_mask": rand(1, 1, QUERIES, KEYS, seed=8).float(),
                                    "is_causal": True, "softcap": 1.5},
    "float key mask, causal": {"attn_mask": rand(1, HEADS, 1, KEYS, seed=8).float(),
                               "is_causal": True},
}  # fmt: skip


def cases() -> list[Any]:
    """Each form with each call. One call per form is quick."""
    cases = []
    for n, form in enumerate(FORMS):
        for m, call in enumerate(CALLS):
            marks = [] if m == n % len(CALLS) else [pytest.mark.slow]
            dtype = (torch.float32, torch.bfloat16)[(n + m) % 2]
            cases.append(pytest.param(form, call, dtype, marks=marks, id=f"{form}-{call}"))
    return cases


def inputs(dtype: torch.dtype, batch: int, queries: int) -> dict[str, Tensor]:
    shapes = {"q": (HEADS, queries), "k": (KV_HEADS, KEYS), "v": (KV_HEADS, KEYS)}
    return {
        name: (1.2 * rand(batch, *shape, DIM, seed=seed)).to(dtype)
        for seed, (name, shape) in enumerate(shapes.items(), 11)
    }


def vectors_of(form: str, batch: int, queries: int) -> dict[str, Tensor]:
    """The vectors of `FORMS`, (B, H, Nq), (B, H, Nk) or (B, H, 1) in fp32."""
    vectors = {}
    distributions = {name: x for name, x in FORMS[form][2].items() if isinstance(x, tuple)}
    for seed, (name, (mean, deviation)) in enumerate(distributions.items(), 21):
        size = {"key_bias": KEYS, "decay": 1}.get(name, queries)
        vectors[name] = (mean + deviation * rand(batch, HEADS, size, seed=seed)).float()
    return vectors


def fixed_of(form: str) -> dict[str, Any]:
    return {name: x for name, x in FORMS[form][2].items() if not isinstance(x, tuple)}


def exact(form: str, tensors: list[Tensor], call: Call, vectors: dict[str, Tensor]) -> Tensor:
    activation, normalize, _ = FORMS[form]
    made = attnzoo.Pairwise(activation, normalize, **vectors, **fixed_of(form))
    if normalize == "threshold":  # the solver of `tiled`, which `test_tiled` checks
        return BACKENDS["tiled"].run(*tensors, call, made)[0]
    return dense_output(*tensors, call, made)


def differentiated(out: Tensor, leaves: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, list(leaves.values()), do.to(out.dtype))
    return {
        "out": out.detach(),
        **dict(zip([f"d{name}" for name in leaves], gradients, strict=True)),
    }


def wide(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in leaves.items()}


def disagreements(
    backend: str, form: str, options: dict[str, Any], dtype: torch.dtype,
    batch: int = 1, queries: int = QUERIES,
) -> list[str]:  # fmt: skip
    """One message for each result or gradient whose error is above its bound."""
    activation, normalize, _ = FORMS[form]
    leaves = {**inputs(dtype, batch, queries), **vectors_of(form, batch, queries)}
    grad = backend != "decode"
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        leaves["attn_mask"] = mask.clone()
    leaves = {name: x.requires_grad_(grad) for name, x in leaves.items()}
    do = rand(batch, HEADS, queries, DIM, seed=31).to(dtype)

    def of(leaves: dict[str, Tensor]) -> tuple[Call, list[Tensor], dict[str, Tensor]]:
        tensors = [leaves[name] for name in "qkv"]
        others = {name: x for name, x in leaves.items() if name not in "qkv"}
        arguments = dict(options)
        if "attn_mask" in others:
            arguments["attn_mask"] = others.pop("attn_mask")
        if "segment_ids" in arguments:
            arguments["segment_ids"] = tuple(x.expand(batch, -1) for x in arguments["segment_ids"])
        return check_call(*tensors, enable_gqa=True, **arguments), tensors, others

    call, tensors, vectors = of(leaves)
    made = attnzoo.Pairwise(activation, normalize, **vectors, **fixed_of(form))
    assert BACKENDS[backend].unsupported(made, call) is None
    out = BACKENDS[backend].run(*tensors, call, made)[0]
    results = differentiated(out, leaves, do) if grad else {"out": out}
    doubled = wide(leaves)
    call, tensors, vectors = of(doubled)
    want = differentiated(exact(form, tensors, call, vectors), doubled, do)
    fixed = {name: x.detach() for name, x in vectors.items()}
    problem = Problem(
        variant=None,
        definition=None,
        backend=backend,
        call=call,
        params={},
        do=do.double(),
        dlse=do.double()[..., 0],
        dtype=dtype,
        **{name: doubled[name].detach() for name in "qkv"},
    )  # type: ignore[arg-type]
    with torch.no_grad():
        bounds = analyse(
            problem, attnzoo.Pairwise(activation, normalize, **fixed, **fixed_of(form))
        )
    if "attn_mask" in leaves:
        shared = [n for n, size in enumerate(doubled["attn_mask"].shape) if size == 1]
        bounds["dattn_mask"] = bounds["dscore"].sum(*shared, keepdim=True)
    allowed = {
        name: x.error[..., 0] if x.error.dim() > want[name].dim() else x.error
        for name, x in bounds.items()
        if name in results
    }
    return violations(backend, results, {name: want[name] for name in results}, allowed)


@pytest.mark.parametrize(("form", "call", "dtype"), cases())
def test_flash_agrees_with_the_form(form: str, call: str, dtype: torch.dtype) -> None:
    batch = 2 if form in ("key bias, offset, gain", "distance") else 1
    assert disagreements("flash", form, CALLS[call], dtype, batch) == []


# flash has a quick test of each form.
@pytest.mark.parametrize(
    "form",
    [pytest.param(x, marks=[pytest.mark.slow] if n % 3 else []) for n, x in enumerate(FORMS)],
)
def test_decode_agrees_with_the_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnzoo.backends.triton.decode.launch.LEAST_KEYS", 32)  # two splits
    dtype = torch.float32 if len(form) % 2 else torch.bfloat16
    options = {"is_causal": True, **({"softcap": 2.0} if "gain" in form else {})}
    assert disagreements("decode", form, options, dtype, batch=2, queries=3) == []


def test_a_distance_without_triton_functions_is_unsupported() -> None:
    q, k, v = inputs(torch.float32, 1, 1).values()
    call = replace(check_call(q, k, v, enable_gqa=True), needs_grad=True)
    bare = attnzoo.Distance("bare", bias=lambda t, decay: -decay * t, bias_slope=lambda t, _: -t)
    half = attnzoo.Distance(
        "half", bias=lambda t, decay: -decay * t, bias_slope=lambda t, _: -t, triton=PLUGIN + "root"
    )
    learned = torch.ones(1, HEADS, 1, requires_grad=True)
    for distance, decay, reason in (
        (bare, 1.0, "does not support bare, which has no Triton implementation"),
        (half, learned, "does not support a gradient for the decay of half"),
    ):
        form = attnzoo.Pairwise(EXP, "sum", distance=distance, decay=decay)
        for backend in ("flash", "decode"):
            actual = BACKENDS[backend].unsupported(form, call)
            assert actual is not None
            assert actual.startswith(reason)
    assert BACKENDS["flash"].unsupported(
        attnzoo.Pairwise(EXP, "sum", distance=half, decay=1.0), call
    ) is None  # fmt: skip


def test_a_triton_function_that_does_not_exist_raises() -> None:
    q, k, v = inputs(torch.float32, 1, 1).values()
    call = check_call(q, k, v, enable_gqa=True)
    missing = attnzoo.Distance("missing", bias=lambda t, decay: -t, triton=PLUGIN + "missing")
    form = attnzoo.Pairwise(EXP, "sum", distance=missing, decay=1.0)
    with pytest.raises(ValueError, match=r"Distance.triton must name a function as 'module:name'"):
        BACKENDS["flash"].run(q, k, v, call, form)


@pytest.mark.parametrize("backend", ["flash", "decode"])
@pytest.mark.parametrize("variant", ["adaptive_temperature", "entmax"])
def test_statistics_and_thresholds_use_capped_logits(variant: str, backend: str) -> None:
    row = {
        "shape": (3, 70), "dtype": torch.float32, "span": "causal", "mask": "none", "heads": "gqa",
        "values": "same", "bias": None, "segments": False, "dropout": False, "lse": False,
        "params": "default", "softcap": 0.8, "dims": (16, 16),
    }  # fmt: skip
    inputs = make(variant, row)
    assert variant_disagreements(variant, backend, inputs, gradients=backend == "flash") == []


@pytest.mark.parametrize("gain", [0.0, -0.7, 1.3])
def test_a_constant_gain_multiplies_capped_logits(gain: float) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(torch.float32, 1, QUERIES).values())
    call = check_call(q, k, v, enable_gqa=True, softcap=0.5)
    form = attnzoo.Pairwise(EXP, "sum", gain=gain)
    do = rand(1, HEADS, QUERIES, DIM, seed=31).float()
    results = {
        backend: differentiated(
            BACKENDS[backend].run(q, k, v, call, form)[0], {"q": q, "k": k, "v": v}, do
        )
        for backend in ("flash", "tiled")
    }
    for name, want in results["tiled"].items():
        torch.testing.assert_close(results["flash"][name], want, rtol=1e-4, atol=2e-6, msg=name)


def test_saturated_logits_and_tiny_logits_of_a_softcap() -> None:
    """tanh of large arguments does not overflow, and small logits keep their digits."""
    q, k, v = inputs(torch.float32, 1, QUERIES).values()
    for size, softcap in ((1e4, 3.0), (1e-5, 1e4), (1.0, 1e6)):
        results, exact = (
            attnzoo.attention(
                size * x, k.to(x.dtype), v.to(x.dtype), softcap=softcap, enable_gqa=True,
                return_lse=True, backend=backend,
            )
            for x, backend in ((q, "flash"), (q.double(), "eager"))
        )  # fmt: skip
        for have, want in zip(results, exact, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("backend", ["flash", "decode"])
def test_a_large_softcap_of_16_bit_inputs_is_unsupported(backend: str) -> None:
    """The error of a capped logit is 1e-7 · softcap."""
    q = torch.zeros(1, 1, 1, DIM, dtype=torch.bfloat16)
    reason = "does not support a softcap above 1000 for torch.bfloat16, got 2000"
    with pytest.raises(ValueError, match=reason):
        attnzoo.attention(q, q, q, softcap=2000.0, backend=backend)
    assert attnzoo.attention(q, q, q, softcap=1000.0, backend=backend).isfinite().all()
    assert attnzoo.attention(*[q.float()] * 3, softcap=2000.0, backend=backend).isfinite().all()


def test_a_bias_that_grows_with_the_distance_leaves_no_nan_in_the_gradients() -> None:
    """Queries beyond the last one, in a block, would have an infinite weight."""
    q, k, v = (rand(1, 1, 70, DIM, seed=n).float().requires_grad_() for n in range(3))
    call = replace(check_call(q, k, v, is_causal=True), needs_grad=True)
    form = attnzoo.Pairwise(EXP, "sum", distance=ROOT, decay=-40.0)
    out = BACKENDS["flash"].run(q, k, v, call, form)[0]
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("activation", [SOFTPICK, RELU2], ids=["softpick", "relu2"])
def test_gradients_of_a_query_whose_weights_are_all_small(activation: attnzoo.Activation) -> None:
    """dS contains (dO·v − dO·o) / Z. An output rounded to bf16 would have an error of 2⁻⁹ / Z."""
    z = 0.01
    q, k, v, do = (rand(1, 1, 16, DIM, seed=n).bfloat16() for n in range(4))
    first = k[0, 0, 0].double()
    q[0, 0, 0] = first * z / (first.square().sum() * DIM**-0.5)
    call = replace(check_call(q, k, v, is_causal=True), needs_grad=True)
    form = attnzoo.Pairwise(activation, "sum")
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
    out = BACKENDS["flash"].run(q, k, v, call, form)[0]
    have = differentiated(out, leaves, do)["dq"][0, 0, 0]
    # The weight of the only visible key is 1, so dS is 0. The sums dO·v and dO·o of D terms have an
    # error of D · 2⁻²³ · Σ|dO v| in fp32.
    terms = float((do[0, 0, 0].double() * v[0, 0, 0].detach().double()).abs().sum())
    slope = 2 / z  # φ'/Z of relu2; that of softpick is half of it
    allowed = 4 * DIM * 2**-23 * terms * slope * float(first.norm()) * DIM**-0.5
    assert float(have.double().norm()) < allowed
