"""The error that a command prints as one line."""

from __future__ import annotations


class UsageError(ValueError):
    """Settings that cannot be run. The message is the one line that the user reads."""
