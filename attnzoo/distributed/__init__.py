"""Context parallelism: one long sequence over several devices, for every variant.

``attnzoo.distributed`` is imported on request: ``import attnzoo`` does not load it.
"""

from attnzoo.distributed.context import context_parallel_attention

__all__ = ["context_parallel_attention"]
