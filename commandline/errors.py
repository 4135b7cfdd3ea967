"""The error that a command prints as one line."""

from __future__ import annotations


class UsageError(ValueError):
    """A wrong argument, setting or file. The command prints the message as one line and exits."""
