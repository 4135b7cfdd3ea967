"""Wrappers: differential, mixture, gate and Laser, around any variant."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnzoo
from attnzoo.nn import WRAPPERS, XSA, Differential, Laser, MixtureAttention, QASSMax
from helpers.cases import rand
from helpers.coverage_table import OUTSIDE, precise
from helpers.crossed import crossed
from helpers.wrappers import (
    KV,
    MADE,
    B,
    D,
    E,
    H,
    N,
    assert_near,
    definition,
    gradients,
    inputs,
    make,
    trained,
)


@pytest.mark.parametrize(("variant", "backend", "which"), crossed(OUTSIDE, MADE))
def test_values_and_gradients_agree_with_the_definition(
    which: str, variant: str, backend: str
) -> None:
    """Of q, k, v, hidden states and all parameters."""
    if (which, backend) == ("differential", "sdpa"):
        pytest.skip("sdpa needs values with as many features as keys, and the halves have fewer")
    if which == "laser" and attnzoo.get_variant(variant).signed:
        pytest.skip("Laser takes a logarithm of the weights' sum; see the test of the error")
    module = make(which, variant)
    dtype = precise(backend)
    leaves = [x.requires_grad_() for x in inputs(module)]
    used = 3 if module.gate is None else 4  # only gates use the hidden states
    wanted = [*leaves[:used], *module.parameters()]
    out, _ = definition(module, *leaves)
    expected = [out, *gradients(out, wanted)]
    mine = copy.deepcopy(module).to(dtype)
    q, k, v, x = (leaf.detach().to(dtype).requires_grad_() for leaf in leaves)
    got = mine(q, k, v, backend=backend, **mine.projected(x, x))
    actual = [got, *gradients(got, [*(q, k, v, x)[:used], *mine.parameters()])]
    assert_near(actual, expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("which", MADE)
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "window": 3, "scale": 0.5},
        {"alibi": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), "is_causal": True},
        {"attn_mask": rand(B, H, N, N, seed=6) > -1},
        {"attn_mask": rand(1, 1, N, N, seed=6)},
        {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * B)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_and_weights(which: str, options: dict[str, Any]) -> None:
    module = make(which, "ssmax")
    q, k, v, x = inputs(module)
    got, weights = module(q, k, v, need_weights=True, **options, **module.projected(x, x))
    expected, expected_weights = definition(module, q, k, v, x, **options)
    assert torch.allclose(got, expected, atol=1e-10)
    assert torch.allclose(weights, expected_weights, atol=1e-10)
    fused = module(q, k, v, **options, **module.projected(x, x))
    assert torch.allclose(fused, expected, atol=1e-10)


@pytest.mark.parametrize("shape", [(H,), (B, H, N)], ids=["head", "token"])
@pytest.mark.parametrize("which", MADE)
def test_a_parameter_of_a_call_is_that_of_all_attentions_of_a_head(
    which: str, shape: tuple[int, ...]
) -> None:
    module = make(which, "sink", given=("b",))
    assert [name for name, _ in module.attention.named_parameters()] == []
    q, k, v, x = inputs(module)
    sinks = rand(*shape, seed=7).requires_grad_()
    got = module(q, k, v, is_causal=True, b=sinks, **module.projected(x, x))
    expected, _ = definition(module, q, k, v, x, is_causal=True, b=sinks)
    assert torch.allclose(got, expected, atol=1e-10)
    assert torch.allclose(*(gradients(out, [sinks])[0] for out in (got, expected)), atol=1e-10)
    with pytest.raises(ValueError, match=r"sink's b must have 4 heads, got \(5,\)"):
        module(q, k, v, b=torch.zeros(5), **module.projected(x, x))
    with pytest.raises(TypeError, match="sink's b must be passed to forward"):
        module(q, k, v, **module.projected(x, x))


# ------------------------------------------------------------- the code of the papers


def test_differential_equals_the_papers_code() -> None:
    """Ye et al.: 2·H heads of D/2 features, one norm and one λ for all heads of a layer."""
    module = make("differential", layer=3)
    assert isinstance(module, Differential)
    q, k, v, _ = inputs(module, heads=H)
    # Their heads are [half 1, half 2] of a head of D features; ours are every second block of two.
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    theirs_q, theirs_k = (x[..., order].transpose(1, 2).reshape(B, N, 2 * H, D // 2)
                          for x in (q, k))  # fmt: skip
    scores = torch.einsum("bihd,bjhd->bhij", theirs_q, theirs_k) / (D // 2) ** 0.5
    scores = scores + torch.full((N, N), -torch.inf).triu(1)
    weights = scores.softmax(-1).view(B, H, 2, N, N)
    l_q1, l_k1, l_q2, l_k2 = module.vectors
    initial = 0.8 - 0.6 * torch.exp(torch.tensor(-0.3 * 3, dtype=torch.float64))
    factor = torch.exp((l_q1 * l_k1).sum()) - torch.exp((l_q2 * l_k2).sum()) + initial
    out = (weights[:, :, 0] - factor * weights[:, :, 1]) @ v
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-5) * module.norm.weight
    assert torch.allclose(module(q, k, v, is_causal=True), out * (1 - initial), atol=1e-12)


def test_differential_v2_equals_its_authors_code() -> None:
    """Heads 0, 2, 4, … minus σ(λ) times heads 1, 3, 5, …, of one call with 2·H query heads."""
    module = make("differential_v2")
    q, k, v, x = inputs(module)
    assert module.gate is not None
    both = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    lam = torch.sigmoid(x @ module.gate.weight.T).transpose(1, 2)[..., None]
    expected = both[:, 0::2] - lam * both[:, 1::2]
    got = module(q, k, v, is_causal=True, **module.projected(x, x))
    assert torch.allclose(got, expected, atol=1e-12)


def test_laser_equals_the_papers_code() -> None:
    """Duvvuri and Dhillon: m + log(A·exp(v − m)), with m the largest value of each feature. A clamp
    of 60 changes values by v³/(3·60²), less than 5e-3 up to v = 3.7."""
    module = Laser("softmax", H, E, clamp=60.0).double()
    q, k, v, _ = inputs(module, heads=H)
    m = v.amax(2, keepdim=True)
    expected = m + (F.scaled_dot_product_attention(q, k, (v - m).exp())).log()
    assert v.abs().max() < 3.7
    assert torch.allclose(module(q, k, v), expected, atol=5e-3)
    small = 1e-3 * v
    expected = F.scaled_dot_product_attention(q, k, small.exp()).log()
    assert torch.allclose(module(q, k, small), expected, atol=1e-12)


@pytest.mark.parametrize("per", ["element", "head"])
def test_gate_equals_the_papers_formula(per: Any) -> None:
    """Qiu et al.: the concatenated heads (B, N, H·D), times σ(X·W)."""
    module = make(f"gate per {per}")
    q, k, v, x = inputs(module, heads=H)
    assert module.gate is not None
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    gate = torch.sigmoid(x @ module.gate.weight.T)
    expected = plain * (gate if per == "element" else gate.repeat_interleave(D, -1))
    got = module(q, k, v, **module.projected(x, x)).transpose(1, 2).flatten(2)
    assert torch.allclose(got, expected, atol=1e-12)


def test_xsa_is_orthogonal_to_the_values_of_the_queries() -> None:
    """Zhai: y − (y·v / v·v)·v. With fewer queries than keys they are the last tokens."""
    module = XSA("softmax", H, E).double()
    q, k, v, _ = inputs(module)
    out, y = module(q, k, v), attnzoo.attention(q, k, v, enable_gqa=True)
    values = v.repeat_interleave(H // KV, 1)
    share = (y * values).sum(-1) / (values * values).sum(-1)
    assert torch.allclose(out, y - share[..., None] * values, atol=1e-12)
    assert (out * values).sum(-1).abs().max() < 1e-12
    assert torch.allclose(module(q[:, :, 4:], k, v), out[:, :, 4:], atol=1e-12)
    assert module(q[:, :, N:], k, v).shape == (B, H, 0, D)
    first = module(q, k, v, is_causal=True)[:, :, 0]  # this token sees only itself
    assert first.abs().max() < 1e-12
    gated = XSA("softmax", H, E, gated=True).double()
    assert torch.equal(gated(q, k, v), y)


@pytest.mark.parametrize("per", ["element", "head"])
def test_qassmax_equals_its_authors_code(per: Any) -> None:
    """Qu et al.: q·base_mlp(log n)·(1 + tanh(query_mlp(q))) with n keys, not causal."""
    module = QASSMax("softmax", H, E, per=per, hidden=5)
    trained(module)
    q, k, v, _ = inputs(module)
    log_n = torch.tensor([[N]], dtype=torch.float64).log()
    base = module.base_mlp(log_n).view(1, H, 1, D if per == "element" else 1)
    scaled = q * base * (1 + module.query_mlp(q).tanh())
    expected = F.scaled_dot_product_attention(scaled, k, v, enable_gqa=True)
    assert torch.allclose(module(q, k, v), expected, atol=1e-12)
    assert [x.shape for x in module.state_dict().values() if x.dim() == 2] == [
        (5, 1), (H * base.shape[-1], 5), (5, D), (base.shape[-1], 5),
    ]  # fmt: skip
    initial = QASSMax("softmax", H, E, per=per).double()
    expected = attnzoo.attention(q, k, v, enable_gqa=True)
    assert torch.allclose(initial(q, k, v), expected, atol=1e-12)


def test_xsa_without_a_direction() -> None:
    """Values of 0, and values whose square overflows or underflows in fp32."""
    module = XSA("softmax", H, E)
    q, k, v, _ = (x.float().requires_grad_() for x in inputs(module, H))
    scales = torch.tensor([0.0, 1e-30, 1e-18, 1.0, 1e18, 1e25, 0.0])[:, None]
    out = module(q, k, v * scales, attn_mask=torch.eye(N).roll(3, 0).bool())
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(out / (1 + out.detach().abs()), [q, k, v]))
    zero = v.detach().clone()
    zero[:, :, 2] = 0
    expected = attnzoo.attention(q, k, zero)[:, :, 2]
    assert torch.equal(module(q, k, zero)[:, :, 2], expected)


def test_a_mixture_of_one_is_the_attention() -> None:
    module = MixtureAttention("softmax", H, E, components=1).double()
    q, k, v, x = inputs(module)
    expected = attnzoo.attention(q, k, v, "softmax", enable_gqa=True)
    assert torch.allclose(module(q, k, v, **module.projected(x, x)), expected, atol=1e-14)


def test_a_mixture_has_a_higher_rank_than_one_attention() -> None:
    """The rank of the log weights is at most D + 1 for one softmax, whatever its query."""
    n, d = 40, 4
    module = MixtureAttention("softmax", 1, d, components=2).double()
    q, k, x = rand(1, 2, n, d, seed=1), rand(1, 1, n, d, seed=2), rand(1, n, d, seed=3)
    assert module.gate is not None
    nn.init.normal_(module.gate.weight)
    gate = module.projected(x, x)
    _, weights = module(q, k, k, need_weights=True, **gate)
    prior = gate["gate"].softmax(-1)[:, 0].mT[..., None]  # [1, K, n, 1]
    one = attnzoo.attention_weights((prior * q).sum(1, keepdim=True), k, k)
    assert torch.linalg.matrix_rank(one[0, 0].log()) == d + 1
    assert torch.linalg.matrix_rank(weights[0, 0].log()) > 2 * d


# ---------------------------------------------------------------------- numerics


def test_hidden_rows_and_extreme_inputs() -> None:
    """A query without keys has output 0 and finite gradients; so have large scores and values."""
    for which in MADE:
        module = make(which)
        q, k, v, x = (y.requires_grad_() for y in inputs(module))
        mask = torch.ones(N, N, dtype=torch.bool)
        mask[2] = False
        out = module(100 * q, k, 20 * v, attn_mask=mask, **module.projected(x, x))
        assert (out[:, :, 2] == 0).all()
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(out, [q, k, v]))


@pytest.mark.parametrize("which", MADE)
def test_fp64_inputs_are_computed_in_fp64(which: str) -> None:
    """Also if the wrapper's own parameters are fp32."""
    module = make(which).float()
    q, k, v, x = inputs(module)
    gate = {name: y.double() for name, y in module.projected(x.float(), x.float()).items()}
    exact = copy.deepcopy(module).double()(q, k, v, **gate)
    assert torch.allclose(module(q, k, v, **gate), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", MADE)
def test_half_precision(which: str, dtype: torch.dtype) -> None:
    """Each of the operations rounds once to the dtype, relative to outputs of size 4 at most."""
    module = make(which)
    exact = definition(module, *inputs(module))[0]
    q, k, v, x = (y.to(dtype) for y in inputs(module))
    got = module.to(dtype)(q, k, v, **module.projected(x, x))
    assert got.dtype == dtype
    assert (got - exact).abs().max() < 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["differential_v2", "mixture", "gate per element"])
def test_outputs_are_combined_in_fp32_and_rounded_once(which: str, dtype: torch.dtype) -> None:
    """All keys have the same value v, so every attention returns exactly v."""
    module = make(which).to(dtype)
    q, k, v, _ = (x.to(dtype) for x in inputs(module, H))
    v = v[:, :, :1].expand(-1, -1, N, -1)
    gate = 2 * rand(B, H, N, module.gates, seed=5).to(dtype)
    out = module(q, k, v, gate=gate)
    exact, share = v.double(), gate.double().sigmoid()
    if which == "differential_v2":
        exact = exact * (1 - share)
    elif which != "mixture":
        exact = exact * share
    rtol = 0.51 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(
    ("clamp", "dtype"),
    [(60.0, torch.float32), (60.0, torch.bfloat16), (9.0, torch.float16)],
    ids=str,
)
def test_laser_at_the_largest_clamp(clamp: float, dtype: torch.dtype) -> None:
    """Values far above and below the clamp, of 3000 equal keys, on every backend of a CPU."""
    module = Laser("softmax", H, E, clamp=clamp)
    k = torch.zeros(1, H, 3000, D, dtype=dtype)
    for sign in (-1.0, 1.0):
        v = torch.full_like(k, sign * 1000)
        for options in ({"backend": "eager"}, {"backend": "tiled"}, {}, {"dropout_p": 0.5}):
            module.train("dropout_p" in options)
            out = module(k[:, :, :3], k, v, **options)
            # Dropout keeps half of 3000 weights, times 2; 0.2 is log of 6 standard deviations.
            assert (out - sign * clamp).abs().max() < (0.2 if module.training else 0.06)


def test_laser_rejects_what_fp16_cannot_hold() -> None:
    q = torch.zeros(1, H, N, D, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"clamp must be at most 9 in fp16, got 15"):
        Laser("softmax", H, E)(q, q, q)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="clamp must be"):
        Laser("softmax", H, E)(q.float(), q.float(), q.float())
    with pytest.raises(TypeError, match=r"v must be bf16.* with sink, whose weights need not sum"):
        Laser("sink", H, E, clamp=9.0)(q, q, q)


def test_laser_rejects_negative_weights() -> None:
    with pytest.raises(ValueError, match="variant must have weights >= 0 for Laser.*'silu'"):
        Laser("silu", H, E)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"given": 3}, TypeError, "given must be a tuple of names, got 3"),
        ({"given": "s"}, TypeError, "given must be a tuple of names, got 's'"),
        ({"given": ("b", "c")}, ValueError, r"given must name .* \(s, b\), got 'c'"),
        ({"given": ("s",), "s": 2.0}, TypeError, "s must not be set if given names it, got 2.0"),
    ],
)
def test_wrong_names_of_given_parameters_raise(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        XSA("ssmax", H, E, **options)


@pytest.mark.parametrize("name", WRAPPERS)
def test_mixed_dtypes_under_autocast_and_wrong_caches(name: str) -> None:
    module = WRAPPERS[name]("softmax", H, E)
    q, k, v, x = (leaf.float() for leaf in inputs(module))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q.bfloat16(), k, v, **module.projected(x, x))
        mask = torch.zeros(N, k.shape[2], dtype=torch.bfloat16)
        masked = module(q, k, v, attn_mask=mask, **module.projected(x, x))
    assert out.shape == masked.shape == (B, H, N, v.shape[-1])
    with pytest.raises(TypeError, match="cache must be a KVCache or a StateCache, got int"):
        module(q, k, v, cache=3, **module.projected(x, x))


def test_every_wrapper_is_tested() -> None:
    assert {name for name, _ in MADE.values()} == {*WRAPPERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["differential", "differential_v2", "mixture"])
def test_compiles_as_one_graph_for_all_lengths(name: str) -> None:
    """einops splits and joins heads in the graph, also of symbolic sizes."""
    attend, graphs = WRAPPERS[name]("ssmax", 2, 16), []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    def attend_to_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Any:
        return attend(q, k, v, is_causal=True, backend="eager", **attend.projected(x, x))

    compiled = torch.compile(attend_to_inputs, fullgraph=True, dynamic=True, backend=count)
    for length in (9, 12, 17):
        x = rand(2, length, 16).float()
        q, k, v = (rand(2, n, length, 8, seed=n).float() for n in (2 * attend.queries, 2, 2))
        assert torch.allclose(compiled(q, k, v, x), attend_to_inputs(q, k, v, x), atol=1e-6)
    assert len(graphs) == 1
    torch.compiler.reset()
