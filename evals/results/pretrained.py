"""Pretrained models, with the attributes of a task that statistics and tables read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evals.measures.sparsity import TITLES
from evals.results.rows import PRETRAINED
from evals.task import Metric

BASELINE = "as loaded"
RISE = "loss minus as loaded"  # in summary.csv, paired by sample
# The retrieval tasks: names of metrics, and their titles.
RETRIEVAL = {
    "one_needle": "one needle",
    "several_keys": "several keys",
    "several_queries": "several queries",
    "several_values": "several values",
    "variable_tracking": "variable tracking",
    "common_word": "common word",
}


class Pretrained:
    """Pretrained models with substituted attention. A seed is a sample, x is a context length."""

    name = PRETRAINED
    about = "Attention variants are substituted in a pretrained language model at inference."
    axis = "n"
    metrics = (
        Metric("loss", "Loss, nats per token (lower is better)", lower_is_better=True),
        Metric("retrieval", "Retrieval, mean of the tasks, %", 100, 1),
        Metric("loss_end", "Loss of the last quarter of the positions", lower_is_better=True),
        Metric("retrieval_logprob", "Log-probability of the right answers, nats per token", 1, 2),
        Metric("retrieval_greedy", "Retrieval by greedy decoding, % of the values", 100, 1),
        Metric("needle_weight", "Weight on the needle, mean over heads", 1, 4),
        Metric("needle_weight_max", "Weight on the needle, largest of all heads"),
        Metric("needle_entropy", "H/log n at the question for the needle"),
        Metric("max_weight", "Largest weight, mean over heads"),
        *(Metric(name, f"{title}, mean over heads") for name, title in TITLES.items()),
    )
    score = metrics[0]
    trained_score = None
    published = None
    versus: Mapping[str, str] = {}
    curve = None

    def remarks(self, settings: Mapping[str, Any]) -> list[str]:
        return []


MODELS = Pretrained()
