"""What a backend is: its name, the kinds of form it is made for, and two functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear


class Unsupported(Protocol):
    def __call__(self, form: Form, call: Call) -> str | None:
        """Why the backend cannot run the form for this call; None where it can."""
        ...


class Run(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, H, Nq, Dv), and lse (B, H, Nq) where the call asks for it."""
        ...


class Scan(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, form: Linear, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A causal linear form from a state to a state: the output, and the sums after it."""
        ...


@dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute a form. `attnzoo.backends.selection` lists them all."""

    name: str
    kinds: tuple[str, ...]  # of form: "pairwise", "linear", "definition"
    unsupported: Unsupported
    run: Run
    scan: Scan | None = None
