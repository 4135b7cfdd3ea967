"""TrainerMixin: weight decay and learning rate of the learned parameters of variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from attnzoo.nn.optimizer import check_rate, without_decay

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TrainerMixin(_Base):
    """Excludes the learned parameters of variants from a Trainer's weight decay.

    List this mixin before the trainer class among the base classes. The trainer class must have the
    methods `get_decay_parameter_names` and `create_optimizer`, as `Trainer` and `Seq2SeqTrainer`.

    Args:
        attention_lr: the learning rate of the learned parameters of the variants. None is that of
            the other parameters. A schedule multiplies both.
        *args, **kwargs: arguments of the trainer class.

    Raises:
        ValueError, TypeError: attention_lr is no finite number of at least 0, the model learns no
            parameter of a variant, or ``optimizers`` has an optimizer: give that one the groups of
            `attnzoo.nn.parameter_groups`.

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

    def __init__(self, *args: Any, attention_lr: float | None = None, **kwargs: Any) -> None:
        self.attention_lr = check_rate("attention_lr", attention_lr)
        super().__init__(*args, **kwargs)
        if attention_lr is not None and self.optimizer is not None:
            raise ValueError(
                f"attention_lr must be None with an optimizer, got {attention_lr}: make the "
                "optimizer from attnzoo.nn.parameter_groups(model, attention_lr=...)"
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's optimizer, with a group of their own for the learned parameters."""
        if self.attention_lr is None or self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        passed: Any = args[0] if args else kwargs.get("model")
        model: Any = self.model if passed is None else passed
        learned = {id(p) for p in without_decay(model)}
        groups = list(optimizer.param_groups)
        moved = [[p for p in group["params"] if id(p) in learned] for group in groups]
        if not any(moved):
            raise ValueError(
                "attention_lr must be None, because model has no learned parameters of a variant, "
                f"got {self.attention_lr}"
            )
        for group, params in zip(groups, moved, strict=True):
            group["params"] = [p for p in group["params"] if id(p) not in learned]
            if params:
                optimizer.add_param_group({**group, "params": params, "lr": self.attention_lr})
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay."""
        constant = {id(parameter) for parameter in without_decay(model)}
        named = model.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if id(parameter) in constant}
        return [name for name in super().get_decay_parameter_names(model) if name not in names]
