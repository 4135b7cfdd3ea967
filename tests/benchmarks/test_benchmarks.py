"""Cases, correctness checks, timing and memory of the benchmarks, and the attention command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from benchmarks.__main__ import main
from benchmarks.harness import memory, report, timing
from benchmarks.harness.bench import Bench, Implementation
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting, learned_params
from benchmarks.harness.correctness import (
    ROWS,
    Check,
    Pairs,
    Reference,
    by_call,
    by_definition,
    rows_to_check,
)
from benchmarks.suites import overhead

QUICK = ["--device", "cpu", "--lengths", "48", "--heads", "2", "--head-dim", "8", "--threads", "1"]
FAST = ["--repeats", "2", "--min-seconds", "0.001"]


def small(**fields: Any) -> Setting:
    return Setting(length=40, heads=2, head_dim=8, **fields)


# ---- cases ------------------------------------------------------------------------------------


def test_case_parse_reads_parameters_and_fills_in_required_ones() -> None:
    case = Case.parse("cosformer(max_length=99)", longest=10)
    assert (case.variant, case.params) == ("cosformer", {"max_length": 99})
    assert Case.parse("cosformer", longest=10).params == {"max_length": 10}
    assert Case.parse("topk", longest=99).params == attnzoo.get_variant("topk").example(99)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "unknown variant 'nothing'"),
        ("ssmax(t=1)", "'ssmax' has no parameter 't'; it has: s, b"),
        ("softmax->ssmax", "only evals support substitutions"),
        ("ssmax(1)", "cannot read"),
    ],
)
def test_case_parse_of_an_invalid_spec_raises(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Case.parse(spec, longest=8)


def test_missing_required_parameter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(attnzoo.get_variant("topk"), example=None)
    monkeypatch.setattr(attnzoo, "get_variant", lambda name: bare)
    with pytest.raises(ValueError, match="requires the parameter 'top_k'"):
        Case.parse("topk", longest=8)


def test_seed_and_scale_determine_the_inputs() -> None:
    a, b = Inputs.make(small()), Inputs.make(small(), gradients=True)
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, Inputs.make(small(seed=1)).q)
    assert torch.equal(Inputs.make(small(input_scale=0.5)).k, a.k * 0.5)


@pytest.mark.parametrize("input_scale", [1.0, 0.1])
def test_scores_are_exact_for_variants_that_select_keys(input_scale: float) -> None:
    inputs = Inputs.make(small(input_scale=input_scale), Case.parse("topk", 40))
    exact = inputs.q.double() @ inputs.k.double().mT
    assert torch.equal((inputs.q @ inputs.k.mT).double(), exact)


def test_learned_parameters_match_those_of_the_module() -> None:
    owned = dict(attnzoo.nn.Attention("ssmax", 2).named_parameters())
    learned = learned_params(Case("ssmax", "ssmax"), small())
    assert {n: tuple(p.shape) for n, p in learned.items()} == {
        n: tuple(p.shape) for n, p in owned.items()
    }


def test_key_dim_is_the_feature_dim_if_features_grow_faster_than_d() -> None:
    key_dims = {n: Case.parse(n, 40).key_dim(64, 16) for n in ("taylor", "cosformer", "softmax")}
    assert key_dims == {"taylor": 16, "cosformer": None, "softmax": None}


# ---- correctness ------------------------------------------------------------------------------


def test_checked_rows_are_the_first_the_last_and_random_ones() -> None:
    ranges = rows_to_check(1000)
    rows = [row for block in ranges for row in block]
    assert len(rows) == ROWS
    assert rows == sorted(set(rows))
    assert {*range(32), *range(968, 1000)} < set(rows)
    assert ranges == rows_to_check(1000)
    assert ranges != rows_to_check(1000, seed=1)
    assert rows_to_check(50) == [range(50)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("variant", "causal"),
    [("cosformer", True), ("ssmax", True), ("ssmax", False), ("adaptive_temperature", True),
     ("adaptive_temperature", False), ("sparsemax", True), ("sparsemax", False)],
)  # fmt: skip
def test_reference_by_blocks_of_rows_equals_the_whole_definition(
    variant: str, causal: bool, kv_heads: int
) -> None:
    case = Case.parse(variant, longest=40)
    setting = Setting(40, queries=30, heads=4, kv_heads=kv_heads, batch=2, head_dim=8,
                      dtype="float64", causal=causal)  # fmt: skip
    inputs = Inputs.make(setting, case, gradients=True, learned=True)
    ranges, pairs = [range(2), range(20, 21), range(27, 30)], Pairs([0, 1], [0, 3])
    attend = case.attend(inputs.params, "eager", **inputs.options)
    expected = by_call(attend, inputs, ranges, pairs)
    part = inputs.part(pairs.batches, pairs.heads)
    parts = by_definition(case, part, ranges, torch.float64)
    assert expected.keys() == parts.keys()
    for name, actual in parts.items():
        torch.testing.assert_close(actual, expected[name].double(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("variant", ["ssmax", "entmax"])
def test_reference_stays_on_the_device(variant: str) -> None:
    """The test uses the meta device, which every machine has."""
    x = [torch.empty(2, 3, 9, 4, device="meta", dtype=torch.bfloat16) for _ in range(4)]
    for leaf in x[:3]:
        leaf.requires_grad_()
    part = Inputs(*x, params={}, causal=False).part([0, 1], [2])
    results = by_definition(Case(variant, variant), part, [range(2), range(5, 9)], torch.float64)
    assert {name: y.device.type for name, y in results.items()} == dict.fromkeys(results, "meta")
    assert results["out"].shape == (2, 1, 6, 4)


def checked(case: Case, setting: Setting, backend: str | None, gradients: bool = True) -> Check:
    inputs = Inputs.make(setting, case, gradients)
    return Reference.of(case, inputs).check(backend, gradients)


@pytest.mark.parametrize("variant", ["softmax", "entmax", "topk", "taylor"])
@pytest.mark.parametrize("backend", [None, "tiled"])
def test_correct_results_pass_the_check(variant: str, backend: str | None) -> None:
    check = checked(Case.parse(variant, longest=40), small(), backend)
    assert check.ok, check.worst
    assert check.deviations.keys() == {"out", "dq", "dk", "dv"}


MANY = Setting(length=150, batch=5, heads=5, head_dim=16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_first_and_last_batch_and_head_are_checked(causal: bool, dtype: str) -> None:
    for variant in ("softmax", "entmax"):
        check = checked(Case(variant, variant), replace(MANY, causal=causal, dtype=dtype), "tiled")
        assert check.ok, check.worst
        assert (check.rows, check.pairs) == (128, 4)


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Makes `attnzoo.attention` return changed results, except from the backend eager."""
    original = attnzoo.attention

    def attention(q: Tensor, *args: Any, **keywords: Any) -> Tensor:
        out = original(q, *args, **keywords)
        return out if keywords.get("backend") == "eager" else change(out, q)

    monkeypatch.setattr(attnzoo, "attention", attention)


@pytest.mark.parametrize("factor", [1.00001, float("nan")])
@pytest.mark.parametrize("gradients", [False, True])
def test_wrong_results_fail_the_check(
    monkeypatch: pytest.MonkeyPatch, factor: float, gradients: bool
) -> None:
    tampered(monkeypatch, lambda out, q: out * factor)
    assert not checked(SOFTMAX, small(), None, gradients).ok


def wrong_row(place: tuple[int, int, int]) -> Callable[[Tensor, Tensor], Tensor]:
    def change(out: Tensor, q: Tensor) -> Tensor:
        factor = torch.ones_like(out)
        factor[place] = 1.1
        return out * factor

    return change


def wrong_gradient(out: Tensor, q: Tensor) -> Tensor:
    """The correct output with a wrong gradient of q."""
    extra = 1e-2 * q
    return out + extra - extra.detach()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (wrong_row((0, 0, 0)), "out"),
        (wrong_row((4, 4, 149)), "out"),
        (wrong_gradient, "dq"),
        # Head 1 is not compared with the reference, but its output must be finite.
        (lambda out, q: out.index_fill(1, torch.tensor(1), float("nan")), "out"),
    ],
    ids=["first row", "last row", "gradient", "NaN in another head"],
)
def test_one_wrong_row_head_or_gradient_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, change: Any, what: str, causal: bool
) -> None:
    tampered(monkeypatch, change)
    check = checked(SOFTMAX, replace(MANY, causal=causal), "tiled")
    assert not check.ok
    assert not check.deviations[what].ok


def test_check_of_a_positional_variant_without_causality_raises() -> None:
    with pytest.raises(ValueError, match="cosformer can only be checked in causal calls"):
        checked(Case.parse("cosformer", 200), replace(MANY, causal=False), "linear")


def test_wrong_results_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tampered(monkeypatch, lambda out, q: out * 2.0)
    file = tmp_path / "out.json"
    command = ["attention", "--variants", "softmax,ssmax", *QUICK, *FAST, "--no-memory"]
    assert main([*command, "--json", str(file)]) == 1
    assert "not timed: softmax at 48, ssmax at 48" in capsys.readouterr().err
    rows = json.loads(file.read_text())["rows"]
    assert [row["seconds"] is None for row in rows] == [False, True, True]
    assert [row["note"] for row in rows] == ["", *["WRONG, not timed"] * 2]


# ---- timing and memory --------------------------------------------------------------------------


def test_interleave_alternates_the_calls() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    seconds = timing.interleave(calls, repeats=3, min_seconds=0.0, warmup=1)
    assert "".join(order) == "abababab"
    assert [len(s) for s in seconds.values()] == [3, 3]


def test_interleave_takes_times_from_the_clock() -> None:
    times = iter([0.0, 1.0, 1.0, 4.0, 9.0, 11.0, 20.0, 24.0])
    calls = {"a": lambda: None, "b": lambda: None}
    seconds = timing.interleave(calls, 2, 0.0, warmup=1, clock=lambda: next(times))
    assert seconds == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_spread_has_median_and_quartiles() -> None:
    spread = timing.Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (spread.median, spread.lower, spread.upper, spread.count) == (3.0, 2.0, 4.0, 5)
    assert timing.ratio([2.0, 4.0], [1.0, 8.0]).median == 1.25


@pytest.mark.slow  # measures resident memory, which a busy machine may swap out
def test_eager_needs_quadratic_memory_and_tiled_does_not() -> None:
    setting = Setting(length=2048, heads=2)
    case, inputs = Case("sigmoid", "sigmoid"), Inputs.make(setting)
    scores = 2 * 2048 * 2048 * 4
    assert memory.measure(Implementation.of(case, inputs, "eager"), setting) > scores
    assert memory.measure(Implementation.of(case, inputs, "tiled"), setting) < scores
    (sdpa,) = Implementation.baselines(SOFTMAX, inputs, setting, ["sdpa"])
    assert memory.measure(sdpa, setting, "both", names=["sdpa"]) < scores


# ---- the command --------------------------------------------------------------------------------


def test_attention_command_names_its_stages_before_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["attention", "--variants", "softmax", *QUICK, *FAST, "--no-memory"]
    assert main([*command, "--direction", "forward,backward"]) == 0
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("attention, N = 48: ")]
    assert [line.split(": ")[1] for line in lines] == [
        "checking 2 implementations",
        "timing forward",
        "timing backward",
    ]
    assert "timing forward" not in output.out


def test_attention_command_writes_json_markdown_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = tmp_path / "deep" / "out.json", tmp_path / "deep" / "out.md"
    specs = "softmax,entmax,log_n(train_length=16)"
    command = ["attention", "--variants", specs, *QUICK, *FAST, "--no-memory", "--json", str(file)]
    assert main([*command, "--markdown", str(text), "--direction", "forward,backward,both"]) == 0
    document = json.loads(file.read_text())
    assert document["settings"]["direction"] == ["forward", "backward", "both"]
    assert document["environment"]["packages"]["torch"]
    names = ["sdpa", "softmax", "entmax", "package entmax: entmax", "log_n(train_length=16)"]
    for direction in ("forward", "backward", "both"):
        rows = {row["name"]: row for row in document["rows"] if row["direction"] == direction}
        assert list(rows) == names
        for row in rows.values():
            assert row["note"] == ""
            assert row["seconds"]["median"] > 0
            assert row["figures"]["tflops"] > 0
            assert (row["error"] or 0) < 1e-5
            assert row["check"] is None or row["check"]["ok"]
        assert rows["softmax"]["ratios"].keys() == {"sdpa"}
        softmax_rows = {"sdpa", "softmax", "package entmax: entmax"}
        assert rows["entmax"]["ratios"].keys() == softmax_rows
    assert sorted(file.parent.iterdir()) == [file, text]
    for shown in (capsys.readouterr().out, text.read_text()):
        assert "attention: H=2 D=8 float32, causal, iid inputs" in shown
        assert re.search(r"time / package entmax: entmax = \d+\.\d\d", shown)
    assert "| 1 | 48 | both | softmax | " in text.read_text()


def test_largest_seed_is_accepted() -> None:
    run = ["attention", "--variants", "softmax", *QUICK, "--check-only"]
    assert main([*run, "--seed", str(2**32 - 1)]) == 0


def test_unsupported_backend_is_noted_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["attention", "--variants", "softmax,sparsemax", "--backend", "sdpa", *QUICK]
    assert main([*command, "--check-only"]) == 0
    assert "ValueError: backend 'sdpa' cannot run 'sparsemax'" in capsys.readouterr().out
    command[2] = "sparsemax"
    assert main([*command, "--check-only"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "nothing"], "unknown variant 'nothing'; known: softmax, "),
        (
            ["--variants", "softmx"],
            "did you mean 'softmax'? --plugin FILE.py loads your own variant",
        ),
        (["--backend", "nothing"], "backend must be"),
        (["--variants", "softmax,softmax"], "must not list a variant twice"),
        (["--learned"], "--learned requires --direction backward or both"),
        (["--direction", "sideways"], "must be a comma-separated list of forward, backward, both"),
        (["--mask", ""], "must not be empty"),
        (["--lengths", "12,x"], "--lengths"),
        (["--lengths", "0"], "--lengths"),
        (["--input-scale", "nan"], "must be a finite number > 0, got 'nan'"),
        (["--seed", str(2**64)], "--seed"),
        (["--seed", "-1"], "--seed"),
        (["--lengths", str(2**64)], "--lengths"),
        (["--heads", str(2**64)], "must be an int from 1 to 2147483647"),
        (["--device", "tpu"], "invalid choice"),
        (["--plugin", "nowhere.py"], "nowhere.py"),
        (["--cpu-time", "--device", "cuda"], "--cpu-time requires --device cpu, got cuda"),
    ],
)
def test_invalid_options_exit_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["attention", *QUICK, "--check-only", *arguments])
    except SystemExit as stop:  # raised by argparse
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_failed_write_keeps_the_old_json_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    report.write_json(str(file), {"rows": []})
    with pytest.raises(TypeError):
        report.write_json(str(file), {"rows": object()})
    assert json.loads(file.read_text()) == {"rows": []}
    assert list(tmp_path.iterdir()) == [file]


def test_json_is_rewritten_after_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, lengths = tmp_path / "out.json", []
    original = Bench.measure_part

    def measure_part(self: Bench, *args: Any) -> None:
        if file.exists():
            lengths.append([row["length"] for row in json.loads(file.read_text())["rows"]])
        original(self, *args)

    monkeypatch.setattr(Bench, "measure_part", measure_part)
    line = ["attention", "--variants", "softmax", *QUICK, "--check-only", "--json", str(file)]
    line[line.index("48")] = "16,32,48"
    assert main(line) == 0
    assert lengths == [[16], [16, 32]]


def test_overhead_lists_all_variants_and_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "CALLS", 1)
    file = tmp_path / "out.json"
    line = ["overhead", "--repeats", "2"]
    assert main([*line, "--json", str(file)]) == 0
    microseconds = json.loads(file.read_text())["microseconds"]
    names = attnzoo.list_variants()
    assert list(microseconds) == ["sdpa", *names, *(f"nn.Attention {name}" for name in names)]
    assert all(spread["median"] > 0 for spread in microseconds.values())
    capsys.readouterr()
    assert main([*line, "--against", str(file)]) == 0
    (row,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("softmax ")]
    assert row.split()[-1] == f"{microseconds['softmax']['median']:.1f}"
    for text in ("{}", "[]", "no", '{"microseconds": []}', '{"microseconds": {"sdpa": {}}}'):
        file.write_text(text)
        assert main([*line, "--against", str(file)]) == 2
        assert capsys.readouterr().err.endswith(f"must be a file written by --json, got {file}\n")
