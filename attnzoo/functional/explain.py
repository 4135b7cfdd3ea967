"""explain(): which backends can run a call, in which order, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.selection import Candidate, candidates, check_backend, linear_work
from attnzoo.core.arguments import check_tensors
from attnzoo.core.call import Call
from attnzoo.core.checks import check_dense, shown
from attnzoo.core.forms import Linear
from attnzoo.core.varlen_arguments import Packed, TokenParams, check_packed
from attnzoo.functional import packed
from attnzoo.functional.padded import (
    PaddedRows,
    as_one_row,
    paged_call,
    reads_pages,
    with_used_keys,
)
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
        gathers: Whether keys of a paged cache are copied first, because no backend that reads pages
            can run the call. ``chosen`` and ``candidates`` are then those of the call on the copy.
        parts: If the call is split by its segments, the number of calls on segments of equal
            lengths, each a batch. ``chosen`` and ``candidates`` are then those of the call with the
            most scores, or of one that is unsupported. None: the call is not split.
    """

    variant: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    reason: str | None = None
    parts: int | None = None
    gathers: bool = False

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.variant}: unsupported\n  {self.reason}"
        split = {None: "", 1: ", split by segments into one batch"}
        words = split.get(self.parts, f", split by segments into {self.parts} calls")
        gathered = ", with keys gathered from their pages" if self.gathers else ""
        backend = self.chosen or "the named backend cannot run this call"
        lines = [f"{self.variant}: {backend}{gathered}{words}"]
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
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **params: Tensor | float | None,
) -> Plan:
    """Which backend `attention` would use for these arguments, and why, without running it.

    With a ``block_table``, the backend of `varlen_attention` for as many queries in each sequence.

    Args:
        q, k, v and all others: As for `attention`.
        seqused_k: As for `varlen_attention`. Needs ``block_table``.
        block_table: As for `varlen_attention`. k and v are then pages, and q is (S, H, Nq, D).
            ``attn_mask`` and ``segment_ids`` must be None, and parameters have at most one value
            per head.

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
    backend = named_backend(backend)
    check_backend(backend)
    if block_table is not None:
        inputs = _paged_inputs((q, k, v), arguments, seqused_k, block_table)
        return _plan_of_pages(q, inputs, variant, arguments | params, backend)
    if seqused_k is not None:
        raise TypeError(
            f"seqused_k must be None without block_table, got {shown(seqused_k)}; explain has no "
            "cu_seq_k"
        )
    ready = prepare(q, k, v, variant, arguments | params)
    runs = None if ready.unsupported is not None else packed.runs_of(ready, backend)
    return _plan(ready, backend) if runs is None else _plan_of_parts(ready, runs, backend)


def _plan_of_parts(ready: ValidatedCall, runs: packed.Runs, backend: str | None) -> Plan:
    with torch.no_grad():
        parts = [part.ready for part in packed.parts_of(ready, runs)]
    plans = [_plan(part, backend) for part in parts]
    plan = next((plan for plan in plans if plan.chosen is None), plans[0])
    return replace(plan, parts=len(plans))


def _paged_inputs(
    tensors: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any], used: Any, table: Any
) -> Packed:
    """The inputs of `varlen_attention` for queries (S, H, Nq, D) and pages of keys and values."""
    q, k, v = tensors
    for name in ("attn_mask", "segment_ids"):
        if (value := arguments[name]) is not None:
            raise TypeError(f"{name} must be None with block_table, got {shown(value)}")
    check_tensors("B, H, N, D", {"q": q})
    check_dense("k", k)
    check_dense("block_table", table)
    rows, queries = q.shape[0], q.shape[2]
    ends = torch.arange(rows + 1, device=q.device) * queries
    most = table.shape[-1] * k.shape[1] if table.dim() == 2 and k.dim() == 4 else 0
    inputs = q.transpose(1, 2).flatten(0, 1), k, v
    longest = queries, most
    return check_packed(
        inputs, (ends, None), longest, arguments["enable_gqa"], used, table, names=("q", "k", "v")
    )


def _plan_of_pages(
    q: Tensor, inputs: Packed, variant: str, options: dict[str, Any], backend: str | None
) -> Plan:
    reads = reads_pages(inputs, backend)
    if reads or inputs.lengths is None or not inputs.attends:
        visible = PaddedRows.of_keys(inputs, inputs.longest[1]).valid[:, None, None]
        ready = paged_call(q, inputs, variant, options | {"attn_mask": visible})
        if reads and not options["return_max_logits"]:
            plan = _plan(ready, backend)
            if plan.chosen is not None:
                return plan
        ready = ready._replace(call=replace(ready.call, pages=None))
        return replace(_plan(ready, backend), gathers=True)
    inputs, _ = with_used_keys(inputs, TokenParams({}, set(), set()))
    ready = prepare(*as_one_row(inputs), variant, options)
    assert inputs.lengths is not None
    runs = packed.runs_of_sequences(*inputs.lengths)
    return replace(_plan_of_parts(ready, runs, backend), gathers=True)


def _plan(ready: ValidatedCall, backend: str | None) -> Plan:
    name, call = ready.variant.name, ready.call
    if ready.unsupported is not None:
        return Plan(name, None, (), ready.unsupported)
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
