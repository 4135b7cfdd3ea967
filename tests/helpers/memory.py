"""Memory that a function allocates."""

from __future__ import annotations

import gc
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Any) -> int:
    """The largest number of bytes that were allocated at once, beyond those at the start."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak
