"""TrainerMixin: excludes the learned parameters of variants from a Trainer's weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from attnzoo.nn import Attention

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TrainerMixin(_Base):
    """Excludes the learned parameters of variants from a Trainer's weight decay.

    List this mixin before the trainer class among the base classes. The trainer class must have the
    method `get_decay_parameter_names`, as `Trainer` and `Seq2SeqTrainer` do.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import TrainerMixin
        >>> class Trainer(TrainerMixin, transformers.Trainer):
        ...     pass

    Notes:
        Zero is not a neutral value for a scale or a sink, so decay towards zero is a wrong prior.
        Trainer itself excludes only biases and norms.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay."""
        learned = {
            f"{prefix}.{name}"
            for prefix, module in model.named_modules()
            if isinstance(module, Attention)
            for name, _ in module.named_parameters()
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in learned]
