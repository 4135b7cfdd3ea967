"""Attention: `attnzoo.attention` as a module that owns a variant's learned parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.core.checks import (
    DTYPES,
    check_bool,
    check_dense,
    check_sizes,
    did_you_mean,
    is_finite,
    is_number,
    plain,
    shown,
)
from attnzoo.core.forms import REQUIRED, Param
from attnzoo.core.parameters import check_entries, check_value
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention, attention_weights
from attnzoo.nn.cache import Cache, KVCache, StateCache
from attnzoo.nn.decoding import attend

BOUNDED = "parametrizations"


class _Bounded(nn.Module):
    """A learned value inside an interval, a thousandth of it off either end, in fp32.

    What is learned is ``original``: the value is low + width · sigmoid(original).
    """

    def __init__(self, what: str, low: float, high: float, start: Tensor) -> None:
        super().__init__()
        self.what = what
        edge = (high - low) * 1e-3
        self.low, self.width = low + edge, high - low - 2 * edge
        self.original = nn.Parameter(self.inverse(start))

    def forward(self) -> Tensor:
        raw = self.original
        raw = raw if raw.dtype == torch.float64 else raw.float()
        return self.low + self.width * raw.sigmoid()

    def inverse(self, value: Tensor) -> Tensor:
        high = self.low + self.width
        if not value.is_meta and not bool(((value > self.low) & (value < high)).all()):
            raise ValueError(
                f"{self.what} must start inside ({self.low:g}, {high:g}) to be learned, got "
                f"{value.tolist()}"
            )
        return ((value - self.low) / self.width).logit()


class Attention(nn.Module):
    """`attnzoo.attention` with the parameters of a variant, those it learns among them.

    Args:
        variant: a name from `attnzoo.list_variants`.
        num_heads: of the queries, H.
        learn: names of parameters to learn, each an fp32 `torch.nn.Parameter` of shape (H,) under
            its own name. None learns those which the variant's paper learns (ssmax: s, sink: b,
            asentmax: beta and gamma); () learns nothing.
        **params: of the variant. For a learned parameter the initial value, a float or a tensor
            (H,); without it the variant's initial value. A parameter with an allowed range
            (entmax's alpha) is learned through a sigmoid and stays inside.

    Shapes:
        forward(q (B, H, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv), cache=None,
        need_weights=False, **keywords) with the keywords of `attnzoo.attention` -> (B, H, Nq, Dv).
        With a cache, from `new_cache`, q, k and v are the next tokens, causal over all so far.
        With ``need_weights`` -> (output, weights (B, H, Nq, Nk)), from the dense definition.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Attention
        >>> attend = Attention("ssmax", num_heads=4)
        >>> attend
        Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    Sources of the initial values: the variants' own files. Exclude these parameters from weight
    decay: their zero is not neutral.
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
        # Whoever hands in a torch.nn.Parameter wants it learned.
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
                raise TypeError(f"variant {variant!r} requires the parameter {name!r}: {spec.doc}")
            elif isinstance(value, Tensor):
                # Its own: checkpoints hold no tensor twice.
                self._initial[name] = self._tensor(spec, value).detach().clone()
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
                raise ValueError(f"learn: {variant!r} can learn {allowed}; got {shown(name)}")
        if len(set(learn)) < len(learn):
            raise ValueError(f"learn must name each parameter once, got {learn!r}")
        return tuple(learn)

    def _tensor(self, spec: Param, value: Tensor) -> Tensor:
        """A tensor given for a parameter, checked."""
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
            raise ValueError(f"learn: give {what} an initial value, a float or a tensor (H,)")
        if isinstance(start, Tensor):
            device = start.device
        else:
            number = check_value(what, spec, start, torch.float32)
            # Kept on the CPU, for a module that is made on meta: there it would have no value.
            start = torch.full((self.num_heads,), number, dtype=torch.float32, device="cpu")
            device = torch.empty(0).device  # torch's default, or that of `with torch.device(...)`
        start = self._tensor(spec, start).expand(self.num_heads)
        check_entries(what, spec, start, torch.float32)
        start = start.detach().clone().float()
        self._initial[spec.name] = start
        if spec.between is None:
            self.register_parameter(spec.name, nn.Parameter(start.to(device, copy=True)))
            return
        # Named as torch.nn.utils.parametrize would name it, so that older checkpoints load. That
        # one changes the module's class, and such a module cannot be pickled.
        if BOUNDED not in self._modules:
            self.add_module(BOUNDED, nn.ModuleDict())
        self._bounded()[spec.name] = _Bounded(what, *spec.between, start).to(device=device)

    def reset_parameters(self, names: Iterable[str] | None = None) -> None:
        """Back to the initial values; also after ``to_empty`` of a module made on another device.

        Args:
            names: of the variant's parameters that are tensors here; None is all of them.
        """
        bounded, held = self._bounded(), self.held()
        with torch.no_grad():
            for name in held if names is None else names:
                start = self._initial[name]
                held[name].copy_(bounded[name].inverse(start) if name in bounded else start)

    def held(self) -> dict[str, Tensor]:
        """The tensors of the state dict, by the names of the variant's parameters."""
        bounded = self._bounded()
        return {n: bounded[n].original if n in bounded else getattr(self, n) for n in self._initial}

    def _bounded(self) -> dict[str, Any]:
        """The learned values that are kept inside an interval."""
        held = self.__dict__.get("_modules", {}).get(BOUNDED)
        return {} if held is None else held._modules

    def __getattr__(self, name: str) -> Any:
        bounded = self._bounded()
        return bounded[name]() if name in bounded else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        bounded = self._bounded()
        if name not in bounded:
            return super().__setattr__(name, value)
        check_dense(bounded[name].what, value)
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
        **keywords: Any,
    ) -> Any:
        """`attnzoo.attention` of this variant; see there for the keywords."""
        check_dense("q", q)
        if q.dim() == 4 and q.shape[1] != self.num_heads:
            raise ValueError(f"q must have num_heads={self.num_heads} heads, got {tuple(q.shape)}")
        own = self._own()
        for name in ("variant", *own):
            if name in keywords:
                raise TypeError(f"{name} belongs to the module: set it when it is made")
        if check_bool("need_weights", need_weights):
            if cache is not None:
                raise ValueError("need_weights must be False with a cache, got True")
            return _dense(q, k, v, self.variant, **keywords, **own)
        if cache is None:
            return attention(q, k, v, self.variant, **keywords, **own)
        return attend(cache, q, k, v, self.variant, **keywords, **own)

    def new_cache(self, max_length: int, kind: str | None = None) -> Cache:
        """An empty cache for decoding, one per sequence or batch of sequences.

        Args:
            max_length: tokens that it can hold. A state has no such limit, and takes none of it.
            kind: "keys", a `KVCache`; "state", a `StateCache`, for variants with a linear form.
                None is "state" where there is one. That is F·(Dv + 1) numbers per head where keys
                and values are D + Dv per token: `taylor` at D = 64 (F = 2145) breaks even at 1089
                tokens, and wants "keys" below.
        """
        if kind not in (None, "keys", "state"):
            raise ValueError(f"kind must be 'keys', 'state' or None, got {shown(kind)}")
        possible = get_variant(self.variant).has_state(**self._own())
        if kind == "state" and not possible:
            raise ValueError(
                f"kind must be 'keys': {self.variant!r} has no state with these parameters "
                "(Variant.has_state); got 'state'"
            )
        keys = KVCache(max_length)  # whatever it will be: max_length is checked
        return StateCache() if possible and kind != "keys" else keys

    def _own(self) -> dict[str, Any]:
        """The variant's parameters; of those that `shard_heads` has spread, this rank's part."""
        values = {p.name: getattr(self, p.name) for p in get_variant(self.variant).params}
        return {name: _local(value) for name, value in values.items()}

    def shard_heads(self, mesh: Any) -> Attention:
        """For tensor parallelism over heads: rank r of a 1-D mesh gets its part of them, in order.

        Parameters (H,) become `DTensor` s, sharded; q is then to have H / ranks heads. In place.
        """
        from torch.distributed.tensor import Shard, distribute_tensor

        ranks = mesh.size()
        if self.num_heads % ranks:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of {ranks} ranks")
        for module in self.modules():
            for name, x in list(module.named_parameters(recurse=False)):
                spread = distribute_tensor(x.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(spread, requires_grad=x.requires_grad))
            for name, x in list(module.named_buffers(recurse=False)):
                if x.dim() == 1:
                    setattr(module, name, distribute_tensor(x, mesh, [Shard(0)]))
        self.num_heads //= ranks
        return self

    def extra_repr(self) -> str:
        shown = []
        for name in [param.name for param in get_variant(self.variant).params]:
            value = getattr(self, name)
            text = _summary(value.detach()) if isinstance(value, Tensor) else f"{value}"
            shown.append(f"{name}={text}" + (" (learned)" if name in self.learned else ""))
        return ", ".join([repr(self.variant), f"num_heads={self.num_heads}", *shown])


def _dense(
    q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Output and weights, these after dropout, as they meet the values."""
    weights = attention_weights(q, k, v, variant, **arguments)
    if not isinstance(weights, Tensor):
        raise ValueError("return_lse must be False with need_weights, got True")
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), weights


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """For an optimizer: weight decay for a model, none for what its variants learn.

    Zero is not neutral for a scale or a sink, so decay towards it is no prior. All else, biases and
    norms too, is in the first group.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Transformer, parameter_groups
        >>> model = Transformer(99, embed_dim=32, num_heads=4, depth=2, variant="ssmax")
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
        >>> [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups]
        [(14, 0.1), (2, 0.0)]
    """
    check_module("model", model)
    weight_decay = plain(weight_decay)
    if not is_number(weight_decay):
        raise TypeError(
            f"weight_decay must be a finite number of at least 0, got {shown(weight_decay)}"
        )
    if not (weight_decay >= 0 and is_finite(weight_decay)):
        raise ValueError(
            f"weight_decay must be a finite number of at least 0, got {shown(weight_decay)}"
        )
    own = [p for m in model.modules() if isinstance(m, Attention) for p in m.parameters()]
    kept = {id(p) for p in own}
    others = [p for p in model.parameters() if id(p) not in kept]
    groups = ((others, weight_decay), (list(dict.fromkeys(own)), 0.0))
    return [{"params": found, "weight_decay": decay} for found, decay in groups if found]


def check_module(what: str, x: Any) -> None:
    if not isinstance(x, nn.Module):
        raise TypeError(f"{what} must be a torch.nn.Module, got {shown(x)}")


def check_heads(num_heads: int, num_kv_heads: int | None, **divided: int) -> int:
    """The heads of keys and values; H must divide what is ``divided`` among heads, they H."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, size in divided.items():
        if size % num_heads:
            raise ValueError(f"{name}={size} is not a multiple of num_heads={num_heads}")
    if num_heads % kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={kv_heads}")
    return kv_heads


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
