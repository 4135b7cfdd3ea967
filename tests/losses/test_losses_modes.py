"""Losses under autograd modes, autocast, checkpointing and torch.compile.

Further tests use inputs with different memory layouts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.losses import linear_loss, loss, margin_loss, z_loss
from helpers.cases import params_of, rand
from helpers.loss_cases import LOSSES, QUICK, learned, some, targets, tensors
from helpers.loss_definitions import dense_linear

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def same(actual: Any, want: Any, **close: Any) -> None:
    for have, exact in zip(actual, want, strict=True):
        torch.testing.assert_close(have, exact, **(close or CLOSE))


# ---- autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", LOSSES)
def test_backward_twice_gives_the_same_gradients(variant: str, reduction: str) -> None:
    """The second of three passes has another incoming gradient. No pass changes saved tensors."""
    inputs, extra = tensors(), learned(variant)
    params = {**params_of(variant), **extra}
    leaves = [*inputs, *extra.values()]
    x, e, b = inputs
    value = linear_loss(x, e, targets(), variant, linear_bias=b, reduction=reduction, **params)
    value = value.sum()
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(3 * value, leaves, retain_graph=True)
    third = torch.autograd.grad(value, leaves)
    same(first, copies)
    same(second, [3 * g for g in copies])
    same(third, copies)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", some(LOSSES))
def test_second_derivatives_raise_or_are_right(variant: str, reduction: str) -> None:
    """Second derivatives of taylor are right here. Those of all other variants raise an error.

    The first derivative of taylor by x is computed by autograd from the moments of the classes.
    """
    x, e, b = tensors()

    def second(function: Any) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"linear_bias": b, "reduction": reduction, **params_of(variant)}
        value = function(x, e, targets(), variant, **options).sum()
        (dx,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, e, b))

    if variant == "taylor":
        same(second(linear_loss), second(lambda *a, **options: dense_linear(*a, **options).loss))
        return
    with pytest.raises(RuntimeError, match="first derivatives"):
        second(linear_loss)


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_transforms_raise(name: str) -> None:
    x, e, _ = (t.detach() for t in tensors())

    def loss_of(x: Tensor) -> Tensor:
        return linear_loss(x, e, targets())

    with pytest.raises((ValueError, RuntimeError), match="torch.func|vmap|transform"):
        if name == "vmap":
            torch.vmap(loss_of)(x[None])
        elif name == "grad":
            torch.func.grad(loss_of)(x)
        else:
            torch.func.jvp(loss_of, (x,), (x,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", LOSSES)
def test_without_gradients_the_value_is_the_same(variant: str, reduction: str) -> None:
    x, e, b = tensors()
    options: dict[str, Any] = {"linear_bias": b, "reduction": reduction, **params_of(variant)}
    want = linear_loss(x, e, targets(), variant, **options)
    assert want.requires_grad
    with torch.no_grad():
        actual = linear_loss(x, e, targets(), variant, **options)
    assert not actual.requires_grad
    torch.testing.assert_close(actual, want.detach(), **CLOSE)
    with torch.inference_mode():
        actual = linear_loss(x, e, targets(), variant, **options)
    torch.testing.assert_close(actual.clone(), want.detach(), **CLOSE)
    options["linear_bias"] = b.detach()
    actual = linear_loss(x.detach(), e.detach(), targets(), variant, **options)
    assert not actual.requires_grad
    torch.testing.assert_close(actual, want.detach(), **CLOSE)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", LOSSES)
def test_each_input_may_be_the_only_one_that_requires_a_gradient(
    variant: str, reduction: str
) -> None:
    inputs, extra = tensors(), learned(variant)
    names = ["input", "linear_weight", "linear_bias", *extra]
    leaves = dict(zip(names, (*inputs, *extra.values()), strict=True))
    upstream = torch.linspace(0.5, 1.5, 23).double() if reduction == "none" else None

    def loss_of(arguments: dict[str, Tensor]) -> Tensor:
        options = {**params_of(variant), **arguments}
        return linear_loss(target=targets(), variant=variant, reduction=reduction, **options)

    want = torch.autograd.grad(loss_of(leaves), list(leaves.values()), upstream)
    for name, exact in zip(names, want, strict=True):
        only = {k: x.detach() for k, x in leaves.items()}
        only[name].requires_grad_()
        gradients = torch.autograd.grad(loss_of(only), only[name], upstream)
        same(gradients, [exact])


@pytest.mark.parametrize("variant", some(LOSSES))
def test_gradients_accumulate_over_calls_with_a_shared_weight(variant: str) -> None:
    x, e, b = tensors()
    y, params = targets(), params_of(variant)
    for part in (slice(0, 10), slice(10, 23)):
        part_loss = linear_loss(
            x[part], e, y[part], variant, linear_bias=b, reduction="sum", **params
        )
        part_loss.backward()
    total = linear_loss(x, e, y, variant, linear_bias=b, reduction="sum", **params)
    same((x.grad, e.grad, b.grad), torch.autograd.grad(total, (x, e, b)))


def test_gradients_of_a_scaled_loss_are_scaled() -> None:
    """A gradient scaler multiplies a loss by a factor, as this test does.

    The reductions "mean" and "none" compute the gradients in different passes.
    """
    x, e, b = tensors()
    for reduction in ("mean", "none"):
        value = linear_loss(x, e, targets(), linear_bias=b, reduction=reduction).sum()
        want = torch.autograd.grad(value, (x, e, b), retain_graph=True)
        scaled = torch.autograd.grad(value * 1024, (x, e, b))
        same(scaled, [1024 * g for g in want])


def test_tied_input_and_weight_sum_their_gradients() -> None:
    e = rand(9, 4).requires_grad_()
    y = torch.arange(9)
    (actual,) = torch.autograd.grad(linear_loss(e, e, y), e)
    (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(e @ e.mT, y), e)
    same([actual], [want])


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", some(LOSSES))
def test_layouts_do_not_matter(variant: str, reduction: str) -> None:
    x, e, b = rand(2, 11, 5), rand(31, 5, seed=1), rand(31, seed=2)
    y = targets(22).reshape(2, 11)
    options: dict[str, Any] = {"reduction": reduction, **params_of(variant)}

    def loss_and_gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        x, e, b = (leaf.requires_grad_() for leaf in leaves)
        value = linear_loss(x, e, y, variant, linear_bias=b, **options)
        return (value.detach(), *torch.autograd.grad(value.sum(), leaves))

    want = loss_and_gradients(x.clone(), e.clone(), b.clone())
    strided = loss_and_gradients(
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        e.mT.contiguous().mT,
        torch.stack([b, b], -1)[:, 0].detach(),
    )
    same(strided, want)
    y = y.mT.contiguous().mT
    same(loss_and_gradients(x.clone(), e.clone(), b.clone()), want)


def test_expanded_inputs() -> None:
    x = rand(1, 5).expand(7, 5).requires_grad_()
    e, b = rand(31, 5, seed=1), torch.zeros(1).double().expand(31)
    actual = linear_loss(x, e, targets(7), linear_bias=b)
    want = torch.nn.functional.cross_entropy(x @ e.mT, targets(7))
    same([actual, *torch.autograd.grad(actual, x)], [want, *torch.autograd.grad(want, x)])


# ---- autocast, checkpointing, compilation -------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", some(LOSSES))
def test_autocast_equals_a_call_with_rounded_inputs(variant: str, reduction: str) -> None:
    """Products take bf16 values; scores and the loss are fp32."""
    x, e, b = (t.detach().float().requires_grad_() for t in tensors(40, 60, 16))
    y = targets(40, 60)
    extra = learned(variant, torch.float32)
    params = {**params_of(variant), **extra}
    options: dict[str, Any] = {"reduction": reduction, "linear_bias": b, **params}
    leaves = [x, e, b, *extra.values()]
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_loss(x, e, y, variant, **options)
    assert actual.dtype == torch.float32
    gradients = torch.autograd.grad(actual.sum(), leaves)
    assert [g.dtype for g in gradients] == [torch.float32] * len(leaves)
    low = [t.detach().bfloat16().double().requires_grad_() for t in (x, e)]
    wide = {name: t.detach().double().requires_grad_() for name, t in extra.items()}
    bias = b.detach().double().requires_grad_()
    options.update(linear_bias=bias, **wide)
    want = linear_loss(*low, y, variant, **options)
    # bf16 has eps 2^-7. |bias| is below 3, so rounding it may shift scores by at most 3 · 2^-8.
    torch.testing.assert_close(actual.double(), want, rtol=2e-2, atol=2e-2)
    exact = torch.autograd.grad(want.sum(), [*low, bias, *wide.values()])
    for have, right in zip(gradients, exact, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(have.double(), right, rtol=0, atol=3e-2 * scale)


def test_autocast_keeps_scores_in_fp32() -> None:
    """Logits near 1000 that differ by 0.25 would be equal in bf16."""
    x = torch.tensor([[1.0, 0.25]], requires_grad=True)
    e = torch.tensor([[1000.0, 0.0], [1000.0, 1.0], [1000.0, 2.0]])
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_loss(x, e, torch.tensor([0]))
    want = torch.tensor([0.0, 0.25, 0.5]).logsumexp(0)
    torch.testing.assert_close(actual.detach(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", some(LOSSES))
def test_checkpointing(variant: str, reduction: str) -> None:
    inputs, extra = tensors(), learned(variant)
    params = {**params_of(variant), **extra}

    def compute_loss(x: Tensor, e: Tensor, b: Tensor) -> Tensor:
        options: dict[str, Any] = {"linear_bias": b, "reduction": reduction, **params}
        return linear_loss(x.tanh(), e, targets(), variant, **options).sum()

    leaves = [*inputs, *extra.values()]
    want = torch.autograd.grad(compute_loss(*inputs), leaves)
    actual = torch.autograd.grad(checkpoint(compute_loss, *inputs, use_reentrant=False), leaves)
    same(actual, want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("variant", some(LOSSES, ()))
def test_compile(variant: str, reduction: str, dynamic: bool) -> None:
    torch.compiler.reset()
    extra = learned(variant)
    params = {**params_of(variant), **extra}

    def compute_loss(x: Tensor, e: Tensor, b: Tensor, y: Tensor) -> Tensor:
        options: dict[str, Any] = {"linear_bias": b, "reduction": reduction, **params}
        return 2 * linear_loss(x.tanh(), e, y, variant, **options)

    compiled = torch.compile(compute_loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (23, 11):
        x, e, b = tensors(tokens)
        y = targets(tokens)
        leaves = [x, e, b, *extra.values()]
        actual, want = compiled(x, e, b, y), compute_loss(x, e, b, y)
        torch.testing.assert_close(actual, want, **CLOSE)
        same(*(torch.autograd.grad(value.sum(), leaves) for value in (actual, want)))


@pytest.mark.slow
# torch imports code with its deprecated torch.jit.script when inductor runs for the first time.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("variant", ["softmax", "entmax", "taylor"])
def test_compile_with_inductor_statistics_and_mask(variant: str) -> None:
    torch.compiler.reset()
    mask = torch.arange(31) % 7 < 6

    def loss_and_score(x: Tensor, e: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"linear_bias": b, "return_stats": True, "class_mask": mask}
        actual, stats = linear_loss(x, e, y, variant, **options)
        return actual, stats.target_score

    x, e, b = tensors()
    y = torch.where(mask[targets() % 31], targets(), -100)
    (actual, score), (want, right) = (
        torch.compile(loss_and_score, fullgraph=True)(x, e, b, y),
        loss_and_score(x, e, b, y),
    )
    same([actual, score], [want, right], rtol=1e-12, atol=1e-12, equal_nan=True)
    same(*(torch.autograd.grad(value, (x, e, b)) for value in (actual, want)))


def test_loss_of_logits_runs_in_modes() -> None:
    z = rand(23, 31).requires_grad_()
    for variant in QUICK:
        params = params_of(variant)
        for reduction in ("mean", "none"):
            value = loss(z, targets(), variant, reduction=reduction, **params).sum()
            first = torch.autograd.grad(value, z, retain_graph=True)
            same(torch.autograd.grad(value, z), first)


@pytest.mark.slow
@pytest.mark.parametrize("function", [linear_loss, z_loss, margin_loss])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_with_operands_that_are_not_contiguous(function: Any) -> None:
    torch.compiler.reset()
    options = {"a": 0.1, "b": 10.0} if function is z_loss else {}
    h, e, y = (
        rand(8, 6).mT.requires_grad_(),
        rand(8, 9, seed=1).mT.requires_grad_(),
        torch.arange(6),
    )
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, want = (
        torch.autograd.grad(f(h, e, y, **options), [h, e]) for f in (compiled, function)
    )
    torch.testing.assert_close(actual, want)
