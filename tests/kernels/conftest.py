"""How much memory an operation takes, and how often a GPU would have to start work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

PeakBytes = Callable[[Callable[[], Any]], int]
Launches = Callable[[Callable[[], Any]], int]


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


class _Counter(TorchDispatchMode):
    """Counts operations but views and what only makes room."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.launches += not (func.is_view or "empty" in name or name == "aten::detach")
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="session")
def launches() -> Launches:
    """``launches(f)``: how many operations of ``f()`` work on tensors."""

    def measure(run: Callable[[], Any]) -> int:
        with _Counter() as counter:
            run()
        return counter.launches

    return measure
