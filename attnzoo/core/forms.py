"""The parts of a variant: its definition, its parameters, and its forms for fast backends.

A *definition* computes the dense weights in plain PyTorch. A *form* describes the same weights in a
way that the fast backends can run. Forms carry *per-query vectors* and never parameters: a
per-query vector is a Python float, or a tensor that broadcasts to ``(B, H, Nq)`` in fp32 (fp64 for
fp64 inputs). A variant computes its vectors from its parameters in PyTorch, a backend returns one
gradient per vector, and autograd propagates it to the parameters. Variants therefore need no
backward of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from attnzoo.core.activations import Activation
from attnzoo.core.checks import is_int, shown

if TYPE_CHECKING:
    from attnzoo.core.call import Call

PerQuery = Tensor | float
Normalize = Literal["none", "sum", "threshold", "select"]
# The field that only one kind of normalization may have.
_EXTRA = {"none": "offset", "sum": "sink", "threshold": "", "select": "keep"}
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()


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


@dataclass(frozen=True)
class Pairwise:
    """The form w_ij = c_i · φ(s_ij − τ_i) with s_ij = gain_i · scale · q_i·k_j + bias_ij.

    ============  =========================  ==========================
    normalize     τ_i                        c_i
    ============  =========================  ==========================
    "none"        ``offset``                 1
    "sum"         0                          1 / (Σ_j φ + φ(``sink``))
    "threshold"   solved so that Σ_j φ = 1   1
    "select"      0                          1 / Σ φ over the ``keep`` largest scores
    ============  =========================  ==========================

    Attributes:
        activation: φ. "threshold" needs one with ``alpha`` or ``convex``, "select" one that
            vanishes at −∞.
        normalize: One of the names in the table.
        gain: Per-query vector, or a `FromStatistics`.
        offset: Per-query vector; required by "none".
        shape: Per-query vector; required by activations with a ``shape_slope``.
        sink: Per-query vector, the score of one additional key with value 0; optional with "sum".
        keep: Number of keys per query with a nonzero weight; required by "select".

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
    kind = "pairwise"

    def __post_init__(self) -> None:
        if not isinstance(self.activation, Activation):
            raise TypeError(f"activation must be an Activation, got {shown(self.activation)}")
        how, extra = self.normalize, _EXTRA
        if not isinstance(how, str) or how not in extra:
            raise ValueError(f"normalize must be one of {', '.join(extra)}, got {shown(how)}")
        # Numbers come first, because isinstance is slow for the class Tensor.
        if not isinstance(self.gain, (float, int, Tensor, FromStatistics)):
            raise TypeError(
                f"gain must be a float, a tensor or FromStatistics, got {shown(self.gain)}"
            )
        given = {"offset": self.offset, "shape": self.shape, "sink": self.sink}
        for field, vector in given.items():
            if vector is not None and not isinstance(vector, (float, int, Tensor)):
                raise TypeError(f"{field} must be a float, a tensor or None, got {shown(vector)}")
        if self.keep is not None and not (is_int(self.keep) and self.keep >= 1):
            raise ValueError(f"keep must be an int of at least 1, got {shown(self.keep)}")
        for field, value in (("offset", self.offset), ("sink", self.sink), ("keep", self.keep)):
            if value is not None and extra[how] != field:
                hint = ""
                if field == "offset" and how == "sum":
                    hint = "; pass it as shape of an activation with shape_slope"
                raise ValueError(
                    f"{field} must be None with normalize={how!r}, got {shown(value)}{hint}"
                )
        if (how == "none" and self.offset is None) or (how == "select" and self.keep is None):
            raise ValueError(f"{extra[how]} must be given with normalize={how!r}, got None")
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
            needed, has = ("given", "has a") if family else ("None", "has no")
            raise ValueError(
                f"shape must be {needed} for {phi.name}, which {has} shape_slope, "
                f"got {shown(self.shape)}"
            )

    @property
    def softmax(self) -> bool:
        """Whether this is a softmax over all keys (and the sink)."""
        return self.normalize == "sum" and self.activation.exponential

    @property
    def has_lse(self) -> bool:
        """Whether the normalizer is a sum of exp, over all keys or the ``keep`` largest scores."""
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

    Example:
        >>> import torch, attnzoo
        >>> elu = attnzoo.Linear(lambda x, positions: torch.nn.functional.elu(x) + 1, lambda d: d)
        >>> elu.features(torch.zeros(5, 8), torch.arange(5)).shape, elu.size(8)
        (torch.Size([5, 8]), 8)
    """

    features: Callable[[Tensor, Tensor], Tensor]
    size: Callable[[int], int]
    cancels: bool = False
    kind = "linear"


@dataclass(frozen=True)
class Definition:
    """The form that every variant has: its definition, with the parameters of one call."""

    name: str
    weights: Callable[..., Tensor]
    scores: Callable[..., Tensor] | None
    params: dict[str, Any]
    kind = "definition"


@dataclass(frozen=True)
class NoForm:
    """The reason why a variant has no form of one kind for a call.

    Attributes:
        kind: "pairwise" or "linear".
        why: The reason, shown by `explain` and in errors.
    """

    kind: str
    why: str


Form = Pairwise | Linear | Definition | NoForm


@dataclass(frozen=True)
class Param:
    """One keyword parameter of a variant.

    Attributes:
        name: Its name as a keyword of `attention`.
        default: The value if none is given; `REQUIRED` if one must be given. None is only
            accepted as a value if it is the default.
        kind: "per_head": a float, or a tensor () or (H,) that may get a gradient. "int", "float",
            "bool": a setting without a gradient.
        doc: What it means and which shapes it may have, for error messages and documentation.
        init: Initial value in `attnzoo.nn.Attention`, which then learns the parameter by default.
            None: it is learned only on request. Only for kind "per_head".
        per_token: Whether a tensor (B, H, Nq) is accepted too. Only for kind "per_head".
        check: ``check(value) -> bool`` for a number, elementwise for a tensor; None accepts all
            finite values.
        allowed: What ``check`` accepts, in words that follow "must be".
        between: Open interval (low, high) in which a learned value is kept. Only for kind
            "per_head".

    Example:
        >>> import attnzoo
        >>> attnzoo.Param("power", 1.0, doc="exponent; a number, or one per head (H,)",
        ...               check=lambda x: x > 0, allowed="above 0").kind
        'per_head'
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
    """One way to turn logits into attention weights; add it with `register_variant`.

    Only the first four fields are required. A definition (``weights``) is enough for masks, GQA,
    gradients and memory linear in N; forms make the faster backends available.

    Parameters are passed to the functions by name. A parameter of kind "per_head" is a float or a
    tensor. In ``weights`` and ``scores`` the tensor broadcasts against the scores:
    (1, H, 1, 1) or (B, H, Nq, 1). In ``forms`` and ``unsupported`` it broadcasts against per-query
    vectors such as ``call.log_n``: (1, H, 1) or (B, H, Nq).

    Attributes:
        name: The name by which `attention` finds it; a Python identifier.
        formula: The formula of the weights, for tables.
        paper: Citation, such as "Nakanishi 2025, arXiv:2501.19399".
        weights: The definition, ``weights(q, k, call, **params) -> (B, H, Nq, Nk)``, in plain
            PyTorch, 0 for invisible keys, in the dtype of ``call.scores(q, k)``.
        params: Its parameters.
        forms: ``forms(call, **params)`` -> a tuple of forms, the preferred one first. Each form
            must give the same weights as the definition in this call.
        scores: ``scores(q, k, call, **params) -> (B, H, Nq, Nk)`` if the weights are a softmax of
            these scores (up to a sink). Visible keys that the variant drops, as topk does, have
            the score −∞. Required for ``return_lse``.
        unsupported: ``unsupported(call, **params)`` -> the reason why this call has no meaning for
            the variant, or None.
        normalized: Whether every row with a visible key sums to 1.
        positional: Whether weights depend on the distance between query and key.
        calibrate: ``calibrate(log_n)`` -> parameters with which the mean gain is 1, if ``log_n`` is
            the mean of log n_i over the rows. Rows with fewer keys get a gain below 1, rows with
            more keys a gain above 1. The outputs of a trained softmax model therefore still change.
        identity: Parameters with which the variant equals softmax for any number of keys, so that
            a model trained with softmax keeps its outputs; None if there are none.
        example: ``example(length)`` -> parameters suited to at most ``length`` keys. All required
            parameters must be included. Evals, benchmarks and tests use them unless others are
            given.
        inference_only: Whether it is meant for models trained with softmax, not for training.
        has_state: ``has_state(**params)`` -> whether a linear form exists for these parameters. If
            so, `linear_attention` supports it, and decoding can use a state of constant size.
        use: When to use it, for tables: one or two short sentences, 100 characters at most.
        output_defaults: Defaults of parameters in an output layer (`attnzoo.losses`), where they
            differ from those in attention.

    Notes:
        ``forms``, ``unsupported`` and ``has_state`` must depend on their arguments only, and no
        function may write into a tensor of the call: results are reused in later calls of the same
        sizes.
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
    output_defaults: dict[str, Any] | None = None
