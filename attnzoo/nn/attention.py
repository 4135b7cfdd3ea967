"""Attention: `attnzoo.attention` as a module that owns the parameters of a variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torch import Tensor, nn

from attnzoo.core.checks import check_bool, check_dense, check_sizes, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention, attention_weights
from attnzoo.nn.cache import Cache, KVCache, StateCache
from attnzoo.nn.decoding import AttentionKeywords, attend
from attnzoo.nn.parameters import VariantParameters


class Attention(VariantParameters):
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
        check_sizes(num_heads=num_heads)
        self.num_heads = num_heads
        self._own(variant, num_heads, learn, params)

    def reset_parameters(self, names: Iterable[str] | None = None) -> None:
        """Resets parameters to their initial values, also after ``to_empty``.

        Args:
            names: names from `parameter_tensors`; None resets all of them.
        """
        self._reset(self.parameter_tensors() if names is None else names)

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
        return ", ".join([repr(self.variant), f"num_heads={self.num_heads}", *self._shown()])


def _dense(
    q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Nq, Dv), and the weights (B, H, Nq, Nk) after dropout."""
    weights = attention_weights(q, k, v, variant, **arguments)
    if not isinstance(weights, Tensor):
        raise ValueError("return_lse must be False with need_weights, got True")
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), weights
