"""QKClip: bounds the logits of attention layers by scaling the matrices of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attnzoo.core.checks import (
    DTYPES,
    check_dense,
    is_dtensor,
    is_finite,
    is_number,
    plain,
    shown,
)
from attnzoo.core.registry import get_variant
from attnzoo.nn.attention import Attention
from attnzoo.nn.checks import check_module, check_registered
from attnzoo.nn.decoder_layer import DecoderLayer
from attnzoo.nn.multihead import MultiheadAttention

Layer = MultiheadAttention | DecoderLayer


class QKClip:
    """QK-clip: after each step of the optimizer, scales W_q and W_k of heads with large logits.

    S_h is the largest logit scale · q_i·k_j of head h in the forwards in training mode since the
    last step. Where S_h > t, both W_q and W_k of the head are multiplied by √(t / S_h), so that the
    logits shrink by t / S_h. Where query heads share a head of keys, W_q alone is multiplied, by
    t / S_h. Other heads do not change. Biases are scaled like their matrices.

    Args:
        model: a module that contains `MultiheadAttention` or `Transformer` layers, without qk_norm
            and with plain parameters that no two layers share. Their forwards then compute the
            largest logits in training mode, until `remove`. Those of a copy or pickle do not.
        threshold: t, above 0.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import QKClip, Transformer
        >>> model = Transformer(99, embed_dim=32, num_heads=4, depth=2, variant="ssmax")
        >>> optimizer, clip = torch.optim.SGD(model.parameters(), lr=0.1), QKClip(model, 100.0)
        >>> model(torch.randint(99, (2, 16))).square().mean().backward()
        >>> optimizer.step()
        >>> [x.shape for x in clip.max_logits]
        [torch.Size([4]), torch.Size([4])]
        >>> clip.step()

    References:
        Kimi Team 2025, arXiv:2507.20534, Section 2.1, with t = 100. There the part of the keys that
        all heads share is not scaled, and the queries of that part take the whole factor. With
        grouped heads the same is done here. Megatron-LM instead scales all heads of a group by the
        factor of their largest logit.

    Notes:
        Logits are those before softcap, gain and bias, so t bounds no scores of a variant with a
        gain, such as ``ssmax``. A maximum that is not finite changes nothing. The state of the
        optimizer is not scaled.

        With data parallelism each rank has the maxima of its batch. Before `step`, all ranks must
        take the maximum: ``for x in clip.max_logits: dist.all_reduce(x, dist.ReduceOp.MAX)``.
        Sharded matrices are not supported; for other models see `qk_clip_`. In training mode,
        calls with a `StateCache` or a sharded sequence raise.
    """

    def __init__(self, model: nn.Module, threshold: float) -> None:
        check_module("model", model)
        self.threshold = _check_threshold(threshold)
        self.layers = [
            x for x in model.modules() if isinstance(x, (MultiheadAttention, DecoderLayer))
        ]
        if not self.layers:
            raise ValueError(
                "model must contain MultiheadAttention or Transformer layers of attnzoo; for "
                "others pass the result of return_max_logits=True to qk_clip_"
            )
        _check_layers(self.layers)
        self._reset()

    @property
    def max_logits(self) -> list[Tensor]:
        """The largest logit of each head since the last step, (H,) for each layer; −inf if none."""
        recorded = [_attention_of(layer).max_logits for layer in self.layers]
        missing = [n for n, x in enumerate(recorded) if x is None]
        if missing:
            raise ValueError(
                f"the attention of layer {missing[0]} records no logits: it was replaced or "
                "copied, or remove() was called; make a new QKClip"
            )
        return [x for x in recorded if x is not None]

    @torch.no_grad()
    def step(self) -> None:
        """Scales the matrices, and forgets the maxima. Call it after each step of the optimizer."""
        recorded = self.max_logits
        _check_layers(self.layers)
        for layer, largest in zip(self.layers, recorded, strict=True):
            for of_queries, of_keys in _projections(layer):
                qk_clip_(of_queries, of_keys, largest, self.threshold)
            key = getattr(layer, "bias_k", None)  # appended by the layer
            if key is not None and key.numel() == _projections(layer)[0][0].shape[0]:
                _scale(key.view(-1), _factors(largest, self.threshold).sqrt())
        self._reset()

    def remove(self) -> None:
        """Ends the recording: the forwards of the model are again those without a QKClip."""
        for layer in self.layers:
            _attention_of(layer).max_logits = None

    def _reset(self) -> None:
        for layer in self.layers:
            weight = _projections(layer)[0][0]
            attention = _attention_of(layer)
            attention.max_logits = torch.full(
                (attention.num_heads,), -math.inf, device=weight.device
            )


@torch.no_grad()
def qk_clip_(q_weight: Tensor, k_weight: Tensor, max_logits: Tensor, threshold: float) -> None:
    """Scales the matrices of queries and keys in place, so that no logit exceeds a threshold.

    Rows of head h are multiplied by √(t / S_h) where S_h > t. If query heads share a head of keys,
    only those of ``q_weight`` are multiplied, by t / S_h. See `QKClip`, which does this for models.

    Args:
        q_weight: matrix (H·D, E) or bias (H·D,) of the queries; the D rows of a head are adjacent.
        k_weight: matrix (Hkv·D, E) or bias (Hkv·D,) of the keys, on the same device. Hkv divides H.
        max_logits: S, the largest logit of each head, (H,), from ``return_max_logits=True``, on the
            same device.
        threshold: t, above 0.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch, attnzoo
        >>> x, (wq, wk) = torch.randn(1, 10, 32), torch.randn(2, 32, 32)
        >>> q, k = ((x @ w.T).unflatten(-1, (4, 8)).transpose(1, 2) for w in (wq, wk))
        >>> _, largest = attnzoo.attention(q, k, k, return_max_logits=True)
        >>> attnzoo.nn.qk_clip_(wq, wk, largest, threshold=5.0)
        >>> q, k = ((x @ w.T).unflatten(-1, (4, 8)).transpose(1, 2) for w in (wq, wk))
        >>> bool((attnzoo.attention(q, k, k, return_max_logits=True)[1] < 5.001).all())
        True
    """
    tensors = {"q_weight": q_weight, "k_weight": k_weight, "max_logits": max_logits}
    for name, x in tensors.items():
        check_dense(name, x)
        if is_dtensor(x):
            raise ValueError(f"{name} must not be sharded")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if x.device != q_weight.device:
            raise ValueError(
                f"{name} must be on q_weight's device {q_weight.device}, got {x.device}"
            )
        if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{name} must have memory for each entry, got an expanded tensor")
    threshold = _check_threshold(threshold)
    if max_logits.dim() != 1 or max_logits.shape[0] == 0:
        raise ValueError(f"max_logits must have shape (H,), got {tuple(max_logits.shape)}")
    heads = max_logits.shape[0]
    if q_weight.dim() == 0 or not q_weight.shape[0] or q_weight.shape[0] % heads:
        raise ValueError(
            f"q_weight must have D rows for each of {heads} heads, got {tuple(q_weight.shape)}"
        )
    rows = k_weight.shape[0] if k_weight.dim() else 0
    dim = q_weight.shape[0] // heads
    if rows == 0 or rows % dim or heads % (rows // dim):
        raise ValueError(
            f"k_weight must have {dim} rows for each head of keys, whose number divides {heads}, "
            f"got {tuple(k_weight.shape)}"
        )
    factors = _factors(max_logits, threshold)
    if rows == q_weight.shape[0]:
        factors = factors.sqrt()
        _scale(k_weight, factors)
    _scale(q_weight, factors)


def _factors(largest: Tensor, threshold: float) -> Tensor:
    """min(1, t / S), (H,); 1 where S is not finite."""
    clipped = (largest > threshold) & largest.isfinite()
    return torch.where(clipped, threshold / largest, 1.0)


@torch.no_grad()
def _scale(weight: Tensor, factors: Tensor) -> None:
    heads = weight.unflatten(0, (len(factors), -1))  # a view
    heads.mul_(factors.view(-1, *[1] * weight.dim()))


def _check_threshold(threshold: float) -> float:
    threshold = plain(threshold)
    if not is_number(threshold):
        raise TypeError(f"threshold must be a number > 0, got {shown(threshold)}")
    if not (threshold > 0 and is_finite(threshold, torch.float32)):
        raise ValueError(f"threshold must be a finite number > 0, got {shown(threshold)}")
    return float(threshold)


def _attention_of(layer: Layer) -> Attention:
    attend = layer.attend
    return attend if isinstance(attend, Attention) else attend.attention


def _check_layers(layers: list[Layer]) -> None:
    scaled: set[int] = set()
    for layer in layers:
        _check_layer(layer)
        owner, names = _scaled(layer)
        check_registered("model", owner, names)
        for name in names:
            if id(parameter := getattr(owner, name)) in scaled:
                raise ValueError(
                    f"model must not have layers that share parameters, such as {name} of a "
                    f"{type(owner).__name__}: use the layer itself several times"
                )
            scaled.add(id(parameter))


def _scaled(layer: Layer) -> tuple[nn.Module, list[str]]:
    """The module and the names of the parameters that a step may scale."""
    if isinstance(layer, DecoderLayer):
        return layer.qkv, ["weight"]
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "in_proj_bias", "bias_k")
    return layer, [name for name in names if getattr(layer, name) is not None]


def _check_layer(layer: Layer) -> None:
    attend = layer.attend
    if not isinstance(attend, Attention) and attend.maps > 1:
        raise ValueError(
            f"model must have no wrapper with several maps per head, got {type(attend).__name__}"
        )
    if not isinstance(attend, Attention) and attend.nonlinear_queries:
        raise ValueError(
            f"model must have no wrapper that makes the queries nonlinear in W_q x, got "
            f"{type(attend).__name__}: scaling W_q does not scale the logits by the same factor"
        )
    if isinstance(layer, DecoderLayer) and isinstance(layer.norm_q, nn.RMSNorm):
        raise ValueError(
            "model must not have qk_norm, which divides queries and keys by their size: scaling "
            "W_q and W_k does not change the logits"
        )
    name = _attention_of(layer).variant
    if not get_variant(name).has_logits:
        raise ValueError(f"model must have variants with logits, got {name!r}")


def _projections(layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """The matrices of queries and keys, and their biases if there are any."""
    if isinstance(layer, DecoderLayer):
        q, k, _ = layer.qkv.weight.split(layer.sizes)
        return [(q, k)]
    queries, width = layer.widths
    pairs = []
    for packed in (layer.in_proj_weight, layer.in_proj_bias):
        if packed is not None:
            pairs.append((packed[:queries], packed[queries : queries + width]))
    if layer.q_proj_weight is not None and layer.k_proj_weight is not None:
        pairs.append((layer.q_proj_weight, layer.k_proj_weight))
    return pairs
