"""Which backend runs a call: the first that supports it, in an order of preference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from attnzoo.backends import BACKENDS, linear
from attnzoo.backends.base import Backend
from attnzoo.backends.triton.decode import backend as decode
from attnzoo.core.call import Call
from attnzoo.core.checks import shown
from attnzoo.core.forms import Form, FromStatistics, Linear, NoForm, Pairwise

# Up to this many scores (half a MiB of fp32) the definition's few dense operations cost less than
# walking over blocks does.
FEW_SCORES = 2**17
# Up to this many it also costs less than torch's fused softmax after a pass for statistics.
FEWEST_SCORES = 2**14

# A multiplication in the scan against one in a block of scores: features have to be made first.
LINEAR_COST = 3
FP64_COST = 2  # a multiplication in fp64 against one in fp32, on a CPU

# Taylor's 2145 at D = 64 would be thirty times q.
FEW_FEATURES = 512

# Keys in reach from which on `decode` comes before `flash`, and before torch's fused softmax, which
# splits keys too: its own partials and second launch have to be worth it.
MANY_KEYS = 1024
MORE_KEYS = 4096


class Candidate(NamedTuple):
    backend: str
    form: Form
    reason: str | None
    note: str = ""  # what decided its place


def preference(forms: tuple[Form, ...], call: Call) -> list[tuple[Backend, Form]]:
    """All (backend, form) pairs, the one expected to be fastest first: of device and sizes only.

    1. A linear form where `linear_is_cheaper`; on a GPU by the kernels of `flash_linear`, up to
       `FEW_FEATURES` features, for they hold all of them in memory.
    2. On a GPU the kernels of `decode` for few rows, from `MORE_KEYS` keys on.
    3. Torch's fused softmax; on a GPU not where the gain comes from statistics of the rows, which
       `flash` takes in a kernel of its own.
    4. On a GPU the kernels of `flash`; for few rows from `MANY_KEYS` keys on those of `decode`.
    5. Blocks of rows by form, then by definition.
    6. The definition in eager mode, where nothing else is able.

    On a CPU up to `FEW_SCORES` scores: torch's fused softmax, then the definition in eager mode;
    the other way round up to `FEWEST_SCORES` where the gain comes from statistics.
    """
    linear_first = any(isinstance(f, Linear) and linear_is_cheaper(f, call) for f in forms)
    statistics = any(isinstance(f, Pairwise) and isinstance(f.gain, FromStatistics) for f in forms)
    scores = call.batch * call.heads * call.queries * call.keys
    if call.device.type == "cuda":
        keys = keys_to_split(call)
        kernels = ["decode", "flash"] if keys >= MANY_KEYS else ["flash", "decode"]
        if statistics:
            order = [*kernels, "sdpa"]
        elif keys >= MORE_KEYS:
            order = ["decode", "sdpa", "flash"]
        else:
            order = ["sdpa", *kernels]
        sizes = [f.size(call.head_dim) for f in forms if isinstance(f, Linear)]
        scans = ["flash_linear", "linear"]
        scans = scans if max(sizes, default=0) <= FEW_FEATURES else scans[::-1]
        order = [*scans, *order, "tiled"] if linear_first else [*order, "tiled", *scans]
        order += ["eager"]
    elif scores <= FEW_SCORES:
        order = ["linear", "tiled", "decode", "flash", "flash_linear"]
        eager_first = statistics and scores <= FEWEST_SCORES
        order = (["eager", "sdpa"] if eager_first else ["sdpa", "eager"]) + order
    else:
        order = ["linear", "sdpa", "tiled"] if linear_first else ["sdpa", "tiled", "linear"]
        order += ["decode", "flash", "flash_linear", "eager"]
    backends = [BACKENDS[name] for name in order]
    return [(backend, form) for backend in backends for form in forms if _meets(backend, form)]


def _meets(backend: Backend, form: Form) -> bool:
    """A pair worth a line in `explain`: an absent form only where a backend takes no other."""
    if isinstance(form, NoForm):
        return backend.kinds == (form.kind,)
    return form.kind in backend.kinds


def keys_to_split(call: Call) -> int:
    """Keys in reach of rows that are few enough to be packed in one tile; 0 if they are not."""
    rows, most = decode.packed_rows(call)
    reach = call.keys if call.left is None else min(call.keys, call.left + call.queries)
    return reach if rows <= most else 0


def linear_is_cheaper(form: Linear, call: Call) -> bool:
    return linear_work(form, call) < 1


def linear_work(form: Linear, call: Call) -> float:
    """Multiplications of the scan over those of the pairs: the state takes F·(Dv + 1) for each key
    and for each row that reads it, a causal row F for each key of its chunk, each counted
    `LINEAR_COST` times, and `FP64_COST` times that in fp64; the pairwise form takes D + Dv for each
    key that a row reaches.
    """
    reach = call.keys if call.right is None else call.keys - (call.queries - 1) / 2
    if call.left is not None:
        reach = min(reach, call.left + 1 + (call.right or 0))
    size = form.size(call.head_dim)
    chunk = linear.chunk_length(size, call.needs_grad) if call.right == 0 else 0
    scan = size * ((call.keys + call.queries) * (call.value_dim + 1) + call.queries * chunk)
    pairs = call.queries * reach * (call.head_dim + call.value_dim)
    cost = LINEAR_COST * (FP64_COST if linear.sums_in_fp64(form, call) else 1)
    return cost * scan / pairs if pairs > 0 else math.inf


def candidates(name: str, forms: tuple[Form, ...], call: Call) -> Iterator[Candidate]:
    """In the order of preference, each asked when its turn comes; without notes.

    ``forms``: of the variant of that name, its definition among them.
    """
    kinds = {form.kind for form in forms}
    absent = [k for k in ("pairwise", "linear") if k not in kinds]
    forms += tuple(NoForm(kind, f"{name} has no {kind} form") for kind in absent)
    for backend, form in preference(forms, call):
        yield Candidate(backend.name, form, backend.unsupported(form, call))


def choose(
    name: str, forms: tuple[Form, ...], call: Call, backend: str | None
) -> tuple[Backend, Form]:
    """The first backend in the order of preference that supports the call, and its form."""
    reasons = []
    for candidate, form, reason, _ in candidates(name, forms, call):
        if backend not in (None, candidate):
            continue
        if reason is None:
            return BACKENDS[candidate], form
        reasons.append(f"{form.kind}: {reason}")
    raise ValueError(f"backend {backend!r} cannot run {name!r} here: {'; '.join(reasons)}")


def check_backend(backend: str | None) -> None:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(
            f"backend must be None or one of {', '.join(BACKENDS)}, got {shown(backend)}"
        )
