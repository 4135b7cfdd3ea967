"""A variant: its definition, its parameters and what other code must know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attnzoo.core.checks import check_callable, is_finite, is_number, shown
from attnzoo.core.forms import Form

if TYPE_CHECKING:
    from attnzoo.core.call import Call


class Required:
    """The type of `REQUIRED`."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Required()


@dataclass(frozen=True)
class Projection:
    """How a module that sees the hidden states makes a parameter: value(x·Wᵀ + b), per head.

    Attributes:
        value: ``value(projected)``, elementwise, for ``projected`` of shape (B, H, N).
        bias: Initial value of b.

    Example:
        >>> import torch, attnzoo
        >>> attnzoo.Projection(torch.nn.functional.logsigmoid, bias=5.0).bias
        5.0
    """

    value: Callable[[Tensor], Tensor]
    bias: float = 0.0

    def __post_init__(self) -> None:
        check_callable("value of a Projection", self.value)
        if not is_number(self.bias):
            raise TypeError(f"bias of a Projection must be a number, got {shown(self.bias)}")
        if not is_finite(self.bias, torch.float32):
            raise ValueError(f"bias of a Projection must be finite, got {shown(self.bias)}")


@dataclass(frozen=True)
class Param:
    """One keyword parameter of a variant.

    Attributes:
        name: Its name as a keyword of `attention`.
        default: The value if none is given; `REQUIRED` if one must be given. None is only
            accepted as a value if it is the default.
        kind: "per_head": a float, or a tensor () or (H,) that may get a gradient. "tensor": a
            tensor (H, …), such as a feature map of a linear form; see ``size``. "int", "float",
            "bool", "str": a setting without a gradient.
        doc: What it means and which shapes it may have, for error messages and documentation.
        init: Initial value in `attnzoo.nn.Attention`, which then learns the parameter by default.
            None: it is learned only on request. For kind "tensor" a function, ``init(D)`` -> the
            value of one head, a tensor of dimensions ``size(D)``. Not for other kinds.
        per_token: Whether a tensor (B, H, Nq) is accepted too. Only for kind "per_head".
        per_key: Whether a tensor (B, H, Nk) is accepted too. Only for kind "per_head", and not with
            ``per_token``.
        size: ``size(D)`` -> the dimensions after the first of a tensor (H, …), for head dimension
            D, a tuple of ints. Required by kind "tensor", and only for it.
        projection: How modules that see the hidden states make the parameter; None: they do not.
            Only with ``per_key`` or ``per_token``. If the parameter also has ``init``, modules use
            the projection only if the parameter is given as "projected".
        host_sink: Whether the parameter takes the sink logits that a host model has learned. Only
            for kind "per_head".
        check: ``check(value) -> bool`` for a number or a str, elementwise for a tensor; None
            accepts all finite values.
        allowed: What ``check`` accepts, in words that follow "must be".
        in_eval: Value that modules pass in evaluation mode; None: the value that they hold. Not for
            the kinds "per_head" and "tensor".
        between: Open interval (low, high) in which a learned value is kept; one end may be
            infinite. Only for kind "per_head".

    Example:
        >>> import attnzoo
        >>> attnzoo.Param("power", 1.0, doc="exponent; a number, or one per head (H,)",
        ...               check=lambda x: x > 0, allowed="above 0").kind
        'per_head'
    """

    name: str
    default: Any = REQUIRED
    kind: Literal["per_head", "tensor", "int", "float", "bool", "str"] = "per_head"
    doc: str = ""
    init: float | Callable[[int], Tensor] | None = None
    per_token: bool = False
    check: Callable[[Any], Any] | None = None
    allowed: str = "finite"
    between: tuple[float, float] | None = None
    per_key: bool = False
    size: Callable[[int], tuple[int, ...]] | None = None
    projection: Projection | None = None
    host_sink: bool = False
    in_eval: Any = None


def no_forms(call: Call, **params: Any) -> tuple[Form, ...]:
    return ()


def no_restriction(call: Call, **params: Any) -> str | None:
    return None


def no_state(**params: Any) -> bool:
    return False


@dataclass(frozen=True)
class SoftmaxOf:
    """The weights of a variant that has only ``scores``: their softmax."""

    scores: Callable[..., Tensor]

    def __call__(self, q: Tensor, k: Tensor, call: Call, **params: Any) -> Tensor:
        scores = self.scores(q, k, call, **params)
        if not isinstance(scores, Tensor):
            raise TypeError(f"scores must return a tensor, got {type(scores).__name__}")
        return call.softmax(scores)


def source_of(weights: Callable[..., Tensor]) -> str:
    """The field of `Variant` that gives the weights, for errors."""
    return "scores" if isinstance(weights, SoftmaxOf) else "weights"


@dataclass(frozen=True)
class Variant:
    """One way to turn logits into attention weights; add it with `register_variant`.

    Only the first three fields are required, and ``weights`` or ``scores``. Either is a definition,
    which is enough for masks, GQA, gradients and memory linear in N; forms make the faster backends
    available.

    Parameters are passed to the functions by name. A parameter of kind "per_head" is a float or a
    tensor. In ``weights`` and ``scores`` the tensor broadcasts against the scores:
    (1, H, 1, 1) or (B, H, Nq, 1), or (B, H, 1, Nk) if it is per key. In ``forms`` and
    ``unsupported`` it broadcasts against vectors such as ``call.log_n``: (1, H, 1) or (B, H, Nq),
    or (B, H, Nk). A parameter of kind "tensor" keeps its shape (H, …).

    Attributes:
        name: The name by which `attention` finds it; a Python identifier.
        formula: The formula of the weights, for tables.
        paper: Citation, such as "Nakanishi 2025, arXiv:2501.19399".
        weights: The definition, ``weights(q, k, call, **params) -> (B, H, Nq, Nk)``, in plain
            PyTorch, 0 for invisible keys, in the dtype of ``call.scores(q, k)``. By default the
            softmax of ``scores``.
        params: Its parameters.
        forms: ``forms(call, **params)`` -> a tuple of forms, the preferred one first. Each form
            must give the same weights as the definition in this call.
        scores: ``scores(q, k, call, **params) -> (B, H, Nq, Nk)`` if the weights are a softmax of
            these scores (up to a sink). Visible keys that the variant drops have the score −∞.
            Required for ``return_lse``.
        unsupported: ``unsupported(call, **params)`` -> the reason why this call has no meaning for
            the variant, or None.
        normalized: Whether every row with a visible key sums to 1.
        signed: Whether weights can be negative.
        has_logits: Whether weights depend on q and k through the logits only. If not, a softcap, a
            float mask, ALiBi, a relative bias, ``return_max_logits`` and given scores raise an
            error.
        positional: Whether weights depend on the distance between query and key.
        absolute: Whether weights depend on the position of the query. Must be True if a function
            uses ``call.places``.
        length_gain: Whether the variant multiplies the scores by a gain that follows the number of
            keys or the position of the query, or can do so. Models that already have such a factor
            cannot be converted to it.
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
            so, `linear_attention` supports it, and decoding can use a state of constant size. A
            tensor that each call passes is None here.
        use: When to use it, for tables: one or two short sentences, 100 characters at most.
        aliases: What papers call it. An error about such a name suggests the variant.
        output_defaults: Defaults of parameters in an output layer (`attnzoo.losses`), where they
            differ from those in attention.
        output_bias: ``output_bias(classes)`` -> initial value of the bias per class of an output
            layer with this number of classes. Output layers that have no such bias by default
            (`attnzoo.nn.AdaptiveSoftmax`, that of `attnzoo.nn.Transformer`) then have it. None: 0.

    Notes:
        ``forms``, ``unsupported`` and ``has_state`` must depend on their arguments only, and no
        function may write into a tensor of the call: results are reused in later calls of the same
        sizes.
    """

    name: str
    formula: str
    paper: str
    weights: Callable[..., Tensor] = None  # type: ignore[assignment]
    params: tuple[Param, ...] = ()
    forms: Callable[..., tuple[Form, ...]] = no_forms
    scores: Callable[..., Tensor] | None = None
    unsupported: Callable[..., str | None] = no_restriction
    normalized: bool = True
    signed: bool = False
    has_logits: bool = True
    positional: bool = False
    absolute: bool = False
    length_gain: bool = False
    calibrate: Callable[[float], dict[str, Any]] | None = None
    identity: dict[str, Any] | None = None
    example: Callable[[int], dict[str, Any]] | None = None
    inference_only: bool = False
    has_state: Callable[..., bool] = no_state
    use: str = ""
    aliases: tuple[str, ...] = ()
    output_defaults: dict[str, Any] | None = None
    output_bias: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        # `dataclasses.replace` with other scores passes the softmax of the former ones.
        is_default = self.weights is None or isinstance(self.weights, SoftmaxOf)
        if is_default and callable(self.scores):
            object.__setattr__(self, "weights", SoftmaxOf(self.scores))

    @property
    def in_eval(self) -> dict[str, Any]:
        """The parameters that modules replace in evaluation mode, with their values there."""
        return {p.name: p.in_eval for p in self.params if p.in_eval is not None}

    @property
    def by_position(self) -> bool:
        """Whether weights depend on positions."""
        return self.positional or self.absolute

    @property
    def needs_positions(self) -> str | None:
        """The name of the variant if weights depend on positions, or None."""
        return self.name if self.by_position else None
