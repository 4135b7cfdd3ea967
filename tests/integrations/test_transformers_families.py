"""The table of families in docs/families.md is what a trial gives."""

from __future__ import annotations

import json

import pytest

from helpers.hf_models import quiet
from scripts import families, tiny_models
from scripts.families_table import RESULTS

pytestmark = quiet


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "bridgetower", "llama", "mpnet", "t5"])
def test_trial_of_a_family_gives_the_stored_result(family: str) -> None:
    fields = "model", "result", "variant", "inputs", "converted"
    rows = json.loads(RESULTS.read_text())["rows"]
    stored = [tuple(row[name] for name in fields) for row in rows if row["family"] == family]
    classes = tiny_models.model_classes(family).values()
    tried = [families.trial(family, models) for models in classes]
    assert [tuple(row[name] for name in fields) for row in tried] == stored
