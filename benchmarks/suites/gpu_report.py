"""What a GPU's run says: its printed table, and the files it leaves.

While a run lasts, what it has is appended to one file of JSON lines, so that a run which is killed
loses the group it was at and no more: `python -m benchmarks gpu --assemble FILE` makes of it what
the end of the run would have made. A line is {"line": …}: first a "header", then "tests", "row" and
"note" lines, at last a "left_out".
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import report
from benchmarks.suites.gpu_cells import YARDSTICKS
from commandline.files import write_whole

Record = dict[str, Any]

COLUMNS = ("variant", "direction", "error (of budget)", "ms", "quartiles", "TFLOP/s", "peak",
           *(f"x {name.removeprefix('sdpa ')}" for name in YARDSTICKS), "MB")  # fmt: skip
WIDTHS = (28, 9, 20, 9, 15, 8, 5, 8, 8, 8, 9, 7)


def environment(commit: str | None = None) -> Record:
    """Where the figures come from. ``commit`` where the checkout came without its history."""
    found = report.environment()
    for name in ("triton", "adasplash", "matplotlib"):
        try:
            found["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["packages"][name] = None
    found |= {"commit": commit or found["commit"], "date": date.today().isoformat()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver()}
    found["device"] = None
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "device": card.name,
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory_bytes": card.total_memory,
        }
    return found


def driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return None
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def stem(where: Record) -> str:
    """The files' name: h200-2026-01-31-0123456789ab, with -dirty where files differ from it."""
    device = (where.get("device") or platform.machine()).lower().removeprefix("nvidia ")
    commit = (where.get("commit") or "").replace("+", "-dirty")
    parts = (re.sub(r"[^a-z0-9]+", "-", device).strip("-"), where["date"], commit)
    return "-".join(part for part in parts if part)


# ---- the table --------------------------------------------------------------------------------


def title(row: Record) -> str:
    mask = "causal" if row["causal"] else "full"
    return (
        f"{row['inputs']} inputs, {mask}, D={row['head_dim']}, N={row['length']}, "
        f"B={row['batch']}, H={row['heads']}, {row['dtype']}"
    )


def cells(row: Record) -> tuple[str, ...]:
    checked, times, error = row["check"], row["seconds"], ""
    if checked is not None:
        numbers = [checked[n] for n in ("error", "share")]
        worst, share = (float("nan") if x is None else x for x in numbers)
        error = f"{checked['worst']} {worst:.1e} ({share:.2f})"
    elif row["error"] is not None:
        error = f"out {row['error']:.1e} of rms"
    spread = f"{times['lower'] * 1e3:.2f}–{times['upper'] * 1e3:.2f}" if times else ""
    ratios = (row["ratios"].get(name) for name in YARDSTICKS)
    return (
        row["name"],
        row["direction"],
        error,
        f"{times['median'] * 1e3:.3f}" if times else "",
        spread,
        f"{row['tflops']:.1f}" if row["tflops"] is not None else "",
        f"{100 * row['peak_share']:.0f} %" if row["peak_share"] is not None else "",
        *(f"{r['median']:.2f}" if r else "" for r in ratios),
        f"{row['peak_bytes'] / 1e6:.0f}" if row["peak_bytes"] is not None else "",
    )


def notes(row: Record) -> str:
    """What the columns have no place for: what went wrong, and ratios to its rivals."""
    rivals = (
        f"{r['median']:.2f} × {n}'s time" for n, r in row["ratios"].items() if n not in YARDSTICKS
    )
    return "; ".join(filter(None, (row["note"], *rivals)))


def line(texts: tuple[str, ...]) -> str:
    return report.aligned(texts, WIDTHS, left=(0, 1))


def row_line(row: Record) -> str:
    note = notes(row)
    return line(cells(row)) + (f"  {note}" if note else "")


# ---- the partial file ---------------------------------------------------------------------------


class Partial:
    """Lines appended to a file as they come, each on the disk before the next is measured."""

    def __init__(self, path: Path, header: Record) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.add("header", header)

    def add(self, line: str, content: Record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"line": line, **content}, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def assembled(path: Path) -> Record:
    """The document that the lines make; a last line which a kill has torn is left out."""
    document: Record = {"environment": {}, "settings": {}, "peak_tflops": None, "tests": None,
                        "complete": False, "rows": [], "notes": [], "left_out": []}  # fmt: skip
    for text in path.read_text().splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        kind = record.pop("line")
        if kind == "header":
            document |= record
        elif kind == "tests":
            document["tests"] = record
        elif kind == "row":
            document["rows"].append(record)
        elif kind == "note":
            document["notes"].append(record["text"])
        elif kind == "left_out":
            document |= {"left_out": record["cells"], "complete": True}
    return document


# ---- the files ----------------------------------------------------------------------------------


def write_all(document: Record, folder: Path) -> list[Path]:
    """JSON, Markdown and, where matplotlib is there, a picture; each whole or not at all."""
    name = stem(document["environment"])
    picture = plot(document)
    if picture is None:
        said = "No picture: matplotlib is not installed, or nothing was timed."
        if said not in document["notes"]:
            document["notes"].append(said)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    report.write_json(str(paths[0]), document)
    write_whole(paths[1], markdown(document, f"{name}.png" if picture else None))
    if picture is not None:
        paths.append(folder / f"{name}.png")
        write_whole(paths[2], picture)
    return paths


def markdown(document: Record, picture: str | None) -> str:
    where, tests = document["environment"], document["tests"]
    packages = where["packages"]
    parts = [
        f"# {where.get('device') or 'no GPU'}, {where['date']}",
        f"Compute capability {where.get('capability')}, driver {where['driver']}, "
        f"CUDA {where['cuda']}, torch {where['torch']}, Triton {packages['triton']}, "
        f"Python {where['python']}, commit {where['commit']}.",
        f"Tests: {'; '.join((tests['summary'], *tests['failed'])) if tests else 'not run'}.",
    ]
    if document["peak_tflops"] is not None:
        parts.append(
            f"A large product of random matrices ran at {document['peak_tflops']:.0f} TFLOP/s: "
            "`peak` is the share of that."
        )
    parts.append(
        "TFLOP/s by the usual count, 4·B·H·N²·D forward, 2.5 times that backward, half if causal. "
        "A column `x …` is the time as a multiple of another's in the same rounds (below 1: "
        "faster); `softmax` is attnzoo's own. MB is the peak beyond the inputs; for backward that "
        "of a forward and a backward pass."
    )
    if not document["complete"]:
        parts.append("**The run did not come to its end: this is what it had until then.**")
    if picture is not None:
        parts.append(f"![TFLOP/s against N]({picture})")
    groups: dict[str, list[Record]] = {}
    for row in document["rows"]:
        groups.setdefault(title(row), []).append(row)
    for name, rows in groups.items():
        table = [(*COLUMNS, "notes"), ("---",) * (len(COLUMNS) + 1)]
        table += [(*cells(row), notes(row)) for row in rows]
        lines = ("| " + " | ".join(c.replace("|", "\\|") for c in texts) + " |" for texts in table)
        parts += [f"## {name}", "\n".join(lines)]
    for heading, texts in (("Notes", document["notes"]), ("Left out", document["left_out"])):
        if texts:
            parts += [f"## {heading}", "\n".join(f"- {text}" for text in texts)]
    return "\n\n".join(parts) + "\n"


def plot(document: Record) -> bytes | None:
    """TFLOP/s against N, causal and i.i.d., a panel for each direction and head dimension."""
    try:
        from matplotlib.figure import Figure

        from evals.reporting.plots import png
    except ImportError:
        return None
    rows = [
        row for row in document["rows"]
        if row["tflops"] is not None and row["causal"] and row["inputs"] == "iid"
    ]  # fmt: skip
    if not rows:
        return None
    dims = sorted({row["head_dim"] for row in rows})
    directions = sorted({row["direction"] for row in rows}, reverse=True)
    figure = Figure(figsize=(6.5 * len(dims), 4.2 * len(directions)), layout="constrained")
    panels = figure.subplots(len(directions), len(dims), squeeze=False)
    names = list(dict.fromkeys(row["name"] for row in rows))
    for i, direction in enumerate(directions):
        for j, dim in enumerate(dims):
            axes = panels[i][j]
            for number, name in enumerate(names):
                points = sorted(
                    (row["length"], row["tflops"])
                    for row in rows
                    if (row["name"], row["direction"], row["head_dim"]) == (name, direction, dim)
                )
                if points:
                    style = "--" if name in YARDSTICKS and name != "softmax" else "-"
                    axes.plot(*zip(*points), style, marker="osD^vP*X"[number % 8], ms=4, label=name)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{direction}, D = {dim}, causal")
            axes.set_xlabel("N")
            axes.set_ylabel("TFLOP/s")
            axes.grid(color="#dddddd", linewidth=0.6)
    panels[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    return png(figure)
