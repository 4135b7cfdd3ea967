"""Measures the weights of every converted head while a model reads.

Only some rows of the weights are computed, in fp32 and from the variant's definition: the last few
queries of a context (sharpness), and the last query of a question (dispersion at the needle).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from evals.measures.heads import own_parameters
from evals.measures.sparsity import TITLES, sparsity

ROWS = 8  # the queries at the end of a context whose weights are measured
_NOT_OF_WEIGHTS = ("need_weights", "dropout_p", "return_lse")


class Weights:
    """Collects weights of every attention layer while the model runs in this context.

    Args:
        model: a model with attention layers of attnzoo.
        last: the number of queries to collect: the last ones.

    Attributes:
        layers: for each layer in the order of execution the weights (B, H, rows, keys) and the
            numbers of visible keys (rows,).
    """

    def __init__(self, model: nn.Module, last: int) -> None:
        self.model, self.last = model, last
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Weights:
        for module in self.model.modules():
            if isinstance(module, attnzoo.nn.Attention):
                hook = module.register_forward_pre_hook(self._record, with_kwargs=True)
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, module: nn.Module, args: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, attnzoo.nn.Attention)
        q, k, v = args
        rows = slice(max(0, q.shape[2] - self.last), None)
        options = {name: x for name, x in kwargs.items() if name not in _NOT_OF_WEIGHTS}
        masks = _masks(options, rows, q.shape[2])
        q, k, v = q[:, :, rows].float(), k.float(), v[..., :1].float()
        if module.softcap is not None:
            options["softcap"] = module.softcap
        options = own_parameters(module) | options | masks
        w = attnzoo.attention_weights(q, k, v, module.variant, **options)
        # With equal scores, the weights of softmax are 0 at keys that a query does not see.
        masks["enable_gqa"] = bool(options.get("enable_gqa"))
        equal = torch.zeros_like(q)[:1], torch.zeros_like(k)[:1], v[:1]
        visible = attnzoo.attention_weights(*equal, **{n: _first(x) for n, x in masks.items()})
        self.layers.append((w.cpu(), (visible[0, 0] > 0).sum(-1).cpu()))


def _masks(options: dict[str, Any], rows: slice, queries: int) -> dict[str, Any]:
    """The mask arguments of a call for its last queries. Causal attention is aligned at the end."""
    masks = {name: options[name] for name in ("is_causal", "window") if name in options}
    if (mask := options.get("attn_mask")) is not None:
        masks["attn_mask"] = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    if (segments := options.get("segment_ids")) is not None:
        of_q, of_k = segments if isinstance(segments, tuple) else (segments, segments)
        masks["segment_ids"] = of_q[:, -queries:][:, rows], of_k
    return masks


def _first(value: Any) -> Any:
    """The first entry of the batch of a mask argument."""
    if isinstance(value, tuple) and isinstance(value[0], Tensor):
        return tuple(part[:1] for part in value)
    return value[:1] if isinstance(value, Tensor) else value


def sharpness(weights: Weights) -> dict[str, Tensor]:
    """The largest weight and the measures of `evals.measures.sparsity`, as means over queries.

    Returns:
        Tensors (B, heads of all layers) by name, such as ``max_weight`` and ``entropy``.
    """
    parts_by_name: dict[str, list[Tensor]] = {name: [] for name in ("max_weight", *TITLES)}
    for w, keys in weights.layers:
        measured = {"max_weight": w.amax(-1), **sparsity(w, keys)}
        for name, values in measured.items():
            parts_by_name[name].append(values.mean(-1))
    return {name: torch.cat(parts, -1) for name, parts in parts_by_name.items()}


def dispersion(weights: Weights, needle: Tensor, tokens: int) -> dict[str, Tensor]:
    """The weight on the tokens of the needle, and the entropy of the row divided by log n.

    Args:
        weights: with ``last`` = 1.
        needle: the indices of the needle's tokens.
        tokens: the number of tokens up to the query. A layer with a window may have fewer keys,
            the last ones; its heads put no weight on tokens before them.

    Returns:
        ``needle_weight`` and ``needle_entropy``, (B, heads of all layers), for the last query.
    """
    on, entropy = [], []
    for w, keys in weights.layers:
        at = needle - (tokens - w.shape[-1])
        on.append(w[:, :, -1, at[at >= 0]].sum(-1))
        entropy.append(sparsity(w[:, :, -1], keys[-1])["entropy"])
    return {"needle_weight": torch.cat(on, -1), "needle_entropy": torch.cat(entropy, -1)}
