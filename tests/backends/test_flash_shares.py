"""flash_shares agrees with the fp64 definition: outputs and gradients, over covering arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.shared_operands import Layout
from attnzoo.backends.triton.shares import operators as ops
from helpers.agreement import disagreements, make
from helpers.cases import rand
from helpers.coverage_table import RUNS, VARIANT_BACKENDS, levels_of
from helpers.covering import covering, each_setting, label
from helpers.operators import opcheck

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

SHARES = [v for v, reasons in VARIANT_BACKENDS.items() if reasons["flash_shares"] is RUNS]
FACTORS = {
    "shape": ((1, 1), (70, 70), (17, 63), (70, 17), (1, 100)),
    "batch": (1, 2),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ("none", "bool", "keys", "float", "float keys"),
    "mask_gradient": (False,),
    "span": ("causal", "window"),
    "heads": ("2 heads", "gqa", "3 of 1"),
    "params": ("default",),
    "values": ("same",),
    "dims": ((16, 16), (40, 24), (136, 40)),
    "bias": (None, "alibi", "table"),
    "segments": (False, True),
    "softcap": (None, 2.0),
    "dropout": (False,),
    "lse": (False,),
    "layout": ("contiguous", "bnhd", "sliced"),
}


def allowed(case: dict[str, Any]) -> bool:
    """Exclude slow cases: Nq + Nk > 100 in batches of 2, or of more than 2 heads."""
    small = case.get("batch", 1) == 1 and case.get("heads", "2 heads") == "2 heads"
    return small or sum(case.get("shape", (1, 1))) <= 100


def cases() -> Iterator[Any]:
    """Each setting in a quick case, and each pair of settings in a quick or a slow one."""
    for variant in SHARES:
        rows = covering(tuple(levels_of(variant, FACTORS).items()), allowed)
        quick = [*each_setting(rows, 1)]
        for seed, row in enumerate(rows):
            marks = [] if row in quick else [pytest.mark.slow]
            yield pytest.param(variant, row, seed, id=f"{variant}-{label(row)}", marks=marks)


@pytest.mark.parametrize(("variant", "case", "seed"), list(cases()))
def test_agrees_with_the_definition(variant: str, case: dict[str, Any], seed: int) -> None:
    assert disagreements(variant, "flash_shares", make(variant, case, seed=10 * seed)) == []


def results(
    backend: str, leaves: list[Tensor], do: Tensor, variant: str = SHARES[0], **options: Any
) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    options = {"is_causal": True, "scale": 1.0, **options}
    out = attnzoo.attention(*leaves, variant, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_logits_agree_with_fp64(dtype: torch.dtype) -> None:
    """Logits from −3000 to 3000, exact in all dtypes: most shares are 0 or 1."""
    scale = torch.tensor([0.0, 1.0, -1.0, 8.0, -8.0, 90.0, -90.0, 3000.0, -3000.0])
    k = scale[torch.arange(75) * 7 % 9].view(1, 1, 75, 1).to(dtype)
    q, do, v = torch.ones_like(k), *(rand(1, 1, 75, 4, seed=i).to(dtype) for i in range(2))
    have = results("flash_shares", [q, k, v], do)
    want = results("eager", [x.double() for x in (q, k, v)], do.double())
    # A share is exact up to 2e-5 where its logit is clamped. dq has logits of 3000 as factors.
    unit = 2e-5 if dtype == torch.float32 else 2e-3
    for x, exact, size in zip(have, want, (1, 3000 * 4, 1, 1), strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=10 * unit * size)


def test_weights_and_gradients_of_distant_keys_keep_their_digits() -> None:
    """With equal logits, weights halve with each key. No sum of other keys may hide small ones."""
    q, k, v, do = (torch.zeros(1, 1, 100, dim) for dim in (8, 8, 100, 100))
    q[0, 0, 99, 0] = 1.0
    v[0, 0] = torch.eye(100)
    do[0, 0, 99, [10, 95]] = 1.0
    out, _, dk, _ = results("flash_shares", [q, k, v], do)
    w = 0.5 ** torch.arange(99, 0, -1, dtype=torch.float64)
    torch.testing.assert_close(out[0, 0, 99, :99].double(), w, rtol=3e-5, atol=0)
    g = w * do[0, 0, 99, :99]
    ds = g - 0.5 * g.cumsum(0)  # 1e-27 between the two keys
    torch.testing.assert_close(dk[0, 0, :99, 0].double(), ds, rtol=3e-5, atol=0)


def test_queries_without_keys_give_0_and_do_not_read_them() -> None:
    leaves = [rand(1, 1, 70, 16, seed=i).float() for i in range(3)]
    do = rand(1, 1, 70, 16, seed=3).float()
    mask = torch.ones(70, 70, dtype=torch.bool)
    mask[33:37] = False
    for x in results("flash_shares", leaves, do, attn_mask=mask)[:2]:
        assert bool((x[..., 33:37, :] == 0).all())
        assert bool((x[..., 0, :] == 0).all())
        assert bool(x.isfinite().all())


def test_nan_reaches_the_later_queries_only() -> None:
    q, k, v = (rand(1, 1, 70, 16, seed=i).float() for i in range(3))
    k[..., 40, 0] = float("nan")
    out = attnzoo.attention(q, k, v, SHARES[0], is_causal=True, backend="flash_shares")
    assert bool(out[..., :41, :].isfinite().all())
    assert bool(out[..., 41:, :].isnan().all())


def test_results_do_not_change_from_run_to_run() -> None:
    """The second call is recorded, the third a prepared launch."""
    leaves = [rand(1, heads, 40, 16, seed=heads).bfloat16() for heads in (2, 1, 1)]
    do = rand(1, 2, 40, 16, seed=3).bfloat16()
    first, *later = (results("flash_shares", leaves, do, enable_gqa=True) for _ in range(3))
    assert all(torch.equal(x, y) for run in later for x, y in zip(run, first, strict=True))


def test_gradient_of_a_float_mask_is_rejected_with_the_reason() -> None:
    q, mask = rand(1, 1, 9, 8).float(), rand(9, 9).float().requires_grad_()
    with pytest.raises(ValueError, match="does not support a gradient for a float mask"):
        attnzoo.attention(
            q, q, q, SHARES[0], attn_mask=mask, is_causal=True, backend="flash_shares"
        )
    with pytest.raises(ValueError, match="does not support dropout"):
        attnzoo.attention(q, q, q, SHARES[0], is_causal=True, dropout_p=0.1, backend="flash_shares")


@pytest.mark.parametrize("gradient", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_opcheck(gradient: bool) -> None:
    q, k, v = (rand(1, h, 9, 8, seed=h).float().requires_grad_(gradient) for h in (2, 1, 1))
    ids = (torch.arange(9) // 4).expand(1, 9).contiguous()
    slopes = rand(1, 2, 9, seed=6).float().abs().requires_grad_(gradient)
    mask = (rand(1, 1, 9, 9, seed=5) > -0.8).view(torch.uint8)
    opcheck(ops.shares_forward, q=q, k=k, v=v, layout=Layout(0.3, 4, -1, mask, ids, ids, slopes))


# While tracing, torch instantiates an autograd.Function and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_compiles_without_graph_breaks_and_agrees_at_every_length() -> None:
    torch.compiler.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnzoo.attention(q, k, v, SHARES[0], is_causal=True, backend="flash_shares")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in (9, 12, 40):
        runs = []
        for function in (compiled, attend):
            leaves = [rand(1, 2, n, 8, seed=i).float().requires_grad_() for i in range(3)]
            out = function(*leaves)
            runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
