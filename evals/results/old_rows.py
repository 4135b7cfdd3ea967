"""Rows of older files, which had other fields for each kind of result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evals.results.tuned import TUNED

_OLD = ("length", "condition", "sample", "positions", "layers", "shared")
# What the rows of one table of a pretrained model share, besides the kind of device: then variants
# read the same contexts. The names of the model and of the text do not matter.
_CONTEXTS = ("fingerprint", "dtype", "data", "seed", "planted")


def converted(row: Any) -> Any:
    """A row of an older file with the fields of today; any other object as it is.

    x        the eval length, or the condition of an experiment
    series   what besides the variant names a line of a table: "positions" or "layers"
    group    what all rows of one table share
    version  what all rows of one line share
    """
    if not isinstance(row, dict) or "x" in row:
        return row
    try:
        fields = _fields(row)
    except (KeyError, TypeError, AttributeError):
        return row  # `evals.results.rows.problem` names the wrong field
    return {name: value for name, value in row.items() if name not in _OLD} | fields


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    of_condition, device = "condition" in row, row["device"].split(":")[0]
    x = row["condition"] if of_condition else row["length"]
    if "sample" in row:
        plugin = row.get("plugin")
        return {
            "x": x,
            "series": {"layers": row["layers"]},
            "seed": row["sample"],
            "group": {**{name: row[name] for name in _CONTEXTS}, "device": device},
            "version": f"plugin {plugin}" if plugin else "built in",
            "settings": {},
        }
    settings, words = row["settings"], row.get("shared", {})
    differing = {name: settings.get(name) for name in words}
    return {
        "x": x,
        "series": {} if of_condition else {"positions": row["positions"]},
        "group": {**shared_settings(settings, words), "data": row["data"], "device": device},
        "version": version_of(row["version"], differing),
    }


def shared_settings(settings: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the rows of a table share.

    words: for each setting that differs between the variants of the table, what the table says in
    place of its value; None if it says nothing. Older rows also name the candidates of a sweep, and
    variants of one table may have different ones.
    """
    texts = {**settings, **words}
    texts = {n: TUNED if str(x).startswith(TUNED) else x for n, x in texts.items()}
    return {name: value for name, value in texts.items() if value is not None}


def version_of(version: str, differing: Mapping[str, Any]) -> str:
    """What all rows of a line share: the version of the variant, and the settings that differ from
    those of other variants."""
    return f"{version} {json.dumps(differing, sort_keys=True)}" if differing else version
