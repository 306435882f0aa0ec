"""A row that times calls: variants of an operation in turn, at some sizes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.counting import counted, forms_of_a_gpu
from benchmarks.measure import (
    Work,
    by_clock,
    by_cuda_events,
    issue_seconds,
    peak_bytes,
    ratio,
    summary,
    take_turns,
)
from benchmarks.record import Effort, Finding, Measured, Row, Target, at_most
from solo_ext.lab.training.cpu_precision import multiplies_bfloat16

OURS, AGAIN = "ours", "again"
NEEDS_BFLOAT16 = "needs a processor with AVX512-BF16 or AMX"
EXACT, NARROW = 1e-5, 1e-2
"""Most that results may differ, in fp32 and where ours multiplies in bfloat16."""


class Goal(NamedTuple):
    """What one of our variants is to reach beside a peer.

    Attributes:
        peer: variant that it is compared with.
        faster: least ratio of the peer's time to ours; 0: the ratio is shown, without a target.
        leaner: least ratio of the peer's memory to ours.
        ours: which variant of ours.
        device: where that holds.
        most_ms: most milliseconds of ours.
        most_mib: most memory of ours.
        most_difference: most that results of both may differ; ``None``: they are not the same.
        most_launches: most operations of ours that a GPU would have to launch; counted anywhere.
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

    variants: Mapping[str, Work | str]
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
        rounds: where calls take seconds: fewer than of other cases, after one to warm up; their
            memory is not measured.
    """

    label: str
    make: Callable[[Effort], Setup]
    goals: tuple[Goal, ...]
    rounds: int | None = None

    def measure(self, effort: Effort) -> Measured:
        """Times the variants in turn, if something is to be reached on this device."""
        goals = [goal for goal in self.goals if goal.device == effort.device]
        if not goals:
            return Measured([], {})
        # The same inputs whatever was measured before.
        torch.manual_seed(0)
        setup = self.make(effort)
        missing = {n: why for n, why in setup.variants.items() if isinstance(why, str)}
        works = {name: on_device(work, effort.device) for name, work in setup.works.items()}
        own = dict.fromkeys(goal.ours for goal in goals if goal.ours in works)
        timed = {**works, **{again(name): works[name] for name in own}}
        timer = by_cuda_events if effort.device == "cuda" else by_clock()
        rounds, warm = effort.rounds, effort.warm
        if self.rounds is not None:
            rounds, warm = min(rounds, self.rounds), min(warm, 1)
        seconds = take_turns(timed, rounds, warm, timer)
        details: dict[str, Any] = summary(seconds, OURS)
        for name, work in works.items():
            if self.rounds is None:
                details[name]["mib"] = peak_bytes(work, effort.device) / 2**20
            if effort.device == "cuda":
                details[name]["issue_ms"] = 1e3 * min(issue_seconds(work) for _ in range(5))
        findings: list[Finding] = []
        for goal in goals:
            if why := missing.get(goal.ours) or missing.get(goal.peer):
                findings += (replace(line, note=why) for line in self._lines(goal))
                continue
            details[goal.ours].setdefault("difference", {})
            difference = None
            if goal.most_difference is not None and setup.difference is not None:
                compared = {**setup.works, **setup.given}
                pair = (on_device(compared[n], effort.device)() for n in (goal.ours, goal.peer))
                difference = setup.difference(*pair)
                details[goal.ours]["difference"][goal.peer] = difference
            findings += self._reached(goal, seconds, details, difference)
        return Measured([*findings, *self.launches(effort)], {**details, **missing})

    def launches(self, effort: Effort) -> Iterator[Finding]:
        """Operations that a GPU would have to launch, where they are to be few.

        What waits for the device raises.
        """
        for goal in self.goals:
            if goal.most_launches is None:
                continue
            works = self.make(replace(effort, device="meta", compiled=False)).works
            with forms_of_a_gpu():
                ours, peer = (
                    counted(works[name]).launches if name in works else None
                    for name in (goal.ours, goal.peer)
                )
            assert ours is not None
            target = at_most(goal.most_launches, "launches")
            names: Any = {"ours": "" if goal.ours == OURS else goal.ours}
            note = "" if peer is None else f"{goal.peer}: {peer}"
            yield Finding(f"{self.label}: launches", target, float(ours), **names, note=note)

    def _lines(self, goal: Goal) -> list[Finding]:
        """One for each number of a goal, not measured."""
        names: Any = {"ours": "" if goal.ours == OURS else goal.ours, "peer": goal.peer}
        memory = f"{self.label}: memory"
        found = []
        if goal.faster is not None:
            found.append(Finding(self.label, Target(goal.faster) if goal.faster else None, **names))
        if goal.leaner is not None:
            found.append(Finding(memory, Target(goal.leaner), **names))
        if goal.most_ms is not None:
            found.append(Finding(f"{self.label}: time", at_most(goal.most_ms, "ms"), **names))
        if goal.most_mib is not None:
            found.append(Finding(memory, at_most(goal.most_mib, "MiB"), **names))
        return found

    def _reached(
        self,
        goal: Goal,
        seconds: Mapping[str, list[float]],
        details: Mapping[str, Any],
        difference: float | None,
    ) -> Iterator[Finding]:
        own, peer = details[goal.ours], details.get(goal.peer, {})
        memory = peer["mib"] / own["mib"] if goal.peer and own.get("mib") else None
        for line in self._lines(goal):
            unit = "x" if line.target is None else line.target.unit
            if unit == "ms":
                yield replace(line, measured=own["ms"])
            elif unit == "MiB":
                yield replace(line, measured=own["mib"])
            elif line.label.endswith(": memory"):
                yield replace(line, measured=memory)
            else:
                note = ""
                if "issue_ms" in own:
                    note = f"host {own['issue_ms']:.2f} ms, peer {peer['issue_ms']:.2f}"
                yield replace(
                    line,
                    measured=ratio(seconds, goal.peer, goal.ours),
                    again=ratio(seconds, again(goal.ours), goal.ours),
                    memory=memory,
                    difference=difference,
                    most_difference=goal.most_difference,
                    note=note,
                )


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


def installed(module: str) -> bool:
    """Whether a library is there."""
    return importlib.util.find_spec(module) is not None


def peer(module: str, make: Callable[[Any], Work]) -> Work | str:
    """A call of a library that may be missing, made with the module of that name."""
    library = module.partition(".")[0]
    if not installed(library):
        return f"peer not installed: {library}"
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
