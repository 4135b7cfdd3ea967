"""Fixtures of the tests of the evals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evals.reporting.shown import ShownGroup
from helpers.small_lm import save_small_lm


@pytest.fixture(scope="session")
def small_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    return save_small_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def without_weights(small_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model without its weights. A command that loads them fails."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    return Path(shutil.copytree(small_lm, folder, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds; the tests marked slow draw them."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("evals.reporting.artifacts.drawn", ShownGroup)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies write empty pictures, because drawing takes two seconds per study."""
    monkeypatch.setattr("evals.reporting.plots.png", lambda figure: b"")
