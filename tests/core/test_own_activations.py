"""User-defined activations run on every backend that their properties allow.

Outputs and gradients of `tiled`, the kernels and `sdpa` are compared with those of a dense
computation in this file. The error bounds are those of `helpers.agreement`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable
from math import e, log2
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import Activation, FromStatistics, Pairwise
from attnzoo.backends import BACKENDS
from attnzoo.core import registry
from attnzoo.core.activations import SOFTPICK
from attnzoo.core.arguments import check_call
from helpers.agreement import disagreements, make
from helpers.cases import rand
from helpers.coverage_table import FORWARD_ONLY, KERNELS, marked

MODULE = "helpers.own_kernels:"
EXP = Activation(
    "exponential", lambda s, shape: s.exp(), lambda s, phi, shape: phi, triton=MODULE + "exp",
    unit=log2(e), exponential=True, convex=True,
)  # fmt: skip
ENTMAX175 = Activation(
    "entmax175",
    lambda s, shape: (1 + 0.75 * s).relu() ** (4 / 3),
    lambda s, phi, shape: phi**0.25,
    triton=MODULE + "entmax175",
    alpha=1.75,
)
# u + u² with u = [1 + x]_+ is convex, is not a q-exponential, and has the value 2 at x = 0.
RAMP = Activation(
    "ramp",
    lambda s, shape: (1 + s).relu() + (1 + s).relu() ** 2,
    lambda s, phi, shape: (1 + 4 * phi).sqrt() * (phi > 0),
    convex=True,
)
# A family of activations [1 + x]_+^shape with the parameter `shape`.
POWER = Activation(
    "power",
    lambda s, shape: (1 + s).relu() ** shape,
    lambda s, phi, shape: shape * (1 + s).relu() ** (shape - 1),
    lambda s, phi, shape: torch.where(phi > 0, phi * (1 + s).clamp(min=1e-30).log(), 0.0),
    convex=True,
)
SQUARE = Activation("square", lambda s, shape: s.relu() ** 2, lambda s, phi, shape: 2 * phi.sqrt())
TAME = Activation(
    "tame",
    lambda s, shape: 1 / (1 + s.clamp(max=0) ** 2),
    lambda s, phi, shape: -2 * s.clamp(min=-1e18, max=0) * phi**2,
    triton=MODULE + "tame",
)
SHAPE = torch.tensor([1.5, 2.5])[:, None]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variants that a test registers."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))


def shaped(form: Pairwise) -> Tensor | None:
    """Append a key axis to the activation's shape parameter, to broadcast it over the scores."""
    return None if form.shape is None else form.shape[..., None]


def phi_of(form: Pairwise, s: Tensor) -> Tensor:
    return form.activation.value(s.clone(), shaped(form))


def threshold(form: Pairwise, s: Tensor, visible: Tensor) -> Tensor:
    """Solve Σ φ(s − τ) = 1 for τ: bisection, then two Newton steps, the last with a gradient."""
    with torch.no_grad():
        low = s.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
        low = low.masked_fill(low == float("-inf"), 0.0)
        high = low + 20
        for _ in range(100):
            tau = (low + high) / 2
            above = (phi_of(form, s - tau) * visible).sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, tau, low), torch.where(above, high, tau)
        tau = low
    for _ in range(2):
        tau = tau.detach()
        phi = phi_of(form, s - tau) * visible
        slope = form.activation.slope(s - tau, phi, shaped(form)).detach() * visible
        slope = slope.sum(-1, keepdim=True)
        tau = tau + (phi.sum(-1, keepdim=True) - 1) / slope.masked_fill(slope == 0, 1.0)
    return tau


def weights_of(form: Pairwise) -> Callable[..., Tensor]:
    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        s, visible = call.scores(q, k) + call.bias, call.visible
        if form.normalize == "none":
            return (phi_of(form, s - form.offset) * visible).expand_as(s)
        if form.normalize == "threshold":
            # Invisible keys get a finite score here and a weight of 0 below.
            seen = s.masked_fill(~visible, 0.0)
            return phi_of(form, seen - threshold(form, seen, visible)) * visible
        if form.keep is not None:
            ranked = s.masked_fill(~visible, float("-inf"))
            order = ranked.sort(stable=True, dim=-1, descending=True).indices[..., : form.keep]
            visible = torch.zeros_like(s).scatter(-1, order, 1.0).bool() & visible
        if form.activation is EXP:
            s = s - call.hide(s).amax(-1, keepdim=True).detach()
        phi = phi_of(form, s) * visible
        total = phi.sum(-1, keepdim=True)
        return phi / total.masked_fill(total == 0, 1.0)

    return weights


def register(form: Pairwise, **fields: Any) -> None:
    attnzoo.register_variant(
        attnzoo.Variant("mine", "-", "-", weights_of(form), forms=lambda call: (form,), **fields)
    )


FORMS = {
    "exp, sum": Pairwise(EXP, "sum"),
    "exp, select": Pairwise(EXP, "select", keep=3),
    "exp, threshold": Pairwise(EXP, "threshold"),
    "α = 1.75": Pairwise(ENTMAX175, "threshold"),
    "convex": Pairwise(RAMP, "threshold"),
    "family": Pairwise(POWER, "threshold", shape=SHAPE[None]),
    "square, select": Pairwise(SQUARE, "select", keep=3),
    "none": Pairwise(TAME, "none", offset=0.3),
}
TILED = {"exp, select", "exp, threshold", "convex", "family", "square, select"}
CASES = [marked(name, "tiled") for name in FORMS]
CASES += [marked(name, backend) for name in FORMS if name not in TILED for backend in KERNELS[:2]]
CASES += [marked("exp, sum", "sdpa")]
INPUTS = {
    "shape": (9, 14), "dtype": torch.float32, "span": "causal", "mask": "keys", "heads": "2 heads",
    "values": "same", "bias": None, "segments": False, "dropout": False, "lse": False,
    "params": "default", "mask_gradient": False,
}  # fmt: skip


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_backends_agree_with_the_definition(name: str, backend: str) -> None:
    register(FORMS[name])
    kind = {**INPUTS, "mask": "none", "span": "full"} if backend == "sdpa" else INPUTS
    if backend == "decode":
        kind = {**INPUTS, "shape": (2, 100)}
    for seed in range(2):
        inputs = make("mine", kind, seed)
        gradients = backend not in FORWARD_ONLY
        assert disagreements("mine", backend, inputs, gradients=gradients) == []


@pytest.mark.parametrize("normalize", ["threshold", "sum"])
def test_shape_parameter_gets_its_gradient(normalize: Any) -> None:
    def form(power: Tensor) -> Pairwise:
        return Pairwise(POWER, normalize, shape=power)

    attnzoo.register_variant(
        attnzoo.Variant(
            "mine", "-", "-", lambda q, k, call, power: weights_of(form(power[..., 0]))(q, k, call),
            params=(attnzoo.Param("power", init=2.0),), forms=lambda call, power: (form(power),),
        )
    )  # fmt: skip
    leaves = [rand(1, 2, 9, 8, seed=i).requires_grad_() for i in range(3)]
    leaves.append(SHAPE[:, 0].double().requires_grad_())
    results = []
    for backend in ("tiled", "eager"):
        *qkv, power = leaves
        out = attnzoo.attention(*qkv, "mine", is_causal=True, backend=backend, power=power)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_supported_backends_follow_from_the_properties(name: str) -> None:
    register(FORMS[name])
    q, k, v = (rand(1, 2, 9, 8, seed=i).float() for i in range(3))
    able = {c.backend: c.reason for c in attnzoo.explain(q, k, v, "mine").candidates}
    assert able["tiled"] is None
    assert (able["sdpa"] is None) == (name == "exp, sum")
    reason = {
        "exp, threshold": "exponential, which has no alpha",
        "convex": "has no Triton implementation",
    }
    assert reason.get(name, "") in str(able["flash"])


def test_a_copy_of_an_activation_works_without_the_original() -> None:
    """The operator of tiled looks up an activation by a string."""
    q, k, v = (rand(1, 2, 9, 4, seed=i) for i in range(3))
    copied = copy.deepcopy(Activation("copied", SQUARE.value, SQUARE.slope))
    outs = []
    for activation in (SQUARE, copied):
        register(Pairwise(activation, "sum"))
        outs.append(attnzoo.attention(q, k, v, "mine", backend="tiled"))
        registry._VARIANTS.pop("mine")
    assert torch.equal(*outs)


def test_value_may_overwrite_what_no_slope_reads() -> None:
    """Otherwise gradients would be wrong, so the backward raises."""
    q, k, v = rand(3, 1, 2, 9, 4).unbind()
    for slope, reads in (
        (lambda s, phi, shape: 3 * s.relu().square(), True),
        (lambda s, phi, shape: 3 * phi.pow(2 / 3), False),
    ):
        cube = Activation("cube", lambda s, shape: s.relu_().pow_(3), slope)
        leaf, form = q.clone().requires_grad_(), Pairwise(cube, "sum")
        out, _ = BACKENDS["tiled"].run(leaf, k, v, check_call(leaf, k, v), form)
        if reads:
            with pytest.raises(ValueError, match="value must not overwrite s, because slope reads"):
                out.sum().backward()
        else:
            out.sum().backward()


@pytest.mark.parametrize("normalize", ["sum", "threshold", "none"])
def test_lse_is_computed_from_the_form_only_if_the_form_is_a_softmax(normalize: Any) -> None:
    form = Pairwise(EXP, normalize, offset=0.3 if normalize == "none" else None)
    register(form, scores=lambda q, k, call: call.scores(q, k))
    q, k, v = (rand(1, 2, 9, 8, seed=i) for i in range(3))
    options: dict[str, Any] = {"backend": "tiled", "return_lse": True}
    plan = attnzoo.explain(q, k, v, "mine", **options)
    (tiled,) = [c for c in plan.candidates if c.backend == "tiled" and c.form is form]
    assert (tiled.reason is None) == (normalize == "sum")
    _, lse = attnzoo.attention(q, k, v, "mine", **options)
    assert torch.allclose(lse, (q @ k.mT / 8**0.5).logsumexp(-1))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": 5}, TypeError, "name of Activation must be a str, got 5"),
    ({"value": None}, TypeError, "activation 'mine': value must be a function, got None"),
    ({"slope": "x"}, TypeError, "activation 'mine': slope must be a function, got 'x'"),
    ({"shape_slope": 1}, TypeError, "shape_slope must be a function or None, got 1"),
    ({"integral": 1}, TypeError, "integral must be a function or None, got 1"),
    ({"triton": 3}, TypeError, "triton must be 'module:name' or None, got 3"),
    ({"unit": "1"}, TypeError, "unit must be a number, got '1'"),
    ({"exponential": 1}, TypeError, "activation 'mine': exponential must be a bool, got 1"),
    ({"increasing": 1}, TypeError, "increasing must be a bool, got 1"),
    ({"alpha": 1.0}, ValueError, r"alpha must be a float in \(1, 2\] or None, got 1.0"),
    ({"alpha": "shape"}, ValueError, r"alpha must be a float in \(1, 2\] or None, got 'shape'"),
    (
        {"alpha": 1.5, "shape_slope": POWER.shape_slope},
        ValueError,
        "alpha must be 'shape' with a shape_slope, or None, got 1.5",
    ),
    ({"alpha": 1.5, "vanishes": False}, ValueError, "vanishes must be True"),
    ({"exponential": True, "vanishes": False}, ValueError, "vanishes must be True"),
    ({"exponential": True, "triton": "a:b"}, ValueError, r"unit must be log2\(e\) .*got 1.0"),
    ({"alpha": 1.5, "triton": "a:b", "unit": 2.0}, ValueError, "unit must be 1.0 .*got 2.0"),
]


@pytest.mark.parametrize(("fields", "error", "words"), WRONG, ids=lambda x: str(x)[:30])
def test_wrong_activation_raises(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Activation(**{"name": "mine", "value": EXP.value, "slope": EXP.slope, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"activation": SQUARE, "normalize": "threshold"}, "with alpha or convex, square has"),
        (
            {"activation": Activation("flat", EXP.value, EXP.slope, vanishes=False)}
            | {"normalize": "select", "keep": 2},
            "vanishes at −∞, flat does not",
        ),
        (
            {"activation": SQUARE, "normalize": "select", "mass": 0.5},
            "mass must be None for square, as it needs φ = exp, got 0.5",
        ),
        ({"activation": EXP, "normalize": "sum", "shape": 1.5}, "shape must be None for expon"),
        ({"activation": POWER, "normalize": "sum"}, "shape must be given for power"),
        ({"activation": EXP, "normalize": "none"}, "offset must be given with normalize='none'"),
        ({"activation": EXP, "normalize": "sum", "factor": 0.5}, "factor must be None with .*0.5"),
        ({"activation": EXP, "normalize": "sum", "eps": 1e-8}, "eps must be 0 for exp.* a sink of"),
        ({"activation": SQUARE, "normalize": "sum", "eps": -1.0}, "finite number >= 0, got -1.0"),
        ({"activation": SQUARE, "normalize": "none", "offset": 0.0, "eps": 1.0}, "eps must be 0 w"),
        ({"activation": EXP, "normalize": "sum", "decay": 1.0}, "distance and decay must be given"),
        ({"activation": SOFTPICK, "normalize": "threshold"}, "threshold"),
        (
            {"activation": SOFTPICK, "normalize": "none", "offset": 0.0},
            "must be 'sum' for softpi",
        ),
        (
            {"activation": SOFTPICK, "normalize": "sum", "sink": 0.0},
            "sink must be None for softp",
        ),
        (
            {"activation": EXP, "normalize": "sum", "key_bias": 1.0}
            | {"gain": FromStatistics(lambda statistics: statistics.entropy, differentiable=False)},
            "key_bias must be None with a gain from statistics",
        ),
    ],
)
def test_wrong_pairwise_raises(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pairwise(**fields)


@pytest.mark.parametrize(
    "field", ["gain", "offset", "shape", "sink", "key_bias", "decay", "factor", "eps"]
)
def test_numbers_of_a_pairwise_form_are_neither_bools_nor_nan(field: str) -> None:
    how = "none" if field == "factor" else "sum"
    fields: dict[str, Any] = {"activation": SQUARE, "normalize": how, "offset": 0.0}
    for wrong in (True, "1"):
        with pytest.raises(TypeError, match=f"{field} must be .*, got {wrong!r}"):
            Pairwise(**fields | {field: wrong})
    with pytest.raises(ValueError, match=f"{field} must .*, got nan"):
        Pairwise(**fields | {field: float("nan")})


def test_activations_that_threads_create_have_different_keys() -> None:
    interval, made = sys.getswitchinterval(), list[Activation]()
    start = threading.Barrier(4)

    def create() -> None:
        start.wait()
        made.extend(dataclasses.replace(RAMP, name="race") for _ in range(500))

    threads = [threading.Thread(target=create) for _ in range(4)]
    sys.setswitchinterval(1e-6)  # threads change often
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({activation.key for activation in made}) == 2000
