"""Converted models are saved and loaded: variants, layers, learned values; specs half known."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import attnzoo
from attnzoo.integrations.transformers import convert, from_config, from_pretrained, revert
from hf_models import ids, llama, quiet

pytestmark = quiet
ROOT = Path(__file__).parent.parent

LOADER = """
import sys, torch, transformers
from attnzoo.integrations.transformers import from_pretrained
transformers.logging.set_verbosity_error()
model = from_pretrained(transformers.AutoModelForCausalLM, sys.argv[1]).eval()
tokens = model.generate(torch.tensor([eval(sys.argv[2])]), max_new_tokens=6, min_new_tokens=6,
                        do_sample=False, pad_token_id=0)
print(tokens[0].tolist())
"""


@pytest.mark.parametrize("shards", [pytest.param("1GB", marks=pytest.mark.slow), "20KB"])
def test_trained_saved_and_loaded_in_a_fresh_process(tmp_path: Path, shards: str) -> None:
    """The same tokens."""
    model = convert(llama(), "ssmax", layers=[0])
    convert(model, "asentmax", layers=[1], delta=0.9).train()
    optimizer = torch.optim.AdamW(attnzoo.nn.parameter_groups(model, 0.1), lr=1e-2)
    for _ in range(4):
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path, max_shard_size=shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shards == "20KB"
    prompt = ids()[0].tolist()
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path), str(prompt)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected[0].tolist()
    again = from_pretrained(AutoModelForCausalLM, tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
    assert again.model.layers[1].self_attn.attnzoo.delta == 0.9


def test_a_base_model_loads_what_a_head_was_saved_on(tmp_path: Path) -> None:
    model = convert(llama(), "ssmax")
    with torch.no_grad():
        model.model.layers[0].self_attn.attnzoo.s.fill_(0.77)
    model.save_pretrained(tmp_path)
    base = from_pretrained(AutoModel, tmp_path).eval()
    assert torch.equal(base.layers[0].self_attn.attnzoo.s, torch.full((4,), 0.77))
    assert torch.allclose(base(ids())[0], model.model(ids())[0], atol=1e-6)


def test_what_a_checkpoint_does_not_hold_has_its_initial_value(tmp_path: Path) -> None:
    model = convert(llama(), "ssmax", s=0.4)
    config = model.config
    revert(model).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "attnzoo" not in written
    convert(model, "ssmax", s=0.4)
    written["attnzoo"] = config.attnzoo
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = from_pretrained(AutoModelForCausalLM, tmp_path)
    assert torch.equal(again.model.layers[1].self_attn.attnzoo.s, torch.full((4,), 0.4))
    made = from_config(AutoModelForCausalLM, config)
    assert torch.equal(made.model.layers[1].self_attn.attnzoo.s, torch.full((4,), 0.4))
    assert made.config._attn_implementation == "attnzoo"


def test_tensors_that_are_given_are_each_layers_own(tmp_path: Path) -> None:
    """Fixed ones are saved once per layer; what is handed in as a Parameter stays learned."""
    model = convert(llama(), "entmax", layers=[0], alpha=torch.tensor([1.2, 1.3, 1.4, 1.5]))
    convert(model, "ssmax", layers=[1], b=torch.nn.Parameter(torch.full((4,), 0.2)))
    convert(model, "entmax", layers=[0], alpha=torch.tensor([1.2, 1.3, 1.4, 1.6]))
    model.save_pretrained(tmp_path)
    again = from_pretrained(AutoModelForCausalLM, tmp_path)
    first, second = (layer.self_attn.attnzoo for layer in again.model.layers)
    assert torch.equal(first.alpha, torch.tensor([1.2, 1.3, 1.4, 1.6]))
    assert {name for name, _ in second.named_parameters()} == {"s", "b"}
    assert torch.equal(again(ids()).logits, model.eval()(ids()).logits)


def test_what_a_config_says_of_another_model_is_not_believed(tmp_path: Path) -> None:
    convert(llama(), "ssmax", layers=[0]).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # without attnzoo: softmax
    with pytest.raises(ValueError, match="model was not converted"):
        revert(plain)
    convert(plain, "entmax", layers=[1])
    assert list(plain.config.attnzoo["layers"]) == ["model.layers.1.self_attn"]
    plain.save_pretrained(tmp_path / "again")
    again = from_pretrained(AutoModelForCausalLM, tmp_path / "again")
    assert "attnzoo" not in again.model.layers[0].self_attn._modules


@pytest.mark.parametrize("option", [{"output_loading_info": True}, {"variant": "fp16"}])
def test_options_that_are_not_supported(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} is not supported here"):
        from_pretrained(AutoModelForCausalLM, tmp_path, **option)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "config has no 'attnzoo'"),
        ({"version": 2}, "is of version 2, this attnzoo knows up to 1"),
        ({"version": None}, "no version"),
        ({"layers": {}}, "no layers"),
        ({"layers": {"model.layers.0.self_attn": {"variant": "ssmax"}}}, "has no num_heads"),
        (
            {"layers": {"x": {"variant": "ssmax", "num_heads": 4, "params": {}, "new": 1}}},
            r"unknown entries: \['new'\]",
        ),
        (
            {"layers": {"x": {"variant": "ssmax", "num_heads": 4, "params": {}}}},
            "has no module 'x'",
        ),
    ],
)
def test_half_known_specs_are_refused(change: dict[str, Any] | None, message: str) -> None:
    config = convert(llama(), "ssmax").config
    config.attnzoo = None if change is None else {**config.attnzoo, **change}
    with pytest.raises(ValueError, match=message):
        from_config(AutoModelForCausalLM, config)


@pytest.mark.slow
def test_two_ranks_agree_with_one() -> None:
    """FSDP2, and tensor parallelism over heads: outputs and gradients of what is learned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "tests/distributed_models.py"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port)], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert all("agreed" in text for text in said)


def test_heads_that_ranks_do_not_divide() -> None:
    class Mesh:
        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of 3 ranks"):
        attnzoo.nn.Attention("ssmax", 4).shard_heads(Mesh())
