"""Machine code is read: instructions, loops, and the FLOPs of tensor-core instructions."""

from __future__ import annotations

import pytest

from benchmarks.kernels import sass

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
