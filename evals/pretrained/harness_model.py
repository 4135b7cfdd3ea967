"""The model ``attnzoo`` of EleutherAI's lm-evaluation-harness; importing this module registers it.

Version 0.4.13 of the harness looks for models of other packages nowhere, so its own command does
not know this one. `evals.pretrained.harness` runs the command after importing this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

# Restores the variants of models that attnzoo converted.
import attnzoo.integrations.transformers  # noqa: F401
from commandline.errors import UsageError
from evals.pretrained.loading import Loaded, read_text
from evals.pretrained.options import parse_layers
from evals.pretrained.substitution import parse_substitution


@register_model("attnzoo")
class AttnzooLM(HFLM):
    """The harness's model ``hf`` with an attention variant in place of the model's attention.

    pretrained: a folder with a model and a tokenizer, or a name on the Hugging Face hub. variant: a
    variant with its parameters, such as ``log_n(train_length=2048)``; None is the model as loaded.
    layers: numbers of layers such as ``0-9,20``; None is all. text: a UTF-8 file, which
    ``calibrate=N`` reads. The other options are those of ``hf``.

    Raises:
        UsageError: the model does not support the variant.
    """

    def __init__(
        self,
        pretrained: str,
        variant: str | None = None,
        layers: str | int | None = None,
        text: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(pretrained, **options)
        if variant is None:
            return
        tokens = torch.empty(0, dtype=torch.long)
        if text is not None:
            tokens = Loaded(self.model, self.tokenizer).tokens(read_text(Path(text)))
        parse_substitution(variant, parse_layers(layers)).onto(self.model, tokens)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse a cache of answers: its entries do not say which variant answered."""
        raise UsageError("--use_cache must not be given: its entries do not tell variants apart")
