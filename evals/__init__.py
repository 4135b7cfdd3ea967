"""Evals of attention variants: how well does each one work beyond the lengths it was trained on?

A plugin that defines a task imports the names below; see docs/evals.md.

Each of these imports only those above it:

    task        the interface of a task: settings, presets, data, model, metrics
    measures    measurements on attention weights, heads and predictions
    tasks       one file per task, families that share a model, experiments on digits
    results     result rows, their files, and statistics over seeds
    plugins     files that register variants or tasks
    progress    how many runs are finished
    run         a run: one training and its evaluations
    options     the options of the command line and of files
    sweeps      tuned settings
    study       which runs are missing, their keys, and their rows
    plan        makes a study from options
    launch      worker processes
    loggers     TensorBoard and Weights & Biases
    command     runs studies and shows their results
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
