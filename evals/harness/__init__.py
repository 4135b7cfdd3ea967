"""Runs of tasks: options, plugins, studies, runs, workers, training, cost estimates."""
