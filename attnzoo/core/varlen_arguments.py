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


class Packed(NamedTuple):
    """Packed tokens, and where their sequences end.

    Attributes:
        query, key, value: As for `varlen_attention`.
        ends: cu_seq_q and cu_seq_k; with a block table cu_seq_k is None.
        longest: max_q and max_k.
        lengths: Numbers of queries and of keys of each sequence; None if they cannot be read.
        used: seqused_k, or None if all keys take part.
        table: block_table, or None if the keys of a sequence are adjacent.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    ends: tuple[Tensor, Tensor | None]
    longest: tuple[int, int]
    lengths: tuple[list[int], list[int]] | None
    used: Tensor | None = None
    table: Tensor | None = None

    @property
    def attends(self) -> bool:
        """Whether a query may see a key, as far as is known."""
        key_axes = self.key.shape[:-2] + (() if self.table is None else self.table.shape)
        if 0 in (self.query.shape[0], *key_axes):
            return False
        return self.lengths is None or any(map(min, *self.lengths))


class TokenParams(NamedTuple):
    """The parameters of a variant, those per query or per key with shape (1, H, T).

    With a block table those per key have shape (1, H, num_pages, page_size).

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
    ends: tuple[Tensor, Tensor | None],
    longest: tuple[Any, Any],
    enable_gqa: bool,
    used: Tensor | None = None,
    table: Tensor | None = None,
    names: tuple[str, str, str] = ("query", "key", "value"),
) -> Packed:
    """Validate the tensors of `varlen_attention` and the lengths of the sequences.

    Args:
        tensors: query, key and value.
        ends: cu_seq_q and cu_seq_k.
        longest: max_q and max_k.
        enable_gqa: As for `varlen_attention`.
        used: seqused_k.
        table: block_table.
        names: The names of ``tensors`` in errors.
    """
    query, key, value = tensors
    cu_seq_q, cu_seq_k = ends
    check_tokens(tensors, enable_gqa, table is not None, names)
    queries = check_ends("cu_seq_q", cu_seq_q, "query", query, query.shape[0])
    sequences, keys = cu_seq_q.shape[0] - 1, None
    if table is not None:
        _check_table(table, used, cu_seq_k, key, sequences)
    else:
        if cu_seq_k is None:
            raise TypeError("cu_seq_k must be a tensor without block_table, got None")
        keys = check_ends("cu_seq_k", cu_seq_k, "key", key, key.shape[0])
        if cu_seq_k.shape != cu_seq_q.shape:
            raise ValueError(
                "cu_seq_k must have as many entries as cu_seq_q, one more than there are "
                f"sequences, got {cu_seq_k.shape[0]} and {cu_seq_q.shape[0]}"
            )
    max_q = check_longest("max_q", longest[0], queries, query.shape[0], sequences)
    if used is None:
        max_k = check_longest("max_k", longest[1], keys, key.shape[0], sequences)
    else:
        most = key.shape[0] if table is None else table.shape[1] * key.shape[1]
        keys = _check_used(used, key, sequences, most if keys is None else keys)
        max_k = check_longest("max_k", longest[1], keys, most)
    if table is not None and keys is not None:
        _check_pages(table, keys, key)
    lengths = None if queries is None or keys is None else (queries, keys)
    return Packed(query, key, value, ends, (max_q, max_k), lengths, used, table)


def check_tokens(
    tensors: tuple[Tensor, Tensor, Tensor], enable_gqa: bool, paged: bool, names: tuple[str, ...]
) -> None:
    """Raise unless query, key and value are (Tq, H, D), (Tk, Hkv, D) and (Tk, Hkv, Dv).

    ``paged``: key and value are (num_pages, page_size, Hkv, D) and (num_pages, page_size, Hkv, Dv).
    ``names``: the names of query, key and value in errors.
    """
    (query, key, value), (of_query, of_key, of_value) = tensors, names
    tokens = dict(zip(names, tensors, strict=True))
    if paged:
        for name, x in ((of_key, key), (of_value, value)):
            check_dense(name, x)
            if x.dim() != 4 or x.shape[1] == 0:
                raise ValueError(
                    f"{name} must have shape (num_pages, page_size, Hkv, D) with block_table, "
                    f"got {tuple(x.shape)}"
                )
            tokens[name] = x[:, 0]
    check_tensors("T, H, D", tokens)
    if key.shape[-1] != query.shape[2]:
        raise ValueError(
            f"{of_key} must have {of_query}'s head dimension {query.shape[2]}, got "
            f"{tuple(key.shape)}"
        )
    if value.shape[:-1] != key.shape[:-1]:
        what = "pages, tokens" if paged else "tokens"
        raise ValueError(
            f"{of_value} must have as many {what} and heads as {of_key}, {tuple(key.shape[:-1])}, "
            f"got {tuple(value.shape)}"
        )
    check_heads((of_query, of_key), query.shape[1], key.shape[-2], enable_gqa)


def _check_used(
    used: Tensor, key: Tensor, sequences: int, most: int | list[int]
) -> list[int] | None:
    """Validate seqused_k. Return its values, or None if they cannot be read.

    ``most``: the number of keys that any sequence could have, or that of each.
    """
    _check_int32("seqused_k", used, (sequences,), key)
    if not (is_readable(used) and is_readable(key)):
        return None
    numbers = used.tolist()
    limits = most if isinstance(most, list) else [most] * len(numbers)
    for at, (number, limit) in enumerate(zip(numbers, limits, strict=True)):
        if not 0 <= number <= limit:
            raise ValueError(
                f"seqused_k must be from 0 to the number of keys that a sequence can have, {limit} "
                f"for sequence {at}, got {number}"
            )
    return numbers


def _check_table(
    table: Tensor, used: Tensor | None, cu_seq_k: Tensor | None, key: Tensor, sequences: int
) -> None:
    """Validate block_table, except its values."""
    if used is None:
        raise TypeError("seqused_k must be a tensor with block_table, got None")
    if cu_seq_k is not None:
        raise TypeError(
            "cu_seq_k must be None with block_table, because seqused_k has the numbers of keys, "
            f"got {shown(cu_seq_k)}"
        )
    _check_int32("block_table", table, (sequences, "max_blocks"), key)


def _check_pages(table: Tensor, keys: list[int], key: Tensor) -> None:
    """Raise unless the entries of block_table that hold keys are pages."""
    if not is_readable(table):
        return
    pages, size = key.shape[:2]
    for at, (entries, number) in enumerate(zip(table.tolist(), keys, strict=True)):
        for page in entries[: -(-number // size)]:
            if not 0 <= page < pages:
                allowed = (
                    f"pages from 0 to {pages - 1}" if pages else "no entries, as there is no page,"
                )
                raise ValueError(
                    f"block_table must have {allowed} where keys are used, got {page} for sequence "
                    f"{at}"
                )


def _check_int32(name: str, x: Any, shape: tuple[int | str, ...], like: Tensor) -> None:
    """Raise unless x is int32 on the device of ``like``. A name in ``shape`` is any number."""
    check_dense(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    fits = x.dim() == len(shape)
    if not fits or any(n != m for n, m in zip(shape, x.shape) if not isinstance(n, str)):
        wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on the keys' device {like.device}, got {x.device}")


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
    name: str, value: Any, lengths: list[int] | None, tokens: int, sequences: int | None = None
) -> int:
    """Validate max_q or max_k.

    Args:
        name: The name of the argument.
        value: Its value.
        lengths: The lengths of the sequences; None if they cannot be read.
        tokens: The length for a value that cannot be read: no sequence is longer.
        sequences: The number of sequences, if they have all tokens together.
    """
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
    if lengths is None and sequences is not None and is_known(sequences * value < tokens):
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


def check_no_splits(params: dict[str, Any]) -> None:
    """Remove torch's ``num_splits`` if it is None; raise if it has another value."""
    if (value := params.pop("num_splits", None)) is not None:
        raise TypeError(
            "num_splits must be None, because varlen_attention does not support it, got "
            f"{shown(value)}"
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
    """The parameters for a batch of one row: tensors (H, T) become (1, H, T).

    Beside paged keys, tensors (num_pages, page_size, H) become (1, H, num_pages, page_size).
    """
    batched, of_queries, of_keys = dict(params), set(), set()
    for param in get_variant(variant).params:
        value = params.get(param.name)
        if not isinstance(value, Tensor) or value.dim() < 2 or param.kind != "per_head":
            continue
        heads, shapes = query.shape[1], ["()", f"({query.shape[1]},)"]
        paged = key.dim() == 4
        of_key = (*key.shape[:2], heads) if paged else (heads, key.shape[0])
        for accepted, names, shape in (
            (param.per_token, of_queries, (heads, query.shape[0])),
            (param.per_key, of_keys, of_key),
        ):
            shapes += [str(tuple(shape))] if accepted else []
            if accepted and value.shape == shape:
                names.add(param.name)
        if param.name not in of_queries | of_keys:
            raise ValueError(
                f"{variant}'s {param.name} must have shape {' or '.join(shapes)}, got "
                f"{tuple(value.shape)}"
            )
        pages_last = paged and param.name in of_keys
        batched[param.name] = (value.movedim(-1, 0) if pages_last else value)[None]
    return TokenParams(batched, of_queries, of_keys)
