"""The gradient of a float mask in flash: shapes, hidden entries, order of the sum, and launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.triton.common import launch, prepared
from helpers.cases import rand

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

BATCH, HEADS, QUERIES, KEYS = 2, 2, 45, 70


def attend(mask: Tensor, variant: str = "softmax", backend: str = "flash", **options: Any) -> Any:
    dtype = torch.float64 if backend == "eager" else torch.float32
    shapes = (HEADS, QUERIES), (1, KEYS), (1, KEYS)
    q, k, v = (rand(BATCH, *shape, 16, seed=n).to(dtype) for n, shape in enumerate(shapes))
    return attnzoo.attention(
        q, k, v, variant, attn_mask=mask, enable_gqa=True, backend=backend, **options
    )


def gradient(mask: Tensor, **options: Any) -> Tensor:
    """The gradient of the mask, which alone requires one."""
    leaf = mask.clone().requires_grad_()
    out = attend(leaf, **options)
    return torch.autograd.grad(out, leaf, rand(*out.shape, seed=9).to(out.dtype))[0]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[launch.Launch]:
    launches, run = [], launch.run

    def record(work: launch.Launch) -> None:
        launches.append(work)
        run(work)

    monkeypatch.setattr(prepared, "run", record)
    return launches


# The last axis of a shape is broadcast by autograd.
SHAPES = (
    (QUERIES, KEYS), (1, HEADS, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS),
    (BATCH, HEADS, QUERIES, KEYS), (KEYS,), (HEADS, 1, KEYS), (BATCH, 1, 1, KEYS),
    (BATCH, HEADS, QUERIES, 1),
)  # fmt: skip
SPANS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 7},
    "segments": {"segment_ids": (torch.arange(QUERIES).expand(BATCH, -1) // 30,
                                 torch.arange(KEYS).expand(BATCH, -1) // 33)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "span"), [(shape, [*SPANS][n % len(SPANS)]) for n, shape in enumerate(SHAPES)]
)
def test_the_gradient_has_the_shape_of_the_mask(shape: tuple[int, ...], span: str) -> None:
    mask = rand(*shape, seed=5)
    mask = mask.masked_fill(mask < -1.0, float("-inf"))
    have = gradient(mask.float(), variant="sigmoid", **SPANS[span])
    want = gradient(mask.float().double(), variant="sigmoid", backend="eager", **SPANS[span])
    assert have.shape == shape
    torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["softmax", "sparsemax"])
def test_hidden_entries_and_rows_have_the_gradient_0(variant: str) -> None:
    """Those of whole tiles, of −∞ in the mask, and of queries whose keys are all hidden."""
    mask = rand(1, 1, QUERIES, KEYS, seed=5).float()
    hidden = torch.ones(QUERIES, KEYS).tril(KEYS - QUERIES).logical_not()
    hidden |= torch.ones(QUERIES, KEYS).tril(KEYS - QUERIES - 7).bool()
    hidden[20] = hidden[:, 40] = True
    mask[..., 20, :] = mask[..., :, 40] = float("-inf")
    have = gradient(mask, variant=variant, is_causal=True, window=7)[0, 0]
    assert bool((have[hidden] == 0).all())
    assert bool((have != 0).any())
    assert bool(have.isfinite().all())


def test_the_sum_over_batches_and_heads_has_a_fixed_order() -> None:
    mask = rand(1, 1, QUERIES, KEYS, seed=5).float()
    each = gradient(mask.expand(BATCH, HEADS, -1, -1), is_causal=True)
    per_head, total = torch.zeros(1, HEADS, QUERIES, KEYS), torch.zeros(1, 1, QUERIES, KEYS)
    for b in range(BATCH):
        per_head += each[b : b + 1]
        for h in range(HEADS):
            total += each[b, h]
    assert torch.equal(gradient(mask, is_causal=True), total)
    assert torch.equal(gradient(mask.expand(1, HEADS, -1, -1), is_causal=True), per_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_lse_reaches_the_mask(dtype: torch.dtype) -> None:
    """∂lse_i/∂mask_ij are the weights. Its dtype is the mask's."""
    mask = rand(QUERIES, KEYS, seed=5).to(dtype).requires_grad_()
    q, k, v = (rand(1, 1, n, 16, seed=n).to(torch.bfloat16) for n in (QUERIES, KEYS, KEYS))
    _, lse = attnzoo.attention(q, k, v, attn_mask=mask, backend="flash", return_lse=True)
    (have,) = torch.autograd.grad(lse.sum(), mask)
    want = (q.double() @ k.double().mT / 4 + mask.double()).softmax(-1)[0, 0]
    assert have.dtype == dtype
    torch.testing.assert_close(have.double(), want, rtol=1e-2, atol=1e-4)


def test_a_backward_launches_what_is_wanted(launched: list[launch.Launch]) -> None:
    """dbias for a dense mask only, in the memory of the mask. dK/dV also for a mask of the keys."""

    def kernels() -> set[str]:
        names = {work.kernel.__name__ for work in launched}
        launched.clear()
        return names - {"flash_forward"}

    bias = rand(1, 1, QUERIES, KEYS, seed=5).float()
    q = rand(1, HEADS, QUERIES, 16, seed=0).float().requires_grad_()
    k = rand(1, HEADS, KEYS, 16, seed=1).float()
    attnzoo.attention(q, k, k, attn_mask=bias, backend="flash").sum().backward()
    assert kernels() == {"flash_dq"}
    gradient(bias[:, :, :1])
    assert kernels() == {"flash_dq", "flash_dkdv"}
    gradient(bias)
    (work,) = (work for work in launched if work.kernel.__name__ == "flash_dbias")
    assert work.args["dbias"].shape == bias.shape
    for other in launched:
        parts = [*other.args.values(), *other.args.get("gradients", ())]
        sizes = [x.numel() for x in parts if isinstance(x, Tensor)]
        assert max(sizes) < BATCH * HEADS * QUERIES * KEYS
    assert kernels() == {"flash_dq", "flash_dbias"}
