"""The argument parser, argument types, and arguments that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

MOST = 2**31  # larger numbers are rejected as typos


class Parser(argparse.ArgumentParser):
    """A parser with short errors. Subcommands made with ``add_subparsers`` are of this class too.

    The error for an unknown option or command suggests the closest known one. A command with a
    default for ``further`` gets its unknown arguments there, without an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, exit_on_error=False, **kwargs)
        self.commands: Mapping[str, argparse.ArgumentParser] = {}
        self.command_hint = ""  # printed below the error for an unknown command

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Add subcommands and keep their parsers by name in ``commands``."""
        action = super().add_subparsers(**kwargs)
        self.commands = action.choices
        return action

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]: argparse overloads it
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse the arguments into a namespace; exit with an error if one is unknown."""
        words = list(sys.argv[1:] if args is None else args)
        if self.commands and words and words[0][:1] != "-" and words[0] not in self.commands:
            hint = f"{did_you_mean(words[0], self.commands)}\n{self.command_hint}".rstrip()
            self.error(f"COMMAND must be {either(self.commands)}, got {words[0]!r}{hint}")
        parsed, unknown = self.parse_known_args(words, namespace)
        if hasattr(parsed, "further"):
            parsed.further = unknown
        elif unknown:
            parser = self.commands.get(words[0], self)
            hint = did_you_mean(unknown[0], parser._option_string_actions)
            parser.error(f"unknown argument {unknown[0]!r}{hint}")
        return parsed

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            colon = "" if error.message.startswith("must ") else ":"
            self.error(f"{error.argument_name}{colon} {error.message}")

    def error(self, message: str) -> NoReturn:
        """Print the message and the command that shows the help, and exit with status 2."""
        self.exit(2, f"error: {message}\nFor help: {self.prog} --help\n")


def either(choices: Collection[str]) -> str:
    """Join the choices with commas and "or".

    >>> either(["a", "b", "c"])
    'a, b or c'
    """
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A hint to append to an error message: the closest known word; "" if no word is close.

    >>> did_you_mean("smok", ["smoke", "quick"])
    "; did you mean 'smoke'?"
    """
    matches = get_close_matches(word.split("=")[0], known, 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def add_plugin(parser: argparse.ArgumentParser, words: str = "") -> None:
    """Add ``--plugin`` to a command that takes variants; ``words`` are appended to its help."""
    words = f"Load a Python file that registers more variants{words}"
    parser.add_argument("--plugin", type=Path, metavar="FILE.py", help=words)


def integer(low: int, high: int = MOST) -> Callable[[str], int]:
    """An argument type for argparse: an int from low to high."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            bound = f">= {low}" if high == MOST else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be an int {bound}, got {text!r}")
        return value

    return read


def number(text: str) -> float:
    """An argument type for argparse: a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


# At most 32 bits, so that seeds computed from this one fit into the 64 bits of a torch seed.
seed = integer(0, 2**32 - 1)


def numbers(text: str) -> list[int]:
    """An argument type for argparse: positive ints separated by commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if not 0 < min(values) <= max(values) < MOST:
        raise argparse.ArgumentTypeError(
            f"must be positive ints separated by commas, below 2**31, such as 16,64, got {text!r}"
        )
    return values
