"""Sequences of unknown lengths as a padded batch, without reading the lengths on the host.

Each sequence is aligned with the right end of its row, so that the last query of a sequence has the
position of its last key, as causality requires. A key mask hides the padding.

The same rows say where the keys of a paged cache are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.selection import Candidate, candidates
from attnzoo.core.call import Pages, in_full_precision
from attnzoo.core.registry import get_variant
from attnzoo.core.varlen_arguments import Packed, TokenParams
from attnzoo.functional.attention import attention
from attnzoo.functional.prepare import ValidatedCall, autocast_dtype, check_supported, prepare
from attnzoo.functional.results import Results


class PaddedRows(NamedTuple):
    """Where the tokens of a packed tensor are in a batch of rows.

    Attributes:
        indices: Index of the token at each place of each row, (S, width), or of its page and of its
            place there; any token for padding.
        valid: Whether a place holds a token, (S, width).
    """

    indices: tuple[Tensor, ...]
    valid: Tensor

    @staticmethod
    def of(ends: Tensor, tokens: int, width: int) -> PaddedRows:
        first, last = ends[:-1, None].long(), ends[1:, None].long()
        index = last - width + torch.arange(width, device=ends.device)
        valid = index >= first
        # Padding repeats a token, so that parameters keep allowed values.
        return PaddedRows((torch.maximum(index, first).clamp(0, tokens - 1),), valid)

    @staticmethod
    def of_keys(inputs: Packed, width: int) -> PaddedRows:
        """The keys that take part. Only entries of the table that hold such keys are read."""
        used, table, key, ends = inputs.used, inputs.table, inputs.key, inputs.ends[1]
        if used is None:
            assert ends is not None
            return PaddedRows.of(ends, key.shape[0], width)
        at = used[:, None].long() - width + torch.arange(width, device=key.device)
        valid = at >= 0
        at = at.clamp(min=0)
        if table is None:
            assert ends is not None
            return PaddedRows(((ends[:-1, None] + at).clamp(max=key.shape[0] - 1),), valid)
        size = key.shape[1]
        # As padding the first key, and page 0 for a sequence without keys
        page = table.long().gather(1, at // size).where(used[:, None] > 0, 0)
        return PaddedRows((page, at % size), valid)

    def take(self, x: Tensor) -> Tensor:
        """Tokens x (T, …) as (S, width, …), or pages (num_pages, page_size, …)."""
        return x[self.indices]

    def take_parameter(self, x: Tensor) -> Tensor:
        """A parameter per token, (1, H, T) or (1, H, num_pages, page_size), as (S, H, width)."""
        return x[0][(slice(None), *self.indices)].transpose(0, 1)


def sequences(ends: Tensor, tokens: int) -> Tensor:
    """The index of each token's sequence, (T,)."""
    at = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), at, right=True)


def with_used_keys(inputs: Packed, token_params: TokenParams) -> tuple[Packed, TokenParams]:
    """The inputs with the keys that take part only, packed. Their lengths must be known."""
    assert inputs.lengths is not None
    rows = PaddedRows.of_keys(inputs, max(inputs.lengths[1]))
    index = tuple(x[rows.valid] for x in rows.indices)
    params = dict(token_params.values)
    for name in token_params.of_keys:
        params[name] = params[name][(slice(None), slice(None), *index)]
    packed = inputs._replace(key=inputs.key[index], value=inputs.value[index], used=None)
    return packed, token_params._replace(values=params)


def as_one_row(inputs: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as (1, H, T, D)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.query, inputs.key, inputs.value))
    return q, k, v


def padded_attention(
    inputs: Packed,
    variant: str,
    backend: str | None,
    arguments: dict[str, Any],
    token_params: TokenParams,
) -> Results:
    """The results of `varlen_attention`: the output (Tq, H, Dv), lse (H, Tq), the maxima (H,)."""
    width = inputs.longest[0]
    queries = PaddedRows.of(inputs.ends[0], inputs.query.shape[0], width)
    keys = PaddedRows.of_keys(inputs, inputs.longest[1])
    q = queries.take(inputs.query).transpose(1, 2)  # [S, H, max_q, D]
    params = dict(token_params.values)
    for rows, names in ((queries, token_params.of_queries), (keys, token_params.of_keys)):
        for name in names:
            params[name] = rows.take_parameter(params[name])  # [S, H, width]
    # Padding repeats a token's value. A cumulative sum over it would grow and lose digits, so
    # padding gets the neutral value.
    neutral = get_variant(variant).identity or {}
    for name in neutral.keys() & set(token_params.of_keys):
        params[name] = params[name].where(keys.valid[:, None], neutral[name])
    visible: dict[str, Any] = {"attn_mask": keys.valid[:, None, None]}
    if arguments["return_max_logits"]:
        # Padding repeats a query, which may see keys there that its token does not see.
        visible = {"segment_ids": ((~queries.valid).int(), 2 * (~keys.valid).int())}
    options = {**visible, **arguments, **params}
    result = _read_pages(q, inputs, variant, backend, options)
    if result is None:
        k, v = (keys.take(x).transpose(1, 2) for x in (inputs.key, inputs.value))
        if inputs.used is not None:  # keys that take no part may be NaN, and 0 · NaN is NaN
            k, v = (x.masked_fill(~keys.valid[:, None, :, None], 0.0) for x in (k, v))
        result = Results.of(attention(q, k, v, variant, backend=backend, **options), arguments)
    tokens = inputs.query.shape[0]
    row = sequences(inputs.ends[0], tokens)
    place = torch.arange(tokens, device=row.device) - inputs.ends[0][1:][row] + width

    def unpadded(x: Tensor) -> Tensor:
        """(S, H, max_q, …) as (Tq, H, …)."""
        return x.transpose(1, 2)[row, place]

    out, lse, largest = result
    return Results(unpadded(out), None if lse is None else unpadded(lse).T, largest)


def first_able(ready: ValidatedCall, backend: str | None) -> Candidate | None:
    """The backend and the form that run a call; None if none can."""
    forms = (*ready.forms, ready.definition)
    considered = candidates(ready.variant.name, forms, ready.call, backend)
    return next((candidate for candidate in considered if candidate.reason is None), None)


def reads_pages(inputs: Packed, backend: str | None) -> bool:
    """Whether a backend may read the pages of the inputs itself.

    On a CPU only a named one does: Triton's interpreter is slow.
    """
    if inputs.table is None or not inputs.attends:
        return False
    if autocast_dtype(inputs.key) != inputs.key.dtype:
        return False
    return inputs.query.is_cuda if backend is None else BACKENDS[backend].reads_pages


def paged_call(q: Tensor, inputs: Packed, variant: str, arguments: dict[str, Any]) -> ValidatedCall:
    """The call of rows q (S, H, max_q, D), whose keys are in pages. Its k and v are the cache.

    ``arguments``: as for `prepare`, with a mask that hides the padding.
    """
    assert inputs.used is not None
    assert inputs.table is not None
    rows, width = q.shape[0], inputs.longest[1]
    cache = inputs.key.transpose(1, 2), inputs.value.transpose(1, 2)
    # One key; `len` would be a constant in an exported graph.
    first = (x[:1, :, :1] if x.shape[0] else x.new_empty(1, *x.shape[1:])[:, :, :1] for x in cache)
    k, v = (x.expand(rows, -1, width, -1) for x in first)
    ready = prepare(q, k, v, variant, arguments)
    pages = Pages(*cache, inputs.table.contiguous(), inputs.used.contiguous())
    return ready._replace(k=pages.k, v=pages.v, call=replace(ready.call, pages=pages))


def _read_pages(
    q: Tensor, inputs: Packed, variant: str, backend: str | None, arguments: dict[str, Any]
) -> Results | None:
    """Run the rows on a backend that reads the pages itself; None if none does in this call."""
    if not reads_pages(inputs, backend) or arguments["return_max_logits"]:
        return None
    ready = paged_call(q, inputs, variant, arguments)
    check_supported(ready)
    call = ready.call
    with in_full_precision(call.device):
        if (first := first_able(ready, backend)) is None:
            return None
        out, lse = BACKENDS[first.backend].run(ready.q, ready.k, ready.v, call, first.form)
    return Results(out.to(call.input_dtype), lse, None)
