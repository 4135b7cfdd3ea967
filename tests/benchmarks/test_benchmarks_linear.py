"""python -m benchmarks linear and decode: what they measure, refuse and conclude."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Case, Inputs, Setting
from benchmarks.harness.timing import Spread, WallClock
from benchmarks.suites import competitors, decode, linear
from helpers.commands import benchmarks, refusal


@pytest.mark.slow
def test_linear_measures_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    done = benchmarks(
        "linear", "--device", "cpu", "--lengths", "64,128", "--heads", "2", "--repeats", "2",
        "--min-seconds", "0.001", "--pairwise-max", "64", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    who = {"sdpa softmax", "cosformer", "taylor"}
    pairwise = {"cosformer, pairwise", "taylor, pairwise"}
    for length, names in ((64, who | pairwise), (128, who)):
        for direction in ("forward", "both"):
            found = [r for r in rows if (r["length"], r["direction"]) == (length, direction)]
            assert {r["name"] for r in found} == names
            for row in found:
                assert row["seconds"]["median"] > 0
                assert row["per_token"] == row["seconds"]["median"] / length
                assert set(row["ratios"]) == names - {row["name"]}
                assert (row["error"] == "") == (row["name"] == "sdpa softmax")
    assert "faster than sdpa softmax" in done.stdout
    assert ("fla is not installed" in done.stdout) or not linear.fla_is_missing()


@pytest.mark.slow
def test_decode_measures_pairwise_variants_and_states(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    done = benchmarks(
        "decode", "--device", "cpu", "--lengths", "32,64", "--batches", "1,2", "--heads", "4",
        "--kv-heads", "2", "--head-dim", "16", "--repeats", "2", "--min-seconds", "0.001",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["copy_gb_per_s"] > 0
    rows = document["rows"]
    assert {r["name"].split("(")[0] for r in rows} == {"sdpa softmax", *attnzoo.list_variants()}
    assert len(rows) == 4 * (1 + len(attnzoo.list_variants()))
    for row in rows:
        assert row["note"] == ""
        assert row["seconds"]["median"] > 0
        assert row["of_copy"] is None  # a CPU's caches know nothing of bandwidth
    assert "cosformer, B=1: a token costs" in done.stdout


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("linear", "--lengths", "0"), "positive integers"),
        (("linear", "--direction", "sideways"), "some of forward,both are expected"),
        pytest.param(("linear", "--device", "cuda"), "needs a CUDA device", marks=NO_GPU),
        (("linear", "--json", "."), "is a folder"),
        pytest.param(("decode", "--device", "cuda"), "needs a CUDA device", marks=NO_GPU),
        (("decode", "--heads", "6", "--kv-heads", "4"), "--heads must be a multiple of --kv-heads"),
        (("decode", "--variants", "nonsense"), "unknown variant 'nonsense'"),
        (("decode", "--backend", "nonsense"), "backend must be None or one of"),
    ],
)
def test_bad_options_are_refused(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *args)


# ---- conclusions ------------------------------------------------------------------------------


def timed(name: str, length: int, seconds: float, of_softmax: float) -> linear.Row:
    spread, share = Spread(seconds, seconds, seconds, 3), Spread(of_softmax, 0, 0, 3)
    return linear.Row(
        name, "forward", length, 1, seconds=spread, per_token=seconds / length,
        ratios={linear.SOFTMAX: share},
    )  # fmt: skip


def test_the_crossover_is_where_it_stays_faster() -> None:
    shares = {1024: 0.9, 2048: 1.2, 4096: 0.8, 8192: 0.4}
    rows = [timed("cosformer", n, 1.0, share) for n, share in shares.items()]
    rows += [timed("taylor", n, 1.0, 1.5) for n in shares]
    rows += [timed(linear.SOFTMAX, n, 1.0, 1.0) for n in shares]
    assert list(linear.crossovers(rows)) == [
        "cosformer, forward: faster than sdpa softmax from N = 4096 on",
        "taylor, forward: not faster than sdpa softmax up to the longest here",
    ]


def test_what_could_not_be_timed_is_not_faster() -> None:
    rows = [timed("cosformer", n, 1.0, 0.5) for n in (1024, 2048, 4096)]
    rows += [timed(linear.SOFTMAX, n, 1.0, 1.0) for n in (1024, 2048, 4096)]
    rows[1].ratios.clear()  # WRONG, or out of memory
    (said,) = linear.crossovers(rows)
    assert said == "cosformer, forward: faster than sdpa softmax from N = 4096 on"


def test_a_token_of_longer_sequences_is_told_in_one_of_8192() -> None:
    rows = [timed("cosformer", n, s, 0.5) for n, s in ((1024, 9.0), (8192, 1.0), (16384, 2.2))]
    assert list(linear.flatness(rows)) == [
        "cosformer, forward: a token costs 1.10 at 16384 of what it does at 8192"
    ]
    assert list(linear.flatness(rows[:2])) == []


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(*args: object, **kwargs: object) -> Tensor:
        return right(*args, **kwargs) * (1.0 if kwargs.get("backend") == "eager" else 1.1)

    right = attnzoo.attention
    monkeypatch.setattr(attnzoo, "attention", spoilt)
    args = argparse.Namespace(
        heads=2, kv_heads=2, head_dim=16, dtype="float32", device="cpu", seed=0, backend=None,
        repeats=2, min_seconds=0.001, feature_dim=4,
    )  # fmt: skip
    cases = [Case("sigmoid", "sigmoid")]
    first, row = decode.measure(cases, args, 1, 40, WallClock(), 1e9)
    assert first.seconds is not None
    assert row.seconds is None
    assert row.note == "WRONG, not timed"


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "entmax"])
@pytest.mark.parametrize("lost", [0, 1000, 1999])
def test_a_key_that_is_lost_is_seen(variant: str, lost: int) -> None:
    q, k, v = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((4, 1), (2, 2000), (2, 2000)))
    decode.plant(q, k)
    case, kept = Case(variant, variant), torch.arange(2000) != lost
    whole, less = (
        attnzoo.attention(q, x, y, variant, enable_gqa=True)
        for x, y in ((k, v), (k[:, :, kept], v[:, :, kept]))
    )
    assert decode.checked(case, q, k, v, whole, True, None).ok
    assert not decode.checked(case, q, k, v, less, True, None).ok


def test_a_failure_is_a_note_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    args = argparse.Namespace(
        heads=2, kv_heads=2, head_dim=16, dtype="float32", device="cpu", seed=0, backend="tiled",
        repeats=2, min_seconds=0.001, feature_dim=4, batch=1, direction=["forward"], threads=1,
        lengths=[40], pairwise_max=0, pairwise="tiled",
    )  # fmt: skip
    first, row = decode.measure([Case("sigmoid", "sigmoid")], args, 1, 40, WallClock(), 1e9)
    assert first.note == "OutOfMemoryError: too much"
    assert row.seconds is not None
    args.backend = "linear"
    cases = [Case("cosformer", "cosformer", {"max_length": 40}), Case("taylor", "taylor")]
    first, row, _ = linear.measure(cases, args, 40, WallClock())
    assert first.note == "OutOfMemoryError: too much"
    assert row.seconds is not None


def test_taylor_of_order_4_has_no_state() -> None:
    assert decode.has_state(Case("taylor", "taylor"))
    assert not decode.has_state(Case("taylor", "taylor", {"order": 4}))


# ---- fla --------------------------------------------------------------------------------------


def test_fla_gets_heads_inside_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with its signatures, (B, N, H, D): the error against fp64 tells the layout."""

    def based(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = [x.transpose(1, 2) for x in (q, k, v)]
        return attnzoo.attention(*x, "taylor", is_causal=True).transpose(1, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, normalize: bool) -> tuple:
        assert normalize
        w = scale * torch.einsum("bihf,bjhf->bhij", q, k).tril()
        return torch.einsum("bhij,bjhd->bihd", w / w.sum(-1, keepdim=True), v), None

    ops = {"based": {"fused_chunk_based": based, "parallel_based": based},
           "linear_attn": {"chunk_linear_attn": plain}}  # fmt: skip
    for module, functions in ops.items():
        made = types.ModuleType(f"fla.ops.{module}")
        for name, function in functions.items():
            setattr(made, name, function)
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", made)
    setting = Setting(40, "both", batch=2, heads=2, head_dim=8)
    seen = set()
    for case in (Case("taylor", "taylor"), Case("cosformer", "cosformer", {"max_length": 64})):
        inputs = Inputs.make(case, setting)
        inputs.q.data[..., 0].abs_().add_(0.5)  # cosFormer has no row of 0/0 then
        inputs.k.data[..., 0].abs_().add_(0.5)
        for name, factory in competitors.linear_rivals(case, inputs).items():
            seen.add(name)
            entry = linear.theirs(case, inputs, factory, setting)
            assert entry.note == ""
            assert float(entry.error.split()[1]) < 1e-5
    assert seen == {"fla fused_chunk_based", "fla parallel_based", "fla chunk_linear_attn"}


def test_what_fla_raises_is_a_note() -> None:
    def factory() -> competitors.Attend:
        raise ImportError("no such thing")

    case, setting = Case("taylor", "taylor"), Setting(40, "both", heads=1, head_dim=8)
    entry = linear.theirs(case, Inputs.make(case, setting), factory, setting)
    assert entry.entrant is None
    assert entry.note == "ImportError: no such thing"
