"""The command ``lm-eval``: EleutherAI's lm-evaluation-harness on converted models."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from commandline.errors import UsageError
from evals.__main__ import main
from evals.pretrained import harness
from evals.pretrained.harness import MODEL_NAME
from helpers.hf_models import quiet
from helpers.small_lm import TEXT, byte_tokenizer, save_small_lm

pytestmark = quiet
installed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install -c constraints.txt -e '.[lm-eval]'",
)
CHOICES, GENERATED = "lm-choices", "lm-generated"  # the names of the two tasks
METRICS = {CHOICES: "acc,none", GENERATED: "exact_match,none"}
_SHARED = "dataset_path: json\ntest_split: train\ndoc_to_text: question\ndoc_to_target: answer\n"
_BY_TASK = {
    CHOICES: "output_type: multiple_choice\ndoc_to_choice: [' one', ' four', ' nine']\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
    GENERATED: "output_type: generate_until\ngeneration_kwargs: {until: ['.'], max_gen_toks: 6}\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a token for padding, which batches of unequal lengths need."""
    folder = save_small_lm(tmp_path_factory.mktemp("model"))
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "<s>"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both tasks, on texts of unequal lengths."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = ("One and two are", "The square of the square root of nine is", "Five less", "A") * 2
    lines = [{"question": text, "answer": 1 + i % 2} for i, text in enumerate(texts)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = {"data_files": str(folder / "data.jsonl"), "cache_dir": str(folder / "cache")}
    for name, text in _BY_TASK.items():
        head = f"task: {name}\ndataset_kwargs: {json.dumps(files)}\n"
        (folder / f"{name}.yaml").write_text(head + _SHARED + text)
    return folder


def answers(tasks: Path, model: str, batch: int = 3, **arguments: Any) -> dict[str, list[Any]]:
    """What a model of the harness answers to each question, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import evals.pretrained.harness_model  # noqa: F401

    results = simple_evaluate(
        model, arguments, list(METRICS), batch_size=batch, device="cpu", log_samples=True,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    assert results is not None
    by_task = {}
    for name, samples in results["samples"].items():
        samples.sort(key=lambda sample: sample["doc_id"])
        by_task[name] = [sample["resps"] for sample in samples]
    return by_task


def logprobs(answers: dict[str, list[Any]]) -> list[float]:
    """The log-probabilities of all choices."""
    return [float(choice[0][0]) for choices in answers[CHOICES] for choice in choices]


@pytest.fixture(scope="module")
def expected(model: Path, tasks: Path) -> dict[str, list[Any]]:
    """What the harness's own model answers."""
    return answers(tasks, "hf", pretrained=str(model))


@installed
@pytest.mark.slow
def test_softmax_answers_as_the_model_of_the_harness(
    model: Path, tasks: Path, expected: dict[str, list[Any]]
) -> None:
    softmax = answers(tasks, MODEL_NAME, pretrained=str(model), variant="softmax")
    assert softmax[GENERATED] == expected[GENERATED]
    assert logprobs(softmax) == pytest.approx(logprobs(expected), abs=1e-4)


@installed
@pytest.mark.slow
def test_padding_of_a_batch_does_not_count_as_keys(
    model: Path, tasks: Path, expected: dict[str, list[Any]]
) -> None:
    variant = {"pretrained": str(model), "variant": "log_n(train_length=4)"}
    alone, batched = (answers(tasks, MODEL_NAME, batch=batch, **variant) for batch in (1, 3))
    assert alone[GENERATED] == batched[GENERATED]
    assert logprobs(alone) == pytest.approx(logprobs(batched), abs=1e-4)
    one_layer = answers(tasks, MODEL_NAME, **variant, layers=1)
    for others in (expected, alone):
        assert logprobs(one_layer) != pytest.approx(logprobs(others), abs=1e-2)


def command(model: Path, out: Path, *words: str) -> int:
    """The exit status of the command."""
    try:
        return main(["lm-eval", "--model", str(model), "--out", str(out), *words])
    except SystemExit as stop:  # raised by argparse
        return int(str(stop.code))


@installed
@pytest.mark.slow
def test_the_command_evaluates_each_variant_and_prints_one_table(
    model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--variants", "softmax,ssmax(calibrate=64)", "--text", str(TEXT)]
    words += ["--tasks", ",".join(METRICS), "--include_path", str(tasks), "--batch_size", "4"]
    assert command(model, tmp_path, *words, "--log_samples") == 0
    table = capsys.readouterr().out.split("lm-evaluation-harness\n")[1]
    for folder, variant in (("softmax", "softmax"), ("ssmax_calibrate=64_", "ssmax(calibrate=64)")):
        (file,) = (tmp_path / folder).rglob("results_*.json")
        assert len(list((tmp_path / folder).rglob("samples_*.jsonl"))) == 2
        results = json.loads(file.read_text())
        assert results["config"]["model_args"]["variant"] == variant
        assert variant in table
        for task, metric in METRICS.items():
            assert f"{results['results'][task][metric]:.4f}" in table


@installed
@pytest.mark.slow
def test_a_cache_of_answers_is_refused() -> None:
    """The harness calls this method if, and only if, its option --use_cache is set."""
    from evals.pretrained.harness_model import AttnzooLM

    with pytest.raises(UsageError, match="--use_cache must not be given"):
        AttnzooLM.__new__(AttnzooLM).set_cache_hook(None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--variants softmax,softmx", "--variants must be among"),
        ("--variants log_n(x=1)", "--variants log_n(x=1): "),
        ("--variants softmax,softmax", "--variants must not repeat an entry, got softmax twice"),
        ("--variants ssmax --layers 7", "--layers must be from 0 to 1 for this model, got 7"),
        ("--layers 0", "--layers needs --variants"),
        ("--variants ssmax(calibrate=8)", "--text and a variant with calibrate=N need each other"),
        (f"--variants ssmax --text {TEXT}", "--text and a variant with calibrate=N need each"),
    ],
)
def test_errors_come_before_the_weights_are_loaded(
    words: str, message: str, without_weights: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert command(without_weights, tmp_path / "out", *words.split(), "--tasks", "none") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_an_error(
    small_lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert command(small_lm, tmp_path / "out", "--tasks", "none") == 2
    assert "pip install -e" in capsys.readouterr().err


def test_the_table_has_one_column_per_variant() -> None:
    scores = {
        "softmax": {"a": {"alias": "a", "sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.25}},
        "topk": {"a": {"acc,none": 1, "acc_stderr,none": "N/A"}},
    }
    table = harness.table(scores)
    assert table.header == ["task", "metric,filter", "softmax", "topk"]
    assert table.rows == [["a", "acc,none", "0.5000 ±0.2500", "1.0000"]]


def test_an_end_without_results_is_an_error(
    small_lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Some options of the harness only print something, such as --tasks list."""
    monkeypatch.setattr(harness, "_command", lambda: lambda: None)
    assert command(small_lm, tmp_path / "out", "--tasks", "list") == 2
    assert "error: lm_eval wrote no results for" in capsys.readouterr().err
