"""Runs of a task: options, study, runs, workers, training, store."""
