"""The share of blocks of the weight matrix that are empty, which a kernel can skip."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import attnzoo
from benchmarks.harness.block_sparse import BLOCK
from benchmarks.harness.cases import Case, Inputs

SAMPLE = 16  # blocks of queries that are looked at


@torch.no_grad()
def empty_blocks(case: Case, inputs: Inputs, size: int = BLOCK) -> float:
    """The share of visible size × size blocks in which all weights are 0.

    It is computed by the definition, for the first batch and head and at most `SAMPLE` evenly
    spaced blocks of queries, so that memory is linear in N.
    """
    i = inputs.detached().part([0], [0])
    rows, keys = i.q.shape[2], i.k.shape[2]
    blocks = max(1, rows // size)
    empty = total = 0
    for block in torch.linspace(0, blocks - 1, min(blocks, SAMPLE)).long().tolist():
        stop = min(rows, (block + 1) * size)
        visible = keys - rows + stop if i.causal else keys  # the last query sees the last key
        w = attnzoo.attention_weights(
            i.q[:, :, block * size : stop], i.k[:, :, :visible], i.v[:, :, :visible], case.variant,
            is_causal=i.causal, scale=i.scale, **i.params,
        )  # fmt: skip
        largest = F.max_pool2d(w[0], (w.shape[2], size), ceil_mode=True)  # [1, 1, key blocks]
        empty += int((largest == 0).sum())
        total += largest.numel()
    return empty / total
