"""`Activation`, the function φ of a pairwise form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import e, log2
from typing import Any, Literal

import torch
from torch import Tensor

from attnzoo.core.checks import check_type, is_number, shown
from attnzoo.core.function_keys import ACTIVATIONS, Keyed


@dataclass(frozen=True)
class Activation(Keyed):
    """An elementwise function φ of the scores with its derivative φ', for pairwise forms.

    If ``shape_slope`` is given, the activation is a family of functions: φ has a second argument,
    ``shape``, which is a per-query vector (entmax: α). Backends rely on the properties stated here
    and never infer them from the name. For torch.compile, create activations outside of the
    compiled call, for example at the top of a module.

    Attributes:
        name: Name for error messages and `explain`.
        value: ``value(s, shape) -> φ(s)``, elementwise; ``shape`` broadcasts against ``s`` and is
            None unless this is a family. The function may overwrite ``s`` if no slope reads ``s``:
            slopes get the same tensor afterwards.
        slope: ``slope(s, φ, shape) -> φ'(s)``, elementwise.
        shape_slope: ``shape_slope(s, φ, shape) -> ∂φ/∂shape`` of a family; None otherwise.
        vanishes: Whether φ(−∞) = 0, so that masked scores may be −∞. If not, backends mask φ.
        triton: The Triton implementation as "module:name", imported when a kernel needs it: a
            ``@triton.jit`` function of (x, shape) that returns (φ, φ') for x = ``unit`` · s. If
            ``vanishes``, both must be 0 at x = −∞. With a ``normalizer`` it returns (φ, φ', μ, μ').
            If ``shifted``, shape is ``unit`` · M. None: the kernels do not support φ.
        triton_shape_slope: The Triton implementation of ∂φ/∂shape, a function of (x, shape), named
            like ``triton``. If ``vanishes``, it must be 0 at x = −∞. None: the kernels compute no
            gradient for ``shape``.
        unit: Factor of the scores that the Triton implementation expects.
        exponential: Whether φ = exp. The form is then a softmax with a log-sum-exp, backends may
            subtract a maximum or call torch's fused softmax, and ``unit`` must be log2(e).
        alpha: α in (1, 2] if φ is the q-exponential [1 + (α−1)s]_+^{1/(α−1)}; "shape" if its α is
            the argument ``shape``; else None. With α, backends and kernels have a fast solver for
            thresholds, and ``unit`` must be 1.
        convex: Whether φ is convex with φ(−∞) = 0 and φ(0) ≥ 1. `tiled` can then solve for a
            threshold by Newton's method. Not needed if ``alpha`` is given.
        increasing: Whether a larger score never has a smaller φ, so that the largest weights belong
            to the largest scores. Implied by ``exponential``, ``alpha`` and ``convex``.
        positive: Whether φ(s) > 0 for every finite s. Losses of "sum" forms need it, because they
            contain log φ(s). Implied by ``exponential``.
        integral: ``integral(s, shape) -> ∫ φ`` from −∞ to s, elementwise. Losses need it for "none"
            forms, and for "threshold" forms without ``alpha``.
        normalizer: ``normalizer(s, shape) -> μ(s)``, elementwise and without writing into s: the
            function whose sum normalizes "sum" forms. None: μ is φ. If ``vanishes``, μ(−∞) = 0 too.
        normalizer_slope: ``normalizer_slope(s, μ, shape) -> μ'(s)``; required with ``normalizer``.
        shifted: Whether φ and μ are computed relative to M = max(0, row maximum of s), which
            backends pass as ``shape``, so that they do not overflow. A larger M must scale both:
            φ(s, M') = e^{M−M'} · φ(s, M). M has no gradient.
        quadratic: (a, b, c) if φ(s) = a + b·s + c·s², else None. Losses can then compute the sum of
            φ over all classes from the mean and the Gram matrix of the rows of the weight matrix,
            without the scores.

    Example:
        >>> import attnzoo
        >>> relu = attnzoo.Activation(
        ...     "relu", lambda s, shape: s.relu(), lambda s, phi, shape: (phi > 0).to(phi.dtype))
        >>> attnzoo.Pairwise(relu, "sum").softmax
        False
    """

    name: str
    value: Callable[[Tensor, Tensor | None], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    shape_slope: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    vanishes: bool = True
    triton: str | None = None
    triton_shape_slope: str | None = None
    unit: float = 1.0
    exponential: bool = False
    alpha: float | Literal["shape"] | None = None
    convex: bool = False
    increasing: bool = False
    positive: bool = False
    integral: Callable[[Tensor, Tensor | None], Tensor] | None = None
    quadratic: tuple[float, float, float] | None = None
    normalizer: Callable[[Tensor, Tensor | None], Tensor] | None = None
    normalizer_slope: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    shifted: bool = False

    def __post_init__(self) -> None:
        self._check_fields(
            required=("value", "slope"),
            optional=("shape_slope", "integral", "normalizer", "normalizer_slope"),
            triton=("triton", "triton_shape_slope"),
        )
        what = f"activation {self.name!r}"
        for field in ("vanishes", "exponential", "convex", "increasing", "positive", "shifted"):
            check_type(f"{what}: {field}", getattr(self, field), bool)
        if not is_number(self.unit):
            raise TypeError(f"{what}: unit must be a number, got {shown(self.unit)}")
        if self.quadratic is not None and not (
            isinstance(self.quadratic, tuple) and len(self.quadratic) == 3
        ):
            raise TypeError(
                f"{what}: quadratic must be (a, b, c) or None, got {shown(self.quadratic)}"
            )
        if (self.normalizer is None) != (self.normalizer_slope is None):
            raise ValueError(f"{what}: normalizer and normalizer_slope must be given together")
        if self.normalizer is not None and (self.shape_slope is not None or self.exponential):
            raise ValueError(f"{what}: normalizer must be None with shape_slope or exponential")
        if self.shifted and (self.shape_slope is not None or self.exponential or self.solvable):
            raise ValueError(
                f"{what}: shifted must be False with shape_slope, exponential, alpha or convex"
            )
        alpha, family = self.alpha, self.shape_slope is not None
        number = isinstance(alpha, float) and 1 < alpha <= 2
        if alpha is not None and not (alpha == "shape" if family else number):
            allowed = (
                "'shape' with a shape_slope, or None" if family else "a float in (1, 2] or None"
            )
            raise ValueError(f"{what}: alpha must be {allowed}, got {shown(alpha)}")
        if (self.exponential or self.solvable) and not self.vanishes:
            raise ValueError(
                f"{what}: vanishes must be True if exponential, alpha or convex is set, got False"
            )
        unit = (
            log2(e) if self.exponential or self.shifted else 1.0 if alpha is not None else self.unit
        )
        if self.triton is not None and self.unit != unit:
            why = "1.0 if alpha is set"
            if unit != 1.0:
                why = "log2(e) if exponential or shifted is True"
            raise ValueError(f"{what}: unit must be {why}, got {shown(self.unit)}")
        self._register(ACTIVATIONS)

    @cached_property
    def of_kernels(self) -> tuple[Any, ...]:
        """The properties for which Triton kernels are compiled."""
        return (
            self.triton, self.triton_shape_slope, self.unit, self.vanishes, self.exponential,
            self.alpha, self.shifted, self.normalizer is not None,
        )  # fmt: skip

    def check_slopes(self) -> None:
        """Raise ValueError if a slope reads s after ``value`` has overwritten it."""
        if (reason := self._overwritten) is not None:
            raise ValueError(reason)

    @cached_property
    def _overwritten(self) -> str | None:
        """Why gradients would be wrong, from values at a few points; None if nothing was wrong."""
        s = torch.tensor([-2.0, -0.3, 0.2, 1.0, 3.0], dtype=torch.float64)
        shape = None
        if self.shape_slope is not None or self.shifted:
            shape = torch.full_like(s, 1.5)
        before = s.clone()
        phi = self.value(s, shape)
        for field in ("slope", "shape_slope"):
            if (slope := getattr(self, field)) is None or torch.equal(s, before):
                continue
            expected, actual = (slope(x.clone(), phi.clone(), shape) for x in (before, s))
            if not torch.equal(expected, actual):
                return (
                    f"activation {self.name!r}: value must not overwrite s, because {field} reads "
                    "it; let value work on a copy"
                )
        return None

    @property
    def solvable(self) -> bool:
        """Whether backends can solve Σ_j φ(s_j − τ) = 1 for τ."""
        return self.convex or self.alpha is not None
