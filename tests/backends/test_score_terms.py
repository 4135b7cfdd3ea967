"""`tiled` with every term of the pairwise form, against the form written out in fp64.

The terms are the softcap, the key bias, the offset, the gain and the bias by distance, the factor
and a normalizer other than φ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends import BACKENDS
from attnzoo.core.activations import EXP, RELU, RELU2, SIGMOID, SOFTPICK, SPARSEMAX
from attnzoo.core.arguments import check_call
from attnzoo.core.distance import LOGARITHMIC
from helpers.cases import rand
from helpers.crossed import crossed
from helpers.pairwise import dense_output

BATCH, HEADS, QUERIES, KEYS = 2, 4, 7, 9

CURVED = attnzoo.Activation(  # φ = s² and μ = 1 + s⁴, which is no multiple of φ
    "curved",
    lambda s, shape: s.square(),
    lambda s, phi, shape: 2 * s,
    vanishes=False,
    normalizer=lambda s, shape: 1 + s**4,
    normalizer_slope=lambda s, mu, shape: 4 * s**3,
)
BIAS_ONLY = attnzoo.Distance(
    "bias only", bias=lambda t, decay: -decay * t.sqrt(), bias_slope=lambda t, decay: -t.sqrt()
)


def of_queries(seed: int) -> Tensor:
    return 0.5 * rand(BATCH, HEADS, QUERIES, seed=seed)


def of_keys(seed: int) -> Tensor:
    return 0.5 * rand(BATCH, HEADS, KEYS, seed=seed)


def of_heads(seed: int) -> Tensor:
    return 3 + rand(1, HEADS, 1, seed=seed).abs()


# Name -> the activation, the normalization and the vectors of a form.
FORMS: dict[str, tuple[attnzoo.Activation, Any, dict[str, Any]]] = {
    "key bias": (EXP, "sum", {"key_bias": of_keys(1)}),
    "key bias per head": (EXP, "sum", {"key_bias": of_keys(1)[:1], "gain": of_queries(2)}),
    "key bias and offset": (EXP, "sum", {"key_bias": of_keys(1), "offset": of_queries(2)}),
    "offset, sink": (EXP, "sum", {"offset": of_queries(2), "sink": of_queries(3)}),
    "sigmoid, key bias": (
        SIGMOID, "none", {"key_bias": of_keys(1), "offset": of_queries(2), "gain": of_queries(3)},
    ),
    "factor": (SIGMOID, "none", {"offset": of_queries(1), "factor": of_queries(2)}),
    "factor 0": (RELU, "none", {"offset": 0.0, "factor": torch.zeros(1, 1, QUERIES).double()}),
    "distance": (EXP, "sum", {"distance": LOGARITHMIC, "decay": of_heads(1)}),
    "distance, gain": (
        EXP, "sum", {"distance": LOGARITHMIC, "decay": of_heads(1), "gain": 1 + of_queries(2)},
    ),
    "bias by distance": (
        EXP, "sum", {"distance": BIAS_ONLY, "decay": of_heads(1), "key_bias": of_keys(2)},
    ),
    "eps": (RELU2, "sum", {"eps": 0.3, "gain": of_queries(1)}),
    "normalizer": (CURVED, "sum", {"eps": 0.1, "gain": of_queries(1)}),
    "normalizer, sink": (CURVED, "sum", {"sink": of_queries(1)}),
    "shifted": (SOFTPICK, "sum", {"eps": 1e-8, "gain": 2 + of_queries(1)}),
    "shifted, key bias": (
        SOFTPICK, "sum", {"key_bias": of_keys(1), "offset": of_queries(2), "eps": 0.1},
    ),
}  # fmt: skip

CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 3},
    "mask": {"attn_mask": rand(BATCH, 1, QUERIES, KEYS, seed=9) > 0},
    "float mask": {"attn_mask": rand(1, HEADS, QUERIES, KEYS, seed=8)},
    "segments": {
        "segment_ids": (torch.arange(QUERIES).expand(2, -1) // 3,
                        torch.arange(KEYS).expand(2, -1) // 4)
    },
    "alibi": {"alibi": torch.linspace(0.1, 0.5, HEADS)},
}  # fmt: skip


def inputs(kv_heads: int = 2) -> list[Tensor]:
    return [
        rand(BATCH, HEADS, QUERIES, 5, seed=11),
        rand(BATCH, kv_heads, KEYS, 5, seed=12),
        rand(BATCH, kv_heads, KEYS, 3, seed=13),
    ]


def gradients(
    attend: Callable[..., Tensor], tensors: list[Tensor], vectors: dict[str, Any]
) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    learned = {n: x.clone().requires_grad_() for n, x in vectors.items() if isinstance(x, Tensor)}
    out = attend(*leaves, {**vectors, **learned})
    do = rand(*out.shape, seed=20).to(out.dtype)
    gradients = torch.autograd.grad(out, [*leaves, *learned.values()], do, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(["q", "k", "v", *learned], gradients, strict=True))}


@pytest.mark.parametrize(("form", "options", "softcap"), crossed(FORMS, CALLS, [None, 1.5]))
def test_tiled_agrees_with_the_form(form: str, options: str, softcap: float | None) -> None:
    activation, normalize, vectors = FORMS[form]
    tensors = inputs()
    call = check_call(*tensors, enable_gqa=True, softcap=softcap, **CALLS[options])
    assert BACKENDS["tiled"].unsupported(
        attnzoo.Pairwise(activation, normalize, **vectors), call
    ) is None  # fmt: skip

    def tiled(q: Tensor, k: Tensor, v: Tensor, vectors: dict[str, Any]) -> Tensor:
        made = attnzoo.Pairwise(activation, normalize, **vectors)
        return BACKENDS["tiled"].run(q, k, v, call, made)[0]

    def dense(q: Tensor, k: Tensor, v: Tensor, vectors: dict[str, Any]) -> Tensor:
        return dense_output(q, k, v, call, attnzoo.Pairwise(activation, normalize, **vectors))

    results, want = gradients(tiled, tensors, vectors), gradients(dense, tensors, vectors)
    for name, exact in want.items():
        torch.testing.assert_close(results[name], exact, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_sdpa_says_what_it_lacks(form: str) -> None:
    activation, normalize, vectors = FORMS[form]
    made = attnzoo.Pairwise(activation, normalize, **vectors)
    call = check_call(*(x.float() for x in inputs(HEADS)), softcap=2.0)
    reason = BACKENDS["sdpa"].unsupported(made, call)
    assert reason is not None
    wanted = (*made.extras, "softcap") if made.softmax else ("only softmax",)
    assert all(name in reason for name in wanted)


def test_offsets_in_the_thousands_keep_the_digits_of_the_difference() -> None:
    """key_bias − offset is formed before the logits are added, which are small."""
    q, k, v = (x.float() for x in inputs(HEADS))
    near = rand(1, HEADS, 1, seed=1).float()
    form = attnzoo.Pairwise(
        EXP, "sum", key_bias=(4096.0 + 0 * near).expand(1, HEADS, KEYS), offset=4096.0 + 0 * near
    )
    call = check_call(q, k, v)
    shifted, _ = BACKENDS["tiled"].run(q, k, v, call, form)
    plain, _ = BACKENDS["tiled"].run(q, k, v, call, attnzoo.Pairwise(EXP, "sum"))
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-6)


def test_tiny_logits_of_a_shifted_activation_keep_their_digits() -> None:
    """With logits of 1e-5, e^z − 1 would have two correct digits in fp32."""
    q, k, v = (x.float() for x in inputs(HEADS))
    out = attnzoo.attention(1e-5 * q, k, v, "softpick", eps=0.0, backend="tiled")
    exact = attnzoo.attention(
        *(x.double() for x in (1e-5 * q, k, v)), "softpick", eps=0.0, backend="eager"
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=2e-5)


def test_fp32_error_of_a_softcap_is_a_few_units() -> None:
    q, k, v = (x.float() for x in inputs(HEADS))
    out = attnzoo.attention(20 * q, k, v, softcap=3.0, backend="tiled")
    exact = attnzoo.attention(*(x.double() for x in (20 * q, k, v)), softcap=3.0, backend="eager")
    # Logits up to about 100 have errors of 1e-5, which the softcap does not enlarge.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"softcap": 0.0}, ValueError, "softcap must be a number above 0 or None, got 0.0"),
        ({"softcap": -2}, ValueError, "softcap must be a number above 0 or None, got -2"),
        ({"softcap": float("nan")}, ValueError, "softcap must be a number above 0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be a number above 0"),
        ({"softcap": "2"}, TypeError, "softcap must be a number above 0 or None, got '2'"),
        ({"softcap": True}, TypeError, "softcap must be a number above 0 or None, got True"),
    ],
)
def test_wrong_softcaps_raise(options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        attnzoo.attention(*inputs(HEADS), **options)


WRONG_FORMS: list[Any] = [
    ("factor of a sum", {"factor": 1.0}, ValueError, "factor must be None with normalize='sum'"),
    ("eps with exp", {"eps": 0.1}, ValueError, "eps must be 0 for exp.*sink"),
    ("negative eps", {"eps": -1.0}, ValueError, "eps must be a finite number >= 0, got -1.0"),
    ("no decay", {"distance": LOGARITHMIC}, ValueError, "distance and decay must be given"),
    ("no distance", {"decay": 2.0}, ValueError, "distance and decay must be given together"),
    ("wrong distance", {"distance": "log", "decay": 1.0}, TypeError, "distance must be a Distance"),
    ("text", {"key_bias": "1"}, TypeError, "key_bias must be a float, a tensor or None"),
    (
        "statistics",
        {"key_bias": 1.0, "gain": attnzoo.FromStatistics(lambda statistics: statistics.lse, False)},
        ValueError,
        "key_bias must be None with a gain from statistics",
    ),
]


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [row[1:] for row in WRONG_FORMS],
    ids=[row[0] for row in WRONG_FORMS],
)
def test_wrong_forms_raise(fields: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        attnzoo.Pairwise(EXP, "sum", **fields)


def test_normalizers_belong_to_sums() -> None:
    with pytest.raises(ValueError, match="normalize must be 'sum' for softpick.*got 'none'"):
        attnzoo.Pairwise(SOFTPICK, "none", offset=0.0)
    with pytest.raises(ValueError, match="sink must be None for softpick, which is shifted"):
        attnzoo.Pairwise(SOFTPICK, "sum", sink=0.0)
    with pytest.raises(ValueError, match="normalizer and normalizer_slope must be given together"):
        attnzoo.Activation("half", SPARSEMAX.value, SPARSEMAX.slope, normalizer=RELU.value)
    with pytest.raises(ValueError, match="gain or bias must be given"):
        attnzoo.Distance("nothing")
    with pytest.raises(ValueError, match="bias_slope must be None without bias"):
        attnzoo.Distance("half", gain=lambda t, d: t, bias_slope=lambda t, d: t)
    with pytest.raises(TypeError, match="triton must be 'module:name' or None, got 3"):
        attnzoo.Distance("half", gain=lambda t, d: t, triton=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="triton_slope must be None without triton"):
        attnzoo.Distance("half", gain=lambda t, d: t, triton_slope="m:f")


@pytest.mark.parametrize(
    ("name", "shape", "allowed"),
    [("key_bias", (2, 4, 7), "Nk"), ("factor", (2, 4, 9), "Nq"), ("decay", (2, 4, 7), "1")],
)
def test_vectors_of_a_wrong_shape_raise(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...], allowed: str
) -> None:
    registry = attnzoo.core.registry
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))

    def forms(call: attnzoo.Call) -> tuple[attnzoo.Pairwise, ...]:
        vectors: dict[str, Any] = {name: torch.zeros(shape)}
        if name == "factor":
            return (attnzoo.Pairwise(SIGMOID, "none", offset=0.0, **vectors),)
        if name == "decay":
            vectors["distance"] = LOGARITHMIC
        return (attnzoo.Pairwise(EXP, "sum", **vectors),)

    def weights(q: Tensor, k: Tensor, call: attnzoo.Call) -> Tensor:
        return call.softmax(call.scores(q, k))

    attnzoo.register_variant(attnzoo.Variant("own", "z", "none", weights, forms=forms))
    with pytest.raises(ValueError, match=rf"{name} must be .* broadcasts to \(B, H, {allowed}\)"):
        attnzoo.attention(*inputs(HEADS), "own")
