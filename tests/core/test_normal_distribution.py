"""log Φ from one erfc."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev

from attnzoo.core.normal_distribution import SMALLEST, log_cdf, log_cdf_and_tail

# erfc is correct to a few units in the last place. A relative error e of its argument changes it by
# a factor of about 1 + x² e.
UNITS = 8


def points(dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.linspace(SMALLEST, 40.0, 4001, dtype=dtype), torch.zeros(1).to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_those_of_log_ndtr(dtype: torch.dtype) -> None:
    x = points(dtype)
    wide, info = x.double(), torch.finfo(dtype)
    error = UNITS * info.eps * (1 + wide.square())  # relative error of a tail
    want = torch.special.log_ndtr(wide)
    log_cdf, tail = (y.double() for y in log_cdf_and_tail(x))
    # log of a tail for x < 0, and about −tail for x > 0
    bound = error * want.abs().clamp(max=1.0) + UNITS * info.eps * want.abs()
    assert bool(((log_cdf - want).abs() <= bound + info.tiny).all())
    want = torch.special.log_ndtr(-wide.abs()).exp()
    assert bool(((tail - want).abs() <= error * want + info.tiny).all())


def test_infinite_values() -> None:
    x = torch.tensor([1e30, math.inf], requires_grad=True)
    y = log_cdf(x)
    assert y.tolist() == pytest.approx([0.0, 0.0], abs=1e-37)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.tolist() == [0.0, 0.0]


# torch imports its rules of forward mode with a function that it deprecates.
@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_derivatives() -> None:
    x = torch.tensor([SMALLEST, -3.0, -0.1, 0.0, 0.2, 5.0], dtype=torch.float64)
    x.requires_grad_()
    assert gradcheck(log_cdf, x, check_forward_ad=True)
    assert gradgradcheck(log_cdf, x)
    nested = (jacfwd(jacfwd(log_cdf)), jacfwd(jacrev(log_cdf)), jacrev(jacfwd(log_cdf)))
    want = jacrev(jacrev(torch.special.log_ndtr))(x.detach())
    for second in nested:
        torch.testing.assert_close(second(x.detach()), want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [torch.func.vmap, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")],
    ids=["vmap", "compile"],
)
def test_transforms(transform: Callable[[Callable[[Tensor], Tensor]], Callable]) -> None:
    x = torch.linspace(-4, 4, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    y = transform(log_cdf)(x)
    torch.testing.assert_close(y, torch.special.log_ndtr(x))
    (slope,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(torch.special.log_ndtr(x).sum(), x)
    torch.testing.assert_close(slope, want)
