"""The table of kernels, from the JSON files that `python -m benchmarks gpu` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commandline.table import markdown

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
LENGTH = 16384
HEAD_DIMS, DIRECTIONS = (64, 128), ("forward", "backward")
AGAINST = ("sdpa flash", "sdpa cudnn")
NONE_YET = "No GPU has been measured yet.\n"

Record = dict[str, Any]


def kernels_table(results: Path = RESULTS, dims: Sequence[int] = HEAD_DIMS) -> str:
    """A paragraph and a table for each device, from its newest file in the folder."""
    newest: dict[str, Record] = {}
    for path in sorted(results.glob("*.json")):
        document = json.loads(path.read_text())
        if not any("tflops" in row["figures"] for row in document["rows"]):
            continue  # a stage without timings of attention
        device = document["environment"]["device"]
        known = newest.get(device)
        if known is None or known["environment"]["date"] <= document["environment"]["date"]:
            newest[device] = document
    parts = [device_table(newest[device], dims) for device in sorted(newest)]
    return "\n".join(parts) if parts else NONE_YET


def device_table(document: Record, dims: Sequence[int]) -> str:
    timed = [row for row in document["rows"] if "tflops" in row["figures"]]
    rows = [
        row for row in timed
        if row["causal"] and row["inputs"] == "iid" and row["head_dim"] in dims
    ]  # fmt: skip
    where = document["environment"]
    named = (
        f"{where['device']}, torch {where['torch']}, Triton {where['packages']['triton']}, "
        f"{where['date']}"
    )
    lengths = {row["length"] for row in rows}
    if not lengths:
        return f"{named}: nothing was timed.\n"
    length = LENGTH if LENGTH in lengths else max(lengths)
    rows = [row for row in rows if row["length"] == length]
    by_column = {(row["name"], row["direction"], row["head_dim"]): row for row in rows}
    columns = [(direction, dim) for dim in dims for direction in DIRECTIONS]
    header = ("", *(f"{direction}, D = {dim}" for direction, dim in columns))
    variants = dict.fromkeys(row["name"] for row in rows if row["kind"] == "variant")
    others = dict.fromkeys(row["name"] for row in rows if row["kind"] != "variant")
    table = [header]
    for name in (*sorted(variants), *others):
        shown = f"`{name}`" if name in variants else name
        table.append((shown, *(cell(by_column.get((name, *column))) for column in columns)))
    example = rows[0]
    return (
        f"{named}: TFLOP/s, causal, {example['dtype']}, N = {length}, B = {example['batch']}, "
        f"H = {example['heads']}. In brackets: the time divided by that of softmax through SDPA's "
        "flash backend and through its cuDNN backend, in the same rounds.\n\n" + markdown(table)
    )


def cell(row: Record | None) -> str:
    """TFLOP/s and two time ratios as text, such as "410 (0.90, 1.20)"; a dash if not measured."""
    if row is None:
        return "–"
    shown = f"{row['figures']['tflops']:.0f}"
    if row["name"] in AGAINST:
        return shown
    ratios = (row["ratios"].get(name) for name in AGAINST)
    multiples = ", ".join(f"{r['median']:.2f}" if r else "–" for r in ratios)
    return f"{shown} ({multiples})"
