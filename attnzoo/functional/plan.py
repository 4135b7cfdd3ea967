"""explain() and the choice of a backend: candidates in the order of preference, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.backends.selection import BACKENDS, linear_work, preference
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear, NoForm
from attnzoo.core.values import shown
from attnzoo.functional.preparation import Prepared, prepare, raise_refusal


class Candidate(NamedTuple):
    backend: str
    form: Form
    objection: str | None
    note: str = ""  # what decided its place


@dataclass(frozen=True)
class Plan:
    """What `attention` would do with a call, and why.

    ``chosen`` is the backend's name, or None where the variant refuses the call (``refusal`` says
    why) or a named backend objects. ``str()`` is the table of backends, forms and reasons in the
    order of preference.
    """

    variant: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.variant}: refused\n  {self.refusal}"
        rows = [f"{self.variant}: {self.chosen}"]
        taken = False
        for backend, form, objection, note in self.candidates:
            first = objection is None and backend == self.chosen and not taken
            taken = taken or first
            reason = objection or ("chosen" if first else "able") + note
            rows.append(f"  {backend:<12} {form.kind:<11} {reason}")
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
    if ready.refusal is not None:
        return Plan(variant, None, (), ready.refusal)
    found = tuple(_with_note(candidate, ready.call) for candidate in candidates(ready, ready.forms))
    able = [c.backend for c in found if c.objection is None and backend in (None, c.backend)]
    return Plan(variant, able[0] if able else None, found)


def check_backend(backend: str | None) -> None:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(
            f"backend must be None or one of {', '.join(BACKENDS)}, got {shown(backend)}"
        )


class Choice(NamedTuple):
    """A backend, the form that it runs, and the forms among which it was chosen."""

    backend: Backend
    form: Form
    forms: tuple[Form, ...]


def candidates(ready: Prepared, forms: tuple[Form, ...]) -> Iterator[Candidate]:
    """In the order of preference, each asked when its turn comes; without notes."""
    name = ready.variant.name
    forms = (*forms, ready.definition)
    kinds = {form.kind for form in forms}
    absent = [k for k in ("pairwise", "linear") if k not in kinds]
    forms += tuple(NoForm(kind, f"{name} has no {kind} form") for kind in absent)
    for backend, form in preference(forms, ready.call):
        yield Candidate(backend.name, form, backend.unsupported(form, ready.call))


def _with_note(candidate: Candidate, call: Call) -> Candidate:
    # For `explain` only: in a compiled call the work is a symbol, which no format takes.
    form = candidate.form
    if BACKENDS[candidate.backend].scan is None or not isinstance(form, Linear):
        return candidate
    return candidate._replace(note=f": {linear_work(form, call):.2g} × the work of all pairs")


def choose(ready: Prepared, backend: str | None) -> Choice:
    """The first backend in the order of preference that supports the call, and its form."""
    check_backend(backend)
    raise_refusal(ready)
    reasons, forms = [], ready.forms
    for name, form, objection, _ in candidates(ready, forms):
        if backend not in (None, name):
            continue
        if objection is None:
            return Choice(BACKENDS[name], form, forms)
        reasons.append(f"{form.kind}: {objection}")
    raise ValueError(
        f"backend {backend!r} cannot run {ready.variant.name!r} here: {'; '.join(reasons)}"
    )
