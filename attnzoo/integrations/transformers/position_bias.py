"""The bias of T5 and its relatives, as a table by relative position instead of a dense matrix.

``compute_bias`` of these hosts makes a matrix (1, H, Nq, Nk) whose entries depend on the difference
j - i of the positions of key and query only. In a converted model it makes one row with an entry
for each difference instead, (1, H, 1, Nq + Nk - 1), which is its own result for one query behind
all others:

    bias[h, i, j] = row[h, Nq - 1 - i + j]

The row is a tensor, so it passes through layers, checkpoints and devices as the matrix did, and it
shows by its shape what it is. `bias_options` turns it into ``relative_bias`` of
`attnzoo.attention`. A bias of zeros, which these hosts make for cross-attention, is left out.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.integrations.transformers.masks import NAME, Mask, with_bias

KIND = "_attnzoo_bias"  # the attribute of a recognized host: "row", "none" or "zeros"
ARGUMENTS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]
FIELDS = (
    "config", "has_relative_attention_bias", "relative_attention_num_buckets",
    "relative_attention_max_distance",
)  # fmt: skip


def bias_options(
    module: nn.Module,
    mask: Mask,
    attention_mask: Mask | Tensor | None,
    bias: Tensor | None,
    queries: int,
    keys: int,
    sharded: bool,
) -> dict[str, Any]:
    """The arguments of `attnzoo.attention` for a mask and a host's bias.

    Args:
        module: the attention module.
        mask: what `masks.read_mask` made of ``attention_mask``.
        attention_mask: the host's mask.
        bias: a matrix or a row for this many queries and keys, or None.
        queries: Nq.
        keys: Nk, including those outside ``mask.start : mask.stop``.
        sharded: whether the call has the tokens of one rank only.
    """
    if bias is None or getattr(module, KIND, None) == "zeros" or bias.numel() == 0:
        return mask.arguments
    if sharded:
        raise ValueError(
            f"{type(module).__name__} must have no bias of its scores when its sequence is "
            "sharded: the bias holds the positions in one shard"
        )
    if queries == 1 or bias.shape[-2:] != (1, queries + keys - 1):
        return with_bias(mask, bias)
    radius = getattr(module, "relative_attention_max_distance", None)
    # A dense mask does not show the position of the first query in a static cache.
    aligned = queries == keys or (isinstance(attention_mask, Mask) and mask.causal)
    if radius is None or not aligned or bias.shape[0] != 1:
        return with_bias(mask, _as_matrix(bias, keys))
    difference = torch.arange(-radius, radius + 1, device=bias.device)
    # The queries are the last of ``mask.stop`` keys, so the entry of difference 0 is the one before
    # ``mask.stop``. The clamp repeats entries for differences that this call does not have.
    entries = (difference + (mask.stop - 1)).clamp(0, bias.shape[-1] - 1)
    return mask.arguments | {"relative_bias": bias[0, :, 0, entries]}


def set_rows(model: nn.Module, used: bool) -> Callable[[], None]:
    """Makes the hosts of a model that are recognized make rows, or not. Returns an undo function.

    A host is recognized if its code and that of the layers around it are transformers' own, and if
    its bias depends on the difference of the positions only. All others make matrices.
    """
    before = [(module, vars(module).get(KIND)) for module in model.modules()]
    for name, module in list(model.named_modules()):
        _set_kind(module, _kind(model, name, module) if used else None)

    def undo() -> None:
        for module, kind in before:
            _set_kind(module, kind)

    return undo


def _set_kind(module: nn.Module, kind: str | None) -> None:
    vars(module).pop(KIND, None)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is prepare:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    if kind is not None:
        setattr(module, KIND, kind)
        module.register_forward_pre_hook(prepare, with_kwargs=True)
    if kind == "row":
        _patch(type(module))


def prepare(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A hook before forward. An empty bias takes the place of a matrix of zeros."""
    kind = getattr(module, KIND, None)
    if kind == "row" and not torch.compiler.is_compiling():
        _patch(type(module))  # again, because the module may come from another process
    if kind != "none" or not _is_active(module) or len(args) > 1:
        return None
    if kwargs.get("position_bias") is not None:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    return args, {**kwargs, "position_bias": hidden.new_empty(1, 1, 0, 0)}


def _is_active(module: Any) -> bool:
    """Whether the module calls `interface.attend`, which alone reads rows."""
    return hasattr(module, KIND) and module.config._attn_implementation == NAME


def _patch(host: Any) -> None:
    """Gives a class a ``compute_bias`` that makes rows in converted models.

    The class, because a module with a method of its own refers to itself, and its replicas on other
    devices (`torch.nn.DataParallel`) would use the weight of the first.
    """
    compute_bias = host.compute_bias
    if hasattr(compute_bias, KIND):
        return

    @wraps(compute_bias)
    def row_or_matrix(
        self: Any,
        query_length: int,
        key_length: int,
        device: Any = None,
        past_seen_tokens: Any = 0,
    ) -> Tensor:
        if _is_active(self):  # one query, at the position of the last
            past_seen_tokens = past_seen_tokens + (query_length - 1)
            query_length, key_length = 1, query_length + key_length - 1
        return compute_bias(self, query_length, key_length, device, past_seen_tokens)

    setattr(row_or_matrix, KIND, True)
    host.compute_bias = row_or_matrix


# ---- recognition -------------------------------------------------------------------------------


def _kind(model: nn.Module, name: str, module: Any) -> str | None:
    """What a recognized host makes, None for all other modules."""
    compute_bias = getattr(type(module), "compute_bias", None)
    if compute_bias is None or list(inspect.signature(compute_bias).parameters) != ARGUMENTS:
        return None
    if not all(hasattr(module, field) for field in FIELDS) or not _is_of_transformers(model, name):
        return None
    if module.has_relative_attention_bias:
        return "row" if _is_by_difference(module) else None
    takes_bias = "position_bias" in inspect.signature(type(module).forward).parameters
    return "none" if takes_bias else "zeros"


def _is_of_transformers(model: nn.Module, name: str) -> bool:
    """Whether the code between a stack of layers and the module is transformers' own.

    Other code may compute with the matrix.
    """
    names = name.split(".")
    path = [model.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
    stack = max(n for n, one in enumerate(path) if n == 0 or isinstance(one, PreTrainedModel))
    return all(
        isinstance(one, nn.ModuleList)
        or type(one).forward.__module__.startswith("transformers.models.")
        for one in path[stack:]
    )


def _is_by_difference(module: Any) -> bool:
    """Whether the bias depends on the difference of positions only, and is constant far away."""
    compute_bias = inspect.unwrap(type(module).compute_bias)
    radius = module.relative_attention_max_distance
    # Numbers that differ between buckets; the weight of the host may be 0 or on meta.
    numbers = torch.arange(module.relative_attention_num_buckets, dtype=torch.float32, device="cpu")
    probe = copy.copy(module)
    vars(probe).pop(KIND, None)
    embedding = nn.Embedding.from_pretrained(numbers[:, None])
    probe._modules = {**module._modules, "relative_attention_bias": embedding}
    matrix = compute_bias(probe, 3, 4 * radius + 1, "cpu", 2 * radius)
    row = compute_bias(probe, 1, 4 * radius + 3, "cpu", 2 * radius + 2)
    values = row[0, 0, 0, 2:]  # of the differences -2R ... 2R
    return (
        torch.equal(matrix, _as_matrix(row, matrix.shape[-1]))
        and bool((values[:radius] == values[radius]).all())
        and bool((values[3 * radius :] == values[3 * radius]).all())
    )


def _as_matrix(row: Tensor, keys: int) -> Tensor:
    """A row (B, H, 1, Nq + Nk - 1) as the matrix (B, H, Nq, Nk)."""
    return row.unfold(-1, keys, 1).squeeze(2).flip(-2)
