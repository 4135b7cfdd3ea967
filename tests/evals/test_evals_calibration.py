"""Expected calibration error and AUROC against independent definitions."""

from __future__ import annotations

import math

import pytest
import torch

from evals.measures.calibration import auroc, calibration_error


def by_bins(confidence: list[float], right: list[bool], bins: int) -> float:
    """The definition, bin by bin."""
    total = 0.0
    for b in range(bins):
        in_bin = [
            r - c
            for c, r in zip(confidence, right, strict=True)
            if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)
        ]
        total += abs(sum(in_bin)) / len(right)
    return total


@pytest.mark.parametrize("bins", [1, 2, 15])
def test_calibration_error_equals_its_definition(bins: int) -> None:
    generator = torch.Generator().manual_seed(bins)
    confidence = torch.rand(200, generator=generator, dtype=torch.float64)
    right = torch.rand(200, generator=generator) < confidence
    expected = by_bins(confidence.tolist(), right.tolist(), bins)
    assert calibration_error(confidence, right, bins) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "right", "bins", "error"),
    [
        # an edge belongs to the lower bin: {0, 0.25}, {0.5}, {0.75}, {1}
        ([0.0, 0.25, 0.5, 0.75, 1.0], [1, 0, 1, 0, 1], 4, (0.75 + 0.5 + 0.75 + 0) / 5),
        ([0.9, 0.6, 0.6], [1, 1, 0], 1, 0.7 - 2 / 3),  # mean confidence − mean accuracy
        ([1.0] * 4, [1, 1, 1, 0], 15, 0.25),  # the share of wrong predictions
        ([1.0] * 4, [1, 1, 1, 1], 15, 0),
        ([], [], 15, math.nan),
        ([math.nan], [1], 15, math.nan),
    ],
)
def test_calibration_error_by_hand(
    confidence: list[float], right: list[int], bins: int, error: float
) -> None:
    numbers = torch.tensor(confidence, dtype=torch.float64)
    value = calibration_error(numbers, torch.tensor(right).bool(), bins)
    assert value == pytest.approx(error, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("uncertainty", "right", "area"),
    [
        ([0.1, 0.2, 0.3, 0.4], [1, 1, 0, 0], 1),
        ([0.4, 0.3, 0.2, 0.1], [1, 1, 0, 0], 0),
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 0, 0], 0.5),
        ([0.1, 0.2, 0.2], [1, 1, 0], 0.75),  # a tie counts one half
        ([0.1, 0.2], [1, 1], math.nan),  # undefined without both kinds of predictions
        ([0.1, 0.2], [0, 0], math.nan),
        ([0.5, math.nan], [1, 0], math.nan),
    ],
)
def test_auroc_by_hand(uncertainty: list[float], right: list[int], area: float) -> None:
    value = auroc(torch.tensor(uncertainty), torch.tensor(right).bool())
    assert value == pytest.approx(area, nan_ok=True)


@pytest.mark.parametrize(
    ("measure", "arguments", "message"),
    [
        *((m, (torch.zeros(2), torch.zeros(3).bool()), r"shape \(N,\), got \(2,\) and \(3,\)")
          for m in (calibration_error, auroc)),
        *((m, (torch.zeros(2), torch.zeros(2)), "right must be bool, got torch.float32")
          for m in (calibration_error, auroc)),
        (calibration_error, (torch.tensor([0.5, 1.5]), torch.ones(2).bool()),
         r"confidence must be in \[0, 1\], got 0.5 to 1.5"),
        (calibration_error, (torch.tensor([0.5]), torch.ones(1).bool(), 0),
         "bins must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(measure, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(*arguments)
