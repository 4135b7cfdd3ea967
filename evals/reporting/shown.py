"""What console and report show of a group: its tables, notes and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from commandline.table import Table
from evals.reporting import pretrained_tables
from evals.reporting.figures import Picture, pictures
from evals.reporting.tables import notes, notes_of_experiment, tables_of_experiment, tables_of_task
from evals.results.summary import Group, failures
from evals.results.summary_csv import Summary, summary_of
from evals.theory import trained_heads


@dataclass(frozen=True, eq=False)
class ShownGroup:
    """A group with its pictures."""

    group: Group
    pictures: Sequence[Picture] = ()

    @cached_property
    def summary(self) -> Summary:
        return summary_of(self.group)

    @cached_property
    def tables(self) -> list[Table]:
        if self.group.is_task:
            return tables_of_task(self.group, self.summary)
        if self.group.is_pretrained:
            return pretrained_tables.tables(self.group, self.summary)
        return tables_of_experiment(self.summary)

    @cached_property
    def theory_tables(self) -> list[Table]:
        return trained_heads.tables(self.group) if self.group.is_task else []

    @property
    def printed(self) -> int:
        """How many tables the console shows without --verbose."""
        return 3 if self.group.is_pretrained else 1

    @property
    def notes(self) -> list[str]:
        """Explanations of the tables."""
        if self.group.is_task:
            return notes(self.summary)
        if self.group.is_pretrained:
            return pretrained_tables.notes(self.group, self.summary)
        return notes_of_experiment(self.summary)

    @property
    def about(self) -> str:
        """A paragraph about the task or model."""
        if not self.group.is_pretrained:
            return self.group.task.about
        trained = ", without training" * (not pretrained_tables.trainings(self.group))
        lines = "; ".join([*self.notes, *failures(self.group)])
        about = "Attention variants are substituted at inference"
        return f"{self.group.title}. {about}{trained}. {lines}."


def drawn(group: Group) -> ShownGroup:
    """The group with all pictures."""
    return ShownGroup(group, pictures(group))
