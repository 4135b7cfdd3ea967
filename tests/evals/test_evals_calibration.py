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
            (c, r)
            for c, r in zip(confidence, right, strict=True)
            if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)
        ]
        if in_bin:
            mean = sum(c for c, _ in in_bin) / len(in_bin)
            total += len(in_bin) / len(right) * abs(sum(r for _, r in in_bin) / len(in_bin) - mean)
    return total


def by_pairs(uncertainty: list[float], right: list[bool]) -> float:
    """The share of pairs of a wrong and a right prediction that are ranked correctly."""
    pairs = [
        (wrong > good) + 0.5 * (wrong == good)
        for wrong, is_right in zip(uncertainty, right, strict=True)
        if not is_right
        for good, also in zip(uncertainty, right, strict=True)
        if also
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("bins", [1, 2, 15])
def test_calibration_error_equals_its_definition(bins: int) -> None:
    generator = torch.Generator().manual_seed(bins)
    confidence = torch.rand(200, generator=generator, dtype=torch.float64)
    right = torch.rand(200, generator=generator) < confidence
    expected = by_bins(confidence.tolist(), right.tolist(), bins)
    assert calibration_error(confidence, right, bins) == pytest.approx(expected, abs=1e-12)


def test_confidences_at_the_edges_belong_to_the_lower_bin() -> None:
    confidence = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    right = torch.tensor([True, False, True, False, True])
    expected = by_bins(confidence.tolist(), right.tolist(), 4)
    assert calibration_error(confidence, right, 4) == pytest.approx(expected, abs=1e-15)


def test_one_bin_compares_mean_accuracy_and_mean_confidence() -> None:
    confidence = torch.tensor([0.9, 0.6, 0.6], dtype=torch.float64)
    right = torch.tensor([True, True, False])
    assert calibration_error(confidence, right, 1) == pytest.approx(abs(2 / 3 - 0.7))


def test_calibration_error_of_certain_predictions_is_the_share_of_wrong_ones() -> None:
    right = torch.tensor([True, True, True, False])
    assert calibration_error(torch.ones(4), right) == 0.25
    assert calibration_error(torch.ones(4), torch.ones(4, dtype=torch.bool)) == 0


def test_calibration_error_of_nothing_or_nan_is_nan() -> None:
    assert math.isnan(calibration_error(torch.empty(0), torch.empty(0, dtype=torch.bool)))
    assert math.isnan(calibration_error(torch.tensor([math.nan]), torch.tensor([True])))


@pytest.mark.parametrize("values", [3, 1000])  # with few values most pairs are ties
def test_auroc_equals_the_share_of_ordered_pairs(values: int) -> None:
    generator = torch.Generator().manual_seed(values)
    uncertainty = torch.randint(values, (120,), generator=generator).double()
    right = torch.rand(120, generator=generator) < 0.7
    expected = by_pairs(uncertainty.tolist(), right.tolist())
    assert auroc(uncertainty, right) == pytest.approx(expected, abs=1e-12)


def test_auroc_of_simple_cases() -> None:
    right = torch.tensor([True, True, False, False])
    assert auroc(torch.tensor([0.1, 0.2, 0.3, 0.4]), right) == 1
    assert auroc(torch.tensor([0.4, 0.3, 0.2, 0.1]), right) == 0
    assert auroc(torch.ones(4), right) == 0.5


@pytest.mark.parametrize("right", [True, False])
def test_auroc_is_undefined_without_both_kinds_of_predictions(right: bool) -> None:
    assert math.isnan(auroc(torch.rand(3), torch.full((3,), right)))
    assert math.isnan(auroc(torch.tensor([0.5, math.nan]), torch.tensor([True, False])))


@pytest.mark.parametrize("measure", [calibration_error, auroc])
def test_wrong_arguments_raise(measure) -> None:
    with pytest.raises(ValueError, match=r"must have the same shape \(N,\), got \(2,\) and \(3,\)"):
        measure(torch.zeros(2), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="right must be bool, got torch.float32"):
        measure(torch.zeros(2), torch.zeros(2))


def test_confidence_outside_its_range_raises() -> None:
    with pytest.raises(ValueError, match=r"confidence must be in \[0, 1\], got 0.5 to 1.5"):
        calibration_error(torch.tensor([0.5, 1.5]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="bins must be >= 1, got 0"):
        calibration_error(torch.tensor([0.5]), torch.tensor([True]), 0)
