"""The table of counted instructions, from the file that `benchmarks profile --json` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commandline.table import markdown

COUNTED = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "profile"
# Calls without a per-query gain; of these, causal ones if they were compiled
EXTRAS = ("no gain", "full no gain")
OTHERS = {"tutorial": "tutorial", "flex": "FlexAttention"}
NONE_YET = "Nothing has been counted yet.\n"

Record = dict[str, Any]


def profile_table(folder: Path = COUNTED) -> str:
    """A paragraph and a table for each architecture in the files of the folder."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        archs = dict.fromkeys(row["arch"] for row in document["rows"])
        parts += [arch_table(document, arch) for arch in archs]
    return "\n".join(parts) if parts else NONE_YET


def arch_table(document: Record, arch: str) -> str:
    by_kernel: dict[tuple, Record] = {}
    for extra in EXTRAS:
        for row in document["rows"]:
            if (row["arch"], row["extra"]) == (arch, extra):
                by_kernel.setdefault((row["kernel"], row["activation"], row["head_dim"]), row)
    others = {
        (x["name"], x["kernel"], x["head_dim"]): x for x in document["others"] if x["arch"] == arch
    }
    header = (
        "loop over full blocks", "instructions", "fp32", "mufu", "mask + integer", "factor",
        "TFLOP/s", *OTHERS.values(),
    )  # fmt: skip
    table = [header]
    for key in sorted(by_kernel, key=lambda key: (key[0] != "forward", key)):
        row = by_kernel[key]
        for loop in full_loops(row):
            beside = [cell(loop, others.get((name, key[0], key[2]))) for name in OTHERS]
            shown = beside if key[1] == "exp" else ["–"] * len(OTHERS)
            table.append((*cells(row, loop), *shown))
    rates, where = document["rates"][arch], document["environment"]
    return (
        f"{arch}, Triton {document['triton']}, {where['date']}. Instructions of a thread per score "
        f"element; TFLOP/s are **predicted** from them with the rates of {rates['device']}, not "
        "measured. For others: instructions, TFLOP/s, and in brackets our instructions divided by "
        "theirs.\n\n" + markdown(table)
    )


def full_loops(row: Record) -> Iterator[Record]:
    """The loop over full blocks of each pass."""
    for loop in row["loops"]:
        if loop["name"].split()[-1] in ("full", "all") and loop["predicted"] is not None:
            yield loop


def cells(row: Record, loop: Record) -> tuple[str, ...]:
    part = " ".join(loop["name"].split()[:-1])
    name = " ".join(filter(None, (row["kernel"], part, f"{row['activation']}, D ="))) + " "
    classes = loop["classes"]
    factors = [loop[x] for x in ("tensor_factor", "element_factor") if loop[x] is not None]
    spilled = f" ({row['stack_bytes']} B spilled)" if row["stack_bytes"] else ""
    return (
        name + str(row["head_dim"]) + spilled, f"{loop['total']:.1f}", f"{classes['fp32']:.1f}",
        f"{classes['mufu']:.1f}", f"{classes['mask'] + classes['integer']:.1f}",
        f"{max(factors):.2f}", f"{loop['predicted']['tflops']:.0f}",
    )  # fmt: skip


def cell(ours: Record, other: Record | None) -> str:
    if other is None:
        return "–"
    theirs = other["loop"]
    spilled = f", {other['stack_bytes']} B spilled" if other["stack_bytes"] else ""
    return (
        f"{theirs['total']:.1f}, {theirs['predicted']['tflops']:.0f}{spilled} "
        f"({ours['total'] / theirs['total']:.2f})"
    )
