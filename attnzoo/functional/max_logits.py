"""The largest logit of each head: one more pass over the keys, beside the backend of the call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.base import Backend
from attnzoo.core.activations import EXP
from attnzoo.core.call import Call, in_full_precision
from attnzoo.core.forms import Pairwise
from attnzoo.core.visibility import visible_entries
from attnzoo.functional import packed
from attnzoo.functional.packed import Runs
from attnzoo.functional.prepare import ValidatedCall, choose_backend


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, call: Call, backend: Backend) -> Tensor:
    """max scale · q_i·k_j over the batch and the visible pairs, (H,) in the dtype of scores.

    Args:
        backend: The backend that runs the call.
    """
    mask = call.mask
    bare = replace(
        call, mask=None if mask is None else visible_entries(mask), softcap=None,
        relative_bias=None, dropout_p=0.0, return_lse=False, needs_grad=False,
    )  # fmt: skip
    with in_full_precision(call.device):
        compute = _backend(bare, backend).max_logits
        assert compute is not None
        return compute(q.detach(), k.detach(), bare)


@torch.no_grad()
def max_logits_of(ready: ValidatedCall, backend: str | None) -> Tensor:
    """The same for a prepared call; ``backend``: the name given by the user, or None."""
    runs = packed.runs_of(ready, backend)
    if runs is not None:
        return max_logits_of_segments(ready, runs, backend)
    return max_logits(ready.q, ready.k, ready.call, choose_backend(ready, backend).backend)


@torch.no_grad()
def max_logits_of_segments(ready: ValidatedCall, runs: Runs, backend: str | None) -> Tensor:
    """The same for a call that runs as one call per length of its segments."""
    parts = [part.ready for part in packed.parts_of(ready, runs)]
    largest = [max_logits(x.q, x.k, x.call, choose_backend(x, backend).backend) for x in parts]
    return torch.stack(largest).amax(0)


def _backend(call: Call, chosen: Backend) -> Backend:
    """The backend that computes the logits: the chosen one, kernels on a GPU, or `tiled`."""
    names = [chosen.name, *(["flash"] if call.device.type == "cuda" else [])]
    for backend in (BACKENDS[name] for name in names):
        if backend.max_logits is None:
            continue
        if backend.kinds == ("definition",) or backend.unsupported(_SOFTMAX, call) is None:
            return backend
    return BACKENDS["tiled"]


_SOFTMAX = Pairwise(EXP, "sum")  # a form that every backend with scores supports
