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
REFUSED = {
    "must use transformers' AttentionInterface": "does not use transformers' `AttentionInterface`",
    "does not support indices": "selects keys by an index",
    "does not support sinks": "has sinks per token",
    "torch.finfo() requires": "supports only its own eager attention",
    "support another attention than its own eager one": "has sinks, and only eager attention",
}
NOT_TRIED = {
    "no model of its own": "has no model of its own: it uses that of another family",
    "ImportError": "needs a package that is not installed, such as timm",
    "ModuleNotFoundError": "needs a package that is not installed, such as timm",
    "config: ": "the rules make no valid tiny config",
    "inputs: ": "the rules make no valid inputs",
    "encoder-decoder": "the rules make no valid inputs",
    "random": "its outputs are random",
    "finite": "its outputs or gradients are not finite",
    "takes more than": "takes more time or memory than the limits",
    "process ended": "takes more time or memory than the limits",
}
RESULT_NAMES = {
    "equal": "equal", "part": "equal in part", "differs": "differs", "refused": "unsupported",
    "none": "no attention", "not tried": "not tried",
}  # fmt: skip


def families_table(path: Path = RESULTS) -> str:
    """A Markdown table: a result, the kind of inputs or the reason, and the families."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for family, rows in rows_by_family(path).items():
        groups[summary(rows)].append(family)
    order = list(RESULT_NAMES)
    table = [("result", "which", "families")]
    for (result, which), names in sorted(
        groups.items(), key=lambda x: (order.index(x[0][0]), -len(x[1]), x[0][1])
    ):
        shown = ", ".join(f"`{name}`" for name in sorted(names))
        table.append((f"{RESULT_NAMES[result]}, {len(names)}", which, shown))
    return markdown(table)


def families_facts(path: Path = RESULTS) -> str:
    """A sentence with the numbers and the versions."""
    stored = json.loads(path.read_text())
    results = [summary(rows)[0] for rows in rows_by_family(path).values()]
    counts = ", ".join(
        f"{results.count(key)} {name}" for key, name in RESULT_NAMES.items() if key in results
    )
    return (
        f"{len(results)} families of transformers {stored['transformers']}, tried with torch "
        f"{stored['torch']} on {stored['date']}: {counts}.\n"
    )


def rows_by_family(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The stored rows of each family."""
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        families[row["family"]].append(row)
    return families


def summary(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The result of a family, and the kind of inputs or the reason."""
    by_result: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        result = row["result"]
        by_result["none" if result == "refused" and without_attention(row) else result].append(row)
    if by_result["differs"]:
        worst = by_result["differs"][0]
        errors = f"outputs {worst['output_error']}, gradients {worst['gradient_error']}"
        return "differs", worst["reason"] or errors
    refused = [in_words(row["reason"], REFUSED) for row in by_result["refused"]]
    if by_result["equal"] and refused:
        return "part", f"a part {refused[0]}"
    if by_result["equal"] and rows[0]["result"] == "not tried":
        return "part", "only a part was tried"
    if by_result["equal"]:
        return "equal", kind(by_result["equal"][0])
    if refused:
        return "refused", refused[0]
    if by_result["none"]:
        return "none", "nothing to convert"
    return "not tried", in_words(by_result["not tried"][0]["reason"], NOT_TRIED)


def without_attention(row: dict[str, Any]) -> bool:
    return "called none" in row["reason"] and not row["other_attention"]


def in_words(reason: str, words: dict[str, str]) -> str:
    other = "runs its attention layers without `AttentionInterface`"
    if "called none" in reason:
        return other
    return next((text for part, text in words.items() if part in reason), reason)


def kind(row: dict[str, Any]) -> str:
    """The kind of model, by the inputs it was tried with."""
    inputs = set(row["inputs"].split())
    sinks = ", with `sink`" if row["variant"] == "sink" else ""
    if inputs & {"decoder_input_ids"}:
        return "encoder-decoder" + sinks
    if "input_ids" in inputs and "pixel_values" in inputs:
        return "text and images" + sinks
    if "input_ids" in inputs:
        return "text" + sinks
    images = inputs & {"pixel_values", "pixel_values_videos", "grid_thw"}
    return ("images" if images else "other inputs") + sinks
