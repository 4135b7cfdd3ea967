"""The command ``pretrained`` on a small random model: results, resumption, shards, errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from commandline.errors import UsageError
from evals.__main__ import main
from evals.pretrained.contexts import Contexts
from evals.pretrained.loading import Loaded, Source, load
from evals.pretrained.study import PretrainedTask
from evals.reporting.shown import ShownGroup
from helpers.hf_models import quiet
from helpers.small_lm import LENGTH, TEXT, byte_tokenizer, save_small_lm

pytestmark = quiet


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds; the tests marked slow draw them."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("evals.reporting.pretrained.drawn", ShownGroup)


def measure(folder: Path, out: Path, *options: str) -> int:
    line = ["pretrained", "--model", str(folder), "--text", str(TEXT), "--out", str(out)]
    line += ["--workers", "0", "--lengths", str(LENGTH), "--samples", "1", "--variants", "softmax"]
    return main([*line, *options])


def rows_in(out: Path) -> dict[tuple[str, int, int], Any]:
    files = sorted(out.glob("rows*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {(row["variant"], row["length"], row["sample"]): row for row in rows}


def test_softmax_and_identity_starts_reproduce_the_loss_of_the_model_itself(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = "softmax,ssmax(start='identity'),ssmax(s=0.5)"
    options = ("--variants", variants, "--samples", "2", "--measures", "loss,dispersion")
    assert measure(folder, tmp_path, *options) == 0
    rows = rows_in(tmp_path)
    assert len(rows) == 4 * 2
    loaded = load(Source(str(folder)))
    contexts = Contexts(loaded, TEXT.read_text(), planted=True, seed=0)
    for sample in range(2):
        context = contexts.draw(LENGTH, sample)
        with torch.no_grad():
            logits = loaded.model(context.tokens[None]).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, context.tokens[1:], reduction="none")
        model_loss = float(losses[context.is_text[1:]].mean())
        for variant in ("as loaded", "softmax", "ssmax(start='identity')"):
            row = rows[variant, LENGTH, sample]
            assert row["metrics"]["loss"] == pytest.approx(model_loss, abs=1e-5)
            curve = row["curves"]
            assert sum(curve["loss_sum"]) / sum(curve["loss_count"]) == pytest.approx(
                model_loss, abs=1e-5
            )
        assert abs(rows["ssmax(s=0.5)", LENGTH, sample]["metrics"]["loss"] - model_loss) > 1e-4
    printed = capsys.readouterr().out
    assert "as loaded" in printed
    assert "Rise of the loss" in printed


@pytest.mark.slow
def test_rows_have_every_measure(folder: Path, tmp_path: Path) -> None:
    assert measure(folder, tmp_path, "--greedy") == 0
    rows = rows_in(tmp_path)
    metrics, curves = (rows["softmax", LENGTH, 0][name] for name in ("metrics", "curves"))
    for task in ("one_needle", "several_keys", "several_queries", "several_values",
                 "variable_tracking", "common_word", "retrieval"):  # fmt: skip
        assert metrics[task] in (0.0, 1.0) or task == "retrieval"
        assert metrics[f"{task}_logprob"] < 0
        assert 0 <= metrics[f"{task}_greedy"] <= 1
    for name in ("max_weight", "entropy", "gini", "needle_weight", "needle_entropy"):
        assert len(curves[f"head_{name}"]) == 8  # two layers of four heads
        mean = sum(curves[f"head_{name}"]) / 8
        assert mean == pytest.approx(metrics[name], rel=1e-3)
    assert metrics["needle_weight_max"] == max(curves["head_needle_weight"])
    # Softmax of transformers is not measured by head, but everything else is.
    plain = rows["as loaded", LENGTH, 0]["metrics"]
    assert "entropy" not in plain
    assert plain["retrieval_logprob"] == pytest.approx(metrics["retrieval_logprob"], abs=1e-4)


def test_a_killed_run_continues_and_more_samples_extend_it(folder: Path, tmp_path: Path) -> None:
    quick = ("--measures", "loss", "--lengths", "64,128", "--samples", "3")
    assert measure(folder, tmp_path / "whole", *quick) == 0
    uninterrupted = rows_in(tmp_path / "whole")
    assert len(uninterrupted) == 2 * 2 * 3
    lines = (tmp_path / "whole" / "rows.jsonl").read_text().splitlines(keepends=True)
    killed = tmp_path / "killed" / "rows.jsonl"
    killed.parent.mkdir()
    killed.write_text("".join(lines[:5]) + lines[5][:40])  # killed while writing a line
    assert measure(folder, killed.parent, *quick) == 0
    again = killed.read_text().splitlines(keepends=True)
    assert again[:5] == lines[:5]
    assert len(again) == len(lines) + 1  # with the damaged line
    continued = [json.loads(line) for line in again[:5] + again[6:]]
    assert {row["key"] for row in continued} == {row["key"] for row in uninterrupted.values()}
    for row in continued:
        expected = uninterrupted[row["variant"], row["length"], row["sample"]]
        assert row["metrics"] == expected["metrics"]
    assert measure(folder, killed.parent, *quick[:-1], "4") == 0
    assert len(killed.read_text().splitlines()) == len(again) + 4  # a sample of 2 × 2


@pytest.mark.parametrize("command", ["pretrained", "adapt"])
def test_failed_contexts_are_repeated_on_request(
    command: str, folder: Path, tmp_path: Path
) -> None:
    line = [command, "--model", str(folder), "--text", str(TEXT), "--out", str(tmp_path)]
    line += ["--workers", "0", "--measures", "loss", "--lengths", "64", "--samples", "2"]
    line += ["--variants", "ssmax"]
    if command == "adapt":
        line += ["--train-length", "64", "--steps", "1", "--batch", "1"]
    assert main(line) == 0
    file = tmp_path / "rows.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    failed = {**first, "status": "oom", "message": "out of memory", "metrics": {}, "curves": {}}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (failed, *others)))
    main(line)
    assert len(file.read_text().splitlines()) == 1 + len(others)
    assert main([*line, "--retry-failed"]) == 0
    *_, again = map(json.loads, file.read_text().splitlines())
    assert (again["key"], again["metrics"]) == (first["key"], first["metrics"])


def test_two_shards_are_one_run(folder: Path, tmp_path: Path, capsys: Any) -> None:
    quick = ("--measures", "loss", "--lengths", "64,96", "--samples", "2")
    assert measure(folder, tmp_path / "one", *quick) == 0
    capsys.readouterr()
    assert measure(folder, tmp_path / "two", *quick, "--shard", "0/2") == 0
    assert "of other shards are missing" in capsys.readouterr().out
    assert measure(folder, tmp_path / "two", *quick, "--shard", "1/2") == 0
    assert (tmp_path / "two" / "report.html").exists()
    one, two = rows_in(tmp_path / "one"), rows_in(tmp_path / "two")
    assert one.keys() == two.keys()
    for key, row in one.items():
        assert row["metrics"] == two[key]["metrics"]
        assert row["key"] == two[key]["key"]
    summaries = [(tmp_path / name / "summary.csv").read_text().splitlines() for name in
                 ("one", "two")]  # fmt: skip
    assert sorted(summaries[0]) == sorted(summaries[1])


@pytest.mark.slow
def test_batches_give_the_same_results(folder: Path, tmp_path: Path) -> None:
    assert measure(folder, tmp_path / "1", "--samples", "3") == 0
    assert measure(folder, tmp_path / "2", "--samples", "3", "--batch", "2") == 0
    one, two = rows_in(tmp_path / "1"), rows_in(tmp_path / "2")
    for key, row in one.items():
        for name, value in row["metrics"].items():
            assert two[key]["metrics"][name] == pytest.approx(value, abs=1e-4), name


def test_some_layers_only(folder: Path, tmp_path: Path) -> None:
    quick = ("--measures", "loss,sharpness", "--lengths", "64")
    variants = ("--variants", "ssmax(s=0.9)")
    assert measure(folder, tmp_path, *quick, *variants) == 0
    assert measure(folder, tmp_path, *quick, *variants, "--layers", "1") == 0
    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    by_layers = {row["layers"]: row for row in rows if row["variant"] == "ssmax(s=0.9)"}
    assert by_layers["1"]["curves"]["heads"] == [4]
    assert by_layers["all"]["curves"]["heads"] == [4, 4]
    assert by_layers["1"]["metrics"]["loss"] != by_layers["all"]["metrics"]["loss"]
    assert (
        by_layers["1"]["curves"]["head_entropy"] != by_layers["all"]["curves"]["head_entropy"][4:]
    )
    assert "ssmax(s=0.9) · layers 1" in (tmp_path / "report.html").read_text()


def test_lengths_beyond_the_trained_context_are_measured_and_marked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(folder, tmp_path, "--measures", "loss", "--lengths", "64,1100") == 0
    printed = capsys.readouterr().out
    assert "warning: the model was trained with 1024 positions; 1100" in printed
    assert "n = 1100: beyond the trained context of 1024 tokens" in printed
    assert math.isfinite(rows_in(tmp_path)["softmax", 1100, 0]["metrics"]["loss"])


@pytest.mark.slow
def test_report_shows_the_results_and_compare_names_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures = ("--measures", "loss,sharpness", "--lengths", "64", "--samples", "2")
    assert measure(folder, tmp_path, *measures) == 0
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    text = page.read_text()
    assert "Loss by position at n = 64" in text
    assert "Attention variants in pretrained models" in text
    for name in ("by-length", "loss-by-position", "heads-max-weight"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("data:image/png") == 3
    capsys.readouterr()
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "compare needs results of tasks, got only those of pretrained" in capsys.readouterr().err


@pytest.mark.usefixtures("own_registry")
def test_variant_of_a_plugin(folder: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "halved.py"
    plugin.write_text(
        "from attnzoo import Variant, register_variant\n"
        "def weights(q, k, call):\n"
        "    scores = (call.scores(q, k) / 2).masked_fill(~call.visible, float('-inf'))\n"
        "    return scores.softmax(-1)\n"
        "register_variant(Variant('halved', 'softmax(z / 2)', 'none', weights))\n"
    )
    options = ("--measures", "loss", "--lengths", "64", "--plugin", str(plugin), "--variants")
    assert measure(folder, tmp_path / "1", *options, "softmax") == 0
    assert ("halved", 64, 0) not in rows_in(tmp_path / "1")
    out = tmp_path / "2"
    assert measure(folder, out, *options, "halved", "--samples", "2") == 0
    # The tables never mix results of two versions of the file.
    plugin.write_text(plugin.read_text() + "# another version\n")
    assert measure(folder, out, *options, "halved") == 0
    lines = (out / "summary.csv").read_text().splitlines()
    assert [line.rsplit(",", 1)[1] for line in lines if ",halved,64,loss," in line] == ["1"]


def test_other_names_of_the_model_and_of_the_text_share_the_baseline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--measures", "loss", "--lengths", "64")
    assert measure(folder, tmp_path / "out", *options) == 0
    (tmp_path / "copy.txt").write_text(TEXT.read_text())
    monkeypatch.chdir(folder.parent)
    other = ("--text", str(tmp_path / "copy.txt"), "--variants", "entmax")
    assert measure(Path(folder.name), tmp_path / "out", *options, *other) == 0
    lines = (tmp_path / "out" / "summary.csv").read_text().splitlines()
    assert sum(",entmax,64,loss minus as loaded," in line for line in lines) == 1


def test_a_text_that_changes_during_the_run_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One.\n")
    task = PretrainedTask(Source("model"), file).planned()
    assert task.read() == "One.\n"
    file.write_text("Two.\n")
    with pytest.raises(UsageError, match=r"text\.txt changed after the start; run the command"):
        task.read()


def test_dry_run_estimates_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--measures", "loss", "--lengths", "64,128", "--dry-run", "--workers", "2")
    assert measure(folder, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out
    assert "4 contexts to read" in printed
    assert "on 2 workers" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--variants", "softmaxx"), "--variants must be among adaptive_temperature, "),
        (("--variants", "softmax->ssmax"), "--variants must be among adaptive_temperature, "),
        (("--variants", "ssmax(x=1)"), "'ssmax' has no parameter 'x'"),
        (("--variants", "entmax(start='identity')"), "no parameters make 'entmax' equal"),
        (("--variants", "entmax(calibrate=8)"), "'entmax' cannot be calibrated"),
        (("--variants", "ssmax(calibrate=1)"), "calibrate must be an int >= 2, got 1"),
        (("--variants", "ssmax(calibrate=99999)"), "calibrate must be at most 11"),
        (
            ("--variants", "entmax(alpha=0.5)"),
            "--variants entmax(alpha=0.5): entmax's alpha must be ",
        ),
        (
            ("--variants", "entmax(p=2)"),
            "entmax(p=2): variant 'entmax' has no parameter",
        ),
        (("--variants", "softmax,softmax"), "--variants must not repeat an entry"),
        (("--layers", "0,2"), "layers must be from 0 to 1 for this model, got 2"),
        (("--layers", "1-0"), "--layers must be all, or numbers such as 0-9,20, got '1-0'"),
        (("--layers", "0-1,1"), "--layers must name each layer once"),
        (("--measures", "los"), "--measures must be among loss, retrieval, "),
        (("--measures", "loss", "--greedy"), "--greedy needs the measure retrieval"),
        (("--lengths", "64"), "--lengths must be at least "),
        (("--lengths", "99999"), "--text must have at least "),
        (("--samples", "1,2"), "--samples must be one number or 1, one for each length, got 2"),
        (("--out", __file__), f"--out must be a folder, got {__file__!r}"),
        (("--batch", "0"), "--batch must be an int >= 1, got 0"),
        (("--workers", "-1"), "--workers must be an int >= 0, got -1"),
        (("--shard", "2/2"), "--shard must be I/N"),
        (("--text", "nowhere"), "--text must be a file, got 'nowhere'"),
        (("--gguf", "nowhere.gguf"), "--gguf must be a file in "),
    ],
)
def test_wrong_options_are_errors_and_write_nothing(
    options: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The errors come before the weights are loaded, which takes long."""
    weights = shutil.ignore_patterns("*.safetensors")
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=weights)
    assert measure(bare, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err.replace(str(bare), str(folder))
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(model: Path) -> str:
        assert measure(model, tmp_path / "out") == 2
        return capsys.readouterr().err

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no tokenizer; write one there" in error(empty)
    byte_tokenizer().save_pretrained(empty)
    assert f"--model {empty}: " in error(empty)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 1, "num_attention_heads": 4,
             "max_position_embeddings": 8192}  # fmt: skip
    bert = transformers.BertLMHeadModel(transformers.BertConfig(initializer_range=0.5, **sizes))
    save_small_lm(tmp_path / "bert", bert)
    assert "--model must be a causal language model, got " in error(tmp_path / "bert")
    texts = tmp_path / "empty.txt"
    texts.write_text("")
    assert measure(folder, tmp_path / "out", "--text", str(texts), "--measures", "loss") == 2
    assert "--text must have at least 1024 tokens for the length 1024, got 0" in (
        capsys.readouterr().err
    )
    texts = tmp_path / "line.txt"
    texts.write_text("word " * 3000)
    assert measure(folder, tmp_path / "out", "--text", str(texts)) == 2
    assert "--text must have at least 4 sentences or lines" in capsys.readouterr().err


def test_lengths_beyond_a_table_of_position_embeddings_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 96}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(bos_token_id=256, eos_token_id=256, **sizes)
    )
    save_small_lm(tmp_path / "gpt2", model)
    for command, option in (
        ("pretrained", "--lengths"), ("adapt", "--lengths"), ("adapt", "--train-length")
    ):  # fmt: skip
        line = [
            command,
            "--model",
            str(tmp_path / "gpt2"),
            "--text",
            str(TEXT),
            "--measures",
            "loss",
        ]
        line += ["--variants", "ssmax", "--out", str(tmp_path / "out"), "--lengths", "64"]
        line += ["--train-length", "64"] * (command == "adapt")
        assert main([*line, option, "97"]) == 2
        assert f"{option} must be at most 96 for this model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_limit_of_a_table_of_positions_leaves_out_its_first_indices() -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "max_position_embeddings": 64}  # fmt: skip
    opt = transformers.OPTConfig(ffn_dim=16, word_embed_proj_dim=16, **sizes)
    roberta = transformers.RobertaConfig(intermediate_size=16, is_decoder=True, **sizes)
    llama = transformers.LlamaConfig(intermediate_size=16, **sizes)
    for config, limit in ((opt, 64), (roberta, 62), (llama, None)):
        loaded = Loaded(transformers.AutoModelForCausalLM.from_config(config), None)
        if limit is None:  # no table
            loaded.check_length("--lengths", 10_000)
            continue
        loaded.check_length("--lengths", limit)
        loaded.model(torch.zeros(1, limit, dtype=torch.long))
        with pytest.raises(UsageError, match=f"--lengths must be at most {limit} for this model"):
            loaded.check_length("--lengths", limit + 1)
