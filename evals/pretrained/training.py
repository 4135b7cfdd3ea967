"""Trains what a variant learns in a pretrained model, and stores only that.

All other parameters are frozen. The learned parameters of the variant, and those of LoRA (Hu et al.
2021, arXiv:2106.09685), are fp32, whatever the dtype of the model. The model stays in evaluation
mode, so dropout is off.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from commandline.variants import VariantCall, identity_of, parse_spec
from evals.conversion import moves
from evals.pretrained.loading import Loaded
from evals.pretrained.reading import surprisal
from evals.pretrained.substitution import Substitution, parse_substitution
from evals.run import fit
from evals.task import Schedule
from evals.tasks import draws

VERSION = 2  # change it when a training with the same settings gives other values
_LORA = "lora_"  # in the names of the parameters that peft adds


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


@dataclass(frozen=True, kw_only=True)
class Adapted(Substitution):
    """A variant whose learned parameters were trained.

    call: the variant at the start of the training. learn: names of the trained parameters. file:
    where the trained values are stored; None is the start of the training.
    """

    recipe: Recipe
    learn: tuple[str, ...] = ()
    file: Path | None = None

    def __str__(self) -> str:
        return f"{self.call} trained ({', '.join([*self.learn, str(self.recipe)])})"

    @property
    def in_place(self) -> bool:
        return not self.recipe.lora

    @property
    def untrained(self) -> Adapted:
        return replace(self, file=None)

    @property
    def options(self) -> dict[str, Any]:
        return {"learn": self.learn}

    def identity(self) -> dict[str, object]:
        trained = {"version": VERSION, "learn": list(self.learn), **asdict(self.recipe)}
        return {**(super().identity() or {}), "trained": trained}

    def onto(self, model: Any, tokens: Tensor) -> Any:
        """Substitute the variant with the trained values, or with those of the start, in place.

        At the start, all other parameters are frozen.
        """
        stored = None if self.file is None else read_stored(self.file)
        unconverted = set(attentions(model))
        model = super().onto(model, tokens)
        for module in set(attentions(model)) - unconverted:
            module.float().reset_parameters()  # convert has rounded them to the model's dtype
        tuner = _with_lora(model, self.recipe) if self.recipe.lora else None
        variant_parameters = {id(x) for module in attentions(model) for x in module.parameters()}
        for name, value in model.named_parameters():
            value.requires_grad_(id(value) in variant_parameters or _LORA in name)
        if stored is None:
            return model
        parameters = trained_parameters(model)
        if parameters.keys() != stored.tensors.keys():
            raise UsageError(f"{self.file} has the parameters of another model; remove it")
        for name, value in parameters.items():
            value.requires_grad_(False).copy_(stored.tensors[name])
        return model if tuner is None else tuner.merge_and_unload()


def parse_training(text: str, layers: tuple[int, ...] | None, recipe: Recipe) -> Adapted:
    """Read a variant to train. "learn" names the parameters; by default all with an initial value.

    Without start, calibrate or an initial value of a learned parameter, the training starts at the
    identity if the variant has one.
    """
    spec = parse_spec(text)
    arguments = dict(spec.test.arguments)
    names = arguments.pop("learn", None)
    if names is not None and not isinstance(names, str):
        raise UsageError(f"{spec.test.name}: learn must be names such as 'x y', got {names!r}")
    if not spec.is_substitution:
        text = str(replace(spec.test, arguments=tuple(arguments.items())))
    call = parse_substitution(text, layers).call
    variant = attnzoo.get_variant(call.name)
    learn = tuple(param.name for param in variant.params if param.init is not None)
    if names is not None:
        learn = tuple(names.replace(",", " ").split())
    if not learn and not recipe.lora:
        raise UsageError(
            f"--variants {text}: {call.name} learns no parameter by itself; name some with "
            f"{call.name}(learn='…'), or train LoRA with --lora"
        )
    starts = {"start", "calibrate", *learn} & arguments.keys()
    if learn and not starts and identity_of(variant) is not None:
        arguments["start"] = "identity"
        call = VariantCall(call.name, tuple(sorted(arguments.items())))
    return Adapted(call, layers, recipe=recipe, learn=learn)


def references(spec: Adapted) -> Iterator[Substitution]:
    """The variant without training: where it equals softmax, calibrated, and at the start."""
    variant = attnzoo.get_variant(spec.call.name)
    dropped = {"start", "calibrate", *spec.learn, *(variant.identity or ())}
    arguments = {name: x for name, x in spec.call.arguments if name not in dropped}
    references = [dict(spec.call.arguments)]
    if variant.calibrate is not None:
        references.insert(0, {**arguments, "calibrate": spec.recipe.length})
    if identity_of(variant):
        references.insert(0, {**arguments, "start": "identity"})
    for reference in references:
        yield Substitution(VariantCall(variant.name, tuple(sorted(reference.items()))), spec.layers)


def check_peft() -> None:
    """Raise UsageError if peft is missing, which LoRA needs."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UsageError("--lora needs peft: pip install -e '.[lora]'") from error


def _with_lora(model: nn.Module, recipe: Recipe) -> Any:
    """Add fp32 LoRA layers to the linear layers below the output layer, in place.

    The scale is that of peft with alpha = rank, which is 1. At the start the outputs of the model
    do not change. The matrices A are drawn at random with the seed of the training.
    """
    from peft import LoraConfig, LoraModel

    config = LoraConfig(
        r=recipe.lora, lora_alpha=recipe.lora, target_modules="all-linear", lora_dropout=0.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        tuner: Any = LoraModel(model, config, "default")  # type: ignore[arg-type]
    for name, value in tuner.model.named_parameters():
        if _LORA in name:
            value.data = value.data.float()
    return tuner


def attentions(model: nn.Module) -> list[attnzoo.nn.Attention]:
    """The converted attention layers, in order."""
    return [module for module in model.modules() if isinstance(module, attnzoo.nn.Attention)]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen."""
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


class Sequences:
    """Training sequences: the tokenizer's special tokens, then consecutive tokens of the text from
    random starts. A sequence depends only on the seed, its length and its number."""

    def __init__(self, loaded: Loaded, tokens: Tensor, recipe: Recipe) -> None:
        self.tokens, self.recipe, self.start = tokens, recipe, loaded.start()
        self.size = recipe.length - len(self.start)
        if len(tokens) < self.size + 1:
            raise UsageError(
                f"--text must have at least {self.size + 1} tokens to train on, got {len(tokens)}"
            )

    def batch(self, first: int, last: int) -> Tensor:
        """The sequences first … last − 1, (last − first, length)."""
        raw = draws.words(self.recipe.seed, "train", self.recipe.length, first, last, 1)[:, 0]
        begins = draws.integers(raw, len(self.tokens) - self.size + 1)
        return torch.stack([
            torch.cat((self.start, self.tokens[begin : begin + self.size])) for begin in begins
        ])  # fmt: skip


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The mean of −log P of all tokens but the first of each sequence (B, N)."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return surprisal(logits, ids[:, 1:]).mean()


def check_gradients(model: Any, spec: Adapted, sequences: Sequences) -> None:
    """Raise if a learned parameter of the variant has no gradient at the start in any layer."""
    loss_of(model, sequences.batch(0, 1)[:, :64]).backward()
    for name in spec.learn:
        if not moves(name, attentions(model)):
            raise UsageError(
                f"--variants {spec.call}: {name} has no gradient there, so training cannot move "
                f"it; give another initial value, such as {spec.call.name}({name}=…)"
            )


@dataclass(frozen=True)
class StoredTraining:
    """A finished training: the trained tensors by name, and what is known about it.

    about: "loss" of each step; "values", for each parameter with one number per head a list of
    heads for each layer; "seconds", "cpu_seconds", "parameters" (their number) and "settings".
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """What a result row says about the training."""
        costs = {name: self.about[name] for name in ("seconds", "cpu_seconds", "parameters")}
        return {**self.about["settings"], **costs}

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
    assert spec.file is not None
    if not spec.file.exists():
        return False
    try:
        read_stored(spec.file)
    except UsageError as error:
        print(f"warning: {error}; it is trained again", file=sys.stderr)
        return False
    return True


def train(spec: Adapted, model: Any, sequences: Sequences, report: Callable[[float], None]) -> None:
    """Train a model at the start of the training and write the parameters to ``spec.file``.

    report: called with the finished fraction after each step.

    Raises:
        evals.run.NotFinite: the training gave a NaN or an infinity.
    """
    assert spec.file is not None
    recipe, losses = spec.recipe, list[Tensor]()
    began, cpu = time.perf_counter(), time.process_time()

    def loss_at(step: int) -> Tensor:
        report(step / recipe.steps)
        loss = loss_of(model, sequences.batch(step * recipe.batch, (step + 1) * recipe.batch))
        losses.append(loss.detach())
        return loss

    trained = trained_parameters(model)
    factors = {False: 1.0, True: recipe.lora_learning_rate / recipe.learning_rate}
    groups = [
        {"params": parameters, "weight_decay": 0.0, "factor": factor}
        for of_lora, factor in factors.items()
        if (parameters := [x for name, x in trained.items() if (_LORA in name) == of_lora])
    ]
    schedule = Schedule(steps=recipe.steps, batch=recipe.batch,
                        learning_rate=recipe.learning_rate, weight_decay=0.0)  # fmt: skip
    fit(model, loss_at, schedule, lambda *_: None, groups)
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
