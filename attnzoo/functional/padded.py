"""Sequences of unknown lengths as a padded batch, without reading the lengths on the host.

Each sequence is aligned with the right end of its row, so that the last query of a sequence has the
position of its last key, as causality requires. A key mask hides the padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.functional.attention import attention


class Rows(NamedTuple):
    """Where the tokens of a packed tensor are in a batch of rows.

    Attributes:
        tokens: Index of the token at each place of each row, (S, width); any token for padding.
        valid: Whether a place holds a token, (S, width).
    """

    tokens: Tensor
    valid: Tensor

    @staticmethod
    def of(ends: Tensor, tokens: int, width: int) -> Rows:
        first, last = ends[:-1, None].long(), ends[1:, None].long()
        index = last - width + torch.arange(width, device=ends.device)
        valid = index >= first
        # Padding repeats a token, so that parameters keep allowed values.
        return Rows(torch.maximum(index, first).clamp(0, tokens - 1), valid)


def sequences(ends: Tensor, tokens: int) -> Tensor:
    """The index of each token's sequence, (T,)."""
    at = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), at, right=True)


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    variant: str,
    backend: str | None,
    arguments: dict[str, Any],
    params: dict[str, Any],
    per_token: tuple[set[str], set[str]],
) -> Tensor | tuple[Tensor, Tensor]:
    """The output (Tq, H, Dv) of `varlen_attention`, or a pair with lse (H, Tq).

    Args:
        ends: cu_seq_q and cu_seq_k.
        longest: max_q and max_k.
        params: The parameters, those per query or per key with shape (1, H, T).
        per_token: The names of the parameters per query and of those per key.
    """
    queries, keys = (Rows.of(e, len(x), width) for e, x, width in zip(ends, (query, key), longest))
    q = query[queries.tokens].transpose(1, 2)  # [S, H, max_q, D]
    k, v = (x[keys.tokens].transpose(1, 2) for x in (key, value))
    params = dict(params)
    for rows, names in zip((queries, keys), per_token):
        for name in names:
            params[name] = params[name][0][:, rows.tokens].transpose(0, 1)  # [S, H, width]
    result = attention(
        q, k, v, variant, attn_mask=keys.valid[:, None, None], backend=backend, **arguments,
        **params,
    )  # fmt: skip
    row = sequences(ends[0], len(query))
    place = torch.arange(len(query), device=query.device) - ends[0][1:][row] + longest[0]

    def tokens(x: Tensor) -> Tensor:
        """(S, H, max_q, …) as (Tq, H, …)."""
        return x.transpose(1, 2)[row, place]

    if isinstance(result, Tensor):
        return tokens(result)
    out, lse = result
    return tokens(out), tokens(lse).T
