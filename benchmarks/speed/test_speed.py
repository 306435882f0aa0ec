"""The speed table under pytest.

    pytest benchmarks/speed --benchmark-only            # every call by itself, grouped by operation
    pytest benchmarks/speed -k gate                     # no ratio below its gate
    pytest benchmarks/speed --benchmark-only --quick    # small sizes

pytest-benchmark runs variants one after another: ratios are what ``python -m benchmarks.speed``
and the gates measure, in turns.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks.interleaved import peak_mib
from benchmarks.speed.effort import Effort
from benchmarks.speed.operation import Case, Operation, Setup, on_device
from benchmarks.speed.rows import ROWS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = [
    pytest.param(case, name, id=f"{case.label}-{name}")
    for row in ROWS.values()
    if isinstance(row, Operation)
    for case in row.cases
    for name in case.names(DEVICE)
]


@functools.lru_cache(maxsize=1)
def made(case: Case, effort: Effort) -> Setup:
    """The variants of the case at hand; tables of half a gigabyte are not kept for all."""
    torch.manual_seed(0)
    return case.make(effort)


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_call(benchmark: Any, effort: Effort, case: Case, name: str) -> None:
    work = made(case, effort).variants[name]
    if isinstance(work, str):
        pytest.skip(work)
    call = on_device(work, effort.device)
    benchmark.group = case.label
    benchmark.extra_info.update(mib=peak_mib(call, effort.device), shrink=effort.shrink)

    def finished() -> None:
        call()
        if effort.device == "cuda":
            torch.cuda.synchronize()

    benchmark(finished)


@pytest.mark.parametrize("name", ROWS)
def test_gate(effort: Effort, name: str) -> None:
    if effort.shrink > 1:
        pytest.skip("targets are those of the full sizes")
    findings = ROWS[name].measure(effort).findings
    missed = [f"{f.label}, {f.peer}: {f.measured}" for f in findings if f.verdict == "missed"]
    assert not missed
