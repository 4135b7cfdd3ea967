"""On a GPU a loss takes few launches, does not wait in the loop over chunks, and is as accurate.

There is no GPU here: launches are counted on the device "meta", and results are computed on a CPU
with the chunks, blocks and solver steps of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from attnzoo.backends.operator import Operator
from attnzoo.core import device
from attnzoo.losses import chunks, linear_loss, perturb_max, perturb_max_loss, potentials
from helpers.agreement import violations
from helpers.cases import params_of
from helpers.covering import covering, each_setting
from helpers.launches import Launches
from helpers.loss_budget import bounds
from helpers.loss_cases import (
    FACTORS,
    LOSSES,
    SETTINGS,
    allowed,
    by_definition,
    by_library,
    differentiate,
    label,
    make,
    some,
    targets,
    tensors,
)
from helpers.memory import peak_of

# The largest numbers of launches. Those of a threshold are its solver's: 27 steps for a tensor α.
MOST: dict[str, tuple[str, dict[str, Any], int]] = {
    "softmax": ("softmax", {}, 400),
    "smoothing": ("softmax", {"label_smoothing": 0.1, "softcap": 30.0}, 600),
    "sigmoid": ("sigmoid", {}, 400),
    "topk": ("topk", {"top_k": 5}, 600),
    "entmax 1.5": ("entmax", {"alpha": 1.5}, 2500),
    "entmax 1.3": ("entmax", {"alpha": 1.3}, 4000),
    "sparsemax": ("sparsemax", {}, 3500),
}


def launches(tokens: int, classes: int, variant: str, **params: Any) -> Launches:
    h = torch.empty(tokens, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    e = torch.empty(classes, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    y = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Launches() as recorded:
        linear_loss(h, e, y, variant, **params).backward()
    return recorded


@pytest.fixture
def meta_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is not hidden from the counter, and 16-bit products are those of a GPU."""
    monkeypatch.setattr(Operator, "_is_plain", lambda self, values: True)
    monkeypatch.setattr(chunks, "has_mixed_products", lambda weight: True)


@pytest.mark.usefixtures("meta_is_a_gpu")
@pytest.mark.parametrize("case", MOST)
def test_a_large_layer_takes_few_launches(case: str) -> None:
    """Forward and backward. The host waits once, for the tokens that are not ignored."""
    variant, params, most = MOST[case]
    recorded = launches(8192, 128256, variant, **params)
    assert 0 < recorded.launched <= most, recorded.launches
    assert recorded.waited == 1, recorded.waits


@pytest.mark.usefixtures("meta_is_a_gpu")
@pytest.mark.parametrize("case", MOST)
def test_launches_do_not_grow_with_the_tokens_of_a_chunk(case: str) -> None:
    variant, params, _ = MOST[case]
    few, many = (launches(n, 32000, variant, **params).launched for n in (64, 4096))
    assert few == many


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of 16 tokens, and blocks of 2^12 numbers where blocks are smaller."""
    monkeypatch.setattr(device, "CPU", ())
    monkeypatch.setattr(chunks, "LARGE", 1)
    monkeypatch.setattr(chunks, "CHUNK", 16)
    for module, name in ((chunks, "COPIED"), (potentials, "POWERS"), (perturb_max, "LARGE_BLOCK")):
        monkeypatch.setattr(module, name, 2**12)


def multiply(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """`torch.mm` of 16-bit matrices with an fp32 result, which a CPU does not have."""
    product = a.float() @ b.float()
    out = options.get("out")
    return product if out is None else out.copy_(product)


ROWS = covering((*FACTORS, ("dtype", (torch.float32, torch.bfloat16))), allowed, seed=1)
QUICK = each_setting(ROWS, 2)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("row", "seed"),
    [
        pytest.param(row, i, id=label(row), marks=[] if row in QUICK else [pytest.mark.slow])
        for i, row in enumerate(ROWS)
    ],
)
def test_values_and_gradients_are_within_error_bounds(
    row: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row["dtype"] == torch.bfloat16:
        monkeypatch.setattr(chunks, "has_mixed_products", lambda weight: True)
        monkeypatch.setattr(torch, "mm", multiply)
    inputs = make(row, seed)
    results, exact = by_library(inputs), by_definition(inputs)
    if exact["loss"].isnan().any():  # the mean of no tokens
        assert results["loss"].isnan().all()
        del exact["loss"]
    assert violations("losses", results, exact, bounds(inputs)) == []


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_classes_and_ignored_tokens_agree_in_fp64(setting: str) -> None:
    row = {name: levels[0] for name, levels in FACTORS}
    row.update(setting=setting, tokens=(40,), classes=6000, features=5, ignored="some", bias=True)
    inputs = make(row, seed=4)
    results, exact = by_library(inputs), by_definition(inputs)
    for name, value in exact.items():
        torch.testing.assert_close(results[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_of_masked_classes_may_be_nan() -> None:
    x, e, _ = (t.detach() for t in tensors(40, 60, 8))
    e[50:] = torch.nan
    mask, y = torch.arange(60) < 50, torch.arange(40)
    masked, removed = [], []
    for destination, rows, class_mask in ((masked, e, mask), (removed, e[:50].clone(), None)):
        leaves = x.clone().requires_grad_(), rows.clone().requires_grad_()
        value = linear_loss(*leaves, y, "sparsemax", class_mask=class_mask)
        destination += [value, *torch.autograd.grad(value, leaves)]
    masked[2] = masked[2][:50]
    for have, want in zip(masked, removed, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("setting", ["softmax", "sparsemax", "entmax 1.3", "entmax", "topk"])
def test_a_sharded_layer_agrees(setting: str, mesh: Any) -> None:
    row = {name: levels[0] for name, levels in FACTORS}
    row.update(setting=setting, tokens=(40,), classes=300, features=5, ignored="some")
    inputs = make(row, seed=4)
    leaves, arguments = inputs.arguments()
    for name, placement in (("input", Replicate()), ("linear_weight", Shard(0))):
        arguments[name] = DTensor.from_local(leaves[name], mesh, [placement])
    value = linear_loss(variant=inputs.variant, **arguments).to_local()
    results = differentiate(value, leaves, inputs)
    for name, right in by_definition(inputs).items():
        torch.testing.assert_close(results[name], right, rtol=1e-9, atol=1e-10)


def test_perturbed_losses_agree_with_those_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    x, e, b = tensors(40, 600, 8)
    results = []
    for fixture in (None, "as_on_a_gpu"):
        if fixture is not None:
            request.getfixturevalue(fixture)
        value = perturb_max_loss(x, e, targets(40, 600), linear_bias=b)
        results.append((value, *torch.autograd.grad(value, (x, e, b))))
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("variant", some(LOSSES))
def test_a_loss_holds_at_most_five_tensors_of_a_chunk(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a learned α, whose gradient takes many operations."""
    monkeypatch.setattr(device, "CPU", ())
    logits = 2**19
    for module, name, size in (
        (chunks, "LARGE", logits), (chunks, "CHUNK", 16), (chunks, "TILE", 16),
        (potentials, "POWERS", logits // 8),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)
    x, e, _ = (t.detach().float().requires_grad_() for t in tensors(256, 2**14, 8))
    params = params_of(variant)
    if variant == "entmax":
        params = {"alpha": torch.tensor(1.3, requires_grad=True)}
    used = peak_of(lambda: linear_loss(x, e, targets(256, 2**14), variant, **params).backward())
    assert used - 4 * (x.numel() + e.numel()) <= 5 * 4 * logits


@pytest.mark.slow
def test_perturbed_losses_hold_few_tensors_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CPU", ())
    assert perturb_max.LARGE_BLOCK <= chunks.LARGE // 8
    for module, name, size in (
        (chunks, "LARGE", 2**17), (chunks, "CHUNK", 16), (chunks, "TILE", 16),
        (perturb_max, "LARGE_BLOCK", 2**14),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)
    x, e, _ = (t.detach().float().requires_grad_() for t in tensors(32, 2**12, 8))
    used = peak_of(lambda: perturb_max_loss(x, e, targets(32, 2**12)).backward())
    assert used - 4 * (x.numel() + e.numel()) <= 5 * 4 * 2**17
