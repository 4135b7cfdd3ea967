"""MultiheadAttention: torch's own layer with any variant; and replace(), which puts it in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.checks import DTYPES, check_bool, check_dense, check_probability, check_sizes
from attnzoo.nn.attention import Attention, check_heads, check_module


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with the weights of a variant.

    Constructor, arguments, outputs and state_dict are torch's, so that a checkpoint of it loads;
    what the variant learns comes on top, under ``attend``. With ``variant="softmax"`` outputs and
    gradients are the same.

    Args:
        embed_dim: E. num_heads: H. dropout: of the weights, in training.
        bias: of the projections. add_bias_kv: one learned key and value more.
        add_zero_attn: one key and value of zeros more.
        kdim, vdim: of keys and values as they come; None is E.
        batch_first: (B, N, E) instead of (N, B, E).
        variant: a name from `attnzoo.list_variants`.
        num_kv_heads: heads of keys and values, of which H is a multiple; None is H.
        learn, **params: as for `Attention`.

    Shapes:
        forward(query (L, B, E), key (S, B, kdim), value (S, B, vdim)) -> (output (L, B, E), weights
        (B, L, S), or (B, H, L, S) with ``average_attn_weights=False``, or None); with batch_first
        (B, L, E) and so on; without a batch (L, E) and so on.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch
        >>> from attnzoo.nn import MultiheadAttention
        >>> layer = MultiheadAttention(64, 4, batch_first=True, variant="entmax")
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = layer(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))

    Masks are torch's: of a bool mask True is *blocked* here (in `attnzoo.attention` True attends).

    Differs: a row whose keys are all blocked is the output's bias, not NaN. ``is_causal`` may stand
    alone and is then the mask; beside a mask it is the hint that the mask is causal, and where
    queries and keys are as many, and no weights are asked for, it is taken at its word. Torch's
    fused path for encoders is not taken.
    """

    # Asked for by torch's encoder layers before they hand their weights to a fused softmax.
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
        learn: tuple[str, ...] | list[str] | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        check_sizes(optional=True, kdim=kdim, vdim=vdim, num_kv_heads=num_kv_heads)
        kv_heads = check_heads(num_heads, num_kv_heads, embed_dim=embed_dim)
        dropout = check_probability("dropout", dropout)
        flags = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
        for name, flag in {**flags, "batch_first": batch_first}.items():
            check_bool(name, flag)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim, self.dropout = embed_dim // num_heads, dropout
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        width = kv_heads * self.head_dim

        def empty(*shape: int, wanted: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **kind)) if wanted else None

        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = empty(embed_dim + 2 * width, embed_dim, wanted=packed)
        self.q_proj_weight = empty(embed_dim, embed_dim, wanted=not packed)
        self.k_proj_weight = empty(width, self.kdim, wanted=not packed)
        self.v_proj_weight = empty(width, self.vdim, wanted=not packed)
        self.in_proj_bias = empty(embed_dim + 2 * width, wanted=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **kind)
        self.bias_k = empty(1, 1, width, wanted=add_bias_kv)
        self.bias_v = empty(1, 1, width, wanted=add_bias_kv)
        self.attend = Attention(variant, num_heads, learn=learn, **params).to(device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch draws them; those of the variant stay as they are."""
        for weight in self._weights():
            nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def _weights(self) -> list[nn.Parameter]:
        """The projections in, in one or in three."""
        found = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [weight for weight in found if weight is not None]

    @classmethod
    def of(cls, layer: nn.MultiheadAttention, variant: str, **options: Any) -> MultiheadAttention:
        """With the parameters of a layer of torch's: the same ones, not copies.

        Raises:
            ValueError: if the layer has hooks, or other parameters than torch gives it.
        """
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError("layer has hooks, which would be lost: remove them first")
        own = cls(
            layer.embed_dim, layer.num_heads, layer.dropout, layer.in_proj_bias is not None,
            layer.bias_k is not None, bool(layer.add_zero_attn), layer.kdim, layer.vdim,
            bool(layer.batch_first), device="meta", variant=variant, **options,
        )  # fmt: skip
        weight = layer.out_proj.weight
        # What the variant learns has values of its own, and is made where the weights are.
        own.attend = Attention(variant, layer.num_heads, **options).to(device=weight.device)
        own_names = {name for name, _ in own.named_parameters() if not name.startswith("attend.")}
        if (names := {name for name, _ in layer.named_parameters()}) != own_names:
            raise ValueError(
                f"layer has parameters {sorted(names)} where torch's has {sorted(own_names)}: what "
                "is pruned or parametrized cannot be replaced"
            )
        for name, parameter in layer.named_parameters():
            module, _, leaf = name.rpartition(".")
            setattr(own.get_submodule(module), leaf, parameter)
        return own.train(layer.training)

    def new_attend(self, variant: str, **options: Any) -> Attention:
        """Another variant for this layer, not yet put into it: ``layer.attend = ...`` does that."""
        made = Attention(variant, self.num_heads, **options).to(device=self.out_proj.weight.device)
        return made.train(self.training)

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
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights or None); see the class.

        Args:
            query, key, value: (L, B, E), (S, B, kdim), (S, B, vdim), or as batch_first says.
            key_padding_mask: (B, S), or (S,) without a batch; bool, True = blocked, or float.
            need_weights: return the weights, which are then made in memory.
            attn_mask: (L, S) or (B·H, L, S); bool, True = blocked, or float, added to the scores.
            average_attn_weights: over the heads.
            is_causal: see the class.
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
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        if need_weights and attn_mask is not None:
            is_causal = False  # as in torch, whose weights come of the mask and not of the hint
        mask, causal = self._masks(key_padding_mask, attn_mask, is_causal, q, k)
        k, v = self._extended(k, v)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal}
        options["enable_gqa"] = self.num_kv_heads != self.num_heads
        options["dropout_p"] = self.dropout if self.training else 0.0
        found = self.attend(q, k, v, need_weights=need_weights, **options)
        out, weights = found if need_weights else (found, None)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether there is a batch."""
        given = {"query": query, "key": key, "value": value}
        for name, x in given.items():
            check_dense(name, x)
            if x.dtype not in DTYPES:
                raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if {x.dim() for x in given.values()} not in ({3}, {2}):
            shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in given.items())
            raise ValueError(f"query, key and value must all have 3 dimensions, or 2: got {shapes}")
        for (name, x), dim in zip(given.items(), (self.embed_dim, self.kdim, self.vdim)):
            if x.shape[-1] != dim:
                raise ValueError(f"{name} must have {dim} features, got {tuple(x.shape)}")
        return query.dim() == 3

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, E] to heads, [B, H, L, D]."""
        width = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, width, width]
        weights = self._weights()
        if len(weights) == 1:
            weights = weights[0].split(sizes)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        parts = zip((query, key, value), weights, biases)
        q, k, v = (F.linear(x, w, b).unflatten(-1, (-1, self.head_dim)) for x, w, b in parts)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """With the learned key and value, then with those of zeros."""
        if self.bias_k is not None and self.bias_v is not None:
            biases = (b.view(1, -1, 1, self.head_dim) for b in (self.bias_k, self.bias_v))
            k, v = (
                torch.cat([x, b.expand(x.shape[0], -1, 1, -1)], dim=2)
                for x, b in zip((k, v), biases)
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v

    def _masks(
        self, padding: Tensor | None, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, bool]:
        """One mask for `attnzoo.attention`, and whether it is causal besides."""
        (batch, _, length, _), keys = q.shape, k.shape[2]
        extra = (self.bias_k is not None) + self.add_zero_attn
        if is_causal and not extra and (mask is None or length == keys):
            mask = None
        elif is_causal:
            is_causal = False
            if mask is None:  # the keys that are added at the end are no later ones
                mask = torch.ones(length, keys, dtype=torch.bool, device=q.device)
                mask = mask.triu(1 + keys - length)
        shapes = [(length, keys), (batch * self.num_heads, length, keys)]
        padding = _attended("key_padding_mask", padding, [(batch, keys)], extra)
        mask = _attended("attn_mask", mask, shapes, extra)
        if padding is not None:
            padding = padding[:, None, None]
        if mask is not None:
            mask = mask.unflatten(0, (batch, -1)) if mask.dim() == 3 else mask[None, None]
        return _joined(padding, mask), is_causal


def _attended(
    name: str, mask: Tensor | None, shapes: list[tuple[int, ...]], extra: int
) -> Tensor | None:
    """With True where a key is attended, and ``extra`` keys more that all see; or to be added."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (True = blocked) or float, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return F.pad(~mask, (0, extra), value=True)
    # Torch's encoder layers make floats of bool masks before they hand them on; no graph can look.
    if not torch.compiler.is_compiling():
        blocked = mask == float("-inf")
        if bool((blocked | (mask == 0)).all()):
            return F.pad(~blocked, (0, extra), value=True)
    return F.pad(mask, (0, extra))


def _joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Both at once."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype == b.dtype == torch.bool:
        return a & b
    if torch.bool not in (a.dtype, b.dtype):
        return a + b
    seen, added = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(seen, added, float("-inf"))


def replace(model: nn.Module, variant: str, **options: Any) -> nn.Module:
    """Puts a `MultiheadAttention` in the place of each `torch.nn.MultiheadAttention` of a model.

    The layers keep their parameters, the same tensors, so an optimizer may know them already; what
    the variant learns is new, under ``attend`` of each. A layer that is a `MultiheadAttention`
    already stays, and gets the variant: called again, ``replace`` exchanges the variant and forgets
    what the former one has learned. Torch's encoder stops to use its fused path, which would go
    past the layer.

    Args:
        model: changed in place.
        variant: a name from `attnzoo.list_variants`.
        **options: ``learn`` and parameters of the variant, as for `Attention`.

    Returns:
        The model; or the new layer, if the model is itself a `torch.nn.MultiheadAttention`.

    Raises:
        ValueError, TypeError: naming the argument; also for a model without such a layer. Nothing
            was changed then.

    Example:
        >>> import torch
        >>> from attnzoo.nn import replace
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> model = replace(torch.nn.TransformerEncoder(layer, 2), "ssmax")
        >>> model(torch.randn(1, 5, 32)).shape
        torch.Size([1, 5, 32])
        >>> model.layers[0].self_attn.attend
        Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)
    """
    check_module("model", model)
    found = [m for m in model.modules() if type(m) is nn.MultiheadAttention]
    own = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
    if not found and not own:
        raise ValueError(f"model has no torch.nn.MultiheadAttention: {type(model).__name__}")
    attends = [layer.new_attend(variant, **options) for layer in own]
    new: dict[Any, nn.Module] = {
        layer: MultiheadAttention.of(layer, variant, **options) for layer in found
    }
    for layer, attend in zip(own, attends):
        layer.attend = attend
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children leaves out repetitions
            if child in new:
                setattr(module, name, new[child])
        if isinstance(module, nn.TransformerEncoder):
            # It would hand on nested tensors, which only its fused path reads.
            module.enable_nested_tensor = module.use_nested_tensor = False
    return new.get(model, model)
