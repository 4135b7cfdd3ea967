"""Sequences of unknown lengths as a padded batch, without reading the lengths on the host.

Each sequence is aligned with the right end of its row, so that the last query of a sequence has the
position of its last key, as causality requires. A key mask hides the padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.core.registry import get_variant
from attnzoo.core.varlen_arguments import Packed, TokenParams
from attnzoo.functional.attention import attention
from attnzoo.functional.results import Results


class PaddedRows(NamedTuple):
    """Where the tokens of a packed tensor are in a batch of rows.

    Attributes:
        tokens: Index of the token at each place of each row, (S, width); any token for padding.
        valid: Whether a place holds a token, (S, width).
    """

    tokens: Tensor
    valid: Tensor

    @staticmethod
    def of(ends: Tensor, tokens: int, width: int) -> PaddedRows:
        first, last = ends[:-1, None].long(), ends[1:, None].long()
        index = last - width + torch.arange(width, device=ends.device)
        valid = index >= first
        # Padding repeats a token, so that parameters keep allowed values.
        return PaddedRows(torch.maximum(index, first).clamp(0, tokens - 1), valid)


def sequences(ends: Tensor, tokens: int) -> Tensor:
    """The index of each token's sequence, (T,)."""
    at = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), at, right=True)


def padded_attention(
    inputs: Packed,
    variant: str,
    backend: str | None,
    arguments: dict[str, Any],
    token_params: TokenParams,
) -> Results:
    """The results of `varlen_attention`: the output (Tq, H, Dv), lse (H, Tq), the maxima (H,)."""
    queries, keys = (
        PaddedRows.of(ends, x.shape[0], width)
        for ends, x, width in zip(inputs.ends, (inputs.query, inputs.key), inputs.longest)
    )
    q = inputs.query[queries.tokens].transpose(1, 2)  # [S, H, max_q, D]
    k, v = (x[keys.tokens].transpose(1, 2) for x in (inputs.key, inputs.value))
    params = dict(token_params.values)
    for rows, names in ((queries, token_params.of_queries), (keys, token_params.of_keys)):
        for name in names:
            params[name] = params[name][0][:, rows.tokens].transpose(0, 1)  # [S, H, width]
    # A repeated gate would be summed over the padding, and cumulative sums lose digits.
    neutral = get_variant(variant).identity or {}
    for name in neutral.keys() & set(token_params.of_keys):
        params[name] = params[name].where(keys.valid[:, None], neutral[name])
    visible: dict[str, Any] = {"attn_mask": keys.valid[:, None, None]}
    if arguments["return_max_logits"]:
        # Padding repeats a query, which may see keys there that its token does not see.
        visible = {"segment_ids": ((~queries.valid).int(), 2 * (~keys.valid).int())}
    result = attention(q, k, v, variant, backend=backend, **visible, **arguments, **params)
    tokens, width = inputs.query.shape[0], inputs.longest[0]
    row = sequences(inputs.ends[0], tokens)
    place = torch.arange(tokens, device=row.device) - inputs.ends[0][1:][row] + width

    def unpadded(x: Tensor) -> Tensor:
        """(S, H, max_q, …) as (Tq, H, …)."""
        return x.transpose(1, 2)[row, place]

    out, lse, largest = Results.of(result, arguments)
    return Results(unpadded(out), None if lse is None else unpadded(lse).T, largest)
