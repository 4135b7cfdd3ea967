"""The command ``pretrained`` on a small random model: results, resumption, shards, errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from commandline.errors import UsageError
from evals.__main__ import main
from evals.measures.arithmetic import rounded_products
from evals.pretrained.contexts import Contexts
from evals.pretrained.loading import Loaded, Source, load
from helpers.hf_models import quiet
from helpers.pretrained_runs import metrics_in, rows_in, run
from helpers.small_lm import LENGTH, TEXT, byte_tokenizer, save_small_lm

pytestmark = [quiet, pytest.mark.usefixtures("no_figures")]
Capture = pytest.CaptureFixture[str]


def measure(folder: Path, out: Path, *options: str) -> int:
    return run("pretrained", folder, out, *options)


def test_softmax_and_identity_starts_reproduce_the_loss_of_the_model_itself(
    small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    variants = "softmax,ssmax(start='identity'),ssmax(s=0.5)"
    options = ("--variants", variants, "--samples", "2", "--measures", "loss,dispersion")
    assert measure(small_lm, tmp_path, *options) == 0
    rows = rows_in(tmp_path)
    assert len(rows) == 4 * 2
    loaded = load(Source(str(small_lm)))
    contexts = Contexts(loaded, TEXT.read_text(), planted=True, seed=0)
    for sample in range(2):
        context = contexts.draw(LENGTH, sample)
        with torch.no_grad():
            logits = loaded.model(context.tokens[None]).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, context.tokens[1:], reduction="none")
        expected = pytest.approx(float(losses[context.is_text[1:]].mean()), abs=1e-5)
        for variant in ("as loaded", "softmax", "ssmax(start='identity')"):
            row = rows[variant, LENGTH, sample]
            assert row["metrics"]["loss"] == expected
            assert sum(row["curves"]["loss_sum"]) / sum(row["curves"]["loss_count"]) == expected
        changed = rows["ssmax(s=0.5)", LENGTH, sample]["metrics"]["loss"]
        assert abs(changed - rows["softmax", LENGTH, sample]["metrics"]["loss"]) > 1e-4
    printed = capsys.readouterr().out
    assert "as loaded" in printed
    assert "Rise of the loss" in printed


@pytest.mark.slow
def test_rows_have_every_measure_and_batches_give_the_same(small_lm: Path, tmp_path: Path) -> None:
    assert measure(small_lm, tmp_path / "1", "--greedy", "--samples", "3") == 0
    rows = rows_in(tmp_path / "1")
    metrics, curves = (rows["softmax", LENGTH, 0][name] for name in ("metrics", "curves"))
    for task in ("one_needle", "several_keys", "several_queries", "several_values",
                 "variable_tracking", "common_word", "retrieval"):  # fmt: skip
        assert metrics[task] in (0.0, 1.0) or task == "retrieval"
        assert metrics[f"{task}_logprob"] < 0
        assert 0 <= metrics[f"{task}_greedy"] <= 1
    for name in ("max_weight", "entropy", "gini", "needle_weight", "needle_entropy"):
        assert len(curves[f"head_{name}"]) == 8  # two layers of four heads
        assert sum(curves[f"head_{name}"]) / 8 == pytest.approx(metrics[name], rel=1e-3)
    assert metrics["needle_weight_max"] == max(curves["head_needle_weight"])
    # Softmax of transformers is not measured by head, but everything else is.
    plain = rows["as loaded", LENGTH, 0]["metrics"]
    assert "entropy" not in plain
    assert plain["retrieval_logprob"] == pytest.approx(metrics["retrieval_logprob"], abs=1e-4)
    assert measure(small_lm, tmp_path / "2", "--greedy", "--samples", "3", "--batch", "2") == 0
    batched = metrics_in(tmp_path / "2")
    for row in rows.values():
        assert batched[row["key"]] == pytest.approx(row["metrics"], abs=1e-4)


def test_a_killed_run_continues_and_more_samples_extend_it(small_lm: Path, tmp_path: Path) -> None:
    quick = ("--measures", "loss", "--lengths", "64,128", "--samples")
    assert measure(small_lm, tmp_path, *quick, "3") == 0
    uninterrupted, file = metrics_in(tmp_path), tmp_path / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(uninterrupted) == len(lines) == 2 * 2 * 3
    file.write_text("".join(lines[:5]) + lines[5][:40])  # killed while writing a line
    assert measure(small_lm, tmp_path, *quick, "3") == 0
    again = file.read_text().splitlines(keepends=True)
    assert again[:5] == lines[:5]
    assert len(again) == len(lines) + 1  # with the damaged line
    file.write_text("".join(again[:5] + again[6:]))
    assert metrics_in(tmp_path) == uninterrupted
    assert measure(small_lm, tmp_path, *quick, "4") == 0
    assert len(metrics_in(tmp_path)) == len(lines) + 4  # a sample of 2 × 2


@pytest.mark.parametrize("command", ["pretrained", "adapt"])
def test_failed_contexts_are_repeated_on_request(
    command: str, small_lm: Path, tmp_path: Path
) -> None:
    line = ("--measures", "loss", "--lengths", "64", "--variants", "ssmax")
    assert run(command, small_lm, tmp_path, *line) == 0
    expected, file = metrics_in(tmp_path), tmp_path / "rows.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    failed = {**first, "status": "oom", "message": "out of memory", "metrics": {}, "curves": {}}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (failed, *others)))
    run(command, small_lm, tmp_path, *line)
    assert len(file.read_text().splitlines()) == 1 + len(others)
    assert run(command, small_lm, tmp_path, *line, "--retry-failed") == 0
    assert metrics_in(tmp_path) == expected


def test_two_shards_are_one_run(small_lm: Path, tmp_path: Path, capsys: Capture) -> None:
    quick = ("--measures", "loss", "--lengths", "64,96", "--samples", "2")
    assert measure(small_lm, tmp_path / "one", *quick) == 0
    capsys.readouterr()
    assert measure(small_lm, tmp_path / "one", *quick[:-1], "3", "--dry-run") == 0
    assert "from the medians of stored results" in capsys.readouterr().out
    assert measure(small_lm, tmp_path / "two", *quick, "--shard", "0/2") == 0
    assert "of other shards are missing" in capsys.readouterr().out
    assert not (tmp_path / "two" / "report.html").exists()
    assert measure(small_lm, tmp_path / "two", *quick, "--shard", "1/2") == 0
    assert (tmp_path / "two" / "report.html").exists()
    assert metrics_in(tmp_path / "one") == metrics_in(tmp_path / "two")
    one, two = (sorted((tmp_path / x / "summary.csv").read_text().splitlines())
                for x in ("one", "two"))  # fmt: skip
    assert one == two


def test_some_layers_only(small_lm: Path, tmp_path: Path) -> None:
    quick = ("--measures", "loss,sharpness", "--lengths", "64", "--variants", "ssmax(s=0.9)")
    rows = []
    for layers in ("all", "1"):
        assert measure(small_lm, tmp_path, *quick, "--layers", layers) == 0
        rows.append(rows_in(tmp_path)["ssmax(s=0.9)", 64, 0])
    (every, one), curves = rows, [row["curves"] for row in rows]
    assert [row["series"] for row in rows] == [{"layers": "all"}, {"layers": "1"}]
    assert [curve["heads"] for curve in curves] == [[4, 4], [4]]
    assert every["metrics"]["loss"] != one["metrics"]["loss"]
    assert curves[1]["head_entropy"] != curves[0]["head_entropy"][4:]
    assert "ssmax(s=0.9) · layers 1" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_products_and_model_in_bfloat16_are_lines_of_the_same_table(
    small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, other = tmp_path / "1", tmp_path / "2"
    loss_only = ("--measures", "loss")
    assert measure(small_lm, out, *loss_only) == 0
    capsys.readouterr()
    assert measure(small_lm, out, *loss_only, "--bfloat16", "model,products") == 0
    assert "2 contexts to read" in capsys.readouterr().out  # those in fp32 are there
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    loss = {row["series"].get("bfloat16", row["variant"]): row["metrics"]["loss"] for row in rows}
    assert loss["softmax"] == pytest.approx(loss["as loaded"], abs=1e-5)
    # The model of transformers with its own attention, in one piece.
    model = load(Source(str(small_lm))).model
    model.set_attn_implementation("eager")
    context = Contexts(load(Source(str(small_lm))), TEXT.read_text(), False, 0).draw(LENGTH, 0)
    with torch.inference_mode(), rounded_products("bfloat16", [model.model.rotary_emb]):
        logits = model(context.tokens[None]).logits[0, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits, context.tokens[1:], reduction="none")
    expected = float(losses[context.is_text[1:]].mean())
    assert loss["products"] == pytest.approx(expected, abs=1e-4)
    assert abs(loss["products"] - loss["softmax"]) > 1e-4
    assert measure(small_lm, other, *loss_only, "--dtype", "bfloat16") == 0
    assert loss["model"] == rows_in(other)["softmax", LENGTH, 0]["metrics"]["loss"]
    page = (out / "report.html").read_text()
    assert all(f"softmax · bfloat16 {what}" in page for what in ("products", "model"))


def test_lengths_beyond_the_trained_context_are_measured_and_marked(
    small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert measure(small_lm, tmp_path, "--measures", "loss", "--lengths", "64,1100") == 0
    printed = capsys.readouterr().out
    assert "warning: the model was trained with 1024 positions; 1100" in printed
    assert "n = 1100: beyond the trained context of 1024 tokens" in printed
    assert math.isfinite(rows_in(tmp_path)["softmax", 1100, 0]["metrics"]["loss"])


@pytest.mark.slow
def test_report_and_compare_show_the_results(
    small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    measures = ("--measures", "loss,sharpness", "--lengths", "64", "--samples", "2")
    assert measure(small_lm, tmp_path, *measures) == 0
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    text = page.read_text()
    assert "Loss by position at n = 64" in text
    assert "Attention variants in pretrained models" in text
    for name in ("by-length", "loss-by-position", "heads-max-weight"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("data:image/png") == 3
    capsys.readouterr()
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
    assert "softmax" in capsys.readouterr().out


@pytest.mark.usefixtures("own_registry")
def test_variant_of_a_plugin(small_lm: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "halved.py"
    plugin.write_text(
        "from attnzoo import Variant, register_variant\n"
        "def weights(q, k, call):\n"
        "    scores = (call.scores(q, k) / 2).masked_fill(~call.visible, float('-inf'))\n"
        "    return scores.softmax(-1)\n"
        "register_variant(Variant('halved', 'softmax(z / 2)', 'none', weights))\n"
    )
    options = ("--measures", "loss", "--lengths", "64", "--plugin", str(plugin), "--variants")
    assert measure(small_lm, tmp_path / "1", *options, "softmax") == 0
    assert ("halved", 64, 0) not in rows_in(tmp_path / "1")
    out = tmp_path / "2"
    assert measure(small_lm, out, *options, "halved", "--samples", "2") == 0
    # The tables never mix results of two versions of the file.
    plugin.write_text(plugin.read_text() + "# another version\n")
    assert measure(small_lm, out, *options, "halved") == 0
    lines = (out / "summary.csv").read_text().splitlines()
    assert [line.rsplit(",", 1)[1] for line in lines if ",halved,64,loss," in line] == ["1"]


def test_other_names_of_the_model_and_of_the_text_share_the_baseline(
    small_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--measures", "loss", "--lengths", "64")
    assert measure(small_lm, tmp_path / "out", *options) == 0
    (tmp_path / "copy.txt").write_text(TEXT.read_text())
    monkeypatch.chdir(small_lm.parent)
    other = ("--text", str(tmp_path / "copy.txt"), "--variants", "entmax")
    assert measure(Path(small_lm.name), tmp_path / "out", *options, *other) == 0
    lines = (tmp_path / "out" / "summary.csv").read_text().splitlines()
    assert sum(",entmax,64,loss minus as loaded," in line for line in lines) == 1


@pytest.mark.parametrize(
    ("command", "message"), [("pretrained", "2 contexts to read"), ("adapt", "1 training to do")]
)
def test_dry_run_counts_runs_and_writes_nothing(
    command: str, message: str, small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    options = ["--measures", "loss", "--lengths", "64", "--dry-run", "--workers", "2"]
    options += ["--save", str(tmp_path / "saved")] * (command == "adapt")
    assert run(command, small_lm, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out
    assert message in printed
    assert "without stored results of the same kind" in printed
    assert [*tmp_path.iterdir()] == []


def test_models_and_texts_that_cannot_be_measured(
    small_lm: Path, tmp_path: Path, capsys: Capture
) -> None:
    def error(model: Path, *options: str) -> str:
        assert measure(model, tmp_path / "out", *options) == 2
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
    text = tmp_path / "text.txt"
    text.write_text("")
    message = error(small_lm, "--text", str(text), "--measures", "loss")
    assert "--text must have at least 1024 tokens for the length 1024, got 0" in message
    text.write_text("word " * 3000)
    message = error(small_lm, "--text", str(text))
    assert "--text must have at least 4 sentences or lines" in message


def test_lengths_beyond_a_table_of_position_embeddings_are_errors(
    tmp_path: Path, capsys: Capture
) -> None:
    sizes = {"vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 96}
    config = transformers.GPT2Config(bos_token_id=256, eos_token_id=256, **sizes)
    folder = save_small_lm(tmp_path / "gpt2", transformers.GPT2LMHeadModel(config))
    for command, option in (
        ("pretrained", "--lengths"), ("adapt", "--lengths"), ("adapt", "--train-length")
    ):  # fmt: skip
        options = ("--measures", "loss", "--variants", "ssmax", option, "97")
        assert run(command, folder, tmp_path / "out", *options) == 2
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
