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
from torch.nn.functional import linear, pad
from transformers import LogitsProcessor
from transformers.loss.loss_utils import ForCausalLMLoss

from attnzoo.core.checks import plain, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.probabilities import probabilities
from attnzoo.functional.score_rows import check_has_rows
from attnzoo.losses.arguments import check_number
from attnzoo.losses.linear_loss import linear_loss
from attnzoo.losses.probabilities import OutputHead, check_head

ENTRY = "attnzoo_output"  # in the config of a model that was trained with the loss of a variant
# What models do with their logits, by the names in their configs: factors with their powers.
SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
SOFTCAP = "final_logit_softcapping"
ROUTER_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")  # of aux_loss in the loss of a model
# With these in their configs, models add losses that they compute only from labels.
ADDED_LOSSES = ("z_loss_coefficient", "diffusion_loss_weight")


class HeadLoss:
    """The loss of one model's output layer, computed from its hidden states.

    ``output`` and ``params`` are ``output`` and ``output_params`` of `TrainerMixin`. The first call
    compares the logits of a token with those of the model.
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
        self.shifts_labels = model.loss_function is ForCausalLMLoss and not self.from_decoder
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

    def with_targets(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Inputs that do not need labels, and the targets (B, N).

        A model that gets no labels makes no decoder_input_ids from them.
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
        shifted = inputs.pop("shift_labels", None)
        others = [name for name in inputs if "_label" in name]
        if others:  # such as next_sentence_label
            raise ValueError(
                f"inputs must have no labels other than labels and shift_labels, got "
                f"{', '.join(others)}: the loss of output would leave them out"
            )
        if shifted is None and self.shifts_labels:
            shifted = pad(labels[..., 1:], (0, 1), value=-100)
        return inputs, labels if shifted is None else shifted

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
            if hidden.shape[:-1] != targets.shape:
                raise ValueError(
                    f"labels must have shape {tuple(hidden.shape[:-1])}, that of the tokens of "
                    f"the output layer, got {tuple(targets.shape)}"
                )
            options = self._options()
            scaled = hidden if self.scale == 1 else hidden * self.scale
            if not self.is_checked:
                with torch.no_grad():
                    z = linear(scaled[..., -1:, :], layer.weight, options.get("linear_bias"))
                    c = self.softcap
                    self.logits = z if c is None else c * torch.tanh(z / c)
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
        loss = self.losses.pop()
        aux_loss = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if not isinstance(aux_loss, Tensor):
            return loss
        if self.router_factor is None:
            raise self._unsupported(f"has an aux_loss, but none of {', '.join(ROUTER_FACTORS)}")
        return loss + self.router_factor * aux_loss.to(loss.device)


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
