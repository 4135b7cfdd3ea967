"""VariantParameters: a module that owns the parameters of a variant."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.core.checks import (
    DTYPES,
    check_dense,
    did_you_mean,
    is_dtensor,
    is_number,
    shown,
)
from attnzoo.core.parameters import check_entries, check_value, missing
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import REQUIRED, Param
from attnzoo.nn.bounded import Bounded
from attnzoo.nn.sharding import assign, local

# torch.nn.utils.parametrize uses the same name, so checkpoints made with it can be loaded.
BOUNDED = "parametrizations"
Names = tuple[str, ...] | list[str]


class VariantParameters(nn.Module):
    """The base class of modules that own the parameters of a variant.

    Each parameter is an attribute under its own name. A learned one is a tensor of shape (n,): n is
    the number of heads of `Attention`, and 1 in `OutputLayer`. It has the dtype of the module, as
    sharding (FSDP) needs, and is cast to fp32 in each call. A parameter in ``given`` is no
    attribute, because callers of forward pass it.
    """

    variant: str
    learned: tuple[str, ...]
    given: tuple[str, ...] = ()  # the parameters that the module does not own

    def _create_parameters(
        self,
        variant: str,
        count: int,
        learn: Names | None,
        params: dict[str, Any],
        defaults: dict[str, Any] | None = None,
        given: Names = (),
        head_dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters. ``defaults`` replace the variant's defaults and initial values.

        ``head_dim`` is needed for initial values of tensors (H, …). ``dtype`` is that of learned
        parameters; None is torch's default dtype.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        specs = {p.name: _with_default(p, defaults or {}) for p in self._specs(variant)}
        self.given = passed_names(variant, specs, given)
        learned = _learned(variant, specs, learn, self.given)
        if learn is None:  # a None that is given, such as an identity map, is not learned
            learned = tuple(name for name in learned if params.get(name, REQUIRED) is not None)
        for name in params:
            if name not in specs:
                known = ", ".join(specs) or "none"
                nearest = did_you_mean(name, [*specs, *signature(type(self)).parameters])
                raise TypeError(
                    f"variant {variant!r} has no parameter {name!r}; it has: {known}{nearest}"
                )
            if name in self.given:
                raise TypeError(
                    f"{variant}'s {name} must not have a value in the constructor: forward takes "
                    f"it, because given is {self.given}"
                )
        # A torch.nn.Parameter is learned without being named in ``learn``.
        learned += tuple(
            name
            for name, value in params.items()
            if isinstance(value, nn.Parameter) and name not in learned
        )
        self.variant, self.learned = variant, learned
        self._initial: dict[str, Tensor] = {}
        for name, spec in specs.items():
            if name in self.given:
                continue
            value = params.get(name, spec.default)
            if name in learned:
                start = value if name in params or spec.init is None else spec.init
                device = None
                if spec.kind == "tensor" and start is spec.init:
                    start, device = self._matrices(spec, count, head_dim), torch.empty(0).device
                self._learn(spec, start, count, dtype, device)
            elif value is REQUIRED:
                raise TypeError(missing(variant, spec))
            elif isinstance(value, Tensor):
                # The value is cloned, because checkpoints reject tensors that share memory.
                self._initial[name] = self._checked(spec, value, count).detach().clone()
                self.register_buffer(name, self._initial[name].clone())
            elif value is None and spec.default is None:
                setattr(self, name, None)
            else:
                setattr(self, name, check_value(f"{variant}'s {name}", spec, value))

    def _matrices(self, spec: Param, count: int, head_dim: int | None) -> Tensor | None:
        """The initial value (H, …) of a parameter of kind "tensor"."""
        what = f"{self.variant}'s {spec.name}"
        if spec.init is None:
            return None
        assert callable(spec.init)  # checked at registration
        if head_dim is None:
            raise TypeError(
                f"head_dim must be given, because {what} is learned and its size depends on it; or "
                f"pass {spec.name}, or leave it out of learn"
            )
        with torch.device("cpu"):
            made = [spec.init(head_dim) for _ in range(count)]
        assert spec.size is not None  # checked at registration
        for one in made:
            check_dense(f"{what}: init(D)", one)
            if one.shape != spec.size(head_dim):
                raise ValueError(
                    f"{what}: init(D) must have shape {spec.size(head_dim)}, got {tuple(one.shape)}"
                )
        return torch.stack(made)

    def _specs(self, variant: str) -> list[Param]:
        """The variant's parameters that this module owns."""
        return list(get_variant(variant).params)

    def _checked(self, spec: Param, value: Tensor, count: int) -> Tensor:
        what = f"{self.variant}'s {spec.name}"
        if spec.kind not in ("per_head", "tensor"):
            check_value(what, spec, value)
        check_dense(what, value)
        if value.dtype not in DTYPES:
            raise TypeError(f"{what} must be fp16, bf16, fp32 or fp64, got {value.dtype}")
        if spec.kind == "tensor":
            # The head dimension, and so the other dimensions, is known in each call only.
            if value.dim() == 0 or value.shape[0] != count:
                raise ValueError(f"{what} must have shape ({count}, …), got {tuple(value.shape)}")
        elif value.shape not in ((), (count,)):
            raise ValueError(f"{what} must have shape () or ({count},), got {tuple(value.shape)}")
        check_entries(what, spec, value)
        return value

    def _learn(
        self,
        spec: Param,
        start: Any,
        count: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        what = f"{self.variant}'s {spec.name}"
        if start is None or start is REQUIRED:
            kind = "a tensor" if spec.kind == "tensor" else f"a float or a tensor ({count},)"
            raise ValueError(f"learn: {what} needs an initial value, {kind}")
        if isinstance(start, Tensor):
            device = device or start.device
        else:
            number = check_value(what, spec, start, dtype)
            # The initial value stays on the CPU even if the module is on the meta device, because
            # meta tensors hold no values.
            start = torch.full((count,), number, dtype=torch.float64, device="cpu")
            device = torch.empty(0).device  # torch's current default device
        start = self._checked(spec, start, count)
        if start.dim() == 0:
            start = start.expand(count)
        self._initial[spec.name] = start = start.detach().clone()
        if spec.between is None:
            check_entries(what, spec, start, dtype)
            self.register_parameter(spec.name, nn.Parameter(start.to(device, dtype, copy=True)))
            return
        # torch.nn.utils.parametrize itself would change the module's class and break pickling.
        if BOUNDED not in self._modules:
            self.add_module(BOUNDED, nn.ModuleDict())
        self._bounded()[spec.name] = Bounded(what, *spec.between, start).to(device, dtype)

    def _reset(self, names: Iterable[str]) -> None:
        """Set parameters to their initial values."""
        bounded, tensors = self._bounded(), self.parameter_tensors()
        for name in names:
            if name in bounded:
                bounded[name].reset_parameters()
            else:
                assign(tensors[name], self._initial[name])

    def parameter_tensors(self) -> dict[str, Tensor]:
        """The variant's tensors in the state dict, keyed by the name of the variant's parameter."""
        bounded = self._bounded()
        return {n: bounded[n].original if n in bounded else getattr(self, n) for n in self._initial}

    def _bounded(self) -> dict[str, Any]:
        """The learned parameters that stay inside an interval, keyed by name."""
        container = self.__dict__.get("_modules", {}).get(BOUNDED)
        return {} if container is None else container._modules

    def __getattr__(self, name: str) -> Any:
        bounded = self._bounded()
        return bounded[name]() if name in bounded else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        bounded = self._bounded()
        if name not in bounded:
            return super().__setattr__(name, value)
        what, original = bounded[name].name, bounded[name].original
        check_dense(what, value)
        if value.shape not in ((), original.shape):
            raise ValueError(
                f"{what} must have shape () or {tuple(original.shape)}, got {tuple(value.shape)}"
            )
        assign(original, bounded[name].inverse(value).expand(original.shape))

    def _params(self) -> dict[str, Any]:
        """The parameters that the module owns. A sharded tensor is replaced by this rank's part."""
        params = {spec.name: local(getattr(self, spec.name)) for spec in self._owned()}
        if not self.training:
            params |= get_variant(self.variant).in_eval
        return params

    def settings(self) -> list[Param]:
        """The parameters of the module that are numbers and not learned."""
        return [spec for spec in self._owned() if is_number(getattr(self, spec.name))]

    def _owned(self) -> list[Param]:
        return [spec for spec in self._specs(self.variant) if spec.name not in self.given]

    def _shown(self) -> list[str]:
        """The variant's parameters as text, for ``extra_repr``."""
        texts = []
        for param in self._owned():
            value = getattr(self, param.name)
            text = _summary(value.detach()) if isinstance(value, Tensor) else f"{value}"
            texts.append(f"{param.name}={text}" + " (learned)" * (param.name in self.learned))
        return [*texts, f"given={self.given}"] if self.given else texts


def _with_default(spec: Param, defaults: dict[str, Any]) -> Param:
    if spec.name not in defaults:
        return spec
    default = defaults[spec.name]
    return replace(spec, default=default, init=None if spec.init is None else default)


def _learned(
    variant: str, specs: dict[str, Param], learn: Names | None, passed: tuple[str, ...]
) -> tuple[str, ...]:
    if learn is None:
        return tuple(n for n, spec in specs.items() if spec.init is not None and n not in passed)
    possible = _may_be_tensors(specs)
    learned = _names("learn", learn, possible, f"learnable parameters of {variant!r}")
    for name in learned:
        if name in passed:
            raise ValueError(f"learn and given must not share a parameter, got {name!r} in both")
    return learned


def passed_names(variant: str, specs: dict[str, Param], passed: Names) -> tuple[str, ...]:
    """The argument ``given``, validated."""
    possible = _may_be_tensors(specs)
    return _names("given", passed, possible, f"parameters of {variant!r} that may be tensors")


def _may_be_tensors(specs: dict[str, Param]) -> list[str]:
    return [name for name, spec in specs.items() if spec.kind in ("per_head", "tensor")]


def _names(what: str, names: Names, possible: list[str], meaning: str) -> tuple[str, ...]:
    """The argument ``what``, validated: a tuple of different names from ``possible``."""
    if not isinstance(names, (tuple, list)):
        optional = " or None" if what == "learn" else ""
        raise TypeError(f"{what} must be a tuple of names{optional}, got {shown(names)}")
    for name in names:
        if name not in possible:
            allowed = ", ".join(possible) or "none"
            raise ValueError(f"{what} must name {meaning} ({allowed}), got {shown(name)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what} must name each parameter once, got {names!r}")
    return tuple(names)


def _summary(x: Tensor) -> str:
    if x.is_meta:
        return "on meta"
    if is_dtensor(x) or not x.numel():  # ranks would have to exchange their values
        return "sharded"
    low, high = float(x.min()), float(x.max())
    if math.isclose(low, high, rel_tol=1e-6, abs_tol=1e-12):
        return f"{low:.4g}"
    return f"{low:.4g}…{high:.4g}"
