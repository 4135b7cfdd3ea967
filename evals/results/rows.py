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


def first(error: ValidationError) -> str:
    """The first thing that is wrong: where, what is allowed, and what came."""
    wrong = error.errors()[0]
    where = "".join(f"{part}." for part in wrong["loc"])[:-1] or "a row"
    came = repr(wrong["input"])
    came = came if len(came) <= 60 else f"{came[:57]}..."
    return f"{where}: {wrong['msg'].removeprefix('Value error, ')}, got {came}"
