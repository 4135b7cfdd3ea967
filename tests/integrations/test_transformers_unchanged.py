"""What convert, revert and loading leave as it was: the whole model after a failure, and what the
runs of a model change."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BigBirdPegasusConfig,
    BigBirdPegasusForSequenceClassification,
    BigBirdPegasusModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from attnzoo.integrations import transformers as integration
from attnzoo.integrations.transformers import convert, from_pretrained, revert
from helpers.hf_checks import state
from helpers.hf_models import bart, image_classifier, llama, quiet

pytestmark = quiet


class Injected(Exception):
    """An error at a step of attnzoo."""


@contextmanager
def failure(number: int) -> Iterator[list[int]]:
    """Raises `Injected` at a call of a function of the integration. Counts the calls.

    The functions that undo changes are not counted.
    """
    count, folder = [0], str(Path(integration.__file__).parent)

    def trace(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(folder) and not code.co_name.startswith("<")
        # Python ignores an error in a generator that it closes.
        generator = code.co_flags & inspect.CO_GENERATOR
        if not inside or generator or code.co_name in ("restore", "undo"):
            return
        count[0] += 1
        if count[0] == number:
            raise Injected(code.co_name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def mixed() -> LlamaForCausalLM:
    """A converted model with gates and added queries."""
    model = convert(llama(), "entmax", layers=[0], alpha=1.3)
    return convert(model, "ssmax", layers=[1], wrapper="differential_v2")


ACTIONS: dict[str, tuple[Any, Any]] = {
    "convert": (llama, lambda model: convert(model, "ssmax", wrapper="mixture")),
    "convert again": (mixed, lambda model: convert(model, "ssmax", wrapper="output_gate")),
    "convert of a composite": (image_classifier, lambda model: convert(model, "ssmax")),
    "convert of an encoder and a decoder": (bart, lambda model: convert(model, "ssmax")),
    "revert": (mixed, revert),
}


@pytest.mark.parametrize(("make", "act"), ACTIONS.values(), ids=list(ACTIONS))
def test_a_failure_at_any_step_leaves_the_model_unchanged(make: Any, act: Any) -> None:
    runs: list[int] = []  # of the graph of ``compiled``

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (runs.append(1), graph(*args))[1]

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(2))
    model = make()
    with failure(0) as count:
        act(model)
    steps = count[0]
    assert steps >= 10
    model = make()
    before = state(model)
    for number in range(1, steps + 1, max(1, steps // 25)):
        with pytest.raises((Injected, ValueError)), failure(number):
            act(model)
        assert state(model) == before, number
    compiled(torch.ones(2))
    assert len(runs) == 2, "compiled functions run uncompiled"
    act(model)


def test_a_failed_loading_leaves_the_given_config_unchanged(tmp_path: Path) -> None:
    mixed().save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    before = copy.deepcopy(vars(config))
    with failure(0) as count:
        from_pretrained(LlamaForCausalLM, tmp_path, config=config)
    assert vars(config) == before
    for number in range(1, count[0] + 1, max(1, count[0] // 10)):
        with pytest.raises(Injected), failure(number):
            from_pretrained(LlamaForCausalLM, tmp_path, config=config)
        assert vars(config) == before, number


class Changing(LlamaForCausalLM):
    """Its forward changes a module, a list, buffers, attributes and its config, like some models.

    Then it may raise.
    """

    fail = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lengths: list[int] = []
        self.count = torch.nn.Buffer(torch.zeros(1))
        self.other = torch.nn.Buffer(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.model.layers[0].mlp = copy.deepcopy(self.model.layers[0].mlp)
        self.lengths.append(4)
        self.count += 1
        self.other = torch.ones(1)
        self.added = self.config.added = 1
        if self.fail:
            raise RuntimeError("fails")
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("fail", [False, True])
def test_runs_of_convert_leave_the_model_as_it_was(fail: bool) -> None:
    model = Changing(llama().config).eval()
    model.fail = fail
    mlp, other, before = model.model.layers[0].mlp, model.other, state(model)
    with pytest.raises(ValueError, match="fails") if fail else nullcontext():
        convert(model, "ssmax")
    if fail:
        assert state(model) == before
    assert model.model.layers[0].mlp is mlp
    assert model.other is other
    assert model.count == 0
    assert model.lengths == []
    assert not hasattr(model, "added")
    assert not hasattr(model.config, "added")


def big_bird(kind: Any) -> Any:
    sizes = {f"{who}_{what}": n for who in ("encoder", "decoder")
             for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = BigBirdPegasusConfig(vocab_size=99, d_model=32, max_position_embeddings=64, **sizes)
    return kind(config).eval()


def test_runs_of_convert_leave_sparse_attention_as_it_was() -> None:
    """A short input makes the model replace it."""
    model = big_bird(BigBirdPegasusForSequenceClassification)
    before = state(model)
    with pytest.raises(ValueError, match="inputs must be given"):
        convert(model, "ssmax")
    assert state(model) == before
    model = big_bird(BigBirdPegasusModel)
    before = model.encoder.layers[0].self_attn.self
    convert(model, "ssmax")
    assert model.encoder.layers[0].self_attn.self is before
    assert model.encoder.attention_type == "block_sparse"
