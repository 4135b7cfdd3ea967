"""Runs of a task: options, study, jobs, workers, training, store."""
