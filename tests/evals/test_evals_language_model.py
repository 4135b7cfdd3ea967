"""The language model: texts, metrics, and trainings that are interrupted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commandline.errors import UsageError
from commandline.variants import VariantCall, parse_spec
from evals.__main__ import main
from evals.measures.arithmetic import lean_arithmetic
from evals.options import Options
from evals.plan import plan_study
from evals.run import Message, Run, RunContext, Substitutes, evaluate, train_once
from evals.tasks.families.answers import SequenceBatch
from evals.tasks.language_model import TASK, depth_parts
from evals.tasks.texts import corpus

TINY: dict[str, Any] = {
    "width": 8, "heads": 2, "depth": 1, "batch": 2, "steps": 30, "train_shortest": 44,
    "train_longest": 44, "test_sequences": 16, "test_least": 1,
}  # fmt: skip

# ---- texts


def test_the_last_tenth_of_a_file_is_the_test_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 89 + "é" + "b" * 9)
    texts, digest = corpus(str(path))
    assert texts["train"].tobytes() == b"a" * 89 + "é".encode()[:1]
    assert texts["test"].tobytes() == "é".encode()[1:] + b"b" * 9
    assert digest != corpus()[1]


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    contents = {f"{part}/{i}.txt": f"{part}{i}" for part in "ab" for i in range(20)}
    contents |= {".hidden/x": "hidden", "a/.x": "hidden"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    texts, _ = corpus(str(tmp_path))
    lines = {split: text.tobytes().decode().split("\n") for split, text in texts.items()}
    assert sorted(lines["train"] + lines["test"]) == sorted(
        content for content in contents.values() if content != "hidden"
    )
    assert len(lines["train"]) > len(lines["test"]) > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "or the path of a file or folder, got .* which does not exist"),
        (b"abc", "is too little text: its test part is empty"),
        (b"a" * 500, "is too little text for length 64: its test part has 50 bytes"),
        (b"a" * 900 + b"\xff" + b"a" * 900, "text.txt is not UTF-8, byte 900 is 0xff"),
    ],
)
def test_wrong_texts_raise(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    line = ["language-model", "--preset", "smoke", "--lengths", "64", "--dry-run"]
    assert main([*line, "--set", f"text={path}"]) == 2
    error = capsys.readouterr().err
    assert "setting text" in error
    assert re.search(message, error)


def test_keys_depend_on_the_digest_and_not_on_the_folder_of_a_text(tmp_path: Path) -> None:
    keys = []
    for number, content in enumerate(["abc" * 500, "abc" * 500, "abd" * 500]):
        path = tmp_path / str(number) / "text.txt"
        path.parent.mkdir()
        path.write_text(content)
        options = Options(preset="smoke", variants=["softmax"], settings={"text": str(path)},
                          lengths=[64])  # fmt: skip
        keys.append([run.keys for run in plan_study(TASK, options, {}).runs({})])
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("path", ["texts", "texts/", ".", "../texts"])
def test_results_have_the_last_part_of_the_path_of_a_text(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path if path.startswith("texts") else tmp_path / "texts")
    settings = replace(TASK.presets["smoke"].settings, text=path)
    assert settings.identity()["text"] == "texts"


# ---- metrics


def test_the_part_of_the_depths_of_each_needle() -> None:
    length, parts = 128, []
    settings = TASK.presets["smoke"].settings
    batch = TASK.batch(0, "planted", length, 0, 64, settings)
    for tokens in batch.tokens:
        depth = bytes(tokens.tolist()).index(b"\n#key=")
        parts.append(depth * 5 // (length - 22))
    assert depth_parts(batch).tolist() == parts
    assert set(parts) == set(range(5))


def test_needles_are_scored_by_depth() -> None:
    batch = TASK.batch(0, "planted", 128, 0, 64, TASK.presets["smoke"].settings)
    answers = batch.answers[batch.asked].reshape(64, 4)
    wrong = torch.where(depth_parts(batch)[:, None] == 3, ord("x"), answers).flatten()
    metrics = TASK.read(torch.nn.functional.one_hot(wrong, 256) * 30.0, batch).metrics
    assert [metrics[f"depth_{i}"].mean().item() for i in range(1, 6)] == [1, 1, 1, 0, 1]
    assert sum(len(metrics[f"depth_{i}"]) for i in range(1, 6)) == 64


def test_a_part_of_the_depths_without_needles_has_no_metric() -> None:
    settings = replace(TASK.presets["smoke"].settings, test_sequences=1, test_least=1)
    model = TASK.build(VariantCall("softmax"), "none", settings)
    outcome = evaluate(TASK, model, {"": Substitutes()}, 0, 64, settings, "cpu", lambda part: None)[
        ""
    ]
    assert outcome.status == "ok"
    assert sum("depth" in name for name in outcome.metrics) == 1


def test_accuracy_of_the_next_byte() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    logits = torch.full((3, 256), -1.0)
    logits[:, 1:7] = torch.arange(6.0)  # 6 is the most probable byte, then 5, …
    batch = SequenceBatch(tokens, torch.tensor([[6, 2, 1]]))
    metrics = TASK.read(logits, batch).metrics
    assert metrics["top1"].tolist() == [True, False, False]
    assert metrics["top5"].tolist() == [True, True, False]


# ---- interruptions


class Interrupted(Exception):
    """Raised in the middle of a training."""


def tiny_run(variant: str, **changes: Any) -> Run:
    settings = TINY | changes
    options = Options(preset="smoke", variants=[variant], settings=settings, lengths=[44])
    (run,) = plan_study(TASK, options, {}).runs({})
    return run


def execute(run: Run, out: Path, interrupted_at: int = 0) -> list[Message]:
    """The messages of a run; it is interrupted when the loss of this step is sent."""
    messages: list[Message] = []

    def emit(message: Message) -> None:
        if message[:2] == ("loss", interrupted_at):
            raise Interrupted
        messages.append(message)

    with lean_arithmetic():
        train_once(run, RunContext("cpu", None, out, None), emit)
    return messages


@pytest.mark.parametrize("variant", ["softmax", "noisy(std=0.5)=>ssmax"])
def test_an_interrupted_training_continues_with_equal_results(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(variant)
    expected = execute(run, tmp_path / "a")
    saved = torch.load(run.model(tmp_path / "a"), weights_only=True)
    assert len(saved["training"]["losses"]) == 2  # of 25 and 5 steps

    monkeypatch.setattr("evals.checkpoints.SAVE_EVERY", 0.0)
    with pytest.raises(Interrupted):
        execute(run, tmp_path / "b", interrupted_at=25)
    assert torch.load(run.checkpoint(tmp_path / "b"), weights_only=True)["step"] == 24
    messages = execute(run, tmp_path / "b")
    losses = [[m[1:] for m in of if m[0] == "loss"] for of in (expected, messages)]
    assert losses[0] == losses[1]
    assert not run.checkpoint(tmp_path / "b").exists()
    resumed = torch.load(run.model(tmp_path / "b"), weights_only=True)
    assert resumed["training"]["losses"] == saved["training"]["losses"]
    assert resumed["training"]["train_cpu_seconds"] > 0
    for name, value in saved["state"].items():
        assert torch.equal(resumed["state"][name], value), name
    (before,), (after,) = (
        next(m[2] for m in of if m[0] == "rows").values() for of in (expected, messages)
    )
    assert after.metrics == before.metrics
    assert after.curves == before.curves
    assert after.curves["training_loss"] == saved["training"]["losses"]


@pytest.mark.parametrize("content", [b"broken", [1], {"model": {}}])
def test_an_unreadable_state_starts_the_training_again(
    content: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run("softmax")
    path = run.checkpoint(tmp_path)
    path.parent.mkdir(parents=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    messages = execute(run, tmp_path)
    assert "the training starts again" in capsys.readouterr().err
    assert [m[1] for m in messages if m[0] == "loss"] == [25, 30]
    assert not path.exists()


def test_a_state_of_another_model_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.checkpoints.SAVE_EVERY", 0.0)
    run, other = tiny_run("softmax"), tiny_run("softmax", width=12)
    with pytest.raises(Interrupted):
        execute(other, tmp_path, interrupted_at=25)
    other.checkpoint(tmp_path).rename(path := run.checkpoint(tmp_path))
    with pytest.raises(UsageError, match=f"^{re.escape(str(path))} does not fit the model"):
        execute(run, tmp_path)


# ---- trainings that change the variant


def trained(run: Run, out: Path) -> dict[str, torch.Tensor]:
    execute(run, out)
    return torch.load(run.model(out), weights_only=True)["state"]


def test_a_variant_that_equals_softmax_continues_its_training(tmp_path: Path) -> None:
    """forgetting with a fixed gate of 1 is softmax, so the switch changes nothing."""
    plain = trained(tiny_run("softmax"), tmp_path)
    same = trained(tiny_run("softmax=>forgetting(log_gates=0.0)"), tmp_path)
    for name, value in plain.items():
        assert torch.allclose(same[name], value, atol=1e-5), name


def test_the_second_variant_learns_after_the_switch(tmp_path: Path) -> None:
    run = tiny_run("softmax=>ssmax")
    assert str(run.variant) == "softmax=>ssmax"
    assert run.variant.params == {"s": 0.0, "b": 1.0}
    state = trained(run, tmp_path)
    plain = trained(tiny_run("softmax"), tmp_path)
    (s,) = (value for name, value in state.items() if name.endswith("attend.s"))
    assert 0 < s.abs().max() < 0.1  # from 0, in 8 steps
    assert state.keys() > plain.keys()
    assert not torch.equal(state["embed.weight"], plain["embed.weight"])


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (["softmax=>sink"], "b has no gradient at its initial value"),
        (["softmax=>sink(b=-30.0)"], "b has no gradient at its initial value"),
        (["softmax=>ssmax=>sink"], "expected name"),
        (["softmax->ssmax=>sink"], "cannot read variant"),
        (["softmax=>mixture(ssmax)"], "a and b of a=>b must have the same wrapper"),
        (["softmax=>nosuch"], "unknown variant 'nosuch'"),
        (["softmax=>ssmax(s=(1, 2, 3))"], "ssmax"),
    ],
)
def test_impossible_switches_raise(variants: list[str], message: str) -> None:
    options = Options(preset="smoke", variants=variants, settings=TINY, lengths=[44])
    with pytest.raises(UsageError, match=message):
        plan_study(TASK, options, {})


@pytest.mark.parametrize("switch", [0.0, 0.01, 0.99, 1.0])
def test_a_switch_leaves_steps_for_both_variants(switch: float) -> None:
    with pytest.raises(UsageError, match=f"both variants of a=>b, got {switch:g} of 30 steps"):
        tiny_run("softmax=>ssmax", switch=switch)


def test_other_commands_refuse_a_switch() -> None:
    with pytest.raises(UsageError, match="this command does not support a=>b"):
        parse_spec("softmax=>ssmax")


def test_a_switch_has_keys_of_its_own() -> None:
    specs = ["ssmax", "softmax=>ssmax", "softmax=>ssmax->softmax", "sink=>ssmax"]
    options = Options(preset="smoke", variants=specs, settings=TINY, lengths=[44])
    planned = plan_study(TASK, options, {})
    assert [str(spec) for spec in planned.specs] == specs
    trainings = planned.runs({})
    assert len({run.training_key for run in trainings}) == len(trainings) == 3
    assert len({key for run in trainings for key in run.keys}) == 4


# ---- settings of training


def test_rows_have_the_mean_loss_of_parts_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.run.LOSS_PARTS", 1)
    run = tiny_run("softmax")
    rows = next(m for m in execute(run, tmp_path) if m[0] == "rows")
    losses = rows[3]["losses"]
    (outcome,) = rows[2].values()
    assert len(losses) == 2
    assert outcome.curves["training_loss"] == [sum(losses) / 2]


def test_autocast_rounds_the_products_and_has_keys_of_its_own(tmp_path: Path) -> None:
    plain, cast = tiny_run("softmax"), tiny_run("softmax", autocast="bfloat16")
    assert plain.training_key != cast.training_key
    expected, state = trained(plain, tmp_path), trained(cast, tmp_path)
    for name, value in expected.items():
        assert state[name].dtype == torch.float32
        assert torch.allclose(state[name], value, atol=0.02), name
    assert any(not torch.equal(state[name], value) for name, value in expected.items())


def test_compile_compiles_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def record(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr("torch.compile", record)
    plain, other = tiny_run("softmax"), tiny_run("softmax", compile=True)
    assert plain.training_key != other.training_key
    trained(plain, tmp_path)
    assert compiled == []
    trained(other, tmp_path)
    assert compiled == [TASK.loss]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"autocast": "float16"}, "autocast must be one of float32, bfloat16, got 'float16'"),
        ({"autocast": "bfloat16", "matmul": "bfloat16"}, "matmul must be float32 with autocast"),
        ({"compile": True, "matmul": "bfloat16"}, "matmul must be float32 with autocast or comp"),
        ({"switch": 1.5}, r"switch must be in \[0, 1.0\], got 1.5"),
    ],
)
def test_wrong_settings_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TASK.presets["smoke"].settings, **changes)
