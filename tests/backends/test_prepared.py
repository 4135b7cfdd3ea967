"""A prepared launch passes the kernel the same arguments as a launch that is described anew.

Runs in a process of its own, with a stand-in for the GPU driver that records all arguments.
"""

from __future__ import annotations

import pytest

from helpers.processes import output_of

pytest.importorskip("triton")

CODE = """
from functools import partial
from types import FunctionType

import torch, attnzoo
from attnzoo.backends.triton.common import prepared
from benchmarks.kernels.stand_in import install

launches, dirty = [], []

def seen(x):
    if isinstance(x, torch.Tensor):
        return x.data_ptr(), x.shape, x.stride(), x.dtype
    if hasattr(x, "base"):
        return "descriptor", x.base.data_ptr(), tuple(x.shape), tuple(x.block_shape)
    return getattr(x, "value", x)  # a constant of a group

def fields(values):  # the fields of groups are arguments too
    return [y for x in values for y in (fields(x) if isinstance(x, tuple) else [x])]

def record(*args):  # the kernel's arguments follow grid, stream, function, metadata and hooks
    launches.append([seen(x) for x in fields(args[9:])])
    for x in fields(args[9:]):
        if isinstance(x, torch.Tensor) and x.dtype == torch.uint8:
            dirty.append(bool(x.any()))
            x.fill_(1)  # the next tensor in this memory must be zeroed anew

install(record)

def run(variant, train, options, tensors, backend="flash"):
    q, k, v = (x.detach().requires_grad_(train) for x in tensors)
    out = attnzoo.attention(q, k, v, variant, backend=backend, **options)
    if train:
        out.backward(torch.ones_like(out))
    return out

def made(shape=(1, 4, 50, 32), keys=60, kv_heads=2):
    q = torch.randn(shape).bfloat16()
    k, v = torch.randn(2, shape[0], kv_heads, keys, shape[3]).bfloat16()
    return q, k, v

def normal(found, tensors):
    # Addresses of new tensors differ between calls; those of inputs must be those of this call.
    known = {x.data_ptr(): f"input {n}" for n, x in enumerate(tensors)}
    def name(x):
        if isinstance(x, tuple) and x and isinstance(x[0], int):
            return (known.get(x[0], "new"), *x[1:])
        if isinstance(x, tuple) and x and x[0] == "descriptor":
            return ("descriptor", known.get(x[1], "new"), *x[2:])
        return x
    return [[name(x) for x in each] for each in found]

def check(variant, train, shape=(1, 4, 50, 32), backend="flash", keys=60, **options):
    options = dict(enable_gqa=True, is_causal=True, **options)
    calls = []
    for n in range(4):
        tensors = made(shape, keys)
        launches.clear()
        dirty.clear()
        out = run(variant, train, options, tensors, backend)
        assert out.shape == shape, out.shape
        assert not any(dirty[:1]), variant  # the threshold kernel is the first that gets the map
        calls.append(normal(list(launches), tensors))
    assert all(found == calls[0] for found in calls[1:]), (variant, train)

for variant in ("softmax", "sigmoid", "ssmax", "taylor", "entmax"):
    for train in (False, True):
        check(variant, train)
check("softmax", True, window=5)
# Forward, statistics or threshold, and backward of each call.
count = len(prepared._prepared)
assert count == 13, count
for variant in ("softmax", "sigmoid", "ssmax", "entmax", "adaptive_temperature"):
    check(variant, False, (1, 4, 1, 32), "decode")
assert len(prepared._prepared) == count + 6, len(prepared._prepared) - count
# States and output, and in the backward dx, states, and dy with dv.
count = len(prepared._prepared)
check("elu", True, (1, 4, 60, 32), "flash_linear")
assert len(prepared._prepared) == count + 5, len(prepared._prepared) - count
for keys in range(40, 44):  # a cache that grows
    q, (k, v) = torch.randn(1, 4, 1, 32).bfloat16(), torch.randn(2, 1, 2, keys, 32).bfloat16()
    launches.clear()
    run("ssmax", False, dict(enable_gqa=True, is_causal=True), (q, k, v), "decode")
    assert launches[0][launches[0].index((k.data_ptr(), k.shape, k.stride(), k.dtype))], keys

# One tensor as q, k and v, and then three tensors of the same shape, must not be mixed up.
x = torch.randn(1, 2, 40, 32).bfloat16()
three = [torch.randn(1, 2, 40, 32).bfloat16() for _ in range(3)]
for tensors in ((x, x, x),) * 3 + (three,) * 3:
    launches.clear()
    run("softmax", False, {}, tensors)
    assert [y[0] for y in launches[-1][:3]] == [t.data_ptr() for t in tensors] or any(
        isinstance(y, tuple) and y[0] == "descriptor" for y in launches[-1])

# A tensor that is not aligned is copied.
off = torch.randn(1 * 2 * 40 * 32 + 1).bfloat16()[1:].view(1, 2, 40, 32)
for tensors in ((three[0],) + tuple(three[1:]), (off,) + tuple(three[1:])) * 2:
    launches.clear()
    run("softmax", False, {}, tensors)
    address = launches[-1][0][0]
    assert address == tensors[0].data_ptr() if tensors[0] is not off else address % 16 == 0

# Float masks have two statistics per query, and so have shifted activations.
mask = torch.zeros(50, 60)
check("softmax", True, attn_mask=mask)
check("softpick", True)

# Keys are split in the forward, which then has a merge, and groups of heads in dK/dV.
check("softmax", True, (1, 8, 600, 32), keys=2048)
assert len(launches) == 4, len(launches)

# A prepared launch keeps no tensor of a call, neither operands nor results.
check("stick_breaking", True, backend="flash_shares")

def tensors_in(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = (*x, *x.values())
    elif isinstance(x, prepared.Prepared):
        x = vars(x).values()
    elif isinstance(x, partial):
        x = (*x.args, *x.keywords.values())
    elif isinstance(x, FunctionType):
        x = [cell.cell_contents for cell in x.__closure__ or ()]
    elif hasattr(x, "base"):
        x = [x.base]
    elif not isinstance(x, (tuple, list, set)):
        return []
    return [tensor for each in x for tensor in tensors_in(each)]

kept = [tuple(x.shape) for x in tensors_in(prepared._prepared)]
assert not kept, kept
print("done")
"""


@pytest.mark.slow
def test_a_prepared_launch_equals_a_new_one() -> None:
    assert output_of(CODE) == "done"
