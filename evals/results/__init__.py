"""Result rows: their fields, their files, and statistics over seeds."""

from evals.results.frame import load

__all__ = ["load"]
