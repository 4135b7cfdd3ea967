"""Runs pairwise forms in Triton kernels, forward and backward.

Memory is linear in N, except for the block map of a threshold: a few bytes per tile of scores.

A form is passed to a kernel as the Triton function of its activation, its per-query vectors, and
flags for the normalization. Separate operators compute statistics and thresholds before the
forward. A gain that is computed from statistics, and the solved threshold τ, are then passed as
per-query vectors. The forward treats τ as a constant. The backward accounts for the dependence of τ
on the scores.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from attnzoo.backends.base import Backend, unsupported_extras
from attnzoo.backends.dropout import new_seed
from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, rule_of
from attnzoo.backends.transforms import reject_transforms
from attnzoo.backends.triton.common.kernel_operands import (
    UNSOLVED,
    layout_of,
    operands_of,
    pad_columns,
)
from attnzoo.backends.triton.flash import operators as ops
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, FromStatistics, NoForm, Pairwise

HAS_TRITON = find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# See `unsupported_extras`.
SUPPORTED = ("key_bias", "offset", "distance", "factor", "eps", "normalizer", "softcap")
# With 16-bit inputs, the error of a capped logit is 1e-7 · softcap.
MOST_SOFTCAP = 1000.0
LARGEST = 256  # largest head dimension in the tables of `tiles`


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, NoForm):
        return form.why
    if not isinstance(form, Pairwise):
        return "supports pairwise forms only"
    return _unsupported_form(form, call) or unsupported_call(call)


def _unsupported_form(form: Pairwise, call: Call) -> str | None:
    activation, distance = form.activation, form.distance
    if (reason := unsupported_extras(form, call, *SUPPORTED)) is not None:
        return reason
    if form.normalize == "select":
        if not activation.exponential:
            return f"does not support a selection with {activation.name} (tiled does)"
        if distance is not None:
            return "does not support a selection with a distance (tiled does)"
    for function in (activation, distance):
        if function is not None and function.triton is None:
            name = function.name
            return f"does not support {name}, which has no Triton implementation (tiled does)"
    if form.normalize == "threshold" and activation.alpha is None:
        name = activation.name
        return f"does not support a threshold for {name}, which has no alpha (tiled does)"
    if call.return_lse and not form.has_lse:
        return "does not support return_lse except for a softmax (tiled does)"
    if isinstance(form.gain, FromStatistics) and form.gain.differentiable and call.needs_grad:
        return "does not support a gradient through the statistics of the logits (tiled does)"
    slopes = [(form.shape, activation.triton_shape_slope, f"parameter of {activation.name}")]
    if distance is not None:
        slopes.append((form.decay, distance.triton_slope, f"decay of {distance.name}"))
    for vector, slope, name in slopes:
        learned = isinstance(vector, Tensor) and vector.requires_grad
        if call.needs_grad and learned and slope is None:
            return f"does not support a gradient for the {name} (tiled does)"
    return None


def unsupported_call(call: Call) -> str | None:
    """Return why the kernels cannot run a call with any form, or None."""
    if call.input_dtype not in DTYPES:
        return f"does not support {call.input_dtype} (tiled does)"
    if max(call.head_dim, call.value_dim) > LARGEST:
        dims = f"{call.head_dim} and {call.value_dim}"
        return f"does not support head dimensions above {LARGEST}, got {dims} (tiled does)"
    if call.softcap is not None and call.softcap > MOST_SOFTCAP and call.input_dtype.itemsize == 2:
        return (
            f"does not support a softcap above {MOST_SOFTCAP:g} for {call.input_dtype}, got "
            f"{call.softcap:g} (tiled does)"
        )
    return unsupported_here(call, "tiled")


def unsupported_here(call: Call, other: str) -> str | None:
    """Return why kernels cannot run on the call's device, or None. Suggest backend ``other``."""
    if not HAS_TRITON:
        return "needs Triton: run pip install -e '.[gpu]' in the clone of attnzoo"
    if call.device.type != "cuda":
        from attnzoo.backends.triton.common.tile import INTERPRETED

        wrong = f"needs a CUDA device or Triton's interpreter, got tensors on {call.device}"
        return None if INTERPRETED.value else wrong
    # Fake tensors may be on a device that this machine does not have.
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return f"does not support AMD GPUs ({other} does)"
    gpu = torch.cuda.get_device_properties(call.device)
    if gpu.major < 8:
        have = f"{gpu.major}.{gpu.minor}"
        return f"needs compute capability 8.0 or higher, got {have} ({other} runs on any GPU)"
    return None


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    assert form.activation.triton is not None
    reject_transforms("flash", q, k, v, call.mask, call.relative_bias)
    q, k, v = pad_columns(q), pad_columns(k), pad_columns(v)
    layout, gain = layout_of(call), form.gain
    solved, rule = UNSOLVED, rule_of(form)
    if isinstance(gain, FromStatistics):
        with torch.no_grad():
            statistics = ops.flash_statistics(q=q.detach(), k=k.detach(), layout=layout)
        gain = gain.of(statistics)
    layout, vectors, terms = operands_of(form, gain, call, layout)
    reject_transforms("flash", *vectors, *terms)
    operands = {"vectors": vectors, "terms": terms, "layout": layout, "rule": rule}
    if form.normalize in ("threshold", "select"):
        with torch.no_grad():
            solved = ops.flash_solve(q=q.detach(), k=k.detach(), v=v.detach(), **operands)
    dropout = Dropout(new_seed(call), call.dropout_p) if call.dropout_p else NO_DROPOUT
    attended = ops.flash_forward(
        q=q, k=k, v=v, solved=solved, dropout=dropout, want_lse=call.return_lse, **operands
    )
    return without_padding(attended.out, call), attended.lse


def max_logits(q: Tensor, k: Tensor, call: Call) -> Tensor:
    reject_transforms("flash", q, k)
    return ops.flash_max_logits(q=pad_columns(q), k=pad_columns(k), layout=layout_of(call))


def without_padding(out: Tensor, call: Call) -> Tensor:
    return out if out.shape[3] == call.value_dim else out[..., : call.value_dim]


BACKEND = Backend(
    "flash", ("pairwise",), unsupported, run, max_logits=max_logits, walks_segments=True
)
