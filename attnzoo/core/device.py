"""Whether sizes of blocks are those for a CPU.

On a CPU, a block of scores should stay in the cache. On a GPU each operation is a launch, so blocks
should be large, and a loop must not read results, because that waits for all launches before it.
"""

from __future__ import annotations

import torch

CPU = ("cpu",)  # device types; tests replace it, to run what a GPU runs


def is_cpu(device: torch.device) -> bool:
    return device.type in CPU
