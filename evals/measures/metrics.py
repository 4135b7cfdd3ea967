"""Metrics of attention weights, and their means over the batches of one eval length.

w (B, n) are the weights of one query per sequence:

    hit_rate          whether the largest weight is on the true key
    oracle_accuracy   whether the class with the largest summed weight is the label
    max_weight        the weight on the true key, even if another key has a larger weight
    weight_sum        Σ w

and the measures of `evals.measures.sparsity`, such as entropy and n_eff. If all weights of a query
are 0, every metric is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from evals.measures.arithmetic import is_out_of_memory
from evals.measures.sparsity import sparsity
from evals.task import BatchResult


def weight_metrics(
    weights: Tensor, target: Tensor, classes: Tensor, label: Tensor, class_count: int
) -> dict[str, Tensor]:
    """Compute the metrics listed at the top of this file, each as a tensor (B,), by name.

    Args:
        weights: (B, n), the weights of one query per sequence.
        target: (B,), the index of the true key.
        classes: (B, n), the class of each key.
        label: (B,), the true class.
        class_count: the number of classes.
    """
    any_weight = (weights != 0).any(dim=-1)
    per_class = weights.new_zeros(len(weights), class_count).scatter_add_(1, classes, weights)
    return {
        "hit_rate": (weights.argmax(dim=-1) == target) & any_weight,
        "oracle_accuracy": (per_class.argmax(dim=-1) == label) & any_weight,
        "max_weight": weights.gather(1, target[:, None])[:, 0],
        "weight_sum": weights.sum(dim=-1),
        **sparsity(weights, weights.shape[-1]),
    }


@dataclass(frozen=True)
class Outcome:
    """The results of one run at one eval length. status: "ok", "nan" or "oom". message: the reason
    if there are no results."""

    status: str
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: float = 0.0


class Tally:
    """Sums of one variant's results over the batches of one eval length, and the CPU time."""

    def __init__(self) -> None:
        # (sum, count) by name
        self.metrics: dict[str, tuple[Tensor, int]] = {}
        self.curves: dict[str, tuple[Tensor, int]] = {}
        self.cpu_seconds = 0.0
        self.failure: Outcome | None = None

    def add(self, work: Callable[[], BatchResult], prefix: str = "") -> None:
        """Add the results of ``work()``, or record an out-of-memory error."""
        if self.failure is not None:
            return
        began = time.process_time()
        try:
            result = work()
            metrics = {name: values.flatten() for name, values in result.metrics.items()}
            for sums, batch in ((self.metrics, metrics), (self.curves, result.curves)):
                for name, values in batch.items():
                    total, count = sums.get(prefix + name, (0.0, 0))
                    total = total + values.double().sum(dim=0).cpu()
                    sums[prefix + name] = total, count + len(values)
        except (MemoryError, RuntimeError) as error:
            self.fail(error)
        self.cpu_seconds += time.process_time() - began

    def fail(self, error: BaseException) -> None:
        """Record an out-of-memory error; raise any other error."""
        if not is_out_of_memory(error):
            raise error
        self.failure = Outcome("oom", str(error).splitlines()[0] if str(error) else "out of memory")

    def outcome(self) -> Outcome:
        """The means over all batches, or a failure if memory ran out or a mean is not finite."""
        if self.failure is not None or not self.metrics:
            failure = self.failure or Outcome("oom", "nothing was evaluated")
            return replace(failure, cpu_seconds=self.cpu_seconds)
        metrics, curves = (
            {name: total / count for name, (total, count) in sums.items()}
            for sums in (self.metrics, self.curves)
        )
        means = [*metrics.items(), *curves.items()]
        if broken := [name for name, mean in means if not mean.isfinite().all()]:
            return Outcome("nan", f"not finite: {', '.join(broken)}", cpu_seconds=self.cpu_seconds)
        numbers = {name: mean.item() for name, mean in metrics.items()}
        lists = {name: mean.tolist() for name, mean in curves.items()}
        return Outcome("ok", "", numbers, lists, self.cpu_seconds)
