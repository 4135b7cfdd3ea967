"""Context parallelism: one long sequence over several devices, for every variant.

``attnzoo.distributed`` is imported on request: ``import attnzoo`` does not load it.
"""

from attnzoo.distributed.batches import Batch, shard, shard_batch, unshard
from attnzoo.distributed.context import context_parallel_attention
from attnzoo.distributed.modules import shard_sequence

__all__ = [
    "Batch",
    "context_parallel_attention",
    "shard",
    "shard_batch",
    "shard_sequence",
    "unshard",
]
