"""The parts of a variant: its definition, its parameters, and its forms for fast backends.

A *definition* computes the dense weights in plain PyTorch. A *form* describes the same weights in a
way that the fast backends can run. Forms carry *vectors* and never parameters: a per-query vector
is a Python float, or a tensor that broadcasts to ``(B, H, Nq)`` in fp32 (fp64 for fp64 inputs). A
per-key vector broadcasts to ``(B, H, Nk)``. A variant computes its vectors from its parameters in
PyTorch, a backend returns one gradient per vector, and autograd propagates it to the parameters.
Variants therefore need no backward of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from attnzoo.core.activation import Activation
from attnzoo.core.checks import check_callable, check_type, is_int, is_number, shown
from attnzoo.core.distance import Distance

PerQuery = Tensor | float
PerKey = Tensor | float
Normalize = Literal["none", "sum", "threshold", "select"]
# The fields that only one kind of normalization may have.
_NORMALIZE_OF = {
    "factor": "none", "sink": "sum", "eps": "sum", "keep": "select", "mass": "select",
}  # fmt: skip
_NORMALIZE = ("none", "sum", "threshold", "select")


class Statistics(NamedTuple):
    """Statistics of each row of s = logits + bias, before the gain.

    Attributes:
        lse: log Σ_j exp(s_ij), (B, H, Nq).
        entropy: Entropy of softmax(s_i) in nats, (B, H, Nq).
    """

    lse: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class FromStatistics:
    """A gain that is computed from `Statistics`, which cost one more pass over the keys.

    Attributes:
        gain: ``gain(statistics) -> gain``, (B, H, Nq).
        differentiable: Whether gradients flow through the statistics.
    """

    gain: Callable[[Statistics], Tensor]
    differentiable: bool

    def __post_init__(self) -> None:
        check_callable("gain of FromStatistics", self.gain)
        check_type("differentiable of FromStatistics", self.differentiable, bool)

    def of(self, statistics: Statistics) -> Tensor:
        """The gain in the dtype of the statistics."""
        return self.gain(statistics).to(statistics.lse.dtype)


def _check_vector(field: str, vector: Any, other: str) -> None:
    """Raise unless the vector is a tensor, or a number that is not NaN."""
    # Numbers come first, because isinstance is slow for the class Tensor.
    if isinstance(vector, bool) or not isinstance(vector, (float, int, Tensor)):
        raise TypeError(f"{field} must be a float, a tensor or {other}, got {shown(vector)}")
    if isinstance(vector, float) and vector != vector:
        raise ValueError(f"{field} must not be NaN, got {shown(vector)}")


@dataclass(frozen=True)
class Pairwise:
    """The form w_ij = c_i · φ(s_ij − τ_i) of the scores s_ij.

    z_ij = scale · q_i·k_j, or softcap · tanh(scale · q_i·k_j / softcap) with a softcap.
    s_ij = gain_i · a(t_ij) · z_ij + bias_ij + m(t_ij) + (key_bias_j − offset_i)

    ``bias`` is the float mask plus ALiBi or the table `relative_bias`, and t_ij = |p_i − p_j| the
    distance of query and key.
    key_bias_j − offset_i is formed first, so that both may be much larger than the difference.
    The kernels compute exp in base 2, where numbers beyond ±2.3e38 overflow: such a key_bias may
    hide its key, and such an offset may give NaN.

    ============  =========================  ==========================
    normalize     τ_i                        c_i
    ============  =========================  ==========================
    "none"        0                          ``factor``
    "sum"         0                          1 / (Σ_j μ + μ(``sink``) + ``eps``)
    "threshold"   solved so that Σ_j φ = 1   1
    "select"      0                          1 / Σ φ over the largest scores, see ``keep``, ``mass``
    ============  =========================  ==========================

    μ is φ, unless the activation has a ``normalizer``.

    Attributes:
        activation: φ. "threshold" needs one with ``alpha`` or ``convex``, "select" one that
            vanishes at −∞.
        normalize: One of the names in the table.
        gain: Per-query vector, or a `FromStatistics`.
        offset: Per-query vector; required by "none", otherwise None is 0.
        shape: Per-query vector; required by activations with a ``shape_slope``.
        sink: Per-query vector, the score of one additional key with value 0; optional with "sum".
        keep: Number of keys per query with a nonzero weight. "select" requires this or ``mass``.
        mass: Softmax weight in (0, 1) that the selected keys reach. A key is selected if the
            weights of the keys before it, by (score descending, index ascending), sum to less than
            ``mass``. Only with exp.
        key_bias: Per-key vector; None is 0.
        distance: A gain a and a bias m by distance; None is a = 1 and m = 0.
        decay: The second argument of ``distance``: a float, or a tensor that broadcasts to
            (B, H, 1).
        factor: Per-query vector that multiplies the weights; None is 1. Only with "none".
        eps: A float >= 0 that is added to the normalizer; only with "sum" and not with exp, where
            a sink of log(eps) is the same.

    Example:
        >>> import attnzoo
        >>> from attnzoo.core.activations import EXP
        >>> form = attnzoo.Pairwise(EXP, "sum", gain=0.5)  # softmax at temperature 2
        >>> form.softmax
        True
    """

    activation: Activation
    normalize: Normalize
    gain: PerQuery | FromStatistics = 1.0
    offset: PerQuery | None = None
    shape: PerQuery | None = None
    sink: PerQuery | None = None
    keep: int | None = None
    mass: float | None = None
    key_bias: PerKey | None = None
    distance: Distance | None = None
    decay: Tensor | float | None = None
    factor: PerQuery | None = None  # not a gain, which would scale the bias too
    eps: float = 0.0
    kind = "pairwise"

    def __post_init__(self) -> None:
        if not isinstance(self.activation, Activation):
            raise TypeError(f"activation must be an Activation, got {shown(self.activation)}")
        how = self.normalize
        if not isinstance(how, str) or how not in _NORMALIZE:
            raise ValueError(f"normalize must be one of {', '.join(_NORMALIZE)}, got {shown(how)}")
        if not isinstance(self.gain, FromStatistics):
            _check_vector("gain", self.gain, "FromStatistics")
        for field in ("offset", "shape", "sink", "key_bias", "decay", "factor"):
            if (vector := getattr(self, field)) is not None:
                _check_vector(field, vector, "None")
        if self.keep is not None and not (is_int(self.keep) and self.keep >= 1):
            raise ValueError(f"keep must be an int of at least 1, got {shown(self.keep)}")
        if self.mass is not None and not (is_number(self.mass) and 0 < self.mass < 1):
            raise ValueError(f"mass must be a number above 0 and below 1, got {shown(self.mass)}")
        if not is_number(self.eps):
            raise TypeError(f"eps must be a finite number >= 0, got {shown(self.eps)}")
        for field, needed in _NORMALIZE_OF.items():
            value = getattr(self, field)
            if value is not None and needed != how and not (field == "eps" and value == 0):
                none = "0" if field == "eps" else "None"
                raise ValueError(
                    f"{field} must be {none} with normalize={how!r}, got {shown(value)}"
                )
        if how == "none" and self.offset is None:
            raise ValueError("offset must be given with normalize='none', got None")
        if how == "select" and (self.keep is None) == (self.mass is None):
            raise ValueError(
                "exactly one of keep and mass must be given with normalize='select', got "
                f"{shown(self.keep)} and {shown(self.mass)}"
            )
        self._check_activation()
        if self.distance is not None or self.decay is not None or self.eps:
            self._check_terms()
        if isinstance(self.gain, FromStatistics) and (added := self._added()):
            raise ValueError(f"{added[0]} must be None with a gain from statistics")

    def _check_activation(self) -> None:
        how, phi, family = self.normalize, self.activation, self.activation.shape_slope is not None
        if how == "threshold" and not phi.solvable:
            raise ValueError(
                f"normalize='threshold' needs an activation with alpha or convex, {phi.name} has "
                "neither"
            )
        if how == "select" and not phi.vanishes:
            raise ValueError(
                f"normalize='select' needs an activation that vanishes at −∞, {phi.name} does not"
            )
        if self.mass is not None and not phi.exponential:
            raise ValueError(
                f"mass must be None for {phi.name}, as it needs φ = exp, got {shown(self.mass)}"
            )
        if family != (self.shape is not None):
            needed, has = ("given", "has a") if family else ("None", "has no")
            raise ValueError(
                f"shape must be {needed} for {phi.name}, which {has} shape_slope, "
                f"got {shown(self.shape)}"
            )
        if phi.normalizer is not None or phi.shifted:
            if how != "sum":
                raise ValueError(
                    f"normalize must be 'sum' for {phi.name}, which has a normalizer or is "
                    f"shifted, got {how!r}"
                )
            if phi.shifted and self.sink is not None:
                raise ValueError(
                    f"sink must be None for {phi.name}, which is shifted, got {shown(self.sink)}"
                )

    def _check_terms(self) -> None:
        if self.distance is not None and not isinstance(self.distance, Distance):
            raise TypeError(f"distance must be a Distance or None, got {shown(self.distance)}")
        if (self.distance is None) != (self.decay is None):
            raise ValueError(
                "distance and decay must be given together, got "
                f"{shown(self.distance)} and {shown(self.decay)}"
            )
        if (
            self.distance is not None
            and isinstance(self.decay, Tensor)
            and self.decay.requires_grad
        ):
            self.distance.check_slopes()
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps must be a finite number >= 0, got {shown(self.eps)}")
        if self.eps and self.activation.exponential:
            raise ValueError(
                f"eps must be 0 for {self.activation.name}, got {shown(self.eps)}; use a sink of "
                "log(eps)"
            )

    def _added(self) -> list[str]:
        """The terms of the scores in use, which statistics of the logits do not contain."""
        names = ("key_bias", "distance") + (("offset",) if self.normalize != "none" else ())
        return [name for name in names if getattr(self, name) is not None]

    @property
    def extras(self) -> tuple[str, ...]:
        """The fields in use that a backend may lack, in the words of `Pairwise`."""
        phi = self.activation
        used = {
            "key_bias": self.key_bias is not None,
            "offset": self.offset is not None and self.normalize != "none",
            "distance": self.distance is not None,
            "factor": self.factor is not None,
            "eps": bool(self.eps),
            "normalizer": phi.normalizer is not None or phi.shifted,
        }
        return tuple([name for name, present in used.items() if present])

    @property
    def softmax(self) -> bool:
        """Whether this is a softmax over all keys (and the sink)."""
        return self.normalize == "sum" and self.activation.exponential

    @property
    def has_lse(self) -> bool:
        """Whether the normalizer is a sum of exp, over all keys or the largest scores."""
        return self.normalize in ("sum", "select") and self.activation.exponential


@dataclass(frozen=True)
class Linear:
    """The form out_i = ψ(scale·q_i)·S_i / (ψ(scale·q_i)·z_i) with a feature map ψ.

    S_i = Σ_j ψ(k_j) v_jᵀ and z_i = Σ_j ψ(k_j), over the visible keys.

    Attributes:
        features: ``features(x, positions) -> ψ``, from (..., N, D) and (N,) to (..., N, F).
        size: ``size(D) -> F``.
        cancels: Whether features can be negative, so that ψ(q)·ψ(k) can be far below |ψ(q)||ψ(k)|.
            Rounding errors grow with |ψ(q)||ψ(k)|. If True, a CPU computes the sums in fp64.
        query_features: The feature map of queries; None: ``features``.
        per_query_head: Whether ``features`` differ between query heads that share a head of keys;
            keys and values are then repeated for each query head.

    Example:
        >>> import torch, attnzoo
        >>> elu = attnzoo.Linear(lambda x, positions: torch.nn.functional.elu(x) + 1, lambda d: d)
        >>> elu.features(torch.zeros(5, 8), torch.arange(5)).shape, elu.size(8)
        (torch.Size([5, 8]), 8)
    """

    features: Callable[[Tensor, Tensor], Tensor]
    size: Callable[[int], int]
    cancels: bool = False
    query_features: Callable[[Tensor, Tensor], Tensor] | None = None
    per_query_head: bool = False
    kind = "linear"

    def __post_init__(self) -> None:
        for field in ("features", "size", "query_features"):
            check_callable(f"{field} of Linear", getattr(self, field), field == "query_features")
        for field in ("cancels", "per_query_head"):
            check_type(f"{field} of Linear", getattr(self, field), bool)

    def of_queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """The features of scaled queries."""
        return (self.query_features or self.features)(x, positions)


@dataclass(frozen=True)
class Shares:
    """The form w_ij = β_ij · Π_l (1 − β_il) over the visible keys l after key j, with β = σ(s).

    s_ij = z_ij + bias_ij, as in `Pairwise`. Each query visits its keys from the last one back, and
    each key takes the share β_ij of what the keys after it have left. A query sees only keys
    before its own position, so causal calls have no weight on the diagonal.

    With the softplus −log(1 − σ(s)), and g_ij = w_ij dO_i·v_j in the backward:

        w_ij = exp(s_ij − Σ_{l ≥ j} softplus(s_il))      dS_ij = g_ij − β_ij Σ_{l ≤ j} g_il

    Example:
        >>> import attnzoo
        >>> attnzoo.Shares().kind
        'shares'
    """

    kind = "shares"


@dataclass(frozen=True)
class Definition:
    """The form that every variant has: its definition, with the parameters of one call.

    ``head_tensors`` names the parameters of kind "tensor", (H, …). Other tensors broadcast against
    the scores.
    """

    name: str
    weights: Callable[..., Tensor]
    scores: Callable[..., Tensor] | None
    params: dict[str, Any]
    head_tensors: tuple[str, ...] = ()
    kind = "definition"


@dataclass(frozen=True)
class NoForm:
    """The reason why a variant has no form of one kind for a call.

    Attributes:
        kind: "pairwise", "linear" or "shares".
        why: The reason, shown by `explain` and in errors.
    """

    kind: str
    why: str

    def __post_init__(self) -> None:
        if self.kind not in (kinds := (Pairwise.kind, Linear.kind, Shares.kind)):
            raise ValueError(
                f"kind of NoForm must be one of {', '.join(kinds)}, got {shown(self.kind)}"
            )
        check_type("why of NoForm", self.why, str)


Form = Pairwise | Linear | Shares | Definition | NoForm
