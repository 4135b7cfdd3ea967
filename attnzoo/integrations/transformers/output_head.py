"""Output heads of Hugging Face models whose probabilities come from a variant: loss and sampling.

A model multiplies its hidden states h (B, N, d) with the matrix E (V, d) of its output embeddings.
The loss is computed from h and E where they meet, and the model goes on with the last token alone,
so the logits (B, N, V) never exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from transformers import LogitsProcessor

from attnzoo.core.checks import plain, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.probabilities import probabilities
from attnzoo.functional.score_rows import check_has_rows
from attnzoo.losses.arguments import check_number
from attnzoo.losses.linear_loss import linear_loss
from attnzoo.losses.probabilities import OutputHead, check_head

ENTRY = "attnzoo_output"  # in the config of a model that was trained with the loss of a variant
SHIFT_LABELS = "shift_labels"  # the input with the target of each token
# What models do with their logits, by the names in their configs: factors with their powers.
SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
SOFTCAP = "final_logit_softcapping"
ROUTER_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")  # of aux_loss in the loss of a model
# With these in their configs, models add losses that they compute only from labels.
ADDED_LOSSES = ("z_loss_coefficient", "diffusion_loss_weight")


class HeadLoss:
    """The loss of one model's output layer, computed from its hidden states.

    ``output`` and ``params`` are ``output`` and ``output_params`` of `TrainerMixin`. The first call
    asks the model whether it shifts labels, and compares the logits of a token with the model's.
    """

    def __init__(self, model: Any, output: Any, params: dict[str, Any] | None) -> None:
        self.model, self.name = model, type(model).__name__
        self.loss = loss_function(output, params)
        self.layer: Any = model.get_output_embeddings()
        if not isinstance(self.layer, nn.Linear):
            kind = type(self.layer)
            raise self._unsupported(
                f"has output embeddings of type {kind.__module__}.{kind.__name__}, not "
                "torch.nn.Linear"
            )
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, SOFTCAP, None)
        self.scale = 1.0
        for name, power in SCALES.items():
            self.scale *= (getattr(config, name, None) or 1.0) ** power
        added = getattr(model, "final_logits_bias", None)
        self.has_added_bias = added is not None and bool(added.any())
        self.from_decoder = getattr(model.config, "is_encoder_decoder", False)
        self.shifts_labels: bool | None = None  # unknown before the first call
        factors = (getattr(x, name, None) for x in (model, config) for name in ROUTER_FACTORS)
        self.router_factor = next((factor for factor in factors if factor is not None), None)
        has_aux_loss = not self.from_decoder and getattr(model.config, "return_dict", True)
        for name in ADDED_LOSSES if has_aux_loss else (*ADDED_LOSSES, "output_router_logits"):
            value = getattr(model.config, name, None)
            if value:
                raise self._unsupported(
                    f"with {name}={value} in its config adds a loss that its outputs do not have "
                    "without labels"
                )
        accepted = inspect.signature(self.loss).parameters
        for name in self._options():
            if name not in accepted:
                raise self._unsupported(f"has a {name}, which this loss does not take")
        self.is_checked = False
        self.losses: list[Tensor] = []  # of the current call
        self.logits: Tensor | None = None  # of its last token (B, 1, V)

    def _unsupported(self, reason: str) -> ValueError:
        return ValueError(f"output must be None, because {self.name} {reason}")

    def _options(self) -> dict[str, Any]:
        """The keywords of the loss that the model needs."""
        bias = self.layer.bias
        if self.has_added_bias:
            added = self.model.final_logits_bias[0]
            bias = added if bias is None else bias + added
        options = {} if bias is None else {"linear_bias": bias * self.scale}
        return options if self.softcap is None else {**options, "softcap": self.softcap}

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits (B, n, V) of hidden states (B, n, d) that are multiplied by ``scale``."""
        z = linear(hidden, self.layer.weight, self._options().get("linear_bias"))
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    @torch.no_grad()
    def _asks_to_shift(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether the model shifts labels by one token; raises if its loss does not show it.

        The name of its loss function does not tell, because many models do not call it. A model
        that shifts has no target if only the first token has a label. Two tokens with hidden states
        0 have few logits, which are finite.
        """
        labels = torch.full_like(inputs["labels"][..., :2], -100)
        labels[..., 0] = inputs["labels"].max().clamp(min=0)
        unshifted = torch.tensor(torch.nan)
        eps = torch.finfo(torch.float32).eps  # also in fp64, because models compute losses in fp32

        def hook(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            nonlocal unshifted, eps
            _check_labels(inputs["labels"], args[0])
            hidden = torch.zeros_like(args[0][..., :2, :])
            z = self._logits(hidden).flatten(0, -2)
            unshifted = cross_entropy(z.float(), labels.flatten().to(z.device))
            eps = max(eps, torch.finfo(z.dtype).eps)
            return (hidden,)

        handle = self.layer.register_forward_pre_hook(hook)
        try:
            outputs: Any = model(**{**inputs, "labels": labels})
        finally:
            handle.remove()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
        if isinstance(loss, Tensor) and loss.numel() == 1:
            if bool(loss.isnan() | (loss == 0)):
                return True
            unshifted = self._with_aux_loss(unshifted, outputs)
            bound = 16 * eps * unshifted.abs()
            if bool((loss.to(unshifted.device) - unshifted).abs() <= bound):
                return False
        raise self._unsupported(
            "does not compute the cross entropy of its labels, which shows whether it shifts them: "
            f"give the inputs {SHIFT_LABELS}, the target of each token"
        )

    def with_shift_labels(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs with the target of each token as shift_labels (B, N), which Trainer counts.

        A model that gets no labels makes no decoder_input_ids from them.

        Args:
            model: the model, perhaps wrapped for several ranks.
        """
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            raise ValueError(f"inputs must have labels, got only {', '.join(sorted(inputs))}")
        inputs = dict(inputs)
        if self.from_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
            make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if make is None:
                raise ValueError(f"inputs of {self.name} must have decoder_input_ids, got none")
            inputs["decoder_input_ids"] = make(labels=labels)
        others = [name for name in inputs if "_label" in name and name != SHIFT_LABELS]
        if others:  # such as next_sentence_label
            raise ValueError(
                f"inputs must have no labels other than labels and {SHIFT_LABELS}, got "
                f"{', '.join(others)}: the loss of output would leave them out"
            )
        if inputs.get(SHIFT_LABELS) is None:
            if self.shifts_labels is None:
                self.shifts_labels = self._asks_to_shift(model, inputs)
            shifted = pad(labels[..., 1:], (0, 1), value=-100) if self.shifts_labels else labels
            inputs[SHIFT_LABELS] = shifted
        return inputs

    @contextmanager
    def computing(
        self, targets: Tensor, items: Tensor | int | None, logits: bool
    ) -> Iterator[None]:
        """Computes the loss in the call of the model inside; `result` returns it.

        Args:
            targets: (B, N), −100 where there is none.
            items: the divisor of the sum of the losses; None for the number of targets.
            logits: whether the model computes all its logits too.
        """

        def hook(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            (hidden,) = args
            _check_labels(targets, hidden)
            options = self._options()
            scaled = hidden if self.scale == 1 else hidden * self.scale
            if not self.is_checked:
                with torch.no_grad():
                    self.logits = self._logits(scaled[..., -1:, :])
            reduction = "mean" if items is None else "sum"
            loss = self.loss(
                scaled, layer.weight, targets.to(hidden.device), reduction=reduction,
                **options,
            )  # fmt: skip
            divisor = 1 if items is None else torch.as_tensor(items, device=loss.device)
            self.losses.append(loss / divisor)
            return None if logits else (hidden[..., -1:, :],)

        self.losses, self.logits = [], None
        # Sharded weights are whole only within the call of their layer.
        handle = self.layer.register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def result(self, outputs: Any, labels: Any = None, num_items_in_batch: Any = None) -> Tensor:
        """The loss of the call that made these outputs, as a ``compute_loss_func`` of Trainer."""
        if len(self.losses) != 1:
            raise self._unsupported(f"calls its output layer {len(self.losses)} times, not once")
        if self.logits is not None:
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
            expected, computed = logits[..., -1:, :].detach().float(), self.logits.float()
            bound = 16 * torch.finfo(self.logits.dtype).eps * computed.abs().max()
            if bool(((expected - computed).abs() > bound).any()):
                raise self._unsupported(
                    "has other logits than its output layer gives; supported are "
                    f"{SOFTCAP}, the factors {', '.join(SCALES)}, and final_logits_bias"
                )
            self.is_checked, self.logits = True, None
        return self._with_aux_loss(self.losses.pop(), outputs)

    def _with_aux_loss(self, loss: Tensor, outputs: Any) -> Tensor:
        """The loss with that of a router, as the model adds it."""
        aux_loss = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if not isinstance(aux_loss, Tensor):
            return loss
        if self.router_factor is None:
            raise self._unsupported(f"has an aux_loss, but none of {', '.join(ROUTER_FACTORS)}")
        return loss + self.router_factor * aux_loss.to(loss.device)


def _check_labels(labels: Tensor, hidden: Tensor) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have shape {tuple(hidden.shape[:-1])}, that of the tokens of the output "
            f"layer, got {tuple(labels.shape)}"
        )


def record_output(model: Any, output: Any, params: dict[str, Any] | None) -> None:
    """Names the variant that a model is trained with in its config; removes the entry of others."""
    config = getattr(model, "config", None)
    if isinstance(output, str):
        numbers = {name: plain(value) for name, value in (params or {}).items()}
        setattr(config, ENTRY, {"variant": output, **numbers})
    elif hasattr(config, ENTRY):
        delattr(config, ENTRY)


def loss_function(output: Any, params: Any) -> Callable[..., Tensor]:
    """The loss that ``output`` and ``output_params`` describe; raises if there is none."""
    loss: Any = output
    if not isinstance(output, str):
        if not callable(output):
            raise TypeError(
                "output must be the name of a variant, a function such as those of "
                f"attnzoo.losses, or None, got {shown(output)}"
            )
        if params is not None:
            raise TypeError(
                f"output_params must be None if output is a function, got {shown(params)}: use "
                "functools.partial"
            )
        return loss
    if params is not None and not isinstance(params, dict):
        raise TypeError(f"output_params must be a dict or None, got {shown(params)}")
    for name, value in (params or {}).items():
        if not isinstance(plain(value), (int, float)):
            raise TypeError(f"output_params[{name!r}] must be a number, got {shown(value)}")
    check_has_rows("TrainerMixin's output", output)
    check_head(OutputHead(torch.zeros(2, 1), None, output, None, params or {}), 0.0, 0.0)
    loss = partial(linear_loss, variant=output, **(params or {}))
    return loss


class VariantLogitsProcessor(LogitsProcessor):
    """Lets ``generate`` sample from the probabilities of a variant.

    Formula: logits z become log w(z / temperature), with w the weights of the variant over the
    vocabulary, and −inf where w = 0. A token with logit −inf does not take part.

    Args:
        variant: a name from `attnzoo.list_variants`, of a variant whose weights do not depend on
            positions.
        temperature: divides the logits before the variant does its work; above 0.
        **params: parameters of the variant, numbers.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.integrations.transformers import VariantLogitsProcessor
        >>> process = VariantLogitsProcessor("sparsemax")
        >>> process(None, torch.tensor([[1.0, 0.5, -1.0]])).exp()
        tensor([[0.7500, 0.2500, 0.0000]])

    References:
        Martins et al. 2020, arXiv:2004.02644: sampling from entmax in place of top-k and top-p.

    Notes:
        The order of the tokens stays as it is, so greedy decoding gives the same tokens, except
        where weights are equal. ``temperature``, ``top_k`` and ``top_p`` of ``generate`` come after
        this processor, and act on w: leave them at 1, 0 and 1. Beam search passes log-softmax in
        place of logits, which is the same only for variants whose weights do not change when a
        constant is added to all logits, such as entmax.
    """

    def __init__(self, variant: str, *, temperature: float = 1.0, **params: Any) -> None:
        self.temperature = check_number("temperature", temperature, above=True)
        self.variant = variant
        check_has_rows("VariantLogitsProcessor", variant)
        self.params = {**(get_variant(variant).output_defaults or {}), **params}
        probabilities(torch.zeros(1, 2), variant, **self.params)  # raises if they do not fit

    def __repr__(self) -> str:
        arguments = {"temperature": self.temperature, **self.params}
        named = "".join(f", {name}={value}" for name, value in arguments.items())
        return f"{type(self).__name__}({self.variant!r}{named})"

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """The log-probabilities (B, V) for the logits of the next token (B, V)."""
        mask = scores != -torch.inf
        return probabilities(
            scores / self.temperature, self.variant, mask=mask, **self.params
        ).log()
