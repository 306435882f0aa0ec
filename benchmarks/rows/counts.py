"""What one training step asks of the host: operations, waits, copies and Python calls.

A step is everything from the start of one batch to the start of the next: the crops, the networks,
the loss, the optimiser, the momentum networks and queues, and what Lightning and this package do
around them. The digits are trained on with a tiny network; except for the optimiser, whose loop on
a CPU launches two to five operations for each parameter, the counts do not depend on sizes.

With CUDA graphs, what is counted is what the host does beside the replay; there the optimiser
takes all parameters at once, as on a GPU.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import pstats
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.counting import Counter, waits_of_cuda
from benchmarks.emulated_graph import emulated_graph
from benchmarks.record import Effort, Finding, Measured, at_most
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.lab.training import pretrain as training
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.step_graph import METHODS as WITH_GRAPHS
from solo_ext.lab.training.step_graph import StepGraphs

FOLDER = "digits"
BASES = {
    "debiased": "simclr",
    "hard_negative": "simclr",
    "metric": "simclr",
    "mochi": "mocov2plus",
    "pcl": "mocov2plus",
    "nnclr_symmetric": "nnclr",
    # SwAV, whose prototypes it has, has no second network.
    "protocpc": "byol",
}
"""What a method of this package builds on."""
WHAT = {
    "launches": "operations",
    "waits": "host waits",
    "copies": "copies from the host",
    "calls": "Python calls",
    "launches_beside_graph": "operations beside a CUDA graph",
    "calls_beside_graph": "Python calls beside a CUDA graph",
}
BESIDE_GRAPH = "launches", "calls"
MORE = 0.03
"""Share by which a count may be above the record's."""
_SETTINGS = (
    "backbone.kwargs.channels=[4,4,8,8]",
    "optimizer.batch_size=64",
    "max_epochs=1",
    "limit_train_batches=12",
    "precision=32-true",
    "online_eval.every_n_epochs=0",
    "limit_val_batches=0",
)
_GRAPHS = ("performance.graphs=true", "optimizer.kwargs.fused=true")
_OF_METHOD = {"pcl": ("method_kwargs.warmup_epochs=0",)}
_COUNTED, _WATCHED, _PROFILED = 4, 6, 7
"""Batches, from 0; the first ones of a run do more."""


class _Watch(Callback):
    """Counts in one step and profiles another; it has to be the first callback."""

    def __init__(self) -> None:
        self.counter, self.profile = Counter(), cProfile.Profile()
        self.waits: list[str] = []
        self._open = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == _PROFILED + 1:
            self.profile.disable()
        self._open.close()
        if index == _COUNTED:
            self._open.enter_context(self.counter)
        if index == _WATCHED and pl_module.device.type == "cuda":
            self.waits = self._open.enter_context(waits_of_cuda())
        if index == _PROFILED:
            self.profile.enable()

    def counts(self, device: str) -> dict[str, int]:
        """What it found."""
        waits = self.counter.waits if device == "cpu" else self.waits
        calls = pstats.Stats(self.profile).total_calls  # type: ignore[attr-defined]
        counted = {"launches": self.counter.launches, "waits": len(waits)}
        return counted | {"copies": len(self.counter.copies), "calls": calls}


def methods() -> list[str]:
    """Every method that has a config for digits."""
    names = [name.partition("/") for name in shipped_configs()]
    return [name for folder, _, name in names if folder == FOLDER and name != "teacher"]


def count_steps(names: Iterable[str], device: str = "cpu") -> dict[str, dict[str, int]]:
    """Counts of one step of each method.

    >>> found = count_steps(["simclr"])["simclr"]
    >>> list(found), found["launches"] > 100
    (['launches', 'waits', 'copies', 'calls'], True)
    """
    torch.set_num_threads(1)
    settings = [*_SETTINGS, f"accelerator={'gpu' if device == 'cuda' else 'cpu'}"]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = folder / "teacher"
        for method in names:
            words = [*settings, *_OF_METHOD.get(method, ())]
            if method in ("seed", "protoseed"):
                if not teacher.exists():
                    learned = compose(f"{FOLDER}/simclr", settings)
                    pretrain(prepare(learned), run_dir=teacher, show_progress=False)
                words.append(f"method_kwargs.teacher.path={teacher}")
            words.append("checkpoint.enabled=false")

            def counts(*more: str, words: Sequence[str] = words, method: str = method) -> Any:
                run, watch = prepare(compose(f"{FOLDER}/{method}", [*words, *more])), _Watch()
                run_dir = folder / f"{method}-{len(more)}"
                pretrain(run, run_dir=run_dir, callbacks=[watch], show_progress=False)
                return watch.counts(device)

            found[method] = counts()
            if method in WITH_GRAPHS:
                with free_replays() if device == "cpu" else contextlib.nullcontext():
                    beside = counts(*_GRAPHS)
                found[method] |= {f"{key}_beside_graph": beside[key] for key in BESIDE_GRAPH}
    return found


def free_replays() -> contextlib.ExitStack:
    """Lets a CPU record steps as a GPU does; later replays than the first one do nothing."""

    class Free:
        def __init__(self, *given: Any) -> None:
            self.first = [emulated_graph(*given)]

        def replay(self) -> None:
            if self.first:
                self.first.pop().replay()

    patched = contextlib.ExitStack()
    graphs = functools.partial(StepGraphs, record=Free)
    patched.enter_context(patch.object(training, "StepGraphs", graphs))
    wanted = patch.object(training, "records_graphs", lambda run: run.performance.graphs)
    patched.enter_context(wanted)
    return patched


def grown(
    found: Mapping[str, Mapping[str, int]], held: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """What is more than 3 % above the record, a line each.

    >>> grown({"pcl": {"launches": 104}}, {"pcl": {"launches": 100}})
    ['pcl: 104 launches, 100 in the record']
    """
    return [
        f"{name}: {numbers[key]} {key}, {held[name][key]} in the record"
        for name, numbers in found.items()
        for key in numbers
        if name in held and numbers[key] > (1 + MORE) * held[name][key]
    ]


def measure(effort: Effort) -> Measured:
    """All methods; with ``shrink`` one and its base."""
    names = methods() if effort.shrink == 1 else ["simclr", "hard_negative"]
    found = count_steps(names, effort.device)
    findings = []
    for name, numbers in found.items():
        of_base = found.get(BASES.get(name, ""), {})
        for key, number in numbers.items():
            # Steps of some of solo-learn's methods cannot be recorded.
            base, what = of_base.get(key), WHAT[key]
            most = at_most(base, "") if base and key in ("waits", "copies") else None
            note = f"{number / base:.2f} of the base method's" if base else ""
            line = Finding(f"{what} of a step of {name}", most, number, unit="", note=note)
            findings.append(replace(line, peer=BASES[name]) if base else line)
    return Measured(findings, found)
