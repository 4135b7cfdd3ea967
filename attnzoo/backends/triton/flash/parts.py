"""How `flash` splits the work of launches with fewer programs than the GPU has room for.

The number of parts depends on shapes and the device only. Each part writes its result in fp32, and
the results are added in a fixed order.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnzoo.backends.triton.common.launch import PER_PROCESSOR

# Fewest queries per part of a group of heads, all heads together. A part with fewer costs more time
# than it saves, because the gradients of all parts are written, read and added.
LEAST_QUERIES = 1024


def programs_of(x: Tensor, block: int) -> int:
    return triton.cdiv(x.shape[2], block) * x.shape[0] * x.shape[1]


def parts_of_group(q: Tensor, k: Tensor, block_n: int, processors: int) -> int:
    """Number of parts of a group of query heads in dK/dV. It divides the group."""
    group = q.shape[1] // max(1, k.shape[1])
    programs = max(1, programs_of(k, block_n))
    wanted = min(group * q.shape[2] // LEAST_QUERIES, PER_PROCESSOR * processors // programs)
    return next((n for n in range(max(1, wanted), group) if group % n == 0), max(1, group))
