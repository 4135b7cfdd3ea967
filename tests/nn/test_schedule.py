"""Settings that change during training: in_eval of Param, and ParameterSchedule."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import attnzoo
from attnzoo.nn import Attention, MultiheadAttention, ParameterSchedule, Transformer
from helpers.cases import rand


def qkv() -> tuple[torch.Tensor, ...]:
    return tuple(rand(1, 2, 9, 4, seed=i).float() for i in range(3))


def test_modules_add_noise_in_training_only() -> None:
    layer = Attention("noisy", 2, std=0.5)
    plain = attnzoo.attention(*qkv())
    torch.manual_seed(0)
    noisy = layer(*qkv())
    torch.manual_seed(0)
    assert torch.equal(noisy, attnzoo.attention(*qkv(), "noisy", std=0.5))
    assert not torch.allclose(noisy, plain)
    assert torch.equal(layer.eval()(*qkv()), plain)
    assert layer.std == 0.5  # it returns with train()


def test_a_schedule_sets_every_layer() -> None:
    model = Transformer(8, 16, 2, 3, "noisy", std=1.0)
    schedule = ParameterSchedule(model, "std", lambda step: 1 / (1 + step))
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    assert [layer.std for layer in layers] == [1.0] * 3
    schedule.step()
    assert [layer.std for layer in layers] == [0.5] * 3
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_a_schedule_continues_from_its_state() -> None:
    layer = MultiheadAttention(8, 2, variant="noisy", std=1.0)
    schedule = ParameterSchedule(layer, "std", lambda step: 0.5**step)
    schedule.step()
    state = schedule.state_dict()
    other = ParameterSchedule(layer, "std", lambda step: 0.5**step)
    assert layer.attend.std == 1.0
    other.load_state_dict(state)
    other.step()
    assert layer.attend.std == 0.25
    with pytest.raises(
        ValueError, match="'last_step': an int of at least 0}, got {'last_step': -1}"
    ):
        other.load_state_dict({"last_step": -1})


def test_a_schedule_changes_a_fixed_parameter_per_head() -> None:
    layer = Attention("sink", 2, b=1.0, learn=())
    ParameterSchedule(layer, "b", lambda step: 2.5)
    assert layer.b == 2.5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Attention("softmax", 2), "std", float), ValueError, "one of: none; got 'std'"),
        ((Attention("sink", 2), "b", float), ValueError, "one of: none; got 'b'"),
        ((Attention("noisy", 2, std=1.0), "std", 3), TypeError, "value must be a function"),
        ((Attention("noisy", 2, std=1.0), 5, float), TypeError, "name must be a str, got 5"),
        (("x", "std", float), TypeError, "model must be a torch.nn.Module"),
        (
            (Attention("noisy", 2, std=1.0), "std", lambda step: -1.0),
            ValueError,
            r"value\(0\) of std must be from 0 to 1e30, got -1.0",
        ),
    ],
)
def test_wrong_arguments_raise(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParameterSchedule(*arguments)


def test_a_wrong_value_changes_no_layer() -> None:
    model = torch.nn.ModuleList([Attention("noisy", 2, std=1.0), Attention("noisy", 2, std=1.0)])
    schedule = ParameterSchedule(model, "std", lambda step: 0.5 if step == 0 else -1.0)
    with pytest.raises(ValueError, match="must be from 0 to 1e30"):
        schedule.step()
    assert [layer.std for layer in model] == [0.5, 0.5]
    assert schedule.last_step == 0


def half(step: int) -> float:
    return 0.5**step


def test_a_schedule_and_its_model_can_be_pickled() -> None:
    schedule = pickle.loads(
        pickle.dumps(ParameterSchedule(Attention("noisy", 2, std=1.0), "std", half))
    )
    schedule.step()
    assert schedule.layers[0].std == 0.5


def test_a_wrong_name_lists_the_settings() -> None:
    with pytest.raises(ValueError, match="one of: std; got 'sdt'; did you mean 'std'"):
        ParameterSchedule(Attention("noisy", 2, std=1.0), "sdt", half)
