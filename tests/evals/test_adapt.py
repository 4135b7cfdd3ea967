"""The command ``adapt`` on a small random model: what is trained, results, resumption, errors."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnzoo.integrations.transformers import convert
from evals.__main__ import main
from evals.pretrained.adapting import (
    Adapted,
    HeldOut,
    Recipe,
    Sequences,
    loss_of,
    read_stored,
    train,
)
from evals.pretrained.contexts import Contexts
from evals.pretrained.loading import Source, load
from evals.pretrained.study import opened
from evals.pretrained.substitution import is_converted, parse_substitution, substituted
from evals.reporting.shown import ShownGroup
from helpers.hf_models import quiet
from helpers.small_lm import TEXT, save_small_lm

pytestmark = quiet
TRAINED = "ssmax(start='identity') trained (s, 6 steps of 2 × 48, rate 0.01, seed 0)"

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds; the tests marked slow draw them."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("evals.reporting.pretrained.drawn", ShownGroup)


def adapt(folder: Path, out: Path, *options: str) -> int:
    read_stored.cache_clear()  # each command is a process of its own
    opened.cache_clear()
    line = ["adapt", "--model", str(folder), "--text", str(TEXT), "--out", str(out)]
    line += ["--train-length", "48", "--steps", "6", "--batch", "2", "--workers", "0"]
    line += ["--lengths", "48,96", "--samples", "2", "--measures", "loss"]
    return main([*line, *options])


def rows_in(out: Path) -> dict[tuple[str, int, int], Any]:
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return {(row["variant"], row["length"], row["sample"]): row for row in rows}


def stored_in(out: Path) -> Path:
    (file,) = (out / "trained").glob("*.safetensors")
    return file


def test_only_the_parameters_of_the_variant_are_trained_and_the_model_is_saved(
    folder: Path, tmp_path: Path
) -> None:
    assert adapt(folder, tmp_path, "--save", str(tmp_path / "saved")) == 0
    before, after = load(Source(str(folder))).model, load(Source(str(tmp_path / "saved"))).model
    loaded_state, saved_state = before.state_dict(), after.state_dict()
    learned = saved_state.keys() - loaded_state.keys()
    assert sorted(learned) == [f"model.layers.{i}.self_attn.attnzoo.s" for i in (0, 1)]
    assert all(torch.equal(saved_state[name], value) for name, value in loaded_state.items())
    stored = load_file(stored_in(tmp_path))
    assert stored.keys() == learned
    for name, value in stored.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, saved_state[name])
        assert (value != 0).all()  # they started at 0
    rows = rows_in(tmp_path)
    held_out = HeldOut(Source(str(folder)), TEXT, training=TEXT, share=0.2).read()
    contexts = Contexts(load(Source(str(folder))), held_out, planted=False, seed=0)
    for sample in (0, 1):
        for length in (48, 96):
            plain, identity, trained = (
                rows[name, length, sample]["metrics"]["loss"]
                for name in ("as loaded", "ssmax(start='identity')", TRAINED)
            )
            assert identity == pytest.approx(plain, abs=1e-5)
            assert abs(trained - plain) > 1e-5
            context = contexts.draw(length, sample).tokens
            again = float(loss_of(after, context[None]).detach())
            assert again == pytest.approx(trained, abs=1e-5)


def test_rows_and_report_say_what_was_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapt(folder, tmp_path, "--verbose", "--lengths", "96") == 0
    rows = rows_in(tmp_path)
    assert {length for _, length, _ in rows} == {48, 96}  # the train length is always measured
    assert {name for name, _, _ in rows} == {
        "as loaded", "ssmax(start='identity')", "ssmax(calibrate=48)", TRAINED}  # fmt: skip
    row = rows[TRAINED, 96, 0]
    training = row["training"]
    assert (training["steps"], training["length"], training["batch"]) == (6, 48, 2)
    assert training["learn"] == ["s"]
    assert training["parameters"] == 8  # two layers of four heads
    assert len(row["curves"]["training_loss"]) == 6
    values = [x for value in load_file(stored_in(tmp_path)).values() for x in value.tolist()]
    assert row["curves"]["head_learned_s"] == pytest.approx(values, rel=1e-4)
    printed = capsys.readouterr().out
    assert "Training" in printed
    assert "Learned s" in printed
    assert "Learned s" in (tmp_path / "report.html").read_text()


def test_training_lowers_the_loss_of_the_training_sequences(folder: Path, tmp_path: Path) -> None:
    """From a start that is far from softmax. Both losses are of the same sequences."""
    options = ("--variants", "ssmax(s=2.0)", "--steps", "30", "--learning-rate", "0.1", "--save")
    assert adapt(folder, tmp_path, *options, str(tmp_path / "saved"), "--lengths", "48") == 0
    end, start = load(Source(str(tmp_path / "saved"))), load(Source(str(folder)))
    convert(start.model, "ssmax", s=2.0)
    row = next(row for row in rows_in(tmp_path).values() if "training" in row)
    text = HeldOut(Source(str(folder)), TEXT, training=TEXT, share=0.2).training_text()
    recipe = Recipe("", 48, 30, 2, 0.1, seed=0)
    ids = Sequences(start, start.tokens(text), recipe).batch(0, 60)
    with torch.no_grad():
        assert loss_of(end.model, ids) < loss_of(start.model, ids) - 1e-3
        first = float(loss_of(start.model, ids[:2]))
    assert row["curves"]["training_loss"][0] == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
@needs_peft
def test_lora_learns_from_the_text(folder: Path, tmp_path: Path) -> None:
    """The random model is worse than a uniform guess, which LoRA can correct on held-out text."""
    options = ("--variants", "ssmax", "--lora", "4", "--steps", "40", "--lengths", "48",
               "--lora-learning-rate", "0.03", "--samples", "8")  # fmt: skip
    assert adapt(folder, tmp_path, *options) == 0
    rows = rows_in(tmp_path)
    (trained,) = {row["variant"] for row in rows.values() if "training" in row}
    start, end = (sum(rows[name, 48, sample]["metrics"]["loss"] for sample in range(8)) / 8
                  for name in ("as loaded", trained))  # fmt: skip
    assert end < start - 0.5


def test_training_depends_on_the_seed_only(folder: Path, tmp_path: Path) -> None:
    assert adapt(folder, tmp_path / "1", "--lengths", "48") == 0
    assert adapt(folder, tmp_path / "2", "--lengths", "48", "--seeds", "0,1") == 0
    first = load_file(stored_in(tmp_path / "1"))
    both = [load_file(file) for file in (tmp_path / "2" / "trained").iterdir()]
    same = [all(torch.equal(x[name], value) for name, value in first.items()) for x in both]
    assert sorted(same) == [False, True]


def test_a_killed_run_continues_without_training_again(folder: Path, tmp_path: Path) -> None:
    assert adapt(folder, tmp_path) == 0
    uninterrupted = rows_in(tmp_path)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    file = stored_in(tmp_path)
    changed = file.stat().st_mtime_ns
    (tmp_path / "rows.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    assert adapt(folder, tmp_path) == 0
    assert file.stat().st_mtime_ns == changed
    again = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(again) == len(lines) + 1  # with the damaged line
    for line in again[4:]:
        row = json.loads(line)
        same = uninterrupted[row["variant"], row["length"], row["sample"]]
        assert row["metrics"] == same["metrics"]
        assert row["key"] == same["key"]
    file.unlink()  # killed in the training: it is done again, with the same result
    (tmp_path / "rows.jsonl").unlink()
    assert adapt(folder, tmp_path) == 0
    assert {key: row["metrics"] for key, row in rows_in(tmp_path).items()} == {
        key: row["metrics"] for key, row in uninterrupted.items()
    }


@pytest.mark.parametrize("damage", ["cut", "no header", "no metadata"])
def test_damaged_trained_parameters_are_trained_again(
    damage: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lengths", "48", "--samples", "1")
    assert adapt(folder, tmp_path, *options) == 0
    file = stored_in(tmp_path)
    tensors, content = load_file(file), file.read_bytes()
    file.unlink()  # the tensors are mapped into memory, so the file must not be cut in place
    if damage == "no metadata":
        save_file(tensors, file)
    else:
        file.write_bytes(content[:-8] if damage == "cut" else b"")
    (tmp_path / "rows.jsonl").unlink()
    capsys.readouterr()
    assert adapt(folder, tmp_path, *options) == 0
    shown = capsys.readouterr()
    assert f"warning: {file} is damaged: " in shown.err
    assert "1 training to do" in shown.out
    again = load_file(file)
    assert all(torch.equal(value, again[name]) for name, value in tensors.items())


def test_some_layers_and_chosen_parameters(folder: Path, tmp_path: Path) -> None:
    options = ("--variants", "ssmax(learn='s b')", "--layers", "1", "--lengths", "48")
    assert adapt(folder, tmp_path, *options) == 0
    names = [f"model.layers.1.self_attn.attnzoo.{name}" for name in ("b", "s")]
    assert sorted(load_file(stored_in(tmp_path))) == names


def test_learned_parameters_are_float32_in_a_model_of_bfloat16(
    folder: Path, tmp_path: Path
) -> None:
    assert adapt(folder, tmp_path, "--dtype", "bfloat16", "--lengths", "48") == 0
    stored = load_file(stored_in(tmp_path))
    for value in stored.values():
        assert value.dtype == torch.float32
        assert not torch.equal(value, value.bfloat16().float())


def test_variants_that_start_at_given_values(folder: Path, tmp_path: Path) -> None:
    assert adapt(folder, tmp_path, "--variants", "sink(b=-2.0),asentmax", "--lengths", "48") == 0
    names = {name.split(" trained")[0] for name, _, _ in rows_in(tmp_path)}
    assert {"sink(b=-2.0)", "sink(start='identity')"} <= names
    learned = [sorted({name.split(".")[-1] for name in load_file(file)})
               for file in (tmp_path / "trained").iterdir()]  # fmt: skip
    assert sorted(learned) == [["b"], ["beta", "gamma"]]


def test_parameters_that_are_matrices(folder: Path, tmp_path: Path) -> None:
    """The row lists trained numbers per head, but not the entries of matrices."""
    assert adapt(folder, tmp_path, "--variants", "hedgehog", "--lengths", "48") == 0
    assert {value.ndim for value in load_file(stored_in(tmp_path)).values()} == {3}
    (curves,) = (row["curves"] for row in rows_in(tmp_path).values() if row["sample"] == 0
                 and "training" in row)  # fmt: skip
    assert [name for name in curves if name.startswith("head_learned")] == []


@needs_peft
def test_lora_depends_on_the_seed_only(folder: Path, tmp_path: Path) -> None:
    options = ("--variants", "softmax", "--lora", "2", "--lengths", "48", "--steps", "1")
    assert adapt(folder, tmp_path / "1", *options, "--seeds", "1") == 0
    assert adapt(folder, tmp_path / "2", *options, "--seeds", "0,1") == 0
    second = load_file(stored_in(tmp_path / "1"))
    both = [load_file(file) for file in (tmp_path / "2" / "trained").iterdir()]
    same = [all(torch.equal(x[name], value) for name, value in second.items()) for x in both]
    assert sorted(same) == [False, True]


def test_a_training_without_memory_does_not_stop_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def starved(spec: Any, *args: Any) -> None:
        if spec.settings.seed == 0:
            raise torch.OutOfMemoryError("out of memory")
        train(spec, *args)

    monkeypatch.setattr("evals.pretrained.adapt_command.train", starved)
    assert adapt(folder, tmp_path, "--lengths", "48", "--seeds", "0,1") == 1
    assert "seed 0): out of memory" in capsys.readouterr().err
    trained = {row["variant"] for row in rows_in(tmp_path).values() if "training" in row}
    assert trained == {TRAINED.replace("seed 0", "seed 1")}


def test_a_substitution_that_fails_leaves_the_model_as_loaded(folder: Path) -> None:
    model = load(Source(str(folder))).model
    call = parse_substitution("ssmax").call
    spec = Adapted(call, None, Recipe("", 48, 1, 1, 0.1, 0), ("s",), Path("nowhere"))
    with pytest.raises(FileNotFoundError), substituted(model, spec, torch.arange(9)):
        pass
    assert not is_converted(model)


@needs_peft
def test_lora_changes_the_weights_of_a_copy(folder: Path, tmp_path: Path) -> None:
    options = ("--variants", "softmax", "--lora", "2", "--lengths", "48", "--lora-learning-rate",
               "0.01", "--save", str(tmp_path / "saved"))  # fmt: skip
    assert adapt(folder, tmp_path, *options) == 0
    assert all("lora_" in name for name in load_file(stored_in(tmp_path)))
    rows = rows_in(tmp_path)
    (trained,) = {row["variant"] for row in rows.values() if "training" in row}
    plain, softmax, end = (
        rows[name, 48, 0]["metrics"]["loss"] for name in ("as loaded", "softmax", trained)
    )
    assert softmax == pytest.approx(plain, abs=1e-5)
    assert abs(end - plain) > 1e-4
    before, after = (load(Source(str(x))).model for x in (folder, tmp_path / "saved"))
    assert before.state_dict().keys() == after.state_dict().keys()
    changed = {name for name, value in before.state_dict().items()
               if not torch.equal(value, after.state_dict()[name])}  # fmt: skip
    assert len(changed) == 2 * 7  # the linear layers of two layers, not the output layer


def test_lora_without_peft_is_an_error(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert adapt(folder, tmp_path / "out", "--lora", "2") == 2
    assert "--lora needs peft: pip install" in capsys.readouterr().err


def test_dry_run_estimates_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "saved")
    assert adapt(folder, tmp_path / "out", "--dry-run", "--save", saved) == 0
    printed = capsys.readouterr().out
    assert "1 training to do" in printed
    assert "about " in printed
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--variants", "softmax"), "softmax learns no parameter by itself"),
        (("--variants", "sink"), "b has no gradient there, so training cannot move it"),
        (("--variants", "ssmax(learn='x')"), "learn"),
        (("--variants", "ssmax(learn=1)"), "learn must be names such as 'x y', got 1"),
        (("--variants", "softmaxx"), "--variants must be among adaptive_temperature, "),
        (("--variants", "ssmax,ssmax"), "--variants must not repeat an entry"),
        (
            ("--train-length", "9500", "--held-out", "0.9"),
            "--text must have at least 9501 tokens to train on, got ",
        ),
        (("--train-length", "1"), "--train-length must be an int >= 2, got 1"),
        (("--lengths", "9999"), "--text must have at least "),
        (("--held-out", "1"), "--held-out must be between 0 and 1, got 1.0"),
        (("--held-out", "0.5", "--eval-text", str(TEXT)), "--held-out must not be given with"),
        (("--eval-text", str(TEXT)), "--eval-text must be another text than --text"),
        (("--eval-text", "nowhere"), "--eval-text must be a file, got 'nowhere'"),
        (("--text", "nowhere"), "--text must be a file, got 'nowhere'"),
        (("--steps", "0"), "--steps must be >= 1, got 0"),
        (("--learning-rate", "0"), "--learning-rate must be finite and > 0"),
        (("--save", __file__), f"--save must be a folder, got {__file__!r}"),
        (("--out", __file__), f"--out must be a folder, got {__file__!r}"),
        (("--save", f"{__file__}/below"), f"--save must be a folder, got '{__file__}/below'"),
        (("--seeds", "0,1", "--save", "there"), "--save needs one variant and one seed"),
        (("--lora-learning-rate", "0.1"), "--lora-learning-rate needs --lora"),
    ],
)
def test_wrong_options_are_errors_and_write_nothing(
    options: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but one come before the weights are loaded, which takes long."""
    if "no gradient" not in message:
        weights = shutil.ignore_patterns("*.safetensors")
        folder = Path(shutil.copytree(folder, tmp_path / "bare", ignore=weights))
    assert adapt(folder, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_converted_model_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    assert adapt(folder, tmp_path / "1", "--lengths", "48", "--save", str(saved)) == 0
    assert adapt(saved, tmp_path / "2") == 2
    assert "attnzoo has already converted this model" in capsys.readouterr().err
