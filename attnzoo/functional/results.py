"""Results: what a call returns, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Results(NamedTuple):
    """What a call may return; None for what it was not asked for."""

    out: Tensor
    lse: Tensor | None
    max_logits: Tensor | None

    @staticmethod
    def of(result: Tensor | tuple[Tensor, ...], arguments: dict[str, Any]) -> Results:
        """The `Results` of a call from what it returned, with its ``arguments``."""
        if isinstance(result, Tensor):
            return Results(result, None, None)
        lse = result[1] if arguments["return_lse"] else None
        return Results(result[0], lse, result[-1] if arguments["return_max_logits"] else None)

    @property
    def returned(self) -> Tensor | tuple[Tensor, ...]:
        """One tensor, or a tuple of what the call was asked for."""
        values = tuple([x for x in self if x is not None])
        return values if len(values) > 1 else self.out
