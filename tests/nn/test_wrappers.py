"""Wrappers: differential, mixture, gate and Laser, around any variant."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnzoo
from attnzoo.nn import (
    WRAPPERS,
    Attention,
    Differential,
    DifferentialV2,
    Laser,
    MixtureAttention,
    MultiheadAttention,
    OutputGate,
    Transformer,
    Wrapper,
    parameter_groups,
    replace,
)
from helpers.cases import rand, unprojected
from helpers.coverage_table import TRAINED, precise
from helpers.errors import WrongCalls, raising

B, H, KV, N, D, E = 2, 4, 2, 7, 8, 32
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "differential": ("differential", {}),
    "differential_v2": ("differential_v2", {}),
    "laser": ("laser", {"clamp": 3.0}),
    "mixture": ("mixture", {"components": 3}),
    "gate per element": ("output_gate", {"per": "element"}),
    "gate per head": ("output_gate", {"per": "head"}),
}


def make(which: str, variant: str = "softmax", **options: Any) -> Wrapper:
    """A wrapper in fp64 whose parameters are not their initial values."""
    name, own = MADE[which]
    torch.manual_seed(0)
    module = WRAPPERS[name](variant, H, E, **own, **unprojected(variant), **options).double()
    with torch.no_grad():
        for index, x in enumerate(p for n, p in module.named_parameters() if "attention." not in n):
            x.add_(0.3 * rand(*x.shape, seed=index))
    return module


def inputs(module: Wrapper, heads: int = KV) -> list[Tensor]:
    """q, k, v and the hidden states."""
    q, k = rand(B, module.queries * H, N, D, seed=1), rand(B, heads, N, D, seed=2)
    return [1.5 * q, 1.5 * k, rand(B, heads, N, D, seed=3), rand(B, N, E, seed=4)]


# ------------------------------------------------------------------------- definitions


def weights_of(
    module: Wrapper, q: Tensor, k: Tensor, index: int, options: dict[str, Any]
) -> Tensor:
    """Weights (B, Nq, Nk) of one map, from its queries and keys (B, N, ·)."""
    params = {
        name: x[index : index + 1] if isinstance(x, Tensor) else x
        for name, x in module.attention._params().items()
    }
    q, k = q[:, None], k[:, None]
    return attnzoo.attention_weights(q, k, k, module.variant, **options, **params)[:, 0]


def head_of(options: dict[str, Any], head: int) -> dict[str, Any]:
    """The keywords of one head."""
    found = dict(options)
    if "alibi" in found:
        found["alibi"] = found["alibi"][head : head + 1]
    if "attn_mask" in found and found["attn_mask"].shape[1] == H:
        found["attn_mask"] = found["attn_mask"][:, head : head + 1]
    return found


def definition(
    module: Wrapper, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output and the weights, head by head, in the order of the formulas."""
    outs, found = [], []
    maps, group = module.maps, H // k.shape[1]
    gate = None if module.gate is None else F.linear(hidden, module.gate.weight)
    for head in range(H):
        own, keys, values = head_of(options, head), k[:, head // group], v[:, head // group]
        queries = q.unflatten(1, (H, -1))[:, head]  # [B, Q, Nq, D]
        mine = None if gate is None else gate.unflatten(-1, (H, -1))[:, :, head]  # [B, Nq, G]
        if isinstance(module, Differential):
            pairs = torch.arange(D // 2)
            rows = []
            for half in range(2):
                which = torch.cat([pairs[half::2], pairs[half::2] + D // 2])
                rows.append(weights_of(
                    module, queries[:, 0, :, which], keys[..., which], half * H + head,
                    {**own, "scale": (D / 2) ** -0.5 * own.get("scale", D**-0.5) * D**0.5},
                ))  # fmt: skip
            x = module.vectors
            factor = (x[0] @ x[1]).exp() - (x[2] @ x[3]).exp() + 0.2  # layer 0
            w = rows[0] - factor * rows[1]
            out = w @ values
            norm = (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            out = 0.8 * module.norm.weight * out / norm
        elif isinstance(module, (DifferentialV2, MixtureAttention)):
            assert mine is not None
            rows = [weights_of(module, queries[:, m], keys, head * maps + m, own)
                    for m in range(maps)]  # fmt: skip
            if isinstance(module, DifferentialV2):
                w = rows[0] - torch.sigmoid(mine) * rows[1]
            else:
                prior = mine.softmax(-1)
                w = sum((prior[..., m : m + 1] * rows[m] for m in range(maps)), torch.zeros(()))
            out = w @ values
        else:
            w = weights_of(module, queries[:, 0], keys, head, own)
            if isinstance(module, Laser):
                c = module.clamp
                out = (w @ (c * torch.tanh(values / c)).exp()).log()
            else:
                assert mine is not None
                out = (w @ values) * torch.sigmoid(mine)
        outs.append(out)
        found.append(w)
    return torch.stack(outs, 1), torch.stack(found, 1)


def gradients(out: Tensor, leaves: list[Tensor], seed: int = 9) -> list[Tensor]:
    return list(torch.autograd.grad(out, leaves, rand(*out.shape, seed=seed).to(out)))


def assert_near(got: list[Tensor], expected: list[Tensor], eps: float) -> None:
    """Entries are sums of fewer than a thousand products of numbers of size 1 or so, so their
    error is below 1000 ε; a wrong formula differs by far more than 1000 fp32 roundings."""
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).abs().max() <= 1000 * eps * (1 + b.abs().max())


@pytest.mark.parametrize("which", MADE)
@pytest.mark.parametrize(("variant", "backend"), TRAINED)
def test_values_and_gradients_agree_with_the_definition(
    which: str, variant: str, backend: str
) -> None:
    """Of q, k, v, hidden states and all parameters."""
    if (which, backend) == ("differential", "sdpa"):
        pytest.skip("sdpa needs values with as many features as keys, and the halves have fewer")
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
    found = [got, *gradients(got, [*(q, k, v, x)[:used], *mine.parameters()])]
    assert_near(found, expected, torch.finfo(dtype).eps)


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


# ------------------------------------------------------------- the code of the papers


def test_differential_equals_the_papers_code() -> None:
    """Ye et al.: 2·H heads of D/2 features, one norm and one λ for all heads of a layer."""
    module = make("differential", layer=3)
    assert isinstance(module, Differential)
    q, k, v, _ = inputs(module, heads=H)
    # Their heads are [half 1, half 2] of a head of D features; ours are every second pair.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
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
    of 88 changes values near 1 by less than 1e-4."""
    module = Laser("softmax", H, E, clamp=88.0).double()
    q, k, v, _ = inputs(module, heads=H)
    m = v.amax(2, keepdim=True)
    expected = m + (F.scaled_dot_product_attention(q, k, (v - m).exp())).log()
    assert torch.allclose(module(q, k, v), expected, atol=2e-3)
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


def test_laser_rejects_a_clamp_that_overflows() -> None:
    q = torch.zeros(1, H, N, D, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"clamp must be at most 11 for torch.float16, got 15"):
        Laser("softmax", H, E)(q, q, q)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="clamp must be"):
        Laser("softmax", H, E)(q.float(), q.float(), q.float())


# ------------------------------------------------------------------------- hosts


def trained(model: nn.Module) -> nn.Module:
    """The model with other parameters than initially, in fp64."""
    with torch.no_grad():
        for index, x in enumerate(model.double().parameters()):
            x.add_(0.1 * rand(*x.shape, seed=index))
    return model


@pytest.mark.parametrize("which", MADE)
@pytest.mark.parametrize("positions", ["rope", "nape"])
def test_transformer_decodes_with_a_cache(which: str, positions: str) -> None:
    """Also with grouped heads, and gradients reach all parameters."""
    model = Transformer(
        20, E, H, 2, "ssmax", positions, num_kv_heads=KV, wrapper=MADE[which], qk_norm=True
    )
    trained(model)
    tokens = torch.randint(20, (B, 9), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches(9)
    full = model(tokens)
    with torch.no_grad():
        parts = [model(tokens[:, s], caches=caches)
                 for s in (slice(4), slice(4, 5), slice(5, 9))]  # fmt: skip
    assert torch.allclose(torch.cat(parts, 1), full, atol=1e-10)
    model.loss(model.states(tokens), tokens).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize("name", ["differential", "differential_v2"])
def test_rope_depends_on_distances_only(name: str) -> None:
    """Tokens that are equal in two windows give equal outputs, wherever the windows are."""
    model = trained(Transformer(20, E, H, 1, positions="rope", wrapper=name, window=3))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3]])
    logits = model(tokens)
    assert torch.allclose(logits[:, 2], logits[:, 8], atol=1e-5)  # angles are fp32
    assert not torch.allclose(logits[:, 2], logits[:, 5], atol=1e-3)


def test_differential_counts_layers() -> None:
    model = Transformer(20, E, H, 2, wrapper="differential")
    initial = [attend.initial for attend in model._attends()]  # pyright: ignore
    assert initial == pytest.approx([0.2, 0.8 - 0.6 * torch.tensor(-0.3).exp().item()])


@pytest.mark.parametrize("which", MADE)
def test_multihead_attention(which: str) -> None:
    """The projections, masks and weights of torch's layer, around the wrapper."""
    torch.manual_seed(0)
    layer = MultiheadAttention(E, H, batch_first=True, num_kv_heads=KV, wrapper=MADE[which])
    trained(layer)
    wrapper = layer.attend
    assert isinstance(wrapper, Wrapper)
    assert layer.in_proj_weight is not None
    x, blocked = rand(B, N, E, seed=5), torch.ones(N, N, dtype=torch.bool).triu(1)
    out, weights = layer(x, x, x, attn_mask=blocked, average_attn_weights=False)
    assert weights is not None
    projected = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    heads = projected.unflatten(-1, (-1, D)).transpose(1, 2)
    q, k, v = heads.split([wrapper.queries * H, KV, KV], dim=1)
    expected, expected_weights = definition(wrapper, q, k, v, x, attn_mask=~blocked[None, None])
    expected = layer.out_proj(expected.transpose(1, 2).flatten(2))
    assert torch.allclose(out, expected, atol=1e-10)
    assert torch.allclose(weights, expected_weights, atol=1e-10)


def test_replace_keeps_torchs_matrices_under_a_gate() -> None:
    theirs = nn.TransformerEncoderLayer(E, H, batch_first=True, dropout=0.0)
    weight = theirs.self_attn.in_proj_weight
    layer = replace(theirs, "entmax", wrapper="output_gate").self_attn
    assert isinstance(layer, MultiheadAttention)
    assert layer.in_proj_weight is weight
    assert isinstance(layer.attend, OutputGate)
    assert layer.attend.variant == "entmax"
    assert theirs(rand(B, N, E).float()).shape == (B, N, E)


def test_modules_are_copied_pickled_and_loaded() -> None:
    for which in MADE:
        module = make(which, "ssmax")
        q, k, v, x = inputs(module)
        out = module(q, k, v, **module.projected(x, x))
        empty = WRAPPERS[MADE[which][0]]("ssmax", H, E, **MADE[which][1]).double()
        empty.load_state_dict(module.state_dict())
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), empty):
            assert torch.equal(other(q, k, v, **other.projected(x, x)), out)


def test_reset_parameters_and_groups() -> None:
    model = Transformer(20, E, H, 2, "ssmax", wrapper="differential")
    trained(model).reset_parameters()
    attend = model._attends()[0]
    assert isinstance(attend, Differential)
    assert isinstance(attend.attention, Attention)
    assert (attend.norm.weight == 1).all()
    assert attend.attention.s[0].item() == pytest.approx(0.168)
    assert 0.05 < attend.vectors.std() < 0.2
    without = parameter_groups(model, 0.1)[1]["params"]
    assert {p.shape for p in without} == {(2 * H,)}
    gated = Transformer(20, E, H, 2, wrapper="output_gate")
    assert len(parameter_groups(gated, 0.1)) == 1


def test_representation() -> None:
    assert repr(MixtureAttention("softmax", 2, 8, components=3)) == (
        "MixtureAttention(\n  num_heads=2, components=3\n  (attention): Attention('softmax', "
        "num_heads=6)\n  (gate): HeadProjection(features=8, num_heads=6)\n)"
    )


def test_variants_keep_their_projections() -> None:
    """forgetting makes its gates for each of the maps."""
    model = Transformer(20, E, H, 1, "forgetting", "none", wrapper="differential_v2")
    projections = model.get_submodule("layers.0.attend.attention.projections.log_gates")
    assert projections.get_parameter("bias").shape == (2 * H,)


# ------------------------------------------------------------------------- errors


def call(which: str = "laser", **changed: Any) -> Any:
    module = make(which)
    q, k, v, _ = inputs(module)
    return module(**{"q": q, "k": k, "v": v, **changed})


WRONG: WrongCalls = [
    (lambda: call("differential_v2"), TypeError, "gate must be given to DifferentialV2"),
    (
        lambda: call("differential_v2", gate=rand(B, H, N, 2)),
        ValueError,
        r"gate must have shape \(2, 4, 7, 1\), got \(2, 4, 7, 2\)",
    ),
    (lambda: call(gate=rand(B, H, N, 1)), ValueError, "gate must be None for Laser"),
    (
        lambda: call("differential_v2", q=rand(B, H, N, D), gate=rand(B, H, N, 1)),
        ValueError,
        r"q must have 2 · num_heads=4 = 8 heads, got \(2, 4, 7, 8\)",
    ),
    (lambda: call(k=rand(B, 3, N, D)), ValueError, "k must have a divisor of num_heads=4 heads"),
    (lambda: call(v=rand(B, KV, N, 5)), ValueError, r"v must have v_dim=8 features, got \(2, 2"),
    (lambda: call(q=rand(H, N, D)), ValueError, r"q must have 4 dimensions, got \(4, 7, 8\)"),
    (lambda: call(return_lse=True), ValueError, "return_lse must be False for Laser"),
    (lambda: call(need_weights=1), TypeError, "need_weights must be a bool"),
    (lambda: call(s=1.0), TypeError, "s"),
    (lambda: Differential("softmax", 4, 24), ValueError, "qk_dim must be a multiple of 4 for Diff"),
    (lambda: Differential("softmax", 3, 32), ValueError, "not a multiple of num_heads=3: give qk"),
    (lambda: Differential("softmax", 4, 32, layer=-1), ValueError, "layer must be an int >= 0"),
    (lambda: MixtureAttention("softmax", 4, 32, components=0), ValueError, "components must be"),
    (lambda: Laser("softmax", 4, 32, clamp=0), ValueError, "clamp must be > 0 and at most 88"),
    (lambda: Laser("softmax", 4, 32, clamp="a"), TypeError, "clamp must be a number > 0"),  # pyright: ignore
    (lambda: OutputGate("softmax", 4, 32, per="row"), ValueError, "per must be 'element' or"),  # pyright: ignore
    (lambda: OutputGate("softmax", 4, 32, s=1.0), TypeError, "no parameter 's'"),
    (lambda: Transformer(9, E, H, 1, wrapper="lasr"), ValueError, "one of .*laser.*got 'lasr'"),
    (lambda: Transformer(9, E, H, 1, wrapper=Laser), TypeError, "wrapper must be a name, a pair"),  # pyright: ignore
    (
        lambda: Transformer(9, E, H, 1, wrapper=("mixture", {"parts": 3})),
        TypeError,
        "wrapper 'mixture' has no argument 'parts'; it has: components",
    ),
    (
        lambda: Transformer(9, E, H, 1, wrapper=("laser", {"layer": 3})),
        TypeError,
        "wrapper 'laser' has no argument 'layer'; it has: clamp",
    ),
    (
        lambda: replace(nn.MultiheadAttention(E, H), "softmax", wrapper="mixture"),
        ValueError,
        "wrapper must use one query per head, which .* got 'mixture', which uses 2",
    ),
]
test_wrong_input = raising(WRONG)


def test_every_wrapper_is_tested() -> None:
    assert {name for name, _ in MADE.values()} == {*WRAPPERS}
