"""The error that a command reports in one line."""

from __future__ import annotations


class UsageError(ValueError):
    """A setting that cannot be run; its text is the one line which the user reads."""
