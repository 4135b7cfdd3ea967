"""The dtype of a converted model, and several ranks: FSDP and tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.integrations.transformers import convert
from helpers.fsdp_training import CASES, alone, save_start, tensor_parallel, trained_on_ranks
from helpers.hf_models import ids, llama, quiet
from helpers.processes import output_of
from helpers.ranks import on_ranks

pytestmark = quiet
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"wrapper {name}": ("ssmax", {"wrapper": name}) for name in attnzoo.nn.WRAPPERS},
    "wrapper laser": ("ssmax", {"wrapper": ("laser", {"clamp": 9.0})}),
    **CASES,
    "asentmax": ("asentmax", {}),
    "relu": ("relu", {"learn": ("power",)}),
    "identity": ("sink", {"start": "identity"}),
}  # fmt: skip
every_option = pytest.mark.parametrize("name", OPTIONS)


def dtypes(model: Any) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


@every_option
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_a_converted_model_has_one_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    variant, options = OPTIONS[name]
    model = convert(llama().to(dtype), variant, **options)
    assert dtypes(model) == {dtype}
    model.save_pretrained(tmp_path)
    for wanted in (torch.float32, torch.bfloat16, "auto"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted)
        assert dtypes(loaded) == {dtype if wanted == "auto" else wanted}
        assert loaded(ids()).logits.isfinite().all()


def test_a_checkpoint_with_learned_parameters_in_fp32_is_cast(tmp_path: Path) -> None:
    model = convert(llama().bfloat16(), "ssmax", s=0.1)
    for layer in model.model.layers:
        layer.self_attn.attnzoo.float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert dtypes(loaded) == {torch.bfloat16}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "forgetting"])
def test_learned_parameters_may_be_fp32_in_a_bf16_model(name: str) -> None:
    """As with fp32 master weights; gradients are fp32 then. Matrices for the hidden states, as
    forgetting has, may not."""
    variant, options = OPTIONS[name]
    model = convert(llama().bfloat16(), variant, **options)
    inner = [m for m in model.modules() if isinstance(m, attnzoo.nn.Attention)]
    for module in inner:
        module.float()
    model(ids(), labels=ids()).loss.backward()
    assert {p.grad.dtype for m in inner for p in m.parameters()} <= {torch.float32}


@pytest.mark.slow
def test_bf16_training_from_meta_under_fsdp_equals_one_process(tmp_path: Path) -> None:
    """Three steps are equal to the last bit, also after saving and loading in a new process."""
    for case in CASES:
        save_start(case, tmp_path / case)
    first, second = on_ranks(2, trained_on_ranks, str(tmp_path), seconds=400)
    assert isinstance(first, dict), first
    code = f"""
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import json, sys, torch
            import attnzoo.integrations.transformers
            from transformers import AutoModelForCausalLM
            ids = torch.tensor({ids().tolist()})
            names = {list(first)}
            load = lambda name: AutoModelForCausalLM.from_pretrained("{tmp_path}/" + name)
            losses = {{n: load(n)(ids, labels=ids).loss.item() for n in names}}
        print(json.dumps(losses))
    """
    reloaded = json.loads(output_of("\n".join(line[8:] for line in code.splitlines())))
    for case in CASES:
        losses, state = alone(str(tmp_path / case))
        for kind in ("fsdp2", "fsdp1"):
            name = f"{case}-{kind}"
            assert first[name] == second[name] == losses
            model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            assert dtypes(model) == {torch.bfloat16}
            assert model.state_dict().keys() == state.keys()
            assert all(torch.equal(x, state[n]) for n, x in model.state_dict().items())
            assert reloaded[name] == model(ids(), labels=ids()).loss.item()


@pytest.mark.slow
def test_tensor_parallelism_of_transformers(tmp_path: Path) -> None:
    model = convert(llama(initializer_range=0.3, vocab_size=100), "ssmax")
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.attnzoo.s, 0.1, 2.0)
    model.save_pretrained(tmp_path)
    expected = model(ids(), labels=ids())
    for result in on_ranks(2, tensor_parallel, str(tmp_path)):
        assert isinstance(result, tuple), result
        message, logits, loss = result
        assert (
            "the 4 heads of its variant, got 2: under tensor parallelism call shard_heads"
            in message
        )
        assert torch.allclose(logits, expected.logits, atol=1e-4)
        assert loss == pytest.approx(expected.loss.item(), rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved(ids()).logits, expected.logits)
