"""attnzoo.nn.MultiheadAttention equals torch's layer."""

from __future__ import annotations

import copy
import math
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import torch.nn.utils.parametrizations
from torch import Tensor, nn

import attnzoo
from attnzoo.nn import Attention, MultiheadAttention, Taylor, replace
from helpers.cases import VARIANTS, params_of, rand

E, H = 12, 3
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "bias_k and bias_v": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "both appended": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "kdim and vdim": {"kdim": 7, "vdim": 5},
    "vdim": {"vdim": 5, "add_bias_kv": True},
}
MASKS = ("none", "bool", "float", "padding", "float padding", "bool and padding", "both float",
         "per head")  # fmt: skip
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
BY_POSITION = [name for name in attnzoo.list_variants() if attnzoo.get_variant(name).by_position]


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Return torch's layer and attnzoo's layer with the same fp64 weights."""
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **options)
    return theirs, ours


def tensors(layer: nn.MultiheadAttention, length: int = 6, keys: int = 8) -> list[Tensor]:
    sizes = ((length, E), (keys, layer.kdim), (keys, layer.vdim))
    made = [rand(n, 2, dim, seed=i) for i, (n, dim) in enumerate(sizes)]
    return [x.transpose(0, 1).contiguous() if layer.batch_first else x for x in made]


def masks(kind: str, length: int = 6, keys: int = 8) -> dict[str, Tensor]:
    """Return mask arguments in which every query sees a key; otherwise torch returns NaN."""
    blocked = rand(length, keys, seed=5) > 0.5
    padding = torch.arange(keys).expand(2, keys) >= torch.tensor([[keys], [keys - 3]])
    blocked[:, 0] = False
    added = rand(length, keys, seed=6).masked_fill(blocked, float("-inf"))
    as_float = torch.zeros(2, keys, dtype=torch.float64).masked_fill(padding, float("-inf"))
    return {
        "none": {},
        "bool": {"attn_mask": blocked},
        "float": {"attn_mask": added},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": as_float},
        "bool and padding": {"attn_mask": blocked, "key_padding_mask": padding},
        "both float": {"attn_mask": added, "key_padding_mask": as_float},
        "per head": {"attn_mask": torch.stack([blocked, *[blocked.roll(1, 0)] * 5])},
    }[kind]


def results(layer: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output, the weights if any, and the gradients of inputs and parameters."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, weights = layer(*leaves, **options)
    loss = (out * rand(*out.shape, seed=8)).sum()
    outputs = [out]
    if weights is not None:
        loss = loss + (weights * rand(*weights.shape, seed=9)).sum()
        outputs.append(weights)
    parameters = [p for _, p in sorted(layer.named_parameters())]
    return [*outputs, *torch.autograd.grad(loss, [*leaves, *parameters])]


@every_layer
def test_initial_weights_equal_torchs(options: dict[str, Any]) -> None:
    theirs, ours = (layer.state_dict() for layer in pair(**options))
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("kind", MASKS)
@every_layer
def test_outputs_weights_and_gradients_equal_torchs(options: dict[str, Any], kind: str) -> None:
    theirs, ours = pair(**options)
    inputs = tensors(theirs)
    for need, average in ((True, True), (True, False), (False, True)):
        call = {**masks(kind), "need_weights": need, "average_attn_weights": average}
        for actual, expected in zip(results(ours, inputs, **call), results(theirs, inputs, **call)):
            assert actual.shape == expected.shape
            assert torch.allclose(actual, expected, atol=1e-9)


@every_layer
def test_unbatched_call_equals_torchs(options: dict[str, Any]) -> None:
    theirs, ours = pair(**options)
    inputs = [x[0] if theirs.batch_first else x[:, 0] for x in tensors(theirs)]
    call = {"key_padding_mask": torch.arange(8) >= 6, "attn_mask": masks("bool")["attn_mask"]}
    for actual, expected in zip(results(ours, inputs, **call), results(theirs, inputs, **call)):
        assert actual.shape == expected.shape
        assert torch.allclose(actual, expected, atol=1e-9)


def test_an_empty_batch_gives_torchs_shapes() -> None:
    theirs, ours = pair(batch_first=True)
    x, mask = torch.zeros(0, 4, E).double(), torch.zeros(0, 4, 4, dtype=torch.bool)
    for expected, actual in zip(theirs(x, x, x, attn_mask=mask), ours(x, x, x, attn_mask=mask)):
        assert actual.shape == expected.shape
    # Torch's layer fails here.
    assert ours(x, x, x, attn_mask=mask, need_weights=False)[0].shape == (0, 4, E)


def test_is_causal_equals_the_causal_mask() -> None:
    theirs, ours = pair()
    inputs = tensors(theirs, 6, 6)
    later = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.float64)
    padding[1, 4:] = float("-inf")
    padding = {"key_padding_mask": padding}
    for more in ({}, padding, {"need_weights": False}):
        call = {"attn_mask": later, "is_causal": True, **more}
        for actual, expected in zip(results(ours, inputs, **call), results(theirs, inputs, **call)):
            assert torch.allclose(actual, expected, atol=1e-9)
    alone = ours(*inputs, is_causal=True)[0]
    assert torch.allclose(alone, ours(*inputs, attn_mask=later)[0])


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_appended_keys_are_visible_in_a_causal_call(options: dict[str, Any]) -> None:
    _, ours = pair(**options)
    inputs = tensors(ours, 5, 5)
    weights = ours(*inputs, is_causal=True)[1]
    assert bool((weights[..., -1] > 0).all())
    assert torch.equal(weights[..., :5].triu(1), torch.zeros(2, 5, 5, dtype=torch.float64))


def test_flags_may_be_numpy_bools() -> None:
    flags = ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    theirs, _ = pair(**dict.fromkeys(flags, True))
    torch.manual_seed(3)
    numpy_bools: Any = dict.fromkeys(flags, np.True_)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **numpy_bools)
    inputs, mask = tensors(theirs), masks("padding")
    for expected, actual in zip(theirs(*inputs, **mask), ours(*inputs, **mask), strict=True):
        assert torch.allclose(actual, expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("length", "is_causal"), [(8, False), (8, True), (6, True)])
def test_relative_bias_is_added_to_the_scores(
    length: int, is_causal: bool, need_weights: bool
) -> None:
    _, layer = pair()
    inputs = tensors(layer, length)
    table = rand(H, 7, seed=4).requires_grad_()
    difference = torch.arange(8) - torch.arange(8 - length, 8)[:, None]
    added = table[:, 3 + difference.clamp(-3, 3)]
    if is_causal:
        added = added.masked_fill(difference > 0, float("-inf"))
    options: dict[str, Any] = {"need_weights": need_weights}
    mask = added.repeat(2, 1, 1)  # (B·H, L, S)
    expected, weights = layer(*inputs, attn_mask=mask, **options)
    out, ours = layer(*inputs, relative_bias=table, is_causal=is_causal, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ours, weights)
    gradients = (torch.autograd.grad(x.square().sum(), table)[0] for x in (out, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "relative_bias must be None for 6 queries and 8 keys without is_causal=True"),
        ({"add_zero_attn": True}, "relative_bias must be None with add_bias_kv or add_zero_attn"),
    ],
)
def test_relative_bias_needs_positions(options: dict[str, Any], message: str) -> None:
    _, layer = pair(**options)
    with pytest.raises(ValueError, match=message):
        layer(*tensors(layer), relative_bias=rand(H, 7))


@pytest.mark.parametrize("flag", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("variant", BY_POSITION)
def test_variants_that_depend_on_positions_have_no_appended_keys(variant: str, flag: str) -> None:
    """An appended key would shift the positions of all queries by one."""
    params, message = params_of(variant), f"add_zero_attn must be False for '{variant}', because"
    theirs, ours = nn.MultiheadAttention(E, H, **{flag: True}), pair(**{flag: True})[1]
    for call in (
        lambda: MultiheadAttention(E, H, variant=variant, **{flag: True}, **params),
        lambda: replace(theirs, variant, **params),
        lambda: replace(ours, variant, **params),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_fully_blocked_row_gives_the_output_bias() -> None:
    _, ours = pair()
    nn.init.normal_(ours.out_proj.bias)
    inputs = tensors(ours)
    for need in (True, False):
        blocked = torch.ones(2, 8, dtype=torch.bool)
        out = ours(*inputs, key_padding_mask=blocked, need_weights=need)[0]
        assert torch.allclose(out, ours.out_proj.bias.expand_as(out))


def test_dropout_applies_in_training_only() -> None:
    layer = MultiheadAttention(E, H, dropout=0.5)
    x = [x.float() for x in tensors(layer)]
    one, two = layer(*x)[0], layer(*x)[0]
    assert not torch.equal(one, two)
    layer.eval()
    assert torch.equal(layer(*x)[0], layer(*x)[0])
    assert torch.allclose(layer(*x)[0], layer(*x, need_weights=False)[0], atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_supports_padding_and_grouped_heads(variant: str) -> None:
    layer = MultiheadAttention(
        16, 4, batch_first=True, variant=variant, num_kv_heads=2, **params_of(variant)
    )
    x = rand(2, 9, 16).float()
    padding = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])
    dense, weights = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    fast, no_weights = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    assert no_weights is None
    assert torch.allclose(dense, fast, atol=1e-5)
    assert weights.shape == (2, 4, 9, 9)
    assert torch.equal(weights[1, ..., 6:], torch.zeros(4, 9, 3))
    state = copy.deepcopy(layer.state_dict())
    loaded = MultiheadAttention(
        16, 4, batch_first=True, variant=variant, num_kv_heads=2, **params_of(variant)
    )
    loaded.load_state_dict(state)
    assert torch.equal(loaded(x, x, x)[0], layer(x, x, x)[0])


def test_the_bias_of_sigmoid_is_set_in_the_attention_of_a_layer() -> None:
    """The argument ``bias`` of the layer is that of the projections."""
    x = rand(5, E)
    gated: Any = {"wrapper": "output_gate", "dtype": torch.float64}
    layers = replace(pair()[0], "sigmoid"), MultiheadAttention(E, H, variant="sigmoid", **gated)
    for layer in layers:
        before = layer(x, x, x, average_attn_weights=False)[1].logit()  # with a bias of −log 5
        attend = Attention("sigmoid", H, bias=-1.0)
        if isinstance(layer.attend, Attention):
            layer.attend = attend
        else:
            layer.attend.attention = attend
        after = layer(x, x, x, average_attn_weights=False)[1].logit()
        assert torch.allclose(after - before, torch.full_like(before, math.log(5) - 1))


def test_torch_checkpoint_loads() -> None:
    theirs = nn.MultiheadAttention(E, H)
    ours = MultiheadAttention(E, H, variant="ssmax")
    missing = ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys
    assert missing == ["attend.s"]
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 10}, "embed_dim=10 is not a multiple of num_heads=3"),
        ({"num_heads": 0}, "num_heads must be an int .* 1, got 0"),
        ({"num_kv_heads": 2}, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"kdim": 0}, "kdim must be an int .* 1, got 0"),
        ({"variant": "softmaxx"}, "'softmaxx'"),
    ],
)
def test_wrong_constructor_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attn_mask": torch.zeros(6, 8, dtype=torch.long)}, TypeError, "attn_mask must be bool"),
        ({"attn_mask": torch.zeros(6, 7)}, ValueError, r"attn_mask must have shape \(6, 8\) or"),
        ({"key_padding_mask": torch.zeros(8)}, ValueError, r"key_padding_mask .* \(2, 8\), got"),
        ({"query": torch.zeros(6, 2, 11)}, ValueError, "query must have 12 features"),
        ({"query": torch.zeros(6, 12)}, ValueError, "must all have 3 dimensions or all 2"),
        (
            {"query": torch.zeros(6, 3, 12)},
            ValueError,
            r"one batch size, got \[\(6, 3, 12\), \(8, 2,",
        ),
        ({"value": torch.zeros(7, 2, 12)}, ValueError, r"same length, got \[\(8, 2, 12\), \(7, 2,"),
    ],
)
def test_wrong_forward_arguments_raise(change: dict, error: type, message: str) -> None:
    layer = MultiheadAttention(E, H)
    inputs = dict(zip(("query", "key", "value"), (x.float() for x in tensors(layer))))
    with pytest.raises(error, match=message):
        layer(**{**inputs, **change})


@pytest.mark.parametrize("name", ["query", "key", "value", "key_padding_mask", "attn_mask"])
def test_lists_instead_of_tensors_raise(name: str) -> None:
    x = torch.randn(2, 5, 16)
    inputs = {"query": x, "key": x, "value": x, name: [[0.0]]}
    with pytest.raises(TypeError, match=f"^{name} must be a tensor, got list"):
        MultiheadAttention(16, 4, batch_first=True)(**inputs)


def test_output_equals_torchs_if_is_causal_contradicts_the_mask() -> None:
    """Torch uses attn_mask if need_weights is True, and is_causal if need_weights is False."""
    theirs, ours = pair()
    inputs = tensors(theirs, 6, 6)
    later = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    later[:, 2] -= 3
    for need in (True, False):
        call = {"attn_mask": later, "is_causal": True, "need_weights": need}
        assert torch.allclose(ours(*inputs, **call)[0], theirs(*inputs, **call)[0])


def test_attn_mask_and_is_causal_both_apply_with_weights() -> None:
    _, ours = pair()
    inputs = tensors(ours, 6, 6)
    first = torch.zeros(6, 6, dtype=torch.bool)
    first[2:, 0] = True
    weights = ours(*inputs, attn_mask=first, is_causal=True)[1]
    assert torch.equal(weights > 0, (~first).tril().expand(2, 6, 6))


@pytest.mark.parametrize("need", [True, False])
def test_learned_float_masks_of_0_and_inf_get_torchs_gradients(need: bool) -> None:
    """Such masks without a gradient become bool."""
    gradients = []
    for layer in pair():
        later = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        masks = [later.requires_grad_(), torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)]
        x = tensors(layer, 6, 6)[0]
        out = layer(x, x, x, attn_mask=masks[0], key_padding_mask=masks[1], need_weights=need)[0]
        gradients.append(torch.autograd.grad(out.square().sum(), masks))
    for theirs, ours in zip(*gradients, strict=True):
        assert torch.allclose(ours.tril(), theirs.tril())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, under vmap
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_float_masks_whose_values_cannot_be_read() -> None:
    """Under vmap, in a trace and on meta."""
    layer = MultiheadAttention(16, 4, batch_first=True, variant="ssmax").requires_grad_(False)
    x = rand(1, 5, 16).float()

    def call(mask: Tensor) -> Tensor:
        return layer(x, x, x, attn_mask=mask, need_weights=False)[0]

    later = nn.Transformer.generate_square_subsequent_mask(5)
    both = torch.stack([later, later + rand(5, 5).float()])
    expected = torch.stack([call(mask) for mask in both])
    assert torch.allclose(torch.func.vmap(call)(both), expected, atol=1e-6)
    traced = torch.jit.trace(call, (later,), check_trace=False)
    assert torch.allclose(traced(both[1]), expected[1], atol=1e-6)
    x, layer = x.to("meta"), layer.to("meta")
    assert call(later.to("meta")).shape == (1, 5, 16)


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    layer = MultiheadAttention(16, 4, batch_first=True, variant="ssmax")
    x = rand(2, 9, 16).float()
    padding = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    call = {"key_padding_mask": padding, "need_weights": False}
    assert torch.allclose(compiled(x, x, x, **call)[0], layer(x, x, x, **call)[0], atol=1e-6)


def test_attention_returns_weights_with_need_weights() -> None:
    attend = attnzoo.nn.Attention("entmax", 4)
    q, k, v = rand(2, 4, 5, 8), rand(2, 2, 5, 8, seed=1), rand(2, 2, 5, 8, seed=2)
    out, weights = attend(q, k, v, is_causal=True, enable_gqa=True, need_weights=True)
    assert torch.allclose(out, attend(q, k, v, is_causal=True, enable_gqa=True))
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    for wrong in ({"return_lse": True}, {"cache": attend.new_cache(8)}):
        with pytest.raises(ValueError, match="need_weights|return_lse"):
            attend(q, k, v, enable_gqa=True, need_weights=True, **wrong)


class Quantized(nn.Module):
    """A linear layer with a method in place of a weight, as torch's quantized layers have."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def quantized(layer: nn.Module) -> None:
    for name, child in list(layer.named_children()):
        if isinstance(child, nn.Linear):
            setattr(layer, name, Quantized(child))


@pytest.mark.parametrize("change", [quantized, accelerate.cpu_offload])
def test_matrices_may_be_quantized_or_offloaded(change: Any) -> None:
    """The weight of an offloaded layer is on meta until the layer runs."""
    x = rand(1, 5, 16).float()
    layers = (MultiheadAttention(16, 2, batch_first=True), Taylor(16, 2))
    for layer, args in zip(layers, ((x, x, x), (x,)), strict=True):
        expected = layer(*args)[0]
        change(layer)
        assert torch.equal(layer(*args)[0], expected)
