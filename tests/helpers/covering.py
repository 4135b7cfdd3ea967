"""Pairwise covering arrays: a small set of test cases in which every pair of settings occurs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations
from typing import Any

Factors = tuple[tuple[str, tuple[Any, ...]], ...]
Row = dict[str, Any]


def pairs_of(row: Row, names: list[str]) -> set[tuple]:
    return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}


@cache
def covering(factors: Factors, allowed: Callable[[Row], bool], seed: int = 0) -> tuple[Row, ...]:
    """Greedily adds rows until every allowed pair of levels has occurred.

    Args:
        factors: pairs of a factor's name and its levels.
        allowed: whether a row is allowed. It is also called with partial rows, and must reject one
            only if no full row with these settings is allowed.
        seed: the seed of the random order in which factors get their levels.

    Raises:
        ValueError: an allowed pair occurs in no allowed row.
    """
    draw = random.Random(seed)
    levels = dict(factors)
    names = list(levels)
    missing = {
        (a, x, b, y)
        for a, b in combinations(names, 2)
        for x in levels[a]
        for y in levels[b]
        if allowed({a: x, b: y})
    }
    rows = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        row = {a: x, b: y}
        for name in draw.sample(names, len(names)):
            if name in row:
                continue
            able = [level for level in levels[name] if allowed({**row, name: level})]
            draw.shuffle(able)
            new = [_gain(row, name, level, names, missing) for level in able]
            if not able:
                break
            row[name] = able[new.index(max(new))]
        missing.discard((a, x, b, y))
        if len(row) < len(names):
            raise ValueError(f"allowed() accepts {a}={x!r} with {b}={y!r}, but no row has both")
        missing -= pairs_of(row, names)
        rows.append({name: row[name] for name in names})
    return tuple(rows)


def each_setting(rows: Iterable[Row], times: int, by: str = "") -> list[Row]:
    """The rows without those whose settings have all occurred ``times`` times before.

    by: a factor; occurrences with each of its levels are counted apart.
    """
    seen, chosen = Counter[tuple[Any, ...]](), []
    for row in rows:
        settings = [(row.get(by), *setting) for setting in row.items()]
        if any(seen[setting] < times for setting in settings):
            chosen.append(row)
            seen.update(settings)
    return chosen


def _gain(row: Row, name: str, level: Any, names: list[str], missing: set[tuple]) -> int:
    """The number of missing pairs that ``row`` covers if the factor ``name`` gets this level."""
    covered = 0
    for other, value in row.items():
        first, second = sorted((name, other), key=names.index)
        values = {name: level, other: value}
        covered += (first, values[first], second, values[second]) in missing
    return covered


def label(row: Row) -> str:
    """The test id of a row: shape, dtype, span, heads, params and the options that are set."""
    settings = [f"{row['shape'][0]}x{row['shape'][1]}", str(row["dtype"])[6:], row["span"]]
    settings += [str(row[key]) for key in ("mask", "heads", "params") if row[key] != "none"]
    settings += [row["bias"]] if row["bias"] else []
    settings += [key for key in ("segments", "dropout", "lse") if row[key]]
    settings += ["dv"] if row["values"] == "other" else []
    settings += ["d{}dv{}".format(*row["dims"])] if "dims" in row else []
    settings += [row["layout"]] if "layout" in row else []
    return "-".join(settings).replace(" ", "_")
