"""Every pairwise form in Triton kernels, forward and backward.

Memory is linear in N, but for the map of a threshold: a few bytes for each tile of keys.

The kernels know a form by its activation's Triton function, its per-query vectors and how it
normalizes. Statistics and thresholds are operators of their own before the forward: the gain that a
variant makes of an entropy, and the τ that a threshold solves for, enter as vectors. A solved τ is
a constant there, and the backward takes its share off the gradients by itself.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.backends.transforms import reject_transforms
from attnzoo.backends.triton.common.kernel_operands import Maps, layout_of, vectors_of
from attnzoo.backends.triton.flash import operators as ops
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, FromStatistics, NoForm, Pairwise

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = 256  # head dimension: `configurations` has no row above


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, NoForm):
        return form.why
    if not isinstance(form, Pairwise):
        return "runs pairwise forms"
    return _unsupported_form(form, call) or _unsupported_call(call)


def _unsupported_form(form: Pairwise, call: Call) -> str | None:
    if form.normalize == "select":
        return "selects no keys (top-k); tiled does"
    if form.activation.triton is None:
        return f"{form.activation.name} names no Triton function; tiled needs none"
    if form.normalize == "threshold" and form.activation.alpha is None:
        return f"solves for q-exponentials only, {form.activation.name} has no alpha; tiled does"
    if call.return_lse and not form.softmax:
        return "returns lse of the softmax of exp only; tiled does by definition"
    half = call.input_dtype == torch.float16
    if half and form.normalize == "none" and not form.activation.bounded:
        # Nothing says that it stays below 65504.
        return f"has no bound for {form.activation.name} without a normalizer in fp16; tiled does"
    if isinstance(form.gain, FromStatistics) and form.gain.differentiable and call.needs_grad:
        return "takes the gain as a constant: its gradient through the statistics is in tiled"
    if call.needs_grad and isinstance(form.shape, Tensor) and form.shape.requires_grad:
        return "gives no gradient for the shape (α); tiled does"
    return None


def _unsupported_call(call: Call) -> str | None:
    if call.input_dtype not in DTYPES:
        return f"takes fp16, bf16 and fp32, not {call.input_dtype}; tiled does"
    if max(call.head_dim, call.value_dim) > LARGEST:
        dims = f"{call.head_dim} and {call.value_dim}"
        return f"takes head dimensions up to {LARGEST}, not {dims}; tiled does"
    if call.dropout_p:
        return "has no dropout; tiled has"
    if call.needs_grad and call.mask is not None and call.mask.requires_grad:
        return "gives no gradient for a float mask; tiled does"
    return unsupported_here(call, "tiled")


def unsupported_here(call: Call, other: str) -> str | None:
    """Why no kernel runs on this machine, and which backend does."""
    if find_spec("triton") is None:
        return "needs Triton: pip install 'attnzoo[gpu]'"
    if call.device.type != "cuda" and not _interpreted():
        return f"needs a CUDA device, or Triton's interpreter; these tensors are on {call.device}"
    # Tensors may be fake ones of a device that is not there.
    if call.device.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return f"is made for NVIDIA's GPUs; {other} runs on any"
    found = torch.cuda.get_device_properties(call.device)
    if found.major < 8:
        have = f"{found.major}.{found.minor}"
        return f"needs compute capability 8.0, not {have}; {other} runs on any"
    return None


def _interpreted() -> bool:
    """Triton's interpreter is on, which runs kernels on the CPU, for tests."""
    from attnzoo.backends.triton.common import launch

    return launch.interpreted()


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    assert form.activation.triton is not None
    reject_transforms("flash", q, k, v)
    q, k, v = readable(q, k, v)
    layout, gain = layout_of(call), form.gain
    if isinstance(gain, FromStatistics):
        with torch.no_grad():
            found = ops.flash_statistics(q=q.detach(), k=k.detach(), layout=layout)
        gain = gain.gain(found)
    layout, vectors = vectors_of(form, gain, layout, call)
    maps, kernel_form = Maps(), form_of(form)
    if form.normalize == "threshold":
        with torch.no_grad():
            alpha = alpha_of(form)
            tau, *found = ops.flash_threshold(
                q=q.detach(), k=k.detach(), v=v.detach(), vectors=vectors, layout=layout,
                form=kernel_form, alpha=alpha,
            )  # fmt: skip
        vectors, maps = vectors._replace(offset=tau), Maps(*found)
    found = ops.flash_forward(
        q=q, k=k, v=v, vectors=vectors, maps=maps, layout=layout, form=kernel_form,
        want_lse=call.return_lse,
    )  # fmt: skip
    return found.out, found.lse


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the one layout that the kernels ask for: rows without gaps."""
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)


def normalize(form: Pairwise) -> str:
    """As the kernels have it: a softmax's running maximum stands for τ."""
    return "online" if form.softmax else form.normalize


def alpha_of(form: Pairwise) -> float | None:
    """None where the shape is α."""
    alpha = form.activation.alpha
    return None if isinstance(alpha, str) else alpha


def form_of(form: Pairwise) -> ops.Form:
    """As the kernels know it."""
    activation = form.activation
    assert activation.triton is not None
    return ops.Form(activation.triton, activation.unit, activation.vanishes, normalize(form))


BACKEND = Backend("flash", ("pairwise",), unsupported, run)
