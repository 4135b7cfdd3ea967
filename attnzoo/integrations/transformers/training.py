"""TrainerMixin: excludes the learned parameters of variants from a Trainer's weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from attnzoo.nn.optimizer import without_decay

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
        The excluded parameters are those of `attnzoo.nn.parameter_groups`; the matrix of a
        projection that makes a parameter decays. Trainer itself excludes only biases and norms.
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay."""
        constant = {id(parameter) for parameter in without_decay(model)}
        named = model.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if id(parameter) in constant}
        return [name for name in super().get_decay_parameter_names(model) if name not in names]
