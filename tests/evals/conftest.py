"""Fixtures of the tests of the evals."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies write empty pictures, because drawing takes two seconds per study."""
    monkeypatch.setattr("evals.reporting.plots.png", lambda figure: b"")
