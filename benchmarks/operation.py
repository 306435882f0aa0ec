"""A row that times calls: variants of an operation in turn, at some sizes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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

Form = Callable[..., Tensor]
"""A loss, of inputs that all its forms share."""
OURS = "ours"
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
        works = {name: on_device(work, effort.device) for name, work in setup.works.items()}
        own = dict.fromkeys(goal.ours for goal in goals if goal.ours in works)
        timed = {**works, **{f"{name}, again": works[name] for name in own}}
        timer = by_cuda_events if effort.device == "cuda" else by_clock()
        rounds, warm = effort.rounds, effort.warm
        if self.rounds is not None:
            rounds, warm = min(rounds, self.rounds), 1
        seconds = take_turns(timed, rounds, warm, timer)
        details: dict[str, Any] = summary(seconds, OURS)
        for name, work in works.items():
            if self.rounds is None:
                details[name]["mib"] = peak_bytes(work, effort.device) / 2**20
            if effort.device == "cuda":
                details[name]["issue_ms"] = 1e3 * min(issue_seconds(work) for _ in range(5))
        missing = {n: why for n, why in setup.variants.items() if isinstance(why, str)}
        compared = {**setup.works, **setup.given}
        findings: list[Finding] = []
        for goal in goals:
            if why := missing.get(goal.ours) or missing.get(goal.peer):
                findings += self._lines(goal, note=why)
                continue
            ours, peer = details[goal.ours], details.get(goal.peer, {})
            found: dict[str, Any] = {}
            if goal.faster is not None:
                found["measured"] = ratio(seconds, goal.peer, goal.ours)
                found["again"] = ratio(seconds, f"{goal.ours}, again", goal.ours)
            if "issue_ms" in ours and peer:
                found["note"] = f"host {ours['issue_ms']:.2f} ms, peer {peer['issue_ms']:.2f}"
            if goal.most_difference is not None and setup.difference is not None:
                pair = (on_device(compared[n], effort.device)() for n in (goal.ours, goal.peer))
                found["difference"] = setup.difference(*pair)
                found["most_difference"] = goal.most_difference
            findings += self._lines(goal, ours, peer, **found)
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
                ours, *peer = (
                    counted(works[name]).launches for name in (goal.ours, goal.peer) if name
                )
            own = "" if goal.ours == OURS else goal.ours
            note = f"{goal.peer}: {peer[0]}" if peer else ""
            target = at_most(goal.most_launches, "launches")
            yield Finding(f"{self.label}: launches", target, float(ours), own, note=note)

    def _lines(
        self,
        goal: Goal,
        ours: Mapping[str, float] = {},
        peer: Mapping[str, float] = {},
        **found: Any,
    ) -> Iterator[Finding]:
        """One for each number of a goal."""
        memory = peer["mib"] / ours["mib"] if peer and ours.get("mib") else None
        own = "" if goal.ours == OURS else goal.ours
        if goal.faster is not None:
            target = Target(goal.faster) if goal.faster else None
            yield Finding(self.label, target, ours=own, peer=goal.peer, memory=memory, **found)
        note = "" if ours else found["note"]
        for what, most, bound, measured in (
            ("memory", goal.leaner, Target, memory),
            ("time", goal.most_ms, partial(at_most, unit="ms"), ours.get("ms")),
            ("memory", goal.most_mib, partial(at_most, unit="MiB"), ours.get("mib")),
        ):
            if most is not None:
                label = f"{self.label}: {what}"
                yield Finding(label, bound(most), measured, own, goal.peer, note=note)


def of_cases(*cases: Case) -> Row:
    """A row that measures an operation at some sizes."""

    def measure(effort: Effort) -> Measured:
        parts = {case.label: case.measure(effort) for case in cases}
        findings = [f for part in parts.values() for f in part.findings]
        return Measured(findings, {k: part.details for k, part in parts.items()})

    return measure


def on_device(work: Work, device: str) -> Work:
    """The work as it runs in training there: on a GPU under autocast."""
    return work if device == "cpu" else torch.autocast(device, dtype=torch.bfloat16)(work)


def peer(module: str, make: Callable[[Any], Any]) -> Any:
    """A call or a form of a library that may be missing, made with the module of that name."""
    library = module.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        return f"peer not installed: {library}"
    return make(importlib.import_module(module))


def in_bfloat16(effort: Effort, form: Form) -> Form | str:
    """A form that multiplies in bfloat16, for which most processors take minutes."""
    if effort.device == "cpu" and effort.shrink == 1 and not multiplies_bfloat16():
        return "needs a processor with AVX512-BF16 or AMX"
    return form


def compiled(effort: Effort, form: Form) -> Form | str:
    """A form under torch.compile."""
    return torch.compile(form, dynamic=False) if effort.compiled else "not compiled with --quick"


def unit(effort: Effort, rows: int, dim: int) -> Tensor:
    """Random unit rows; as many at full size."""
    return F.normalize(torch.randn(effort.size(rows), dim, device=effort.device), dim=1)


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())


def of_losses(
    inputs: Sequence[Any],
    forms: Mapping[str, Form | str],
    given: Mapping[str, Form] = {},
    exact: Sequence[Any] = (),
) -> Setup:
    """Forms of a loss, with its gradients to the inputs that are to learn.

    Those to the first one are compared across the sphere: many forms do not normalise inside.

    Args:
        given: as of a :class:`Setup`.
        exact: inputs of these; by default the same.
    """

    def work(form: Form, inputs: Sequence[Any]) -> Work:
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        return lambda: torch.autograd.grad(form(*inputs), wanted)

    rows = F.normalize(inputs[0].detach(), dim=1)

    def across(gradient: Tensor) -> Tensor:
        return gradient - (gradient * rows).sum(1, keepdim=True) * rows

    def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        pairs = zip(found[1:], expected[1:], strict=True)
        first = relative(across(found[0]), across(expected[0]))
        return max([first, *(relative(*pair) for pair in pairs)])

    works = {n: form if isinstance(form, str) else work(form, inputs) for n, form in forms.items()}
    compared = {name: work(form, exact or inputs) for name, form in given.items()}
    return Setup(works, difference, compared)
