"""A row that times calls: variants of an operation in turn, at some sizes."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.interleaved import (
    Work,
    by_clock,
    by_cuda_events,
    issue_seconds,
    peak_bytes,
    ratios,
    summary,
    take_turns,
)
from benchmarks.speed.counting import counted
from benchmarks.speed.target import Effort, Finding, Measured, Row, Target, at_most
from solo_ext.lab.training.cpu_precision import multiplies_bfloat16

OURS, AGAIN = "ours", "again"
NEEDS_GPU, OF_CPU = "needs a GPU", "a target on a CPU"
NEEDS_BFLOAT16 = "needs a processor with AVX512-BF16 or AMX"
LAUNCHES = "launches"
EXACT, NARROW = 1e-5, 1e-2
"""Most that results may differ, in fp32 and where ours multiplies in bfloat16."""


class Goal(NamedTuple):
    """What one of our variants is to reach beside a peer.

    Attributes:
        peer: variant that it is compared with; empty for numbers of ours alone.
        faster: least ratio of the peer's time to ours; 0: the ratio is shown, without a target.
        leaner: least ratio of the peer's memory to ours.
        ours: which variant of ours.
        device: where that holds.
        most_ms: most milliseconds of ours.
        most_mib: most memory of ours.
        most_difference: most that results of both may differ; ``None``: they are not the same.
        most_launches: most operations of ours that a GPU would have to launch.
    """

    peer: str = ""
    faster: float | None = None
    leaner: float | None = None
    ours: str = OURS
    device: str = "cpu"
    most_ms: float | None = None
    most_mib: float | None = None
    most_difference: float | None = None
    most_launches: int | None = None


class Setup(NamedTuple):
    """An operation on given inputs.

    Attributes:
        variants: calls by name, ``ours`` among them; in place of one that cannot be, why.
        difference: of what one of ours returned from what a peer returned.
        given: in place of variants that draw at random, the same with the same draws; they are
            compared, not timed.
    """

    variants: dict[str, Work | str]
    difference: Callable[[Any, Any], float] | None = None
    given: Mapping[str, Work] = {}

    @property
    def works(self) -> dict[str, Work]:
        """Those that can be called."""
        return {name: work for name, work in self.variants.items() if not isinstance(work, str)}


class Case(NamedTuple):
    """An operation at a size.

    Attributes:
        label: of the full size.
        most_rounds: fewer rounds than other cases, after one to warm up and without memory: where
            a peer takes seconds in as many small steps that the profiler would drown.
    """

    label: str
    make: Callable[[Effort], Setup]
    goals: tuple[Goal, ...]
    most_rounds: int | None = None

    def measure(self, effort: Effort) -> Measured:
        """Times the variants in turn, if something is to be reached on this device."""
        if all(goal.device != effort.device for goal in self.goals):
            return Measured([f for g in self.goals for f in _not_here(self.label, g)], {})
        # The same inputs whatever was measured before.
        torch.manual_seed(0)
        setup = self.make(effort)
        works = {name: on_device(work, effort.device) for name, work in setup.works.items()}
        here = [goal for goal in self.goals if goal.device == effort.device]
        own = dict.fromkeys([OURS, *(goal.ours for goal in here if goal.ours in works)])
        timed = {**works, **{again(name): works[name] for name in own}}
        timer = by_cuda_events if effort.device == "cuda" else by_clock(time.perf_counter)
        few = self.most_rounds is not None
        rounds = min(effort.rounds, self.most_rounds) if few else effort.rounds
        seconds = take_turns(timed, rounds, min(effort.warm, 1) if few else effort.warm, timer)
        details = summary(seconds, OURS)
        if not few:
            for name, work in works.items():
                details[name]["mib"] = peak_bytes(work, effort.device) / 2**20
        if effort.device == "cuda":
            for name, work in works.items():
                details[name]["issue_ms"] = 1e3 * min(issue_seconds(work) for _ in range(5))
        missing = {n: why for n, why in setup.variants.items() if isinstance(why, str)}
        findings = []
        for goal in self.goals:
            if goal.device != effort.device:
                findings += _not_here(self.label, goal)
            elif missing.keys() & {goal.ours, goal.peer}:
                why = missing.get(goal.ours) or missing[goal.peer]
                findings += _lines(self.label, goal, note=why)
            else:
                findings += _reached(self.label, goal, seconds, details, setup, effort.device)
        return Measured(findings, {**details, **missing})


def again(name: str) -> str:
    """One of our variants a second time."""
    return f"{name}, {AGAIN}"


def of_cases(*cases: Case) -> Row:
    """A row that measures an operation at some sizes."""

    def measure(effort: Effort) -> Measured:
        parts = {case.label: case.measure(effort) for case in cases}
        findings = [f for part in parts.values() for f in part.findings]
        return Measured(findings, {k: part.details for k, part in parts.items()})

    return measure


def on_device(work: Work, device: str) -> Work:
    """The work as it runs in training there: on a GPU under autocast."""
    if device == "cpu":
        return work

    def under_autocast() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return work()

    return under_autocast


def _lines(label: str, goal: Goal, **rest: Any) -> list[Finding]:
    """One for each number of a goal, not measured."""
    names = {"ours": "" if goal.ours == OURS else goal.ours, "peer": goal.peer, **rest}
    found = []
    if goal.faster is not None:
        found.append(Finding(label, Target(goal.faster) if goal.faster else None, **names))
    if goal.leaner is not None:
        found.append(Finding(f"{label}: memory", Target(goal.leaner), **names))
    if goal.most_ms is not None:
        found.append(Finding(f"{label}: time", at_most(goal.most_ms, "ms"), **names))
    if goal.most_mib is not None:
        found.append(Finding(f"{label}: memory", at_most(goal.most_mib, "MiB"), **names))
    if goal.most_launches is not None:
        target = at_most(goal.most_launches, LAUNCHES)
        found.append(Finding(f"{label}: launches", target, **names))
    return found


def _not_here(label: str, goal: Goal) -> list[Finding]:
    note = NEEDS_GPU if goal.device == "cuda" else OF_CPU
    return _lines(f"{label}, on a GPU" if goal.device == "cuda" else label, goal, note=note)


def _reached(
    label: str,
    goal: Goal,
    seconds: Mapping[str, list[float]],
    details: Mapping[str, Any],
    setup: Setup,
    device: str,
) -> list[Finding]:
    own = details[goal.ours]
    memory = difference = None
    if goal.peer:
        memory = details[goal.peer]["mib"] / own["mib"] if own.get("mib") else None
        if goal.most_difference is not None and setup.difference is not None:
            compared = {**setup.works, **setup.given}
            pair = (on_device(compared[name], device)() for name in (goal.ours, goal.peer))
            difference = setup.difference(*pair)
            details[goal.ours].setdefault("difference", {})[goal.peer] = difference
    found = []
    for line in _lines(label, goal):
        unit = "" if line.target is None else line.target.unit
        if unit == "ms":
            measured: float | None = own["ms"]
        elif unit == "MiB":
            measured = own["mib"]
        elif unit == LAUNCHES:
            measured = float(counted(setup.works[goal.ours]).launches)
        elif line.label.endswith(": memory"):
            measured = memory
        else:
            measured = ratios(seconds, goal.peer, goal.ours)[1]
            equals = ratios(seconds, again(goal.ours), goal.ours)[1]
            line = replace(line, again=equals, memory=memory, difference=difference)
            line = replace(line, most_difference=goal.most_difference)
            if "issue_ms" in own:
                note = f"host {own['issue_ms']:.2f} ms, peer {details[goal.peer]['issue_ms']:.2f}"
                line = replace(line, note=note)
        found.append(replace(line, measured=measured))
    return found


def installed(module: str) -> bool:
    """Whether a library is there."""
    return importlib.util.find_spec(module) is not None


def not_installed(name: str) -> str:
    """What the table says of a peer that is not."""
    return f"peer not installed: {name}"


def peer(module: str, make: Callable[[Any], Work]) -> Work | str:
    """A call of a library that may be missing, made with the module of that name."""
    library = module.partition(".")[0]
    if not installed(library):
        return not_installed(library)
    return make(importlib.import_module(module))


def in_bfloat16(effort: Effort, work: Work) -> Work | str:
    """A call that multiplies in bfloat16, for which most processors take minutes."""
    if effort.device == "cpu" and effort.shrink == 1 and not multiplies_bfloat16():
        return NEEDS_BFLOAT16
    return work


def compiled(effort: Effort, function: Callable[..., Any], *args: Any) -> Work | str:
    """``function(*args)`` under torch.compile."""
    if not effort.compiled:
        return "not compiled with --quick"
    made = torch.compile(function, dynamic=False)
    return lambda: made(*args)


def unit(effort: Effort, rows: int, dim: int) -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(rows, dim, device=effort.device), dim=1)


def across(gradient: Tensor, rows: Tensor) -> Tensor:
    """The gradient across the sphere: many forms do not normalise inside."""
    rows = rows.detach()
    return gradient - (gradient * rows).sum(1, keepdim=True) * rows


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())
