"""Groups of operands that operators on pairwise forms share. See `attnzoo.backends.operator`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.core.activation import Activation
from attnzoo.core.distance import Distance
from attnzoo.core.forms import Pairwise


class Layout(NamedTuple):
    """Scale, mask and layout arguments. Kernels take a converted mask and relative bias."""

    scale: float
    left: int | None
    right: int | None
    mask: Tensor | None  # [B|1, H|1, Nq|1, Nk]
    q_segments: Tensor | None  # int64 [B, Nq]
    k_segments: Tensor | None  # int64 [B, Nk]
    relative_bias: Tensor | None  # see `Call`
    softcap: float | None = None


class Terms(NamedTuple):
    """What a form adds to the scores, or multiplies them or the weights with, beside `Vectors`."""

    key_bias: Tensor | None = None  # broadcasts to (B, H, Nk)
    decay: Tensor | None = None  # broadcasts to (B, H, 1)
    factor: Tensor | None = None  # broadcasts to (B, H, Nq)


class Dropout(NamedTuple):
    """Dropout of the weights; see `attnzoo.backends.dropout`."""

    seed: Tensor | None = None  # int64 (); None without dropout
    dropout_p: float = 0.0


NO_DROPOUT = Dropout()


class Vectors(NamedTuple):
    """The per-query vectors of a form. Kernels receive a solved threshold τ as ``offset``."""

    gain: Tensor | None = None
    offset: Tensor | None = None
    shape: Tensor | None = None
    sink: Tensor | None = None


class Rule(NamedTuple):
    """How weights follow from scores: the fields of a `Pairwise` form that are not tensors."""

    activation: Activation
    normalize: str
    keep: int | None = None
    mass: float | None = None
    eps: float = 0.0
    distance: Distance | None = None

    @property
    def online(self) -> bool:
        """Whether τ is the maximum of the scores: a normalized exp."""
        return self.normalize in ("sum", "select") and self.activation.exponential


def rule_of(form: Pairwise) -> Rule:
    return Rule(
        form.activation, form.normalize, form.keep, form.mass, float(form.eps), form.distance
    )  # fmt: skip
