"""Runs a prepared call on a backend, without the cache of repeated calls."""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.selection import choose
from attnzoo.core.call import in_full_precision
from attnzoo.functional import packed
from attnzoo.functional.prepare import Prepared, check_supported


def run(ready: Prepared, backend: str | None) -> tuple[Tensor, Tensor | None]:
    """The output (B, H, Nq, Dv) in the dtype of the inputs, and lse if the call asks for it."""
    check_supported(ready)
    call = ready.call
    with in_full_precision(call.device):
        runs = None
        if call.segments is not None and packed.splits(ready.q, backend):
            runs = packed.runs_of(ready)
        if runs is not None:
            return packed.run(ready, runs, backend)
        forms = (*ready.forms, ready.definition)
        chosen, form = choose(ready.variant.name, forms, call, backend)
        out, lse = chosen.run(ready.q, ready.k, ready.v, call, form)
    return out.to(call.input_dtype), lse
