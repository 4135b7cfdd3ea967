"""Layers own the projections that make parameters of a variant from the hidden states."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnzoo
from attnzoo import Param, Projection
from attnzoo.core import registry
from attnzoo.nn import MultiheadAttention, Transformer, parameter_groups, replace
from helpers.cases import ALL_VARIANTS, rand, unprojected
from helpers.errors import WrongCalls, raising

E, H = 16, 4
NAMES = ["attend.projections.log_gates.weight", "attend.projections.log_gates.bias"]


def multihead(variant: str = "forgetting", **options: Any) -> MultiheadAttention:
    torch.manual_seed(1)
    options = {"batch_first": True, "dtype": torch.float64, **options}
    layer = MultiheadAttention(E, H, variant=variant, **options)
    with torch.no_grad():
        for name, x in layer.named_parameters():
            if "projections" in name and name.endswith("weight"):
                x.copy_(rand(*x.shape, seed=2))
    return layer


def fresh(variant: str = "forgetting", **options: Any) -> MultiheadAttention:
    return MultiheadAttention(E, H, variant=variant, **options)


def named(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters())


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant with a projected gain per query and a projected shift per key."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    attnzoo.register_variant(
        attnzoo.Variant(
            "mine",
            "-",
            "-",
            lambda q, k, call, gain, shift: call.softmax(gain * call.scores(q, k) + shift),
            params=(
                Param("gain", 1.0, per_token=True, projection=Projection(torch.exp, 0.5)),
                Param("shift", 0.0, per_key=True, projection=Projection(torch.tanh)),
            ),
        )
    )


# ---- every variant ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_multihead_attention_supports_every_variant(variant: str) -> None:
    layer, x = multihead(variant, num_kv_heads=2, **unprojected(variant)), rand(2, 9, E)
    dense, weights = layer(x, x, x, is_causal=True, average_attn_weights=False)
    fast, _ = layer(x, x, x, is_causal=True, need_weights=False)
    assert weights.shape == (2, H, 9, 9)
    assert torch.allclose(dense, fast, atol=1e-6)
    fast.square().sum().backward()
    for name, parameter in named(layer).items():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_transformer_trains_every_variant(variant: str) -> None:
    torch.manual_seed(0)
    model = Transformer(20, E, H, 2, variant, positions="none", **unprojected(variant))
    tokens = torch.randint(20, (2, 9))
    model.loss(model.states(tokens[:, :-1]), tokens[:, 1:]).backward()
    for name, parameter in named(model).items():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        if "projections" in name:
            assert bool((parameter.grad != 0).any()), name


# ---- values -----------------------------------------------------------------------------------


def expected_output(layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the causal output, computed by the functions of torch from the layer's matrices."""
    state = named(layer)
    gates = nn.functional.logsigmoid(key @ state[NAMES[0]].T + state[NAMES[1]])  # [B, S, H]
    before = gates.cumsum(1).transpose(1, 2)
    last = before[..., key.shape[1] - query.shape[1] :]
    q, k, v = layer._project(query, key, value)
    scores = q @ k.mT / q.shape[-1] ** 0.5 + last[..., None] - before[..., None, :]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
    hidden = hidden.triu(1 + key.shape[1] - query.shape[1])
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("queries", [9, 5])
def test_gates_are_projected_from_the_input_of_the_keys(queries: int) -> None:
    layer = multihead(kdim=6, vdim=7)
    leaves = [rand(2, n, d, seed=d).requires_grad_() for n, d in ((queries, E), (9, 6), (9, 7))]
    leaves += named(layer).values()
    out = layer(*leaves[:3], is_causal=True, need_weights=False)[0]
    expected = expected_output(layer, *leaves[:3])
    assert torch.allclose(out, expected)
    do = rand(*out.shape, seed=8)
    pairs = (torch.autograd.grad(x, leaves, do) for x in (out, expected))
    assert all(torch.allclose(a, b) for a, b in zip(*pairs, strict=True))


def test_layouts_of_torch_give_the_same_outputs() -> None:
    layer, x = multihead(), rand(2, 9, E)
    expected = layer(x, x, x, is_causal=True)[0]
    assert torch.allclose(layer(x[0], x[0], x[0], is_causal=True)[0], expected[0])
    layer.batch_first = False
    y = x.transpose(0, 1)
    assert torch.allclose(layer(y, y, y, is_causal=True)[0].transpose(0, 1), expected)


def test_a_parameter_with_an_initial_value_is_projected_on_request() -> None:
    """ASEntmax of the paper: β = softplus(W_β x + b_β) and γ = 2 tanh(W_γ x + b_γ) per token."""
    plain, x = multihead("asentmax"), rand(2, 9, E)
    assert plain.attend.learned == ("beta", "gamma")
    assert plain.attend.projections is None
    start = fresh(variant="asentmax", beta="projected", gamma="projected", dtype=torch.float64)
    torch.manual_seed(1)
    layer = multihead("asentmax", beta="projected", gamma="projected", learn=())
    assert layer.attend.learned == ()
    state = named(layer.attend)
    assert [tuple(p.shape) for p in state.values()] == [(H, E), (H,)] * 2
    made = layer.attend.projected(x, x)
    beta = nn.functional.softplus(x @ state["projections.beta.weight"].T)
    gamma = 2 * torch.tanh(x @ state["projections.gamma.weight"].T)
    assert torch.allclose(made["beta"], beta.mT)
    assert torch.allclose(made["gamma"], gamma.mT)
    # The initial projections give the initial values of the plain parameters.
    made = start.attend.projected(x, x)
    assert torch.allclose(made["beta"], plain.attend.beta.double()[:, None])
    assert torch.equal(made["gamma"], torch.zeros(2, H, 9).double())


def test_parameters_per_query_are_projected_from_the_queries(mine: None) -> None:
    layer = multihead("mine", kdim=6, vdim=6)
    query, key = rand(2, 5, E), rand(2, 9, 6, seed=1)
    shapes = {name: tuple(x.shape) for name, x in named(layer.attend).items()}
    assert shapes == {
        "projections.gain.weight": (H, E),
        "projections.gain.bias": (H,),
        "projections.shift.weight": (H, 6),
        "projections.shift.bias": (H,),
    }
    made = layer.attend.projected(query, key)
    state = named(layer.attend)
    gain = query @ state["projections.gain.weight"].T + state["projections.gain.bias"]
    assert torch.allclose(made["gain"], gain.exp().transpose(1, 2))
    shift = key @ state["projections.shift.weight"].T
    assert torch.allclose(made["shift"], shift.tanh().transpose(1, 2))
    q, k, v = layer._project(query, key, key)
    weights = layer(query, key, key, average_attn_weights=False)[1]
    assert torch.allclose(weights, attnzoo.attention_weights(q, k, v, "mine", **made))


def test_gates_of_a_bf16_layer_are_fp32() -> None:
    """Near the bias of 5, bf16 would round the projected value to multiples of 1/32."""
    layer, x = fresh().bfloat16(), rand(2, 9, E).bfloat16()
    nn.init.normal_(layer.attend.projections["log_gates"].weight, std=0.01)
    gates = layer.attend.projected(x, x)["log_gates"]
    exact = fresh().double()
    exact.load_state_dict(layer.state_dict())
    expected = exact.attend.projected(x.double(), x.double())["log_gates"]
    assert gates.dtype == torch.float32
    assert torch.allclose(gates.double(), expected, rtol=1e-3)
    layer = fresh().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.attend.projected(x.float(), x.float())["log_gates"].dtype == torch.float32
        assert layer(*[x.float()] * 3, is_causal=True, need_weights=False)[0].isfinite().all()


@pytest.mark.slow
def test_a_projecting_layer_compiles_as_one_graph() -> None:
    layer, x = multihead(), rand(2, 9, E)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    call = {"is_causal": True, "need_weights": False}
    assert torch.allclose(compiled(x, x, x, **call)[0], layer(x, x, x, **call)[0])


def test_a_causal_mask_and_is_causal_may_come_with_weights() -> None:
    """Torch ignores is_causal then, but a causal variant needs it."""
    layer, x = multihead(), rand(2, 9, E)
    expected, weights = layer(x, x, x, is_causal=True)
    blocked = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for mask in (blocked, torch.zeros(9, 9).double().masked_fill(blocked, float("-inf"))):
        for call in ({}, {"need_weights": False}):
            out, same_weights = layer(x, x, x, attn_mask=mask, is_causal=True, **call)
            assert torch.allclose(out, expected)
            assert same_weights is None or torch.allclose(same_weights, weights)


# ---- initial values, state dict, learn --------------------------------------------------------


def test_initial_gates_are_equal_and_other_matrices_are_those_of_softmax() -> None:
    torch.manual_seed(1)
    softmax = MultiheadAttention(E, H)
    torch.manual_seed(1)
    layer = fresh()
    assert list(layer.state_dict()) == [*softmax.state_dict(), *NAMES]
    assert all(torch.equal(x, layer.state_dict()[n]) for n, x in softmax.state_dict().items())
    gates = layer.attend.projected(*[rand(1, 9, E).float()] * 2)["log_gates"]
    assert torch.allclose(gates, nn.functional.logsigmoid(torch.tensor(5.0)))
    torch.manual_seed(1)
    softmax = Transformer(20, E, H, 2).state_dict()
    torch.manual_seed(1)
    state = Transformer(20, E, H, 2, "forgetting").state_dict()
    assert all(torch.equal(x, state[name]) for name, x in softmax.items())
    assert {n for n in state if n not in softmax} == {
        f"layers.{i}.{name}" for i in (0, 1) for name in NAMES
    }


def test_state_dict_and_copies_keep_the_projections() -> None:
    layer, x = multihead(), rand(2, 9, E)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = fresh(batch_first=True, dtype=torch.float64)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (loaded, copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, x, x, is_causal=True)[0], layer(x, x, x, is_causal=True)[0])


def test_reset_parameters_restores_the_initial_values() -> None:
    model = Transformer(20, E, H, 1, [("forgetting", {})])
    with torch.device("meta"):
        empty = Transformer(20, E, H, 1, [("forgetting", {})])
    empty.to_empty(device="cpu")
    for other in (model, empty):
        with torch.no_grad():
            for x in other.parameters():
                x.fill_(float("nan"))
        other.reset_parameters()
        state = named(other)
        assert not bool(state[f"layers.0.{NAMES[0]}"].any())
        assert state[f"layers.0.{NAMES[1]}"].tolist() == [5.0] * H
    scales = Transformer(20, E, H, 1, "ssmax")
    with torch.no_grad():
        scales.layers[0].attend.s.fill_(3.0)
    scales.reset_parameters()
    assert scales.layers[0].attend.s.tolist() == pytest.approx([0.168] * H)


def test_values_and_learn_choose_what_is_learned() -> None:
    x = rand(2, 9, E).float()
    fixed = fresh(log_gates=0.0)
    assert fixed.attend.projections is None
    softmax = MultiheadAttention(E, H)
    softmax.load_state_dict(fixed.state_dict())
    expected = softmax(x, x, x, is_causal=True)[0]
    assert torch.allclose(fixed(x, x, x, is_causal=True)[0], expected, atol=1e-6)
    for options in ({}, {"learn": None}, {"learn": ("log_gates",)}, {"learn": ["log_gates"]}):
        assert list(named(fresh(**options).attend)) == [name[7:] for name in NAMES]
    per_head = fresh(learn=("log_gates",), log_gates=-0.1)
    (raw,) = per_head.attend.parameters()
    assert raw.shape == (H,)
    for value in (-300.0, 300.0):  # as after large steps of an optimizer
        nn.init.constant_(raw, value)
        assert bool((per_head.attend.log_gates < 0).all())
        assert bool(per_head(x, x, x, is_causal=True)[0].isfinite().all())
    with pytest.raises(TypeError, match="'forgetting' requires the parameter 'log_gates'"):
        fresh(learn=())
    with pytest.raises(TypeError, match="learn must be a tuple of names or None, got 'log_gates'"):
        fresh(learn="log_gates")
    with pytest.raises(ValueError, match="learn must name each parameter once"):
        fresh(learn=("log_gates", "log_gates"))


def test_parameters_with_a_default_are_projected_unless_learn_omits_them(mine: None) -> None:
    def names(**options: Any) -> list[str]:
        return [n for n, _ in multihead("mine", **options).attend.named_parameters()]

    assert len(names()) == 4
    assert names(learn=()) == []
    gain = ["projections.gain.weight", "projections.gain.bias"]
    assert names(learn=("gain",)) == gain
    assert names(shift=0.5) == gain
    assert names(gain="projected", learn=()) == gain


def test_matrices_of_projections_have_weight_decay_and_biases_have_none() -> None:
    layer = fresh()
    decayed, constant = parameter_groups(layer, 0.1)
    state = named(layer)
    assert [id(p) for p in constant["params"]] == [id(state[NAMES[1]])]
    assert any(p is state[NAMES[0]] for p in decayed["params"])


# ---- torch's models ---------------------------------------------------------------------------


def test_replace_adds_and_removes_projections() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    before, x = named(model), rand(2, 9, E)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    replace(model, "forgetting")
    after = named(model)
    assert all(after[name] is before[name] for name in before)
    added = {f"layers.{i}.self_attn.{name}" for i in (0, 1) for name in NAMES}
    assert set(after) - set(before) == added
    assert all(after[name].dtype == torch.float64 for name in added)
    model(x, mask=mask, is_causal=True).sum().backward()
    assert all(after[name].grad is not None for name in added)
    replace(model, "ssmax")
    assert not set(named(model)) & added
    replace(model, "forgetting", log_gates=0.0, softcap=9.0)
    capped = model(x, mask=mask, is_causal=True)
    replace(model, "softmax", softcap=9.0)
    assert torch.allclose(model(x, mask=mask, is_causal=True), capped)
    attend = model.layers[0].self_attn.new_attend("forgetting")
    assert attend.projections["log_gates"].weight.dtype == torch.float64


def test_a_decoder_keeps_its_attention_to_another_sequence() -> None:
    """A causal variant has no meaning there, so only the other layers are replaced."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).double()
    x, memory = rand(2, 9, E), rand(2, 5, E, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    for part in model.layers:
        part.self_attn = replace(part.self_attn, "forgetting")
    model(x, memory, tgt_mask=mask, tgt_is_causal=True).sum().backward()
    assert all(name in named(model.layers[0].self_attn) for name in NAMES)
    with pytest.raises(ValueError, match=r"forgetting does not .* of layers\.0\.multihead_attn"):
        replace(model, "forgetting")
    model(x, memory, tgt_mask=mask, tgt_is_causal=True)


WRONG: WrongCalls = [
    (
        lambda: fresh(add_bias_kv=True),
        ValueError,
        "add_bias_kv and add_zero_attn must be False for 'forgetting', .* have no log_gates",
    ),
    (lambda: fresh(add_zero_attn=True), ValueError, "add_zero_attn must be False"),
    (lambda: fresh(given=("log_gates",)), TypeError, "given is an argument of Attention only"),
    (
        lambda: Transformer(9, E, H, 1, [("forgetting", {"given": ("log_gates",)})]),
        TypeError,
        "given is an argument of Attention only",
    ),
    (lambda: fresh(log_gates=0.5), ValueError, "log_gates must be between -1e4 and 0, got 0.5"),
    (
        lambda: fresh()(*[torch.ones(3, 2, E)] * 3),
        ValueError,
        "is_causal must be True, unless all queries follow all keys",
    ),
    (lambda: fresh(softcap=-1.0), ValueError, "softcap must be a number above 0 or None, got -1"),
    (lambda: Transformer(9, E, H, 1, softcap="x"), TypeError, "softcap must be .* got 'x'"),  # type: ignore
]


test_wrong_arguments_raise = raising(WRONG)


# ---- softcap ----------------------------------------------------------------------------------


def test_softcap_of_a_layer_is_that_of_its_attention() -> None:
    layer, x = multihead("ssmax", softcap=0.1), rand(2, 9, E)
    q, k, v = layer._project(x, x, x)
    expected = attnzoo.attention_weights(q, k, v, "ssmax", softcap=0.1, s=layer.attend.s)
    assert torch.allclose(layer(x, x, x, average_attn_weights=False)[1], expected)
    state = layer.state_dict()
    plain = MultiheadAttention(E, H, variant="ssmax", dtype=torch.float64, batch_first=True)
    plain.load_state_dict(state)
    assert plain.attend.softcap is None
    assert not torch.allclose(plain(x, x, x)[0], layer(x, x, x)[0])


def test_softcap_of_a_model_is_that_of_all_layers_without_their_own() -> None:
    layers = ["ssmax", ("softmax", {"softcap": 3.0})]
    model = Transformer(20, E, H, 2, layers, softcap=30, output_params={"softcap": 10.0})
    assert [layer.attend.softcap for layer in model.layers] == [30.0, 3.0]
    assert model.output.softcap == 10.0
    assert Transformer(20, E, H, 1).layers[0].attend.softcap is None
