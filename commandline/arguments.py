"""Types of command-line arguments, and arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

MOST = 2**31  # what is beyond is a slip


def add_plugin(parser: argparse.ArgumentParser, words: str = "") -> None:
    """``--plugin``, of every command in which a variant can be named; ``words`` end its help."""
    words = f"a file that registers more variants{words}"
    parser.add_argument("--plugin", type=Path, metavar="FILE.py", help=words)


def seed(text: str) -> int:
    """A seed, for an argument parser: torch takes 64 bits, and some are made from several."""
    if not (text.isascii() and text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r}: a seed is an integer from 0 to 2³² − 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """Positive integers with commas between them, for an argument parser."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if not 0 < min(values) <= max(values) < MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: positive integers, as 16,64,256, are expected")
    return values
