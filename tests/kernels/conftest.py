"""How much memory an operation takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

PeakBytes = Callable[[Callable[[], Any]], int]


@pytest.fixture(scope="session")
def peak_bytes() -> PeakBytes:
    """``peak_bytes(f)``: the largest sum of what ``f()`` has allocated at a time."""

    def measure(run: Callable[[], Any]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            kept = run()
        held = most = 0
        events: list[Any] = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
        memory = [e for e in events if e.name() == "[memory]"]
        for event in sorted(memory, key=lambda e: e.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        del kept
        return most

    return measure
