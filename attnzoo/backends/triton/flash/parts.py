"""How `flash` splits the work of launches with fewer programs than the GPU has room for.

The number of parts depends on shapes and the device only. Each part writes its result in fp32, and
the results are added in a fixed order.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnzoo.backends.shared_operands import Layout
from attnzoo.backends.triton.common.launch import PER_PROCESSOR
from attnzoo.backends.triton.common.merge import MOST_SPLITS

# Fewest queries per part of a group of heads, all heads together, and fewest keys per split in the
# forward. Smaller parts cost more time than they save: their results are written, read and added.
LEAST_QUERIES = LEAST_KEYS = 1024


def programs_of(x: Tensor, block: int) -> int:
    return triton.cdiv(x.shape[2], block) * x.shape[0] * x.shape[1]


def parts_of_group(q: Tensor, k: Tensor, block_n: int, processors: int) -> int:
    """Number of parts of a group of query heads in dK/dV. It divides the group."""
    group = max(1, q.shape[1] // max(1, k.shape[1]))
    wanted = PER_PROCESSOR * processors // max(1, programs_of(k, block_n))
    most = max(1, min(group, group * q.shape[2] // LEAST_QUERIES))
    parts = [n for n in range(1, most + 1) if group % n == 0]
    return next((n for n in parts if n >= wanted), parts[-1])


def splits_of_keys(q: Tensor, k: Tensor, layout: Layout, block_m: int, processors: int) -> int:
    """Number of splits of the keys in the forward: more than 1 for few queries and many keys."""
    seen = k.shape[2]
    if layout.left is not None and layout.right is not None:
        seen = min(seen, layout.left + block_m + layout.right)
    wanted = PER_PROCESSOR * processors // max(1, programs_of(q, block_m))
    # With room for two programs or fewer per block, splitting is not worth its cost.
    return min(wanted, MOST_SPLITS.value, max(1, seen // LEAST_KEYS)) if wanted > 2 else 1
