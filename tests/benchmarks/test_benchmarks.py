"""The benchmark measures what it says, and notices a wrong result before it times it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import attnzoo
from benchmarks import readme
from benchmarks.__main__ import main
from benchmarks.harness import memory, report, timing
from benchmarks.harness.cases import DISCONTINUOUS, REQUIRED, Case, Inputs, Setting, learned_params
from benchmarks.harness.correctness import ROWS, by_call, by_definition, check, check_runs

QUICK = ["--lengths", "48", "--heads", "2", "--head-dim", "8", "--threads", "1"]
FAST = ["--repeats", "2", "--min-seconds", "0.001"]


def small(direction: str = "forward", **fields) -> Setting:
    return Setting(length=40, direction=direction, heads=2, head_dim=8, **fields)


# ---- cases ------------------------------------------------------------------------------------


def test_parameters_can_be_typed() -> None:
    case = Case.parse("cosformer(max_length=99)", longest=10)
    assert (case.variant, case.params) == ("cosformer", {"max_length": 99})
    assert Case.parse("cosformer", longest=10).params == {"max_length": 10}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "unknown variant 'nothing'"),
        ("ssmax(t=1)", "ssmax has no parameter 't'; it has: s, b"),
        ("softmax->ssmax", "nothing to swap"),
        ("ssmax(1)", "cannot read"),
    ],
)
def test_what_cannot_be_run_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Case.parse(spec, longest=8)


def test_a_required_parameter_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REQUIRED, "topk")
    with pytest.raises(ValueError, match=r"write topk\(top_k=…\)"):
        Case.parse("topk", longest=8)


def test_the_table_of_required_parameters_is_complete_and_not_stale() -> None:
    needing = {
        name
        for name in attnzoo.list_variants()
        if any(p.default is attnzoo.REQUIRED for p in attnzoo.get_variant(name).params)
    }
    assert set(REQUIRED) == needing
    assert set(attnzoo.list_variants()) >= DISCONTINUOUS


def test_inputs_depend_on_seed_and_length_alone() -> None:
    case = Case("softmax", "softmax")
    a, b = Inputs.make(case, small()), Inputs.make(case, small(direction="both"))
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, Inputs.make(case, small(seed=1)).q)
    scaled = Inputs.make(case, small(input_scale=0.5))
    assert torch.equal(scaled.k, a.k * 0.5)


@pytest.mark.parametrize("input_scale", [1.0, 0.1])
def test_top_k_inputs_have_exact_scores(input_scale: float) -> None:
    inputs = Inputs.make(Case("topk", "topk", {"top_k": 4}), small(input_scale=input_scale))
    exact = inputs.q.double() @ inputs.k.double().mT
    assert torch.equal((inputs.q @ inputs.k.mT).double(), exact)


def test_learned_parameters_are_those_of_the_module() -> None:
    case = Case("ssmax", "ssmax")
    owned = dict(attnzoo.nn.Attention("ssmax", 2).named_parameters())
    assert {n: tuple(p.shape) for n, p in learned_params(case, 2).items()} == {
        n: tuple(p.shape) for n, p in owned.items()
    }


# ---- correctness ------------------------------------------------------------------------------


def test_rows_are_first_last_and_random() -> None:
    runs = check_runs(1000)
    rows = [row for run in runs for row in run]
    assert len(rows) == ROWS
    assert rows == sorted(set(rows))
    assert {*range(32), *range(968, 1000)} < set(rows)
    assert runs == check_runs(1000)
    assert runs != check_runs(1000, seed=1)
    assert check_runs(50) == [range(50)]


@pytest.mark.parametrize("variant", ["ssmax", "cosformer", "adaptive_temperature", "sparsemax"])
def test_the_reference_run_by_run_is_the_whole_definition(variant: str) -> None:
    case = Case.parse(variant, longest=40)
    inputs = Inputs.make(case, small("both", dtype="float64", learned=True))
    runs = [range(2), range(20, 21), range(37, 40)]
    whole = by_call(case, inputs, runs, "eager")
    parts = by_definition(case, inputs, runs, torch.float64)
    assert whole.keys() == parts.keys()
    for name, part in parts.items():
        torch.testing.assert_close(part, whole[name].double(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("variant", ["softmax", "entmax", "topk", "taylor"])
@pytest.mark.parametrize("backend", [None, "tiled"])
def test_correct_results_pass(variant: str, backend: str | None) -> None:
    case = Case.parse(variant, longest=40)
    found = check(case, Inputs.make(case, small("both")), backend)
    assert found.ok, found.worst
    assert found.deviations.keys() == {"out", "dq", "dk", "dv"}


def off_by(factor: float):
    """`attnzoo.attention` whose fp32 results are wrong unless they come from the definition."""
    true = attnzoo.attention

    def attention(q, *args, **keywords):
        out = true(q, *args, **keywords)
        return out if keywords.get("backend") == "eager" else out * factor

    return attention


@pytest.mark.parametrize("factor", [1.00001, float("nan")])
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_wrong_results_fail(monkeypatch: pytest.MonkeyPatch, factor: float, direction: str) -> None:
    monkeypatch.setattr(attnzoo, "attention", off_by(factor))
    case = Case("softmax", "softmax")
    assert not check(case, Inputs.make(case, small(direction)), None).ok


def test_wrong_results_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(attnzoo, "attention", off_by(2.0))
    file = tmp_path / "out.json"
    command = ["attention", "--variants", "softmax,ssmax", *QUICK, *FAST, "--no-memory"]
    assert main([*command, "--json", str(file)]) == 1
    assert "not timed: softmax at 48, ssmax at 48" in capsys.readouterr().err
    rows = json.loads(file.read_text())["rows"]
    assert [row["seconds"] is None for row in rows] == [False, True, True]


# ---- timing and memory --------------------------------------------------------------------------


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    seconds = timing.interleave(calls, repeats=3, min_seconds=0.0, warmup=1)
    assert "".join(order) == "abababab"
    assert [len(s) for s in seconds.values()] == [3, 3]


def test_a_spread_is_the_quartiles() -> None:
    spread = timing.Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (spread.median, spread.lower, spread.upper, spread.count) == (3.0, 2.0, 4.0, 5)
    assert timing.ratio([2.0, 4.0], [1.0, 8.0]).median == 1.25


@pytest.mark.slow  # resident memory, which a busy machine may take away
def test_memory_of_the_definition_is_quadratic_and_of_tiled_is_not() -> None:
    case, setting = Case("sigmoid", "sigmoid"), Setting(length=2048, heads=2, threads=1)
    scores = 2 * 2048 * 2048 * 4
    eager = memory.measure(case, Setting(**{**vars(setting), "backend": "eager"}))
    tiled = memory.measure(case, Setting(**{**vars(setting), "backend": "tiled"}))
    assert eager > scores
    assert tiled < scores


# ---- the command --------------------------------------------------------------------------------


def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "out.json"
    specs = "softmax,entmax,log_n(train_length=16)"
    command = ["attention", "--variants", specs, *QUICK, *FAST, "--no-memory", "--json", str(file)]
    assert main([*command, "--direction", "both"]) == 0
    document = json.loads(file.read_text())
    assert document["settings"]["direction"] == "both"
    assert document["environment"]["packages"]["torch"]
    rows = {row["spec"].strip(): row for row in document["rows"]}
    assert list(rows) == [
        "sdpa softmax", "softmax", "entmax", "package entmax: entmax", "log_n(train_length=16)",
    ]  # fmt: skip
    assert rows["softmax"]["check"]["ok"]
    assert rows["softmax"]["ratio"]["median"] > 0
    assert rows["package entmax: entmax"]["speedup"] > 0
    assert list(file.parent.iterdir()) == [file]
    assert "entmax" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("speedup", "words"),
    [(2.0, "2.0 × faster"), (0.9, "1.1 × slower"), (0.25, "4.0 × slower"), (0.98, "as fast")],
)
def test_slower_is_not_called_faster(speedup: float, words: str) -> None:
    row = report.Row("package entmax", 16, "forward", speedup=speedup)
    assert report.row_line(row).endswith(f"  attnzoo was {words}")


def test_the_largest_seed_is_taken() -> None:
    run = ["attention", "--variants", "softmax", *QUICK, "--check-only"]
    assert main([*run, "--seed", str(2**32 - 1)]) == 0


def test_a_refusal_is_a_row_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["attention", "--variants", "softmax,sparsemax", "--backend", "sdpa", *QUICK]
    assert main([*command, "--check-only"]) == 0
    assert "refused: backend 'sdpa'" in capsys.readouterr().out
    command[2] = "sparsemax"
    assert main([*command, "--check-only"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "nothing"], "unknown variant"),
        (["--backend", "nothing"], "backend must be"),
        (["--learned"], "--learned needs --direction both"),
        (["--lengths", "12,x"], "positive integers"),
        (["--lengths", "0"], "positive integers"),
        (["--input-scale", "nan"], "positive float"),
        (["--seed", str(2**64)], "a seed is an integer from 0 to 2³² − 1"),
        (["--seed", "-1"], "a seed is an integer from 0 to 2³² − 1"),
        (["--lengths", str(2**64)], "positive integers"),
        (["--heads", str(2**64)], "a positive int is expected"),
        (["--device", "tpu"], "invalid choice"),
        (["--plugin", "nowhere.py"], "nowhere.py"),
    ],
)
def test_unknown_settings_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["attention", *QUICK, "--check-only", *arguments])
    except SystemExit as stop:  # argparse's own way
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_json_is_all_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    report.write_json(str(file), {"rows": []})
    with pytest.raises(TypeError):
        report.write_json(str(file), {"rows": object()})
    assert json.loads(file.read_text()) == {"rows": []}
    assert list(tmp_path.iterdir()) == [file]


# ---- the README's table -------------------------------------------------------------------------


def test_every_variant_has_its_row() -> None:
    table = readme.variants_table().splitlines()
    assert [line.split("`")[1] for line in table[2:]] == attnzoo.list_variants()
    assert all(line.count(" | ") == 5 for line in table)


def test_text_around_the_table_is_kept() -> None:
    kernels = "c\n<!-- kernels: begin -->\n<!-- kernels: end -->\nd\n"
    evals = "".join(
        f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("tasks", "evals")
    )
    text = f"a\n<!-- variants: begin -->\nold\n<!-- variants: end -->\nb\n{evals}{kernels}"
    new = readme.rendered(text)
    assert new.startswith("a\n<!-- variants: begin -->\n| variant")
    assert "|\n<!-- variants: end -->\nb\n<!-- tasks: begin -->\n- `max-retrieval`" in new
    assert "<!-- evals: end -->\nc\n<!-- kernels: begin -->\n" in new
    assert new.endswith("\n<!-- kernels: end -->\nd\n")
    assert readme.rendered(new) == new
    with pytest.raises(ValueError, match="one pair"):
        readme.rendered("nothing here")
