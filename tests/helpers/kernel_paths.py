"""Kernel paths: the properties of a form that decide which kernel code runs.

A path is the kind of form, its activation, normalization and source of the gain, its per-query
vectors, and which of them are learned. Two variants with the same path run the same code. The quick
covering arrays of the kernel tests therefore contain one variant per path.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import cycle, islice
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

import attnzoo
from attnzoo.core.parameters import VECTORS
from attnzoo.functional.prepare import prepare
from helpers.agreement import make
from helpers.cases import CASES, CAUSAL_ONLY, NO_LSE, NO_SCORE
from helpers.covering import Factors, Row, covering, each_setting


class Level(NamedTuple):
    """A variant with one choice of parameters; see `agreement.make` for ``params``."""

    variant: str
    params: str | int

    def __str__(self) -> str:
        return f"{self.variant}-{self.params}"


class Path(NamedTuple):
    kind: str  # "pairwise", "linear" or "definition"
    # The form's normalization, "online" for a softmax with a running maximum, or "mass" for a
    # selection by weight
    normalize: str
    activation: str
    gain: str  # "none", "per query" or "statistics"
    vectors: tuple[str, ...]  # those that the form has besides the gain
    learned: tuple[str, ...]  # vectors, including the gain, that require a gradient


PLAIN = {
    "shape": (3, 4), "dtype": torch.float32, "span": "causal", "mask": "none", "heads": "2 heads",
    "values": "same", "bias": None, "segments": False, "dropout": False, "lse": False,
}  # fmt: skip


@cache
def path_of(level: Level, kinds: tuple[str, ...] = ("pairwise",)) -> Path:
    """The path of a call on a backend that supports the kinds of forms in ``kinds``."""
    _, arguments = make(level.variant, {**PLAIN, "params": level.params}).arguments()
    q, k, v = (arguments.pop(name) for name in "qkv")
    ready = prepare(q, k, v, level.variant, arguments)
    forms = ready.variant.forms(ready.call, **ready.params)
    form = next((form for form in forms if form.kind in kinds), None)
    if form is None:
        return Path("definition", "definition", level.variant, "none", (), ())
    if isinstance(form, attnzoo.Linear):
        return Path("linear", "linear", "", "none", (), ())
    assert isinstance(form, attnzoo.Pairwise)
    vectors = {name: getattr(form, name) for name in VECTORS}
    gain = vectors["gain"]
    learned = [n for n, x in vectors.items() if isinstance(x, Tensor) and x.requires_grad]
    source = "per query" if isinstance(gain, Tensor) else "none"
    if isinstance(gain, attnzoo.FromStatistics):
        source = "statistics"
        learned += ["gain"] if gain.differentiable else []
    used = tuple(name for name in VECTORS if name != "gain" and vectors[name] is not None)
    normalize = "online" if form.softmax else "mass" if form.mass else form.normalize
    return Path("pairwise", normalize, form.activation.name, source, used, tuple(learned))


def one_level_per_path(
    levels: Iterable[Level], kinds: tuple[str, ...] = ("pairwise",)
) -> dict[str, list[Level]]:
    """One level for each path, in groups that share a covering array; see `quick_rows`.

    If several levels have the same path, the result has only one of them. The function prefers
    levels whose ``params`` is a string to levels whose ``params`` is an index.
    """
    by_path: dict[Path, Level] = {}
    for level in sorted(levels, key=lambda level: isinstance(level.params, int)):
        by_path.setdefault(path_of(level, kinds), level)
    groups: dict[str, list[Level]] = {}
    for path, level in by_path.items():
        group = path.normalize if path.normalize == "threshold" else path.kind
        groups.setdefault(group, []).append(level)
    return groups


ROUNDS = 1  # quick cases per path and per setting, at least


LARGEST_OF_EXPENSIVE = 200 * 17  # scores per head


def supports(row: Row) -> bool:
    """Whether the row's variant runs with the row's shape, span, mask, bias and lse.

    Rows may be partial. Expensive variants run with small shapes only.
    """
    level = row.get("params")
    if level is None:
        return True
    if CASES[level.variant].expensive and math.prod(row.get("shape", ())) > LARGEST_OF_EXPENSIVE:
        return False
    masked = "float" in row.get("mask", "none") or row.get("bias") is not None
    scored = not (level.variant in NO_SCORE and masked)
    if level.variant in CAUSAL_ONLY and row.get("span", "causal") not in ("causal", "window"):
        return False
    return scored and not (level.variant in NO_LSE and row.get("lse", False))


def quick_rows(
    factors: dict[str, tuple],
    levels: Iterable[Level],
    allowed: Callable[[Row], bool],
    thin: Iterable[dict[str, Any]],
    kinds: tuple[str, ...] = ("pairwise",),
) -> list[tuple[str, Row]]:
    """Quick test cases (variant, row) from covering arrays.

    Threshold forms, other pairwise forms and linear forms have one array each, because they run
    different kernels. The paths of one array differ only in a few steps of the kernel. It therefore
    suffices that each setting and each path occurs in `ROUNDS` rows. The slow arrays,
    which are made elsewhere, contain each pair of settings; see `variant_rows`. Levels that
    `one_level_per_path` leaves out are tested only with one of the rows in ``thin``, in turn.
    """
    levels = list(levels)
    groups, rows = one_level_per_path(levels, kinds), []
    for group in groups.values():
        settings = _covering(tuple(factors.items()), allowed, tuple(group))
        waiting = deque(group)
        for row in each_setting(settings, ROUNDS):
            able = next(level for level in waiting if supports({**row, "params": level}))
            waiting.remove(able)
            waiting.append(able)
            rows.append({**row, "params": able})
        for level in group:
            supported = [row for row in settings if supports({**row, "params": level})]
            missing = ROUNDS - sum(row["params"] == level for row in rows)
            rows += [{**row, "params": level} for row in islice(cycle(supported), max(missing, 0))]
    others = (x for x in levels if not any(x in group for group in groups.values()))
    rows += [{**row, "params": level} for level, row in zip(others, cycle(thin), strict=False)]
    return [(row["params"].variant, {**row, "params": row["params"].params}) for row in rows]


def code_of(variant: str, kinds: tuple[str, ...] = ("pairwise",)) -> tuple[str, str, str]:
    """The properties of a variant's form that decide most of the code that runs."""
    path = path_of(Level(variant, "default"), kinds)
    return path.kind, path.normalize, path.activation


def variant_rows(
    variants: Iterable[str],
    factors_of: Callable[[str], Factors],
    allowed: Callable[[Row], bool],
    kinds: tuple[str, ...] = ("pairwise",),
) -> Iterator[tuple[str, int, Row]]:
    """Slow test cases (variant, seed, row).

    The first variant of each normalization and activation has each pair of settings. Later ones run
    the same code, and have each pair of parameters and another setting.
    """
    known = set()
    for variant in variants:
        rows = covering(factors_of(variant), allowed)
        code = code_of(variant, kinds)
        for seed, row in enumerate(each_setting(rows, 1, "params") if code in known else rows):
            yield variant, seed, row
        known.add(code)


@cache
def _covering(
    factors: Factors, allowed: Callable[[Row], bool], levels: tuple[Level, ...]
) -> tuple[Row, ...]:
    """A covering array of the settings that some level supports."""
    factors = tuple((name, values) for name, values in factors if name != "params")
    return covering(
        factors,
        lambda row: allowed(row) and any(supports({**row, "params": level}) for level in levels),
    )


def quick_variants(
    variants: Iterable[str], kinds: tuple[str, ...] = ("pairwise",)
) -> list[ParameterSet]:
    """Test parameters, slow if expensive or if an earlier variant runs the same code.

    The code is the same if normalization and activation are.
    """
    known, values = set(), []
    for variant in variants:
        code = code_of(variant, kinds)
        slow = code in known or CASES[variant].expensive
        values.append(pytest.param(variant, marks=[pytest.mark.slow] if slow else []))
        known.add(code)
    return values
