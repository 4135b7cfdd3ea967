"""MultiheadAttention: torch's layer with any variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.checks import (
    DTYPES,
    check_bool,
    check_dense,
    check_device_and_dtype,
    check_probability,
    check_sizes,
    is_dtensor,
)
from attnzoo.core.registry import get_variant
from attnzoo.nn.attention import Attention
from attnzoo.nn.checks import (
    check_appended,
    check_cross_attention,
    check_heads,
    check_like,
    check_not_of_layers,
    check_options_of,
    check_plain_layer,
    check_queries,
    check_table_positions,
)
from attnzoo.nn.masks import attended
from attnzoo.nn.parameters import Names
from attnzoo.nn.wrappers import Choice, Wrapper, host_attention


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with the weights of a variant.

    Constructor, forward and state_dict are those of torch's layer. The learned parameters of the
    variant are added under ``attend``; checkpoints of torch's layer do not have them, so load those
    with ``strict=False``. With ``variant="softmax"`` outputs and gradients equal torch's.

    Args:
        embed_dim: number of features of queries and outputs, E.
        num_heads: number of query heads, H.
        dropout: dropout probability of the weights in training, below 1.
        bias: whether the projections have a bias.
        add_bias_kv: whether to append a learned key and value. Must be False for variants whose
            weights depend on positions.
        add_zero_attn: whether to append a key and a value of zeros. Must be False likewise.
        kdim: number of features of ``key``; None is E.
        vdim: number of features of ``value``; None is E.
        batch_first: whether inputs and outputs are (B, N, E) instead of (N, B, E).
        device: device of the parameters.
        dtype: dtype of the projections.
        variant: a name from `attnzoo.list_variants`.
        num_kv_heads: number of key and value heads, a divisor of H; None is H.
        learn: names of the variant's parameters to learn, as for `Attention`.
        softcap: softcap of the logits, as for `Attention`.
        wrapper: a name such as "output_gate" or a pair (name, arguments), as for `Transformer`.
            With Q queries per head (see `Wrapper`) the matrix of the queries has Q·E rows, and
            checkpoints of torch's layer do not load if Q > 1. None is no wrapper.
        layer: number of the layer in its model, from 0, for wrappers that depend on it.
        **params: parameters of the variant, as for `Attention`. If a parameter has a projection,
            and no value is given here, the layer learns the projection: from ``key`` for one value
            per key, from ``query`` for one per query. The parameter ``bias`` of the variant sigmoid
            is set by ``layer.attend = Attention("sigmoid", num_heads, bias=…)``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import MultiheadAttention
        >>> layer = MultiheadAttention(64, 4, batch_first=True, variant="entmax")
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = layer(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))

    Notes:
        Masks follow torch: True in a bool mask means *blocked*. (In `attnzoo.attention` True means
        attend.)

        Differences from torch: a query whose keys are all blocked gives the output bias, not NaN.
        ``is_causal=True`` works without a mask. With ``need_weights`` it applies together with
        ``attn_mask``; torch uses the mask only. Torch's fused encoder path is not used.
    """

    # Torch's encoder layers use their fused softmax only if this attribute is True.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        variant: str = "softmax",
        num_kv_heads: int | None = None,
        learn: Names | None = None,
        softcap: float | None = None,
        wrapper: Choice = None,
        layer: int = 0,
        **params: Any,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        check_options_of(self, variant, params)
        check_device_and_dtype(device, dtype)
        check_sizes(optional=True, kdim=kdim, vdim=vdim, num_kv_heads=num_kv_heads)
        kv_heads = check_heads(num_heads, num_kv_heads, embed_dim=embed_dim)
        dropout = check_probability("dropout", dropout)
        bias, batch_first = check_bool("bias", bias), check_bool("batch_first", batch_first)
        add_bias_kv = check_bool("add_bias_kv", add_bias_kv)
        add_zero_attn = check_bool("add_zero_attn", add_zero_attn)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim, self.dropout = embed_dim // num_heads, dropout
        self.batch_first, self.add_zero_attn, self.layer = batch_first, add_zero_attn, layer
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {"learn": learn, "softcap": softcap, "wrapper": wrapper, **params}
        self.appends = add_bias_kv or add_zero_attn
        attend = self._attention(variant, options, device, dtype, layer)
        self.widths = attend.queries * embed_dim, kv_heads * self.head_dim
        queries, width = self.widths

        def empty(*shape: int, create: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **kind)) if create else None

        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = empty(queries + 2 * width, embed_dim, create=packed)
        self.q_proj_weight = empty(queries, embed_dim, create=not packed)
        self.k_proj_weight = empty(width, self.kdim, create=not packed)
        self.v_proj_weight = empty(width, self.vdim, create=not packed)
        self.in_proj_bias = empty(queries + 2 * width, create=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **kind)
        self.bias_k = empty(1, 1, width, create=add_bias_kv)
        self.bias_v = empty(1, 1, width, create=add_bias_kv)
        self.attend = attend
        self._draw()

    def reset_parameters(self) -> None:
        """Draws the projections as torch does; resets the parameters of ``attend``."""
        self.out_proj.reset_parameters()
        self._draw()
        self.attend.reset_parameters()

    def _draw(self) -> None:
        for weight in self._weights():
            nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def _weights(self) -> list[nn.Parameter]:
        """The weights of the input projections: one packed weight or three."""
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [weight for weight in weights if weight is not None]

    @classmethod
    def of(
        cls, module: nn.MultiheadAttention, variant: str, *, layer: int = 0, **options: Any
    ) -> MultiheadAttention:
        """Creates a layer that shares its parameters with a `torch.nn.MultiheadAttention`.

        Args:
            module: torch's layer. Its parameters are used, not copied.
            variant: a name from `attnzoo.list_variants`.
            layer: number of the layer in its model, from 0.
            **options: ``learn``, ``softcap``, ``wrapper`` and parameters of the variant.

        Raises:
            ValueError: the module is of a subclass, pruned, parametrized, sharded or compiled, or
                has an adapter, hooks or another forward; or the wrapper uses more than one query
                per head.
        """
        check_plain_layer("module", module)
        check_not_of_layers(options)
        new = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            module.bias_k is not None, bool(module.add_zero_attn), module.kdim, module.vdim,
            bool(module.batch_first), device="meta", variant=variant, layer=layer, **options,
        )  # fmt: skip
        check_queries(new.attend, 1, options)
        for name, parameter in module.named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(new.get_submodule(owner), leaf, parameter)
        new.train(module.training)
        # ``attend`` is created again, because on meta the variant's parameters have no values.
        new.attend = new.new_attend(variant, **options)
        return new

    def new_attend(
        self, variant: str, *, layer: int | None = None, **options: Any
    ) -> Attention | Wrapper:
        """An `Attention` of another variant for this layer; assign it to ``layer.attend``.

        ``options`` may have a ``wrapper`` with as many queries per head as the layer has now.
        ``layer`` is the number of the layer; None keeps its number. The layer must not be sharded.
        """
        if any(map(is_dtensor, self.parameters())):
            raise ValueError("the layer must not be sharded: call replace before fully_shard")
        weight = self._weights()[0]
        number = self.layer if layer is None else layer
        new = self._attention(variant, options, weight.device, weight.dtype, number)
        new.train(self.training)
        check_queries(new, self.widths[0] // self.embed_dim, options)
        return new

    def _attention(
        self, variant: str, options: dict[str, Any], device: Any, dtype: Any, layer: int
    ) -> Attention | Wrapper:
        options = dict(options)
        new = host_attention(
            options.pop("wrapper", None), variant, self.num_heads, self.embed_dim, options,
            key_dim=self.kdim, qk_dim=self.head_dim, v_dim=self.head_dim, layer=layer,
            device=device, dtype=dtype,
        )  # fmt: skip
        if self.appends:
            made = (new if isinstance(new, Attention) else new.attention).given
            check_appended(get_variant(variant), made, new.needs_positions)
        return new

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        relative_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the queries to the keys, as in torch.

        Args:
            query: (L, B, E); with batch_first (B, L, E); without a batch (L, E).
            key: (S, B, kdim), (B, S, kdim) or (S, kdim), as for ``query``.
            value: (S, B, vdim), (B, S, vdim) or (S, vdim), as for ``query``.
            key_padding_mask: (B, S), or (S,) without a batch. Bool: True = blocked. Float: added to
                the scores.
            need_weights: also return the weights, which takes memory for B·H·L·S numbers.
            attn_mask: (L, S) or (B·H, L, S). Bool: True = blocked. Float: added to the scores.
            average_attn_weights: average the weights over the heads.
            is_causal: causal attention. With attn_mask, a hint that this mask is causal. If L = S
                and no key is appended, the mask is then ignored, or with need_weights both apply.
                Otherwise only the mask applies.
            relative_bias: a table (H, 2R + 1), as for `attnzoo.attention`, such as one from
                `RelativeBias`. L must be S unless ``is_causal``, and no key may be appended.

        Returns:
            (output, weights). The output has the layout of ``query``. The weights are (B, L, S), or
            (B, H, L, S) with ``average_attn_weights=False``, or None without ``need_weights``.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        tensors = query, key, value
        flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
        for name, flag in {**flags, "is_causal": is_causal}.items():
            check_bool(name, flag)
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                check_dense(name, mask)
        batched = self._check(*tensors)
        if not batched:
            tensors = tuple(x[None] for x in tensors)
        elif not self.batch_first:
            tensors = tuple(x.transpose(0, 1) for x in tensors)
        q, k, v = self._project(*tensors)  # [B, H, L, D], [B, Hkv, S, D] twice
        crossed = not is_causal and q.shape[2] != k.shape[2]
        hint = "; is_causal=True says that the queries are the last tokens of the same sequence"
        check_cross_attention(self.attend.needs_positions, "MultiheadAttention", crossed, hint)
        if relative_bias is not None:
            check_table_positions(q.shape[2], k.shape[2], is_causal, self.appends)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        mask, causal = attended(
            key_padding_mask, attn_mask, is_causal, need_weights, q, k, self.num_heads,
            appended=(self.bias_k is not None) + self.add_zero_attn,
        )  # fmt: skip
        k, v = self._extended(k, v)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal}
        options["relative_bias"] = relative_bias
        options |= self.attend.projected(tensors[0], tensors[1])
        options["enable_gqa"] = self.num_kv_heads != self.num_heads
        options["dropout_p"] = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = self.attend(q, k, v, need_weights=True, **options)
        else:
            out = self.attend(q, k, v, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    if TYPE_CHECKING:
        # torch types Module.__call__ as (...) -> Any, which would hide the result's type.
        @overload
        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor,
            key_padding_mask: Tensor | None = None, need_weights: Literal[True] = True,
            attn_mask: Tensor | None = None, average_attn_weights: bool = True,
            is_causal: bool = False, *, relative_bias: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor,
            key_padding_mask: Tensor | None = None, *, need_weights: Literal[False],
            attn_mask: Tensor | None = None, average_attn_weights: bool = True,
            is_causal: bool = False, relative_bias: Tensor | None = None,
        ) -> tuple[Tensor, None]: ...  # fmt: skip
        @overload
        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor,
            key_padding_mask: Tensor | None = None, need_weights: bool = True,
            attn_mask: Tensor | None = None, average_attn_weights: bool = True,
            is_causal: bool = False, *, relative_bias: Tensor | None = None,
        ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip
        def __call__(self, *args: Any, **keywords: Any) -> Any: ...

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Checks the inputs; returns whether they have a batch dimension."""
        inputs = {"query": query, "key": key, "value": value}
        weight = self._weights()[0]
        for name, x in inputs.items():
            if isinstance(x, Tensor) and x.is_nested:
                raise TypeError(
                    f"{name} must be a dense tensor, got a nested one: give replace the whole "
                    "TransformerEncoder, or set its use_nested_tensor to False"
                )
            check_dense(name, x)
            if x.dtype not in DTYPES:
                raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
            check_like(name, x, weight)
        if {x.dim() for x in inputs.values()} not in ({3}, {2}):
            shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in inputs.items())
            raise ValueError(
                f"query, key and value must all have 3 dimensions or all 2, got {shapes}"
            )
        for (name, x), dim in zip(inputs.items(), (self.embed_dim, self.kdim, self.vdim)):
            if x.shape[-1] != dim:
                raise ValueError(f"{name} must have {dim} features, got {tuple(x.shape)}")
        batched = query.dim() == 3
        batch, length = (0, 1) if batched and self.batch_first else (1, 0)
        if batched and not query.shape[batch] == key.shape[batch] == value.shape[batch]:
            shapes = [tuple(x.shape) for x in inputs.values()]
            raise ValueError(f"query, key and value must have one batch size, got {shapes}")
        if key.shape[length] != value.shape[length]:
            shapes = [tuple(x.shape) for x in (key, value)]
            raise ValueError(f"key and value must have the same length, got {shapes}")
        return batched

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects [B, L, E] to heads, [B, H, L, D]."""
        queries, width = self.widths
        sizes = [queries, width, width]
        weights = self._weights()
        if len(weights) == 1:
            weights = weights[0].split(sizes)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        parts = zip((query, key, value), weights, biases)
        q, k, v = (F.linear(x, w, b).unflatten(-1, (-1, self.head_dim)) for x, w, b in parts)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the learned key and value (bias_k, bias_v), then a key and a value of zeros."""
        if self.bias_k is not None and self.bias_v is not None:
            biases = (b.view(1, -1, 1, self.head_dim) for b in (self.bias_k, self.bias_v))
            k, v = (
                torch.cat([x, b.expand(x.shape[0], -1, 1, -1)], dim=2)
                for x, b in zip((k, v), biases)
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v
