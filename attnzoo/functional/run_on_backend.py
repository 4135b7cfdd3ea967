"""Runs a prepared call on a backend."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attnzoo.core.call import in_full_precision
from attnzoo.functional import packed
from attnzoo.functional.call_cache import remember
from attnzoo.functional.prepare import ValidatedCall, check_supported, choose_backend


def run_on_backend(
    ready: ValidatedCall, backend: str | None, key: Hashable | None = None,
    params: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output (B, H, Nq, Dv) in the dtype of the inputs, and lse if the call asks for it.

    With a ``key`` the call is remembered for `call_cache.find`, with its parameters ``params``.
    """
    check_supported(ready)
    call = ready.call
    with in_full_precision(call.device):
        if (runs := packed.runs_of(ready, backend)) is not None:
            return packed.attend_segments(ready, runs, backend)
        chosen = choose_backend(ready, backend)
        remember(key, ready, chosen, params or {})
        out, lse = chosen.backend.run(ready.q, ready.k, ready.v, call, chosen.form)
    return out.to(call.input_dtype), lse
