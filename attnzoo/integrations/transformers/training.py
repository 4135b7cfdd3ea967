"""TrainerMixin: what transformers' Trainer needs to train a converted model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from attnzoo.nn import Attention

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TrainerMixin(_Base):
    """Keeps what variants learn out of a Trainer's weight decay.

    Zero is not neutral for a scale or a sink, so decay towards it is no prior. Trainer itself
    leaves out biases and norms only.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import TrainerMixin
        >>> class Trainer(TrainerMixin, transformers.Trainer):
        ...     pass

    Goes before any class of trainers that has `get_decay_parameter_names`, `Seq2SeqTrainer` too.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        own = {
            f"{prefix}.{name}"
            for prefix, module in model.named_modules()
            if isinstance(module, Attention)
            for name, _ in module.named_parameters()
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in own]
