"""Hashes of identities, and checks of variants before a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

import attnzoo
from commandline.variants import VariantCall


def objection(variant: VariantCall, lengths: list[int], positions: str) -> str | None:
    """Why attnzoo would refuse a variant, by one small call per length before any training."""
    try:
        module = attnzoo.nn.Attention(variant.name, 1, **variant.params)
        options = {"alibi": torch.ones(1)} if positions == "alibi" else {}
        for length in lengths:
            q, k = torch.ones(1, 1, 1, 8), torch.ones(1, 1, length, 8)
            with torch.no_grad():
                module(q, k, k, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        # Want of memory is a row which says so, not a setting without a meaning.
        return None if is_out_of_memory(error) else str(error)
    return None


def key_of(identity: Mapping[str, object]) -> str:
    """Twenty hex digits of the SHA-256 of an identity's canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
