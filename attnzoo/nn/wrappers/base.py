"""Wrapper: the base class of modules that combine the outputs of an `Attention`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attnzoo.core.arguments import check_heads
from attnzoo.core.call import widened
from attnzoo.core.checks import (
    DTYPES,
    check_bool,
    check_dense,
    check_device_and_dtype,
    check_sizes,
    is_int,
    shown,
)
from attnzoo.core.registry import get_variant
from attnzoo.core.relative_bias import check_shape
from attnzoo.functional.prepare import autocast_dtype
from attnzoo.nn.attention import projecting_attention
from attnzoo.nn.cache import Cache
from attnzoo.nn.checks import check_options_of, check_positional
from attnzoo.nn.projections import HeadProjection


def check_layer(layer: Any) -> None:
    """Raises unless ``layer`` is the number of a layer."""
    if not is_int(layer) or layer < 0:
        raise ValueError(f"layer must be an int >= 0, got {shown(layer)}")


def check_per(per: Any) -> None:
    """Raises unless ``per`` says what has one number: each element or each head."""
    if per not in ("element", "head"):
        raise ValueError(f"per must be 'element' or 'head', got {shown(per)}")


class Wrapper(nn.Module):
    """The base class of wrappers: an `Attention` of M heads for each head of the output.

    A wrapper changes what the attention gets, and combines its M outputs per head to one. A host,
    such as `Transformer`, makes Q queries per head of the output. A wrapper may have a gate: G
    numbers per token and head, x·Wᵀ of the hidden states x from which the queries are made. W is 0
    initially.

    Args:
        variant: a name from `attnzoo.list_variants`.
        num_heads: number of heads of the output, H.
        embed_dim: number of features of the hidden states, E.
        qk_dim: number of features of each query and key head, D; None is E // H.
        v_dim: number of features of each value head, Dv; None is E // H.
        key_dim: number of features of the hidden states of the keys; None is E.
        layer: number of the layer in its model, from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **options: ``learn``, ``softcap``, ``given`` and parameters of the variant, as for
            `Attention` with M·H heads. A parameter in ``given`` has H heads in each call, and all M
            attentions of a head get the same value.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> from attnzoo.nn import WRAPPERS, Wrapper
        >>> attend = WRAPPERS["mixture"]("softmax", num_heads=4, embed_dim=32)
        >>> isinstance(attend, Wrapper), attend.queries, attend.maps
        (True, 2, 2)

    Attributes:
        num_heads: H.
        queries: Q.
        maps: M.
        attention: the `Attention` of M·H heads.
    """

    queries = 1
    maps = 1
    gates = 0
    positional = False  # whether the output depends on which of the keys is that of the query
    length_gain = False  # whether the wrapper scales queries by the number of keys
    nonlinear_queries = False  # whether the queries of the attention are nonlinear in q

    def __init__(
        self,
        variant: str,
        num_heads: int,
        embed_dim: int,
        *,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        key_dim: int | None = None,
        layer: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, embed_dim=embed_dim)
        check_options_of(self, variant, options)
        check_device_and_dtype(device, dtype)
        self.embed_dim, self.key_dim = embed_dim, key_dim or embed_dim
        check_sizes(optional=True, qk_dim=qk_dim, v_dim=v_dim, key_dim=key_dim)
        check_layer(layer)
        if embed_dim % num_heads and None in (qk_dim, v_dim):
            raise ValueError(
                f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}: give qk_dim "
                "and v_dim"
            )
        self.num_heads, self.layer = num_heads, layer
        self.qk_dim, self.v_dim = qk_dim or embed_dim // num_heads, v_dim or embed_dim // num_heads
        kind = {"device": device, "dtype": dtype}
        passed = options.pop("given", ())
        self._configure(**kind)
        heads = self.maps * num_heads
        self.attention = projecting_attention(
            variant, heads, embed_dim, self.key_dim, self.map_dim, options, passed, **kind
        )
        self.passed = tuple(passed)
        self.gate = None
        if self.gates:
            self.gate = HeadProjection(embed_dim, self.gates * num_heads, None, **kind)

    @property
    def map_dim(self) -> int:
        """The number of features of each query and key of the attention."""
        return self.qk_dim

    def _configure(self, **kind: Any) -> None:
        """Sets the sizes of the wrapper, and creates its own parameters."""

    @classmethod
    def own_arguments(cls) -> dict[str, Any]:
        """The arguments that only this wrapper has, with their default values."""
        shared = inspect.signature(Wrapper).parameters
        return {
            name: parameter.default
            for name, parameter in inspect.signature(cls).parameters.items()
            if name not in shared
        }

    @property
    def variant(self) -> str:
        """The name of the wrapped variant."""
        return self.attention.variant

    @property
    def softcap(self) -> float | None:
        """The softcap of the wrapped attention."""
        return self.attention.softcap

    @property
    def needs_positions(self) -> str | None:
        """What depends on positions, as `Attention.needs_positions`."""
        return self.attention.needs_positions or (type(self).__name__ if self.positional else None)

    @property
    def uses_hidden_states(self) -> bool:
        """Whether `projected` makes something."""
        return self.gates > 0 or self.attention.uses_hidden_states

    def reset_parameters(self) -> None:
        """Resets all parameters to their initial values."""
        self.attention.reset_parameters()
        if self.gate is not None:
            self.gate.reset_parameters()

    def projected(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """What the module makes from the hidden states, as keywords for `forward`.

        Args:
            query: hidden states from which the queries are made, (B, Nq, E).
            key: hidden states from which the keys are made, (B, Nk, key_dim).

        Returns:
            "gate", (B, H, Nq, G), if the wrapper has a gate; and the parameters of the variant that
            have a projection, (B, M·H, Nq) or (B, M·H, Nk).

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        for name, x, features in (("query", query, self.embed_dim), ("key", key, self.key_dim)):
            check_dense(name, x)
            if x.dim() != 3 or x.shape[-1] != features:
                raise ValueError(f"{name} must be (B, N, {features}), got {tuple(x.shape)}")
        made = self.attention.projected(query, key)
        if self.gate is not None:
            made["gate"] = rearrange(self.gate(query), "b (h g) n -> b h n g", g=self.gates)
        return made

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Any,
        gate: Tensor | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
        **keywords: Any,
    ) -> Any:
        """Attention of the queries to the keys.

        Args:
            q: queries, (B, Q·H, Nq, D). The Q queries of a head are adjacent.
            k: keys, (B, Hkv, Nk, D). Hkv divides H.
            v: values, (B, Hkv, Nk, Dv).
            gate: the gate from `projected`, (B, H, Nq, G); None if the wrapper has none.
            cache: a cache from `new_cache`, as for `Attention`.
            need_weights: also return the weights.
            **keywords: the other keywords of `Attention.forward` except ``return_lse`` and
                ``return_max_logits``, and the parameters named by ``given``. ``scale`` is that of D
                features. ``alibi`` and ``relative_bias`` have H heads, masks have 1 or H.
                ``enable_gqa`` is True by default.

        Returns:
            The output (B, H, Nq, Dv). With ``need_weights`` (output, weights (B, H, Nq, Nk)): the
            weights of the maps are combined like their outputs.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        check_positional("q, k and v", others)
        self._check_inputs(q, k, v, keywords.pop("enable_gqa", True))
        self._check_gate(gate, q)
        gate = None if gate is None else widened(gate)  # outputs are combined in fp32
        for name in ("return_lse", "return_max_logits"):
            if check_bool(name, keywords.pop(name, False)):
                raise ValueError(f"{name} must be False for {type(self).__name__}, got True")
        options = {**keywords, "cache": cache, "enable_gqa": True}
        for name in ("alibi", "relative_bias"):
            if isinstance(values := options.get(name), Tensor):
                check_shape(name, values, self.num_heads, "head")
                options[name] = self._spread(values, 0)
        kinds = {param.name: param.kind for param in get_variant(self.variant).params}
        for name in self.passed:
            if isinstance(values := options.get(name), Tensor) and values.dim() > 0:
                dim = 1 if kinds[name] == "per_head" and values.dim() == 3 else 0
                options[name] = self._per_map(f"{self.variant}'s {name}", values, dim)
        if isinstance(mask := options.get("attn_mask"), Tensor) and mask.dim() in (3, 4):
            options["attn_mask"] = self._per_map("attn_mask", mask, -3, or_one=True)
        values = v
        q, k, v, options = self._inputs(q, k, v, options)
        check_bool("need_weights", need_weights)
        result: Any = self.attention(q, k, v, need_weights=need_weights, **options)
        out, weights = result if need_weights else (result, None)
        out = self._output(self._mixed(out, gate), gate, values).to(out.dtype)
        return out if weights is None else (out, self._mixed(weights, gate).to(weights.dtype))

    def _check_inputs(self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: Any) -> None:
        for name, x, dim in (("q", q, self.qk_dim), ("k", k, self.qk_dim), ("v", v, self.v_dim)):
            check_dense(name, x)
            if x.dim() != 4:
                raise ValueError(f"{name} must have 4 dimensions, got {tuple(x.shape)}")
            if x.dtype not in DTYPES:
                raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
            if autocast_dtype(x) != autocast_dtype(q):
                raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
            if x.shape[-1] != dim:
                size = f"{'v_dim' if name == 'v' else 'qk_dim'}={dim}"
                raise ValueError(f"{name} must have {size} features, got {tuple(x.shape)}")
        if q.shape[1] != self.queries * self.num_heads:
            raise ValueError(
                f"q must have {self.queries * self.num_heads} heads ({self._needed()}), got "
                f"{tuple(q.shape)}"
            )
        if k.shape[1] < 1 or self.num_heads % k.shape[1]:
            raise ValueError(
                f"k must have a divisor of num_heads={self.num_heads} heads, got {tuple(k.shape)}"
            )
        check_heads(("q", "k"), self.num_heads, k.shape[1], enable_gqa)
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"k must have q's B={q.shape[0]}, got {tuple(k.shape)}")
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"v must have the (B, Hkv, Nk) of k, {tuple(k.shape[:3])}, got {tuple(v.shape)}"
            )

    def _per_map(self, what: str, x: Tensor, dim: int, or_one: bool = False) -> Tensor:
        """A tensor of H heads for the M·H heads of the attention; it may have 1 if ``or_one``."""
        if or_one and x.shape[dim] == 1:
            return x
        if x.shape[dim] != self.num_heads:
            allowed = f"1 or {self.num_heads}" if or_one else self.num_heads
            raise ValueError(f"{what} must have {allowed} heads, got {tuple(x.shape)}")
        return self._spread(x, dim)

    def _check_gate(self, gate: Any, q: Tensor) -> None:
        if not self.gates:
            if gate is not None:
                raise ValueError(f"gate must be None for {type(self).__name__}, got {shown(gate)}")
            return
        shape = (q.shape[0], self.num_heads, q.shape[2], self.gates)
        if gate is None:
            raise TypeError(
                f"gate must be given to {type(self).__name__}, a tensor {shape} from projected"
            )
        check_dense("gate", gate)
        if gate.dtype not in DTYPES:
            raise TypeError(f"gate must be fp16, bf16, fp32 or fp64, got {gate.dtype}")
        if gate.device != q.device:
            raise ValueError(f"gate must be on q's device {q.device}, got {gate.device}")
        if gate.shape != shape:
            raise ValueError(f"gate must have shape {shape}, got {tuple(gate.shape)}")

    # What a wrapper may change ------------------------------------------------------------

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q (B, M·H, Nq, ·), k, v and keywords for the attention."""
        return q, k, v, options

    def _spread(self, x: Tensor, dim: int) -> Tensor:
        """Repeats a tensor with one entry per head of the output, for the maps of each head."""
        return x.repeat_interleave(self.maps, dim) if self.maps > 1 else x

    def _mixed(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """The combination (B, H, Nq, ·) of outputs or weights (B, M·H, Nq, ·)."""
        return x

    def _output(self, out: Tensor, gate: Tensor | None, v: Tensor) -> Tensor:
        """The output of the wrapper from the combination of the outputs, (B, H, Nq, Dv).

        v are the values that the wrapper got, (B, Hkv, Nk, Dv).
        """
        return out

    def _needed(self) -> str:
        heads = f"num_heads={self.num_heads}"
        return heads if self.queries == 1 else f"{self.queries} · {heads}"

    # --------------------------------------------------------------------------------------

    def new_cache(self, max_length: int, kind: str | None = None) -> Cache:
        """An empty cache, as from `Attention.new_cache`."""
        return self.attention.new_cache(max_length, kind)

    def extra_repr(self) -> str:
        """The number of heads, for repr()."""
        return f"num_heads={self.num_heads}"
