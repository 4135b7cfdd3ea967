"""QKClip and qk_clip_: logits of clipped heads shrink to the threshold, others do not change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from attnzoo.nn import Attention, MultiheadAttention, QKClip, Transformer, qk_clip_
from helpers.cases import rand

TOKENS = torch.arange(24).view(2, 12) % 7


def maxima(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The largest logits in one forward in training mode."""
    clip = QKClip(model, 1e30)
    model(*inputs)
    return clip.max_logits


def grown(model: nn.Module, by: float = 6.0) -> nn.Module:
    """The model in fp64, with matrices that give logits of some size."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=by * parameter.shape[-1] ** -0.5)
    return model.double()


LAYERS = {
    "packed, biases": dict(embed_dim=16, num_heads=4),
    "separate": dict(embed_dim=16, num_heads=4, kdim=5, vdim=3),
    "appended key": dict(embed_dim=16, num_heads=4, add_bias_kv=True),
    "grouped": dict(embed_dim=16, num_heads=4, num_kv_heads=2),
    "grouped, appended key": dict(embed_dim=16, num_heads=4, num_kv_heads=1, add_bias_kv=True),
    "softcap": dict(embed_dim=16, num_heads=4, softcap=2.0),
    "gain": dict(embed_dim=16, num_heads=4, variant="ssmax"),
    "gate": dict(embed_dim=16, num_heads=4, wrapper="output_gate"),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_step_scales_logits_to_the_threshold(options: dict[str, Any], need_weights: bool) -> None:
    layer = grown(MultiheadAttention(batch_first=True, **options), by=1.0)
    x = rand(2, 6, 16)
    key = rand(2, 6, options.get("kdim", 16), seed=1)
    inputs = x, key, rand(2, 6, options.get("vdim", 16), seed=2)
    (before,) = maxima(layer, *inputs)
    threshold = float(before.sort().values[1:3].mean())  # two heads are above it
    clip = QKClip(layer, threshold)
    state = copy.deepcopy(layer.state_dict())
    layer(*inputs, need_weights=need_weights)
    (recorded,) = clip.max_logits
    assert torch.equal(recorded, before)
    clip.step()
    (after,) = maxima(layer, *inputs)
    assert torch.allclose(after, before.clamp(max=threshold), rtol=1e-12)
    changed = {name for name, x in layer.state_dict().items() if not torch.equal(x, state[name])}
    assert changed <= {"in_proj_weight", "q_proj_weight", "k_proj_weight", "in_proj_bias", "bias_k"}
    rows = layer.in_proj_weight
    if rows is not None:  # those of the values
        width = layer.num_kv_heads * 4
        assert torch.equal(rows[-width:], state["in_proj_weight"][-width:])


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_a_transformer(positions: str, kv_heads: int) -> None:
    model = grown(Transformer(7, 32, 4, 2, positions=positions, num_kv_heads=kv_heads), by=1.5)
    before = maxima(model, TOKENS)
    clip = QKClip(model, float(before[0].sort().values[1:3].mean()))
    model(TOKENS)
    clip.step()
    after = maxima(model, TOKENS)
    # The output of the first layer changes, and so do the inputs of the second.
    assert torch.allclose(after[0], before[0].clamp(max=clip.threshold), rtol=1e-12)


def test_training_with_it_bounds_the_logits() -> None:
    """The target is one key per query, so that logits grow. Without it they reach 2.45."""
    threshold, inputs = 1.0, 2 * torch.eye(8, dtype=torch.float64).expand(1, 8, 8)
    target = inputs.roll(1, dims=1)

    def largest_of(clipped: bool) -> list[float]:
        torch.manual_seed(0)
        layer = MultiheadAttention(8, 2, batch_first=True).double()
        clip, weights = QKClip(layer, threshold if clipped else 1e30), list(layer.parameters())
        seen = []
        for _ in range(64):
            out = layer(inputs, inputs, inputs, need_weights=False)[0]
            gradients = torch.autograd.grad((out - target).square().sum(), weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.data -= 0.02 * gradient
            seen.append(float(clip.max_logits[0].max()))
            clip.step()
        return seen

    assert largest_of(False)[-1] > 2 * threshold
    # A step of the optimizer comes between the clipping and the next forward.
    assert max(largest_of(True)) < 1.5 * threshold


def test_the_maximum_is_over_the_forwards_in_training_mode() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True).double()
    small, large = rand(1, 5, 8), 3 * rand(1, 5, 8, seed=1)
    want = torch.maximum(*(maxima(layer, x, x, x)[0] for x in (small, large)))
    clip = QKClip(layer, 100.0)
    for x in (large, small):
        layer(x, x, x)
    assert torch.equal(clip.max_logits[0], want)
    layer.eval()(10 * large, 10 * large, large)
    assert torch.equal(clip.max_logits[0], want)
    clip.step()
    assert clip.max_logits[0].tolist() == [-torch.inf] * 2


def test_outputs_are_those_without_it() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True)
    x = rand(1, 5, 8).float()
    out, weights = layer(x, x, x)
    QKClip(layer, 100.0)
    recorded, recorded_weights = layer(x, x, x)
    assert torch.equal(recorded, out)
    assert torch.equal(recorded_weights, weights)
    attend = Attention("softmax", 2)
    attend.max_logits = torch.zeros(2)
    q = rand(1, 2, 5, 4)
    out, lse = attend(q, q, q, return_lse=True)
    assert lse.shape == (1, 2, 5)
    assert len(attend(q, q, q, return_lse=True, return_max_logits=True)) == 3


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -torch.inf])
def test_a_maximum_that_is_not_finite_changes_nothing(value: float) -> None:
    wq, wk = rand(8, 5), rand(8, 5, seed=1)
    before = wq.clone(), wk.clone()
    qk_clip_(wq, wk, torch.tensor([value, 1.0]), 2.0)
    assert torch.equal(wq, before[0])
    assert torch.equal(wk, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_matrices(dtype: torch.dtype) -> None:
    wq, wk, largest = rand(8, 5).to(dtype), rand(8, 5).to(dtype), torch.tensor([8.0, 1.0])
    before = wq.clone()
    qk_clip_(wq, wk, largest, 2.0)
    factors = torch.tensor([0.5, 1.0]).repeat_interleave(4)[:, None].to(dtype)
    assert torch.equal(wq, before * factors)
    assert torch.equal(wk, before * factors)
    shared = before[:4].clone()
    qk_clip_(wq := before.clone(), shared, largest, 2.0)
    assert torch.equal(shared, before[:4])
    assert torch.equal(wq, before * factors.square())


W = torch.zeros(8, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((W, W, torch.ones(2, 1), 1.0), ValueError, r"max_logits must have shape \(H,\)"),
        ((W, W, torch.ones(3), 1.0), ValueError, "q_weight must have D rows for each of 3 heads"),
        ((W, W[:3], torch.ones(2), 1.0), ValueError, "k_weight must have 4 rows for each head"),
        ((W, torch.zeros(12, 5), torch.ones(2), 1.0), ValueError, "k_weight must have 4 rows"),
        ((W, W, torch.ones(2), 0), ValueError, "threshold must be a finite number > 0, got 0"),
        ((W, W, torch.ones(2), "1"), TypeError, "threshold must be a number > 0, got '1'"),
        (([1.0], W, torch.ones(2), 1.0), TypeError, "q_weight must be a tensor, got list"),
        ((W.int(), W, torch.ones(2), 1.0), TypeError, "q_weight must be fp16, .*, got torch.int32"),
        ((W, W.long(), torch.ones(2), 1.0), TypeError, "k_weight must be fp16, .* torch.int64"),
        ((W, W, torch.ones(2).int(), 1.0), TypeError, "max_logits must be fp16, .* torch.int32"),
        ((W, W.to("meta"), torch.ones(2), 1.0), ValueError, "k_weight must be on .* cpu, got meta"),
        ((W[:1].expand(8, 5), W, torch.ones(2), 1.0), ValueError, "q_weight must have memory"),
        ((W, W[:, :1].expand(8, 5), torch.ones(2), 1.0), ValueError, "k_weight must have memory"),
    ],
)
def test_wrong_matrices_raise(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qk_clip_(*arguments)


def test_an_error_leaves_both_matrices_unchanged() -> None:
    keys = torch.ones(8, 5)
    with pytest.raises(ValueError, match="q_weight must have memory"):
        qk_clip_(torch.ones(1, 5).expand(8, 5), keys, torch.full((2,), 9.0), 1.0)
    assert torch.equal(keys, torch.ones(8, 5))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Linear(2, 2), ValueError, "model must contain MultiheadAttention or Transformer"),
        ("model", TypeError, "model must be a torch.nn.Module, got 'model'"),
        (Transformer(7, 8, 2, 1, qk_norm=True), ValueError, "model must not have qk_norm"),
        (MultiheadAttention(8, 2, variant="elu"), ValueError, "variants with logits, got 'elu'"),
        (
            MultiheadAttention(16, 2, wrapper="differential"),
            ValueError,
            "no wrapper with several maps per head, got Differential",
        ),
        (
            Transformer(7, 16, 2, 1, wrapper="qassmax"),
            ValueError,
            "no wrapper that makes the queries nonlinear in W_q x, got QASSMax",
        ),
    ],
)
def test_wrong_models_raise(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QKClip(model, 1.0)
    if isinstance(model, nn.Module):
        attends = [x for x in model.modules() if isinstance(x, Attention)]
        assert all(x.max_logits is None for x in attends)


def test_a_replaced_attention_raises() -> None:
    layer = MultiheadAttention(8, 2)
    clip = QKClip(layer, 1.0)
    layer.attend = layer.new_attend("ssmax")
    with pytest.raises(ValueError, match="attention of layer 0 records no logits: it was replaced"):
        clip.step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight_norm": lambda x: parametrizations.weight_norm(x, "in_proj_weight"),
    "pruned": lambda x: prune.l1_unstructured(x, "in_proj_weight", 0.5),
    "pruned bias": lambda x: prune.l1_unstructured(x, "in_proj_bias", 0.5),
    "separate": lambda x: parametrizations.weight_norm(x, "k_proj_weight"),
    "qkv": lambda x: parametrizations.weight_norm(x.layers[1].qkv),
}


@pytest.mark.parametrize("change", CHANGES)
def test_matrices_that_are_computed_raise(change: str) -> None:
    model: nn.Module = MultiheadAttention(8, 2, kdim=4 if change == "separate" else None)
    if change == "qkv":
        model = Transformer(7, 8, 2, 2)
    clip = QKClip(model, 1.0)
    CHANGES[change](model)
    message = "model must have a plain parameter .*, got a .* that is pruned, parametrized"
    with pytest.raises(ValueError, match=message):
        clip.step()
    clip.remove()
    with pytest.raises(ValueError, match=message):
        QKClip(model, 1.0)
    assert all(x.max_logits is None for x in model.modules() if isinstance(x, Attention))


def test_shared_matrices_raise() -> None:
    model: Any = Transformer(7, 8, 2, 2)
    model.layers[1].qkv.weight = model.layers[0].qkv.weight
    with pytest.raises(ValueError, match="must not have layers that share parameters, such as wei"):
        QKClip(model, 1.0)
    layer = MultiheadAttention(8, 2, vdim=4)
    layer.k_proj_weight = layer.q_proj_weight
    with pytest.raises(ValueError, match="share parameters, such as k_proj_weight"):
        QKClip(layer, 1.0)


def test_a_layer_that_is_used_twice_is_scaled_once() -> None:
    model: Any = grown(Transformer(7, 8, 2, 2), by=1.5)
    model.layers[1] = model.layers[0]
    (before,) = maxima(model, TOKENS)
    clip, weight = QKClip(model, float(before.min()) / 2), model.layers[0].qkv.weight
    queries = weight[:8].clone()
    model(TOKENS)
    clip.step()
    factors = (clip.threshold / before).sqrt().repeat_interleave(4)
    assert torch.allclose(weight[:8], factors[:, None] * queries)


def test_a_state_cache_in_training_mode_raises() -> None:
    model = Transformer(7, 8, 2, 1, variant="taylor")
    clip = QKClip(model, 1.0)
    with pytest.raises(ValueError, match="QKClip does not support a StateCache in training mode"):
        model(TOKENS, caches=model.new_caches(16))
    model.eval()(TOKENS, caches=model.new_caches(16))
    clip.remove()
    model.train()(TOKENS, caches=model.new_caches(16))


def test_a_sharded_sequence_in_training_mode_raises() -> None:
    layer = MultiheadAttention(8, 2)
    QKClip(layer, 1.0)
    layer.attend.sharding = object()  # pyright: ignore
    x = rand(4, 1, 8).float()
    with pytest.raises(ValueError, match="QKClip does not support a sharded sequence in training"):
        layer(x, x, x, need_weights=False)


def test_remove_ends_the_recording() -> None:
    layer = MultiheadAttention(8, 2)
    clip = QKClip(layer, 1.0)
    clip.remove()
    x = rand(4, 1, 8).float()
    layer(x, x, x)
    assert layer.attend.max_logits is None
    for call in (clip.step, lambda: clip.max_logits):
        with pytest.raises(ValueError, match=r"records no logits.*remove\(\) was called"):
            call()


def test_copies_do_not_record() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True, variant="ssmax")
    QKClip(layer, 1.0)
    x = rand(1, 4, 8).float()
    out = layer(x, x, x)[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, x, x)[0], out)
        assert twin.attend.max_logits is None
    assert layer.attend.max_logits is not None


@pytest.mark.slow
def test_compiles_without_graph_break() -> None:
    torch.compiler.reset()
    model = Transformer(7, 16, 2, 2).double()
    clip = QKClip(model, 100.0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for shift in (0, 1):
        compiled((TOKENS + shift) % 7)
    have = clip.max_logits
    clip.step()
    for shift in (0, 1):
        model((TOKENS + shift) % 7)
    for x, y in zip(have, clip.max_logits, strict=True):
        assert torch.allclose(x, y, rtol=1e-9)
