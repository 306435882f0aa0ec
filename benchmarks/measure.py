"""Time and memory of several ways to do the same thing.

They take turns, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], Any]
Timer = Callable[[Work, int], float]
"""Takes work and how often to do it; seconds of one call."""

_LEAST_SECONDS = 2e-2
_MOST_CALLS = 3
"""More on a GPU, each behind a wait of its own, would take seconds."""
_CYCLES = 2e9
"""Of a GPU in a second, roughly."""


def take_turns(
    variants: Mapping[str, Work], rounds: int, warm: int, timer: Timer
) -> dict[str, list[float]]:
    """Times all variants in every round, each round starting with another one.

    Work of less than 20 ms is repeated within its turn, as often as fills that time.

    Args:
        variants: what to do, by name.
        rounds: that count.
        warm: rounds before them: allocators and caches settle.
        timer: how calls are timed.

    Returns:
        Seconds of one call in every round, by name.
    """
    names = list(variants)
    repeats = dict.fromkeys(names, 1)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            spent = timer(variants[name], repeats[name])
            if turn < 0:
                repeats[name] = max(repeats[name], round(_LEAST_SECONDS / max(spent, 1e-9)))
            else:
                seconds[name].append(spent)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> float:
    """Median over rounds of the time of one over another's."""
    pairs = zip(seconds[name], seconds[to], strict=True)
    return statistics.median(a / b for a, b in pairs)


def summary(seconds: Mapping[str, list[float]], to: str) -> dict[str, dict[str, Any]]:
    """Of each variant `ms`, its median, and the `ratio` of :func:`ratio`."""
    return {
        name: {"ms": 1e3 * statistics.median(times), "ratio": ratio(seconds, name, to)}
        for name, times in seconds.items()
    }


def by_clock(clock: Callable[[], float] = time.process_time) -> Timer:
    """Times by a clock, without another one the seconds of a processor in this process."""

    def timer(work: Work, repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            work()
        return (clock() - start) / repeats

    return timer


def by_cuda_events(work: Work, repeats: int) -> float:
    """Seconds of the GPU for one of some calls, between two events.

    The GPU sleeps while the host issues a call, as it would be at work on the networks of a step;
    otherwise small kernels would take the time that the host needs to start them. Work that waits
    for the GPU ends its sleep, and is timed with what the host does after that.
    """
    # The first call may compile; the GPU would sleep twice as long as that.
    issue = min(issue_seconds(work) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent = 0.0
    calls = min(repeats, _MOST_CALLS)
    for _ in range(calls):
        torch.cuda._sleep(int(2 * issue * _CYCLES))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end)
    return spent / 1e3 / calls


def issue_seconds(work: Work) -> float:
    """Seconds of the host for a call, without waiting for what it started on a GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """Largest sum of live allocations of one call beyond its inputs, in bytes."""
    if device == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - held
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = work()
    del result
    held = most = 0
    events: Any = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
