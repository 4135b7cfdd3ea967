"""Substitution of variants in a pretrained model, and fingerprints of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attnzoo
from commandline.errors import UsageError
from evals.pretrained.contexts import Contexts
from evals.pretrained.loading import Loaded, Source, load
from evals.pretrained.substitution import (
    apply,
    is_converted,
    parse_layers,
    parse_substitution,
    substituted,
)
from helpers.hf_models import ids, large_llama, quiet
from helpers.small_lm import TEXT, byte_tokenizer, save_small_lm

pytestmark = quiet


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(Source(str(save_small_lm(tmp_path_factory.mktemp("model"), start=True))))


@pytest.fixture(scope="module")
def contexts(loaded: Loaded) -> Contexts:
    return Contexts(loaded, TEXT.read_text(), planted=True, seed=0)


def test_a_model_is_restored(loaded: Loaded, contexts: Contexts) -> None:
    tokens = contexts.tokens[None, :50]
    with torch.inference_mode():
        expected = loaded.model(tokens).logits
        with substituted(loaded.model, parse_substitution("ssmax(s=0.9)"), tokens[0]) as model:
            assert not torch.allclose(model(tokens).logits, expected, atol=1e-3)
        assert not is_converted(loaded.model)
        assert torch.equal(loaded.model(tokens).logits, expected)


def test_a_converted_model_keeps_what_it_learned(tmp_path: Path) -> None:
    model, tokens = large_llama(), ids()[0]
    apply(model, parse_substitution("ssmax(s=0.7)"), tokens)
    with torch.inference_mode():
        expected = model(tokens[None]).logits
        with substituted(model, parse_substitution("softmax"), tokens) as other:
            assert other is not model
            assert not torch.allclose(other(tokens[None]).logits, expected, atol=1e-3)
        assert torch.equal(model(tokens[None]).logits, expected)
    # Such a model is measured as loaded, with its own weights.
    save_small_lm(tmp_path, apply(large_llama(), parse_substitution("ssmax(s=0.7)"), tokens))
    again = load(Source(str(tmp_path)))
    assert is_converted(again.model)


def test_calibration_sets_the_mean_gain_to_one(loaded: Loaded, contexts: Contexts) -> None:
    substitution = parse_substitution("ssmax(calibrate=100)")
    with substituted(loaded.model, substitution, contexts.tokens) as model:
        modules = [m for m in model.modules() if isinstance(m, attnzoo.nn.Attention)]
        s = float(modules[0].s.detach()[0]) if modules[0].s.dim() else float(modules[0].s)
    log_n = torch.arange(1, 101).double().log().mean()
    assert s == pytest.approx(float(1 / log_n), rel=1e-5)


def test_layers_are_numbers_and_ranges() -> None:
    assert parse_layers("all") is None
    assert parse_layers("4,0-2") == (0, 1, 2, 4)
    with pytest.raises(UsageError, match="--layers must be all, or numbers"):
        parse_layers("first")


def test_fingerprints_tell_models_apart(loaded: Loaded, tmp_path: Path) -> None:
    assert loaded.fingerprint() == loaded.fingerprint()
    other = Loaded(large_llama(), loaded.tokenizer)
    assert other.fingerprint() != loaded.fingerprint()
    half = load(Source(str(save_small_lm(tmp_path, large_llama(), start=True)), dtype="bfloat16"))
    assert half.fingerprint() != other.fingerprint()
    assert Loaded(loaded.model, byte_tokenizer()).fingerprint() != loaded.fingerprint()


@pytest.mark.parametrize("change", [{"rope_theta": 500_000.0}, {"max_position_embeddings": 99}])
def test_fingerprints_depend_on_the_config_but_not_on_the_folder(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    for name in ("one", "moved", "changed"):
        save_small_lm(tmp_path / name)
    file = tmp_path / "changed" / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("rope_parameters") or {}):
        part |= {name: value for name, value in change.items() if name in part}
    assert config != json.loads(file.read_text())
    file.write_text(json.dumps(config))
    one, moved, changed = (
        load(Source(str(tmp_path / name))).fingerprint() for name in ("one", "moved", "changed")
    )
    assert one == moved
    assert one != changed


def test_fingerprints_depend_on_parameters_of_converted_models(tmp_path: Path) -> None:
    fingerprints = set()
    for length in (16, 2048):
        model = apply(large_llama(), parse_substitution(f"log_n(train_length={length})"), ids()[0])
        folder = save_small_lm(tmp_path / str(length), model)
        fingerprints.add(load(Source(str(folder))).fingerprint())
    fingerprints.add(
        load(Source(str(save_small_lm(tmp_path / "plain", large_llama())))).fingerprint()
    )
    assert len(fingerprints) == 3
