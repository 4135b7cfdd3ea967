"""A third-party variant has a loss if its form defines one. Otherwise a call raises an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import Activation, Pairwise, Param
from attnzoo.core import registry
from attnzoo.core.activations import EXP
from attnzoo.losses import linear_loss
from helpers.cases import rand
from helpers.loss_cases import targets, tensors

INPUT, WEIGHT = rand(4, 3).float(), rand(6, 3, seed=1).float()
TARGET = torch.tensor([0, 5, 2, 2])
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variants that a test registers."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))


def register(name: str, form: Pairwise | None, **fields: Any) -> None:
    def weights(q: Tensor, k: Tensor, call: Any, **params: Any) -> Tensor:
        return call.softmax(call.scores(q, k))

    forms = {} if form is None else {"forms": lambda call, **params: (form,)}
    attnzoo.register_variant(attnzoo.Variant(name, "", "", weights, **forms, **fields))


RELU = Activation("relu", lambda s, shape: s.relu(), lambda s, phi, shape: (phi > 0).to(phi.dtype))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    "form",
    [None, Pairwise(RELU, "sum"), Pairwise(RELU, "none", offset=0.0)],
    ids=["a definition only", "a weight of the target that can be 0", "no integral"],
)
def test_third_party_variants_without_a_loss_raise(form: Pairwise | None) -> None:
    register("my_own", form)
    with pytest.raises(ValueError, match="my_own") as error:
        linear_loss(INPUT, WEIGHT, TARGET, "my_own")
    # The message gives a reason beyond the name.
    assert len(str(error.value)) > 40


@pytest.mark.usefixtures("own_registry")
def test_the_reason_of_an_unsupported_third_party_variant_is_raised() -> None:
    register("never", Pairwise(EXP, "sum"), unsupported=lambda call: "never works on Sundays")
    with pytest.raises(ValueError, match="never works on Sundays"):
        linear_loss(INPUT, WEIGHT, TARGET, "never")


@pytest.mark.usefixtures("own_registry")
def test_third_party_parameters_are_checked() -> None:
    power = Param("power", 1.0, check=lambda x: x > 0, allowed="above 0")
    register("strict", Pairwise(EXP, "sum"), params=(power,))
    with pytest.raises(ValueError, match="power"):
        linear_loss(INPUT, WEIGHT, TARGET, "strict", power=-1.0)


def assert_equal_losses(
    actual: Tensor, per_token: Tensor, y: Tensor, inputs: tuple[Tensor, ...], reduction: str
) -> None:
    """The loss and its gradients are those of ``per_token``; targets below 0 are ignored."""
    want = torch.where(y >= 0, per_token, 0.0)
    want = want.sum() / (y >= 0).sum() if reduction == "mean" else want
    torch.testing.assert_close(actual, want, **CLOSE)
    gradients = (torch.autograd.grad(value.sum(), inputs) for value in (actual, want))
    for have, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(have, exact, **CLOSE)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_third_party_variant_whose_activation_has_an_integral_has_a_loss(reduction: str) -> None:
    """φ = ReLU², without a normalizer: L = Σ_j ReLU(s_j − o)³/3 − (s_y − o)."""
    square = Activation(
        "square",
        lambda s, shape: s.relu() ** 2,
        lambda s, phi, shape: 2 * phi.sqrt(),
        integral=lambda s, shape: s.relu() ** 3 / 3,
    )

    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return call.zero_hidden((call.scores(q, k) - 0.3).relu() ** 2)

    attnzoo.register_variant(
        attnzoo.Variant(
            "relu_squared", "ReLU(z − 0.3)²", "", weights,
            forms=lambda call: (Pairwise(square, "none", offset=0.3),), normalized=False,
        )
    )  # fmt: skip
    x, e, b = tensors()
    y = targets()
    actual = linear_loss(x, e, y, "relu_squared", linear_bias=b, reduction=reduction)
    z = x @ e.mT + b - 0.3
    want = (z.relu() ** 3 / 3).sum(-1) - z.gather(1, y.clamp(min=0)[:, None])[:, 0]
    assert_equal_losses(actual, want, y, (x, e, b), reduction)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_third_party_threshold_variant_whose_activation_has_an_integral_has_a_loss(
    reduction: str,
) -> None:
    """φ(x) = [1 + x]_+² with φ(0) = 1: L = τ + Σ_j [1 + s_j − τ]_+³/3 − 1/3 − s_y."""
    square = Activation(
        "shifted_square",
        lambda s, shape: (1 + s).relu() ** 2,
        lambda s, phi, shape: 2 * phi.sqrt(),
        integral=lambda s, shape: (1 + s).relu() ** 3 / 3,
        convex=True,
    )
    register("shifted", Pairwise(square, "threshold"))
    x, e, b = tensors()
    y = targets()
    actual = linear_loss(x, e, y, "shifted", linear_bias=b, reduction=reduction)
    z = x @ e.mT + b
    low = z.detach().amax(-1, keepdim=True)
    high = low + 1
    for _ in range(100):
        tau = (low + high) / 2
        above = ((1 + z.detach() - tau).relu() ** 2).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, tau, low), torch.where(above, high, tau)
    want = tau[:, 0] + ((1 + z - tau).relu() ** 3 / 3).sum(-1) - 1 / 3
    want = want - z.gather(1, y.clamp(min=0)[:, None])[:, 0]
    assert_equal_losses(actual, want, y, (x, e, b), reduction)


@pytest.mark.usefixtures("own_registry")
def test_a_third_party_sum_variant_whose_activation_is_positive_has_a_loss() -> None:
    """For φ(s) = 1 + s², L = log Σ_j φ(s_j) − log φ(s_y), with and without ``quadratic``."""
    x, e, b = tensors()
    y = targets()
    phi = 1 + (x @ e.mT + b) ** 2
    want = phi.sum(-1).log() - phi.gather(1, y.clamp(min=0)[:, None])[:, 0].log()
    want = want[y >= 0].mean()
    exact = torch.autograd.grad(want, (x, e, b))
    for name, quadratic in (("plain", None), ("moments", (1.0, 0.0, 1.0))):
        activation = Activation(
            name,
            lambda s, shape: 1 + s * s,
            lambda s, phi, shape: 2 * s,
            vanishes=False,
            positive=True,
            quadratic=quadratic,
        )
        register(name, Pairwise(activation, "sum"))
        actual = linear_loss(x, e, y, name, linear_bias=b)
        torch.testing.assert_close(actual, want, **CLOSE)
        for have, right in zip(torch.autograd.grad(actual, (x, e, b)), exact, strict=True):
            torch.testing.assert_close(have, right, **CLOSE)


@pytest.mark.usefixtures("own_registry")
def test_the_loss_of_a_single_class_is_0_also_if_phi_of_0_is_2() -> None:
    double = Activation(
        "double",
        lambda s, shape: 2 * (1 + s).relu() ** 2,
        lambda s, phi, shape: (8 * phi).sqrt(),
        integral=lambda s, shape: 2 * (1 + s).relu() ** 3 / 3,
        convex=True,
    )
    register("double", Pairwise(double, "threshold"))
    one = linear_loss(INPUT, WEIGHT[:1], torch.zeros_like(TARGET), "double", reduction="none")
    torch.testing.assert_close(one, torch.zeros_like(one))
    assert bool((linear_loss(INPUT, WEIGHT, TARGET, "double", reduction="none") >= 0).all())


POWER = Activation(
    "power",
    lambda s, shape: (1 + s).relu() ** shape,
    lambda s, phi, shape: shape * (1 + s).relu() ** (shape - 1),
    lambda s, phi, shape: torch.where(phi > 0, phi * (1 + s).clamp(min=1e-30).log(), 0.0),
    convex=True,
    integral=lambda s, shape: (1 + s).relu() ** (shape + 1) / (shape + 1),
)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("normalize", ["threshold", "none"])
def test_a_third_party_family_with_an_integral_has_a_loss(normalize: Any) -> None:
    """The family [1 + x]_+^p at p = 2 has the loss of [1 + x]_+²; a learned p raises."""
    square = Activation(
        "square",
        lambda s, shape: (1 + s).relu() ** 2,
        lambda s, phi, shape: 2 * phi.sqrt(),
        integral=lambda s, shape: (1 + s).relu() ** 3 / 3,
        convex=True,
    )
    offset = {"offset": 0.2} if normalize == "none" else {}
    register("fixed", Pairwise(square, normalize, **offset))
    attnzoo.register_variant(
        attnzoo.Variant(
            "family", "", "", lambda q, k, call, p: call.scores(q, k), params=(Param("p", 2.0),),
            forms=lambda call, p: (
                Pairwise(POWER, normalize, shape=call.per_query(p), **offset),
            ),
        )
    )  # fmt: skip
    x, e, b = tensors()
    actual = linear_loss(x, e, targets(), "family", linear_bias=b)
    want = linear_loss(x, e, targets(), "fixed", linear_bias=b)
    torch.testing.assert_close(actual, want, **CLOSE)
    gradients = (torch.autograd.grad(value, (x, e, b)) for value in (actual, want))
    for have, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(have, exact, **CLOSE)
    p = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="family.*gradient"):
        linear_loss(x, e, targets(), "family", linear_bias=b, p=p)
