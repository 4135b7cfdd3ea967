"""The GPU's inputs, competitors, commands and files, on a CPU; at the end what needs a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attnzoo
from benchmarks import kernels_table
from benchmarks.__main__ import main
from benchmarks.harness.cases import Case, Inputs, Setting
from benchmarks.harness.clusters import block_sparsity
from benchmarks.harness.correctness import Pairs, check
from benchmarks.harness.timing import CudaEvents, WallClock
from benchmarks.suites import competitors, gpu, gpu_attention, gpu_report
from benchmarks.suites.gpu_attention import accepted
from benchmarks.suites.gpu_cells import GpuRow

SOFTMAX = Case("softmax", "softmax")
SMALL = Setting(length=150, direction="both", batch=3, heads=3, head_dim=16, causal=False)


# ---- clustered inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_clustered_inputs_leave_most_blocks_empty(causal: bool) -> None:
    length = 1536 if causal else 1024
    setting = Setting(length=length, heads=2, causal=causal, clustered=True)
    inputs = Inputs.make(SOFTMAX, setting)
    assert block_sparsity(inputs.q, inputs.k, "entmax", causal, {}) >= 0.8
    plain = Inputs.make(SOFTMAX, replace(setting, clustered=False))
    assert block_sparsity(plain.q, plain.k, "entmax", causal, {}) < 0.06


def test_blocks_are_counted_to_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.clusters.SCORES", 64 * 150)  # a block of rows at a time
    q = torch.eye(3).repeat_interleave(64, 0)[None, None, :150] * 1e3
    # Each block of rows sees its own block of keys alone.
    assert block_sparsity(q, q, "entmax", False, {}) == pytest.approx(6 / 9)
    assert block_sparsity(q, q, "entmax", True, {}) == pytest.approx(3 / 6)
    assert block_sparsity(q, q, "softmax", True, {}) == pytest.approx(3 / 6)  # exp(−577) is 0
    assert block_sparsity(0 * q, q, "softmax", False, {}) == 0


def test_clusters_need_room() -> None:
    with pytest.raises(ValueError, match="head dimension of at least 16"):
        Inputs.make(SOFTMAX, Setting(length=64, head_dim=8, clustered=True))


# ---- competitors --------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, -1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_a_softmax_of_log_sigmoids_times_its_sum_is_sigmoid(
    causal: bool, bias: float | None
) -> None:
    """The formula of FlexAttention's competitor, with plain tensors, values and gradients."""
    setting = Setting(length=40, heads=2, head_dim=16, causal=causal, dtype="float64",
        direction="both", input_scale=4.0)  # fmt: skip
    i = Inputs.make(SOFTMAX, setting)
    rows, keys = torch.arange(40)[:, None], torch.arange(40)
    modify = competitors.log_sigmoid(setting, bias)
    s = modify(i.q @ i.k.mT * 16**-0.5, rows * 0, rows * 0, rows, keys)
    s = s.masked_fill(rows < keys, -torch.inf) if causal else s
    lse = s.logsumexp(-1)
    trick = (s.softmax(-1) @ i.v) * lse.exp()[..., None]
    exact = attnzoo.attention(i.q, i.k, i.v, "sigmoid", is_causal=causal, bias=bias)
    torch.testing.assert_close(trick, exact, rtol=1e-6, atol=1e-7)
    leaves = (i.q, i.k, i.v)
    for found, wanted in zip(
        torch.autograd.grad(trick, leaves, i.do), torch.autograd.grad(exact, leaves, i.do)
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competitors, "compiled", lambda attend: attend)
    setting = Setting(length=48, heads=2, head_dim=16)
    i = Inputs.make(SOFTMAX, setting)
    with torch.no_grad():
        found = competitors.flex_sigmoid(setting, None)(i.q, i.k, i.v)
    exact = attnzoo.attention(i.q, i.k, i.v, "sigmoid", is_causal=True)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_no_exponential_overflows() -> None:
    modify = competitors.log_sigmoid(SMALL, 0.0)
    x = torch.tensor([-1e4, -5.0, 0.0, 5.0, 1e4])
    torch.testing.assert_close(modify(x, x, x, x, x), F.logsigmoid(x))


def test_which_competitors_there_are() -> None:
    assert list(competitors.yardsticks(SMALL)) == ["sdpa flash", "sdpa cudnn", "flex"]
    assert list(competitors.yardsticks(SMALL, ("cudnn",))) == ["sdpa cudnn"]
    sigmoid = Case("sigmoid(bias=-2.0)", "sigmoid", {"bias": -2.0})
    assert list(competitors.rivals(sigmoid, SMALL)) == ["flex sigmoid(bias=-2.0)"]
    assert competitors.rivals(SOFTMAX, SMALL) == {}


# ---- the commands -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["attention", "--device", "cuda"], "--device cuda needs a CUDA device, and torch sees"),
        (["gpu", "--out", "nowhere"], "gpu needs a CUDA device, and torch sees none"),
        (["gpu", "--out", "nowhere", "--assemble", "no.jsonl"], "there is no file no.jsonl"),
        (["attention", "--mask", "full"], "--mask is not for --device cpu"),
        (["attention", "--device", "cuda", "--learned"], "--learned is not for --device cuda"),
        (["attention", "--head-dim", "64,128"], "--head-dim takes several with --device cuda"),
        (["attention", "--direction", "backward"], "apart with --device cuda only"),
    ],
)
def test_refusals_are_one_line(
    command: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_variants_that_the_backend_refuses_are_named() -> None:
    cases, refused = accepted(None, "sdpa", "cpu", 64)
    assert "softmax" in {case.spec for case in cases}
    assert any(text.startswith("topk is not measured: sdpa says: ") for text in refused)
    with pytest.raises(ValueError, match="listed twice"):
        accepted("softmax,softmax", "sdpa", "cpu", 64)
    with pytest.raises(ValueError, match="backend must be"):
        accepted("softmax", "nothing", "cpu", 64)


def test_the_reduced_grid_starts_with_the_length_of_the_readme() -> None:
    plan = gpu.plan(dict(heads=16, dtype="bfloat16", device="cuda"))
    lengths = [setting.length for _, settings in plan for setting in settings]
    assert lengths[0] == kernels_table.LENGTH == gpu.LENGTHS[0]
    assert set(lengths) == set(gpu.LENGTHS)
    flex = {s.length for names, settings in plan if "flex" in names for s in settings}
    assert flex == {gpu.LENGTHS[0]}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands with a CPU as their device, one competitor and a small grid."""
    for module in (gpu, gpu_attention):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "CudaEvents", WallClock)
        monkeypatch.setattr(module, "require_cuda", lambda what: None)
        monkeypatch.setattr(module, "matrix_peak", lambda *_: 1e12)
    monkeypatch.setattr("benchmarks.harness.grid.TOKENS", 64)
    monkeypatch.setattr(gpu, "LENGTHS", (64, 32))
    monkeypatch.setattr(gpu, "HEAD_DIMS", (16,))
    monkeypatch.setattr(gpu, "HEADS", 2)
    monkeypatch.setattr(competitors, "NAMES", ("flash", "adasplash"))


@pytest.mark.usefixtures("on_cpu")
def test_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = {"summary": "9 passed", "status": 0, "seconds": 1.0, "failed": []}
    monkeypatch.setattr(gpu, "pytest_gpu", lambda seconds: tests)
    command = ["gpu", "--out", str(tmp_path), "--backend", "tiled", "--commit", "0123+"]
    assert main([*command, "--variants", "softmax,entmax"]) == 0
    files = {path.suffix: path for path in tmp_path.iterdir()}
    assert files.keys() == {".json", ".md", ".png"}
    assert files[".json"].stem.endswith("-0123-dirty")
    document = json.loads(files[".json"].read_text())
    assert document["complete"]
    assert document["tests"] == tests
    assert document["left_out"] == []
    rows = document["rows"]
    assert all(row["seconds"] and not row["note"] for row in rows)
    # Four groups of flash, softmax and entmax, and one of clustered inputs, in two directions.
    assert len(rows) == 5 * 3 * 2
    assert "left out" not in capsys.readouterr().out
    command = ["gpu", "--out", str(tmp_path), "--backend", "tiled", "--budget", "1e-9"]
    assert main([*command, "--variants", "softmax", "--skip-tests"]) == 0
    said = capsys.readouterr().out
    assert said.count("left out: iid D=16") == 4
    (tmp_path / f"{gpu_report.stem(gpu_report.environment('0123'))}.partial.jsonl").touch()
    assert main([*command, "--commit", "0123"]) == 2
    assert "--assemble it, or remove it" in capsys.readouterr().err


@pytest.mark.usefixtures("on_cpu")
def test_a_whole_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    command = ["attention", "--device", "cuda", "--backend", "tiled", "--lengths", "32,64",
        "--head-dim", "16", "--heads", "2", "--repeats", "3", "--min-seconds", "0.001",
        "--mask", "full", "--inputs", "iid", "--json", str(file)]  # fmt: skip
    variants = ["--variants", "softmax,adaptive_temperature,sparsemax"]
    assert main([*command, *variants, "--competitors", "", "--dtype", "float32"]) == 0
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 2 * 3 * 2
    assert document["left_out"] == []
    said = capsys.readouterr().out
    assert "iid inputs, full, D=16, N=64, B=1, H=2, float32" in said
    assert "128 rows of the first and last batches" in said
    assert "adaptive_temperature backward: " in said
    assert main([*command, "--variants", "ssmax", "--check-only"]) == 0
    assert main([*command, "--variants", "topk", "--check-only", "--backend", "sdpa"]) == 2


def test_pytest_is_run_and_its_last_line_kept() -> None:
    found = gpu.pytest_gpu(60.0, ["--version"])
    assert (found["status"], found["failed"]) == (0, [])
    assert found["summary"].startswith("pytest")
    stopped = gpu.pytest_gpu(0.05)
    assert (stopped["summary"], stopped["status"]) == ("stopped after 0 s", -1)
    assert gpu.summary_line("...\n==== 2 passed, 1 skipped in 0.1s ====\n\n") == (
        "2 passed, 1 skipped in 0.1s"
    )


# ---- the files ----------------------------------------------------------------------------------


def results(device: str = "NVIDIA Test", date: str = "2026-01-31", tflops: float = 410.0) -> Any:
    packages = {"triton": "3.6.0"}
    spread = {"median": 0.9, "lower": 0.8, "upper": 1.0, "count": 10}
    row = GpuRow("ssmax", "variant", "forward", 64, True, 16384, 4, 16, "bfloat16", "iid")
    measured = {
        **row.record(),
        "tflops": tflops,
        "seconds": spread,
        "ratios": {"sdpa flash": spread},
    }
    yardstick = {**measured, "name": "sdpa flash", "kind": "yardstick", "ratios": {}}
    other = {**measured, "inputs": "clustered", "tflops": 1.0}
    return {
        "environment": {"device": device, "date": date, "torch": "2.11.0", "packages": packages,
            "python": "3.12.3", "driver": "580", "cuda": "13.0", "capability": "9.0",
            "commit": "0123456789ab+"},
        "settings": {}, "peak_tflops": 700.0, "notes": [], "left_out": ["iid D=64 full N=1024"],
        "tests": {"summary": "9 passed in 1s", "status": 0, "seconds": 1.0, "failed": []},
        "complete": True, "rows": [measured, yardstick, other],
    }  # fmt: skip


def test_the_readmes_table_is_made_from_results(tmp_path: Path) -> None:
    assert kernels_table.kernels_table(tmp_path) == "No GPU has been measured yet.\n"
    for name, document in {
        "b": results(date="2026-01-30", tflops=1.0),
        "a": results(),
        "c": results(device="Another"),
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    first, second = kernels_table.kernels_table(tmp_path).split("NVIDIA Test")
    assert first.startswith("Another, torch 2.11.0, Triton 3.6.0, 2026-01-31: TFLOP/s, causal,")
    lines = second.splitlines()
    assert "N = 16384, B = 4, H = 16" in lines[0]
    assert (
        lines[2]
        == "|  | forward, D = 64 | backward, D = 64 | forward, D = 128 | backward, D = 128 |"
    )
    assert lines[4] == "| `ssmax` | 410 (0.90, –) | – | – | – |"
    assert lines[5] == "| sdpa flash | 410 | – | – | – |"


def test_a_run_that_was_killed_is_assembled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = results()
    header = {name: whole[name] for name in ("environment", "settings", "peak_tflops")}
    partial_file = gpu_report.Partial(tmp_path / "deep" / "x.partial.jsonl", header)
    partial_file.add("tests", whole["tests"])
    partial_file.add("note", {"text": "a note"})
    for row in whole["rows"]:
        partial_file.add("row", row)
    with partial_file.path.open("a") as file:
        file.write('{"line": "row", "na')  # torn by the kill
    document = gpu_report.assembled(partial_file.path)
    assert document["rows"] == whole["rows"]
    assert document["tests"] == whole["tests"]
    assert not document["complete"]
    out = tmp_path / "out"
    assert main(["gpu", "--out", str(out), "--assemble", str(partial_file.path)]) == 0
    stem = "test-2026-01-31-0123456789ab-dirty"
    assert sorted(p.name for p in out.iterdir()) == [f"{stem}.{e}" for e in ("json", "md", "png")]
    assert json.loads((out / f"{stem}.json").read_text())["rows"] == whole["rows"]
    text = (out / f"{stem}.md").read_text()
    assert "did not come to its end" in text
    assert "## iid inputs, causal, D=64, N=16384, B=4, H=16, bfloat16" in text
    assert f"]({stem}.png)" in text
    assert "a note" in capsys.readouterr().out
    assert (out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_what_no_run_writes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = tmp_path / "x.partial.jsonl"
    partial.write_text('{"line": "header", "environment": {"device": null}}\n{"line": "row"}\n')
    for out, message in (
        (tmp_path / "out", "holds a line that no run writes: KeyError"),
        (partial, "--out must be a folder"),
    ):
        assert main(["gpu", "--out", str(out), "--assemble", str(partial)]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [partial]


def test_a_complete_run_says_what_was_left_out(tmp_path: Path) -> None:
    document = results()
    document["rows"] = []
    paths = gpu_report.write_all(document, tmp_path)
    assert [path.suffix for path in paths] == [".json", ".md"]
    text = paths[1].read_text()
    assert "- iid D=64 full N=1024" in text
    assert "- No picture" in text
    assert "did not come to its end" not in text


def test_a_wrong_result_is_the_exit_status(tmp_path: Path) -> None:
    document = results()
    assert gpu.finish(document, tmp_path) == 0
    document["tests"]["status"] = 1
    assert gpu.finish(document, tmp_path) == 1
    document["tests"] = None
    bad = {"ok": False, "rows": 128, "pairs": 4, "worst": "out", "error": None, "share": None}
    document["rows"][0]["check"] = bad
    assert gpu.finish(document, tmp_path) == 1


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_events_of_a_gpu() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    timer = CudaEvents()
    seconds = timer.rounds({"one": lambda: x @ x, "two": lambda: x @ x @ x}, 5, 0.001)
    assert min(seconds["one"]) > 0
    assert sum(seconds["two"]) > sum(seconds["one"])
    assert timer.peak_bytes(lambda: x @ x) >= x.numel() * 4
    timer.settle()
    timer.release()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_the_gate_on_a_gpu(causal: bool) -> None:
    setting = replace(SMALL, causal=causal, device="cuda", dtype="bfloat16")
    inputs = Inputs.make(SOFTMAX, setting)
    found = check(SOFTMAX, inputs, "tiled", pairs=Pairs.corners(3, 3))
    assert found.ok, found.worst


@pytest.mark.gpu
def test_the_table_of_a_gpu(tmp_path: Path) -> None:
    """torch's own competitors raise nothing that is not said, and times are positive."""
    file = tmp_path / "out.json"
    command = ["attention", "--device", "cuda", "--variants", "softmax", "--lengths", "256",
        "--head-dim", "64", "--heads", "2", "--batch", "2", "--inputs", "iid", "--repeats", "3",
        "--backend", "tiled", "--competitors", "flash,cudnn", "--json", str(file)]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
    assert all(row["note"] or row["seconds"]["median"] > 0 for row in rows)
    assert all(row["check"]["ok"] for row in rows if row["name"] == "softmax")
