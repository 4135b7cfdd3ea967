"""explain(): which backends could run a call, in which order, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.selection import Candidate, candidates, check_backend, linear_work
from attnzoo.core.call import Call
from attnzoo.core.forms import Linear
from attnzoo.functional.prepare import prepare


@dataclass(frozen=True)
class Plan:
    """What `attention` would do with a call, and why.

    ``chosen`` is the backend's name, or None where the variant refuses the call (``reason`` says
    why) or a named backend objects. ``str()`` is the table of backends, forms and reasons in the
    order of preference.
    """

    variant: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.variant}: unsupported\n  {self.reason}"
        rows = [f"{self.variant}: {self.chosen}"]
        taken = False
        for backend, form, reason, note in self.candidates:
            first = reason is None and backend == self.chosen and not taken
            taken = taken or first
            text = reason or ("chosen" if first else "able") + note
            rows.append(f"  {backend:<12} {form.kind:<11} {text}")
        return "\n".join(rows)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    backend: str | None = None,
    **arguments: Any,
) -> Plan:
    """What `attention` would do with these arguments, without doing it.

    Returns:
        a `Plan`: ``.chosen`` is the backend, its text the table of candidates and reasons. A named
        ``backend`` that objects, and a variant that refuses, show as ``chosen`` None.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 8, 1024, 64).unbind()
        >>> attnzoo.explain(q, k, v, "ssmax", is_causal=True).chosen
        'sdpa'
    """
    ready = prepare(q, k, v, variant, arguments)
    check_backend(backend)
    if ready.unsupported is not None:
        return Plan(variant, None, (), ready.unsupported)
    every = candidates(variant, (*ready.forms, ready.definition), ready.call)
    found = tuple(_with_note(candidate, ready.call) for candidate in every)
    able = [c.backend for c in found if c.reason is None and backend in (None, c.backend)]
    return Plan(variant, able[0] if able else None, found)


def _with_note(candidate: Candidate, call: Call) -> Candidate:
    # For `explain` only: in a compiled call the work is a symbol, which no format takes.
    form = candidate.form
    if BACKENDS[candidate.backend].scan is None or not isinstance(form, Linear):
        return candidate
    return candidate._replace(note=f": {linear_work(form, call):.2g} × the work of all pairs")
