"""Cases (a variant with its parameters), settings of inputs, and the inputs themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.block_sparse import block_sparse
from commandline.errors import UsageError
from commandline.variants import complete, parse_spec, unknown

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A variant with its parameters. ``spec`` is the text that selects both in ``--variants``."""

    spec: str
    variant: str
    params: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(spec: str, longest: int) -> Case:
        """The case that a spec selects.

        Missing required parameters come from the variant's example.

        Args:
            spec: such as ``"ssmax"`` or ``"entmax(alpha=1.4)"``.
            longest: the largest number of keys in any call.

        Raises:
            UsageError: the variant is unknown, or its parameters are invalid.
        """
        parsed = parse_spec(spec)
        if parsed.is_substitution:
            raise UsageError(
                f"--variants must be name or name(x=1), got {spec!r}; "
                "only evals support substitutions (a->b)"
            )
        if (reason := unknown(parsed.test.name)) is not None:
            raise UsageError(reason)
        case = Case(str(parsed), parsed.test.name, complete(parsed.test, longest).params)
        try:
            case.plan()
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
        return case

    def plan(self, backend: str | None = None) -> attnzoo.Plan:
        """The plan of `attnzoo.explain` for a causal call with one query, one key and D = 1."""
        x = torch.empty(1, 1, 1, 1)
        return attnzoo.explain(
            x, x, x, self.variant, is_causal=True, backend=backend, **self.params
        )  # fmt: skip

    @cached_property
    def forms(self) -> list[Any]:
        """The variant's forms with the case's parameters: the form of each candidate of `plan`."""
        return [candidate.form for candidate in self.plan().candidates]

    @property
    def linear(self) -> attnzoo.Linear | None:
        return next((f for f in self.forms if isinstance(f, attnzoo.Linear)), None)

    @property
    def pairwise(self) -> attnzoo.Pairwise | None:
        return next((f for f in self.forms if isinstance(f, attnzoo.Pairwise)), None)

    @property
    def shares(self) -> attnzoo.Shares | None:
        return next((f for f in self.forms if isinstance(f, attnzoo.Shares)), None)

    @property
    def has_threshold(self) -> bool:
        """Whether the normalization solves for a threshold iteratively, which leaves a residual."""
        return self.pairwise is not None and self.pairwise.normalize == "threshold"

    @property
    def selects(self) -> bool:
        """Whether only keys with the largest scores get weight, so that the output can be
        discontinuous."""
        return self.pairwise is not None and self.pairwise.normalize == "select"

    def key_dim(self, head_dim: int, feature_dim: int) -> int | None:
        """The dimension of q and k for the linear form; None means the head dimension.

        The result is ``feature_dim`` if the number of features grows faster than the dimension.
        """
        if self.linear is None or self.linear.size(2 * head_dim) <= 2 * self.linear.size(head_dim):
            return None
        return feature_dim

    def attend(self, params: dict[str, Any], backend: str | None, **options: Any) -> Attend:
        return partial(
            attnzoo.attention, variant=self.variant, backend=backend, **options, **params
        )  # fmt: skip


SOFTMAX = Case("softmax", "softmax")


@dataclass(frozen=True)
class Setting:
    """The shapes, dtype and distribution of a call's inputs. ``length`` is the number of keys."""

    length: int
    queries: int | None = None  # None: as many as keys
    batch: int = 1
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int = 64
    key_dim: int | None = None  # dimension of q and k; None: the head dimension
    dtype: str = "float32"
    causal: bool = True
    block_sparse: bool = False
    input_scale: float = 1.0
    seed: int = 0
    device: str = "cpu"

    @property
    def inputs(self) -> str:
        return "block-sparse" if self.block_sparse else "iid"

    @property
    def title(self) -> str:
        """A table's title: all fields except the length and the batch size."""
        kv = f" Hkv={self.kv_heads}" if self.kv_heads not in (None, self.heads) else ""
        queries = "" if self.queries is None else f", Nq={self.queries}"
        scale = "" if self.input_scale == 1 else f" × {self.input_scale:g}"
        return (
            f"H={self.heads}{kv} D={self.head_dim} {self.dtype}, "
            f"{'causal' if self.causal else 'full'}{queries}, {self.inputs} inputs{scale}"
        )


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient ``do`` of the output, (B, H, N, D), and a case's parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    params: dict[str, Any]
    causal: bool = True
    scale: float | None = None

    @staticmethod
    def make(
        setting: Setting, case: Case = SOFTMAX, gradients: bool = False, learned: bool = False
    ) -> Inputs:
        """Random inputs from the setting's seed.

        gradients: whether q, k and v require gradients. learned: whether the parameters that
        `attnzoo.nn.Attention` learns require gradients.
        """
        s, dtype = setting, getattr(torch, setting.dtype)
        generator = torch.Generator(s.device).manual_seed(s.seed * 1_000_003 + s.length)
        key_dim, kv_heads = s.key_dim or s.head_dim, s.kv_heads or s.heads
        queries = s.length if s.queries is None else s.queries

        def drawn(heads: int, length: int, dim: int) -> Tensor:
            shape = (s.batch, heads, length, dim)
            return torch.randn(shape, generator=generator, device=s.device)

        q, k = drawn(s.heads, queries, key_dim), drawn(kv_heads, s.length, key_dim)
        if s.block_sparse:
            q, k = block_sparse(q, k, generator)
        q, k, scale = q.mul_(s.input_scale), k.mul_(s.input_scale), None
        if case.selects:
            # q and k are rounded to small multiples of ``step``, a power of two, so that their
            # products and sums are exact in fp32. Every order of summation then gives the same
            # scores, and the same keys if their number is given. A sum of weights is rounded, so a
            # key may still differ where it is close to the mass.
            scale = 2.0 ** round(math.log2(key_dim**-0.5))
            step = 2.0 ** (math.floor(math.log2(s.input_scale)) - 4)
            q, k = (x.div_(step).round_().mul_(step) for x in (q, k))
        q, k = q.to(dtype), k.to(dtype)
        # v is cast before do is drawn, because an fp32 copy of a long KV cache takes much memory.
        v = drawn(kv_heads, s.length, s.head_dim).mul_(s.input_scale).to(dtype)
        do = drawn(s.heads, queries, s.head_dim).to(dtype)
        params = dict(case.params)
        if gradients:
            for x in (q, k, v):
                x.requires_grad_()
            params |= learned_params(case, s) if learned else {}
        return Inputs(q, k, v, do, params, s.causal, scale)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a call with these tensors."""
        gqa = self.q.shape[1] != self.k.shape[1]
        return {"is_causal": self.causal, "enable_gqa": gqa, "scale": self.scale}

    def detached(self) -> Inputs:
        """These inputs, detached so that no tensor requires a gradient."""
        params = {n: x.detach() if isinstance(x, Tensor) else x for n, x in self.params.items()}
        q, k, v = (x.detach() for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, params=params)

    def part(self, batches: list[int], heads: list[int]) -> Inputs:
        """The inputs restricted to these batches and query heads."""
        group = self.q.shape[1] // self.k.shape[1]
        of_kv = sorted({head // group for head in heads})
        indices = {"q": heads, "k": of_kv, "v": of_kv, "do": heads}

        def cut(x: Tensor, *index: Any) -> Tensor:
            return x.detach()[index].requires_grad_(x.requires_grad)

        fields = {n: cut(getattr(self, n)[batches], slice(None), indices[n]) for n in indices}
        params = {n: cut(x, heads) if isinstance(x, Tensor) else x for n, x in self.params.items()}
        return replace(self, **fields, params=params)

    def leaves(self) -> dict[str, Tensor]:
        """All inputs and parameters that require a gradient, by name."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, **self.params}
        return {n: x for n, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad}


def learned_params(case: Case, setting: Setting) -> dict[str, Tensor]:
    """The parameters that `attnzoo.nn.Attention` learns, by name, as tensors (H,) or (H, …)."""
    module = attnzoo.nn.Attention(
        case.variant, setting.heads, head_dim=setting.key_dim or setting.head_dim, **case.params
    ).to(setting.device)
    return {name: getattr(module, name).detach().requires_grad_() for name in module.learned}


def call(attend: Attend, inputs: Inputs, direction: str) -> Callable[[], Any]:
    """The function without arguments that is timed for this direction.

    "forward" computes the output without gradients. "backward" computes only the gradients, on one
    graph that all its calls reuse. "both" computes the output and the gradients.
    """
    if direction == "forward":
        i = inputs.detached()

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(i.q, i.k, i.v)

        return forward
    leaves = list(inputs.leaves().values())
    if direction == "backward":
        out = attend(inputs.q, inputs.k, inputs.v)
        return partial(torch.autograd.grad, out, leaves, inputs.do, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        out = attend(inputs.q, inputs.k, inputs.v)
        return torch.autograd.grad(out, leaves, inputs.do)

    return both
