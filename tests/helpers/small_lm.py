"""A small random language model with a tokenizer of bytes, in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from helpers.hf_models import llama

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "LICENSE"
LENGTH = 1024  # tokens that have room for the planted facts, at one token a byte


def byte_tokenizer(start: bool = False) -> Any:
    """One token per byte. With ``start``, every text begins with a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<s>", *letters])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if start:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def word_tokenizer(text: str) -> Any:
    """Tokens of a text's words and points in the way of SentencePiece: "▁" stands for a space.

    The decoder drops the space of the first token, as those of Llama 2 and Mistral do.
    """
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
        pre_tokenizers.Split(tokenizers.Regex(r"[.?]"), "isolated"),
    ])  # fmt: skip
    pieces = dict.fromkeys(piece for piece, _ in split.pre_tokenize_str("A" + text))
    pieces |= dict.fromkeys(piece for piece, _ in split.pre_tokenize_str(text))
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", *pieces])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = split
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def save_small_lm(folder: Path, model: Any = None, start: bool = False) -> Path:
    """Save a model, by default a Llama with two layers of four heads, and its tokenizer."""
    options = {"vocab_size": 257, "max_position_embeddings": LENGTH, "initializer_range": 0.2}
    (llama(**options) if model is None else model).save_pretrained(folder)
    byte_tokenizer(start).save_pretrained(folder)
    return folder
