"""Trains what a variant learns in a pretrained model, and stores only that.

All other parameters are frozen. The learned parameters of the variant are fp32, whatever the dtype
of the model. The model stays in evaluation mode, so dropout is off.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

import attnzoo
from commandline.errors import UsageError
from commandline.files import write_whole
from evals.pretrained import contexts, lora
from evals.pretrained.loading import Loaded, read_text
from evals.pretrained.reading import surprisal
from evals.pretrained.study import PretrainedTask, outlined
from evals.pretrained.substitution import Substitution, apply
from evals.run import fit
from evals.task import Schedule
from evals.tasks import draws

VERSION = 2  # change it when a training with the same settings gives other values
_LEAST_GRADIENT = 1e-11  # a thousandth of AdamW's eps: smaller gradients move nothing


@dataclass(frozen=True)
class Recipe:
    """The settings of a training. text: a hash of the training text. lora: the rank, or 0."""

    text: str
    length: int
    steps: int
    batch: int
    learning_rate: float
    seed: int
    lora: int = 0
    lora_learning_rate: float = 0.0

    def __str__(self) -> str:
        words = f"{self.steps} steps of {self.batch} × {self.length}, rate {self.learning_rate:g}"
        if self.lora:
            words += f", LoRA {self.lora} at {self.lora_learning_rate:g}"
        return f"{words}, seed {self.seed}"


@dataclass(frozen=True)
class Adapted(Substitution):
    """A variant whose learned parameters were trained.

    call: the variant at the start of the training. learn: names of the trained parameters. file:
    where the trained values are stored.
    """

    recipe: Recipe | None = None
    learn: tuple[str, ...] = ()
    file: Path = Path()

    @property
    def settings(self) -> Recipe:
        assert self.recipe is not None
        return self.recipe

    def __str__(self) -> str:
        return f"{self.call} trained ({', '.join([*self.learn, str(self.settings)])})"

    @property
    def in_place(self) -> bool:
        return not self.settings.lora

    def identity(self) -> dict[str, object]:
        trained = {"version": VERSION, "learn": list(self.learn), **asdict(self.settings)}
        return {**super().identity(), "trained": trained}

    def prepared(self, model: Any, tokens: Tensor) -> tuple[Any, Any]:
        """The model at the start of the training with frozen parameters, and the LoRA tuner."""
        unconverted = set(attentions(model))
        model = apply(model, self, tokens, learn=self.learn)
        for module in set(attentions(model)) - unconverted:
            module.float().reset_parameters()  # convert has rounded them to the model's dtype
        recipe = self.settings
        tuner = lora.added(model, recipe.lora, recipe.seed) if recipe.lora else None
        variant_parameters = {id(x) for module in attentions(model) for x in module.parameters()}
        for name, value in model.named_parameters():
            value.requires_grad_(id(value) in variant_parameters or lora.MARK in name)
        return model, tuner

    def onto(self, model: Any, tokens: Tensor) -> Any:
        stored = read_stored(self.file)
        model, tuner = self.prepared(model, tokens)
        parameters = trained_parameters(model)
        if parameters.keys() != stored.tensors.keys():
            raise UsageError(f"{self.file} has the parameters of another model; remove it")
        with torch.no_grad():
            for name, value in stored.tensors.items():
                parameters[name].copy_(value)
        for value in parameters.values():
            value.requires_grad_(False)
        return model if tuner is None else lora.merged(tuner)


def attentions(model: nn.Module) -> list[attnzoo.nn.Attention]:
    """The converted attention layers, in order."""
    return [module for module in model.modules() if isinstance(module, attnzoo.nn.Attention)]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen."""
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


@dataclass(frozen=True)
class HeldOut(PretrainedTask):
    """A task whose contexts are not of the training text.

    text: the text of the contexts, or the text of both if share > 0. training: the training text.
    share: the part at the end of the text that is held out; 0 if the training text is another file.
    """

    training: Path = Path()
    share: float = 0.0

    @property
    def text_name(self) -> str:
        return f"last {100 * self.share:g} % of {self.text.name}" if self.share else self.text.name

    @property
    def data(self) -> str:
        return f"{super().data} trained-on-{self.hashes[0]}"

    def training_text(self) -> str:
        return self.texts()[0]

    def typical(self, drawn: contexts.Contexts) -> Tensor:
        return training_tokens(self)

    def _read(self) -> tuple[str, str]:
        """The training text and the text of the contexts. A text is cut at the end of a line."""
        if not self.share:
            return read_text(self.training), read_text(self.text, "--eval-text")
        text = read_text(self.text)
        cut = text.find("\n", int(len(text) * (1 - self.share))) + 1
        if cut == 0:
            raise UsageError(
                f"--text must have a line that ends in its last {100 * self.share:g} %, so that "
                "this part can be held out"
            )
        return text[:cut], text[cut:]


@cache
def training_tokens(task: HeldOut) -> Tensor:
    """The tokens (N,) of the training text."""
    return outlined(task.source).tokens(task.training_text())


class Sequences:
    """Training sequences: the tokenizer's special tokens, then consecutive tokens of the text from
    random starts. A sequence depends only on the seed, its length and its number."""

    def __init__(self, loaded: Loaded, tokens: Tensor, recipe: Recipe) -> None:
        self.tokens, self.recipe, self.start = tokens, recipe, loaded.start()
        size = recipe.length - len(self.start)
        if len(tokens) < size + 1:
            raise UsageError(
                f"--text must have at least {size + 1} tokens to train on, got {len(tokens)}"
            )

    def batch(self, first: int, last: int) -> Tensor:
        """The sequences first … last − 1, (last − first, length)."""
        recipe, size = self.recipe, self.recipe.length - len(self.start)
        raw = draws.words(recipe.seed, "train", recipe.length, first, last, 1)[:, 0]
        begins = draws.integers(raw, len(self.tokens) - size + 1)
        return torch.stack([torch.cat((self.start, self.tokens[b : b + size])) for b in begins])


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The mean of −log P of all tokens but the first of each sequence (B, N)."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return surprisal(logits, ids[:, 1:]).mean()


def check_gradients(model: Any, spec: Adapted, sequences: Sequences) -> None:
    """Raise if a learned parameter of the variant has no gradient at the start in any layer."""
    with torch.enable_grad():
        loss_of(model, sequences.batch(0, 1)[:, :64]).backward()
    for name in spec.learn:
        grads = [x.grad for layer in attentions(model) for x in _tensors(layer, name)]
        largest = max((float(g.abs().max()) for g in grads if g is not None), default=0.0)
        if largest < _LEAST_GRADIENT:
            raise UsageError(
                f"--variants {spec.call}: {name} has no gradient there, so training cannot move "
                f"it; give another initial value, such as {spec.call.name}({name}=…)"
            )


def _tensors(layer: attnzoo.nn.Attention, name: str) -> list[Tensor]:
    """The trainable tensors behind a parameter; a bounded one is stored under a longer name."""
    return [x for key, x in layer.named_parameters() if name in key.split(".")]


@dataclass(frozen=True)
class StoredTraining:
    """A finished training: the trained tensors by name, and what is known about it.

    about: "loss" of each step; "values", for each parameter with one number per head a list of
    heads for each layer; "seconds", "cpu_seconds", "parameters" (their number) and "settings".
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    @cached_property
    def curves(self) -> dict[str, list[float]]:
        """The curves of a result row."""
        curves: dict[str, list[float]] = {"training_loss": self.about["loss"]}
        for name, layers in self.about["values"].items():
            curves[f"head_learned_{name}"] = [x for heads in layers for x in heads]
            curves["heads"] = [float(len(heads)) for heads in layers]
        return curves


_ABOUT = {"loss", "values", "seconds", "cpu_seconds", "parameters", "settings"}


@cache
def read_stored(file: Path) -> StoredTraining:
    """Read the file of a finished training.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        with safe_open(file, "pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            about = json.loads((reader.metadata() or {})["about"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise UsageError(f"{file} is damaged: {error}") from error
    if not isinstance(about, dict) or not about.keys() >= _ABOUT:
        raise UsageError(f"{file} is damaged: its metadata must have {', '.join(sorted(_ABOUT))}")
    return StoredTraining(tensors, about)


def is_trained(spec: Adapted) -> bool:
    """Whether the training is finished. A damaged file gives a warning, and does not count."""
    if not spec.file.exists():
        return False
    try:
        read_stored(spec.file)
    except UsageError as error:
        print(f"warning: {error}; it is trained again", file=sys.stderr)
        return False
    return True


def train(
    spec: Adapted, loaded: Loaded, model: Any, tokens: Tensor, report: Callable[[float], None]
) -> None:
    """Train a prepared model and write the trained parameters to ``spec.file``.

    report: called with the finished fraction after each step.

    Raises:
        evals.run.NotFinite: the training gave a NaN or an infinity.
    """
    recipe, sequences = spec.settings, Sequences(loaded, tokens, spec.settings)
    began, cpu = time.perf_counter(), time.process_time()
    losses: list[Tensor] = []

    def loss_at(step: int) -> Tensor:
        report(step / recipe.steps)
        with torch.enable_grad():
            ids = sequences.batch(step * recipe.batch, (step + 1) * recipe.batch)
            loss = loss_of(model, ids)
        losses.append(loss.detach())
        return loss

    schedule = Schedule(steps=recipe.steps, batch=recipe.batch,
                        learning_rate=recipe.learning_rate, weight_decay=0.0)  # fmt: skip
    fit(model, loss_at, schedule, lambda *_: None, _groups(model, recipe))
    trained = trained_parameters(model)
    about = {
        "loss": [_short(float(loss)) for loss in losses],
        "values": _per_head(attentions(model), spec.learn),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "parameters": sum(x.numel() for x in trained.values()),
        "settings": {**asdict(recipe), "learn": list(spec.learn), "start": str(spec.call),
                     "optimizer": "AdamW, one cycle", "torch": torch.__version__},
    }  # fmt: skip
    tensors = {name: x.detach().cpu().contiguous() for name, x in trained.items()}
    write_whole(spec.file, save(tensors, {"about": json.dumps(about)}))


def _per_head(
    layers: Sequence[attnzoo.nn.Attention], names: Sequence[str]
) -> dict[str, list[list[float]]]:
    """The values of the parameters with one number per head, a list of heads for each layer."""
    return {
        name: [[_short(x) for x in getattr(layer, name).tolist()] for layer in layers]
        for name in names
        if all(getattr(layer, name).ndim == 1 for layer in layers)
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameter groups: the variant's, and those of LoRA with their own learning rate."""
    named = trained_parameters(model).items()
    variant_parameters = [x for name, x in named if lora.MARK not in name]
    lora_parameters = [x for name, x in named if lora.MARK in name]
    groups: list[dict[str, Any]] = [
        {"params": variant_parameters, "weight_decay": 0.0},
        {"params": lora_parameters, "weight_decay": 0.0,
         "factor": recipe.lora_learning_rate / recipe.learning_rate},
    ]  # fmt: skip
    return [group for group in groups if group["params"]]
