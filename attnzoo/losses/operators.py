"""Losses and rows of targets as PyTorch operators with derivatives.

With reduction "mean" or "sum", the forward pass already makes the gradients, while it has the
scores of a chunk. The backward pass only multiplies them by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from attnzoo.backends.operator import Operator, operator
from attnzoo.backends.shared_operands import Vectors
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.losses.arguments import TokenBatch
from attnzoo.losses.chunks import PER_TOKEN, Layer, losses
from attnzoo.losses.rules import RULES, ClassShard, LossRule, Options, Tokens

P = ParamSpec("P")
R = TypeVar("R")
STATS = len(PER_TOKEN)  # outputs of `output_layer` before the gradients
FIRST_ONLY = (
    "attnzoo.losses supports first derivatives only, got a second backward through a gradient"
)


def first_derivatives_only(function: Callable[P, R]) -> Operator[P, R]:
    return Operator(function, get_type_hints(function), FIRST_ONLY)


@first_derivatives_only
def output_layer(
    *, input: Tensor, weight: Tensor | None, bias: Tensor | None, vectors: Vectors,
    class_mask: Tensor | None, target: Tensor, factor: Tensor, class_weight: Tensor | None,
    rule: str, options: Options, shard: ClassShard, wanted: list[str],
) -> list[Tensor]:  # fmt: skip
    """Loss and statistics per token, then the gradients of Σ factor · loss that are wanted."""
    layer = Layer(input, weight, bias, class_mask)
    tokens = Tokens(target, factor, None, vectors, class_weight, shard)
    with in_full_precision(input.device):
        outputs = losses(layer, tokens, RULES[rule], options, wanted)
    return [outputs[name] for name in (*PER_TOKEN, *wanted)]


@output_layer.fake
def _(
    *, input: Tensor, weight: Tensor | None, bias: Tensor | None, vectors: Vectors,
    target: Tensor, options: Options, wanted: list[str],
) -> list[Tensor]:  # fmt: skip
    dtype = score_dtype(input)
    operands: dict[str, Any] = dict(input=input, weight=weight, bias=bias, **vectors._asdict())
    count = STATS if options.want_stats else 1
    per_token = [input.new_empty(target.shape, dtype=dtype) for _ in range(count)]
    per_token += [input.new_empty(0, dtype=dtype) for _ in range(STATS - count)]
    shapes = [operands[name].shape for name in wanted]
    return per_token + [input.new_empty(shape, dtype=dtype) for shape in shapes]


@output_layer.flops
def _(*, input: Tensor, weight: Tensor | None, target: Tensor, wanted: list[str]) -> int:
    # The logits, and one product for each gradient. Without a matrix, the input is the logits.
    products = 1 + ("input" in wanted) + ("weight" in wanted)
    return 0 if weight is None else 2 * products * target.shape[0] * weight.numel()


DIFFERENTIABLE = ("input", "weight", "bias", *Vectors._fields)
TENSORS = (*DIFFERENTIABLE, "class_mask", "target", "factor", "class_weight")


class TokenLosses(torch.autograd.Function):
    """Returns (loss, *statistics). The loss is per token, or Σ factor · loss if ``reduced``.

    ``tensors`` are those named in `TENSORS`, in this order.
    """

    @staticmethod
    def forward(
        ctx: Any, reduced: bool, rule: str, options: Options, shard: ClassShard,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        needed = [name for name, x in zip(DIFFERENTIABLE, ctx.needs_input_grad[4:]) if x]
        outputs = _evaluate(tensors, needed if reduced else [], rule, options, shard)
        loss, stats = outputs[0], outputs[1:STATS]
        ctx.save_for_backward(*tensors)
        ctx.reduced, ctx.needed, ctx.constants = reduced, needed, (rule, options, shard)
        ctx.gradients = outputs[STATS:] if reduced else None
        ctx.mark_non_differentiable(*stats)
        return _reduced(loss, tensors) if reduced else loss, *stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = grads[0]
        if grad is None:
            return (None,) * (4 + len(TENSORS))
        named = dict(zip(TENSORS, ctx.saved_tensors))
        # If ctx keeps no reference to a gradient, autograd makes it the .grad of a parameter and
        # does not copy it. A second backward pass computes the gradients again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None or torch.is_grad_enabled():
            named["factor"] = named["factor"] * grad if ctx.reduced else grad
            scaled = _evaluate(tuple(named.values()), ctx.needed, *ctx.constants)[STATS:]
        else:
            scaled = [x.mul_(grad) for x in gradients]
        del gradients
        by_name = {name: x.to(named[name].dtype) for name, x in zip(ctx.needed, scaled)}
        return None, None, None, None, *(by_name.get(name) for name in TENSORS)


def _evaluate(
    tensors: tuple[Tensor | None, ...], wanted: list[str], rule: str, options: Options,
    shard: ClassShard,
) -> list[Tensor]:  # fmt: skip
    """`output_layer` of the tensors named in `TENSORS`."""
    named: dict[str, Any] = dict(zip(TENSORS, tensors))
    vectors = Vectors(*(named.pop(name) for name in Vectors._fields))
    return output_layer(
        vectors=vectors, rule=rule, options=options, shard=shard, wanted=wanted, **named
    )


def _reduced(loss: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
    """Σ factor · loss.

    The loss of an ignored token is 0, so its factor does not matter, as long as it is finite.
    """
    factor = tensors[TENSORS.index("factor")]
    assert factor is not None
    return torch.dot(loss, factor)


def token_losses(
    batch: TokenBatch, rule: LossRule, options: Options, vectors: Vectors | None = None
) -> tuple[Tensor, ...]:
    """(loss, *statistics). The loss is reduced and shaped as the batch asks for."""
    reduced, shard = batch.reduction != "none", batch.shard
    mask = None if batch.class_mask is None else shard.local(batch.class_mask)
    tensors = (
        batch.input, batch.weight, batch.bias, *(vectors or Vectors()), mask, batch.target,
        batch.factor(), batch.class_weight,
    )  # fmt: skip
    constants = rule.__name__, options._replace(ignore_index=batch.ignore_index), shard
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        loss, *stats = TokenLosses.apply(reduced, *constants, *tensors)
    else:
        loss, *stats = _evaluate(tensors, [], *constants)[:STATS]
        if reduced:
            loss = _reduced(loss, tensors)
    return batch.shaped(loss), *stats


@operator
def target_rows(*, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the targets in the dtype of scores. Their gradients are summed in that dtype too."""
    return weight.index_select(0, target).to(dtype)


@target_rows.fake
def _(*, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((target.shape[0], weight.shape[1]), dtype=dtype)


@target_rows.flops
def _() -> int:
    return 0  # no product


@target_rows.backward("weight", no_double=FIRST_ONLY)
def target_rows_backward(*, weight: Tensor, target: Tensor, dout: Tensor) -> dict[str, Tensor]:
    total = weight.new_zeros(weight.shape, dtype=dout.dtype).index_add_(0, target, dout)
    return {"weight": total.to(weight.dtype)}


@target_rows_backward.flops
def _() -> int:
    return 0


def hidden_states(batch: TokenBatch) -> Tensor:
    """Hidden states (N, d) in the dtype of scores, 0 for ignored tokens."""
    # NaN in an ignored token must not reach the gradients.
    return batch.input.to(score_dtype(batch.input)).masked_fill(~batch.counted[:, None], 0.0)


def hidden_and_target(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Hidden states and rows of the targets, both (N, d), or with a bias (N, d + 1).

    The bias is one more column of the rows, and 1 in the hidden states.
    """
    assert batch.weight is not None
    h, target = hidden_states(batch), batch.classes_of_tokens
    rows = target_rows(weight=batch.weight, target=target, dtype=h.dtype)
    if batch.bias is None:
        return h, rows
    bias = batch.bias.index_select(0, target).to(h.dtype)[:, None]
    return torch.nn.functional.pad(h, (0, 1), value=1.0), torch.cat([rows, bias], 1)
