"""The table of the families of transformers, from docs/results/families.json."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from commandline.table import markdown

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "families.json"
FIELDS = (
    "family", "model", "result", "reason", "variant", "inputs", "converted", "other_attention",
    "output_error", "gradient_error",
)  # fmt: skip
TOLERANCE = 1e-5  # of errors relative to the largest entry

# What part of the reason of a row means, in words. The first one that occurs counts.
MEANINGS = {
    "called none": "runs its attention layers without `AttentionInterface`",
    "must use transformers' AttentionInterface": "does not use transformers' `AttentionInterface`",
    "torch.finfo() requires": "supports only its own eager attention",
    "support another attention than its own eager one": "has sinks, and only eager attention",
    "no model of its own": "has no model of its own: it uses that of another family",
    "ImportError": "needs a package that is not installed, such as timm",
    "ModuleNotFoundError": "needs a package that is not installed, such as timm",
    "config: ": "the rules make no valid tiny config",
    "inputs: ": "the rules make no valid inputs",
    "encoder-decoder": "the rules make no valid inputs",
    "random": "its outputs are random",
    "finite": "its outputs or gradients are not finite",
    "MemoryError": "takes more time or memory than the limits",
    "TimeoutError": "takes more time or memory than the limits",
}
RESULT_NAMES = {
    "equal": "equal", "part": "equal in part", "differs": "differs", "refused": "unsupported",
    "none": "no attention", "not tried": "not tried",
}  # fmt: skip


def families_table(path: Path = RESULTS) -> str:
    """A Markdown table: a result, the kind of inputs or the reason, and the families."""
    order = list(RESULT_NAMES)
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for family, (result, which) in summaries(path).items():
        groups[order.index(result), which].append(f"`{family}`")
    rows = [
        (f"{RESULT_NAMES[order[result]]}, {len(names)}", which, ", ".join(names))
        for (result, which), names in sorted(
            groups.items(), key=lambda group: (group[0][0], -len(group[1]), group[0][1])
        )
    ]
    return markdown([("result", "which", "families"), *rows])


def families_facts(path: Path = RESULTS) -> str:
    """A sentence with the numbers and the versions."""
    stored = json.loads(path.read_text())
    results = [result for result, _ in summaries(path).values()]
    counts = ", ".join(
        f"{results.count(key)} {name}" for key, name in RESULT_NAMES.items() if key in results
    )
    return (
        f"{len(results)} families of transformers {stored['transformers']}, tried with torch "
        f"{stored['torch']} on {stored['date']}: {counts}.\n"
    )


def summaries(path: Path) -> dict[str, tuple[str, str]]:
    """The result of each family, and the kind of its inputs or the reason."""
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        families[row["family"]].append(row)
    return {family: summary(rows) for family, rows in families.items()}


def summary(rows: list[dict[str, Any]]) -> tuple[str, str]:
    first: dict[str, dict[str, Any]] = {}  # the first row by result
    for row in rows:
        empty = "called none" in row["reason"] and not row["other_attention"]
        first.setdefault("none" if row["result"] == "refused" and empty else row["result"], row)
    if worst := first.get("differs"):
        errors = f"outputs {worst['output_error']}, gradients {worst['gradient_error']}"
        return "differs", worst["reason"] or errors
    if "equal" in first:
        if "refused" in first:
            return "part", f"a part {in_words(first['refused']['reason'])}"
        if rows[0]["result"] == "not tried":
            return "part", "only a part was tried"
        return "equal", kind(first["equal"])
    result = next(name for name in ("refused", "none", "not tried") if name in first)
    reason = "nothing to convert" if result == "none" else in_words(first[result]["reason"])
    return result, reason


def in_words(reason: str) -> str:
    return next((text for part, text in MEANINGS.items() if part in reason), reason)


def kind(row: dict[str, Any]) -> str:
    """The kind of model, by the inputs it was tried with."""
    inputs = set(row["inputs"].split())
    name = "images" if inputs & {"pixel_values", "pixel_values_videos", "grid_thw"} else ""
    if "input_ids" in inputs:
        name = "text and images" if "pixel_values" in inputs else "text"
    if "decoder_input_ids" in inputs:
        name = "encoder-decoder"
    return (name or "other inputs") + (", with `sink`" if row["variant"] == "sink" else "")
