"""Losses other than `linear_loss`: margins, noise, masks, moments, distances between classes.

They agree with their formulas in fp64, values and gradients.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import losses
from helpers.cases import rand
from helpers.other_loss_definitions import ENTRIES, Entry

CLASSES = 11
TARGET = torch.tensor([3, 0, -100, 8, 6, 3])


def call(
    entry: Entry, h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, **options: Any
) -> Tensor:
    options = {**entry.options, **options}
    if entry.with_bias:
        options["linear_bias"] = bias
    if entry.seed is not None:
        options["generator"] = torch.Generator().manual_seed(entry.seed)
    value: Tensor = getattr(losses, entry.function)(h, matrix, target, **options)
    return value


def define(entry: Entry, h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """The losses (N,), 0 for ignored tokens."""
    counted = target != -100
    options = dict(entry.options)
    if entry.seed is not None:
        options["seed"] = entry.seed
    values = entry.definition(h, matrix, bias, target.where(counted, 0), **options)
    return torch.where(counted, values, 0.0)


def leaves(tokens: int, dim: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    h, matrix = scale * rand(tokens, dim), rand(CLASSES, dim, seed=1)
    return h.requires_grad_(), matrix.requires_grad_(), rand(CLASSES, seed=2).requires_grad_()


def gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads)]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", ENTRIES)
def test_losses_and_gradients_are_those_of_the_formula(
    name: str, biased: bool, reduction: str
) -> None:
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6)
    used_bias = bias if biased and entry.with_bias else None
    actual = call(entry, h, matrix, used_bias, TARGET, reduction=reduction)
    want = define(entry, h, matrix, used_bias, TARGET)
    if reduction == "mean":
        want = want.sum() / 5
    torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12)
    upstream = rand(6, seed=3) if reduction == "none" else torch.tensor(1.0).double()
    inputs = h, matrix, bias
    for one, other in zip(*(gradients((x * upstream).sum(), inputs) for x in (actual, want))):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ENTRIES)
def test_tokens_may_have_any_shape(name: str) -> None:
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6)
    flat = call(entry, h, matrix, bias, TARGET, reduction="none")
    shaped = call(entry, h.view(2, 3, 4), matrix, bias, TARGET.view(2, 3), reduction="none")
    assert torch.equal(shaped, flat.view(2, 3))
    total = call(entry, h, matrix, bias, TARGET, reduction="sum")
    torch.testing.assert_close(total, flat.sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ENTRIES)
def test_ignored_tokens_take_no_part_even_with_nan(name: str) -> None:
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6)
    broken = h.detach().clone()
    broken[2] = float("nan")
    broken.requires_grad_()
    actual, want = (call(entry, x, matrix, bias, TARGET, reduction="sum") for x in (broken, h))
    torch.testing.assert_close(actual, want, rtol=1e-13, atol=0)
    for one, other in zip(
        gradients(actual, (broken, matrix, bias)), gradients(want, (h, matrix, bias))
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ENTRIES)
def test_nan_in_one_token_does_not_reach_other_losses(name: str) -> None:
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6)
    broken = h.detach().clone()
    broken[4] = float("nan")
    actual = call(entry, broken, matrix, bias, TARGET, reduction="none")
    want = call(entry, h, matrix, bias, TARGET, reduction="none")
    assert actual[4].isnan()
    others = torch.arange(6) != 4
    torch.testing.assert_close(actual[others], want[others], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ENTRIES)
def test_without_counted_tokens_the_sum_is_0_and_the_mean_nan(name: str) -> None:
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6)
    for tokens in (0, 6):
        target = torch.full((tokens,), -100)
        x = h[:tokens]
        assert call(entry, x, matrix, bias, target, reduction="sum").item() == 0
        assert math.isnan(call(entry, x, matrix, bias, target).item())
        grads = gradients(call(entry, x, matrix, bias, target, reduction="sum"), (h, matrix))
        assert not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e.function != "masked_loss"])
def test_a_single_class(name: str) -> None:
    """The target is certain. Only z_loss, which compares with a constant, is not 0."""
    entry, (h, matrix, bias) = ENTRIES[name], leaves(3)
    h32, one, b = (x.detach().requires_grad_() for x in (h, matrix[:1], bias[:1]))
    target = torch.zeros(3, dtype=torch.long)
    actual = call(entry, h32, one, b, target, reduction="none")
    want = 0.0
    if entry.function == "z_loss":
        want = math.log1p(math.exp(0.7 * 1.3)) / 0.7
    torch.testing.assert_close(actual, torch.full_like(actual, want), rtol=1e-12, atol=1e-12)
    for grad in gradients(actual.sum(), (h32, one, b)):
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, 1e-4])
@pytest.mark.parametrize("name", ENTRIES)
def test_extreme_logits_give_finite_losses_and_gradients(
    name: str, size: float, dtype: torch.dtype
) -> None:
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6, scale=size)
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in (h, matrix, bias))
    values = call(entry, *inputs, TARGET, reduction="none")
    assert bool(values.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in gradients(values.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ENTRIES)
def test_16_bit_inputs_are_computed_in_fp32(name: str, dtype: torch.dtype) -> None:
    """Losses of 16-bit inputs are those of their values in fp32; gradients are rounded once more.

    The bias of fp32 and fp64 differ by rounding only, so the noise must be drawn in fp32 for both.
    """
    entry, (h, matrix, bias) = ENTRIES[name], leaves(6)
    small = tuple(x.detach().to(dtype).requires_grad_() for x in (h, matrix, bias))
    wide = tuple(x.detach().float().requires_grad_() for x in small)
    actual, want = (call(entry, *x, TARGET, reduction="none") for x in (small, wide))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
    unit = torch.finfo(dtype).eps
    for one, other in zip(gradients(actual.sum(), small), gradients(want.sum(), wide)):
        assert one.dtype == dtype
        largest = float(other.abs().max())
        torch.testing.assert_close(one.float(), other, rtol=unit, atol=4 * unit * largest)


def test_margins_at_angles_of_0_and_pi() -> None:
    """At both angles sin θ is 0 and acos has no derivative. The gradient is finite."""
    u = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    matrix = torch.cat([u, -u, torch.tensor([[0.8, -0.6]], dtype=torch.float64)]).requires_grad_()
    h = (3 * u).expand(2, 2).clone().requires_grad_()
    options: dict[str, Any] = {"kind": "arc", "scale": 2.0, "margin": 0.5, "reduction": "none"}
    actual = losses.margin_loss(h, matrix, torch.tensor([0, 1]), **options)
    same, opposite = 2 * math.cos(0.5), 2 * (-1 - 0.5 * math.sin(0.5))
    opposites = [math.exp(-2.0), math.exp(2.0)]  # the first class for the second token
    want = [
        math.log(math.exp(t) + 1 + other) - t
        for t, other in zip((same, opposite), opposites, strict=True)
    ]
    torch.testing.assert_close(actual, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)
    for grad in gradients(actual.sum(), (h, matrix)):
        assert bool(grad.isfinite().all())


def test_a_well_trained_token_has_a_small_positive_loss() -> None:
    """At scale 64 the target is exp(64) times the rest. A corrected log-sum-exp would give 0."""
    h = torch.tensor([[1.0, 0.0]])
    matrix = torch.tensor([[1.0, 0.0], [-1.0, 1e-3]])
    actual = losses.margin_loss(h, matrix, torch.tensor([0]), kind="cos", margin=0.0)
    assert float(actual) == pytest.approx(math.exp(-128), rel=1e-4)


def test_rows_of_zeros_have_cosine_0() -> None:
    h, matrix = torch.zeros(1, 3, requires_grad=True), rand(4, 3).float().requires_grad_()
    actual = losses.margin_loss(h, matrix, torch.tensor([1]), kind="cos", margin=0.0)
    assert actual.item() == pytest.approx(math.log(4), rel=1e-6)
    assert all(bool(g.isfinite().all()) for g in gradients(actual, (h, matrix)))


def test_noise_is_drawn_per_token_and_only_in_training() -> None:
    h, matrix = rand(5, 3), rand(7, 3, seed=1)
    target = torch.arange(5)
    plain = losses.linear_loss(h, matrix, target, reduction="none")
    calm = losses.noisy_loss(h, matrix, target, alpha=1.0, training=False, reduction="none")
    torch.testing.assert_close(calm, plain, rtol=1e-12, atol=1e-13)
    first, second = (
        losses.noisy_loss(h, matrix, target, alpha=1.0, reduction="none",
                          generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )  # fmt: skip
    assert bool((first > plain).all())
    assert bool((first != second).all())


def test_masked_loss_is_the_loss_of_the_classes_in_the_mask() -> None:
    h, matrix, bias = leaves(5)
    target, task = torch.tensor([0, 2, 0, 3, 2]), torch.arange(CLASSES) < 4
    actual = losses.masked_loss(h, matrix, target, task, linear_bias=bias)
    alone = losses.linear_loss(h, matrix[:4], target, linear_bias=bias[:4])
    torch.testing.assert_close(actual, alone, rtol=1e-13, atol=0)
    for value in (-math.inf, 0.7):
        loss = losses.masked_loss(h, matrix, target, task, linear_bias=bias, value=value)
        _, by_matrix, by_bias = gradients(loss, (h, matrix, bias))
        assert not by_matrix[4:].any()
        assert not by_bias[4:].any()


def test_a_mask_may_differ_between_tokens() -> None:
    h, matrix, _ = leaves(4)
    target = torch.tensor([0, 1, 2, 3])
    masks = (torch.arange(CLASSES)[None] + torch.arange(4)[:, None]) % 2 == 0
    masks = masks.scatter(1, target[:, None], True)
    actual = losses.masked_loss(h, matrix, target, masks, value=-0.4, reduction="none")
    one_by_one = [
        losses.masked_loss(h[n : n + 1], matrix, target[n : n + 1], masks[n], value=-0.4)
        for n in range(4)
    ]
    torch.testing.assert_close(actual, torch.stack(one_by_one), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 50, 3000])
def test_perturb_max_of_equal_logits_is_log_v(classes: int, dtype: torch.dtype) -> None:
    h, matrix = torch.ones(1, 2, dtype=dtype), torch.ones(classes, 2, dtype=dtype)
    actual = losses.perturb_max_loss(h, matrix, torch.tensor([0]), std=0.3)
    # V terms log Φ(t + d), each of up to log V in size, are added.
    error = 4 * classes * torch.finfo(dtype).eps * math.log(classes)
    assert float(actual) == pytest.approx(math.log(classes), abs=max(error, 1e-14))


@pytest.mark.parametrize("lead", [-40.0, -3.0, 0.0, 0.5, 8.0])
def test_perturb_max_of_two_classes_is_a_normal_distribution(lead: float) -> None:
    """z_y + ε_y − z_k − ε_k is normal with variance 2 std²."""
    z = torch.tensor([[lead, 0.0]], dtype=torch.float64)
    actual = losses.perturb_max_loss(z, torch.eye(2).double(), torch.tensor([0]), std=2.0)
    want = -torch.special.log_ndtr(torch.tensor(lead / math.sqrt(8), dtype=torch.float64))
    torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-14)


def test_perturb_max_of_a_far_target_is_the_squared_distance() -> None:
    """With V − 1 equal rivals at distance D, −log P tends to D²/2 · (V − 1)/V."""
    z = torch.zeros(1, 5)
    z[0, 0] = -3000.0
    actual = losses.perturb_max_loss(z, torch.eye(5), torch.tensor([0]))
    assert float(actual) == pytest.approx(3000**2 / 2 * 4 / 5, rel=1e-4)


def test_exact_loss_is_the_error_rate_of_noisy_scores() -> None:
    """Monte Carlo with 10⁶ draws; the bound is five standard errors."""
    z, draws = rand(1, 4), 10**6
    noisy = z + 0.7 * rand(draws, 4, seed=9)
    rate = float((noisy.argmax(-1) != 2).double().mean())
    actual = losses.exact_loss(z, torch.eye(4).double(), torch.tensor([2]), std=0.7)
    assert float(actual) == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / draws))


def test_z_loss_does_not_change_with_shifts_and_scales() -> None:
    h, matrix, bias = (x.detach() for x in leaves(6))
    actual = losses.z_loss(h, matrix, TARGET, a=0.5, b=2.0, linear_bias=bias)
    for other in (
        losses.z_loss(7 * h, matrix, TARGET, a=0.5, b=2.0, linear_bias=7 * bias),
        losses.z_loss(h, matrix + rand(4, seed=8), TARGET, a=0.5, b=2.0, linear_bias=bias + 3),
    ):
        torch.testing.assert_close(other, actual, rtol=1e-12, atol=0)


def test_moments_stay_accurate_under_a_common_offset() -> None:
    """Rows that share an offset of 100: Σz² − mean² from raw sums would lose four digits in fp32.

    Left is the rounding of the matrix itself, 2⁻²⁴ · 100 per entry, against entries of size 1.
    """
    h, matrix, _ = (x.detach() for x in leaves(6))
    wide = matrix + 100
    actual = losses.z_loss(h.float(), wide.float(), TARGET, a=0.5, b=2.0)
    want = losses.z_loss(h, wide, TARGET, a=0.5, b=2.0)
    torch.testing.assert_close(actual.double(), want, rtol=1e-4, atol=0)


def test_emo_has_the_value_of_cross_entropy_but_spares_similar_classes() -> None:
    """Class 1 has almost the embedding of the target, class 2 the opposite."""
    matrix = torch.tensor([[1.0, 0.0], [0.98, 0.2], [-1.0, 0.0]]).double().requires_grad_()
    h = torch.tensor([[0.1, 0.3]]).double().requires_grad_()
    bias = torch.zeros(3).double().requires_grad_()
    target = torch.tensor([0])
    emo = losses.emo_loss(h, matrix, target, linear_bias=bias)
    plain = attnzoo.losses.linear_loss(h, matrix, target, linear_bias=bias)
    torch.testing.assert_close(emo, plain, rtol=1e-9, atol=0)
    by_emo, by_plain = (torch.autograd.grad(x, bias, retain_graph=True)[0] for x in (emo, plain))
    assert by_emo[1].item() < by_plain[1].item()


@pytest.mark.parametrize("name", ["z", "spherical"])
def test_moments_give_the_loss_of_the_logits(name: str) -> None:
    """With 40 tokens, 30 classes and d = 4 the moments cost less than the logits."""
    entry, h, matrix = ENTRIES[name], rand(40, 4), rand(30, 4, seed=1)
    inputs = h.requires_grad_(), matrix.requires_grad_(), rand(30, seed=2).requires_grad_()
    target = torch.arange(40) % 30
    actual, want = (f(entry, *inputs, target) for f in (call, define))
    torch.testing.assert_close(actual, want.mean(), rtol=1e-12, atol=0)
    for one, other in zip(*(gradients(x.mean(), inputs) for x in (actual, want))):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("classes", [4, 400])
def test_spherical_loss_of_states_orthogonal_to_all_rows(classes: int) -> None:
    """All logits are 0 up to rounding, so that the exact loss is log V for a large eps."""
    matrix = torch.cat([rand(classes, 4, seed=1), torch.zeros(classes, 4)], 1).float()
    turn = torch.linalg.qr(rand(8, 8, seed=2)).Q.float()
    h = torch.cat([torch.zeros(64, 4), 10 * rand(64, 4)], 1).float()
    actual = losses.spherical_loss(
        h @ turn, matrix @ turn, torch.zeros(64, dtype=torch.long), eps=1
    )
    assert actual.item() == pytest.approx(math.log(classes), rel=1e-3)


@pytest.mark.parametrize("classes", [5, 1000])
def test_z_loss_of_equal_logits_has_no_gradient(classes: int) -> None:
    matrix = rand(8).float().expand(classes, 8).clone().requires_grad_()
    h, target = rand(40, 8, seed=1).float(), torch.arange(40) % 5
    actual = losses.z_loss(h, matrix, target, a=0.1, b=10.0)
    assert actual.item() == pytest.approx(math.log1p(math.e) / 0.1, rel=1e-6)
    assert not torch.autograd.grad(actual, matrix)[0].any()


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e19, 1e30])
@pytest.mark.parametrize("classes", [20, 200])
def test_z_loss_of_scaled_states_is_the_same(classes: int, factor: float) -> None:
    h, matrix = rand(40, 8).float(), rand(classes, 8, seed=1).float()
    target = torch.arange(40) % 20
    actual, want = (losses.z_loss(x, matrix, target, a=0.5, b=2.0) for x in (factor * h, h))
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("function", ["perturb_max_loss", "exact_loss"])
def test_a_target_with_the_logit_minus_infinity(function: str) -> None:
    h, matrix, bias = (x.detach().requires_grad_() for x in leaves(2))
    lost = bias.detach().clone()
    lost[3] = -math.inf
    values = getattr(losses, function)(
        h, matrix, torch.tensor([3, 4]), linear_bias=lost, reduction="none"
    )
    assert values[0].item() == (math.inf if function == "perturb_max_loss" else 1.0)
    assert bool(values[1].isfinite())
    (grad,) = torch.autograd.grad(values.sum(), h)
    assert not grad[0].any()
    assert bool(grad[1].any())


def test_perturb_max_of_a_certain_target_is_not_negative() -> None:
    z = torch.cat([torch.full((50, 1), 8.0), rand(50, 9).float()], 1)
    values = losses.perturb_max_loss(
        z, torch.eye(10), torch.zeros(50, dtype=torch.long), reduction="none"
    )
    assert values.min().item() >= 0


def test_emo_of_a_class_with_the_direction_of_the_target() -> None:
    """L_emo is 0 up to rounding, and so is its gradient. The value is that of cross entropy."""
    row = rand(1, 16).float()
    matrix = torch.cat([row, 2 * row, -torch.ones(1, 16)])
    bias = torch.tensor([-20.0, 0.0, -30.0], requires_grad=True)
    h, target = rand(1, 16, seed=1).float(), torch.tensor([0])
    actual = losses.emo_loss(h, matrix, target, linear_bias=bias)
    plain = losses.linear_loss(h, matrix, target, linear_bias=bias)
    torch.testing.assert_close(actual, plain, rtol=1e-6, atol=0)
    assert bool(torch.autograd.grad(actual, bias)[0].isfinite().all())


def test_arc_margin_of_a_row_of_zeros() -> None:
    """θ = π/2 with all classes, so t = −s sin m."""
    actual = losses.margin_loss(
        torch.zeros(1, 3), torch.eye(3), torch.tensor([0]), scale=1.0, margin=0.5
    )
    t = -math.sin(0.5)
    assert float(actual) == pytest.approx(math.log(math.exp(t) + 2) - t, rel=1e-6)
