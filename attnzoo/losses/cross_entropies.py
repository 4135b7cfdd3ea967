"""Cross entropy with another score for the target, for masked classes, or with a distance added.

Margins and noise change the target's score from z_y to t:

    L = log(Σ_{j≠y} exp(z_j) + exp(t)) − t = log(1 + exp(r − t)),  r = log Σ_{j≠y} exp(z_j)

r leaves out the target, so nothing cancels if t leads all other classes. Correcting the
log-sum-exp over all classes instead gives −∞ where exp(z_y) is most of the sum.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.backends.shared_operands import Vectors
from attnzoo.core.activations import EXP
from attnzoo.core.call import in_full_precision, score_dtype
from attnzoo.core.checks import check_bool, check_dense, is_number, plain, shown
from attnzoo.functional.attention import attention
from attnzoo.losses.arguments import TokenBatch, bind_batch, check_number
from attnzoo.losses.forms import form_loss
from attnzoo.losses.operators import hidden_and_target, hidden_states, token_losses
from attnzoo.losses.rules import NEG_INF, Options, Tokens, rule

# Scale and margin of each kind, as in its paper.
DEFAULTS = {"am": (30.0, 0.35), "cos": (64.0, 0.35), "arc": (64.0, 0.5)}


def margin_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    kind: str = "arc",
    scale: float | None = None,
    margin: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of scaled cosines, with a margin for the target.

    Let θ_j be the angle between a hidden state and row j of ``linear_weight``, s the scale, m the
    margin and y the target. The loss of a token is::

        L = log(exp(t) + Σ_{j≠y} exp(s cos θ_j)) − t

        kind "am", "cos"    t = s (cos θ_y − m)
        kind "arc"          t = s cos(θ_y + m) if θ_y + m <= π, else s (cos θ_y − m sin m)

    Args:
        input, linear_weight, target, ignore_index, reduction: As for `linear_loss`.
        kind: "am" (scale 30, margin 0.35), "cos" (64, 0.35) or "arc" (64, 0.5). "am" and "cos" have
            one formula and differ in their defaults.
        scale: s > 0; None for the default of the kind.
        margin: m >= 0, for "arc" an angle in radians of at most π; None for the default.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import margin_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> loss = margin_loss(h, E, torch.arange(8), kind="arc")
        >>> loss.backward()

    References:
        AM-Softmax: Wang et al. 2018, arXiv:1801.05599, Eq. 6. CosFace: Wang et al. 2018,
        arXiv:1801.09414, Eq. 4. ArcFace: Deng et al. 2019, arXiv:1801.07698, Eq. 3; the rule for
        θ_y + m > π is that of its code.

    Notes:
        Memory is linear in tokens + classes. Rows are normalized in the dtype of scores, so fp32
        copies of ``input`` and ``linear_weight`` are made. A row of zeros is at a right angle to
        all others. sin θ is computed as ‖u − v‖·‖u + v‖/2 from unit vectors u and v. Unlike
        √(1 − cos²θ), this is accurate for small angles and has finite gradients.
    """
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(f"kind must be one of {', '.join(DEFAULTS)}, got {shown(kind)}")
    usual = DEFAULTS[kind]
    s = usual[0] if scale is None else check_number("scale", scale, above=True)
    most = math.pi if kind == "arc" else None
    m = usual[1] if margin is None else check_number("margin", margin, most=most)
    batch = bind_batch(input, linear_weight, None, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        assert batch.weight is not None
        h = hidden_states(batch)
        batch = batch._replace(input=_unit_rows(h), weight=_unit_rows(batch.weight.to(h.dtype)))
        u, v = hidden_and_target(batch)
        cosine = torch.linalg.vecdot(u, v)
        if kind == "arc":
            moved = cosine * math.cos(m) - _sine(u, v) * math.sin(m)
            score = torch.where(cosine >= -math.cos(m), moved, cosine - m * math.sin(m))
        else:
            score = cosine - m
        return _target_score_loss(batch._replace(input=s * u), s * score)


def noisy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    alpha: float,
    linear_bias: Tensor | None = None,
    training: bool = True,
    generator: torch.Generator | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy whose target score is lowered by annealed noise.

    With logits z = input · linear_weightᵀ + linear_bias, hidden state h, target row E_y, the angle
    θ between them and ξ ~ N(0, 1), drawn once per token, the loss of a token is::

        L = log(exp(t) + Σ_{j≠y} exp(z_j)) − t,  t = z_y − α ‖E_y‖ ‖h‖ (1 − cos θ) |ξ|

    The noise vanishes as the hidden state turns to its target, so a saturated softmax does not stop
    learning early.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.
        alpha: α >= 0, the size of the noise.
        training: If False, no noise is drawn, and the loss is cross entropy.
        generator: Source of the noise, on the device of ``input``; None for torch's default.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import noisy_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> noisy_loss(h, E, torch.arange(8), alpha=0.1).backward()

    References:
        Noisy Softmax: Chen et al. 2017, arXiv:1708.03769.

    Notes:
        Memory is linear in tokens + classes.
    """
    size = check_number("alpha", alpha)
    check_bool("training", training)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {shown(generator)}")
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        h, rows = hidden_and_target(batch)
        score = torch.linalg.vecdot(h, rows)
        if training:
            d = batch.input.shape[1]  # h and rows have one more column with a bias
            h, rows = h[:, :d], rows[:, :d]
            norms = torch.linalg.vector_norm(h, dim=-1) * torch.linalg.vector_norm(rows, dim=-1)
            noise = torch.randn(score.shape, generator=generator, dtype=h.dtype, device=h.device)
            score = score - size * noise.abs() * (norms - torch.linalg.vecdot(h, rows))
        return _target_score_loss(batch, score)


def masked_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    class_mask: Tensor,
    *,
    value: float = -math.inf,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy in which the logits of masked classes are a constant.

    With logits z = input · linear_weightᵀ + linear_bias, the loss of a token with target y is::

        L = log(Σ_{j in the mask} exp(z_j) + K exp(value)) − z_y

    K is the number of classes outside the mask. They get no gradient, so training on one task does
    not push down the classes of others. With −∞ they do not take part. With a finite value, the
    logits of the task's classes are still compared with a level outside of the task.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.
        class_mask: Bool (V,) or (*, V), True for classes of the task and for the target.
        value: The logit of all other classes, a number or −inf.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import masked_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(10, 32, requires_grad=True)
        >>> task = torch.arange(10) < 4
        >>> masked_loss(h, E, torch.arange(8) % 4, task, value=-5.0).backward()
        >>> bool(E.grad[4:].any())
        False

    References:
        Kim et al. 2023, arXiv:2309.14808: softmax masking for continual learning.

    Notes:
        Memory is linear in tokens + classes, apart from the mask itself. Targets are not checked on
        a GPU or under torch.compile; a masked target then has an infinite loss.
    """
    level = plain(value)
    if not (is_number(level) and level == -math.inf):
        level = check_number("value", value, least=None, other=" or -inf")
    check_dense("class_mask", class_mask)
    batch = bind_batch(
        input, linear_weight, linear_bias, target, ignore_index, reduction, class_mask
    )
    assert batch.class_mask is not None
    with in_full_precision(batch.input.device):
        # One more key with the logit value + log K stands for the K masked classes.
        hidden = (~batch.class_mask).sum(-1).to(score_dtype(batch.input))
        sink = (hidden.log() + level).expand(batch.target.shape[0])
        vectors = None if level == -math.inf else Vectors(sink=sink)
        return _cross_entropy(batch, vectors)


def emo_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """EMO: cross entropy and an upper bound of the earth mover's distance, in equal shares.

    With probabilities Q = softmax(input · linear_weightᵀ + linear_bias), unit rows Ê of
    ``linear_weight`` without gradient, target y and sg for "no gradient", the loss of a token is::

        L_mle = −log Q_y
        L_emo = 1 − ⟨Ê_y, Σ_j Q_j Ê_j − sg(Q_y) Ê_y⟩
        L     = ½ (L_mle + sg(L_mle / L_emo) · L_emo)

    The value of L is L_mle. The gradient of L_emo rewards probability on classes whose embeddings
    are close to that of the target, which cross entropy punishes like any other.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import emo_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> emo_loss(h, E, torch.arange(8)).backward()

    References:
        Ren et al. 2023, arXiv:2310.04691. sg(Q_y) is subtracted in one published version of the
        code, not in others. There Ê is a frozen copy of the pretrained matrix; here it follows
        ``linear_weight``.

    Notes:
        Σ_j Q_j Ê_j is attention of the hidden states over the classes with values Ê, so memory is
        linear in tokens + classes. Ê takes an fp32 copy of ``linear_weight``. L_emo is a difference
        of numbers near 1. In the denominator it counts as at least its rounding error of about
        1e-6 (fp64: 2e-15), where the source adds 1e-10.
    """
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        assert batch.weight is not None
        each = batch._replace(reduction="none", lead=batch.target.shape)
        mle = _cross_entropy(each)
        h = hidden_states(batch)
        keys = batch.weight.to(h.dtype)
        values = _unit_rows(keys.detach())
        if batch.bias is not None:
            h = pad(h, (0, 1), value=1.0)
            keys = torch.cat([keys, batch.bias.to(h.dtype)[:, None]], 1)
        predicted = attention(h[None, None], keys[None, None], values[None, None], scale=1.0)
        true = values.index_select(0, batch.classes_of_tokens)
        target_part = (-mle).exp().detach() * true.square().sum(-1)
        emo = 1 - (torch.linalg.vecdot(true, predicted[0, 0]) - target_part)
        level, cost = emo.detach(), mle.detach()
        factor = cost / level.clamp(min=8 * torch.finfo(h.dtype).eps)
        # factor · level is cost, but loses digits if level is small.
        return batch.reduced(0.5 * (mle + cost + factor * (emo - level)))


@rule
def target_score_loss(
    z: Tensor, tokens: Tokens, wanted: list[str], options: Options
) -> dict[str, Tensor]:
    """The rule of L above. t is the vector ``sink``."""
    target = tokens.vectors.sink
    assert target is not None
    z.scatter_(1, tokens.column, NEG_INF)
    if tokens.hidden is not None:
        z.masked_fill_(tokens.hidden, NEG_INF)
    peak = z.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == NEG_INF, 0.0)  # no other class
    total = z.sub_(peak).exp_().sum(-1)
    lead = peak[:, 0] - target + total.log()  # log Σ would lose digits in a large sum
    result = {"loss": torch.logaddexp(lead, torch.zeros_like(lead))}
    if wanted:
        # ∂L/∂r; 0 if there is no other class, whose total is 0 too.
        share = tokens.factor * lead.sigmoid()
        z.mul_((share / total.where(total != 0, 1.0))[:, None])
        if "sink" in wanted:
            result["sink"] = -share
    return result


def _target_score_loss(batch: TokenBatch, score: Tensor) -> Tensor:
    """Cross entropy with these scores (N,) of the targets."""
    return token_losses(batch, target_score_loss, Options(), Vectors(sink=score))[0]


def _cross_entropy(batch: TokenBatch, vectors: Vectors | None = None) -> Tensor:
    options = Options(activation=EXP.key, normalize="sum")
    return token_losses(batch, form_loss, options, vectors)[0]


def _unit_rows(x: Tensor) -> Tensor:
    """Rows x/‖x‖; rows of zeros stay 0."""
    # The result does not depend on the factor. It keeps squares of large and small x in range.
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / largest.where(largest > 0, 1.0)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.where(norm > 0, 1.0)


def _sine(u: Tensor, v: Tensor) -> Tensor:
    """The sine of the angle between unit rows (N, d), 1 if a row is 0."""
    norm = partial(torch.linalg.vector_norm, dim=-1)
    zero = (u == 0).all(-1) | (v == 0).all(-1)
    return (0.5 * norm(u - v) * norm(u + v)).masked_fill(zero, 1.0)
