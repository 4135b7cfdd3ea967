"""The output layers of the experiments on digits: losses and probabilities."""

from __future__ import annotations

import math

import pytest
import torch

import attnzoo
from commandline.variants import VariantCall, parse_spec
from evals.task import EVERY_VARIANT
from evals.tasks import EXPERIMENTS
from evals.tasks.digits import data, layers
from evals.tasks.digits.experiment import Classifier, ClassifierSettings, accuracy

CALLS = [parse_spec(text).train for text in layers.every_layer()]
VARIANTS = [call for call in CALLS if call.name not in layers.FUNCTIONS]


# Layers whose loss is an integral take seconds; other tests differentiate these losses.
INTEGRALS = ("perturb_max_loss", "exact_loss")


@pytest.mark.parametrize(
    "call",
    [pytest.param(x, marks=[pytest.mark.slow] if x.name in INTEGRALS else []) for x in CALLS],
    ids=str,
)
def test_every_output_layer_learns_and_gives_probabilities(call: VariantCall) -> None:
    torch.manual_seed(0)
    settings = ClassifierSettings(width=32)
    training, test = data.split(0)
    model = Classifier(call, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in data.batches(0, 60, 64, data.TRAIN):
        loss = model.loss(training.at(index))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    p = model.eval().probabilities(test.pixels)
    assert p.shape == (data.TEST, 10)
    assert p.dtype == torch.float64
    assert ((p >= 0) & (p <= 1)).all()
    assert accuracy(model, test) > 0.5


@pytest.mark.parametrize("call", VARIANTS, ids=str)
def test_probabilities_of_a_variant_are_its_weights(call: VariantCall) -> None:
    torch.manual_seed(0)
    layer = layers.layer(8, call)
    assert isinstance(layer, layers.VariantLayer)
    hidden = torch.randn(5, 8, dtype=torch.float64)
    logits = hidden @ layer.weight.double().T + layer.bias.double()
    params = {p.name: getattr(layer, p.name) for p in layer._specs(call.name)}
    params |= attnzoo.get_variant(call.name).output_defaults or {}
    expected = attnzoo.probabilities(logits.float(), call.name, **params)
    assert torch.allclose(layer.double().log_prob(hidden).exp().float(), expected, atol=1e-5)


def test_probabilities_of_the_functions_by_their_definitions() -> None:
    """z = hidden · weightᵀ + bias; the noise of perturb_max_loss is sampled."""
    torch.manual_seed(0)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    probabilities, logits = {}, {}
    for text in ("margin_loss(kind='am')", "noisy_loss(alpha=0.5)", "emo_loss",
                 "z_loss(a=2.0, b=1.0)", "spherical_loss", "perturb_max_loss"):  # fmt: skip
        layer = layers.layer(8, parse_spec(text).train).double()
        assert isinstance(layer, layers.FunctionLayer)
        name = text.split("(")[0]
        probabilities[name] = layer.log_prob(hidden).exp()
        logits[name] = layer.linear(hidden)
    for name in ("noisy_loss", "emo_loss"):
        assert torch.allclose(probabilities[name], logits[name].softmax(-1))
    z = logits["z_loss"]
    score = (z - z.mean(-1, keepdim=True)) / z.std(-1, correction=0, keepdim=True)
    assert torch.allclose(probabilities["z_loss"], torch.sigmoid(2 * (score - 1)))
    squares = logits["spherical_loss"].square() + 1e-3
    assert torch.allclose(probabilities["spherical_loss"], squares / squares.sum(-1, keepdim=True))
    draws = 20_000
    noisy = logits["perturb_max_loss"][:, None] + torch.randn(4, draws, 10, dtype=torch.float64)
    winners = torch.nn.functional.one_hot(noisy.argmax(-1), 10).double().mean(1)
    assert (probabilities["perturb_max_loss"] - winners).abs().max() < 5 * 0.5 / math.sqrt(draws)
    assert torch.allclose(probabilities["margin_loss"].sum(-1), torch.ones(4, dtype=torch.float64))


def test_probabilities_of_a_margin_loss_have_no_margin() -> None:
    torch.manual_seed(0)
    layer = layers.layer(8, parse_spec("margin_loss(kind='arc', scale=5.0)").train).double()
    assert isinstance(layer, layers.FunctionLayer)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    cosines = torch.nn.functional.cosine_similarity(hidden[:, None], layer.linear.weight, dim=-1)
    assert torch.allclose(layer.log_prob(hidden), (5 * cosines).log_softmax(-1))


def test_every_loss_of_the_library_is_an_output_layer() -> None:
    """masked_loss needs a mask for each image and belongs to continual learning."""
    public = {name for name in attnzoo.losses.__all__ if name.endswith("_loss")}
    assert set(layers.FUNCTIONS) == public - {"linear_loss", "masked_loss"}


def test_all_variants_with_a_loss_are_output_layers() -> None:
    names = {call.name for call in VARIANTS}
    for name in attnzoo.list_variants():
        reason = layers.unsupported(layers.completed(VariantCall(name)))
        assert (reason is None) == (name in names), reason
    assert {"softmax", "entmax", "sigmoid", "sink", "taylor"} <= names
    assert EXPERIMENTS["classification"].presets["quick"].variants == EVERY_VARIANT


def test_a_mask_of_all_classes_changes_nothing() -> None:
    """Options of the output layer, such as softcap, also hold for masked losses."""
    torch.manual_seed(0)
    hidden, target = 5 * torch.randn(6, 8), torch.arange(6)
    for text in ("softmax(softcap=0.5)", "softmax(label_smoothing=0.2)", "entmax(alpha=1.7)"):
        layer = layers.layer(8, parse_spec(text).train)
        assert isinstance(layer, layers.VariantLayer)
        masked = layer.masked_loss(hidden, target, torch.ones(layers.CLASSES, dtype=torch.bool))
        torch.testing.assert_close(masked, layer.loss(hidden, target))


@pytest.mark.parametrize(
    "text", ["margin_loss(reduction='none')", "noisy_loss(alpha=0.1, ignore_index=3)"]
)
def test_arguments_of_the_mean_over_images_cannot_be_set(text: str) -> None:
    reason = layers.unsupported(parse_spec(text).train)
    assert reason is not None
    assert "cannot be set here" in reason
