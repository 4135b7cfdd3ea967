"""hedgehog's learned maps: every backend, modules and models."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.integrations.transformers import convert, from_pretrained
from attnzoo.nn import Attention, MultiheadAttention, Transformer
from helpers.cases import rand
from helpers.coverage_table import marked, precise
from helpers.hf_models import ids, llama, outputs, quiet
from helpers.scored import weights_of

B, H, KV, N, D = 2, 4, 2, 9, 6
BACKENDS = [marked(name) for name in ("eager", "tiled", "linear", "flash_linear")]


def inputs(heads: int = KV) -> list[Tensor]:
    """q, k, v and the two maps."""
    q, k, v = rand(B, H, N, D, seed=1), rand(B, heads, N, D, seed=2), rand(B, heads, N, 5, seed=3)
    return [2 * q, 2 * k, v, rand(H, D, D, seed=4), rand(H, D, D, seed=5)]


def authors(
    q: Tensor, k: Tensor, v: Tensor, query_map: Tensor, key_map: Tensor, causal: bool
) -> Tensor:
    """The features of the authors' code, of two softmaxes, and the quadratic attention."""
    out = []
    for h in range(H):
        keys, values = k[:, h // (H // k.shape[1])], v[:, h // (H // v.shape[1])]
        x, y = D**-0.5 * q[:, h] @ query_map[h], keys @ key_map[h]
        x, y = (torch.cat([z.softmax(-1), (-z).softmax(-1)], -1) for z in (x, y))
        a = x @ y.mT
        a = a.tril() if causal else a
        out.append((a / a.sum(-1, keepdim=True)) @ values)
    return torch.stack(out, 1)


@pytest.mark.parametrize("backend", ["eager", "tiled", "linear"])
def test_weights_of_two_unit_keys(backend: str) -> None:
    """ψ(q) = [1, 2, 2, 1] / 3, and ψ(k) are [e, 1, 1, e] / (1 + e) and [1, e, e, 1] / (1 + e)."""
    e = math.e
    expected = torch.tensor([2 + e, 1 + 2 * e]).double() / (3 + 3 * e)
    scores = torch.tensor([[0.0, math.log(2)]]).double()
    assert torch.allclose(weights_of(scores, "hedgehog", backend)[0], expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [H, KV])
@pytest.mark.parametrize("backend", BACKENDS)
def test_maps_on_every_backend(backend: str, heads: int, causal: bool) -> None:
    """Outputs and the gradients of q, k, v and both maps."""
    leaves = [x.requires_grad_() for x in inputs(heads)]
    expected = authors(*leaves, causal)
    do = rand(*expected.shape, seed=6)
    dtype = precise(backend)
    mine = [x.detach().to(dtype).requires_grad_() for x in leaves]
    q, k, v, query_map, key_map = mine
    out = attnzoo.attention(
        q, k, v, "hedgehog", query_map=query_map, key_map=key_map, is_causal=causal,
        enable_gqa=True, backend=backend,
    )  # fmt: skip
    actual = [out, *torch.autograd.grad(out, mine, do.to(dtype))]
    wanted = [expected, *torch.autograd.grad(expected, leaves, do)]
    # Sums of a few hundred products; a wrong formula differs by far more than 1000 roundings.
    for a, b in zip(actual, wanted, strict=True):
        assert (a.double() - b).abs().max() <= 1000 * torch.finfo(dtype).eps * (1 + b.abs().max())


@pytest.mark.parametrize("one", ["query_map", "key_map"])
def test_a_map_that_is_not_given_is_the_identity(one: str) -> None:
    q, k, v, query_map, key_map = inputs()
    maps = {"query_map": query_map, "key_map": key_map}
    eye = torch.eye(D).double().expand(H, D, D)
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": True}
    for backend in ("eager", "linear"):
        options["backend"] = backend
        out = attnzoo.attention(q, k, v, "hedgehog", **options, **{one: maps[one]})
        other = {name: x if name == one else eye for name, x in maps.items()}
        expected = attnzoo.attention(q, k, v, "hedgehog", **options, **other)
        assert torch.allclose(out, expected, atol=1e-12)


def test_masks_and_a_state_with_grouped_heads() -> None:
    q, k, v, query_map, key_map = inputs()
    maps = {"query_map": query_map, "key_map": key_map, "enable_gqa": True}
    mask = rand(B, 1, 1, N, seed=7) > -0.5
    expected = attnzoo.attention(
        q, k, v, "hedgehog", attn_mask=mask, is_causal=True, backend="eager", **maps
    )
    poisoned = k.masked_fill(~mask[:, :, 0, :, None], torch.nan)
    for backend in ("tiled", "linear"):
        out = attnzoo.attention(
            q, poisoned, v, "hedgehog", attn_mask=mask, is_causal=True, backend=backend, **maps
        )
        assert torch.allclose(out, expected, atol=1e-12)
    parts, state = [], None
    for s in (slice(4), slice(4, 5), slice(5, N)):
        out, state = attnzoo.linear_attention(
            q[:, :, s], k[:, :, s], v[:, :, s], "hedgehog", state=state, attn_mask=mask[..., s],
            **maps,
        )  # fmt: skip
        parts.append(out)
    assert torch.allclose(torch.cat(parts, 2), expected, atol=1e-12)


def test_a_state_needs_maps_of_the_same_kind() -> None:
    q, k, v = rand(3, 1, H, 4, D, seed=1).unbind()
    maps, cache = rand(H, D, D, seed=2), attnzoo.nn.StateCache()
    attnzoo.nn.attend(cache, q[:, :, :3], k[:, :, :3], v[:, :, :3], "hedgehog", query_map=maps)
    shape = re.escape(f"a tensor {(H, D, D)}")
    for params, message in (
        ({}, f"query_map must be {shape} as in the first call of this StateCache, got None"),
        ({"query_map": maps, "key_map": maps}, f"key_map must be None .*, got {shape}"),
    ):
        with pytest.raises(ValueError, match=message):
            attnzoo.nn.attend(cache, q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], "hedgehog", **params)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_extreme_inputs_have_finite_weights_and_gradients(size: float) -> None:
    q, k, v = (x.float() for x in inputs(H)[:3])
    leaves = [(size * q).requires_grad_(), (size * k).requires_grad_(), v.requires_grad_()]
    for backend in ("eager", "tiled", "linear"):
        out = attnzoo.attention(*leaves, "hedgehog", is_causal=True, backend=backend)
        assert out.abs().max() <= v.abs().max() * (1 + 1e-5)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


# ------------------------------------------------------------------------- modules


def test_modules_learn_the_maps_from_the_identity() -> None:
    module = Attention("hedgehog", H, head_dim=D)
    assert {n: x.shape for n, x in module.named_parameters()} == {
        "query_map": (H, D, D), "key_map": (H, D, D)
    }  # fmt: skip
    assert torch.equal(module.query_map, torch.eye(D).expand(H, D, D))
    with torch.no_grad():
        module.key_map.add_(1)
    module.reset_parameters()
    assert torch.equal(module.key_map, torch.eye(D).expand(H, D, D))
    fixed = Attention("hedgehog", H, learn=())
    assert not list(fixed.parameters())
    with pytest.raises(TypeError, match="head_dim must be given, because hedgehog's query_map is"):
        Attention("hedgehog", H)
    with pytest.raises(ValueError, match="head_dim must be"):
        Attention("hedgehog", H, head_dim=0)
    with pytest.raises(TypeError, match="head_dim is an argument of Attention only"):
        Transformer(9, 16, 2, 1, "hedgehog", head_dim=8)


@pytest.mark.parametrize("wrapper", [None, "differential", "mixture"])
def test_layers_learn_the_maps(wrapper: str | None) -> None:
    model = Transformer(9, 32, H, 2, "hedgehog", num_kv_heads=KV, wrapper=wrapper)
    maps = [x for name, x in model.named_parameters() if name.endswith("_map")]
    assert len(maps) == 4
    tokens = torch.randint(9, (2, 7))
    model.loss(model.states(tokens), tokens).backward()
    assert all(x.grad is not None and bool(x.grad.any()) for x in maps)
    with torch.no_grad():
        caches = model.new_caches(7)
        parts = [model(tokens[:, s], caches=caches) for s in (slice(3), slice(3, 7))]
        assert torch.allclose(torch.cat(parts, 1), model(tokens), atol=1e-5)
    layer = MultiheadAttention(32, H, variant="hedgehog", wrapper=wrapper)
    assert any(name.endswith("key_map") for name, _ in layer.named_parameters())


@quiet
def test_converted_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model = convert(llama(), "hedgehog")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.attnzoo.key_map.add_(0.3 * rand(H, 8, 8).float())
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    assert torch.equal(outputs(loaded), outputs(model))
    assert not torch.equal(outputs(loaded), outputs(convert(llama(), "hedgehog")))
    assert loaded(ids()).logits.isfinite().all()
