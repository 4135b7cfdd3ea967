"""The timer for GPUs and the groups of a benchmark, tested on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.__main__ import main
from benchmarks.harness import journal
from benchmarks.harness.bench import Bench, Implementation
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting
from benchmarks.harness.correctness import Reference
from benchmarks.harness.grid import flops, grid
from benchmarks.harness.report import DEVICE_LOST, Report
from benchmarks.harness.timing import MIN_ROUNDS, CudaEvents, WallClock

SMALL = Setting(length=150, batch=3, heads=3, head_dim=16, causal=False)


# ---- the timer ----------------------------------------------------------------------------------


class FakeCuda:
    """Replaces torch.cuda. The clock of this fake device advances only in `work`."""

    def __init__(self) -> None:
        self.now, self.done, self.waits = 0.0, [], 0
        self.allocated = self.peak = 100

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        fake = self

        class Event:
            at = float("nan")

            def record(self) -> None:
                self.at = fake.now

            def elapsed_time(self, end: Any) -> float:
                assert fake.waits, "elapsed_time was called before synchronize"
                return (end.at - self.at) * 1e3

        return Event()

    def work(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.done.append(name)

    def synchronize(self) -> None:
        self.waits += 1

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak


def fake_timer(**seconds: float) -> tuple[FakeCuda, CudaEvents, dict[str, Callable[[], None]]]:
    cuda = FakeCuda()
    calls = {name: partial(cuda.work, name, s) for name, s in seconds.items()}
    return cuda, CudaEvents(cuda, flush=partial(cuda.work, ".", 1.0)), calls


def test_events_exclude_the_buffer_writes_before_a_call() -> None:
    cuda, timer, calls = fake_timer(a=0.002, b=0.001)
    seconds = timer.rounds(calls, repeats=4, min_seconds=0.0)
    assert seconds == {
        "a": pytest.approx([0.002] * 4, abs=1e-9),
        "b": pytest.approx([0.001] * 4, abs=1e-9),
    }
    # The timer runs a warm-up, a trial round and four rounds. It synchronizes twice in total.
    assert "".join(cuda.done) == "ab" + ".a.b" * 5
    assert cuda.waits == 2


@pytest.mark.parametrize(
    ("repeats", "least", "most", "rounds"),
    [(10, 0.0, 99.0, 10), (2, 0.05, 99.0, 17), (10, 0.0, 0.02, 6), (10, 0.0, 0.001, MIN_ROUNDS)],
)
def test_number_of_rounds_depends_on_the_time_of_a_round(
    repeats: int, least: float, most: float, rounds: int
) -> None:
    _, timer, calls = fake_timer(a=0.002, b=0.001)
    seconds = timer.rounds(calls, repeats, least, most)
    assert [len(s) for s in seconds.values()] == [rounds, rounds]


def test_peak_memory_excludes_earlier_allocations() -> None:
    cuda, timer, _ = fake_timer()

    def call() -> None:
        cuda.peak = 170

    assert timer.peak_bytes(call) == 70


# ---- the grid -----------------------------------------------------------------------------------


def test_grid_halves_the_batch_down_to_one_when_the_length_doubles() -> None:
    settings = grid([2**i for i in range(10, 18)], [64, 128], heads=16)
    assert len(settings) == 8 * 2 * 2 * 2
    assert {s.batch * s.heads * s.length for s in settings if s.length <= 2**16} == {2**20}
    assert {s.batch for s in settings if s.length == 2**17} == {1}
    assert {s.batch for s in grid([64], [64], batch=5)} == {5}


def test_flops_are_half_if_causal_and_2_5_times_as_many_backward() -> None:
    full = Setting(length=1000, batch=2, heads=3, head_dim=64, causal=False)
    assert flops(full, "forward") == 4 * 2 * 3 * 1000 * 1000 * 64
    assert flops(replace(full, causal=True), "forward") == flops(full, "forward") / 2
    assert flops(full, "backward") == 2.5 * flops(full, "forward")
    assert flops(full, "both") == 3.5 * flops(full, "forward")


# ---- block-sparse inputs ------------------------------------------------------------------------


def empty_blocks(inputs: Inputs) -> float:
    """The share of visible 64 × 64 blocks in which all entmax weights are 0."""
    w = attnzoo.attention_weights(inputs.q, inputs.k, inputs.v, "entmax", is_causal=inputs.causal)
    nonzero = F.max_pool2d(w[0], 64) > 0  # [H, blocks of queries, blocks of keys]
    visible = torch.ones_like(nonzero).tril() if inputs.causal else torch.ones_like(nonzero)
    return ((visible & ~nonzero).sum() / visible.sum()).item()


@pytest.mark.parametrize("causal", [True, False])
def test_block_sparse_inputs_have_mostly_empty_blocks(causal: bool) -> None:
    setting = Setting(1536 if causal else 1024, heads=2, causal=causal, block_sparse=True)
    assert empty_blocks(Inputs.make(setting)) >= 0.8
    assert empty_blocks(Inputs.make(replace(setting, block_sparse=False))) < 0.06


def test_block_sparse_inputs_with_a_small_head_dim_raise() -> None:
    with pytest.raises(ValueError, match="must be at least 16 for block-sparse inputs, got 8"):
        Inputs.make(Setting(length=64, head_dim=8, block_sparse=True))


# ---- groups -------------------------------------------------------------------------------------

TINY = Setting(32, heads=2, head_dim=16)
FAST = {"repeats": 3, "min_seconds": 0.0}


def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("no kernel\nand more")


def baseline(name: str, attend: Any) -> Implementation:
    return Implementation(name, SOFTMAX, Inputs.make(TINY), lambda: attend, "baseline")


def test_error_of_one_implementation_is_a_note_in_its_row() -> None:
    rows: list[Any] = []
    variants = [Implementation.of(SOFTMAX, Inputs.make(TINY), name) for name in (None, "linear")]
    variants[1].name = "not supported"
    Bench("x", WallClock(), **FAST).measure_part(
        [baseline("broken", broken), *variants], TINY, rows
    )
    assert [row.seconds is None for row in rows] == [True, False, True]
    assert rows[0].note == "RuntimeError: no kernel"
    assert "backend 'linear' cannot run 'softmax'" in rows[2].note


def report() -> Report:
    return Report({})


def groups(
    *implementations: Implementation,
) -> list[tuple[Setting, Callable[[], list[Implementation]]]]:
    return [(replace(TINY, length=n), lambda: list(implementations)) for n in (32, 64)]


def test_a_group_in_parts_writes_each_variant_and_compares_it_with_softmax(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    written, others = (
        Report({}, journal=str(file)),
        [Case.parse(x, 64) for x in ("sigmoid", "relu")],
    )
    torch_softmax = partial(F.scaled_dot_product_attention, is_causal=True)
    variants = [Implementation.of(case, Inputs.make(TINY), None) for case in (SOFTMAX, *others)]
    group = [baseline("sdpa", torch_softmax), *variants]
    Bench("x", WallClock(), **FAST, in_parts=True).measure([(TINY, lambda: group)], written)
    lines = [next(iter(line.values())) for line in journal.read(file)[1:]]
    names = [line if isinstance(line, str) else line["name"] for line in lines]
    assert names == ["softmax", "sdpa", "softmax", "sigmoid", "sigmoid", "relu", "relu"]
    assert all(row.seconds and row.check and row.check.ok for row in written.rows[1:])
    assert [row.ratios.keys() for row in written.rows] == [
        {"softmax"}, {"sdpa"}, {"sdpa", "softmax"}, {"sdpa", "softmax"},
    ]  # fmt: skip


def test_references_are_made_once_for_a_case_and_not_for_calls_that_no_backend_supports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases, make = [], Reference.of

    def counted(case: Case, *args: Any) -> Reference:
        cases.append(case.spec)
        return make(case, *args)

    monkeypatch.setattr(Reference, "of", counted)
    inputs = Inputs.make(TINY, gradients=True)
    again = partial(F.scaled_dot_product_attention, is_causal=True)
    group = [
        Implementation("sdpa", SOFTMAX, inputs, lambda: again, "baseline"),
        Implementation.of(SOFTMAX, inputs, None),
        Implementation.of(Case.parse("relu", 64), inputs, "linear"),
    ]
    Bench("x", WallClock(), ("forward", "backward"), **FAST).measure(
        [(TINY, lambda: group)], report()
    )
    assert cases == ["softmax"]


def test_group_whose_inputs_do_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> list[Implementation]:
        raise torch.OutOfMemoryError("too much")

    empty_report = report()
    Bench("x", WallClock()).measure([(TINY, fail)], empty_report)
    assert empty_report.left_out[0].endswith("N=32: OutOfMemoryError: too much")
    assert empty_report.finish() == 2
    assert "nothing could be measured" in capsys.readouterr().err


def test_lost_device_ends_the_run_and_keeps_earlier_rows() -> None:
    class Dying(WallClock):
        alive = True

        def synchronize(self) -> None:
            if not self.alive:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    timer, partial_report = Dying(), report()

    def fatal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        timer.alive = False
        raise RuntimeError("CUDA error: an illegal memory access")

    softmax = Implementation.of(SOFTMAX, Inputs.make(TINY), None)
    Bench("x", timer, **FAST).measure(groups(softmax, baseline("fatal", fatal)), partial_report)
    assert partial_report.rows[0].check is not None
    assert "an illegal memory access" in partial_report.rows[1].note
    broken_group, later_group = partial_report.left_out
    assert broken_group.startswith("the rest of x: ")
    assert "N=32: the device failed at fatal: RuntimeError: CUDA error" in broken_group
    assert later_group.endswith("N=64")
    assert partial_report.finish() == DEVICE_LOST


def test_usage_error_without_a_gpu_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["attention", "--device", "cuda"]) == 2
    output = capsys.readouterr()
    assert "--device cuda requires a CUDA device, but torch sees none" in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""
