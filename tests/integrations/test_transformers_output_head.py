"""The loss of a variant in a model's output layer, and sampling from its probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, Trainer, TrainingArguments

import attnzoo
from attnzoo.integrations.transformers import TrainerMixin, VariantLogitsProcessor, convert
from attnzoo.losses import loss, margin_loss
from helpers.hf_models import SMALL, gemma2, gpt2, ids, llama, quiet
from helpers.output_head_ranks import CASES, losses_and_gradients, model_of
from helpers.ranks import on_ranks

pytestmark = [quiet, pytest.mark.filterwarnings("ignore::UserWarning")]


class MyTrainer(TrainerMixin, Trainer):
    pass


def trainer(model: Any, path: Path, rows: Any = None, **options: Any) -> MyTrainer:
    names = ("output", "output_params", "compute_loss_func")
    ours = {name: options.pop(name) for name in names if name in options}
    arguments = TrainingArguments(
        str(path), **{"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.1,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant", **options},
    )  # fmt: skip
    return MyTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, **ours)


SPECIAL = {"pad_token_id": 0, "eos_token_id": 1}


def t5(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}
    config = transformers.T5Config(
        **sizes, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, **SPECIAL, **options
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def marian() -> Any:
    torch.manual_seed(0)
    layers = {f"{who}_{what}": n for who in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.MarianConfig(
        vocab_size=99, d_model=32, max_position_embeddings=64, decoder_start_token_id=0, **layers,
        **SPECIAL,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    model.final_logits_bias.normal_()
    return model


def decoder(name: str) -> Any:
    """A causal language model that computes its loss from labels that it does not shift."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64,
        encoder_layers=1, encoder_attention_heads=4, decoder_start_token_id=2, init_std=0.5,
        bos_token_id=2, dropout=0.0, **SPECIAL,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def xlm() -> Any:
    torch.manual_seed(0)
    config = transformers.XLMConfig(vocab_size=99, emb_dim=32, n_layers=1, n_heads=4)
    return transformers.XLMWithLMHeadModel(config).eval()


def small(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **SPECIAL, **options})
    suffix = "ForMaskedLM" if name == "Bert" else "ForCausalLM"
    return getattr(transformers, name + suffix)(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied weights": lambda: llama(tie_word_embeddings=True),
    "converted": lambda: convert(llama(), "ssmax"),
    "gpt2": gpt2,
    "softcap": lambda: gemma2(final_logit_softcapping=0.5),
    "factor below 1": partial(small, "Cohere", logit_scale=0.3),
    "divisor": partial(small, "Granite", logits_scaling=4.0),
    "t5": partial(t5, tie_word_embeddings=True),
    "t5, two matrices": partial(t5, tie_word_embeddings=False),
    "added bias": marian,
    "masked tokens, bias": partial(small, "Bert"),
    "bart": partial(decoder, "Bart"),
    "pegasus": partial(decoder, "Pegasus"),
    "whisper": partial(decoder, "Whisper"),
    "xlm": xlm,
}
UNSHIFTED = ("masked tokens, bias", "bart", "pegasus", "whisper", "xlm")


def labels_of(tokens: Tensor) -> Tensor:
    """Labels with different numbers of ignored tokens in the rows."""
    labels = tokens.clone()
    labels[0, 3:8] = -100
    return labels


QUICK = ("llama", "t5", "bart")


@pytest.mark.parametrize("variant", ["softmax", "entmax"])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MODELS]
)
def test_loss_and_gradients_are_those_of_the_logits(
    name: str, variant: str, tmp_path: Path
) -> None:
    model, reference = MODELS[name]().double(), MODELS[name]().double()
    tokens = ids()
    labels = labels_of(tokens)
    ours = trainer(model, tmp_path, output=variant).compute_loss(
        model, {"input_ids": tokens, "labels": labels}
    )
    result = reference(input_ids=tokens, labels=labels)
    is_shifted = name not in UNSHIFTED and not model.config.is_encoder_decoder
    targets = pad(labels[:, 1:], (0, 1), value=-100) if is_shifted else labels
    theirs = loss(result.logits, targets, variant)
    if variant == "softmax":  # the models compute theirs in fp32
        assert torch.allclose(result.loss.double(), theirs, rtol=1e-5)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    ours.backward()
    theirs.backward()
    for have, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert (have.grad is None) == (want.grad is None)
        if want.grad is not None:
            assert torch.allclose(have.grad, want.grad, rtol=1e-9, atol=1e-14)


def test_the_model_computes_the_logits_of_one_token(tmp_path: Path) -> None:
    model = llama()
    batch = {"input_ids": ids(), "labels": ids()}
    shapes: list[Any] = []
    model.lm_head.register_forward_hook(lambda *args: shapes.append(tuple(args[-1].shape)))
    mine = trainer(model, tmp_path, [{"input_ids": row, "labels": row} for row in ids()],
                   output="entmax", per_device_eval_batch_size=2)  # fmt: skip
    first = mine.compute_loss(model, batch)
    assert shapes == [(2, 2, 99), (2, 1, 99)]  # the first call asks whether labels are shifted
    second, outputs = mine.compute_loss(model, batch, return_outputs=True)
    assert shapes[2:] == [(2, 12, 99)]
    assert torch.equal(outputs.logits, model(ids()).logits)
    assert torch.equal(first, second)
    shapes.clear()
    assert mine.evaluate()["eval_loss"] == pytest.approx(first.item(), rel=1e-6)
    assert shapes == [(2, 1, 99)]
    assert mine.predict(mine.eval_dataset).predictions.shape == (2, 12, 99)
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [llama, pytest.param(t5, marks=pytest.mark.slow)], ids=["llama", "t5"]
)
def test_training_lowers_the_loss_and_accumulates_gradients(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """The rows have different numbers of labels, so a mean of means would be another loss."""
    rows = [{"input_ids": row, "labels": y} for row, y in zip(ids(), labels_of(ids()), strict=True)]
    weights, losses = [], []
    for size in (2, 1):
        model = make()
        mine = trainer(
            model, tmp_path, rows, output="entmax", output_params={"alpha": 1.5},
            per_device_train_batch_size=size, gradient_accumulation_steps=2 // size,
        )  # fmt: skip
        mine.train()
        losses.append([x["loss"] for x in mine.state.log_history if "loss" in x])
        weights.append([x.detach() for x in model.parameters()])
    assert losses[0][0] > losses[0][1] > losses[0][2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for have, want in zip(*weights, strict=True):
        assert torch.allclose(have, want, atol=1e-6)


@pytest.mark.slow
def test_ranks_have_the_loss_of_their_rows_and_the_gradients_of_the_mean() -> None:
    results = on_ranks(2, losses_and_gradients)
    for case in CASES:
        model = model_of(case)
        z, targets = model(ids()).logits[:, :-1], ids()[:, 1:]
        expected = loss(z, targets, "entmax", reduction="none").mean(-1)
        expected.mean().backward()
        for rank, result in enumerate(results):
            assert isinstance(result, dict), result
            value, gradients = result[case]
            assert value == pytest.approx(expected[rank].item(), rel=1e-9)
            for name, parameter in model.named_parameters():
                assert torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-14), name


@pytest.mark.parametrize(("make", "targets"), [(llama, 22), (partial(decoder, "Bart"), 24)])
def test_the_loss_is_divided_by_the_number_of_targets(
    make: Callable[[], Any], targets: int, tmp_path: Path
) -> None:
    model = make()
    mine = trainer(model, tmp_path, output="softmax")
    batch = {"input_ids": ids(), "labels": ids()}
    (inputs,), count = mine.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert count == targets
    ours = mine.compute_loss(model, inputs, num_items_in_batch=count)
    assert torch.allclose(ours, model(**batch).loss)


def test_output_takes_other_losses(tmp_path: Path) -> None:
    model = llama()
    angles = partial(margin_loss, kind="arc")
    batch = {"input_ids": ids(), "labels": ids()}
    ours = trainer(model, tmp_path, output=angles).compute_loss(model, batch)
    hidden = model.model(ids()).last_hidden_state[:, :-1]
    theirs = margin_loss(hidden, model.lm_head.weight, ids()[:, 1:], kind="arc")
    assert torch.allclose(ours, theirs, rtol=1e-6)
    with pytest.raises(ValueError, match="has a softcap, which this loss does not take"):
        trainer(gemma2(), tmp_path, output=angles)


@pytest.mark.parametrize(
    ("name", "factor", "options"),
    [
        ("Qwen3Moe", "router_aux_loss_coef",
         {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        pytest.param("JetMoe", "aux_loss_coef", {"num_local_experts": 4, "num_experts_per_tok": 2},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_auxiliary_loss_of_a_router_is_added(
    name: str, factor: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**options, "num_key_value_heads": 2, "output_router_logits": True, factor: 3.0}
    batch = {"input_ids": ids(), "labels": ids()}
    losses, gradients = [], []
    for ours in ({}, {"output": "softmax"}):
        model = small(name, **options)
        losses.append(trainer(model, tmp_path, **ours).compute_loss(model, dict(batch)))
        losses[-1].backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    assert torch.allclose(*losses, rtol=1e-6)
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-6)


def test_losses_that_the_outputs_do_not_have_raise(tmp_path: Path) -> None:
    for model, text in (
        (t5(output_router_logits=True), "with output_router_logits=True in its config adds a loss"),
        (llama(z_loss_coefficient=0.1), "with z_loss_coefficient=0.1 in its config adds a loss"),
    ):
        with pytest.raises(ValueError, match=text):
            trainer(model, tmp_path, output="entmax")
    mine = trainer(small("Bert"), tmp_path, output="entmax")
    batch = {"input_ids": ids(), "labels": ids(), "next_sentence_label": ids()[:, 0]}
    with pytest.raises(ValueError, match="no labels other than .*, got next_sentence_label"):
        mine.compute_loss(mine.model, batch)


def test_evaluation_with_generate_has_the_loss_of_the_variant(tmp_path: Path) -> None:
    class MySeq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
        pass

    model, rows = t5(), [{"input_ids": x, "labels": x} for x in ids()]
    values = []
    for generates in (False, True):
        arguments = transformers.Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=generates, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        mine = MySeq2SeqTrainer(model, arguments, eval_dataset=rows, output="entmax")
        result = mine.predict(rows)
        values.append(result.metrics["test_loss"])
    assert result.predictions.ndim == 2  # tokens, not logits
    assert values[1] == pytest.approx(values[0], rel=1e-6)


class Doubled(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result.logits = 2 * result.logits
        return result


class Twice(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class AddsLoss(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result["aux_loss"] = result.logits.sum()
        return result


class Smooths(transformers.BartForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result.loss = None if result.loss is None else result.loss + 0.1 * result.logits.mean() + 1
        return result


def test_a_model_whose_loss_does_not_show_its_targets_needs_them(tmp_path: Path) -> None:
    model = Smooths(decoder("Bart").config)
    mine = trainer(model, tmp_path, output="softmax")
    batch = {"input_ids": ids(), "labels": ids()}
    with pytest.raises(ValueError, match="Smooths does not compute the cross entropy of its labe"):
        mine.compute_loss(model, batch)
    assert not model.lm_head._forward_pre_hooks
    result = mine.compute_loss(model, {**batch, "shift_labels": ids()})
    assert torch.allclose(result, loss(model(ids()).logits, ids()))


def test_models_that_do_not_fit_raise(tmp_path: Path) -> None:
    batch = {"input_ids": ids(), "labels": ids()}
    for kind, text in (
        (Doubled, "Doubled has other logits than its output layer gives"),
        (Twice, "Twice calls its output layer 2 times"),
        (AddsLoss, "AddsLoss has an aux_loss, but none of router_aux_loss_coef, aux_loss_coef"),
    ):
        model = kind(llama().config)
        with pytest.raises(ValueError, match=text):
            trainer(model, tmp_path, output="entmax").compute_loss(model, batch)
        assert not model.lm_head._forward_pre_hooks
    with pytest.raises(
        ValueError, match="has output embeddings of type builtins.NoneType, not torch.nn.Linear"
    ):
        trainer(llama().model, tmp_path, output="entmax")
    mine = trainer(llama(), tmp_path, output="entmax")
    with pytest.raises(ValueError, match="inputs must have labels, got only input_ids"):
        mine.compute_loss(mine.model, {"input_ids": ids()})
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 12\), .* got \(2, 5\)"):
        mine.compute_loss(mine.model, {"input_ids": ids(), "labels": ids(5)})


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueError, "label_smoothing_factor=0.1", {"label_smoothing_factor": 0.1}),
        (ValueError, "a compute_loss_func", {"compute_loss_func": print}),
        (ValueError, "torch_compile", {"torch_compile": True}),
        (ValueError, "'relu' has no loss", {"output": "relu"}),
        (
            ValueError,
            "variant of TrainerMixin's output must not depend on positions",
            {"output": "forgetting"},
        ),
        (TypeError, "output must be the name of a variant, a function", {"output": 3}),
        (TypeError, "output_params must be None without output", {"output": None}),
        (TypeError, "output_params must be None if output is a function", {"output": margin_loss}),
        (TypeError, "output_params must be a dict or None", {"output_params": 1.5}),
        (TypeError, "must be a number", {"output_params": {"alpha": torch.tensor(1.5)}}),
    ],
)
def test_wrong_arguments_raise(
    error: type[Exception], text: str, options: dict[str, Any], tmp_path: Path
) -> None:
    params: dict[str, Any] = {"alpha": 1.5}
    options = {"output": "entmax", **({} if options.get("output") in ("relu", "forgetting") else
               {"output_params": params}), **options}  # fmt: skip
    with pytest.raises(error, match=text):
        trainer(llama(), tmp_path, **options)


# ---- sampling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "temperature"),
    [(partial(llama, initializer_range=0.3), 0.5), (t5, 20.0)],
    ids=["llama", "t5"],
)
def test_generate_draws_tokens_of_the_support(make: Callable[..., Any], temperature: float) -> None:
    """Softmax would draw almost any token."""
    model = make()
    process = VariantLogitsProcessor("sparsemax", temperature=temperature)
    torch.manual_seed(0)
    result = model.generate(
        ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=8, do_sample=True, top_k=0,
        logits_processor=[process], output_logits=True, return_dict_in_generate=True,
        pad_token_id=0, eos_token_id=98, num_return_sequences=4,
    )  # fmt: skip
    logits = torch.stack(result.logits, 1)
    drawn = result.sequences[:, -logits.shape[1] :]
    weights = attnzoo.probabilities(logits / temperature, "sparsemax")
    unfinished = (drawn == 98).long().cumsum(-1) <= (drawn == 98)
    assert bool((weights.gather(-1, drawn[..., None])[..., 0] > 0)[unfinished].all())
    assert 1 < (weights > 0).sum(-1).float().mean() < 60  # of 99 tokens


def test_greedy_and_beam_search() -> None:
    model = llama(initializer_range=0.3)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids()), "max_new_tokens": 6,
                               "do_sample": False, "pad_token_id": 0}  # fmt: skip
    process = [VariantLogitsProcessor("entmax")]
    greedy = model.generate(ids(), **options)
    assert torch.equal(greedy, model.generate(ids(), logits_processor=process, **options))
    beams = model.generate(
        ids(), num_beams=3, logits_processor=process, output_scores=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    z = model(beams.sequences).logits[:, 11:-1]
    weights = attnzoo.probabilities(z, "entmax").gather(-1, beams.sequences[:, 12:, None])
    assert torch.allclose(weights.log().sum((1, 2)) / 6, beams.sequences_scores, atol=1e-4)


def test_processor_leaves_out_tokens_without_logits() -> None:
    z = torch.tensor([[1.0, -torch.inf, 0.9, -3.0]])
    for variant, params in (("entmax", {"alpha": 1.3}), ("ssmax", {}), ("topk", {"top_k": 2})):
        expected = torch.zeros_like(z)
        expected[:, [0, 2, 3]] = attnzoo.probabilities(z[:, [0, 2, 3]] / 2, variant, **params)
        process = VariantLogitsProcessor(variant, temperature=2.0, **params)
        assert torch.allclose(process(None, z).exp(), expected)
        assert process(None, z)[0, 1] == -torch.inf
    for error, text, arguments in (
        (ValueError, "temperature must be a finite number > 0, got 0", {"temperature": 0}),
        (TypeError, "beta", {"beta": 1.0}),
        (ValueError, "alpha", {"alpha": 0.5}),
    ):
        with pytest.raises(error, match=text):
            VariantLogitsProcessor("entmax", **arguments)
    with pytest.raises(ValueError, match="variant of VariantLogitsProcessor must not depend"):
        VariantLogitsProcessor("stick_breaking")


def test_the_processor_shows_its_arguments() -> None:
    text = "VariantLogitsProcessor('entmax', temperature=0.5, alpha=1.3)"
    assert repr(VariantLogitsProcessor("entmax", temperature=0.5, alpha=1.3)) == text


def test_the_config_of_a_saved_model_names_the_head(tmp_path: Path) -> None:
    model = convert(llama(), "ssmax").train()
    batch = {"input_ids": ids(), "labels": ids()}
    options: dict[str, Any] = {"output": "entmax", "output_params": {"alpha": 1.3}}
    trainer(model, tmp_path, **options).compute_loss(model, batch)
    trainer(model, tmp_path).compute_loss(model.eval(), batch)  # an evaluation changes nothing
    model.save_pretrained(tmp_path)
    process = VariantLogitsProcessor(**AutoConfig.from_pretrained(tmp_path).attnzoo_output)
    assert process.variant == "entmax"
    assert process.params == {"alpha": 1.3}


def test_the_config_names_only_the_head_of_the_last_training(tmp_path: Path) -> None:
    batch = {"input_ids": ids(), "labels": ids()}
    model = llama().train()
    for output in (None, margin_loss):
        trainer(model, tmp_path, output="entmax").compute_loss(model, batch)
        assert model.config.attnzoo_output == {"variant": "entmax"}
        trainer(model, tmp_path, output=output).compute_loss(model, batch)
        assert not hasattr(model.config, "attnzoo_output")
    model = Doubled(llama().config)
    with pytest.raises(ValueError, match="has other logits"):
        trainer(model, tmp_path, output="entmax").compute_loss(model, batch)
    assert not hasattr(model.config, "attnzoo_output")
