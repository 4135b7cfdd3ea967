"""The command python -m benchmarks profile: loops are counted and held to limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import anchors, criteria, rates, sass
from benchmarks.kernels.activations import kinds
from benchmarks.kernels.counts import LoopCount, Profile, count_loops, names_of
from benchmarks.kernels.profile import CELLS, comparison, cubin_name, heading
from benchmarks.kernels.specializations import (
    ARCHITECTURES,
    BARE,
    EXTRAS,
    PADDED,
    Specialization,
    of_groups,
)
from helpers.commands import benchmarks, error_of


def loop_text(start: int, *opcodes: tuple[str, int]) -> str:
    """A loop with these opcodes, each repeated."""
    names = [name for name, n in opcodes for _ in range(n)]
    lines = [f"        /*{start + 16 * i:04x}*/    {name} R1, R2 ;" for i, name in enumerate(names)]
    end = start + 16 * len(names)
    return "\n".join([*lines, f"        /*{end:04x}*/   @P0 BRA 0x{start:x} ;", ""])


def test_counts_are_per_score_element_and_loops_are_named_by_their_work() -> None:
    # One warpgroup and a tile of 64 x 16: 8 elements per thread, 2 products with D = 64.
    product = ("HGMMA.64x16x16.F32.BF16", 4), ("HGMMA.64x64x16.F32.BF16", 1)
    work = (("MUFU.EX2", 16), ("FFMA", 16), ("F2FP.BF16.F32.PACK_AB", 4), ("FADD2", 4), ("IMAD", 8))
    text = (
        loop_text(0, *product, *work)
        + loop_text(0x1000, *product, *work, ("ISETP.GT.AND", 8), ("FSEL", 8))
        + "        /*2000*/    EXIT ;\n"
    )
    code = sass.instructions(text)
    full, edge = count_loops(code, "forward", "sm_90", (64, 16), 4, 64)
    assert (full.name, edge.name) == ("full", "edge")
    assert full.instructions == 54
    assert full.total == 54 / 8
    assert (full.classes["mufu"], full.classes["fp32"], full.classes["mask"]) == (2.0, 2.5, 0.0)
    assert (edge.classes["mask"], edge.share("ISETP", "FSEL")) == (2.0, 2.0)
    assert (full.tensor_factor, full.element_factor) == (1.0, 1.0)
    assert full.prediction is not None
    cycles = full.prediction.cycles
    assert cycles["tensor"] == 2 * 2 * 64 / 4096
    assert cycles["fp32"] == 3 / 128  # a packed instruction computes two results
    assert cycles["alu"] == 0
    assert full.prediction.serial == pytest.approx(2 * 2 * 64 / 4096 + 2 / 16)
    assert full.prediction.bound == "mufu"
    # Half of the tile: everything is done twice.
    twice = count_loops(code, "forward", "sm_90", (32, 16), 4, 64)[0]
    assert (twice.tensor_factor, twice.element_factor) == (2.0, 2.0)


def test_linear_kernels_are_counted_per_64_tokens_whatever_the_length_of_a_chunk() -> None:
    """An iteration takes a chunk of tokens. That of the kernels compared with takes 64."""
    text = loop_text(0, ("HGMMA.64x64x16.F32.BF16", 4), ("FFMA", 219)) + "  /*2000*/ EXIT ;\n"
    for chunk, wanted in ((128, 112.0), (64, 224.0)):
        (counted,) = count_loops(sass.instructions(text), "linear", "sm_90", (chunk, 64), 8, 128)
        assert (counted.instructions, counted.per_64_tokens) == (224, wanted)
    assert loop().per_64_tokens is None
    row = profile("linear states", replace(counted, per_64_tokens=112.0), activation="", extra="")
    assert not any("per_64_tokens" in text for text in criteria.violations([row]))


@pytest.mark.parametrize(
    ("passes", "masks", "names"),
    [
        (["", ""], [0.1, 3.0], ["full", "edge"]),
        (["", "", ""], [2.2, 0.1, 3.0], ["edge", "full", "edge"]),
        ([""], [9.0], ["all"]),
        (
            ["maximum", "maximum", "step"],
            [0.1, 2.0, 4.0],
            ["maximum full", "maximum edge", "step all"],
        ),
    ],
)
def test_names_of_loops(passes: list[str], masks: list[float], names: list[str]) -> None:
    assert names_of(passes, masks) == names


@pytest.mark.parametrize(
    ("total", "mufu", "issued", "needed", "tflops"),
    [  # counts and speeds of kernels that were counted by hand
        (10.61, 1.03, 512, 512, 595),
        (12.31, 2.0, 512, 512, 495),
        (11.41, 1.0, 768, 768, 671),
        (55.69, 2.06, 1536, 1024, 305),
    ],
)
def test_predicted_speed(
    total: float, mufu: float, issued: float, needed: float, tflops: float
) -> None:
    speed = rates.predict("sm_90", total, mufu, 4.0, 3.0, issued, needed)
    assert speed.tflops == pytest.approx(tflops, abs=1)
    assert speed.tflops_overlap > speed.tflops


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rates_give_the_published_tflops(arch: str) -> None:
    known = {"sm_80": 312, "sm_90": 989, "sm_100": 2250}
    row = rates.RATES[arch]
    assert row.processors * row.clock * row.tensor / 1e12 == pytest.approx(known[arch], rel=2e-3)


def test_blocks_per_processor() -> None:
    def blocks(*kernel: int) -> int:
        return rates.blocks_per_processor("sm_90", *kernel)

    assert blocks(8, 128, 49152) == 2  # registers
    assert blocks(4, 168, 49152) == 3
    assert blocks(4, 32, 100_000) == 2  # shared memory
    assert blocks(1, 16, 0) == 32
    assert blocks(16, 16, 0) == 4  # threads
    assert rates.blocks_per_processor("sm_100", 4, 32, 1024, 256) == 2  # tensor memory


# ---- criteria ---------------------------------------------------------------------------------


def loop(name: str = "full", **changed: Any) -> LoopCount:
    """A loop that satisfies all limits."""
    mask = 2.4 if name == "edge" else 0.05
    classes = dict.fromkeys(sass.KINDS, 0.0) | {"fp32": 3.1, "mufu": 1.0, "mask": mask}
    opcodes = {"ISETP": mask / 2, "FSEL": mask / 2}
    speed = rates.predict("sm_90", 6.0, 1.0, 3.1, 0.1, 256, 256)
    valid = LoopCount(name, 100, 6.0, classes, opcodes, 1, 1.0, 1.0, 3, 0, speed)
    return replace(valid, **changed)


def profile(kernel: str = "forward", *loops: LoopCount, **changed: Any) -> Profile:
    spec = Specialization(kernel, "sm_90", "bf16", 128, "exp", "no gain")
    for name in set(changed) & set(spec._fields):
        spec = spec._replace(**{name: changed.pop(name)})
    valid = Profile(
        spec, (128, 128), 8, 2, 200, 0, 1024, 1, "HGMMA", "TMA", loops or (loop(), loop("edge"))
    )
    return replace(valid, **changed)


def test_kernels_within_all_limits_violate_nothing() -> None:
    assert criteria.violations([profile(name) for name in ("forward", "dq", "dkdv")]) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (profile("forward", loop(total=8.31)), "loop full: total 8.31 per element, at most 8.3"),
        (profile("forward", loop("all", total=9.0)), "loop all: total 9.00"),
        (profile("dq", loop(tensor_factor=1.5)), "tensor work is done 1.50 times, must be 1.00"),
        (profile("dkdv", loop(element_factor=2.0)), "element-wise work is done 2.00 times"),
        (profile("dkdv", stack_bytes=80), "80 bytes of stack"),
        (profile("dkdv", tensor_core="HMMA"), "HMMA instead of HGMMA"),
        (profile("dkdv", tensor_core=None, arch="sm_100"), "no tensor cores instead of UTCHMMA"),
        (replace(profile(), loops=()), "no tile loop found"),
        (profile("forward", loop(classes={**loop().classes, "mask": 0.2})), "mask 0.20"),
        (
            profile("forward", loop(opcodes={"FSEL": 1.0}), activation="sigmoid"),
            "FSETP+FSEL 1.00 per element, at most 0",
        ),
        (
            profile("forward", loop(), loop("edge", opcodes={"ISETP": 1.9})),
            "loop edge: 1.88 ISETP more than full, at most 1.2",
        ),
        (
            profile("threshold", loop("maximum full"), loop("step full", total=15.2),
                    activation="entmax15"),
            "loop step full: total 15.20",
        ),
        (
            profile("threshold", loop("step full"), activation="entmax15"),
            "no loop maximum over full blocks",
        ),
        (
            profile("linear states", loop(per_64_tokens=213.0), activation="", extra=""),
            "per_64_tokens 213.00 instructions of a warp, at most 212.4",
        ),
        (
            profile("linear output", loop(narrow_copies=2), activation="", extra="", head_dim=64),
            "narrow_copies 2.00, at most 0",
        ),
    ],
)  # fmt: skip
def test_each_violation_is_named(row: Profile, words: str) -> None:
    violations = criteria.violations([row])
    assert any(words in text for text in violations), violations
    assert all(text.startswith(f"{row.spec.kernel}, {row.spec.config}, sm_") for text in violations)


def test_limits_of_counts_hold_for_one_version_of_triton_and_calls_without_gain() -> None:
    slow = profile("forward", loop(total=99.0), loop("edge"))
    assert len(criteria.violations([slow])) == 1
    assert criteria.violations([slow], counted=False) == []
    assert criteria.violations([replace(slow, spec=slow.spec._replace(extra=""))]) == []
    spilled = profile(stack_bytes=8)
    assert len(criteria.violations([spilled], counted=False)) == 1


def test_forward_and_backward_together() -> None:
    slow = rates.predict("sm_90", 10.0, 1.0, 3.0, 1.0, 2048, 512)
    rows = [profile(name, loop(prediction=slow), loop("edge")) for name in criteria.STEP]
    assert criteria.violations(rows) == [
        "forward, dq and dkdv together, exp D=128 no gain, sm_90: 1.73 cycles per element "
        "without overlap, at most 0.83"
    ]


def test_masked_calls_and_wide_heads_are_compared_with_plain_ones() -> None:
    slow = rates.predict("sm_90", 30.0, 1.0, 3.0, 1.0, 256, 256)
    plain = profile("dq", extra="")
    window = profile("dq", loop(prediction=slow), extra="window")
    wide = profile("dq", loop(prediction=slow), extra="", head_dim=256)
    violations = criteria.violations([plain, window, wide])
    assert [text.split(":")[0] for text in violations] == [
        "dq, exp D=128 bf16 window, sm_90", "dq, exp D=256 bf16, sm_90",
    ]  # fmt: skip
    assert "predicted at 0.42 of the speed of exp D=128 bf16, at least 0.5" in violations[0]


def test_every_limit_belongs_to_a_profiled_kernel() -> None:
    known = set(kinds().values())
    cells = {
        (c.kernel, c.activation, c.head_dim, c.arch)
        for c in of_groups(CELLS, list(ARCHITECTURES), [64, 128, 256])
    }
    for limit in criteria.LIMITS:
        if not limit.kernel.startswith("linear"):
            assert limit.activation in known
            assert (limit.kernel, limit.activation, limit.head_dim, limit.arch) in cells


def test_cells_are_few_and_hold_every_mask_of_a_softmax() -> None:
    cells = list(of_groups(CELLS, ["sm_90"], [64, 128, 256]))
    extras: dict[tuple, set[str]] = {}
    for spec in cells:
        extras.setdefault((spec.kernel, spec.activation, spec.head_dim), set()).add(spec.extra)
    passes = ("forward", "dq", "dkdv")
    for (kernel, activation, _), masks in extras.items():
        softmax = activation == "exp" and kernel in passes
        assert masks == {"", "full no gain"} | ({*BARE, *EXTRAS, *PADDED} if softmax else set())
    assert {kernel for kernel, *_ in extras} == {*passes, "dbias", "stats", "threshold"}
    assert len(cells) <= 180


# ---- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (("forward", "sm_90", "bf16", 128, "exp", "no gain"), "forward-exp-D128-causal-bf16-sm_90"),
        (("dq", "sm_80", "bf16", 64, "exp", ""), "dq-exp-D64-causal-gain-bf16-sm_80"),
        (("dq", "sm_80", "bf16", 64, "exp", "full"), "dq-exp-D64-full-gain-bf16-sm_80"),
        (("dq", "sm_80", "bf16", 64, "exp", "full no gain"), "dq-exp-D64-full-bf16-sm_80"),
        (("dkdv", "sm_100", "bf16", 64, "exp", "window"), "dkdv-exp-D64-causal-window-bf16-sm_100"),
        (("linear dv", "sm_80", "bf16", 64), "linear_dv-D64-causal-bf16-sm_80"),
    ],
)
def test_names_of_cubins(spec: tuple, name: str) -> None:
    assert cubin_name(Specialization(*spec)) == f"{name}.cubin"


def test_cubins_have_different_names() -> None:
    cells = list(of_groups(CELLS, list(ARCHITECTURES), [64, 128, 256]))
    assert len({cubin_name(spec) for spec in cells}) == len(cells)


def test_heading_names_the_resources_of_a_kernel() -> None:
    shown = heading(profile())
    for word in ("128 x 128", "200 registers", "0 B stack", "HGMMA", "TMA", "blocks per SM: 1"):
        assert word in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "sm_70"], "--arch must list some of sm_80, sm_90, sm_100, got 'sm_70'"),
        (["--kernels", "decode"], "--kernels must list some of forward"),
        (["--jobs", "0"], "--jobs must be an int >= 1, got 0"),
        (["--json", "."], "--json must be a file, got the folder ."),
        (["--cubins", "/dev/null/x"], "--cubins /dev/null/x: "),
    ],
)
def test_invalid_options_exit_with_status_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "profile", *options)


@pytest.mark.slow
def test_profile_of_compiled_kernels(tmp_path: Path) -> None:
    """All kernels of one family: counts, files and the check."""
    file, folder = tmp_path / "profile.json", tmp_path / "cubins"
    done = benchmarks(
        "profile", "--arch", "sm_90", "--kernels", "stats", "--quick", "--jobs", "1",
        "--json", str(file), "--cubins", str(folder), "--check",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all criteria hold" in done.stdout
    assert "predicted, not measured" in done.stdout
    document = json.loads(file.read_text())
    assert document["rates"]["sm_90"]["tensor"] == 4096
    for row in document["rows"]:
        assert (row["kernel"], row["arch"], row["tensor_core"]) == ("stats", "sm_90", "HGMMA")
        assert row["stack_bytes"] == 0
        full, *edges = row["loops"]
        assert full["name"] == "full"
        assert full["tensor_factor"] == 1.0
        # One exponential. The softcap's tanh is an exponential and a division.
        mufu = 3.0 if row["extra"] == "softcap" else 1.0
        assert full["classes"]["mufu"] == pytest.approx(mufu, abs=0.05)
        assert all(edge["classes"]["mask"] > full["classes"]["mask"] for edge in edges)
        assert 0 < full["predicted"]["tflops"] < full["predicted"]["tflops_overlap"] < 989.5
    names = {path.name for path in folder.iterdir()}
    settings = ("D64-causal-gain", "D128-causal-gain", "D128-causal-softcap")
    assert names == {f"stats-exp-{name}-bf16-sm_90.cubin" for name in settings}
    assert all(path.read_bytes()[:4] == b"\x7fELF" for path in folder.iterdir())


# ---- kernels of others ------------------------------------------------------------------------


def test_tutorial_without_its_kernels_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text, message in (
        ("other.py", "x = 1\n", "must define _attn_fwd, as Triton's tutorial 06 does"),
        ("wrong.py", "1 / 0\n", "ZeroDivisionError: division by zero"),
    ):
        file = tmp_path / name
        file.write_text(text)
        assert f"--tutorial {file}" in (
            error := error_of(capsys, "profile", "--tutorial", str(file))
        )
        assert message in error
    missing = tmp_path / "missing.py"
    assert "FileNotFoundError" in error_of(capsys, "profile", "--tutorial", str(missing))


def test_tasks_of_anchors() -> None:
    assert list(anchors.tasks(None, False, ["sm_90"], {"forward"})) == []
    assert list(anchors.tasks("file.py", True, ["sm_90"], {"threshold"})) == []
    assert not any(t.backward for t in anchors.tasks("", True, ["sm_90"], {"forward"}))
    tasks = list(anchors.tasks("file.py", True, ["sm_90"], {"forward", "dq"}))
    assert [(t.name, t.backward, t.head_dim) for t in tasks] == [
        (name, backward, dim)
        for name in ("tutorial", "flex") for dim in (64, 128) for backward in (False, True)
    ]  # fmt: skip


def test_comparison_names_both_counts_and_the_ratio() -> None:
    other = anchors.Anchor("flex", "forward", "sm_90", 128, 255, 72, loop(total=12.0))
    header, text = comparison([profile()], [other])
    assert "ratio" in header
    assert text.startswith("forward D=128 sm_90: 6.00, ")
    assert "flex: 12.00, " in text
    assert text.endswith("(72 B stack)  0.50")
    assert list(comparison([profile("dq")], [other])) == [header]
    assert list(comparison([profile()], [])) == []


@pytest.mark.slow
def test_flex_attention_is_compiled_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    done = benchmarks(
        "profile", "--arch", "sm_90", "--kernels", "dq", "--quick", "--jobs", "1", "--flex",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flex:" in done.stdout
    others = json.loads(file.read_text())["others"]
    assert {(x["kernel"], x["head_dim"]) for x in others} == {
        (kernel, dim) for kernel in ("dkdv", "dq") for dim in (64, 128)
    }
    for other in others:
        assert other["loop"]["tensor_factor"] == 1.0
        assert 7 < other["loop"]["total"] < 20
