"""`chunks.losses` as a PyTorch operator, and its derivative.

With reduction "mean" or "sum", the forward pass already makes the gradients, while it has the
scores of a chunk. The backward pass only multiplies them by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from attnzoo.backends.operator import Operator
from attnzoo.backends.shared_operands import Vectors
from attnzoo.backends.tiled.walk import Normalizer
from attnzoo.core.activations import EXP
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.keys import ACTIVATIONS
from attnzoo.losses.batch import Batch
from attnzoo.losses.chunks import PER_TOKEN, Layer, Rule, losses
from attnzoo.losses.classes import WHOLE, ClassShard
from attnzoo.losses.perturbed import LARGE_BLOCK, perturbed_losses
from attnzoo.losses.rest import rest_losses
from attnzoo.losses.tokens import Options, form_losses

P = ParamSpec("P")
R = TypeVar("R")
STATS = len(PER_TOKEN)  # outputs of `output_layer` before the gradients


FIRST_ONLY = (
    "attnzoo.losses supports first derivatives only, got a second backward through a gradient"
)


def first_derivatives_only(function: Callable[P, R]) -> Operator[P, R]:
    return Operator(function, get_type_hints(function), FIRST_ONLY)


class Setting(NamedTuple):
    """Operands that are not differentiable and not tensors.

    ``deviation`` belongs to the rules "perturbed" and "error", all fields after it to "form".
    The fields from ``group`` on are those of `sharded.ShardOfRank`; no group: all classes.
    """

    rule: str  # a key of RULES
    ignore_index: int
    deviation: float = 1.0
    activation: str = ""
    normalize: str = ""
    keep: int | None = None
    softcap: float | None = None
    label_smoothing: float = 0.0
    lse_penalty: float = 0.0
    want_stats: bool = False
    group: str = ""
    first: int = 0
    here: int = 0
    classes: int = 0
    largest_shard: int = 0


def cross_entropy(ignore_index: int) -> Setting:
    return Setting("form", ignore_index, activation=EXP.key, normalize="sum")


SPARSE = ("threshold", "select")  # normalizations with which most classes have weight 0


def _form_rule(s: Setting, class_weight: Tensor | None) -> Rule:
    how = Normalizer(ACTIVATIONS[s.activation], s.normalize, s.keep)
    options = Options(s.softcap, s.label_smoothing, s.lse_penalty, s.want_stats)
    compute = partial(form_losses, how=how, class_weight=class_weight, options=options)
    return Rule(compute, s.want_stats, s.normalize in SPARSE)


def _rest_rule(s: Setting, class_weight: Tensor | None) -> Rule:
    return Rule(rest_losses)


def _perturbed_rule(s: Setting, class_weight: Tensor | None) -> Rule:
    error = s.rule == "error"
    compute = partial(perturbed_losses, deviation=s.deviation, error=error)
    return Rule(compute, block=LARGE_BLOCK)


RULES = {
    "form": _form_rule,
    "rest": _rest_rule,
    "perturbed": _perturbed_rule,
    "error": _perturbed_rule,
}


def _shard(s: Setting) -> ClassShard:
    if not s.group:
        return WHOLE
    from attnzoo.losses.sharded import ShardOfRank  # DTensor takes a second to import

    return ShardOfRank(s.group, s.first, s.here, s.classes, s.largest_shard)


@first_derivatives_only
def output_layer(
    *, input: Tensor, weight: Tensor | None, bias: Tensor | None, vectors: Vectors,
    class_mask: Tensor | None, target: Tensor, factor: Tensor, class_weight: Tensor | None,
    setting: Setting, wanted: list[str],
) -> list[Tensor]:  # fmt: skip
    """Loss and statistics per token, then the gradients of Σ factor · loss that are wanted."""
    rule = RULES[setting.rule](setting, class_weight)
    layer = Layer(input, weight, bias, class_mask, _shard(setting))
    with in_full_precision(input.device):
        found = losses(layer, target, factor, vectors, rule, setting.ignore_index, wanted)
    return [found[name] for name in (*PER_TOKEN, *wanted)]


@output_layer.fake
def _(
    *, input: Tensor, weight: Tensor | None, bias: Tensor | None, vectors: Vectors,
    target: Tensor, setting: Setting, wanted: list[str],
) -> list[Tensor]:  # fmt: skip
    dtype = score_dtype(input)
    given: dict[str, Any] = dict(input=input, weight=weight, bias=bias, **vectors._asdict())
    count = STATS if setting.want_stats else 1
    per_token = [input.new_empty(target.shape, dtype=dtype) for _ in range(count)]
    per_token += [input.new_empty(0, dtype=dtype) for _ in range(STATS - count)]
    return per_token + [given[name].new_empty(given[name].shape, dtype=dtype) for name in wanted]


@output_layer.flops
def _(*, input: Tensor, weight: Tensor | None, target: Tensor, wanted: list[str]) -> int:
    # The logits, and one product for each gradient. Without a matrix, the input is the logits.
    products = 1 + ("input" in wanted) + ("weight" in wanted)
    return 0 if weight is None else 2 * products * target.shape[0] * weight.numel()


DIFFERENTIABLE = ("input", "weight", "bias", *Vectors._fields)
TENSORS = (*DIFFERENTIABLE, "class_mask", "target", "factor", "class_weight")


class TokenLosses(torch.autograd.Function):
    """Returns (loss, *statistics). The loss is per token, or Σ factor · loss if ``reduced``.

    The arguments are ``reduced``, ``setting`` and the tensors named in `TENSORS`, in this order.
    """

    @staticmethod
    def forward(
        ctx: Any, reduced: bool, setting: Setting, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        named: dict[str, Any] = dict(zip(TENSORS, tensors))
        needed = [name for name, x in zip(DIFFERENTIABLE, ctx.needs_input_grad[2:]) if x]
        found = run(named, setting, needed if reduced else [])
        loss, stats = found[0], found[1:STATS]
        ctx.save_for_backward(*tensors)
        ctx.reduced, ctx.setting, ctx.needed = reduced, setting, needed
        ctx.gradients = found[STATS:] if reduced else None
        ctx.mark_non_differentiable(*stats)
        if reduced:
            loss = weighted_sum(loss, named["factor"])
        return loss, *stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = grads[0]
        if grad is None:
            return (None,) * (2 + len(TENSORS))
        named = dict(zip(TENSORS, ctx.saved_tensors))
        # If ctx keeps no reference to a gradient, autograd makes it the .grad of a parameter and
        # does not copy it. A second backward pass computes the gradients again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None or torch.is_grad_enabled():
            factor = named["factor"] * grad if ctx.reduced else grad
            found = run(named | {"factor": factor}, ctx.setting, ctx.needed)[STATS:]
        else:
            found = [x.mul_(grad) for x in gradients]
        del gradients
        by_name = {name: x.to(named[name].dtype) for name, x in zip(ctx.needed, found)}
        return None, None, *(by_name.get(name) for name in TENSORS)


def token_losses(
    reduced: bool, setting: Setting, operands: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Run `TokenLosses`, or only its forward pass if no operand needs a gradient."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return TokenLosses.apply(reduced, setting, *operands)  # type: ignore[no-any-return]
    named: dict[str, Any] = dict(zip(TENSORS, operands))
    loss, *stats = run(named, setting, [])[:STATS]
    if reduced:
        loss = weighted_sum(loss, named["factor"])
    return loss, *stats


def run(named: dict[str, Any], setting: Setting, wanted: list[str]) -> list[Tensor]:
    """`output_layer` with operands by name."""
    vectors = Vectors(*(named[name] for name in Vectors._fields))
    rest = {name: x for name, x in named.items() if name not in Vectors._fields}
    return output_layer(vectors=vectors, setting=setting, wanted=wanted, **rest)


def batch_loss(batch: Batch, setting: Setting, vectors: Vectors | None = None) -> Tensor:
    """The loss of a batch, reduced and shaped as the batch asks for."""
    operands = (
        batch.input, batch.weight, batch.bias, *(vectors or Vectors()), batch.class_mask,
        batch.target, batch.factor(), None,
    )  # fmt: skip
    return batch.shaped(token_losses(batch.reduction != "none", setting, operands)[0])


def weighted_sum(loss: Tensor, factor: Tensor) -> Tensor:
    """Σ factor · loss. The loss of an ignored token is 0, and its factor may be anything finite."""
    return torch.dot(loss, factor)
