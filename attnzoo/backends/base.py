"""The backend interface: a name, the kinds of form it accepts, and its functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear, Pairwise


class Unsupported(Protocol):
    def __call__(self, form: Form, call: Call) -> str | None:
        """Return why the backend cannot run the form for this call, or None if the backend can."""
        ...


class Run(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, H, Nq, Dv), and lse (B, H, Nq) if the call asks for it."""
        ...


class MaxLogits(Protocol):
    def __call__(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Return the largest logit of each head, (H,), for a call without softcap and bias."""
        ...


class Scan(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a causal linear form from the state ``sums``; return the output and the new state."""
        ...


def unsupported_extras(form: Pairwise, call: Call, *supported: str) -> str | None:
    """Return why a backend cannot run the form, if it runs only these of `Pairwise.extras`.

    ``supported`` may also contain "softcap".
    """
    used = form.extras if call.softcap is None else (*form.extras, "softcap")
    lacking = [name for name in used if name not in supported]
    return f"does not support {', '.join(lacking)} (tiled does)" if lacking else None


@dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute a form. `attnzoo.backends.BACKENDS` lists all of them.

    ``scan`` is None for backends that cannot continue from the state of a linear form.
    ``max_logits`` is None for backends that have no scores; `tiled` then computes the logits.
    ``walks_segments``: whether the backend computes only the scores of keys near a query's own
    segment. A call with segments is not split for such a backend; see `functional.packed`.
    ``splits_segments``: whether it is split nevertheless, because calls on segments are faster.
    ``reads_pages``: whether the backend runs calls with `Call.pages`.
    ``any_alignment``: whether the last query may have another position than the last key.
    """

    name: str
    kinds: tuple[str, ...]  # of form: "pairwise", "linear", "shares", "definition"
    unsupported: Unsupported
    run: Run
    scan: Scan | None = None
    max_logits: MaxLogits | None = None
    walks_segments: bool = False
    splits_segments: bool = False
    reads_pages: bool = False
    any_alignment: bool = False
