"""Kernel paths: which forms a kernel can tell apart, and which variants reach them.

A kernel does not know variants. It knows a form: the activation, how it normalizes, where the gain
comes from, and which rows there are. Two variants with the same path run the same code, so the
quick arrays of the kernel tests take each path once, as one factor among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

import attnzoo
from attnzoo.functional.prepare import prepare
from helpers.agreement import make
from helpers.cases import NO_LSE, NO_SCORE
from helpers.covering import Factors, Row, covering


class Level(NamedTuple):
    """A variant with one of its settings; see `agreement.make` for ``params``."""

    variant: str
    params: str | int

    def __str__(self) -> str:
        return f"{self.variant}-{self.params}"


class Path(NamedTuple):
    kind: str  # of the form
    normalize: str  # "online" is a softmax, whose maximum runs along
    activation: str
    gain: str  # none, row, or statistics
    rows: tuple[str, ...]  # offset, shape and sink, where there are any
    learned: tuple[str, ...]  # those, and the gain, that take a gradient


PLAIN = {
    "shape": (3, 4), "dtype": torch.float32, "span": "causal", "mask": "none", "heads": "2 heads",
    "values": "same", "alibi": False, "segments": False, "dropout": False, "lse": False,
}  # fmt: skip


@cache
def path_of(level: Level, kinds: tuple[str, ...] = ("pairwise",)) -> Path:
    """The path that a call takes on a backend for these kinds of forms."""
    _, arguments = make(level.variant, {**PLAIN, "params": level.params}).arguments()
    q, k, v = (arguments.pop(name) for name in "qkv")
    ready = prepare(q, k, v, level.variant, arguments)
    forms = ready.variant.forms(ready.call, **ready.params)
    form = next(form for form in forms if form.kind in kinds)
    if isinstance(form, attnzoo.Linear):
        return Path("linear", "linear", "", "none", (), ())
    assert isinstance(form, attnzoo.Pairwise)
    vectors = {name: getattr(form, name) for name in ("gain", "offset", "shape", "sink")}
    gain = vectors["gain"]
    learned = [n for n, x in vectors.items() if isinstance(x, Tensor) and x.requires_grad]
    source = "row" if isinstance(gain, Tensor) else "none"
    if isinstance(gain, attnzoo.FromStatistics):
        source = "statistics"
        learned += ["gain"] if gain.differentiable else []
    rows = tuple(name for name in ("offset", "shape", "sink") if vectors[name] is not None)
    normalize = "online" if form.softmax else form.normalize
    return Path("pairwise", normalize, form.activation.name, source, rows, tuple(learned))


def carriers(
    levels: Iterable[Level], kinds: tuple[str, ...] = ("pairwise",)
) -> dict[str, list[Level]]:
    """By how a form normalizes: for each path one level. Defaults go before other settings."""
    found: dict[Path, Level] = {}
    for level in sorted(levels, key=lambda level: isinstance(level.params, int)):
        found.setdefault(path_of(level, kinds), level)
    groups: dict[str, list[Level]] = {}
    for path, level in found.items():
        groups.setdefault(path.normalize, []).append(level)
    return groups


def takes(row: Row) -> bool:
    """Whether the variant of a partial row has what the row asks for."""
    level = row.get("params")
    if level is None:
        return True
    masked = "float" in row.get("mask", "none") or row.get("alibi", False)
    scored = not (level.variant in NO_SCORE and masked)
    return scored and not (level.variant in NO_LSE and row.get("lse", False))


def quick_rows(
    factors: dict[str, tuple],
    levels: Iterable[Level],
    allowed: Callable[[Row], bool],
    thin: Iterable[dict[str, Any]],
    kinds: tuple[str, ...] = ("pairwise",),
) -> list[tuple[str, Row]]:
    """(variant, row) of one covering array for each way to normalize, its paths being a factor.

    Levels that carry no path get the rows of ``thin``.
    """
    levels = list(levels)
    groups, rows = carriers(levels, kinds), []
    for group in groups.values():
        mine = {**factors, "params": tuple(group)}
        if all(level.variant in NO_SCORE for level in group):
            mine.update(mask=tuple(x for x in mine["mask"] if "float" not in x), alibi=(False,))
        if all(level.variant in NO_LSE for level in group):
            mine["lse"] = (False,)
        rows += _both(tuple(mine.items()), allowed)
    for level in levels:
        if not any(level in group for group in groups.values()):
            rows += [{**row, "params": level} for row in thin]
    return [(row["params"].variant, {**row, "params": row["params"].params}) for row in rows]


@cache
def _both(factors: Factors, allowed: Callable[[Row], bool]) -> tuple[Row, ...]:
    return covering(factors, lambda row: takes(row) and allowed(row))


def quick_variants(
    variants: Iterable[str], kinds: tuple[str, ...] = ("pairwise",)
) -> list[ParameterSet]:
    """All of them as a test's values, slow but for the first that has an activation."""
    known, values = set(), []
    for variant in variants:
        path = path_of(Level(variant, "default"), kinds)
        seen = (path.kind, path.normalize, path.activation)
        values.append(pytest.param(variant, marks=[pytest.mark.slow] if seen in known else []))
        known.add(seen)
    return values
