"""Wrappers in models and in torch's layers, and wrong input."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnzoo.nn import (
    WRAPPERS,
    XSA,
    Attention,
    Differential,
    Laser,
    MixtureAttention,
    MultiheadAttention,
    OutputGate,
    QASSMax,
    Transformer,
    Wrapper,
    host_attention,
    parameter_groups,
    replace,
)
from helpers.cases import rand
from helpers.errors import WrongCalls, raising
from helpers.wrappers import KV, MADE, B, D, E, H, N, definition, inputs, make, trained


@pytest.mark.parametrize("which", MADE)
@pytest.mark.parametrize("positions", ["rope", "nape", "t5"])
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
    expected = pytest.approx([0.2, 0.8 - 0.6 * torch.tensor(-0.3).exp().item()])
    assert initial == expected
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True)
    encoder = replace(nn.TransformerEncoder(layer, 2), "softmax", wrapper="differential")
    assert [block.self_attn.attend.initial for block in encoder.layers] == expected  # pyright: ignore
    mixed = nn.ModuleList([MultiheadAttention(E, H), nn.MultiheadAttention(E, H)])
    for _ in range(2):
        replace(mixed, "ssmax", wrapper="differential")
        assert [layer.attend.initial for layer in mixed] == expected  # pyright: ignore
    with pytest.raises(TypeError, match="layer must not be given"):
        replace(mixed, "ssmax", layer=1)
    second = MultiheadAttention(E, H, wrapper="differential", layer=1)
    assert [0.2, second.attend.initial] == expected  # pyright: ignore


def test_the_name_of_a_wrapper_in_place_of_a_variant_raises() -> None:
    with pytest.raises(ValueError, match="got 'laser', the name of a wrapper; .* wrapper='laser'"):
        MultiheadAttention(E, H, variant="laser")


def test_the_dtype_under_autocast_is_that_of_attention() -> None:
    for which in MADE:
        module = make(which).float()
        q, k, v, x = (y.float() for y in inputs(module))
        with torch.autocast("cpu", torch.bfloat16):
            out, weights = module(q, k, v, need_weights=True, **module.projected(x, x))
        assert out.dtype == weights.dtype == torch.bfloat16


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
    assert repr(OutputGate("softmax", 2, 8, bias=True)).startswith(
        "OutputGate(\n  num_heads=2, per='element', bias=True\n"
    )
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


def sharded(which: str) -> Any:
    module = make(which)
    module.attention.sharding = object()  # pyright: ignore
    return module(*inputs(module)[:3])


def host(wrapper: Any = None, options: Any = {}, **changed: Any) -> Any:  # noqa: B006
    sizes = {"key_dim": E, "qk_dim": D, "v_dim": D, **changed}
    return host_attention(wrapper, "softmax", H, E, options, **sizes)


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
        r"q must have 8 heads \(2 · num_heads=4\), got \(2, 4, 7, 8\)",
    ),
    (lambda: call(k=rand(B, 3, N, D)), ValueError, "k must have a divisor of num_heads=4 heads"),
    (lambda: call(v=rand(B, KV, N, 5)), ValueError, r"v must have v_dim=8 features, got \(2, 2"),
    (lambda: call(q=rand(H, N, D)), ValueError, r"q must have 4 dimensions, got \(4, 7, 8\)"),
    (
        lambda: call(q=rand(B, H, N, 6)),
        ValueError,
        r"q must have qk_dim=8 features, got \(2, 4, 7, 6",
    ),
    (lambda: call(k=rand(B, KV, N, 16)), ValueError, "k must have qk_dim=8 features"),
    (lambda: call(v=rand(B, H, N, D)), ValueError, r"v must have the .* of k, \(2, 2, 7\), got"),
    (lambda: call(v=rand(B, KV, N, D).float()), TypeError, "v must have q's dtype torch.float64"),
    (lambda: call(v=rand(B, KV, N, D).long()), TypeError, "v must be fp16, bf16, fp32 or fp64"),
    (lambda: call("differential", scale=True), TypeError, "scale must be a finite number"),
    (lambda: call("differential", scale="x"), TypeError, "scale must be a finite number"),
    (lambda: call(enable_gqa=False), ValueError, "q and k must have the same number of heads"),
    (lambda: call(enable_gqa="x"), TypeError, "enable_gqa must be a bool, got 'x'"),
    (
        lambda: call("differential", alibi=torch.ones(2 * H)),
        ValueError,
        r"alibi must have one slope per head, shape \(4,\), got \(8,\)",
    ),
    (
        lambda: call("differential", relative_bias=torch.ones(H, 6)),
        ValueError,
        r"entries per head, shape \(4, 2R \+ 1\), got \(4, 6\)",
    ),
    (
        lambda: call("differential", attn_mask=torch.ones(B, 2 * H, N, N).bool()),
        ValueError,
        r"attn_mask must have 1 or 4 heads, got \(2, 8, 7, 7\)",
    ),
    (
        lambda: call("differential_v2", gate=torch.zeros(B, H, N, 1).long()),
        TypeError,
        "gate must be fp16, bf16, fp32 or fp64, got torch.int64",
    ),
    (lambda: call(gate=3), ValueError, "gate must be None for Laser, got 3"),
    (lambda: call(return_lse="x"), TypeError, "return_lse must be a bool, got 'x'"),
    (
        lambda: make("differential_v2").projected(rand(B, N, E - 1), rand(B, N, E)),
        ValueError,
        r"query must be \(B, N, 32\), got \(2, 7, 31\)",
    ),
    (lambda: make("laser").projected(3, 4), TypeError, "query must be a tensor, got int"),  # pyright: ignore
    (lambda: call(return_lse=True), ValueError, "return_lse must be False for Laser"),
    (lambda: call(need_weights=1), TypeError, "need_weights must be a bool"),
    (lambda: call(s=1.0), TypeError, "s"),
    (lambda: Differential("softmax", 4, 24), ValueError, "qk_dim must be a multiple of 8 for Diff"),
    (lambda: host(v_dim=0), ValueError, "v_dim must be"),
    (lambda: host(layer=-1), ValueError, "layer must be an int >= 0, got -1"),
    (lambda: host(options=None), TypeError, "options must be a dict, got None"),
    (
        lambda: host(wrapper="laser", options={"clamp": 3.0, "layer": 2}),
        TypeError,
        "options must not have layer: arguments of the wrapper",
    ),
    (lambda: Differential("softmax", 3, 32), ValueError, "not a multiple of num_heads=3: give qk"),
    (lambda: Differential("softmax", 4, 32, layer=-1), ValueError, "layer must be an int >= 0"),
    (lambda: MixtureAttention("softmax", 4, 32, components=0), ValueError, "components must be"),
    (
        lambda: Laser("softmax", 4, 32, clamp=0),
        ValueError,
        "clamp must be a number > 0 and at most",
    ),
    (lambda: Laser("softmax", 4, 32, clamp="a"), TypeError, "clamp must be a number > 0"),  # pyright: ignore
    (lambda: OutputGate("softmax", 4, 32, per="row"), ValueError, "per must be 'element' or"),  # pyright: ignore
    (
        lambda: OutputGate("softmax", 4, 32, activation="tanh"),  # pyright: ignore
        ValueError,
        "activation must be 'sigmoid' or 'softplus', got 'tanh'",
    ),
    (lambda: OutputGate("softmax", 4, 32, norm=1), TypeError, "norm must be a bool, got 1"),  # pyright: ignore
    (lambda: OutputGate("softmax", 4, 32, bias=0.0), TypeError, "bias must be a bool, got 0"),  # pyright: ignore
    (lambda: XSA("softmax", 4, 32, gated=1), TypeError, "gated must be a bool, got 1"),  # pyright: ignore
    (
        lambda: call("xsa", q=rand(B, H, N + 1, D)),
        ValueError,
        "q must have at most as many tokens as k for XSA, .* got 8 and 7",
    ),
    (
        lambda: MultiheadAttention(E, H, wrapper="xsa", add_zero_attn=True),
        ValueError,
        "add_bias_kv and add_zero_attn must be False for 'XSA', because it depends on positions",
    ),
    (
        lambda: MultiheadAttention(E, H, wrapper="xsa")(
            torch.ones(2, 1, E), *2 * [torch.ones(3, 1, E)]
        ),
        ValueError,
        "XSA does not support the cross-attention of MultiheadAttention: positions of .*undefined",
    ),
    (
        lambda: replace(nn.TransformerDecoderLayer(E, H), "softmax", wrapper="xsa"),
        ValueError,
        "XSA does not support the cross-attention of multihead_attn",
    ),
    (lambda: QASSMax("softmax", 4, 32, per="row"), ValueError, "per must be 'element' or 'head'"),  # pyright: ignore
    (lambda: QASSMax("softmax", 4, 32, hidden=0), ValueError, "hidden must be"),
    (lambda: sharded("qassmax"), ValueError, "the sequence must not be sharded for QASSMax"),
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
