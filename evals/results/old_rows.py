"""Rows that were stored before `evals.results.rows` had the fields x, series and group."""

from __future__ import annotations

from typing import Any

from evals.results.rows import Row, is_pretrained, key_of
from evals.results.tuned import TUNED


def converted(row: Any) -> Any:
    """A row of an older file with the fields of today; any other object as it is."""
    if not isinstance(row, dict) or "x" in row or is_pretrained(row):
        return row
    try:
        group, version = shared_settings(row["settings"], row.get("shared", {})), row["version"]
        differing = {name: row["settings"].get(name) for name in row.get("shared", {})}
        new = {
            "x": row["length"] if "length" in row else row["condition"],
            "series": {"positions": row["positions"]} if "positions" in row else {},
            "group": {**group, "data": row["data"], "device": row["device"].split(":")[0]},
            "version": version_of(version, differing),
        }
    except (KeyError, TypeError, AttributeError):
        return row  # `problem` names the wrong field
    old = ("length", "condition", "positions", "shared")
    return {name: value for name, value in row.items() if name not in old} | new


def shared_settings(settings: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """The settings of a table: in place of those that differ between its variants, a word."""
    texts = {n: TUNED if str(x).startswith(TUNED) else x for n, x in (settings | words).items()}
    return {name: value for name, value in texts.items() if value is not None}


def version_of(version: str, differing: dict[str, Any]) -> str:
    """The version of a variant whose settings differ from those of others in its table."""
    return key_of({"version": version, "settings": differing}) if differing else version


def with_old_fields(row: Row) -> Row:
    """For reports that still read the older fields."""
    if "x" not in row or is_pretrained(row):
        return row
    differing = {
        name: row["group"].get(name)
        for name, value in row["settings"].items()
        if row["group"].get(name) != value
    }
    place = {"length": row["x"]} if isinstance(row["x"], int) else {"condition": row["x"]}
    return {**row, **place, **row["series"], "shared": differing}
