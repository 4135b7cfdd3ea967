"""Calls of context_parallel_attention, compared with one process that has the whole sequence."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import attnzoo
from attnzoo.distributed import context_parallel_attention
from attnzoo.distributed.layout import Shards
from helpers.cases import CASES, params_of, rand

METHODS = ("all_gather", "ulysses", "ring")
LAYOUTS = ("zigzag", "contiguous")
CHUNK = 6  # tokens per chunk with the layout "zigzag"
HEADS = ((4, 2), (4, 4), (6, 2), (3, 1))  # query and key/value heads
# What a call may have besides queries, keys and values.
FEATURES = (
    "plain", "causal", "causal window", "window pair", "alibi", "causal segments", "key mask",
    "float key mask", "causal dense mask", "query mask", "softcap", "causal lse", "scale table",
    "low key mask lse",
)  # fmt: skip


class Case(NamedTuple):
    variant: str
    method: str
    layout: str
    feature: str
    heads: tuple[int, int]
    learned: bool  # parameters (H,), else the example values
    per_token: bool  # parameters (B, H, N)

    @property
    def id(self) -> str:
        words = [*self[:4], f"{self.heads[0]}of{self.heads[1]}"]
        return "-".join(words + ["learned"] * self.learned + ["per token"] * self.per_token)


def cases(variants: tuple[str, ...]) -> list[Case]:
    """Each variant with each method and feature; the rest changes from case to case."""
    made = []
    for n, (variant, method, feature) in enumerate(product(variants, METHODS, FEATURES)):
        learned = bool(CASES[variant].learned) and n % 2 == 0
        per_token = learned and CASES[variant].per_token and n % 4 == 0
        layout = LAYOUTS[n % 2 ^ n // 12 % 2]
        made.append(Case(variant, method, layout, feature, HEADS[n % 4], learned, per_token))
    return made


def some_cases(variants: tuple[str, ...]) -> list[Case]:
    """Two fifths of the cases, in which any two of variant, method and feature occur together."""
    return [case for n, case in enumerate(cases(variants)) if n % 5 in (0, 2)]


class Inputs(NamedTuple):
    """The tensors of a call by name, and its other arguments.

    along: the dimension along which each tensor is cut into shards; None if it is passed whole.
    """

    tensors: dict[str, Tensor]
    along: dict[str, int | None]
    options: dict[str, Any]


def inputs_of(case: Case, tokens: int) -> Inputs:
    heads, kv_heads = case.heads
    tensors = {
        "q": rand(2, heads, tokens, 8, seed=1),
        "k": rand(2, kv_heads, tokens, 8, seed=2),
        "v": rand(2, kv_heads, tokens, 6, seed=3),
    }
    along: dict[str, int | None] = dict.fromkeys("qkv", 2)
    options: dict[str, Any] = {"enable_gqa": heads != kv_heads, **params_of(case.variant, tokens)}
    words = case.feature.split()
    options["is_causal"] = "causal" in words
    if "window" in words:
        options["window"] = 7 if "causal" in words else (5, 9)
    if "alibi" in words:
        tensors["alibi"], along["alibi"] = rand(heads, seed=4).abs(), None
    if "table" in words:
        tensors["relative_bias"], along["relative_bias"] = rand(heads, 17, seed=4), None
    if "segments" in words:
        # The second boundary lies inside of a chunk; the last segment has several chunks.
        ids = torch.zeros(2, tokens, dtype=torch.long)
        ids[:, 4:], ids[:, CHUNK + 1 :] = 1, 2
        tensors["segment_ids"], along["segment_ids"] = ids, 1
    if "mask" in words:
        rows = {"dense": (tokens, tokens), "query": (tokens, 1), "key": (1, tokens)}
        kind = next(word for word in rows if word in words)
        mask = rand(2, 1, *rows[kind], seed=5)
        if "low" in words:
            mask = torch.full_like(mask, -1e18)  # all scores are equal, and lse has no digits
        elif "float" in words:
            mask = mask.masked_fill(mask > 1, float("-inf"))
            mask[0] = float("-inf")  # a sequence without visible keys
        else:
            mask = mask > -1
        tensors["attn_mask"], along["attn_mask"] = mask, -1 if kind == "key" else -2
    if "softcap" in words:
        options["softcap"] = 3.0
    if "scale" in words:
        options["scale"] = 0.7
    options["return_lse"] = "lse" in words
    specs = {param.name: param for param in attnzoo.get_variant(case.variant).params}
    for i, (name, spec) in enumerate(specs.items()):
        if spec.kind == "tensor":
            assert spec.size is not None
            tensors[name], along[name] = 0.3 * rand(heads, *spec.size(8), seed=6 + i), None
        elif case.learned and name in CASES[case.variant].learned:
            low, high = CASES[case.variant].learned[name]
            long = case.per_token or spec.per_key
            shape = (2, heads, tokens) if long else (heads,)
            tensors[name] = low + (high - low) * torch.sigmoid(rand(*shape, seed=6 + i))
            along[name] = 2 if long else None
            options.pop(name, None)
    return Inputs(tensors, along, options)


def outcome(case: Case, rank: int, mesh: Any, chunk: int) -> str | None:
    """None if the call agrees with one process; a text if not, or if the case does not exist."""
    layout = Shards(case.layout, mesh.size(), 2 * chunk)
    inputs = inputs_of(case, layout.total)
    leaves = _learnable(inputs.tensors)
    try:
        expected = _results(attnzoo.attention(variant=case.variant, **leaves, **inputs.options))
    except (ValueError, TypeError):
        return "not supported"
    mine = _learnable({name: _shard(x, inputs.along[name], layout, rank)
                       for name, x in inputs.tensors.items()})  # fmt: skip
    try:
        actual = _results(context_parallel_attention(
            variant=case.variant, **mine, **inputs.options, mesh=mesh, method=case.method,
            layout=case.layout,
        ))  # fmt: skip
    except ValueError as error:
        return f"rejected: {error}"
    weights = [rand(*x.shape, seed=20 + i) for i, x in enumerate(expected)]
    local_weights = [_shard(x, 2, layout, rank) for x in weights]
    wanted = _gradients(leaves, expected, weights)
    got = _gradients(mine, actual, local_weights)
    pairs = {
        f"out {i}": (x, _shard(y, 2, layout, rank))
        for i, (x, y) in enumerate(zip(actual, expected, strict=True))
    }
    for name, gradient in got.items():
        if inputs.along[name] is None:  # a partial sum
            dist.all_reduce(gradient)
            pairs[f"d{name}"] = (gradient, wanted[name])
        else:
            pairs[f"d{name}"] = (gradient, _shard(wanted[name], inputs.along[name], layout, rank))
    # Both are fp64, with sums in another order and a threshold solved to 1e-13.
    wrong = [
        name for name, (x, y) in pairs.items() if not torch.allclose(x, y, rtol=1e-8, atol=1e-9)
    ]
    return f"differs: {', '.join(wrong)}" if wrong else None


def _learnable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: x.detach().clone().requires_grad_(x.is_floating_point())
        for name, x in tensors.items()
    }


def _results(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _gradients(
    tensors: dict[str, Tensor], results: tuple[Tensor, ...], weights: list[Tensor]
) -> dict[str, Tensor]:
    # lse is −inf for rows without keys.
    total = sum((x.masked_fill(x.isinf(), 0.0) * w).sum() for x, w in zip(results, weights))
    names = [name for name, x in tensors.items() if x.requires_grad]
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, [tensors[name] for name in names], allow_unused=True)
    zeros = (torch.zeros_like(tensors[name]) for name in names)
    return {n: z if x is None else x for n, x, z in zip(names, gradients, zeros, strict=True)}


def _shard(x: Tensor, dim: int | None, layout: Shards, rank: int) -> Tensor:
    return x if dim is None else layout.shard(x, rank, dim)


def outcomes(rank: int, checked: list[Case], chunk: int = CHUNK) -> dict[str, str | None]:
    """The outcome of each case by its id, on one rank."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return {case.id: outcome(case, rank, mesh, chunk) for case in checked}


def low_precision(rank: int) -> dict[str, float]:
    """The largest difference of bf16 calls from one process, in units in the last place.

    By method and backend. The sums are in fp32 on both sides, in another order.
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    errors_by_call = {}
    for variant in ("ssmax", "entmax"):
        for method, backend in (("all_gather", "tiled"), ("ulysses", "eager"), ("ring", None)):
            layout = Shards("zigzag", mesh.size(), 2 * CHUNK)
            case = Case(variant, method, layout.layout, "causal", (4, 2), False, False)
            inputs = inputs_of(case, layout.total)
            tensors = {name: x.bfloat16() for name, x in inputs.tensors.items()}
            leaves = _learnable(tensors)
            mine = _learnable({name: _shard(x, 2, layout, rank) for name, x in tensors.items()})
            exact = attnzoo.attention(variant=variant, **leaves, **inputs.options)
            out = context_parallel_attention(
                variant=variant, **mine, **inputs.options, mesh=mesh, method=method, backend=backend
            )
            assert out.dtype == torch.bfloat16
            weight = rand(*exact.shape, seed=20).bfloat16()
            wanted = _gradients(leaves, (exact,), [weight])
            got = _gradients(mine, (out,), [_shard(weight, 2, layout, rank)])
            pairs = [(out, exact), *((got[name], wanted[name]) for name in got)]
            errors = [
                (x.float() - _shard(y, 2, layout, rank).float()).abs().max() / y.abs().max()
                for x, y in pairs
            ]
            errors_by_call[f"{variant} {method}"] = float(torch.stack(errors).max()) * 2**8
    return errors_by_call


def dropped(rank: int) -> dict[str, tuple[float, ...]]:
    """Σ out, Σ dv, the expected sum and the spread of out.

    All values are 1, and half of the weights are dropped.

    Σ out and Σ dv are both the sum of all kept weights.
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sums_by_method = {}
    for method in METHODS:
        torch.manual_seed(rank)
        q, k = torch.zeros(2, 1, 4, 64, 8, dtype=torch.float64).unbind()
        v = torch.ones(1, 4, 64, 8, dtype=torch.float64, requires_grad=True)
        out = context_parallel_attention(q, k, v, mesh=mesh, method=method, dropout_p=0.5)
        out.sum().backward()
        assert v.grad is not None
        sums = torch.stack([out.detach().sum(), v.grad.sum()])
        dist.all_reduce(sums)
        count = float(mesh.size() * out.numel())
        sums_by_method[method] = (*sums.tolist(), count, float(out.std()))
    return sums_by_method


def everything(rank: int, checked: list[Case]) -> dict[str, Any]:
    """All of the above."""
    return {
        "outcomes": outcomes(rank, checked),
        "bf16": low_precision(rank),
        "dropout": dropped(rank),
    }
