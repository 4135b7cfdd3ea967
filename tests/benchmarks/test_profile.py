"""The command python -m benchmarks profile: machine code is read, counted and held to limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import criteria, rates, sass
from benchmarks.kernels.activations import kinds
from benchmarks.kernels.counts import LoopCount, Profile, count_loops, names_of
from benchmarks.kernels.profile import CELLS, cubin_name, heading
from benchmarks.kernels.specializations import ARCHITECTURES, Specialization, of_groups
from helpers.commands import benchmarks, error_of

# A prologue, a loop over full blocks with a wait for a barrier outside its address range, a loop
# over edges, and code that is never reached.
SM_90 = """
\tFunction : kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/               @P0 BRA 0x90 ;                        /* 0x0000000400640947 */
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R2 ;
        /*0030*/              @!P0 BRA 0x110 ;                       /* 0x0000000400640947 */
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*0050*/                   FFMA R4, R4, R2.reuse, -R3 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   F2FP.BF16.F32.PACK_AB R5, R6, R4 ;
        /*0080*/               @P2 BRA 0x20 ;                        /* 0xfffffe8000249947 */
        /*0090*/                   ISETP.GT.AND P3, PT, R2, R7, PT ;
        /*00a0*/                   FSEL R4, R4, -INF , P3 ;
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24 ;
        /*00c0*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00d0*/                   BRA.U UP0, 0x90 ;
        /*00e0*/                   STG.E.128 desc[UR8][R2.64], R4 ;
        /*00f0*/                   EXIT ;
        /*0110*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R2 ;
        /*0120*/              @!P0 BRA 0x110 ;
        /*0130*/                   BRA 0x40 ;
        /*0140*/                   BRA 0x140;
        /*0150*/                   NOP;
"""
# A loop inside another. @P1 EXIT is executed in the loop.
SM_80 = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;            /* 0x00000a0000017a02 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R4], [R6.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R68, R80.reuse, R56, RZ ;
        /*0030*/                   HMMA.1688.F32.TF32 R68, R80, R56, R68 ;
        /*0040*/              @!P1 LDGSTS.E.BYPASS.LTC128B [R4], [R6.64] ;
        /*0050*/              @!P1 EXIT ;
        /*0060*/                   FSETP.GT.AND P0, PT, R2, R3, PT ;
        /*0070*/                   IMAD.WIDE R2, R2, R3, c[0x0][0x160] ;
        /*0080*/              @!P2 BRA 0x20 ;
        /*0090*/                   LEA R2, R3, R2, 0x1 ;
        /*00a0*/               @P3 BRA 0x10 ;
        /*00b0*/                   EXIT ;
"""


def test_loops_of_hopper_code() -> None:
    code = sass.instructions(SM_90)
    assert len(code) == 21
    full, edge = sass.loops(code)
    assert [x.name for x in full.code] == [
        "SYNCS", "BRA", "HGMMA", "FFMA", "MUFU", "F2FP", "BRA", "BRA",
    ]  # fmt: skip
    assert [hex(x.address) for x in full.code][-1] == "0x130"
    classes = {"sync": 1, "other": 3, "tensor": 1, "fp32": 1, "mufu": 1, "conversion": 1}
    assert full.classes == classes
    assert edge.start == 0x90
    assert edge.classes == {"mask": 2, "tensor": 1, "uniform": 1, "other": 1}
    assert sass.tensor_flops(full, code, 8) == 2 * 128 * 128 * 16
    assert sass.tensor_core(SM_90) == "HGMMA"


def test_innermost_loop_of_ampere_code() -> None:
    code = sass.instructions(SM_80)
    (loop,) = sass.loops(code)
    assert (loop.start, len(loop.code)) == (0x20, 7)
    assert loop.number("LDGSTS") == 1
    assert loop.classes == {"tensor": 2, "global": 1, "other": 2, "mask": 1, "integer": 1}
    assert sass.tensor_flops(loop, code, 4) == 4 * (2 * 16 * 8 * 16 + 2 * 16 * 8 * 8)
    assert sass.tensor_core(SM_80) == "HMMA"


@pytest.mark.parametrize(
    ("word", "size"),
    [
        ("0x8100490", (128, 64, 16)),  # bf16, as Triton writes it for a tile of 128 x 64
        ("0x4210490", (64, 128, 16)),
        ("0x8200910", (128, 128, 8)),  # tf32
    ],
)
def test_blackwell_products_have_the_size_in_their_descriptor(
    word: str, size: tuple[int, int, int]
) -> None:
    text = f"""
        /*0000*/                   UMOV UR33, {word} ;
        /*0010*/                   UMOV UR5, 0x40004040 ;
        /*0020*/                   UMOV UR59, UR33 ;
        /*0030*/               @P1 UTCHMMA gdesc[UR4], gdesc[UR14], tmem[UR11], tmem[UR58], \
idesc[UR59], !UPT ;
        /*0040*/              @!P1 BRA 0x30 ;
        /*0050*/                   EXIT ;
"""
    code = sass.instructions(text)
    (loop,) = sass.loops(code)
    m, n, k = size
    assert sass.tensor_flops(loop, code, 8) == 2 * m * n * k
    unknown = sass.instructions(text.replace(f"UMOV UR33, {word}", "ULDC UR33, c[0x0][0x160]"))
    assert sass.tensor_flops(sass.loops(unknown)[0], unknown, 8) is None


def test_loop_with_two_entries_is_no_natural_loop() -> None:
    text = """
        /*0000*/               @P0 BRA 0x20 ;
        /*0010*/                   FADD R1, R1, R1 ;
        /*0020*/                   FADD R2, R2, R2 ;
        /*0030*/               @P1 BRA 0x10 ;
        /*0040*/                   EXIT ;
"""
    assert sass.loops(sass.instructions(text)) == []


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
    found = rates.predict("sm_90", total, mufu, 4.0, 3.0, issued, needed)
    assert found.tflops == pytest.approx(tflops, abs=1)
    assert found.tflops_overlap > found.tflops


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
    found = rates.predict("sm_90", 6.0, 1.0, 3.1, 0.1, 256, 256)
    given = LoopCount(name, 100, 6.0, classes, opcodes, 1, 1.0, 1.0, 3, 0, found)
    return replace(given, **changed)


def profile(kernel: str = "forward", *loops: LoopCount, **changed: Any) -> Profile:
    spec = Specialization(kernel, "sm_90", "bf16", 128, "exp", "no gain")
    for name in set(changed) & set(spec._fields):
        spec = spec._replace(**{name: changed.pop(name)})
    given = Profile(
        spec, (128, 128), 8, 2, 200, 0, 1024, 1, "HGMMA", "TMA", loops or (loop(), loop("edge"))
    )
    return replace(given, **changed)


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
            profile("linear states", loop(instructions=213), activation="", extra=""),
            "instructions 213.00, at most 212.4",
        ),
        (
            profile("linear output", loop(narrow_copies=2), activation="", extra="", head_dim=64),
            "narrow_copies 2.00, at most 0",
        ),
    ],
)  # fmt: skip
def test_each_violation_is_named(row: Profile, words: str) -> None:
    found = criteria.violations([row])
    assert any(words in text for text in found), found
    assert all(text.startswith(f"{row.spec.kernel}, {row.spec.config}, sm_") for text in found)


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
    found = criteria.violations([plain, window, wide])
    assert [text.split(":")[0] for text in found] == [
        "dq, exp D=128 bf16 window, sm_90", "dq, exp D=256 bf16, sm_90",
    ]  # fmt: skip
    assert "predicted at 0.42 of the speed of exp D=128 bf16, at least 0.5" in found[0]


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
        assert full["classes"]["mufu"] == pytest.approx(1.0, abs=0.05)
        assert all(edge["classes"]["mask"] > full["classes"]["mask"] for edge in edges)
        assert 0 < full["predicted"]["tflops"] < full["predicted"]["tflops_overlap"] < 989.5
    names = {path.name for path in folder.iterdir()}
    assert names == {f"stats-exp-D{dim}-causal-gain-bf16-sm_90.cubin" for dim in (64, 128)}
    assert all(path.read_bytes()[:4] == b"\x7fELF" for path in folder.iterdir())
