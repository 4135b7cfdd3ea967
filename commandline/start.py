"""Starts a command of this repository."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def start(main: Callable[[], int]) -> int:
    """The exit status of a command; 1, without a traceback, if the reader of its output closed it.

    ``head`` closes the output after the lines that it needs, for example.
    """
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        try:
            print(flush=True)  # the error may be of another pipe, such as that of a worker
        except BrokenPipeError:
            # Python flushes the output again when it exits, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        raise
