"""Runs commands on pretrained models in this process, and reads their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evals.__main__ import main
from evals.pretrained.loading import load
from evals.pretrained.training import read_stored
from helpers.small_lm import LENGTH, TEXT

_OPTIONS = {
    "pretrained": f"--workers 0 --lengths {LENGTH} --samples 1 --variants softmax",
    "adapt": "--workers 0 --train-length 48 --steps 6 --batch 2 --lengths 48,96 --samples 2 "
    "--measures loss",
    "sharpness": "--lengths 16 --samples 1",
}


def run(command: str, folder: Path, out: Path, *options: str) -> int:
    """The exit status of a command. Each command is a process of its own, so nothing is cached."""
    for cached in (read_stored, load):
        cached.cache_clear()
    line = [command, "--model", str(folder), "--text", str(TEXT), "--out", str(out)]
    try:
        return main([*line, *_OPTIONS[command].split(), *options])
    except SystemExit as stop:  # raised by argparse
        return int(str(stop.code))


def rows_in(out: Path) -> dict[tuple[str, int, int], Any]:
    """The rows of all files by variant, length and sample."""
    files = sorted(out.glob("rows*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(row["variant"], row["x"], row["seed"]): row for row in rows}


def metrics_in(out: Path) -> dict[str, Any]:
    """The metrics of all rows by key."""
    return {row["key"]: row["metrics"] for row in rows_in(out).values()}
