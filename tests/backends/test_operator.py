"""The decorator `operator` is tested with the example out = gain · factor · x + shift."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from helpers.operators import opcheck


class Vectors(NamedTuple):
    gain: Tensor | None = None
    shift: Tensor | None = None


class Result(NamedTuple):
    out: Tensor
    total: Tensor | None


@operator
def example_move(*, x: Tensor, vectors: Vectors, factor: float, want_total: bool) -> Result:
    gain = torch.ones_like(x) if vectors.gain is None else vectors.gain
    out = gain * factor * x + (0.0 if vectors.shift is None else vectors.shift)
    return Result(out, out.sum(-1) if want_total else None)


@example_move.fake
def _(*, x: Tensor, want_total: bool) -> Result:
    return Result(torch.empty_like(x), x.new_empty(x.shape[:-1]) if want_total else None)


@example_move.backward("x", "gain", "shift")
def example_move_backward(
    *, x: Tensor, vectors: Vectors, factor: float, out: Tensor, dout: Tensor,
    dtotal: Tensor | None, wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    dout = dout.clone() if dtotal is None else dout + dtotal[..., None]
    gain = torch.ones_like(x) if vectors.gain is None else vectors.gain
    made = {"x": lambda: gain * factor * dout, "gain": lambda: x * factor * dout}
    return {name: made[name]() if name in made else dout for name in wanted}


@operator
def example_double(*, x: Tensor) -> Tensor:
    return 2 * x


@example_double.fake
def _(*, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def operands(**vectors: Tensor) -> dict[str, Any]:
    x = torch.arange(1.0, 7.0).view(2, 3).requires_grad_()
    return {"x": x, "vectors": Vectors(**vectors), "factor": 2.0, "want_total": True}


@pytest.mark.parametrize("want_total", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("names", [(), ("gain",), ("shift",), ("gain", "shift")], ids=len)
def test_opcheck(names: tuple[str, ...], want_total: bool) -> None:
    vectors = {name: torch.full((2, 3), 3.0).requires_grad_() for name in names}
    opcheck(example_move, **{**operands(**vectors), "want_total": want_total})


def test_operands_that_require_a_gradient_get_one() -> None:
    gain, shift = torch.full((2, 3), 3.0).requires_grad_(), torch.zeros(2, 3)
    arguments = operands(gain=gain, shift=shift)
    outputs = example_move(**arguments)
    (outputs.out.sum() + 10 * outputs.total.sum()).backward()
    assert torch.equal(arguments["x"].grad, torch.full((2, 3), 66.0))
    assert torch.equal(gain.grad, 22 * arguments["x"].detach())
    assert shift.grad is None


def test_a_missing_output_gradient_is_zero() -> None:
    arguments = operands()
    example_move(**arguments).total.sum().backward()
    assert torch.equal(arguments["x"].grad, torch.full((2, 3), 2.0))


def test_an_output_that_is_not_requested_is_none() -> None:
    arguments = {**operands(), "want_total": False}
    assert example_move(**arguments).total is None
    assert example_move.overload(*example_move.flat(**arguments))[1].shape == (0,)


def test_operands_must_be_passed_by_name() -> None:
    arguments = operands()
    with pytest.raises(TypeError, match="takes the keyword arguments x, vectors"):
        example_move(*arguments.values())
    for wrong in (
        {**arguments, "more": 1},
        {"x": arguments["x"]},
        {**arguments, "more": arguments.pop("factor")},
    ):
        with pytest.raises(TypeError, match="takes the keyword arguments x, vectors"):
            example_move(**wrong)


def test_unsupported_derivatives_raise() -> None:
    arguments = operands()
    (dx,) = torch.autograd.grad(
        example_move(**arguments).out.sum(), arguments["x"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="pass backend='eager'"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="attnzoo::example_double is not differentiable"):
        example_double(x=arguments["x"]).sum().backward()


def test_calls_with_and_without_the_dispatcher_agree() -> None:
    results: list[list[Tensor]] = []
    direct: Any = example_move
    for call in (
        direct,
        lambda **arguments: example_move.overload(*example_move.flat(**arguments)),
    ):
        arguments = operands(gain=torch.full((2, 3), 3.0).requires_grad_())
        out, total = call(**arguments)
        (out.sum() + 10 * total.sum()).backward()
        results.append([out, total, arguments["x"].grad, arguments["vectors"].gain.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_saved_tensors_can_be_packed() -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.clone()

    arguments = operands()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = example_move(**arguments).out
    out.sum().backward()
    assert len(packed) == 2  # x and out
    assert torch.equal(arguments["x"].grad, torch.full((2, 3), 2.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it of saved tensors
def test_compiled_autograd_gives_the_same_gradients() -> None:
    arguments = operands()
    import torch._dynamo.compiled_autograd

    out = example_move(**arguments).out
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.sum().backward()
    assert torch.equal(arguments["x"].grad, torch.full((2, 3), 2.0))


def test_batched_gradients_raise() -> None:
    arguments = operands()
    out = example_move(**arguments).out
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(out, arguments["x"], torch.ones(4, 2, 3), is_grads_batched=True)
