"""`Activation`, the function φ of a pairwise form, and the activations of the shipped variants.

The entmax family is the q-exponential φ(x) = [1 + (α−1)x]_+^{1/(α−1)} in the units of the scores:
φ(0) = 1, φ' = φ^{2−α}, and α → 1 gives exp (Peters et al. 2019, arXiv:1905.05702, with τ shifted
by 1/(α−1)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import e, factorial, log2
from typing import Any, Literal

import torch
from torch import Tensor

from attnzoo.core.checks import shown
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
        what = f"activation {shown(self.name)}"
        for field in (
            "vanishes", "exponential", "convex", "increasing", "positive", "shifted",
        ):  # fmt: skip
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"{what}: {field} must be a bool, got {shown(getattr(self, field))}"
                )
        if self.integral is not None and not callable(self.integral):
            raise TypeError(
                f"{what}: integral must be a function or None, got {shown(self.integral)}"
            )
        if self.quadratic is not None and not (
            isinstance(self.quadratic, tuple) and len(self.quadratic) == 3
        ):
            raise TypeError(
                f"{what}: quadratic must be (a, b, c) or None, got {shown(self.quadratic)}"
            )
        for field in ("normalizer", "normalizer_slope"):
            if (function := getattr(self, field)) is not None and not callable(function):
                raise TypeError(
                    f"{what}: {field} must be a function or None, got {shown(function)}"
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


TRITON = "attnzoo.backends.triton.common.activations:"  # followed by the activation's name

EXP = Activation(
    "exp",
    lambda s, shape: s.exp_(),
    lambda s, phi, shape: phi,
    triton=TRITON + "exp",
    unit=log2(e),
    exponential=True,
    convex=True,
    positive=True,
    increasing=True,
)

SIGMOID = Activation(
    "sigmoid",
    lambda s, shape: s.sigmoid_(),
    lambda s, phi, shape: phi.addcmul(phi, phi, value=-1),
    triton=TRITON + "sigmoid",
    unit=log2(e),
    positive=True,
    # softplus(s). torch's softplus is inexact above its threshold of 20.
    integral=lambda s, shape: -torch.nn.functional.logsigmoid(-s),
    increasing=True,
)

RELU = Activation(
    "relu",
    lambda s, shape: s.relu_(),
    lambda s, phi, shape: (phi > 0).to(phi.dtype),
    triton=TRITON + "relu",
    increasing=True,
)

RELU2 = Activation(
    "relu2",
    lambda s, shape: s.relu_().square_(),
    lambda s, phi, shape: 2 * phi.sqrt(),
    triton=TRITON + "relu2",
    increasing=True,
)


def _relu_power_slope(s: Tensor, phi: Tensor, power: Tensor | None) -> Tensor:
    assert power is not None
    return torch.where(s > 0, power * s.clamp(min=0).pow(power - 1), 0.0)


def _relu_power_shape_slope(s: Tensor, phi: Tensor, power: Tensor | None) -> Tensor:
    # Scores of 0 and below are replaced, so that the logarithm is finite.
    return torch.where(s > 0, phi * torch.where(s > 0, s, 1.0).log(), 0.0)


def _relu_power(s: Tensor, power: Tensor | None) -> Tensor:
    assert power is not None
    # NaN stays NaN.
    return torch.where(s <= 0, 0.0, torch.where(s <= 0, 1.0, s).pow(power))


RELU_POWER = Activation(
    "relu_power",
    _relu_power,
    _relu_power_slope,
    _relu_power_shape_slope,
    triton=TRITON + "relu_power",
    triton_shape_slope=TRITON + "relu_power_shape_slope",
    increasing=True,
)


def _exp_less_one(s: Tensor, most: Tensor) -> Tensor:
    """(e^s − 1) · e^{−M} for s ≤ M. expm1 keeps the digits of small s."""
    down = (-most).exp()
    return torch.where(s.abs() < 1, s.clamp(-1, 1).expm1() * down, (s - most).exp() - down)


def _softpick(s: Tensor, most: Tensor | None) -> Tensor:
    assert most is not None
    return _exp_less_one(s, most).relu_()


def _softpick_slope(s: Tensor, phi: Tensor, most: Tensor | None) -> Tensor:
    assert most is not None
    return torch.where(s > 0, (s - most).exp(), 0.0)


def _softpick_normalizer_slope(s: Tensor, mu: Tensor, most: Tensor | None) -> Tensor:
    assert most is not None
    return (s - most).exp() * s.sign()


SOFTPICK = Activation(
    "softpick",
    _softpick,
    _softpick_slope,
    vanishes=False,
    normalizer=lambda s, most: _exp_less_one(s, most).abs_(),  # type: ignore[arg-type]
    normalizer_slope=_softpick_normalizer_slope,
    shifted=True,
    triton=TRITON + "softpick",
    unit=log2(e),
    increasing=True,
)

IDENTITY = Activation(
    "identity",
    lambda s, shape: s,
    lambda s, phi, shape: torch.ones_like(s),
    vanishes=False,
    increasing=True,
)

SPARSEMAX = Activation(
    "sparsemax",
    lambda s, shape: s.add_(1).relu_(),
    lambda s, phi, shape: (phi > 0).to(phi.dtype),
    triton=TRITON + "sparsemax",
    alpha=2.0,
    increasing=True,
)

ENTMAX15 = Activation(
    "entmax15",
    lambda s, shape: torch.add(s.new_ones(()), s, alpha=0.5, out=s).relu_().square_(),
    # φ' = √φ is computed as φ · rsqrt(φ): most φ are 0, and on some CPUs √0 is ten times slower.
    lambda s, phi, shape: phi.clamp_min(torch.finfo(phi.dtype).tiny).rsqrt_().mul_(phi),
    triton=TRITON + "entmax15",
    alpha=1.5,
    increasing=True,
)


def _q_exp(s: Tensor, alpha: Tensor | None) -> Tensor:
    assert alpha is not None
    # log1p is accurate for small (α−1)s. Clamping its argument at −1 implements [·]_+.
    inner = ((alpha - 1) * s).clamp_min_(-1.0)
    return inner.log1p_().div_(alpha - 1).exp_()


def _q_exp_slope(s: Tensor, phi: Tensor, alpha: Tensor | None) -> Tensor:
    assert alpha is not None
    # Outside the support the slope is 0, but φ^{2−α} would give 0⁰ = 1 at α = 2.
    return torch.where(phi > 0, phi.pow(2 - alpha), 0.0)


def _q_exp_shape_slope(s: Tensor, phi: Tensor, alpha: Tensor | None) -> Tensor:
    """∂φ/∂α = φ·[x/(a·u) − log(u)/a²] with a = α − 1, u = 1 + ax; its limit at α = 1 is −φx²/2."""
    assert alpha is not None
    a = alpha - 1
    inside = phi > 0
    x = torch.where(inside, s, 0.0)
    y = a * x
    closed = x / (a * (1 + y)) - torch.log1p(y) / (a * a)
    # The two terms of `closed` cancel for small y. The series x² Σ_k (−1)^{k−1} (k−1)/k y^{k−2}
    # replaces them there.
    series = torch.zeros_like(y)
    for k in range(10, 1, -1):
        series = series * y + (-1) ** (k - 1) * (k - 1) / k
    log_slope = torch.where(y.abs() < 3e-2, x * x * series, closed)
    return torch.where(inside, phi * log_slope, 0.0)


Q_EXP = Activation(
    "q_exp",
    _q_exp,
    _q_exp_slope,
    _q_exp_shape_slope,
    triton=TRITON + "q_exp",
    triton_shape_slope=TRITON + "q_exp_shape_slope",
    alpha="shape",
    increasing=True,
)


def _taylor(order: int) -> Activation:
    """The activation φ(s) = Σ_{p ≤ order} s^p / p!, which is positive only for even orders."""

    def value(s: Tensor, shape: Tensor | None, top: int = order) -> Tensor:
        if top == 1:
            return s + 1
        # Horner's scheme, with one pass over s per power.
        total = torch.add(s.new_tensor(1 / factorial(top - 1)), s, alpha=1 / factorial(top))
        for power in reversed(range(top - 1)):
            torch.addcmul(s.new_tensor(1 / factorial(power)), total, s, out=total)
        return total

    return Activation(
        f"taylor{order}",
        value,
        lambda s, phi, shape: value(s, shape, order - 1),
        vanishes=False,
        triton=f"{TRITON}taylor{order}" if order in (2, 4) else None,
        positive=True,
        quadratic=(1.0, 1.0, 0.5) if order == 2 else None,
    )


# The Taylor activations by order. The largest order is 170, because 171! overflows a float. The
# activations are created at import, because torch.compile does not support activations created
# inside a compiled call.
TAYLOR = {order: _taylor(order) for order in range(2, 171, 2)}
