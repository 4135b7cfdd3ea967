"""MixtureOutput: an output layer that mixes several softmaxes, or several hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.core.call import score_dtype
from attnzoo.core.checks import check_sizes, is_dtensor, shown
from attnzoo.functional.prepare import autocast_dtype
from attnzoo.functional.topk import TopK
from attnzoo.losses.arguments import check_options, check_plain, check_target
from attnzoo.losses.probabilities import check_head, log_probabilities, topk_by_chunks
from attnzoo.nn.output_layer import OutputLayer, TargetLoss

MIXES = ("probabilities", "contexts")
NEG_INF = float("-inf")


class MixtureOutput(OutputLayer):
    """An output layer whose probabilities are a mixture of K distributions, with its loss.

    K contexts c_k = tanh(W_k h) and a prior π = softmax(W_π h) are computed from a hidden state h.
    All components share the matrix E and the bias b::

        mix="probabilities"    p = Σ_k π_k w(E c_k + b)
        mix="contexts"         p = w(E Σ_k π_k c_k + b)

    w are the variant's weights, and the loss of "contexts" is the variant's loss. The loss of
    "probabilities" is −log p_y. It follows from K losses of each token,
    ℓ_k = −log w_y(E c_k + b)::

        −log p_y = −log Σ_k exp(log π_k − ℓ_k),  for softmax  ℓ_k = lse_k − z_ky

    The memory of `loss` is linear in tokens · K + classes. For softmax, log p of "contexts" has a
    rank of at most d + 2 over any number of tokens (d + 1 without bias), as with one softmax.
    "probabilities" has no such bound.

    Args:
        in_features: number of features of a hidden state, d. The contexts have the same number.
        num_classes: number of classes, V.
        components: number of components, K.
        variant: a name from `attnzoo.list_variants` of a variant that has a loss. For
            "probabilities" this loss must be −log w_y, as with softmax, ssmax, log_n, sink and
            taylor.
        bias: whether the layer learns a bias b per class.
        mix: "probabilities" or "contexts".
        learn, softcap, ignore_index, device, dtype, **params: as for `OutputLayer`; the parameter
            ``bias`` of the variant sigmoid cannot be set here either.

    Attributes:
        weight: E, (V, d). It can be tied as the one of `OutputLayer`.
        bias: (V,) or None.
        contexts: the linear map to all W_k h, with a weight (K·d, d).
        prior: the linear map W_π, with a weight (K, d).

    Raises:
        ValueError, TypeError: an argument is wrong, or the variant has no loss that can be mixed;
            the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import MixtureOutput
        >>> layer = MixtureOutput(16, 1000, 3)
        >>> layer
        MixtureOutput(
          16, 1000, 3, 'softmax', bias=True
          (contexts): Linear(in_features=16, out_features=48, bias=False)
          (prior): Linear(in_features=16, out_features=3, bias=False)
        )
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> output, loss = layer(hidden, target)
        >>> torch.allclose(loss, -output.mean())
        True
        >>> layer.topk(hidden, 5).indices.shape
        torch.Size([8, 5])

    References:
        Yang et al. 2018, "Breaking the softmax bottleneck", arXiv:1711.03953: the mixture of
        softmaxes in Section 2.4, the mixture of contexts in Section 2.5.

    Notes:
        As in the paper's formula, W_k and W_π have no bias. There is no dropout of the contexts.
        Label smoothing and ``lse_penalty`` are not available. After `shard_classes` only `loss` can
        be called; W_k and W_π are not sharded.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        components: int,
        variant: str = "softmax",
        bias: bool = True,
        *,
        mix: str = "probabilities",
        learn: tuple[str, ...] | list[str] | None = None,
        softcap: float | None = None,
        ignore_index: int = -100,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **params: Any,
    ) -> None:
        check_sizes(components=components)
        if not isinstance(mix, str) or mix not in MIXES:
            raise ValueError(f"mix must be one of {', '.join(MIXES)}, got {shown(mix)}")
        for name in {"label_smoothing", "lse_penalty"} & params.keys():
            raise TypeError(f"MixtureOutput has no argument {name}")
        super().__init__(
            in_features, num_classes, variant, bias, learn=learn, softcap=softcap,
            ignore_index=ignore_index, device=device, dtype=dtype, **params,
        )  # fmt: skip
        self.components, self.mix = components, mix
        if mix == "probabilities" and check_head(self._head(), 0.0, 0.0).normalize != "sum":
            raise ValueError(
                f"variant must have the loss -log w_y with mix='probabilities', but {variant!r} "
                "has another loss; mix='contexts' takes any variant that has a loss"
            )
        size = components * in_features
        self.contexts = nn.Linear(in_features, size, bias=False, device=device, dtype=dtype)
        self.prior = nn.Linear(in_features, components, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draws all matrices and the bias as `torch.nn.Linear` does; resets the variant's
        parameters."""
        super().reset_parameters()
        for child in self.children():  # none yet when OutputLayer.__init__ calls this method
            if isinstance(child, nn.Linear):
                child.reset_parameters()

    def forward(self, input: Tensor, target: Tensor) -> TargetLoss:
        """The log-probability of each target, and the mean loss, as from `OutputLayer`."""
        self._check_whole()
        input = self._without_ignored(input, target)
        if self.mix == "contexts":
            return super().forward(self._mixed(input), target)
        losses = self._losses(input, target)
        ignored = target == self.ignore_index
        output = (-losses.detach()).masked_fill(ignored, float("nan"))
        return TargetLoss(output, _reduced(losses, ignored, "mean"))

    def loss(self, input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of the targets, as from `OutputLayer.loss`, with the same arguments."""
        input = self._without_ignored(input, target)
        if self.mix == "contexts":
            return super().loss(self._mixed(input), target, reduction)
        check_options(reduction, 0.0, 0.0, None, self.ignore_index, False)
        return _reduced(self._losses(input, target), target == self.ignore_index, reduction)

    def logits(self, input: Tensor) -> Tensor:
        """For mix="contexts" logits z of all classes, (*, V), before ``softcap``.

        A mixture of probabilities has no logits. The result is then `log_prob`.
        """
        self._check_whole()
        if self.mix == "contexts":
            return super().logits(self._mixed(self._checked_input(input)))
        return self.log_prob(input)

    def log_prob(self, input: Tensor) -> Tensor:
        """Log-probabilities of all classes, (*, V), for hidden states (*, d); differentiable.

        The result is in fp32, or fp64 for fp64 inputs. For mix="probabilities" the computation
        needs several times K times the memory of the result if gradients are needed.
        """
        input = self._checked_input(input)
        if self.mix == "contexts":
            return super().log_prob(self._mixed(input))
        log_prior, contexts = self._components(input)
        head, total = self._head(), None
        for k in range(self.components):
            each = log_probabilities(contexts[..., k, :], head) + log_prior[..., k, None]
            if total is None:
                total = each
                continue
            off = each == NEG_INF  # the gradient of log(0 + 0) would be NaN
            more = torch.logaddexp(total, each.masked_fill(off, 0.0))
            total = torch.where(off, total, more)
        assert total is not None
        return total

    def topk(self, input: Tensor, k: int) -> TopK:
        """The k most probable classes of each token, as from `OutputLayer`."""
        checked = self._checked_input(input)
        if self.mix == "contexts":
            return super().topk(self._mixed(checked).to(input.dtype), k)
        return topk_by_chunks(self.log_prob, input, k, self.num_classes)

    def _check_whole(self) -> None:
        if is_dtensor(self.weight):
            raise TypeError("weight is a DTensor: only the method loss takes sharded classes")

    def _without_ignored(self, input: Tensor, target: Tensor) -> Tensor:
        """Checked hidden states, 0 where the target is ignored."""
        check_plain(input=input)
        input = self._checked_input(input)
        lead = input.shape[:-1]
        check_target(target, lead, self.num_classes, None, self.ignore_index, input.device)
        # NaN in an ignored token must not reach the gradients.
        return input.masked_fill((target == self.ignore_index)[..., None], 0.0)

    def _losses(self, input: Tensor, target: Tensor) -> Tensor:
        """−log p_y of each token, (*); 0 where the target is ignored."""
        log_prior, contexts = self._components(input)
        each = super().loss(contexts, target[..., None].expand(log_prior.shape), "none")
        losses = -torch.logsumexp(log_prior - each, dim=-1)
        return losses.masked_fill(target == self.ignore_index, 0.0)

    def _components(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """log π (*, K) in fp32 or fp64, and the contexts (*, K, d)."""
        for name, linear in (("contexts", self.contexts), ("prior", self.prior)):
            dtype = autocast_dtype(linear.weight)
            if dtype != input.dtype:
                raise TypeError(
                    f"{name}.weight must have the dtype of input, {input.dtype}, got {dtype}"
                )
        log_prior = self.prior(input).to(score_dtype(input)).log_softmax(-1)
        contexts = torch.tanh(self.contexts(input))
        return log_prior, contexts.unflatten(-1, (self.components, self.in_features))

    def _mixed(self, input: Tensor) -> Tensor:
        """Σ_k π_k c_k, (*, d)."""
        log_prior, contexts = self._components(input)
        return (log_prior.exp()[..., None] * contexts).sum(-2).to(contexts.dtype)

    def extra_repr(self) -> str:
        """Sizes, the variant and the values of its parameters, for repr()."""
        features, classes, params = super().extra_repr().split(", ", 2)
        mix = "" if self.mix == MIXES[0] else f", mix={self.mix!r}"
        return f"{features}, {classes}, {self.components}, {params}{mix}"


def _reduced(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()
