"""Statistics over samples of the rows of pretrained models."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from evals.results.rows import Row
from evals.results.summary import Estimate, estimate

BASELINE = "as loaded"
RISE = "loss minus as loaded"  # in summary.csv, paired by sample
# The retrieval tasks: names of metrics, and their titles.
RETRIEVAL = {
    "one_needle": "one needle",
    "several_keys": "several keys",
    "several_queries": "several queries",
    "several_values": "several values",
    "variable_tracking": "variable tracking",
    "common_word": "common word",
}
# What must be equal in the rows of a group, besides the kind of device: then variants read the same
# contexts. The names of the model and of the text do not matter.
_SAME = ("fingerprint", "dtype", "data", "seed", "planted")


@dataclass(frozen=True, eq=False)
class PretrainedGroup:
    """Rows of one model, text, dtype, seed and kind of device.

    The last row of each (series, length, sample) counts, but metrics that only earlier rows have
    are kept. Rows of earlier versions of a plugin do not count.
    """

    rows: Sequence[Row]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def title(self) -> str:
        row = self.first
        planted = "" if row["planted"] else ", nothing planted"
        device = "" if _device(row) == "cpu" else f", {_device(row)}"
        return f"{row['model']}, {row['text']}, {row['dtype']}{device}, seed {row['seed']}{planted}"

    @cached_property
    def rows_by_point(self) -> dict[tuple[str, int], dict[int, Row]]:
        """The rows with results by (series, length), each by sample."""
        rows: dict[tuple[str, int], dict[int, Row]] = {}
        for row in self.rows:
            if row["status"] == "ok":
                samples = rows.setdefault((series_of(row), row["length"]), {})
                old = samples.get(row["sample"], {"metrics": {}, "curves": {}})
                samples[row["sample"]] = {
                    **row,
                    **{name: {**old[name], **row[name]} for name in ("metrics", "curves")},
                }
        # The order of samples decides their interval, so that equal samples have equal intervals.
        return {key: dict(sorted(samples.items())) for key, samples in rows.items()}

    @cached_property
    def series(self) -> list[str]:
        """The variants with their layers; the model as loaded first."""
        names = dict.fromkeys(map(series_of, self.rows))
        return sorted(names, key=lambda name: name != BASELINE)

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({row["length"] for row in self.rows})

    def samples(self, series: str, length: int) -> dict[int, Row]:
        """The rows with results, by sample."""
        return self.rows_by_point.get((series, length), {})

    def values(self, series: str, length: int, metric: str) -> dict[int, float]:
        """A metric by sample."""
        rows = self.samples(series, length).items()
        return {s: row["metrics"][metric] for s, row in rows if metric in row["metrics"]}

    def mean(self, series: str, length: int, metric: str) -> Estimate | None:
        """The mean over samples."""
        return estimate(list(self.values(series, length, metric).values()))

    def gain(self, series: str, length: int, metric: str) -> Estimate | None:
        """The mean difference from the model as loaded, paired by sample."""
        if series == BASELINE:
            return None
        base = self.values(BASELINE, length, metric)
        values = self.values(series, length, metric).items()
        return estimate([value - base[sample] for sample, value in values if sample in base])

    def by_position(
        self, series: str, length: int, rise: bool = False
    ) -> list[tuple[int, int, Estimate]]:
        """(first position, end, mean loss) of each bin of positions in which a sample has tokens of
        the text. The mean is over samples. With ``rise``, the loss of the model as loaded is
        subtracted, paired by sample."""
        bins_by_sample, base = (
            self._bins(series, length),
            self._bins(BASELINE, length) if rise else {},
        )
        losses: dict[tuple[int, int], list[float]] = {}
        for sample, bins in bins_by_sample.items():
            for span, loss in bins.items():
                if not rise:
                    losses.setdefault(span, []).append(loss)
                elif span in base.get(sample, {}):
                    losses.setdefault(span, []).append(loss - base[sample][span])
        means = [(begin, end, estimate(losses[begin, end])) for begin, end in sorted(losses)]
        return [(begin, end, mean) for begin, end, mean in means if mean is not None]

    def _bins(self, series: str, length: int) -> dict[int, dict[tuple[int, int], float]]:
        """The mean loss of each bin, by sample and (first position, end)."""
        curves = {sample: row["curves"] for sample, row in self.samples(series, length).items()}
        return {
            sample: {
                span: total / count
                for span, total, count in zip(
                    pairwise(map(int, curve["loss_edges"])),
                    curve["loss_sum"],
                    curve["loss_count"],
                    strict=True,
                )
                if count
            }
            for sample, curve in curves.items()
            if "loss_sum" in curve
        }

    def by_head(self, series: str, length: int, name: str) -> list[list[float]]:
        """A measure of each head, as a list for each layer; means over samples."""
        curves = [row["curves"] for row in self.samples(series, length).values()]
        curves = [curve for curve in curves if f"head_{name}" in curve]
        if not curves:
            return []
        head_curves = [curve[f"head_{name}"] for curve in curves]
        means = [sum(values) / len(values) for values in zip(*head_curves, strict=True)]
        ends = [0, *accumulate(int(count) for count in curves[0]["heads"])]
        return [means[begin:end] for begin, end in pairwise(ends)]

    def has(self, metric: str) -> bool:
        """Whether any row has the metric."""
        return any(metric in row["metrics"] for row in self.rows)

    def failed(self) -> list[str]:
        """A line for each series, length and reason of failed samples."""
        samples_by_failure: dict[tuple[str, int, str], list[int]] = {}
        for row in self.rows:
            if row["status"] != "ok":
                key = series_of(row), row["length"], f"{row['status']}: {row['message']}"
                samples_by_failure.setdefault(key, []).append(row["sample"])
        return [
            f"failed: {series}, n = {length}: {reason} (samples {', '.join(map(str, samples))})"
            for (series, length, reason), samples in samples_by_failure.items()
        ]

    def beyond(self) -> list[int]:
        """The lengths above the number of positions that the model was trained with."""
        limit = self.first["limit"]
        return [n for n in self.lengths if limit is not None and n > limit]


def summary_csv(groups: Sequence[PretrainedGroup]) -> str:
    """All means with their intervals, a line for each group, series, length and metric."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("model", "dtype", "text", "seed", "series", "length", "metric")
    writer.writerow([*names, "mean", "low", "high", "samples"])
    for group in groups:
        start = [group.first[name] for name in names[:4]]
        for (series, length), rows in group.rows_by_point.items():
            metrics = dict.fromkeys(name for row in rows.values() for name in row["metrics"])
            means = [(name, group.mean(series, length, name)) for name in metrics]
            means.append((RISE, group.gain(series, length, "loss")))
            means += [
                (f"loss at positions {begin} to {end - 1}", mean)
                for begin, end, mean in group.by_position(series, length)
            ]
            for name, mean in means:
                if mean is not None:
                    low, high = mean.interval or (None, None)
                    numbers = [f"{x:.6g}" if x is not None else "" for x in (mean.mean, low, high)]
                    writer.writerow([*start, series, length, name, *numbers, mean.count])
    return out.getvalue()


def series_of(row: Row) -> str:
    """The variant, with its layers if these are not all."""
    return row["variant"] + ("" if row["layers"] == "all" else f" · layers {row['layers']}")


def _device(row: Row) -> str:
    return row["device"].split(":")[0]


def groups(rows: Iterable[Row]) -> list[PretrainedGroup]:
    """Group rows by what the variants must share to be compared."""
    rows_by_group: dict[str, list[Row]] = {}
    for row in rows:
        shared = [_device(row), *(row[name] for name in _SAME)]
        rows_by_group.setdefault(json.dumps(shared), []).append(row)
    return [
        PretrainedGroup(_of_latest_plugins(group_rows)) for group_rows in rows_by_group.values()
    ]


def _of_latest_plugins(rows: Sequence[Row]) -> list[Row]:
    """The rows without those of earlier versions of the plugin of a series."""
    latest = {series_of(row): row.get("plugin") for row in rows}
    return [row for row in rows if row.get("plugin") == latest[series_of(row)]]
