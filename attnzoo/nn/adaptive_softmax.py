"""AdaptiveSoftmax: an output layer with a head of frequent classes and clusters of rare ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.core.checks import check_bool, check_sizes, is_int, is_number, plain, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.topk import TopK
from attnzoo.losses.arguments import check_options, check_target
from attnzoo.losses.probabilities import topk_by_chunks
from attnzoo.nn.cutoffs import chosen_cutoffs
from attnzoo.nn.output_layer import OutputLayer, TargetLoss

IGNORED = -100  # ignore_index of the head and of the clusters
FIXED = ("in_features", "num_classes", "variant", "bias", "ignore_index", "device", "dtype")
CLUSTERS = 64  # the most clusters that `AdaptiveSoftmax.from_frequencies` makes
SMALLEST = 50 * 2560.0

Variant = str | tuple[str, dict[str, Any]]


class AdaptiveSoftmax(nn.Module):
    """An output layer that computes few logits for most tokens, as
    `torch.nn.AdaptiveLogSoftmaxWithLoss`, with a choice of variants.

    The classes must be sorted by frequency: class 0 is the most frequent. The head has an entry for
    each of the first ``cutoffs[0]`` classes, and one for each cluster of the other classes. Cluster
    i = 1 … J reduces the hidden states to d // div_value^i features. The probability of a class in
    the head is its weight there, and the probability of a class in a cluster is the product::

        p_y = head_y                       y < cutoffs[0]
        p_y = head_{cluster} · tail_y      otherwise

    The loss of a token is the loss of the head plus, for a class in a cluster, the loss of its
    cluster. For softmax it is −log p_y. A step with B tokens computes B·(cutoffs[0] + J) logits in
    the head, and logits of a cluster only for tokens whose target lies there.

    Args:
        in_features: number of features of a hidden state, d.
        num_classes: number of classes, V.
        cutoffs: J ascending ints from 1 to V − 1: the first class of each cluster.
        variant: the variant of the head: a name from `attnzoo.list_variants` of a variant that has
            a loss, or a pair (name, keywords of `OutputLayer`), such as
            ("softmax", {"softcap": 30.0}). Where its formula has n, it is the number of entries of
            the head.
        tail_variant: the variant of each cluster, likewise; None is ``variant``. Where its formula
            has n, it is the number of classes of the cluster.
        div_value: the base of the reduction of features.
        head_bias: whether the head learns a bias per entry. Head and clusters always have a bias if
            their variant has an `output_bias`.
        ignore_index, device, dtype: as for `OutputLayer`.

    Attributes:
        head: the `OutputLayer` of the head, with ``cutoffs[0]`` + J entries.
        tail: for each cluster a linear map and an `OutputLayer`.
        cutoffs: the cutoffs with V at the end, as in torch.

    Raises:
        ValueError, TypeError: an argument is wrong, or a variant has no loss; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import AdaptiveSoftmax
        >>> layer = AdaptiveSoftmax(64, 1000, [50, 200], tail_variant="entmax")
        >>> hidden, target = torch.randn(8, 64), torch.randint(1000, (8,))
        >>> output, loss = layer(hidden, target)
        >>> output.shape, loss.shape
        (torch.Size([8]), torch.Size([]))
        >>> same = AdaptiveSoftmax(64, 1000, [50, 200])
        >>> state = torch.nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [50, 200]).state_dict()
        >>> same.load_state_dict(state)
        <All keys matched successfully>

    References:
        Grave et al. 2017, "Efficient softmax approximation for GPUs", arXiv:1609.04309.

    Notes:
        For softmax, initial parameters, results and state dicts are those of torch. Unlike torch,
        hidden states may have any number of dimensions, targets may be ignored, and a cluster must
        keep at least one feature. As in torch, a cluster without targets gets no gradient, and
        reading which clusters have targets makes a GPU wait and breaks the graph of torch.compile.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        cutoffs: Sequence[int],
        variant: Variant = "softmax",
        tail_variant: Variant | None = None,
        *,
        div_value: float = 4.0,
        head_bias: bool = False,
        ignore_index: int = -100,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, num_classes=num_classes)
        check_bool("head_bias", head_bias)
        check_options("mean", 0.0, 0.0, None, ignore_index, False)
        self.in_features, self.num_classes = in_features, num_classes
        self.cutoffs = [*_cutoffs(cutoffs, num_classes), num_classes]
        sizes = _sizes(in_features, _div_value(div_value), len(cutoffs))
        if len(sizes) < len(cutoffs):
            raise ValueError(
                f"cutoffs must have at most {len(sizes)} entries, because in_features // "
                f"div_value^{len(sizes) + 1} leaves no feature, got {len(cutoffs)}"
            )
        self.div_value, self.ignore_index = float(div_value), int(ignore_index)
        self.shortlist_size, self.n_clusters = self.cutoffs[0], len(self.cutoffs) - 1
        name, options = _variant("variant", variant)
        tail_name, tail_options = name, options
        if tail_variant is not None:
            tail_name, tail_options = _variant("tail_variant", tail_variant)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        entries = self.shortlist_size + self.n_clusters
        bias = head_bias or get_variant(name).output_bias is not None
        self.head = OutputLayer(in_features, entries, name, bias, **made, **options)
        bias = get_variant(tail_name).output_bias is not None
        self.tail = nn.ModuleList()
        for first, end, size in zip(self.cutoffs, self.cutoffs[1:], sizes):
            project = nn.Linear(in_features, size, bias=False, **made)
            layer = OutputLayer(size, end - first, tail_name, bias, **made, **tail_options)
            self.tail.append(nn.ModuleList([project, layer]))

    @classmethod
    def from_frequencies(
        cls,
        in_features: int,
        counts: Tensor | Sequence[float],
        variant: Variant = "softmax",
        tail_variant: Variant | None = None,
        *,
        clusters: int | None = None,
        tokens: int = 2560,
        overhead: float = SMALLEST,
        smallest: float = SMALLEST,
        div_value: float = 4.0,
        **options: Any,
    ) -> AdaptiveSoftmax:
        """A layer whose cutoffs minimize the modelled time of a step, for given class frequencies.

        A product of B rows and k columns is modelled to take the time

            g(k, B) = c + max(λ k_0 B_0, λ k B)

        and a step with B tokens takes g(J + k_h, B) + Σ_i g(k_i, p_i B), where the head has
        k_h classes, and cluster i has k_i classes and the share p_i of the tokens. Dynamic
        programming finds the cutoffs with the least time. They do not depend on λ.

        Args:
            in_features: number of features of a hidden state, d.
            counts: the frequency of each class, (V,), in descending order. Any unit.
            variant, tail_variant, div_value, **options: as for `AdaptiveSoftmax`.
            clusters: J; None takes the number from 1 to 5 with the least time.
            tokens: B, the number of tokens in a step.
            overhead: c/λ, the fixed time of a product. It has an influence only if ``clusters`` is
                None.
            smallest: k_0 · B_0, the size k · B up to which the time of a product is constant.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.

        Example:
            >>> from attnzoo.nn import AdaptiveSoftmax
            >>> zipf = [1 / rank for rank in range(1, 100_001)]
            >>> AdaptiveSoftmax.from_frequencies(64, zipf, clusters=2).cutoffs
            [2975, 31890, 100000]

        References:
            Grave et al. 2017, arXiv:1609.04309, Section 4.

        Notes:
            Both defaults of the constants are assumptions, not measurements: the time is constant
            up to 50 columns of 2560 rows, and c is as long as the rest of such a product. Measure
            them on your device. The model ignores that products of the clusters have fewer
            features, and that they need a projection.
        """
        sizes = _sizes(in_features, _div_value(div_value), CLUSTERS)
        cutoffs = chosen_cutoffs(counts, clusters, tokens, overhead, smallest, len(sizes))
        options = {"div_value": div_value, **options}
        return cls(in_features, len(counts), cutoffs, variant, tail_variant, **options)

    def reset_parameters(self) -> None:
        """Draws all matrices as `torch.nn.Linear` does; resets the variants' parameters."""
        self.head.reset_parameters()
        for project, layer in self._clusters():
            project.reset_parameters()
            layer.reset_parameters()

    @property
    def has_zeros(self) -> bool:
        """Whether the layer can give classes probability 0, as with sparsemax, entmax and topk."""
        return any(layer.has_zeros for layer in (self.head, *(one for _, one in self._clusters())))

    def forward(self, input: Tensor, target: Tensor) -> TargetLoss:
        """The log-probability of each target, and the mean loss.

        Args:
            input: hidden states, (*, d).
            target: class indices, (*), int64, sorted by frequency.

        Returns:
            `TargetLoss`, a named tuple (output (*), loss ()), both in fp32, or fp64 for fp64
            inputs. Only ``loss`` has gradients.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        split = self._split(input, target)
        output, mean = self.head(split.input, split.head_target)
        count = split.counted()
        # The mean over no tokens is NaN, and its gradient would be NaN too.
        total = torch.where(count > 0, mean, 0.0) * count
        for rows, (project, layer), targets in self._visited(split):
            losses = layer(project(split.input[rows]), targets)
            output, total = (
                output.index_add(0, rows, losses.output),
                total + losses.loss * len(targets),
            )
        return TargetLoss(output.reshape(target.shape), _mean(total, count))

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor) -> TargetLoss: ...

    def loss(self, input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of the targets, as from `OutputLayer.loss`, with the same arguments."""
        check_options(reduction, 0.0, 0.0, None, self.ignore_index, False)
        split = self._split(input, target)
        inner = "none" if reduction == "none" else "sum"
        total = self.head.loss(split.input, split.head_target, inner)
        for rows, (project, layer), targets in self._visited(split):
            losses = layer.loss(project(split.input[rows]), targets, inner)
            total = total.index_add(0, rows, losses) if inner == "none" else total + losses
        if reduction == "mean":
            return _mean(total, split.counted())
        return total.reshape(target.shape) if reduction == "none" else total

    def logits(self, input: Tensor) -> Tensor:
        """The same as `log_prob`, because no logits give the probabilities of all classes."""
        return self.log_prob(input)

    def log_prob(self, input: Tensor) -> Tensor:
        """Log-probabilities of all classes, (*, V), for hidden states (*, d).

        A probability of 0 gives −inf. The result is in fp32, or fp64 for fp64 inputs, and has
        gradients.
        """
        head = self.head.log_prob(input)
        log_probs = [head[..., : self.shortlist_size]]
        for at, (project, layer) in enumerate(self._clusters(), self.shortlist_size):
            log_probs.append(layer.log_prob(project(input)) + head[..., at : at + 1])
        return torch.cat(log_probs, dim=-1)

    def topk(self, input: Tensor, k: int) -> TopK:
        """The k most probable classes of each token, as from `OutputLayer`."""
        self.head._checked_input(input)
        return topk_by_chunks(self.log_prob, input, k, self.num_classes)

    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each token, (*), for hidden states (*, d)."""
        return self.topk(input, 1).indices[..., 0]

    def _clusters(self) -> list[tuple[nn.Linear, OutputLayer]]:
        return [tuple(pair) for pair in self.tail]  # type: ignore[arg-type, return-value]

    def _split(self, input: Tensor, target: Tensor) -> _Split:
        """Checked hidden states and targets, with the target of each token in the head."""
        input = self.head._checked_input(input)
        lead, classes = input.shape[:-1], self.num_classes
        y = check_target(target, lead, classes, None, self.ignore_index, input.device)
        cluster = torch.bucketize(y, y.new_tensor(self.cutoffs[:-1]), right=True)
        cluster = cluster.masked_fill(y == self.ignore_index, 0)
        head_target = torch.where(cluster == 0, y, self.shortlist_size + cluster - 1)
        head_target = head_target.masked_fill(y == self.ignore_index, IGNORED)
        return _Split(input.reshape(-1, self.in_features), y, head_target, cluster)

    def _visited(self, split: _Split) -> list[tuple[Tensor, tuple[nn.Linear, OutputLayer], Tensor]]:
        """The clusters that have targets: indices of their tokens, the layers and the targets."""
        visited = []
        for i, pair in enumerate(self._clusters()):
            rows = (split.cluster == i + 1).nonzero()[:, 0]
            if len(rows):
                visited.append((rows, pair, split.target[rows] - self.cutoffs[i]))
        return visited

    def extra_repr(self) -> str:
        """Sizes and cutoffs, for repr()."""
        return f"{self.in_features}, {self.num_classes}, cutoffs={self.cutoffs[:-1]}"


class _Split(NamedTuple):
    """Tokens with their targets, for the head and the clusters."""

    input: Tensor  # (N, d)
    target: Tensor  # (N,)
    head_target: Tensor  # (N,)
    cluster: Tensor  # (N,), 0 for the head and for ignored tokens, otherwise from 1 to J

    def counted(self) -> Tensor:
        """The number of tokens that are not ignored, ()."""
        return (self.head_target != IGNORED).sum()


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """total / count; NaN with gradient 0 if ``count`` is 0."""
    return torch.where(count > 0, total / count.clamp(min=1), float("nan"))


def _sizes(in_features: int, div_value: float, count: int) -> list[int]:
    """The features of the first ``count`` clusters, up to the last one that has any."""
    check_sizes(in_features=in_features)
    every = (int(in_features // div_value ** (i + 1)) for i in range(count))
    return list(takewhile(lambda size: size >= 1, every))


def _div_value(value: Any) -> float:
    value = plain(value)
    if not is_number(value):
        raise TypeError(f"div_value must be a number >= 1, got {shown(value)}")
    if not 1 <= value <= torch.finfo(torch.float32).max:
        raise ValueError(f"div_value must be a finite number >= 1, got {shown(value)}")
    return float(value)


def _cutoffs(cutoffs: Any, classes: int) -> list[int]:
    allowed = f"ascending ints from 1 to num_classes - 1 = {classes - 1}"
    if not isinstance(cutoffs, Sequence) or isinstance(cutoffs, str) or not cutoffs:
        raise TypeError(f"cutoffs must be a sequence of {allowed}, got {shown(cutoffs)}")
    numbers = [plain(one) for one in cutoffs]
    if (
        not all(is_int(one) and 1 <= one < classes for one in numbers)
        or sorted(set(numbers)) != numbers
    ):
        raise ValueError(f"cutoffs must be {allowed}, got {shown(cutoffs)}")
    return numbers


def _variant(name: str, choice: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(choice, str):
        return choice, {}
    if not isinstance(choice, tuple) or [type(one) for one in choice] != [str, dict]:
        raise TypeError(
            f"{name} must be a name or a pair (name, keywords of OutputLayer), got {shown(choice)}"
        )
    if fixed := [one for one in FIXED if one in choice[1]]:
        raise TypeError(f"{name} must not set {', '.join(fixed)}")
    return choice[0], choice[1]
