"""Timing several ways to do the same thing in turn, so that a busy machine disturbs all alike."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], Any]

_LEAST_SECONDS = 2e-2


def race(
    variants: Mapping[str, Work],
    rounds: int,
    warm: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float | list[float]]]:
    """Times all variants in every round, each round starting with another one.

    Work of less than 20 ms is repeated within its turn, as often as fills that time.

    Args:
        variants: what to do, by name; the first is what ratios are relative to.
        rounds: that count.
        warm: rounds before them: allocators and caches settle.
        clock: seconds; ``time.process_time`` leaves out what other processes take of the core.

    Returns:
        Of each variant `ms`, its median; `ratio`, the median over rounds of its time over the
        first one's of the same round; `quartiles` of that ratio.
    """
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    repeats = dict.fromkeys(names, 1)
    for turn in range(warm + rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            spent = _seconds(variants[name], repeats[name], clock)
            if turn >= warm:
                seconds[name].append(spent)
            else:
                repeats[name] = max(repeats[name], round(_LEAST_SECONDS / spent), 1)
    first = seconds[names[0]]
    found: dict[str, dict[str, float | list[float]]] = {}
    for name, times in seconds.items():
        ratios = [t / own for t, own in zip(times, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found[name] = {
            "ms": 1e3 * statistics.median(times),
            "ratio": middle,
            "quartiles": [low, high],
        }
    return found


def _seconds(work: Work, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        work()
    return (clock() - start) / repeats


def peak_mib(work: Work) -> float:
    """Largest sum of live allocations of one call beyond its inputs, in MiB, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = work()
    del result
    held = most = 0
    events: Any = trace.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20


def show(name: str, row: Mapping[str, Any], note: str = "") -> None:
    """Prints a line of a table of what :func:`race` and :func:`peak_mib` found."""
    low, high = row["quartiles"]
    print(
        f"  {name:12} {row['ms']:9.3f} ms  {row['ratio']:7.2f} x ({low:.2f} to {high:.2f})"
        f"  {row['mib']:8.1f} MiB  {note}",
        flush=True,
    )


class Record(dict[str, Any]):
    """What a benchmark found; written to the file of ``--json`` if there is one.

    Making it also sets one thread and a seed.

    Args:
        doc: of the benchmark; its first line is the help.
    """

    def __init__(self, doc: str) -> None:
        parser = argparse.ArgumentParser(description=doc.splitlines()[0])
        parser.add_argument("--json", type=Path)
        self._file: Path | None = parser.parse_args().json
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def write(self) -> None:
        """Writes what there is."""
        if self._file is not None:
            self._file.write_text(json.dumps(self, indent=1) + "\n")
