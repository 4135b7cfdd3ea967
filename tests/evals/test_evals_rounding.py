"""Rounded operands of products (setting ``matmul``), rounded inputs, and the command ``ties``."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from evals.__main__ import main
from evals.measures.arithmetic import rounded_products
from evals.tasks import TASKS
from evals.tasks.families.retrieval import RetrievalSettings
from evals.theory.ties import accuracies


def low(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize("inference", [False, True])
def test_products_round_their_operands_and_nothing_else(inference: bool) -> None:
    a, b, bias = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    with rounded_products("bfloat16"), torch.inference_mode(inference):
        products = (
            F.linear(a, b, bias),
            torch.einsum("id,jd->ij", a, b) + bias,
            a[None] @ b.T + bias,
        )
        sums, exact = a + 1, F.linear(a.double(), b.double())
    for product in products:
        torch.testing.assert_close(product.squeeze(0), low(a) @ low(b).T + bias)
    assert torch.equal(sums, a + 1)
    assert torch.equal(exact, a.double() @ b.double().T)
    assert not torch.equal(products[0], F.linear(a, b, bias))


def test_backward_products_are_rounded_too() -> None:
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    slope = torch.randn(5, 3)
    with rounded_products("bfloat16"):
        F.linear(a, b).backward(slope)
    torch.testing.assert_close(a.grad, low(slope) @ low(b.detach()))
    torch.testing.assert_close(b.grad, low(slope).T @ low(a.detach()))


def test_products_in_the_forward_pass_of_an_exact_module_are_not_rounded() -> None:
    exact, other, x = torch.nn.Linear(7, 3), torch.nn.Linear(7, 3), torch.randn(5, 7)
    with torch.inference_mode():
        expected = exact(x)
        with rounded_products("bfloat16", [exact]):
            results = exact(x), other(x)
    assert torch.equal(results[0], expected)
    torch.testing.assert_close(results[1], low(x) @ low(other.weight).T + other.bias)
    assert "forward" not in vars(exact)


def test_attention_multiplies_rounded_queries_keys_weights_and_values() -> None:
    q, k, v = torch.randn(3, 2, 1, 4, 8)
    with rounded_products("bfloat16"):
        out = attnzoo.attention(q, k, v)
    weights = (low(q) @ low(k).mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(out, low(weights) @ low(v), rtol=2**-8, atol=2**-8)
    assert not torch.equal(out, attnzoo.attention(q, k, v))


def test_rounded_inputs_keep_the_label() -> None:
    task, plain = TASKS["max-retrieval"], RetrievalSettings(steps=1)
    settings = RetrievalSettings(steps=1, inputs="bfloat16")
    exact, batch = (task.batch(0, "test", 64, 0, 4, one) for one in (plain, settings))
    assert torch.equal(batch.features, low(exact.features))
    assert torch.equal(batch.label, exact.label)


def test_the_defaults_leave_the_keys_of_stored_results_as_they_are() -> None:
    identity = RetrievalSettings(steps=1).identity()
    assert not {"matmul", "inputs"} & identity.keys()
    assert RetrievalSettings(steps=1, matmul="bfloat16").identity()["matmul"] == "bfloat16"


@pytest.mark.parametrize("name", ["matmul", "inputs"])
def test_unknown_dtypes_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of float32, bfloat16, float16"):
        RetrievalSettings(steps=1, **{name: "int8"})


def test_ceilings_of_rounded_values() -> None:
    """With k tied items, a random one is right with probability near 1/k + (1 − 1/k) / 10."""
    few, many = accuracies(16, 500), accuracies(4096, 500)
    assert 0.97 < few["bfloat16"].random_item <= few["bfloat16"].most_frequent_class < 1
    assert many["float16"].random_item == pytest.approx(1 / 2 + 1 / 20, abs=0.25)
    tied = 1 + 4095 / 512
    assert many["bfloat16"].random_item == pytest.approx(0.9 / tied + 0.1, abs=0.05)
    assert many["bfloat16"].most_frequent_class > many["bfloat16"].random_item + 0.05
    assert many == accuracies(4096, 500)


def test_the_command_prints_published_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ties", "--sequences", "2"]) == 0
    text, progress = capsys.readouterr()
    assert re.match(r"\[1/\d+\] n = 16: done after 0:0\d\n\[2/", progress)
    assert "softmax, published" in text
    assert "2 test sequences per length (seed 0)" in text
