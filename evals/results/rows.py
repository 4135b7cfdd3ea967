"""The fields of a result row, keys, and error messages for invalid rows and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

import attnzoo
from commandline.checkout import commit
from evals.task import VALIDATION
from evals.tasks import EVALS, EXPERIMENTS, TASKS

PRETRAINED = "pretrained"  # the task of rows of pretrained models
Row = dict[str, Any]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Numbers = dict[str, float]
Lists = dict[str, list[float]]


def key_of(identity: Mapping[str, object]) -> str:
    """A key for a dict: the first twenty hex digits of the SHA-256 of its JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def origin() -> dict[str, str]:
    """The versions and the CPU's arithmetic, which every result row names."""
    return {
        "arithmetic": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "attnzoo": attnzoo.__version__,
        "commit": commit() or "unknown",
    }


class RowSettings(BaseModel):
    """The settings in a row that tables and figures need. Other settings are allowed."""

    model_config = ConfigDict(strict=True)

    steps: NotNegative
    train_shortest: NotNegative | None = None
    train_longest: Positive | None = None


def _checked_x(x: Any) -> Any:
    if not (isinstance(x, str) or (type(x) is int and x >= 1)):
        raise ValueError(f"must be a length >= 1 or a condition, got {x!r}")
    return x


class RowFields(BaseModel):
    """The fields of every result row. Other fields are allowed.

    x: the eval length or the condition. series: what besides the variant names a line of a table,
    such as the position encoding. group: what all rows of a table share. seed: of a pretrained
    model, the number of the sample. version: what all rows of a variant and series share.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    key: str
    task: str
    variant: str
    seed: NotNegative
    status: Literal["ok", "nan", "oom"]
    message: str
    metrics: Numbers
    curves: Lists
    cpu_seconds: float
    version: str
    data: str
    device: str
    torch: str
    attnzoo: str
    commit: str
    x: Annotated[Any, AfterValidator(_checked_x)]
    series: dict[str, str]
    group: dict[str, Any]
    arithmetic: str = ""  # the CPU's vector instructions, which decide how sums are rounded


class Tried(BaseModel):
    """A candidate of a sweep with its validation scores, one per seed (None: failed)."""

    values: Numbers
    scores: list[float | None]


class Tuned(BaseModel):
    """The tuned values of a variant, {} if it was not tuned, and what its sweep tried."""

    values: Numbers
    tried: list[Tried]

    @model_validator(mode="after")
    def _check_tried(self) -> Tuned:
        """Every candidate has a value for each tuned setting."""
        for tried in self.tried:
            if lacks := sorted(self.values.keys() - tried.values.keys()):
                raise ValueError(f"must have {lacks[0]} in every candidate, got {tried.values}")
        return self


class TrainedFields(RowFields):
    """The fields of a result row of a task or an experiment.

    The last fields are of tasks only: split is "validation" in a row of a sweep; tuned has the
    choice of a sweep.
    """

    settings: RowSettings
    chance: float
    schedule: str
    sequences: NotNegative = 0
    learned: Lists = {}
    train_cpu_seconds: float = 0.0
    training: str = ""
    split: Literal["validation"] | None = None
    tuned: Tuned | None = None


class PretrainedFields(RowFields):
    """The required fields of a result row of a pretrained model."""

    model: str
    fingerprint: str
    limit: int | None
    dtype: str
    text: str
    planted: bool


def is_pretrained(row: object) -> bool:
    """Whether a row is of a pretrained model."""
    return isinstance(row, dict) and row.get("task") == PRETRAINED


def is_trial(row: object) -> bool:
    """Whether a row belongs to an experiment; otherwise it belongs to a task."""
    return isinstance(row, dict) and row.get("task") in list(EXPERIMENTS)  # it may be unhashable


def is_validation(row: Row) -> bool:
    """Whether a row is a score of a sweep. Such rows are in no table."""
    return row.get("split") == VALIDATION


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """The distinct values of a field, sorted. Rows without the field are left out."""
    return sorted({row[name] for row in rows if row.get(name) is not None})


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values differ between these tables, or that some of them lack."""
    absent = object()
    names = dict.fromkeys(name for table in tables for name in table)
    return [n for n in names if any(x.get(n, absent) != tables[0].get(n, absent) for x in tables)]


def problem(row: object) -> str | None:
    """The error message for a row that was read from a file, or None if it is valid."""
    try:
        fields = (PretrainedFields if is_pretrained(row) else TrainedFields).model_validate(row)
    except ValidationError as error:
        return first_error(error)
    if isinstance(fields, TrainedFields) and isinstance(fields.x, int):
        for name in ("train_shortest", "train_longest"):
            if getattr(fields.settings, name) is None:
                return f"settings.{name} is missing"
            if name not in fields.group:
                return f"group.{name} is missing"
    if fields.task in EXPERIMENTS and fields.x not in EXPERIMENTS[fields.task].conditions:
        known = ", ".join(EXPERIMENTS[fields.task].conditions)
        return f"x must be among {known}, got {fields.x!r}"
    if fields.task in (PRETRAINED, *TASKS) and isinstance(fields.x, str):
        return f"x must be a length >= 1, got {fields.x!r}"
    if fields.status == "ok" and fields.task in EVALS:
        score = EVALS[fields.task].score.name
        if score not in fields.metrics:
            return f"metrics must have {score!r} where status is 'ok'"
    return None


# Words for the allowed values. The keys are the types of pydantic's errors.
_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": ">= {ge}",
    "int_parsing": "an int",
    "int_type": "an int",
    "is_instance_of": "a list",  # pydantic's error for the type Sequence
    "less_than_equal": "<= {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a table",
    "path_type": "a path",
    "sequence_str": "a list",
    "string_type": "text",
    "too_short": "a non-empty list",
}


def first_error(error: ValidationError, word: Callable[[str], str] = str) -> str:
    """The first error of a validation, as "NAME must be X, got Y"; ``word`` changes the name."""
    details = error.errors()[0]
    names = [part for part in details["loc"] if isinstance(part, str)]
    where = word(".".join(names)) if names else "the row"
    if details["type"] == "missing":
        return f"{where} is missing"
    if details["type"] not in _ALLOWED:  # for example an error from a validator of Options
        message = details["msg"].removeprefix("Value error, ")
        return f"{where} {message}" if message.startswith("must ") else f"{where}: {message}"
    allowed = _ALLOWED[details["type"]].format(**details.get("ctx", {}))
    value = repr(details["input"])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    # If the location ends with an index, the error is in an entry of a list.
    must = "must be" if len(names) == len(details["loc"]) else "entries must be"
    return f"{where} {must} {allowed}, got {value}"
