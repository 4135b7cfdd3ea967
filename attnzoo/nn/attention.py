"""Attention: `attnzoo.attention` as a module that owns the parameters of a variant."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from attnzoo.core.checks import (
    DTYPES,
    check_bool,
    check_dense,
    check_sizes,
    did_you_mean,
    shown,
)
from attnzoo.core.forms import REQUIRED, Param
from attnzoo.core.parameters import check_entries, check_value, missing
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention, attention_weights
from attnzoo.nn.bounded import Bounded
from attnzoo.nn.cache import Cache, KVCache, StateCache
from attnzoo.nn.decoding import AttentionKeywords, attend

# The name that torch.nn.utils.parametrize uses in checkpoints, so that those checkpoints load.
BOUNDED = "parametrizations"


class Attention(nn.Module):
    """`attnzoo.attention` as a module that owns the parameters of a variant.

    Each learned parameter is an fp32 `torch.nn.Parameter` of shape (H,), one value per query head,
    under the parameter's own name. The module does not project queries, keys and values.

    Args:
        variant: a name from `attnzoo.list_variants`.
        num_heads: number of query heads, H.
        learn: names of the parameters to learn. None is the variant's default, as in its paper
            (ssmax: s; sink: b; asentmax: beta and gamma). () learns nothing.
        **params: values of the variant's parameters: floats or tensors of shape (H,). For a learned
            parameter this is the initial value; the default is the variant's own. A
            `torch.nn.Parameter` given here is learned. A parameter with an allowed range (entmax's
            alpha) is learned through a sigmoid and stays inside the range.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Attention
        >>> attend = Attention("ssmax", num_heads=4)
        >>> attend
        Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    References:
        The paper of each variant is ``attnzoo.get_variant(variant).paper``; the source of each
        initial value is named at the top of the variant's file.

    Notes:
        Exclude these parameters from weight decay with `parameter_groups`: zero is not a neutral
        value for them.
    """

    def __init__(
        self,
        variant: str,
        num_heads: int,
        *,
        learn: tuple[str, ...] | list[str] | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        found = get_variant(variant)
        check_sizes(num_heads=num_heads)
        specs = {param.name: param for param in found.params}
        learned = self._learned(variant, specs, learn)
        for name in params:
            if name not in specs:
                known = ", ".join(specs) or "none"
                nearest = did_you_mean(name, [*specs, "learn"])
                raise TypeError(
                    f"variant {variant!r} has no parameter {name!r}; it has: {known}{nearest}"
                )
        # A torch.nn.Parameter is learned without being named in ``learn``.
        learned += tuple(
            name
            for name, value in params.items()
            if isinstance(value, nn.Parameter) and name not in learned
        )
        self.variant, self.num_heads, self.learned = variant, num_heads, learned
        self._initial: dict[str, Tensor] = {}
        for name, spec in specs.items():
            value = params.get(name, spec.default)
            if name in learned:
                self._learn(spec, value if name in params or spec.init is None else spec.init)
            elif value is REQUIRED:
                raise TypeError(missing(variant, spec))
            elif isinstance(value, Tensor):
                # The value is cloned, because checkpoints reject tensors that share memory.
                self._initial[name] = self._checked(spec, value).detach().clone()
                self.register_buffer(name, self._initial[name].clone())
            elif value is None and spec.default is None:
                setattr(self, name, None)
            else:
                setattr(self, name, check_value(f"{variant}'s {name}", spec, value))

    @staticmethod
    def _learned(
        variant: str, specs: dict[str, Param], learn: tuple[str, ...] | list[str] | None
    ) -> tuple[str, ...]:
        if learn is None:
            return tuple(name for name, spec in specs.items() if spec.init is not None)
        possible = [name for name, spec in specs.items() if spec.kind == "per_head"]
        if not isinstance(learn, (tuple, list)):
            raise TypeError(f"learn must be a tuple of names or None, got {shown(learn)}")
        for name in learn:
            if name not in possible:
                allowed = ", ".join(possible) or "none"
                raise ValueError(
                    f"learn must name learnable parameters of {variant!r} ({allowed}), got "
                    f"{shown(name)}"
                )
        if len(set(learn)) < len(learn):
            raise ValueError(f"learn must name each parameter once, got {learn!r}")
        return tuple(learn)

    def _checked(self, spec: Param, value: Tensor) -> Tensor:
        what = f"{self.variant}'s {spec.name}"
        if spec.kind != "per_head":
            check_value(what, spec, value)
        check_dense(what, value)
        if value.dtype not in DTYPES:
            raise TypeError(f"{what} must be fp16, bf16, fp32 or fp64, got {value.dtype}")
        if value.shape not in ((), (self.num_heads,)):
            raise ValueError(
                f"{what} must have shape () or ({self.num_heads},), got {tuple(value.shape)}"
            )
        check_entries(what, spec, value)
        return value

    def _learn(self, spec: Param, start: Any) -> None:
        what = f"{self.variant}'s {spec.name}"
        if start is None or start is REQUIRED:
            raise ValueError(f"learn: {what} needs an initial value, a float or a tensor (H,)")
        if isinstance(start, Tensor):
            device = start.device
        else:
            number = check_value(what, spec, start, torch.float32)
            # The initial value stays on the CPU even for a module on meta, which would lose it.
            start = torch.full((self.num_heads,), number, dtype=torch.float32, device="cpu")
            device = torch.empty(0).device  # torch's current default device
        start = self._checked(spec, start).expand(self.num_heads)
        check_entries(what, spec, start, torch.float32)
        start = start.detach().clone().float()
        self._initial[spec.name] = start
        if spec.between is None:
            self.register_parameter(spec.name, nn.Parameter(start.to(device, copy=True)))
            return
        # torch.nn.utils.parametrize itself would change the module's class and break pickling.
        if BOUNDED not in self._modules:
            self.add_module(BOUNDED, nn.ModuleDict())
        self._bounded()[spec.name] = Bounded(what, *spec.between, start).to(device=device)

    def reset_parameters(self, names: Iterable[str] | None = None) -> None:
        """Resets parameters to their initial values, also after ``to_empty``.

        Args:
            names: names from `parameter_tensors`; None resets all of them.
        """
        bounded, tensors = self._bounded(), self.parameter_tensors()
        with torch.no_grad():
            for name in tensors if names is None else names:
                start = self._initial[name]
                tensors[name].copy_(bounded[name].inverse(start) if name in bounded else start)

    def parameter_tensors(self) -> dict[str, Tensor]:
        """The tensors of the state dict, keyed by the name of the variant's parameter."""
        bounded = self._bounded()
        return {n: bounded[n].original if n in bounded else getattr(self, n) for n in self._initial}

    def _bounded(self) -> dict[str, Any]:
        """The learned parameters that stay inside an interval, keyed by name."""
        found = self.__dict__.get("_modules", {}).get(BOUNDED)
        return {} if found is None else found._modules

    def __getattr__(self, name: str) -> Any:
        bounded = self._bounded()
        return bounded[name]() if name in bounded else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        bounded = self._bounded()
        if name not in bounded:
            return super().__setattr__(name, value)
        check_dense(bounded[name].name, value)
        with torch.no_grad():
            bounded[name].original.copy_(bounded[name].inverse(value))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cache: Cache | None = None,
        need_weights: bool = False,
        return_lse: bool = False,
        **keywords: Unpack[AttentionKeywords],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the queries to the keys.

        Args:
            q: queries, (B, H, Nq, D).
            k: keys, (B, Hkv, Nk, D).
            v: values, (B, Hkv, Nk, Dv).
            cache: a cache from `new_cache`. q, k and v are then the next tokens; they attend
                causally to all tokens so far and are appended to the cache.
            need_weights: also return the weights, computed from the variant's dense definition.
            return_lse: also return the log-sum-exp, for variants that are a softmax of scores.
            **keywords: the other keywords of `attnzoo.attention`, without the variant's parameters.

        Returns:
            The output (B, H, Nq, Dv). With ``need_weights`` (output, weights (B, H, Nq, Nk)). With
            ``return_lse`` (output, lse (B, H, Nq)).

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        check_dense("q", q)
        if q.dim() == 4 and q.shape[1] != self.num_heads:
            raise ValueError(f"q must have num_heads={self.num_heads} heads, got {tuple(q.shape)}")
        params = self._params()
        for name in ("variant", *params):
            if name in keywords:
                raise TypeError(
                    f"{name} must not be passed to forward: it is set in the constructor"
                )
        options: dict[str, Any] = {**keywords, **params, "return_lse": return_lse}
        if check_bool("need_weights", need_weights):
            if cache is not None:
                raise ValueError("need_weights must be False with a cache, got True")
            return _dense(q, k, v, self.variant, **options)
        if cache is None:
            return attention(q, k, v, self.variant, **options)
        return attend(cache, q, k, v, self.variant, **options)

    if TYPE_CHECKING:
        # torch types Module.__call__ as (...) -> Any, which would hide the result's type.
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: Literal[False] = False, return_lse: Literal[False] = False,
            **keywords: Unpack[AttentionKeywords],
        ) -> Tensor: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: Literal[True], return_lse: Literal[False] = False,
            **keywords: Unpack[AttentionKeywords],
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: Literal[False] = False, return_lse: Literal[True],
            **keywords: Unpack[AttentionKeywords],
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: bool = False, return_lse: bool = False,
            **keywords: Unpack[AttentionKeywords],
        ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
        def __call__(self, *args: Any, **keywords: Any) -> Any: ...

    @overload
    def new_cache(self, max_length: int, kind: Literal["keys"]) -> KVCache: ...
    @overload
    def new_cache(self, max_length: int, kind: Literal["state"]) -> StateCache: ...
    @overload
    def new_cache(self, max_length: int, kind: str | None = None) -> Cache: ...
    def new_cache(self, max_length: int, kind: str | None = None) -> Cache:
        """An empty cache for decoding one batch of sequences.

        Args:
            max_length: number of tokens that a `KVCache` can hold. A `StateCache` has no limit.
            kind: "keys" for a `KVCache`, "state" for a `StateCache` (variants with a linear form
                only). None is "state" where possible, else "keys".

        Notes:
            A state of F features has F·(Dv + 1) numbers per head. Keys and values have D + Dv
            numbers per head and token. The state of `taylor` with D = Dv = 64 (F = 2145) is smaller
            than the keys and values of 1090 or more tokens; use "keys" for shorter sequences.
        """
        if kind not in (None, "keys", "state"):
            raise ValueError(f"kind must be 'keys', 'state' or None, got {shown(kind)}")
        possible = get_variant(self.variant).has_state(**self._params())
        if kind == "state" and not possible:
            raise ValueError(
                f"kind must be 'keys' or None, got 'state': {self.variant!r} has no state with "
                "these parameters"
            )
        keys = KVCache(max_length)  # always created, because it checks max_length
        return StateCache() if possible and kind != "keys" else keys

    def _params(self) -> dict[str, Any]:
        """The variant's parameters; after `shard_heads` only this rank's part of them."""
        values = {p.name: getattr(self, p.name) for p in get_variant(self.variant).params}
        return {name: _local(value) for name, value in values.items()}

    def shard_heads(self, mesh: Any) -> Attention:
        """Shards the parameters over heads for tensor parallelism, in place.

        Parameters of shape (H,) become sharded `DTensor` objects. Rank r keeps the r-th group of
        H / ranks heads, and q must then have H / ranks heads.

        Args:
            mesh: a one-dimensional `torch.distributed.device_mesh.DeviceMesh`.

        Returns:
            The module itself.

        Raises:
            ValueError: num_heads is not a multiple of the number of ranks.
        """
        from torch.distributed.tensor import Shard, distribute_tensor

        ranks = mesh.size()
        if self.num_heads % ranks:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of {ranks} ranks")
        for module in self.modules():
            for name, x in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(x.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(sharded, requires_grad=x.requires_grad))
            for name, x in list(module.named_buffers(recurse=False)):
                if x.dim() == 1:
                    setattr(module, name, distribute_tensor(x, mesh, [Shard(0)]))
        self.num_heads //= ranks
        return self

    def extra_repr(self) -> str:
        """The variant and the values of its parameters, for repr()."""
        shown = []
        for name in [param.name for param in get_variant(self.variant).params]:
            value = getattr(self, name)
            text = _summary(value.detach()) if isinstance(value, Tensor) else f"{value}"
            shown.append(f"{name}={text}" + (" (learned)" if name in self.learned else ""))
        return ", ".join([repr(self.variant), f"num_heads={self.num_heads}", *shown])


def _dense(
    q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv), and the weights (B, H, Nq, Nk) after dropout."""
    weights = attention_weights(q, k, v, variant, **arguments)
    if not isinstance(weights, Tensor):
        raise ValueError("return_lse must be False with need_weights, got True")
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), weights


def _local(value: Any) -> Any:
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return value
    local = getattr(value, "to_local", None)
    return value if local is None else local()


def _summary(x: Tensor) -> str:
    if x.is_meta:
        return "on meta"
    low, high = float(x.min()), float(x.max())
    if math.isclose(low, high, rel_tol=1e-6, abs_tol=1e-12):
        return f"{low:.4g}"
    return f"{low:.4g}…{high:.4g}"
