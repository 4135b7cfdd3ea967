"""Makes the kernel launch of a specialization, on meta tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.activations import activations, distance
from benchmarks.kernels.specializations import DROPOUT, DTYPES, EXTRAS, SPLIT, Specialization

# Features per token in linear calls. taylor has 153 at D = 16, padded to a multiple of 8.
FEATURES = 160
KEYS = 4096  # number of keys in decode calls
SHORT = 256  # number of keys in "decode short" calls, which have one split
# Kernels by the last word of a specialization's kernel
DECODE_STAGES = {
    "decode": "decode", "short": "decode", "merge": "merge_splits", "products": "decode_products",
    "statistics": "decode_stats", "solver": "decode_threshold",
}  # fmt: skip
COLUMNS = 32768  # entries of a row in row kernels
PAGE = 16  # keys of a page, as in most engines
RADIUS = 128  # of a table of a bias by relative position
PROCESSORS = 132  # multiprocessors of an H200


class Described(NamedTuple):
    """Arguments that several launch functions share."""

    layout: Any
    rule: Any
    vectors: Any
    terms: Any
    solved: Any
    lse: bool
    dropout: Any


def describe(spec: Specialization) -> Any:
    describers = {
        "linear": describe_linear, "decode": describe_decode, "shares": describe_shares,
        "rows": describe_rows,
    }  # fmt: skip
    return describers.get(spec.family, describe_flash)(spec)


def arch_of(spec: Specialization) -> int:
    return int(spec.arch.removeprefix("sm_"))


def extras_of(spec: Specialization) -> tuple[str, ...]:
    named = tuple(spec.extra.split())
    return (*EXTRAS, *named) if "all" in named else named


def empty(spec: Specialization, *shape: int) -> Tensor:
    """A tensor (…, head_dim)."""
    return torch.empty(*shape, spec.head_dim, dtype=DTYPES[spec.dtype], device="meta")


def layout_of(spec: Specialization, q: Tensor, keys: int) -> Any:
    from attnzoo.backends.shared_operands import Layout
    from attnzoo.backends.triton.common.kernel_operands import new_vector

    extras, queries = extras_of(spec), q.shape[2]
    of_q, of_k = (
        q.new_empty(1, n, dtype=torch.int64) if "segments" in (*extras, spec.kernel) else None
        for n in (queries, keys)
    )
    mask = None
    if "bool" in extras:
        mask = q.new_empty(1, 1, queries, keys, dtype=torch.uint8)
    elif "mask" in extras or spec.kernel == "dbias":
        dtype = torch.float32 if "fp32" in extras else q.dtype
        mask = q.new_empty(1, 1, queries, keys, dtype=dtype)
    elif "learned-keys" in extras:
        mask = q.new_empty(1, 1, 1, keys)
    elif any(name in extras for name in ("keys", "heads", "pages")):
        heads = q.shape[1] if "heads" in extras else 1
        mask = q.new_empty(1, heads, 1, keys, dtype=torch.uint8)
    left, right = keys // 4 if "window" in extras else None, None if "full" in extras else 0
    relative = None
    if "alibi" in extras:
        relative = new_vector(q)
    elif "table" in extras:
        relative = q.new_empty(q.shape[1], 2 * RADIUS + 1, dtype=torch.float32)
    softcap = 50.0 if "softcap" in extras else None
    return Layout(0.1, left, right, mask, of_q, of_k, relative, softcap)


def described(spec: Specialization, q: Tensor, keys: int) -> Described:
    from attnzoo.backends.shared_operands import NO_DROPOUT, Dropout, Terms, Vectors, rule_of
    from attnzoo.backends.triton.common.kernel_operands import Solved, new_vector
    from attnzoo.backends.triton.flash.launch import new_selection, new_solved

    use, extras = activations()[spec.activation], extras_of(spec)
    kind, vector, layout = use.kind, new_vector(q), layout_of(spec, q, keys)
    lse = spec.extra.startswith("all") and kind == "online"
    offset = kind == "none" or "factor" in kind or "key-bias" in extras
    vectors = Vectors(
        gain=None if spec.extra.endswith("no gain") else vector,
        offset=vector if offset else None,
        shape=vector if "family" in kind else None,
        sink=vector if lse else None,
    )
    key_bias = q.new_empty(*q.shape[:2], keys, dtype=torch.float32)
    terms = Terms(
        key_bias=key_bias if "key-bias" in extras else None,
        decay=vector[..., 0] if "distance" in extras else None,
        factor=vector if "factor" in kind else None,
    )
    rule, solved = rule_of(use.form), Solved()
    if rule.normalize == "threshold":
        solved = new_solved(q, q.new_empty(*q.shape[:2], keys, q.shape[3]), q)
    if rule.normalize == "select":
        solved = new_selection(q)
    if "distance" in extras:
        rule = rule._replace(distance=distance())
    dropout = NO_DROPOUT
    if DROPOUT in extras:
        dropout = Dropout(q.new_empty((), dtype=torch.int64), 0.1)
    return Described(layout, rule, vectors, terms, solved, lse, dropout)


def is_plain(spec: Specialization) -> bool:
    """Whether the kernel has the tile of the table PLAIN.

    Kernels of shares have one tile for all calls, and are as plain as a call without extras.
    """
    from attnzoo.backends.triton.common.launch import is_safe

    if spec.family in ("linear", "rows"):
        return True
    if spec.family == "shares":
        return not spec.extra
    q = empty(spec, 1, 2, 1024)
    layout, rule, vectors, terms, _, _, dropout = described(spec, q, q.shape[2])
    return not is_safe(spec.family, q, layout, rule, vectors, terms, dropout)


def describe_flash(spec: Specialization) -> Any:
    from attnzoo.backends.triton.common.kernel_operands import new_vector, saves_weight_sum
    from attnzoo.backends.triton.flash import launch, launch_backward

    k = q = empty(spec, 1, 2, 1024)
    if spec.extra == SPLIT:
        # Few queries for the forward, whose blocks may be of 16; many for parts of a group in dK/dV
        q = empty(spec, 1, 2, 256) if spec.family == "forward" else q
        k = empty(spec, 1, 1, 2048)
    do = out = q.new_empty(q.shape)
    vector, arch = new_vector(q), arch_of(spec)
    layout, rule, vectors, terms, solved, lse, dropout = described(spec, q, k.shape[2])
    if spec.family in ("forward", "segments"):
        operands = (
            q, k, k, layout, rule, vectors, terms, solved, lse, arch, PROCESSORS, dropout
        )  # fmt: skip
        launches, _ = launch.describe_forward(*operands)
        names = {"segments": "segment_ranges", "forward merge": "merge_splits"}
        name = names.get(spec.kernel, "flash_forward")
        return next(each for each in launches if each.kernel.__name__ == name)
    if spec.kernel == "stats":
        return launch.describe_stats(q, q, layout, "peak" in extras_of(spec), arch)[0][-1]
    if spec.kernel == "selection":
        return launch.describe_selection(q, q, q, layout, rule, vectors, terms, arch)[0][-1]
    if spec.kernel == "threshold":
        return launch.describe_threshold(q, q, q, layout, rule, vectors, terms, arch)[0][-1]
    stat = None if rule.normalize == "none" else new_vector(q)
    weight_sum = new_vector(q) if saves_weight_sum(rule, layout, vectors, terms, lse) else None
    differentiable = {**vectors._asdict(), **terms._asdict(), "relative_bias": layout.relative_bias}
    wanted = ["k", *(name for name, x in differentiable.items() if x is not None)]
    if "learned-keys" in extras_of(spec):
        wanted.append("key_bias")
    bias = layout.mask if spec.kernel == "dbias" else None
    launches, _ = launch_backward.describe_backward(
        do, vector if lse else None, q, k, k, out, stat, weight_sum, layout, rule, vectors, terms,
        solved, bias, wanted, arch, PROCESSORS, dropout,
    )  # fmt: skip
    name = f"flash_{spec.kernel}"
    return next(each for each in launches if each.kernel.__name__ == name)


def describe_linear(spec: Specialization) -> Any:
    """The launch of a call with two query heads per key/value head.

    It is causal with an initial state. With segments there is no state, and "full" is not causal.
    """
    from attnzoo.backends.triton.linear import launch
    from attnzoo.backends.triton.linear.state import layout

    dtype, arch = DTYPES[spec.dtype], arch_of(spec)
    x = torch.empty(1, 2, 1024, FEATURES, dtype=dtype, device="meta")
    do = x.new_empty(1, 2, 1024, spec.head_dim, dtype=dtype)
    y, v = x[:, :1], do[:, :1]
    delta = x.new_empty(1, 2, 1024, dtype=torch.float32)
    first = delta.new_empty(1, 1, FEATURES, layout(spec.head_dim, 32).WIDTH)
    bounds = None
    if "segments" in extras_of(spec):
        first, bounds = None, x.new_empty(1, 2, 1024, dtype=torch.int32)
    sums = first, bounds
    forward, (states, _) = launch.describe_states(y, v, None, *sums, False, 1, True, arch)
    assert states is not None
    back, _ = launch.describe_states(x, do, delta, *sums, True, 1, True, arch)
    read = states, states if "full" in extras_of(spec) else None, bounds
    output, _ = launch.describe_output(x, y, v, *read, spec.head_dim, dtype, arch)
    dx, _ = launch.describe_dx(x, y, v, do, delta, *read, arch)
    (dy, dv), _ = launch.describe_dy_dv(y, v, x, do, delta, *read, arch)
    launches = {"states back": back, "output": output, "dx": dx, "dy": dy, "dv": dv}
    return {"states": forward, **launches}[spec.kernel.removeprefix("linear ")]


def describe_shares(spec: Specialization) -> Any:
    from attnzoo.backends.triton.shares import launch

    q, arch = empty(spec, 1, 2, 1024), arch_of(spec)
    layout = layout_of(spec, q, q.shape[2])._replace(right=-1)
    if spec.kernel == "shares forward":
        return launch.describe_forward(q, q, q, layout, arch)[0][-1]
    launches, _ = launch.describe_backward(q, q, q, q, layout, ("relative_bias",), arch)
    name = spec.kernel.replace(" ", "_")
    return next(each for each in launches if each.kernel.__name__ == name)


def describe_rows(spec: Specialization) -> Any:
    from benchmarks.kernels import row_softmax

    x = empty(spec._replace(head_dim=COLUMNS), 16)
    return row_softmax.describe(spec.kernel.removeprefix("rows "), x, x.new_empty(x.shape))


def few_queries(spec: Specialization) -> int:
    """Number of queries in a decode call with eight query heads per key/value head.

    The number depends on ``spec.extra`` and ``spec.dtype``, so that tiles of 16, 32 and 64 rows are
    compiled.
    """
    queries = {"": 1, "keys": 1, "heads": 1, "distance": 1, "pages": 1, "window": 4}
    return queries.get(spec.extra, 4 if spec.dtype == "fp32" else 8)


def describe_decode(spec: Specialization) -> Any:
    """The launch of a decode call with eight query heads per key/value head."""
    from attnzoo.backends.triton.common.kernel_operands import NOT_PAGED, Paged
    from attnzoo.backends.triton.decode import launch

    words = spec.kernel.split()
    keys, stage = SHORT if "short" in words else KEYS, DECODE_STAGES[words[-1]]
    q, k = empty(spec, 1, 8, few_queries(spec)), empty(spec, 1, 1, keys)
    layout, rule, vectors, terms, _, lse, _ = described(spec, q, keys)
    paged = NOT_PAGED
    if "pages" in extras_of(spec):
        table = q.new_empty(1, keys // PAGE, dtype=torch.int32)
        paged, k = Paged(table, table[:, 0], keys), empty(spec, keys // PAGE, 1, PAGE)
    machine = arch_of(spec), PROCESSORS
    if rule.normalize == "threshold" or stage in ("decode", "merge_splits"):
        operands = q, k, k, None, paged, layout, rule, vectors, terms, lse, *machine
        launches, _ = launch.describe_decode(*operands)
    else:
        launches, _ = launch.describe_statistics(q, k, paged, layout, *machine)
    return next(each for each in launches if each.kernel.__name__ == stage)
