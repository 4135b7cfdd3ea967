"""What a row of results must hold, and what is wrong with one that does not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evals.tasks import TASKS

Row = dict[str, Any]
Whole = Annotated[int, Field(ge=0)]
Figures = dict[str, float]
Lists = dict[str, list[float]]


class Settings(BaseModel):
    """Of the settings, those which tables and pictures name."""

    model_config = ConfigDict(strict=True)

    steps: Whole
    train_shortest: Whole
    train_longest: Whole


class Fields(BaseModel):
    """The fields of a row; more are allowed."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    key: str
    task: str
    variant: str
    positions: str
    seed: Whole
    length: Whole
    sequences: Whole
    status: Literal["ok", "nan", "oom"]
    message: str
    metrics: Figures
    curves: Lists
    learned: Lists
    chance: float
    cpu_seconds: float
    train_cpu_seconds: float
    settings: Settings
    version: str
    schedule: str
    data: str
    device: str
    torch: str
    attnzoo: str
    commit: str
    training: str


def problem(row: object) -> str | None:
    """What is wrong with a row that was read, in words; None if nothing is."""
    try:
        found = Fields.model_validate(row)
    except ValidationError as error:
        return first(error)
    if found.status == "ok" and found.task in TASKS:
        score = TASKS[found.task].score.name
        if score not in found.metrics:
            return f"metrics has no {score}, although status is ok"
    return None


# What is allowed, by pydantic's kind of error.
_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "is_instance_of": "a list",  # Sequence is the one class
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a table",
    "sequence_str": "a list",
    "string_type": "text",
    "too_short": "a list that is not empty",
}


def first(error: ValidationError) -> str:
    """The first thing that is wrong: where, what is allowed, and what came."""
    wrong = error.errors()[0]
    names = [part for part in wrong["loc"] if isinstance(part, str)]
    where = ".".join(names) or "a row"
    if wrong["type"] == "missing":
        return f"{where} is missing"
    if wrong["type"] not in _ALLOWED:  # among them errors of our own
        return f"{where}: {wrong['msg'].removeprefix('Value error, ')}"
    allowed = _ALLOWED[wrong["type"]].format(**wrong.get("ctx", {}))
    came = repr(wrong["input"])
    came = came if len(came) <= 60 else f"{came[:57]}..."
    # Of a list, the entry that is wrong is known by its value.
    must = "must be" if len(names) == len(wrong["loc"]) else "must each be"
    return f"{where} {must} {allowed}, got {came}"
