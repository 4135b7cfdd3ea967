"""Transformer: a small decoder with a choice of position encoding and of a variant per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.call import score_dtype
from attnzoo.core.checks import (
    check_bool,
    check_dense,
    check_probability,
    check_sizes,
    is_readable,
    shown,
)
from attnzoo.nn.adaptive_softmax import AdaptiveSoftmax
from attnzoo.nn.attention import Attention
from attnzoo.nn.cache import Cache, cached_length
from attnzoo.nn.checks import check_heads, check_options_of, check_positional, check_range
from attnzoo.nn.decoder_layer import DecoderLayer, Scale
from attnzoo.nn.output_layer import OutputLayer
from attnzoo.nn.per_layer import per_layer
from attnzoo.nn.relative_bias import RelativeBias
from attnzoo.nn.rope import Scaling, frequencies, parse_scaling
from attnzoo.nn.segments import (
    check_key_mask,
    check_segments,
    check_shape,
    first_visible,
    is_key_mask,
    restarted,
)
from attnzoo.nn.sharding import Sharding
from attnzoo.nn.tied_output import TiedOutput, output_of
from attnzoo.nn.wrappers import Choice, Wrapper

POSITIONS = ("rope", "p-rope", "alibi", "nape", "t5", "none")


class Transformer(nn.Module):
    """A small pre-norm decoder language model, for evals and examples.

    Each layer computes x ← x + Attention(RMSNorm(x)), then x ← x + MLP(RMSNorm(x)). Attention is
    causal. By default the output layer shares its matrix with the embedding.

    Args:
        vocab_size: number of different tokens.
        embed_dim: number of features, E. Each head has E // H of them.
        num_heads: number of query heads, H.
        depth: number of layers.
        variant: a name from `attnzoo.list_variants`; or a list with one entry per layer, each a
            name or a pair (name, parameters).
        positions: the position encoding. "rope" rotates pairs of features of queries and keys.
            "p-rope" rotates only the share ``rope_share`` of pairs with the highest frequencies.
            "alibi" adds −slope·|i − j| to the scores, with slopes 2^{−8h/H}. "nape" does so in the
            second half of the heads, with slopes 1, 1/2, 1/3, …, and the first half has no encoding
            (Vasylenko et al. 2025, arXiv:2506.16640, and their code). "t5" adds a learned bias, a
            `RelativeBias` that all layers share, with all 32 buckets before the query. "none" has
            no encoding besides the causal mask.
        num_kv_heads: number of key and value heads, a divisor of H; None is H.
        mlp_dim: number of hidden features of each MLP; None is 4·E.
        window: number of keys that each query sees, its own included; None is no limit.
        dropout: probability of dropout on the outputs of attention and MLP, in training.
        rope_base: base of the rotation frequencies; the longest wavelength is nearly 2π·rope_base.
        rope_share: share of the pairs that "p-rope" rotates, from 0 to 1.
        rope_scaling: scaling of the rotation, for inputs longer than those in training. A dict with
            keys of Hugging Face: "rope_type", one of "linear", "ntk" and "yarn" (see the notes);
            "factor", the length of the inputs divided by the train length, from 1; and for "yarn"
            "original_max_position_embeddings", the train length in tokens, besides "beta_fast",
            "beta_slow" and "attention_factor", which may be absent. None is no scaling. The
            attribute of this name may be set in a trained model.
        output: the variant of the output layer, an `OutputLayer` that shares its matrix with the
            embedding; or an `OutputLayer`, `MixtureOutput` or `AdaptiveSoftmax` for E features and
            ``vocab_size`` classes, whose initial parameters are drawn again. Its matrix is not
            shared unless you write ``model.output.weight = model.embed.weight``. The attribute
            ``output`` is the layer itself.
        output_params: keyword arguments for `OutputLayer`: parameters of its variant, and others
            such as ``softcap``. ``bias`` is False unless given here or the variant has an
            `output_bias`. None if ``output`` is a layer.
        softcap: softcap of the attention logits of each layer, as for `Attention`; None is no
            softcap. ``output_params`` has the softcap of the output layer.
        qk_norm: whether each head's queries and keys are divided by their root mean square and
            multiplied by a learned factor per feature, before the position encoding.
        qk_dim: number of features of each query and key head, D; None is E // H.
        layer_scale: initial value of a learned factor per feature on the output of attention and
            MLP (LayerScale), such as 1e-4; None is no factor.
        wrapper: a wrapper of the attention of each layer: "differential", "differential_v2",
            "laser", "mixture", "output_gate", "qassmax" or "xsa", or a pair (name, arguments), such
            as ("mixture", {"components": 3}). See `Wrapper`. None is no wrapper.
        **params: parameters of the variant, if it is the same in all layers. If a parameter has a
            projection and no value is given, each layer learns the projection.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Transformer
        >>> model = Transformer(100, embed_dim=64, num_heads=4, depth=2, variant="ssmax")
        >>> tokens = torch.randint(100, (1, 12))
        >>> caches = model.new_caches(max_length=32)
        >>> with torch.no_grad():
        ...     _ = model(tokens[:, :11], caches=caches)
        ...     last = model(tokens[:, 11:], caches=caches)
        ...     full = model(tokens)
        >>> torch.allclose(last, full[:, 11:], atol=1e-5)
        True

    References:
        RoPE: Su et al. 2021, arXiv:2104.09864. Position interpolation: Chen et al. 2023,
        arXiv:2306.15595. NTK-aware interpolation and YaRN: Peng et al. 2023, arXiv:2309.00071,
        equations 15 to 22. p-RoPE: Barbero et al. 2024, arXiv:2410.06205, Section 6.1. ALiBi: Press
        et al. 2021, arXiv:2108.12409. QK-norm: Dehghani et al. 2023, arXiv:2302.05442, with a layer
        norm. LayerScale: Touvron et al. 2021, arXiv:2103.17239.

    Notes:
        RoPE rotates pair p = 0 … D/2 − 1 by θ_p = b^{−2p/D} per token, with b = ``rope_base``. With
        the factor f, the train length L and the number of turns r_p = L·θ_p/2π:

        - "linear", position interpolation: θ_p/f.
        - "ntk", NTK-aware: the base b·f^{D/(D − 2)}. The lowest frequency is divided by f, the
          highest one by 1.
        - "yarn": θ_p·(1 − γ_p + γ_p/f), where γ rises from 0 at r_p = ``beta_fast`` = 32 to 1 at
          r_p = ``beta_slow`` = 1. Queries and keys are multiplied by ``attention_factor``, which is
          0.1·ln f + 1 by default, and so logits by its square. As in the authors' code, γ is linear
          in p between the two bounds, which are rounded outwards to integers p; in the paper it is
          linear in r_p. "p-rope" multiplies all features, Hugging Face's partial rotations only the
          rotated ones.

        The frequencies do not depend on the length of a call, so later tokens never change earlier
        outputs. Hugging Face's type "dynamic", whose frequencies do, is not supported; with factor
        1 its frequencies at f·L tokens are those of "ntk". Keys in a cache are rotated: do not set
        the attribute between calls that share caches.
    """

    BIASED = ("alibi", "nape", "t5")  # the encodings that add a bias to the scores
    sharding: Sharding | None = None  # see `attnzoo.distributed.shard_sequence`

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        depth: int,
        variant: str | Sequence[str | tuple[str, dict[str, Any]]] = "softmax",
        positions: str = "rope",
        *,
        num_kv_heads: int | None = None,
        mlp_dim: int | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        rope_base: float = 10000.0,
        rope_share: float = 0.75,
        rope_scaling: Mapping[str, Any] | None = None,
        output: str | OutputLayer | AdaptiveSoftmax = "softmax",
        output_params: dict[str, Any] | None = None,
        softcap: float | None = None,
        qk_norm: bool = False,
        qk_dim: int | None = None,
        layer_scale: float | None = None,
        wrapper: Choice = None,
        **params: Any,
    ) -> None:
        super().__init__()
        if isinstance(variant, str):
            check_options_of(self, variant, params)
        check_sizes(vocab_size=vocab_size, embed_dim=embed_dim, num_heads=num_heads, depth=depth)
        check_sizes(optional=True, num_kv_heads=num_kv_heads, mlp_dim=mlp_dim, window=window,
                    qk_dim=qk_dim)  # fmt: skip
        kv_heads = check_heads(num_heads, num_kv_heads, embed_dim=embed_dim)
        if positions not in POSITIONS:
            raise ValueError(
                f"positions must be one of {', '.join(POSITIONS)}, got {shown(positions)}"
            )
        head_dim = qk_dim or embed_dim // num_heads
        if "rope" in positions and head_dim % 2:
            actual = f"qk_dim = {qk_dim}" if qk_dim else f"{embed_dim} // {num_heads} = {head_dim}"
            raise ValueError(f"positions={positions!r} needs an even head dimension, got {actual}")
        check_bool("qk_norm", qk_norm)
        if layer_scale is not None:
            layer_scale = check_range("layer_scale", layer_scale, 0)
        rope_share = check_range("rope_share", rope_share, 0, 1)
        rope_base = check_range("rope_base", rope_base, 1)
        dropout = check_probability("dropout", dropout)
        self.positions, self.window, self.num_heads = positions, window, num_heads
        self.rotated_pairs = 0
        if "rope" in positions:
            share = rope_share if positions == "p-rope" else 1.0
            self.rotated_pairs = round(share * head_dim / 2)
        self.head_dim, self.rope_base = head_dim, rope_base
        self.rope_scaling = rope_scaling
        self.embed = nn.Embedding(vocab_size, embed_dim)
        heads, dims = (num_heads, kv_heads), (head_dim, embed_dim // num_heads)
        self.layers = nn.ModuleList(
            DecoderLayer(
                embed_dim, heads, dims, mlp_dim or 4 * embed_dim, dropout, qk_norm, layer_scale,
                name, values, wrapper, number,
            )
            for number, (name, values) in enumerate(
                per_layer(self, variant, depth, params, softcap)
            )
        )  # fmt: skip
        t5 = positions == "t5"
        self.relative_bias = RelativeBias(num_heads, bidirectional=False) if t5 else None
        self.norm = nn.RMSNorm(embed_dim)
        self.output = output_of(self.embed, output, output_params)
        self.reset_parameters()

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The scaling of the rotation, with all keys; None is no scaling."""
        return None if self._rope_scaling is None else self._rope_scaling.as_dict()

    @rope_scaling.setter
    def rope_scaling(self, scaling: Mapping[str, Any] | None) -> None:
        made: Scaling | None = None
        if scaling is not None:
            if not self.rotated_pairs:
                raise ValueError(
                    "rope_scaling must be None where no pair of features is rotated, as with "
                    f"positions={self.positions!r}, got {shown(scaling)}"
                )
            made = parse_scaling(scaling, self.head_dim, self.rope_base)
        self._rope_scaling = made

    def reset_parameters(self) -> None:
        """Draws all matrices from a normal distribution with mean 0.

        The standard deviation is 0.02/√(2·depth) for the last matrix of a residual branch, and 0.02
        for other matrices. The bias of the output layer is set to `Variant.output_bias` or 0. The
        parameters of the variants and their projections, of the position encoding, of norms and of
        LayerScale are set to their initial values. A layer given as ``output`` has its own
        `reset_parameters`.
        """
        self.output.reset_parameters()
        initialized = {id(p) for p in self.output.parameters()} - {id(self.embed.weight)}
        for attend in self._attends():
            attend.reset_parameters()
            initialized |= {id(p) for p in attend.parameters()}
        if self.relative_bias is not None:
            self.relative_bias.reset_parameters()
            initialized.add(id(self.relative_bias.weight))
        for module in (*self.layers.modules(), self.norm):
            if isinstance(module, (nn.RMSNorm, Scale)):
                module.reset_parameters()
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and id(parameter) not in initialized:
                ends_branch = name.endswith(("out.weight", "down.weight"))
                scale = (2 * len(self.layers)) ** -0.5 if ends_branch else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "embed" and isinstance(
            output := self.__dict__["_modules"].get("output"), TiedOutput
        ):
            output.tie(value)
        super().__setattr__(name, value)

    def forward(
        self,
        tokens: Tensor,
        *others: Any,
        attn_mask: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token after each token.

        Args:
            tokens: int (B, N).
            attn_mask: bool key mask, (B, 1, 1, N) or (1, 1, 1, N), True = attend. With caches its
                last dimension counts all tokens so far, ``tokens`` included. Positions count from
                the first visible token.
            caches: from `new_caches`. ``tokens`` are then the next tokens of their sequences.
            segment_ids: int (B, N), the segment of each token, for documents packed in one
                sequence. A token sees only its own segment, and the outputs are those of the
                segments one by one. Equal ids must be adjacent. With caches its last dimension
                counts all tokens so far, ``tokens`` included.

        Returns:
            (B, N, vocab_size).

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        check_positional("tokens", others)
        return self.logits(
            self.states(tokens, attn_mask=attn_mask, caches=caches, segment_ids=segment_ids)
        )

    if TYPE_CHECKING:

        def __call__(
            self,
            tokens: Tensor,
            *,
            attn_mask: Tensor | None = None,
            caches: Sequence[Cache] | None = None,
            segment_ids: Tensor | None = None,
        ) -> Tensor: ...

    def states(
        self,
        tokens: Tensor,
        *,
        attn_mask: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states, (B, N, E); takes the arguments of `forward`.

        ``logits(states)`` gives the logits. If only some logits are needed, select their states
        first.
        """
        self._check_tokens(tokens)
        start = 0 if caches is None else cached_length(caches, len(self.layers))
        if attn_mask is not None and self.sharding is None:  # shards are checked on all ranks
            check_key_mask(attn_mask, tokens, start)
        options: dict[str, Any] = {"attn_mask": attn_mask, "window": self.window}
        if self.relative_bias is not None:
            options["relative_bias"] = self.relative_bias()
        elif self.positions in self.BIASED:
            options["alibi"] = self._slopes(tokens.device)
        positions = self._positions(tokens, start, segment_ids, attn_mask)
        if segment_ids is not None:
            options["segment_ids"] = segment_ids[:, start:], segment_ids
        rotation = self._rotation(positions)
        x = self.embed(tokens)
        for n, layer in enumerate(self.layers):
            x = layer(x, rotation, caches[n] if caches else None, options)
        return self.norm(x)

    def _positions(
        self, tokens: Tensor, start: int, segment_ids: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor:
        """The position of each token in its sequence (N,) or (B, N), or in its segment (B, N).

        Padding on the left is not counted.
        """
        count, sharding = tokens.shape[1], self.sharding
        if segment_ids is not None and sharding is not None:
            all_ids = sharding.gather(segment_ids, 1)  # raises on all ranks if they differ
            check_shape(segment_ids, tokens, 0)
            check_segments(all_ids, all_ids, 0)
            return sharding.shard(restarted(all_ids), 1)
        if segment_ids is not None:
            check_segments(segment_ids, tokens, start)
            return restarted(segment_ids)[:, start:]
        if sharding is None:
            at = torch.arange(start, start + count, device=tokens.device)
        else:
            at = sharding.positions(count, tokens.device)
        if not self.rotated_pairs or not is_key_mask(attn_mask, tokens):
            return at
        return at - first_visible(attn_mask if sharding is None else sharding.gather(attn_mask, -1))

    def _slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slope of each head, (H,)."""
        heads = torch.arange(1, self.num_heads + 1, device=device)
        if self.positions == "nape":
            free = self.num_heads // 2
            return torch.cat([torch.zeros(free, device=device), 1 / heads[: self.num_heads - free]])
        return torch.exp2(-8.0 * heads / self.num_heads)

    def _check_tokens(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be an int tensor (B, N), got {type(tokens).__name__}")
        check_dense("tokens", tokens)
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"tokens must be int32 or int64 (B, N), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if tokens.is_meta and not self.embed.weight.is_meta:
            raise ValueError(
                f"tokens must be on {self.embed.weight.device} like the model, got a meta tensor"
            )
        if not is_readable(tokens):
            return
        size = self.embed.num_embeddings
        wrong = tokens[(tokens < 0) | (tokens >= size)]
        if len(wrong):
            raise ValueError(
                f"tokens must be from 0 to vocab_size - 1 = {size - 1}, got {int(wrong[0])}"
            )

    def logits(self, states: Tensor) -> Tensor:
        """Logits (..., vocab_size) from states (..., E), as from ``output.logits``.

        They are before a softcap. A `MixtureOutput` of probabilities and an `AdaptiveSoftmax` give
        log-probabilities. For probabilities use ``output.log_prob(states)`` or
        ``output.topk(states, k)``.
        """
        return self.output.logits(states)

    def loss(self, states: Tensor, target: Tensor) -> Tensor:
        """The mean loss of the output layer, without the logits of all tokens in memory.

        Args:
            states: from `states`, or a selection of them, (..., E).
            target: the token that follows each state, int64 (...). The mean omits targets equal to
                the output layer's ``ignore_index``, which is -100 by default.

        Returns:
            A scalar in fp32, or fp64 for fp64 states.
        """
        return self.output.loss(states, target)

    def new_caches(
        self, max_length: int, kind: Literal["keys", "state"] | None = None
    ) -> list[Cache]:
        """One empty cache per layer, for sequences of up to ``max_length`` tokens.

        ``kind`` is that of `Attention.new_cache`. Use "keys" to decode with ``segment_ids``.
        """
        if kind is None and (self.window is not None or self.positions in self.BIASED):
            kind = "keys"
        return [attend.new_cache(max_length, kind) for attend in self._attends()]

    def _attends(self) -> list[Attention | Wrapper]:
        # Not self.layers: torch.compile and other wrappers may hold a layer.
        return [layer.attend for layer in self.layers.modules() if isinstance(layer, DecoderLayer)]

    def _rotation(self, positions: Tensor) -> Tensor | None:
        """cos and sin of RoPE's angles, times the amplitude of the scaling, in fp32, or in fp64 for
        an fp64 model: (2, N, pairs) for positions (N,), or (2, B, 1, N, pairs) for (B, N)."""
        if not self.rotated_pairs:
            return None
        dtype, scaling = score_dtype(self.embed.weight), self._rope_scaling
        pair = torch.arange(self.rotated_pairs, device=positions.device, dtype=dtype)
        angle_per_token = (scaling.frequencies if scaling else frequencies)(
            pair, self.head_dim, self.rope_base
        )
        amplitude = scaling.amplitude if scaling else 1.0
        if amplitude != 1:  # it also multiplies the features that are not rotated
            unrotated = self.head_dim // 2 - self.rotated_pairs
            angle_per_token = F.pad(angle_per_token, (0, unrotated))
        angles = positions[..., None] * angle_per_token
        if positions.dim() == 2:
            angles = angles[:, None]
        rotation = torch.stack([angles.cos(), angles.sin()])
        return rotation if amplitude == 1 else amplitude * rotation
