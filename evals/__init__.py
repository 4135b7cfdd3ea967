"""Evals of attention variants: how well does each one work beyond the lengths it was trained on?

A plugin that defines a task imports the names below; see docs/evals.md.

Each of these imports only those above it:

    task        the interface of a task: settings, presets, data, model, metrics
    experiment  the interface of an experiment: output layers under several conditions
    measures    measurements on attention weights, heads and predictions
    tasks       one file per task, families that share a model, experiments on digits
    results     result rows, their files, and statistics over seeds
    harness     options, plugins, studies, runs, workers, training, cost estimates
    theory      closed forms, laws fitted to trained heads, ranks, in-context
    reporting   tables, figures, the report, and commands that show results
    pretrained  the attention of pretrained models
"""

from evals.task import Metric, Preset
from evals.tasks import draws, register_task
from evals.tasks.families.retrieval import RetrievalBatch, RetrievalSettings, RetrievalTask
from evals.tasks.families.sequence import SequenceBatch, SequenceSettings, SequenceTask

__all__ = [
    "Metric",
    "Preset",
    "RetrievalBatch",
    "RetrievalSettings",
    "RetrievalTask",
    "SequenceBatch",
    "SequenceSettings",
    "SequenceTask",
    "draws",
    "register_task",
]
