"""attnzoo.nn.Taylor, the linear attention layer of Based."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnzoo.nn import Taylor
from helpers.cases import rand


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_taylor_layer_equals_its_formula(kv_heads: int | None) -> None:
    torch.manual_seed(1)
    layer = Taylor(24, 4, num_kv_heads=kv_heads).double()
    x = rand(2, 9, 24)
    heads = 4 if kv_heads is None else kv_heads
    q = layer.q_proj(x).view(2, 9, 4, 16).transpose(1, 2)
    k = layer.k_proj(x).view(2, 9, heads, 16).transpose(1, 2).repeat_interleave(4 // heads, dim=1)
    v = layer.v_proj(x).view(2, 9, heads, 6).transpose(1, 2).repeat_interleave(4 // heads, dim=1)
    z = (q @ k.mT) / 4
    w = (1 + z + z * z / 2).tril()
    o = (w / w.sum(-1, keepdim=True)) @ v
    expected = layer.out_proj(o.transpose(1, 2).reshape(2, 9, 24))
    assert torch.allclose(layer(x, is_causal=True), expected)
    cache = layer.new_cache(9)
    rows = [layer(token, cache=cache) for token in x.split(1, dim=1)]
    assert torch.allclose(torch.cat(rows, dim=1), expected)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "embed_dim=10 is not a multiple of num_heads=4"),
        ({"embed_dim": 8, "num_heads": 4, "num_kv_heads": 3}, "not a multiple of num_kv_heads=3"),
        (
            {"embed_dim": 8, "num_heads": 4, "feature_dim": 0},
            "feature_dim must be an int .* 1, got 0",
        ),
        ({"embed_dim": 8, "num_heads": None}, "num_heads must be an int .* 1, got None"),
    ],
)
def test_wrong_sizes_raise(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Taylor(**sizes)
