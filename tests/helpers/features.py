"""Arguments of `attention` for each feature of a call in `coverage_table.py`."""

from __future__ import annotations

from typing import Any

import torch

from helpers.cases import rand

N = 9


def feature(name: str, gradient: bool = True) -> dict[str, Any]:
    """q, k, v and the keyword arguments of a small call with the feature."""
    heads, kv_heads, queries, keys, dim, values, batch = 2, 2, N, N, 8, 8, 2
    dtype = torch.float32
    options: dict[str, Any] = {}
    if "causal" in name:
        options["is_causal"] = True
    if name.startswith("one query"):
        queries = 1
    elif name.startswith("more keys"):
        keys = N + 4
    elif name.startswith("more queries"):
        queries = N + 4
    elif name.startswith("no keys"):
        keys = 0
    elif name == "no queries":
        queries = 0
    elif name == "no batch":
        batch = 0
    elif name == "no values":
        values = 0
    elif name == "other value dim":
        values = 5
    elif name == "head dim 264":
        heads, kv_heads, dim, values, batch = 1, 1, 264, 264, 1
    elif name == "fp64":
        dtype = torch.float64
    elif name in ("GQA", "MQA", "key mask per head, GQA"):
        heads, kv_heads = (2, 1) if name == "MQA" else (4, 2)
        options["enable_gqa"] = True
    elif name == "window":
        options.update(window=3, is_causal=True)
    elif name == "window pair":
        options["window"] = (2, 1)
    elif name == "alibi":
        options["alibi"] = torch.tensor([0.5, 0.25])
    elif name == "relative bias":
        options["relative_bias"] = rand(heads, 9, seed=8).float()
    elif name == "segments":
        options["segment_ids"] = (torch.arange(N) // 4).expand(batch, N)
    elif name == "dropout":
        options["dropout_p"] = 0.4
    elif name == "lse":
        options["return_lse"] = True
    elif name == "scale 0.3":
        options["scale"] = 0.3
    if name == "float mask, fp32 for bf16":
        dtype = torch.bfloat16
    if name.startswith("key mask"):
        per_head = heads if "per head" in name else 1
        options["attn_mask"] = rand(batch, per_head, 1, keys, seed=7) > -0.8
    elif name.startswith("bool mask"):
        options["attn_mask"] = rand(batch, 1, queries, keys, seed=7) > -0.8
    elif name.startswith("float mask"):
        mask = rand(batch, 1, queries, keys, seed=7).float()
        options["attn_mask"] = mask.masked_fill(mask < -0.8, float("-inf"))
        options["attn_mask"].requires_grad_(gradient and name.endswith("gradient"))
    q = rand(batch, heads, queries, dim, seed=1)
    k = rand(batch, kv_heads, keys, dim, seed=2)
    v = rand(batch, kv_heads, keys, values, seed=3)
    tensors = {n: x.to(dtype).requires_grad_(gradient) for n, x in (("q", q), ("k", k), ("v", v))}
    return {**tensors, **options}
