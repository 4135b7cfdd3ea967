"""attnzoo.nn.Attention: parameters, state dict, repr, autocast and errors."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnzoo
from attnzoo.nn import Attention
from helpers.cases import CASES, VARIANTS, learned, params_of, rand
from helpers.crossed import crossed

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def qkv(n: int = 7, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [rand(2, heads, n, 8, seed=i, dtype=dtype) for i in range(3)]


def module(variant: str, **options: Any) -> Attention:
    return Attention(variant, 4, head_dim=8, **{**params_of(variant), **options})


def learning(variant: str) -> Attention:
    """Return a module that learns all parameters that the variant can learn."""
    return module(variant, learn=tuple(CASES[variant].learned), **learned(variant, 4))


# ---- parameters -------------------------------------------------------------------------------

LEARNED = {
    "screening": {"r": 2.0},
    "asentmax": {"beta": math.log(2), "gamma": 0.0},
    "hedgehog": {"query_map": torch.eye(8).tolist(), "key_map": torch.eye(8).tolist()},
    "sink": {"b": 0.0},
    "ssmax": {"s": 0.168},
}


@every_variant
def test_default_learned_parameters_and_initial_values(variant: str) -> None:
    attend = module(variant)
    # A bounded parameter r is learned as parametrizations.r.original.
    names = [name.removesuffix(".original").split(".")[-1] for name, _ in attend.named_parameters()]
    expected = LEARNED.get(variant, {})
    assert set(names) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(getattr(attend, name), torch.tensor([value] * 4))


@every_variant
def test_learned_parameters_are_per_head_and_get_gradients(variant: str) -> None:
    attend = learning(variant)
    parameters = list(attend.parameters())
    assert len(parameters) == len(CASES[variant].learned)
    assert all(p.shape == (4,) and p.dtype == torch.float32 for p in parameters)
    for name, value in learned(variant, 4).items():
        assert torch.allclose(getattr(attend, name), value)
    q, k, v = qkv()
    expected = attnzoo.attention(
        q, k, v, variant, is_causal=True, **{**params_of(variant), **learned(variant, 4)}
    )
    out = attend(q, k, v, is_causal=True)
    assert torch.allclose(out, expected, atol=1e-6)
    out.square().sum().backward() if parameters else None
    assert all(bool((p.grad != 0).all()) for p in parameters)


@every_variant
def test_empty_learn_gives_no_parameters(variant: str) -> None:
    attend = module(variant, learn=())
    assert list(attend.parameters()) == []
    q, k, v = qkv()
    expected = attnzoo.attention(q, k, v, variant, **params_of(variant))
    assert torch.equal(attend(q, k, v), expected)


def test_constructor_arguments_are_initial_values() -> None:
    assert Attention("ssmax", 2, s=0.43).s.tolist() == pytest.approx([0.43] * 2)
    start = torch.tensor([0.1, 0.2])
    attend = Attention("ssmax", 2, s=start, b=0.5, learn=("s",))
    assert attend.b == 0.5
    attend.s.data += 1
    assert start.tolist() == pytest.approx([0.1, 0.2])  # the module has a copy of the tensor
    fixed = Attention("ssmax", 2, s=start, learn=())
    assert [name for name, _ in fixed.named_buffers()] == ["s"]
    assert "s" in fixed.state_dict()


def test_parameters_have_the_default_dtype_or_the_one_asked_for() -> None:
    torch.set_default_dtype(torch.bfloat16)  # as transformers does while loading
    try:
        attend = Attention("ssmax", 4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert attend.s.dtype == torch.bfloat16
    attend.float().reset_parameters()  # the initial values are not rounded
    assert attend.s.tolist() == torch.tensor([0.168] * 4).tolist()
    assert Attention("ssmax", 4, dtype=torch.float64).s.tolist() == [0.168] * 4
    alpha = Attention("entmax", 4, learn=("alpha",), dtype=torch.float16, device="meta")
    assert {(p.dtype, p.device.type) for p in alpha.parameters()} == {(torch.float16, "meta")}
    with pytest.raises(TypeError, match="dtype must be fp16, bf16, fp32 or fp64, got torch.int8"):
        Attention("ssmax", 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="ssmax's s must be finite.*torch.float16"):
        Attention("ssmax", 4, s=1e5, dtype=torch.float16)


@pytest.mark.parametrize("raw", [-1e4, -100.0, -50.0, -20.0, 0.0, 20.0, 50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_alpha_stays_inside_its_range(raw: float, dtype: torch.dtype) -> None:
    attend = Attention("entmax", 4, learn=("alpha",)).to(dtype)
    with torch.no_grad():
        next(attend.parameters()).fill_(raw)
    alpha = attend.alpha.double()
    assert bool(((alpha > 1) & (alpha < 2)).all())
    q, k, v = (x.requires_grad_() for x in qkv(dtype=dtype))
    out = attend(q, k, v)
    out.sum().backward()
    assert bool(out.isfinite().all())
    for leaf in (q, k, v, *attend.parameters()):
        assert bool(leaf.grad.isfinite().all())


def test_alpha_moves_towards_two_for_a_sparser_target() -> None:
    attend = Attention("entmax", 4, learn=("alpha",))
    q, k, v = qkv()
    target = attnzoo.attention(q, k, v, "sparsemax")
    optimizer = torch.optim.Adam(attend.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (attend(q, k, v) - target).square().sum().backward()
        optimizer.step()
    assert bool((attend.alpha > 1.75).all())


def test_bf16_module_computes_its_gain_in_fp32() -> None:
    """`module.to(torch.bfloat16)` rounds the learned scale, but neither log n nor the gain."""
    attend = Attention("ssmax", 4).to(torch.bfloat16)
    assert attend.s.dtype == torch.bfloat16
    q, k, v = qkv(n=200, dtype=torch.bfloat16)
    rounded = float(torch.tensor(0.168).bfloat16())
    for backend in ("eager", "tiled", "sdpa"):
        expected = attnzoo.attention(q, k, v, "ssmax", s=rounded, backend=backend)
        assert torch.equal(attend(q, k, v, backend=backend), expected)
    q, k, v = qkv(n=200)  # inputs in fp32, parameters in bf16
    assert torch.equal(attend(q, k, v), attnzoo.attention(q, k, v, "ssmax", s=rounded))


# ---- state dict, copies, pickling, repr, autocast, meta ----------------------------------------


@every_variant
def test_state_dict_round_trip(variant: str) -> None:
    one, two = learning(variant), module(variant, learn=tuple(CASES[variant].learned),
                                         **learned(variant, 4, seed=5))  # fmt: skip
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two.load_state_dict(torch.load(file, weights_only=True))
    q, k, v = qkv()
    assert torch.equal(one(q, k, v), two(q, k, v))


@every_variant
def test_deepcopy_is_equal_and_independent(variant: str) -> None:
    one = learning(variant)
    two = copy.deepcopy(one)
    q, k, v = qkv()
    before = one(q, k, v)
    assert torch.equal(before, two(q, k, v))
    assert repr(one) == repr(two)
    for p in two.parameters():
        p.data += 0.3
    assert torch.equal(before, one(q, k, v))
    if CASES[variant].learned:
        assert not torch.equal(before, two(q, k, v))


@every_variant
def test_module_can_be_pickled(variant: str) -> None:
    one = learning(variant)
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    q, k, v = qkv()
    for two in (pickle.loads(pickle.dumps(one)), torch.load(file, weights_only=False)):
        assert type(two) is Attention
        assert two.state_dict().keys() == one.state_dict().keys()
        assert torch.equal(two(q, k, v), one(q, k, v))


def test_bounded_parameter_has_torchs_parametrization_name_in_checkpoints() -> None:
    """A checkpoint holds the raw value; a sigmoid maps this value into the parameter's range."""
    attend = Attention("entmax", 4, learn=("alpha",))
    raw = {"parametrizations.alpha.original": torch.tensor([-1.0, 0.0, 1.0, 2.0])}
    assert attend.state_dict().keys() == raw.keys()
    attend.load_state_dict(raw)
    inside = 1.001 + 0.998 * next(iter(raw.values())).sigmoid()
    assert torch.allclose(attend.alpha, inside)
    attend.alpha = torch.full((4,), 1.7)
    assert torch.allclose(attend.alpha, torch.full((4,), 1.7))
    assert [name for name, _ in attend.named_parameters()] == list(raw)
    with pytest.raises(ValueError, match="alpha must start inside"):
        attend.alpha = torch.full((4,), 2.5)
    with pytest.raises(TypeError, match="alpha must be a tensor, got float"):
        attend.alpha = 1.7
    with pytest.raises(ValueError, match=r"alpha must have shape \(\) or \(4,\), got \(3,\)"):
        attend.alpha = torch.full((3,), 1.7)
    attend.alpha = torch.tensor(1.6)
    assert torch.allclose(attend.alpha, torch.full((4,), 1.6))


@every_variant
def test_reset_parameters_restores_initial_values(variant: str) -> None:
    one = module(variant, learn=tuple(CASES[variant].learned), **learned(variant, 4))
    expected = {name: x.clone() for name, x in one.state_dict().items()}
    for x in one.state_dict().values():
        x.fill_(float("nan"))
    one.reset_parameters()
    for name, x in one.state_dict().items():
        assert torch.equal(x, expected[name]), name


def test_extra_repr_is_readable() -> None:
    shown = {
        "ssmax": "Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)",
        "softmax": "Attention('softmax', num_heads=4)",
        "sigmoid": "Attention('sigmoid', num_heads=4, bias=None)",
        "asentmax": (
            "Attention('asentmax', num_heads=4, beta=0.6931 (learned), gamma=0 (learned), "
            "delta=1.0, extra=0, scaled=1.0)"
        ),
        "cosformer": "Attention('cosformer', num_heads=4, max_length=256, features=relu)",
    }
    for variant, text in shown.items():
        assert repr(module(variant)) == text
    spread = Attention("sink", 2, b=torch.tensor([-1.0, 2.5]))
    assert repr(spread) == "Attention('sink', num_heads=2, b=-1…2.5 (learned))"
    alpha = Attention("entmax", 2, learn=("alpha",))
    assert "alpha=1.5 (learned)" in alpha.extra_repr()


@pytest.mark.parametrize(("variant", "backend"), crossed(VARIANTS, [None, "eager", "tiled"]))
def test_autocast_gives_the_dtype_of_torchs_attention(variant: str, backend: str | None) -> None:
    attend = learning(variant)
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        like = scaled_dot_product_attention(q, k, v)
        out = attend(q, k, v, is_causal=True, backend=backend)
        mixed = attend(q.bfloat16(), k, v, is_causal=True, backend=backend)
    assert out.dtype == mixed.dtype == like.dtype == torch.bfloat16
    # Autocast only rounds the inputs; the computation stays in fp32.
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, attend(*low, is_causal=True, backend=backend))
    with torch.autocast("cpu", torch.bfloat16):
        exact = [x.double() for x in (q, k, v)]
        assert attend(*exact, backend=backend).dtype == scaled_dot_product_attention(*exact).dtype
    out.float().sum().backward() if CASES[variant].learned else None
    for p in attend.parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32


def test_autocast_does_not_round_float_masks_and_slopes() -> None:
    q, k, v = qkv()
    mask, slopes = rand(7, 7, seed=5).float(), torch.tensor([0.1, 0.2, 0.3, 0.4])
    with torch.autocast("cpu", torch.bfloat16):
        out = attnzoo.attention(q, k, v, attn_mask=mask, alibi=slopes, backend="tiled")
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, attnzoo.attention(*low, attn_mask=mask, alibi=slopes, backend="tiled"))


def test_module_made_on_meta_gets_its_initial_values() -> None:
    for variant, learn in (("ssmax", None), ("entmax", ("alpha",)), ("sink", None)):
        with torch.device("meta"):
            attend = Attention(variant, 4, learn=learn)
        assert all(p.device.type == "meta" for p in attend.parameters())
        attend.to_empty(device="cpu").reset_parameters()
        expected = Attention(variant, 4, learn=learn).state_dict()
        for name, x in attend.state_dict().items():
            assert torch.equal(x, expected[name]), name


# ---- keywords and errors ----------------------------------------------------------------------


def test_forward_accepts_the_keywords_of_attention() -> None:
    attend = Attention("ssmax", 4, s=0.3)
    q, k, v = qkv()
    k, v = k[:, :2], v[:, :2]
    options: dict[str, Any] = dict(
        attn_mask=rand(2, 1, 1, 7, seed=8) > -1,
        is_causal=True,
        scale=0.5,
        enable_gqa=True,
        window=3,
        alibi=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        segment_ids=torch.tensor([[0] * 3 + [1] * 4, [0] * 7]),
        backend="tiled",
        return_lse=True,
    )
    outputs = attend(q, k, v, **options)
    expected = attnzoo.attention(q, k, v, "ssmax", s=attend.s, **options)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="unknown variant 'softmaxx'"):
        Attention("softmaxx", 4)
    for heads in (0, -1, 2.0, True, None):
        words = f"num_heads must be an int .* 1, got {heads}"
        with pytest.raises(ValueError, match=words):
            Attention("softmax", heads)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'ssmax' has no parameter 'alpha'; it has: s, b"):
        Attention("ssmax", 4, alpha=1.5)
    with pytest.raises(TypeError, match="'topk' requires the parameter 'top_k'"):
        Attention("topk", 4)
    with pytest.raises(TypeError, match="learn must be a tuple of names or None, got 's'"):
        Attention("ssmax", 4, learn="s")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"learn must name each parameter once.*\('s', 's'\)"):
        Attention("ssmax", 4, learn=("s", "s"))
    with pytest.raises(ValueError, match=r"learnable .* 'ssmax' \(s, b\), got 'c'"):
        Attention("ssmax", 4, learn=("c",))
    with pytest.raises(ValueError, match=r"learnable .* 'topk' \(none\), got 'top_k'"):
        Attention("topk", 4, top_k=3, learn=("top_k",))
    with pytest.raises(ValueError, match="sigmoid's bias needs an initial value"):
        Attention("sigmoid", 4, learn=("bias",))
    with pytest.raises(ValueError, match=r"ssmax's s must have shape \(\) or \(4,\), got \(3,\)"):
        Attention("ssmax", 4, s=torch.ones(3))
    with pytest.raises(ValueError, match=r"alpha must start inside \(1.*got \[2.0, 2.0"):
        Attention("entmax", 4, alpha=2.0, learn=("alpha",))
    with pytest.raises(ValueError, match=r"entmax's alpha must be in \(1, 2\].*, got 3"):
        Attention("entmax", 4, alpha=3.0)
    with pytest.raises(TypeError, match="taylor's order must be an int, got 2.5"):
        Attention("taylor", 4, order=2.5)
    q, k, v = qkv(heads=3)
    with pytest.raises(ValueError, match=r"num_heads=4 heads, got \(2, 3, 7, 8\)"):
        Attention("softmax", 4)(q, k, v)
    q, k, v = qkv()
    with pytest.raises(TypeError, match="s must not be passed to forward"):
        Attention("ssmax", 4)(q, k, v, s=0.3)
    with pytest.raises(TypeError, match="has no parameter 'beta'"):
        Attention("ssmax", 4)(q, k, v, beta=0.3)
    with pytest.raises(TypeError, match="q must be a tensor"):
        Attention("ssmax", 4)([[1.0]], k, v)
