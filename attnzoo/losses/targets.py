"""Hidden states, and the rows of the matrix that belong to their targets."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.core.call import score_dtype
from attnzoo.losses.batch import Batch
from attnzoo.losses.operators import FIRST_ONLY


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


def hidden_states(batch: Batch) -> Tensor:
    """Hidden states (N, d) in the dtype of scores, 0 for ignored tokens."""
    # NaN in an ignored token must not reach the gradients.
    return batch.input.to(score_dtype(batch.input)).masked_fill(~batch.counted[:, None], 0.0)


def unit_rows(x: Tensor) -> Tensor:
    """Rows x/‖x‖; rows of zeros stay 0."""
    # The result does not depend on the factor. It keeps squares of large and small x in range.
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / largest.where(largest > 0, 1.0)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.where(norm > 0, 1.0)


def hidden_and_target(batch: Batch) -> tuple[Tensor, Tensor]:
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
