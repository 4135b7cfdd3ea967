"""User-defined variants: arguments and return values of their functions, and wrong fields."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import FromStatistics, Linear, NoForm, Pairwise, Param, Projection
from attnzoo.core import registry
from attnzoo.core.activations import EXP, SIGMOID
from helpers.cases import rand
from helpers.coverage_table import marked

POWER = torch.tensor([1.0, 1.5, 2.0, 3.0]).double()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variants that a test registers."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))


def register(weights: Callable[..., Any], **fields: Any) -> None:
    attnzoo.register_variant(attnzoo.Variant("mine", "-", "-", weights, **fields))


def shifted_relu(q: Tensor, k: Tensor, call: Any, power: Any) -> Tensor:
    weights = call.scores(q, k).relu() ** power / call.counts.clamp(min=1)[..., None]
    return weights.masked_fill(~call.visible, 0.0)


# (Nq, Nk). H = 4 equals Nk, Nq, both or neither, so that a wrong broadcast fails.
SHAPES = [(5, 4), (4, 6), (4, 4), (5, 6)]


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_parameter_per_head_equals_one_call_per_head(queries: int, keys: int, backend: str) -> None:
    register(shifted_relu, params=(Param("power", 1.0),))
    q, k, v = (rand(2, 4, n, 8, seed=n) for n in (queries, keys, keys))
    options: dict[str, Any] = {"is_causal": True, "backend": backend}
    out = attnzoo.attention(q, k, v, "mine", power=POWER, **options)
    for head, power in enumerate(POWER.tolist()):
        one = (x[:, head : head + 1] for x in (q, k, v))
        alone = attnzoo.attention(*one, "mine", power=power, **options)
        assert torch.allclose(out[:, head : head + 1], alone)
    weights = attnzoo.attention_weights(q, k, v, "mine", is_causal=True, power=POWER)
    assert torch.allclose(weights @ v, out)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize(("batch", "queries"), [(2, 0), (0, 3)])
def test_an_empty_output_has_a_gradient(batch: int, queries: int, backend: str) -> None:
    register(shifted_relu, params=(Param("power", 1.0),))
    q, k, v = (rand(batch, 4, n, 8).requires_grad_() for n in (queries, 5, 5))
    attnzoo.attention(q, k, v, "mine", backend=backend).sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in (q, k, v))


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_parameter_per_query_equals_the_formula(backend: str) -> None:
    register(shifted_relu, params=(Param("power", 1.0, per_token=True),))
    q, k, v = rand(3, 2, 4, 4, 8).unbind()
    power = 1 + rand(2, 4, 4, seed=5).abs()
    out = attnzoo.attention(q, k, v, "mine", power=power, backend=backend)
    z = (q @ k.mT / 8**0.5).relu()
    assert torch.allclose(out, z ** power[..., None] / 4 @ v)


def test_parameter_per_head_gets_its_gradient() -> None:
    register(shifted_relu, params=(Param("power", 1.0),))
    q, k, v = rand(3, 2, 4, 4, 8).unbind()
    power = POWER.clone().requires_grad_()
    z = (q @ k.mT / 8**0.5).relu()
    (expected,) = torch.autograd.grad((z ** power[:, None, None] / 4 @ v).sum(), power)
    for backend in ("eager", "tiled"):
        out = attnzoo.attention(q, k, v, "mine", power=power, backend=backend)
        (gradient,) = torch.autograd.grad(out.sum(), power)
        assert torch.allclose(gradient, expected)


WRONG_WEIGHTS: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (
        lambda q, k, call: call.scores(q, k)[None],
        ValueError,
        r"weights of variant 'mine' must have shape .* = \(2, 4, 5, 6\), got \(1, 2, 4, 5, 6\)",
    ),
    (
        lambda q, k, call: call.scores(q, k).mT,
        ValueError,
        r"weights of variant 'mine' must have shape .*got \(2, 4, 6, 5\)",
    ),
    (
        lambda q, k, call: torch.full((1, 1, 1, call.keys), 1 / call.keys),
        ValueError,
        r"weights of variant 'mine' must have shape .*got \(1, 1, 1, 6\)",
    ),
    (
        lambda q, k, call: call.scores(q, k).to(torch.float64),
        TypeError,
        "weights of variant 'mine' must have the dtype .*torch.float32, got torch.float64",
    ),
    (
        lambda q, k, call: call.visible.expand(2, 4, 5, 6),
        TypeError,
        "weights of variant 'mine' must have the dtype .*torch.float32, got torch.bool",
    ),
    (lambda q, k, call: None, TypeError, "weights .*'mine' must be a tensor, got NoneType"),
]


@pytest.mark.parametrize("case", WRONG_WEIGHTS, ids=lambda case: case[2][-20:])
def test_weights_of_wrong_shape_or_dtype_raise(
    case: tuple[Callable[..., Any], type[Exception], str],
) -> None:
    weights, error, words = case
    register(weights)
    q, k, v = (rand(2, 4, n, 8).float() for n in (5, 6, 6))
    for backend in ("eager", "tiled"):
        with pytest.raises(error, match=words):
            attnzoo.attention(q, k, v, "mine", backend=backend)
    with pytest.raises(error, match=words):
        attnzoo.attention_weights(q, k, v, "mine")


def test_scores_of_wrong_shape_raise() -> None:
    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return call.softmax(call.scores(q, k))

    register(weights, scores=lambda q, k, call: call.scores(q, k)[0])
    q, k, v = (rand(2, 4, n, 8).float() for n in (5, 6, 6))
    with pytest.raises(ValueError, match=r"scores of variant 'mine' must .*got \(4, 5, 6\)"):
        attnzoo.attention(q, k, v, "mine", return_lse=True)


def weights(q: Tensor, k: Tensor, call: Any, **params: Any) -> Tensor:
    return call.softmax(call.scores(q, k))


A, INF = Param("a", 1.0), float("inf")


def positive(**fields: Any) -> tuple[Param]:
    return (Param("a", check=lambda x: x > 0, allowed="above 0", **fields),)


# (wrong fields, error, a pattern of its message)
WRONG_FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": 3}, TypeError, "variant name must be a str, got 3"),
    ({"name": ""}, ValueError, "variant name must be an identifier, got ''"),
    ({"name": "class"}, ValueError, "variant name must be an identifier, got 'class'"),
    ({"formula": None}, TypeError, "'mine': formula must be a str, got None"),
    ({"aliases": "mine too"}, TypeError, "'mine': aliases must be a tuple of str, got 'mine too'"),
    ({"use": None}, TypeError, "'mine': use must be a str, got None"),
    ({"paper": 2024}, TypeError, "'mine': paper must be a str, got 2024"),
    ({"normalized": "no"}, TypeError, "'mine': normalized must be a bool, got 'no'"),
    ({"weights": None}, TypeError, "'mine': weights or scores must be given"),
    (
        {"weights": None, "scores": lambda q, k: q},
        TypeError,
        r"scores must be a function of \(q, k, call\), got \(q, k\): too many",
    ),
    ({"weights": None, "scores": 3}, TypeError, r"scores must be a function of .*, got 3"),
    (
        {"weights": lambda q, k: q},
        TypeError,
        r"weights .* of \(q, k, call\), got \(q, k\): too many",
    ),
    (
        {"weights": lambda q, k, call: q, "params": (A,)},
        TypeError,
        r"weights must be a function of \(q, k, call, a=…\), got \(q, k, call\): .*'a'",
    ),
    (
        {"weights": lambda q, k, call, a: q},
        TypeError,
        "weights .*: missing a required argument: 'a'",
    ),
    ({"scores": "z"}, TypeError, r"scores must be a function of \(q, k, call\), got 'z'"),
    ({"forms": ()}, TypeError, r"forms must be a function of \(call\), got \(\)"),
    (
        {"forms": lambda call: (), "params": (A,)},
        TypeError,
        r"forms .* of \(call, a=…\), got \(call",
    ),
    ({"unsupported": None}, TypeError, r"unsupported must be a function of \(call\), got None"),
    ({"has_state": True}, TypeError, r"has_state must be a function of \(\), got True"),
    (
        {"has_state": lambda: True, "params": (A,)},
        TypeError,
        r"has_state must be a function of \(a=…\), got \(\): got an unexpected .*'a'",
    ),
    ({"example": {}}, TypeError, r"example must be a function of \(length\), got {}"),
    ({"inference_only": 1}, TypeError, "'mine': inference_only must be a bool, got 1"),
    ({"identity": 1}, TypeError, "'mine': identity must be a dict, got 1"),
    ({"identity": {"b": 1}}, ValueError, r"identity must name parameters \(none\), got {'b': 1}"),
    ({"output_defaults": 5}, TypeError, "'mine': output_defaults must be a dict, got 5"),
    ({"calibrate": 1.0}, TypeError, r"calibrate must be a function of \(log_n\), got 1.0"),
    ({"params": A}, TypeError, r"params must be a tuple of Param, got Param\(name='a'"),
    ({"params": [A]}, TypeError, r"params must be a tuple of Param, got \[Param"),
    ({"params": {"a": 1.0}}, TypeError, "params must be a tuple of Param, got {'a': 1.0}"),
    ({"params": (A, A)}, ValueError, "params must have distinct names, got a, a"),
    ({"params": (Param(3),)}, TypeError, "parameter name must be a str, got 3"),
    ({"params": (Param("a b"),)}, ValueError, "parameter name must be an identifier, got 'a b'"),
    ({"params": (Param("lambda"),)}, ValueError, "name must be an identifier, got 'lambda'"),
    ({"params": (Param("a", kind="x"),)}, ValueError, "kind must be one of 'per_head', .*got 'x'"),
    ({"params": (Param("a", doc=None),)}, TypeError, "'a': doc must be a str, got None"),
    ({"params": (Param("a", allowed=1),)}, TypeError, "'a': allowed must be a str, got 1"),
    ({"params": (Param("a", check=1),)}, TypeError, "check must be a function or None, got 1"),
    ({"params": (Param("a", "x"),)}, TypeError, "default must be a number, got 'x'"),
    ({"params": (Param("a", torch.ones(4)),)}, TypeError, "default must be a number, got a tensor"),
    ({"params": (Param("a", float("nan")),)}, ValueError, "default must be finite, got nan"),
    ({"params": (Param("a", 10**400),)}, ValueError, "default must be finite, got 1000"),
    ({"params": (Param("a", 1.5, kind="int"),)}, TypeError, "default must be an int, got 1.5"),
    ({"params": (Param("a", 1, kind="bool"),)}, TypeError, "default must be a bool, got 1"),
    ({"params": positive(default=0.0)}, ValueError, "default must be above 0, got 0.0"),
    ({"params": positive(init=-1.0)}, ValueError, "init must be above 0, got -1.0"),
    ({"params": (Param("a", init="x"),)}, TypeError, "init must be a number, got 'x'"),
    ({"params": (Param("a", init=1e39),)}, ValueError, r"init must be finite, got 1e\+39"),
    ({"params": (Param("a", kind="int", init=1),)}, ValueError, "init requires kind .*'int'"),
    ({"params": (Param("a", kind="float", per_token=True),)}, ValueError, "per_token requires"),
    ({"params": (Param("a", per_token=1),)}, TypeError, "per_token must be a bool, got 1"),
    ({"params": (Param("a", between=1),)}, TypeError, "between must be a pair of numbers, got 1"),
    ({"params": (Param("a", between=(2, 1)),)}, ValueError, r"with low < high.*got \(2, 1\)"),
    ({"params": (Param("a", between=(-INF, INF)),)}, ValueError, r"one may be.*\(-inf, inf\)"),
    ({"params": (Param("a", between=(0, -INF)),)}, ValueError, r"low < high.*\(0, -inf\)"),
    (
        {"params": (Param("a", init=-1, between=(0, INF)),)},
        ValueError,
        r"inside \(0, inf\), got -1",
    ),
    ({"params": (Param("a", init=5, between=(0, 2)),)}, ValueError, r"inside \(0, 2\), got 5"),
    ({"params": (Param("a", per_token=True, per_key=True),)}, ValueError, "must not both be True"),
    ({"params": (Param("a", kind="tensor"),)}, ValueError, "size must be given for kind 'tensor'"),
    ({"params": (Param("a", size=lambda d: (d,)),)}, ValueError, "size must be given for kind"),
    (
        {"params": (Param("a", kind="tensor", size=lambda: (1,)),)},
        TypeError,
        r"size must be a function of \(D\), got \(\): too many",
    ),
    ({"params": (Param("a", projection=Projection(abs)),)}, ValueError, "projection requires per_"),
    (
        {"params": (Param("a", per_key=True, projection=abs),)},
        TypeError,
        "projection must be a Projection, got <built-in function abs>",
    ),
    (
        {"params": (Param("a", host_sink=True), Param("b", host_sink=True))},
        ValueError,
        "one parameter at most may have host_sink, got a, b",
    ),
]


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"value": 3}, TypeError, "value of a Projection must be a function, got 3"),
        ({"bias": "5"}, TypeError, "bias of a Projection must be a number, got '5'"),
        ({"bias": True}, TypeError, "bias of a Projection must be a number, got True"),
        ({"bias": float("nan")}, ValueError, "bias of a Projection must be finite, got nan"),
    ],
)
def test_wrong_projections_raise(fields: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Projection(**{"value": torch.tanh, **fields})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NoForm("liner", "-"), "kind of NoForm must be one of .*, linear, .*got 'liner'"),
        (lambda: NoForm("linear", None), "why of NoForm must be a str, got None"),
        (lambda: Linear(3, lambda d: d), "features of Linear must be a function, got 3"),
        (lambda: Linear(torch.relu, 4), "size of Linear must be a function, got 4"),
        (
            lambda: Linear(torch.relu, lambda d: d, query_features=1),
            "query_features of Linear must be a function or None, got 1",
        ),
        (lambda: Linear(torch.relu, lambda d: d, 1), "cancels of Linear must be a bool, got 1"),
        (lambda: FromStatistics(3, True), "gain of FromStatistics must be a function, got 3"),
        (lambda: FromStatistics(abs, "x"), "differentiable of FromStatistics .*bool, got 'x'"),
    ],
)
def test_wrong_forms_raise_at_construction(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize("case", WRONG_FIELDS, ids=lambda case: case[2][:30])
def test_wrong_fields_raise(
    case: tuple[dict[str, Any], type[Exception], str],
) -> None:
    wrong, error, words = case
    fields = {"name": "mine", "formula": "-", "paper": "-", "weights": weights, **wrong}
    with pytest.raises(error, match=words):
        attnzoo.register_variant(attnzoo.Variant(**fields))
    assert fields["name"] not in attnzoo.list_variants()


WRONG_FORMS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "forms of variant 'mine' must be a tuple of Pairwise, .*got None"),
    (("x",), TypeError, r"forms of variant 'mine' must be a tuple of Pairwise, .*got \('x',\)"),
    (attnzoo.Pairwise(EXP, "sum"), TypeError, r"must be a tuple of Pairwise, .*got Pairwise\("),
    (
        (attnzoo.Pairwise(EXP, "sum", gain=torch.ones(4)),),
        ValueError,
        r"gain must be .*\(B, H, Nq\) = \(2, 4, 5\), got \(4,\)",
    ),
    (
        (attnzoo.Pairwise(EXP, "sum", sink=torch.ones(1, 3, 1)),),
        ValueError,
        r"sink must be .*\(2, 4, 5\), got \(1, 3, 1\)",
    ),
    (
        (attnzoo.Pairwise(SIGMOID, "none", offset=torch.ones(1, 4, 1, 1)),),
        ValueError,
        r"offset must be .*\(2, 4, 5\), got \(1, 4, 1, 1\)",
    ),
    (
        (attnzoo.Pairwise(EXP, "sum", gain=torch.ones(1, 4, 1).long()),),
        ValueError,
        "gain must be a float or a float tensor .*got .*torch.int64",
    ),
]


@pytest.mark.parametrize("case", WRONG_FORMS, ids=lambda case: case[2][:30])
def test_wrong_forms_raise(case: tuple[Any, type[Exception], str]) -> None:
    forms, error, words = case
    register(weights, forms=lambda call: forms)
    q, k, v = (rand(2, 4, n, 8).float() for n in (5, 6, 6))
    with pytest.raises(error, match=words):
        attnzoo.attention(q, k, v, "mine")
    with pytest.raises(error, match=words):
        attnzoo.explain(q, k, v, "mine")


def spread(names: str, n: int) -> dict[str, Tensor]:
    """Vectors by name: numbers from 1 to 2 that have more digits than 16 bits hold."""
    rows = {"gain": (1, 4, n), "key_bias": (1, 4, n), "sink": (1, 4, 1), "offset": (1, 1, n)}
    return {x: 1 + rand(*rows[x], seed=len(x)).sigmoid().float() for x in names.split()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        marked("sdpa", "gain"),
        *(marked(x, "gain key_bias sink offset") for x in ("tiled", "flash", "decode")),
        *(marked(x, "statistics") for x in ("sdpa", "tiled", "flash", "decode")),
    ],
)
def test_vectors_of_a_form_are_used_in_the_dtype_of_the_scores(
    backend: str, names: str, dtype: torch.dtype
) -> None:
    """A 16-bit vector rounds nothing but itself. The second call is a cached one."""
    q, k, v = (rand(1, 4, 16, 8, seed=i).float() for i in range(3))

    def results(exact: bool) -> list[Tensor]:
        def cast(x: Tensor) -> Tensor:
            return x.to(dtype).float() if exact else x.to(dtype)

        def forms(call: Any) -> tuple[Pairwise]:
            if names == "statistics":
                gain = FromStatistics(
                    lambda statistics: cast(statistics.entropy), differentiable=False
                )
                return (Pairwise(EXP, "sum", gain=gain),)
            vectors: dict[str, Any] = {x: cast(y) for x, y in spread(names, 16).items()}
            return (Pairwise(EXP, "sum", **vectors),)

        name = "exact" if exact else "mine"
        attnzoo.register_variant(attnzoo.Variant(name, "-", "-", lambda q, k, call: q, forms=forms))
        return [attnzoo.attention(q, k, v, name, backend=backend) for _ in range(2)]

    for have, want in zip(results(exact=False), results(exact=True), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_weights_are_a_softmax_of_the_scores_by_default(backend: str) -> None:
    def scores(q: Tensor, k: Tensor, call: Any, a: Any) -> Tensor:
        return a * call.scores(q, k) + call.bias

    fields = {"params": (Param("a", 2.0),), "scores": scores}
    variant = attnzoo.register_variant(attnzoo.Variant("mine", "-", "-", **fields))
    assert variant == attnzoo.Variant("mine", "-", "-", **fields)
    q, k, v = rand(3, 2, 4, 6, 8).unbind()
    options: dict[str, Any] = {"is_causal": True, "return_lse": True, "backend": backend}
    out, lse = attnzoo.attention(q, k, v, "mine", **options)
    expected = attnzoo.attention(q, k, v, "softmax", scale=2 * 8**-0.5, **options)
    assert torch.allclose(out, expected[0])
    assert torch.allclose(lse, expected[1])


def test_replaced_scores_replace_the_softmax_of_the_former_ones() -> None:
    fields = {
        "name": "mine",
        "forms": lambda call: (),
        "scores": lambda q, k, call: 0 * q @ k.mT,
    }
    uniform = replace(attnzoo.get_variant("softmax"), **fields)
    attnzoo.register_variant(uniform)
    q, k, v = rand(3, 1, 1, 4, 8).unbind()
    assert torch.allclose(attnzoo.attention(q, k, v, "mine"), v.mean(2, keepdim=True))
    for name in ("softmax", "ssmax", "entmax"):
        variant = attnzoo.get_variant(name)
        assert pickle.loads(pickle.dumps(variant.weights)) == variant.weights


@pytest.mark.parametrize(
    ("scores", "error", "words"),
    [
        (lambda q, k, call: None, TypeError, "scores must return a tensor, got NoneType"),
        (lambda q, k, call: call.scores(q, k).mT, ValueError, "scores of variant 'mine' must have"),
    ],
)
def test_wrong_scores_are_named(scores: Any, error: type[Exception], words: str) -> None:
    attnzoo.register_variant(attnzoo.Variant("mine", "-", "-", scores=scores))
    q, k = rand(1, 1, 3, 8), rand(1, 1, 4, 8)
    with pytest.raises(error, match=words):
        attnzoo.attention(q, k, k, "mine", backend="eager")


def test_unsupported_must_return_a_str_or_none() -> None:
    register(weights, unsupported=lambda call: True)
    with pytest.raises(
        TypeError, match="unsupported of variant 'mine' must return a str or None, got True"
    ):
        attnzoo.explain(*rand(3, 2, 4, 6, 8).unbind(), "mine")


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"activation": None}, TypeError, "activation must be an Activation, got None"),
        ({"normalize": ["sum"]}, ValueError, r"normalize must be one of none, .*got \['sum'\]"),
        ({"gain": "1"}, TypeError, "gain must be a float, a tensor or FromStatistics, got '1'"),
        ({"sink": [0.0]}, TypeError, r"sink must be a float, a tensor or None, got \[0.0\]"),
        ({"normalize": "select", "keep": 1.5}, ValueError, "keep must be an int .* 1, got 1.5"),
        ({"normalize": "select", "keep": -1}, ValueError, "keep must be an int .* 1, got -1"),
        ({"normalize": "select", "mass": 1.0}, ValueError, "above 0 and below 1, got 1.0"),
        ({"normalize": "select", "mass": "1"}, ValueError, "mass must be a number .* got '1'"),
        ({"normalize": "select", "mass": float("nan")}, ValueError, "mass must be .*, got nan"),
        ({"normalize": "select"}, ValueError, "one of keep and mass must be .*, got None and None"),
        ({"normalize": "select", "keep": 2, "mass": 0.5}, ValueError, "got 2 and 0.5"),
        ({"keep": 2}, ValueError, "keep must be None with normalize='sum', got 2"),
        ({"mass": 0.5}, ValueError, "mass must be None with normalize='sum', got 0.5"),
    ],
)
def test_wrong_pairwise_raises(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attnzoo.Pairwise(**{"activation": EXP, "normalize": "sum", **fields})
