"""What one training step asks of the host: launches, host waits and Python calls.

    python -m benchmarks.steps                    # every method of configs/solo_ext/digits
    python -m benchmarks.steps pcl mocov2plus
    python -m benchmarks.steps --write            # and the table that a test compares with

A step is everything from the start of one batch to the start of the next: the crops, the networks,
the loss, the optimiser, the momentum networks and queues, and what Lightning and this package do
around them. The digits are trained on with a tiny network; except for the optimiser, whose loop on
a CPU launches two to five operations for each parameter, the counts do not depend on sizes. Ratios
are to the method that a row builds on.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.speed.counting import Counter
from solo_ext import host
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core.files import read_text, write_text
from solo_ext.lab.pages import Table, markdown_table
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

TABLE = Path("results") / "speed" / "steps.json"
FOLDER = "digits"
COUNTS = ("launches", "waits", "calls")
BASES = {
    "debiased": "simclr",
    "hard_negative": "simclr",
    "metric": "simclr",
    "mochi": "mocov2plus",
    "pcl": "mocov2plus",
    "nnclr_symmetric": "nnclr",
    "protocpc": "swav",
}
"""What a method of this package builds on."""
_SETTINGS = (
    "backbone.kwargs.channels=[4,4,8,8]",
    "optimizer.batch_size=64",
    "max_epochs=1",
    "limit_train_batches=12",
    "precision=32-true",
    "online_eval.every_n_epochs=0",
    "limit_val_batches=0",
    "accelerator=cpu",
)
_OF_METHOD = {"pcl": ("method_kwargs.warmup_epochs=0",)}
_COUNTED, _PROFILED = 4, 7
"""Batches, from 0; the first ones of a run do more."""


class _Watch(Callback):
    """Counts in one step and profiles another; it has to be the first callback."""

    def __init__(self) -> None:
        self.counter, self.profile = Counter(), cProfile.Profile()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _COUNTED:
            self.counter.__enter__()
        if batch_idx == _COUNTED + 1:
            self.counter.__exit__(None, None, None)
        if batch_idx == _PROFILED:
            self.profile.enable()
        if batch_idx == _PROFILED + 1:
            self.profile.disable()


def methods() -> list[str]:
    """Every method that has a config for digits."""
    names = [name.partition("/") for name in shipped_configs()]
    return [name for folder, _, name in names if folder == FOLDER and name != "teacher"]


def count_steps(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Counts of one step of each method.

    >>> found = count_steps(["simclr"])["simclr"]
    >>> list(found), found["launches"] > 100
    (['launches', 'waits', 'calls'], True)
    """
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = folder / "teacher"
        for method in names:
            words = [*_SETTINGS, *_OF_METHOD.get(method, ())]
            if method in ("seed", "protoseed"):
                if not teacher.exists():
                    learned = compose(f"{FOLDER}/simclr", _SETTINGS)
                    pretrain(prepare(learned), run_dir=teacher, show_progress=False)
                words.append(f"method_kwargs.teacher.path={teacher}")
            words.append("checkpoint.enabled=false")
            watch = _Watch()
            config = compose(f"{FOLDER}/{method}", words)
            pretrain(
                prepare(config), run_dir=folder / method, callbacks=[watch], show_progress=False
            )
            counted = watch.counter.tally
            calls = pstats.Stats(watch.profile).total_calls  # type: ignore[attr-defined]
            numbers = counted.launches, counted.synchronisations, calls
            found[method] = dict(zip(COUNTS, numbers, strict=True))
    return found


def grown(
    found: Mapping[str, Mapping[str, int]], held: Mapping[str, Mapping[str, int]], share: float
) -> list[str]:
    """What is more than a share above the table, a line each.

    >>> grown({"pcl": {"launches": 104}}, {"pcl": {"launches": 100}}, 0.03)
    ['pcl: 104 launches, 100 in the table']
    """
    return [
        f"{name}: {numbers[key]} {key}, {held[name][key]} in the table"
        for name, numbers in found.items()
        for key in numbers
        if name in held and numbers[key] > (1 + share) * held[name][key]
    ]


def table(found: Mapping[str, Mapping[str, int]]) -> Table:
    """The counts, and the ratios to the base where that was counted too."""
    rows = []
    for name, numbers in found.items():
        base = found.get(BASES.get(name, ""))
        over = [f"{numbers[k] / base[k]:.2f}" if base else "" for k in ("launches", "calls")]
        rows.append([name, *(f"{numbers[key]:,}" for key in COUNTS), *over])
    head = ["method", *COUNTS, "launches over its base", "calls over its base"]
    return Table(head, rows, frozenset(range(1, len(head))))


def made_by() -> dict[str, str]:
    """What the counts depend on besides this package."""
    versions = {"torch": torch.__version__.partition("+")[0], "lightning": pl.__version__}
    return versions | {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "solo-learn": host.detect().generation,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("methods", nargs="*", help="of configs/solo_ext/digits; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE}")
    args = parser.parse_args(arguments)
    found = count_steps(args.methods or methods())
    print(markdown_table(table(found)))
    if args.write:
        before = json.loads(read_text(TABLE))["methods"] if args.methods else {}
        record = {**made_by(), "methods": before | found}
        write_text(TABLE, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
