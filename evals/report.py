"""report.html"""

from collections.abc import Sequence

from evals.summary import Group


def report_html(groups: Sequence[Group], note: str) -> str:
    return ""
