"""What measures a GPU, on a CPU: the timer with a fake device, the gate and groups when small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Case, Inputs, Setting
from benchmarks.harness.correctness import Pairs, by_call, by_definition, check
from benchmarks.harness.grid import Budget, flops, grid, label
from benchmarks.harness.timing import LEAST_ROUNDS, CudaEvents, WallClock
from benchmarks.suites import competitors
from benchmarks.suites.gpu_cells import Bench, matrix_peak, targets

SOFTMAX = Case("softmax", "softmax")
SMALL = Setting(length=150, direction="both", batch=3, heads=3, head_dim=16, causal=False)


# ---- the timer ----------------------------------------------------------------------------------


class FakeCuda:
    """A device whose time stands still but for the work it is given."""

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
                assert fake.waits, "read before the device was waited for"
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
    return cuda, CudaEvents(cuda, lead=partial(cuda.work, ".", 1.0)), calls


def test_events_time_the_call_and_not_what_leads_it() -> None:
    cuda, timer, calls = fake_timer(a=0.002, b=0.001)
    seconds = timer.rounds(calls, repeats=4, min_seconds=0.0)
    assert seconds == {
        "a": pytest.approx([0.002] * 4, abs=1e-9),
        "b": pytest.approx([0.001] * 4, abs=1e-9),
    }
    # A warm-up, a trial round, four rounds; in turn; and two waits in all.
    assert "".join(cuda.done) == "ab" + ".a.b" * 5
    assert cuda.waits == 2


@pytest.mark.parametrize(
    ("repeats", "least", "most", "rounds"),
    [(10, 0.0, 99.0, 10), (2, 0.05, 99.0, 17), (10, 0.0, 0.02, 6), (10, 0.0, 0.001, LEAST_ROUNDS)],
)
def test_short_calls_have_more_rounds_and_long_ones_fewer(
    repeats: int, least: float, most: float, rounds: int
) -> None:
    _, timer, calls = fake_timer(a=0.002, b=0.001)
    seconds = timer.rounds(calls, repeats, least, most)
    assert [len(s) for s in seconds.values()] == [rounds, rounds]


def test_peak_memory_is_beyond_what_was_allocated() -> None:
    cuda, timer, _ = fake_timer()

    def call() -> None:
        cuda.peak = 170

    assert timer.peak_bytes(call) == 70


# ---- the grid -----------------------------------------------------------------------------------


def test_the_number_of_tokens_is_constant() -> None:
    settings = grid([2**i for i in range(10, 18)], [64, 128], heads=16)
    assert len(settings) == 8 * 2 * 2 * 2
    assert {s.batch * s.heads * s.length for s in settings if s.length <= 2**16} == {2**20}
    assert {s.batch for s in settings if s.length == 2**17} == {1}
    assert len({label(s) for s in settings}) == len(settings)
    assert {s.batch for s in grid([64], [64], batch=5)} == {5}


def test_the_usual_count_of_flops() -> None:
    full = Setting(length=1000, batch=2, heads=3, head_dim=64, causal=False)
    assert flops(full, "forward") == 4 * 2 * 3 * 1000 * 1000 * 64
    assert flops(replace(full, causal=True), "forward") == flops(full, "forward") / 2
    assert flops(full, "backward") == 2.5 * flops(full, "forward")


def test_a_budget_ends() -> None:
    now = [5.0]
    budget = Budget(2.0, clock=lambda: now[0])
    assert (budget.left, budget.spent) == (2.0, False)
    now[0] = 7.5
    assert (budget.left, budget.spent) == (0.0, True)
    assert not Budget().spent


# ---- correctness --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["ssmax", "adaptive_temperature", "entmax", "sigmoid"])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_some_heads_are_those_of_the_whole_call(variant: str, causal: bool) -> None:
    setting = replace(SMALL, length=40, dtype="float64", causal=causal)
    case = Case(variant, variant)
    inputs = Inputs.make(case, setting)
    runs, pairs = [range(2), range(20, 21), range(37, 40)], Pairs([0, 2], [1])
    whole = by_call(case, inputs, runs, "eager", pairs)
    parts = by_definition(case, inputs.part(pairs.batches, pairs.heads), runs, torch.float64)
    assert whole.keys() == parts.keys() == {"out", "dq", "dk", "dv"}
    for name, part in parts.items():
        torch.testing.assert_close(part, whole[name], msg=name)


@pytest.mark.parametrize("variant", ["ssmax", "entmax"])
def test_the_reference_stays_on_the_device(variant: str) -> None:
    """The device that is no CPU and everywhere there: it has shapes and no numbers."""
    x = [torch.empty(2, 3, 9, 4, device="meta", dtype=torch.bfloat16) for _ in range(4)]
    for leaf in x[:3]:
        leaf.requires_grad_()
    part = Inputs(*x, params={}, causal=False).part([0, 1], [2])
    found = by_definition(Case(variant, variant), part, [range(2), range(5, 9)], torch.float64)
    assert {name: y.device.type for name, y in found.items()} == dict.fromkeys(found, "meta")
    assert found["out"].shape == (2, 1, 6, 4)


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`attnzoo.attention` whose results are changed unless they come from the definition."""
    true = attnzoo.attention

    def attention(q: Tensor, *args: Any, **keywords: Any) -> Tensor:
        out = true(q, *args, **keywords)
        return out if keywords.get("backend") == "eager" else change(out, q)

    monkeypatch.setattr(attnzoo, "attention", attention)


def wrong_row(place: tuple[int, int, int]) -> Callable[[Tensor, Tensor], Tensor]:
    def change(out: Tensor, q: Tensor) -> Tensor:
        factor = torch.ones_like(out)
        factor[place] = 1.1
        return out * factor

    return change


def wrong_gradient(out: Tensor, q: Tensor) -> Tensor:
    """The same values; a gradient of q that is off."""
    extra = 1e-2 * q
    return out + extra - extra.detach()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_lets_right_results_pass(causal: bool, dtype: str) -> None:
    setting = replace(SMALL, causal=causal, dtype=dtype)
    for variant in ("softmax", "entmax"):
        case = Case(variant, variant)
        found = check(case, Inputs.make(case, setting), "tiled", pairs=Pairs.corners(3, 3))
        assert found.ok, found.worst
        assert (found.rows, found.pairs) == (128, 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (wrong_row((0, 0, 0)), "out"),
        (wrong_row((2, 2, 149)), "out"),
        (wrong_gradient, "dq"),
        # Between the heads that are compared, so that it must be finite at least.
        (lambda out, q: out.index_fill(1, torch.tensor(1), float("nan")), "out"),
    ],
    ids=["first row", "last row", "gradient", "NaN in another head"],
)
def test_the_gate_stops_wrong_results(
    monkeypatch: pytest.MonkeyPatch, change: Any, what: str, causal: bool
) -> None:
    inputs = Inputs.make(SOFTMAX, replace(SMALL, causal=causal))
    tampered(monkeypatch, change)
    found = check(SOFTMAX, inputs, "tiled", pairs=Pairs.corners(3, 3))
    assert not found.ok
    assert not found.deviations[what].ok


def test_positions_are_refused_without_causality() -> None:
    case = Case("cosformer", "cosformer", {"max_length": 200})
    with pytest.raises(ValueError, match="cosformer needs positions"):
        check(case, Inputs.make(case, SMALL), "linear")


# ---- groups -------------------------------------------------------------------------------------


def plain_sdpa(setting: Setting) -> Any:
    return partial(F.scaled_dot_product_attention, is_causal=setting.causal)


def broken(kind: str) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError(f"no kernel: {kind}\nand more")

    return attend


def fake_yardsticks(setting: Setting, names: tuple[str, ...]) -> competitors.Factories:
    return {
        "sdpa flash": partial(plain_sdpa, setting),
        "sdpa cudnn": partial(broken, "when called"),
        "flex": lambda: broken("never")(*3 * [torch.empty(0)]),
    }


def fake_rivals(case: Case, setting: Setting, names: tuple[str, ...]) -> competitors.Factories:
    attend = partial(attnzoo.attention, variant="entmax", is_causal=setting.causal)
    return {f"copy {case.spec}": lambda: attend} if case.variant == "entmax" else {}


def bench(*specs: str, **options: Any) -> Bench:
    fast = dict(backend="tiled", repeats=3, min_seconds=0.0, peak=1e9, timer=WallClock())
    known = dict(yardsticks=fake_yardsticks, rivals=fake_rivals)
    return Bench([Case.parse(spec, 64) for spec in specs], **{**fast, **known, **options})


TINY = dict(heads=2, batch=1, dtype="float32")


def test_a_group_from_end_to_end() -> None:
    made = bench("softmax", "adaptive_temperature", "entmax")
    (rows,) = made.rows(grid([64], [16], ["full"], ["iid"], **TINY))
    assert made.left_out == []
    found = {(row.name, row.direction): row for row in rows}
    for direction in ("forward", "backward"):
        assert found["sdpa cudnn", direction].note == "RuntimeError: no kernel: when called"
        assert found["flex", direction].note == "RuntimeError: no kernel: never"
        for name in ("sdpa flash", "softmax", "adaptive_temperature", "entmax", "copy entmax"):
            row = found[name, direction]
            assert row.seconds is not None
            assert row.seconds.count == 3
            assert row.tflops is not None
            assert row.peak_share == pytest.approx(row.tflops * 1e3)
        entmax = found["entmax", direction]
        assert entmax.check is not None
        assert entmax.check.ok
        names = {"out"} if direction == "forward" else {"out", "dq", "dk", "dv"}
        assert entmax.check.deviations.keys() == names
        assert entmax.block_sparsity == 0.0
        assert entmax.ratios.keys() == {"sdpa flash", "softmax", "copy entmax"}
        error = found["copy entmax", direction].error
        assert error is not None
        assert error < 1e-5
    said = " ".join(targets(rows))
    assert "adaptive_temperature forward:" in said
    assert "0 % of the 64 × 64 blocks are empty" in said
    json.dumps([row.record() for row in rows], allow_nan=False)


def test_wrong_and_refused_variants_are_rows_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda out, q: out * 1.1)
    (rows,) = bench("softmax", rivals=lambda *_: {}).rows(grid([64], [16], **IID))
    assert [r.note for r in rows if r.name == "softmax"] == ["WRONG, not timed"] * 2
    monkeypatch.undo()
    (rows,) = bench("sparsemax", "ssmax", backend="sdpa").rows(grid([64], [16], **IID))
    refusal = next(row for row in rows if row.name == "sparsemax")
    assert "backend 'sdpa' cannot run 'sparsemax'" in refusal.note
    assert refusal.seconds is None
    # Nobody asked for softmax, to which all are compared.
    assert {row.kind for row in rows if row.name == "softmax"} == {"yardstick"}


IID: dict[str, Any] = dict(masks=["causal"], inputs=["iid"], **TINY)


def test_clustered_inputs_are_for_thresholds() -> None:
    settings = grid([64], [16], ["causal"], ["clustered"], **TINY)
    made = bench("softmax", "entmax", time=False)
    (rows,) = made.rows(settings)
    assert {(row.name, row.inputs) for row in rows} == {("entmax", "clustered")}
    assert list(bench("softmax", time=False).rows(settings)) == []


def test_what_the_budget_leaves_out_is_named() -> None:
    now = [0.0]

    class Slow(WallClock):
        def rounds(self, *args: Any) -> dict[str, list[float]]:
            now[0] += 10.0
            return super().rounds(*args)

    made = bench("softmax", budget=Budget(5.0, lambda: now[0]), timer=Slow())
    groups = list(made.rows(grid([32, 64], [16], **IID)))
    assert len(groups) == 1
    assert made.left_out == ["iid D=16 causal N=64"]


def test_a_budget_ends_within_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 99.0])
    made = bench("softmax", "ssmax", budget=Budget(5.0, lambda: next(now)), time=False)
    (rows,) = made.rows(grid([32], [16], **IID))
    assert {row.name for row in rows} == {"softmax"}
    assert made.left_out == ["ssmax iid D=16 causal N=32"]


def test_a_lost_device_ends_the_run_and_keeps_what_there_was() -> None:
    class Dying(WallClock):
        alive = True

        def settle(self) -> None:
            if not self.alive:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    timer = Dying()

    def fatal(*_: Any) -> competitors.Factories:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.alive = False
            return q

        return {"copy": lambda: attend}

    made = bench("softmax", "ssmax", rivals=fatal, timer=timer)
    (rows,) = made.rows(grid([32, 64], [16], **IID))
    assert next(row for row in rows if row.name == "softmax").check is not None
    assert made.left_out[0].startswith("what is missing of iid D=16 causal N=32: the device failed")
    assert "at copy: RuntimeError: CUDA error: an illegal" in made.left_out[0]
    assert made.left_out[1:] == ["iid D=16 causal N=64"]


def test_the_peak_is_a_rate() -> None:
    class Fixed(WallClock):
        def rounds(self, *args: Any) -> dict[str, list[float]]:
            return {"product": [0.5, 0.25, 0.25]}

    assert matrix_peak(Fixed(), "float32", "cpu", size=8) == 2 * 8**3 / 0.25
