"""Result rows as a table of pandas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from evals.results.rows import Row


def load(
    folder: str | Path | Sequence[str | Path], plugin: str | Path | None = None
) -> pd.DataFrame:
    """The results in a folder, or in several, as a tidy table: a line for each row and metric.

    Args:
        folder: as for ``python -m evals report``: folders with rows.jsonl, also in subfolders.
        plugin: the file of a plugin whose task the results have.

    Returns:
        A DataFrame with the columns

        - task, variant;
        - positions, of tasks, or layers, of pretrained models;
        - x: the eval length, or the condition of an experiment;
        - seed: of a pretrained model, the number of the sample;
        - metric, value: a row that failed has one line, with NaN;
        - status, key;
        - version: rows of a variant differ in it if its plugin changed or a sweep chose other
          values;
        - settings.NAME for each setting of the run and for whatever else separates tables: data and
          device, and of a pretrained model also model, fingerprint, dtype, text, seed and planted.

        A cell is NaN if the kind of result has no such column. Results of sweeps are left out.
        A line that is not JSON, as after an interruption, is left out with a warning.

    Raises:
        UsageError: there is no folder, a folder has no results, or one of its files has a line
            that is JSON but not a row.
    """
    import pandas as pd

    from commandline.errors import UsageError
    from commandline.variants import load_plugin
    from evals.results.rows import is_validation
    from evals.results.store import read_rows

    if plugin is not None:
        load_plugin(Path(plugin), need_variant=False)
    folders = [folder] if isinstance(folder, str | Path) else list(folder)
    if not folders:
        raise UsageError(f"folder must be a path or a list of paths, got {folder!r}")
    lines = [
        {
            **{name: row[name] for name in ("task", "variant")},
            **row["series"],
            **{name: row[name] for name in ("x", "seed")},
            "metric": metric,
            "value": value,
            **{name: row[name] for name in ("status", "key", "version")},
            **{f"settings.{name}": setting for name, setting in _settings(row).items()},
        }
        for row in read_rows([Path(path) for path in folders])
        if not is_validation(row)
        for metric, value in (row["metrics"] or {None: float("nan")}).items()
    ]
    return pd.DataFrame(lines)


def _settings(row: Row) -> dict[str, Any]:
    """The settings of a run, after what else its table shares."""
    names = {name: row[name] for name in ("model", "text") if name in row}
    return {**row["group"], **names, **row["settings"]}
