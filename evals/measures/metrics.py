"""What is measured on attention weights, and the sums over chunks that become one row.

With w (B, n) the weights of one query and p = |w| / Σ|w|:

    hit_rate          argmax w is the true key: what the scorer allows
    oracle_accuracy   argmax_c Σ_{i in class c} w_i is the label: what the weights allow
    max_weight        w of the true key
    entropy           H(p) / log n
    n_eff             1 / Σ p²
    weight_sum        Σ w

A row whose weights are all 0 attends to nothing: hit and oracle are 0, and so are entropy
and n_eff.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evals.measures.arithmetic import is_out_of_memory
from evals.task import BatchResult


def weight_metrics(
    weights: Tensor, target: Tensor, classes: Tensor, label: Tensor, class_count: int
) -> dict[str, Tensor]:
    """Metrics (B,) of weights (B, n), true keys (B,), the keys' classes (B, n), labels (B,)."""
    size = weights.abs()
    total = size.sum(dim=-1)
    seen = total > 0
    p = size / total.masked_fill(~seen, 1.0)[:, None]
    per_class = weights.new_zeros(len(weights), class_count).scatter_add_(1, classes, weights)
    n_eff = seen / p.square().sum(dim=-1).masked_fill(~seen, 1.0)
    return {
        "hit_rate": (weights.argmax(dim=-1) == target) & seen,
        "oracle_accuracy": (per_class.argmax(dim=-1) == label) & seen,
        "max_weight": weights.gather(1, target[:, None])[:, 0],
        "entropy": -torch.special.xlogy(p, p).sum(dim=-1) / math.log(weights.shape[-1]),
        "n_eff": n_eff,
        "weight_sum": weights.sum(dim=-1),
    }


@dataclass(frozen=True)
class Outcome:
    """One row's figures, or why there are none: status "ok", "nan" or "oom"."""

    status: str
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: float = 0.0


class Tally:
    """Sums of one variant's figures over the chunks of one length, and the CPU time they took."""

    def __init__(self) -> None:
        self.metrics: dict[str, tuple[float, int]] = {}  # sum, count
        self.curves: dict[str, tuple[Tensor, int]] = {}
        self.cpu_seconds = 0.0
        self.failure: Outcome | None = None

    def add(self, work: Callable[[], BatchResult], prefix: str = "") -> None:
        """Add the figures of work(), in which memory may run out."""
        if self.failure is not None:
            return
        began = time.process_time()
        try:
            figures = work()
            for name, values in figures.metrics.items():
                total, count = self.metrics.get(prefix + name, (0.0, 0))
                total += values.double().sum().item()
                self.metrics[prefix + name] = total, count + values.numel()
            for name, rows in figures.curves.items():
                total, count = self.curves.get(prefix + name, (0.0, 0))
                total = total + rows.double().sum(dim=0).cpu()
                self.curves[prefix + name] = total, count + len(rows)
        except (MemoryError, RuntimeError) as error:
            self.fail(error)
        self.cpu_seconds += time.process_time() - began

    def fail(self, error: BaseException) -> None:
        """Record that memory ran out; any other error is a defect and goes on."""
        if not is_out_of_memory(error):
            raise error
        self.failure = Outcome("oom", str(error).splitlines()[0] if str(error) else "out of memory")

    def outcome(self) -> Outcome:
        """Means over all there was, unless something failed or is not finite."""
        if self.failure is not None or not self.metrics:
            failure = self.failure or Outcome("oom", "nothing was evaluated")
            return Outcome(failure.status, failure.message, cpu_seconds=self.cpu_seconds)
        metrics = {name: total / count for name, (total, count) in self.metrics.items()}
        curves = {name: (total / count).tolist() for name, (total, count) in self.curves.items()}
        broken = [name for name, mean in metrics.items() if not math.isfinite(mean)]
        broken += [n for n, curve in curves.items() if not all(map(math.isfinite, curve))]
        if broken:
            return Outcome("nan", f"not finite: {', '.join(broken)}", cpu_seconds=self.cpu_seconds)
        return Outcome("ok", "", metrics, curves, self.cpu_seconds)
