"""Loads pretrained causal language models of Hugging Face, and turns a text into their tokens."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commandline.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Without one of these files transformers loads an empty tokenizer for some models, without an
# error.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
_PROBE = "A"  # any text that every tokenizer has tokens for


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    model: a folder, or a name on the Hugging Face hub. gguf: a GGUF file in it, or None. dtype: a
    key of `DTYPES`.
    """

    model: str
    gguf: str | None = None
    dtype: str = "float32"
    device: str = "cpu"

    def __str__(self) -> str:
        return self.model if self.gguf is None else f"{self.model} --gguf {self.gguf}"


# Names of tables with one embedding per position, such as wpe and embed_positions. Tables of
# relative positions have other limits.
_POSITIONS = re.compile(r"^(?!.*rel).*(wpe|position)")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in evaluation mode, and its tokenizer. The parameters of an outline are on meta."""

    model: Any
    tokenizer: Any

    @property
    def limit(self) -> int | None:
        """The number of positions that the model was trained with, if its config says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def tokens(self, text: str) -> Tensor:
        """The tokens (N,) of a text, without special tokens."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    def text_inside(self, token: int) -> str:
        """What a token adds to a text that it continues.

        Some tokenizers drop the space of the first token of a text, so the token follows another.
        """
        before = self.tokens(_PROBE).tolist()
        alone, after = (
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (before, [*before, token])
        )
        return after.removeprefix(alone)

    def start(self) -> Tensor:
        """The special tokens that the tokenizer puts before every text, such as one named BOS."""
        plain = self.tokens(_PROBE).tolist()
        full = self.tokenizer(_PROBE)["input_ids"]
        where = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
        return torch.tensor(full[:where], dtype=torch.long)

    def check_length(self, option: str, length: int) -> None:
        """Raise UsageError if a learned table of position embeddings has no entry for a length.

        Such a table is an `nn.Embedding` named after positions. OPT's tables have an ``offset``;
        in those of BERT's kind, position 0 has the index after ``padding_idx``.
        """
        for name, table in self.model.named_modules():
            last = name.rsplit(".", 1)[-1]
            if not isinstance(table, nn.Embedding) or not _POSITIONS.search(last):
                continue
            first = 0 if table.padding_idx is None else table.padding_idx + 1
            most = table.weight.shape[0] - getattr(table, "offset", first)
            if length > most:
                raise UsageError(
                    f"{option} must be at most {most} for this model, which has no embedding of "
                    f"later positions, got {length}"
                )

    def fingerprint(self) -> str:
        """A hash of the model's parameters and config and of the tokenizer. Results of two models
        are never mixed."""
        digest = hashlib.sha256()
        for part in (_without_origin(self.model.config.to_dict()), _tokenizing(self.tokenizer)):
            digest.update(json.dumps(part, sort_keys=True, default=repr).encode())
        for name, value in self.model.state_dict().items():
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:20]


# Entries of a config that say where a model comes from.
_ORIGIN = ("_name_or_path", "transformers_version")


def _without_origin(config: dict[str, Any]) -> dict[str, Any]:
    """A config, and the configs in it, without name, path and version."""
    return {
        name: _without_origin(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _ORIGIN
    }


def _tokenizing(tokenizer: Any) -> Any:
    """What the tokens of a text depend on."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    # Calls of the tokenizer change its padding and truncation, which texts here never have.
    return {**json.loads(fast.to_str()), "padding": None, "truncation": None}


def read_text(file: Path, option: str = "--text") -> str:
    """The text of a UTF-8 file."""
    if not file.is_file():
        raise UsageError(f"{option} must be a file, got {str(file)!r}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {file}: {error}") from error


def from_source(source: Source, kind: str, **options: Any) -> Any:
    """The result of ``from_pretrained`` of a class of transformers, such as "AutoModel".

    Raises:
        UsageError: transformers is missing, or there is no such model, file or tokenizer.
    """
    try:
        import transformers

        # Restores the variants of models that attnzoo converted.
        import attnzoo.integrations.transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(str(error)) from error
    folder = Path(source.model)
    if source.gguf is not None:
        options["gguf_file"] = source.gguf
        if folder.is_dir() and not (folder / source.gguf).is_file():
            raise UsageError(f"--gguf must be a file in {folder}, got {source.gguf!r}")
    else:
        transformers.logging.disable_progress_bar()  # a GGUF file loads for long enough for one
        if folder.is_dir() and not any(any(folder.glob(kind)) for kind in _TOKENIZER_FILES):
            raise UsageError(
                f"--model {folder} has no tokenizer; write one there with tokenizer.save_pretrained"
            )
    try:
        return getattr(transformers, kind).from_pretrained(source.model, **options)
    except (OSError, ValueError, ImportError) as error:
        raise _no_model(source, error) from error


def _no_model(source: Source, error: Exception) -> UsageError:
    reason = str(error).strip() or type(error).__name__
    return UsageError(f"--model {source}: {reason.splitlines()[0]}")


@cache
def outline(source: Source, kind: str = "AutoModelForCausalLM") -> Loaded:
    """The tokenizer of a model, and the model without its weights; made once.

    Options are checked with it, because the weights of a model take long to load.

    Raises:
        UsageError: as for `from_source`.
    """
    tokenizer, config = from_source(source, "AutoTokenizer"), from_source(source, "AutoConfig")
    import transformers

    try:
        with torch.device("meta"):
            model = getattr(transformers, kind).from_config(config)
    except (ValueError, ImportError) as error:
        raise _no_model(source, error) from error
    return Loaded(model.eval(), tokenizer)


@cache
def load(source: Source) -> Loaded:
    """A causal language model and its tokenizer, loaded once in each process.

    Raises:
        UsageError: as for `outline`, or the model is not causal.
    """
    tokenizer = outline(source).tokenizer
    model = from_source(source, "AutoModelForCausalLM", dtype=DTYPES[source.dtype])
    if source.gguf is not None:
        model = _plain(model, source)
    loaded = Loaded(model.to(source.device).eval(), tokenizer)
    _check_causal(loaded, source)
    return loaded


def _plain(model: Any, source: Source) -> Any:
    """The same model without the marks of GGUF, so that it can be trained and saved.

    Transformers has dequantized the weights, but it refuses to save a model with these marks.
    """
    if not all(value.is_floating_point() for value in model.parameters()):
        raise UsageError(f"--model {source}: its weights are still quantized after loading")
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(DTYPES[source.dtype])
    plain.load_state_dict(model.state_dict())
    return plain


@torch.inference_mode()
def _check_causal(loaded: Loaded, source: Source) -> None:
    """Raise if the logits of a token depend on the token after it."""
    model, config = loaded.model, loaded.model.config
    ids = torch.tensor([[0, 1], [0, 2]], device=model.device) % config.get_text_config().vocab_size
    one, other = model(input_ids=ids).logits[:, 0].double()
    # Causal models give equal logits up to rounding; an unlucky batch may round differently.
    if not torch.allclose(one, other, rtol=0.05, atol=0.05 * float(one.abs().max())):
        raise UsageError(
            f"--model must be a causal language model, got {source.model} "
            f"({type(model).__name__}), in which tokens see later tokens"
        )
