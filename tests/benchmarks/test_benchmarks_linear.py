"""The commands python -m benchmarks linear and decode."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attnzoo
from benchmarks.harness import baselines
from benchmarks.harness.bench import Bench, Implementation
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting
from benchmarks.harness.correctness import RESIDUAL, Reference, deviation
from benchmarks.harness.report import Row
from benchmarks.harness.timing import Spread, WallClock
from benchmarks.suites import decode, linear
from helpers.cases import ALL_VARIANTS
from helpers.commands import benchmarks, error_of
from helpers.coverage_table import RUNS, VARIANT_BACKENDS

LINEAR = [v for v in ALL_VARIANTS if VARIANT_BACKENDS[v]["linear"] is RUNS]


@pytest.mark.slow
def test_command_linear_measures_forward_alone_and_with_backward(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    done = benchmarks(
        "linear", "--device", "cpu", "--lengths", "64,128", "--heads", "2", "--repeats", "2",
        "--min-seconds", "0.001", "--pairwise-max", "64", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    others = {"sdpa", *LINEAR}
    pairwise = {f"{variant}, pairwise" for variant in LINEAR}
    for length, names in ((64, others | pairwise), (128, others)):
        for direction in ("forward", "both"):
            timed = [r for r in rows if (r["length"], r["direction"]) == (length, direction)]
            assert {r["name"] for r in timed} == names
            for row in timed:
                assert row["seconds"]["median"] > 0
                per_token = row["seconds"]["median"] / length * 1e9
                assert row["figures"]["ns_per_token"] == pytest.approx(per_token)
                assert "sdpa" in row["ratios"] or row["name"] == "sdpa"
                assert (row["check"] is None) == (row["name"] == "sdpa")
    assert "faster than sdpa" in done.stdout
    assert "faster than cosformer, pairwise" in done.stdout


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
    assert {r["name"].split("(")[0] for r in rows} == {"sdpa", *attnzoo.list_variants()}
    assert len(rows) == 4 * (1 + len(attnzoo.list_variants()))
    for row in rows:
        assert row["note"] == ""
        assert row["seconds"]["median"] > 0
        assert row["figures"] == {}  # no share of the copy bandwidth on a CPU
        assert (row["check"] is None) == (row["backend"] == "state" or row["name"] == "sdpa")
        assert (row["backend"] == "state") == (row["name"] in LINEAR)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("linear", "--lengths", "0"), "--lengths"),
        (
            ("linear", "--direction", "sideways"),
            "must be a comma-separated list of forward, backward, both",
        ),
        pytest.param(("linear", "--device", "cuda"), "requires a CUDA device", marks=NO_GPU),
        (("linear", "--json", "."), "got the folder"),
        pytest.param(("decode", "--device", "cuda"), "requires a CUDA device", marks=NO_GPU),
        (("decode", "--heads", "6", "--kv-heads", "4"), "--heads must be a multiple of --kv-heads"),
        (("decode", "--variants", "nonsense"), "unknown variant 'nonsense'"),
        (("decode", "--backend", "nonsense"), "backend must be None or one of"),
    ],
)
def test_invalid_options_exit_with_status_2(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *args)


# ---- conclusions ------------------------------------------------------------------------------


def timed(name: str, length: int, of_softmax: float) -> Row:
    spread = Spread(1.0, 1.0, 1.0, 3)
    ratios = {"sdpa": Spread(of_softmax, 0, 0, 3)}
    return Row("linear", name, SOFTMAX, "variant", "forward", Setting(length), seconds=spread,
               ratios=ratios)  # fmt: skip


def test_crossover_is_the_length_from_which_the_linear_form_stays_faster() -> None:
    shares = {1024: 0.9, 2048: 1.2, 4096: 0.8, 8192: 0.4}
    rows = [timed("cosformer", n, share) for n, share in shares.items()]
    rows += [timed("taylor", n, 1.5) for n in shares]
    cases = [Case.parse(name, 8192) for name in ("cosformer", "taylor")]
    rows += [timed("sdpa", n, 1.0) for n in shares]
    assert list(linear.crossovers(rows, cases)) == [
        "cosformer, forward: faster than sdpa from N = 4096 on",
        "taylor, forward: not faster than sdpa at N = 8192, the longest measured",
    ]


def test_length_that_was_not_timed_counts_as_slower() -> None:
    rows = [timed("cosformer", n, 0.5) for n in (1024, 2048, 4096)]
    rows += [timed("sdpa", n, 1.0) for n in (1024, 2048, 4096)]
    rows[1].ratios.clear()
    (text,) = linear.crossovers(rows, [Case.parse("cosformer", 4096)])
    assert text == "cosformer, forward: faster than sdpa from N = 4096 on"


# ---- decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "entmax"])
@pytest.mark.parametrize("lost", [0, 1000, 1999])
def test_check_notices_a_missing_key(variant: str, lost: int) -> None:
    setting = Setting(2000, queries=1, batch=1, heads=4, kv_heads=2, dtype="bfloat16", causal=False)
    inputs = Inputs.make(setting)
    decode.add_heavy_keys(inputs.q, inputs.k)
    case, remaining = Case(variant, variant), torch.arange(2000) != lost
    reference = Reference.of(case, inputs)
    assert reference.check(None, False).ok
    k, v = (x[:, :, remaining] for x in (inputs.k, inputs.v))
    less = attnzoo.attention(inputs.q, k, v, variant, enable_gqa=True)
    slack = torch.finfo(torch.bfloat16).eps + RESIDUAL
    assert not deviation(less, reference.plain["out"], reference.exact["out"], slack).ok


def test_next_token_on_a_state_equals_the_whole_sequence() -> None:
    """The sequence is shorter than `STATE_TOKENS`, so the state contains all of its tokens."""
    setting = Setting(24, queries=1, heads=4, kv_heads=2, head_dim=16, causal=False)
    for name in ("cosformer", "taylor"):
        case = Case.parse(name, 25)
        i = Inputs.make(replace(setting, queries=24, key_dim=case.key_dim(16, 4)), case)
        q, k, v = (torch.cat([x, x[:, :, -1:]], 2) for x in (i.q, i.k, i.v))
        expected = attnzoo.attention(q, k, v, name, is_causal=True, enable_gqa=True, **case.params)
        out = decode.next_token(case, 4, setting)(i.q, i.k, i.v)
        torch.testing.assert_close(out, expected[:, :, -1:], rtol=1e-4, atol=1e-5)


def test_taylor_of_order_4_has_no_linear_form() -> None:
    assert Case("taylor", "taylor").linear is not None
    assert Case("taylor", "taylor", {"order": 4}).linear is None


# ---- fla --------------------------------------------------------------------------------------


def test_fla_is_called_with_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla is replaced by functions with its signatures and its layout (B, N, H, D)."""

    def based(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.is_contiguous()
        x = [x.transpose(1, 2) for x in (q, k, v)]
        return attnzoo.attention(*x, "taylor", is_causal=True).transpose(1, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, normalize: bool) -> tuple:
        assert normalize
        w = scale * torch.einsum("bihf,bjhf->bhij", q, k).tril()
        return torch.einsum("bhij,bjhd->bihd", w / w.sum(-1, keepdim=True), v), None

    ops = {"based": {"fused_chunk_based": based, "parallel_based": based},
           "linear_attn": {"chunk_linear_attn": plain}}  # fmt: skip
    for module, functions in ops.items():
        fake_module = types.ModuleType(f"fla.ops.{module}")
        for name, function in functions.items():
            setattr(fake_module, name, function)
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", fake_module)
    monkeypatch.setattr(baselines, "installed", lambda package: True)
    setting, rows = Setting(40, batch=2, heads=2, head_dim=8), []
    for case in (Case("taylor", "taylor"), Case("cosformer", "cosformer", {"max_length": 64})):
        inputs = Inputs.make(setting, case, gradients=True)
        inputs.q.data[..., 0].abs_().add_(0.5)  # avoids 0/0 in cosFormer
        inputs.k.data[..., 0].abs_().add_(0.5)
        implementations = Implementation.baselines(
            case, linear.in_fla_layout(inputs), setting, ["fla"]
        )
        bench = Bench("linear", WallClock(), ["forward", "both"], repeats=1, min_seconds=0.0)
        bench.measure_part(implementations, setting, rows)
    for row in rows:
        assert row.note == ""
        assert row.error is not None
        assert row.error < 1e-5
    assert {row.name for row in rows} == {
        "fla fused_chunk_based: taylor", "fla parallel_based: taylor",
        "fla chunk_linear_attn: cosformer",
    }  # fmt: skip
