"""Attention: `attnzoo.attention` as a module that owns the parameters of a variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from attnzoo.core.arguments import Segments, Window, check_softcap
from attnzoo.core.checks import check_bool, check_dense, check_device_and_dtype, check_sizes, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention, attention_weights
from attnzoo.nn.cache import Cache, KVCache, StateCache
from attnzoo.nn.checks import check_options_of, check_positional
from attnzoo.nn.decoding import attend
from attnzoo.nn.parameters import Names, VariantParameters, passed_names
from attnzoo.nn.projections import Projections, split_projected
from attnzoo.nn.sharding import Sharding


class Attention(VariantParameters):
    """`attnzoo.attention` as a module that owns the parameters of a variant.

    Each learned parameter is a `torch.nn.Parameter` under the parameter's own name. Its shape is
    (H,), one value per query head, or (H, …) for a feature map. The module does not project
    queries, keys and values.

    Args:
        variant: a name from `attnzoo.list_variants`.
        num_heads: number of query heads, H.
        learn: names of the parameters to learn. None is the variant's default, as in its paper
            (`Param.init`). () learns nothing.
        softcap: softcap c of every call, as for `attnzoo.attention`; None is no softcap.
        given: names of parameters that the module does not own. Each call must pass them to
            forward as keywords, with values as for `attnzoo.attention`.
        head_dim: number of features of each query and key head, D. Only needed for a variant that
            learns tensors (H, …), such as a feature map. Layers pass it.
        device: device of the parameters; None is torch's default device.
        dtype: dtype of the learned parameters; None is torch's default dtype. Each call casts them
            to fp32, or to fp64 for fp64 inputs.
        **params: values of the variant's parameters: floats or tensors of shape (H,). For a learned
            parameter this is the initial value; the default is the variant's own. For a
            `torch.nn.Parameter` a copy is learned; to learn the tensor itself, or to share it
            between modules, pass it to forward (see ``given``). A parameter with an interval
            (`Param.between`) is learned through a sigmoid or softplus and stays inside.

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
        >>> forget = Attention("forgetting", num_heads=4, given=("log_gates",))
        >>> log_gates = torch.nn.functional.logsigmoid(torch.randn(2, 4, 16))
        >>> forget(q, k, v, is_causal=True, log_gates=log_gates).shape
        torch.Size([2, 4, 16, 8])

    References:
        The paper of each variant is ``attnzoo.get_variant(variant).paper``; the source of each
        initial value is named at the top of the variant's file.

    Notes:
        Exclude these parameters from weight decay with `parameter_groups`: zero is not a neutral
        value for them.

        A learned parameter without an interval may leave its allowed values in training. On a CPU,
        forward then raises a ValueError; on a GPU, values are not read.
    """

    queries = 1  # per head; a wrapper may need more
    projections: Projections | None
    sharding: Sharding | None = None  # see `attnzoo.distributed.shard_sequence`
    shards_heads = False  # whether `shard_heads` was called
    max_logits: Tensor | None = None  # (H,), if a `QKClip` records the largest logits

    def __init__(
        self,
        variant: str,
        num_heads: int,
        *,
        learn: Names | None = None,
        softcap: float | None = None,
        given: Names = (),
        head_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads)
        check_options_of(self, variant, params)
        check_sizes(optional=True, head_dim=head_dim)
        check_device_and_dtype(device, dtype)
        self.num_heads = num_heads
        self.softcap = check_softcap(softcap, torch.float32)
        if softcap is not None and not get_variant(variant).has_logits:
            raise ValueError(
                f"softcap must be None for {variant}, which has no logits, got {softcap}"
            )
        self._create_parameters(
            variant, num_heads, learn, params, given=given, head_dim=head_dim, dtype=dtype
        )
        if device is not None:
            self.to(device=device)
        self.projections = None  # see `projecting_attention`

    @property
    def needs_positions(self) -> str | None:
        """The name of what depends on the positions of queries among the keys, or None."""
        return get_variant(self.variant).needs_positions

    @property
    def uses_hidden_states(self) -> bool:
        """Whether `projected` makes something."""
        return self.projections is not None

    def reset_parameters(self, names: Iterable[str] | None = None) -> None:
        """Resets parameters to their initial values, also after ``to_empty``.

        Args:
            names: names from `parameter_tensors`; None resets all of them, and the projections.
        """
        self._reset(self.parameter_tensors() if names is None else names)
        if names is None and self.projections is not None:
            self.projections.reset_parameters()

    def projected(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """The parameters that the module makes from the hidden states, keyed by name.

        Args:
            query: hidden states from which the queries are made, (B, Nq, features).
            key: hidden states from which the keys are made, (B, Nk, features).

        Returns:
            Tensors (B, H, Nq) or (B, H, Nk) for forward. {} unless the module belongs to a
            `MultiheadAttention` or `Transformer` whose variant has such parameters.
        """
        return {} if self.projections is None else self.projections(query, key)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Any,
        cache: Cache | None = None,
        need_weights: bool = False,
        return_lse: bool = False,
        return_max_logits: bool = False,
        **keywords: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Attention of the queries to the keys.

        Args:
            q: queries, (B, H, Nq, D).
            k: keys, (B, Hkv, Nk, D).
            v: values, (B, Hkv, Nk, Dv).
            cache: a cache from `new_cache`. q, k and v are then the next tokens; they attend
                causally to all tokens so far and are appended to the cache.
            need_weights: also return the weights, computed from the variant's dense definition.
            return_lse: also return the log-sum-exp, for variants that are a softmax of scores.
            return_max_logits: also return the largest logit of each head, for variants with logits.
            **keywords: the other keywords of `attnzoo.attention` except softcap, and the parameters
                named by ``given``. Other parameters of the variant are not accepted.

        Returns:
            The output (B, H, Nq, Dv). With ``need_weights`` (output, weights (B, H, Nq, Nk)). With
            ``return_lse`` (output, lse (B, H, Nq)). With ``return_max_logits`` the maxima (H,) come
            last.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        check_positional("q, k and v", others)
        check_dense("q", q)
        if q.dim() == 4 and q.shape[1] != self.num_heads:
            raise ValueError(f"q must have num_heads={self.num_heads} heads, got {tuple(q.shape)}")
        params = self._params()
        for name in ("variant", "softcap", *params):
            if name in keywords:
                raise TypeError(
                    f"{name} must not be passed to forward: it is set in the constructor"
                )
        for name in self.given:
            if name not in keywords:
                raise TypeError(
                    f"{self.variant}'s {name} must be passed to forward, because given is "
                    f"{self.given}"
                )
        options: dict[str, Any] = {**keywords, **params, "return_lse": return_lse}
        records = self.training and self.max_logits is not None
        if records and not return_max_logits:
            self._check_recorded(cache)
        options["return_max_logits"] = return_max_logits or records
        if self.softcap is not None:
            options["softcap"] = self.softcap
        result = self._attend(q, k, v, cache, need_weights, options)
        return self._recorded(result, return_max_logits) if records else result

    def _check_recorded(self, cache: Cache | None) -> None:
        """Raises if a call has no largest logits for `QKClip`."""
        if self.sharding is not None or isinstance(cache, StateCache):
            what = "a StateCache" if self.sharding is None else "a sharded sequence"
            raise ValueError(
                f"QKClip does not support {what} in training mode: call eval() of the module or "
                "remove() of the QKClip"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, which no `QKClip` clips: they record no logits."""
        return {name: x for name, x in vars(self).items() if name != "max_logits"}

    def _recorded(
        self, result: Tensor | tuple[Tensor, ...], return_max_logits: bool
    ) -> Tensor | tuple[Tensor, ...]:
        """Adds the maxima, the last of the results, to `max_logits`; returns the others."""
        *others, largest = result
        assert self.max_logits is not None
        self.max_logits = torch.maximum(self.max_logits.to(largest), largest)
        if return_max_logits:
            return result
        return others[0] if len(others) == 1 else tuple(others)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, need_weights: bool,
        options: dict[str, Any],
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        if check_bool("need_weights", need_weights):
            if self.sharding is not None:
                raise ValueError("need_weights must be False for a sharded sequence, got True")
            if cache is not None:
                raise ValueError("need_weights must be False with a cache, got True")
            return _dense(q, k, v, self.variant, **options)
        if self.sharding is not None:
            if cache is not None:
                raise ValueError("cache must be None for a sharded sequence")
            return self.sharding.attention(q, k, v, self.variant, **options)
        if cache is None:
            return attention(q, k, v, self.variant, **options)
        return attend(cache, q, k, v, self.variant, **options)

    if TYPE_CHECKING:
        # torch types Module.__call__ as (...) -> Any, which would hide the result's type.
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: Literal[False] = False, return_lse: Literal[False] = False,
            attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False, window: Window = None, alibi: Tensor | None = None,
            relative_bias: Tensor | None = None, segment_ids: Segments = None,
            dropout_p: float = 0.0, backend: str | None = None, **params: Tensor,
        ) -> Tensor: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: Literal[True], return_lse: Literal[False] = False,
            attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False, window: Window = None, alibi: Tensor | None = None,
            relative_bias: Tensor | None = None, segment_ids: Segments = None,
            dropout_p: float = 0.0, backend: str | None = None, **params: Tensor,
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: Literal[False] = False, return_lse: Literal[True],
            attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False, window: Window = None, alibi: Tensor | None = None,
            relative_bias: Tensor | None = None, segment_ids: Segments = None,
            dropout_p: float = 0.0, backend: str | None = None, **params: Tensor,
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: bool = False, return_lse: bool = False,
            attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False, window: Window = None, alibi: Tensor | None = None,
            relative_bias: Tensor | None = None, segment_ids: Segments = None,
            dropout_p: float = 0.0, backend: str | None = None, **params: Tensor,
        ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, *, cache: Cache | None = None,
            need_weights: bool = False, return_lse: bool = False,
            return_max_logits: Literal[True],
            attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False, window: Window = None, alibi: Tensor | None = None,
            relative_bias: Tensor | None = None, segment_ids: Segments = None,
            dropout_p: float = 0.0, backend: str | None = None, **params: Tensor,
        ) -> tuple[Tensor, ...]: ...  # fmt: skip
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
            numbers per head and token. With F = 2145 and D = Dv = 64 the state is smaller than the
            keys and values of 1090 or more tokens; use "keys" for shorter sequences.
        """
        if kind not in (None, "keys", "state"):
            raise ValueError(f"kind must be 'keys', 'state' or None, got {shown(kind)}")
        params = {**self._params(), **dict.fromkeys(self.given)}
        possible = self.softcap is None and get_variant(self.variant).has_state(**params)
        if kind == "state" and not possible:
            what = "these parameters" if self.softcap is None else "a softcap"
            raise ValueError(
                f"kind must be 'keys' or None, got 'state': {self.variant!r} has no state with "
                f"{what}"
            )
        keys = KVCache(max_length)  # always created, because it checks max_length
        return StateCache() if possible and kind != "keys" else keys

    def shard_heads(self, mesh: Any) -> Attention:
        """Shards the parameters over heads for tensor parallelism, in place.

        Parameters of shape (H,) become sharded `DTensor` objects. Rank r keeps the r-th group of
        H / ranks heads, and q must then have H / ranks heads.

        Args:
            mesh: a one-dimensional `torch.distributed.device_mesh.DeviceMesh`.

        Returns:
            The module itself.

        Raises:
            ValueError: num_heads is not a multiple of the number of ranks, the heads or the
                module's sequence are sharded already, or mesh has more than one dimension.
            TypeError: mesh is not a DeviceMesh.
        """
        from torch.distributed.tensor import Shard, distribute_tensor  # slow to import

        from attnzoo.core.rank_agreement import ranks_of

        if self.shards_heads:
            raise ValueError("shard_heads must be called once")
        if self.sharding is not None:
            raise ValueError("shard_heads must be called before attnzoo.distributed.shard_sequence")
        ranks = ranks_of(mesh).count
        if self.num_heads % ranks:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of {ranks} ranks")
        for module in self.modules():
            for name, x in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(x.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(sharded, requires_grad=x.requires_grad))
            for name, x in list(module.named_buffers(recurse=False)):
                if x.dim() > 0:
                    setattr(module, name, distribute_tensor(x, mesh, [Shard(0)]))
        self.num_heads //= ranks
        self.shards_heads = True
        return self

    def extra_repr(self) -> str:
        """The variant and the values of its parameters, for repr()."""
        softcap = [] if self.softcap is None else [f"softcap={self.softcap}"]
        heads = f"num_heads={self.num_heads}"
        return ", ".join([repr(self.variant), heads, *self._shown(), *softcap])


def projecting_attention(
    variant: str,
    num_heads: int,
    query_dim: int,
    key_dim: int,
    head_dim: int,
    options: dict[str, Any],
    passed: Names = (),
    **kind: Any,
) -> Attention:
    """An `Attention` of a layer that sees the hidden states; it owns `Projections` if needed.

    Args:
        variant: a name from `attnzoo.list_variants`.
        num_heads: number of query heads.
        query_dim: number of features of the hidden states of the queries.
        key_dim: number of features of the hidden states of the keys.
        head_dim: number of features of each query and key head.
        options: ``learn``, ``softcap`` and parameters of the variant, as for `Attention`. The value
            "projected" asks for a parameter made from the hidden states.
        passed: names of parameters that each call passes: ``given`` of `Attention`.
        **kind: device and dtype of the parameters.
    """
    if "head_dim" in options:
        raise TypeError("head_dim is an argument of Attention only: this layer sets it")
    specs = {param.name: param for param in get_variant(variant).params}
    passed = passed_names(variant, specs, passed)
    for name in passed:
        if name in options:
            raise TypeError(f"{name} must not be set if given names it, got {shown(options[name])}")
    names, options = split_projected(variant, options)
    names = tuple(name for name in names if name not in passed)
    others = {**kind, **options, "given": (*names, *passed)}
    new = Attention(variant, num_heads, head_dim=head_dim, **others)
    if names:
        new.projections = Projections(variant, names, num_heads, query_dim, key_dim, **kind)
    return new


def _dense(q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> tuple[Tensor, ...]:
    """The output (B, H, Nq, Dv), the weights (B, H, Nq, Nk) after dropout, and the maxima."""
    if check_bool("return_lse", arguments["return_lse"]):
        raise ValueError("return_lse must be False with need_weights, got True")
    result = attention_weights(q, k, v, variant, **arguments)
    weights, *largest = (result,) if isinstance(result, Tensor) else result
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), weights, *largest
