"""The tables of times, memory and counted instructions, from files in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attnzoo
from benchmarks.harness.cases import SOFTMAX
from commandline.table import markdown
from scripts import variant_facts

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
LENGTH, HEAD_DIMS = 16384, (64, 128)
AGAINST = ("sdpa flash", "sdpa cudnn")
# Calls without a per-query gain; of these, causal ones if they were compiled
EXTRAS = ("no gain", "full no gain")
OTHERS = {"tutorial": "tutorial", "flex": "FlexAttention"}
COUNTS = ("instructions", "fp32", "mufu", "mask + integer", "factor", "TFLOP/s")

Record = dict[str, Any]


def documents(folder: Path) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def kernels_table(results: Path = RESULTS, dims: tuple[int, ...] = HEAD_DIMS) -> str:
    """A paragraph and a table for each device, from its newest file with times of attention."""
    newest: dict[str, Record] = {}
    for document in sorted(documents(results), key=lambda x: x["environment"]["date"]):
        if any("tflops" in row["figures"] for row in document["rows"]):
            newest[document["environment"]["device"]] = document
    parts = [device_table(newest[device], dims) for device in sorted(newest)]
    return "\n".join(parts) or "No GPU has been measured yet.\n"


def device_table(document: Record, dims: tuple[int, ...]) -> str:
    where = document["environment"]
    named = f"{where['device']}, torch {where['torch']}, Triton {where['packages']['triton']}"
    rows = [
        row for row in document["rows"]
        if "tflops" in row["figures"] and row["causal"] and row["inputs"] == "iid"
        and row["head_dim"] in dims
    ]  # fmt: skip
    if not rows:
        return f"{named}, {where['date']}: nothing was timed.\n"
    lengths = {row["length"] for row in rows}
    length = LENGTH if LENGTH in lengths else max(lengths)
    rows = [row for row in rows if row["length"] == length]
    by_column = {(row["name"], row["direction"], row["head_dim"]): row for row in rows}
    columns = [(direction, dim) for dim in dims for direction in ("forward", "backward")]
    variants = {row["name"] for row in rows if row["kind"] == "variant"}
    others = dict.fromkeys(row["name"] for row in rows if row["kind"] != "variant")
    table = [("", *(f"{direction}, D = {dim}" for direction, dim in columns))]
    for name in (*sorted(variants), *others):
        shown = f"`{name}`" if name in variants else name
        table.append((shown, *(speed(by_column.get((name, *column))) for column in columns)))
    return (
        f"{named}, {where['date']}: TFLOP/s, causal, {rows[0]['dtype']}, N = {length}, "
        f"B = {rows[0]['batch']}, H = {rows[0]['heads']}. In brackets: the time divided by that of "
        "softmax through SDPA's flash backend and through its cuDNN backend, in the same "
        f"rounds.\n\n{markdown(table)}"
    )


def speed(row: Record | None) -> str:
    """TFLOP/s and two time ratios as text, such as "410 (0.90, 1.20)"; a dash if not measured."""
    if row is None:
        return "–"
    shown = f"{row['figures']['tflops']:.0f}"
    if row["name"] in AGAINST:
        return shown
    ratios = (row["ratios"].get(name) for name in AGAINST)
    multiples = ", ".join(f"{r['median']:.2f}" if r else "–" for r in ratios)
    return f"{shown} ({multiples})"


def cost_table(file: Path = RESULTS / "cpu" / "attention.json") -> str:
    """A paragraph and a table, from a file of ``benchmarks attention --cpu-time --json``."""
    if not file.exists():
        return "No CPU has been measured yet.\n"
    document = json.loads(file.read_text())
    where, rows = document["environment"], document["rows"]
    first, by_name = rows[0], {(row["case"], row["direction"]): row for row in rows}
    mask = "causal" if first["causal"] else "full"
    with_memory = any(row["peak_bytes"] is not None for row in rows)
    threads = "one thread" if where["threads"] == 1 else f"{where['threads']} threads"
    memory = ("MB forward", "MB with backward") if with_memory else ()
    table = [("variant", "work", "forward", "backward", *memory)]
    for name in attnzoo.list_variants():
        forms = variant_facts.forms_of(name)
        work = " or ".join(map(variant_facts.cost, forms)) or "N²·D, by the definition"
        lines = [by_name.get((name, direction)) for direction in ("forward", "backward")]
        used = map(megabytes, lines) if with_memory else ()
        table.append((f"`{name}`", work, *map(relative_time, lines), *used))
    return (
        f"{where['cpu']}, {threads}, torch {where['torch']}, {where['date']}: {mask}, "
        f"{first['dtype']}, B = {first['batch']}, H = {first['heads']}, N = {first['length']}, "
        f"D = {first['head_dim']}. Median of the CPU time divided by that of `softmax` in the same "
        f"rounds{', and peak memory without the inputs' if with_memory else ''}.\n\n"
        f"{markdown(table)}"
    )


def relative_time(row: Record | None) -> str:
    if row is None or row["seconds"] is None:
        return "–"
    return "1" if row["case"] == SOFTMAX.spec else f"{row['ratios'][SOFTMAX.spec]['median']:.1f}"


def megabytes(row: Record | None) -> str:
    return "–" if row is None or row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"


def profile_table(folder: Path = RESULTS / "profile") -> str:
    """A paragraph and a table for each architecture, from files of ``benchmarks profile --json``.

    A line is the loop over full blocks of a pass of a kernel.
    """
    parts = []
    for document in documents(folder):
        where, rows = document["environment"], document["rows"]
        for arch in dict.fromkeys(row["arch"] for row in rows):
            lines = profile_lines(document, arch)
            parts.append(
                f"{arch}, Triton {document['triton']}, {where['date']}. Instructions of a thread "
                "per score element; TFLOP/s are **predicted** from them with the rates of "
                f"{document['rates'][arch]['device']}, not measured. For others: instructions, "
                "TFLOP/s, and in brackets our instructions divided by theirs.\n\n"
                + markdown([("loop over full blocks", *COUNTS, *OTHERS.values()), *lines])
            )
    return "\n".join(parts) or "Nothing has been counted yet.\n"


def profile_lines(document: Record, arch: str) -> Iterator[tuple[str, ...]]:
    kernels: dict[tuple[str, str, int], Record] = {}
    for row in sorted(document["rows"], key=lambda row: row["extra"] != EXTRAS[0]):
        if row["arch"] == arch and row["extra"] in EXTRAS:
            kernels.setdefault((row["kernel"], row["activation"], row["head_dim"]), row)
    others = {
        (x["name"], x["kernel"], x["head_dim"]): x for x in document["others"] if x["arch"] == arch
    }
    for key in sorted(kernels, key=lambda key: (key[0] != "forward", key)):
        (kernel, activation, dim), row = key, kernels[key]
        for loop in row["loops"]:
            *part, kind = loop["name"].split()
            if kind not in ("full", "all") or loop["predicted"] is None:
                continue
            beside = [others.get((name, kernel, dim)) for name in OTHERS]
            classes = loop["classes"]
            yield (
                " ".join((kernel, *part, activation)) + f", D = {dim}{spilled(row, ' ({})')}",
                f"{loop['total']:.1f}", f"{classes['fp32']:.1f}", f"{classes['mufu']:.1f}",
                f"{classes['mask'] + classes['integer']:.1f}",
                f"{max(loop['tensor_factor'] or 0, loop['element_factor'] or 0):.2f}",
                f"{loop['predicted']['tflops']:.0f}",
                *(compared(loop, other if activation == "exp" else None) for other in beside),
            )  # fmt: skip


def compared(ours: Record, other: Record | None) -> str:
    if other is None:
        return "–"
    theirs, more = other["loop"], spilled(other, ", {}")
    ratio = ours["total"] / theirs["total"]
    return f"{theirs['total']:.1f}, {theirs['predicted']['tflops']:.0f}{more} ({ratio:.2f})"


def spilled(row: Record, text: str) -> str:
    return text.format(f"{row['stack_bytes']} B spilled") if row["stack_bytes"] else ""
