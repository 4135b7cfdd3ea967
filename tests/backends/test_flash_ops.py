"""flash: its operators, autocast, double backward and third-party variants."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import attnzoo
from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common.kernel_operands import Solved
from attnzoo.backends.triton.flash import operators as flash_ops
from attnzoo.core import activations, registry
from helpers.cases import rand
from helpers.operators import opcheck

pytestmark = pytest.mark.interpreter


def qkv(n: int = 9, d: int = 8, gradient: bool = False) -> list[Tensor]:
    """q (1, 2, n, d), k (1, 1, n, d) and v (1, 1, n, d)."""
    shapes = ((1, 2, n, d), (1, 1, n, d), (1, 1, n, d))
    return [rand(*shape, seed=i).float().requires_grad_(gradient) for i, shape in enumerate(shapes)]


MASK = (rand(1, 1, 9, 9, seed=5) > -0.8).view(torch.uint8)
IDS = (torch.arange(9) // 4).expand(1, 9).contiguous()
VECTOR = rand(1, 2, 9, seed=6).float().abs()
NOTHING = Layout(0.3, None, 0, None, None, None, None)
ALL = Layout(0.3, 4, 2, MASK, IDS, IDS, VECTOR)
OFFSET = VECTOR.clone()
KEY_BIAS = Terms(key_bias=VECTOR)
BIASED = NOTHING._replace(mask=rand(1, 1, 9, 9, seed=7).float())
BIASED_KEYS = NOTHING._replace(mask=rand(1, 2, 1, 9, seed=7).float())
ENTMAX = Rule(activations.ENTMAX15, "threshold")
SELECT = Rule(activations.EXP, "select", keep=2)
FORMS: dict[str, tuple[Vectors, Terms, Layout, Rule]] = {
    "online": (
        Vectors(VECTOR, OFFSET, sink=VECTOR), KEY_BIAS, ALL, Rule(activations.EXP, "sum"),
    ),
    "none": (
        Vectors(offset=VECTOR), Terms(factor=VECTOR), NOTHING, Rule(activations.SIGMOID, "none"),
    ),
    "sum": (Vectors(), Terms(), NOTHING, Rule(activations.TAYLOR[2], "sum")),
    "threshold": (Vectors(VECTOR, OFFSET), KEY_BIAS, ALL, ENTMAX),
    "select": (Vectors(VECTOR, OFFSET), KEY_BIAS, ALL, SELECT),
    "bias": (Vectors(), Terms(), BIASED, Rule(activations.EXP, "sum")),
    "bias per key": (Vectors(), Terms(), BIASED_KEYS, Rule(activations.SIGMOID, "none")),
}  # fmt: skip
SLOW = ("none", "sum", "bias per key")
CHECKED = [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in FORMS]


def operands(form: str, gradient: bool) -> dict[str, Any]:
    """The arguments of the operator flash_forward for a key of `FORMS`."""
    vectors, terms, layout, rule = FORMS[form]
    q, k, v = qkv(gradient=gradient)
    solved = Solved()
    if rule.normalize in ("threshold", "select"):
        solved = flash_ops.flash_solve(
            q=q.detach(), k=k.detach(), v=v.detach(), vectors=vectors, terms=terms, layout=layout,
            rule=rule,
        )  # fmt: skip
    vectors, terms = (
        type(group)(*(x if x is None else x.clone().requires_grad_(gradient) for x in group))
        for group in (vectors, terms)
    )
    if "bias" in form:
        assert layout.mask is not None
        layout = layout._replace(mask=layout.mask.clone().requires_grad_(gradient))
    dropout = Dropout(torch.tensor(7), 0.5) if form == "threshold" else NO_DROPOUT
    return {
        "q": q, "k": k, "v": v, "vectors": vectors, "terms": terms, "solved": solved,
        "layout": layout, "rule": rule, "dropout": dropout,
        "want_lse": form in ("online", "select"),
    }  # fmt: skip


def test_opcheck_statistics() -> None:
    q, k, _ = qkv()
    opcheck(flash_ops.flash_statistics, q=q, k=k, layout=ALL)
    opcheck(flash_ops.flash_max_logits, q=q, k=k, layout=ALL)


@pytest.mark.parametrize("shape", [None, 1 + VECTOR.clamp(0.1, 1)], ids=["entmax15", "q_exp"])
def test_opcheck_threshold(shape: Tensor | None) -> None:
    rule = ENTMAX if shape is None else Rule(activations.Q_EXP, "threshold")
    q, k, v = qkv()
    opcheck(
        flash_ops.flash_solve, q=q, k=k, v=v, vectors=Vectors(VECTOR, OFFSET, shape),
        terms=KEY_BIAS, layout=ALL, rule=rule,
    )  # fmt: skip


@pytest.mark.parametrize("rule", [SELECT, SELECT._replace(keep=None, mass=0.7)])
def test_opcheck_selection(rule: Rule) -> None:
    q, k, v = qkv()
    opcheck(
        flash_ops.flash_solve, q=q, k=k, v=v, vectors=Vectors(VECTOR, OFFSET), terms=KEY_BIAS,
        layout=ALL, rule=rule,
    )  # fmt: skip


@pytest.mark.parametrize("form", CHECKED)
def test_opcheck_forward(form: str) -> None:
    opcheck(flash_ops.flash_forward, **operands(form, gradient=True))


@pytest.mark.parametrize("form", CHECKED)
def test_opcheck_backward(form: str) -> None:
    arguments = operands(form, gradient=False)
    results = flash_ops.flash_forward(**arguments)
    dlse = torch.ones_like(results.lse) if arguments.pop("want_lse") else None
    groups = (arguments["vectors"], arguments["terms"])
    vectors = (n for group in groups for n, x in group._asdict().items() if x is not None)
    wanted = ["q", "k", "v", *(["mask"] if "bias" in form else []), *vectors]
    wanted += ["relative_bias"] if arguments["layout"] is ALL else []
    opcheck(
        flash_ops.flash_backward, **arguments, **results._asdict(),
        dout=torch.ones_like(results.out), dlse=dlse, wanted=wanted,
    )  # fmt: skip


# ---- precision and derivatives ----------------------------------------------------------------


def test_autocast_computes_in_its_dtype() -> None:
    leaves = qkv(gradient=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attnzoo.attention(*leaves, "ssmax", enable_gqa=True, backend="flash")
    assert out.dtype == torch.bfloat16
    low = [x.detach().bfloat16() for x in leaves]
    assert torch.equal(out, attnzoo.attention(*low, "ssmax", enable_gqa=True, backend="flash"))
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in leaves)


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "entmax"])
def test_double_backward_raises(variant: str) -> None:
    q, k, v = qkv(gradient=True)
    out = attnzoo.attention(q, k, v, variant, enable_gqa=True, backend="flash")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match="eager"):
        torch.autograd.grad(dq.square().sum(), k)


@pytest.mark.parametrize("shape", [(9, 9), (2, 1, 9)])
def test_a_double_backward_of_a_learned_mask_raises(shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    mask = rand(*shape, seed=3).float().requires_grad_()
    out = attnzoo.attention(q, k, v, attn_mask=mask, enable_gqa=True, backend="flash")
    (gradient,) = torch.autograd.grad(out.square().sum(), mask, create_graph=True)
    with pytest.raises(RuntimeError, match="eager"):
        torch.autograd.grad(gradient.square().sum(), mask)


# For forward-mode derivatives torch imports code that uses its deprecated torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", ["flash", "decode"])
def test_forward_mode_raises_and_names_eager(backend: str) -> None:
    """Without the error, the tangent would silently be 0."""
    q, k, v = qkv()
    slopes, mask = torch.tensor([0.5, 0.25]), rand(9, 9, seed=3).float()
    for name, x in (("q", q), ("alibi", slopes), ("attn_mask", mask), ("b", slopes)):
        with forward_ad.dual_level():
            arguments = {"q": q, "k": k, "v": v, name: forward_ad.make_dual(x, torch.ones_like(x))}
            with torch.no_grad(), pytest.raises(ValueError, match="forward-mode.*backend='eager'"):
                attnzoo.attention(variant="sink", backend=backend, enable_gqa=True, **arguments)


def test_a_learned_mask_runs_without_gradients() -> None:
    """Under no_grad, requires_grad of a parameter is still True, but no gradient is needed."""
    q, k, v = qkv()
    options = {"attn_mask": torch.nn.Parameter(rand(9, 9, seed=3).float())}
    with torch.no_grad():
        outs = [
            attnzoo.attention(q, k, v, "entmax", enable_gqa=True, backend=backend, **options)
            for backend in ("flash", "eager")
        ]
    assert torch.allclose(*outs, atol=1e-5)


# ---- third-party variants ---------------------------------------------------------------------

RELU2 = """
import triton
import triton.language as tl


@triton.jit
def relu2(x, shape):
    u = tl.maximum(x, 0.0)
    return u * u, 2.0 * u
"""


@pytest.fixture
def relu2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Registers a variant with φ = relu(x)², whose Triton implementation is in another module."""
    (tmp_path / "their_kernels.py").write_text(RELU2)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    phi = attnzoo.Activation(
        "their relu2",
        lambda s, shape: s.relu_().square_(),
        lambda s, phi, shape: 2 * phi.sqrt(),
        triton="their_kernels:relu2",
    )

    def weights(q: Tensor, k: Tensor, call: Any, strength: Any) -> Tensor:
        s = strength * call.scores(q, k) + call.bias
        w = s.relu().square().masked_fill(~call.visible, 0.0)
        total = w.sum(-1, keepdim=True)
        return w / total.masked_fill(total == 0, 1.0)

    attnzoo.register_variant(
        attnzoo.Variant(
            "their_relu2", "ReLU(z)² / Σ", "-", weights,
            params=(attnzoo.Param("strength", 1.0),),
            forms=lambda call, strength: (
                attnzoo.Pairwise(phi, "sum", gain=call.per_query(strength)),
            ),
        )
    )  # fmt: skip
    return "their_relu2"


def test_a_third_party_activation_runs(relu2: str) -> None:
    assert "their_kernels" not in sys.modules
    results = []
    for backend in ("flash", "tiled"):
        leaves = [*qkv(70, gradient=True), torch.tensor([0.5, 2.0], requires_grad=True)]
        leaves += [torch.tensor([0.02, 0.1], requires_grad=True)]
        q, k, v, strength, alibi = leaves
        out = attnzoo.attention(
            q, k, v, relu2, strength=strength, alibi=alibi, is_causal=True, enable_gqa=True,
            backend=backend,
        )  # fmt: skip
        do = rand(1, 2, 70, 8, seed=9).float()
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    for have, want in zip(*results, strict=True):
        assert float((have - want).abs().max()) <= 2e-5 * float(want.abs().max())
    del sys.modules["their_kernels"]


@pytest.mark.parametrize(
    ("normalize", "named", "reason"),
    [
        ("sum", True, None),
        ("threshold", False, "does not support a gradient for the parameter of q_exp"),
        ("threshold", True, None),
    ],
)
def test_a_learned_shape_needs_a_function_for_its_slope(
    normalize: str, named: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    slope = activations.Q_EXP.triton_shape_slope if named else None
    phi = replace(activations.Q_EXP, triton_shape_slope=slope)

    def weights(q: Tensor, k: Tensor, call: Any, alpha: Any) -> Tensor:
        raise AssertionError

    def forms(call: Any, alpha: Any) -> tuple:
        return (attnzoo.Pairwise(phi, normalize, shape=call.per_query(alpha)),)

    attnzoo.register_variant(
        attnzoo.Variant("curved", "-", "-", weights, forms=forms,
                        params=(attnzoo.Param("alpha", 1.5),))
    )  # fmt: skip
    alpha = torch.tensor([1.3, 1.7], requires_grad=True)
    call = partial(attnzoo.attention, *qkv(), "curved", alpha=alpha, enable_gqa=True)
    (want,) = torch.autograd.grad(call(backend="tiled").square().sum(), alpha)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            call(backend="flash")
        return
    (gradient,) = torch.autograd.grad(call(backend="flash").square().sum(), alpha)
    assert torch.allclose(gradient, want, rtol=1e-4)


POWER2 = """
import triton
import triton.language as tl


@triton.jit
def power2(x, shape):
    phi = tl.exp2(x)
    return phi, 0.6931471805599453 * phi
"""


@pytest.fixture
def register_power2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that registers the third-party variant w = 2^z and returns its name."""
    (tmp_path / "more_kernels.py").write_text(POWER2)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))

    def register(normalize: str, triton: str = "more_kernels:power2", **fields: Any) -> str:
        phi = attnzoo.Activation(
            "power2", lambda s, shape: s.exp2_(), lambda s, phi, shape: math.log(2) * phi,
            triton=triton,
        )  # fmt: skip
        total = normalize == "sum"

        def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
            w = (call.scores(q, k) + call.bias).exp2().masked_fill(~call.visible, 0.0)
            return w / w.sum(-1, keepdim=True) if total else w

        offset = {} if total else {"offset": 0.0}
        form = attnzoo.Pairwise(phi, normalize, **offset)
        attnzoo.register_variant(
            attnzoo.Variant("power2", "2^z", "-", weights, forms=lambda call: (form,), **fields)
        )
        return "power2"

    yield register
    sys.modules.pop("more_kernels", None)


def test_return_lse_is_supported_for_exp_only(register_power2: Any) -> None:
    """A variant with φ = 2^x has an lse in its definition, but the kernels do not compute it."""
    scores = lambda q, k, call: math.log(2) * (call.scores(q, k) + call.bias)  # noqa: E731
    name, options = register_power2("sum", scores=scores), {"enable_gqa": True, "return_lse": True}
    with pytest.raises(ValueError, match="does not support return_lse except for a softmax"):
        attnzoo.attention(*qkv(), name, backend="flash", **options)
    (_, have), (_, want) = (
        attnzoo.attention(*qkv(), name, backend=backend, **options) for backend in (None, "eager")
    )
    assert torch.allclose(have, want)


@pytest.mark.parametrize("size", [2.2, 0.1])
def test_weights_without_a_normalizer_may_be_large_in_fp16(
    register_power2: Any, size: float
) -> None:
    """At size 2.2 the largest weight is above 65504, the largest fp16 number. The output is not."""
    name = register_power2("none", normalized=False)
    q, k, v = (x.half() for x in qkv())
    q, k, v = size * q, size * k, v * 2.0**-10
    out, want = (
        attnzoo.attention(q, k, v, name, enable_gqa=True, backend=backend).double()
        for backend in ("flash", "eager")
    )
    assert bool(want.isfinite().all())
    assert torch.allclose(out, want, rtol=4e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("triton", ["more_kernels:power3", "nowhere:power2", "power2"])
def test_missing_triton_implementation_is_named_in_the_error(
    register_power2: Any, triton: str
) -> None:
    name = register_power2("sum", triton)
    with pytest.raises(ValueError, match=f"must name a function as 'module:name', got '{triton}'"):
        attnzoo.attention(*qkv(), name, enable_gqa=True, backend="flash")


@pytest.mark.parametrize("backend", ["flash", "tiled", "sdpa"])
def test_parameters_of_a_gain_from_statistics_get_gradients(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics are constants, so the gradient of the gain goes to its parameter only."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))

    def gain(entropy: Tensor, strength: Tensor) -> Tensor:
        return 1.0 + strength * entropy

    def weights(q: Tensor, k: Tensor, call: Any, strength: Any) -> Tensor:
        z = call.scores(q, k)
        with torch.no_grad():
            p = call.softmax(z)
            entropy = torch.special.entr(p).sum(-1)
        return call.softmax(gain(entropy[..., None], strength) * z)

    def forms(call: Any, strength: Any) -> tuple:
        def vector(statistics: attnzoo.Statistics) -> Tensor:
            return gain(statistics.entropy, call.per_query(strength))

        return (attnzoo.Pairwise(activations.EXP, "sum", attnzoo.FromStatistics(vector, False)),)

    attnzoo.register_variant(
        attnzoo.Variant("warm", "softmax((1 + a·H)·z)", "-", weights, forms=forms,
                        params=(attnzoo.Param("strength", 0.0),))
    )  # fmt: skip
    gradients = []
    for name in (backend, "eager"):
        strength = torch.tensor([0.3, -0.1], requires_grad=True)
        out = attnzoo.attention(*qkv(), "warm", strength=strength, enable_gqa=True, backend=name)
        gradients.append(torch.autograd.grad(out.square().sum(), strength)[0])
    assert bool((gradients[1] != 0).all())
    assert torch.allclose(*gradients, rtol=1e-3)


@pytest.mark.parametrize(
    "lazy",
    [
        lambda grad: torch._efficientzerotensor(grad.shape),
        lambda grad: torch.complex(0 * grad, -grad).conj().imag,
    ],
    ids=["zeros without storage", "negated view"],
)
def test_gradients_without_plain_storage(lazy: Any) -> None:
    q, k, v = (rand(1, 2, 40, 1, seed=n).float().requires_grad_() for n in range(3))
    gradients = []
    for backend in ("flash", "eager"):
        out = attnzoo.attention(q, k, v, is_causal=True, backend=backend)
        out.register_hook(lazy)
        gradients.append(torch.autograd.grad(out.sum(), (q, k, v)))
    torch.testing.assert_close(*gradients)
