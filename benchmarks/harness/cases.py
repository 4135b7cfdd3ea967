"""What is measured: a variant with its parameters, and the inputs it is called with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.harness.clusters import clustered
from commandline.errors import UsageError
from commandline.variants import parse_spec

# Values for parameters that have no default, given the longest sequence of the run. A variant that
# is not named here must be given its own: NAME(parameter=value).
REQUIRED: dict[str, Callable[[int], dict[str, Any]]] = {
    "cosformer": lambda longest: {"max_length": longest},
    "topk": lambda longest: {"top_k": 32},
}

# Which keys are kept is not a continuous function of the scores: a difference in the last bit
# between two correct computations may keep another key. See `Inputs.make`.
DISCONTINUOUS = frozenset({"topk"})

SDPA = "sdpa softmax"


@dataclass(frozen=True)
class Case:
    """A variant with its parameters. `spec` is how it is printed and can be typed again."""

    spec: str
    variant: str
    params: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(spec: str, longest: int) -> Case:
        parsed = parse_spec(spec)
        if parsed.is_swap:
            raise UsageError(f"{spec}: nothing is trained here, so there is nothing to swap")
        name, params = parsed.test.name, parsed.test.params
        if name not in attnzoo.list_variants():
            known = ", ".join(attnzoo.list_variants())
            raise UsageError(f"unknown variant {name!r}; known: {known}")
        variant = attnzoo.get_variant(name)
        given = {**REQUIRED.get(name, lambda _: {})(longest), **params}
        unknown = sorted(set(params) - {p.name for p in variant.params})
        if unknown:
            known = ", ".join(p.name for p in variant.params) or "none"
            raise UsageError(f"{name} has no parameter {unknown[0]!r}; it has: {known}")
        missing = [
            p.name for p in variant.params if p.default is attnzoo.REQUIRED and p.name not in given
        ]
        if missing:
            example = ", ".join(f"{name}=…" for name in missing)
            raise UsageError(f"{name} needs {', '.join(missing)}: write {name}({example})")
        return Case(str(parsed), name, given)

    def plan(self, backend: str | None = None) -> attnzoo.Plan:
        """What attnzoo says of it at the smallest causal call."""
        x = torch.empty(1, 1, 1, 1)
        return attnzoo.explain(
            x, x, x, self.variant, is_causal=True, backend=backend, **self.params
        )  # fmt: skip

    def has_form(self, kind: type) -> bool:
        """Whether it offers a form of this kind."""
        return any(isinstance(candidate.form, kind) for candidate in self.plan().candidates)

    @property
    def has_threshold(self) -> bool:
        """Whether a form of it is solved for a threshold, by iteration to a residual."""
        forms = (c.form for c in self.plan().candidates)
        return any(isinstance(f, attnzoo.Pairwise) and f.normalize == "threshold" for f in forms)


@dataclass(frozen=True)
class Setting:
    """Everything but the variant. On the CPU causal throughout."""

    length: int
    direction: str = "forward"
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    input_scale: float = 1.0
    backend: str | None = None
    learned: bool = False
    seed: int = 0
    threads: int = 2
    device: str = "cpu"
    causal: bool = True
    clustered: bool = False


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, (B, H, N, D), and a case's parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    params: dict[str, Any]
    causal: bool = True

    @staticmethod
    def make(case: Case, setting: Setting) -> Inputs:
        device = torch.device(setting.device)
        generator = torch.Generator(device).manual_seed(setting.seed * 1_000_003 + setting.length)
        shape = (setting.batch, setting.heads, setting.length, setting.head_dim)
        q, k, v, do = (torch.randn(shape, generator=generator, device=device) for _ in range(4))
        if setting.clustered:
            q, k = clustered(q, k, generator)
        q, k, v = (x * setting.input_scale for x in (q, k, v))
        if case.variant in DISCONTINUOUS:
            # On a grid of binary fractions every product and partial sum is exact in fp32: all
            # orders of summation give the same scores, ties included, and keep the same keys.
            step = 2.0 ** (math.floor(math.log2(setting.input_scale)) - 4)
            q, k = ((x / step).round() * step for x in (q, k))
        dtype = getattr(torch, setting.dtype)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        params = dict(case.params)
        if setting.direction == "both":
            for x in (q, k, v):
                x.requires_grad_()
            if setting.learned:
                params |= learned_params(case, setting.heads)
        return Inputs(q, k, v, do.to(dtype), params, setting.causal)

    def detached(self) -> Inputs:
        """The same without gradients of q, k and v."""
        return replace(self, q=self.q.detach(), k=self.k.detach(), v=self.v.detach())

    def part(self, batches: list[int], heads: list[int]) -> Inputs:
        """These batches and heads alone; for parameters that are no heads' own."""
        fields = {}
        for name in ("q", "k", "v", "do"):
            x = getattr(self, name)
            fields[name] = x.detach()[batches][:, heads].requires_grad_(x.requires_grad)
        return replace(self, **fields)

    def leaves(self) -> dict[str, Tensor]:
        """What a gradient is taken with respect to."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, **self.params}
        return {n: x for n, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad}


def learned_params(case: Case, heads: int) -> dict[str, Tensor]:
    """The parameters that `attnzoo.nn.Attention` would learn, one value per head."""
    return {
        p.name: torch.full((heads,), float(p.init), requires_grad=True)
        for p in attnzoo.get_variant(case.variant).params
        if p.init is not None and p.name not in case.params
    }


def call(case: Case, inputs: Inputs, backend: str | None) -> Callable[[], tuple[Tensor, ...]]:
    """The call that is timed: the output, or the output and all gradients."""

    def attend() -> Tensor:
        return attnzoo.attention(
            inputs.q, inputs.k, inputs.v, case.variant, is_causal=inputs.causal, backend=backend,
            **inputs.params,
        )  # fmt: skip

    return _with_gradients(attend, inputs)


def sdpa_call(inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """torch's own fused softmax on the same tensors: the yardstick of every ratio."""

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, is_causal=inputs.causal
        )  # fmt: skip

    return _with_gradients(attend, inputs)


def package_call(case: Case, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]] | None:
    """Eager attention with the package `entmax`, where that computes the same thing."""
    if not inputs.causal or not inputs.params.keys() <= {"alpha"}:
        return None
    try:
        import entmax
    except ImportError:
        return None
    alpha = inputs.params.get("alpha", 1.5)
    if case.variant == "sparsemax":
        normalize = entmax.sparsemax
    elif case.variant == "entmax" and isinstance(alpha, float) and alpha in (1.5, 2.0):
        normalize = entmax.entmax15 if alpha == 1.5 else entmax.sparsemax
    else:
        return None
    hidden = torch.ones(inputs.q.shape[2], inputs.k.shape[2], dtype=torch.bool).triu(1)

    def attend() -> Tensor:
        scores = inputs.q.shape[-1] ** -0.5 * inputs.q @ inputs.k.mT
        return normalize(scores.masked_fill(hidden, -torch.inf), dim=-1) @ inputs.v

    return _with_gradients(attend, inputs)


def _with_gradients(
    attend: Callable[[], Tensor], inputs: Inputs
) -> Callable[[], tuple[Tensor, ...]]:
    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(),)

    def both() -> tuple[Tensor, ...]:
        out = attend()
        # A yardstick has no use for the variant's parameters.
        gradients = torch.autograd.grad(
            out, list(inputs.leaves().values()), inputs.do, allow_unused=True
        )
        return (out, *(g for g in gradients if g is not None))

    return both if inputs.leaves() else forward
