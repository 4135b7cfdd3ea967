"""Reads rows of older versions, which had other fields for each kind of result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evals.results.tuned import TUNED

Row = dict[str, Any]
# What the rows of one table of a pretrained model share, besides the kind of device: then variants
# read the same contexts. The names of the model and of the text do not matter.
_CONTEXTS = ("fingerprint", "dtype", "data", "seed", "planted")


def converted(row: Row) -> Row:
    """The row with the fields x, series, group and version of the present version.

    A row that has x is returned as it is.

        x        the eval length, or the condition of an experiment
        series   what besides the variant names a line of a table: "positions" or "layers"
        group    what all rows of one table share
        version  what all rows of one line share
    """
    if "x" in row:
        return row
    if "sample" in row:
        return _of_pretrained(row)
    origin = {"data": row["data"], "device": _kind(row)}
    if "condition" in row:
        fields = {"x": row["condition"], "series": {}, "group": {**row["settings"], **origin}}
        return _without(row, "condition") | fields
    shared = row.get("shared", {})
    fields = {
        "x": row["length"],
        "series": {"positions": row["positions"]},
        "group": {**table_settings(row["settings"], shared), **origin},
        "version": version_of(row["version"], row["settings"], shared),
    }
    return _without(row, "length", "positions") | fields


def _of_pretrained(row: Row) -> Row:
    plugin = row.get("plugin")
    fields = {
        "x": row["length"],
        "series": {"layers": row["layers"]},
        "seed": row["sample"],
        "group": {**{name: row[name] for name in _CONTEXTS}, "device": _kind(row)},
        "version": f"plugin {plugin}" if plugin else "built in",
        "settings": {},
    }
    return _without(row, "length", "layers", "sample") | fields


def table_settings(settings: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the table that a row belongs to.

    shared: for each setting that differs between the variants of the table, what the table says in
    place of its value; None if it says nothing. Older rows also name the candidates of a sweep, and
    variants of one table may have different ones.
    """
    texts = {n: TUNED if str(x).startswith(TUNED) else x for n, x in (settings | shared).items()}
    return {name: value for name, value in texts.items() if value is not None}


def version_of(variant: str, settings: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    """What all rows of a line share: the version of the variant, and the settings that are its own
    or tuned."""
    differing = {name: settings.get(name) for name in shared}
    return f"{variant} {json.dumps(differing, sort_keys=True)}" if differing else variant


def _kind(row: Row) -> str:
    return str(row["device"]).split(":")[0]


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}
