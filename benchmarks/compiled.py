"""What `performance.compile` gains: seconds of a processor per training step, with and without.

    SOLO_EXT_DATA=FOLDER python -m benchmarks.compiled --json results/speed/compiled.jsonl

Runs of two epochs of a shipped config, in turns: compiled and not, each in a process of its own
with one thread. A step is forward and backward pass and optimiser, without the making of its batch.
The first epoch, in which networks are compiled, is counted by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from solo_ext.core.files import append_lines

CONFIG = "cifar10_cpu/simclr"


class _StepClock(Callback):
    """Seconds of this process in every step, and by the clock on the wall in the first epoch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.first_epoch = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.first_epoch = self.first_epoch or time.perf_counter() - self._began

    def on_train_batch_start(self, *_: Any) -> None:
        self._before = time.process_time()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch:
            self.steps.append(time.process_time() - self._before)


def one_run(config: str, compiled: bool) -> None:
    """Trains two epochs and prints a line of JSON."""
    from solo_ext.config.compose import compose
    from solo_ext.lab.training.prepare import prepare
    from solo_ext.lab.training.pretrain import pretrain

    changes = ["max_epochs=2", f"performance.compile={str(compiled).lower()}"]
    clock = _StepClock()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(compose(config, changes))
        pretrain(prepared, run_dir=Path(folder) / "run", callbacks=[clock])
    found = {
        "config": config,
        "compiled": compiled,
        "step_seconds": statistics.median(clock.steps),
        "steps": len(clock.steps),
        "first_epoch_seconds": clock.first_epoch,
    }
    print(json.dumps(found))


def main() -> None:
    """Runs all in turns and prints what the compiled form takes of the other's time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="append a line for each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--one", choices=("true", "false"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one_run(given.config, given.one == "true")
        return
    ratios = []
    for _ in range(given.rounds):
        seconds = {}
        for compiled in ("false", "true"):
            words = [sys.executable, "-m", "benchmarks.compiled"]
            words += ["--config", given.config, "--one", compiled]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
            ended = subprocess.run(words, env=one_thread, check=True, stdout=subprocess.PIPE)
            line = json.loads(ended.stdout.splitlines()[-1])
            seconds[compiled] = line["step_seconds"]
            if given.json:
                append_lines(given.json, [line])
        ratios.append(seconds["true"] / seconds["false"])
    print(given.config, "compiled / not:", " ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
