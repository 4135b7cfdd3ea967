"""OutputLayer: a linear layer over classes whose probabilities come from a variant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.checks import check_bool, check_device_and_dtype, check_sizes, is_dtensor
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Param
from attnzoo.functional.prepare import cast_by_autocast
from attnzoo.functional.score_rows import check_has_rows
from attnzoo.functional.topk import TopK
from attnzoo.losses.arguments import check_layer, check_options
from attnzoo.losses.linear_loss import linear_loss
from attnzoo.losses.probabilities import (
    OutputHead,
    check_head,
    has_zeros,
    linear_topk,
    log_probabilities,
    target_log_probabilities,
)
from attnzoo.nn.parameters import VariantParameters
from attnzoo.nn.sharding import local


class TargetLoss(NamedTuple):
    """What `OutputLayer` returns.

    Attributes:
        output: log-probability of each target, without gradients; −inf for probability 0, NaN for
            ignored targets.
        loss: mean loss of the variant.
    """

    output: Tensor
    loss: Tensor


class OutputLayer(VariantParameters):
    """A linear layer over classes whose probabilities come from a variant, with its loss.

    The logits are z = input · weightᵀ + bias. The probabilities are the variant's weights of z.
    Only `logits` and `log_prob` hold the logits of all tokens. Other methods compute them for some
    tokens at a time. The methods are those of `torch.nn.AdaptiveLogSoftmaxWithLoss`, `topk` and
    `logits`.

    Args:
        in_features: number of features of a hidden state, d.
        num_classes: number of classes, V.
        variant: a name from `attnzoo.list_variants` of a variant that has a loss.
        bias: whether the layer learns a bias per class. The parameter ``bias`` of the variant
            sigmoid cannot be set here and is 0. Without a bias per class, the loss of sigmoid
            starts near V·log 2.
        learn: names of the variant's parameters to learn, as for `Attention`; a learned parameter
            has shape (1,).
        softcap: c > 0 replaces the logits z by c·tanh(z/c).
        label_smoothing, lse_penalty, ignore_index: as for `attnzoo.losses.linear_loss`.
        device, dtype: of weight, bias and learned parameters of the variant.
        **params: values of the variant's parameters: floats, or tensors () or (1,). For a learned
            parameter this is the initial value.

    Attributes:
        weight: (V, d), initialized as in `torch.nn.Linear`.
        bias: (V,) or None, initialized as in `torch.nn.Linear`, plus `Variant.output_bias`.
        shards_classes: whether `shard_classes` was called.

    Raises:
        ValueError, TypeError: an argument is wrong, or the variant has no loss; the message names
            it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import OutputLayer
        >>> layer = OutputLayer(64, 1000, "entmax", alpha=1.5)
        >>> layer
        OutputLayer(64, 1000, 'entmax', bias=True, alpha=1.5)
        >>> hidden, target = torch.randn(8, 64), torch.randint(1000, (8,))
        >>> output, loss = layer(hidden, target)
        >>> output.shape, loss.shape
        (torch.Size([8]), torch.Size([]))
        >>> embedding = torch.nn.Embedding(1000, 64)
        >>> layer.weight = embedding.weight  # tied weights

    References:
        The loss of each variant: `attnzoo.losses.linear_loss`.

    Notes:
        Without label smoothing and ``lse_penalty``, ``loss`` is the mean of −``output`` for
        softmax, ssmax, log_n, sink and taylor. For the other variants it is not: sparsemax, entmax,
        asentmax and topk give some targets probability 0, where ``output`` is −inf and the loss is
        finite. The probabilities of sigmoid and sink do not sum to 1.

        A tie made by ``layer.weight = embedding.weight`` is kept by ``deepcopy``, pickling and
        ``to``. As with all modules of torch, ``to_empty`` breaks it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        variant: str = "softmax",
        bias: bool = True,
        *,
        learn: tuple[str, ...] | list[str] | None = None,
        softcap: float | None = None,
        label_smoothing: float = 0.0,
        lse_penalty: float = 0.0,
        ignore_index: int = -100,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, num_classes=num_classes)
        check_bool("bias", bias)
        check_device_and_dtype(device, dtype)
        check_options("mean", label_smoothing, lse_penalty, softcap, ignore_index, False)
        self.in_features, self.num_classes = in_features, num_classes
        self.softcap = None if softcap is None else float(softcap)
        self.label_smoothing, self.lse_penalty = float(label_smoothing), float(lse_penalty)
        self.ignore_index = int(ignore_index)
        self.shards_classes = False
        self.weight = nn.Parameter(
            torch.empty(num_classes, in_features, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        check_has_rows("OutputLayer", variant)
        defaults = get_variant(variant).output_defaults
        self._create_parameters(variant, 1, learn, params, defaults, dtype=dtype)
        if device is not None:
            self.to(device=device)
        check_head(self._head(), self.label_smoothing, self.lse_penalty)
        self.reset_parameters()

    def _specs(self, variant: str) -> list[Param]:
        return [param for param in super()._specs(variant) if param.name not in ("weight", "bias")]

    def reset_parameters(self) -> None:
        """Draws weight and bias as `torch.nn.Linear` does; resets the variant's parameters.

        The bias is drawn around `Variant.output_bias`.
        """
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            start = self.bias_start
            nn.init.uniform_(self.bias, start - bound, start + bound)
        self._reset(self.parameter_tensors())

    @property
    def bias_start(self) -> float:
        """The initial value of the bias, without torch's random part."""
        start = get_variant(self.variant).output_bias
        return 0.0 if start is None else start(self.num_classes)

    @property
    def has_zeros(self) -> bool:
        """Whether the layer can give classes probability 0, as with sparsemax, entmax and topk."""
        return has_zeros(check_head(self._head(), self.label_smoothing, self.lse_penalty))

    def forward(self, input: Tensor, target: Tensor) -> TargetLoss:
        """The log-probability of each target, and the mean loss.

        Args:
            input: hidden states, (*, d).
            target: class indices, (*), int64.

        Returns:
            `TargetLoss`, a named tuple (output (*), loss ()), both in fp32, or fp64 for fp64
            inputs. Only ``loss`` has gradients. The method `loss` costs less.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        if is_dtensor(self.weight):
            raise TypeError(
                "weight is a DTensor: only the methods loss and logits take sharded classes"
            )
        loss, stats = linear_loss(input, target=target, return_stats=True, **self._arguments())
        output = target_log_probabilities(input, self._head(), target, stats, self.ignore_index)
        return TargetLoss(output, loss)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor) -> TargetLoss: ...

    def loss(self, input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of the targets, without their log-probabilities.

        Args:
            input: hidden states, (*, d).
            target: class indices, (*), int64. The loss is 0 where it equals ``ignore_index``.
            reduction: "mean" over the other tokens, "sum" or "none".

        Returns:
            A scalar, or (*) with reduction "none"; in fp32, or fp64 for fp64 inputs.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        if self.shards_classes and not is_dtensor(input):
            from attnzoo.losses.sharded import replicated  # slow to import

            weight: Any = self.weight
            input = replicated(input, weight.device_mesh)
            loss = linear_loss(input, target=target, reduction=reduction, **self._arguments())
            return loss.to_local()
        return linear_loss(input, target=target, reduction=reduction, **self._arguments())

    def shard_classes(self, mesh: Any) -> OutputLayer:
        """Shards the classes over ranks for tensor parallelism, in place.

        ``weight`` and ``bias`` become sharded `DTensor` objects. All ranks must call `loss` with
        the same tokens; it has the gradients of one device. The methods that return probabilities
        raise, and `logits` takes a DTensor.

        Args:
            mesh: a one-dimensional `torch.distributed.device_mesh.DeviceMesh`.

        Returns:
            The module itself. A tie to an embedding's weight is lost.

        Raises:
            ValueError: the classes are sharded already, or mesh has more than one dimension.
            TypeError: mesh is not a DeviceMesh.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from attnzoo.nn import OutputLayer
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> mesh = dist.init_device_mesh("cpu", (1,))
            >>> layer = OutputLayer(8, 100, "entmax").shard_classes(mesh)
            >>> layer.loss(torch.randn(4, 8), torch.arange(4)).backward()
            >>> layer.weight.grad.placements
            (Shard(dim=0),)
            >>> dist.destroy_process_group()
        """
        from torch.distributed.tensor import Shard, distribute_tensor  # slow to import

        from attnzoo.core.rank_agreement import ranks_of

        if is_dtensor(self.weight):
            raise ValueError("shard_classes must be called once, before other sharding of weight")
        ranks_of(mesh)
        for name, x in (("weight", self.weight), ("bias", self.bias)):
            if x is not None:
                sharded = distribute_tensor(x.detach(), mesh, [Shard(0)])
                setattr(self, name, nn.Parameter(sharded, requires_grad=x.requires_grad))
        self.shards_classes = True
        return self

    def logits(self, input: Tensor) -> Tensor:
        """Logits z of all classes, (*, V), for hidden states (*, d), before ``softcap``."""
        if not is_dtensor(self.weight):
            self._checked_input(input)
        elif not is_dtensor(input):
            raise TypeError(
                f"input must be a DTensor if the weight is one, got a {type(input).__name__}"
            )
        return F.linear(input, self.weight, self.bias)

    def log_prob(self, input: Tensor) -> Tensor:
        """Log-probabilities of all classes, (*, V), for hidden states (*, d).

        A probability of 0 gives −inf with gradient 0. The result is in fp32, or fp64 for fp64
        inputs, and has gradients. The computation needs several times the memory of the result.
        """
        return log_probabilities(input, self._head())

    def topk(self, input: Tensor, k: int) -> TopK:
        """The k most probable classes of each token, as from `attnzoo.linear_topk`.

        Args:
            input: hidden states, (*, d).
            k: number of classes, from 1 to V.

        Returns:
            A named tuple (values, indices), both (*, k): probabilities in descending order, and
            classes. Without gradients.
        """
        head = self._head()
        return linear_topk(
            input, head.weight, k, head.variant, linear_bias=head.bias, softcap=head.softcap,
            **head.params,
        )  # fmt: skip

    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each token, (*), for hidden states (*, d)."""
        return self.topk(input, 1).indices[..., 0]

    def _checked_input(self, input: Tensor) -> Tensor:
        """The input, in the dtype of autocast if that is on; raises unless it fits the layer."""
        # One class suffices for the check. A cast of all would be in vain.
        bias = None if self.bias is None else cast_by_autocast(_one_class(self.bias))[0]
        input, weight = cast_by_autocast(input, _one_class(self.weight))
        check_layer(input, weight, bias)
        return input

    def _head(self) -> OutputHead:
        return OutputHead(self.weight, self.bias, self.variant, self.softcap, self._params())

    def _arguments(self) -> dict[str, Any]:
        """The arguments of `linear_loss` except input and target."""
        return {
            "linear_weight": self.weight,
            "linear_bias": self.bias,
            "variant": self.variant,
            "softcap": self.softcap,
            "label_smoothing": self.label_smoothing,
            "lse_penalty": self.lse_penalty,
            "ignore_index": self.ignore_index,
            **self._params(),
        }

    def extra_repr(self) -> str:
        """Sizes, the variant and the values of its parameters, for repr()."""
        options = {
            "softcap": (self.softcap, None),
            "label_smoothing": (self.label_smoothing, 0.0),
            "lse_penalty": (self.lse_penalty, 0.0),
            "ignore_index": (self.ignore_index, -100),
        }
        changed = [f"{name}={x}" for name, (x, default) in options.items() if x != default]
        sizes = [str(self.in_features), str(self.num_classes), repr(self.variant)]
        return ", ".join([*sizes, f"bias={self.bias is not None}", *self._shown(), *changed])


def _one_class(x: Tensor) -> Tensor:
    """The matrix or bias of one class, without its values: ranks would have to exchange them."""
    return local(x).new_empty(1, *x.shape[1:])
