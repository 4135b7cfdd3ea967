"""Validates the arguments of `varlen_attention` that `attention` does not have."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.core.arguments import check_heads, check_tensors
from attnzoo.core.checks import (
    check_bool,
    check_dense,
    has_values,
    is_int,
    is_known,
    is_readable,
    plain,
    shown,
)
from attnzoo.core.registry import get_variant

NO_LIMIT = 2**30  # more than any distance between tokens
# Arguments of torch's function that must be None, and what to do instead.
NOT_SUPPORTED = {
    "seqused_k": "; pass the keys that take part, and their ends as cu_seq_k",
    "block_table": "; pass the keys in the order of their sequences",
    "num_splits": "",
}


class Packed(NamedTuple):
    """Packed tokens, and where their sequences end.

    Attributes:
        query, key, value: As for `varlen_attention`.
        ends: cu_seq_q and cu_seq_k.
        longest: max_q and max_k.
        lengths: Numbers of queries and of keys of each sequence; None if they cannot be read.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    ends: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    lengths: tuple[list[int], list[int]] | None

    @property
    def attends(self) -> bool:
        """Whether a query may see a key, as far as is known."""
        if 0 in (self.query.shape[0], self.key.shape[0]):
            return False
        return self.lengths is None or any(map(min, *self.lengths))


class TokenParams(NamedTuple):
    """The parameters of a variant, those per query or per key with shape (1, H, T).

    Attributes:
        values: All parameters, by name.
        of_queries: The names of those per query.
        of_keys: The names of those per key.
    """

    values: dict[str, Any]
    of_queries: set[str]
    of_keys: set[str]


def check_packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    ends: tuple[Tensor, Tensor],
    longest: tuple[Any, Any],
    enable_gqa: bool,
) -> Packed:
    """Validate (query, key, value), (cu_seq_q, cu_seq_k) and (max_q, max_k)."""
    query, key, value = tensors
    check_tokens(query, key, value, enable_gqa)
    tokens = query.shape[0], key.shape[0]
    queries = check_ends("cu_seq_q", ends[0], "query", query, tokens[0])
    keys = check_ends("cu_seq_k", ends[1], "key", key, tokens[1])
    sizes = ends[0].shape[0], ends[1].shape[0]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "cu_seq_k must have as many entries as cu_seq_q, one more than there are sequences, "
            f"got {sizes[1]} and {sizes[0]}"
        )
    max_q = check_longest("max_q", longest[0], queries, sizes[0] - 1, tokens[0])
    max_k = check_longest("max_k", longest[1], keys, sizes[1] - 1, tokens[1])
    lengths = None if queries is None or keys is None else (queries, keys)
    return Packed(query, key, value, ends, (max_q, max_k), lengths)


def check_tokens(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise unless query, key and value are (Tq, H, D), (Tk, Hkv, D) and (Tk, Hkv, Dv)."""
    check_tensors("T, H, D", {"query": query, "key": key, "value": value})
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key must have query's head dimension {query.shape[2]}, got {tuple(key.shape)}"
        )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"value must have as many tokens and heads as key, {tuple(key.shape[:2])}, got "
            f"{tuple(value.shape)}"
        )
    check_heads(("query", "key"), query.shape[1], key.shape[1], enable_gqa)


def check_ends(name: str, ends: Tensor, of: str, like: Tensor, tokens: int) -> list[int] | None:
    """Validate the ends of sequences. Return their lengths, or None if they cannot be read.

    Args:
        name: The name of ``ends``.
        of: The name of the tensor that is cut at ``ends``.
        like: That tensor.
        tokens: Its number of tokens.
    """
    check_dense(name, ends)
    if ends.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {ends.dtype}")
    if ends.dim() != 1 or ends.shape[0] == 0:
        raise ValueError(
            f"{name} must have shape (S + 1,) for S sequences, got {tuple(ends.shape)}"
        )
    if ends.device != like.device:
        raise ValueError(f"{name} must be on {of}'s device {like.device}, got {ends.device}")
    if not (is_readable(ends) and is_readable(like)):
        return None
    values = ends.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    for at, (start, stop) in enumerate(pairwise(values), 1):
        if stop < start:
            raise ValueError(f"{name} must not decrease, got {start} and then {stop} at {at}")
    if values[-1] != tokens:
        raise ValueError(
            f"{name} must end with the number of tokens of {of}, {tokens}, got {values[-1]}"
        )
    return [stop - start for start, stop in pairwise(values)]


def check_longest(
    name: str, value: Any, lengths: list[int] | None, sequences: int, tokens: int
) -> int:
    """Validate max_q or max_k; ``lengths`` is None if they cannot be read."""
    value = plain(value)
    if (
        isinstance(value, Tensor)
        and value.shape == ()
        and value.dtype in (torch.int32, torch.int64)
    ):
        value = int(value) if has_values(value) else tokens
    if isinstance(value, Tensor) or not is_int(value):
        raise TypeError(f"{name} must be an int or a tensor () of ints, got {shown(value)}")
    if is_known(value < 0):
        raise ValueError(f"{name} must be at least 0, got {shown(value)}")
    if lengths is None and is_known(sequences * value < tokens):
        raise ValueError(
            f"{name} must be at least the length of the longest sequence; {value} is too small for "
            f"{tokens} tokens in {sequences} sequences"
        )
    if lengths is not None and max(lengths, default=0) > value:
        raise ValueError(
            f"{name} must be at least the length of the longest sequence, {max(lengths)}, got "
            f"{value}"
        )
    return value


def check_torch_arguments(params: dict[str, Any]) -> None:
    """Remove the arguments of torch's function that are None; raise if one has another value."""
    for name, instead in NOT_SUPPORTED.items():
        if (value := params.pop(name, None)) is not None:
            raise TypeError(
                f"{name} must be None, because varlen_attention does not support it, got "
                f"{shown(value)}{instead}"
            )


def wants_lse(aux: Any) -> bool:
    """Whether torch's ``return_aux`` asks for lse."""
    if aux is None:
        return False
    if not isinstance(lse := getattr(aux, "lse", None), bool):
        raise TypeError(f"return_aux must be an AuxRequest of torch or None, got {shown(aux)}")
    return lse


def with_window_size(
    size: Any, is_causal: Any, window: Any
) -> tuple[Any, int | tuple[int, int] | None]:
    """``is_causal`` and ``window`` of a call that has torch's ``window_size`` as well."""
    pair = [plain(x) for x in size] if isinstance(size, (tuple, list)) else []
    if len(pair) != 2 or not all(is_int(x) and x >= -1 for x in pair):
        raise ValueError(
            "window_size must be a pair (left, right) of ints >= 0, or -1 for no limit, got "
            f"{shown(size)}"
        )
    check_bool("is_causal", is_causal)
    left, right = pair
    if left == right == -1:
        return is_causal, window
    if window is not None:
        raise ValueError(
            f"window must be None with window_size={(left, right)}, got {shown(window)}"
        )
    if is_causal or right == 0:
        return True, None if left == -1 else left + 1
    return False, (NO_LIMIT if left == -1 else left, NO_LIMIT if right == -1 else right)


def with_batch(variant: str, params: dict[str, Any], query: Tensor, key: Tensor) -> TokenParams:
    """The parameters for a batch of one row: tensors (H, T) become (1, H, T)."""
    found, of_queries, of_keys = dict(params), set(), set()
    for param in get_variant(variant).params:
        value = params.get(param.name)
        if not isinstance(value, Tensor) or value.dim() < 2 or param.kind != "per_head":
            continue
        heads, shapes = query.shape[1], ["()", f"({query.shape[1]},)"]
        for accepted, names, tokens in (
            (param.per_token, of_queries, query.shape[0]),
            (param.per_key, of_keys, key.shape[0]),
        ):
            shapes += [f"({heads}, {tokens})"] if accepted else []
            if accepted and value.shape == (heads, tokens):
                names.add(param.name)
        if param.name not in of_queries | of_keys:
            raise ValueError(
                f"{variant}'s {param.name} must have shape {' or '.join(shapes)}, got "
                f"{tuple(value.shape)}"
            )
        found[param.name] = value[None]
    return TokenParams(found, of_queries, of_keys)
