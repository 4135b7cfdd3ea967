"""The command ``adapt`` on a small random model: what is trained, results, resumption, errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnzoo.integrations.transformers import convert
from evals.pretrained.command import split_text
from evals.pretrained.contexts import Contexts
from evals.pretrained.loading import Source, load
from evals.pretrained.substitution import is_converted, parse_substitution, substituted
from evals.pretrained.training import Adapted, Recipe, Sequences, loss_of, train
from helpers.hf_models import quiet
from helpers.pretrained_runs import metrics_in, rows_in, run
from helpers.small_lm import TEXT

pytestmark = [quiet, pytest.mark.usefixtures("no_figures")]
Capture = pytest.CaptureFixture[str]
TRAINED = "ssmax(start='identity') trained (s, 6 steps of 2 × 48, rate 0.01, seed 0)"
SHORT = ("--lengths", "48", "--samples", "1")

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


def adapt(folder: Path, out: Path, *options: str) -> int:
    return run("adapt", folder, out, *options)


def trained_in(out: Path) -> dict[str, Any]:
    """The rows of trained variants by variant, one of each."""
    return {row["variant"]: row for row in rows_in(out).values() if "training" in row}


def stored_in(out: Path) -> Path:
    (file,) = (out / "trained").glob("*.safetensors")
    return file


def test_only_the_parameters_of_the_variant_are_trained_and_the_model_is_saved(
    small_lm: Path, tmp_path: Path
) -> None:
    assert adapt(small_lm, tmp_path, "--save", str(tmp_path / "saved")) == 0
    before, after = load(Source(str(small_lm))).model, load(Source(str(tmp_path / "saved"))).model
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
    contexts = Contexts(
        load(Source(str(small_lm))), split_text(TEXT.read_text(), 0.2)[1], planted=False, seed=0
    )
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
    small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert adapt(small_lm, tmp_path, "--verbose", "--lengths", "96") == 0
    rows = rows_in(tmp_path)
    assert {length for _, length, _ in rows} == {48, 96}  # the train length is always measured
    assert {name for name, _, _ in rows} == {
        "as loaded", "ssmax(start='identity')", "ssmax(calibrate=48)", TRAINED}  # fmt: skip
    row = rows[TRAINED, 96, 0]
    expected = {"steps": 6, "length": 48, "batch": 2, "learn": ["s"], "parameters": 8}
    assert {name: row["training"][name] for name in expected} == expected
    assert len(row["curves"]["training_loss"]) == 6
    values = [x for value in load_file(stored_in(tmp_path)).values() for x in value.tolist()]
    assert row["curves"]["head_learned_s"] == pytest.approx(values, rel=1e-4)
    printed = capsys.readouterr().out
    assert "Training" in printed
    assert "Learned s" in printed
    assert "Learned s" in (tmp_path / "report.html").read_text()


def test_training_lowers_the_loss_of_the_training_sequences(small_lm: Path, tmp_path: Path) -> None:
    """From a start that is far from softmax. Both losses are of the same sequences."""
    options = ("--variants", "ssmax(s=2.0)", "--steps", "30", "--learning-rate", "0.1", "--save")
    assert adapt(small_lm, tmp_path, *options, str(tmp_path / "saved"), "--lengths", "48") == 0
    load.cache_clear()
    end, start = load(Source(str(tmp_path / "saved"))), load(Source(str(small_lm)))
    convert(start.model, "ssmax", s=2.0)
    (row,) = trained_in(tmp_path).values()
    recipe = Recipe("", 48, 30, 2, 0.1, seed=0)
    ids = Sequences(start, start.tokens(split_text(TEXT.read_text(), 0.2)[0]), recipe).batch(0, 60)
    with torch.no_grad():
        assert loss_of(end.model, ids) < loss_of(start.model, ids) - 1e-3
        first = float(loss_of(start.model, ids[:2]))
    assert row["curves"]["training_loss"][0] == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
@needs_peft
def test_lora_learns_from_the_text(small_lm: Path, tmp_path: Path) -> None:
    """The random model is worse than a uniform guess, which LoRA can correct on held-out text."""
    options = ("--variants", "ssmax", "--lora", "4", "--steps", "40", "--lengths", "48",
               "--lora-learning-rate", "0.03", "--samples", "8")  # fmt: skip
    assert adapt(small_lm, tmp_path, *options) == 0
    rows = rows_in(tmp_path)
    (trained,) = trained_in(tmp_path)
    start, end = (sum(rows[name, 48, sample]["metrics"]["loss"] for sample in range(8)) / 8
                  for name in ("as loaded", trained))  # fmt: skip
    assert end < start - 0.5


@pytest.mark.parametrize(
    "options",
    [("--variants", "ssmax"),
     pytest.param(("--variants", "softmax", "--lora", "2", "--steps", "1"), marks=needs_peft)],
)  # fmt: skip
def test_training_depends_on_the_seed_only(
    options: tuple[str, ...], small_lm: Path, tmp_path: Path
) -> None:
    assert adapt(small_lm, tmp_path / "1", *SHORT, *options, "--seeds", "1") == 0
    assert adapt(small_lm, tmp_path / "2", *SHORT, *options, "--seeds", "0,1") == 0
    second = load_file(stored_in(tmp_path / "1"))
    both = [load_file(file) for file in (tmp_path / "2" / "trained").iterdir()]
    same = [all(torch.equal(x[name], value) for name, value in second.items()) for x in both]
    assert sorted(same) == [False, True]


def test_a_killed_run_continues_without_training_again(small_lm: Path, tmp_path: Path) -> None:
    assert adapt(small_lm, tmp_path) == 0
    uninterrupted, rows = metrics_in(tmp_path), tmp_path / "rows.jsonl"
    lines, file = rows.read_text().splitlines(keepends=True), stored_in(tmp_path)
    changed = file.stat().st_mtime_ns
    rows.write_text("".join(lines[:3]))
    assert adapt(small_lm, tmp_path) == 0
    assert file.stat().st_mtime_ns == changed
    assert len(rows.read_text().splitlines()) == len(lines)
    assert metrics_in(tmp_path) == uninterrupted
    file.unlink()  # killed in the training: it is done again, with the same result
    rows.unlink()
    assert adapt(small_lm, tmp_path) == 0
    assert metrics_in(tmp_path) == uninterrupted


@pytest.mark.parametrize("damage", ["cut", "no header", "no metadata"])
def test_damaged_trained_parameters_are_trained_again(
    damage: str, small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert adapt(small_lm, tmp_path, *SHORT) == 0
    file = stored_in(tmp_path)
    tensors, content = load_file(file), file.read_bytes()
    file.unlink()  # the tensors are mapped into memory, so the file must not be cut in place
    if damage == "no metadata":
        save_file(tensors, file)
    else:
        file.write_bytes(content[:-8] if damage == "cut" else b"")
    (tmp_path / "rows.jsonl").unlink()
    capsys.readouterr()
    assert adapt(small_lm, tmp_path, *SHORT) == 0
    shown = capsys.readouterr()
    assert f"warning: {file} is damaged: " in shown.err
    assert "1 training to do" in shown.out
    again = load_file(file)
    assert all(torch.equal(value, again[name]) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("variants", "options", "names", "learned"),
    [
        ("ssmax(learn='s b')", ("--layers", "1"), {"ssmax(start='identity')"},
         [["model.layers.1.self_attn.attnzoo.b", "model.layers.1.self_attn.attnzoo.s"]]),
        ("sink(b=-2.0),asentmax", ("--layers", "0"), {"sink(b=-2.0)", "sink(start='identity')"},
         [["model.layers.0.self_attn.attnzoo.b"],
          ["model.layers.0.self_attn.attnzoo.beta", "model.layers.0.self_attn.attnzoo.gamma"]]),
    ],
)  # fmt: skip
def test_layers_parameters_and_starts(
    variants: str,
    options: tuple[str, ...],
    names: set[str],
    learned: list[list[str]],
    small_lm: Path,
    tmp_path: Path,
) -> None:
    assert adapt(small_lm, tmp_path, "--variants", variants, *options, *SHORT) == 0
    files = (tmp_path / "trained").iterdir()
    assert sorted(sorted(load_file(file)) for file in files) == learned
    assert names <= {name.split(" trained")[0] for name, _, _ in rows_in(tmp_path)}


def test_learned_parameters_are_float32_in_a_model_of_bfloat16(
    small_lm: Path, tmp_path: Path
) -> None:
    assert adapt(small_lm, tmp_path, "--dtype", "bfloat16", *SHORT) == 0
    for value in load_file(stored_in(tmp_path)).values():
        assert value.dtype == torch.float32
        assert not torch.equal(value, value.bfloat16().float())


def test_parameters_that_are_matrices(small_lm: Path, tmp_path: Path) -> None:
    """The row lists trained numbers per head, but not the entries of matrices."""
    assert adapt(small_lm, tmp_path, "--variants", "hedgehog", *SHORT) == 0
    assert {value.ndim for value in load_file(stored_in(tmp_path)).values()} == {3}
    (row,) = trained_in(tmp_path).values()
    assert [name for name in row["curves"] if name.startswith("head_learned")] == []


def test_a_training_without_memory_does_not_stop_the_others(
    small_lm: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    def starved(spec: Any, *args: Any) -> None:
        if spec.recipe.seed == 0:
            raise torch.OutOfMemoryError("out of memory")
        train(spec, *args)

    monkeypatch.setattr("evals.pretrained.training.train", starved)
    assert adapt(small_lm, tmp_path, *SHORT, "--seeds", "0,1") == 1
    assert "seed 0): out of memory" in capsys.readouterr().err
    assert trained_in(tmp_path).keys() == {TRAINED.replace("seed 0", "seed 1")}


def test_a_substitution_that_fails_leaves_the_model_as_loaded(small_lm: Path) -> None:
    model, recipe = load(Source(str(small_lm))).model, Recipe("", 48, 1, 1, 0.1, 0)
    call = parse_substitution("ssmax").call
    spec = Adapted(call, recipe=recipe, learn=("s",), file=Path("nowhere"))
    with pytest.raises(FileNotFoundError), substituted(model, spec, torch.arange(9)):
        pass
    assert not is_converted(model)


@needs_peft
def test_lora_changes_the_weights_of_a_copy(small_lm: Path, tmp_path: Path) -> None:
    options = ("--variants", "softmax", "--lora", "2", "--lora-learning-rate", "0.01", "--save")
    assert adapt(small_lm, tmp_path, *SHORT, *options, str(tmp_path / "saved")) == 0
    assert all("lora_" in name for name in load_file(stored_in(tmp_path)))
    rows = rows_in(tmp_path)
    (trained,) = trained_in(tmp_path)
    plain, softmax, end = (
        rows[name, 48, 0]["metrics"]["loss"] for name in ("as loaded", "softmax", trained)
    )
    assert softmax == pytest.approx(plain, abs=1e-5)
    assert abs(end - plain) > 1e-4
    before, after = (
        load(Source(str(x))).model.state_dict() for x in (small_lm, tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert len(changed) == 2 * 7  # the linear layers of two layers, not the output layer


def test_lora_without_peft_is_an_error(
    without_weights: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert adapt(without_weights, tmp_path / "out", "--lora", "2") == 2
    assert "--lora needs peft: pip install" in capsys.readouterr().err


def test_a_converted_model_is_an_error(small_lm: Path, tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "saved"
    assert adapt(small_lm, tmp_path / "1", *SHORT, "--save", str(saved)) == 0
    assert adapt(saved, tmp_path / "2") == 2
    assert "attnzoo has already converted this model" in capsys.readouterr().err
