"""explain(): which backends can run a call, in which order, and why."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.selection import Candidate, candidates, check_backend, linear_work
from attnzoo.core.call import Call
from attnzoo.core.forms import Linear
from attnzoo.functional import packed
from attnzoo.functional.prepare import ValidatedCall, prepare
from attnzoo.functional.use_backend import named_backend


@dataclass(frozen=True)
class Plan:
    """Which backend `attention` would use for a call, and why; returned by `explain`.

    ``str(plan)`` is a table with one line per candidate, in the order of preference.

    Attributes:
        variant: The name of the variant.
        chosen: The name of the backend; None if the call is unsupported.
        candidates: Pairs of a backend and a form, the preferred one first. Each has the fields
            ``backend`` (a name), ``form``, ``reason`` (why it cannot run the call, or None) and
            ``note``.
        reason: Why the variant does not support the call, or None.
        parts: If the call is split by its segments, the number of calls on segments of equal
            lengths, each a batch. ``chosen`` and ``candidates`` are then those of the call with the
            most scores, or of one that is unsupported. None: the call is not split.
    """

    variant: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    reason: str | None = None
    parts: int | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.variant}: unsupported\n  {self.reason}"
        split = {None: "", 1: ", split by segments into one batch"}
        words = split.get(self.parts, f", split by segments into {self.parts} calls")
        lines = [f"{self.variant}: {self.chosen}{words}"]
        seen = False
        for backend, form, reason, note in self.candidates:
            chosen = reason is None and backend == self.chosen and not seen
            seen = seen or chosen
            text = reason or ("chosen" if chosen else "supported") + note
            lines.append(f"  {backend:<12} {form.kind:<11} {text}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | tuple[int, int] | None = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **params: Tensor | float | None,
) -> Plan:
    """Which backend `attention` would use for these arguments, and why, without running it.

    Args:
        q, k, v and all others: As for `attention`.

    Returns:
        A `Plan`. Where `attention` would raise because the variant or the named backend does not
        support the call, ``plan.chosen`` is None.

    Raises:
        ValueError: An argument has a wrong value or shape.
        TypeError: An argument has a wrong type or dtype, or a parameter is unknown or missing.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 8, 1024, 64).unbind()
        >>> attnzoo.explain(q, k, v, "ssmax", is_causal=True).chosen
        'sdpa'
    """
    arguments = dict(
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        alibi=alibi,
        relative_bias=relative_bias,
        segment_ids=segment_ids,
        softcap=softcap,
        dropout_p=dropout_p,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    ready = prepare(q, k, v, variant, arguments | params)
    backend = named_backend(backend)
    check_backend(backend)
    if ready.unsupported is not None:
        return Plan(variant, None, (), ready.unsupported)
    runs = packed.runs_of(ready, backend)
    if runs is None:
        return _plan(ready, backend)
    with torch.no_grad():
        parts = [part.ready for part in packed.parts_of(ready, runs)]
    plans = [_plan(part, backend) for part in parts]
    plan = next((plan for plan in plans if plan.chosen is None), plans[0])
    return replace(plan, parts=len(plans))


def _plan(ready: ValidatedCall, backend: str | None) -> Plan:
    name, call = ready.variant.name, ready.call
    considered = candidates(name, (*ready.forms, ready.definition), call)
    considered = tuple(_with_note(candidate, call) for candidate in considered)
    able = [c.backend for c in considered if c.reason is None and backend in (None, c.backend)]
    return Plan(name, able[0] if able else None, considered)


def _with_note(candidate: Candidate, call: Call) -> Candidate:
    # `candidates` cannot add the note: under torch.compile, `linear_work` is not a number.
    form = candidate.form
    if BACKENDS[candidate.backend].scan is None or not isinstance(form, Linear):
        return candidate
    return candidate._replace(note=f": {linear_work(form, call):.2g} × the cost of a pairwise form")
