"""What a variant is: its definition, its parameters and the forms from which the fast paths follow.

A *row* is one fp32 number per (batch, head, query): a tensor that broadcasts to ``(B, H, Nq)``
(fp64 for fp64 inputs), or a Python float. Forms carry rows and never parameters: a variant turns
its parameters into rows in torch, so autograd reduces a row's gradient back to the parameter and
no variant needs a backward of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import e, log2
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from attnzoo.core.checks import is_int, shown

if TYPE_CHECKING:
    from attnzoo.core.call import Call

PerQuery = Tensor | float
Normalize = Literal["none", "sum", "threshold", "select"]
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()


@dataclass(frozen=True)
class Activation:
    """φ(s) and φ'(s); with ``shape`` a family of them (entmax: α), one member per query.

    value(s, shape) -> φ, slope(s, φ, shape) -> φ'. ``value`` may overwrite ``s``: a caller that
    needs the scores again passes a copy.
    shape_slope(s, φ, shape) -> ∂φ/∂shape, of a family; None where there is no shape.
    vanishes: φ(−∞) = 0, so that a masked score may be −∞; otherwise φ itself is masked.
    triton: the Triton implementation as "module:name", so that nothing here imports Triton: a
        ``@triton.jit`` function of (x, shape) that returns (φ, φ') and gets x = ``unit`` · s. Both
        must be 0 at x = −∞ if φ vanishes there.

    What backends know of φ beyond that is said here, never guessed from the name:

    exponential: φ = exp. Its sum is a softmax: it has a log-sum-exp, a backend may take a running
        maximum off the scores, and torch's fused softmax may stand for it. ``unit`` is log2 e.
    alpha: φ is the q-exponential [1 + (α−1)x]_+^{1/(α−1)} of this α in (1, 2]; "shape" if α is the
        shape. Thresholds are solved fast, and in kernels. ``unit`` is 1.
    convex: φ is convex, φ(−∞) = 0 and φ(0) ≥ 1: `tiled` solves for a threshold by Newton's method.
        A q-exponential need not say so.
    bounded: φ ≤ 1, which fp16 holds without a normalizer.

    For torch.compile it must be made before the call, at the top of a module say.
    """

    name: str
    value: Callable[[Tensor, Tensor | None], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    shape_slope: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    vanishes: bool = True
    triton: str | None = None
    unit: float = 1.0
    exponential: bool = False
    alpha: float | Literal["shape"] | None = None
    convex: bool = False
    bounded: bool = False

    def __post_init__(self) -> None:
        what = f"activation {shown(self.name)}"
        for field in ("vanishes", "exponential", "convex", "bounded"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"{what}: {field} must be a bool, got {shown(getattr(self, field))}"
                )
        alpha, family = self.alpha, self.shape_slope is not None
        number = isinstance(alpha, float) and 1 < alpha <= 2
        if alpha is not None and not (alpha == "shape" if family else number):
            allowed = (
                "'shape' with a shape_slope, or None" if family else "a float in (1, 2] or None"
            )
            raise ValueError(f"{what}: alpha must be {allowed}, got {shown(alpha)}")
        if (self.exponential or self.solvable) and not self.vanishes:
            raise ValueError(f"{what}: vanishes must be True, as exponential, alpha and convex say")
        unit = log2(e) if self.exponential else 1.0 if alpha is not None else self.unit
        if self.triton is not None and self.unit != unit:
            why = "log2(e) of an exponential" if self.exponential else "1.0 where alpha is given"
            raise ValueError(f"{what}: unit must be {why}, got {shown(self.unit)}")

    @property
    def solvable(self) -> bool:
        """A threshold can be solved for."""
        return self.convex or self.alpha is not None


class Statistics(NamedTuple):
    """Of the logits before the gain, with the bias: lse = log Σ exp(s), and the entropy in nats."""

    lse: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class FromStatistics:
    """A row computed from `Statistics`, which the backend takes in one extra pass over the keys."""

    gain: Callable[[Statistics], Tensor]
    differentiable: bool


@dataclass(frozen=True)
class Pairwise:
    """w_ij = c_i · φ(s_ij − τ_i) with s_ij = gain_i · scale · q_i·k_j + bias_ij.

    ============  =========================  ==========================
    normalize     τ_i                        c_i
    ============  =========================  ==========================
    "none"        ``offset``                 1
    "sum"         0                          1 / (Σ_j φ + φ(``sink``))
    "threshold"   solved so that Σ_j φ = 1   1
    "select"      0                          1 / Σ φ over the ``keep`` largest scores
    ============  =========================  ==========================

    A threshold needs an activation with ``alpha`` or ``convex``, a selection one that vanishes at
    −∞. ``shape`` is for an activation with a ``shape_slope``.
    """

    activation: Activation
    normalize: Normalize
    gain: PerQuery | FromStatistics = 1.0
    offset: PerQuery | None = None
    shape: PerQuery | None = None
    sink: PerQuery | None = None
    keep: int | None = None
    kind = "pairwise"

    def __post_init__(self) -> None:
        if not isinstance(self.activation, Activation):
            raise TypeError(f"activation must be an Activation, got {shown(self.activation)}")
        how = self.normalize
        takes = {"none": "offset", "sum": "sink", "threshold": "", "select": "keep"}
        if not isinstance(how, str) or how not in takes:
            raise ValueError(f"normalize must be one of {', '.join(takes)}, got {shown(how)}")
        if not isinstance(self.gain, (Tensor, float, int, FromStatistics)):
            raise TypeError(f"gain must be a row or FromStatistics, got {shown(self.gain)}")
        for field in ("offset", "shape", "sink"):
            row = getattr(self, field)
            if row is not None and not isinstance(row, (Tensor, float, int)):
                raise TypeError(f"{field} must be a row, a float or a tensor, got {shown(row)}")
        if self.keep is not None and not (is_int(self.keep) and self.keep >= 1):
            raise ValueError(f"keep must be an int of at least 1, got {shown(self.keep)}")
        for field in ("offset", "sink", "keep"):
            if getattr(self, field) is not None and takes[how] != field:
                raise ValueError(f"normalize={how!r} takes no {field}")
        if (how == "none" and self.offset is None) or (how == "select" and self.keep is None):
            raise ValueError(f"normalize={how!r} needs {takes[how]}")
        phi, family = self.activation, self.activation.shape_slope is not None
        if how == "threshold" and not phi.solvable:
            raise ValueError(
                f"normalize='threshold' needs an activation with alpha or convex, {phi.name} has "
                "neither"
            )
        if how == "select" and not phi.vanishes:
            raise ValueError(
                f"normalize='select' needs an activation that vanishes at −∞, {phi.name} does not"
            )
        if family != (self.shape is not None):
            raise ValueError(f"shape must be {'given' if family else 'None'} for {phi.name}")

    @property
    def softmax(self) -> bool:
        """Of all keys, the sink's share included: a running maximum may be taken off the scores."""
        return self.normalize == "sum" and self.activation.exponential


@dataclass(frozen=True)
class Linear:
    """o_i = ψ(scale·q_i)·S_i / ψ(scale·q_i)·z_i, S_i = Σ_j ψ(k_j) v_jᵀ, z_i = Σ_j ψ(k_j).

    features(x, positions) maps (..., N, D) and (N,) to (..., N, F); size(D) is F. ``cancels``:
    features have either sign, so that ψ(q)·ψ(k) may be far below |ψ(q)||ψ(k)|. The rounding error
    is relative to the latter, so on a CPU such sums are taken in fp64.
    """

    features: Callable[[Tensor, Tensor], Tensor]
    size: Callable[[int], int]
    cancels: bool = False
    kind = "linear"


@dataclass(frozen=True)
class Definition:
    """The form every variant has: its dense weights, with the parameters of this call bound."""

    name: str
    weights: Callable[..., Tensor]
    scores: Callable[..., Tensor] | None
    params: dict[str, Any]
    kind = "definition"


@dataclass(frozen=True)
class NoForm:
    """A form that a variant does not offer for this call, with the reason for `explain`."""

    kind: str
    why: str


Form = Pairwise | Linear | Definition | NoForm


@dataclass(frozen=True)
class Param:
    """One keyword parameter of a variant.

    ``kind`` is "per_head" (a float, a 0-dim or (H,) tensor; with ``per_token`` also (B, H, Nq)), or
    "int", "float", "bool" for a setting that never needs a gradient. ``allowed`` says in words
    what ``check`` accepts. ``init`` is the value from which `attnzoo.nn.Attention` learns the
    parameter by default; None leaves it fixed there unless asked. ``between`` is an open interval
    that a learned value is kept in.
    """

    name: str
    default: Any = REQUIRED
    kind: Literal["per_head", "int", "float", "bool"] = "per_head"
    doc: str = ""
    init: float | None = None
    per_token: bool = False
    check: Callable[[Any], Any] | None = None
    allowed: str = "finite"
    between: tuple[float, float] | None = None


def no_forms(call: Call, **params: Any) -> tuple[Form, ...]:
    return ()


def no_restriction(call: Call, **params: Any) -> str | None:
    return None


def no_state(**params: Any) -> bool:
    return False


@dataclass(frozen=True)
class Variant:
    """One member of the zoo.

    weights(q, k, call, **params) -> (B, H, Nq, Nk): the definition, dense and plain.
    forms(call, **params) -> the forms that hold for this call, the preferred one first.
    scores(q, k, call, **params) -> (B, H, Nq, Nk), −∞ where w = 0 by rule: given when the weights
        are a softmax of them (up to a sink), which is what ``return_lse`` needs.
    unsupported(call, **params) -> why this call has no meaning for the variant, or None.
    ``forms``, ``unsupported`` and ``has_state`` must depend on their arguments alone, and no
        function may write into a tensor of the call: later calls of the same sizes rely on both.
    Parameters of kind "per_head" come as a float, or as a tensor that broadcasts: (1, H, 1, 1) or
        (B, H, Nq, 1) in ``weights`` and ``scores``, against scores; (1, H, 1) or (B, H, Nq) in
        ``forms`` and ``unsupported``, against per-query vectors as `Call.log_n`.
    normalized: every row with a visible key sums to 1.
    positional: weights depend on how far a key stands from a query.
    calibrate(log_n) -> parameters with which the gain is 1 on average over rows whose log n_i is
        ``log_n`` on average. Rows with few keys then have a gain below 1 and rows with many keys
        one above 1, so a model that was trained with softmax still changes.
    example(length) -> parameters that suit sequences of up to ``length`` keys, the required ones
        among them: evals, benchmarks and tests use these where a user gives none.
    inference_only: made for models that were trained with softmax, not for training.
    has_state(**params) -> whether a linear form holds for these parameters, in every call that a
        linear form takes: `attnzoo.linear_attention` then runs, and a cache may be a state.
    use: when to use the variant, one short sentence for tables.
    identity: parameters with which the variant is softmax, for any number of keys; None where no
        parameters do that. A model that was trained with softmax then begins as what it was.
    """

    name: str
    formula: str
    paper: str
    weights: Callable[..., Tensor]
    params: tuple[Param, ...] = ()
    forms: Callable[..., tuple[Form, ...]] = no_forms
    scores: Callable[..., Tensor] | None = None
    unsupported: Callable[..., str | None] = no_restriction
    normalized: bool = True
    positional: bool = False
    calibrate: Callable[[float], dict[str, Any]] | None = None
    identity: dict[str, Any] | None = None
    example: Callable[[int], dict[str, Any]] | None = None
    inference_only: bool = False
    has_state: Callable[..., bool] = no_state
    use: str = ""
