"""Measures the weights of every converted head while a model reads.

Only some rows of the weights are computed, in fp32 and from the variant's definition: the last few
queries of a context (sharpness), and the last query of a question (dispersion at the needle).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from evals.measures.heads import attention_calls, own_parameters
from evals.measures.sparsity import TITLES, sparsity

ROWS = 8  # the queries at the end of a context whose weights are measured
_NOT_OF_WEIGHTS = ("need_weights", "dropout_p", "return_lse")
LayerWeights = tuple[Tensor, Tensor]  # weights (B, H, rows, keys), numbers of visible keys (rows,)


@contextmanager
def recorded_weights(model: nn.Module, last: int) -> Iterator[list[LayerWeights]]:
    """Collect the weights of the ``last`` queries of each converted layer while a model runs, in
    the order of execution."""
    layers: list[LayerWeights] = []

    def record(module: Any, qkv: tuple[Tensor, Tensor, Tensor], kwargs: dict[str, Any]) -> None:
        q, k, v = qkv
        rows = slice(max(0, q.shape[2] - last), None)
        options = {name: x for name, x in kwargs.items() if name not in _NOT_OF_WEIGHTS}
        masks = _masks(options, rows, q.shape[2])
        q, k, v = q[:, :, rows].float(), k.float(), v[..., :1].float()
        if module.softcap is not None:
            options["softcap"] = module.softcap
        options = own_parameters(module) | options | masks
        w = attnzoo.attention_weights(q, k, v, module.variant, **options)
        layers.append((w.cpu(), visible_keys(q, k, masks).cpu()))

    with attention_calls(model, record):
        yield layers


def _masks(options: dict[str, Any], rows: slice, queries: int) -> dict[str, Any]:
    """The mask arguments of a call for its last queries. Causal attention is aligned at the end."""
    masks = {name: x for name, x in options.items() if name in ("is_causal", "window")}
    if (mask := options.get("attn_mask")) is not None:
        masks["attn_mask"] = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    if (segments := options.get("segment_ids")) is not None:
        of_q, of_k = segments if isinstance(segments, tuple) else (segments, segments)
        masks["segment_ids"] = of_q[:, -queries:][:, rows], of_k
    return masks


def visible_keys(q: Tensor, k: Tensor, masks: Mapping[str, Any]) -> Tensor:
    """The number of keys that each query of the first sequence sees, (Nq,).

    A layer may have a window, so causality alone does not give it. With equal scores, the weights
    of softmax are 0 only at keys that a query does not see.
    """
    zero_q, zero_k = (torch.zeros_like(x[:1, :, :, :1]) for x in (q, k))
    masks = {name: _first(x) for name, x in masks.items()}
    w = attnzoo.attention_weights(
        zero_q, zero_k, zero_k, enable_gqa=q.shape[1] != k.shape[1], **masks
    )
    return (w[0, 0] > 0).sum(-1)


def _first(value: Any) -> Any:
    """The first entry of the batch of a mask argument."""
    if isinstance(value, tuple):
        return tuple(map(_first, value))
    return value[:1] if isinstance(value, Tensor) else value


def sharpness(layers: Sequence[LayerWeights]) -> dict[str, Tensor]:
    """The largest weight and the measures of `evals.measures.sparsity`, as means over queries.

    Returns:
        Tensors (B, heads of all layers) by name, such as ``max_weight`` and ``entropy``.
    """
    measured = [{"max_weight": w.amax(-1), **sparsity(w, keys)} for w, keys in layers]
    return {
        name: torch.cat([measures[name].mean(-1) for measures in measured], -1)
        for name in ("max_weight", *TITLES)
    }


def dispersion(layers: Sequence[LayerWeights], needle: Tensor, tokens: int) -> dict[str, Tensor]:
    """The weight on the tokens of the needle, and the entropy of the row divided by log n.

    Args:
        layers: the weights of the last query.
        needle: the indices of the needle's tokens.
        tokens: the number of tokens up to the query. A layer with a window may have fewer keys,
            the last ones; its heads put no weight on tokens before them.

    Returns:
        ``needle_weight`` and ``needle_entropy``, (B, heads of all layers), for the last query.
    """
    on, entropy = [], []
    for w, keys in layers:
        at = needle - (tokens - w.shape[-1])
        on.append(w[:, :, -1, at[at >= 0]].sum(-1))
        entropy.append(sparsity(w[:, :, -1], keys[-1])["entropy"])
    return {"needle_weight": torch.cat(on, -1), "needle_entropy": torch.cat(entropy, -1)}
