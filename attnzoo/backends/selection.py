"""Choose the backend of a call: the first one that supports it, in order of preference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch.compiler import is_exporting

from attnzoo.backends import BACKENDS, linear
from attnzoo.backends.base import Backend
from attnzoo.core.call import Call
from attnzoo.core.checks import is_known, is_symbolic, shown
from attnzoo.core.forms import (
    Form,
    FromStatistics,
    Linear,
    NoForm,
    Pairwise,
)

# Up to this many scores (half a MiB of fp32), the few dense operations of the definition cost less
# than a loop over blocks.
FEW_SCORES = 2**17
# Up to this many scores, the definition also costs less than a pass over the keys for statistics,
# followed by torch's fused softmax.
FEWEST_SCORES = 2**14

# Cost of a multiplication in the scan relative to one in a block of scores. The factor is above 1
# because the scan also computes the features.
LINEAR_COST = 3
FP64_COST = 2  # cost of a multiplication in fp64 relative to one in fp32, on a CPU

# Up to this many features, `flash_linear` is preferred to `linear`. `flash_linear` keeps all
# features in memory. 2145 features (Taylor, D = 64) take about thirty times the memory of q.
FEW_FEATURES = 512

# Up to this many queries × heads per group without gradients, as in decoding, a selection of keys
# runs on `tiled` on a GPU. There `flash` has one program per head, which reads all keys several
# times. Neither has been timed on a GPU.
FEW_SELECTING = 64


class Candidate(NamedTuple):
    backend: str
    form: Form
    reason: str | None
    note: str = ""  # shown by `explain` after the status


def preference(forms: tuple[Form, ...], call: Call) -> list[tuple[Backend, Form]]:
    """All (backend, form) pairs, fastest first, including those that cannot run the call.

    On a GPU, and on a CPU above `FEW_SCORES` scores:

    1. A linear form if `linear_is_cheaper`. On a GPU, `flash_linear` comes before `linear` with up
       to `FEW_FEATURES` features, and after `linear` with more. If segments have unknown lengths
       there, a pairwise form is preferred: `flash` computes only the scores within segments.
    2. On a GPU, `decode`, which supports few queries only. It comes before `sdpa` for any number of
       keys, because each token of a decoding adds a key: torch may run cuDNN, which builds a plan
       for each new shape, and this takes longer than the attention of one token. If the number of
       queries is symbolic, it comes after `sdpa` and `flash`.
    3. `sdpa`, torch's fused softmax. On a GPU it comes after `flash` if the gain comes from
       statistics of the logits, which `flash` computes in a kernel.
    4. On a GPU, `flash` and `flash_shares`. `tiled` comes first for a selection of keys by few
       queries, see `FEW_SELECTING`.
    5. `tiled` with a form, then with the definition. A linear form that is not cheaper comes next.
    6. `eager`, if no other backend supports the call.

    On a CPU up to `FEW_SCORES` scores: `sdpa`, then `eager`. Up to `FEWEST_SCORES` scores with a
    gain from statistics: `eager`, then `sdpa`. For symbolic lengths see `has_few_scores`.
    """
    linear_first = any(isinstance(f, Linear) and linear_is_cheaper(f, call) for f in forms)
    if call.device.type == "cuda" and call.segments is not None and call.longest is None:
        linear_first = linear_first and not any(isinstance(f, Pairwise) for f in forms)
    statistics = any(isinstance(f, Pairwise) and isinstance(f.gain, FromStatistics) for f in forms)
    if call.device.type == "cuda":
        order = ["flash", "sdpa"] if statistics else ["sdpa", "flash"]
        # In a graph, `decode` would limit a symbolic number of queries to few.
        order = [*order, "decode"] if is_symbolic(call.queries) else ["decode", *order]
        sizes = [f.size(call.head_dim) for f in forms if isinstance(f, Linear)]
        scans = ["flash_linear", "linear"]
        scans = scans if max(sizes, default=0) <= FEW_FEATURES else scans[::-1]
        order = [*order, "flash_shares", "tiled"]
        selects = any(isinstance(f, Pairwise) and f.normalize == "select" for f in forms)
        rows = call.queries * (call.heads // max(1, call.kv_heads))
        if selects and not call.needs_grad and is_known(rows <= FEW_SELECTING):
            order = ["tiled", *(name for name in order if name != "tiled")]
        order = [*scans, *order] if linear_first else [*order, *scans]
        order += ["eager"]
    elif has_few_scores(forms, call):
        order = ["linear", "tiled", "decode", "flash", "flash_linear", "flash_shares"]
        eager_first = statistics and is_known(scores_of(call) <= FEWEST_SCORES)
        order = (["eager", "sdpa"] if eager_first else ["sdpa", "eager"]) + order
    else:
        order = ["linear", "sdpa", "tiled"] if linear_first else ["sdpa", "tiled", "linear"]
        order += ["decode", "flash", "flash_linear", "flash_shares", "eager"]
    backends = [BACKENDS[name] for name in order]
    return [(backend, form) for backend in backends for form in forms if _meets(backend, form)]


def scores_of(call: Call) -> int:
    return call.batch * call.heads * call.queries * call.keys


def has_few_scores(forms: tuple[Form, ...], call: Call) -> bool:
    """Whether the definition costs less than a loop over blocks.

    In a graph with symbolic lengths the answer is False if the lengths may have many scores, so
    that one graph serves all. A variant without a form has no such graph in blocks.
    """
    few = scores_of(call) <= FEW_SCORES
    in_blocks = any(isinstance(form, Pairwise | Linear) for form in forms)
    if not in_blocks and not is_exporting():
        return bool(few)
    return is_known(few)


def _meets(backend: Backend, form: Form) -> bool:
    """True if the backend accepts the form's kind.

    A `NoForm` gives the reason why a form is missing. It is listed only for backends that accept no
    other kind of form.
    """
    if isinstance(form, NoForm):
        return backend.kinds == (form.kind,)
    return form.kind in backend.kinds


def linear_is_cheaper(form: Linear, call: Call) -> bool:
    lengths = call.queries, call.keys, 0 if call.longest is None else call.longest
    if is_symbolic(*lengths):  # the scan is cheaper for all but small lengths
        return form.size(call.head_dim) <= FEW_FEATURES
    return linear_work(form, call) < 1


def linear_work(form: Linear, call: Call) -> float:
    """Cost of the scan relative to the cost of the pairwise form, in multiplications.

    The scan takes F·(Dv + 1) for each key and each query, and twice that with segments and without
    causality. With causality or segments it also takes F for each pair of a query and a key of the
    same chunk. The pairwise form takes D + Dv for each pair that causality and window allow, where
    sequences have `Call.longest` tokens. A multiplication of the scan counts `LINEAR_COST` times,
    or `LINEAR_COST` · `FP64_COST` times if the scan runs in fp64.
    """
    keys, queries = (call.keys, call.queries) if call.longest is None else (call.longest,) * 2
    visible = keys if call.right is None else keys - (queries - 1) / 2
    if call.left is not None:
        visible = min(visible, call.left + 1 + (call.right or 0))
    size = form.size(call.head_dim)
    in_chunks = call.right == 0 or call.segments is not None
    chunk = linear.chunk_length(size, call.needs_grad) if in_chunks else 0
    scans = 2 if call.right is None and call.segments is not None else 1
    with_states = scans * (call.keys + call.queries) * (call.value_dim + 1)
    scan = size * (with_states + call.queries * chunk)
    pairs = call.queries * visible * (call.head_dim + call.value_dim)
    cost = LINEAR_COST * (FP64_COST if linear.sums_in_fp64(form, call) else 1)
    return cost * scan / pairs if pairs > 0 else math.inf


def candidates(
    name: str, forms: tuple[Form, ...], call: Call, backend: str | None = None
) -> Iterator[Candidate]:
    """Yield the candidates in order of preference, without notes.

    Args:
        forms: All forms of the variant ``name``, including its definition.
        backend: Only candidates of this backend.
    """
    listed = with_absent(name, forms)
    if backend is None:
        ordered = preference(listed, call)
    else:  # the order needs no comparison of sizes
        ordered = [(BACKENDS[backend], f) for f in listed if _meets(BACKENDS[backend], f)]
    for chosen, form in ordered:
        yield Candidate(chosen.name, form, _unsupported(chosen, form, call))


def with_absent(name: str, forms: tuple[Form, ...]) -> tuple[Form, ...]:
    """The forms, and a reason for each kind of form that is missing."""
    kinds = {form.kind for form in forms}
    absent = [k for k in ("pairwise", "linear", "shares") if k not in kinds]
    return forms + tuple(NoForm(kind, f"{name} has no {kind} form") for kind in absent)


def _unsupported(backend: Backend, form: Form, call: Call) -> str | None:
    if call.pages is not None and not backend.reads_pages:
        return "does not read pages"
    reason = backend.unsupported(form, call)
    if reason is None and not backend.any_alignment and not call.aligned:
        return "does not support a last query at another position than the last key (tiled does)"
    return reason


def choose(
    name: str, forms: tuple[Form, ...], call: Call, backend: str | None
) -> tuple[Backend, Form]:
    """Return the first backend in the order of preference that supports the call, and its form."""
    reasons = []
    for candidate in candidates(name, forms, call, backend):
        if candidate.reason is None:
            return BACKENDS[candidate.backend], candidate.form
        reasons.append(f"{candidate.form.kind}: {candidate.reason}")
    raise ValueError(f"backend {backend!r} cannot run {name!r} here: {'; '.join(reasons)}")


def check_backend(backend: str | None) -> None:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(
            f"backend must be None or one of {', '.join(BACKENDS)}, got {shown(backend)}"
        )
