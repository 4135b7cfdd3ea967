"""TrainerMixin: the learned parameters of variants, and the loss of an output head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from attnzoo.integrations.transformers.output_head import (
    SHIFT_LABELS,
    HeadLoss,
    loss_function,
    record_output,
)
from attnzoo.nn.optimizer import check_rate, without_decay

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

LOSS_ONLY = "attnzoo_loss_only"  # an input of `compute_loss` in an evaluation without predictions


class TrainerMixin(_Base):
    """Excludes the learned parameters of variants from a Trainer's weight decay.

    With ``output``, it also computes the loss of the model's output layer from the hidden states,
    in memory linear in tokens + vocabulary. The model need not be converted.

    List this mixin before the trainer class among the base classes. The trainer class must have the
    methods `get_decay_parameter_names` and `create_optimizer`, as `Trainer` and `Seq2SeqTrainer`.

    Args:
        attention_lr: the learning rate of the learned parameters of the variants. None is that of
            the other parameters. A schedule multiplies both.
        output: the variant whose loss the output layer gets, or a function with the first arguments
            of `attnzoo.losses.linear_loss` and ``reduction``, such as those of `attnzoo.losses`.
            None is the loss of the model.
        output_params: parameters of the variant, a dict of numbers.
        *args, **kwargs: arguments of the trainer class.

    Raises:
        ValueError, TypeError: attention_lr is no finite number of at least 0, the model learns no
            parameter of a variant, or ``optimizers`` has an optimizer: give that one the groups of
            `attnzoo.nn.parameter_groups`. Or the variant has no loss, or ``output`` does not fit
            the model or the arguments of the trainer.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import TrainerMixin
        >>> class Trainer(TrainerMixin, transformers.Trainer):
        ...     pass

    Notes:
        Zero is not a neutral value for a scale or a sink, so decay towards zero is a wrong prior.
        The excluded parameters are those of `attnzoo.nn.parameter_groups`; the matrix of a
        projection that makes a parameter decays. Trainer itself excludes only biases and norms.

        ``output`` takes the hidden states, the matrix and the bias where the model multiplies them.
        It supports tied weights, a factor or a softcap of the logits that the config names, and
        gradient accumulation. Labels are shifted if the model shifts them, and −100 is ignored.
        The first call asks the model, by its loss of two tokens. It raises a ValueError if this
        loss is no cross entropy, or if the logits of a token are not those of the model. Inputs may
        have ``shift_labels``, the target of each token, in place of this question.
        Outputs have the logits of the last token only, except in an evaluation that returns
        predictions. The auxiliary loss of a router is added as the model adds it. Training sets the
        entry ``attnzoo_output`` in the config of the model, a dict with the variant and its
        parameters, which is saved with the model. Training with another loss removes it.
    """

    def __init__(
        self,
        *args: Any,
        attention_lr: float | None = None,
        output: str | Callable[..., Any] | None = None,
        output_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.attention_lr = check_rate("attention_lr", attention_lr)
        self.output, self.output_params = output, output_params
        self.head: HeadLoss | None = None
        if output is not None:
            loss_function(output, output_params)
        elif output_params is not None:
            raise TypeError(f"output_params must be None without output, got {output_params!r}")
        super().__init__(*args, **kwargs)
        if output is not None:
            self._set_head()
        if attention_lr is not None and self.optimizer is not None:
            raise ValueError(
                f"attention_lr must be None with an optimizer, got {attention_lr}: make the "
                "optimizer from attnzoo.nn.parameter_groups(model, attention_lr=...)"
            )

    def _set_head(self) -> None:
        """Prepares the loss of ``output``; raises if the arguments of the trainer do not fit."""
        args = self.args
        for unsupported, what in (
            (args.label_smoothing_factor, f"label_smoothing_factor={args.label_smoothing_factor}"),
            (self.compute_loss_func is not None, "a compute_loss_func"),
            (args.torch_compile, "torch_compile"),
            (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process; start one process per GPU"),
        ):
            if unsupported:
                raise ValueError(f"output must be None with {what}")
        self._head_of_model()
        # Trainer then counts the labels of a step, and divides by their number once.
        self.compute_loss_func = lambda *args, **kwargs: self._head_of_model().result(*args)

    def _head_of_model(self) -> HeadLoss:
        """The loss for the current model, which hyperparameter search changes."""
        if self.head is None or self.head.model is not self.model:
            self.head = HeadLoss(self.model, self.output, self.output_params)
        return self.head

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss, and the outputs of the model if wanted."""
        args: Any = return_outputs, num_items_in_batch
        if self.output is None:
            result = super().compute_loss(model, inputs, *args)
        else:
            head = self._head_of_model()
            loss_only = inputs.get(LOSS_ONLY, not return_outputs)
            inputs = {name: x for name, x in inputs.items() if name != LOSS_ONLY}
            inputs = head.with_shift_labels(model, inputs)
            targets = inputs.pop(SHIFT_LABELS)
            with head.computing(targets, num_items_in_batch, logits=not loss_only):
                result = super().compute_loss(model, inputs, *args)
        if model.training:
            record_output(self.model, self.output, self.output_params)
        return result

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The batches of a step and the number of their targets."""
        if self.output is not None:
            epoch_iterator = map(self._with_shift_labels, epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _with_shift_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        model: Any = self.model_wrapped
        with self.compute_loss_context_manager():
            return self._head_of_model().with_shift_labels(model, self._prepare_inputs(inputs))

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The loss of a batch, and unless ``prediction_loss_only`` its logits and labels."""
        if self.output is None or "labels" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        if not prediction_loss_only and getattr(self.args, "predict_with_generate", False):
            result = super().prediction_step(model, inputs, False, *args, **kwargs)
            # Seq2SeqTrainer then takes the loss of the model.
            loss, _, _ = self.prediction_step(model, inputs, True)
            return loss, *result[1:]
        inputs = self._with_shift_labels(inputs)
        if prediction_loss_only:
            inputs[LOSS_ONLY] = True
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

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
