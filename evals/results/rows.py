"""The fields of a result row, and error messages for invalid rows and options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evals.task import VALIDATION
from evals.tasks import EXPERIMENTS, TASKS

PRETRAINED = "pretrained"  # the task of rows of pretrained models
Row = dict[str, Any]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Numbers = dict[str, float]
Lists = dict[str, list[float]]


class RowSettings(BaseModel):
    """The settings in a row that tables and figures need. Other settings are allowed."""

    model_config = ConfigDict(strict=True)

    steps: NotNegative
    train_shortest: NotNegative
    train_longest: Positive


class TrialRowSettings(BaseModel):
    """The settings in a row of an experiment that tables need. Other settings are allowed."""

    model_config = ConfigDict(strict=True)

    steps: NotNegative


class RowFields(BaseModel):
    """The required fields of every result row. Other fields are allowed."""

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
    arithmetic: str = ""  # the CPU's vector instructions, which decide how sums are rounded


class TrainedFields(RowFields):
    """The required fields of a result row with a trained model."""

    chance: float
    schedule: str


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


class TaskFields(TrainedFields):
    """The fields of a result row of a task, the optional ones last.

    split: "validation" in a row of a sweep. shared: for each setting that differs between the
    variants of a table, what the table's settings say in place of its value.
    """

    positions: str
    length: Positive
    sequences: NotNegative
    learned: Lists
    train_cpu_seconds: float
    settings: RowSettings
    training: str
    split: Literal["validation"] | None = None
    shared: dict[str, Any] = {}
    tuned: Tuned | None = None


class TrialFields(TrainedFields):
    """The required fields of a result row of an experiment."""

    condition: str
    settings: TrialRowSettings


class PretrainedFields(RowFields):
    """The required fields of a result row of a pretrained model."""

    model: str
    fingerprint: str
    limit: int | None
    dtype: str
    text: str
    layers: str
    length: Positive
    sample: NotNegative
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


def problem(row: object) -> str | None:
    """The error message for a row that was read from a file, or None if it is valid."""
    fields = TrialFields if is_trial(row) else TaskFields
    fields = PretrainedFields if is_pretrained(row) else fields
    try:
        valid_row = fields.model_validate(row)
    except ValidationError as error:
        return first_error(error)
    known = TASKS | EXPERIMENTS
    if valid_row.status == "ok" and valid_row.task in known:
        score = known[valid_row.task].score.name
        if score not in valid_row.metrics:
            return f"metrics must have {score!r} where status is 'ok'"
    return None


# Words for the allowed values. The keys are the types of pydantic's errors.
_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": ">= {ge}",
    "int_type": "an int",
    "is_instance_of": "a list",  # pydantic's error for the type Sequence
    "less_than_equal": "<= {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a table",
    "sequence_str": "a list",
    "string_type": "text",
    "too_short": "a non-empty list",
}


def first_error(error: ValidationError) -> str:
    """The first error of a validation, as "NAME must be X, got Y"."""
    details = error.errors()[0]
    names = [part for part in details["loc"] if isinstance(part, str)]
    where = ".".join(names) or "the row"
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
