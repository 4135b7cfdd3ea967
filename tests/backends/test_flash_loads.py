"""How flash loads tiles (by TMA or by pointers), and how its softmax applies the factor of q·k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attnzoo
from attnzoo.backends.shared_operands import NO_DROPOUT, Layout, Rule, Terms, Vectors
from attnzoo.backends.triton.common import launch, measured, prepared
from attnzoo.backends.triton.common.kernel_operands import Solved
from attnzoo.backends.triton.common.tiles import Config, map_tile
from attnzoo.backends.triton.flash import operators as flash_ops
from attnzoo.backends.triton.flash.launch import (
    describe_forward,
    describe_stats,
    describe_threshold,
)
from attnzoo.backends.triton.flash.launch_backward import describe_backward
from attnzoo.core import activations
from helpers.cases import rand
from helpers.packed import CALLS, PackedCall

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]


CAUSAL = Layout(0.25, None, 0, None, None, None, None)
SOFTMAX = Rule(activations.EXP, "sum")


def sizes(work: launch.Launch) -> list[int | None]:
    tile = work.args["tile"]
    constants = tile.BLOCK_M, tile.BLOCK_N, tile.MAP_M, tile.MAP_N
    return [getattr(x, "value", None) for x in constants]


def arguments(q: Tensor, k: Tensor, v: Tensor, arch: int) -> dict[str, Any]:
    operands = q, k, v, CAUSAL, SOFTMAX, Vectors(), Terms(), Solved(), False, arch, 132
    launches, _ = describe_forward(*operands)
    return launches[-1].args


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


# ---- TMA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_kernels_for_sm_90_and_sm_100_load_aligned_keys_and_values_by_tma(
    arch: int, dim: int
) -> None:
    """A block of 40 columns is padded to 64."""
    q = meta(1, 2, 300, dim)
    args = arguments(q, q, q, arch)
    kind = f"tensordesc<bf16[1, 1, {args['tile'].BLOCK_N.value}, 64]>"
    wanted = kind if arch in (90, 100) else None
    assert args["k_descriptor"] == args["v_descriptor"] == wanted
    assert (describe_stats(q, q, CAUSAL, False, arch)[0][-1].args["k_descriptor"] is None) == (
        wanted is None
    )


@pytest.mark.parametrize(
    ("case", "k"),
    [
        ("fp32", meta(1, 2, 50, 64, dtype=torch.float32)),
        ("expanded heads", meta(1, 1, 50, 64).expand(1, 2, 50, 64)),
        ("no keys", meta(1, 2, 0, 64)),
    ],
)
def test_other_keys_and_values_are_loaded_by_pointers(case: str, k: Tensor) -> None:
    q = meta(*k.shape, dtype=k.dtype)
    args = arguments(q, k, q, 90)
    assert args["k_descriptor"] is args["v_descriptor"] is None, case


@pytest.mark.parametrize("expanded", ["k", "do", None])
def test_the_gradient_of_a_mask_loads_all_tensors_by_tma_or_none(expanded: str | None) -> None:
    shape = 1, 2, 50, 64
    names = ("do", "q", "k", "v")
    tensors = [
        meta(1, 1, *shape[2:]).expand(shape) if n == expanded else meta(*shape) for n in names
    ]
    mask, stat = meta(1, 1, 50, 50), meta(1, 2, 50, dtype=torch.float32)
    operands = tensors[0], None, *tensors[1:], meta(*shape), stat, stat, CAUSAL._replace(mask=mask)
    rule = SOFTMAX, Vectors(), Terms(), Solved(), mask, ["mask"], 90, 132
    dbias = describe_backward(*operands, *rule)[0][-1]
    assert dbias.kernel.__name__ == "flash_dbias"
    descriptors = [dbias.args[f"{name}_descriptor"] for name in names]
    assert {x is None for x in descriptors} == {expanded is not None}


@pytest.mark.parametrize(
    "variant",
    ["softmax", *(pytest.param(v, marks=pytest.mark.slow) for v in ("ssmax", "entmax",
     "adaptive_temperature"))],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_tma_and_pointers_give_equal_results(
    variant: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 queries, 90 keys, 4 and 2 heads: full blocks, the diagonal, and a block beyond the end."""
    q, k, v = (rand(2, h, n, 32, seed=h + n).bfloat16() for h, n in ((4, 70), (2, 90), (2, 91)))
    v = v[:, :, 1:]
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    outs, used = [], []
    launch_kernel = launch.run

    def spy(work: launch.Launch) -> None:
        used.append(work.args.get("k_descriptor") is not None)
        launch_kernel(work)

    monkeypatch.setattr(prepared, "run", spy)
    for archs in (launch.TMA, ()):
        monkeypatch.setattr(launch, "TMA", archs)
        out = attnzoo.attention(q, k, v, variant, is_causal=True, enable_gqa=True, backend="flash")
        outs.append(out)
        assert any(used) == bool(archs)
        used.clear()
    assert torch.equal(*outs)


# ---- addresses --------------------------------------------------------------------------------


every_call = pytest.mark.parametrize(
    ("variant", "backend"),
    [pytest.param(*call, marks=[] if call[0] == "softmax" else [pytest.mark.slow])
     for call in CALLS],
)  # fmt: skip


@every_call
def test_slices_that_start_anywhere_give_the_same_results(variant: str, backend: str) -> None:
    """q, k and v are slices of a packed projection, 8 and 6 bytes after an aligned address."""
    aligned, *others = (PackedCall(variant, backend, start) for start in (0, 4, 3))
    assert [x.slices()[1].data_ptr() % 16 for x in (aligned, *others)] == [0, 8, 6]
    for other in others:
        for have, want in zip(
            other.outputs_and_gradients(), aligned.outputs_and_gradients(), strict=True
        ):
            assert torch.allclose(have.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["flash", "decode"])
@pytest.mark.parametrize("dim", [20, 32])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_fake_results_have_the_strides_of_real_ones(backend: str, dim: int, layout: str) -> None:
    """Rows of 20 numbers, and rows that start anywhere, are copied to rows 16 bytes apart."""
    wide = rand(3, 2, 4, 8, dim + 3, seed=dim).bfloat16()[..., 3:]
    q, k, v = (x if layout == "bhnd" else x.transpose(1, 2) for x in wide)
    q, k, v = q.detach(), k.detach(), v.detach()
    real = attnzoo.attention(q, k, v, backend=backend)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = attnzoo.attention(*(mode.from_tensor(x) for x in (q, k, v)), backend=backend)
    assert (real.shape, real.stride()) == (fake.shape, fake.stride())
    assert real.stride(1) % 8 == real.stride(2) % 8 == 0
    want = attnzoo.attention(q.float(), k.float(), v.float(), backend="eager")
    assert torch.allclose(real.float(), want, atol=2e-2)


# name -> view of a mask (2, 2, 40, 45), heads and queries of the mask that the kernel reads
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "rows of 45": (lambda mask: mask, 2, 40),
    "one for all heads": (lambda mask: mask[:, :1].expand(-1, 2, -1, -1), 1, 40),
    "one for all queries": (lambda mask: mask[:, :, :1].expand(-1, -1, 40, -1), 2, 1),
    "rows that start anywhere": (lambda mask: torch.cat([mask, mask], -1)[..., 3:48], 2, 40),
    "columns": (lambda mask: mask.mT.contiguous().mT, 2, 40),
}


@pytest.mark.parametrize("case", MASKS)
def test_a_view_of_a_mask_gets_its_gradient(case: str) -> None:
    mask = torch.where(rand(2, 2, 40, 45, seed=3) > 0, 0.5, float("-inf")).requires_grad_()
    q, k, v = (rand(2, 2, n, 16, seed=n).float() for n in (40, 45, 45))
    gradients = []
    for backend in ("flash", "eager"):
        out = attnzoo.attention(q, k, v, attn_mask=MASKS[case][0](mask), backend=backend)
        gradients += torch.autograd.grad(out.square().sum(), mask)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("case", MASKS)
def test_rows_of_a_dense_mask_are_read_16_bytes_at_a_time(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other masks are copied, without their expanded dimensions."""
    masks, launch_kernel = [], launch.run

    def record(work: launch.Launch) -> None:
        masks.append(work.args["visible"].mask)
        launch_kernel(work)

    monkeypatch.setattr(prepared, "run", record)
    view, heads, queries = MASKS[case]
    mask = rand(2, 2, 40, 45, seed=3) > 0
    if dtype == torch.float16:
        mask = torch.where(mask, 0.5, float("-inf")).to(dtype)
    mask = view(mask)
    q, k, v = (rand(2, 2, n, 16, seed=n).half() for n in (40, 45, 45))
    out, want = (attnzoo.attention(q, k, v, attn_mask=mask, backend=b) for b in ("flash", "eager"))
    assert torch.allclose(out.float(), want.float(), atol=2e-3)
    (copy,) = masks
    assert copy.shape[1:3] == (heads, queries)
    assert queries == 1 or copy.stride(2) % (16 // mask.element_size()) == 0


@every_call
def test_a_call_reads_new_values_in_the_same_memory(variant: str, backend: str) -> None:
    """Nothing of the inputs' values is kept. A captured CUDA graph relies on that."""
    call = PackedCall(variant, backend)
    first = call.outputs_and_gradients()
    call.fill(seed=1)
    second = call.outputs_and_gradients()
    assert not any(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    call.fill(seed=0)
    assert all(torch.equal(x, y) for x, y in zip(first, call.outputs_and_gradients(), strict=True))


# ---- the factor -------------------------------------------------------------------------------


def definition(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor, scale: float, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and lse of softmax with a gain per query, in fp64."""
    s = gain.double()[..., None] * scale * (q.double() @ k.double().mT)
    s = s.masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    return s.softmax(-1).masked_fill(empty, 0.0) @ v.double(), s.logsumexp(-1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gains", ["none", "normal", "zero"])
@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
def test_factors_of_any_sign_agree_with_the_definition(
    scale: float, gains: str, dtype: torch.dtype, masked: bool
) -> None:
    """The maximum is taken before the factor, so its sign matters, and 0 · (−∞) must not occur.

    The first 20 of 100 queries see no key.
    """
    q, k, v = (rand(1, 2, n, 16, seed=n).to(dtype) for n in (100, 80, 81))
    v = v[:, :, 1:]
    visible = torch.ones(100, 80).tril(-20).bool()
    mask = None
    if masked:
        visible[:, 7] = visible[60] = False
        mask = visible.clone()[None, None].view(torch.uint8)
    ones = torch.ones(1, 2, 100)
    gain = {"none": ones, "zero": 0.0 * ones, "normal": rand(1, 2, 100, seed=4).float()}[gains]
    layout = Layout(scale, None, 0, mask, None, None, None)
    outputs = flash_ops.flash_forward(
        q=q, k=k, v=v, vectors=Vectors(None if gains == "none" else gain), terms=Terms(),
        solved=Solved(), layout=layout, rule=SOFTMAX, dropout=NO_DROPOUT, want_lse=True,
    )  # fmt: skip
    out, lse = definition(q, k, v, gain, scale, visible)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert torch.allclose(outputs.out.double(), out, atol=tolerance)
    assert outputs.lse is not None
    assert torch.allclose(outputs.lse.double(), lse, atol=1e-5)
    assert outputs.stat is not None
    assert bool(outputs.stat.isfinite().all()), "also of queries without keys"


def test_a_gain_of_nan_gives_nan_and_an_infinite_product_times_zero_too() -> None:
    q, k, v = (rand(1, 1, 70, 16, seed=n).float() for n in range(3))
    gain = torch.ones(1, 1, 70)
    gain[..., 5], gain[..., 40:] = float("nan"), 0.0
    q[..., 50, :], k[..., 3, :] = 1e30, 1e30
    outputs = flash_ops.flash_forward(
        q=q, k=k, v=v, vectors=Vectors(gain), terms=Terms(), solved=Solved(),
        layout=CAUSAL, rule=SOFTMAX, dropout=NO_DROPOUT, want_lse=False,
    )  # fmt: skip
    nan = outputs.out[0, 0].isnan().all(-1)
    assert nan[5]
    assert nan[50]
    assert not nan[[0, 1, 2, 40, 60]].any()


# ---- tiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_blocks_divide_the_tiles_of_the_block_map(
    arch: int, dim: int, dtype: torch.dtype, masked: bool
) -> None:
    mask = torch.ones(1, 1, 256, 256, dtype=torch.uint8) if masked else None
    layout = CAUSAL._replace(mask=mask)
    call = layout, Rule(activations.ENTMAX15, "threshold"), Vectors(), Terms()
    q = torch.ones(1, 2, 256, dim, dtype=dtype)
    (solver,), solved = describe_threshold(q, q, q, *call, arch)
    tile = tuple(sizes(solver)[:2])
    assert tile == map_tile(dim, 8 * dtype.itemsize)
    assert solved.blocks is not None
    assert solved.blocks.shape[1:] == (256 // tile[0], 256 // tile[1])
    (forward,), (out, stat, _, _) = describe_forward(q, q, q, *call, solved, False, arch, 132)
    backward, _ = describe_backward(
        out, None, q, q, q, out, stat, None, *call, solved, None, "k", arch, 132
    )
    dq, dkdv = backward[0], backward[-1]
    for launched in (forward, dq):
        block_m, block_n, *_ = sizes(launched)
        assert block_n == tile[1]
        assert tile[0] % block_m == 0
    block_m, block_n, *map_size = sizes(dkdv)
    assert tile[0] % block_m == tile[1] % block_n == 0
    assert tuple(map_size) == tile


# ---- dense masks ------------------------------------------------------------------------------


@pytest.mark.slow
def test_heads_of_a_mask_may_be_more_than_2_31_entries_apart() -> None:
    """As in a mask (1, 2, 65536, 65536). Memory between the entries is never touched."""
    n, far = 64, 2**32
    torch.use_deterministic_algorithms(False)  # torch.empty would fill the memory
    mask = torch.empty(far + n * n, dtype=torch.bool).as_strided((1, 2, n, n), (2 * far, far, n, 1))
    mask[:, 0] = True
    mask[:, 1] = rand(n, n) < -0.5
    q, k, v = (rand(1, h, n, 16, seed=h).float().requires_grad_() for h in (2, 1, 1))
    gradients = []
    for backend in ("flash", "eager"):
        out = attnzoo.attention(q, k, v, attn_mask=mask, enable_gqa=True, backend=backend)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, atol=1e-4)


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_tiles_that_read_a_head_in_parts_agree_for_both_signs_of_the_scale(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (rand(1, 2, 40, 64, seed=n).bfloat16() for n in range(3))
    call: dict[str, Any] = {"scale": scale, "return_max_logits": True}
    want, largest = attnzoo.attention(q, k, v, backend="eager", **call)
    current = measured.tile_of_kernel

    def in_parts(kernel: str, *others: Any) -> Config:
        return current(kernel, *others)._replace(part=32)

    monkeypatch.setattr(measured, "tile_of_kernel", in_parts)
    out, flash_largest = attnzoo.attention(q, k, v, backend="flash", **call)
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(flash_largest, largest, rtol=1e-5, atol=1e-5)
