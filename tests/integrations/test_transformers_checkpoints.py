"""Saving and loading of converted models: variants, layers, learned values, invalid specs."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from logging import StreamHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.utils import logging

import attnzoo
from attnzoo.integrations.transformers import convert, from_config, from_pretrained, revert
from helpers.hf_models import GQA, ids, llama, quiet

pytestmark = quiet
ROOT = Path(__file__).parents[2]

LOADER = """
import sys, torch, transformers
from attnzoo.integrations.transformers import from_pretrained
transformers.logging.set_verbosity_error()
model = from_pretrained(transformers.AutoModelForCausalLM, sys.argv[1]).eval()
tokens = model.generate(torch.tensor([eval(sys.argv[2])]), max_new_tokens=6, min_new_tokens=6,
                        do_sample=False, pad_token_id=0)
print(tokens[0].tolist())
"""


@pytest.fixture
def warned() -> Iterator[io.StringIO]:
    """Yield a stream with the warnings of transformers."""
    stream = io.StringIO()
    handler = StreamHandler(stream)
    logging.set_verbosity_warning()
    logging.add_handler(handler)
    yield stream
    logging.remove_handler(handler)
    logging.set_verbosity_error()


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_model_loaded_in_another_process_generates_the_same(tmp_path: Path, shards: str) -> None:
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
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name
    assert loaded.model.layers[1].self_attn.attnzoo.delta == 0.9


def test_base_model_loads_from_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    model = convert(llama(), "ssmax")
    with torch.no_grad():
        model.model.layers[0].self_attn.attnzoo.s.fill_(0.77)
    model.save_pretrained(tmp_path)
    base = from_pretrained(AutoModel, tmp_path).eval()
    assert torch.equal(base.layers[0].self_attn.attnzoo.s, torch.full((4,), 0.77))
    assert torch.allclose(base(ids())[0], model.model(ids())[0], atol=1e-6)


def test_parameters_missing_in_a_checkpoint_get_initial_values(tmp_path: Path) -> None:
    model = convert(llama(), "ssmax", s=0.4)
    config = model.config
    revert(model).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "attnzoo" not in written
    convert(model, "ssmax", s=0.4)
    written["attnzoo"] = config.attnzoo
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    assert torch.equal(loaded.model.layers[1].self_attn.attnzoo.s, torch.full((4,), 0.4))
    made = from_config(AutoModelForCausalLM, config)
    assert torch.equal(made.model.layers[1].self_attn.attnzoo.s, torch.full((4,), 0.4))
    assert made.config._attn_implementation == "attnzoo"


def test_tensor_parameters_are_copied_per_layer(tmp_path: Path) -> None:
    """Each layer saves its own fixed tensors. A Parameter given to convert stays learned."""
    model = convert(llama(), "entmax", layers=[0], alpha=torch.tensor([1.2, 1.3, 1.4, 1.5]))
    convert(model, "ssmax", layers=[1], b=torch.nn.Parameter(torch.full((4,), 0.2)))
    convert(model, "entmax", layers=[0], alpha=torch.tensor([1.2, 1.3, 1.4, 1.6]))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    first, second = (layer.self_attn.attnzoo for layer in loaded.model.layers)
    assert torch.equal(first.alpha, torch.tensor([1.2, 1.3, 1.4, 1.6]))
    assert {name for name, _ in second.named_parameters()} == {"s", "b"}
    assert torch.equal(loaded(ids()).logits, model.eval()(ids()).logits)


def test_tensor_parameters_of_a_bf16_model_are_not_rounded(tmp_path: Path) -> None:
    alpha = torch.tensor([1.2, 1.3, 1.4, 1.6])
    convert(llama().bfloat16(), "entmax", alpha=alpha).save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.layers[0].self_attn.attnzoo.alpha, alpha)


def test_entries_of_another_model_with_the_same_config_are_ignored(tmp_path: Path) -> None:
    """A config object that two models share lists the converted layers of both."""
    plain, converted = llama(), llama()
    converted.config = plain.config
    convert(converted, "ssmax", layers=[0])
    with pytest.raises(ValueError, match="model must be a converted model"):
        revert(plain)
    convert(plain, "entmax", layers=[1])
    assert list(plain.config.attnzoo["layers"]) == ["model.layers.1.self_attn"]
    plain.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    assert "attnzoo" not in loaded.model.layers[0].self_attn._modules


# ---- transformers' own loader -----------------------------------------------------------------

LOADERS: dict[str, Any] = {
    "auto": AutoModelForCausalLM.from_pretrained,
    "class": LlamaForCausalLM.from_pretrained,
    "ours": partial(from_pretrained, AutoModelForCausalLM),
}
# "auto" calls "class".
every_loader = pytest.mark.parametrize(
    "load",
    [pytest.param(load, id=name, marks=[pytest.mark.slow] * (name == "class"))
     for name, load in LOADERS.items()],
)  # fmt: skip


def trained() -> LlamaForCausalLM:
    """Return a model with two variants whose learned values differ from the initial values."""
    model = convert(llama(num_hidden_layers=3), "ssmax", layers=[0], b=torch.full((4,), 0.1))
    convert(model, "entmax", layers=[2], learn=("alpha",))
    with torch.no_grad():
        model.model.layers[0].self_attn.attnzoo.s.copy_(torch.tensor([0.4, 0.5, 0.6, 0.7]))
        model.model.layers[2].self_attn.attnzoo.alpha = torch.tensor([1.2, 1.3, 1.4, 1.7])
    return model


@every_loader
def test_each_loader_restores_the_variants(load: Any, tmp_path: Path, warned: io.StringIO) -> None:
    """Learned values are restored, without a warning of missing or unexpected keys."""
    model = trained()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded, info = load(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert warned.getvalue() == ""
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    loaded.save_pretrained(tmp_path / "second")
    assert torch.equal(load(tmp_path / "second")(ids()).logits, model(ids()).logits)
    assert torch.equal(revert(loaded)(ids()).logits, revert(model)(ids()).logits)


@every_loader
def test_learned_values_are_loaded_in_the_dtype_of_the_model(load: Any, tmp_path: Path) -> None:
    model = convert(llama().bfloat16(), "ssmax", s=0.1717)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert (loaded.dtype, loaded.lm_head.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    attend = loaded.model.layers[1].self_attn.attnzoo
    assert torch.equal(attend.s, torch.full((4,), 0.1717).bfloat16())
    attend.float().reset_parameters()  # the config has the initial value unrounded
    assert torch.equal(attend.s, torch.full((4,), 0.1717))


@every_loader
def test_each_loader_sets_missing_values_to_initial_values(load: Any, tmp_path: Path) -> None:
    """The checkpoint has a converted model's config, but no values of its learned parameters."""
    llama().save_pretrained(tmp_path)
    converted = convert(llama(), "entmax", alpha=1.3, learn=("alpha",), layers=[0])
    convert(converted, "ssmax", layers=[1], s=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    converted.config.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    for name, x in converted.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name


def test_classes_and_from_config_apply_the_configured_variants() -> None:
    """The test includes a base model, whose module names lack the prefix `model.`."""
    config = convert(llama(), "ssmax", layers=[1], s=0.3).config
    for make in (LlamaForCausalLM, LlamaModel, AutoModel.from_config):
        model = make(config)
        base = getattr(model, "model", model)
        assert torch.allclose(base.layers[1].self_attn.attnzoo.s, torch.tensor(0.3))
        assert "attnzoo" not in base.layers[0].self_attn._modules


def test_model_with_sub_models_is_saved_and_loaded(tmp_path: Path) -> None:
    """LLaVA renames weights in its checkpoint. Its text model can be made from its text config."""
    text = LlamaConfig(**GQA)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        image_size=16, patch_size=4,
    )  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=98)
    model = LlavaForConditionalGeneration(config).eval()
    convert(model, "ssmax", s=0.7, inputs=ids())
    layer = model.model.language_model.layers[1].self_attn
    layer.attnzoo.s.data += 0.1
    model.save_pretrained(tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.language_model.layers[1].self_attn.attnzoo.s, layer.attnzoo.s)
    with torch.no_grad():
        assert torch.allclose(loaded(ids()).logits, model(ids()).logits, atol=1e-6)
    alone = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path))  # LlamaConfig reads text_config
    assert torch.equal(alone.model.layers[1].self_attn.attnzoo.s, torch.full((4,), 0.7))
    revert(loaded)
    assert not hasattr(loaded.config.text_config, "attnzoo")
    assert loaded.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("requested", ["sdpa", "eager"])
@every_loader
def test_loading_with_another_implementation_raises(
    load: Any, requested: str, tmp_path: Path
) -> None:
    convert(llama(), "ssmax", s=1.0).save_pretrained(tmp_path)
    message = f"attn_implementation must be 'attnzoo', .* 2 layers .*, got '{requested}': .*revert"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, attn_implementation=requested)
    model = revert(load(tmp_path))
    model.set_attn_implementation(requested)
    assert torch.allclose(model(ids()).logits, llama()(ids()).logits, atol=1e-6)


@every_loader
def test_no_implementation_is_that_of_the_config(load: Any, tmp_path: Path) -> None:
    """Scripts pass None if the user chooses nothing."""
    model = convert(llama(), "ssmax", s=1.0)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, attn_implementation=None)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


@every_loader
def test_loading_without_the_plugin_of_a_variant_names_load_plugin(
    load: Any, tmp_path: Path
) -> None:
    convert(llama(), "softmax", layers=[1]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"variant": "softmax"', '"variant": "cube"'))
    message = r"layers.1.self_attn' has the variant 'cube', .*: call attnzoo.load_plugin\(file\)"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.slow
def test_process_without_attnzoo_cannot_load_a_converted_model(tmp_path: Path) -> None:
    """Without an error, the model would silently compute softmax."""
    convert(llama(), "ssmax", s=1.0).save_pretrained(tmp_path / "converted")
    revert(convert(llama(), "ssmax", s=1.0)).save_pretrained(tmp_path / "reverted")
    code = (
        "import sys, transformers\n"
        "transformers.LlamaForCausalLM.from_pretrained(sys.argv[1] + '/reverted')\n"
        "try: transformers.LlamaForCausalLM.from_pretrained(sys.argv[1] + '/converted')\n"
        "except ValueError as error: print(error, 'attnzoo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert 'attn_implementation="attnzoo"` is not supported' in done.stdout, done.stderr
    assert done.stdout.strip().endswith("False")


def test_file_variant_of_transformers_is_saved_and_loaded(tmp_path: Path) -> None:
    """With variant="fp16", transformers writes and reads model.fp16.safetensors."""
    model = trained()
    model.save_pretrained(tmp_path, variant="fp16")
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path, variant="fp16")
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


# ---- invalid specs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "config must be of a converted model, got one without 'attnzoo'"),
        ({"version": 2}, "must be of version 1 or older, got 2"),
        ({"version": None}, "must have a version"),
        ({"layers": {}}, "must have layers"),
        ({"layers": {"model.layers.0.self_attn": {"variant": "ssmax"}}}, "must have num_heads"),
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
def test_invalid_specs_raise(change: dict[str, Any] | None, message: str) -> None:
    config = convert(llama(), "ssmax").config
    config.attnzoo = None if change is None else {**config.attnzoo, **change}
    with pytest.raises(ValueError, match=message):
        from_config(AutoModelForCausalLM, config)


@pytest.mark.slow
def test_two_ranks_agree_with_one() -> None:
    """Outputs and gradients agree under FSDP2 and under tensor parallelism over heads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "tests/helpers/distributed_models.py"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port)], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert all("agreed" in text for text in outputs)
