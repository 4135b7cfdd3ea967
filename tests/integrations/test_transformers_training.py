"""Converted models in transformers' Trainer and under PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import attnzoo
from attnzoo.integrations.transformers import TrainerMixin, convert
from attnzoo.nn import MultiheadAttention, OutputLayer, parameter_groups
from helpers.hf_models import ids, llama, quiet

pytestmark = [quiet, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.slow
def test_trainer_with_parameter_groups_does_not_decay_scales(tmp_path: Path) -> None:
    """The weight decay is so large that a decayed scale would move by far more than 1e-2."""
    model = convert(llama(), "ssmax", s=0.5)
    optimizer = torch.optim.SGD(parameter_groups(model, weight_decay=100.0), lr=1e-3)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids()]
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    before = model.model.embed_tokens.weight.norm().item()
    Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule)).train()
    assert model.model.embed_tokens.weight.norm().item() < 0.8 * before
    for layer in model.model.layers:
        s = layer.self_attn.attnzoo.s
        assert not torch.equal(s, torch.full((4,), 0.5))
        assert torch.allclose(s, torch.full((4,), 0.5), atol=1e-2)


class MyTrainer(TrainerMixin, Trainer):
    pass


@pytest.mark.parametrize("variant", ["ssmax", "entmax"])
def test_trainer_mixin_decays_all_but_scales_and_norms(variant: str, tmp_path: Path) -> None:
    """All gradients are zero, so that the optimizer applies weight decay only."""
    learn = {"ssmax": ("s", "b"), "entmax": ("alpha",)}[variant]
    model = convert(llama(), variant, learn=learn)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = TrainingArguments(
        str(tmp_path), weight_decay=0.5, learning_rate=1e-2, report_to=[], use_cpu=True
    )
    optimizer = MyTrainer(model, arguments).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    unchanged = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    scales = {name for name in before if ".attnzoo." in name}
    assert len(scales) == 2 * len(learn)
    assert unchanged == scales | {name for name in before if "norm" in name}


def test_trainer_mixin_gives_scales_their_own_learning_rate(tmp_path: Path) -> None:
    """The first step of AdamW is at most as large as the learning rate."""
    model = convert(llama(), "ssmax", s=0.5)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-4,
        lr_scheduler_type="constant", optim="adamw_torch",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids()]
    before = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    trainer = MyTrainer(model, arguments, train_dataset=rows, attention_lr=0.05)
    trainer.train()
    assert sorted(g["lr"] for g in trainer.optimizer.param_groups) == [1e-4, 1e-4, 0.05]
    for layer in model.model.layers:
        step = (layer.self_attn.attnzoo.s - 0.5).abs()
        assert bool(((step > 1e-3) & (step < 0.051)).all())
    moved = model.model.layers[0].self_attn.q_proj.weight - before
    assert 0 < moved.abs().max() < 1.1e-4


def test_trainer_mixin_with_a_wrong_learning_rate_raises(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    optimizer = torch.optim.SGD(llama().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="attention_lr must be None with an optimizer, got 0.1"):
        MyTrainer(llama(), arguments, attention_lr=0.1, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="attention_lr must be None, because model has no learned"):
        MyTrainer(llama(), arguments, attention_lr=0.1).create_optimizer()
    with pytest.raises(TypeError, match="attention_lr must be a finite number >= 0 or None, got"):
        MyTrainer(llama(), arguments, attention_lr="fast")


class DecaysAll:
    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]


class DecaysAllButLearned(TrainerMixin, DecaysAll):
    pass


def test_trainer_mixin_and_parameter_groups_follow_one_rule() -> None:
    """The scale of an output layer does not decay, the matrix of a projection does."""
    attend, head = MultiheadAttention(8, 2, variant="forgetting"), OutputLayer(8, 9, "ssmax")
    model = torch.nn.ModuleDict({"attend": attend, "head": head})
    decayed = {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
    names = DecaysAllButLearned().get_decay_parameter_names(model)
    assert names == [name for name, p in model.named_parameters() if id(p) in decayed]
    projection = "attend.attend.projections.log_gates"
    assert {"head.s", f"{projection}.weight", f"{projection}.bias"} & set(names) == {
        f"{projection}.weight"
    }


@pytest.mark.slow
def test_trainer_mixin_trains_and_does_not_decay_scales(tmp_path: Path) -> None:
    """The weight decay is so large that a decayed scale would move by far more than 1e-2."""
    model = convert(llama(), "ssmax", s=0.5)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, weight_decay=200.0,
        learning_rate=1e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids()]
    before = model.model.embed_tokens.weight.norm().item()
    MyTrainer(model, arguments, train_dataset=rows).train()
    assert model.model.embed_tokens.weight.norm().item() < 0.8 * before
    for layer in model.model.layers:
        s = layer.self_attn.attnzoo.s
        assert not torch.equal(s, torch.full((4,), 0.5))
        assert torch.allclose(s, torch.full((4,), 0.5), atol=1e-2)


def test_peft_trains_and_saves_learned_parameters(tmp_path: Path) -> None:
    model = convert(llama(), "ssmax")
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["attnzoo"], r=2)
    adapted = get_peft_model(model, config)
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert len([n for n in trained if n.endswith("attnzoo.modules_to_save.default.s")]) == 2
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        adapted(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(convert(llama(), "ssmax"), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, adapted(ids()).logits)
        assert not torch.allclose(loaded(ids()).logits, convert(llama(), "ssmax")(ids()).logits)


@pytest.mark.slow
def test_trainer_checkpoints_a_converted_model_on_tiled(tmp_path: Path) -> None:
    """The sequences are so long that attention runs on tiled, not on eager."""
    length = 192
    tokens = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    weights = []
    for checkpointing in (False, True):
        model = convert(llama(), "entmax")
        q = torch.empty(2, 4, length, 8)
        assert attnzoo.explain(q, q, q, "entmax", is_causal=True).chosen == "tiled"
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-2,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train()
        weights.append([x.detach() for x in model.parameters()])
    for have, want in zip(*weights, strict=True):
        assert torch.allclose(have, want, atol=1e-5)
