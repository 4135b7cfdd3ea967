"""Retrieval tasks: one attention head finds one of n items, and an MLP predicts its class.

`max-retrieval` and `needle` belong to this family. The model is an MLP for items, an MLP for the
query, one attention head with q, k and v projections, and an output MLP. Items have no order, so
there is no position encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import attnzoo
from commandline.variants import VariantCall
from evals.measures import heads
from evals.measures.arithmetic import rounded
from evals.measures.metrics import weight_metrics
from evals.task import BatchResult, HeadSample, Measure, Metric, Preset, Published, Settings, Task
from evals.tasks.families.batches import Batch, check_range, check_tensor, check_type

CLASSES = 10
# Maximum number of keys in the curve ``best_keys``. It has the weights of the keys that fit the
# query best, in descending order of ``RetrievalBatch.closeness``.
BEST_KEYS = 16

METRICS = (
    Metric("accuracy", "Accuracy, %", 100, 1),
    Metric("hit_rate", "Hit rate (the largest weight is on the true key), %", 100, 1),
    Metric("oracle_accuracy", "Accuracy of the class with the largest summed weight, %", 100, 1),
    Metric("max_weight", "Weight on the true key", log=True),
    Metric("entropy", "Entropy of the weights, H / log n"),
    Metric("n_eff", "Effective number of keys, 1 / Σ p²", digits=1),
    Metric("weight_sum", "Weight sum, Σ w"),
    # Optional: results stored before these measures existed do not have them.
    Metric("renyi_2", "Rényi entropy of order 2 of the weights, H₂ / log n", optional=True),
    Metric("renyi_inf", "Rényi entropy of order ∞ of the weights, H∞ / log n", optional=True),
    Metric("l1_l2", "ℓ1/ℓ2 of the weights, Σ|w| / √Σw²", digits=2, optional=True),
    Metric("hoyer", "Hoyer index of the weights (0: equal weights, 1: one key)", optional=True),
    Metric("gini", "Gini index of the weights (0: equal weights, 1 − 1/n: one key)", optional=True),
)


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings(Settings):
    """Settings of a retrieval task.

    scale: "sqrt" (z = q·k / √d) or "none" (z = q·k). qk_dim: the width of queries and keys, d; 0
    stands for ``width``. inputs: the dtype to which the features of items and queries are rounded,
    as by ``matmul``, but no other operand; the true item stays the largest before rounding.
    """

    batch: int = 128
    train_shortest: int = 5
    train_longest: int = 16
    test_sequences: int = 2000
    test_least: int = 500
    scale: str = "sqrt"
    qk_dim: int = 0
    inputs: str = "float32"

    MAY_BE_ZERO = ("qk_dim",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in ("sqrt", "none"):
            raise ValueError(f"scale must be 'sqrt' or 'none', got {self.scale!r}")
        self._check_dtype("inputs")

    def identity(self) -> dict[str, object]:
        defaults = {"qk_dim": 0, "inputs": "float32"}
        return {
            k: x for k, x in super().identity().items() if k not in defaults or x != defaults[k]
        }


@dataclass(frozen=True)
class RetrievalBatch(Batch):
    """B sequences of n items.

    features: float (B, n, F), the items without their classes. classes: int64 (B, n), 0 to 9.
    query: float (B, G), the features of the query. closeness: float (B, n), how well an item fits
    the query; the true item is the first one with the largest value.
    """

    features: Tensor
    classes: Tensor
    query: Tensor
    closeness: Tensor

    @property
    def target(self) -> Tensor:
        """The index of the true item: (B,)."""
        return self.closeness.argmax(dim=-1)

    @property
    def label(self) -> Tensor:
        """The class of the true item: (B,)."""
        return self.classes.gather(1, self.target[:, None])[:, 0]

    def items(self) -> Tensor:
        """The model's input ``[features, onehot(class)]``: (B, n, F + 10)."""
        one_hot = torch.zeros(*self.classes.shape, CLASSES, device=self.classes.device)
        one_hot.scatter_(2, self.classes[..., None], 1.0)
        return torch.cat((self.features, one_hot), dim=-1)


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


class RetrievalModel(nn.Module):
    """Maps items (B, n, F + 10) and a query (B, G) to ten logits."""

    def __init__(
        self, sizes: tuple[int, int], variant: VariantCall, settings: RetrievalSettings
    ) -> None:
        super().__init__()
        width, query_width = settings.width, settings.qk_dim or settings.width
        features, query_features = sizes
        self.scale = query_width**-0.5 if settings.scale == "sqrt" else 1.0
        self.item = _mlp(features + CLASSES, width, width)
        self.query = _mlp(query_features, width, width)
        self.attention = (
            attnzoo.nn.Attention(variant.name, 1, head_dim=query_width, **variant.params)
            if variant.wrapper_choice is None
            else attnzoo.nn.host_attention(
                variant.wrapper_choice, variant.name, 1, width, variant.params,
                key_dim=width, qk_dim=query_width, v_dim=width,
            )
        )  # fmt: skip
        self.to_q = nn.Linear(width, self.attention.queries * query_width)
        self.to_k = nn.Linear(width, query_width)
        self.to_v = nn.Linear(width, width)
        self.output = _mlp(width, width, CLASSES)

    def options(self, query: Tensor) -> dict[str, Any]:
        """The options of attention for a query (B, G): the scale, and the gate of a wrapper."""
        if isinstance(self.attention, attnzoo.nn.Attention):
            return {"scale": self.scale}
        hidden = self.query(query)[:, None]
        return {"scale": self.scale, **self.attention.projected(hidden, hidden)}

    def project(self, items: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, Q, 1, D), k and v (B, 1, n, D) of items (B, n, F + 10) and query (B, G). Q is 1, or
        the number of queries of a wrapper.

        For k and v, W (U x + c) + b is computed as (W U) x + (W c + b), with a third fewer
        operations. Results and gradients are the same, because no activation stands between the
        item MLP's second layer (U, c) and the projections (W, b).
        """
        hidden, second = self.item[:2], self.item[2]
        assert isinstance(second, nn.Linear)
        folds = [(to.weight @ second.weight, to(second.bias)) for to in (self.to_k, self.to_v)]
        item = hidden(items)
        k, v = (F.linear(item, weight, bias)[:, None] for weight, bias in folds)
        q = rearrange(self.to_q(self.query(query)), "b (m d) -> b m 1 d", m=self.attention.queries)
        return q, k, v

    def forward(self, items: Tensor, query: Tensor) -> Tensor:
        """Logits (B, 10)."""
        attended = self.attention(*self.project(items, query), **self.options(query))
        return self.output(attended[:, 0, 0])


# A function (seed, split, length, start, stop) that returns sequences start .. stop − 1.
Draw = Callable[[int, str, int, int, int], RetrievalBatch]


@dataclass(frozen=True)
class RetrievalTask(Task):
    """A retrieval task.

    Attributes besides those of `Task`:
        version: the version of the data.
        draw: draws a batch from (seed, split, length, start, stop).
        sizes: (F, G). F is the number of features of an item, besides its class. G is the number of
            features of a query.

    `evals/tasks/needle.py` is an example in 50 lines.
    """

    name: str
    about: str
    version: str
    draw: Draw
    sizes: tuple[int, int]
    presets: Mapping[str, Preset]
    published: Published | None = None
    head_sequences: int = 256
    trained_score: float | None = 0.95
    positions: tuple[str, ...] = ("none",)
    metrics: tuple[Metric, ...] = METRICS
    splits: Mapping[str, str] = field(default_factory=lambda: {"": "test"})

    def data_version(self, settings: Any) -> str:
        return self.version

    def chance(self, settings: Any) -> float:
        return 1 / CLASSES

    def tokens(self, length: int) -> int:
        return length

    def build(
        self, variant: VariantCall, positions: str, settings: RetrievalSettings
    ) -> RetrievalModel:
        return RetrievalModel(self.sizes, variant, settings)

    def batch(
        self, seed: int, split: str, length: int, start: int, stop: int, settings: RetrievalSettings
    ) -> RetrievalBatch:
        batch = self.draw(seed, split, length, start, stop)
        check_type(batch, RetrievalBatch)
        count, (features, query_features) = stop - start, self.sizes
        for name, shape, dtype in (
            ("features", (count, length, features), torch.float32),
            ("classes", (count, length), torch.int64),
            ("query", (count, query_features), torch.float32),
            ("closeness", (count, length), torch.float32),
        ):
            check_tensor(name, getattr(batch, name), shape, dtype)
        check_range("classes", batch.classes, 0, CLASSES - 1)
        if settings.inputs != "float32":
            features, query = (rounded(x, settings.inputs) for x in (batch.features, batch.query))
            batch = replace(batch, features=features, query=query)
        return batch

    def loss(self, model: RetrievalModel, batch: RetrievalBatch) -> Tensor:
        return F.cross_entropy(model(batch.items(), batch.query), batch.label)

    def measure(self, model: RetrievalModel, batch: RetrievalBatch, sample: HeadSample) -> Measure:
        """Compute q, k and v once, and return a function that measures one variant on them.

        ``accuracy`` uses attention in fp32, as in training. The other metrics use weights computed
        in fp64 from the same q and k, so that rounding causes no ties.
        """
        qkv, options = model.project(batch.items(), batch.query), model.options(batch.query)
        q, k, v = (x.double() for x in qkv)
        if isinstance(model.attention, attnzoo.nn.Attention):
            v = v[..., :1]  # the weights do not depend on the values
        exact: dict[str, Any] = {
            name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()
        }
        target, label = batch.target, batch.label
        order = batch.closeness.topk(min(BEST_KEYS, batch.classes.shape[1]), dim=-1).indices

        def measured(substitute: VariantCall | None) -> BatchResult:
            with heads.substituted(model, substitute):
                attention = model.attention
                logits = model.output(attention(*qkv, **options)[:, 0, 0])
                with heads.measured_heads(attention, sample) as curves:
                    weights = attention(q, k, v, need_weights=True, **exact)[1][:, 0, 0]
            metrics = weight_metrics(weights, target, batch.classes, label, CLASSES)
            # Adding 0 · logits propagates a NaN, which would otherwise count as a wrong answer.
            right = (logits.argmax(dim=-1) == label).double()
            metrics["accuracy"] = right + 0 * logits.sum(dim=-1)
            return BatchResult(metrics, {"best_keys": weights.gather(1, order), **curves})

        return measured
